"""scripts/benchmark.py as its user meets it, and what it promises of blockwise's memory, by compiling alone."""

import functools
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from matplotlib import image

from scripts import benchmark

TINY = "--lengths 67 --heads 2 --kv-heads 1 --head-size 16 --batch 3 --dtype float32 --repeats 3 --memory-lengths".split()


@pytest.fixture(scope="module")
def script():
    return benchmark


@pytest.fixture
def peer(script, monkeypatch):
    """Adds a peer for one test: peer(name, attend)."""
    return lambda *args: monkeypatch.setattr(script, "PEERS", [*script.PEERS, script.Contender(*args)])


def lines_of(capsys, *words):
    return [line for line in capsys.readouterr().out.splitlines() if all(word in line for word in words)]


def rows_of(folder, part="timed"):
    """{(T, passes, name): row} of benchmark.json."""
    rows = json.loads((folder / "benchmark.json").read_text())[part]
    return {(row["case"]["T"], row["passes"], row["name"]): row for row in rows}


def test_a_run_prints_a_table_and_writes_json_and_png(script, tmp_path, capsys):
    assert script.main([*TINY, "--memory-lengths", "128", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for name in ("device", "versions", "commit", "date", "inputs", "times", "ratio", "flops", "memory", "error"):
        assert re.search(rf"^{name} +\S", printed, re.MULTILINE), name
    rows = rows_of(tmp_path)
    assert len(rows) == 2 * 2
    for (T, passes, name), row in rows.items():
        assert row["status"] == "ok" and len(row["seconds"]) == 3 and row["error"] < 1e-5
        assert row["median"] == sorted(row["seconds"])[1]
        ratio = row["median"] / rows[T, passes, "blockwise"]["median"]
        assert re.search(rf"^\| {T} +\| {re.escape(passes)} +\| {name} .*\| {ratio:.2f} ", printed, re.MULTILINE)
    compiled = rows_of(tmp_path, "compiled")
    assert len(compiled) == 2 and all(row["temporary_bytes"] > 0 and not row["seconds"] for row in compiled.values())
    assert image.imread(tmp_path / "benchmark.png").std() > 0.01


def test_nothing_to_compile_or_time_is_no_obstacle(script, tmp_path, capsys):
    arguments = "--lengths 16 --implementations jax.nn/cudnn --dtype float32 --repeats 1 --memory-lengths --full --out"
    assert script.main([*arguments.split(), str(tmp_path)]) == 0
    assert len(lines_of(capsys, "not run", "jax.nn/cudnn", "full: it ")) == 2
    assert (tmp_path / "benchmark.png").exists()


def wrong_in_its_last_row(script, q, k, v, causal):
    o = script.jax_nn("xla")(q, k, v, causal)
    return o.at[:, -1].set(v[:, -1])


def test_a_wrong_result_is_reported_and_not_timed(script, peer, tmp_path, capsys):
    peer("careless", functools.partial(wrong_in_its_last_row, script))
    assert script.main([*TINY, "--implementations", "careless", "--dtype", "bfloat16", "--out", str(tmp_path)]) == 1
    for (_, passes, _), row in rows_of(tmp_path).items():
        assert row["status"] == "wrong" and not row["seconds"] and "o is off by" in row["reason"]
        assert ("dq is off by" in row["reason"]) == (passes == "forward+backward")
    assert len(lines_of(capsys, "wrong", "careless", "o is off by", "the tolerance is")) == 2


def test_a_wrong_gradient_is_enough(script, peer, tmp_path):
    peer("stopped", lambda q, k, v, causal: script.jax_nn("xla")(q, lax.stop_gradient(k), v, causal))
    assert script.main([*TINY, "--implementations", "stopped", "--out", str(tmp_path)]) == 1
    status = {passes: row["status"] for (_, passes, _), row in rows_of(tmp_path).items()}
    assert status == {"forward": "ok", "forward+backward": "wrong"}


def test_what_raises_is_reported_with_its_error_and_the_others_are_timed(script, peer, tmp_path, capsys):
    def raises(q, k, v, causal):
        raise RuntimeError(f"no kernel for {q.shape[1]} queries")

    peer("broken", raises)
    assert (
        script.main([*TINY, "--implementations", "blockwise", "broken", "--memory-lengths", "128", "--out", str(tmp_path)]) == 1
    )
    rows = rows_of(tmp_path)
    assert rows[67, "forward", "broken"]["reason"] == "RuntimeError: no kernel for 67 queries"
    assert all(row["status"] == ("ok" if name == "blockwise" else "failed") for (*_, name), row in rows.items())
    assert len(lines_of(capsys, "failed", "broken", "RuntimeError: no kernel for")) == 2 + 1  # and the compiled one


def test_what_would_not_fit_into_memory_is_not_run(script, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(script, "memory_limit", lambda: 10**6)
    arguments = "--lengths 1024 --heads 1 --dtype float32 --implementations jax.nn/xla --memory-lengths --out"
    assert script.main([*arguments.split(), str(tmp_path)]) == 0
    assert len(lines_of(capsys, "not run", "jax.nn/xla", "over the limit of 0.0 GB")) == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--implementations fast", "got 'fast'. Or one of jax.nn/xla"),
        ("--heads 3 --kv-heads 2", "--heads must be a multiple of --kv-heads; got 3 and 2."),
        ("--lengths 0", "must be at least 1; got 0"),
    ],
)
def test_a_wrong_argument_is_explained(script, capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        script.main(arguments.split())
    assert message in capsys.readouterr().err


def test_a_round_calls_each_once_in_an_order_that_rotates(script):
    called = []
    calls = {name: functools.partial(called.append, name) for name in "abc"}
    times = script.interleave(calls, 4)
    assert [len(times[name]) for name in "abc"] == [4, 4, 4]
    assert "".join(called[-12:]) == "abcbcacababc"


def test_the_error_is_relative_to_the_block_that_is_wrong(script):
    want = np.ones((2, 200, 3, 5), np.float32)
    want[:, 128:] *= 1e-2  # as late rows of causal attention are small
    x = want.copy()
    x[1, 150, 2] *= 2
    assert script.error(jnp.asarray(want), want) == 0
    np.testing.assert_allclose(script.error(jnp.asarray(x), want), (1 / 64) ** 0.5, rtol=1e-5)
    assert np.isnan(script.error(jnp.asarray(x).at[0, 0, 0, 0].set(jnp.nan), want))


# ---- what is claimed of memory; nothing here is run ----


@functools.cache
def temporary_bytes(script, name, T, N):
    case = script.Case(B=1, T=T, S=T, N=N, K=N, H=64, dtype="float32", causal=True)
    row = script.memory(script.contender(name), case)
    assert row.status == "ok", row.reason
    return row.temporary_bytes


def test_65536_tokens_take_less_than_300_megabytes(script):
    assert temporary_bytes(script, "blockwise", 65536, 1) < 300e6


@pytest.mark.parametrize("T", [16384, 32768])
def test_temporaries_grow_at_most_linearly(script, T):
    assert temporary_bytes(script, "blockwise", 2 * T, 1) <= 2.1 * temporary_bytes(script, "blockwise", T, 1)


def test_4096_tokens_take_an_eighth_of_the_memory_of_jax_nn(script):
    assert temporary_bytes(script, "blockwise", 4096, 4) <= temporary_bytes(script, "jax.nn/xla", 4096, 4) / 8
