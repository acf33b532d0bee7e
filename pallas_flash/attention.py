"""`flash_attention` and `flash_attention_jvp`: signatures and documentation."""

from __future__ import annotations  # help() shows annotations as they stand here

import functools
from collections.abc import Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
from jaxtyping import Array, Bool, Float, Int

from pallas_flash import checks
from pallas_flash.checks import AnyArray, unexpected
from pallas_flash.choose import dispatch
from pallas_flash.context_parallel import Context
from pallas_flash.dropout import Shared
from pallas_flash.jax_support import hardware
from pallas_flash.masks import Mask
from pallas_flash.problem import arguments
from pallas_flash.problem.call import Call, ImplementationName, ScoreMod, in_lines

_Query = Float[AnyArray, "*B T N H"]
_Key = Float[AnyArray, "*B S K H"]
_Value = Float[AnyArray, "*B S K Hv"]
_Bias = Float[AnyArray, "*#BNTS"] | None
_Mask = Bool[AnyArray, "*#BNTS"] | Mask | None
_Output = Float[Array, "*B T N Hv"]
_Residual = Float[Array, "*B T N"]


class Options(TypedDict, total=False):
    """The arguments of `flash_attention` that are named and do not change what it returns: the type
    of a dict `options` in `flash_attention(query, key, value, **options)`. Of a dict[str, Any] a
    type checker cannot know what the call returns."""

    scale: float | Float[AnyArray, "..."] | None
    is_causal: bool
    query_seq_lengths: Int[AnyArray, "*B"] | None
    key_value_seq_lengths: Int[AnyArray, "*B"] | None
    local_window_size: int | tuple[int | None, int | None] | None
    implementation: ImplementationName | None
    query_offset: int | Int[AnyArray, "*#B"]
    query_segment_ids: Int[AnyArray, "*B T"] | None
    key_value_segment_ids: Int[AnyArray, "*B S"] | None
    logits_soft_cap: float | None
    sinks: Float[AnyArray, "N"] | None
    dropout_rate: float
    dropout_rng: Array | Shared | None
    deterministic: bool | None
    context: Context | None
    score_mod: ScoreMod | None
    value_size: int | None


# Completion in editors reads all keywords of one overload, the first
@overload
def flash_attention(
    query: _Query,
    key: _Key,
    value: _Value | None,
    bias: _Bias = None,
    mask: _Mask = None,
    *,
    scale: float | Float[AnyArray, "..."] | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[AnyArray, "*B"] | None = None,
    key_value_seq_lengths: Int[AnyArray, "*B"] | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: ImplementationName | None = None,
    return_residual: Literal[False] = False,
    return_max_logits: Literal[False] = False,
    query_offset: int | Int[AnyArray, "*#B"] = 0,
    query_segment_ids: Int[AnyArray, "*B T"] | None = None,
    key_value_segment_ids: Int[AnyArray, "*B S"] | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[AnyArray, "N"] | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | Shared | None = None,
    deterministic: bool | None = None,
    context: Context | None = None,
    score_mod: ScoreMod | None = None,
    value_size: int | None = None,
) -> _Output: ...
@overload
def flash_attention(
    query: _Query,
    key: _Key,
    value: _Value | None,
    bias: _Bias = None,
    mask: _Mask = None,
    *,
    return_residual: Literal[True],
    return_max_logits: Literal[False] = False,
    **options: Unpack[Options],
) -> tuple[_Output, _Residual]: ...
@overload
def flash_attention(
    query: _Query,
    key: _Key,
    value: _Value | None,
    bias: _Bias = None,
    mask: _Mask = None,
    *,
    return_residual: Literal[False] = False,
    return_max_logits: Literal[True],
    **options: Unpack[Options],
) -> tuple[_Output, _Residual]: ...
@overload
def flash_attention(
    query: _Query,
    key: _Key,
    value: _Value | None,
    bias: _Bias = None,
    mask: _Mask = None,
    *,
    return_residual: Literal[True],
    return_max_logits: Literal[True],
    **options: Unpack[Options],
) -> tuple[_Output, _Residual, _Residual]: ...
@overload
def flash_attention(
    query: _Query,
    key: _Key,
    value: _Value | None,
    bias: _Bias = None,
    mask: _Mask = None,
    *,
    return_residual: bool = False,
    return_max_logits: bool = False,
    **options: Unpack[Options],
) -> _Output | tuple[_Output, _Residual] | tuple[_Output, _Residual, _Residual]: ...
@unexpected.refused
def flash_attention(
    query: Float[AnyArray, "*B T N H"],
    key: Float[AnyArray, "*B S K H"],
    value: Float[AnyArray, "*B S K Hv"] | None,
    bias: Float[AnyArray, "*#BNTS"] | None = None,
    mask: Bool[AnyArray, "*#BNTS"] | Mask | None = None,
    *,
    scale: float | Float[AnyArray, "..."] | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[AnyArray, "*B"] | None = None,
    key_value_seq_lengths: Int[AnyArray, "*B"] | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: ImplementationName | None = None,
    return_residual: bool = False,
    return_max_logits: bool = False,
    query_offset: int | Int[AnyArray, "*#B"] = 0,
    query_segment_ids: Int[AnyArray, "*B T"] | None = None,
    key_value_segment_ids: Int[AnyArray, "*B S"] | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[AnyArray, "N"] | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | Shared | None = None,
    deterministic: bool | None = None,
    context: Context | None = None,
    score_mod: ScoreMod | None = None,
    value_size: int | None = None,
) -> Float[Array, "*B T N Hv"] | tuple[Float[Array, "..."], ...]:
    """Exact attention, softmax(scale * query key^T + bias) value, in O(T + S) memory,
    differentiable in every float argument.

    A superset of `jax.nn.dot_product_attention`: same names, same order, same defaults. The
    algorithm is FlashAttention-2 (arXiv:2307.08691): an online softmax over blocks of keys, and a
    backward that recomputes the scores.

    Dimensions: B leading axes (none, one or more), T queries, S keys, N query heads, K key/value
    heads, H and Hv head sizes. query, key and value share one dtype: float32, bfloat16, float16,
    or, with jax_enable_x64, float64. Sums and the softmax are float32, or float64 for float64.

    All masks below combine: a query attends to the keys that none of them hides. A query with no
    such key gets the output 0 and a log-sum-exp of -inf, or of its head's sink, and the only
    gradient is then lse's by the sink, 1. Padding has no gradient at all: queries and keys beyond
    the lengths, or behind the last sequence of a `masks.Varlen`. These, their tangents and their
    cotangents may be NaN; keys that only a mask array, a rule or a bias of -inf hides may not.

    First and second derivatives are there in every mode, and "reference" has derivatives of
    any order (docs/derivatives.md). With a context there is the gradient alone.

    Arrays are dynamic: they may be traced, and new values need no recompilation. Flags, names,
    windows, the soft cap, and Python and NumPy scalars are static.

    Args:
      query: [*B, T, N, H].
      key: [*B, S, K, H]. N must be a multiple of K: N / K adjacent query heads share a key/value
        head.
      value: [*B, S, K, Hv]; or None, with value_size.
      bias: real, one axis or more, broadcastable to [*B, N, T, S]; added to the logits after the
        scale. Its gradient has its own shape.
      mask: a bool array broadcastable to [*B, N, T, S] (True: attend), or an object of
        `pallas_flash.masks`, which skips blocks that it hides.
      scale: multiplies query key^T; 1 / sqrt(H) by default. A number, or an array of one value or
        of [N], one for each head. An array may be learned: it is multiplied into query, and the
        product rounded to query's dtype.
      is_causal: query i sees keys up to position i + query_offset. With T != S this is top-left
        aligned, as in jax.nn; query_offset = S - T aligns the last query with the last key.
      query_seq_lengths: int32 [*B]; queries from there on are padding.
      key_value_seq_lengths: int32 [*B]; keys from there on are padding.
      local_window_size: w or (left, right): query i sees keys i + query_offset - left to i +
        query_offset + right, both inclusive; None on a side is no limit. A window is not causal by
        itself. Static; `masks.Window` takes arrays.
      implementation: "hopper" (Mosaic GPU kernels for H100 and H200), "blackwell" (for B200 and
        B300), "ampere" (for NVIDIA GPUs from A100 and RTX 30 on), "triton" (Pallas' Triton
        lowering), "blockwise" (plain JAX) or "reference" (dense). A named implementation runs the
        call or raises. None, and jax.nn's names "xla" and "cudnn", select one automatically;
        `explain` says which and why. On a GPU these are the first four once their self-check has
        passed. Without a GPU "triton" runs in Pallas' interpreter. "flash1" and "standard" are
        earlier algorithms, for comparison.
      return_residual: return (output, lse), where lse is the log-sum-exp of the logits in base e,
        float32 [*B, T, N], differentiable.
      return_max_logits: also return, last, the largest logit of each row, float32 [*B, T, N], over
        the keys that the query sees, after scale, bias, soft cap and score_mod; without sinks, and
        -inf where there is no key. It has no gradient.
      query_offset: the key position of query 0, an int, or int32, a scalar or [*B]. is_causal,
        local_window_size and masks are relative to it.
      query_segment_ids: int32 [*B, T], for packed documents: a query sees the keys with its own id.
      key_value_segment_ids: int32 [*B, S]; default: query_segment_ids, if T == S.
      logits_soft_cap: c: the logits become c * tanh(logits / c), after scale and bias, before the
        mask.
      sinks: real, [N]: one more logit for each head in the softmax's denominator, as if of a key
        with the value 0 that every query sees. The log-sum-exp includes it. -inf: no sink; inf: it
        takes the whole softmax, and the output is 0.
      dropout_rate: static, at least 0 and below 1. Each weight of the softmax becomes 0 with this
        probability, and is otherwise divided by the keep probability. The rate is rounded to the
        nearest 256th, and to 1/256 at least: 0.1 is 26/256 = 0.1016. The log-sum-exp is that of the
        softmax before dropout.
      dropout_rng: a key of `jax.random`, typed or raw, which may be traced; needed where
        dropout_rate is above 0. `pallas_flash.dropout_mask` shows the kept weights: they
        depend only on this key, batch row, head, query and key, so they are the same in every
        implementation and on any mesh. Inside jax.shard_map each device counts its batch rows and
        heads from 0: fold jax.lax.axis_index into the key. `pallas_flash.dropout.Shared(key)` has
        one mask [T, S] for all batch rows and heads.
      deterministic: True: results are bitwise deterministic, gradients too. False lets "hopper" add
        up dQ, and with grouped heads dK and dV, in any order: one backward kernel instead of two,
        for heads up to 128, where queries see so many keys that it is faster. None: True where XLA
        is asked for the same, by --xla_gpu_deterministic_ops or
        --xla_gpu_exclude_nondeterministic_ops in XLA_FLAGS when the call is traced, and else False.
        The other implementations have one backward, which is bitwise deterministic.
      context: context parallelism, for a sequence sharded along an axis of the mesh: `Ring(axis)`,
        `Zigzag(axis)` or `AllToAll(axis)` of `pallas_flash.context_parallel`. Inside jax.shard_map
        each device passes its shard of query, key, value and ids; of bias and mask arrays its rows
        of T and all of S; offsets, lengths, sinks and dropout keys as for the whole call. Arrays
        with explicit axes are passed whole, and a sharded T defaults to a Ring.
      score_mod: score_mod(score, b, h, q_idx, kv_idx) -> score, any JAX-traceable scalar function.
        It maps the logit of each pair of query and key, after scale, bias and soft cap, before the
        mask; -inf hides the key. `pallas_flash.scores` has some. score is float32 (float64 for
        float64), the others are int32: the batch row, counted over all leading axes; the query
        head; the query's key position, which is its row + query_offset; and the key's position. All
        sequences of a `masks.Varlen` have the same b: its `key_value_segment_ids` tell them apart.
        score_mod may capture arrays, traced ones too, and index them down to scalars, as table[h,
        kv_idx]. Captured float arrays get gradients, which "blockwise" on a GPU adds in any order.
        It may be called for pairs that a mask hides; the result is not used, but in "reference" its
        derivative there must be finite. Inside jax.shard_map b and h count from 0 on each device.
      value_size: Hv, with value=None: the values are the first Hv columns of key, as in a cache of
        latents (MLA; arXiv:2405.04434). "hopper", "blackwell" and "ampere" then read keys once in
        decoding; everywhere else the values are a copy of these columns.

    Returns:
      The output [*B, T, N, Hv] in the query's dtype. With return_residual or return_max_logits, a
      tuple: the output, then lse, then the largest logits, each where it is requested.

    Raises:
      TypeError: an unsupported type or dtype.
      ValueError: an invalid shape or value.
      NotImplementedError: the named implementation cannot run this call.

    Examples:
      >>> import jax
      >>> from pallas_flash import flash_attention
      >>> query = jax.random.normal(jax.random.key(0), (2, 100, 8, 64))  # [B, T, N, H]
      >>> key = value = jax.random.normal(jax.random.key(1), (2, 100, 2, 64))  # [B, S, K, H]
      >>> o, lse = flash_attention(query, key, value, is_causal=True, return_residual=True)
      >>> o.shape, lse.shape
      ((2, 100, 8, 64), (2, 100, 8))
    """
    call = Call(
        query=query,
        key=key,
        value=value,
        bias=bias,
        mask=mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        implementation=implementation,
        return_max_logits=return_max_logits,
        query_offset=query_offset,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        deterministic=deterministic,
        context=context,
        score_mod=score_mod,
        value_size=value_size,
    )
    return_residual = checks.flag("return_residual", return_residual)
    with hardware.at(call.arguments().values()):
        return dispatch.results(return_residual, *dispatch.map_over_mesh(dispatch.attend, call))


in_lines(flash_attention)


@overload
def flash_attention_jvp(
    primals: Sequence[AnyArray],
    tangents: Sequence[AnyArray],
    *,
    bias: _Bias = None,
    mask: _Mask = None,
    return_residual: Literal[False] = False,
    **options: Unpack[Options],
) -> tuple[_Output, _Output]: ...
@overload
def flash_attention_jvp(
    primals: Sequence[AnyArray],
    tangents: Sequence[AnyArray],
    *,
    bias: _Bias = None,
    mask: _Mask = None,
    return_residual: Literal[True],
    **options: Unpack[Options],
) -> tuple[tuple[_Output, _Residual], tuple[_Output, _Residual]]: ...
@overload
def flash_attention_jvp(
    primals: Sequence[AnyArray],
    tangents: Sequence[AnyArray],
    *,
    bias: _Bias = None,
    mask: _Mask = None,
    return_residual: bool = False,
    return_max_logits: bool = False,
    **options: Unpack[Options],
) -> tuple[Any, Any]: ...
@unexpected.refused
def flash_attention_jvp(
    primals: Sequence[AnyArray], tangents: Sequence[AnyArray], **options: Any
) -> tuple[Any, Any]:
    """flash_attention in forward mode: `jax.jvp(flash_attention, primals, tangents)`, in O(T + S)
    memory.

    The tangent of the output is do = sum_j p_j ((ds_j - mu) v_j + dv_j); mu = sum_j p_j ds_j is the
    tangent of lse (DESIGN.md, "The other modes").

    Args:
      primals: (query, key, value), or (query, key, value, bias); with value=None and value_size
        among the options, (query, key).
      tangents: as many, of the same shapes and dtypes.
      **options: the other arguments of `flash_attention`; they have no tangents.

    Returns:
      The pair of what flash_attention returns and its tangent.

    Raises:
      TypeError, ValueError: as in `flash_attention`.
      NotImplementedError: as in `flash_attention`, or a context, which has no forward mode.

    Examples:
      >>> import jax
      >>> from pallas_flash import flash_attention_jvp
      >>> qkv = [jax.random.normal(jax.random.key(n), (1, 20, 4, 16)) for n in range(3)]
      >>> o, do = flash_attention_jvp(qkv, qkv, is_causal=True)
      >>> o.shape == do.shape
      True
    """
    for name, arrays in dict(primals=primals, tangents=tangents).items():
        if not isinstance(arrays, tuple | list):
            raise TypeError(
                f"{name} must be (query, key, value); got {checks.description(arrays)}."
            )
    attend = functools.partial(flash_attention, **options)
    return jax.jvp(attend, tuple(primals), tuple(tangents))


def make_call(*args, **kwargs) -> tuple[Call, Any]:
    """A call of flash_attention, and its return_residual."""
    call = dict(unexpected.bind(flash_attention, args, kwargs).arguments)
    return_residual = checks.flag("return_residual", call.pop("return_residual", False))
    return Call(**call), return_residual


def normalised(*args, **kwargs) -> tuple[arguments.Problem, arguments.Operands]:
    """The problem and the operands of a call of flash_attention, as if all of it were on one
    device."""
    call, _ = make_call(*args, **kwargs)
    return arguments.normalise(call)
