"""Calls over caches and over parts of the keys: what runs each, what explains it, and what it must
equal."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np
from cases import Sizes, normal, qkv
from decoding import pool
from features.calls import EXPLAINED, INTERPRETED, assert_equal, on_its_gpu, reason

from pallas_flash import (
    explain,
    explain_paged,
    flash_attention,
    masks,
    merge_attention,
    paged_attention,
)
from pallas_flash.tiled import quantised

B, N, K, H, HV, PAGE, PAGES = 2, 4, 2, 64, 64, 16, 144
S = PAGE * PAGES  # so many that "blockwise" reads them in place
LENGTHS = np.array([S - 5, 700], np.int32)
CU_SEQLENS = np.array([0, 6, 7], np.int32)  # a prompt of six tokens, and one token


class Case(NamedTuple):
    """A function of the package and its arguments; of the dense reference, which takes the same
    keys and values in order; and the function that says what runs."""

    run: Callable
    arguments: dict[str, Any]
    plain: Callable
    plain_arguments: dict[str, Any]
    explain: Callable = explain_paged


def arrays(dtype, T=1):
    """query, key, value."""
    return map(jnp.asarray, qkv(np.random.default_rng(0), Sizes(B, T, S, N, K, H, HV), dtype))


def contiguous(dtype):
    """With few queries and many keys, which are split."""
    x = dict(zip(("query", "key", "value"), arrays(dtype), strict=True))
    x |= dict(key_value_seq_lengths=LENGTHS)
    return Case(flash_attention, x, flash_attention, x, explain)


def paged(dtype, T=1, size=H, stored=None, **options) -> Case:
    """`stored` is a dtype of 8 bits."""
    rng = np.random.default_rng(0)
    pages, (key, value) = pool(rng, PAGE, LENGTHS, PAGES, (size, HV), dtype, stored)
    query = normal(rng, B, T, N, size, dtype=dtype)
    wide = query.astype(key.dtype)  # float32 beside what was stored in 8 bits
    plain = dict(query=wide, key=key, value=value, key_value_seq_lengths=LENGTHS)
    return Case(paged_attention, dict(query=query) | pages | options, flash_attention, plain)


def listed(dtype):
    """Lists of 300 keys for each key head."""
    case = paged(dtype)
    chosen = np.random.default_rng(2).integers(-9, 700, (B, 1, K, 300), np.int32)
    mask = dict(mask=masks.KeyLists(chosen))
    plain = case.plain_arguments | mask
    return case._replace(arguments=case.arguments | mask, plain_arguments=plain)


def latents(dtype):
    """Keys whose first columns are the values."""
    case = paged(dtype, size=2 * HV, v_pages=None, value_size=HV)
    plain = case.plain_arguments
    return case._replace(plain_arguments=plain | dict(value=plain["key"][..., :HV]))


def ragged(dtype):
    """A prompt beside a single token."""
    case = paged(dtype, T=6)
    query = case.arguments["query"]
    packed = jnp.concatenate([query[0], query[1, :1]])
    plain = case.plain_arguments | dict(query_offset=LENGTHS - [6, 1], is_causal=True)

    def in_order(**arguments):
        o = flash_attention(**arguments)
        return jnp.concatenate([o[0], o[1, :1]])

    arguments = case.arguments | dict(query=packed, cu_seqlens_q=CU_SEQLENS)
    return case._replace(arguments=arguments, plain=in_order, plain_arguments=plain)


def with_gradients(attend):
    def run(query, key, value, **options):
        loss = lambda *x: jnp.sum(jnp.sin(attend(*x, **options).astype(jnp.float32)))
        return attend(query, key, value, **options), jax.grad(loss, (0, 1, 2))(query, key, value)

    return run


def merged(query, key, value, **options):
    part = lambda keys: flash_attention(
        query, key[:, keys], value[:, keys], return_residual=True, **options
    )
    return merge_attention(*zip(part(slice(90)), part(slice(90, None)), strict=True))[0]


def parts(dtype):
    query, key, value = arrays(dtype, T=20)
    x = dict(query=query, key=key[:, :200], value=value[:, :200])
    return Case(with_gradients(merged), x, with_gradients(flash_attention), x, explain)


DECODING = {
    "few queries, many keys (split-KV)": contiguous,
    "`paged_attention`": paged,
    **{f"pages of {x}": functools.partial(paged, stored=x) for x in quantised.LARGEST},
    "pages of latents, `value_size`": latents,
    "pages, lists of single keys": listed,
    "pages, a prompt beside single tokens": ragged,
    "`merge_attention`, with gradients": parts,
}
COPIES, REGULAR = ", of a copy", ", by the regular forward"


def verdict(name: str, implementation: str, supported: str) -> str:
    """`supported` and how, or why an implementation refuses the call. It is run unless it is only
    explained, for a GPU."""
    is_run = implementation not in {*EXPLAINED} - {*INTERPRETED}
    case = DECODING[name]("bfloat16" if implementation in EXPLAINED else "float32")
    try:
        with on_its_gpu(implementation):
            found = case.explain(**case.arguments, implementation=implementation)
        if is_run:
            static = {n: x for n, x in case.arguments.items() if x is None or isinstance(x, int)}
            run = functools.partial(case.run, **static, implementation=implementation)
            arrays = {n: x for n, x in case.arguments.items() if n not in static}
            with gpu_interpreter.kernels(implementation):
                got = jax.block_until_ready(jax.jit(run)(**arrays))
            plain = functools.partial(case.plain, implementation="reference")
            assert_equal(got, plain(**case.plain_arguments), (name, implementation))
    except NotImplementedError as error:
        return reason(error)
    if case.explain is explain_paged:
        return supported + ("" if found.copies.startswith("nothing") else COPIES)
    is_regular = case.run is flash_attention and "decoding" not in str(found.tiles)
    return supported + (REGULAR if is_regular else "")
