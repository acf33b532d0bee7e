"""Checks of the arguments of `FlashAttention`'s constructor and call."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_flash import checks, context_parallel
from pallas_flash.checks.sizes import Sizes
from pallas_flash.flax import cache as caches
from pallas_flash.problem.arguments import DTYPES

FLAGS = "qk_norm", "is_causal", "sinks", "use_bias", "keep_rngs"


def check_constructor(given: dict[str, Any]):
    """Raises where an argument of the constructor has a wrong type. flash_attention checks the
    arguments that are its own."""
    for name in FLAGS:
        checks.flag(name, given[name])
    checks.optional_flag("deterministic_gradients", given["deterministic_gradients"])
    for name in ("out_features", "in_kv_features"):
        if given[name] is not None:
            checks.count(name, given[name])
    context_parallel.check(given["context"])
    for name in ("kernel_init", "out_kernel_init"):
        if not callable(given[name]) and (given[name] is not None or name == "kernel_init"):
            raise TypeError(
                f"{name} must be an initializer, as nnx.initializers.lecun_normal(); got "
                f"{checks.description(given[name])}."
            )
    _check_dtypes(given["dtype"], given["param_dtype"])
    rngs = given["rngs"]
    if not isinstance(rngs, nnx.Rngs) or not ("params" in rngs or "default" in rngs):
        got = (
            f"streams {', '.join(rngs)}" if isinstance(rngs, nnx.Rngs) else checks.description(rngs)
        )
        raise TypeError(f"rngs must be nnx.Rngs with a stream params, as nnx.Rngs(0); got {got}.")


def scale(x):
    """The scale as the layer keeps it: an array is state. flash_attention checks it."""
    is_state = checks.is_array(x) and not isinstance(x, np.generic | nnx.Variable)
    return nnx.data(jnp.asarray(x)) if is_state or isinstance(x, list) else x


def _check_dtypes(dtype, param_dtype):
    def is_floating(x):
        try:
            return x is not None and jnp.issubdtype(x, jnp.floating)
        except TypeError:  # it is no dtype
            return False

    if not is_floating(param_dtype):
        raise TypeError(f"param_dtype must be a float's; got {param_dtype!r}.")
    if dtype is not None and not (is_floating(dtype) and jnp.dtype(dtype).name in DTYPES):
        raise TypeError(f"dtype must be None, {', '.join(DTYPES)}; got {dtype!r}.")


def check_call(layer, x, inputs_k, inputs_v, *, segment_ids, lengths, kv_lengths, cache):
    """Raises where the inputs of a call do not fit the layer or each other."""
    _check_self(layer, x, segment_ids, cache)
    _check_cross(layer, x, inputs_k, inputs_v, segment_ids, kv_lengths, cache)
    sizes = Sizes(x.shape[:1], dict(B=x.shape[0], T=x.shape[1]))
    named = dict(
        segment_ids=(segment_ids, "BT"), lengths=(lengths, "B"), kv_lengths=(kv_lengths, "B")
    )
    for name, (y, letters) in named.items():
        if y is not None:
            sizes.ints(name, y, letters)


def _check_self(layer, x, segment_ids, cache):
    if x.ndim != 3 or x.shape[-1] != layer.in_features:
        raise ValueError(
            f"inputs_q must be [B, T, in_features] = (B, T, {layer.in_features}); got {x.shape}."
        )
    if cache is not None:
        caches.check(
            cache, x, layer._left if layer.is_causal else None, layer.num_kv_heads, layer.head_size
        )
    if cache is not None and segment_ids is not None:
        raise ValueError("segment_ids cannot go with a cache: give each document a row of its own.")


def _check_cross(layer, x, inputs_k, inputs_v, segment_ids, kv_lengths, cache):
    if inputs_k is None:
        if inputs_v is not None or kv_lengths is not None:
            raise ValueError(
                "inputs_v and kv_lengths belong to inputs_k: give inputs_k too, or lengths for "
                "self-attention."
            )
        if layer.in_kv_features != layer.in_features:
            raise ValueError(
                f"a layer with in_kv_features = {layer.in_kv_features} beside "
                f"{layer.in_features} needs inputs_k."
            )
        return
    if layer.is_causal or layer.rope is not None or layer.local_window_size is not None:
        raise ValueError(
            "positions in inputs_q and in inputs_k cannot be compared with each other: for "
            "cross-attention make the layer "
            "with is_causal=False, rope_base=None and no local_window_size."
        )
    if segment_ids is not None:
        raise ValueError(
            "segment_ids are of self-attention: with inputs_k give "
            "mask=masks.Documents(query_ids, key_ids)."
        )
    if cache is not None:
        raise ValueError(
            "a cache cannot go with inputs_k: it holds the tokens of self-attention. Give "
            "inputs_k each time."
        )
    for name, y in dict(
        inputs_k=inputs_k, inputs_v=inputs_k if inputs_v is None else inputs_v
    ).items():
        if not checks.is_array(y):
            raise TypeError(f"{name} must be an array; got {checks.description(y)}.")
        if y.ndim != 3 or y.shape != (x.shape[0], inputs_k.shape[1], layer.in_kv_features):
            shape = (
                f"({x.shape[0]}, {'S' if name == 'inputs_k' else inputs_k.shape[1]}, "
                f"{layer.in_kv_features})"
            )
            raise ValueError(
                f"{name} must be [B, S, in_kv_features] = {shape} to match inputs_q {x.shape}; "
                f"got {y.shape}."
            )


def heads(num_heads, num_kv_heads, head_size, in_features) -> tuple[int, int, int]:
    """N, K and H, with the defaults filled in."""
    N, in_features = checks.count("num_heads", num_heads), checks.count("in_features", in_features)
    K = N if num_kv_heads is None else checks.count("num_kv_heads", num_kv_heads)
    if N % K:
        raise ValueError(f"num_heads must be a multiple of num_kv_heads; got {N} and {K}.")
    if head_size is None and in_features % N:
        raise ValueError(
            f"in_features must be a multiple of num_heads = {N}; got {in_features}. Or give "
            "head_size."
        )
    H = in_features // N if head_size is None else checks.count("head_size", head_size)
    return N, K, H
