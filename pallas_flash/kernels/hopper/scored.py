"""The logits of a tile that a bias or a score_mod changes, and their derivative. They are natural,
and so is all that is made of them: either may bring them to the ends of float32."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash import online_softmax
from pallas_flash.arguments import Problem
from pallas_flash.kernels.hopper import biased, ruled
from pallas_flash.pytrees import IntLike


def is_natural(p: Problem) -> bool:
    """Whether scores are; else they are in units of log 2."""
    return p.unit == 1.0


def left_out(p: Problem) -> float:
    """What the scores lack of a soft cap's, by `scores_apart`."""
    return 0.0 if is_natural(p) or p.soft_cap is None else p.soft_cap * online_softmax.LOG2E


class OfHead(NamedTuple):
    """Those of a batch row and head."""

    problem: Problem
    bias: biased.OfHead | None
    rule: ruled.OfHead | None  # of the score_mod

    def of(self, s, first_query: IntLike, first_key: IntLike):
        """The logits, from S = Q K^T of a block."""
        return self.vjp(s, first_query, first_key)[0]

    def vjp(self, s, first_query: IntLike, first_key: IntLike, transposed: bool = False):
        """The same, and the function from their cotangent to that of scale * S + bias; None: it is
        the same."""
        x, cap = s * self.problem.scale, self.problem.soft_cap
        if self.bias is not None:
            x = x + self.bias.of(first_query, first_key, s.shape, transposed)
        if cap is None:
            return (
                (x, None)
                if self.rule is None
                else self._modified(x, first_query, first_key, transposed)
            )
        apart, times = online_softmax.scores_apart(x, 1.0, cap)
        x = apart * (times * online_softmax.LN2) + cap
        of_cap = lambda ds: online_softmax.capped_apart(ds, apart, cap)
        if self.rule is None:
            return x, of_cap
        x, back = self._modified(x, first_query, first_key, transposed)
        return x, lambda ds: of_cap(back(ds))

    def _modified(self, logits, first_query: IntLike, first_key: IntLike, transposed: bool):
        """What the score_mod makes of logits, and the function from its cotangent to theirs.

        Where the cotangent is 0, as of a pair that a mask hides, so is the other: there the rule
        may have no derivative.
        """
        made, given = self.rule.asked.evaluate, []

        def both(values, b, h, query, key, s, ds):
            new, pull = jax.vjp(lambda s: made(values, b, h, query, key, s), s)
            return new, *pull(ds)

        block = ruled.Block(first_query, first_key, logits.shape, transposed)
        steps = self.rule.steps(both, block, lambda: logits, lambda: given[0])

        def back(ds):
            given.append(ds)
            of_logits = steps.output(1)
            return of_logits if of_logits is ds else jnp.where(ds == 0, 0.0, of_logits)

        return steps.output(0), back


def of(
    p: Problem, bias, score: ruled.Numbers | None, batch: IntLike, head: IntLike
) -> OfHead | None:
    """From refs; None without a bias (biased.whole) and a score_mod."""
    if bias is None and score is None:
        return None
    return OfHead(p, biased.of(bias, batch, head), ruled.of(p.score, score, batch, head))
