"""Identities with derivatives in one mode alone, or in none; elsewhere they raise, and say what to
do."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_flash.transforms.equation import NO_JET, Equation, primitive

FIRST_BY_REVERSE = (
    "A call with a context, or vmapped over an axis of an explicit mesh, has first derivatives "
    "alone, in reverse mode alone, by jax.grad, jax.vjp and jax.jacrev; others have every mode, "
    "and second derivatives."
)
NO_REVERSE_UNDER_CHECKS = (
    "jax has no gradient of a shard_map inside of one that checks its types, and on a mesh whose "
    "other axes are Explicit flash_attention is one: give yours check_vma=False, or name all axes "
    "of the mesh in it."
)
NO_FIRST = (
    "paged_attention has no derivative: it is for tokens that are generated. flash_attention has "
    "one."
)


@dataclasses.dataclass(frozen=True)
class Identity(Equation):
    """Returns x, whose tangents raise where they are computed (`no_forward`) or transposed
    (`no_reverse`); with both, at once. A tree is one equation, since a tangent that is zero and
    static would be computed before the others."""

    primitive = primitive("flash_attention_identity")
    has_kernels = False
    no_forward: str | None = None
    no_reverse: str | None = None

    def run(self, x):
        return x

    results_like = run

    @property
    def no_jet(self):
        return self.no_forward or NO_JET

    def push(self, args, tangents):
        if self.no_forward and self.no_reverse:
            raise NotImplementedError(self.no_forward)
        (x,), (dx,) = args, tangents
        dx = jax.tree.map(lambda a, da: jnp.zeros_like(a) if da is None else da, x, dx)
        # x is returned unchanged: a derivative of higher order passes around this equation
        return x, Tangents(self.no_forward, self.no_reverse)(dx)


@dataclasses.dataclass(frozen=True)
class Tangents(Identity):
    """The tangents of an Identity."""

    primitive = primitive("flash_attention_tangent", has_transpose=True)

    def run(self, x):
        if self.no_forward:
            raise NotImplementedError(self.no_forward)
        return x

    def push(self, args, tangents):
        return self.run(*args), self(*tangents)

    def pull(self, args, cotangents):
        if self.no_reverse:
            raise NotImplementedError(self.no_reverse)
        return (cotangents,)


reverse_only = Identity(no_forward=FIRST_BY_REVERSE)
without_reverse = Identity(no_reverse=NO_REVERSE_UNDER_CHECKS)
no_first = Identity(NO_FIRST, NO_FIRST)
no_second = Identity(FIRST_BY_REVERSE, FIRST_BY_REVERSE)
