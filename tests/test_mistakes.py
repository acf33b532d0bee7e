"""Mistakes beside the values of flash_attention's arguments: names of other libraries, and what is
given to the other functions and classes."""

import inspect
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_flash
from pallas_flash import (
    attention_weights,
    dropout_mask,
    explain,
    flash_attention,
    flash_attention_jvp,
    masks,
    merge_attention,
    paged_attention,
    scores,
)
from pallas_flash.checks.unexpected import LAYER, LAYER_CALL, NEEDLESS, OURS
from pallas_flash.context_parallel import Ring, zigzag
from pallas_flash.flax import FlashAttention

MIGRATING = pathlib.Path(__file__).parents[1] / "docs" / "migrating.md"
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


def theirs() -> list[str]:
    """The first column of migrating.md's tables."""
    lines = MIGRATING.read_text().splitlines()
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
