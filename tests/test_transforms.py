"""The function under JAX's transformations, on every implementation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Sizes, bias, dense_mask, qkv
from check import close
from jax import export

from pallas_flash import flash_attention, masks

pytestmark = pytest.mark.usefixtures("small_tiles", "quick_compile")
Z = Sizes(T=19, S=23, N=2, K=1, H=8, Hv=8)


def attend(implementation, **kw):
    return functools.partial(flash_attention, implementation=implementation, **kw)


def equal(a, b, tolerance=5e-6):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        close(x, y, tolerance)


def test_jit_and_eager_agree_and_value_and_grad_works(implementation, rng):
    q, k, v = qkv(rng, Z)
    f = lambda q, k, v: jnp.sum(attend(implementation, is_causal=True)(q, k, v) ** 2)
    equal(jax.value_and_grad(f, argnums=(0, 1, 2))(q, k, v), jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))(q, k, v))


@pytest.mark.parametrize("axes", [(0, 0, 0), (3, 0, 1), (0, None, None), (None, 1, 2)], ids=str)
def test_vmap_over_any_axis_equals_a_loop_with_gradients(axes, implementation, rng):
    moved = lambda x, axis: x if axis is None else np.moveaxis(np.stack([x, x[::-1] + 0.5]), 0, axis)
    q, k, v = (moved(x, axis) for x, axis in zip(qkv(rng, Z), axes, strict=True))
    lengths = np.array([[9, 23], [17, 2]], np.int32)

    def f(q, k, v, lengths):
        attention = attend(implementation, is_causal=True, query_offset=4, key_value_seq_lengths=lengths)
        return jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(attention(*x))), argnums=(0, 1, 2))(q, k, v)

    actual = jax.jit(jax.vmap(f, in_axes=(*axes, 0)))(q, k, v, lengths)
    pick = lambda x, axis, i: x if axis is None else np.take(x, i, axis)
    for i in range(2):
        alone = f(*(pick(x, axis, i) for x, axis in zip((q, k, v), axes, strict=True)), lengths[i])
        equal(jax.tree.map(lambda x, i=i: x[i], actual), alone)


def test_vmap_over_documents_bias_and_mask_equals_a_loop(implementation, rng):
    q, k, v = qkv(rng, Z)
    ids = np.sort(rng.integers(0, 3, (2, Z.B, Z.T))).astype(np.int32)
    key_ids = np.sort(rng.integers(0, 3, (2, Z.B, Z.S))).astype(np.int32)
    biases, masks = (np.stack([f(rng, "1NTS", Z) for _ in range(2)]) for f in (bias, dense_mask))

    def f(ids, key_ids, bias, mask):
        return attend(implementation, query_segment_ids=ids, key_value_segment_ids=key_ids)(q, k, v, bias, mask)

    actual = jax.jit(jax.vmap(f))(ids, key_ids, biases, masks)
    for i in range(2):
        equal(actual[i], f(ids[i], key_ids[i], biases[i], masks[i]))


def test_remat_by_name_keeps_output_and_lse_and_nothing_is_kept_without_names(implementation, rng, capsys):
    q, k, v = qkv(rng, Z)
    f = lambda q, k, v: jnp.sum(jnp.sin(attend(implementation)(jnp.tanh(q), k, v)))
    policy = jax.checkpoint_policies.save_only_these_names("flash_attention_out", "flash_attention_lse")
    kept, nothing = jax.checkpoint(f, policy=policy), jax.checkpoint(f)
    equal(*(jax.jit(jax.grad(g, argnums=(0, 1, 2)))(q, k, v) for g in (f, kept)))
    residuals = 2 if implementation == "reference" else 3  # of lse m and l
    for g, saved in (kept, residuals), (nothing, 0):
        jax.ad_checkpoint.print_saved_residuals(g, q, k, v)
        assert sum("from the argument" not in line for line in capsys.readouterr().out.splitlines()) == saved


def test_scan_over_layers_differentiates(implementation, rng):
    z = Z._replace(S=Z.T, K=Z.N)
    x, *_ = qkv(rng, z)

    def loop(x, scanned):
        layer = lambda x, _: (x + attend(implementation, is_causal=True)(x, x, x), None)
        if scanned:
            return jnp.sum(jax.lax.scan(layer, x, None, length=3)[0] ** 2)
        for _ in range(3):
            x, _ = layer(x, None)
        return jnp.sum(x**2)

    equal(*(jax.jit(jax.value_and_grad(functools.partial(loop, scanned=s)))(x) for s in (True, False)))


def test_abstract_shapes_go_through(implementation):
    q = jax.ShapeDtypeStruct((2, 37, 4, 16), jnp.bfloat16)
    o, lse = jax.eval_shape(attend(implementation, is_causal=True, return_residual=True), q, q, q)
    assert (o.shape, o.dtype, lse.shape, lse.dtype) == (q.shape, jnp.bfloat16, (2, 37, 4), jnp.float32)


def test_64_bits_and_strict_promotion_change_nothing(implementation, rng):
    q, k, v = qkv(rng, Z)
    ids = dict(
        query_segment_ids=np.arange(2 * Z.T).reshape(2, -1) % 2, key_value_segment_ids=np.arange(2 * Z.S).reshape(2, -1) % 3
    )
    kw = dict(local_window_size=9, query_offset=2, key_value_seq_lengths=[5, 23], mask=masks.PrefixLM(np.array([3, 9])), **ids)
    kw |= dict(bias=bias(rng, "1N1S", Z)) if implementation != "flash1" else {}
    kw |= dict(sinks=[0.5, -1.0], dropout_rate=0.1, dropout_rng=jax.random.key(0))
    f = lambda q, k, v: jnp.sum(jnp.sin(attend(implementation, **kw)(q, k, v)))
    expected = jax.grad(f, argnums=(0, 1, 2))(q, k, v)
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        actual = jax.grad(f, argnums=(0, 1, 2))(*(jnp.asarray(x) for x in (q, k, v)))
    assert {x.dtype for x in actual} == {jnp.dtype("float32")}
    equal(actual, expected)


@pytest.mark.parametrize("implementation", ["reference"])
def test_a_program_with_symbols_for_batch_and_length_serves_all_sizes(implementation, rng):
    def gradients(q, k, v, lengths, ids):
        more = dict(key_value_seq_lengths=lengths, query_segment_ids=ids, key_value_segment_ids=ids)
        more |= dict(is_causal=True, query_offset=k.shape[1] - q.shape[1], implementation=implementation)
        return jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(flash_attention(*x, **more))), argnums=(0, 1, 2))(q, k, v)

    b, t = export.symbolic_shape("b, t")
    shape = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)
    ints = shape(b, dtype=jnp.int32), shape(b, t, dtype=jnp.int32)
    program = export.export(jax.jit(gradients))(shape(b, t, Z.N, Z.H), *[shape(b, t, Z.K, Z.H)] * 2, *ints)
    for B, T in (2, 5), (1, 19):
        x = *qkv(rng, Z._replace(B=B, T=T, S=T)), np.full(B, 4, np.int32), np.arange(B * T, dtype=np.int32).reshape(B, T) // 3
        equal(program.call(*x), gradients(*x))


def test_kernels_say_that_they_need_known_sizes():
    b, t = export.symbolic_shape("b, t")
    q = jax.ShapeDtypeStruct((b, t, 2, 8), jnp.float32)
    f = lambda q: flash_attention(q, q, q, implementation="portable")
    with pytest.raises(NotImplementedError, match="a kernel's grid is made of known sizes; got b, t, t"):
        jax.eval_shape(f, q)


def test_derivatives_that_are_not_there_raise(implementation, rng):
    q, k, v = qkv(rng, Z)
    f = lambda q: jnp.sum(attend(implementation)(q, k, v) ** 2)
    with pytest.raises(TypeError, match=r"can't apply forward-mode .*\(jvp\) to a custom_vjp function"):
        jax.jvp(f, (q,), (q,))
    second = lambda: jax.grad(lambda q: jnp.sum(jax.grad(f)(q) ** 2))(q)
    if implementation == "reference":
        assert np.all(np.isfinite(second()))
        return
    with pytest.raises(NotImplementedError, match="first derivatives alone"):
        second()
