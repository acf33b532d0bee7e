"""Attention in every mode of differentiation: a forward whose tangent is a linear operation, and
whose gradient is the transpose of that. What an implementation has no kernel for is blockwise's."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash import autodiff, blockwise, primitives
from pallas_flash.arguments import Gradients, Operands, Problem
from pallas_flash.backends import BLOCKWISE, Choice
from pallas_flash.devices.varying import vary_alike
from pallas_flash.kernels import device
from pallas_flash.linear_maps import LinearMap, floats, is_zero
from pallas_flash.online_softmax import LogBase, RowScale, SoftmaxState


class Residuals(NamedTuple):
    operands: Operands
    o: jax.Array
    stats: SoftmaxState  # without its top


@dataclasses.dataclass(frozen=True)
class _Map(LinearMap):
    """Of an implementation; `plain` is the same by blockwise."""

    problem: Problem
    choice: Choice

    @property
    def log_base(self) -> LogBase:
        return self.choice.backend.log_base(self.problem)

    @property
    def has_effects(self) -> bool:
        return device.interpret is not None  # jax's GPU interpreter has some

    def plain(self, residuals: Residuals):
        if self.choice.backend.takes_row_scale:
            return self, residuals
        choice = Choice(BLOCKWISE, blockwise.tiles(self.problem).of_gradient())
        stats = residuals.stats.in_base_e(self.log_base)
        return dataclasses.replace(self, choice=choice), residuals._replace(stats=stats)


@dataclasses.dataclass(frozen=True)
class Tangent(_Map):
    """Of o [B, T, N, Hv] and lse [B, N, T], by the tangents of the operands that have some."""

    def apply(self, residuals: Residuals, x: Gradients):
        backend, tiles = self.choice
        if backend.tangent is None:
            plain, residuals = self.plain(residuals)
            return plain.apply(residuals, x)
        operands, o, stats = residuals
        if backend.takes_row_scale:
            rows = scale = stats.row_scale(None)
        else:
            rows = stats.row_lse(self.log_base)
            scale = RowScale(rows.lse, 1.0 if rows.factor is None else rows.factor, None)
        dlse = jnp.zeros_like(stats.m)
        if x.sinks is not None:
            of_sinks = x.sinks[None, :, None].astype(dlse.dtype)
            dlse = of_sinks * autodiff.sink_weights(operands.sinks, scale, self.log_base)
        do, dlse = backend.tangent(
            self.problem, tiles, operands, x._replace(sinks=None), rows, o, dlse
        )
        # without them the rows that are not there, of which all may be NaN, have no lse
        if operands.sinks is not None:
            do, dlse = autodiff.of_valid_rows(operands, do, dlse)
        return do.astype(o.dtype), dlse

    def results_like(self, residuals, x):
        return residuals.o, residuals.stats.m

    def transpose(self, x):
        is_there = jax.tree.map(lambda a: a is not None, x, is_leaf=lambda a: a is None)
        return Gradient(self.problem, self.choice, is_there)

    def pull(self, residuals, x, cotangents):
        return _second(self, residuals, x, cotangents)


@dataclasses.dataclass(frozen=True)
class Gradient(_Map):
    """Of the operands named in `wanted`, by the cotangents of o and lse."""

    wanted: Gradients  # of bools

    def apply(self, residuals, x):
        return self._pick(autodiff.gradients(self.problem, self.choice, residuals, x))

    def results_like(self, residuals, x):
        return self._pick(residuals.operands.differentiable)

    def _pick(self, x: Gradients) -> Gradients:
        return jax.tree.map(lambda wanted, a: a if wanted else None, self.wanted, x)

    def transpose(self, x):
        return Tangent(self.problem, self.choice)

    def pull(self, residuals, x, cotangents):
        return _second(self.transpose(x), residuals, cotangents, x)


def _second(tangent: Tangent, residuals: Residuals, dx: Gradients, cotangents):
    """The gradient of <cotangents, tangent(residuals, dx)> with respect to the floats of the
    residuals."""
    plain, in_base_e = tangent.plain(residuals)
    operands, _, stats = in_base_e  # nothing of o: `blockwise.derivatives`
    rows, do, delta = autodiff.of_rows(plain.problem, plain.choice, in_base_e, cotangents)
    _, dlse = plain.apply(in_base_e, dx)
    gradients, of_sum = blockwise.second(
        plain.problem, plain.choice.tiles, operands, dx, rows, do, delta, dlse
    )
    if operands.sinks is not None:
        along = 0.0 if dx.sinks is None else dx.sinks[None, :, None].astype(delta.dtype)

        def of_sinks(sinks, inverse_sum):
            weights = autodiff.sink_weights(sinks, rows._replace(inverse_sum=inverse_sum))
            return -jnp.sum((along - dlse) * weights * delta)

        of_sinks, more = jax.grad(of_sinks, argnums=(0, 1))(operands.sinks, rows.inverse_sum)
        gradients, of_sum = gradients._replace(sinks=of_sinks), of_sum + more
    of_l = jnp.where(stats.empty, 0.0, -of_sum * jnp.square(rows.inverse_sum))
    zeros = jax.tree.map(jnp.zeros_like, residuals)
    zeros = zeros._replace(operands=zeros.operands.with_differentiable(gradients))
    if residuals.stats.l is None:
        of_stats = zeros.stats._replace(m=tangent.log_base.to_e(of_l))
    else:
        of_stats = zeros.stats._replace(l=of_l)
    found = floats(zeros._replace(stats=of_stats))
    return [a.astype(like.dtype) for a, like in zip(found, floats(residuals), strict=True)]


@dataclasses.dataclass(frozen=True)
class Forward(primitives.KeptUnderVmap):
    """The rules of the forward, of operands: o [B, T, N, Hv] and the SoftmaxState [B, N, T].

    An equation of its own: JAX forgets the rule of a `jax.custom_jvp`, as in a scan that is
    differentiated twice.
    """

    primitive = primitives.primitive("flash_attention_every_mode")
    problem: Problem
    choice: Choice

    def __call__(self, x: Operands):
        return self.choice.backend.forward(self.problem, self.choice.tiles, x)

    def jvp(self, primals, tangents, *, jaxpr, in_tree, out_tree):
        backend, tiles = self.choice
        choice = self.choice._replace(tiles=backend.of_gradient(tiles))
        if choice.tiles != tiles:
            rules = dataclasses.replace(self, choice=choice)
            flat = lambda *leaves: jax.tree.leaves(rules(*jax.tree.unflatten(in_tree, leaves)))
            jaxpr = jax.make_jaxpr(self.vmap(flat))(*primals)
            return rules.jvp(primals, tangents, jaxpr=jaxpr, in_tree=in_tree, out_tree=out_tree)
        trees = dict(in_tree=in_tree, out_tree=out_tree)
        results = self.primitive.bind(*primals, jaxpr=jaxpr, rules=self, **trees)
        (x,), (along,) = (jax.tree.unflatten(in_tree, each) for each in (primals, tangents))
        o, stats = autodiff.named(*jax.tree.unflatten(out_tree, results))
        residuals = Residuals(x, o, stats._replace(top=None))
        along = jax.tree.map(
            lambda t: None if is_zero(t) else t, along.differentiable, is_leaf=is_zero
        )
        if jax.tree.leaves(along):
            maps = tuple(_with_results(in_axes, x, residuals, along) for in_axes in self.maps)
            do, dlse = Tangent(self.problem, choice).mapped(maps, residuals, along)
        else:
            do, dlse = jnp.zeros_like(o), jnp.zeros_like(stats.m)
        # where there is an l, any m gives the same softmax: it has no tangent, and l = b^(lse - m)
        # has all of lse's
        dstats = jax.tree.map(jnp.zeros_like, stats)
        if stats.l is None:
            dstats = dstats._replace(m=backend.log_base(self.problem).from_e(dlse))
        else:
            dstats = dstats._replace(l=stats.l * dlse)
        return tuple(map(jax.tree.leaves, ((o, stats), (do, dstats))))


def _with_results(in_axes: tuple, x: Operands, residuals: Residuals, along: Gradients) -> tuple:
    """The in_axes of the residuals and of the tangents that are there, by those of x."""
    of_results = [0] * (len(jax.tree.leaves(residuals)) - len(in_axes))
    is_mapped = jax.tree.unflatten(jax.tree.structure(x), [axis == 0 for axis in in_axes])
    of_tangents = jax.tree.map(
        lambda t, mapped: None if t is None else mapped,
        along,
        is_mapped.differentiable,
        is_leaf=lambda t: t is None,
    )
    of_tangents = [0 if mapped else None for mapped in jax.tree.leaves(of_tangents)]
    return *in_axes, *of_results, *of_tangents


def attend(problem: Problem, choice: Choice, operands: Operands):
    """As `autodiff.attend`."""
    return _attend(problem, choice, vary_alike(operands))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend(problem, choice, operands):
    if choice.backend.is_dense:
        o, stats = autodiff.named(*choice.backend.forward(problem, choice.tiles, operands))
    else:
        forward = Forward(problem, choice)
        o, stats = primitives.bind(forward, forward, operands)
    return o, *autodiff.lse_and_largest(choice.backend.log_base(problem), problem, operands, stats)
