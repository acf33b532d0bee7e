"""What a user may get wrong: each mistake has its error, which says what was expected and what came."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import explain, flash_attention, masks
from pallas_flash.kernels import device

Q, K = (2, 5, 4, 8), (2, 7, 2, 8)


def call(query=Q, key=K, value=K, dtype="float32", **kw):
    q, k, v = (jnp.ones(x, dtype) if isinstance(x, tuple) else x for x in (query, key, value))
    return flash_attention(q, k, v, **kw)


ones = jnp.ones
BAD = {
    "not an array": (dict(query=[1.0]), TypeError, "query must be an array; got list"),
    "float64 numpy": (dict(key=np.ones(K)), TypeError, r"key must be float32, bfloat16, float16; got float64. Cast it"),
    "integers": (dict(dtype="int32"), TypeError, "query must be float32, bfloat16, float16; got int32"),
    "mixed dtypes": (dict(value=ones(K, "bfloat16")), TypeError, "one dtype; got query float32 and value bfloat16"),
    "rank 2": (dict(query=(4, 8), key=(4, 8), value=(4, 8)), ValueError, "at least 3; got query"),
    "ranks differ": (dict(key=K[1:]), ValueError, r"as many axes as query, at least 3; got key \(7, 2, 8\)"),
    "head sizes differ": (dict(key=(2, 7, 2, 9)), ValueError, r"key must be \(2, S, K, 8\) to match query"),
    "batches differ": (dict(key=(3, 7, 2, 8)), ValueError, r"key must be \(2, S, K, 8\) to match query"),
    "value length": (dict(value=(2, 6, 2, 8)), ValueError, r"value must be \(2, 7, 2, Hv\) to match key"),
    "value heads": (dict(value=(2, 7, 4, 8)), ValueError, r"value must be \(2, 7, 2, Hv\) to match key"),
    "groups": (dict(key=(2, 7, 3, 8), value=(2, 7, 3, 8)), ValueError, "multiple of the key/value heads.*N = 4, K = 3"),
    "bias shape": (dict(bias=ones((2, 4, 5, 6))), ValueError, r"bias must be broadcastable to .* = \(2, 4, 5, 7\); got"),
    "bias rank": (dict(bias=ones((1, 2, 4, 5, 7))), ValueError, "bias must be broadcastable"),
    "bool bias": (dict(bias=ones((5, 7), bool)), TypeError, "bias must be floating.*A bool array goes to mask"),
    "bias list": (dict(bias=[0.0]), TypeError, "bias must be an array; got list"),
    "mask shape": (dict(mask=ones((2, 3, 5, 7), bool)), ValueError, "mask must be broadcastable"),
    "int mask": (dict(mask=ones((5, 7), int)), TypeError, "mask must be bool"),
    "mask string": (dict(mask="causal"), TypeError, "mask must be an array or a pallas_flash.masks object; got str"),
    "key lengths shape": (dict(key_value_seq_lengths=ones(3, int)), ValueError, r"key_value_seq_lengths must be int32 \[B\]"),
    "key lengths dtype": (dict(key_value_seq_lengths=ones(2)), TypeError, "key_value_seq_lengths must be integers; got float"),
    "query lengths shape": (dict(query_seq_lengths=3), ValueError, r"query_seq_lengths must be int32 \[B\] = \(2,\); got \(\)"),
    "window negative": (dict(local_window_size=-1), ValueError, "local_window_size must be an int or"),
    "window of three": (dict(local_window_size=(1, 2, 3)), ValueError, "local_window_size must be an int or"),
    "window of floats": (dict(local_window_size=(1.0, 2)), ValueError, "local_window_size must be an int or"),
    "offset float": (dict(query_offset=1.5), TypeError, "query_offset must be integers; got float64"),
    "offset shape": (dict(query_offset=ones(3, int)), ValueError, r"query_offset must be int32 \[B\] = \(2,\)"),
    "ids without keys": (dict(query_segment_ids=ones((2, 5), int)), ValueError, "give key_value_segment_ids too"),
    "ids without queries": (dict(key_value_segment_ids=ones((2, 7), int)), ValueError, "needs query_segment_ids"),
    "ids shape": (
        dict(query_segment_ids=ones((2, 7), int), key_value_segment_ids=ones((2, 7), int)),
        ValueError,
        r"query_segment_ids must be int32 \[B, T\] = \(2, 5\); got \(2, 7\)",
    ),
    "two sets of ids": (
        dict(mask=masks.Documents(ones((2, 5), int), ones((2, 7), int)) & masks.Documents(ones((2, 5), int), ones((2, 7), int))),
        ValueError,
        "one set of document ids",
    ),
    "mask object's shape": (dict(mask=masks.KeyLengths(ones(5, int))), ValueError, r"KeyLengths.lengths must be int32 \[B\]"),
    "causal number": (dict(is_causal=1), TypeError, "is_causal must be True or False"),
    "scale nan": (dict(scale=float("nan")), ValueError, "scale must be a finite number; got nan"),
    "scale array": (dict(scale=ones(2)), TypeError, "scale must be a number known while tracing"),
    "soft cap zero": (dict(logits_soft_cap=0.0), ValueError, "logits_soft_cap must be a finite number above 0; got 0.0"),
    "implementation": (dict(implementation="cudnn"), ValueError, "reference, flash1, standard; got 'cudnn'"),
    "head of 257": (
        dict(query=(1, 3, 1, 257), key=(1, 3, 1, 257), value=(1, 3, 1, 8), implementation="portable"),
        NotImplementedError,
        "'portable' cannot run this call: head sizes above 256 .* H = 257",
    ),
    "nothing to tile": (
        dict(key=(2, 0, 2, 8), value=(2, 0, 2, 8), implementation="blockwise"),
        NotImplementedError,
        "'blockwise' cannot run this call: S = 0: there is nothing to tile",
    ),
    "sinks": (dict(sinks=ones(4)), NotImplementedError, "sinks is not implemented yet"),
    "dropout rate": (dict(dropout_rate=0.1), NotImplementedError, "dropout_rate is not implemented yet"),
    "dropout rng": (dict(dropout_rng=jax.random.key(0)), NotImplementedError, "dropout_rng is not implemented yet"),
    "a traced order": (dict(deterministic=1), TypeError, "deterministic must be True or False, known while tracing; got int"),
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
    with pytest.raises(ValueError, match=r"a window is \(left, right\), each an int >= 0 or None; got \(-1, None\)"):
        masks.Window(-1)


def test_a_traced_scale_has_a_clear_error():
    with pytest.raises(TypeError, match="scale must be a number known while tracing"):
        jax.jit(lambda s: call(scale=s))(0.5)


def test_lists_and_numpy_integers_serve_as_lengths_and_offsets():
    expected = call(key_value_seq_lengths=jnp.array([3, 7]), is_causal=True, query_offset=2)
    actual = call(key_value_seq_lengths=[3, 7], is_causal=np.bool_(True), query_offset=np.int64(2))
    np.testing.assert_array_equal(actual, expected)


def test_explain_names_the_implementation_its_tiles_and_why_not_the_others():
    shapes = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in (Q, K, K)]
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    text = explain(*shapes, is_causal=True, key_value_seq_lengths=lengths, implementation="portable")
    assert text.implementation == "portable" and set(text.why_not) == {"hopper", "blockwise", "reference", "flash1", "standard"}
    lines = str(text).splitlines()
    assert lines[0].startswith("call            B=2 T=5 S=7 N=4 K=2 H=8 Hv=8 bfloat16, mask: causal, key lengths, scale 0.3536")
    assert lines[1] == "implementation  portable"
    assert lines[2].startswith("tiles           forward 16 x 16, 4 warps")
    assert lines[4] == "not blockwise   portable was asked for"


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what is chosen where there is no GPU")
def test_without_a_gpu_blockwise_is_chosen_and_explain_says_why():
    text = explain(jnp.ones(Q), jnp.ones(K), jnp.ones(K))
    assert text.implementation == "blockwise"
    assert text.why_not["portable"] == "there is no GPU: it would run in Pallas' interpreter, slowly"
    assert text.why_not["reference"] == "blockwise comes before it"


def test_an_old_gpu_is_told_what_is_needed(monkeypatch):
    monkeypatch.setattr(device, "compute_capability", lambda: 7.5)
    with pytest.raises(NotImplementedError, match=r"need an NVIDIA GPU of compute capability 8\.0 or higher; this one has 7\.5"):
        call(implementation="portable")
    assert "7.5" in explain(jnp.ones(Q), jnp.ones(K), jnp.ones(K)).why_not["portable"]


def test_explain_has_the_errors_of_the_call():
    with pytest.raises(NotImplementedError, match="sinks"):
        explain(jnp.ones(Q), jnp.ones(K), jnp.ones(K), sinks=jnp.ones(4))
    with pytest.raises(TypeError, match="unexpected keyword argument 'causal'"):
        explain(jnp.ones(Q), jnp.ones(K), jnp.ones(K), causal=True)
