"""Identities that let derivatives through in one mode alone, or in none, and raise elsewhere with
what to do."""

import functools

import jax

from pallas_flash.jax_internals import Primitive, ad, batching, mlir

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


def _identity(x, no_forward: str | None = None, no_reverse: str | None = None):
    """x, whose tangents raise where they are computed (`no_forward`) or transposed (`no_reverse`);
    at once, if in both. All of a tree go together: a tangent that is zero and static would be
    computed before the others."""
    leaves, tree = jax.tree.flatten(x)
    results = identity_p.bind(*leaves, no_forward=no_forward, no_reverse=no_reverse)
    return jax.tree.unflatten(tree, results)


reverse_only = functools.partial(_identity, no_forward=FIRST_BY_REVERSE)
without_reverse = functools.partial(_identity, no_reverse=NO_REVERSE_UNDER_CHECKS)
no_first = functools.partial(_identity, no_forward=NO_FIRST, no_reverse=NO_FIRST)
no_second = functools.partial(_identity, no_forward=FIRST_BY_REVERSE, no_reverse=FIRST_BY_REVERSE)

identity_p = Primitive("flash_attention_identity")
identity_p.multiple_results = True
identity_p.def_impl(lambda *x, **_: x)
identity_p.def_abstract_eval(lambda *x, **_: x)
mlir.register_lowering(identity_p, lambda _, *x, **__: x)
batching.primitive_batchers[identity_p] = lambda x, axes, **modes: (
    identity_p.bind(*x, **modes),
    axes,
)

tangent_p = Primitive("flash_attention_tangent")
tangent_p.multiple_results = True
tangent_p.def_abstract_eval(lambda *x, **_: x)


def _jvp(x, tangents, *, no_forward, no_reverse):
    if no_forward and no_reverse:
        raise NotImplementedError(no_forward)
    tangents = map(ad.instantiate_zeros, tangents)
    # x comes out as it went in: what differentiates that too goes around this
    return x, tangent_p.bind(*tangents, no_forward=no_forward, no_reverse=no_reverse)


def _transpose(cotangents, *tangents, no_reverse, **_):
    if no_reverse:
        raise NotImplementedError(no_reverse)
    is_linear = map(ad.is_undefined_primal, tangents)
    return [c if linear else None for c, linear in zip(cotangents, is_linear, strict=True)]


def _forward_only(rule):
    """The rule of tangents, which mapped or differentiated are on their way to be computed: jax
    would raise at the next step."""

    def checked(*args, no_forward, no_reverse):
        if no_forward:
            raise NotImplementedError(no_forward)
        return rule(*args, no_forward=no_forward, no_reverse=no_reverse)

    return checked


@_forward_only
def _tangent_batch(x, axes, **modes):
    return tangent_p.bind(*x, **modes), axes


@_forward_only
def _tangent_jvp(x, tangents, **modes):
    tangents = map(ad.instantiate_zeros, tangents)
    return tangent_p.bind(*x, **modes), tangent_p.bind(*tangents, **modes)


ad.primitive_jvps[identity_p] = _jvp
ad.primitive_transposes[tangent_p] = _transpose
ad.primitive_jvps[tangent_p] = _tangent_jvp
batching.primitive_batchers[tangent_p] = _tangent_batch
tangent_p.def_impl(_forward_only(lambda *x, **_: x))
mlir.register_lowering(tangent_p, _forward_only(lambda _, *x, **__: x))
