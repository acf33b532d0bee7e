"""The house stays in order: each module imports only from the rows below it, and masks are
described once."""

import ast
import pathlib

import pytest

import pallas_flash
from pallas_flash.choose import backends

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "pallas_flash"

# Each module may import from those after it.
ORDER = [
    "__main__",
    "choose.selfcheck.trial",
    "__init__",
    "flax.__init__",
    "flax.layer",
    "flax.validation",
    "flax.hook",
    "flax.cache",
    "flax.rotary",
    "weights",
    "merge",
    "explanation",
    "accounting",
    "caches.pages",
    "caches.paged",
    "caches.attend",
    "caches.tables",
    "caches.ragged",
    "attention",
    "choose.dispatch",
    "transforms.partial_broadcast",
    "problem.signatures",
    "context_parallel",
    "devices.ring",
    "devices.ulysses",
    "transforms.kernel_pass",
    "transforms.partition",
    "transforms.callback_names",
    "devices.sharding",
    "devices.shared_arrays",
    "choose.selection",
    "choose.selfcheck.verdicts",
    "choose.selfcheck.comparison",
    "choose.selfcheck.outcome",
    "choose.selfcheck.records",
    "choose.selfcheck.attempts",
    "transforms.autodiff",
    "transforms.linear_maps",
    "transforms.derivative_modes",
    "transforms.lowering",
    "transforms.equation",
    "choose.backends",
    "tiled.reference",
    "tiled.blockwise.__init__",
    "tiled.blockwise.decode",
    "tiled.blockwise.derivatives",
    "tiled.blockwise.heads",
    "tiled.blockwise.logits",
    "tiled.blockwise.mask",
    "tiled.blockwise.mods",
    "tiled.blockwise.tuning",
    "tiled.blockwise.key_blocks",
    "tiled.blockwise.slices",
    "tiled.blockwise.softmax",
    "tiled.blockwise.matmul",
    "kernels.classic.__init__",
    "kernels.classic.standard",
    "kernels.classic.flash1",
    "kernels.triton.__init__",
    "kernels.triton.tangent",
    "kernels.triton.backward",
    "kernels.triton.forward",
    "kernels.triton.decode",
    "kernels.triton.tables",
    "kernels.triton.tuning",
    "kernels.pallas_call.tile",
    "kernels.pallas_call.by_triton",
    "kernels.pallas_call.interpreted",
    "kernels.pallas_call.mods",
    "kernels.pallas_call.__init__",
    "kernels.ampere.__init__",
    "kernels.ampere.forward",
    "kernels.ampere.backward",
    "kernels.ampere.tuning",
    "kernels.hopper.__init__",
    "kernels.hopper.forward",
    "kernels.hopper.second_consumer",
    "kernels.hopper.backward",
    "kernels.hopper.backward_dkv",
    "kernels.hopper.dkv_consumer",
    "kernels.hopper.dq_store",
    "kernels.hopper.backward_dq",
    "kernels.hopper.tangent",
    "kernels.hopper.tile",
    "kernels.hopper.sync",
    "kernels.hopper.tuning",
    "kernels.hopper.tile_sizes",
    "kernels.mma.__init__",
    "kernels.mma.score_gradients",
    "kernels.mma.gradients",
    "kernels.mma.tangent",
    "kernels.mma.decode",
    "kernels.mma.padded_rows",
    "kernels.mma.tile",
    "kernels.mma.tuning",
    "kernels.mosaic.operations",
    "kernels.mosaic.launch",
    "kernels.mosaic.roles",
    "kernels.mosaic.statistics",
    "kernels.mosaic.gradients",
    "kernels.mosaic.tangents",
    "kernels.mosaic.logits",
    "kernels.mosaic.mask",
    "kernels.mosaic.mods",
    "kernels.mosaic.packed_mask",
    "kernels.mosaic.bias",
    "kernels.mosaic.dropout",
    "kernels.mosaic.block_info",
    "kernels.mosaic.scheduler",
    "kernels.mosaic.ragged_tail",
    "kernels.mosaic.registers",
    "kernels.mosaic.tiling",
    "kernels.mosaic.__init__",
    "jax_support.hardware",
    "kernels.__init__",
    "tiled.split_kv",
    "tiled.quantised",
    "problem.arguments",
    "problem.call",
    "dropout",
    "checks.sizes",
    "tiled.schedule",
    "tiled.online_softmax",
    "masks.__init__",
    "masks.block_mask",
    "masks.resolution",
    "masks.expression",
    "masks.mask",
    "masks.block_types",
    "masks.resolved_mask",
    "scores",
    "mods.score_mod",
    "mods.mask_mod",
    "mods.bound",
    "mods.traced",
    "mods.captured",
    "mods.programs",
    "mods.derivatives",
    "mods.__init__",
    "checks.__init__",
    "jax_support.xla_flags",
    "checks.unexpected",
    "checks.tracebacks",
    "jax_support.pytrees",
    "jax_support.varying",
    "jax_support.jax_internals",
    "devices.__init__",
    "caches.__init__",
    "choose.selfcheck.__init__",
    "jax_support.__init__",
    "problem.__init__",
    "choose.__init__",
    "transforms.__init__",
    "tiled.__init__",
]


def modules():
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def imported(path):
    """The package's modules that a file imports, in ORDER's names."""
    known = modules()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pallas_flash":
            base = node.module.removeprefix("pallas_flash").strip(".")
            for alias in node.names:
                full = f"{base}.{alias.name}".strip(".")
                for name in (full, f"{full}.__init__", base, f"{base}.__init__".strip(".")):
                    if name in known:
                        yield name
                        break


def test_every_module_has_its_place_in_the_order():
    assert set(modules()) == set(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_a_module_imports_only_from_below(name):
    for other in imported(modules()[name]):
        assert ORDER.index(other) > ORDER.index(name), (
            f"{name} imports {other}, which stands above it"
        )


BACKENDS = {backend.name for backend in backends.BACKENDS}


@pytest.mark.parametrize("name", [name for name in ORDER if name != "choose.backends"])
def test_no_module_but_backends_decides_by_an_implementations_name(name):
    def names_one(node):
        constants = [x.value for x in ast.walk(node) if isinstance(x, ast.Constant)]
        is_name = isinstance(node, ast.Attribute) and ast.unparse(node).endswith("backend.name")
        return is_name or any(x in BACKENDS for x in constants if isinstance(x, str))

    for node in ast.walk(ast.parse(modules()[name].read_text())):
        if isinstance(node, ast.Compare):
            compared = [node.left, *node.comparators]
            assert not any(map(names_one, compared)), ast.unparse(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            assert not any(map(names_one, node.args)), ast.unparse(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("_replace"):
            assert "name" not in [keyword.arg for keyword in node.keywords], ast.unparse(node)


PUBLIC = ("accounting", "context_parallel", "flax", "masks", "scores")  # modules
OUTSIDE = sorted([*(ROOT / "models").glob("*.py"), *(ROOT / "scripts").rglob("*.py")])
# Tiles that no call chooses are timed by what chooses them.
INSIDE = {
    "tiles.py": {"attention", "problem", "transforms", "kernels", "choose"},
    "tune.py": {"choose"},
}


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda p: p.name)
def test_models_and_scripts_use_only_public_names(path):
    public = {*pallas_flash.__all__, *PUBLIC, "__version__"} | INSIDE.get(path.name, set())
    for node in ast.walk(ast.parse(path.read_text())):
        imported, names = [], [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "pallas_flash":
            imported = [f"pallas_flash.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported = [node.module or ""]
        for name in (*names, *imported):
            if name.startswith("pallas_flash."):
                assert name.split(".")[1] in public, f"{path.name} uses {name}"
                is_submodule = name in imported and name.count(".") > 1 and path.name not in INSIDE
                assert not is_submodule, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", sorted((ROOT / "scripts").glob("*.py")), ids=lambda p: p.name)
def test_what_lies_on_top_of_the_scripts_is_a_command(path):
    assert path.read_text().startswith(f'"""python scripts/{path.name}')


# What computes attention, and how an implementation reads a mask.
COMPUTES = ("kernels", "tiled", "transforms")
RESOLVED = {"masks.resolved_mask", "masks.block_types"}


@pytest.mark.parametrize("name", [name for name in ORDER if name.split(".")[0] in COMPUTES])
def test_an_implementation_reads_resolved_masks_and_knows_no_kind_of_mask(name):
    known = {other for other in imported(modules()[name]) if other.startswith("masks.")}
    assert known <= RESOLVED, f"{name} imports {known - RESOLVED}"


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_a_file_says_its_one_job_and_fits_into_one_sitting(path):
    source = path.read_text()
    assert ast.get_docstring(ast.parse(source)), "the first line of a file says its job"
    assert source.count("\n") <= 400
