"""A call: the arguments of `flash_attention` as one object, each with its axes and its check."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from pallas_flash import checks


class Static(NamedTuple):
    """An argument that compiled code depends on; its check makes it exact when the call is made."""

    check: Callable[[str, Any], Any] = lambda name, x: x


class Data(NamedTuple):
    """An argument that may be an array: its axes, of which the first may be missing where it
    broadcasts, and what makes it one that jax takes without loss. C is an axis of any size, whole
    on each device."""

    axes: str = ""
    exact: Callable[[str, Any], Any] | None = None


def _window(name: str, x):
    return None if x is None else checks.window(x)


def _soft_cap(name: str, x):
    return checks.number(name, x, None, positive=True)


def _listed(name: str, x):
    return jnp.asarray(x) if isinstance(x, list) else x


def _ints(name: str, x):
    return x if x is None or checks.is_int(x) else checks.ints(name, x)


def kinds(call) -> dict[str, Static | Data]:
    """Of a call, or of its class, whether each argument is data, and its axes and check."""
    return {field.name: field.type.__metadata__[0] for field in dataclasses.fields(call)}


def _register(cls):
    """Makes a pytree of a Call: what may be an array is data."""
    data = [name for name, kind in kinds(cls).items() if isinstance(kind, Data)]
    static = [name for name in kinds(cls) if name not in data]
    return jax.tree_util.register_dataclass(cls, data, static)


@_register
@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of `flash_attention` but return_residual, in its order; then what a mesh made
    of some of them."""

    query: Annotated[Any, Data("BTNH")] = None
    key: Annotated[Any, Data("BSKH")] = None
    value: Annotated[Any, Data("BSKH")] = None
    bias: Annotated[Any, Data("BNTS", exact=_listed)] = None
    # or a masks.Mask, whose parts know their axes
    mask: Annotated[Any, Data("BNTS", exact=_listed)] = None
    scale: Annotated[Any, Data("N", exact=_listed)] = None
    is_causal: Annotated[bool, Static(checks.flag)] = False
    query_seq_lengths: Annotated[Any, Data("B", exact=_ints)] = None
    key_value_seq_lengths: Annotated[Any, Data("B", exact=_ints)] = None
    local_window_size: Annotated[Any, Static(_window)] = None  # a masks.Window
    implementation: Annotated[str | None, Static()] = None
    return_max_logits: Annotated[bool, Static(checks.flag)] = False
    query_offset: Annotated[Any, Data("B", exact=_ints)] = 0
    query_segment_ids: Annotated[Any, Data("BT")] = None
    key_value_segment_ids: Annotated[Any, Data("BS")] = None
    logits_soft_cap: Annotated[float | None, Static(_soft_cap)] = None
    sinks: Annotated[Any, Data("N", exact=_listed)] = None
    dropout_rate: Annotated[float, Static(checks.rate)] = 0.0
    dropout_rng: Annotated[Any, Data()] = None
    deterministic: Annotated[bool, Static(checks.flag)] = True
    context: Annotated[Any, Static()] = None
    score_mod: Annotated[Any, Data()] = None  # a function, or a BoundScoreMod, which knows its axes

    # those of dropout_rng, of all batch rows and heads
    dropout_seeds: Annotated[Any, Data("BNC")] = None
    # what all that hides keys but a dense mask comes to, from someone who sees all rows
    resolved_mask: Annotated[Any, Data()] = None

    def __post_init__(self):
        for name, kind in kinds(self).items():
            x = getattr(self, name)
            if isinstance(kind, Static):
                x = kind.check(name, x)
            elif hasattr(x, "__jax_array__") and not checks.is_array(x):
                x = jnp.asarray(x)
            object.__setattr__(self, name, x)

    def arguments(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def replace(self, **arguments: Any) -> Self:
        return dataclasses.replace(self, **arguments)

    def exact(self) -> Self:
        """Lists as arrays, and integers as int32: jax would cut off what is wider."""
        exact = {name: kind.exact for name, kind in kinds(self).items() if isinstance(kind, Data)}
        new = {name: f(name, getattr(self, name)) for name, f in exact.items() if f}
        ids = ("query_segment_ids", "key_value_segment_ids")
        given = {name: x for name in ids if (x := getattr(self, name)) is not None}
        return self.replace(**new, **dict(zip(given, checks.ids(given), strict=True)))


@_register
@dataclasses.dataclass(frozen=True)
class WeightsCall(Call):
    """The arguments of `attention_weights`."""

    rows: Annotated[Any, Data("C")] = None


@_register
@dataclasses.dataclass(frozen=True)
class PagedCall(Call):
    """The arguments of `paged_attention`; P pages."""

    k_pages: Annotated[Any, Data("PCKH")] = None
    v_pages: Annotated[Any, Data("PCKH")] = None
    page_table: Annotated[Any, Data("BC")] = None
    lengths: Annotated[Any, Data("B")] = None
    cu_seqlens_q: Annotated[Any, Data("C")] = None
    k_scales: Annotated[Any, Data("PCK")] = None
    v_scales: Annotated[Any, Data("PCK")] = None


AXES: dict[str, str] = {
    name: kind.axes
    for cls in (Call, WeightsCall, PagedCall)
    for name, kind in kinds(cls).items()
    if isinstance(kind, Data) and kind.axes
}


def is_data(x) -> bool:
    """Whether it is an array on a device's account: NumPy's scalars are static."""
    return isinstance(x, jax.Array) or (hasattr(x, "dtype") and len(x.shape) > 0)
