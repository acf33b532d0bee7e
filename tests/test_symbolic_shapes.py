"""Programs of jax.export whose batch, lengths and numbers of sequences are symbols."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import normal, qkv
from check import value_and_gradients
from jax import export
from test_transforms import Z, attend, equal

from pallas_flash import flash_attention, masks

pytestmark = pytest.mark.usefixtures("small_tiles")


def exported(f, *shapes):
    """A program for arrays of these shapes, in which letters are symbols, and dtypes."""
    scope = export.SymbolicScope()
    of = lambda shape, dtype: jax.ShapeDtypeStruct(export.symbolic_shape(shape, scope=scope), dtype)
    return export.export(jax.jit(f))(*(of(shape, dtype) for shape, dtype in shapes)).call


def serves(f, x, *shapes):
    """The program of f for arrays of these shapes gives for x what f gives."""
    equal(exported(f, *shapes)(*x), f(*x))


def of_qkv(b, t, s):
    """The shapes of Z's query, key and value with these symbols."""
    return [
        (f"{b}, {length}, {n}, {Z.H}", "float32") for length, n in ((t, Z.N), (s, Z.K), (s, Z.K))
    ]


@pytest.mark.whole("reference")
@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_a_program_with_symbols_for_batch_and_length_serves_all_sizes(implementation, rng):
    def gradients(q, k, v, lengths, ids):
        more = dict(key_value_seq_lengths=lengths, query_segment_ids=ids, key_value_segment_ids=ids)
        more |= dict(is_causal=True, query_offset=k.shape[1] - q.shape[1])
        return value_and_gradients(attend(implementation, **more))(q, k, v)

    program = exported(gradients, *of_qkv("b", "t", "t"), ("b", "int32"), ("b, t", "int32"))
    for B, T in (2, 5), (1, 19):
        ids = np.arange(B * T, dtype=np.int32).reshape(B, T) // 3
        x = *qkv(rng, Z._replace(B=B, T=T, S=T)), np.full(B, 4, np.int32), ids
        equal(program(*x), gradients(*x))


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_a_program_with_symbols_needs_no_mask(implementation, rng):
    every = None, masks.Window(np.array(3), 4), masks.MaskMod(lambda b, h, q, k: k % 3 > 0)
    f = lambda *x: sum(jnp.sin(attend(implementation, mask=mask)(*x)) for mask in every)
    gradients = value_and_gradients(f, 0)
    x = qkv(rng, Z._replace(B=1, T=5, S=7))
    serves(gradients, x, *of_qkv(1, "t", "s"))


@pytest.mark.whole
def test_a_program_with_symbols_has_scores(rng):
    def attention(q, k, v, table):
        rule = lambda s, b, h, q, k: jnp.tanh(s * table[0, 0]) + table[h][k % 23] * b
        return attend("blockwise", is_causal=True, score_mod=rule)(q, k, v)

    gradients = value_and_gradients(attention, (0, 3))
    x = *qkv(rng, Z._replace(S=Z.T)), normal(rng, Z.N, 23)
    serves(gradients, x, *of_qkv("b", "t", "t"), (f"{Z.N}, 23", "float32"))


@pytest.mark.parametrize("block, query_block", [(64, 1), (8, 8), (1, 1)])
@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_a_program_with_symbols_takes_lists_of_keys(implementation, block, query_block, rng):
    def gradients(q, k, v, indices):
        lists = masks.KeyLists(indices, block, query_block)
        return value_and_gradients(attend(implementation, mask=lists, is_causal=True))(q, k, v)

    indices = rng.integers(-1, 4, (2, 16 // query_block, 1, 3)).astype(np.int32)
    x = *qkv(rng, Z._replace(B=2, T=16)), indices
    serves(gradients, x, *of_qkv("b", f"{query_block}*t", "s"), ("b, t, 1, 3", "int32"))


def test_a_program_serves_any_number_of_sequences(rng):
    f = lambda *x: attend("blockwise", mask=masks.Varlen(*x[3:]), is_causal=True)(*x[:3])
    program = exported(f, *of_qkv(1, "t", "s"), *[("n", "int32")] * 2)
    x = qkv(rng, Z._replace(B=1, T=5, S=7))
    for ends in [([0, 5], [0, 6]), ([0, 2, 2, 4], [0, 3, 4, 7])]:
        ends = [np.array(each, np.int32) for each in ends]
        equal(program(*x, *ends), f(*x, *ends))


@pytest.mark.parametrize("of_bias", ["b, 1", "1, r"])
def test_leading_axes_that_share_a_bias_may_be_symbols(of_bias, rng):
    gradients = value_and_gradients(attend("blockwise"), (0, 3))
    shapes = [(f"b, r, t, {n}, {Z.H}", "float32") for n in (Z.N, Z.K, Z.K)]
    shapes.append((f"{of_bias}, {Z.N}, t, t", "float32"))
    q, k, v = qkv(rng, Z._replace(B=6, T=5, S=5))
    x = [a.reshape(2, 3, *a.shape[1:]) for a in (q, k, v)]
    lead = (2, 1) if of_bias == "b, 1" else (1, 3)
    x.append(normal(rng, *lead, Z.N, 5, 5))
    serves(gradients, x, *shapes)


def test_heads_are_no_symbols():
    n, q = export.symbolic_shape("n")[0], jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match=r"head counts and head sizes must be static; .* got n\."):
        k = jax.ShapeDtypeStruct((1, 4, n, 8), jnp.float32)
        jax.eval_shape(lambda k, q: flash_attention(k, q, q), k, q[:, :, :1])


def test_kernels_say_that_they_need_known_sizes():
    b, t = export.symbolic_shape("b, t")
    q = jax.ShapeDtypeStruct((b, t, 2, 8), jnp.float32)
    f = lambda q: flash_attention(q, q, q, implementation="triton")
    with pytest.raises(
        NotImplementedError,
        match="a kernel's grid must be static; got the symbolic dimensions b, t, t",
    ):
        jax.eval_shape(f, q)
