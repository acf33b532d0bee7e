"""Kernels are tried on this machine before they are taken unasked: implementations that lie, raise, hang and crash are found."""

import dataclasses
import itertools
import json
import pathlib
import sys
import threading
import warnings

import fakes
import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pallas_flash
from pallas_flash import backends, explain, flash_attention, masks, schedule, trial
from pallas_flash.__main__ import main
from pallas_flash.kernels import device, hopper, portable
from pallas_flash.machine import records, selfcheck
from pallas_flash.rules import kinds

Q = np.random.default_rng(0).normal(size=(4, 8, 2, 16)).astype(np.float32)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """The user's cache folder, empty; the check is on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PALLAS_FLASH_SELF_CHECK", "1")
    monkeypatch.delenv("PALLAS_FLASH_IMPLEMENTATION", raising=False)
    return tmp_path / "pallas_flash"


@pytest.fixture
def install(monkeypatch):
    """Puts fakes before all others, as on a GPU that nobody has checked, and as in a new process."""

    def install(*names_and_fakes):
        made = (fakes.backend(x) if isinstance(x, str) else x for x in names_and_fakes)
        fakes.install(monkeypatch.setattr, *made)

    return install


@pytest.fixture
def checked(monkeypatch):
    """The names of the implementations that were checked, in order."""
    names, check = [], selfcheck.check
    monkeypatch.setattr(selfcheck, "check", lambda backend, *args: (names.append(backend.name), check(backend, *args))[1])
    return names


def call(q=Q, **kw):
    return flash_attention(q, q, q, is_causal=True, **kw)


def taken(**kw) -> str:
    return explain(Q, Q, Q, is_causal=True, **kw).implementation


def quietly(f, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return f(*args)


# ---- what a call does ----


def test_kernels_that_are_right_are_checked_once_recorded_and_taken(install, checked, cache, caplog):
    install("honest")
    for _ in range(2):
        np.testing.assert_array_equal(call(), call(implementation="reference"))
    install("honest")  # a new process
    call()
    assert checked == ["honest"] and taken() == "honest" and len(list(cache.iterdir())) == 1
    (line,) = caplog.messages
    assert line.startswith("pallas_flash checks its kernels on this Fake GPU, once: honest 16/16 float32, deterministic")


def test_kernels_that_lie_are_told_with_numbers_and_the_next_are_taken(install, checked):
    install("liar", "honest")
    with pytest.warns(RuntimeWarning, match=r"does not take liar 16/16 float32, .*: dk is off by \d.*; the tolerance is 1e-04"):
        np.testing.assert_array_equal(call(), call(implementation="reference"))
    assert taken() == "honest" and "wrong on this machine: dk is off by" in explain(Q, Q, Q).why_not["liar"]
    install("liar", "honest")  # a new process knows it, and says it again
    with pytest.warns(RuntimeWarning, match="liar.*dk is off by"):
        call()
    assert checked == ["liar", "honest"]


def test_kernels_that_raise_are_told_and_not_recorded(install, checked, cache):
    install("raiser")
    with pytest.warns(RuntimeWarning, match="raiser.*: RuntimeError: ptxas fell over. The next implementation serves"):
        call()
    assert checked == ["raiser"] and not cache.exists()


def test_kernels_that_hang_end_the_call_with_what_to_do_and_are_not_taken_again(install, checked, monkeypatch):
    hung = threading.Event()
    sleeper = fakes.backend("sleeper", lambda *_: hung.wait())
    install(sleeper, "honest")
    monkeypatch.setattr(selfcheck, "LIMIT", 0.2)
    with pytest.raises(RuntimeError, match=r"did not end within 0\.2 s.*Start again: sleeper will not be taken"):
        call()
    hung.set()
    monkeypatch.setattr(selfcheck, "LIMIT", 300)
    install(sleeper, "honest")  # a new process
    with pytest.warns(RuntimeWarning, match="sleeper.*did not end"):
        call()
    assert checked == ["sleeper", "honest"] and taken() == "honest"


def mapped(f):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data")))


def on_an_explicit_mesh(f):
    def run(q):
        with jax.set_mesh(jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))):
            return jax.jit(f)(jax.device_put(q, P("data")))

    return run


def with_options(f):
    def run(q):
        with jax.disable_jit(), jax.enable_x64(True):
            return f(q)

    return run


TRANSFORMED = {
    "jit": jax.jit,
    "grad": lambda f: jax.jit(jax.grad(lambda q: jnp.sum(f(q)))),
    "vmap": lambda f: lambda q: jax.vmap(f)(q[:, None])[:, 0],
    "scan": lambda f: lambda q: jax.lax.scan(lambda _, q: (None, f(q[None])[0]), None, q)[1],
    "checkpoint": lambda f: jax.jit(jax.grad(jax.checkpoint(lambda q: jnp.sum(f(q))))),
    "shard_map": mapped,
    "an explicit mesh": on_an_explicit_mesh,
    "options": with_options,
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_check_in_the_middle_of_tracing_is_made_and_disturbs_nothing(name, install, checked):
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices; conftest asks for eight on a CPU")
    install("honest")
    q = jax.device_put(Q)
    found = TRANSFORMED[name](call)(q)
    assert checked == ["honest"]
    expected = TRANSFORMED[name](lambda q: call(q, implementation="reference"))(q)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_explain_runs_nothing_and_names_the_condition(install, checked):
    install("crasher")
    text = str(explain(Q, Q, Q))
    assert "implementation  crasher, if this machine's check finds it right: the first call checks it, or python" in text
    assert checked == []


def test_explain_knows_no_condition_once_the_check_was_right(install):
    install("honest")
    call()
    assert explain(Q, Q, Q).condition is None


# ---- what the environment asks ----


def test_without_the_self_check_kernels_are_trusted(install, checked, monkeypatch):
    install("honest")
    monkeypatch.setenv("PALLAS_FLASH_SELF_CHECK", "0")
    call()
    assert checked == [] and explain(Q, Q, Q).condition is None and taken() == "honest"


def test_the_environment_names_the_implementation_of_calls_that_name_none(install, checked, monkeypatch):
    install("liar")
    monkeypatch.setenv("PALLAS_FLASH_IMPLEMENTATION", "blockwise")
    call()
    assert checked == [] and taken(implementation="reference") == "reference"
    text = str(explain(Q, Q, Q))
    assert "implementation  blockwise, as PALLAS_FLASH_IMPLEMENTATION asks" in text
    assert "not liar        blockwise was asked for" in text


@pytest.mark.parametrize(
    "name, text",
    [
        ("IMPLEMENTATION", "PALLAS_FLASH_IMPLEMENTATION must be unset or one of honest, hopper, .*; got 'no'"),
        ("SELF_CHECK", r"PALLAS_FLASH_SELF_CHECK must be 0 \(trust the kernels\), 1 or unset .*; got 'no'"),
    ],
)
def test_a_bad_value_in_the_environment_has_a_clear_error(name, text, install, monkeypatch):
    install("honest")
    monkeypatch.setenv(f"PALLAS_FLASH_{name}", "no")
    with pytest.raises(ValueError, match=text):
        call()


# ---- the records ----

VARIANT = selfcheck.Variant("honest", 64, 64, "float32", "deterministic")


@pytest.mark.parametrize("field", records.Machine._fields)
def test_a_record_holds_for_one_gpu_driver_jax_and_package(field):
    assert records.write(VARIANT, fakes.GPU, dict(wrong=None)) is None
    assert records.read(VARIANT, fakes.GPU)["wrong"] is None
    assert records.read(VARIANT, fakes.GPU._replace(**{field: "another"})) is None


def test_a_record_holds_as_long_as_no_source_of_the_package_changes(monkeypatch):
    sources = {path: path.read_bytes() for path in pathlib.Path(pallas_flash.__file__).parent.rglob("*.py")}
    digest = lambda: records._sources.__wrapped__()
    monkeypatch.setattr(pathlib.Path, "read_bytes", lambda path: sources[path])
    before = digest()
    for name in ("kernels/hopper/forward.py", "online_softmax.py", "machine/selfcheck.py"):
        path = next(path for path in sources if path.as_posix().endswith(name))
        with monkeypatch.context() as patch:
            patch.setitem(sources, path, sources[path] + b"#")
            assert digest() != before, name
    assert digest() == before


def test_a_folder_that_cannot_be_written_leaves_all_but_the_record(install, checked, cache, caplog):
    cache.write_text("a file where the folder should be")
    install("honest")
    call()
    assert checked == ["honest"] and taken() == "honest"
    assert "cannot record that it checked honest" in caplog.messages[-1]


def test_a_damaged_record_is_written_anew(install, checked, cache):
    install("honest")
    call()
    (path,) = cache.iterdir()
    path.write_text(path.read_text()[:20])
    install("honest")
    call()
    assert checked == ["honest"] * 2 and json.loads(path.read_text())["wrong"] is None


def test_records_are_whole_whoever_else_writes_them(cache):
    def write():
        for i in range(50):
            assert records.write(VARIANT, fakes.GPU, dict(wrong=str(i) * 10_000)) is None

    writers = [threading.Thread(target=write) for _ in range(4)]
    records.write(VARIANT, fakes.GPU, dict(wrong="0"))
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert records.read(VARIANT, fakes.GPU) is not None
    assert len(list(cache.iterdir())) == 1


def test_code_that_is_traced_for_a_gpu_elsewhere_is_not_checked(monkeypatch):
    fakes.plug_in(monkeypatch.setattr, fakes.Device("Fake GPU"))
    assert records.machine().gpu == "Fake GPU"
    elsewhere = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=elsewhere)):
        assert records.machine() is None


# ---- the check itself ----


@pytest.mark.parametrize("position, name", list(enumerate(["o", "lse", "dq", "dk", "dv"])))
def test_one_wrong_row_is_found_in_every_result(position, name, install):
    backend = fakes.backend("liar", *fakes.lie(position))
    wrong = selfcheck.check(backend, explain(Q, Q, Q).problem, [fakes.TINY]).wrong
    assert f"{name} is off by" in wrong


def test_nan_is_wrong():
    x = np.ones((1, 70, 2, 3), np.float32)
    assert not selfcheck.error(np.where(np.arange(3) == 1, np.nan, x), x) <= 1e9
    assert selfcheck.error(x, x) == 0


DROPOUT = dict(dropout_rate=0.25, dropout_rng=jax.random.key(0))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, call", [("float32", {}), ("bfloat16", DROPOUT)])
def test_the_portable_kernels_pass_with_room_to_spare(dtype, call):
    (backend,) = (backend for backend in backends.BACKENDS if backend.name == "portable")
    q = jax.ShapeDtypeStruct((1, 8, 2, 50), dtype)
    errors, wrong = selfcheck.check(backend, explain(q, q, q, **call).problem, [fakes.TINY])
    assert wrong is None and max(errors.values()) < selfcheck.TOLERANCE[dtype] / 2


@pytest.mark.gpu
@pytest.mark.skipif(gpu_interpreter.MISSING is not None, reason=str(gpu_interpreter.MISSING))
def test_the_hopper_kernels_pass_with_room_to_spare():
    (backend,) = (backend for backend in backends.BACKENDS if backend.name == "hopper")
    q = jax.ShapeDtypeStruct((1, 8, 2, 50), "bfloat16")
    with gpu_interpreter.hopper_kernels():
        errors, wrong = selfcheck.check(backend, explain(q, q, q, deterministic=False).problem, [fakes.TINY])
    assert wrong is None and max(errors.values()) < selfcheck.TOLERANCE["bfloat16"] / 3


@pytest.mark.parametrize("kernels", [hopper, portable], ids=lambda kernels: kernels.__name__)
def test_all_problems_of_a_variant_have_the_tiles_that_were_checked(kernels):
    shape = lambda length, size: jax.ShapeDtypeStruct((1, length, 2, size), "bfloat16")
    some = explain(shape(523, 1), shape(709, 1), shape(709, 1)).problem
    for size in range(1, 257, 9):
        for value_size in range(1, 257, 11):
            for deterministic, dropped in itertools.product((True, False), (0, 1)):
                p = dataclasses.replace(some, head_size=size, value_size=value_size, deterministic=deterministic, dropped=dropped)
                wide = dict(zip(("head_size", "value_size"), selfcheck._widths(p), strict=True))
                assert kernels.tiles(p) == kernels.tiles(dataclasses.replace(p, **wide))


def test_schemes_are_told_apart_where_the_kernels_are():
    (hopper, portable, *_) = backends.BACKENDS

    def schemes(backend, size):
        q = jax.ShapeDtypeStruct((1, 8, 2, size), "bfloat16")
        return [selfcheck.variant_of(backend, explain(q, q, q, deterministic=d).problem).scheme for d in (True, False)]

    assert schemes(hopper, 128) == ["deterministic", "in any order"]
    assert schemes(hopper, 256) == schemes(portable, 128) == ["deterministic"] * 2


def test_dropout_is_checked_by_itself_with_weights_dropped():
    (hopper, *_), q = backends.BACKENDS, jax.ShapeDtypeStruct((1, 8, 2, 64), "bfloat16")
    plain, dropping = (explain(q, q, q, **call).problem for call in ({}, DROPOUT))
    assert selfcheck.variant_of(hopper, dropping).scheme == "deterministic, dropout"
    assert hopper.tiles(plain) != hopper.tiles(dropping) == hopper.tiles(selfcheck.trial(dropping, fakes.TINY)[0])
    other = lambda problem, tiles, x: fakes.REFERENCE.forward(problem, tiles, x._replace(seeds=x.seeds + 1))
    wrong = selfcheck.check(fakes.backend("liar", other, fakes.REFERENCE.backward), dropping, [fakes.TINY]).wrong
    assert "o is off by" in wrong


def test_masks_that_are_rules_are_checked_by_themselves_with_blocks_of_all_kinds():
    (hopper, *_), q = backends.BACKENDS, jax.ShapeDtypeStruct((1, 8, 2, 64), "bfloat16")
    problem = explain(q, q, q, mask=masks.Dilated(2)).problem
    assert selfcheck.variant_of(hopper, problem).scheme == "deterministic, a rule"
    small, operands, _ = selfcheck.trial(problem, selfcheck.SIZES)
    tiles = hopper.tiles(small).forward
    found = schedule.block_kinds(operands.visibility, small.batch, small.heads, small.queries, tiles.block_q, tiles.block_k)
    assert set(np.asarray(found).ravel().tolist()) == {kinds.EMPTY, kinds.PARTIAL, kinds.FULL}
    assert len({head.tobytes() for head in np.asarray(found)[0]}) > 1


def test_a_mask_that_is_an_array_has_blocks_of_all_kinds():
    problem = trial.Case("reference", 64, 64, "bfloat16", True, 0.0, "a mask").problem()
    small, operands, _ = selfcheck.trial(problem, selfcheck.SIZES)
    tiles = backends.BACKENDS[0].tiles(small).forward
    found = kinds.of_array(operands.mask, small.queries, small.keys, tiles.block_q, tiles.block_k)
    assert set(np.asarray(found).ravel().tolist()) == {kinds.EMPTY, kinds.PARTIAL, kinds.FULL}


@pytest.mark.parametrize("name", ["mask", "bias", "score"])
def test_what_else_changes_logits_is_checked_by_itself(name):
    more = next(more for more in selfcheck.MORE if more.startswith(f"a {name}"))
    problem = trial.Case("reference", 64, 64, "bfloat16", True, 0.0, more).problem()
    assert selfcheck.variant_of(fakes.REFERENCE, problem).scheme == f"deterministic, {more}"

    def without(problem, tiles, x):
        return fakes.REFERENCE.forward(dataclasses.replace(problem, **{name: None}), tiles, x._replace(**{name: None}))

    wrong = lambda *fake: selfcheck.check(fakes.backend("fake", *fake), problem, [fakes.TINY]).wrong
    assert "o is off by" in wrong(without) and wrong(fakes.REFERENCE.forward) is None


def test_the_gradient_of_a_bias_is_checked():
    problem = trial.Case("reference", 64, 64, "float32", True, 0.0, "a bias").problem()

    def backward(*args):
        dq, dk, dv, dbias = fakes.REFERENCE.backward(*args)
        return dq, dk, dv, dbias * 1.01

    wrong = selfcheck.check(fakes.backend("liar", fakes.REFERENCE.forward, backward), problem, [fakes.TINY]).wrong
    assert wrong.startswith("dbias is off by 1.0e-02")


def test_decoding_is_checked_by_itself_on_a_problem_that_is_decoding():
    (_, portable, *_) = backends.BACKENDS
    q, k = (jax.ShapeDtypeStruct((1, length, 2, 64), "bfloat16") for length in (1, 4096))
    problem = explain(q, k, k).problem
    assert selfcheck.variant_of(portable, problem).scheme == "deterministic, decoding"
    (sizes,) = selfcheck.trials(problem)
    assert portable.tiles(selfcheck.trial(problem, sizes)[0]).decode is not None


@pytest.mark.parametrize("size", [64, 96, 128])
def test_hopper_is_checked_with_one_tile_to_a_program_and_with_several(size):
    (hopper, *_), q = backends.BACKENDS, jax.ShapeDtypeStruct((4, 4096, 8, size), "bfloat16")
    problem = explain(q, q, q, is_causal=True).problem
    one, several = (hopper.tiles(selfcheck.trial(problem, sizes)[0]).forward for sizes in selfcheck.trials(problem))
    assert one.rounds == 1 < several.rounds and several.q_stages == 2


def test_the_largest_error_of_all_trials_counts_and_nan_most(monkeypatch):
    problem = explain(Q, Q, Q).problem
    found = [dict(o=1e-6, dq=float("nan")), dict(o=0.5, dq=1e-6)]
    monkeypatch.setattr(selfcheck, "_errors", lambda *_: found.pop(0))
    wrong = selfcheck.check(fakes.backend("honest"), problem, [fakes.TINY, fakes.TINY]).wrong
    assert wrong.startswith("o is off by 5.0e-01, dq is off by nan; ")


# ---- python -m pallas_flash ----


@pytest.fixture
def with_fakes(install, monkeypatch):
    """Processes that know the fakes, as this one does."""
    install(*fakes.FORWARDS)
    tests = str(pathlib.Path(__file__).parent)
    run = f"import sys; sys.path[:0] = [{tests!r}]; import fakes; fakes.main()"
    monkeypatch.setattr(trial, "COMMAND", [sys.executable, "-c", run])


@pytest.mark.whole
def test_the_command_tells_right_from_wrong_crashed_and_failed_and_records_what_lasts(with_fakes, capsys):
    names = "honest", "liar", "crasher", "raiser"
    assert main(["--implementations", *names, "--dtypes", "float32", "--head-sizes", "64"]) == 1
    out = capsys.readouterr().out
    rows = {name: line for name in names for line in out.splitlines() if line.startswith(f"{name} 64/64 float32")}
    assert rows["honest"].endswith(" right") and " ms " in rows["honest"]
    assert "WRONG: dk is off by" in rows["liar"]
    assert rows["crasher"].endswith("WRONG: its process died of SIGABRT")
    assert rows["raiser"].endswith("WRONG: RuntimeError: ptxas fell over")
    assert f"1 of 4 are right. Recorded in {records.folder()}." in out
    found = {name: records.read(VARIANT._replace(implementation=name), fakes.GPU) for name in names}
    assert found["honest"]["wrong"] is None and "SIGABRT" in found["crasher"]["wrong"] and found["raiser"] is None


def test_a_process_that_hangs_is_ended_and_that_is_its_verdict(with_fakes):
    finding = trial.in_a_process(trial.Case("sleeper", 64, 64, "float32", *trial.SCHEMES[0]), limit=0.5)
    assert finding.verdict.wrong == "its check did not end within 0.5 s" and finding.lasting


def test_the_command_says_what_is_taken_and_why_not_the_others(capsys, monkeypatch):
    monkeypatch.setattr(trial, "in_a_process", lambda case, limit: trial.Finding(selfcheck.TRUSTED))
    monkeypatch.setattr(device, "compute_capability", lambda: None)
    assert main(["--implementations", "hopper"]) == 1  # there is nothing that it could run
    out = capsys.readouterr().out
    assert "hopper is not here: implementation 'hopper' cannot run this call: " in out and "0 of 0 are right." in out
    if jax.default_backend() == "cpu":
        assert out.count("takes  blockwise\n") == 5
    assert main(["--implementations", "blockwise", "--head-sizes", "64", "192/128"]) == 0
    assert "blockwise 192/128 bfloat16, deterministic, dropout  " in capsys.readouterr().out


@pytest.mark.parametrize("text", ["0", "64/300", "wide"])
def test_a_bad_head_size_has_a_clear_error(text, capsys):
    with pytest.raises(SystemExit):
        main(["--head-sizes", text])
    assert "--head-sizes: " in capsys.readouterr().err


def test_the_largest_logits_are_checked_by_themselves():
    q = jax.ShapeDtypeStruct((1, 8, 2, 64), "float32")
    problem = explain(q, q, q, return_max_logits=True).problem
    assert selfcheck.variant_of(fakes.REFERENCE, problem).scheme == "deterministic, the largest logits"

    def forward(*args):
        o, stats = fakes.REFERENCE.forward(*args)
        return o, stats._replace(top=stats.top * 1.01)

    wrong = lambda forward: selfcheck.check(fakes.backend("fake", forward, fakes.REFERENCE.backward), problem, [fakes.TINY]).wrong
    assert wrong(fakes.REFERENCE.forward) is None and wrong(forward).startswith("largest is off by 1.0e-02")
