"""The statistics of each row that the forward of every family returns beside o: a SoftmaxState,
with an l where the logits are in base e."""

import jax
import jax.numpy as jnp

from pallas_flash.kernels.mosaic.logits import soft_cap_constant
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.problem.log_base import LogBase
from pallas_flash.tiled import schedule
from pallas_flash.tiled.online_softmax import SoftmaxState


def types(p: Problem, block_q: int) -> SoftmaxState:
    """The types of what the kernel writes: [B, N, rows of whole tiles], since where a vector ends
    Mosaic clips its store by the end of the array, not of the row."""
    length = schedule.ceil_div(p.queries, block_q) * block_q
    rows = jax.ShapeDtypeStruct((p.batch, p.heads, length), jnp.float32)
    return SoftmaxState(
        rows, rows if p.log_base is LogBase.E else None, rows if p.max_logits else None
    )


def finish(p: Problem, stats: SoftmaxState) -> SoftmaxState:
    """The statistics that a kernel writes, from the running state of a tile."""
    if p.log_base is LogBase.E:
        return stats
    m, l, top = stats
    return SoftmaxState(jnp.where(l == 0, -jnp.inf, m + jnp.log2(l)), None, top)


def results(p: Problem, written: list[jax.Array]) -> SoftmaxState:
    """The statistics of all rows, from the arrays that the kernel has written."""
    tree = jax.tree.structure(types(p, 1))
    stats = jax.tree.unflatten(tree, [x[:, :, : p.queries] for x in written])
    constant = soft_cap_constant(p)
    top = None if stats.top is None else stats.top + constant
    return stats._replace(m=stats.m + constant, top=top)


def sinks(p: Problem, x: Operands) -> jax.Array | None:
    """The sinks [N], minus the constant that factored logits omit."""
    return None if x.sinks is None else x.sinks - p.log_base.to_e(soft_cap_constant(p))
