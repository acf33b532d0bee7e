"""Dense attention in float32, or float64 for float64, in O(T S) memory, differentiated by JAX: the
oracle.

Attention Is All You Need (arXiv:1706.03762), equation 1, with masks, bias and a soft cap, and 0 for
a row that sees no key.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash import dropout
from pallas_flash.checks import sums
from pallas_flash.masks import block_types
from pallas_flash.problem.arguments import Gradients, Operands, Problem
from pallas_flash.problem.implementation import Implementation
from pallas_flash.tiled.online_softmax import LOWEST, SoftmaxState, with_tangent_of


def attend(problem: Problem, x: Operands):
    """o [B, T, N, Hv] in the query's dtype, and the SoftmaxState of its rows."""
    o, lse, top = _attend(problem, x)
    return o, SoftmaxState(lse, None, top)


def _attend(p: Problem, x: Operands):
    """o, the log-sum-exp lse [B, N, T], and the largest logit, None if it is not requested."""
    row = jnp.arange(p.queries, dtype=jnp.int32)
    visible = _visible(p, x, row)
    v = _keys_of_heads(p, visible, x.value)
    weights, m, l, top = _softmax(p, x, visible, row)
    empty = m == -jnp.inf
    o = jnp.einsum("bnts,bsnh->btnh", _dropped(p, x, weights), v, precision="highest")
    o = jnp.where(jnp.swapaxes(empty, 1, 2), 0.0, o)
    lse = jnp.where(empty, -jnp.inf, m + jnp.log(l))[..., 0]
    if (valid := x.resolved_mask.valid(row)) is not None:
        # the derivative with respect to padding may be NaN, and is dropped
        o = jnp.where(valid[..., None, None], o, lax.stop_gradient(o))
        lse = jnp.where(valid[:, None], lse, lax.stop_gradient(lse))
    return o.astype(x.query.dtype), lse, top


def weights(p: Problem, x: Operands, row):
    """The softmax [B, N, rows, S] of the queries with the indices `row`; x.query, x.bias and x.mask
    are of these queries alone."""
    return _softmax(p, x, _visible(p, x, row), row)[0]


def _visible(p: Problem, x: Operands, row):
    """Whether each row sees each key, [B, N, rows, S]."""
    visible = block_types.visible_pairs(
        x.resolved_mask, p.batch, p.heads, row, jnp.arange(p.keys, dtype=jnp.int32)
    )
    visible = jnp.broadcast_to(visible, (p.batch, p.heads, p.queries, p.keys))
    return visible if x.mask is None else visible & x.mask


def _by_head(rows):
    return jnp.moveaxis(rows, 1, 2)[..., None]


def _keys_of_heads(p: Problem, visible, x):
    """The keys or values of each query head; 0 where no query sees them, so that NaN there changes
    nothing."""
    is_visible = _by_head(
        visible.reshape(p.batch, p.kv_heads, p.group, p.queries, p.keys).any((2, 3))
    )
    return jnp.repeat(jnp.where(is_visible, x, 0).astype(sums(x.dtype)), p.group, axis=2)


def _softmax(p: Problem, x: Operands, visible, row):
    """The weights of the rows, the maxima of their scores and the sums of their exponentials, [B,
    N, rows, 1], and the largest logits, None if they are not requested."""
    wide, key = sums(x.query.dtype), jnp.arange(p.keys, dtype=jnp.int32)
    q = jnp.where(_by_head(visible.any(3)), x.query, 0).astype(wide)
    k = _keys_of_heads(p, visible, x.key)
    # the scale multiplies q: after the product, minus m, it would become one multiply-add
    s = jnp.einsum("btnh,bsnh->bnts", p.scale * q, k, precision="highest")
    if x.bias is not None:
        s = s + x.bias.astype(wide)
    if p.soft_cap is not None:
        s = p.soft_cap * jnp.tanh(s / p.soft_cap)
    if x.score is not None:
        # the derivative for a hidden pair may be NaN, and is dropped
        differentiable = lambda a: jnp.where(visible, a, lax.stop_gradient(a))
        s = x.score.apply(
            differentiable(s),
            lambda n, index: differentiable(x.score.arrays[n][index]),
            *x.score.pairs(p.batch, p.heads, row, key),
        )
    s = jnp.where(visible, s, -jnp.inf)
    top = lax.stop_gradient(jnp.max(s, axis=-1, initial=-jnp.inf)) if p.max_logits else None
    if x.sinks is not None:  # one more key, with the value 0
        sinks = with_tangent_of(x.sinks, jnp.minimum(x.sinks, -LOWEST))  # no inf - inf
        sinks = jnp.broadcast_to(sinks[:, None, None], (*s.shape[:3], 1))
        s = jnp.concatenate([s, sinks], axis=-1)

    m = lax.stop_gradient(jnp.max(s, axis=-1, keepdims=True, initial=-jnp.inf))
    empty = m == -jnp.inf
    e = jnp.exp(jnp.where(empty, -jnp.inf, s - jnp.where(empty, 0.0, m)))
    l = jnp.where(empty, 1.0, e.sum(-1, keepdims=True))
    return e / l if x.sinks is None else (e / l)[..., :-1], m, l, top


def _dropped(p: Problem, x: Operands, weights):
    """The weights [B, N, T, S] that dropout keeps, divided by the fraction of them that it
    keeps."""
    if x.seeds is None:
        return weights
    return jnp.where(dropout.mask(p.dropped, x.seeds, p.queries, p.keys), weights / p.kept, 0)


def backward(problem: Problem, x: Operands, lse, do, delta) -> Gradients:
    """JAX's derivative of `attend`, from the do and delta that autodiff computes of the cotangents
    of o and lse."""
    do = do if problem.kept == 1 else do * jnp.asarray(problem.kept, do.dtype)

    def outputs(differentiable):
        o, lse, _ = _attend(problem, x.with_differentiable(differentiable))
        return o, lse

    (o, lse_of_keys), vjp = jax.vjp(outputs, x.differentiable)
    share = lax.stop_gradient(_share(lse_of_keys, lse))
    dlse = (
        jnp.einsum(
            "btnh,btnh->bnt", o.astype(delta.dtype), do.astype(delta.dtype), precision="highest"
        )
        - delta
    )
    dlse = jnp.where((lse == jnp.inf) | (share == 0), 0.0, dlse * share)
    do = (do.astype(delta.dtype) * jnp.swapaxes(share, 1, 2)[..., None]).astype(do.dtype)
    (gradients,) = vjp((do, dlse))
    return gradients._replace(sinks=None)


def _share(lse_of_keys, lse):
    """The share of these keys in the softmax of all keys, whose log-sum-exp is lse: 1, but for
    rounding, if these are all."""
    gap = lse_of_keys - lse
    whole = (lse == jnp.inf) | (jnp.abs(gap) <= 4 * jnp.finfo(lse.dtype).eps * jnp.abs(lse))
    return jnp.where(whole, 1.0, jnp.exp(gap))


class Reference(Implementation):
    """Dense attention, which other implementations are compared with."""

    name = "reference"
    is_dense = True

    def why_not(self, problem):
        return None

    def tiles(self, problem):
        return None

    def forward(self, problem, tiles, x):
        return attend(problem, x)

    def backward(self, problem, tiles, x, lse, do, delta):
        return backward(problem, x, lse, do, delta)


REFERENCE = Reference()
