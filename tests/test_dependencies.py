"""What must be installed: jax, jaxtyping and numpy. A jax whose Pallas does not have what kernels
import is one without them."""

import json
import os
import re
import subprocess
import sys

import pytest
from processes import ROOT, printed_by
from selection import whole_but

from pallas_flash.jax_support import jax_internals
from scripts.gpt_run.console import TRAIN

PYPROJECT = (ROOT / "pyproject.toml").read_text()
PROGRAM = """
import contextlib, json, re, sys

import jax

missing = ["jax.experimental.pallas", "jax.experimental.mosaic"]
for name in [*missing, "absl", "flax", "optax", "matplotlib"]:
    sys.modules[name] = None  # to import it raises
before = set(sys.modules)
import pallas_flash, pallas_flash.accounting
loaded = {name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names

with contextlib.redirect_stdout(sys.stderr):
    exec(re.search(r"```python\\n(.*?)```", open("README.md").read(), re.S).group(1))

from pallas_flash.jax_support import hardware

hardware.interpret = True  # else hopper asks for a GPU first
why_not = pallas_flash.explain(q, k, v).why_not
try:
    flash_attention(q, k, v, implementation="triton")
except NotImplementedError as error:
    print(json.dumps([sorted(loaded), why_not, str(error), bool(jax.numpy.isfinite(o).all())]))
"""


@pytest.fixture(scope="module")
def without_pallas():
    return json.loads(printed_by(PROGRAM, JAX_DISABLE_MOST_OPTIMIZATIONS="1"))


def test_importing_the_package_loads_only_what_it_depends_on(without_pallas):
    depends = re.search(r"^dependencies = (\[.*\])$", PYPROJECT, re.M).group(1)
    names = {re.match(r"\w+", dependency).group() for dependency in json.loads(depends)}
    assert set(without_pallas[0]) <= {"pallas_flash"} | names


def test_the_readmes_first_example_runs_without_pallas(without_pallas):
    assert without_pallas[3]


@pytest.mark.parametrize("name", ["hopper", "blackwell", "ampere", "triton", "flash1", "standard"])
def test_kernels_that_cannot_be_imported_say_so(without_pallas, name):
    _, why_not, refused, _ = without_pallas
    assert re.match(
        r"its kernels cannot be imported with jax [\d.]+: .*(pallas|mosaic)", why_not[name]
    )
    assert "'triton' cannot run this call: its kernels cannot be imported" in refused


def test_pip_takes_the_jax_that_the_package_asks_for():
    (jax,) = re.findall(r'"(jax[<>=][^"]*)"', PYPROJECT)
    assert jax == jax_internals.SUPPORTED


WITHOUT = """
import runpy, sys

missing, program, *sys.argv[1:] = sys.argv[1:]
sys.modules[missing] = None
sys.argv[0] = program
if program.endswith(".py"):
    runpy.run_path(program, run_name="__main__")
else:
    __import__(program)
"""
EXTRAS = [  # what is missing, and in what
    "flax pallas_flash.flax",
    "matplotlib scripts/draw_mask.py Causal()",
    "matplotlib scripts/draw_design.py",
    "matplotlib scripts/draw_speed.py",
    "matplotlib scripts/generations.py",
    "optax scripts/train_gpt.py",
    "filelock scripts/train_gpt.py",
    "orbax scripts/generate.py runs/gpt-1",
]


@pytest.mark.parametrize(
    "case",
    whole_but(
        EXTRAS,
        "flax pallas_flash.flax",
        "matplotlib scripts/draw_mask.py Causal()",
        "optax scripts/train_gpt.py",
        "orbax scripts/generate.py runs/gpt-1",
    ),
)
def test_what_is_not_installed_is_named_with_its_extra(case):
    command, (missing, program, *_) = [sys.executable, "-c", WITHOUT, *case.split()], case.split()
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "."}
    )
    line, extra = run.stderr.splitlines()[-1], "train" if program.endswith(".py") else "flax"
    assert run.returncode == 1
    assert missing in line and line.endswith(f"Run pip install '.[{extra}]'."), run.stderr
    assert ("Traceback" in run.stderr) == (extra == "flax")


def test_the_scripts_know_what_their_extra_installs():
    extra = re.search(r'^train = \["pallas-flash\[flax\]", (.*)\]$', PYPROJECT, re.M).group(1)
    names = {name.replace("-", ".") for name in re.findall(r'"([\w-]+)', extra)}
    assert {*TRAIN} == {"flax", *names}
