"""jax.vmap of a call is one call of more batch rows: an implementation sees all of them, and cuts
and orders them as its own."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from pallas_flash import lowering
from pallas_flash.arguments import Operands, Problem
from pallas_flash.backends import Choice, Half
from pallas_flash.devices.call import operand_letters, row_letters


class Mapped(Half):
    """A half of which vmap makes one of more batch rows."""

    __slots__ = ()

    def __call__(self, problem: Problem, tiles, operands: Operands, *rest):
        leaves, tree = jax.tree.flatten((operands, *rest))
        run = lambda *leaves: self.run(problem, tiles, *jax.tree.unflatten(tree, leaves))
        call, out = jax.make_jaxpr(run, return_shape=True)(*leaves)
        letters = (
            *jax.tree.leaves(operand_letters(problem, operands)),
            *map(row_letters, jax.tree.leaves(rest)),
        )
        results = call_p.bind(*leaves, call=call, work=Work(self, problem, tiles, tree, letters))
        return jax.tree.unflatten(jax.tree.structure(out), results)


def with_rows(choice: Choice, is_blind: bool = False) -> Choice:
    """The choice for calls that may be mapped. The products of the reference jax maps itself, in
    every mode of derivatives."""
    backend = choice.backend
    if backend.name == "reference":
        return choice
    forward, backward = (Mapped(backend, is_forward, is_blind) for is_forward in (True, False))
    return choice._replace(backend=backend._replace(forward=forward, backward=backward))


class Work(NamedTuple):
    """What a Mapped does, without the arrays: hashable, a parameter of the primitive."""

    half: Mapped
    problem: Problem
    tiles: Any
    tree: Any  # of the arrays
    letters: tuple[str, ...]  # of each array's axes

    def together(self, size: int, leaves, is_mapped) -> list | None:
        """The results [size, ..] of `size` calls by one, from arrays [size, ..] and those that all
        calls share.

        None, if it would copy what they share of q, k, v, or of a mask or bias of several batch
        rows; or if something, or its gradient, belongs to each call and to none of its batch rows:
        sinks, what a rule reads.
        """
        (x, *_), B, is_forward = (
            jax.tree.unflatten(self.tree, leaves),
            self.problem.batch,
            self.half.is_forward,
        )
        each_has, *_ = jax.tree.unflatten(self.tree, is_mapped)
        if not (each_has.query and each_has.key and each_has.value):
            return None
        with_gradient = [] if is_forward else [x.bias, *x.differentiable.captured]
        rows = []
        for a, letters, mapped in zip(leaves, self.letters, is_mapped, strict=True):
            each = mapped or any(a is b for b in with_gradient)
            has_rows, is_dense = letters.startswith("B"), a is x.bias or a is x.mask
            if (each and not has_rows) or (is_dense and not each and a.shape[0] > 1):
                return None
            if each or (has_rows and not is_dense):
                a = a if mapped else jnp.broadcast_to(a, (size, *a.shape))
                a = a.reshape(size * B, *a.shape[2:])
            rows.append(a)
        x, *rest = jax.tree.unflatten(self.tree, rows)
        x, backend = _numbered(x, size, B), self.half.backend
        problem = self.problem.of_part(x)
        if backend.why_not(problem):
            return None
        results = self.half(problem, backend.tiles_like(self.tiles, problem), x, *rest)
        return [y.reshape(size, B, *y.shape[1:]) for y in jax.tree.leaves(results)]


def _numbered(x: Operands, size: int, batch: int) -> Operands:
    """The operands of `size` calls, in which rules count the batch rows of each from 0."""

    def numbered(asked):
        if asked is None or asked.batch is not None or not asked.mod.uses_batch:
            return asked
        return dataclasses.replace(asked, batch=jnp.tile(jnp.arange(batch, dtype=jnp.int32), size))

    resolved_mask = dataclasses.replace(
        x.resolved_mask, mask_mod=numbered(x.resolved_mask.mask_mod)
    )
    return x._replace(resolved_mask=resolved_mask, score=numbered(x.score))


call_p = Primitive("flash_attention_call")
call_p.multiple_results = True
call_p.def_impl(lambda *leaves, call, work: jaxpr_as_fun(call)(*leaves))
call_p.def_effectful_abstract_eval(lambda *_, call, work: (call.out_avals, call.effects))


def _lower(ctx, *leaves, call, work: Work):
    lowering.tell(ctx, work.half.backend.name, work.half.is_blind, call)
    return mlir.core_call_lowering(ctx, *leaves, name=call_p.name, call_jaxpr=call)


mlir.register_lowering(call_p, _lower)


def _batch(leaves, axes, *, call, work: Work):
    is_mapped = [axis is not None for axis in axes]
    leaves = [
        jnp.moveaxis(x, axis, 0) if m else x
        for x, axis, m in zip(leaves, axes, is_mapped, strict=True)
    ]
    size = next(x.shape[0] for x, m in zip(leaves, is_mapped, strict=True) if m)
    if size == 0:
        return [jnp.zeros((0, *y.shape), y.dtype) for y in call.out_avals], [0] * len(
            call.out_avals
        )
    results = work.together(size, leaves, is_mapped)
    if results is None:
        results = jax.vmap(jaxpr_as_fun(call), [0 if m else None for m in is_mapped])(*leaves)
    return results, [0] * len(results)


batching.primitive_batchers[call_p] = _batch


def _jvp(primals, tangents, *, call, work: Work):
    """Second derivatives, of plain JAX."""
    return jax.jvp(jaxpr_as_fun(call), primals, tuple(map(ad.instantiate_zeros, tangents)))


ad.primitive_jvps[call_p] = _jvp
