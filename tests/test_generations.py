"""scripts/generations.py as its user meets it: its counts are those of the accounting, and stand
without a GPU."""

import itertools
import json
import pathlib
import re

import pytest
from matplotlib import image
from pictures import assert_same

from pallas_flash import accounting
from pallas_flash.accounting import published
from scripts import generations
from scripts.bench import machine
from scripts.history import compiled, counts, times

ROOT = pathlib.Path(__file__).parents[1]
FIGURE = ROOT / "pallas_flash" / "design" / "generations.svg"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What the command writes, of counts alone, by its defaults; and what it prints."""
    with pytest.MonkeyPatch.context() as patch:
        printed = []
        patch.setattr(
            "builtins.print", lambda *words, **_: printed.append(" ".join(map(str, words)))
        )
        folder = tmp_path_factory.mktemp("generations")
        assert generations.main(["--counts", "--out", str(folder)]) == 0
    return folder, "\n".join(printed)


def row_of(printed, name):
    """Of the first table that has it."""
    return (
        re.search(rf"^\| {re.escape(name)} +\|(.*)\|$", printed, re.MULTILINE).group(1).split("|")
    )


@pytest.mark.whole
def test_the_paper_stands_beside_its_formulas_and_the_kernels(run):
    _, printed = run
    p = published.gpt2_medium()
    numbers = lambda name: [cell.strip() for cell in row_of(printed, name)]
    for name, kernels in (("standard", published.frameworks(p)), ("flash", published.flash(p))):
        line = numbers(f"{name}, as printed")
        assert (line[1], line[4]) == (str(published.GFLOPS[name]), str(published.GIGABYTES[name]))
        assert line[7] == f"{published.MILLISECONDS[name]} on an A100"
        assert float(numbers(f"{name}, the paper's formulas")[4]) == pytest.approx(
            published.GIGABYTES[name], rel=0.1
        )
        assert float(numbers(f"{name}, the paper's formulas")[1]) == pytest.approx(
            accounting.total(kernels).matrix / 1e9, abs=0.5
        )
    for name in counts.GENERATIONS:
        whole = accounting.total(counts.kernels_of(name, p))
        assert float(numbers(name)[4]) == pytest.approx(whole.bytes / 1e9, abs=0.005)
        assert numbers(name)[7] == ""  # no time without a GPU
    assert numbers("hopper")[5] == "cannot run"
    assert "no times   --counts" in printed


@pytest.mark.whole
def test_the_notes_derive_what_the_paper_printed(run):
    _, printed = run
    assert (
        "75.2 - 66.6 = 8.6: the one product that flash computes again, of one head, is 8.59"
        in printed
    )
    assert re.search(r"the formulas give 67.65, \+1.6%, and 76.24, \+1.4%", printed)
    assert re.search(
        r"without the zeros that algorithm 4 writes to dK and dV first, 4.38, -0.5%", printed
    )


@pytest.mark.parametrize("shape", [(64, 1024, 16, 64), (2, 768, 3, 128)], ids=str)
def test_every_step_from_the_papers_bytes_to_the_kernels_is_accounted_for(shape):
    """The steps are formulas of their own; no step is what is left over."""
    p = counts.the_problem(*shape)
    ways = counts.ways(p)
    assert [way.stop for way in ways] == list(counts.GENERATIONS)
    for way in ways:
        assert way.end == accounting.total(counts.kernels_of(way.stop, p)).bytes, way.stop


@pytest.mark.whole
def test_memory_of_flash_is_linear_and_the_published_ratios_follow():
    rows = [
        row
        for row in counts.by_length(published.gpt2_medium(), [1024, 2048, 4096])
        if not row.causal
    ]
    for one, twice in itertools.pairwise(rows):
        assert twice.extra["standard"] > 3.9 * one.extra["standard"]
        for name in ("flash1", "triton", "hopper"):
            assert twice.extra[name] == 2 * one.extra[name]
    ratios = [(row.arrays + row.kept) / (row.arrays + row.flash) for row in rows[1:]]
    assert ratios == pytest.approx(counts.PUBLISHED_MEMORY, rel=0.1)


def test_larger_tiles_move_fewer_bytes_and_never_less_than_the_bound():
    rows = counts.by_block(published.gpt2_medium(), [16, 64, 256])
    assert (
        rows[0].forward > rows[1].forward > rows[2].forward
        and rows[0].backward > rows[1].backward > rows[2].backward
    )
    assert all(12 < row.forward / row.bound < 36 for row in rows)


@pytest.mark.whole
def test_the_json_holds_what_was_printed(run):
    folder, _ = run
    data = json.loads((folder / "generations.json").read_text())
    assert data["published"]["gigabytes"] == published.GIGABYTES
    assert (
        set(data["table"]) > set(counts.GENERATIONS)
        and len(data["lengths"]) == 12
        and len(data["blocks"]) == 6
    )
    assert (
        data["ways"][0]["begin"] + sum(step for _, step in data["ways"][0]["steps"])
        == data["table"]["standard"]["bytes"]
    )


@pytest.mark.whole
def test_the_committed_figure_shows_what_is_counted_today(run):
    folder, _ = run
    again = f"stale: run python scripts/generations.py --counts --figure {FIGURE.relative_to(ROOT)}"
    assert_same(FIGURE, folder / "generations.svg", again)


def test_readme_shows_the_figure():
    assert f"]({FIGURE.relative_to(ROOT)})" in (ROOT / "README.md").read_text()


# ---- compiled memory ----


def test_where_nothing_can_be_compiled_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(
        compiled.gpu_code, "missing", lambda: "it needs wheels: pip install -e '.[compile]'"
    )
    assert compiled.temporaries("H200", published.gpt2_medium()) == (
        {},
        "it needs wheels: pip install -e '.[compile]'",
    )


@pytest.mark.skipif(
    compiled.gpu_code.missing() is not None,
    reason=f"compiling for a GPU: {compiled.gpu_code.missing()}",
)
def test_compiled_memory_is_what_the_formulas_say():
    p = published.gpt2_medium()
    found, gpu = compiled.temporaries("H200", p)
    assert gpu == "H200" and set(counts.GENERATIONS) == set(found)
    for name, temporary in found.items():
        assert temporary == pytest.approx(counts.memory(name, p), rel=0.02), name


# ---- as on a GPU ----


@pytest.mark.whole
def test_on_a_gpu_it_times_every_generation_and_says_what_could_not_run(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(machine, "on_gpu", lambda: True)
    monkeypatch.setattr(machine, "_query", lambda names: ["no-such-program"])
    monkeypatch.setattr(times, "GENERATIONS", ("standard", "flash1", "hopper"))
    monkeypatch.setattr(published, "gpt2_medium", lambda: counts.the_problem(1, 32, 1, 64))
    assert (
        generations.main(
            f"--lengths 32 --tokens 32 --blocks 16 --repeats 2 --out {tmp_path}".split()
        )
        == 0
    )
    printed = capsys.readouterr().out
    timed = {
        name: rows
        for name, rows in json.loads((tmp_path / "generations.json").read_text()).items()
        if "timed" in name
    }
    assert [len(rows) for rows in timed.values()] == [3 * 3 * 2, 3 * 2, 2]
    for row in itertools.chain(*timed.values()):
        assert row["status"] == ("not run" if row["name"] == "hopper" else "ok"), row["reason"]
    assert re.search(
        r"^not run +hopper, .*: implementation 'hopper' cannot run", printed, re.MULTILINE
    )
    assert re.search(r"^\| 32 +\| full +\| time +\| +\| +[\d.]+ +\|", printed, re.MULTILINE)
    assert image.imread(tmp_path / "generations-times.png").std() > 0.01


def test_a_block_that_triton_cannot_have_is_refused(capsys):
    with pytest.raises(SystemExit):
        generations.main(["--blocks", "48"])
    assert (
        "must be a power of two from 16 on, as Triton wants tiles; got 48"
        in capsys.readouterr().err
    )
