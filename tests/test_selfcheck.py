"""Kernels are checked on this machine before they run by default: what a call does, what the
environment asks, and the records."""

import contextlib
import json
import pathlib
import re
import threading

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from check import close
from fakes import call, explained
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pallas_flash
from pallas_flash import flash_attention
from pallas_flash.choose.selfcheck import records, trial, verdicts
from pallas_flash.context_parallel import Ring
from pallas_flash.jax_support import jax_internals, options
from pallas_flash.tiled.blockwise.implementation import blockwise_tangent

pytestmark = pytest.mark.usefixtures("verdict_folder")


def taken(**kw) -> str:
    return explained(**kw).implementation


# ---- what a call does ----


def test_kernels_that_are_right_are_checked_once_recorded_and_taken(
    install, checked, verdict_folder, caplog
):
    install("honest")
    for _ in range(2):
        np.testing.assert_array_equal(call(), call(implementation="reference"))
    install("honest")  # a new process
    call()
    assert checked == ["honest"] and len(list(verdict_folder.iterdir())) == 1
    assert (taken(), explained().condition) == ("honest", None)
    (line,) = caplog.messages
    assert line.startswith(
        "pallas_flash: one-time self-check of honest 16/16 float32, deterministic on this Fake GPU"
    )


@pytest.mark.parametrize("times", [1, 2])
def test_forward_mode_is_checked_where_it_is_asked_for_and_blockwises_taken_if_wrong(
    times, install, checked
):
    ran = []

    def tangent(problem, tiles, *args):
        ran.append(times)
        do, dlse = blockwise_tangent(fake.log_base(problem), problem, *args)
        return times * do, dlse

    fake = fakes.fake("honest", tangent=tangent)
    install(fake)
    call()
    assert not ran
    along = lambda **kw: jax.jit(lambda q: jax.jvp(lambda q: call(q, **kw), (q,), (q,))[1])(
        fakes.QUERY
    )
    lies = pytest.warns(RuntimeWarning, match="deterministic, forward mode failed .* do is off by")
    with lies if times == 2 else contextlib.nullcontext():
        found = along()
    close(found, along(implementation="reference"), 1e-5)
    assert ran and checked == ["honest", "honest"] and taken() == "honest"
    close(along(implementation="honest"), times * found, 1e-5)  # by name nothing is checked


def test_kernels_that_lie_are_told_with_numbers_and_the_next_are_taken(install, checked):
    install("liar", "honest")
    with pytest.warns(
        RuntimeWarning,
        match=r"self-check of liar 16/16 float32, .* failed on .*: dk is off by \d.*; "
        "the tolerance is 1e-04",
    ):
        np.testing.assert_array_equal(call(), call(implementation="reference"))
    assert (
        taken() == "honest" and "wrong on this machine: dk is off by" in explained().why_not["liar"]
    )
    install("liar", "honest")  # a new process knows it, and says it again
    with pytest.warns(RuntimeWarning, match="liar.*dk is off by"):
        call()
    assert checked == ["liar", "honest"]


ROWS = P(None, "x")


def refused(*_):
    raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: no such layout")


REFUSED = "wrong on this machine: the compiler rejects it: .*no such layout"


def test_where_one_order_of_the_backward_fails_the_family_runs_the_other(install, checked):
    install(fakes.with_two_orders(in_any_order=refused))
    gradient = lambda **kw: jax.jit(jax.grad(lambda q: jnp.sum(call(q, **kw))))
    gradient(deterministic=True)(fakes.QUERY)
    assert checked == ["hopper_like"] and explained(deterministic=True).condition is None
    told = (
        f"self-check of hopper_like 16/16 float32, in any order failed .*: {REFUSED}. Falling back "
        "to hopper_like 16/16 float32, deterministic, which is right; "
    )
    with pytest.warns(RuntimeWarning, match=told):
        found = gradient()(fakes.QUERY)
    close(found, gradient(implementation="reference")(fakes.QUERY), 1e-5)
    mesh = jax.sharding.Mesh(jax.devices()[:1], "x")
    in_a_ring = lambda q: call(q, context=Ring("x"))
    ring = jax.shard_map(in_a_ring, mesh=mesh, in_specs=ROWS, out_specs=ROWS)
    traced = [TRANSFORMED[name](gradient()) for name in ("vmap", "scan")]
    for f in (*traced, jax.grad(lambda q: jnp.sum(ring(q)))):
        jax.eval_shape(f, fakes.QUERY)
    assert checked == ["hopper_like"] * 2
    says = explained()
    assert (says.implementation, says.tiles, says.problem.deterministic) == ("hopper_like", True, 1)
    assert re.search(f"^whose variant 'in any order' is {REFUSED}$", says.condition)
    assert says.backward.endswith("the one that adds in any order failed its self-check")
    assert taken(implementation="hopper_like") == "hopper_like"


def test_where_products_run_in_another_order_the_family_waits_for_them(install, checked):
    install(fakes.with_waits(refused))
    told = (
        f"self-check of blackwell_like 16/16 float32, deterministic failed .*: {REFUSED}. Falling "
        "back to blackwell_like 16/16 float32, deterministic, waits for reads, which is right; "
    )
    with pytest.warns(RuntimeWarning, match=told):
        found = call()
    close(found, call(implementation="reference"), 1e-5)
    gradient = jax.grad(lambda q: jnp.sum(call(q)))
    mesh = jax.sharding.Mesh(jax.devices()[:1], "x")
    in_a_ring = lambda q: call(q, context=Ring("x"))
    ring = jax.shard_map(in_a_ring, mesh=mesh, in_specs=ROWS, out_specs=ROWS)
    for f in (*(TRANSFORMED[name](gradient) for name in ("vmap", "scan")), ring):
        jax.eval_shape(f, fakes.QUERY)
    assert checked == ["blackwell_like"] * 2
    says = explained()
    assert (says.implementation, says.tiles) == ("blackwell_like", True)
    assert says.backward == "blackwell_like has one for this call, whatever deterministic is"


def test_where_both_orders_of_the_backward_fail_the_next_family_runs(install, checked):
    install(fakes.with_two_orders(refused, refused), "honest")
    with pytest.warns(RuntimeWarning, match="Falling back to the next implementation, ") as told:
        call()
    assert [checked, taken(), len(told)] == [["hopper_like"] * 2 + ["honest"], "honest", 2]
    assert re.search(
        f"^in any order: {REFUSED}; deterministic: {REFUSED}$", explained().why_not["hopper_like"]
    )


@pytest.mark.parametrize("order, taken", [("in order", None), ("in any order", refused)])
def test_of_calls_that_share_keys_the_backward_in_order_runs_where_it_is_right(
    order, taken, install
):
    ran = []
    any_order = lambda *args: (ran.append("in any order"), fakes.REFERENCE.backward(*args))[1]
    in_order = lambda *args: (ran.append("in order"), fakes.REFERENCE.backward(*args))[1]
    install(fakes.with_two_orders(any_order, taken or in_order))
    attend = lambda q: flash_attention(q, fakes.QUERY, fakes.QUERY)
    gradient = jax.grad(lambda q: jnp.sum(jnp.sin(attend(q))))
    told = pytest.warns(RuntimeWarning, match="deterministic failed .* one call after another")
    with told if taken else contextlib.nullcontext():
        found = jax.vmap(gradient)(fakes.QUERY[None])
    assert ran[-1] == order
    close(found[0], gradient(fakes.QUERY), 1e-5)


def test_what_could_not_be_checked_is_not_wrong_and_is_checked_again(
    install, checked, verdict_folder, monkeypatch
):
    errors = [MemoryError("another job has it"), MemoryError("still")]

    def forward(*args):
        if errors:
            raise errors.pop(0)
        return fakes.REFERENCE.forward(*args)

    install(fakes.fake("late", forward), "honest")
    monkeypatch.setattr(verdicts, "AGAIN", 1e6)
    late = lambda text: pytest.warns(
        RuntimeWarning, match=f"late.*: not checked on this machine: MemoryError: {text}. Falling"
    )
    with late("another job has it"):
        call()
    call()  # too early: what takes long and fails is not tried at every trace
    assert (
        checked == ["late", "honest"]
        and "not checked on this machine" in explained().why_not["late"]
    )
    monkeypatch.setattr(verdicts, "AGAIN", 0)
    verdicts._again.update(dict.fromkeys(verdicts._again, 0))
    with late("still"):
        call()
    assert taken() == "honest" and [
        path.name.split("-")[0] for path in verdict_folder.iterdir()
    ] == ["honest"]
    call()
    assert checked == ["late", "honest", "late", "late"] and taken() == "late"


def test_the_limit_is_for_kernels_that_run_and_not_for_their_compiler(install, monkeypatch):
    limits, traced, ran, in_a_thread = [], [], [], verdicts._in_a_thread
    monkeypatch.setattr(
        verdicts,
        "_in_a_thread",
        lambda f, limit=None: (limits.append(limit), in_a_thread(f, limit))[1],
    )
    run = fakes.when_it_runs(lambda: ran.append(limits[-1]))
    install(fakes.fake("slow to compile", lambda *args: (traced.append(limits[-1]), run(*args))[1]))
    call()
    assert set(traced[:1]) == {None} and set(ran[:1]) == {verdicts.LIMIT}


def test_kernels_that_hang_end_the_call_with_what_to_do_and_are_not_taken_again(
    install, checked, monkeypatch
):
    hung = threading.Event()
    sleeper = fakes.fake("sleeper", fakes.when_it_runs(hung.wait))
    install(sleeper, "honest")
    monkeypatch.setattr(verdicts, "LIMIT", 0.2)
    with pytest.raises(
        RuntimeError,
        match=r"did not finish within 0\.2 s.*Restart the process: it will no longer take sleeper",
    ):
        call()
    hung.set()
    monkeypatch.setattr(verdicts, "LIMIT", 300)
    install(sleeper, "honest")  # a new process
    with pytest.warns(RuntimeWarning, match="sleeper.*did not finish"):
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


TRANSFORMED = {
    "jit": jax.jit,
    "grad": lambda f: jax.jit(jax.grad(lambda q: jnp.sum(f(q)))),
    "vmap": lambda f: lambda q: jax.vmap(f)(q[:, None])[:, 0],
    "scan": lambda f: lambda q: jax.lax.scan(lambda _, q: (None, f(q[None])[0]), None, q)[1],
    "checkpoint": lambda f: jax.jit(jax.grad(jax.checkpoint(lambda q: jnp.sum(f(q))))),
    "shard_map": mapped,
    "an explicit mesh": on_an_explicit_mesh,
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_check_in_the_middle_of_tracing_is_made_and_disturbs_nothing(name, install, checked):
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices; conftest asks for eight on a CPU")
    install("honest")
    q = jax.device_put(fakes.QUERY)
    found = TRANSFORMED[name](call)(q)
    assert checked == ["honest"]
    expected = TRANSFORMED[name](lambda q: call(q, implementation="reference"))(q)
    np.testing.assert_allclose(found, expected, atol=1e-6)


OTHER = dict(default_prng_impl="rbg", numpy_dtype_promotion="strict", numpy_rank_promotion="raise")
OTHER |= dict(default_matmul_precision="bfloat16", transfer_guard="disallow")
OTHER |= dict(array_garbage_collection_guard="log", legacy_prng_key="error")


def test_the_check_runs_under_its_own_options(install, monkeypatch):
    of_jax = lambda: {name: getattr(jax.config, f"jax_{name}") for name in options.DEFAULTS}
    seen, before = [], of_jax()
    forward = lambda *args: (seen.append(of_jax()), fakes.REFERENCE.forward(*args))[1]
    install(fake := fakes.fake("fake", forward))
    monkeypatch.setattr(trial, "_measure", lambda *_: seen.append(of_jax()))
    problem = explained().problem
    try:
        for name, value in options.DEFAULTS.items():
            jax.config.update(f"jax_{name}", OTHER.get(name, not value))
        right = verdicts.first_right(fake, [problem])
        trial.run_case(trial.Case("fake", 64, 64, "float32", *trial.SHORT[0]), lambda: None)
    finally:
        for name, value in before.items():
            jax.config.update(f"jax_{name}", value)
    assert right.problem is problem and len(seen) >= 2
    assert all(found == options.DEFAULTS for found in seen)


def test_explain_runs_nothing_and_names_the_condition(install, checked):
    install("crasher")
    text = str(explained())
    assert (
        "implementation  crasher, if its self-check passes on this machine: the first call runs "
        "it, or python" in text
    )
    assert checked == []


# ---- what the environment asks ----


def test_without_the_self_check_kernels_are_trusted(install, checked, monkeypatch):
    install("honest")
    monkeypatch.setenv("PALLAS_FLASH_SELF_CHECK", "0")
    call()
    assert (checked, taken(), explained().condition) == ([], "honest", None)


def test_the_environment_names_the_implementation_of_calls_that_name_none(
    install, checked, monkeypatch
):
    install("liar")
    monkeypatch.setenv("PALLAS_FLASH_IMPLEMENTATION", "blockwise")
    call()
    assert checked == [] and taken(implementation="reference") == "reference"
    text = str(explained())
    assert "implementation  blockwise, as PALLAS_FLASH_IMPLEMENTATION says" in text
    assert "not liar        blockwise was selected by name" in text


BAD = {
    "IMPLEMENTATION": "must be unset or one of honest, hopper, .*; got 'no'",
    "SELF_CHECK": r"must be 0 \(trust the kernels\), 1 or unset .*; got 'no'",
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_in_the_environment_has_a_clear_error(name, install, monkeypatch):
    install("honest")
    monkeypatch.setenv(f"PALLAS_FLASH_{name}", "no")
    with pytest.raises(ValueError, match=f"PALLAS_FLASH_{name} {BAD[name]}"):
        call()


# ---- the records ----


@pytest.mark.parametrize("field", records.Machine._fields)
def test_a_record_holds_for_one_gpu_driver_jax_and_package(field):
    assert records.write(fakes.VARIANT, fakes.GPU, dict(wrong=None)) is None
    assert records.read(fakes.VARIANT, fakes.GPU)["wrong"] is None
    assert records.read(fakes.VARIANT, fakes.GPU._replace(**{field: "another"})) is None


@pytest.mark.parametrize("place", ["jax", "CUDA_HOME", "XLA_FLAGS", "PATH"])
def test_a_record_holds_for_the_ptxas_that_compiles_wherever_it_comes_from(
    place, tmp_path, monkeypatch
):
    (folder := tmp_path / "bin").mkdir()
    ptxas = folder / "ptxas"
    ptxas.write_text("#!/bin/sh\necho Build cuda_99.9\n")
    ptxas.chmod(0o755)
    compilers = records.compilers.__wrapped__
    assert "cuda_99.9" not in compilers()
    if place == "jax":
        monkeypatch.setattr(jax_internals.find("jax._src", "lib"), "cuda_path", str(tmp_path))
    else:
        flag = f"--xla_gpu_cuda_data_dir={tmp_path}"
        value = dict(XLA_FLAGS=flag, PATH=str(folder)).get(place, str(tmp_path))
        monkeypatch.setenv(place, value)
    assert "ptxas Build cuda_99.9" in compilers()


def test_a_record_holds_as_long_as_no_source_of_the_package_changes(monkeypatch):
    sources = {
        path: path.read_bytes() for path in pathlib.Path(pallas_flash.__file__).parent.rglob("*.py")
    }
    digest = lambda: records._sources.__wrapped__()
    monkeypatch.setattr(pathlib.Path, "read_bytes", lambda path: sources[path])
    before = digest()
    for name in ("kernels/hopper/forward.py", "online_softmax.py", "selfcheck/verdicts.py"):
        path = next(path for path in sources if path.as_posix().endswith(name))
        with monkeypatch.context() as patch:
            patch.setitem(sources, path, sources[path] + b"#")
            assert digest() != before, name
    assert digest() == before


def test_a_folder_that_cannot_be_written_leaves_all_but_the_record(
    install, checked, verdict_folder, caplog
):
    verdict_folder.write_text("a file where the folder should be")
    install("honest")
    call()
    assert checked == ["honest"] and taken() == "honest"
    assert "cannot save the result of the self-check of honest" in caplog.messages[-1]


def test_a_damaged_record_is_written_anew(install, checked, verdict_folder):
    install("honest")
    call()
    (path,) = verdict_folder.iterdir()
    path.write_text(path.read_text()[:20])
    install("honest")
    call()
    assert checked == ["honest"] * 2 and json.loads(path.read_text())["wrong"] is None


def test_records_are_whole_whoever_else_writes_them(verdict_folder):
    def write():
        for i in range(50):
            assert records.write(fakes.VARIANT, fakes.GPU, dict(wrong=str(i) * 10_000)) is None

    writers = [threading.Thread(target=write) for _ in range(4)]
    records.write(fakes.VARIANT, fakes.GPU, dict(wrong="0"))
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert records.read(fakes.VARIANT, fakes.GPU) is not None
    assert len(list(verdict_folder.iterdir())) == 1


def test_code_that_is_traced_for_a_gpu_elsewhere_is_not_checked(monkeypatch):
    fakes.plug_in(monkeypatch.setattr, fakes.Device("Fake GPU"))
    assert records.machine().gpu == "Fake GPU"
    elsewhere = jax.sharding.AbstractDevice(
        device_kind="NVIDIA H200", num_cores=132, platform="gpu"
    )
    with jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((), (), abstract_device=elsewhere)
    ):
        assert records.machine() is None
