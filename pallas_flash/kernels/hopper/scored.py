"""What a score_mod makes of a tile's logits, and the derivative of that."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash.arguments import Problem
from pallas_flash.kernels.hopper import ruled
from pallas_flash.masks import Ints
from pallas_flash.online_softmax import LN2, LOG2E


class OfHead(NamedTuple):
    """A score_mod of one batch row and head."""

    rule: ruled.OfHead
    cap: float

    def of(self, s, scale: float, first_query: Ints, first_key: Ints):
        """What it makes of s and scale of `scores_apart`: likewise a product, less the same constant."""
        return self.vjp(s, scale, first_query, first_key)[0]

    def vjp(self, s, scale: float, first_query: Ints, first_key: Ints, transposed: bool = False):
        """The same, and the function from its natural cotangent to that of the logits that it was given.

        Where the cotangent is 0, as of a pair that a mask hides, so is the other: there the rule may have no derivative.
        """
        made, given = self.rule.asked.made, []

        def both(values, b, h, query, key, s, ds):
            new, pull = jax.vjp(lambda s: made(values, b, h, query, key, s), s)
            return new, *pull(ds)

        logit = lambda: s * (scale * LN2) + self.cap
        steps = self.rule.steps(both, s.shape, first_query, first_key, transposed, logit, lambda: given[0])

        def back(ds):
            given.append(ds)
            of_s = steps.output(1)
            return of_s if of_s is ds else jnp.where(ds == 0, 0.0, of_s)

        return (steps.output(0) - self.cap, LOG2E), back


def of(p: Problem, x: ruled.Numbers | None, batch: Ints, head: Ints) -> OfHead | None:
    """From refs; None without a score_mod."""
    return None if x is None else OfHead(ruled.of(p.score, x, batch, head), p.soft_cap or 0.0)
