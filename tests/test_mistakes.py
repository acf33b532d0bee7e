"""Mistakes beside the values of flash_attention's arguments: names of other libraries, and what is
given to the other functions and classes."""

import dataclasses
import importlib
import inspect
import pathlib
import pickle
import pydoc
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_flash
from pallas_flash import (
    PagedCache,
    attention_weights,
    dropout_mask,
    explain,
    explain_paged,
    flash_attention,
    flash_attention_jvp,
    listed_weights,
    masks,
    merge_attention,
    paged_attention,
    paged_cache,
    scores,
)
from pallas_flash.accounting import name_of
from pallas_flash.attention import normalised
from pallas_flash.checks.names import BY_CALLABLE, NEEDLESS, OURS
from pallas_flash.context_parallel import Ring, zigzag
from pallas_flash.flax import FlashAttention, rope

DOCS = pathlib.Path(__file__).parents[1] / "docs"
LAYER, LAYER_CALL = BY_CALLABLE["FlashAttention"], BY_CALLABLE["FlashAttention.__call__"]
ones = jnp.ones
q, k, x = ones((2, 5, 4, 8)), ones((2, 7, 2, 8)), ones((1, 8, 2, 8))


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
    "block_sizes": "Leave block_sizes out: tiles",
    "block_size": r"mean mask=masks.KeyLists\(block_indices, block_size\)\?",
    "k_descale": r"Leave k_descale out: dequantise: query.astype\(bfloat16\) \* its scale; 8 bits",
}
# each call, its error, and what it says
ELSEWHERE = {
    **{
        name: (
            lambda name=name: flash_attention(q, k, k, **{name: 1}),
            TypeError,
            rf"argument '{name}'\..*{text}",
        )
        for name, text in UNEXPECTED.items()
    },
    "pages of another library": (
        lambda: paged_attention(x, x, x, 1, 1, page_indices=1),
        TypeError,
        r"Did you mean page_table\?",
    ),
    "options without their names": (
        lambda: flash_attention(q, k, k, None, None, 0.5),
        TypeError,
        "takes query, key, value, bias, mask; got 6 arguments .* by name: scale, is_causal",
    ),
    "no value of explain": (lambda: explain(q, k), TypeError, "flash_attention.*'value'"),
    "shapes of explain": (
        lambda: explain(q.shape, k.shape, k.shape),
        TypeError,
        r"query must be an array or a jax.ShapeDtypeStruct; got the tuple \(2, 5, 4, 8\)",
    ),
    "a value for weights": (
        lambda: attention_weights(q, k, k, rows=[0]),
        TypeError,
        r"takes no value: \(query, key, bias, mask, \*, rows\); got .* \(2, 7, 2, 8\)",
    ),
    "a residual of weights": (
        lambda: attention_weights(q, k, rows=[0], return_residual=True),
        TypeError,
        "returns the weights alone",
    ),
    "pairs to merge": (
        lambda: merge_attention((q, q[..., 0]), (q, q[..., 0])),
        ValueError,
        r"pass merge_attention\(\*zip\(\*pairs\)\)",
    ),
    "no sizes of a dropout mask": (
        lambda: dropout_mask(jax.random.key(0), 0.1, (5.0, 7)),
        ValueError,
        r"shape must be \(\*B, N, T, S\), .* got \(5.0, 7\)",
    ),
    "a window of one side": (lambda: masks.Window(4), TypeError, "argument: 'right'"),
    "a window back": (
        lambda: flash_attention(q, q, q, mask=masks.Window(jnp.array(-1), 0)),
        ValueError,
        "Window.left must be 0 or more; got -1",
    ),
    "a window of half a token": (
        lambda: masks.Window(0, np.array(0.5)),
        TypeError,
        "Window.right must be integers; got float64",
    ),
    "a window for each head": (
        lambda: flash_attention(q, q, q, mask=masks.Window(np.arange(7), None)),
        ValueError,
        r"Window.left must be int32 \[B\] = .*; got \(7,\)",
    ),
    "an array as local_window_size": (
        lambda: flash_attention(q, q, q, local_window_size=(jnp.array(3), 0)),
        ValueError,
        r"must be a static int .* Arrays are for mask=masks.Window\(left, right\)",
    ),
    "a chunk of half a token": (
        lambda: masks.Chunked(0.5),
        ValueError,
        "Chunked.size must be a static int from 1 to .*; got the float 0.5",
    ),
    "scales and tiles": (
        lambda: flash_attention(q, k, k, q_descale=1, block_q=64, fp8_params=1),
        TypeError,
        "Leave q_descale and fp8_params out: dequantise.* Leave block_q out: tiles",
    ),
    "an 8-bit query": (
        lambda: flash_attention(q.astype("float8_e4m3fn"), k, k),
        TypeError,
        r"got float8_e4m3fn\. Dequantise: query.astype\(bfloat16\) \* its scale; .*paged_atten",
    ),
    "8-bit values": (
        lambda: flash_attention(q, k, k.astype("int8")),
        TypeError,
        r"value must be .*; got int8\. Dequantise: value.astype\(bfloat16\)",
    ),
    "an 8-bit query of pages": (
        lambda: paged_attention(x.astype("float8_e4m3fn"), x, x, [[0]], [1]),
        TypeError,
        r"query must be .*; got float8_e4m3fn\. Dequantise",
    ),
    "no heads": (
        lambda: flash_attention(q[:, :, :0], k[:, :, :0], k[:, :, :0]),
        ValueError,
        r"with N and K from 1 on; got \(2, 5, 0, 8\) and \(2, 7, 0, 8\)",
    ),
    "the tokens of one sequence": (
        lambda: masks.Varlen(32),
        ValueError,
        r"int32 \[B, sequences \+ 1\] .* as \[0, 32\] for one; got the int 32",
    ),
    "a float of keys": (
        lambda: masks.Varlen([0, 3]).key_value_segment_ids(32.0),
        ValueError,
        "length must be a static int from 0 on; got the float 32.0",
    ),
    "a float of ids for slopes": (
        lambda: scores.Alibi(ones((2, 4)), ones(7)),
        TypeError,
        "Alibi.key_value_segment_ids must be integers; got float32",
    ),
    **{
        f"id {n} for slopes of two sequences": (
            lambda n=n: scores.Alibi(ones((2, 4)), [0, 1, 2, n]),
            ValueError,
            rf"key_value_segment_ids must be from 0 to 1, .*, or 2 for padding; got {n}",
        )
        for n in (-1, 3)
    },
    "ids of the queries alone": (
        lambda: flash_attention(q, k, k, mask=masks.Documents([[0] * 5] * 2)),
        ValueError,
        r"Documents\(ids\) alone is enough only where T == S; got T = 5, S = 7\. Pass key_ids",
    ),
    **{
        f"{words} in place of a bias": (
            lambda mask=mask: flash_attention(q, k, k, mask),
            TypeError,
            f"bias must be an array; got {re.escape(words)}. Pass a mask by name: mask=",
        )
        for words, mask in {
            "Causal()": masks.Causal(),
            "(Causal() | Chunked(size=4))": masks.Causal() | masks.Chunked(4),
            "~(KeyLengths(lengths=[3]))": ~masks.KeyLengths([3]),
            "KeyLengths(lengths=int32[2]) & Causal()": masks.KeyLengths(ones(2, int))
            & masks.Causal(),
        }.items()
    },
    "a drawing of everything": (
        lambda: masks.draw(masks.Causal(), 100_000, 100_000),
        ValueError,
        "1048576 at most; got 10000000000. Draw larger blocks: block=2048",
    ),
    "a drawing of what is traced": (
        lambda: jax.jit(lambda n: masks.draw(masks.KeyLengths(n), 2, 2))(ones(1, int)),
        TypeError,
        "draw prints values, which are not known under jax.jit: call it outside",
    ),
    "an angle for each of other tokens": (
        lambda: rope(q, np.arange(3)[None]),
        ValueError,
        r"positions must be \[B, T\] = \(2, 5\), or \[1, T\] for all rows; got \(1, 3\)",
    ),
    "a list to rotate": (lambda: rope([1.0], [0]), ValueError, r"x must be \[B, T, N, H\]"),
    "frequencies of other heads": (
        lambda: rope(q, np.arange(5)[None], frequencies=ones(8)),
        ValueError,
        r"frequencies must be \[H/2\] = \(4,\); got \(8,\)",
    ),
    "a base of 0": (lambda: rope(q, np.arange(5)[None], 0), ValueError, "base must be .* above 0"),
    **{
        f"a cache of {dtype}": (
            lambda dtype=dtype: paged_cache(1, 8, 1, 8, pages=1, page=8, dtype=dtype),
            TypeError,
            f"a cache's dtype must be float32, .* float8_e5m2; got {got}",
        )
        for dtype, got in (("fp8", "the text 'fp8'"), (0.5, "the float"), (jnp.int32, "int32"))
    },
    "a page of text": (
        lambda: paged_cache(1, 8, 1, 8, pages=1, page="8"),
        ValueError,
        "page must be a static int from 1 on; got the text '8'",
    ),
    "a flag of text for a cache": (
        lambda: paged_cache(1, 8, 1, 8, pages=1, values_are_keys="no"),
        TypeError,
        "values_are_keys must be a static bool",
    ),
    "rows of text": (
        lambda: paged_cache(1, 8, 1, 8, pages=1).release("all"),
        TypeError,
        "rows must be an array; got the text 'all'",
    ),
    "one primal": (
        lambda: flash_attention_jvp(q, q),
        TypeError,
        r"primals must be \(query, key, value\); got an array float32",
    ),
    "a residual of text for explain": (
        lambda: explain(q, k, k, return_residual="lse"),
        TypeError,
        "return_residual must be a static bool",
    ),
    "objects for explain": (
        lambda: explain(np.array([None]), k, k),
        TypeError,
        r"query must be an array; got an array object\[1\]",
    ),
    "a number that no int32 holds": (
        lambda: flash_attention(q, k, k, 2**40),
        TypeError,
        "bias must be an array; cannot convert this the int 1099511627776",
    ),
    "no mask": (lambda: masks.draw(None, 2, 2), TypeError, "mask must be an object of pallas"),
    "a name that is none": (
        lambda: masks.MaskMod(lambda b, h, q, k: q >= k, 3),
        TypeError,
        "MaskMod.name must be a text; got the int 3",
    ),
    "no cap": (lambda: scores.SoftCap(None), TypeError, "SoftCap.cap must be .*; got NoneType"),
    "a number to reorder": (lambda: zigzag(3, 2), ValueError, "x must be arrays with an axis 1"),
    "an axis of text": (lambda: zigzag(x, 2, "T"), TypeError, "axis must be a static int; got"),
    "an array for an axis": (lambda: Ring(ones(2)), TypeError, "Ring.axis must be the name of an"),
    "a device for its kind": (lambda: name_of(jax.devices()[0]), TypeError, "kind must be a text"),
    "less than no tokens": (lambda: masks.GlobalTokens(-1), ValueError, "from 0 to .* the int -1"),
    "one side": (
        lambda: masks.Window(window=4),
        TypeError,
        r"^Window\(\) got .* 'window'\. Leave window out: .* Window\(w - 1, 0\)",
    ),
    "what a cache needs": (
        lambda: paged_cache(2, 64),
        TypeError,
        r"^paged_cache\(\) missing 2 required arguments: 'kv_heads' and 'head_size'\. It takes b",
    ),
    "a window of Causal": (
        lambda: masks.Causal(4),
        TypeError,
        r"Causal\(\) takes no arguments; got 1 argument without a name\. A window is masks.Window",
    ),
    "a value for listed weights": (
        lambda: listed_weights(q, k, k, masks.KeyLists([[[0]]]), q),
        TypeError,
        r"There is no value: listed_weights\(query, key, lists, lse\)",
    ),
    "a value by name for weights": (
        lambda: attention_weights(q, k, value=k, rows=[0]),
        TypeError,
        "attention_weights takes no value",
    ),
    "a value by name for listed weights": (
        lambda: listed_weights(q, k, masks.KeyLists([[[0]]] * 5), ones((2, 5, 4)), value=k),
        TypeError,
        "listed_weights takes no value",
    ),
    "pages that are missing": (
        lambda: explain_paged(x),
        TypeError,
        r"^paged_attention\(\) missing .* 'k_pages'\. It takes query, k_pages, v_pages, page_table",
    ),
    "a stride back": (lambda: masks.Dilated(-1), ValueError, "Dilated.stride .* got the int -1"),
    "a bool of tokens": (lambda: masks.GlobalTokens(True), ValueError, "the bool True"),
    **{
        f"{kind.__name__} of {x!r}": (
            lambda kind=kind, x=x: kind(x),
            TypeError,
            rf"{kind.__name__}\.\w+ must be integers; got ",
        )
        for kind in (
            masks.KeyLengths,
            masks.KeyLists,
            masks.KeyStarts,
            masks.QueryLengths,
            masks.PrefixLM,
        )
        for x in (True, 0.5, [1.5, 2.0])
    },
    "a float of ids": (
        lambda: masks.Documents(np.ones((1, 3)), [[0]]),
        TypeError,
        "Documents.query_ids must be integers; got float64",
    ),
    "a bool of lists": (
        lambda: masks.KeyLists(ones((5, 1, 3)) > 0),
        TypeError,
        "KeyLists.indices must be integers; got bool",
    ),
    **{
        f"a {name} of {x!r}": (
            lambda name=name, x=x: masks.KeyLists([[[0]]], **{name: x}),
            ValueError,
            rf"KeyLists.{name} must be a static int from 1 to \d+; got the \w+ {x}",
        )
        for name, x in (("block", 0), ("block", 2.0), ("query_block", True), ("block", 2**31))
    },
    "lists without entries": (
        lambda: flash_attention(q, k, k, mask=lists((2, 5, 1, 0))),
        ValueError,
        r"with n from 1 on; got \(2, 5, 1, 0\)\. A list that names nothing has an entry of -1",
    ),
    "a traced block": (
        lambda: jax.jit(lambda block: masks.KeyLists([[[0]]], block).block)(3),
        ValueError,
        "KeyLists.block must be .*; got a traced array .*static_argnames='block'",
    ),
    **{
        f"lists {shape} for {size} queries": (
            lambda shape=shape, size=size: flash_attention(q, k, k, mask=lists(shape, size)),
            ValueError,
            rf"KeyLists.indices must be integers \[\*B or 1, {text}",
        )
        for shape, size, text in (
            (
                (2, 4, 1, 3),
                1,
                r"T, L, n\] = \(2, 5, L, n\), .*K = 2 or N = 4; got \(2, 4, 1, 3\)\.$",
            ),
            ((2, 5, 1, 3), 2, r"ceil\(T / 2\), L, n\] = \(2, 3, L, n\), .*got \(2, 5, 1, 3\)\.$"),
            ((3, 5, 1, 3), 1, r"T, L, n\] .*; got \(3, 5, 1, 3\)\.$"),
            ((2, 5, 3, 3), 1, r"T, L, n\] .*; got \(2, 5, 3, 3\)\.$"),
            ((), 1, r"T, L, n\] .*; got \(\)\.$"),
            (
                (2, 5, 3),
                1,
                r".*; got \(2, 5, 3\)\. For one list for all heads pass x\[\.\.\., None, :\]",
            ),
            ((5, 3), 1, r".*; got \(5, 3\)\. For one list for all heads pass x\[\.\.\., None, :\]"),
            ((2, 4, 5, 3), 1, r".*\. Do the heads come before the length\?"),
        )
    },
    "lists as an array": (
        lambda: flash_attention(q, k, k, mask=jnp.zeros((2, 5, 1, 3), int)),
        TypeError,
        r"mask must be bool .*; lists of keys as masks.KeyLists\(x\)",
    ),
    **{
        f"lists of single keys under {sign}": (
            lambda mask=mask: flash_attention(q, k, k, mask=mask),
            TypeError,
            r"\| and ~ take KeyLists with block \* query_block >= 64; got block 1 and query_block 1"
            r"\. Add the keys to the lists, or .* join them by merge_attention",
        )
        for sign, mask in {
            "|": masks.Causal() | masks.KeyLists([[[0]]] * 5),
            "~": ~masks.KeyLists([[[0]]] * 5),
        }.items()
    },
    "lists of two sizes": (
        lambda: flash_attention(q, k, k, mask=lists((5, 1, 3)) & lists((5, 1, 3), block=2)),
        TypeError,
        r"& joins KeyLists of equal block .*; got \(block, query_block\) = \(1, 1\), \(2, 1\)",
    ),
    "lists of a sequence on several devices": (
        lambda: flash_attention(q, k, k, mask=lists((5, 1, 3)), context=Ring("x")),
        NotImplementedError,
        r"KeyLists take sequences that are whole on a device; got context=Ring\('x'",
    ),
    "lists for a kernel without their table": (
        lambda: flash_attention(q, k, k, mask=lists((5, 1, 3)), implementation="triton"),
        NotImplementedError,
        r"it takes lists as a table of blocks, with block \* query_block >= 64; got 1 \* 1\.",
    ),
    "text in an array": (
        lambda: flash_attention(q, k, k, mask=np.full((5, 7), "causal")),
        TypeError,
        r"mask must be an array or a pallas_flash.masks object; got an array <U6\[5, 7\]",
    ),
    "capitals": (lambda: flash_attention(q, k, k, IS_CAUSAL=True), TypeError, r"mean is_causal\?"),
    "axes that are no names": (
        lambda: Ring("x", batch=0),
        TypeError,
        "Ring.batch must be the name of an axis of the mesh, .*; got 0",
    ),
    "no devices": (lambda: zigzag(x, 0), ValueError, "devices must be a static int from 1 on"),
    "text for slopes": (
        lambda: scores.Alibi([0.5, "a"]),
        TypeError,
        "Alibi.slopes must be an array; got a tuple of str",
    ),
    "text for a distance": (
        lambda: scores.T5Bias(ones(32), max_distance="128"),
        ValueError,
        "T5Bias.max_distance must be a static int from 1 on; got the text '128'",
    ),
    "text for a direction": (
        lambda: scores.T5Bias(ones(32), bidirectional="no"),
        TypeError,
        "T5Bias.bidirectional must be a static bool",
    ),
    "a cap of 0": (lambda: scores.SoftCap(0), ValueError, "SoftCap.cap must be .* above 0"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_mistake_elsewhere_has_a_clear_error_too(name):
    f, error, text = ELSEWHERE[name]
    with pytest.raises(error, match=text):
        f()


def test_a_mask_of_no_global_tokens_shows_none():
    assert not masks.GlobalTokens(0).mask_mod()(0, 0, *jnp.indices((3, 3))).any()


def test_a_masks_array_with_one_row_is_that_of_all_rows():
    ends, ids = [0, 2, 5], np.arange(5)
    x, each = ones((3, 5, 4, 8)), lambda x: np.broadcast_to(x, (3, *np.shape(x)))
    for kind, array in [
        (masks.KeyLengths, 3),
        (masks.KeyStarts, 3),
        (masks.QueryLengths, 3),
        (masks.PrefixLM, 3),
        (masks.Documents, ids),
        (masks.Varlen, ends),
    ]:
        one, all_rows = (
            normalised(x, x, x, mask=kind(a))[1] for a in (np.array([array]), each(array))
        )
        jax.tree.map(np.testing.assert_array_equal, one, all_rows)


def test_ends_of_packed_rows_may_repeat_the_last_and_are_not_looked_at_where_they_are_traced():
    q, attend = (
        ones((5, 4, 8)),
        jax.jit(lambda q, ends: flash_attention(q, q, q, mask=masks.Varlen(ends))),
    )
    assert flash_attention(q, q, q, mask=masks.Varlen([0, 2, 5, 5, 5])).shape == q.shape
    assert attend(q, jnp.array([3, 2, 9])).shape == q.shape


@pytest.mark.parametrize(
    "name, module",
    dict(
        FlashAttention="flax", create_block_mask="masks", Ring="context_parallel", Alibi="scores"
    ).items(),
)
def test_an_import_from_the_package_is_told_the_module_that_has_the_name(name, module):
    with pytest.raises(ImportError, match=f"{name} is in pallas_flash.{module}: from pallas_fl"):
        exec(f"from pallas_flash import {name}")
    assert not hasattr(pallas_flash, name) and name not in dir(pallas_flash)
    with pytest.raises(
        ImportError, match="cannot import name 'np'"
    ):  # which a module has of others
        exec("from pallas_flash import np")


@pytest.mark.parametrize("f", [explain, attention_weights, flash_attention_jvp, paged_attention])
def test_a_name_from_elsewhere_is_told_ours_wherever_a_call_is_given(f):
    x = ones((1, 8, 2, 8))
    arrays = ((x,) * 3,) * 2 if f is flash_attention_jvp else (x,) * 3
    more = dict(rows=[0]) if f is attention_weights else {}
    with pytest.raises(TypeError, match=r"'softmax_scale'. Did you mean scale\?"):
        f(*arrays, softmax_scale=1.0, **more)


def test_a_paged_call_is_told_the_names_of_paged_attention():
    with pytest.raises(TypeError, match=r"Did you mean page_table\? Did you mean lengths\?"):
        paged_attention(*(ones((1, 8, 2, 8)),) * 3, block_table=ones((1, 1)), cache_seqlens=ones(1))


METHODS = dict(
    FlashAttention="__call__ init_cache init_rolling_cache",
    PagedCache="append attend release reserve share shortage",
    Varlen="key_value_segment_ids",
)


def public():
    """What a user calls, by its name: all of docs/api.md but data that the package makes."""
    data = PagedCache, pallas_flash.Explanation, pallas_flash.Options, masks.BlockMask, masks.Mask
    for path in re.findall(r"^::: (pallas_flash.+)$", (DOCS / "api.md").read_text(), re.M):
        *module, name = path.split(".")
        x = getattr(importlib.import_module(".".join(module)), name)
        is_data = x in data or (isinstance(x, type) and issubclass(x, tuple))
        if callable(x) and not is_data:
            yield name, x
        for method in METHODS.get(name, "").split():
            yield f"{name}.{method}", getattr(x, method)


def parameters(f) -> dict:
    # of a constructor itself: nnx's metaclass hides it
    return inspect.signature(f.__init__ if isinstance(f, type) else f).parameters


def told(f, /, **arguments) -> str:
    """What f says of arguments that it does not have."""
    is_method = not isinstance(f, type) and next(iter(parameters(f)), None) == "self"
    with pytest.raises(TypeError) as error:
        f(*[None] * is_method, **arguments)
    return str(error.value)


def test_everything_public_tells_which_argument_was_meant():
    names = set()
    for name, f in public():
        own = [x for x in parameters(f).values() if x.name != "self"]
        if any(x.kind == x.VAR_KEYWORD for x in own):  # its options are flash_attention's
            continue
        names.add(name)
        for x in own:
            text = told(f, **{f"{x.name}_": None})
            assert text.startswith(f"{name}() got an unexpected keyword argument '{x.name}_'. Did ")
            assert text.rpartition(" mean ")[2].startswith(x.name), text  # of two names the longer
    assert names >= {"flash_attention", "KeyLists", "PagedCache.append", "FlashAttention.__call__"}


def test_a_name_from_elsewhere_is_told_by_one_table_for_everything_public():
    callables = dict(public())
    for name, hints in BY_CALLABLE.items():
        f, own = callables[name], parameters(callables[name])
        for theirs, hint in hints.items():
            text = told(f, **{theirs: None})
            assert theirs not in own and f"{name}() got an unexpected keyword arg" in text
            if hint.partition("?")[0].partition("=")[0] in own:
                assert f"Did you mean {hint}" in text, text
            else:  # a sentence
                assert hint[0].isupper() and text.endswith(hint.replace("{}", theirs)), text
    assert told(masks.Varlen, cu_seqlens=1, max_seqlen=1).endswith(
        "Did you mean cu_seqlens_q? Leave max_seqlen out: no maxima are needed."
    )


def test_a_mask_whose_constructor_tells_names_is_a_dataclass_like_any_other():
    lists = masks.KeyLists(np.zeros((1, 5, 1, 3), np.int32), query_block=2)
    assert list(inspect.signature(masks.KeyLists).parameters) == ["indices", "block", "query_block"]
    assert list(inspect.signature(masks.MaskMod).parameters) == ["function", "name"]
    assert "heads" not in pydoc.render_doc(masks.KeyLists.__init__)
    assert pickle.loads(pickle.dumps(lists)) == lists == jax.tree.map(lambda x: x, lists)
    assert dataclasses.replace(lists, block=4) == masks.KeyLists(lists.indices, 4, 2)
    with pytest.raises(TypeError, match="takes indices, block, query_block; got 4"):
        masks.KeyLists(lists.indices, 1, 1, "K")

    class Near(masks.Window):
        def __init__(self, size):
            super().__init__(size, size)

    assert Near(3).right == 3 and list(inspect.signature(Near).parameters) == ["size"]


def test_help_of_the_package_begins_with_what_it_has_and_shows_no_methods_of_dict_and_tuple():
    text = pydoc.plain(pydoc.render_doc(pallas_flash))
    assert "    flash_attention " in text[:1200] and "    paged_cache " in text[:4000]
    assert "fromkeys" not in text and len(text) < 43_000


def theirs() -> list[str]:
    """The first column of migrating.md's tables."""
    lines = (DOCS / "migrating.md").read_text().splitlines()
    return [line.split(" | ")[0] for line in lines if line.startswith("| ")]


def test_every_name_that_migrating_translates_is_known_to_the_errors():
    functions = flash_attention, paged_attention, masks.create_block_mask
    ours = {name for f in functions for name in inspect.signature(f).parameters}
    for line in theirs():
        told = ours | {*OURS, *NEEDLESS, *LAYER, *LAYER_CALL}
        assert {*re.findall(r"(\w+)=", line)} <= told, line
    for name, texts in OURS.items():
        for text in (texts,) if isinstance(texts, str) else texts:
            assert re.match(r"\w+", text)[0] in ours, name


def test_migrating_translates_every_name_that_the_errors_know():
    known = {*OURS, *NEEDLESS, *LAYER, *LAYER_CALL} - {
        *inspect.signature(FlashAttention.__init__).parameters
    }
    known -= {*inspect.signature(FlashAttention.__call__).parameters}
    assert known - {name for line in theirs() for name in re.findall(r"\w+", line)} == set()


PACKAGE = str(pathlib.Path(pallas_flash.__file__).parent)


def attend(q, k):
    return flash_attention(q, k, x)


@pytest.fixture
def filtered_tracebacks():
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "auto")
    yield
    jax.config.update("jax_traceback_filtering", before)


# a wrong argument, eager and under jit; and a rule of JAX that has no place for the call
@pytest.mark.parametrize(
    "call, last",
    [
        (lambda: attend(x, x[..., :3]), "attend"),
        (lambda: jax.jit(attend)(x, x[..., :3]), "attend"),
        (lambda: jax.linear_transpose(lambda k: attend(x, k), x)(x), "<lambda>"),
    ],
)
def test_a_traceback_ends_at_the_users_line(call, last, filtered_tracebacks):
    with pytest.raises((ValueError, NotImplementedError)) as error:
        call()
    assert error.traceback[-1].name == last
    assert not any(str(entry.path).startswith(PACKAGE) for entry in error.traceback)
