"""What the package needs of jax beyond what jax promises to keep: a jax that lacks it is refused in
one sentence. `test_partition.py` has what it can do without."""

import json
import pathlib
import subprocess
import sys

import jax

from pallas_flash import jax_internals

ROOT = pathlib.Path(__file__).parents[1]
NEEDED = [
    f"{module}.{name}" for module, names in jax_internals.NEEDED.items() for name in names.split()
]
PROGRAM = """
import json, pkgutil, sys

import jax, jax.extend

said = {}
for name in json.loads(sys.argv[1]):
    for module in [module for module in sys.modules if module.startswith("pallas_flash")]:
        del sys.modules[module]
    path, _, last = name.rpartition(".")
    owner = pkgutil.resolve_name(path)
    removed = vars(owner)[last]
    delattr(owner, last)
    try:
        import pallas_flash
    except ImportError as error:
        said[name] = str(error)
    setattr(owner, last, removed)
print(json.dumps(said))
"""


def test_a_jax_that_lacks_a_name_is_refused_at_import_in_one_sentence():
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(NEEDED)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    jaxes = jax_internals.SUPPORTED
    assert json.loads(run.stdout) == {
        name: f"pallas_flash runs with {jaxes}; jax {jax.__version__} has no {name}: "
        f"pip install '{jaxes}'"
        for name in NEEDED
    }
