"""Checks of single arguments: arrays, integers, flags and numbers. Each returns its argument in
canonical form, or raises."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from pallas_flash.checks.names import DEQUANTISE

AnyArray = Array | np.ndarray
IN_FLAX = " Flax's modules need attention_fn=pallas_flash.flax.attention_fn."
MASK_HINT = (
    " Pass a mask_mod as masks.MaskMod(function), and an instance of a mask, such as "
    "masks.Causal()."
)
INT32 = np.iinfo(np.int32)


def is_array(x) -> bool:
    # anything is an attribute of nnx.Rngs
    return isinstance(getattr(x, "shape", None), tuple) and hasattr(x, "dtype")


def is_int(x) -> bool:
    return isinstance(x, int | np.integer)


def is_constant(x) -> bool:
    """Whether an array's values belong to the call: numpy's numbers and integers, which jax could
    cut, and single flags."""
    # a key of jax.random has none
    known, kind = isinstance(x, np.ndarray) or is_known(x), getattr(x.dtype, "kind", None)
    return isinstance(x, np.generic) or (
        known and (kind in ("i", "u") or (x.dtype == bool and x.shape == ()))
    )


def from_shapes(f: Callable, call: Any):
    """f(call), which returns no array, for a call of arrays or of shapes; computes nothing."""
    leaves, tree = jax.tree.flatten(call)
    data = [is_array(x) and not is_constant(x) and not _is_text(x) for x in leaves]
    results = []

    def trace(arrays):
        arrays = iter(arrays)
        values = [next(arrays) if a else x for x, a in zip(leaves, data, strict=True)]
        results.append(f(jax.tree.unflatten(tree, values)))

    jax.eval_shape(trace, [x for x, a in zip(leaves, data, strict=True) if a])
    return results[0]


def like_array(name: str, x, or_what: str = ""):
    """Raises where x is neither an array nor made of numbers."""
    others = _others(x)
    if not others:
        return
    is_sequence = isinstance(x, list | tuple)
    got = f"a {type(x).__name__} of {described(others[0])}" if is_sequence else description(x)
    if name == "mask":
        hint = MASK_HINT if callable(x) else " Join masks with &: a & b." if is_sequence else ""
    else:
        hint = " Pass a mask by name: mask=." if name == "bias" and _words(x) else ""
    raise TypeError(f"{name} must be an array{or_what}; got {got}.{hint}")


def _others(x) -> list:
    """What is in a list, or is itself, neither an array nor a number."""
    if isinstance(x, list | tuple):
        return [other for part in x for other in _others(part)]
    return [] if (is_array(x) and not _is_text(x)) or isinstance(x, int | float) else [x]


def _is_text(x) -> bool:
    """Whether x is an array of NumPy's of texts or objects."""
    return getattr(getattr(x, "dtype", None), "kind", None) in ("O", "S", "U")


def array(name: str, x, or_what: str = ""):
    """x as a jax array; lists and numbers too, as jax takes them."""
    if isinstance(x, jax.Array):
        return x
    like_array(name, x, or_what)
    if not getattr(getattr(x, "dtype", None), "isnative", True):
        raise TypeError(
            f"{name} must be an array{or_what} in this machine's byte order; got {x.dtype}. Pass "
            'x.astype(x.dtype.newbyteorder("=")).'
        )
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(
            f"{name} must be an array{or_what}; cannot convert this "
            f"{description(x).removeprefix('an ')}: {error}"
        ) from None


def one_of(dtypes: tuple[str, ...], name: str, dtype):
    """Raises where an array has another dtype than these."""
    if str(dtype) in dtypes:
        return
    has_8_bits = dtype.itemsize == 1 and dtype.kind != "b"
    hint = DEQUANTISE.replace("query", name) if has_8_bits else f"cast it with {name}.astype(...)"
    raise TypeError(
        f"{name} must be {', '.join(dtypes[:-1])} or {dtypes[-1]}; got {dtype}. "
        f"{hint[0].upper()}{hint[1:]}."
    )


def dense(name: str, x, dtype):
    """A bias, floating and no wider than sums of `dtype`, or a bool mask."""
    x = array(name, x, " or a pallas_flash.masks object" * (name == "mask"))
    if name == "mask":
        if x.dtype != bool:
            raise TypeError(
                f"mask must be bool (True: attend); got {x.dtype}. Pass an additive mask of 0 and "
                "-1e9 as bias, or as mask=x > -1; a mask of 1 (attend) and 0 as mask=x != 0; lists "
                f"of keys as masks.KeyLists(x).{IN_FLAX}"
            )
        return x
    if not (jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)):
        hint = " Pass a bool array as mask." if x.dtype == bool else ""
        raise TypeError(f"bias must be real numbers, added to the logits; got {x.dtype}.{hint}")
    return x if str(x.dtype) in ("float32", "bfloat16", "float16") else x.astype(sums(dtype))


def sums(dtype):
    """The dtype that values of `dtype` are summed in. No promotion: under
    jax_numpy_dtype_promotion="strict" that raises."""
    return jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32


def flag(name: str, x, or_else: str = "") -> bool:
    if isinstance(x, bool | np.bool_) or (is_known(x) and x.dtype == bool and x.shape == ()):
        return bool(x)
    raise TypeError(
        f"{name} must be {or_else}a static bool, True or False; got {description(x)}."
        f"{if_traced(name, x)}"
    )


def optional_flag(name: str, x) -> bool | None:
    return None if x is None else flag(name, x, "None or ")


def number(name: str, x, default, positive=False, or_what: str = ""):
    if x is None:
        return default
    try:
        if isinstance(x, str | bytes | bool):
            raise TypeError
        x = float(x)
    except (TypeError, jax.errors.ConcretizationTypeError):
        raise TypeError(
            f"{name} must be a static number{or_what}; got {description(x)}.{if_traced(name, x)}"
        ) from None
    if not math.isfinite(x) or (positive and x <= 0):
        raise ValueError(
            f"{name} must be a finite number{' above 0, or None' if positive else ''}; got {x}."
        )
    return x


def scale(x, default: float, heads: int):
    """The scale as a number and None, or 1.0 and the factors of the queries, one or [N]: an array
    is data, and may be traced."""
    x = jnp.asarray(x) if isinstance(x, list) else x
    if not is_array(x) or isinstance(x, np.generic):
        return number("scale", x, default, or_what=", or an array"), None
    if (
        x.shape not in ((), (1,), (heads,))
        or x.dtype == bool
        or jnp.issubdtype(x.dtype, jnp.complexfloating)
    ):
        raise ValueError(
            f"scale must be one real number, or one for each query head, [N] = ({heads},); got "
            f"{x.dtype} {x.shape}."
        )
    return 1.0, array("scale", x)


def sinks(x, heads: int):
    """A logit for each query head."""
    x = array("sinks", x)
    if x.shape != (heads,) or not (
        jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)
    ):
        raise ValueError(
            f"sinks must be real numbers, one for each query head, [N] = ({heads},); got {x.dtype} "
            f"{x.shape}."
        )
    return x


def rate(name: str, x) -> float:
    x = number(name, x, 0.0)
    if not 0 <= x < 1:
        raise ValueError(f"{name} must be at least 0 and below 1; got {x}.")
    return x


def rng(name: str, x):
    """A key of jax.random."""
    if x is None:
        raise ValueError(
            f"dropout_rate above 0 needs {name}, a key of jax.random such as jax.random.key(0), "
            f"a new one for each call.{IN_FLAX}"
        )
    # a raw key is one of uint32
    axes = 0 if is_array(x) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else 1
    if not is_array(x) or len(x.shape) != axes or (axes and x.dtype != jnp.uint32):
        got = f"{x.dtype} {x.shape}" if is_array(x) else description(x)
        hint = " Draw a key from nnx.Rngs: rngs.dropout()." if callable(x) else ""
        raise TypeError(
            f"{name} must be one key of jax.random, such as jax.random.key(0); got {got}.{hint}"
        )
    return x


def count(name: str, x, most: int = INT32.max, least: int = 1) -> int:
    """A static int from 1 on."""
    if is_int(x) and not isinstance(x, bool) and least <= x <= most:
        return int(x)
    upper = f" to {most}" if most < INT32.max else ""
    raise ValueError(
        f"{name} must be a static int from {least}{upper or ' on'}; got {description(x)}."
        f"{if_traced(name, x)}"
    )


def value_size(name: str, x) -> int | None:
    """How many of the keys' columns are the values."""
    return None if x is None else count(name, x)


def values_are_keys(size: int | None, key, value, names: tuple[str, str] = ("key", "value")):
    """Whether there is no value, since it is the first columns of the key, as many as `size`."""
    key_name, value_name = names
    if value is not None:
        if size is not None:
            raise ValueError(
                f"value_size is for {value_name}=None, where the values are the first columns of "
                f"{key_name}; got {value_name} {jnp.shape(value)} and value_size {size}: leave one "
                "out."
            )
        return False
    if size is None:
        raise TypeError(
            f"{value_name} must be an array; got NoneType. If the values are the first columns of "
            f"{key_name}, pass their number: value_size."
        )
    if key.shape and size > key.shape[-1]:
        raise ValueError(
            f"value_size must be at most the H of {key_name} {key.shape}, whose first columns are "
            f"the values; got {size}."
        )
    return True


def ints(name: str, x):
    """x as int32. What is too large for that raises where it can be seen, and is brought to the
    ends of int32 where it is traced. A length or position so far away is as good as any beyond the
    last key."""
    x = _narrow(name, x)
    if np.can_cast(x.dtype, np.int32):
        return x.astype(np.int32)
    if is_known(x):
        raise ValueError(
            f"{name} must fit into int32; got {max(int(x.min()), int(x.max()), key=abs)}."
        )
    low = jnp.asarray(0 if x.dtype.kind == "u" else INT32.min, x.dtype)
    return jnp.clip(x, low, jnp.asarray(INT32.max, x.dtype)).astype(jnp.int32)


def ends(name: str, x, tokens: int | None = None, first: int | None = 0):
    """Raises where values that are known are no ends of sequences in so many tokens: they ascend
    along the last axis from `first`, or from 0 or more where that is None."""
    if not is_known(x) or 0 in (x.ndim, x.size):
        return
    x = np.asarray(jax.device_get(x))
    begins = (x[..., 0] >= 0) if first is None else (x[..., 0] == first)
    fits = not isinstance(tokens, int) or (x <= tokens).all()
    if begins.all() and fits and (x[..., 1:] >= x[..., :-1]).all():
        return
    start = "0 or more" if first is None else first
    stop = f" to the {tokens} tokens at most" if isinstance(tokens, int) else ""
    raise ValueError(f"{name} must ascend, from {start}{stop}; got {x.tolist()}.")


def from_zero(name: str, x):
    """Raises where an array has values that are known and below 0."""
    if is_known(x) and x.size and (least := int(np.asarray(jax.device_get(x)).min())) < 0:
        raise ValueError(f"{name} must be 0 or more; got {least}.")


def ids(named: dict):
    """One or two arrays of integers as int32, equal where these are."""
    x = [_narrow(name, x) for name, x in named.items()]
    if all(np.can_cast(a.dtype, np.int32) for a in x):
        return [a.astype(np.int32) for a in x]
    xp, wide = np if all(map(is_known, x)) else jnp, np.result_type(*(a.dtype for a in x))
    if wide.kind == "f" or (xp is jnp and jax.dtypes.canonicalize_dtype(wide) != wide):
        got = " and ".join(str(a.dtype) for a in x)
        raise TypeError(
            f"{' and '.join(named)} must be integers of one dtype, or fit into int32; got {got}."
        )
    x = [xp.asarray(a).astype(wide) for a in x]
    known = xp.sort(xp.concatenate([a.reshape(-1) for a in x]))
    return [xp.searchsorted(known, a.reshape(-1)).reshape(a.shape).astype(np.int32) for a in x]


def integers(name: str, x):
    """x as an array, which must be one of integers."""
    if type(x).__name__ == "_DimExpr":  # a symbol of jax.export, as S - T may be
        x = jnp.asarray(x, jnp.int32)
    given, x = x, x if is_array(x) else np.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        got = description(given) if x.dtype == object or not is_array(given) else x.dtype
        of = f" of {x.dtype.name.rstrip('0123456789')}" if isinstance(given, list | tuple) else ""
        raise TypeError(f"{name} must be integers; got {got}{of}.")
    return x


def _narrow(name: str, x):
    """An array of integers; if its values are known numpy's, and int32 where that holds them."""
    x = integers(name, x)
    if np.can_cast(x.dtype, np.int32) or not is_known(x):
        return x
    x = np.asarray(x)
    return (
        x.astype(np.int32)
        if x.size == 0 or INT32.min <= int(x.min()) <= int(x.max()) <= INT32.max
        else x
    )


def is_known(x) -> bool:
    """Whether the values of an array are known here and now."""
    concrete = (
        isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.is_fully_addressable
    )
    return concrete or isinstance(x, np.ndarray | np.generic)


def if_traced(name: str, x) -> str:
    return (
        f" Under jax.jit make it static: static_argnames={name.rpartition('.')[2]!r}."
        if isinstance(x, jax.core.Tracer)
        else ""
    )


def description(x) -> str:
    if isinstance(x, str | bytes):
        return f"the text {x!r}"
    if is_array(x):
        return (
            f"{'a traced' if isinstance(x, jax.core.Tracer) else 'an'} array "
            f"{x.dtype}{list(x.shape)}"
        )
    if isinstance(x, bool | int | float | complex):
        return f"the {type(x).__name__} {x!r}"
    return described(x)


def described(x) -> str:
    """A mask as a user writes it, anything else by its type."""
    return _words(x) or type(x).__name__


def _words(x) -> str | None:
    in_words = getattr(type(x), "in_words", None)  # a method of masks.Mask
    return None if in_words is None else in_words(x)
