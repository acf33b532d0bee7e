"""Keys and values in 8 bits: one float32 scale for each token and head, by which kernels multiply
logits and weights."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_flash.problem import arguments

LARGEST = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}
DTYPES = " or ".join([", ".join([*LARGEST][:-1]), [*LARGEST][-1]])


def is_quantised(dtype) -> bool:
    return str(jnp.dtype(dtype)) in LARGEST


def quantised(x: Float[Array, "*n H"], dtype) -> tuple[Array, Float[Array, "*n"]]:
    """x8 of the dtype and scales, such that x is nearly x8 * scales: symmetric, the largest of each
    row [H] is LARGEST. NaN stays NaN, in the scale. int8 errs by half a step, up to 1/254 of the
    row's largest, e4m3 by up to 1/16 of each number, e5m2 by up to 1/8."""
    x = x.astype(jnp.float32)
    scales = jnp.maximum(
        jnp.max(jnp.abs(x), axis=-1) / LARGEST[str(jnp.dtype(dtype))], jnp.finfo(jnp.float32).tiny
    )
    # XLA's maximum on a CPU passes over NaN in large arrays
    scales = jnp.where(jnp.isnan(x).any(-1), jnp.nan, scales)
    x = x / scales[..., None]
    return (jnp.round(x) if jnp.issubdtype(dtype, jnp.integer) else x).astype(dtype), scales


def bits(x):
    """float8 as uint8, to gather from and scatter into: XLA for a CPU would make float16 of the
    whole array for that, and so it copies it once."""
    is_float8 = x.dtype.itemsize == 1 and jnp.issubdtype(x.dtype, jnp.floating)
    return lax.bitcast_convert_type(x, jnp.uint8) if is_float8 else x


def taken(pages: Array, numbers) -> Array:
    """The pages with these numbers, or the nearest that there are."""
    found = jnp.take(bits(pages), numbers, axis=0, mode="clip")
    return found if found.dtype == pages.dtype else lax.bitcast_convert_type(found, pages.dtype)


def empty_scales(shape, dtype) -> Array | None:
    """Of the keys, or the values, of an empty cache of this shape [..., H]; None where the dtype
    needs none. TypeError for one that a cache cannot have."""
    if not (is_quantised(dtype) or str(jnp.dtype(dtype)) in arguments.DTYPES):
        raise TypeError(
            f"a cache's dtype must be {', '.join(arguments.DTYPES)}, {DTYPES}; got "
            f"{jnp.dtype(dtype)}."
        )
    return jnp.zeros(shape[:-1], jnp.float32) if is_quantised(dtype) else None


def written(cache: Any, to, **tokens: Float[Array, "B T K H"] | None):
    """The cache with keys, and values unless they are None, each under its field's name, in the
    slots with the index `to`, in its own dtype; what has no slot is dropped."""
    new = {name: x for name, x in tokens.items() if x is not None}
    for name, x in list(new.items()):
        scales = f"{name[0]}_scales"
        if getattr(cache, scales) is not None:
            new[name], new[scales] = quantised(x, getattr(cache, name).dtype)

    def write(slots, x):
        found = (
            bits(slots).at[to].set(bits(x.astype(slots.dtype)), mode="drop", unique_indices=True)
        )
        return found if found.dtype == slots.dtype else lax.bitcast_convert_type(found, slots.dtype)

    return cache._replace(**{name: write(getattr(cache, name), x) for name, x in new.items()})


def weights(dtype):
    """What weights times scales are rounded to for their product with the values: float16 ends at
    6e-8, scales do not."""
    return jnp.bfloat16 if dtype == jnp.float16 else dtype


def check(dtype, k_pages, v_pages, k_scales, v_scales):
    """Raises where pages have neither 8 bits nor the query's dtype, where they have no scales and
    need them, or the other way round, and where the two do not fit."""
    both = {"k_pages": (k_pages, "k_scales", k_scales), "v_pages": (v_pages, "v_scales", v_scales)}
    if v_pages is None:
        del both["v_pages"]
        if v_scales is not None:
            raise ValueError(
                "v_scales must be None where v_pages is: the values are columns of the keys, and "
                f"have their scales, k_scales; got v_scales {v_scales.shape}."
            )
        v_pages = k_pages
    dtypes = k_pages.dtype, v_pages.dtype
    if dtypes[0] != dtypes[1] and len({is_quantised(dtype) for dtype in dtypes}) == 1:
        raise TypeError(
            f"k_pages and v_pages must have one dtype, or one of them {DTYPES}; got {dtypes[0]} "
            f"and {dtypes[1]}."
        )
    for name, (pages, name_of_scales, scales) in both.items():
        if not is_quantised(pages.dtype) and pages.dtype != dtype:
            raise TypeError(
                f"query and {name} must have one dtype, or {name} {DTYPES}; got {dtype} and "
                f"{pages.dtype}. Make the cache with paged_cache(dtype=query.dtype), or cast the "
                "query."
            )
        if is_quantised(pages.dtype) != (scales is not None):
            needs = "needs" if scales is None else f"is for {DTYPES}, and has no place for"
            raise TypeError(f"{name} of {pages.dtype} {needs} {name_of_scales} [P, page, K].")
        if scales is not None and (scales.shape != pages.shape[:3] or scales.dtype != jnp.float32):
            got = f"{scales.dtype} {scales.shape}"
            raise ValueError(
                f"{name_of_scales} must be float32 [P, page, K] = {pages.shape[:3]} like {name}; "
                f"got {got}."
            )
