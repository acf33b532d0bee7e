"""Keys and values in 8 bits, with a float32 scale for each token and head, by which kernels
multiply logits and weights."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_flash import checks
from pallas_flash.jax_support import xla_cpu
from pallas_flash.problem import arguments

LARGEST = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}
DTYPES = " or ".join([", ".join([*LARGEST][:-1]), [*LARGEST][-1]])


def is_quantised(dtype) -> bool:
    return str(jnp.dtype(dtype)) in LARGEST


def quantise(x: Float[Array, "*n H"], dtype) -> tuple[Array, Float[Array, "*n"]]:
    """Rounds x to x8 * scales, x8 of the dtype, symmetric: the largest number of each row [H]
    becomes LARGEST. NaN stays NaN, in the scale. int8 errs by half a step, up to 1/254 of the row's
    largest number, e4m3 by up to 1/16 of each number, e5m2 by up to 1/8."""
    x = x.astype(jnp.float32)
    scales = jnp.maximum(
        jnp.max(jnp.abs(x), axis=-1) / LARGEST[str(jnp.dtype(dtype))], jnp.finfo(jnp.float32).tiny
    )
    # XLA's maximum on a CPU passes over NaN in large arrays
    scales = jnp.where(jnp.isnan(x).any(-1), jnp.nan, scales)
    x = x / scales[..., None]
    return (jnp.round(x) if jnp.issubdtype(dtype, jnp.integer) else x).astype(dtype), scales


def cache_dtype(dtype):
    """The dtype of a cache, as numpy's. Raises TypeError for one that a cache cannot have."""
    try:
        known = None if dtype is None else jnp.dtype(dtype)
    except (TypeError, ValueError):
        known = None
    if known is not None and (is_quantised(known) or str(known) in arguments.DTYPES):
        return known
    got = known if isinstance(dtype, type | jnp.dtype) else checks.description(dtype)
    raise TypeError(f"a cache's dtype must be {', '.join(arguments.DTYPES)}, {DTYPES}; got {got}.")


def empty_scales(shape, dtype) -> Array | None:
    """The scales of keys or values [..., H] in an empty cache; None where the dtype needs none."""
    return jnp.zeros(shape[:-1], jnp.float32) if is_quantised(dtype) else None


def write(cache: Any, slots, **tokens: Float[Array, "B T K H"] | None):
    """The cache with keys, and values unless they are None, each under the name of its field, at
    the index `slots` of that field and cast to its dtype; tokens beyond the slots are dropped."""
    new = {name: x for name, x in tokens.items() if x is not None}
    for name, x in list(new.items()):
        scales = f"{name[0]}_scales"
        if getattr(cache, scales) is not None:
            new[name], new[scales] = quantise(x, getattr(cache, name).dtype)

    return cache._replace(
        **{name: xla_cpu.put(getattr(cache, name), slots, x) for name, x in new.items()}
    )


def weights(dtype):
    """The dtype that weights times scales are rounded to for their product with the values:
    float16 ends at 6e-8, scales do not."""
    return jnp.bfloat16 if dtype == jnp.float16 else dtype


def check(dtype, k_pages, v_pages, k_scales, v_scales):
    """Raises where pages have neither 8 bits nor the query's dtype, where scales are missing,
    needless or of another shape, and where the dtypes of keys and values do not go together."""
    both = {"k_pages": (k_pages, "k_scales", k_scales), "v_pages": (v_pages, "v_scales", v_scales)}
    if v_pages is None:
        del both["v_pages"]
        if v_scales is not None:
            raise ValueError(
                "v_scales must be None where v_pages is: the values are columns of the keys, and "
                f"have their scales, k_scales; got v_scales {v_scales.shape}."
            )
        v_pages = k_pages
    checks.one_of(arguments.DTYPES, "query", dtype)
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
        shape = pages.shape[:-1]
        if scales is not None and (scales.shape != shape or scales.dtype != jnp.float32):
            raise ValueError(
                f"{name_of_scales} must be float32 [P, page, K] = {shape} like {name}; got "
                f"{scales.dtype} {scales.shape}."
            )
