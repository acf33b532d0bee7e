"""What a score_mod makes of a tile's logits, and the derivative of that."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from pallas_flash.arguments import Problem
from pallas_flash.kernels.hopper import seen
from pallas_flash.masks import Ints
from pallas_flash.online_softmax import LN2, LOG2E
from pallas_flash.rules import reads, rule
from pallas_flash.rules.score import Score


class Numbers(NamedTuple):
    """What a rule is given of batch rows and heads."""

    batch: Any  # int32 [B], their numbers; None where it does not ask for them
    head: Any  # int32 [N]
    offset: Any  # int32 [B]; None where it is known
    values: tuple  # that it reads, each [B, N]


def numbers(p: Problem, score: Score | None) -> Numbers | None:
    """Those of a score_mod, None without one."""
    if score is None:
        return None
    b, h = score.numbers(p.batch, p.heads)
    values = tuple(jnp.broadcast_to(value, (p.batch, p.heads)) for _, value in score.by_head(p.batch, p.heads))
    offset = None if isinstance(score.offset, int) else score.offset
    return Numbers(b if score.rule.reads_batch else None, h if score.rule.reads_head else None, offset, values)


class OfHead(NamedTuple):
    """A score_mod of one batch row and head."""

    problem: Problem
    batch: Ints
    head: Ints
    offset: Ints
    values: list

    def of(self, s, scale: float, first_query: Ints, first_key: Ints):
        """What it makes of s and scale of `scores_apart`: likewise a product, less the same constant."""
        return self.vjp(s, scale, first_query, first_key)[0]

    def vjp(self, s, scale: float, first_query: Ints, first_key: Ints, transposed: bool = False):
        """The same, and the function from its natural cotangent to that of the logits that it was given.

        Where the cotangent is 0, as of a pair that a mask hides, so is the other: there the rule may have no derivative.
        """
        made, cap, given = self.problem.score.made, self.problem.soft_cap or 0.0, []

        def both(s, ds, b, h, query, key, *values):
            new, pull = jax.vjp(lambda s: made(values, b, h, query, key, s), s)
            return new, *pull(ds)

        logit, index, number = (jax.ShapeDtypeStruct(*x) for x in ((s.shape, s.dtype), (s.shape, jnp.int32), ((), jnp.int32)))
        read = [jax.ShapeDtypeStruct((), x.dtype) for x in self.values]
        with rule.any_mesh():
            program = jax.make_jaxpr(both)(logit, logit, number, number, index, index, *read)
        steps = Steps(
            program,
            lambda: s * (scale * LN2) + cap,
            lambda: given[0],
            lambda: self.batch,
            lambda: self.head,
            lambda: seen.of_queries(first_query + self.offset, s.shape, transposed),
            lambda: seen.of_keys(first_key, s.shape, transposed),
            *(lambda x=x: x for x in self.values),
        )

        def back(ds):
            given.append(ds)
            of_s = steps.output(1)
            return of_s if of_s is ds else jnp.where(ds == 0, 0.0, of_s)

        return (steps.output(0) - cap, LOG2E), back


def of(problem: Problem, x: Numbers | None, batch: Ints, head: Ints) -> OfHead | None:
    """From refs; None without a score_mod."""
    if x is None:
        return None
    b, h = None if x.batch is None else x.batch[batch], None if x.head is None else x.head[head]
    offset = problem.score.offset if x.offset is None else x.offset[batch]
    return OfHead(problem, b, h, offset, [value[batch, head] for value in x.values])


class Steps:
    """A program of tiles. What it computes it computes once, and where it is asked for: what nobody reads would be in the way of
    Mosaic's layout inference."""

    def __init__(self, program, *inputs: Callable):
        self.jaxpr, self.known = program.jaxpr, {}
        self.makes = dict(zip(self.jaxpr.invars, inputs, strict=True))
        self.equations = {out: eqn for eqn in self.jaxpr.eqns for out in eqn.outvars}

    def output(self, number: int):
        return self(self.jaxpr.outvars[number])

    def __call__(self, x):
        if isinstance(x, Literal):
            return x.val
        if x not in self.known:
            if x not in self.makes:
                eqn = self.equations[x]
                self.makes |= zip(eqn.outvars, _outputs(eqn, [functools.partial(self, of) for of in eqn.invars]), strict=True)
            self.known[x] = self.makes[x]()
        return self.known[x]


def _outputs(eqn, inputs: list[Callable]) -> list[Callable]:
    """One for each output of an equation, from those of its inputs."""
    if (inner := eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))) is not None:
        steps = Steps(inner, *inputs)
        return [functools.partial(steps.output, n) for n in range(len(eqn.outvars))]
    compute = _INSTEAD.get(eqn.primitive.name)
    if compute is None:
        return [lambda: reads.bind(eqn, [x() for x in inputs])[0]]
    return [lambda: compute(*(x() for x in inputs), **eqn.params)]


def _power(x, y: int):
    if y == 0:
        return jnp.ones_like(x)
    power = functools.reduce(lax.mul, [x] * abs(y))
    return power if y > 0 else 1.0 / power


# What Mosaic does not know, or computes with an error of 2^-11: the tanh of NVIDIA GPUs.
_INSTEAD = {
    "add_any": lax.add,
    "copy": lambda x: x,
    "integer_pow": _power,
    "not": lambda x: x ^ (True if x.dtype == bool else np.array(-1).astype(x.dtype)),
    "tanh": lambda x, **_: 2.0 * lax.logistic(2.0 * x) - 1.0,
}
