"""A bias or mask that broadcasts over only some of several leading axes is read where it lies."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from check import equal, value_and_gradients
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import make_mesh
from selection import whole_but

from pallas_flash import attention_weights, explain, flash_attention, masks
from pallas_flash.context_parallel import Ring
from pallas_flash.tiled import blockwise

LEAD, T, N, K, H = (2, 3, 2), 19, 4, 2, 8


def arrays(rng, lead=LEAD):
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return [normal(*lead, T, heads, H) for heads in (N, K, K)], normal


def outputs_and_gradients(implementation, x, bias, **kw):
    every = dict(return_residual=True, return_max_logits=True, implementation=implementation)
    attend = functools.partial(flash_attention, **every, **kw)
    return value_and_gradients(attend, (0, 1, 2, 3))(*x, bias)


@pytest.mark.whole("triton")
@pytest.mark.parametrize("implementation", ["blockwise", "triton", "reference"])
@pytest.mark.parametrize("of_bias", [(2, 1, 1), (1, 3, 1), (3, 2), (2, 1, 2), (2, 3, 1), (1, 1, 2)])
def test_it_is_as_one_that_is_copied_to_all_and_the_gradient_has_its_shape(
    of_bias, implementation, rng
):
    (x, normal), of_mask = arrays(rng), (1, 3, 2)
    bias, mask = normal(*of_bias, N, T, T), normal(*of_mask, 1, T, T) < 1
    copied = jnp.broadcast_to(bias, (*LEAD, N, T, T)), jnp.broadcast_to(mask, (*LEAD, 1, T, T))
    found, gradients = outputs_and_gradients(implementation, x, bias, mask=mask)
    expected, of_copies = outputs_and_gradients("reference", x, copied[0], mask=copied[1])
    equal(found, expected)
    *of_x, of_bias = gradients
    lead = (1,) * (len(LEAD) - len(bias.shape) + 3) + bias.shape[:-3]
    summed = [axis for axis, n in enumerate(lead) if n == 1]
    equal(of_bias, of_copies[3].sum(summed, keepdims=True).reshape(bias.shape))
    equal(of_x, of_copies[:3])


def test_kernels_get_no_array_that_has_it_for_each_batch_row():
    x = jax.ShapeDtypeStruct((2, 3, T, N, H), jnp.float32)
    bias = jax.ShapeDtypeStruct((2, 1, N, T, T), jnp.float32)

    def gradients(q, k, v, bias):
        attend = lambda *x: flash_attention(*x, mask=bias > 0, implementation="triton")
        return jax.grad(lambda *x: attend(*x).sum(), (0, 3))(q, k, v, bias)

    printed = str(jax.make_jaxpr(gradients)(x, x, x, bias))
    assert f"[2,1,{N},{T},{T}]" in printed
    assert f"[2,3,{N},{T},{T}]" not in printed and f"[6,{N},{T},{T}]" not in printed


OTHERS = {
    "lengths": lambda B, rng: dict(key_value_seq_lengths=rng.integers(1, T, B).astype(np.int32)),
    "offsets": lambda B, rng: dict(
        query_offset=rng.integers(0, 5, B).astype(np.int32), is_causal=True
    ),
    "an offset in an array": lambda B, rng: dict(query_offset=jnp.int32(3), is_causal=True),
    "ids": lambda B, rng: dict(
        query_segment_ids=np.sort(rng.integers(0, 3, (*B, T))).astype(np.int32)
    ),
    "a mask of data": lambda B, rng: dict(
        mask=masks.PrefixLM(jnp.asarray(rng.integers(0, T, B), jnp.int32))
    ),
    "a rule by batch row": lambda B, rng: dict(
        mask=masks.MaskMod(lambda b, h, i, j: (i + j + b) % 4 > 0),
        score_mod=lambda s, b, h, i, j: s * (b + h),
    ),
    "dropout": lambda B, rng: dict(dropout_rate=0.3, dropout_rng=jax.random.key(1)),
    "sinks and a scale by head": lambda B, rng: dict(
        sinks=jnp.arange(N) * 0.5, scale=jnp.arange(N) / N
    ),
}


@pytest.mark.parametrize(
    "other", whole_but(OTHERS, "offsets", "ids", "a rule by batch row", "sinks and a scale by head")
)
def test_all_other_arguments_stay_with_their_batch_rows(other, rng):
    lead = (2, 3)
    (x, normal), kw = arrays(rng, lead), OTHERS[other](lead, rng)
    bias = normal(2, 1, N, T, T)
    found, gradients = outputs_and_gradients("blockwise", x, bias, **kw)
    copied = jnp.broadcast_to(bias, (*lead, N, T, T))
    expected, of_copies = outputs_and_gradients("blockwise", x, copied, **kw)
    equal(found, expected)
    equal(gradients[:3], of_copies[:3])
    equal(gradients[3], of_copies[3].sum(1, keepdims=True))


def test_it_has_second_derivatives_forward_mode_and_vmaps(rng):
    lead = (2, 3)
    (x, normal), (along, _) = arrays(rng, lead), arrays(rng, lead)
    bias = normal(2, 1, N, T, T)
    f = lambda q, k, v, b: jnp.sin(flash_attention(q, k, v, b, implementation="blockwise"))
    plain = lambda q, k, v, b: f(q, k, v, jnp.broadcast_to(b, (*lead, N, T, T)))
    for of in (
        lambda f: jax.jvp(f, (*x, bias), (*along, bias)),
        lambda f: jax.grad(lambda b: jnp.sum(jax.grad(lambda q: f(q, *x[1:], b).sum())(x[0]) ** 2))(
            bias
        ),
        lambda f: jax.vmap(f, (0, None, None, None))(jnp.stack([x[0], along[0]]), *x[1:], bias),
    ):
        equal(jax.jit(functools.partial(of, f))(), jax.jit(functools.partial(of, plain))())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh_its_axes_lie_where_those_of_the_query_do(kind, rng):
    mesh = make_mesh(kind, data=2, context=4)
    x, normal = arrays(rng, (2, 4))
    x, bias = [a[:, :, :16] for a in x], normal(2, 1, N, 16, 16)
    expected, of_copies = outputs_and_gradients("reference", x, bias)
    calls = [(P("data", "context"), P("data"), None)]
    if kind == AxisType.Explicit:
        calls.append(
            (P("data", None, "context"), P("data", None, None, "context"), Ring("context"))
        )
    for of_x, of_bias, scheme in calls:
        at = lambda axes, a: jax.device_put(a, NamedSharding(mesh, axes))
        with jax.set_mesh(mesh):
            on_mesh = [at(of_x, a) for a in x], at(of_bias, bias)
            found, gradients = outputs_and_gradients("blockwise", *on_mesh, context=scheme)
        equal(jax.device_get((found[1], gradients)), (expected[1], of_copies))


def test_explain_says_how_many_calls_there_are():
    x, bias = jax.ShapeDtypeStruct((*LEAD, T, N, H), "float32"), np.zeros((2, 1, 1, N, T, T))
    text = str(explain(x, x, x, bias))
    assert "B=6 " in text and "bias (1, 4, 19, 19)" in text and "2 of these: a bias" in text
    assert "of these" not in str(explain(x, x, x, bias[:1])) + str(explain(x, x, x))


def test_weights_have_it_too(rng):
    (q, k, _), normal = arrays(rng, (2, 3))
    bias = normal(2, 1, N, T, T)
    rows = np.array([1, 5])
    of = lambda bias: attention_weights(q, k, bias=bias, rows=rows)
    equal(of(bias), of(jnp.broadcast_to(bias, (2, 3, N, T, T))))


def test_errors_name_the_shapes_of_the_whole_call(rng):
    (q, k, v), normal = arrays(rng, (2, 3))
    bias = normal(2, 1, N, T, T)
    with pytest.raises(
        ValueError, match=r"key_value_seq_lengths must be int32 .* = \(2, 3\); got \(3,\)"
    ):
        flash_attention(q, k, v, bias, key_value_seq_lengths=np.ones(3, np.int32))
    with pytest.raises(ValueError, match=r"= \(2, 3, 4, 19, 19\); got \(2, 1, 4, 19, 18\)"):
        flash_attention(q, k, v, bias[..., :-1])


@pytest.mark.parametrize("with_gradient", [False, True])
def test_it_takes_no_more_memory_for_more_calls_that_share_nothing(with_gradient, monkeypatch):
    monkeypatch.setattr(blockwise.tuning, "_is_one_device", lambda: True)

    def temporaries(B):
        x = jax.ShapeDtypeStruct((B, 128, 128, 4, 16), jnp.float32)
        bias = jax.ShapeDtypeStruct((B, 1, 4, 128, 128), jnp.float32)
        run = functools.partial(flash_attention, implementation="blockwise")
        if with_gradient:
            run = jax.grad(lambda *x: flash_attention(*x).sum(), (0, 1, 2, 3))
        return jax.jit(run).lower(x, x, x, bias).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(2) < 1.5 * temporaries(1)
