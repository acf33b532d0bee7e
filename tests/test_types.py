"""What README shows is right to a type checker, and what the types say is what the functions do."""

import inspect
import pathlib
import re
import typing

import cases
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import attention, backends, flash_attention, paged_attention
from pallas_flash.flax import attention_fn

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S))
TYPES = """
from jax import Array
from typing import assert_type

from pallas_flash.flax import RollingCache

assert_type(flash_attention(q, k, v), Array)
assert_type(flash_attention(q, k, v, return_residual=True), tuple[Array, Array])
assert_type(flash_attention(q, k, v, return_residual=bool(q.ndim)), Array | tuple[Array, Array])
assert_type(ours(jnp.ones((1, 5, 512))), Array)
assert_type(ours(jnp.ones((1, 5, 512)), cache=ours.init_cache(1, 9))[1].length, Array)
assert_type(recent, RollingCache)
flash_attention(q, k, v, implementation="xla")
flash_attention(q, k, v, implementation="none of them")  # type: ignore[call-overload]
"""


@pytest.mark.whole
def test_mypy_finds_nothing_in_the_examples(tmp_path, monkeypatch):
    mypy = pytest.importorskip("mypy.api", reason="mypy is in the extra test")
    monkeypatch.setenv("MYPYPATH", str(ROOT))
    (tmp_path / "examples.py").write_text(EXAMPLES + TYPES)
    options = ["--warn-unused-ignores", "--follow-imports=silent", f"--cache-dir={tmp_path}"]
    report, _, status = mypy.run([*options, str(tmp_path / "examples.py")])
    assert status == 0, report


def test_the_types_name_every_implementation():
    assert set(typing.get_args(attention.Implementation)) == {*backends.NAMES, "xla", "cudnn"}


def _is_of_type(x, function, name):
    """As a checker at run time sees it: jaxtyping's hook with beartype."""
    return any(isinstance(x, of) for of in typing.get_args(inspect.signature(function).parameters[name].annotation))


@pytest.mark.parametrize("zeros", [np.zeros, jnp.zeros])
def test_the_types_are_of_all_that_the_functions_take(zeros):
    for letters in cases.BROADCASTS:
        shape = cases.broadcast_shape(letters, cases.Sizes())
        for function in (flash_attention, attention_fn):
            assert _is_of_type(zeros(shape, np.float32), function, "bias") and _is_of_type(zeros(shape, bool), function, "mask")
    for dtype in ("int8", "float8_e4m3fn", "bfloat16"):
        assert _is_of_type(zeros((4, 8, 2, 16), dtype), paged_attention, "k_pages")
    assert all(_is_of_type(zeros(shape, "int32"), flash_attention, "query_offset") for shape in ((), (2,)))
