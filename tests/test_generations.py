"""scripts/generations.py counts what the kernels do, and its picture is what it counts today."""

import json
import re
import subprocess
import sys

import jax
import pytest
from observation import attention, observe
from pictures import assert_same

from pallas_flash.accounting import Cost, total
from pallas_flash.jax_support import hardware
from pallas_flash.transforms import autodiff
from scripts import generations
from scripts.bench import gpu_code
from scripts.generations import FIGURE, GENERATIONS, GPT2_MEDIUM, ROOT, Attention

mosaic = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2), reason="the Mosaic kernels need jax 0.11.2"
)
MOSAIC = ("ampere", "hopper", "blackwell")
NAMES = [pytest.param(n, marks=mosaic if n.startswith(MOSAIC) else ()) for n in GENERATIONS]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The picture of the command, and what it prints."""
    with pytest.MonkeyPatch.context() as patch:
        lines, path = [], tmp_path_factory.mktemp("generations") / "generations.svg"
        patch.setattr("builtins.print", lambda *words, **_: lines.append(" ".join(map(str, words))))
        generations.main(["--out", str(path)])
    return path, "\n".join(lines)


@pytest.mark.parametrize("shape", [(1, 256, 2, 64), (1, 384, 1, 128, True)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_formulas_are_what_the_kernels_load_store_and_compute(name, shape, monkeypatch):
    p = Attention(*shape)
    implementation = GENERATIONS[name].implementation
    tiles = p.tiles(implementation, generations.counted_for(GENERATIONS[name]))
    if "online" in name:
        tiles = tiles._replace(online=True)
    if implementation in MOSAIC:  # it is traced, not run
        monkeypatch.setattr(hardware, "interpret", True)
    autodiff.attend.clear_cache()
    attend = attention(implementation, tiles, is_causal=p.causal)
    x = jax.ShapeDtypeStruct((p.B, p.T, p.N, p.H), "float16")
    forward = observe(attend, x, x, x)
    both = observe(lambda q, k, v, do: jax.vjp(attend, q, k, v)[1](do), x, x, x, x)
    autodiff.attend.clear_cache()
    by_xla = ("delta", "cast")
    costs = {n: c for n, c in generations.kernels(name, p).items() if not n.endswith(by_xla)}
    assert observed(both) == total(costs)
    assert observed(forward) == total({n: c for n, c in costs.items() if n.startswith("forward")})


def observed(kernels) -> Cost:
    work = [(k.operations["matrix"], k.operations["exponentials"]) for k in kernels.values()]
    bytes_ = [(k.reads.total(), k.writes.total()) for k in kernels.values()]
    return Cost(*(sum(x) for x in (*zip(*work, strict=True), *zip(*bytes_, strict=True))))


@mosaic
def test_the_table_shows_the_paper_beside_the_kernels(run):
    rows = re.findall(r"^\| (.*?) *\|(.*)\|$", run[1], re.MULTILINE)
    cells = {name: [cell.strip() for cell in row.split("|")] for name, row in rows}
    assert cells["the paper's standard, as printed"][1:6:2] == ["66.6", "40.3", "41.7 measured"]
    for name in GENERATIONS:
        cost = total(generations.kernels(name, GPT2_MEDIUM))
        assert float(cells[name][3]) == pytest.approx(cost.bytes / 1e9, abs=0.005)
    cannot_run = {gpu: set() for gpu in generations.SHOWN}
    for name in GENERATIONS:
        for gpu, cell in zip(generations.SHOWN, cells[name][5:], strict=True):
            cannot_run[gpu] |= {name.partition(" ")[0]} if cell == "cannot run" else set()
    assert [*cannot_run.values()] == [{"hopper", "blackwell"}, {"blackwell"}, {"hopper"}]


@mosaic
def test_the_committed_picture_shows_what_is_counted_today(run):
    assert_same(FIGURE, run[0], "stale: run python scripts/generations.py")
    assert f"]({FIGURE.relative_to(ROOT)})" in (ROOT / "README.md").read_text()


def test_a_jax_without_mosaic_kernels_draws_the_others_and_says_what_it_leaves_out(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    monkeypatch.chdir(tmp_path)
    committed = FIGURE.read_bytes()
    generations.main([])
    said, picture = capsys.readouterr().out, (tmp_path / FIGURE.name).read_text()
    for name, generation in GENERATIONS.items():
        is_drawn = generation.implementation not in MOSAIC
        assert (f"| {name} " in said) == (f"<!-- {name} -->" in picture) == is_drawn, name
        why = rf"Left out: {re.escape(name)}\. implementation '{generation.implementation}' .* it "
        assert bool(re.search(why + r"needs jax 0\.11\.2", said)) != is_drawn
    assert FIGURE.read_bytes() == committed


COMPILE = """
import json, pathlib, sys
from scripts.bench import gpu_code
gpu_code.prepare(pathlib.Path(sys.argv[1]))
import jax
from pallas_flash import flash_attention
from pallas_flash.accounting import GPUS
from scripts.generations import GENERATIONS, GPT2_MEDIUM as p

x, found = jax.ShapeDtypeStruct((p.B, p.T, p.N, p.H), "float16"), {}
for name in sys.argv[3:]:
    options = dict(implementation=name, deterministic=True)
    def both(q, k, v, do):
        o, vjp = jax.vjp(lambda *x: flash_attention(*x, **options), q, k, v)
        return o, *vjp(do)
    program = gpu_code.compiled(GPUS[sys.argv[2]], both, x, x, x, x)
    found[name] = program.memory_analysis().temp_size_in_bytes
print(json.dumps(found))
"""


@pytest.mark.skipif(
    gpu_code.missing() is not None, reason=f"compiling for a GPU: {gpu_code.missing()}"
)
@pytest.mark.parametrize("gpu", [generations.SECOND, generations.THIRD])
def test_compiled_memory_is_what_the_formulas_say(gpu, tmp_path):
    counted = {name: g for name, g in GENERATIONS.items() if generations.counted_for(g) == gpu}
    names = {generation.implementation for generation in counted.values()}
    command = [sys.executable, "-c", COMPILE, str(tmp_path), gpu, *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    for name, generation in counted.items():
        temporary = found[generation.implementation]
        assert temporary == pytest.approx(generation.memory(GPT2_MEDIUM), rel=0.02), name
