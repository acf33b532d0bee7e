"""The code of README.md and of the pages in docs/ runs as it stands, their links lead somewhere,
and what the tree cites of scripts/results.md and of notes beside kernels is there."""

import doctest
import importlib
import inspect
import pathlib
import re
import sys
import traceback

import jax
import pytest
from pictures import assert_same
from processes import ROOT, printed_by
from selection import needs_mosaic, whole_but

import pallas_flash.flax
from pallas_flash import __main__, accounting, explain, flash_attention, masks, scores
from scripts import draw_speed
from scripts.bench import gpu_code, results
from setup import for_an_index

PACKAGE = ROOT / "pallas_flash"
README = (ROOT / "README.md").read_text()
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))]
HEAVY = ("decoding.md", "derivatives.md", "devices.md", "flax.md", "masks.md", "migrating.md")
RESULTS = ROOT / "scripts" / "results.md"
NOTES = {path.parent.name: path for path in PACKAGE.glob("kernels/*/NOTES.md")}
MEASURED = [str(path.relative_to(ROOT)) for path in (RESULTS, *NOTES.values())]
# test_design.py, test_other_models.py and test_recipes.py run these
ELSEWHERE = "docs/DESIGN.md", "docs/other_models.md", "docs/recipes.md"
WITH_CODE = [
    name for name in PAGES if name not in ELSEWHERE and "```python\n" in (ROOT / name).read_text()
]
LIGHT = [name for name in WITH_CODE if name.split("/")[-1] not in HEAVY]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


@pytest.mark.parametrize("name", whole_but(WITH_CODE, *LIGHT))
def test_the_code_of_a_page_runs_from_top_to_bottom(name):
    namespace = {}
    for code in re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.S):
        exec(compile(code, name, "exec"), namespace)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_its_code_needs_beside_the_package(name):
    page = (ROOT / name).read_text()
    code = "".join(re.findall(r"```py(?:thon)?\n(.*?)```", page, re.S))
    imported = {*re.findall(r"^ *(?:import|from) (\w+)", code, re.M)}
    brought = {"jax", "jaxtyping", "numpy", "pallas_flash"}
    for module in imported - brought - {*sys.stdlib_module_names}:
        in_flax = module in ("flax", "orbax")
        said = r"extra `flax`|'\.\[flax" if in_flax else rf"(pip install .*|# for \S*){module}"
        assert re.search(said, page), module


PUT_OURS = """
import jax.numpy as jnp

of_jax, of_flax = blocks
q = jnp.ones((1, 4, 2, 8), jnp.bfloat16)
exec(of_jax)
_, lse = jax.nn.dot_product_attention(q, q, q, implementation="xla", return_residual=True)
assert lse.dtype == q.dtype and jax.nn.dot_product_attention is not theirs
exec(of_flax)
layers = nnx.MultiHeadAttention(2, 8, rngs=nnx.Rngs(0)), linen.SelfAttention(2)
assert [layer.attention_fn for layer in layers] == [attention_fn] * 2
"""


def test_the_conftests_for_other_packages_tests_put_ours_in_place():
    """In a process of its own, since they change jax and Flax."""
    blocks = re.findall(r"```py\n(.*?)```", (ROOT / "docs/verify.md").read_text(), re.S)
    program = f"import jax\nblocks = {blocks!r}{PUT_OURS}"
    printed_by(program)


@pytest.mark.parametrize(
    "name, most",
    {"README.md": 1300, "scripts/results.md": 4000, **dict.fromkeys(MEASURED[1:], 2500)}.items(),
)
def test_a_page_stays_short(name, most):
    assert len((ROOT / name).read_text().split()) <= most


def table_of(page: str, first: str) -> list[list[str]]:
    """The rows of the table whose header begins with this cell."""
    text = (ROOT / page).read_text()
    lines = re.search(rf"^\| {re.escape(first)} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.M)[1]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines.splitlines()]


TIMED = results.of_an_h100()


def test_the_speeds_that_readme_shows_are_those_of_results_the_default_first():
    assert list(TIMED)[1] == results.BACKWARD
    rows = table_of("README.md", "head size, mask, T")
    assert len(rows) == 7
    for name, *cells in rows:
        expected = []
        for timed in TIMED.values():
            one = next(x for x in timed if f"{x.case}, {x.T}" == name)
            ratios = (one.peers.get(peer) for peer in ("cuDNN", "fa3"))
            ratios = ", ".join("–" if x is None else results.as_text(x) for x in ratios)
            expected.append(f"{one.tflops:.0f} ({ratios})")
        assert cells == expected, name
    packed = next(cells for name, *cells in rows if "16 documents" in name)
    times = re.search(r"backward of 16 packed documents takes cuDNN \[([\d.]+) times", README)[1]
    assert f"({times}, " in packed[1]
    backward = of_fa3(results.BACKWARD)
    assert f"FlashAttention-3, which takes {backward} of the default's time from T = 1024" in README
    faq = " ".join((ROOT / "docs/faq.md").read_text().split())
    both = f"{backward} of the time of the default, and {of_fa3(results.DETERMINISTIC)} of that of"
    assert f"from T = 1024 on, takes {both} `deterministic=True`" in faq


def of_fa3(passes: str) -> str:
    """From which to which time over ours, from T = 1024 on."""
    ratios = [x.peers["fa3"] for x in TIMED[passes] if x.T > 512 and "fa3" in x.peers]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def test_the_faq_lists_every_peer_that_is_faster_on_an_h100():
    names = {"fa3": "FlashAttention-3"}
    faster = {}
    for column, timed in enumerate(TIMED.values()):
        for one in timed:
            found = (f"{names.get(peer, peer)} {text}" for peer, text in one.faster_peers().items())
            faster.setdefault(f"{one.case}, {one.T}", [""] * 3)[column] = ", ".join(found)
    expected = {name: cells for name, cells in faster.items() if any(cells)}
    assert {
        name: cells for name, *cells in table_of("docs/faq.md", "head size, mask, T")
    } == expected


def test_the_picture_of_speed_shows_what_results_says(tmp_path):
    draw_speed.main(["--out", str(tmp_path / "speed.svg")])
    assert_same(draw_speed.PICTURE, tmp_path / "speed.svg", "stale: run scripts/draw_speed.py")
    assert f"]({draw_speed.PICTURE.relative_to(ROOT)})" in README


def test_explain_prints_what_its_page_shows():
    q = jax.ShapeDtypeStruct((2, 1000, 8, 64), "bfloat16")
    k = jax.ShapeDtypeStruct((2, 1000, 2, 64), "bfloat16")
    differs = ["tiles "]  # by machine
    if jax.__version_info__ < (0, 11, 2):
        differs += ["not hopper ", "not blackwell ", "not ampere "]

    def lines(text):
        return [next(filter(line.startswith, differs), line) for line in text.strip().splitlines()]

    shown = re.search(r"```text\n(.*?)```", (ROOT / "docs/verify.md").read_text(), re.S).group(1)
    assert lines(shown) == lines(str(explain(q, k, k, is_causal=True)))


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(path: pathlib.Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", path.read_text(), re.M)}


@pytest.mark.parametrize("name", [*PAGES, *MEASURED])
def test_a_link_leads_to_a_file_and_a_heading(name):
    page = ROOT / name
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.S)
    for *_, target in LINK.findall(text):
        if target.startswith("http"):
            continue
        path, _, heading = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not heading or heading in anchors(there), target


def test_the_layout_names_what_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text[text.index("## Repository") : text.index("## Code")]
    named = re.findall(r"`([\w/]+(?:/|\.py))`", table)
    for name in named:
        assert (PACKAGE / name).exists() or (ROOT / name).exists(), name
    folders = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    families = {f"kernels/{path.parent.name}/" for path in PACKAGE.glob("kernels/*/__init__.py")}
    assert folders | families <= {*named}


@pytest.mark.parametrize(
    "implementation",
    ["blockwise", pytest.param("hopper", marks=needs_mosaic)],
)
def test_a_call_goes_the_way_that_contributing_shows(implementation):
    page = (ROOT / "CONTRIBUTING.md").read_text()
    *shown, forward, launch = re.findall(r"^\| \d+ \| `([\w/]+\.py)` (\w+) \|", page, re.M)
    where = launch if implementation == "hopper" else ("tiled/blockwise/__init__.py", "forward")
    stacks = []

    def when_called(frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and file == str(PACKAGE / where[0]) and frame.f_code.co_name == where[1]:
            stacks.append(traceback.extract_stack(frame))

    q = jax.ShapeDtypeStruct((1, 248, 1, 64), "bfloat16")
    attend = lambda q: flash_attention(q, q, q, is_causal=True, implementation=implementation)
    before = sys.getprofile()
    with gpu_code.as_if_on(accounting.GPUS["H200"]):
        sys.setprofile(when_called)
        try:
            jax.jit(attend).lower(q) if implementation == "blockwise" else jax.eval_shape(attend, q)
        finally:
            sys.setprofile(before)
    ours = [frame for frame in stacks[0] if frame.filename.startswith(str(PACKAGE))]
    way = [(str(pathlib.Path(x.filename).relative_to(PACKAGE)), x.name) for x in ours]
    if implementation == "hopper":
        assert way == [*shown, forward, launch]
    else:
        assert len(way) <= 12 and way[-4:] == [*shown[-4:-1], where]


def test_the_reference_has_every_public_name():
    shown = re.findall(r"^::: pallas_flash\.([\w.]+)$", (ROOT / "docs/api.md").read_text(), re.M)
    public = [
        name for name in pallas_flash.__all__ if not inspect.ismodule(getattr(pallas_flash, name))
    ]
    for module in (accounting, pallas_flash.flax):
        public += [f"{module.__name__.partition('.')[2]}.{name}" for name in module.__all__]
    for module in (masks, scores):
        classes = [x for x in vars(module).values() if isinstance(x, type)]
        internal = [masks.BlockTypes]
        own = [x for x in classes if x.__module__.startswith(module.__name__) and x not in internal]
        public += [f"{module.__name__.partition('.')[2]}.{x.__name__}" for x in own]
    assert {name for name in public if "._" not in name} <= {*shown}


API = (ROOT / "docs/api.md").read_text()
# whose docstrings have an example; those of masks draw them
EXAMPLES = [
    *re.findall(r"^::: (pallas_flash\.masks\.\w+)$", API, re.M),
    "pallas_flash.flash_attention",
    "pallas_flash.flash_attention_jvp",
    "pallas_flash.attention_weights",
    "pallas_flash.merge_attention",
    "pallas_flash.dropout_mask",
    "pallas_flash.explain",
    "pallas_flash.scores.Alibi",
    "pallas_flash.paged_attention",
    "pallas_flash.paged_cache",
    "pallas_flash.context_parallel.Ring",
    "pallas_flash.flax.attention_fn",
    "pallas_flash.flax.FlashAttention",
]


def docstring(name: str) -> str:
    module, _, own = name.rpartition(".")
    return inspect.getdoc(getattr(importlib.import_module(module), own))


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of_a_docstring_prints_what_it_shows(name):
    example = doctest.DocTestParser().get_doctest(docstring(name), {}, name, None, None)
    assert example.examples
    printed = []
    failed, _ = doctest.DocTestRunner(verbose=False).run(example, out=printed.append)
    assert not failed, "".join(printed)


def test_the_reference_cuts_no_sentence_into_names():
    """Where it says what is returned and raised."""
    for name in EXAMPLES:
        for line in docstring(name).partition("Raises:\n")[2].partition("\n\n")[0].splitlines():
            assert line.startswith("    ") or re.match(r"  (\w+Error(, )?)+: ", line), line


def test_the_site_loads_nothing_from_elsewhere():
    site = (ROOT / "mkdocs.yml").read_text()
    assert "://" not in site, site
    assert "font: false" in site


def test_install_says_of_drivers_what_the_command_says():
    page, source = (ROOT / "docs/install.md").read_text(), inspect.getsource(__main__)
    assert all(f"driver {driver} or newer" in page for driver in __main__.PLUGINS.values())
    quoted = re.findall(r"^\| `(.*?)` \|", page.partition("| it says |")[2], re.M)
    fixed = [re.split(r"jax-\S+|=\S+|\d\S+", message) for message in quoted]
    assert len(fixed) == 6
    assert [part for parts in fixed for part in parts if part.strip() not in source] == []


def test_the_options_of_commands_exist():
    sources = [
        *ROOT.glob("scripts/**/*.py"),
        ROOT / "pallas_flash/__main__.py",
        ROOT / "tests/conftest.py",
    ]
    # as add_argument has it, or a row of a table of options
    option = re.compile(r'"--([a-z][a-z-]*)"|"([a-z][a-z-]*)": \(')
    found = (option.findall(path.read_text()) for path in sources)
    known = {f"--{name or row}" for of_file in found for name, row in of_file}
    for name in [*PAGES, *MEASURED]:
        commands = re.findall(
            r"(?:scripts/\w+\.py|-m pallas_flash)[^`\n|]*", (ROOT / name).read_text()
        )
        options = set(re.findall(r"--[a-z][a-z-]+", " ".join(commands)))
        assert options <= known, f"{name}: {options - known}"


def test_what_code_cites_of_results_and_notes_is_a_heading_there():
    """As results.md#cpu, hopper/NOTES.md#executed, or NOTES.md#executed beside it."""
    cited = [
        (path.name, NOTES[family or path.parent.name] if page == "NOTES" else RESULTS, heading)
        for folder in ("pallas_flash", "scripts", "models")
        for path in (ROOT / folder).rglob("*.py")
        for family, page, heading in re.findall(
            r"(?:(\w+)/)?(results|NOTES)\.md#([\w-]+)", path.read_text()
        )
    ]
    assert cited, "nothing is cited"
    assert [each for each in cited if each[2] not in anchors(each[1])] == []


@pytest.mark.parametrize("repository", [None, "https://example.org/flash"])
def test_on_a_package_index_no_link_leads_nowhere(repository):
    here, there = LINK.findall(README), LINK.findall(for_an_index(README, repository))
    assert all(target.startswith("https://") for *_, target in there)
    if repository:
        kinds = {"!": "raw", "": "blob"}
        assert there == [
            (mark, text, target if "://" in target else f"{repository}/{kinds[mark]}/main/{target}")
            for mark, text, target in here
        ]
    else:
        assert here and all(
            text in for_an_index(README, None) for mark, text, _ in here if not mark
        )
