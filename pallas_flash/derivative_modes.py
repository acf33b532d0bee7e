"""Identities that let derivatives through in one mode alone, and raise in the other."""

from collections.abc import Callable

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

NO_FORWARD = (
    "flash_attention has derivatives in reverse mode only, by jax.grad, jax.vjp and jax.jacrev. In "
    "place of jax.jvp, jax.jacfwd "
    "and jax.linearize call flash_attention_jvp(primals, tangents)."
)
NO_SECOND_REVERSE = (
    "flash_attention has no derivative in reverse of its gradient: take it forward over reverse, "
    "as jax.jvp of jax.grad with "
    'implementation="blockwise", or use implementation="reference".'
)
NO_SECOND = (
    'these kernels of flash_attention have first derivatives alone: implementation="blockwise" has '
    "second ones forward over "
    'reverse, as jax.jvp of jax.grad, and "reference" in every mode.'
)

NO_REVERSE_UNDER_CHECKS = (
    "jax has no gradient of a shard_map inside of one that checks its types, and on a mesh whose "
    "other axes are Explicit "
    "flash_attention is one: give yours check_vma=False, or name all axes of the mesh in it."
)


def _one_way(name: str, no_forward: str | None, no_reverse: str | None) -> Callable:
    """x for itself, whose tangents raise where they are computed (`no_forward`) or transposed
    (`no_reverse`)."""
    primal_p, tangents_p = _identity(name), _identity(f"{name}_tangent")

    def computed(*_, **__):
        raise NotImplementedError(no_forward)

    def transposed(cotangents, *tangents):
        if no_reverse:
            raise NotImplementedError(no_reverse)
        return [
            c if ad.is_undefined_primal(t) else None
            for c, t in zip(cotangents, tangents, strict=True)
        ]

    # x comes out as it went in: what differentiates that too goes around this
    ad.primitive_jvps[primal_p] = lambda x, dx: (x, tangents_p.bind(*map(ad.instantiate_zeros, dx)))
    ad.primitive_jvps[tangents_p] = lambda x, dx: (
        tangents_p.bind(*x),
        tangents_p.bind(*map(ad.instantiate_zeros, dx)),
    )
    ad.primitive_transposes[tangents_p] = transposed
    # mapped or differentiated as well, tangents are on their way to be computed: jax would raise at
    # the next step
    if no_forward:
        tangents_p.def_impl(computed)
        mlir.register_lowering(tangents_p, computed)
        batching.primitive_batchers[tangents_p] = ad.primitive_jvps[tangents_p] = computed

    def identity(x):
        leaves, tree = jax.tree.flatten(x)
        return jax.tree.unflatten(tree, primal_p.bind(*leaves))

    return identity


def _identity(name: str) -> Primitive:
    """Of all at once: one that is zero and known is not computed before the others."""
    identity_p = Primitive(name)
    identity_p.multiple_results = True
    identity_p.def_impl(lambda *x: x)
    identity_p.def_abstract_eval(lambda *x: x)
    mlir.register_lowering(identity_p, lambda _, *x: x)
    batching.primitive_batchers[identity_p] = lambda x, axes: (identity_p.bind(*x), axes)
    return identity_p


first_in_reverse_alone = _one_way("flash_attention_first", NO_FORWARD, None)
without_reverse = _one_way("flash_attention_under_checks", None, NO_REVERSE_UNDER_CHECKS)
second_in_forward_alone = _one_way("flash_attention_second", None, NO_SECOND_REVERSE)


def _no_way(why_not: str) -> Callable:
    """x for itself, whose derivative raises."""

    def raises(primals, tangents):
        raise NotImplementedError(why_not)

    identity = jax.custom_jvp(lambda x: x)
    identity.defjvp(raises)
    return identity


no_first = _no_way(
    "paged_attention has no derivative: it is for tokens that are generated. flash_attention has "
    "one."
)
no_second = _no_way(NO_SECOND)
