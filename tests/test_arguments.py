"""What a user may get wrong: each mistake has its error, which says what was expected and what
came."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_flash import (
    flash_attention,
    masks,
)
from pallas_flash.attention import normalised

Q, K = (2, 5, 4, 8), (2, 7, 2, 8)


def call(query=Q, key=K, value=K, dtype="float32", **kw):
    q, k, v = (jnp.ones(x, dtype) if isinstance(x, tuple) else x for x in (query, key, value))
    return flash_attention(q, k, v, **kw)


ones = jnp.ones
SEQUENCES = np.array([[0, 3, 5]] * 2)
VARLEN = masks.Varlen(SEQUENCES, [[0, 5, 7]] * 2)
BAD = {
    "not an array": (dict(query=None), TypeError, "query must be an array; got NoneType"),
    "no value": (dict(value=None), TypeError, "got NoneType. If the values are .* value_size"),
    "a value and its size": (
        dict(value_size=4),
        ValueError,
        r"value_size is for value=None, .* got value \(2, 7, 2, 8\) and value_size 4",
    ),
    "a value size beyond H": (
        dict(value=None, value_size=9),
        ValueError,
        r"value_size must be at most the H of key \(2, 7, 2, 8\), .* got 9",
    ),
    "a value size of 0": (
        dict(value=None, value_size=0),
        ValueError,
        "value_size must be a static int from 1 on; got the int 0",
    ),
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
        r"multiple of the number of key/value heads; got N = 4, K = 3\.$",
    ),
    "groups of self-attention": (
        dict(query=(2, 7, 4, 8), key=(2, 7, 3, 8), value=(2, 7, 3, 8)),
        ValueError,
        r"got N = 4, K = 3\.$",
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
    "mask of keys for all queries": (
        dict(mask=ones((2, 1, 7), bool)),
        ValueError,
        r"got \(2, 1, 7\). For the same in all heads, pass x\[..., None, :, :\]",
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
        r"mask must be an array or .*; got a tuple of Causal\(\)\. Join masks with &",
    ),
    "mask of all": (
        dict(mask=True),
        ValueError,
        "mask must have axes, .*; got one value for all: see is_causal",
    ),
    "flash_attn's dropout_p, by its place": (
        dict(bias=0.1),
        ValueError,
        r"bias must have axes, broadcastable to .* \(2, 4, 5, 7\); got one value .* dropout_rate",
    ),
    "a bias of no axes": (dict(bias=jnp.array(0.1)), ValueError, "bias must have axes"),
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
        "query_offset must be integers; got the float 1.5",
    ),
    "offset bool": (
        dict(query_offset=True),
        TypeError,
        "query_offset must be integers; got the bool True",
    ),
    "list of floats": (
        dict(key_value_seq_lengths=[3.0, 7.0]),
        TypeError,
        "key_value_seq_lengths must be integers; got list of float",
    ),
    "another byte order": (
        dict(bias=np.ones((5, 7), ">f4")),
        TypeError,
        r"bias must be an array in this machine's byte order; got >f4. Pass x.astype\(",
    ),
    "a scale in another byte order": (
        dict(scale=np.ones(4, ">f8")),
        TypeError,
        "scale must be an array in this machine's byte order; got >f8",
    ),
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
    "mask object's shape": (
        dict(mask=masks.KeyLengths(ones(5, int))),
        ValueError,
        r"KeyLengths.lengths must be int32 \[B\]",
    ),
    "varlen's ends": (
        dict(mask=masks.Varlen([0, 3, 5])),
        ValueError,
        r"int32 \[B, sequences \+ 1\] = \(2, sequences \+ 1\); got .* query \[T, N, H\], without",
    ),
    **{
        f"varlen's ends that {what}": (
            dict(mask=masks.Varlen(*(make(ends) for ends in pair))),
            ValueError,
            rf"Varlen.{name} must ascend, from 0 to the {tokens} tokens at most; got {got}",
        )
        for what, make, pair, name, tokens, got in (
            ("begin later", list, [[[0, 5], [3, 5]]], "cu_seqlens_q", 5, r"\[\[0, 5\], \[3, 5\]\]"),
            ("fall", np.array, [[[0, 4, 3]] * 2], "cu_seqlens_q", 5, r"\[\[0, 4, 3\]"),
            ("lie beyond", jnp.array, [[[0, 6]] * 2], "cu_seqlens_q", 5, r"\[\[0, 6\]"),
            ("lie beyond the keys", list, [[[0, 5]] * 2, [[0, 8]] * 2], "cu_seqlens_k", 7, ""),
        )
    },
    "mask without its array": (
        dict(mask=masks.PrefixLM(None)),
        TypeError,
        "PrefixLM.prefix must be integers; got NoneType",
    ),
    "varlen of a number": (
        dict(mask=masks.Varlen(np.array(5))),
        ValueError,
        r"Varlen.cu_seqlens_q must be int32 \[B, sequences \+ 1\] = .*; got \(\)",
    ),
    "varlen without ends": (
        dict(mask=masks.Varlen(None)),
        TypeError,
        "Varlen.cu_seqlens_q must be integers; got NoneType",
    ),
    "varlen's other ends": (
        dict(mask=masks.Varlen(SEQUENCES, SEQUENCES[:, :2])),
        ValueError,
        "as many ends of queries as of keys",
    ),
    "varlen and an offset": (
        dict(mask=VARLEN, query_offset=2),
        ValueError,
        "already fixes query positions; it cannot be combined with query_offset",
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
    "an array for an implementation": (
        dict(implementation=np.zeros(2)),
        ValueError,
        r"implementation must be None or one of .*; got array\(\[0\., 0\.\]\)\.",
    ),
    "tokamax's implementation": (
        dict(implementation="mosaic"),
        ValueError,
        "got 'mosaic'. tokamax's mosaic is hopper, blackwell or ampere here: pass None",
    ),
    "heads within features": (
        dict(query=(2, 32, 128), key=(2, 32, 32), value=(2, 32, 32)),
        ValueError,
        r"key must be \(S, K, 128\) .* \(2, 32, 128\) is read as \[T, N, H\]; reshape \[B, T, N",
    ),
    "heads within features of one size": (
        dict(query=(2, 5, 32), key=(2, 7, 32), value=(2, 7, 32)),
        ValueError,
        r"got N = 5, K = 7. .* A query \(2, 5, 32\) is read as \[T, N, H\]",
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
        r"dropout_rng must be one key of jax.random, such as jax.random.key\(0\); got the int 0",
    ),
    "streams for a key": (
        dict(dropout_rate=0.1, dropout_rng=nnx.Rngs(0)),
        TypeError,
        r"dropout_rng must be one key .*; got Rngs. Draw a key from nnx.Rngs: rngs.dropout\(\)",
    ),
    "a stream for a key": (
        dict(dropout_rate=0.1, dropout_rng=nnx.Rngs(0).dropout),
        TypeError,
        r"; got RngStream. Draw a key from nnx.Rngs: rngs.dropout\(\)",
    ),
    "several keys": (
        dict(dropout_rate=0.1, dropout_rng=jax.random.split(jax.random.key(0))),
        TypeError,
        r"dropout_rng must be one key .* got key<fry> \(2,\)",
    ),
    "a traced order": (
        dict(deterministic=1),
        TypeError,
        "deterministic must be None or a static bool, True or False; got the int 1",
    ),
    "not on this machine": (
        dict(implementation="hopper", scale=-1.0),
        NotImplementedError,
        "'hopper' cannot run this call: it needs a GPU .*; there is none. Also: .*wgmma multiplies "
        ".*got float32. Also: .* the scale, which must be above 0; got -1.0. The call: ",
    ),
    "not on this machine either": (
        dict(implementation="ampere", scale=-1.0),
        NotImplementedError,
        "'ampere' cannot run this call: it needs an NVIDIA GPU .*; there is none. Also: .*mma "
        "multiplies .*got float32. Also: .* the scale, which must be above 0; got -1.0. The call",
    ),
    "flash_attn's causal": (
        dict(causal=True),
        TypeError,
        r"an unexpected keyword argument 'causal'. Did you mean is_causal\? .*query_offset=S - T",
    ),
    "flash_attn's other names": (
        dict(softmax_scale=1.0, window_size=(3, 0), dropout_p=0.1),
        TypeError,
        r"keyword arguments 'softmax_scale' and .*mean scale\? Did you mean local_window_size\? .*"
        r"Did you mean dropout_rate\? It goes with dropout_rng",
    ),
    "a needless name": (
        dict(enable_gqa=True),
        TypeError,
        "argument 'enable_gqa'. Leave enable_gqa out: grouped heads need no flag",
    ),
    "a slip": (dict(is_casual=True), TypeError, r"'is_casual'. Did you mean is_causal\?"),
    "a name of nobody's": (dict(colour=1), TypeError, r"keyword argument 'colour'\.$"),
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
        match=r"a window is \(left, right\), each an int from 0 to 2147483647, an array of such "
        r"ints or None; got \(-1, None\)",
    ):
        masks.Window(-1, None)


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
        match=f"must be .*a static .*; got a traced array .*static_argnames='{name}'",
    ):
        jax.jit(flash_attention)(ones(Q), ones(K), ones(K), **{name: value})


@pytest.mark.parametrize(
    "kw",
    [
        {},
        dict(is_causal=True),
        dict(local_window_size=2, query_offset=1),
        dict(mask=masks.Causal() & masks.Window(2, 0), logits_soft_cap=3.0),
    ],
    ids=str,
)
def test_a_call_without_data_but_its_operands_computes_nothing_before_it_attends(kw):
    q = ones((2, 3, 2, 4))
    program = jax.make_jaxpr(lambda q: normalised(q, q, q, **kw)[1].query)(q)
    assert not program.eqns
