"""Mistakes beside flash_attention's arguments: names of other libraries, and what is given to the
other functions and classes."""

import dataclasses
import importlib
import inspect
import pathlib
import pickle
import pydoc
import re
from functools import partial

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


CACHE_LACKS = ("fp8", "uint8", "int16", "bool", "float8_e4m3")
SIZES = dict.fromkeys(("batch", "max_length", "kv_heads", "head_size", "pages"), 2)
# what is raised, what it says, and the call
ELSEWHERE = {
    TypeError: {
        "takes query, key, value, bias, mask; got 6 .* by name: scale, is_causal": lambda: (
            flash_attention(q, k, k, None, None, 0.5)
        ),
        "flash_attention.*'value'": lambda: explain(q, k),
        r"query must be an array or a jax.ShapeDtypeStruct; got the tuple \(2, 5, 4, 8\)": lambda: (
            explain(q.shape, k.shape, k.shape)
        ),
        r"takes no value: \(query, key, bias, mask, \*, rows\); got .* \(2, 7, 2, 8\)": lambda: (
            attention_weights(q, k, k, rows=[0])
        ),
        "returns the weights alone": lambda: attention_weights(
            q, k, rows=[0], return_residual=True
        ),
        "argument: 'right'": lambda: masks.Window(4),
        "Window.right must be integers; got float64": lambda: masks.Window(0, np.array(0.5)),
        r"query must be .*; got float8_e4m3fn\. Dequantise": lambda: paged_attention(
            x.astype("float8_e4m3fn"), x, x, [[0]], [1]
        ),
        "Alibi.key_value_segment_ids must be integers; got float32": lambda: scores.Alibi(
            ones((2, 4)), ones(7)
        ),
        "draw prints values, which are not known under jax.jit: call it outside": lambda: jax.jit(
            lambda n: masks.draw(masks.KeyLengths(n), 2, 2)
        )(ones(1, int)),
        **{
            f"a cache's dtype must be float32, .* float8_e5m2; got {got}": partial(
                paged_cache, 1, 8, 1, 8, pages=1, dtype=dtype
            )
            for dtype, got in {
                **{name: f"the text '{name}'" for name in CACHE_LACKS},
                0.5: "the float",
                jnp.int32: "int32",
            }.items()
        },
        "values_are_keys must be a static bool": lambda: paged_cache(
            1, 8, 1, 8, pages=1, values_are_keys="no"
        ),
        "rows must be an array; got the text 'all'": lambda: paged_cache(
            1, 8, 1, 8, pages=1
        ).release("all"),
        r"primals must be \(query, key, value\); got an array float32": lambda: flash_attention_jvp(
            q, q
        ),
        "return_residual must be a static bool": lambda: explain(q, k, k, return_residual="lse"),
        r"query must be an array; got an array object\[1\]": lambda: explain(
            np.array([None]), k, k
        ),
        "mask must be an object of pallas": lambda: masks.draw(None, 2, 2),
        "MaskMod.name must be a text; got the int 3": lambda: masks.MaskMod(
            lambda b, h, q, k: q >= k, 3
        ),
        "SoftCap.cap must be .*; got NoneType": lambda: scores.SoftCap(None),
        "axis must be a static int; got": lambda: zigzag(x, 2, "T"),
        "Ring.axis must be the name of an axis of the mesh": lambda: Ring(ones(2)),
        **{
            rf"Ring.axis must be .*, or a tuple of them; got {re.escape(repr(x))}": partial(Ring, x)
            for x in (3, None, ["data", "context"])
        },
        "kind must be a text": lambda: name_of(jax.devices()[0]),
        r"^Window\(\) got .* 'window'\. Leave window out: .* Window\(w - 1, 0\)": lambda: (
            masks.Window(window=4)
        ),
        r"^paged_cache\(\) missing 2 .*: 'kv_heads' and 'head_size'\. It takes batch": lambda: (
            paged_cache(2, 64)
        ),
        r"Causal\(\) takes no arguments; got 1 .* name\. A window is masks.Window": lambda: (
            masks.Causal(4)
        ),
        r"There is no value: listed_weights\(query, key, lists, lse\)": lambda: listed_weights(
            q, k, k, masks.KeyLists([[[0]]]), q
        ),
        "attention_weights takes no value": lambda: attention_weights(q, k, value=k, rows=[0]),
        "listed_weights takes no value": lambda: listed_weights(
            q, k, masks.KeyLists([[[0]]] * 5), ones((2, 5, 4)), value=k
        ),
        r"^paged_attention\(\) missing .* 'k_pages'\. .* k_pages, v_pages, page_table": lambda: (
            explain_paged(x)
        ),
        **{
            rf"{kind.__name__}\.\w+ must be integers; got {got}": partial(kind, x)
            for kind in (
                masks.KeyLengths,
                masks.KeyLists,
                masks.KeyStarts,
                masks.QueryLengths,
                masks.PrefixLM,
            )
            for x, got in ((True, "the bool"), (0.5, "the float"), ([1.5, 2.0], "list of float"))
        },
        "Documents.query_ids must be integers; got float64": lambda: masks.Documents(
            np.ones((1, 3)), [[0]]
        ),
        "KeyLists.indices must be integers; got bool": lambda: masks.KeyLists(ones((5, 1, 3)) > 0),
        "Ring.batch must be the name of an axis of the mesh, .*; got 0": lambda: Ring("x", batch=0),
        "Alibi.slopes must be an array; got a tuple of str": lambda: scores.Alibi([0.5, "a"]),
        "T5Bias.bidirectional must be a static bool": lambda: scores.T5Bias(
            ones(32), bidirectional="no"
        ),
    },
    ValueError: {
        r"pass merge_attention\(\*zip\(\*pairs\)\)": lambda: merge_attention(
            (q, q[..., 0]), (q, q[..., 0])
        ),
        r"shape must be \(\*B, N, T, S\), .* got \(5.0, 7\)": lambda: dropout_mask(
            jax.random.key(0), 0.1, (5.0, 7)
        ),
        r"a window is \(left, right\), each an int from 0 to 2147483647, an array of such ints or "
        r"None; got \(-1, None\)": lambda: masks.Window(-1, None),
        "Chunked.size must be a static int from 1 to .*; got the float 0.5": lambda: masks.Chunked(
            0.5
        ),
        r"int32 \[B, sequences \+ 1\] .* as \[0, 32\] for one; got the int 32": lambda: (
            masks.Varlen(32)
        ),
        "length must be a static int from 0 on; got the float 32.0": lambda: masks.Varlen(
            [0, 3]
        ).key_value_segment_ids(32.0),
        **{
            f"key_value_segment_ids must be from 0 to 1, .*, or 2 for padding; got {n}": partial(
                scores.Alibi, ones((2, 4)), [0, 1, 2, n]
            )
            for n in (-1, 3)
        },
        "1048576 at most; got 10000000000. Draw larger blocks: block=2048": lambda: masks.draw(
            masks.Causal(), 100_000, 100_000
        ),
        r"positions must be \[B, T\] = \(2, 5\), or \[1, T\] for all rows; got \(1, 3\)": lambda: (
            rope(q, np.arange(3)[None])
        ),
        r"x must be \[B, T, N, H\]": lambda: rope([1.0], [0]),
        r"frequencies must be \[H/2\] = \(4,\); got \(8,\)": lambda: rope(
            q, np.arange(5)[None], frequencies=ones(8)
        ),
        "base must be .* above 0": lambda: rope(q, np.arange(5)[None], 0),
        **{
            f"^{name} must be a static int from 1 on; got the int {size}": partial(
                paged_cache, **SIZES | {name: size}
            )
            for name in SIZES
            for size in (-1, 0)
        },
        "page must be a static int from 1 on; got the text '8'": lambda: paged_cache(
            1, 8, 1, 8, pages=1, page="8"
        ),
        "x must be arrays with an axis 1": lambda: zigzag(3, 2),
        "from 0 to .* the int -1": lambda: masks.GlobalTokens(-1),
        "Dilated.stride .* got the int -1": lambda: masks.Dilated(-1),
        "the bool True": lambda: masks.GlobalTokens(True),
        **{
            rf"KeyLists.{name} must be a static int from 1 to \d+; got the \w+ {x}": partial(
                masks.KeyLists, [[[0]]], **{name: x}
            )
            for name, x in (("block", 0), ("block", 2.0), ("query_block", True), ("block", 2**31))
        },
        "KeyLists.block must be .*; got a traced array .*static_argnames='block'": lambda: jax.jit(
            lambda block: masks.KeyLists([[[0]]], block).block
        )(3),
        "devices must be a static int from 1 on": lambda: zigzag(x, 0),
        "T5Bias.max_distance must be a static int from 1 on; got the text '128'": lambda: (
            scores.T5Bias(ones(32), max_distance="128")
        ),
        "SoftCap.cap must be .* above 0": lambda: scores.SoftCap(0),
    },
    NotImplementedError: {},
}


@pytest.mark.parametrize(
    "error, text", [(error, text) for error in ELSEWHERE for text in ELSEWHERE[error]]
)
def test_a_mistake_elsewhere_has_a_clear_error_too(error, text):
    with pytest.raises(error, match=text):
        ELSEWHERE[error][text]()


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


@pytest.mark.parametrize(
    "f", [explain, attention_weights, flash_attention_jvp, paged_attention, explain_paged]
)
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
