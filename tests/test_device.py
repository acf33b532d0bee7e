"""A call is for the device it runs on, not for the best of its machine: CPUs beside a GPU, GPUs
that differ, other platforms."""

import contextlib
import functools
import re
import warnings

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from check import TOLERANCE, close, cotangents, run
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from selection import needs_mosaic, whole_but

from pallas_flash import explain, flash_attention, masks, paged_attention
from pallas_flash.choose import selection
from pallas_flash.choose.selfcheck import comparison, records, verdicts
from pallas_flash.jax_support import hardware
from pallas_flash.transforms import kernel_pass
from pallas_flash.transforms.kernel_pass import KernelPass

CPU = jax.devices("cpu")[0]
H100, A100 = fakes.Device(), fakes.Device("NVIDIA A100-SXM4-80GB", "8.0", 108)
HALF = "hopper" if jax.__version_info__ >= (0, 11, 2) else "triton in 16 bits"
DTYPES = {HALF: jnp.float16, "triton": jnp.float32}  # of which an H100 takes them


@pytest.fixture(autouse=True)
def h100(monkeypatch, tmp_path):
    """This machine has an H100 and an A100 beside its CPU; what is taken unasked was found
    right."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PALLAS_FLASH_SELF_CHECK", "0")
    monkeypatch.delenv("PALLAS_FLASH_IMPLEMENTATION", raising=False)
    fakes.plug_in(monkeypatch.setattr, H100, A100)
    kernel_pass._once.cache_clear()


def qkv(dtype=jnp.float16, B=2, T=20, S=37, N=2, K=1, H=16):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(B, *size, H)), dtype) for size in ((T, N), (S, K), (S, K))]


def on_mesh(kind):
    return lambda x: jax.device_put(
        x, NamedSharding(Mesh(np.array([CPU]), ("data",), axis_types=(kind,)), P("data"))
    )


nothing, anywhere = contextlib.nullcontext, lambda x: x
FOR_THE_CPU = {
    "default_device": (lambda: jax.default_device(CPU), anywhere),
    "default_device by name": (lambda: jax.default_device("cpu"), anywhere),
    "committed arrays": (nothing, lambda x: jax.device_put(x, CPU)),
    "committed NumPy": (nothing, lambda x: jax.device_put(np.asarray(x), CPU)),
    "a mesh with Auto axes": (nothing, on_mesh(AxisType.Auto)),
    "a mesh with explicit axes": (nothing, on_mesh(AxisType.Explicit)),
    "set_mesh": (lambda: jax.set_mesh(Mesh(np.array([CPU]), ("data",))), anywhere),
}


def test_an_h100_takes_its_kernels_for_what_may_lie_there():
    assert {name: explain(*qkv(dtype)).implementation for name, dtype in DTYPES.items()} == {
        name: name.split()[0] for name in DTYPES
    }


@pytest.mark.parametrize("name", whole_but(FOR_THE_CPU, "committed arrays"))
def test_a_call_for_the_cpu_of_a_machine_with_a_gpu_takes_blockwise_and_checks_nothing(
    name, monkeypatch
):
    monkeypatch.setenv("PALLAS_FLASH_SELF_CHECK", "1")
    monkeypatch.setattr(comparison, "check", lambda *_: pytest.fail("a check ran"))
    context, placed = FOR_THE_CPU[name]
    with context():
        for dtype in DTYPES.values():
            found = explain(*map(placed, qkv(dtype)))
            assert (
                found.implementation == "blockwise"
                and "the call is not for a GPU" in found.why_not["triton"]
            )
    taken, choose = [], selection.choose
    monkeypatch.setattr(
        selection, "choose", lambda *args: (taken.append(choose(*args)), taken[-1])[1]
    )
    x = qkv()
    with context():
        o, _ = jax.vjp(flash_attention, *map(placed, x))
    assert {choice.implementation.name for _, choice in taken} == {"blockwise"}
    close(o, flash_attention(*x, implementation="reference"), 2e-3)


# ---- a program of which nobody knows while it is traced where it will run ----

RULE = masks.MaskMod(lambda b, h, q, k: (q // 8 + k // 8 + h + b) % 3 > 0)
CALLS = {
    "causal": dict(is_causal=True),
    "lengths, dropout": dict(
        query_seq_lengths=np.int32([20, 3]),
        key_value_seq_lengths=np.int32([0, 30]),
        query_offset=-2,
        dropout_rate=0.2,
        dropout_rng=jax.random.key(0),
    ),
    "a rule, sinks, a soft cap": dict(mask=RULE, sinks=np.float32([0.3, -1]), logits_soft_cap=2.0),
    "a bias, dropout": dict(
        bias=np.ones((1, 2, 20, 37), np.float32), dropout_rate=0.2, dropout_rng=jax.random.key(0)
    ),
}


@pytest.mark.parametrize("name", whole_but(DTYPES, HALF))
@pytest.mark.parametrize("call", whole_but(CALLS, "lengths, dropout"))
def test_kernels_in_a_program_that_is_lowered_for_a_cpu_are_blockwise(name, call, rng, monkeypatch):
    elsewhere, taken = KernelPass.run_elsewhere, []

    def run_elsewhere(self, *args):
        taken.append((self.implementation.name, self.name))
        return elsewhere(self, *args)

    monkeypatch.setattr(KernelPass, "run_elsewhere", run_elsewhere)
    kw = {
        name: jax.device_put(x, CPU) if hasattr(x, "shape") else x
        for name, x in CALLS[call].items()
    }
    x = [jax.device_put(x, CPU) for x in qkv(DTYPES[name])]
    tolerance = TOLERANCE[str(x[0].dtype)]
    x += cotangents(rng, x[0], x[2])
    found, expected = (run(*x, implementation, **kw) for implementation in (None, "reference"))
    jax.tree.map(lambda x, y: close(x, y, tolerance), found, expected)
    assert taken == [(name.split()[0], each) for each in ("forward", "backward")]


@pytest.mark.whole
def test_vmap_scan_and_checkpoint_of_such_calls_are_blockwise_too():
    q, k, v = qkv(jnp.float32)

    def loss(implementation, q, k, v):
        def one(q, k, v):  # sinks of each call's own: no vmap makes one call of them
            sinks = jnp.full(q.shape[-2], q.mean())
            return flash_attention(
                q, k, v, is_causal=True, sinks=sinks, implementation=implementation
            )

        layer = jax.checkpoint(
            lambda q, _: (jax.vmap(jax.vmap(one))(q[:, None], k[:, None], v[:, None])[:, 0], None)
        )
        return jnp.sum(jnp.sin(jax.lax.scan(layer, q, None, length=2)[0]))

    found, expected = (
        jax.jit(jax.grad(functools.partial(loss, name), (0, 1, 2)))(q, k, v)
        for name in (None, "reference")
    )
    jax.tree.map(lambda x, y: close(x, y, 1e-5), found, expected)


@pytest.mark.parametrize("name", whole_but(DTYPES, "triton"))
def test_pages_in_a_program_that_is_lowered_for_a_cpu_are_read_by_blockwise(name):
    q, pages, _ = qkv(DTYPES[name], T=1, S=8, B=6)
    q, table, lengths = q[:2], jnp.int32([[3, 1, 0], [2, 5, 4]]), jnp.int32([20, 9])
    attend = lambda implementation: jax.jit(
        lambda *x: paged_attention(*x, implementation=implementation, return_residual=True)
    )
    found, expected = (
        attend(name)(*jax.device_put((q, pages, pages, table, lengths), CPU))
        for name in (None, "reference")
    )
    jax.tree.map(lambda x, y: close(x, y, 2e-3), found, expected)


@pytest.mark.parametrize("name", whole_but(DTYPES, HALF))
@pytest.mark.parametrize("sinks", whole_but([None, 9.0], None))
def test_the_largest_logits_of_such_programs_are_there_too(sinks, name):
    x = jax.device_put(qkv(DTYPES[name]), CPU)
    more = dict(
        is_causal=True,
        query_offset=-2,
        sinks=None if sinks is None else np.full(2, sinks),
        return_max_logits=True,
    )
    found, expected = (
        jax.jit(functools.partial(flash_attention, implementation=i, **more))(*x)[1]
        for i in (None, "reference")
    )
    assert np.isneginf(expected[:, :2]).all()
    close(found, expected, 1e-5)


@needs_mosaic
def test_hopper_by_name_says_that_a_cpu_cannot_run_it():
    call = jax.jit(lambda *x: flash_attention(*x, implementation="hopper"))
    with pytest.raises(
        NotImplementedError,
        match=r"'hopper' runs on GPUs only, but the program is lowered for another",
    ):
        call(*qkv())


# ---- rules ----


def test_a_rule_that_keeps_a_call_from_all_kernels_is_warned_of():
    made = lambda n: jnp.exp2(-(jnp.arange(2) + 1.0))[n]
    summed = lambda n: jnp.sum(jnp.where(jnp.arange(2) == n, 0.5, 1.0))

    def run(f, is_mask, **kw):
        mask = masks.MaskMod(lambda b, h, q, k: f(h) * q >= k) if is_mask else None
        score_mod = None if is_mask else lambda s, b, h, q, k: s * f(h)
        call = functools.partial(flash_attention, mask=mask, score_mod=score_mod, **kw)
        jax.eval_shape(call, *qkv())
        return explain(*qkv(), mask=mask, score_mod=score_mod).implementation

    text = r"no GPU kernel evaluates the rules of this call\. Falling back to 'blockwise', which "
    text += r"is plain JAX\. .*triton: <lambda> needs iota, reduce_sum, .* docs/masks\.md"
    for is_mask in (False, True):
        with pytest.warns(RuntimeWarning, match=text):
            assert run(summed, is_mask) == "blockwise"
        with warnings.catch_warnings(action="error"):
            assert run(made, is_mask) != "blockwise"
            run(summed, is_mask, implementation="blockwise")
            with jax.default_device(CPU):
                run(summed, is_mask)


# ---- jax.export ----


def exported(platforms, *x, **kw):
    return export.export(jax.jit(lambda *x: flash_attention(*x, **kw)), platforms=platforms)(*x)


@pytest.mark.parametrize(
    "platforms", [["cpu"], ["tpu"], pytest.param(["cpu", "cuda"], marks=needs_mosaic)]
)
def test_a_machine_with_a_gpu_exports_for_other_platforms_too(platforms):
    x = qkv()
    program = exported(platforms, *x)
    assert ("mosaic_gpu" in program.mlir_module()) == ("cuda" in platforms)
    if "cpu" in platforms:
        loaded = export.deserialize(program.serialize())
        close(loaded.call(*x), flash_attention(*x, implementation="reference"), 2e-3)


def test_who_exports_triton_kernels_is_told_what_jax_asks_of_them(caplog):
    named = jax.sharding.AbstractDevice(A100.device_kind, A100.core_count, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=named)):
        with pytest.raises(ValueError, match="Cannot serialize code with custom calls"):
            exported(["cuda"], *qkv())
        (line,) = caplog.messages
        check = re.search(r'DisabledSafetyCheck.custom_call\("(.*?)"\)', line)[1]
        program = jax.jit(flash_attention)
        program = export.export(
            program,
            platforms=["cuda"],
            disabled_checks=[export.DisabledSafetyCheck.custom_call(check)],
        )
        assert "triton" in export.deserialize(program(*qkv()).serialize()).mlir_module()


def test_who_exports_for_a_gpu_without_one_is_told_once_that_it_is_blockwise(caplog):
    with jax.default_device(CPU):
        for _ in range(2):
            exported(["cuda"], *qkv())
        (line,) = caplog.messages
        assert 'a program for cuda runs "blockwise", not the GPU kernels' in line
        caplog.clear(), kernel_pass._once.cache_clear()
        exported(["cuda"], *qkv(), implementation="blockwise")
        jax.jit(flash_attention)(*qkv())
        assert not caplog.messages


# ---- GPUs that differ ----


def test_each_gpu_has_its_own_kernels_and_verdicts():
    for gpu, capability, processors in (H100, 9.0, 132), (A100, 8.0, 108):
        with jax.default_device(gpu):
            assert (hardware.compute_capability(), hardware.processors()) == (
                capability,
                processors,
            )
            assert records.machine().gpu == gpu.device_kind
    with jax.default_device(CPU):
        assert hardware.compute_capability() is None and records.machine() is None


def test_a_check_runs_on_the_gpu_that_the_call_is_for(monkeypatch):
    monkeypatch.setenv("PALLAS_FLASH_SELF_CHECK", "1")
    monkeypatch.setattr(verdicts, "_known", {})
    found = []
    monkeypatch.setattr(
        comparison, "check", lambda *_: (found.append(hardware.here()), lambda: verdicts.TRUSTED)[1]
    )
    problem = explain(*qkv(jnp.float32)).problem
    for gpu in (A100, H100):
        with jax.default_device(gpu):
            assert selection.choose(problem)[1].implementation.name == "triton"
    assert found == [A100, H100]
