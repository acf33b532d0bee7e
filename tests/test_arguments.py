"""What a user may get wrong: each mistake has its error, which says what was expected and what
came."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import checks, explain, flash_attention, masks, paged_attention
from pallas_flash.attention import normalised
from pallas_flash.call import Call, PagedCall
from pallas_flash.kernels import device

Q, K = (2, 5, 4, 8), (2, 7, 2, 8)


def call(query=Q, key=K, value=K, dtype="float32", **kw):
    q, k, v = (jnp.ones(x, dtype) if isinstance(x, tuple) else x for x in (query, key, value))
    return flash_attention(q, k, v, **kw)


ones = jnp.ones
SEQUENCES = np.array([[0, 3, 5]] * 2)
VARLEN = masks.Varlen(SEQUENCES, SEQUENCES + 2)
BAD = {
    "not an array": (dict(query=None), TypeError, "query must be an array; got NoneType"),
    "integers": (
        dict(dtype="int32"),
        TypeError,
        "query must be float32, bfloat16, float16 or float64; got int32. Cast it",
    ),
    "mixed dtypes": (
        dict(value=ones(K, "bfloat16")),
        TypeError,
        "one dtype; got query float32 and value bfloat16",
    ),
    "rank 2": (
        dict(query=(4, 8), key=(4, 8), value=(4, 8)),
        ValueError,
        r"3 axes or more; got \(4, 8\)",
    ),
    "ranks differ": (
        dict(key=K[1:]),
        ValueError,
        r"key must have as many axes as query \(.*\); got \(7, 2, 8\)",
    ),
    "head sizes differ": (
        dict(key=(2, 7, 2, 9)),
        ValueError,
        r"key must be \(2, S, K, 8\) to match query",
    ),
    "batches differ": (
        dict(key=(3, 7, 2, 8)),
        ValueError,
        r"key must be \(2, S, K, 8\) to match query",
    ),
    "value length": (
        dict(value=(2, 6, 2, 8)),
        ValueError,
        r"value must be \(2, 7, 2, Hv\) to match key",
    ),
    "value heads": (
        dict(value=(2, 7, 4, 8)),
        ValueError,
        r"value must be \(2, 7, 2, Hv\) to match key",
    ),
    "groups": (
        dict(key=(2, 7, 3, 8), value=(2, 7, 3, 8)),
        ValueError,
        "multiple of the number of key/value heads; got N = 4, K = 3",
    ),
    "bias shape": (
        dict(bias=ones((2, 4, 5, 6))),
        ValueError,
        r"bias must be broadcastable to .* = \(2, 4, 5, 7\); got",
    ),
    "bias rank": (dict(bias=ones((1, 2, 4, 5, 7))), ValueError, "bias must be broadcastable"),
    "bool bias": (
        dict(bias=ones((5, 7), bool)),
        TypeError,
        "bias must be real numbers.*Pass a bool array as mask",
    ),
    "bias text": (dict(bias="alibi"), TypeError, "bias must be an array; got the text 'alibi'"),
    "mask of keys": (
        dict(mask=ones((2, 7), bool)),
        ValueError,
        r"got \(2, 7\). .* padding does, pass x\[..., None, None, :\]",
    ),
    "mask of pairs": (
        dict(mask=ones((2, 5, 7), bool)),
        ValueError,
        r"got \(2, 5, 7\). .* heads, pass x\[..., None, :, :\]",
    ),
    "mask shape": (dict(mask=ones((2, 3, 5, 7), bool)), ValueError, "mask must be broadcastable"),
    "int mask": (
        dict(mask=ones((5, 7), int)),
        TypeError,
        "mask must be bool .* got int32.* mask=x != 0",
    ),
    "additive mask": (
        dict(mask=-1e9 * ones((5, 7))),
        TypeError,
        "mask must be bool .* got float32.* as bias, or as mask=x > -1",
    ),
    "mask string": (
        dict(mask="causal"),
        TypeError,
        "mask must be an array or a pallas_flash.masks object; got the text 'causal'",
    ),
    "mask rule": (
        dict(mask=lambda b, h, q, k: q >= k),
        TypeError,
        r"mask must be an array or .* a mask_mod as masks.MaskMod\(function\)",
    ),
    "mask not made": (
        dict(mask=masks.Causal),
        TypeError,
        r"got function. .* an instance of a mask, such as masks.Causal\(\)",
    ),
    "mask tuple": (
        dict(mask=(masks.Causal(), masks.Window(3, 0))),
        TypeError,
        "mask must be an array or .* cannot convert this tuple",
    ),
    "ragged bias": (
        dict(bias=[[0.0, 1.0], [2.0]]),
        TypeError,
        "bias must be an array; cannot convert this list",
    ),
    "key lengths shape": (
        dict(key_value_seq_lengths=ones(3, int)),
        ValueError,
        r"key_value_seq_lengths must be int32 \[B\]",
    ),
    "key lengths dtype": (
        dict(key_value_seq_lengths=ones(2)),
        TypeError,
        "key_value_seq_lengths must be integers; got float",
    ),
    "no offset": (
        dict(query_offset=None),
        TypeError,
        "query_offset must be integers; got NoneType",
    ),
    "query lengths shape": (
        dict(query_seq_lengths=3),
        ValueError,
        r"query_seq_lengths must be int32 \[B\] = \(2,\); got \(\)",
    ),
    "window negative": (
        dict(local_window_size=-1),
        ValueError,
        "local_window_size must be a static int or",
    ),
    "window of -1": (
        dict(local_window_size=(-1, 0)),
        ValueError,
        r"or None for no limit; got \(-1, 0\)",
    ),
    "window of three": (
        dict(local_window_size=(1, 2, 3)),
        ValueError,
        "local_window_size must be a static int or",
    ),
    "window of floats": (
        dict(local_window_size=(1.0, 2)),
        ValueError,
        "local_window_size must be a static int or",
    ),
    "window beyond int32": (
        dict(local_window_size=2**31),
        ValueError,
        "from 0 to 2147483647 .* got 2147483648",
    ),
    "offset float": (
        dict(query_offset=1.5),
        TypeError,
        "query_offset must be integers; got float64",
    ),
    "offset bool": (dict(query_offset=True), TypeError, "query_offset must be integers; got bool"),
    "offset beyond int32": (
        dict(query_offset=-(2**31) - 1),
        ValueError,
        "query_offset must fit into int32; got -2147483649",
    ),
    "lengths beyond int32": (
        dict(key_value_seq_lengths=[3, 2**32]),
        ValueError,
        "key_value_seq_lengths must fit .* got 4294967296",
    ),
    "offset shape": (
        dict(query_offset=ones(3, int)),
        ValueError,
        r"query_offset must be int32 \[B\] = \(2,\)",
    ),
    "ids without keys": (
        dict(query_segment_ids=ones((2, 5), int)),
        ValueError,
        "Pass key_value_segment_ids too",
    ),
    "ids without queries": (
        dict(key_value_segment_ids=ones((2, 7), int)),
        ValueError,
        "needs query_segment_ids",
    ),
    "ids shape": (
        dict(query_segment_ids=ones((2, 7), int), key_value_segment_ids=ones((2, 7), int)),
        ValueError,
        r"query_segment_ids must be int32 \[B, T\] = \(2, 5\); got \(2, 7\)",
    ),
    "two sets of ids": (
        dict(
            mask=masks.Documents(ones((2, 5), int), ones((2, 7), int))
            & masks.Documents(ones((2, 5), int), ones((2, 7), int))
        ),
        ValueError,
        "one set of document ids",
    ),
    "mask object's shape": (
        dict(mask=masks.KeyLengths(ones(5, int))),
        ValueError,
        r"KeyLengths.lengths must be int32 \[B\]",
    ),
    "varlen's ends": (
        dict(mask=masks.Varlen([0, 3, 5])),
        ValueError,
        r"Varlen.cu_seqlens_q must be int32 \[B, C\] = \(2, 3\); got",
    ),
    "mask without its array": (
        dict(mask=masks.PrefixLM(None)),
        TypeError,
        "PrefixLM.prefix must be integers; got NoneType",
    ),
    "varlen without ends": (
        dict(mask=masks.Varlen(None)),
        TypeError,
        "Varlen.cu_seqlens_q must be integers; got NoneType",
    ),
    "varlen's other ends": (
        dict(mask=masks.Varlen(SEQUENCES, SEQUENCES[:, 1:])),
        ValueError,
        "as many ends of queries as of keys",
    ),
    "varlen and an offset": (
        dict(mask=VARLEN, query_offset=2),
        ValueError,
        "already fixes query positions; it cannot be combined with query_offset",
    ),
    "varlen and a score": (
        dict(mask=VARLEN, score_mod=lambda s, b, h, q, k: s + q),
        ValueError,
        "q_idx counts from one query_offset. Varlen.cu_seqlens_q. alone can",
    ),
    "causal number": (dict(is_causal=1), TypeError, "is_causal must be a static bool"),
    "scale nan": (dict(scale=float("nan")), ValueError, "scale must be a finite number; got nan"),
    "scale text": (
        dict(scale="0.25"),
        TypeError,
        "scale must be a static number, or an array; got the text '0.25'",
    ),
    "scale shape": (
        dict(scale=ones(2)),
        ValueError,
        r"one for each query head, \[N\] = \(4,\); got float32 \(2,\)",
    ),
    "soft cap text": (
        dict(logits_soft_cap="30"),
        TypeError,
        "logits_soft_cap must be a static number; got the text",
    ),
    "soft cap zero": (
        dict(logits_soft_cap=0.0),
        ValueError,
        "logits_soft_cap must be a finite number above 0, or None; got 0.0",
    ),
    "implementation": (
        dict(implementation="portable"),
        ValueError,
        "reference, flash1, standard, or jax.nn's xla .* got 'portable'",
    ),
    "heads before length": (
        dict(query=(2, 4, 5, 8), key=(2, 2, 7, 8), value=(2, 2, 7, 8)),
        ValueError,
        r"got N = 5, K = 7. Do the heads come before the length\? Here they come after it: "
        r"jnp.swapaxes\(x, -3, -2\)",
    ),
    "mask of heads before length": (
        dict(
            query=(2, 4, 5, 8), key=(2, 2, 5, 8), value=(2, 2, 5, 8), mask=ones((2, 1, 5, 5), bool)
        ),
        ValueError,
        r"got \(2, 1, 5, 5\). Do the heads come before the length",
    ),
    "head of 257": (
        dict(query=(1, 3, 1, 257), key=(1, 3, 1, 257), value=(1, 3, 1, 8), implementation="triton"),
        NotImplementedError,
        "'triton' cannot run this call: head sizes above 256 .* H = 257",
    ),
    "nothing to tile": (
        dict(key=(2, 0, 2, 8), value=(2, 0, 2, 8), implementation="blockwise"),
        NotImplementedError,
        "'blockwise' cannot run this call: S = 0: there is nothing to tile",
    ),
    "sinks by key head": (
        dict(sinks=ones(2)),
        ValueError,
        r"one for each query head, \[N\] = \(4,\); got float32 \(2,\)",
    ),
    "a number for sinks": (
        dict(sinks=0.5),
        ValueError,
        r"sinks must be real numbers, .* got float32 \(\)",
    ),
    "bool sinks": (
        dict(sinks=ones(4, bool)),
        ValueError,
        "sinks must be real numbers, .* got bool",
    ),
    "dropout without a key": (
        dict(dropout_rate=0.1),
        ValueError,
        r"dropout_rate above 0 needs dropout_rng, a key",
    ),
    "dropout of all": (
        dict(dropout_rate=1.0, dropout_rng=jax.random.key(0)),
        ValueError,
        "dropout_rate must be at least 0 and below 1; got 1.0",
    ),
    "a seed for a key": (
        dict(dropout_rate=0.1, dropout_rng=0),
        TypeError,
        r"dropout_rng must be one key of jax.random, such as jax.random.key\(0\); got int",
    ),
    "several keys": (
        dict(dropout_rate=0.1, dropout_rng=jax.random.split(jax.random.key(0))),
        TypeError,
        r"dropout_rng must be one key .* got key<fry> \(2,\)",
    ),
    "a traced order": (
        dict(deterministic=1),
        TypeError,
        "deterministic must be a static bool, True or False; got int",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_has_a_clear_error(name):
    kw, error, text = BAD[name]
    with pytest.raises(error, match=text):
        call(**kw)


def test_a_mistake_is_found_before_anything_is_computed():
    shapes = [jax.ShapeDtypeStruct(x, jnp.float32) for x in (Q, K, K)]
    with pytest.raises(ValueError, match="mask must be broadcastable"):
        jax.eval_shape(lambda *x: flash_attention(*x, mask=ones((3, 3), bool)), *shapes)


def test_a_bad_window_object_says_what_a_window_is():
    with pytest.raises(
        ValueError,
        match=r"a window is \(left, right\), each an int from 0 to 2147483647 or None; got \(-1, "
        r"None\)",
    ):
        masks.Window(-1)


@pytest.mark.parametrize(
    "name",
    [
        "is_causal",
        "return_residual",
        "deterministic",
        "local_window_size",
        "logits_soft_cap",
        "dropout_rate",
    ],
)
def test_what_belongs_to_the_program_cannot_be_traced_and_says_how_to_name_it(name):
    value = 3 if name in ("local_window_size", "logits_soft_cap") else True
    with pytest.raises(
        (TypeError, ValueError),
        match=f"must be a static .*; got a traced array .*static_argnames='{name}'",
    ):
        jax.jit(flash_attention)(ones(Q), ones(K), ones(K), **{name: value})


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
    assert jax.tree.leaves(masks.Window(np.int64(3))) == []


def test_what_has_a_jax_array_serves_as_one_as_in_jax_nn(rng):
    class Wrapped:
        def __init__(self, x):
            self.x = x

        def __jax_array__(self):
            return self.x

    def gradients(attend, wrap):
        def loss(q, k, bias):
            lengths = wrap(jnp.array([3, 7]))
            return jnp.sum(
                jnp.sin(
                    attend(wrap(q), wrap(k), wrap(k), wrap(bias), key_value_seq_lengths=lengths)
                )
            )

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, bias)

    q, k, bias = _q(rng, Q), _q(rng, (2, 7, 4, 8)), _q(rng, (4, 5, 7))
    for a, b in zip(
        gradients(flash_attention, Wrapped),
        gradients(jax.nn.dot_product_attention, Wrapped),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, atol=1e-5)
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


@pytest.mark.parametrize(
    "dtype, sums", [("float64", "float64"), ("float32", "float32"), ("bfloat16", "float32")]
)
def test_what_sums_are_in_is_the_same_for_a_dtype_and_its_name(dtype, sums):
    assert checks.sums(dtype) == checks.sums(jnp.dtype(dtype)) == getattr(jnp, sums)


def test_a_window_may_have_a_limit_on_one_side_alone():
    x = ones((1, 9, 2, 8))
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
    attend = lambda q, scale: jnp.sum(
        jnp.sin(flash_attention(q, k, k, scale=scale, is_causal=True, query_seq_lengths=lengths))
    )

    def by_hand(q, scale):
        return attend(q * scale.reshape(-1, 1), 1.0)

    for scale in jnp.array(0.7), jnp.array([0.7, -0.3, 0.0, 1.5]):
        value, (dq, dscale) = jax.jit(jax.value_and_grad(attend, argnums=(0, 1)))(padded, scale)
        expected, (dq_by_hand, dscale_by_hand) = jax.value_and_grad(by_hand, argnums=(0, 1))(
            q, scale
        )
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        np.testing.assert_allclose(dq, dq_by_hand, atol=1e-6)
        np.testing.assert_allclose(dscale, dscale_by_hand, atol=1e-5)


def test_arrays_are_data_and_one_program_serves_every_value():
    problem = lambda **kw: explain(ones(Q), ones(K), ones(K), is_causal=True, **kw).problem
    for name, values in dict(query_offset=(3, 4), scale=(0.5, -0.5)).items():
        a, b = (problem(**{name: jnp.asarray(x)}) for x in values)
        assert a == b and hash(a) == hash(b)
        assert problem(**{name: abs(values[0])}) != problem(**{name: abs(values[1]) + 1})


def test_names_of_jax_nn_choose_and_explain_says_so():
    q, k = ones(Q), ones(K)
    for name in ("xla", "cudnn"):
        text = explain(q, k, k, implementation=name)
        assert (
            text.implementation == explain(q, k, k).implementation
            and text.why_not == explain(q, k, k).why_not
        )
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
    assert text.implementation == "triton" and set(text.why_not) == {
        "hopper",
        "blockwise",
        "reference",
        "flash1",
        "standard",
    }
    lines = str(text).splitlines()
    assert lines[0].startswith(
        "call            B=2 T=5 S=7 N=4 K=2 H=8 Hv=8 bfloat16, mask: causal, key lengths, scale "
        "0.3536"
    )
    assert lines[1] == "implementation  triton"
    assert lines[2].startswith("tiles           forward 16 x 16, 4 warps")
    assert lines[4] == "not blockwise   triton was selected by name"


def test_without_a_gpu_blockwise_is_chosen_and_explain_says_why():
    text = explain(jnp.ones(Q), jnp.ones(K), jnp.ones(K))
    assert text.implementation == "blockwise"
    assert (
        text.why_not["triton"]
        == "the call is not for a GPU: it would run in Pallas' interpreter, slowly"
    )
    assert text.why_not["reference"] == "blockwise comes before it"


def test_an_old_gpu_is_told_what_is_needed(monkeypatch):
    monkeypatch.setattr(device, "compute_capability", lambda: 7.5)
    with pytest.raises(
        NotImplementedError,
        match=r"need an NVIDIA GPU of compute capability 8\.0 or higher; this one has 7\.5",
    ):
        call(implementation="triton")
    assert "7.5" in explain(jnp.ones(Q), jnp.ones(K), jnp.ones(K)).why_not["triton"]


def test_explain_has_the_errors_of_the_call():
    with pytest.raises(ValueError, match="sinks must be"):
        explain(jnp.ones(Q), jnp.ones(K), jnp.ones(K), sinks=jnp.ones(5))
    with pytest.raises(TypeError, match="unexpected keyword argument 'causal'"):
        explain(jnp.ones(Q), jnp.ones(K), jnp.ones(K), causal=True)


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
