"""Identities that let derivatives through in one mode alone, and raise in the other."""

from collections.abc import Callable

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

NO_FORWARD = (
    "flash_attention has derivatives in reverse mode only, by jax.grad, jax.vjp and jax.jacrev. In place of jax.jvp, jax.jacfwd "
    "and jax.linearize call flash_attention_jvp(primals, tangents)."
)
NO_SECOND_REVERSE = (
    "flash_attention has no derivative in reverse of its gradient: take it forward over reverse, as jax.jvp of jax.grad with "
    'implementation="blockwise", or use implementation="reference".'
)
NO_SECOND = (
    'these kernels of flash_attention have first derivatives alone: implementation="blockwise" has second ones forward over '
    'reverse, as jax.jvp of jax.grad, and "reference" in every mode.'
)

NO_REVERSE_UNDER_CHECKS = (
    "jax has no gradient of a shard_map inside of one that checks its types, and on a mesh whose other axes are Explicit "
    "flash_attention is one: give yours check_vma=False, or name all axes of the mesh in it."
)


def _one_way(name: str, no_forward: str | None, no_reverse: str | None) -> Callable:
    """x for itself, whose tangents raise where they are computed (`no_forward`) or transposed (`no_reverse`)."""
    tangents_p = Primitive(name)  # of all at once: one that is zero and known is not computed before the others
    tangents_p.multiple_results = True

    def computed(*_):
        raise NotImplementedError(no_forward)

    def transposed(cotangents, *tangents):
        if no_reverse:
            raise NotImplementedError(no_reverse)
        return [c if ad.is_undefined_primal(t) else None for c, t in zip(cotangents, tangents, strict=True)]

    def jvp(primals, tangents):
        return tangents_p.bind(*primals), tangents_p.bind(*map(ad.instantiate_zeros, tangents))

    tangents_p.def_impl(computed if no_forward else lambda *t: t)
    tangents_p.def_abstract_eval(lambda *t: t)
    ad.primitive_jvps[tangents_p] = jvp
    ad.primitive_transposes[tangents_p] = transposed
    batching.primitive_batchers[tangents_p] = lambda args, axes: (tangents_p.bind(*args), axes)
    mlir.register_lowering(tangents_p, computed if no_forward else lambda _, *t: t)

    def through(primals, tangents):
        leaves, tree = jax.tree.flatten(tangents[0])
        return primals[0], jax.tree.unflatten(tree, tangents_p.bind(*leaves))

    identity = jax.custom_jvp(lambda x: x)
    identity.defjvp(through)
    return identity


first_in_reverse_alone = _one_way("flash_attention_tangent", NO_FORWARD, None)
without_reverse = _one_way("flash_attention_under_checks", None, NO_REVERSE_UNDER_CHECKS)
second_in_forward_alone = _one_way("flash_attention_second_tangent", None, NO_SECOND_REVERSE)


def _no_way(why_not: str) -> Callable:
    """x for itself, whose derivative raises."""

    def raises(primals, tangents):
        raise NotImplementedError(why_not)

    identity = jax.custom_jvp(lambda x: x)
    identity.defjvp(raises)
    return identity


no_first = _no_way("paged_attention has no derivative: it is for tokens that are generated. flash_attention has one.")
no_second = _no_way(NO_SECOND)
