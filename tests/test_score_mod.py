"""score_mods: what dense autodiff says in every implementation, under every transform, and
what is said of mistakes."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Sizes, qkv
from check import TOLERANCE, close, equal, value_and_gradients
from selection import whole_but

from pallas_flash import explain, flash_attention, flash_attention_jvp, masks, scores

pytestmark = pytest.mark.usefixtures("small_tiles")
Z = Sizes(B=2, T=19, S=37, N=4, K=2, H=8, Hv=8)
IDS = jnp.arange(40, dtype=jnp.int32) // 3
OFFSET = np.array([3, 18], np.int32)
ENDS = np.array([[0, 4, 4, 12, 17], [0, 3, 9, 9, 19]], np.int32)
KEY_ENDS = np.array([[0, 11, 20, 23, 37], [0, 2, 17, 20, 30]], np.int32)
PLACES = {  # of the queries among the keys
    "an offset by batch row": dict(query_offset=OFFSET),
    "sequences": dict(mask=masks.Varlen(ENDS, KEY_ENDS)),
    "sequences of equal lengths": dict(mask=masks.Varlen(ENDS, jnp.asarray(ENDS))),
}

# From a table [N, 23] a score_mod.
RULES = {
    "by head and distance": lambda table: (
        lambda s, b, h, q, k: s + table[h, jnp.clip(q - k + 11, 0, 22)]
    ),
    "of what other arrays say": lambda table: (
        lambda s, b, h, q, k: s * table[h, jax.jit(lambda q: jnp.clip(IDS[q], 0, 22))(q - k)]
    ),
    "by key alone": lambda table: lambda s, b, h, q, k: s * table[0, k % 23],
    "arrays that it makes": lambda table: (
        lambda s, b, h, q, k: (
            s
            - jnp.exp(table * jnp.linspace(0.5, 1, 23))[h, 1]
            * jnp.exp2(-jnp.arange(4.0))[h]
            * abs(q - k)
        )
    ),
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


def dense(q, k, v, score_mod, query_offset=OFFSET, mask=None):
    """o and lse [B, T, N] of causal attention in plain JAX."""
    s = jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, Z.N // Z.K, 2)) / math.sqrt(Z.H)
    position, seen = np.arange(Z.T)[:, None] + np.reshape(query_offset, (-1, 1, 1, 1)), True
    if mask is not None:
        ends = map(np.asarray, (mask.cu_seqlens_q, mask.cu_seqlens_k))
        seen, position = (x[:, None] for x in oracle.sequences(*ends, Z.B, Z.T, Z.S))
    at = *oracle.rows_and_heads(Z.B, Z.N), position, np.arange(Z.S)
    s = jnp.where(seen & (at[3] <= position), jnp.vectorize(score_mod)(s, *at), -jnp.inf)
    lse = jax.nn.logsumexp(s, axis=-1)
    p = jnp.exp(s - jnp.where(lse == -jnp.inf, 0, lse)[..., None])
    return jnp.einsum("bnts,bsnh->btnh", p, jnp.repeat(v, Z.N // Z.K, 2)), jnp.swapaxes(lse, 1, 2)


of_all = functools.partial(value_and_gradients, argnums=(0, 1, 2, 3))


def arrays(rng):
    return *map(jnp.asarray, qkv(rng, Z)), jnp.asarray(rng.normal(size=(Z.N, 23)), jnp.float32)


PLACED = [(name, "an offset by batch row") for name in RULES]
PLACED += [("by head and distance", place) for place in ("sequences", "sequences of equal lengths")]
PLACED += [(name, "sequences") for name in ("of what other arrays say", "one number and a row")]
FAST = "of what other arrays say", "arrays that it makes", "two reads of one table"


@pytest.mark.parametrize(
    "name, place",
    whole_but(PLACED, *(row for row in PLACED[:-2] if row[0] in FAST), PLACED[-1]),
)
def test_output_lse_and_all_gradients_are_those_of_dense_autodiff(name, place, implementation, rng):
    options = dict(is_causal=True, return_residual=True, implementation=implementation)
    attend = lambda q, k, v, table: flash_attention(
        q, k, v, score_mod=RULES[name](table), **options, **PLACES[place]
    )
    x = arrays(rng)
    plain = lambda q, k, v, table: dense(q, k, v, RULES[name](table), **PLACES[place])
    equal(of_all(attend)(*x), of_all(plain)(*x))


# what is read of a table with an index beyond an axis, and the same by indices that lie inside
BEYOND = {
    "the last entry": (
        lambda t, h, j: t[2 * h, j],
        lambda t, h, j: t[jnp.minimum(2 * h, 3), jnp.minimum(j, 8)],
    ),
    "a number": (
        lambda t, h, j: t[h].at[j].get(mode="fill", fill_value=0.5),
        lambda t, h, j: jnp.where(j < 9, t[h, jnp.minimum(j, 8)], 0.5),
    ),
}


@pytest.mark.parametrize("name", BEYOND)
def test_beyond_an_axis_of_an_array_is_what_jax_has_there(name, rng):
    """In kernels, which have an array as one axis, the next entry would be of the next row."""
    q, k, v, table = arrays(rng)
    q, table = q[:, :9], table[:, :9]

    def of(implementation, read):
        attend = lambda q, k, v, table: flash_attention(
            *(q, k, v),
            score_mod=lambda s, b, h, i, j: s + read(table, h, j),
            implementation=implementation,
        )
        return of_all(attend)(q, k, v, table)

    beyond, inside = BEYOND[name]
    equal(of("triton", beyond), of("reference", inside))


# ---- -inf, transforms, devices ----


@pytest.mark.whole("reference", "triton")
def test_a_score_of_minus_infinity_hides_a_key_and_all_of_a_row_too(implementation, rng):
    q, k, v, table = arrays(rng)
    seen = lambda q, k: (q % 3 > 0) & (k % 2 == q % 2)
    options = dict(is_causal=True, return_residual=True, implementation=implementation)
    hidden = lambda s, b, h, q, k: jnp.where(seen(q, k), s + 0 * table[h, 0], -jnp.inf)
    of = lambda **kw: of_all(lambda q, k, v, _: flash_attention(q, k, v, **options, **kw))(
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


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "beside q, k and v"])
def test_kernels_have_the_tangent_along_an_array(alone, rng):
    x = arrays(rng)
    along = (*map(jnp.zeros_like, x[:3]), x[3]) if alone else x

    def tangent(name):
        rule = RULES["by head and distance"]
        attend = lambda *x: flash_attention(*x[:3], score_mod=rule(x[3]), implementation=name)
        return jax.jit(lambda: jax.jvp(attend, x, along)[1])()

    equal(tangent("triton"), tangent("reference"))


def test_forward_mode_is_right_where_scores_are_computed_twice_and_round_otherwise(rng):
    x = arrays(rng)[:3]
    of = lambda name: flash_attention_jvp(
        x, x, score_mod=lambda s, b, h, q, k: s - 0.1 * abs(q - k), implementation=name
    )
    equal(jax.jit(of, static_argnums=0)("blockwise"), jax.jit(of, static_argnums=0)("reference"))


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


# ---- what is said of a mistake, and of what an implementation lacks ----

SHAPES = r"is called once, with scalars,.* it raised "
FLOATS = IDS * 1.0
MISTAKES = {
    "no function": (
        0.5,
        r"a function score_mod\(score, b, h, q_idx, .*\) that .*; got the float 0.5",
    ),
    "too few": (lambda s: s, r"raised TypeError: .*takes 1 positional argument but 5 were given"),
    "a bool": (
        lambda s, b, h, q, k: q >= k,
        r"of the score's dtype, float32\[\]; got bool\[\]. To hide keys, pass a mask",
    ),
    "an int": (lambda s, b, h, q, k: q - k, r"float32\[\]; got int32\[\]"),
    "half": (lambda s, b, h, q, k: s.astype(jnp.bfloat16), r"float32\[\]; got bfloat16\[\]"),
    "many": (lambda s, b, h, q, k: s + jnp.arange(3.0), r"float32\[\]; got float32\[3\]"),
    "a shape": (lambda s, b, h, q, k: s / s.shape[-1], SHAPES + "IndexError"),
    "a softmax": (lambda s, b, h, q, k: jax.nn.softmax(s, axis=-1), SHAPES + "ValueError"),
    "of NumPy": (
        lambda s, b, h, q, k: s + np.ones(4)[h],
        "NumPy takes no traced values: .* jnp.asarray for arrays",
    ),
    "a function of NumPy": (
        lambda s, b, h, q, k: np.where(q < k, s, 0),
        r"bool\[\]\. NumPy takes .*: use jnp",
    ),
    "a row": (
        lambda s, b, h, q, k: s + jnp.sum(IDS.reshape(20, 2)[b]),
        r"may only be indexed down to scalars.*; got `reduce_sum` of an array of shape \(2,\)",
    ),
    "in a loop": (
        lambda s, b, h, q, k: jax.lax.fori_loop(0, 3, lambda i, s: s + FLOATS[k + i], s),
        r"got `scan` of an array of shape \(40,\)\. Index it before the loop or branch",
    ),
    "by score": (
        lambda s, b, h, q, k: s + FLOATS[s.astype(int)],
        "by b, h, q_idx and kv_idx; got an index that depends on the score",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_says_what_was_expected(name):
    score_mod, text = MISTAKES[name]
    q = jnp.ones((1, 4, 2, 8))
    with pytest.raises(TypeError, match=text):
        flash_attention(q, q, q, score_mod=score_mod)


def test_kernels_name_the_operation_that_they_lack():
    q = jnp.ones((1, 4, 2, 8))

    def odd(score, b, h, q_idx, kv_idx):
        return jax.lax.erf(score)

    text = r"odd needs erf.*, which jax's Triton lowering does not know for tiles"
    with pytest.raises(NotImplementedError, match=text):
        flash_attention(q, q, q, score_mod=odd, implementation="triton")
    loop = lambda s, b, h, q, k: jax.lax.fori_loop(0, 3, lambda _, s: s * s, s)
    # the gradient does
    with pytest.raises(NotImplementedError, match=r"needs scan in reverse, which jax's Triton"):
        flash_attention(q, q, q, score_mod=loop, implementation="triton")
    x, cap = [q.astype(jnp.bfloat16)] * 3, scores.SoftCap(3.0)
    of_classic = dict(
        flash1="no gradients for the arrays", standard="needs the scores before score_mod"
    )
    for name, text in of_classic.items():
        with pytest.raises(NotImplementedError, match=text):
            flash_attention(*x, score_mod=cap, implementation=name)
    why_not = lambda score_mod: explain(*x, score_mod=score_mod).why_not["hopper"]
    assert re.search(
        r"odd needs .*\berf\b.*, which Mosaic GPU does not know for registers", why_not(odd)
    )
    assert "needs scan," in why_not(
        lambda s, b, h, q, k: jax.lax.fori_loop(0, 3, lambda _, s: 2 * s, s)
    )
    assert "needs fmod," in why_not(lambda s, b, h, q, k: s % 2.0)
    assert "registers" not in why_not(
        lambda s, b, h, q, k: scores.Alibi((0.5, 2.0))(jnp.tanh(s), b, h, q, k)
    )


def test_a_score_mod_is_refused_on_no_mesh_that_is_not_refused_elsewhere():
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",))):
        score_mod = lambda s, b, h, q, k: jnp.maximum(s, abs(s) / 2)
        x = [jax.ShapeDtypeStruct((1, 4, 2, 8), jnp.float32)] * 3
        assert explain(*x, score_mod=score_mod, implementation="triton").implementation == "triton"
