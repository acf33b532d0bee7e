"""`flash_attention` and `explain`: the signature, its meaning, and four calls."""

import dataclasses
import inspect
from typing import Any, Literal, TypedDict, Unpack, overload

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_flash import arguments, autodiff, checks, partition, selfcheck, sharding
from pallas_flash.masks import Mask

AnyArray = Array | np.ndarray
Implementation = Literal["hopper", "portable", "blockwise", "reference", "flash1", "standard", "xla", "cudnn"]


class _Options(TypedDict, total=False):
    """For type checkers: what `flash_attention` takes by name, but return_residual, which tells its overloads apart."""

    scale: float | Float[AnyArray, "..."] | None
    is_causal: bool
    query_seq_lengths: Int[AnyArray, "*B"] | None
    key_value_seq_lengths: Int[AnyArray, "*B"] | None
    local_window_size: int | tuple[int, int] | None
    implementation: Implementation | None
    query_offset: int | Int[AnyArray, "*B"]
    query_segment_ids: Int[AnyArray, "*B T"] | None
    key_value_segment_ids: Int[AnyArray, "*B S"] | None
    logits_soft_cap: float | None
    sinks: Float[AnyArray, "N"] | None
    dropout_rate: float
    dropout_rng: Array | None
    deterministic: bool


_Query = Float[AnyArray, "*B T N H"]
_Key = Float[AnyArray, "*B S K H"]
_Value = Float[AnyArray, "*B S K Hv"]
_Bias = Float[AnyArray, "*#B #N #T #S"] | None
_Mask = Bool[AnyArray, "*#B #N #T #S"] | Mask | None
_Output = Float[Array, "*B T N Hv"]
_Residual = Float[Array, "*B T N"]


@overload
def flash_attention(
    query: _Query,
    key: _Key,
    value: _Value,
    bias: _Bias = None,
    mask: _Mask = None,
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[_Options],
) -> _Output: ...
@overload
def flash_attention(
    query: _Query,
    key: _Key,
    value: _Value,
    bias: _Bias = None,
    mask: _Mask = None,
    *,
    return_residual: Literal[True],
    **options: Unpack[_Options],
) -> tuple[_Output, _Residual]: ...
@overload
def flash_attention(
    query: _Query,
    key: _Key,
    value: _Value,
    bias: _Bias = None,
    mask: _Mask = None,
    *,
    return_residual: bool,
    **options: Unpack[_Options],
) -> _Output | tuple[_Output, _Residual]: ...
def flash_attention(
    query: Float[AnyArray, "*B T N H"],
    key: Float[AnyArray, "*B S K H"],
    value: Float[AnyArray, "*B S K Hv"],
    bias: Float[AnyArray, "*#B #N #T #S"] | None = None,
    mask: Bool[AnyArray, "*#B #N #T #S"] | Mask | None = None,
    *,
    scale: float | Float[AnyArray, "..."] | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[AnyArray, "*B"] | None = None,
    key_value_seq_lengths: Int[AnyArray, "*B"] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
    query_offset: int | Int[AnyArray, "*B"] = 0,
    query_segment_ids: Int[AnyArray, "*B T"] | None = None,
    key_value_segment_ids: Int[AnyArray, "*B S"] | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[AnyArray, "N"] | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    deterministic: bool = True,
) -> Float[Array, "*B T N Hv"] | tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]:
    """Exact attention, softmax(scale * query key^T + bias) value, in O(T + S) memory, differentiable in every float argument.

    A superset of `jax.nn.dot_product_attention`: same names, same order, same defaults. The algorithm is FlashAttention-2
    (arXiv:2307.08691): blocks of keys pass by a running maximum and sum, and the backward computes the scores again.

    The letters: B leading axes (none, one or more), T queries, S keys, N query heads, K key/value heads, H and Hv head sizes.
    query, key and value share one dtype: float32, bfloat16, float16, or with jax_enable_x64 float64. Sums and softmax statistics
    are float32, for float64 float64.

    Which keys a query sees is the intersection of everything below. A query that sees no key gets output 0, a log-sum-exp of
    -inf and no gradient. What lies beyond the lengths may be NaN; keys that only a mask array or a bias of -inf hides may not.

    An array is data: it may be traced, and one compiled program serves all its values. Flags, names, windows, the soft cap and
    numbers of Python and NumPy belong to the program.

    Args:
      query: [*B, T, N, H].
      key: [*B, S, K, H]. N must be a multiple of K: N / K neighbouring query heads share one key/value head.
      value: [*B, S, K, Hv].
      bias: real, broadcastable to [*B, N, T, S]; added to the logits after the scale. Its gradient has its own shape.
      mask: a bool array broadcastable to [*B, N, T, S] (True: attend), or an object of `pallas_flash.masks`, whose blocks that
        no query sees cost nothing.
      scale: multiplies query key^T; 1 / sqrt(H) by default. A number, or an array, one or [N] by head, which may be learned: it
        is multiplied into query, and the product rounded to query's dtype.
      is_causal: query i sees keys up to position i + query_offset. With T != S this is top-left aligned, as in jax.nn;
        query_offset = S - T aligns the last query with the last key.
      query_seq_lengths: int32 [*B]; later queries see nothing.
      key_value_seq_lengths: int32 [*B]; later keys are not seen.
      local_window_size: w or (left, right): query i sees keys i + query_offset - left to i + query_offset + right, both
        inclusive. A window is not causal by itself.
      implementation: "hopper" (Pallas Mosaic GPU kernels for H100 and H200), "portable" (Pallas kernels), "blockwise" (plain
        JAX) or "reference" (dense); None chooses, and so do jax.nn's "xla" and "cudnn"; `explain` says what and why: a GPU runs
        the first two unasked once it has found them right. One that cannot run the call raises. Without a GPU "portable" runs in
        Pallas' interpreter. "flash1" and "standard" are earlier algorithms, to compare with.
      return_residual: return (output, lse), lse the natural log-sum-exp of the logits, float32 [*B, T, N], differentiable.
      query_offset: the key position of query 0, an int or int32 [*B]; it moves is_causal, local_window_size and masks.
      query_segment_ids: int32 [*B, T], packed documents: a query sees the keys with its own id.
      key_value_segment_ids: int32 [*B, S]; the query's by default when T == S.
      logits_soft_cap: c: the logits become c * tanh(logits / c), after scale and bias, before the mask.
      sinks: not implemented yet.
      dropout_rate: not implemented yet.
      dropout_rng: not implemented yet.
      deterministic: True: same inputs, same bits, in the gradients too. False lets a backward add in any order: "hopper" then
        takes one kernel instead of two for heads up to 128; the others have no use for it.

    Returns:
      The output [*B, T, N, Hv] in the query's dtype; with return_residual, the pair (output, lse).

    Raises:
      TypeError: a dtype or type that does not fit.
      ValueError: a shape or value that does not fit.
      NotImplementedError: the implementation asked for cannot run this call, or an argument is not implemented yet.
    """
    call = dict(
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
        query_offset=query_offset,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        deterministic=deterministic,
        implementation=implementation,
    )
    return_residual = checks.flag("return_residual", return_residual)
    mesh = sharding.mesh_of(call)
    o, lse = _attend(**call) if mesh is None else sharding.by_device(_attend, arguments.exact(call), mesh)
    return (o, lse) if return_residual else o


def _attend(implementation, **call):
    problem, operands = arguments.normalise(**call)
    choice = sharding.under_vmap(selfcheck.choose(problem, implementation), operands.query)
    choice = partition.under_jit(choice, operands)
    o, lse = autodiff.attend(problem, choice, operands)
    rows = np.shape(call["query"])[:-1]
    return o.reshape(*rows, problem.value_size), jnp.swapaxes(lse, 1, 2).reshape(rows)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `flash_attention` would run for a call, and why. `print` it."""

    problem: arguments.Problem
    implementation: str
    tiles: Any  # the block sizes of that implementation, None where it has none
    why_not: dict[str, str]  # for each other implementation, why it was not taken
    condition: str | None = None  # of taking it

    def __str__(self):
        taken = ", ".join(filter(None, (self.implementation, self.condition)))
        lines = [f"call            {self.problem}", f"implementation  {taken}"]
        lines += [f"tiles           {self.tiles}"] if self.tiles is not None else []
        lines += [f"not {name:<11} {reason}" for name, reason in self.why_not.items()]
        return "\n".join(lines)


_SIGNATURE = inspect.signature(flash_attention)


def explain(*args: Any, **kwargs: Any) -> Explanation:
    """Takes the arguments of `flash_attention`, arrays or `jax.ShapeDtypeStruct`s, and says what would run. Computes nothing."""
    call = _SIGNATURE.bind(*args, **kwargs)
    call.apply_defaults()
    asked = dict(call.arguments)
    implementation, _ = asked.pop("implementation"), asked.pop("return_residual")
    problem = arguments.problem_of(asked)
    choice = selfcheck.choose(problem, implementation, check=False)
    why_not, condition = selfcheck.reasons(problem, choice, implementation)
    return Explanation(problem, choice.backend.name, choice.tiles, why_not, condition)
