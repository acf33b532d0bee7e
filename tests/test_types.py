"""What README shows is right to a type checker, and what the types say is what the functions do."""

import pathlib
import re
import typing

import pytest

from pallas_flash import attention, backends

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
