"""Every mode of differentiation of plain JAX: blockwise's first and second derivatives are those of
dense attention in float64, with every argument."""

import functools
import itertools

import check
import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    BROADCASTS,
    GATHERED,
    MASKS,
    TABLES,
    Sizes,
    arguments,
    bias,
    dense_mask,
    normal,
    qkv,
)
from jax.experimental import jet
from jax.sharding import AxisType, NamedSharding
from meshes import make_mesh
from selection import whole_but
from test_derivative_modes import MASKED
from walks import EVERY_WALK, walking

from pallas_flash import explain, flash_attention
from pallas_flash.choose import implementations
from pallas_flash.tiled import blockwise

pytestmark = pytest.mark.usefixtures("small_tiles")
Z = Sizes(T=19, S=35, N=4, K=2, H=5, Hv=3)


def score_mod(table):
    """By head and distance; the logarithm is no number where the key comes later."""

    def mod(s, b, h, q, k):
        far = jnp.where(k > q, 0.0, jnp.log(jnp.where(k > q, 1.0, q - k + 1.0)))
        return jnp.sin(s * table[h, 0]) + table[h, 1 + abs(q - k) % 3] - 0.1 * far + table[h, 4] * s

    return mod


def drawn(rng, name: str):
    """The floats that a call differentiates, and the rest of it: a mask by its name, and what else
    changes scores by chance."""
    chance = lambda p: rng.random() < p
    query, key, value = qkv(rng, Z)
    floats = dict(query=query, key=key, value=value)
    options = arguments((MASKED | TABLES | GATHERED)[name](rng, Z))
    if chance(0.4):
        floats["bias"] = bias(rng, rng.choice(BROADCASTS), Z)
    if chance(0.4):
        floats["sinks"] = normal(rng, Z.N)
    # sequences have an offset each
    if chance(0.4) and "varlen" not in name and "sequences" not in name:
        floats["table"] = normal(rng, Z.N, 5)
    if chance(0.3):
        options["logits_soft_cap"] = 2.0
    if chance(0.3):
        options |= dict(dropout_rate=0.25, dropout_rng=jax.random.key(rng.integers(99)))
    if "mask" not in options and chance(0.3):
        options["mask"] = dense_mask(rng, rng.choice(BROADCASTS), Z)
    return floats, options


def modes(implementation, options, x, dx, ux, rest=None):
    """Derivatives along dx and ux: first in forward and reverse, and second in all four orders;
    none by the `rest` of the floats."""

    def attend(x):
        x = x | (rest or {})
        mod = dict(score_mod=score_mod(x.pop("table"))) if "table" in x else {}
        o, lse = flash_attention(
            **x, **mod, **options, implementation=implementation, return_residual=True
        )
        return o, jnp.where(jnp.isinf(lse), 0, lse)

    loss = lambda x: sum(jnp.sum(jnp.sin(out)) for out in attend(x))
    gradient = jax.grad(loss)
    along = lambda f, dx: lambda x: jax.jvp(f, (x,), (dx,))[1]
    dot = lambda a, b: sum(jnp.vdot(a[name], b[name]) for name in a)
    return {
        "forward": along(attend, dx)(x),
        "reverse": gradient(x),
        "forward over forward": along(along(attend, dx), ux)(x),
        "forward over reverse": along(gradient, dx)(x),
        "reverse over forward": jax.grad(along(loss, dx))(x),
        "reverse over reverse": jax.grad(lambda x: dot(gradient(x), ux))(x),
    }


def are_the_references(rng, floats, options, by=None, tolerance=2e-5, implementation="blockwise"):
    """Derivatives by the floats of these names, or by all."""
    x = {name: a for name, a in floats.items() if name in (by or floats)}
    rest = {name: a for name, a in floats.items() if name not in x}
    dx, ux = ({name: rng.normal(size=a.shape) for name, a in x.items()} for _ in range(2))
    with jax.enable_x64(True):
        in_float64 = [{name: np.float64(a) for name, a in y.items()} for y in (x, dx, ux, rest)]
        expected = jax.jit(functools.partial(modes, "reference", options))(*in_float64)
        expected = jax.tree.map(np.asarray, expected)
    in_float32 = [{name: np.float32(a) for name, a in y.items()} for y in (x, dx, ux, rest)]
    found = jax.jit(functools.partial(modes, implementation, options))(*in_float32)
    for name, wanted in expected.items():
        pairs = zip(jax.tree.leaves(found[name]), jax.tree.leaves(wanted), strict=True)
        for n, pair in enumerate(pairs):
            check.close(*pair, tolerance, f"{name}, {n}")


@pytest.mark.parametrize("name", whole_but(MASKED, "holes by head"))
def test_all_derivatives_of_first_and_second_order_are_the_dense_ones(name, rng):
    are_the_references(rng, *drawn(rng, name))


WALKED = [*zip([*TABLES, *GATHERED], itertools.cycle(EVERY_WALK), strict=False)]


@pytest.mark.whole
@pytest.mark.parametrize("name, walk", WALKED)
def test_so_are_those_of_each_walk_over_lists(name, walk, rng, monkeypatch):
    walking(monkeypatch, walk)
    are_the_references(rng, *drawn(rng, name))


@pytest.mark.whole
@pytest.mark.parametrize("name", ["documents_causal", "full"])
def test_so_are_those_of_kernels_with_all_that_has_derivatives(name, rng):
    table, sinks = rng.normal(size=(Z.N, 5)), rng.normal(size=Z.N)
    floats = dict(zip(("query", "key", "value"), qkv(rng, Z), strict=True))
    floats |= dict(table=table, sinks=sinks, bias=bias(rng, "1N1S", Z))
    options = arguments(MASKS[name](rng, Z)) | dict(logits_soft_cap=2.0)
    are_the_references(rng, floats, options, implementation="triton")


ALONE = "query", "key", "value", "bias", "sinks"
IN_BASE_2 = ("sinks", "standard")  # without a bias


@pytest.mark.parametrize(
    "name, implementation",
    whole_but([*itertools.product(ALONE, ["blockwise"]), IN_BASE_2], IN_BASE_2),
)
def test_derivatives_by_one_operand_alone_are_the_dense_ones_too(name, implementation, rng):
    floats = dict(zip(ALONE, (*qkv(rng, Z), bias(rng, "1N1S", Z), None), strict=True))
    floats["sinks"] = np.append(normal(rng, Z.N - 1), np.float32(np.inf))
    if implementation == "standard":
        del floats["bias"]
    options = dict(is_causal=True, query_offset=3)
    are_the_references(rng, floats, options, by=[name], implementation=implementation)


@pytest.mark.whole
def test_a_bias_of_minus_infinity_hides_keys_and_whole_rows_in_every_mode(rng):
    floats, _ = drawn(rng, "full")
    hidden = rng.random((Z.B, 1, Z.T, Z.S)) < 0.3
    hidden[0, :, 7] = True
    floats = dict(query=floats["query"], key=floats["key"], value=floats["value"])
    floats["bias"] = np.where(hidden, -np.inf, bias(rng, "B1TS", Z))
    are_the_references(rng, floats, dict(is_causal=True, query_offset=3))


@pytest.mark.whole
@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
def test_nan_in_padding_of_arrays_and_tangents_changes_no_bit_in_any_mode(implementation, rng):
    queries, keys = np.array([9, Z.T], np.int32), np.array([Z.S, 11], np.int32)
    options = dict(query_seq_lengths=queries, key_value_seq_lengths=keys, is_causal=True)
    clean = [dict(zip(("query", "key", "value"), qkv(rng, Z), strict=True)) for _ in range(3)]
    sinks = normal(rng, 3, Z.N)

    def results(arrays):
        x = [{**a, "sinks": s} for a, s in zip(arrays, sinks, strict=True)]
        lengths = dict(query=queries, key=keys, value=keys)
        found = jax.jit(functools.partial(modes, implementation, options))(*x)
        is_there = lambda name, a: np.arange(a.shape[1]) < lengths[name][:, None]
        return found, [
            {name: np.where(is_there(name, a)[..., None, None], a, np.nan) for name, a in y.items()}
            for y in arrays
        ]

    expected, dirty = results(clean)
    found, _ = results(dirty)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


# ---- compositions ----

W = jnp.cos(jnp.arange(8.0))


def mixed(f, t):
    """(k, q, v) -> the derivative by k of the derivative by q along t, of a loss of f(q, k, v)."""
    gradient = jax.grad(lambda *x: jnp.sum(f(*x) * W))
    return jax.grad(lambda k, q, v: jnp.sum(gradient(q, k, v) * t))


def on_two_devices(f):
    mesh = make_mesh(AxisType.Auto, d=2)
    return jax.shard_map(f, mesh=mesh, in_specs=(jax.P("d"),) * 3, out_specs=jax.P("d"))


def compositions(f, q=None, k=None, v=None, t=None) -> dict:
    """By name, functions without arguments that differentiate and map f(q, k, v), along t."""
    loss = lambda a, b: jnp.sum(f(a * q, k, b * v) * W)  # of two numbers
    by_query = lambda q: f(q, k, v)
    linear = lambda: jax.linearize(by_query, q)[1]
    both = (0, 1)
    second = lambda f: mixed(f, t)(k, q, v)
    by_queries = lambda q, k, v: jax.vmap(f, (0, None, None))(jnp.stack([q, t]), k, v)
    scanned = lambda q, k, v: jax.lax.scan(
        lambda x, s: (f(s * x, k, v), None), q, jnp.arange(1.0, 3.0)
    )[0]
    of_all = lambda queries: jax.vmap(lambda q: mixed(f, t)(k, q, v))(queries)
    of_both = lambda of: jax.vmap(jax.vmap(of, (0, None)), (None, 0))
    newton = lambda i, a: a - 1e-3 * jax.jacfwd(loss)(a, 0.9)

    def on_a_mesh(kind):
        spread = NamedSharding(make_mesh(kind, d=2), jax.P("d"))
        *x, along = jax.device_put((k, q, v, t), spread)
        return jax.jit(mixed(f, along))(*x)

    return {
        "linearize": lambda: linear()(t),
        "the transpose of linearize": lambda: jax.linear_transpose(linear(), q)(t),
        "jacfwd": lambda: jax.jacfwd(loss, both)(0.7, 0.9),
        "jacrev": lambda: jax.jacrev(lambda q: by_query(q)[0, 5, 1])(q),
        "hessian": lambda: jax.hessian(loss, both)(0.7, 0.9),
        "jacrev of jacfwd": lambda: jax.jacrev(jax.jacfwd(loss, both), both)(0.7, 0.9),
        "forward over all of them": lambda: jax.jvp(lambda k: mixed(f, t)(k, q, v), (k,), (k,)),
        "vmap of second": lambda: of_all(jnp.stack([q, t])),
        "second of vmap, with shared keys": lambda: second(by_queries),
        "vmap of no call": lambda: of_all(jnp.zeros((0, *q.shape))),
        "vmaps of forward": lambda: of_both(jax.jacfwd(loss))(jnp.arange(3.0), jnp.arange(2.0)),
        "Newton's steps in a loop": lambda: jax.lax.fori_loop(0, 2, newton, 0.7),
        "checkpoint": lambda: second(jax.checkpoint(f)),
        "scan": lambda: second(scanned),
        "inside of shard_map": lambda: on_two_devices(mixed(f, 1.0))(k, q, v),
        "of shard_map": lambda: second(on_two_devices(f)),
        "of Auto axes": lambda: on_a_mesh(AxisType.Auto),
        "of Explicit axes": lambda: on_a_mesh(AxisType.Explicit),
    }


COMPOSITIONS = [*compositions(None)]
BY_BLOCKWISE = [(name, "blockwise") for name in COMPOSITIONS]
BY_KERNELS = [(name, "triton") for name in COMPOSITIONS if "shard_map" not in name]
BY_KERNELS += [("forward over all of them", name) for name in ("flash1", "standard")]
FAST = "the transpose of linearize", "hessian"
FAST = [*((name, "blockwise") for name in FAST), ("checkpoint", "triton")]


@pytest.mark.parametrize("name, implementation", whole_but([*BY_BLOCKWISE, *BY_KERNELS], *FAST))
def test_transformations_compose_as_those_of_dense_attention(name, implementation, rng):
    x = [normal(rng, 2, 19, 2, 8) for _ in range(4)]

    def composed(by):
        attend = functools.partial(flash_attention, is_causal=True, implementation=by)
        return compositions(attend, *x)[name]()

    check.equal(composed(implementation), composed("reference"))


LINEAR = {
    "a call": lambda f: f,
    "jit": lambda f: jax.jit(f),
    "vmap that shares the values": lambda f: (
        lambda v: jnp.einsum(
            "cbtnh,c->btnh", jax.vmap(lambda c: f(c * v))(jnp.arange(1.0, 3.0)), jnp.ones(2)
        )
    ),
}


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("implementation", ["blockwise", "reference", "triton"])
def test_the_values_have_a_linear_transpose(implementation, name, rng):
    (q, k, v), do = qkv(rng, Z), normal(rng, Z.B, Z.T, Z.N, Z.Hv)
    options = dict(is_causal=True, query_offset=3, dropout_rate=0.25, logits_soft_cap=2.0)
    options |= dict(dropout_rng=jax.random.key(1), sinks=normal(rng, Z.N))
    of = lambda name_: LINEAR[name](
        lambda v: flash_attention(q, k, v, implementation=name_, **options)
    )
    (found,) = jax.linear_transpose(of(implementation), v)(do)
    check.close(found, jax.vjp(of("reference"), v)[1](do)[0], 1e-5)
    of_query = lambda q: flash_attention(q, k, v, implementation=implementation)
    if implementation != "reference":
        with pytest.raises(NotImplementedError, match="linear in value alone"):
            jax.linear_transpose(of_query, q)(do)


def test_the_reference_has_higher_derivatives_by_jet(rng):
    q, k, v = (normal(rng, 1, 5, 2, 4) for _ in range(3))
    series = ((k, 0 * k, 0 * k),)
    attend = functools.partial(flash_attention, implementation="reference", is_causal=True)
    found, expected = (
        jet.jet(lambda q: f(q, k, v), (q,), series)
        for f in (attend, functools.partial(jax.nn.dot_product_attention, is_causal=True))
    )
    for pair in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        check.close(*pair, 1e-5)


@pytest.mark.parametrize("implementation", [None, "blockwise", "triton", "standard"])
def test_jet_of_the_other_implementations_names_the_reference(implementation, rng):
    q = normal(rng, 1, 5, 2, 4)
    attend = functools.partial(flash_attention, q, implementation=implementation)
    mapped = lambda k: jax.vmap(attend)(k[None], k[None])
    for f in (lambda k: attend(k, k), jax.jit(lambda k: attend(k, k)), mapped):
        with pytest.raises(NotImplementedError, match=r'jet takes .* implementation="reference"'):
            jet.jet(f, (q,), ((q,),))


def test_a_gradient_traces_its_forward_once(rng, monkeypatch):
    """That of the tiles that it runs with, which may be others than those of a call alone."""
    traced = []
    forward = lambda *args: traced.append(args[1]) or blockwise.forward(*args)
    watched = fakes.changed(implementations.BLOCKWISE, forward=forward)
    monkeypatch.setattr(implementations, "find", lambda name: watched)
    q, k, v = qkv(rng, Z)
    loss = lambda q: jnp.sum(flash_attention(q, k, v, implementation="blockwise"))
    jax.jit(jax.grad(loss)).lower(q)
    assert len(traced) == 1


def test_explain_says_which_derivatives_a_call_has():
    x = jax.ShapeDtypeStruct((2, 19, 2, 8), jnp.float32)
    said = {
        name: explain(x, x, x, implementation=name).derivatives
        for name in implementations.names()[3:]
    }
    modes = "every mode, of first order, and of second by blockwise"
    assert said == dict(
        triton=modes,
        blockwise="every mode, of first and second order",
        reference="every mode, of any order",
        flash1=f"{modes}; forward mode by blockwise",
        standard=f"{modes}; forward mode by blockwise",
    )
    mesh = make_mesh(d=2)
    spread = NamedSharding(mesh, jax.P(None, "d"))
    x = jax.device_put(jnp.ones((2, 20, 2, 8)), spread)
    assert explain(x, x, x).derivatives == "reverse mode, of first order"


def test_a_third_derivative_in_reverse_says_what_has_it(rng):
    q, k, v, t = (normal(rng, 2, 19, 2, 8) for _ in range(4))
    third = lambda name: jax.grad(
        lambda v: jnp.sum(
            mixed(functools.partial(flash_attention, implementation=name), t)(k, q, v)
        )
    )(v)
    with pytest.raises(NotImplementedError, match='implementation="reference" has all of them'):
        third("blockwise")
    assert np.all(np.isfinite(third("reference")))


def test_temporaries_of_second_derivatives_grow_linearly_with_the_length(monkeypatch):
    monkeypatch.undo()  # small_tiles
    attend = functools.partial(flash_attention, implementation="blockwise", is_causal=True)

    def run(q, k, v, t):
        loss = lambda *x: jnp.sum(jnp.sin(attend(*x)))
        return jax.grad(lambda k, q, v: jnp.sum(jax.grad(loss)(q, k, v) * t))(k, q, v)

    x = lambda length: [jax.ShapeDtypeStruct((1, length, 1, 64), jnp.float32)] * 4
    few, many = (check.temporary_bytes(run, *x(length)) for length in (16384, 65536))
    assert many <= 4.1 * few and few < 16384**2  # bytes: a quarter of dense scores
