"""A call: the arguments of `flash_attention` as one object, each with its axes and its check; and
the signature of a public function as help() shows it."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_flash import checks, masks
from pallas_flash.problem.page_layout import PageLayout

ImplementationName = Literal[
    "hopper",
    "blackwell",
    "ampere",
    "triton",
    "blockwise",
    "reference",
    "flash1",
    "standard",
    "xla",
    "cudnn",
]
# (score, b, h, q_idx, kv_idx) -> score
ScoreMod = Callable[[Array, Array, Array, Array, Array], Array]


class Static(NamedTuple):
    """A static argument: compiled code depends on it. Its check runs when the call is made."""

    check: Callable[[str, Any], Any] = lambda name, x: x


class Data(NamedTuple):
    """A dynamic argument, which may be an array: its axes, of which the first may be missing where
    it broadcasts, and what converts it losslessly to one of jax. C is an axis of any size,
    replicated on each device."""

    axes: str = ""
    canonicalize: Callable[[str, Any], Any] | None = None


def _window(name: str, size) -> masks.Window | None:
    if size is None or isinstance(size, masks.Window):
        return size
    try:
        left, right = (size, size) if checks.is_int(size) else size
        window = masks.Window(left, right)
        if window.ARRAYS:
            raise TypeError
        return window
    except (TypeError, ValueError, jax.errors.JAXTypeError):
        traced = next((x for x in jax.tree.leaves(size) if isinstance(x, jax.core.Tracer)), None)
        got = repr(size) if traced is None else checks.description(traced)
        has_arrays = any(isinstance(x, jax.Array) for x in jax.tree.leaves(size))
        hint = " Arrays are for mask=masks.Window(left, right)." * has_arrays
        raise ValueError(
            f"{name} must be a static int or (left, right), each from 0 to {checks.INT32.max} or "
            f"None for no limit; got {got}.{checks.if_traced(name, traced)}{hint}"
        ) from None


def _soft_cap(name: str, x):
    return checks.number(name, x, None, positive=True)


def _listed(name: str, x):
    return jnp.asarray(x) if isinstance(x, list) else x


def _ints(name: str, x):
    return x if x is None or checks.is_int(x) else checks.ints(name, x)


@functools.cache
def kinds(cls) -> dict[str, Static | Data]:
    """The kind of each argument of a class of calls: static with its check, or data with its
    axes."""
    return {field.name: field.type.__metadata__[0] for field in dataclasses.fields(cls)}


def _register(cls):
    """Registers a Call as a pytree whose leaves are its data."""
    data = [name for name, kind in kinds(cls).items() if isinstance(kind, Data)]
    static = [name for name in kinds(cls) if name not in data]
    return jax.tree_util.register_dataclass(cls, data, static)


@_register
@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of `flash_attention` in its order, without return_residual; then values that a
    sharded call computes of them."""

    query: Annotated[Any, Data("BTNH")] = None
    key: Annotated[Any, Data("BSKH")] = None
    value: Annotated[Any, Data("BSKH")] = None
    bias: Annotated[Any, Data("BNTS", canonicalize=_listed)] = None
    # or a masks.Mask, whose parts know their axes
    mask: Annotated[Any, Data("BNTS", canonicalize=_listed)] = None
    scale: Annotated[Any, Data("N", canonicalize=_listed)] = None
    is_causal: Annotated[bool, Static(checks.flag)] = False
    query_seq_lengths: Annotated[Any, Data("B", canonicalize=_ints)] = None
    key_value_seq_lengths: Annotated[Any, Data("B", canonicalize=_ints)] = None
    local_window_size: Annotated[Any, Static(_window)] = None  # a masks.Window
    implementation: Annotated[str | None, Static()] = None
    return_max_logits: Annotated[bool, Static(checks.flag)] = False
    query_offset: Annotated[Any, Data("B", canonicalize=_ints)] = 0
    query_segment_ids: Annotated[Any, Data("BT")] = None
    key_value_segment_ids: Annotated[Any, Data("BS")] = None
    logits_soft_cap: Annotated[float | None, Static(_soft_cap)] = None
    sinks: Annotated[Any, Data("N", canonicalize=_listed)] = None
    dropout_rate: Annotated[float, Static(checks.rate)] = 0.0
    dropout_rng: Annotated[Any, Data()] = None
    deterministic: Annotated[bool | None, Static(checks.optional_flag)] = None
    context: Annotated[Any, Static()] = None
    score_mod: Annotated[Any, Data()] = None  # a function, or a BoundScoreMod, which knows its axes
    # without a value: how many of the keys' columns are the values
    value_size: Annotated[int | None, Static(checks.value_size)] = None

    # the seeds that dropout_rng gives all batch rows and heads
    dropout_seeds: Annotated[Any, Data("BNC")] = None
    # all masks but a dense one, from a caller that has all rows
    resolved_mask: Annotated[Any, Data()] = None

    def __post_init__(self):
        for name, kind in kinds(type(self)).items():
            x = getattr(self, name)
            if isinstance(kind, Static):
                x = kind.check(name, x)
            elif hasattr(x, "__jax_array__") and not checks.is_array(x):
                x = jnp.asarray(x)
            object.__setattr__(self, name, x)

    def arguments(self) -> dict[str, Any]:
        return dict(vars(self))

    def axes(self, name: str) -> str:
        """A letter for each axis of an argument that is data."""
        return AXES[name]

    def replace(self, **arguments: Any) -> Self:
        return dataclasses.replace(self, **arguments)

    def canonicalize(self) -> Self:
        """The call with lists as arrays, and integers as int32: jax would truncate wider ones."""
        new = {
            name: kind.canonicalize(name, getattr(self, name))
            for name, kind in kinds(type(self)).items()
            if isinstance(kind, Data) and kind.canonicalize
        }
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
class ListedWeightsCall(Call):
    """The arguments of `listed_weights`."""

    lse: Annotated[Any, Data("BTN")] = None


@_register
@dataclasses.dataclass(frozen=True)
class PagedCall(Call):
    """The arguments of `paged_attention`."""

    layout: ClassVar[PageLayout] = PageLayout()
    k_pages: Annotated[Any, Data(layout.axes)] = None
    v_pages: Annotated[Any, Data(layout.axes)] = None
    page_table: Annotated[Any, Data("BC")] = None
    lengths: Annotated[Any, Data("B")] = None
    cu_seqlens_q: Annotated[Any, Data("C")] = None
    k_scales: Annotated[Any, Data(layout.axes[:-1])] = None
    v_scales: Annotated[Any, Data(layout.axes[:-1])] = None


AXES: dict[str, str] = {
    name: kind.axes
    for cls in (Call, WeightsCall, ListedWeightsCall, PagedCall)
    for name, kind in kinds(cls).items()
    if isinstance(kind, Data) and kind.axes
}


def is_data(x) -> bool:
    """Whether an argument is a dynamic array: NumPy's scalars are static."""
    return isinstance(x, jax.Array) or (checks.is_array(x) and len(x.shape) > 0)


class _InLines(inspect.Signature):
    """A signature with a line for each parameter; its annotations are text."""

    def __str__(self):
        lines, is_named = [], False
        for x in self.parameters.values():
            if x.kind == x.KEYWORD_ONLY and not is_named:
                lines, is_named = [*lines, "*"], True
            name = f"**{x.name}" if x.kind == x.VAR_KEYWORD else x.name
            annotation = "" if x.annotation is x.empty else f": {x.annotation}"
            lines.append(
                f"{name}{annotation}" + ("" if x.default is x.empty else f" = {x.default!r}")
            )
        returned = self.return_annotation
        arrow = "" if returned is self.empty else f" -> {returned}"
        return "(\n" + "".join(f"    {line},\n" for line in lines) + f"){arrow}"

    def format(self, **_):  # what help() calls from Python 3.13 on
        return str(self)


def in_lines(f: Callable) -> None:
    """Lets help() show the signature of a function with annotations from __future__ line by
    line."""
    signature = inspect.signature(f)
    shown = _InLines(
        list(signature.parameters.values()), return_annotation=signature.return_annotation
    )
    setattr(f, "__signature__", shown)  # noqa: B010, type checkers know no such attribute
