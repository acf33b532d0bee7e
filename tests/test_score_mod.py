"""score_mods: what dense autodiff says in every implementation, under every transform, and
what is said of mistakes."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Sizes, qkv
from check import TOLERANCE, close
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from selection import whole_but

from pallas_flash import (
    autodiff,
    context_parallel,
    flash_attention,
    flash_attention_jvp,
    masks,
    scores,
)

pytestmark = pytest.mark.usefixtures("small_tiles")
Z = Sizes(B=2, T=19, S=37, N=4, K=2, H=8, Hv=8)
IDS = jnp.arange(40, dtype=jnp.int32) // 3
OFFSET = np.array([3, 18], np.int32)

# From a table [N, 23] a score_mod.
RULES = {
    "by head and distance": lambda table: (
        lambda s, b, h, q, k: s + table[h, jnp.clip(q - k + 11, 0, 22)]
    ),
    "of what other arrays say": lambda table: (
        lambda s, b, h, q, k: s * table[h, jax.jit(lambda q: jnp.clip(IDS[q], 0, 22))(q - k)]
    ),
    "by key alone": lambda table: lambda s, b, h, q, k: s * table[0, k % 23],
    "a number by head": lambda table: lambda s, b, h, q, k: s - jnp.exp(table)[h, 1] * abs(q - k),
    "one number and a row": lambda table: (
        lambda s, b, h, q, k: jnp.tanh(s * table[0, 0]) + table[h][k % 23] * b
    ),
    "two reads of one table": lambda table: (
        lambda s, b, h, q, k: s + table.T[k % 5, h] * jnp.take(table[1], q % 23)
    ),
    "no array": lambda table: (
        lambda s, b, h, q, k: jnp.where((q + b) % 3 == k % (h + 2), -jnp.inf, s * s)
    ),
}


FOUR_DEVICES = pytest.mark.skipif(
    len(jax.devices()) < 4, reason="needs four devices; conftest asks for them on a CPU"
)


def dense(q, k, v, score_mod, offset=OFFSET):
    """o and lse [B, T, N] of causal attention in plain JAX."""
    s = jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, Z.N // Z.K, 2)) / math.sqrt(Z.H)
    position = np.arange(Z.T)[:, None] + np.reshape(offset, (-1, 1, 1, 1))
    at = (
        np.arange(Z.B)[:, None, None, None],
        np.arange(Z.N)[:, None, None],
        position,
        np.arange(Z.S),
    )
    s = jnp.where(at[3] <= position, jnp.vectorize(score_mod)(s, *at), -jnp.inf)
    lse = jax.nn.logsumexp(s, axis=-1)
    p = jnp.exp(s - jnp.where(lse == -jnp.inf, 0, lse)[..., None])
    return jnp.einsum("bnts,bsnh->btnh", p, jnp.repeat(v, Z.N // Z.K, 2)), jnp.swapaxes(lse, 1, 2)


def loss_of(attend):
    def loss(*x):
        o, lse = attend(*x)
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.where(lse == -jnp.inf, 0, jnp.cos(lse)))

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))


def equal(a, b, tolerance=1e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        close(x, y, tolerance)


def arrays(rng):
    return *map(jnp.asarray, qkv(rng, Z)), jnp.asarray(rng.normal(size=(Z.N, 23)), jnp.float32)


@pytest.mark.parametrize("name", RULES)
def test_output_lse_and_all_gradients_are_those_of_dense_autodiff(name, implementation, rng):
    options = dict(
        is_causal=True, query_offset=OFFSET, return_residual=True, implementation=implementation
    )
    attend = lambda q, k, v, table: flash_attention(
        q, k, v, score_mod=RULES[name](table), **options
    )
    x = arrays(rng)
    plain = lambda q, k, v, table: dense(q, k, v, RULES[name](table))
    equal(loss_of(attend)(*x), loss_of(plain)(*x), 2e-5)  # the loss sums 1,400 numbers


@pytest.mark.whole
@pytest.mark.parametrize("implementation", ["blockwise", "triton"])
def test_a_score_mod_goes_with_all_that_else_changes_logits_and_weights(implementation, rng):
    x = arrays(rng)
    options = dict(
        return_residual=True,
        mask=masks.MaskMod(lambda b, h, q, k: IDS[q] != IDS[k] + 1),
        logits_soft_cap=3.0,
        is_causal=True,
        query_offset=18,
        sinks=np.array([0.5, -1, 0, 2], np.float32),
        dropout_rate=0.25,
        dropout_rng=jax.random.key(0),
        key_value_seq_lengths=np.array([30, 37], np.int32),
        query_segment_ids=np.arange(2 * Z.T).reshape(2, -1) // 9,
        key_value_segment_ids=np.ones((2, Z.S), np.int32),
    )

    def attend(name, q, k, v, table):
        rule = RULES["by head and distance"](table)
        return flash_attention(
            q, k, v, table[:, None, :1], score_mod=rule, implementation=name, **options
        )

    of = lambda name: loss_of(functools.partial(attend, name))(*x)
    equal(of(implementation), of("reference"))


# ---- -inf, transforms, devices ----


@pytest.mark.whole("reference", "triton")
def test_a_score_of_minus_infinity_hides_a_key_and_all_of_a_row_too(implementation, rng):
    q, k, v, table = arrays(rng)
    seen = lambda q, k: (q % 3 > 0) & (k % 2 == q % 2)
    options = dict(is_causal=True, return_residual=True, implementation=implementation)
    hidden = lambda s, b, h, q, k: jnp.where(seen(q, k), s + 0 * table[h, 0], -jnp.inf)
    of = lambda **kw: loss_of(lambda q, k, v, _: flash_attention(q, k, v, **options, **kw))(
        q, k, v, table
    )
    equal(of(score_mod=hidden), of(mask=masks.MaskMod(lambda b, h, q, k: seen(q, k))))
    o, lse = flash_attention(q, k, v, score_mod=hidden, **options)
    assert np.all(o[:, ::3] == 0) and np.all(lse[:, ::3] == -np.inf)


@pytest.mark.parametrize(
    "implementation", whole_but(["reference", "blockwise", "triton"], "triton")
)
def test_what_a_mask_hides_and_what_is_not_there_may_be_nan(implementation, rng):
    x = arrays(rng)

    def far(table):  # nan after the query, and after the last query
        return lambda s, b, h, q, k: (
            s - table[h, 0] * jnp.log(q - k + 1.0) * jnp.sqrt(Z.T - 1.0 - q)
        )

    attend = lambda q, k, v, table: flash_attention(
        q, k, v, is_causal=True, implementation=implementation, score_mod=far(table)
    )
    gradients = jax.jit(jax.grad(lambda *x: jnp.sum(jnp.sin(attend(*x))), argnums=(0, 1, 2, 3)))(*x)
    assert all(np.isfinite(x).all() and np.any(x != 0) for x in gradients)


@pytest.mark.parametrize(
    "implementation", whole_but(["reference", "triton", "blockwise"], "blockwise")
)
def test_tables_may_be_traced_mapped_checkpointed_and_learned(implementation, rng):
    q, k, v, table = arrays(rng)
    tables = np.stack([table, table[:, ::-1]])

    def loss(table, q):
        rule = RULES["by head and distance"](jnp.sin(table))
        f = jax.checkpoint(
            lambda q: flash_attention(
                q, k, v, score_mod=rule, query_offset=OFFSET, implementation=implementation
            )
        )
        return jnp.sum(jnp.sin(f(q)))

    mapped = jax.jit(jax.vmap(jax.value_and_grad(loss, argnums=(0, 1)), in_axes=(0, None)))(
        tables, q
    )
    wanted = lambda table, q: jnp.sum(
        jnp.sin(unmasked(q, k, v, RULES["by head and distance"](jnp.sin(table))))
    )
    dense_loss = jax.jit(jax.value_and_grad(wanted, argnums=(0, 1)))
    for i in range(2):
        equal(jax.tree.map(lambda x: x[i], mapped), dense_loss(tables[i], q))


def unmasked(q, k, v, score_mod):
    def position_too(s, b, h, position, key):
        return score_mod(s, b, h, position - Z.S + jnp.asarray(OFFSET)[b], key)

    return dense(q, k, v, position_too, np.full(Z.B, Z.S))[0]


def test_forward_mode_is_right_where_scores_are_computed_twice_and_round_otherwise(rng):
    x = arrays(rng)[:3]
    of = lambda name: flash_attention_jvp(
        x, x, score_mod=lambda s, b, h, q, k: s - 0.1 * abs(q - k), implementation=name
    )
    equal(jax.jit(of, static_argnums=0)("blockwise"), jax.jit(of, static_argnums=0)("reference"))


@pytest.mark.whole
def test_forward_mode_and_second_derivatives_are_those_of_reference(rng):
    x, dx = arrays(rng), arrays(rng)
    rule = RULES["one number and a row"](x[3])
    jvp = lambda name: jax.jit(
        functools.partial(flash_attention_jvp, implementation=name, score_mod=rule)
    )(x[:3], dx[:3])
    equal(jvp("blockwise"), jvp("reference"))
    attend = lambda name: (
        lambda q, k, v, table: flash_attention(
            *(q, k, v),
            score_mod=RULES["one number and a row"](table),
            implementation=name,
            return_residual=True,
        )
    )
    hvp = lambda name: jax.jit(
        lambda x, dx: jax.jvp(lambda *x: loss_of(attend(name))(*x)[1], x, dx)[1]
    )(x, dx)
    equal(hvp("blockwise"), hvp("reference"), 3e-5)


@FOUR_DEVICES
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("implementation", whole_but(["triton", "blockwise"], "blockwise"))
def test_on_a_mesh_batch_rows_and_heads_are_numbered_over_all_devices(kind, implementation, rng):
    x = arrays(rng)
    rule = lambda table: lambda s, b, h, q, k: s + table[h, jnp.clip(q - k + 11, 0, 22)] * (b + 1)
    options = dict(
        is_causal=True, query_offset=OFFSET, return_residual=True, implementation=implementation
    )
    loss = loss_of(lambda q, k, v, t: flash_attention(q, k, v, score_mod=rule(t), **options))
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))
    placed = [jax.device_put(a, NamedSharding(mesh, P("data", None, "model", None))) for a in x[:3]]
    table = jax.device_put(x[3], NamedSharding(mesh, P()))
    spread = loss(*placed, table)
    assert spread[1][0].sharding.spec[:3] == ("data", None, "model")
    equal(spread, loss(*x))


@pytest.mark.whole
@FOUR_DEVICES
def test_heads_are_numbered_over_all_devices_that_a_sequence_lies_on(rng):
    q, k, v, table = (x[:, : x.shape[1] // 4 * 4] for x in arrays(rng))
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    attend = lambda q, k, v, **kw: flash_attention(
        q, k, v, score_mod=scores.Alibi(table[:, 0]), **kw
    )
    placed = [
        jax.device_put(jnp.repeat(a, Z.N // a.shape[2], 2), NamedSharding(mesh, P(None, "x")))
        for a in (q, k, v)
    ]
    for context in context_parallel.AllToAll("x"), context_parallel.Ring("x"):
        close(attend(*placed, context=context), attend(q, k, v), 1e-5)


@FOUR_DEVICES
@pytest.mark.parametrize(
    "context", [None, context_parallel.Ring("x")], ids=["rows whole", "a ring"]
)
def test_rules_are_asked_inside_of_a_checked_shard_map(rng, context):
    q, k, v, table = (x[:, : x.shape[1] // 4 * 4] for x in arrays(rng))
    rule = masks.MaskMod(lambda b, h, q, k: (q - k) % 3 != 1)

    def attend(q, k, v, table, offset, context=None):
        score_mod = lambda s, b, h, i, j: jnp.tanh(s) - table[h, (i - j) % 4]
        return flash_attention(
            q, k, v, mask=rule, score_mod=score_mod, query_offset=offset, context=context
        )

    mesh, spec = jax.make_mesh((2, 2), ("b", "x")), P("b", None if context is None else "x")
    spread = jax.shard_map(
        lambda *x: attend(*x, context=context),
        mesh=mesh,
        in_specs=(spec, spec, spec, P(), P("b")),
        out_specs=spec,
    )
    of = lambda f: jax.jit(
        jax.grad(
            lambda q, k, v, table, o: jnp.sin(f(q, k, v, table, o)).sum(), argnums=(0, 1, 2, 3)
        )
    )
    placed = [
        jax.device_put(x, NamedSharding(mesh, s))
        for x, s in zip((q, k, v, table), (spec, spec, spec, P()), strict=True)
    ]
    offset = jnp.arange(2, dtype=jnp.int32)
    found = of(spread)(*placed, jax.device_put(offset, NamedSharding(mesh, P("b"))))
    for x, expected in zip(found, of(attend)(q, k, v, table, offset), strict=True):
        close(x, expected, 1e-5)


@pytest.mark.whole
def test_a_program_with_symbols_for_batch_and_length_has_scores(rng):
    attend = functools.partial(flash_attention, is_causal=True, implementation="blockwise")

    def gradients(q, k, v, table):
        rule = RULES["one number and a row"]
        loss = lambda q, table: jnp.sum(jnp.sin(attend(q, k, v, score_mod=rule(table))))
        return jax.grad(loss, argnums=(0, 1))(q, table)

    x = *(a[:, : Z.T] for a in arrays(rng)[:3]), arrays(rng)[3]
    b, t = export.symbolic_shape("b, t")
    shapes = [jax.ShapeDtypeStruct((b, t, *a.shape[2:]), a.dtype) for a in x[:3]]
    program = export.export(jax.jit(gradients))(
        *shapes, jax.ShapeDtypeStruct(x[3].shape, x[3].dtype)
    )
    equal(program.call(*x), gradients(*x))


def test_functions_with_derivatives_of_their_own_are_told_apart(rng):
    x = arrays(rng)

    def doubled(factor):
        f = jax.custom_jvp(lambda s: 2 * s)
        f.defjvp(lambda primals, tangents: (f(primals[0]), factor * tangents[0]))
        return lambda s, b, h, q, k: f(s)

    loss = lambda q, factor: flash_attention(
        q, *x[1:3], score_mod=doubled(factor), implementation="blockwise"
    ).sum()
    gradients = jax.jit(lambda q: [jax.grad(loss)(q, factor) for factor in (2.0, 4.0)])(x[0])
    equal(gradients[1], 2 * gradients[0])


def test_equal_functions_share_one_compiled_program(rng):
    q, k, v, table = arrays(rng)
    f = lambda n: flash_attention(
        q, k, v, score_mod=lambda s, b, h, q, k: s + n * table[h, k % 3], implementation="blockwise"
    )
    programs = [(f(n), autodiff.attend._cache_size())[1] for n in (2.0, 2.0, 3.0)]
    assert programs[0] == programs[1] == programs[2] - 1


def test_a_table_of_64_bits_has_its_gradient_with_strict_promotion(rng):
    q = jnp.asarray(rng.normal(size=(1, 9, 2, 16)), jnp.bfloat16)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        rule = lambda t: lambda s, b, h, i, j: s + t[h, (i - j) % jnp.int32(8)].astype(s.dtype)
        attend = lambda t, name: flash_attention(q, q, q, score_mod=rule(t), implementation=name)
        loss = lambda t, name: attend(t, name).astype(jnp.float32).sum()
        found, expected = (
            jax.grad(loss)(jnp.asarray(np.eye(2, 8)), name) for name in ("triton", "reference")
        )
        assert found.dtype == jnp.float64
        close(found, expected, TOLERANCE["bfloat16"])
