"""What the package needs of jax beyond what jax promises to keep: a jax that lacks it is refused in
one sentence; `test_partition.py` has what it can do without. And what jax prepares is taken as it
comes."""

import ast
import json
import re

import jax
from processes import ROOT, printed_by

from pallas_flash.jax_support import jax_internals

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
    said = printed_by(PROGRAM, json.dumps(NEEDED))
    jaxes = jax_internals.SUPPORTED
    assert json.loads(said) == {
        name: f"pallas_flash runs with {jaxes}; jax {jax.__version__} has no {name}: "
        f"pip install '{jaxes}'"
        for name in NEEDED
    }


def test_what_jax_does_not_promise_is_taken_in_one_place_and_known_there():
    promised = re.compile(
        r"(?!jax\.(_src|interpreters|extend|experimental\.custom_partitioning)\b)"
    )
    for path in (ROOT / "pallas_flash").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert all(promised.match(alias.name) for alias in node.names), path
            if isinstance(node, ast.ImportFrom):
                assert promised.match(node.module or ""), f"{path}: {ast.unparse(node)}"
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if re.match(r"(ad|batching|mlir)\.\w+$", name):
                assert f"jax.interpreters.{name}" in NEEDED, path


COMING = """
import jax
import jax.numpy as jnp

from pallas_flash import flash_attention

x = jnp.linspace(-1.0, 1.0, 32).reshape(1, 4, 2, 4)
sinks = jnp.ones(2)


def loss(x, sinks, implementation):
    clip = lambda s, b, h, q, k: jax.nn.relu(s)
    attend = lambda x: flash_attention(
        x, x, x, sinks=sinks, score_mod=clip, implementation=implementation
    )
    return jnp.sum(jnp.sin(jax.checkpoint(attend)(x)))


ours, expected = (jax.grad(loss, argnums=(0, 1))(x, sinks, name) for name in (None, "reference"))
assert jax.tree.all(jax.tree.map(lambda a, b: jnp.allclose(a, b, atol=1e-6), ours, expected))
"""


def test_gradients_are_right_with_the_custom_jvp_and_the_checkpoint_that_jax_prepares():
    printed_by(COMING, JAX_CUSTOM_JVP3="1", JAX_REMAT3="1")


def test_a_jax_without_places_for_source_lines_and_hidden_frames_is_left_as_it_is(monkeypatch):
    def find(module, name):
        raise ImportError(module)

    monkeypatch.setattr(jax_internals, "find", find)
    jax_internals.hide_frames("a folder")
    with jax_internals.traced_lines():
        assert jax.make_jaxpr(lambda x: x + 1)(1.0).eqns
