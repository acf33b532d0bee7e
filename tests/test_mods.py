"""Rules, whether mask_mods or score_mods: what tells two apart, what is kept of one, what one may
do."""

import copy
import dataclasses
import functools
import gc
import multiprocessing
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify, io_callback
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, put

from pallas_flash import flash_attention, masks
from pallas_flash.mods import bound, captured, programs
from pallas_flash.transforms import autodiff

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


def test_on_a_mesh_too():
    mesh = make_mesh(AxisType.Auto, b=2)
    (x,) = put(mesh, P("b"), jnp.concatenate([X, X]))
    for c in (0.0, 3.0):
        rule = FACTORS["a parameter that prints as another"](c)
        run = lambda x, rule=rule: flash_attention(
            x, x, x, score_mod=lambda s, b, h, i, j: s + rule(j)
        )
        np.testing.assert_allclose(jax.jit(run)(x)[:1], run(X), atol=1e-5)


def test_a_callback_on_a_mesh_with_auto_axes_is_refused_which_xla_would_not_survive():
    mesh = make_mesh(AxisType.Auto, b=2)
    (x,) = put(mesh, P("b"), jnp.concatenate([X, X]))
    factor = by_callback(2.0)
    run = lambda x: flash_attention(x, x, x, score_mod=lambda s, b, h, i, j: s * factor(j))
    with pytest.raises(NotImplementedError, match=r"jax\.pure_callback does not run on a mesh"):
        jax.jit(run)(x)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=P("b"), out_specs=P("b"), check_vma=False)
    np.testing.assert_allclose(jax.jit(mapped)(x)[:1], run(X), atol=1e-5)


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
    packed = masks.Varlen(ids, ids + 0)
    assert packed == masks.Varlen(ids, ids) == masks.Varlen(ids) != masks.Varlen(ids, ids + 1)
    assert hash(packed) == hash(masks.Varlen(ids)) and packed.has_positions
    assert not masks.Varlen([0, 3], [0, 3]).has_positions
    factor = by_callback(2.0)
    rule = lambda factor: masks.MaskMod(lambda b, h, q, k: factor(k) < 1.0)
    assert rule(factor) == rule(factor) != rule(by_callback(2.0))
    jax.jit(lambda x: [same(x) == same(ids), same(x) == same(x)] == [False, True] or 1 / 0)(ids)


# ---- what is kept of a rule ----


@jax.custom_vjp
def doubled(s):
    return 2 * s


doubled.defvjp(lambda s: (2 * s, None), lambda _, d: (3 * d,))  # the three is seen in gradients
WITH_DERIVATIVES = {
    "relu": jax.nn.relu,
    "log_sigmoid": jax.nn.log_sigmoid,
    "in a loop": lambda s: jax.lax.fori_loop(0, 2, lambda _, s: jax.nn.softplus(s), s),
    "custom_vjp": doubled,
}


@pytest.mark.parametrize("name", WITH_DERIVATIVES)
def test_nothing_is_kept_of_a_rule_and_equal_ones_share_a_program(name):
    function, tables, sizes = WITH_DERIVATIVES[name], [], set()
    for n in range(3):
        table = jnp.full(8, float(n))
        tables.append(weakref.ref(table))
        attend(score_mod=lambda s, b, h, q, k, table=table: function(s) + table[k])
        sizes.add(autodiff.attend._cache_size())
        del table
        gc.collect()
    assert len(sizes) == 1
    assert [table() for table in tables] == [None] * 3


@pytest.mark.parametrize("name", WITH_DERIVATIVES)
def test_a_functions_own_derivatives_are_those_of_a_rule(name):
    function, weights = WITH_DERIVATIVES[name], jnp.linspace(-1, 1, X.size).reshape(X.shape)

    def loss(x, attention):
        return jnp.sum(weights * attention(x))

    def dense(x):
        s = function(jnp.einsum("bqnh,bknh->bnqk", x, x) / 2)
        return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(s), x)

    flash = lambda x: flash_attention(x, x, x, score_mod=lambda s, *_: function(s))
    gradient = lambda attention: jax.grad(loss)(X, attention)
    np.testing.assert_allclose(gradient(flash), gradient(dense), atol=1e-5)
    if name == "custom_vjp":  # has no derivative in forward mode
        return
    along = lambda attention: jax.grad(lambda x: jnp.sum(jax.grad(loss)(x, attention) * X))(X)
    np.testing.assert_allclose(along(flash), along(dense), atol=1e-4)


def test_a_rule_keeps_three_derivatives_of_a_function_and_says_so():
    program = jax.make_jaxpr(jax.nn.softplus)(0.0).jaxpr
    kept = programs.reopen(programs.close(program))
    function = lambda x: captured.run(kept.eqns, kept.outvars, {kept.invars[0]: x})[0]
    of_jax = jax.nn.softplus
    for _ in range(programs.ORDERS):
        function, of_jax = jax.grad(function), jax.grad(of_jax)
        np.testing.assert_allclose(function(0.3), of_jax(0.3), rtol=1e-6)
    with pytest.raises(NotImplementedError, match=r"has 3 derivatives, .*; got one more"):
        jax.grad(function)(0.3)


W = jnp.linspace(-1, 1, 8)
# a function of a number; how many arrays a rule of it captures, and how many of these have a
# gradient: those made of what it reads
MADE_INSIDE = {
    "arange": (lambda n: jnp.exp2(-(jnp.arange(8) + 1.0))[n], 1, 0),
    "ones and a scan": (
        lambda n: jax.lax.scan(lambda c, x: (c + x, c), 0.0, jnp.ones(8))[1][n],
        *(1, 0),
    ),
    "with a learned array": (lambda n: jnp.exp(W * jnp.arange(8.0))[n] + jnp.ones(8)[n], 2, 1),
    "in jit": (
        jax.jit(lambda n: jax.nn.softplus(W + jax.jit(lambda: jnp.arange(8))())[n]),
        *(1, 1),
    ),
    "a sum": (lambda n: n + jnp.sum(jnp.arange(4)), 1, 0),
    "random numbers": (lambda n: jax.random.normal(jax.random.key(0), (8,))[n], 1, 0),
    "a random number": (lambda n: n + jax.random.uniform(jax.random.key(0)), 1, 0),
    "a table of pairs": (lambda n: (W[:, None] * jnp.arange(3))[n, 2], 1, 1),
    "nothing": (lambda n: n * jnp.sqrt(2.0) + jnp.exp(jnp.float32(0.5)), 0, 0),
    "all of an array": (lambda n: jnp.sum(jnp.where(jnp.arange(8) == n, 2.0, 0.0)), 0, 0),
    "an array in a loop": (
        lambda n: jax.lax.fori_loop(0, 2, lambda i, x: x + jnp.arange(8.0)[n + i], 0.0),
        *(0, 0),
    ),
    "a random number for each": (
        lambda n: jax.random.uniform(jax.random.fold_in(jax.random.key(0), n)),
        *(1, 0),
    ),
}


@pytest.mark.parametrize("name", MADE_INSIDE)
def test_what_depends_on_no_scalar_is_computed_before_and_captured(name, constants):
    function, arrays, tables = MADE_INSIDE[name]
    score = bound.trace(lambda s, b, h, q, k: s * function(h), jnp.float32)
    mask, of_mask = bound.trace_mask_mod(lambda b, h, q, k: function(h) > 0.5)
    assert (score.mod.tables, len(of_mask)) == (tables, arrays)
    assert len(score.arrays) == arrays
    for h in (0, 5):
        np.testing.assert_allclose(score.mod(score.arrays, 0, h, 0, 0, 2.0), 2 * function(h), 1e-6)
        assert mask(of_mask, 0, h, 0, 0) == (function(h) > 0.5)
    if name not in ("all of an array", "an array in a loop", "a random number for each"):
        assert not {"iota", "dynamic_slice"} & (score.primitives | mask.primitives)


@pytest.mark.whole
def test_a_rule_leaks_no_tracers():
    with jax.checking_leaks():
        for function in WITH_DERIVATIVES.values():
            rule = lambda t, s, k, f=function: f(s) + t[k]
            loss = lambda t, rule=rule: attend(score_mod=lambda s, b, h, q, k: rule(t, s, k)).sum()
            jax.jit(jax.grad(loss))(jnp.zeros(8))


# ---- masks in a pickle ----


def later(b, h, q, k):
    return q >= k


def read_lengths(b, h, q, k):
    return k < jnp.asarray([5])[b]


MASKS = {
    "a function": lambda: masks.MaskMod(later),
    "a loop": lambda: masks.MaskMod(
        lambda b, h, q, k: jax.lax.fori_loop(0, 3, lambda i, n: jnp.where(n > k, n, n + i), q) > k
    ),
    "an array": lambda: masks.MaskMod(read_lengths),
    "a function with a derivative": lambda: masks.MaskMod(
        lambda b, h, q, k: jax.nn.relu(1.0 * (q - k)) > 1
    ),
    "dilated": lambda: masks.Dilated(2),
    "or": lambda: masks.Window(2, 0) | masks.GlobalTokens(1),
    "or with data": lambda: masks.KeyLengths(jnp.asarray([3])) | masks.Dilated(3),
    "not": lambda: masks.Causal() & ~masks.Dilated(3),
    "blocks": lambda: masks.create_block_mask(masks.Dilated(2), 8, 8, block=4),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_goes_through_a_pickle_and_is_copied(name):
    mask = MASKS[name]()
    wanted = attend(mask=mask)
    for made in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask), copy.copy(mask)):
        assert made == mask and hash(made) == hash(mask) and repr(made) == repr(mask)
        np.testing.assert_array_equal(attend(mask=made), wanted)
    dataclasses.asdict(dataclasses.make_dataclass("Config", ["mask"])(mask))


def _in_another_process(mask):
    return np.asarray(attend(mask=mask)), mask == masks.Dilated(2)


@pytest.mark.whole
def test_a_mask_is_sent_to_a_process_that_is_spawned():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        result, is_equal = pool.apply(_in_another_process, (masks.Dilated(2),))
    assert is_equal
    np.testing.assert_allclose(result, attend(mask=masks.Dilated(2)), atol=1e-6)


def test_a_mask_of_an_operation_of_ones_own_says_that_it_is_not_pickled():
    mask = masks.MaskMod(lambda b, h, q, k: times_p.bind(1.0 * q, by=Factor(2.0)) > k)
    with pytest.raises(pickle.PicklingError, match="may use jax's own operations; got `times`"):
        pickle.dumps(mask)


# ---- effects, and axes with names ----


@jax.custom_jvp
def said(x):
    return 1.0 * x


@said.defjvp
def of_said(primals, tangents):
    jax.debug.print("{}", *tangents)
    return primals[0], tangents[0]


EFFECTS = {
    "a derivative": said,
    "debug_callback": lambda x: jax.debug.callback(lambda _: None, x),
    "debug_print": lambda x: jax.debug.print("{}", x),
    "check": lambda x: checkify.check(x < -100, "too large"),
    "io_callback": lambda x: io_callback(lambda _: None, None, x),
    "psum": lambda x: jax.lax.psum(x, "r"),
}


@pytest.mark.parametrize("name", EFFECTS)
def test_a_rule_with_effects_is_refused_everywhere_in_the_same_sentence(name):
    effect = EFFECTS[name]

    def score_mod(s, b, h, q, k):
        effect(s)
        return s

    def mask_mod(b, h, q, k):
        effect(1.0 * q)
        return q >= k

    in_jit = jax.jit(lambda x: flash_attention(x, x, x, score_mod=score_mod))
    calls = {
        "eager": lambda: attend(score_mod=score_mod),
        "reference": lambda: attend(score_mod=score_mod, implementation="reference"),
        "jit": lambda: in_jit(X),
        "grad": lambda: jax.grad(lambda x: in_jit(x).sum())(X),
        "checkify": lambda: checkify.checkify(in_jit)(X),
        "a mask": lambda: masks.MaskMod(mask_mod),
    }
    for call in calls.values():
        run = jax.vmap(lambda _, call=call: call() and 0, axis_name="r")
        with pytest.raises(TypeError, match=r"k?v_idx\) must have no effects, as it is .*; got `"):
            run(jnp.arange(2))


@pytest.mark.whole("triton")
@pytest.mark.parametrize("implementation", ["blockwise", "reference", "triton"])
def test_a_rule_knows_its_place_on_an_axis_with_a_name(implementation):
    x = jax.random.normal(jax.random.key(1), (2, 1, 8, 1, 4))
    run = functools.partial(flash_attention, implementation=implementation)

    def by_place(x):
        n = lambda: jax.lax.axis_index("r")
        mask = masks.MaskMod(lambda b, h, q, k: q >= k - 2 * n())
        return run(x, x, x, score_mod=lambda s, b, h, q, k: s * (1.0 + n()), mask=mask)

    def wanted(n):
        y, later = x[n], masks.Window(None, 2 * n)
        return run(y, y, y, score_mod=lambda s, b, h, q, k: s * (1.0 + n), mask=later)

    wanted = jnp.stack([wanted(0), wanted(1)])
    close = functools.partial(np.testing.assert_allclose, desired=wanted, atol=1e-5)
    close(jax.vmap(by_place, axis_name="r")(x))
    close(jax.jit(jax.vmap(by_place, axis_name="r"))(x))
    mesh = make_mesh(AxisType.Auto, r=2)
    on_each = lambda x: by_place(x[0])[None]
    for check in (False, True) if implementation != "triton" else (False,):
        f = jax.shard_map(on_each, mesh=mesh, in_specs=P("r"), out_specs=P("r"), check_vma=check)
        close(jax.jit(f)(x))
