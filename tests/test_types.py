"""What README shows is right to a type checker, and what the types say is what the functions do."""

import ast
import inspect
import pydoc
import re
import typing

import cases
import jax.numpy as jnp
import numpy as np
import pytest
from processes import ROOT

from pallas_flash import (
    Options,
    PagedCache,
    attention_weights,
    flash_attention,
    listed_weights,
    merge_attention,
    paged_attention,
)
from pallas_flash.caches import paged
from pallas_flash.choose import implementations
from pallas_flash.flax import FlashAttention, attention_fn
from pallas_flash.problem.call import ImplementationName

EXAMPLES = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S))
TYPES = """
from jax import Array
from typing import Any, assert_type

from pallas_flash import Options, flash_attention_jvp
from pallas_flash.flax import RollingCache

options: Options = dict(is_causal=True, implementation="blockwise")
assert_type(flash_attention(q, k, v, **options), Array)
assert_type(flash_attention(q, k, v, return_residual=True, **options), tuple[Array, Array])
assert_type(flash_attention_jvp((q, k, v), (q, k, v), **options), tuple[Array, Array])
with_tangents = flash_attention_jvp([q, k, v], [q, k, v], return_residual=True, is_causal=True)
assert_type(with_tangents, tuple[tuple[Array, Array], tuple[Array, Array]])
flash_attention(q, k, v, is_casual=True)  # type: ignore[call-overload]
flash_attention(q, k, v, return_residual=True, is_casual=True)  # type: ignore[call-overload]
flash_attention_jvp((q, k, v), (q, k, v), is_casual=True)  # type: ignore[call-overload]
bad: Options = dict(is_casual=True)  # type: ignore[typeddict-unknown-key]
assert_type(flash_attention(q, k, v), Array)
assert_type(flash_attention(q, k, v, return_residual=True), tuple[Array, Array])
assert_type(flash_attention(q, k, v, return_max_logits=True), tuple[Array, Array])
both = flash_attention(q, k, v, return_residual=True, return_max_logits=True)
assert_type(both, tuple[Array, Array, Array])
either = flash_attention(q, k, v, return_residual=bool(q.ndim))
assert_type(either, Array | tuple[Array, Array] | tuple[Array, Array, Array])
assert_type(pool.attend(new), Array)
assert_type(pool.attend(new, return_residual=True), Array | tuple[Array, ...])
pool.attend(new, is_casual=True)  # type: ignore[call-overload]
assert_type(ours(jnp.ones((1, 5, 512))), Array)
assert_type(ours(jnp.ones((1, 5, 512)), cache=ours.init_cache(1, 9))[1].lengths, Array)
assert_type(ours(jnp.ones((1, 5, 512)), cache=ours.init_rolling_cache(1, 9))[1], RollingCache)
flash_attention(q, k, v, implementation="xla")
flash_attention(q, k, v, implementation="none of them")  # type: ignore[call-overload]
anything: dict[str, Any] = dict(is_causal=True)
assert_type(flash_attention(q, k, v, **anything), Any)
"""
# Two flags decide what is returned, which takes overloads. A dict[str, Any] may hold both flags and
# matches every overload, and then the typing spec makes the result Any ("Overload call evaluation",
# step 5): annotate such a dict as Options. Where no overload matches, mypy says what is wrong in
# its first line and then lists all overloads. The alternatives were worse: without overloads every
# call returns a union; a last overload that takes **unknown, of a type that nothing has, makes the
# report one line, but that says "expected Never" and not which keyword was meant.
WRONG = """
flash_attention(q, k, v, is_casual=True)
flash_attention_jvp((q, k, v), (q, k, v), is_casual=True)
"""


@pytest.mark.whole
def test_mypy_accepts_the_examples_and_names_a_wrong_keyword_first(tmp_path, monkeypatch):
    mypy = pytest.importorskip("mypy.api", reason="mypy is in the extra test")
    monkeypatch.setenv("MYPYPATH", str(ROOT))
    (tmp_path / "examples.py").write_text(EXAMPLES + TYPES)
    (tmp_path / "wrong.py").write_text(f"from examples import *\n{WRONG}")
    options = ["--warn-unused-ignores", "--follow-imports=silent", f"--cache-dir={tmp_path}"]
    monkeypatch.chdir(tmp_path)
    report, _, _ = mypy.run([*options, "examples.py", "wrong.py"])
    assert "examples.py" not in report, report
    for line, name in (3, "flash_attention"), (4, "flash_attention_jvp"):
        first = next(text for text in report.splitlines() if f"wrong.py:{line}:" in text)
        what = f'Unexpected keyword argument "is_casual" for overloaded function "{name}"'
        assert f'error: {what}; did you mean "is_causal"?' in first


def test_the_types_name_every_implementation():
    assert set(typing.get_args(ImplementationName)) == {
        *implementations.names(),
        "xla",
        "cudnn",
    }


def _is_of_type(x, function, name):
    """As a checker at run time sees it: jaxtyping's hook with beartype."""
    return any(isinstance(x, of) for of in typing.get_args(typing.get_type_hints(function)[name]))


FLAGS = ("return_residual", "return_max_logits")  # what tells overloads apart


@pytest.mark.parametrize(
    "function, options", [(flash_attention, Options), (paged_attention, paged.Options)]
)
def test_an_editor_finds_every_keyword_in_the_first_overload_and_the_others_take_the_same(
    function, options
):
    kinds = lambda f: [
        (x.name, x.kind, x.default) for x in inspect.signature(f).parameters.values()
    ]
    types = lambda of: {
        name: str(x)
        for name, x in typing.get_type_hints(of).items()
        if name not in (*FLAGS, "return")
    }
    shown, *others = typing.get_overloads(function)
    assert kinds(shown) == kinds(function) and types(shown) == types(function)
    named = {name for name, kind, _ in kinds(function) if kind == inspect.Parameter.KEYWORD_ONLY}
    assert types(options) == {name: x for name, x in types(function).items() if name in named}
    for other in others:
        assert types(other) == {
            name: x for name, x in types(function).items() if name not in named
        } | dict(options=str(typing.Unpack[options]))


@pytest.mark.parametrize(
    "function",
    [
        flash_attention,
        paged_attention,
        attention_fn,
        attention_weights,
        listed_weights,
        merge_attention,
        FlashAttention.__init__,
        FlashAttention.__call__,
        PagedCache.append,
    ],
)
def test_help_shows_a_short_line_for_each_argument_and_what_it_shows_is_python(function):
    shown = str(inspect.signature(function))
    assert shown in pydoc.plain(pydoc.render_doc(function))
    lines = [line.strip() for line in shown.splitlines()[1:-1]]
    assert max(map(len, shown.splitlines())) <= 110
    names = [re.match(r"\**(\w*)", line).group(1) for line in lines if line != "*,"]
    assert names == list(inspect.signature(function).parameters)
    ast.parse(f"def f{re.sub('<.*>', '...', shown)}: ...")


@pytest.mark.parametrize("zeros", [np.zeros, jnp.zeros])
def test_the_types_are_of_all_that_the_functions_take(zeros):
    for letters in cases.BROADCASTS:
        shape = cases.broadcast_shape(letters, cases.Sizes())
        for function in (flash_attention, attention_fn):
            assert _is_of_type(zeros(shape, np.float32), function, "bias") and _is_of_type(
                zeros(shape, bool), function, "mask"
            )
    for dtype in ("int8", "float8_e4m3fn", "bfloat16"):
        assert _is_of_type(zeros((4, 8, 2, 16), dtype), paged_attention, "k_pages")
    assert all(
        _is_of_type(zeros(shape, "int32"), flash_attention, "query_offset") for shape in ((), (2,))
    )
