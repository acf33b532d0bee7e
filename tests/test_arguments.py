"""What a user may get wrong: each mistake has its error, which says what was expected and what
came."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_flash import flash_attention, masks
from pallas_flash.attention import normalised
from pallas_flash.context_parallel import Ring

Q, K = (2, 5, 4, 8), (2, 7, 2, 8)


def call(query=Q, key=K, value=K, dtype="float32", **kw):
    q, k, v = (jnp.ones(x, dtype) if isinstance(x, tuple) else x for x in (query, key, value))
    return flash_attention(q, k, v, **kw)


ones = jnp.ones
SEQUENCES = np.array([[0, 3, 5]] * 2)
VARLEN = masks.Varlen(SEQUENCES, [[0, 5, 7]] * 2)


def lists(shape, query_block=1, block=1):
    return masks.KeyLists(np.zeros(shape, np.int32), block, query_block)


UNEXPECTED = {
    "cu_seqlens": r"mean mask=masks.Varlen\(cu_seqlens\)\?",
    "return_softmax_lse": r"mean return_residual\? It returns the log-sum-exp",
    "dropout_seed": r"mean dropout_rng\? It is a key of jax.random",
    "logits_dtype": "Leave logits_dtype out: logits are float32",
    "precision": "attention_fn=.*attention_fn. Leave precision out: float32",
    "attention_mask": r"mean mask\? Padding is bool \[B, 1, 1, S\], or pass key_value_seq_lengths",
    "key_padding_mask": r"mean mask\? Padding is bool",
    "kv_lens": r"mean key_value_seq_lengths\?",
    "block_q": "Leave block_q out: tiles are chosen; explain says which",
    "block_size": r"mean mask=masks.KeyLists\(block_indices, block_size\)\?",
    "k_descale": r"Leave k_descale out: dequantise: query.astype\(bfloat16\) \* its scale; 8 bits",
}
# what is raised, what it says, and the arguments
BAD = {
    TypeError: {
        "query must be an array; got NoneType": dict(query=None),
        "got NoneType. If the values are .* value_size": dict(value=None),
        "query must be float32, bfloat16, float16 or float64; got int32. Cast it": dict(
            dtype="int32"
        ),
        "one dtype; got query float32 and value bfloat16": dict(value=ones(K, "bfloat16")),
        "bias must be real numbers.*Pass a bool array as mask": dict(bias=ones((5, 7), bool)),
        "bias must be an array; got the text 'alibi'": dict(bias="alibi"),
        "mask must be bool .* got int32.* mask=x != 0": dict(mask=ones((5, 7), int)),
        "mask must be bool .* got float32.* as bias, or as mask=x > -1": dict(
            mask=-1e9 * ones((5, 7))
        ),
        "mask must be an array or a pallas_flash.masks object; got the text 'causal'": dict(
            mask="causal"
        ),
        r"mask must be an array or .* a mask_mod as masks.MaskMod\(function\)": dict(
            mask=lambda b, h, q, k: q >= k
        ),
        r"got function. .* an instance of a mask, such as masks.Causal\(\)": dict(
            mask=masks.Causal
        ),
        r"mask must be an array or .*; got a tuple of Causal\(\)\. Join masks with &": dict(
            mask=(masks.Causal(), masks.Window(3, 0))
        ),
        "bias must be an array; cannot convert this list": dict(bias=[[0.0, 1.0], [2.0]]),
        "query_offset must be integers; got NoneType": dict(query_offset=None),
        r"bias must be an array in this machine's byte order; got >f4. Pass x.astype\(": dict(
            bias=np.ones((5, 7), ">f4")
        ),
        "scale must be an array in this machine's byte order; got >f8": dict(
            scale=np.ones(4, ">f8")
        ),
        "PrefixLM.prefix must be integers; got NoneType": dict(mask=masks.PrefixLM(None)),
        "Varlen.cu_seqlens_q must be integers; got NoneType": dict(mask=masks.Varlen(None)),
        "is_causal must be a static bool": dict(is_causal=1),
        "scale must be a static number, or an array; got the text '0.25'": dict(scale="0.25"),
        "logits_soft_cap must be a static number; got the text": dict(logits_soft_cap="30"),
        r"dropout_rng must be one key .*, such as jax.random.key\(0\); got the int 0": dict(
            dropout_rate=0.1, dropout_rng=0
        ),
        r"dropout_rng must be .*; got Rngs. Draw a key from nnx.Rngs: rngs.dropout\(\)": dict(
            dropout_rate=0.1, dropout_rng=nnx.Rngs(0)
        ),
        r"; got RngStream. Draw a key from nnx.Rngs: rngs.dropout\(\)": dict(
            dropout_rate=0.1, dropout_rng=nnx.Rngs(0).dropout
        ),
        r"dropout_rng must be one key .* got key<fry> \(2,\)": dict(
            dropout_rate=0.1, dropout_rng=jax.random.split(jax.random.key(0))
        ),
        "deterministic must be None or a static bool, True or False; got the int 1": dict(
            deterministic=1
        ),
        r"unexpected .* argument 'causal'. Did you mean is_causal\? .*query_offset=S - T": dict(
            causal=True
        ),
        r"keyword arguments 'softmax_scale' and .*mean scale\? Did you mean local_window_size\? .*"
        r"Did you mean dropout_rate\? It goes with dropout_rng": dict(
            softmax_scale=1.0, window_size=(3, 0), dropout_p=0.1
        ),
        "argument 'enable_gqa'. Leave enable_gqa out: grouped heads need no flag": dict(
            enable_gqa=True
        ),
        "Leave q_descale and fp8_params out: dequantise.* Leave block_q out: tiles": dict(
            q_descale=1, block_q=64, fp8_params=1
        ),
        r"got float8_e4m3fn\. Dequantise: query.astype\(bfloat16\) \* its scale; .*paged": dict(
            query=ones(Q, "float8_e4m3fn")
        ),
        r"value must be .*; got int8\. Dequantise: value.astype\(bfloat16\)": dict(
            value=ones(K, "int8")
        ),
        "bias must be an array; cannot convert this the int 1099511627776": dict(bias=2**40),
        r"mask must be bool .*; lists of keys as masks.KeyLists\(x\)": dict(
            mask=jnp.zeros((2, 5, 1, 3), int)
        ),
        r"& joins KeyLists of equal block .*got \(block, query_block\) = \(1, 1\), \(2, 1\)": dict(
            mask=lists((5, 1, 3)) & lists((5, 1, 3), block=2)
        ),
        r"mask must be an array or a pallas_flash.masks object; got an array <U6\[5, 7\]": dict(
            mask=np.full((5, 7), "causal")
        ),
        r"mean is_causal\?": dict(IS_CAUSAL=True),
        **{
            f"bias must be an array; got {re.escape(words)}. Pass a mask by name: mask=": dict(
                bias=mask
            )
            for words, mask in {
                "Causal()": masks.Causal(),
                "(Causal() | Chunked(size=4))": masks.Causal() | masks.Chunked(4),
                "~(KeyLengths(lengths=[3]))": ~masks.KeyLengths([3]),
                "KeyLengths(lengths=int32[2]) & Causal()": masks.KeyLengths(ones(2, int))
                & masks.Causal(),
            }.items()
        },
        **{
            r"\| and ~ take KeyLists with block \* query_block >= 64; got block "
            rf"{block} and query_block 1\. Add the keys to the lists, or .* merge_attention": dict(
                mask=mask
            )
            for block, mask in {
                1: masks.Causal() | lists((5, 1, 3)),
                32: ~lists((5, 1, 3), block=32),
            }.items()
        },
        **{rf"argument '{name}'\..*{text}": {name: 1} for name, text in UNEXPECTED.items()},
        r"keyword argument 'colour'\.$": dict(colour=1),
    },
    ValueError: {
        r"value_size is for value=None, .* got value \(2, 7, 2, 8\) and value_size 4": dict(
            value_size=4
        ),
        r"value_size must be at most the H of key \(2, 7, 2, 8\), .* got 9": dict(
            value=None, value_size=9
        ),
        "value_size must be a static int from 1 on; got the int 0": dict(value=None, value_size=0),
        r"3 axes or more; got \(4, 8\)": dict(query=(4, 8), key=(4, 8), value=(4, 8)),
        r"key must have as many axes as query \(.*\); got \(7, 2, 8\)": dict(key=K[1:]),
        r"key must be \(2, S, K, 8\) to match query \(2, 5, 4, 8\); got \(2, 7, 2, 9\)": dict(
            key=(2, 7, 2, 9)
        ),
        r"key must be \(2, S, K, 8\) to match query \(2, 5, 4, 8\); got \(3, 7, 2, 8\)": dict(
            key=(3, 7, 2, 8)
        ),
        r"value must be \(2, 7, 2, Hv\) to match key .*; got \(2, 6, 2, 8\)": dict(
            value=(2, 6, 2, 8)
        ),
        r"value must be \(2, 7, 2, Hv\) to match key .*; got \(2, 7, 4, 8\)": dict(
            value=(2, 7, 4, 8)
        ),
        r"multiple of the number of key/value heads; got N = 4, K = 3\.$": dict(
            key=(2, 7, 3, 8), value=(2, 7, 3, 8)
        ),
        r"got N = 4, K = 3\.$": dict(query=(2, 7, 4, 8), key=(2, 7, 3, 8), value=(2, 7, 3, 8)),
        r"bias must be broadcastable to .* = \(2, 4, 5, 7\); got": dict(bias=ones((2, 4, 5, 6))),
        "bias must be broadcastable": dict(bias=ones((1, 2, 4, 5, 7))),
        r"got \(2, 7\). .* padding does, pass x\[..., None, None, :\]": dict(
            mask=ones((2, 7), bool)
        ),
        r"got \(2, 5, 7\). .* heads, pass x\[..., None, :, :\]": dict(mask=ones((2, 5, 7), bool)),
        r"got \(2, 1, 7\). For the same in all heads, pass x\[..., None, :, :\]": dict(
            mask=ones((2, 1, 7), bool)
        ),
        "mask must have axes, .*; got one value for all: see is_causal": dict(mask=True),
        # flash_attn's dropout_p, by its place
        r"bias must have axes, broadcastable to .* \(2, 4, 5, 7\); got one .* dropout_rate": dict(
            bias=0.1
        ),
        "bias must have axes": dict(bias=jnp.array(0.1)),
        r"key_value_seq_lengths must be int32 \[B\]": dict(key_value_seq_lengths=ones(3, int)),
        r"query_seq_lengths must be int32 \[B\] = \(2,\); got \(\)": dict(query_seq_lengths=3),
        "local_window_size must be a static int or .* got -1": dict(local_window_size=-1),
        r"local_window_size must be a static int or .* got \(1, 2, 3\)": dict(
            local_window_size=(1, 2, 3)
        ),
        r"local_window_size must be a static int or .* got \(1.0, 2\)": dict(
            local_window_size=(1.0, 2)
        ),
        "from 0 to 2147483647 .* got 2147483648": dict(local_window_size=2**31),
        "query_offset must fit into int32; got -2147483649": dict(query_offset=-(2**31) - 1),
        "key_value_seq_lengths must fit .* got 4294967296": dict(key_value_seq_lengths=[3, 2**32]),
        r"query_offset must be int32 \[B\] = \(2,\)": dict(query_offset=ones(3, int)),
        "Pass key_value_segment_ids too": dict(query_segment_ids=ones((2, 5), int)),
        "needs query_segment_ids": dict(key_value_segment_ids=ones((2, 7), int)),
        r"query_segment_ids must be int32 \[B, T\] = \(2, 5\); got \(2, 7\)": dict(
            query_segment_ids=ones((2, 7), int), key_value_segment_ids=ones((2, 7), int)
        ),
        r"KeyLengths.lengths must be int32 \[B\]": dict(mask=masks.KeyLengths(ones(5, int))),
        r"int32 \[B, sequences \+ 1\] = \(2, sequences \+ 1\); got .* \[T, N, H\], without": dict(
            mask=masks.Varlen([0, 3, 5])
        ),
        r"Varlen.cu_seqlens_q must be int32 \[B, sequences \+ 1\] = .*; got \(\)": dict(
            mask=masks.Varlen(np.array(5))
        ),
        **{
            rf"Varlen.{name} must ascend, from 0 to the {tokens} tokens at most; got {got}": dict(
                mask=masks.Varlen(*map(make, ends))
            )
            for make, ends, name, tokens, got in (
                (list, [[[0, 5], [3, 5]]], "cu_seqlens_q", 5, r"\[\[0, 5\], \[3, 5\]\]"),
                (np.array, [[[0, 4, 3]] * 2], "cu_seqlens_q", 5, r"\[\[0, 4, 3\]"),
                (jnp.array, [[[0, 6]] * 2], "cu_seqlens_q", 5, r"\[\[0, 6\]"),
                (list, [[[0, 5]] * 2, [[0, 8]] * 2], "cu_seqlens_k", 7, ""),
            )
        },
        "as many ends of queries as of keys": dict(mask=masks.Varlen(SEQUENCES, SEQUENCES[:, :2])),
        "Window.left must be 0 or more; got -1": dict(mask=masks.Window(jnp.array(-1), 0)),
        r"Window.left must be int32 \[B\] = .*; got \(7,\)": dict(
            mask=masks.Window(np.arange(7), None)
        ),
        r"must be a static int .* Arrays are for mask=masks.Window\(left, right\)": dict(
            local_window_size=(jnp.array(3), 0)
        ),
        r"with N and K from 1 on; got \(2, 5, 0, 8\) and \(2, 7, 0, 8\)": dict(
            query=(2, 5, 0, 8), key=(2, 7, 0, 8), value=(2, 7, 0, 8)
        ),
        r"\(ids\) alone is enough only where T == S; got T = 5, S = 7\. Pass key_ids": dict(
            mask=masks.Documents([[0] * 5] * 2)
        ),
        r"n from 1 on; got \(2, 5, 1, 0\)\. A list that names nothing has an entry of -1": dict(
            mask=lists((2, 5, 1, 0))
        ),
        **{
            rf"KeyLists.indices must be integers \[\*B or 1, {text}": dict(mask=lists(shape, block))
            for shape, block, text in (
                (
                    (2, 4, 1, 3),
                    1,
                    r"T, L, n\] = \(2, 5, L, n\), .*K = 2 or N = 4; got \(2, 4, 1, 3\)\.$",
                ),
                ((2, 5, 1, 3), 2, r"ceil\(T / 2\), L, n\] = \(2, 3, L, n\), .*\(2, 5, 1, 3\)\.$"),
                ((3, 5, 1, 3), 1, r"T, L, n\] .*; got \(3, 5, 1, 3\)\.$"),
                ((2, 5, 3, 3), 1, r"T, L, n\] .*; got \(2, 5, 3, 3\)\.$"),
                ((), 1, r"T, L, n\] .*; got \(\)\.$"),
                ((2, 5, 3), 1, r".*; got \(2, 5, 3\)\. .* for all heads pass x\[\.\.\., None, :\]"),
                ((5, 3), 1, r".*; got \(5, 3\)\. .* for all heads pass x\[\.\.\., None, :\]"),
                ((2, 4, 5, 3), 1, r".*\. Do the heads come before the length\?"),
            )
        },
        "already fixes query positions; it cannot be combined with query_offset": dict(
            mask=VARLEN, query_offset=2
        ),
        "scale must be a finite number; got nan": dict(scale=float("nan")),
        r"scale must be .*one for each query head, \[N\] = \(4,\); got float32 \(2,\)": dict(
            scale=ones(2)
        ),
        "logits_soft_cap must be a finite number above 0, or None; got 0.0": dict(
            logits_soft_cap=0.0
        ),
        "reference, flash1, standard, or jax.nn's xla .* got 'portable'": dict(
            implementation="portable"
        ),
        r"implementation must be None or one of .*; got array\(\[0\., 0\.\]\)\.": dict(
            implementation=np.zeros(2)
        ),
        "got 'mosaic'. tokamax's mosaic is hopper, blackwell or ampere here: pass None": dict(
            implementation="mosaic"
        ),
        # heads within features
        r"key must be \(S, K, 128\) .* \(2, 32, 128\) is read as \[T, N, H\]; reshape \[B, T": dict(
            query=(2, 32, 128), key=(2, 32, 32), value=(2, 32, 32)
        ),
        r"got N = 5, K = 7. .* A query \(2, 5, 32\) is read as \[T, N, H\]": dict(
            query=(2, 5, 32), key=(2, 7, 32), value=(2, 7, 32)
        ),
        r"got N = 5, K = 7. Do the heads come before the length\? Here they come after it: "
        r"jnp.swapaxes\(x, -3, -2\)": dict(
            query=(2, 4, 5, 8), key=(2, 2, 7, 8), value=(2, 2, 7, 8)
        ),
        r"got \(2, 1, 5, 5\). Do the heads come before the length": dict(
            query=(2, 4, 5, 8), key=(2, 2, 5, 8), value=(2, 2, 5, 8), mask=ones((2, 1, 5, 5), bool)
        ),
        r"sinks must be .*one for each query head, \[N\] = \(4,\); got float32 \(2,\)": dict(
            sinks=ones(2)
        ),
        r"sinks must be real numbers, .* got float32 \(\)": dict(sinks=0.5),
        "sinks must be real numbers, .* got bool": dict(sinks=ones(4, bool)),
        r"dropout_rate above 0 needs dropout_rng, a key": dict(dropout_rate=0.1),
        "dropout_rate must be at least 0 and below 1; got 1.0": dict(
            dropout_rate=1.0, dropout_rng=jax.random.key(0)
        ),
    },
    NotImplementedError: {
        r"KeyLists take sequences that are whole on a device; got context=Ring\('x'": dict(
            mask=lists((5, 1, 3)), context=Ring("x")
        ),
        "'triton' cannot run this call: head sizes above 256 .* H = 257": dict(
            query=(1, 3, 1, 257), key=(1, 3, 1, 257), value=(1, 3, 1, 8), implementation="triton"
        ),
        "'blockwise' cannot run this call: S = 0: there is nothing to tile": dict(
            key=(2, 0, 2, 8), value=(2, 0, 2, 8), implementation="blockwise"
        ),
        **{
            f"'{name}' cannot run this call: it needs .* compute capability {capability}.*; there "
            f"is none. Also: .*{by} multiplies .*got float32. Also: .* the scale, which must be "
            "above 0; got -1.0. The call: ": dict(implementation=name, scale=-1.0)
            for name, capability, by in (
                ("hopper", "9.0", "wgmma"),
                ("blackwell", "10.0 or 10.3", "tcgen05"),
                ("ampere", "8.0 or more", "mma"),
            )
        },
    },
}


@pytest.mark.parametrize("error, text", [(error, text) for error in BAD for text in BAD[error]])
def test_a_mistake_has_a_clear_error(error, text):
    with pytest.raises(error, match=text):
        call(**BAD[error][text])


def test_a_mistake_is_found_before_anything_is_computed():
    shapes = [jax.ShapeDtypeStruct(x, jnp.float32) for x in (Q, K, K)]
    with pytest.raises(ValueError, match="mask must be broadcastable"):
        jax.eval_shape(lambda *x: flash_attention(*x, mask=ones((3, 3), bool)), *shapes)


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
