"""The forms that arguments may have, and what `explain` says of a call."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from check import equal, value_and_gradients

from pallas_flash import explain, flash_attention, masks, paged_attention
from pallas_flash.attention import normalised
from pallas_flash.choose import implementations
from pallas_flash.jax_support import hardware
from pallas_flash.problem.call import Call, PagedCall

Q, K = (2, 5, 4, 8), (2, 7, 2, 8)


def _q(rng, shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def test_lists_numpy_numbers_and_single_flags_serve_as_arguments(rng):
    q, k = _q(rng, Q), _q(rng, K)
    bias = [[0.5] * 7] * 5
    expected = flash_attention(
        *(q, k, k, jnp.array(bias)),
        key_value_seq_lengths=jnp.array([3, 7]),
        is_causal=True,
        query_offset=2,
        local_window_size=3,
        scale=0.5,
    )
    for flag in (np.bool_(True), np.array(True), jnp.array(True)):
        actual = flash_attention(
            *(q.tolist(), np.asarray(k, np.float64), k, bias),
            key_value_seq_lengths=[3, 7],
            is_causal=flag,
            query_offset=np.int64(2),
            local_window_size=(np.int64(3), np.int8(3)),
            scale=np.float64(0.5),
        )
        np.testing.assert_array_equal(actual, expected)
    assert masks.Window(np.int64(3), np.int8(3)) == masks.Window(3, 3)
    assert jax.tree.leaves(masks.Window(np.int64(3), None)) == []


def test_what_has_a_jax_array_serves_as_one_as_in_jax_nn(rng):
    class Wrapped:
        def __init__(self, x):
            self.x = x

        def __jax_array__(self):
            return self.x

    def run(attend):
        def wrapped(q, k, bias):
            lengths = Wrapped(jnp.array([3, 7]))
            return attend(*map(Wrapped, (q, k, k, bias)), key_value_seq_lengths=lengths)

        return value_and_gradients(wrapped)(q, k, bias)

    q, k, bias = _q(rng, Q), _q(rng, (2, 7, 4, 8)), _q(rng, (4, 5, 7))
    equal(run(flash_attention), run(jax.nn.dot_product_attention))
    assert str(explain(Wrapped(q), Wrapped(k), Wrapped(k))) == str(explain(q, k, k))


def test_a_query_without_batch_axes_takes_bias_mask_and_lengths_of_a_batch_of_one(rng):
    q, k = _q(rng, Q[1:]), _q(rng, K[1:])
    bias, mask, ids = _q(rng, (1, 4, 5, 7)), rng.random((1, 1, 5, 7)) < 0.7, np.zeros((1, 5), int)
    key_ids = np.arange(7)[None] % 2
    ints = dict(
        key_value_seq_lengths=jnp.array([6]), query_segment_ids=ids, key_value_segment_ids=key_ids
    )
    expected = flash_attention(q[None], k[None], k[None], bias, mask, **ints)[0]
    np.testing.assert_array_equal(flash_attention(q, k, k, bias, mask, **ints), expected)
    ints = {name: x[0] for name, x in ints.items()}
    np.testing.assert_array_equal(flash_attention(q, k, k, bias[0], mask[0], **ints), expected)


def test_a_window_may_have_a_limit_on_one_side_alone():
    x = jnp.ones((1, 9, 2, 8))
    asked = lambda **kw: normalised(x, x, x, **kw)[0]
    assert asked(local_window_size=(None, 0)) == asked(is_causal=True)
    assert asked(local_window_size=(None, None)) == asked()


def test_an_integer_bias_is_added_as_jax_nn_adds_it(rng):
    q, k, bias = _q(rng, Q), _q(rng, (2, 7, 4, 8)), rng.integers(-3, 3, (1, 4, 5, 7))
    np.testing.assert_allclose(
        flash_attention(q, k, k, bias), jax.nn.dot_product_attention(q, k, k, bias), atol=1e-6
    )


def test_a_scale_of_any_sign_may_be_traced_and_learned_one_for_all_or_one_for_each_head(rng):
    q, k = _q(rng, Q), _q(rng, K)
    lengths = jnp.array([3, 5])
    padded = q.at[0, 3:].set(jnp.nan)  # has no part in the gradient of the scale
    attend = lambda q, scale: flash_attention(
        q, k, k, scale=scale, is_causal=True, query_seq_lengths=lengths
    )

    def by_hand(q, scale):
        return attend(q * scale.reshape(-1, 1), 1.0)

    for scale in jnp.array(0.7), jnp.array([0.7, -0.3, 0.0, 1.5]):
        o, (dq, dscale) = value_and_gradients(attend, (0, 1))(padded, scale)
        expected, (dq_by_hand, dscale_by_hand) = value_and_gradients(by_hand, (0, 1))(q, scale)
        np.testing.assert_allclose(o, expected, atol=1e-6)
        np.testing.assert_allclose(dq, dq_by_hand, atol=1e-6)
        np.testing.assert_allclose(dscale, dscale_by_hand, atol=1e-5)


def test_arrays_are_data_and_one_program_serves_every_value():
    problem = lambda **kw: (
        explain(jnp.ones(Q), jnp.ones(K), jnp.ones(K), is_causal=True, **kw).problem
    )
    for name, values in dict(query_offset=(3, 4), scale=(0.5, -0.5)).items():
        a, b = (problem(**{name: jnp.asarray(x)}) for x in values)
        assert a == b and hash(a) == hash(b)
        assert problem(**{name: abs(values[0])}) != problem(**{name: abs(values[1]) + 1})


def test_names_of_jax_nn_choose_and_explain_says_so():
    q, k = jnp.ones(Q), jnp.ones(K)
    for name in ("xla", "cudnn"):
        text, expected = explain(q, k, k, implementation=name), explain(q, k, k)
        assert text.implementation == expected.implementation and text.why_not == expected.why_not
        assert f"chosen: {name!r} is a name of jax.nn, and chooses as None does" in str(text)
        np.testing.assert_array_equal(
            flash_attention(q, k, k, implementation=name), flash_attention(q, k, k)
        )


def test_kernels_say_that_they_take_no_float64_and_no_mask_that_jax_cannot_index():
    shapes = lambda T, dtype: [jax.ShapeDtypeStruct((1, T, 1, 8), dtype)] * 3
    with jax.enable_x64(True):
        assert (
            explain(*shapes(5, "float64")).why_not["triton"]
            == "the kernels sum in float32; got float64"
        )
    T = 2**16
    for queries, reason in (
        (2**15, None),
        (2**15 + 1, "indexes a dense mask of 2^31 to 2^32 elements by an int32"),
    ):
        mask = jax.ShapeDtypeStruct((queries, T), bool)
        q = jax.ShapeDtypeStruct((1, queries, 1, 8), jnp.float32)
        why_not = explain(q, *shapes(T, jnp.float32)[:2], mask=mask).why_not
        for name in ("triton", "flash1", "standard"):
            assert (reason in why_not[name]) if reason else ("indexes" not in why_not[name])


def test_explain_names_the_implementation_its_tiles_and_why_not_the_others():
    shapes = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in (Q, K, K)]
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    text = explain(*shapes, is_causal=True, key_value_seq_lengths=lengths, implementation="triton")
    assert text.implementation == "triton"
    assert set(text.why_not) == {*implementations.names()} - {"triton"}
    lines = str(text).splitlines()
    assert lines[0].startswith(
        "call            B=2 T=5 S=7 N=4 K=2 H=8 Hv=8 bfloat16, mask: causal, key lengths, scale "
        "0.3536"
    )
    assert lines[2].startswith("tiles           forward 16 x 16, 4 warps")
    assert "not blockwise   triton was selected by name" in lines


@pytest.mark.parametrize(
    "block, implementation, said",
    [
        (
            1,
            "blockwise",
            "tiles           lists of 3 keys, gathered, 5 queries at a time, in float32",
        ),
        (
            1,
            "blockwise",
            "not triton      it takes lists as a table of blocks, with block * query_bl",
        ),
        (
            64,
            "triton",
            "lists           a table: each names up to 2 of 2 blocks, and those that none",
        ),
    ],
)
def test_explain_says_what_becomes_of_lists_of_keys(block, implementation, said):
    q, k = jnp.ones(Q), jnp.ones((2, 100, 2, 8))
    lists = masks.KeyLists(np.zeros((5, 1, 3), np.int32), block)
    text = str(explain(q, k, k, mask=lists, implementation=implementation))
    assert f"\n{said}" in text


def test_an_old_gpu_is_told_what_is_needed(monkeypatch):
    q, k = jnp.ones(Q), jnp.ones(K)
    monkeypatch.setattr(hardware, "compute_capability", lambda: 7.5)
    with pytest.raises(
        NotImplementedError,
        match=r"need an NVIDIA GPU of compute capability 8\.0 or higher; this one has 7\.5",
    ):
        flash_attention(q, k, k, implementation="triton")
    assert "7.5" in explain(q, k, k).why_not["triton"]


def test_a_call_has_a_field_for_each_argument_with_its_default():
    signature = inspect.signature(flash_attention).parameters
    default = lambda parameter: None if parameter.default is parameter.empty else parameter.default
    arguments = {name: default(parameter) for name, parameter in signature.items()}
    del arguments["return_residual"]
    fields = {field.name: field.default for field in dataclasses.fields(Call)}
    assert list(fields)[: len(arguments)] == list(arguments)
    assert {name: fields[name] for name in arguments} == arguments
    paged = {*inspect.signature(paged_attention).parameters} - {"return_residual"}
    assert paged <= {field.name for field in dataclasses.fields(PagedCall)}
