"""The code of docs/other_models.md runs as it stands, and its models call flash_attention; what
only names versions is Python."""

import ast
import os
import pathlib
import re

os.environ["KERAS_BACKEND"] = "jax"  # Keras reads it once, on import

import jax
import pytest

PAGE = (pathlib.Path(__file__).parents[1] / "docs" / "other_models.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
NOT_RUN = [code for code in BLOCKS if re.match(r"# for [\w-]+ \d+\.\d+\.\d+", code)]


@pytest.mark.whole
def test_the_code_for_flax_and_keras_runs_from_top_to_bottom_and_takes_ours(monkeypatch):
    keras = pytest.importorskip("keras", reason="keras is in the extra test")
    if keras.backend.backend() != "jax":
        pytest.skip("Keras was imported with another backend before")
    # put back at the end
    monkeypatch.setattr(jax.nn, "dot_product_attention", jax.nn.dot_product_attention)
    page = {}
    for code in BLOCKS:
        if code not in NOT_RUN:
            exec(compile(code, "other_models.md", "exec"), page)
    calls = {
        "nnx": lambda x: page["model"](x, deterministic=True),
        "linen": lambda x: page["ours"].apply(page["variables"], x),
        "keras": lambda x: page["layer"](x, x),
    }
    for name, call in calls.items():
        assert "flash_attention" in str(jax.make_jaxpr(call)(page["x"])), name


@pytest.mark.parametrize("code", NOT_RUN, ids=lambda code: code.split()[2])
def test_what_is_not_run_here_imports_the_package_it_names_and_ours(code):
    ast.parse(code)
    imported = {*re.findall(r"^ *(?:from|import) (\w+)", code, re.M)}
    assert {code.split()[2].removeprefix("dm-"), "pallas_flash"} <= imported
