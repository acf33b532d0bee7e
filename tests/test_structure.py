"""The house stays in order: each folder imports only from those below it, and masks are described
once."""

import ast
import collections
import functools
import graphlib

import pytest
from processes import ROOT

import pallas_flash
from pallas_flash.choose import implementations

PACKAGE = ROOT / "pallas_flash"

# Each folder may import from those after it; the modules on top stand between them.
FOLDERS = [
    "flax",
    "caches",
    "choose",
    "transforms",
    "devices",
    "kernels",
    "tiled",
    "problem",
    "masks",
    "mods",
    "checks",
    "jax_support",
]


@functools.cache
def modules():
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
        for path in sorted(PACKAGE.rglob("*.py"))
    }


@functools.cache
def parsed(path):
    return ast.parse(path.read_text())


@functools.cache
def imported(path):
    """The package's modules that a file imports, as `modules` names them."""
    return list(_imported(path))


def _imported(path):
    known = modules()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pallas_flash":
            base = node.module.removeprefix("pallas_flash").strip(".")
            for alias in node.names:
                full = f"{base}.{alias.name}".strip(".")
                for name in (full, f"{full}.__init__", base, f"{base}.__init__".strip(".")):
                    if name in known:
                        yield name
                        break


@functools.cache
def rooms():
    """For each folder, and each module on top, those that it imports from."""
    graph = collections.defaultdict(set)
    for name, path in modules().items():
        room = name.split(".")[0]
        graph[room] |= {other.split(".")[0] for other in imported(path)} - {room}
    return graph


def test_no_module_and_no_folder_needs_what_needs_it():
    for graph in (rooms(), {name: set(imported(path)) for name, path in modules().items()}):
        graphlib.TopologicalSorter(graph).prepare()  # raises at a circle


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_only_from_below(folder):
    graph, todo, below = rooms(), [folder], set()
    while todo:
        new = graph[todo.pop()] - below
        below |= new
        todo += new
    assert below & {*FOLDERS} <= {*FOLDERS[FOLDERS.index(folder) + 1 :]}


def test_every_folder_has_its_place_and_few_modules_stand_beside_them():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders == {*FOLDERS}
    assert len([path for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")]) <= 9


IMPLEMENTATIONS = {*implementations.names()}


@pytest.mark.parametrize("name", [name for name in modules() if name != "choose.implementations"])
def test_only_the_table_of_implementations_decides_by_an_implementations_name(name):
    def names_one(node):
        constants = [x.value for x in ast.walk(node) if isinstance(x, ast.Constant)]
        text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        is_name = text.endswith("implementation.name")
        return is_name or any(x in IMPLEMENTATIONS for x in constants if isinstance(x, str))

    for node in ast.walk(parsed(modules()[name])):
        if isinstance(node, ast.Compare):
            compared = [node.left, *node.comparators]
            assert not any(map(names_one, compared)), ast.unparse(node)


@pytest.mark.parametrize("name", [name for name in modules() if "jax_internals" not in name])
def test_a_module_is_imported_by_a_statement_that_an_editor_follows(name):
    assert "import_module" not in modules()[name].read_text()


PUBLIC = ("accounting", "context_parallel", "flax", "masks", "scores")  # modules
OUTSIDE = sorted([*(ROOT / "models").glob("*.py"), *(ROOT / "scripts").rglob("*.py")])
# Tiles that no call chooses are timed by what chooses them, and features by their names there.
INSIDE = {
    "tiles.py": {"attention", "problem", "transforms", "kernels", "choose"},
    **{name: {"choose"} for name in ("tune.py", "experiments.py", "cases.py", "peers.py")},
}


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda p: p.name)
def test_models_and_scripts_use_only_public_names(path):
    public = {*pallas_flash.__all__, *PUBLIC, "__version__"} | INSIDE.get(path.name, set())
    for node in ast.walk(parsed(path)):
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


@pytest.mark.parametrize("name", [name for name in modules() if name.split(".")[0] in COMPUTES])
def test_an_implementation_reads_resolved_masks_and_knows_no_kind_of_mask(name):
    known = {other for other in imported(modules()[name]) if other.startswith("masks.")}
    assert known <= RESOLVED, f"{name} imports {known - RESOLVED}"


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_a_file_says_its_one_job_and_fits_into_one_sitting(path):
    assert ast.get_docstring(parsed(path)), "the first line of a file says its job"
    assert path.read_text().count("\n") <= 400
