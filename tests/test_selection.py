"""The fast half of the tests leaves nothing out that has a name."""

import itertools
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import conftest
import jax
import jax.numpy as jnp
import pytest
from selection import EACH_TURN, TURNS, diagonal, fast_half, mark_for_a_gpu, one_turn
from test_paged_arguments import pages

from pallas_flash import paged_attention
from pallas_flash.jax_support import hardware


@pytest.mark.parametrize("sizes", [(19, 3), (2, 3, 3), (11, 2, 2), (4,), (2, 2)], ids=str)
def test_every_value_of_every_parameter_occurs_once_at_least(sizes):
    rows = list(itertools.product(*(range(size) for size in sizes)))
    kept = [rows[i] for i in diagonal(rows)]
    assert len(kept) == max(sizes)
    assert [len(set(column)) for column in zip(*kept, strict=True)] == list(sizes)


def test_pairs_of_other_values_take_turns():
    rows = list(itertools.product(range(5), "ab", "cd"))
    assert {rows[i][1:] for i in diagonal(rows)} == {("a", "c"), ("b", "d"), ("a", "d"), ("b", "c")}


def test_a_test_without_parameters_runs():
    assert diagonal([()]) == [0]


def test_what_is_marked_whole_is_left_out_and_with_names_these_implementations_alone():
    def item(implementation, *marks):
        spec = SimpleNamespace(params=dict(implementation=implementation))
        marker = pytest.mark.whole(*marks[0]).mark if marks else None
        common = dict(
            function="f",
            path="p",
            iter_markers=lambda name: [],
            get_closest_marker=lambda name: marker,
        )
        return SimpleNamespace(callspec=spec, **common)

    items = [item("a"), item("b", ("b", "c")), item("d", ("b", "c")), item("e", ())]
    assert fast_half(items) == [items[0], items[2]]


def test_in_sixteen_turns_each_test_runs_once():
    path = pathlib.Path("tests/test_masks.py")
    items = [SimpleNamespace(nodeid=f"test_{n}", path=path) for n in range(100)]
    turns = [one_turn(items, number) for number in range(7, 7 + TURNS + 1)]
    assert turns[0] == turns[TURNS] and all(turns)
    assert sorted(items.index(item) for turn in turns[:TURNS] for item in turn) == [*range(100)]


@pytest.mark.parametrize("name", EACH_TURN)
def test_what_the_tables_say_is_tested_in_each_turn(name):
    path = pathlib.Path(__file__).parent / name
    assert path.exists()
    item = SimpleNamespace(nodeid="test", path=path)
    assert [one_turn([item], number) for number in range(TURNS)] == [[item]] * TURNS


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize(
    "uses, marked, is_for_a_gpu",
    [
        (("implementation", "rng"), False, True),
        (("implementation",), False, False),
        (("rng",), True, True),
        (("rng",), False, False),
    ],
)
def test_a_gpu_runs_what_compares_numbers_and_what_is_marked_and_skips_the_rest(
    uses, marked, is_for_a_gpu, on_gpu
):
    names = ["gpu"] * marked
    item = SimpleNamespace(
        fixturenames=["tmp_path", *uses], get_closest_marker=lambda name: name in names
    )
    item.add_marker = lambda mark: names.append(mark.name)
    mark_for_a_gpu(item, on_gpu)
    assert ("gpu" in names, "skip" in names) == (is_for_a_gpu, on_gpu and not is_for_a_gpu)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_what_a_gpu_is_too_old_for_is_skipped_in_the_words_of_the_refusal(on_gpu, monkeypatch):
    scales = dict.fromkeys(("k_scales", "v_scales"), jnp.ones((4, 256, 1)))
    call = pages(page=256, dtype=jnp.float8_e4m3fn, implementation="triton", **scales)
    monkeypatch.setattr(hardware, "compute_capability", lambda: 8.0)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu" if on_gpu else "cpu")
    test = conftest.pytest_runtest_call(None)
    next(test)
    with pytest.raises(NotImplementedError, match=r"compute capability 8.9") as refusal:
        paged_attention(**call)
    with pytest.raises(
        pytest.skip.Exception if on_gpu else NotImplementedError, match=r"compute capability 8.9"
    ):
        test.throw(refusal.value)


@pytest.mark.whole
def test_a_test_that_hangs_ends_its_process_alone_and_is_named(tmp_path):
    text = "import time\n\ndef test_hangs():\n    time.sleep(100)\n\ndef test_passes():\n    pass\n"
    (tmp_path / "test_two.py").write_text(text)
    settings = pathlib.Path(__file__).parents[1] / "pyproject.toml"
    command = (
        f"-m pytest -q -c {settings} -n 1 -o faulthandler_timeout=2 -p no:cacheprovider {tmp_path}"
    )
    run = subprocess.run(
        [sys.executable, *command.split()], cwd=tmp_path, capture_output=True, text=True, timeout=90
    )
    assert (
        "crashed while running" in run.stdout
        and "test_hangs" in run.stdout
        and "1 failed, 1 passed" in run.stdout
    )
