"""Kernels are checked on this machine before they run by default: implementations that lie, raise,
hang and crash are found."""

import contextlib
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
from check import close
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from selection import whole_but

import pallas_flash
from pallas_flash import (
    backends,
    explain,
    flash_attention,
    masks,
    paged_attention,
    paged_cache,
    schedule,
    trial,
)
from pallas_flash.__main__ import main, print_machine
from pallas_flash.accounting import GPUS
from pallas_flash.caches import attend
from pallas_flash.kernels import device, hopper, triton
from pallas_flash.masks import block_types
from pallas_flash.selfcheck import comparison, records, verdicts
from scripts import gpu_code

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
    """Puts fakes before all others, as on a GPU that nobody has checked, and as in a new
    process."""

    def install(*names_and_fakes):
        made = (fakes.backend(x) if isinstance(x, str) else x for x in names_and_fakes)
        fakes.install(monkeypatch.setattr, *made)

    return install


@pytest.fixture
def checked(monkeypatch):
    """The names of the implementations that were checked, in order."""
    names, check = [], comparison.check
    monkeypatch.setattr(
        comparison,
        "check",
        lambda backend, *args: (names.append(backend.name), check(backend, *args))[1],
    )
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


def test_kernels_that_are_right_are_checked_once_recorded_and_taken(
    install, checked, cache, caplog
):
    install("honest")
    for _ in range(2):
        np.testing.assert_array_equal(call(), call(implementation="reference"))
    install("honest")  # a new process
    call()
    assert checked == ["honest"] and taken() == "honest" and len(list(cache.iterdir())) == 1
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
        do, dlse = backends.blockwise_tangent(fake.log_base(problem), problem, *args)
        return times * do, dlse

    fake = fakes.backend("honest", tangent=tangent)
    install(fake)
    call()
    assert not ran
    along = lambda **kw: jax.jit(lambda q: jax.jvp(lambda q: call(q, **kw), (q,), (q,))[1])(Q)
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
        taken() == "honest"
        and "wrong on this machine: dk is off by" in explain(Q, Q, Q).why_not["liar"]
    )
    install("liar", "honest")  # a new process knows it, and says it again
    with pytest.warns(RuntimeWarning, match="liar.*dk is off by"):
        call()
    assert checked == ["liar", "honest"]


def test_what_could_not_be_checked_is_not_wrong_and_is_checked_again(
    install, checked, cache, monkeypatch
):
    errors = [MemoryError("another job has it"), MemoryError("still")]

    def forward(*args):
        if errors:
            raise errors.pop(0)
        return fakes.REFERENCE.forward(*args)

    install(fakes.backend("late", forward), "honest")
    late = lambda text: pytest.warns(
        RuntimeWarning, match=f"late.*: not checked on this machine: MemoryError: {text}. Falling"
    )
    with late("another job has it"):
        call()
    call()  # too early: what takes long and fails is not tried at every trace
    assert (
        checked == ["late", "honest"]
        and "not checked on this machine" in explain(Q, Q, Q).why_not["late"]
    )
    monkeypatch.setattr(verdicts, "AGAIN", 0)
    verdicts._again.update(dict.fromkeys(verdicts._again, 0))
    with late("still"):
        call()
    assert taken() == "honest" and [path.name.split("-")[0] for path in cache.iterdir()] == [
        "honest"
    ]
    call()
    assert checked == ["late", "honest", "late", "late"] and taken() == "late"


def test_what_the_compiler_refuses_is_recorded_and_not_compiled_in_every_process(install, checked):
    def forward(*_):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 107008\nand so on"
        )

    for _ in range(2):
        install(fakes.backend("wide", forward))
        with pytest.warns(
            RuntimeWarning,
            match="wide.*: wrong on this machine: the compiler rejects it: .*107008. Falling",
        ):
            call()
    assert checked == ["wide"]


def test_the_limit_is_for_kernels_that_run_and_not_for_their_compiler(install, monkeypatch):
    limits, traced, ran, in_a_thread = [], [], [], verdicts._in_a_thread
    monkeypatch.setattr(
        verdicts,
        "_in_a_thread",
        lambda f, limit=None: (limits.append(limit), in_a_thread(f, limit))[1],
    )
    run = fakes.when_it_runs(lambda: ran.append(limits[-1]))
    install(
        fakes.backend("slow to compile", lambda *args: (traced.append(limits[-1]), run(*args))[1])
    )
    flash_attention(Q, Q, Q)
    assert set(traced[:1]) == {None} and set(ran[:1]) == {verdicts.LIMIT}


def test_kernels_that_hang_end_the_call_with_what_to_do_and_are_not_taken_again(
    install, checked, monkeypatch
):
    hung = threading.Event()
    sleeper = fakes.backend("sleeper", fakes.when_it_runs(hung.wait))
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
    assert (
        "implementation  crasher, if its self-check passes on this machine: the first call runs "
        "it, or python" in text
    )
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


def test_the_environment_names_the_implementation_of_calls_that_name_none(
    install, checked, monkeypatch
):
    install("liar")
    monkeypatch.setenv("PALLAS_FLASH_IMPLEMENTATION", "blockwise")
    call()
    assert checked == [] and taken(implementation="reference") == "reference"
    text = str(explain(Q, Q, Q))
    assert "implementation  blockwise, as PALLAS_FLASH_IMPLEMENTATION says" in text
    assert "not liar        blockwise was selected by name" in text


@pytest.mark.parametrize(
    "name, text",
    [
        (
            "IMPLEMENTATION",
            "PALLAS_FLASH_IMPLEMENTATION must be unset or one of honest, hopper, .*; got 'no'",
        ),
        (
            "SELF_CHECK",
            r"PALLAS_FLASH_SELF_CHECK must be 0 \(trust the kernels\), 1 or unset .*; got 'no'",
        ),
    ],
)
def test_a_bad_value_in_the_environment_has_a_clear_error(name, text, install, monkeypatch):
    install("honest")
    monkeypatch.setenv(f"PALLAS_FLASH_{name}", "no")
    with pytest.raises(ValueError, match=text):
        call()


# ---- the records ----

VARIANT = verdicts.Variant("honest", 64, 64, "float32", "deterministic")


@pytest.mark.parametrize("field", records.Machine._fields)
def test_a_record_holds_for_one_gpu_driver_jax_and_package(field):
    assert records.write(VARIANT, fakes.GPU, dict(wrong=None)) is None
    assert records.read(VARIANT, fakes.GPU)["wrong"] is None
    assert records.read(VARIANT, fakes.GPU._replace(**{field: "another"})) is None


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


def test_a_folder_that_cannot_be_written_leaves_all_but_the_record(install, checked, cache, caplog):
    cache.write_text("a file where the folder should be")
    install("honest")
    call()
    assert checked == ["honest"] and taken() == "honest"
    assert "cannot save the result of the self-check of honest" in caplog.messages[-1]


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
    elsewhere = jax.sharding.AbstractDevice(
        device_kind="NVIDIA H200", num_cores=132, platform="gpu"
    )
    with jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((), (), abstract_device=elsewhere)
    ):
        assert records.machine() is None


# ---- the check itself ----


@pytest.mark.parametrize(
    "result, name", [("o", "o"), ("lse", "lse"), ("query", "dq"), ("key", "dk"), ("value", "dv")]
)
def test_one_wrong_row_is_found_in_every_result(result, name, install):
    backend = fakes.backend("liar", *fakes.lie(result))
    wrong = comparison.check(backend, explain(Q, Q, Q).problem, [fakes.TINY])().wrong
    assert f"{name} is off by" in wrong


def test_nan_is_wrong():
    x = np.ones((1, 70, 2, 3), np.float32)
    assert not comparison.error(np.where(np.arange(3) == 1, np.nan, x), x) <= 1e9
    assert comparison.error(x, x) == 0


DROPOUT = dict(dropout_rate=0.25, dropout_rng=jax.random.key(0))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, call", [("float32", {}), ("bfloat16", DROPOUT)])
def test_the_portable_kernels_pass_with_room_to_spare(dtype, call):
    backend = backends.find("triton")
    q = jax.ShapeDtypeStruct((1, 8, 2, 50), dtype)
    errors, wrong, _ = comparison.check(backend, explain(q, q, q, **call).problem, [fakes.TINY])()
    assert wrong is None and max(errors.values()) < comparison.TOLERANCE[dtype] / 2


@pytest.mark.gpu
@pytest.mark.skipif(gpu_interpreter.MISSING is not None, reason=str(gpu_interpreter.MISSING))
def test_the_hopper_kernels_pass_with_room_to_spare():
    backend = backends.find("hopper")
    q = jax.ShapeDtypeStruct((1, 8, 2, 50), "bfloat16")
    with gpu_interpreter.hopper_kernels():
        errors, wrong, _ = comparison.check(
            backend, explain(q, q, q, deterministic=False).problem, [fakes.TINY]
        )()
    assert wrong is None and max(errors.values()) < comparison.TOLERANCE["bfloat16"] / 3


@pytest.mark.parametrize("kernels", [hopper, triton], ids=lambda kernels: kernels.__name__)
def test_all_problems_of_a_variant_have_the_tiles_that_were_checked(kernels):
    shape = lambda length, size: jax.ShapeDtypeStruct((1, length, 2, size), "bfloat16")
    some = explain(shape(523, 1), shape(709, 1), shape(709, 1)).problem
    for size in range(1, 257, 9):
        for value_size in range(1, 257, 11):
            for deterministic, dropped in itertools.product((True, False), (0, 1)):
                p = dataclasses.replace(
                    some,
                    head_size=size,
                    value_size=value_size,
                    deterministic=deterministic,
                    dropped=dropped,
                )
                wide = dict(zip(("head_size", "value_size"), comparison.widths(p), strict=True))
                assert kernels.tiles(p) == kernels.tiles(dataclasses.replace(p, **wide))


def test_schemes_are_told_apart_where_the_kernels_are():
    hopper, triton = map(backends.find, ("hopper", "triton"))

    def schemes(backend, size):
        q = jax.ShapeDtypeStruct((1, 8, 2, size), "bfloat16")
        return [
            verdicts.variant_of(backend, explain(q, q, q, deterministic=d).problem).scheme
            for d in (True, False)
        ]

    assert schemes(hopper, 128) == ["deterministic", "in any order"]
    assert schemes(hopper, 256) == schemes(triton, 128) == ["deterministic"] * 2


def test_dropout_is_checked_by_itself_with_weights_dropped():
    (hopper, *_), q = backends.BACKENDS, jax.ShapeDtypeStruct((1, 8, 2, 64), "bfloat16")
    plain, dropping = (explain(q, q, q, **call).problem for call in ({}, DROPOUT))
    assert verdicts.variant_of(hopper, dropping).scheme == "deterministic, dropout"
    assert (
        hopper.tiles(plain)
        != hopper.tiles(dropping)
        == hopper.tiles(comparison.trial(dropping, fakes.TINY)[0])
    )
    other = lambda problem, tiles, x: fakes.REFERENCE.forward(
        problem, tiles, x._replace(seeds=x.seeds + 1)
    )
    wrong = comparison.check(
        fakes.backend("liar", other, fakes.REFERENCE.backward), dropping, [fakes.TINY]
    )().wrong
    assert "o is off by" in wrong


def test_masks_that_are_rules_are_checked_by_themselves_with_blocks_of_all_kinds():
    (hopper, *_), q = backends.BACKENDS, jax.ShapeDtypeStruct((1, 8, 2, 64), "bfloat16")
    problem = explain(q, q, q, mask=masks.Dilated(2)).problem
    assert verdicts.variant_of(hopper, problem).scheme == "deterministic, a rule"
    small, operands, _ = comparison.trial(problem, comparison.SIZES)
    tiles = hopper.tiles(small).forward
    found = schedule.block_kinds(
        operands.resolved_mask,
        small.batch,
        small.heads,
        small.queries,
        tiles.block_q,
        tiles.block_k,
    )
    assert set(np.asarray(found).ravel().tolist()) == {
        block_types.EMPTY,
        block_types.PARTIAL,
        block_types.FULL,
    }
    assert len({head.tobytes() for head in np.asarray(found)[0]}) > 1


def test_a_mask_that_is_an_array_has_blocks_of_all_kinds():
    problem = trial.Case("reference", 64, 64, "bfloat16", True, 0.0, "a mask").problem()
    small, operands, _ = comparison.trial(problem, comparison.SIZES)
    tiles = backends.BACKENDS[0].tiles(small).forward
    found = block_types.from_array(
        operands.mask, small.queries, small.keys, tiles.block_q, tiles.block_k
    )
    assert set(np.asarray(found).ravel().tolist()) == {
        block_types.EMPTY,
        block_types.PARTIAL,
        block_types.FULL,
    }


IGNORED = {  # what a call may have, and problem and operands without it
    "a mask": lambda p, x: (dataclasses.replace(p, mask=None), x._replace(mask=None)),
    "a bias": lambda p, x: (dataclasses.replace(p, bias=None), x._replace(bias=None)),
    "a score_mod": lambda p, x: (dataclasses.replace(p, score=None), x._replace(score=None)),
    "a soft cap": lambda p, x: (dataclasses.replace(p, soft_cap=None), x),
    "segment ids": lambda p, x: (
        p,
        x._replace(
            resolved_mask=dataclasses.replace(x.resolved_mask, query_ids=None, key_ids=None)
        ),
    ),
}


@pytest.mark.parametrize("more", whole_but(IGNORED, "a mask", "a score_mod", "segment ids"))
def test_what_else_changes_logits_is_checked_by_itself(more):
    problem = trial.Case("reference", 64, 64, "bfloat16", True, 0.0, more).problem()
    assert verdicts.variant_of(fakes.REFERENCE, problem).scheme == f"deterministic, {more}"

    def without(problem, tiles, x):
        problem, x = IGNORED[more](problem, x)
        return fakes.REFERENCE.forward(problem, tiles, x)

    wrong = lambda *fake: (
        comparison.check(
            fakes.backend("fake", *fake), problem, [fakes.TINY | dict(batch=2)]
        )().wrong
    )
    assert "o is off by" in wrong(without) and wrong(fakes.REFERENCE.forward) is None


@pytest.mark.parametrize("lacks", whole_but(["left", "offset", "sinks"], "offset"))
def test_windows_offsets_by_row_and_sinks_are_checked_whether_a_call_has_them_or_not(lacks):
    problem = explain(Q, Q, Q).problem
    assert [sizes["sinks"] for sizes in comparison.trials(problem)] == [False, True]

    def without(problem, tiles, x):
        if lacks == "sinks":
            return fakes.REFERENCE.forward(
                dataclasses.replace(problem, sinks=False), tiles, x._replace(sinks=None)
            )
        at = dataclasses.replace(x.resolved_mask, **{lacks: dict(left=None, offset=0)[lacks]})
        return fakes.REFERENCE.forward(problem, tiles, x._replace(resolved_mask=at))

    wrong = lambda *fake: (
        comparison.check(
            fakes.backend("fake", *fake), problem, [fakes.TINY | dict(sinks=True)]
        )().wrong
    )
    assert "o is off by" in wrong(without) and wrong(fakes.REFERENCE.forward) is None


PAGES = [
    attend.Pages(((9, page, 2, 64),) * 2, *of)
    for page, *of in [(8, "int8", False), (16, None, False), (64, "float8_e4m3fn", True)]
]


@pytest.mark.parametrize(
    "pages", [PAGES[0], *(pytest.param(pages, marks=pytest.mark.whole) for pages in PAGES[1:])]
)
def test_kernels_that_read_pages_are_checked_by_themselves(pages, monkeypatch):
    q, k = (jax.ShapeDtypeStruct((1, length, 2, 64), "bfloat16") for length in (1, 4096))
    problem, blockwise = explain(q, k, k).problem, backends.find("blockwise")
    assert (
        verdicts.variant_of(blockwise, problem, pages.way).scheme
        == f"deterministic, decoding, {pages.way.name}"
    )
    sizes = fakes.TINY | dict(queries=3, keys=320, sinks=True)
    right = comparison.check(blockwise, problem, [sizes], pages.way)()
    assert right.errors.keys() == {"o", "lse"} and right.wrong is None
    in_place = attend._in_place
    monkeypatch.setattr(
        attend,
        "_in_place",
        lambda p, page, name, x, table, *s: in_place(p, page, name, x, table + 1, *s),
    )
    assert "o is off by" in comparison.check(blockwise, problem, [sizes], pages.way)().wrong


def test_a_call_with_pages_takes_no_kernel_that_was_found_right_without_them(monkeypatch):
    asked = []
    why_not = lambda backend, problem, check=True, way=comparison.FLASH_ATTENTION: asked.append(
        (backend.name, way.name)
    )
    monkeypatch.setattr(verdicts, "why_not", why_not)
    cache = paged_cache(4, 16, 2, 16, pages=8, page=8, dtype="int8")
    scales = dict(k_scales=cache.key_scale, v_scales=cache.value_scale)
    paged_attention(Q[:, :1], cache.key, cache.value, cache.table, cache.length, **scales)
    assert asked[-1][1] == "pages of 8 int8"


def test_the_gradient_of_a_bias_is_checked():
    problem = trial.Case("reference", 64, 64, "float32", True, 0.0, "a bias").problem()

    def backward(*args):
        gradients = fakes.REFERENCE.backward(*args)
        return gradients._replace(bias=gradients.bias * 1.01)

    wrong = comparison.check(
        fakes.backend("liar", fakes.REFERENCE.forward, backward), problem, [fakes.TINY]
    )().wrong
    assert wrong.startswith("dbias is off by 1.0e-02")


def test_decoding_is_checked_by_itself_on_a_problem_that_is_decoding():
    triton = backends.find("triton")
    q, k = (jax.ShapeDtypeStruct((1, length, 2, 64), "bfloat16") for length in (1, 4096))
    problem = explain(q, k, k).problem
    assert verdicts.variant_of(triton, problem).scheme == "deterministic, decoding"
    (sizes,) = comparison.trials(problem)
    assert triton.tiles(comparison.trial(problem, sizes)[0]).decode is not None


@pytest.mark.parametrize("size", [64, 96, 128])
def test_hopper_is_checked_with_one_tile_to_a_program_and_with_several(size):
    (hopper, *_), q = backends.BACKENDS, jax.ShapeDtypeStruct((4, 4096, 8, size), "bfloat16")
    problem = explain(q, q, q, is_causal=True).problem
    one, several = (
        hopper.tiles(comparison.trial(problem, sizes)[0]).forward
        for sizes in comparison.trials(problem)
    )
    assert one.tiles_per_program == 1 < several.tiles_per_program and several.q_stages == 2


def test_the_largest_error_of_all_trials_counts_and_nan_most(monkeypatch):
    problem = explain(Q, Q, Q).problem
    found = [dict(o=1e-6, dq=float("nan")), dict(o=0.5, dq=1e-6)]
    monkeypatch.setattr(comparison, "_errors", lambda *_: found.pop(0))
    wrong = comparison.check(fakes.backend("honest"), problem, [fakes.TINY, fakes.TINY])().wrong
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
def test_the_command_tells_right_from_wrong_crashed_and_failed_and_records_what_lasts(
    with_fakes, capsys
):
    names = "honest", "liar", "crasher", "raiser"
    assert main(["--implementations", *names, "--dtypes", "float32", "--head-sizes", "64"]) == 1
    out = capsys.readouterr().out
    rows = {
        name: line
        for name in names
        for line in out.splitlines()
        if line.startswith(f"{name} 64/64 float32")
    }
    assert rows["honest"].endswith(" right") and " ms " in rows["honest"]
    assert "WRONG: dk is off by" in rows["liar"]
    assert rows["crasher"].endswith("WRONG: its process died of SIGABRT")
    assert rows["raiser"].endswith("NOT CHECKED: RuntimeError: ptxas fell over")
    assert f"1 of 4 are right. Recorded in {records.folder()}." in out
    found = {name: records.read(VARIANT._replace(implementation=name), fakes.GPU) for name in names}
    assert (
        found["honest"]["wrong"] is None
        and "SIGABRT" in found["crasher"]["wrong"]
        and found["raiser"] is None
    )


CASE = trial.Case("honest", 64, 64, "float32", *trial.SHORT[0])
RIGHT = "print(json.dumps([[{}, None, None], 1, 2]))"
FOUND = {  # by what a process does
    f"print('compiling'); time.sleep(2.5); print('ready', flush=True); input(); {RIGHT}": None,
    "print('ready', flush=True); time.sleep(60)": "wrong on this machine: its check did not finish "
    "within 2 s",
    "print(json.dumps([[{}, 'refused', None]]))": "wrong on this machine: refused",
    "os.abort()": "wrong on this machine: its process died of SIGABRT",
    "os.kill(os.getpid(), 9)": "not checked on this machine: its process died of SIGKILL, which "
    "others send: a system short of "
    "memory, say",
    "print('ready', flush=True); input(); exit('no more')": "not checked on this machine: no more",
}


def processes(monkeypatch, code: str):
    monkeypatch.setattr(
        trial, "COMMAND", [sys.executable, "-c", f"import json, os, sys, time; {code}"]
    )


@pytest.mark.parametrize("code", whole_but(FOUND, *(code for code in FOUND if "sleep" not in code)))
def test_a_process_is_ended_where_it_hangs_and_only_what_lasts_is_its_verdict(code, monkeypatch):
    processes(monkeypatch, code)
    assert trial.in_a_process(CASE, limit=2).verdict.why_not == FOUND[code]


@pytest.mark.whole
def test_several_processes_compile_at_a_time_and_one_runs(monkeypatch, tmp_path):
    log = tmp_path / "log"
    note = lambda word: f"open({str(log)!r}, 'a').write('{word} '); time.sleep(0.3)"
    processes(
        monkeypatch,
        f"{note('compile')}; print('ready', flush=True); input(); {note('run')}; {note('end')}; "
        f"{RIGHT}",
    )
    found = list(trial.findings([CASE] * 3, limit=60, jobs=3))
    assert [finding.verdict.why_not for finding in found] == [None] * 3
    words = log.read_text()
    assert words.count("run end") == 3 and words.startswith("compile compile compile")


def test_by_default_an_h100_checks_what_most_calls_need_within_minutes():
    with gpu_code.as_if_on(GPUS["H100"]):
        if jax.__version_info__ >= (0, 11, 2):
            assert trial.default_names() == ["hopper", "triton"]
        found, _ = trial.cases(["hopper", "triton"], None, ["bfloat16"], False)
    assert len(found) * trial.SECONDS / 8 <= 180
    needed = {
        f"triton {H}/{H} bfloat16, deterministic{more}"
        for H in (32, 64, 128)
        for more in ("", ", decoding")
    }
    assert needed <= {str(variant) for variant in found}


def test_what_the_machine_lacks_is_the_reason_that_is_told():
    with gpu_code.as_if_on(GPUS["A100-80GB"]):
        found, refused = trial.cases(["hopper"], None, ["float16", "float32"], True)
    assert not found and (
        "compute capability 9.0" in refused["hopper"] or jax.__version__ in refused["hopper"]
    )


def test_the_command_says_what_is_taken_and_why_not_the_others(capsys, monkeypatch):
    monkeypatch.setattr(trial, "in_a_process", lambda case, limit: trial.Finding(verdicts.TRUSTED))
    monkeypatch.setattr(device, "compute_capability", lambda: None)
    assert main(["--implementations", "hopper"]) == 1  # there is nothing that it could run
    out = capsys.readouterr().out
    assert "hopper is not here: it needs " in out and "0 of 0 are right." in out
    if jax.default_backend() == "cpu":
        assert out.count("takes  blockwise\n") == 5
    assert main(["--all", "--implementations", "blockwise", "--head-sizes", "64", "192/128"]) == 0
    assert "blockwise 192/128 bfloat16, deterministic, dropout  " in capsys.readouterr().out


CUDA13, CUDA12 = "jax-cuda13-plugin", "jax-cuda12-plugin"


@pytest.mark.parametrize(
    "driver, plugins, environment, told",
    [
        ("unknown", [], {}, "no NVIDIA driver is loaded here; for an NVIDIA GPU pip install "),
        ("580.65.06", [], {}, "driver 580.65.06 is loaded, but jax has no plugin for CUDA: pip "),
        ("535.104.05", [CUDA13], {}, f"{CUDA13} needs a newer driver than 535.104.05: pip install"),
        ("535.104.05", [CUDA12], {}, f"{CUDA12} did not start with driver 535.104.05: it broke\n"),
        ("580.65.06", [CUDA13], {}, f"{CUDA13} did not start with driver 580.65.06: it broke\n"),
        ("580.65.06", [CUDA13], dict(CUDA_VISIBLE_DEVICES="-1"), "CUDA_VISIBLE_DEVICES='-1' hides"),
        ("580.65.06", [CUDA13], dict(JAX_PLATFORMS="cpu"), "JAX_PLATFORMS=cpu names none; unset"),
    ],
)
def test_the_command_says_why_there_is_no_gpu_and_what_to_do(
    driver, plugins, environment, told, capsys, monkeypatch
):
    fakes.unplug(monkeypatch.setattr, driver, plugins, "it broke\nand so on")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", environment.get("JAX_PLATFORMS"))
    try:
        print_machine()
    finally:
        jax.config.update("jax_platforms", before)
    assert f"\nno GPU: {told}" in capsys.readouterr().out


def test_the_command_misses_no_gpu_where_there_is_one(capsys, monkeypatch):
    fakes.plug_in(monkeypatch.setattr, fakes.Device())
    print_machine()
    assert "no GPU" not in capsys.readouterr().out


@pytest.mark.parametrize("text", ["0", "64/300", "wide"])
def test_a_bad_head_size_has_a_clear_error(text, capsys):
    with pytest.raises(SystemExit):
        main(["--head-sizes", text])
    assert "--head-sizes: " in capsys.readouterr().err


def test_the_largest_logits_are_checked_by_themselves():
    q = jax.ShapeDtypeStruct((1, 8, 2, 64), "float32")
    problem = explain(q, q, q, return_max_logits=True).problem
    assert (
        verdicts.variant_of(fakes.REFERENCE, problem).scheme == "deterministic, the largest logits"
    )

    def forward(*args):
        o, stats = fakes.REFERENCE.forward(*args)
        return o, stats._replace(top=stats.top * 1.01)

    wrong = lambda forward: (
        comparison.check(
            fakes.backend("fake", forward, fakes.REFERENCE.backward), problem, [fakes.TINY]
        )().wrong
    )
    assert wrong(fakes.REFERENCE.forward) is None and wrong(forward).startswith(
        "largest is off by 1.0e-02"
    )
