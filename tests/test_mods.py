"""Rules, whether mask_mods or score_mods: what tells two apart, what is kept of one, what one may
do."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from pallas_flash import flash_attention, masks

X = jax.random.normal(jax.random.key(0), (1, 8, 1, 4))
attend = functools.partial(flash_attention, X, X, X)


@dataclasses.dataclass(frozen=True)
class Factor:
    """Prints as any other."""

    number: float
    __repr__ = object.__repr__


times_p = Primitive("times")
times_p.def_impl(lambda x, *, by: x * by.number)
times_p.def_abstract_eval(lambda x, *, by: x)
mlir.register_lowering(times_p, mlir.lower_fun(lambda x, *, by: x * by.number, False))
batching.primitive_batchers[times_p] = lambda x, axes, *, by: (times_p.bind(*x, by=by), axes[0])


def by_callback(c: float):
    host = lambda j: (np.asarray(j) * c).astype(np.float32)
    like = jax.ShapeDtypeStruct((), jnp.float32)
    return lambda j: jax.pure_callback(host, like, j, vmap_method="expand_dims")


def by_array(c: float):
    table = jnp.arange(2000.0) * c
    return lambda j: table[j]


def by_jitted_array(c: float):
    return jax.jit(by_array(c))


# number -> kv_idx -> kv_idx * number
FACTORS = {
    "the function of a callback": by_callback,
    "a parameter that prints as another": lambda c: lambda j: times_p.bind(1.0 * j, by=Factor(c)),
    "an array": by_array,
    "an array of a jitted function": by_jitted_array,
}


@pytest.fixture(params=[False, True], ids=["hoisted", "literal"])
def constants(request):
    """Arrays in a program: as inputs of it, or as literals, which print as "..."."""
    before = jax.config.jax_use_simplified_jaxpr_constants
    jax.config.update("jax_use_simplified_jaxpr_constants", request.param)
    yield
    jax.config.update("jax_use_simplified_jaxpr_constants", before)


@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
@pytest.mark.parametrize("name", FACTORS)
def test_rules_that_print_alike_are_told_apart(name, implementation, constants):
    run = functools.partial(attend, implementation=implementation)
    step = jax.jit(lambda mask: run(mask=mask))
    for c in (0.0, 0.25, 3.0):
        factor = FACTORS[name](c)
        result = run(score_mod=lambda s, b, h, i, j, f=factor: s + f(j))
        wanted = run(score_mod=lambda s, b, h, i, j, c=c: s + c * j)
        np.testing.assert_allclose(result, wanted, atol=1e-5)
        rule = masks.MaskMod(lambda b, h, i, j, f=factor: f(j) < 1.0)
        np.testing.assert_allclose(
            step(rule), run(mask=np.arange(8)[None, None, None] * c < 1.0), atol=1e-5
        )


def test_a_rule_that_reads_an_array_runs_in_kernels_whatever_the_array_is_to_jax(constants):
    read = by_array(0.5)
    run = functools.partial(attend, score_mod=lambda s, b, h, i, j: s + read(j))
    np.testing.assert_allclose(
        run(implementation="triton"), run(implementation="reference"), atol=1e-5
    )


def test_masks_are_equal_if_their_arrays_are(constants):
    ids = jnp.arange(9) // 4
    same = lambda ids: masks.MaskMod(lambda b, h, q, k: ids[q] == ids[k])
    assert same(ids) == same(ids + 0) and hash(same(ids)) == hash(same(ids + 0))
    assert same(ids) != same(ids + ids) and same(ids) != same(ids[:8])
    with_lengths = lambda ids, n: same(ids) & masks.Causal() | masks.KeyLengths(n * ids)
    assert with_lengths(ids, 2) == with_lengths(ids + 0, 2) != with_lengths(ids, 3)
    jax.jit(lambda x: [same(x) == same(ids), same(x) == same(x)] == [False, True] or 1 / 0)(ids)
