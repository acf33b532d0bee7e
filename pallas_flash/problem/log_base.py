"""The base of the exponentials: scores are logits in this base."""

import enum
import math
from collections.abc import Callable

import jax.numpy as jnp

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)


class LogBase(enum.Enum):
    """The base b of scores s: P = b^(s - lse). A score is its logit times log_b e."""

    TWO = LOG2E
    E = 1.0

    @property
    def log_e(self) -> float:
        """log_b e."""
        return self.value

    def power(self, x, exp2: Callable = jnp.exp2):
        """b^x, by an exp2."""
        return exp2(x if self is LogBase.TWO else x * (LOG2E / self.log_e))

    def log(self, x):
        """log_b x, by a log2."""
        return jnp.log2(x) if self is LogBase.TWO else jnp.log2(x) * (self.log_e / LOG2E)

    def from_e(self, x):
        """Logits as scores."""
        return x if self is LogBase.E else x * self.log_e

    def to_e(self, s):
        """Scores as logits."""
        return s if self is LogBase.E else s / self.log_e
