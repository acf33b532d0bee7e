"""Implementations that are right, lie, raise, hang and crash, put before all others in the table; a
GPU that is not there."""

import copy
import dataclasses
import importlib.metadata
import os
import time

import jax
import numpy as np

import pallas_flash.__main__
from pallas_flash import explain, flash_attention
from pallas_flash.choose import implementations
from pallas_flash.choose.selfcheck import comparison, records, trial, verdicts
from pallas_flash.problem.arguments import Gradients
from pallas_flash.problem.implementation import Implementation

GPU = records.Machine("Fake GPU", "1.2", "jax", "compilers", "sources")
VARIANT = verdicts.Variant("honest", 64, 64, "float32", "deterministic")
QUERY = np.random.default_rng(0).normal(size=(4, 8, 2, 16)).astype(np.float32)
TINY = comparison.SIZES | dict(batch=1, queries=67, keys=131, heads=2, kv_heads=1)
REFERENCE = implementations.REFERENCE


def call(q=QUERY, **kw):
    return flash_attention(q, q, q, is_causal=True, **kw)


def explained(**kw):
    return explain(QUERY, QUERY, QUERY, is_causal=True, **kw)


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU for whom decides by the device; nothing runs on it."""

    device_kind: str = "NVIDIA H100 80GB HBM3"
    compute_capability: str = "9.0"
    core_count: int = 132
    platform: str = "gpu"


def plug_in(put, *gpus: Device):
    """They are the default devices of this machine, beside its CPUs."""
    real = jax.local_devices
    put(
        jax,
        "local_devices",
        lambda backend=None: list(gpus) if backend in (None, "gpu") else real(backend=backend),
    )


def unplug(put, driver: str, plugins: list[str], error: str):
    """A machine where jax has CPUs alone, with this driver and plugins that do not start."""
    real = jax.local_devices

    def local_devices(backend=None):
        if backend in ("cuda", "gpu"):
            raise RuntimeError(error)
        return real(backend="cpu")

    put(jax, "local_devices", local_devices)
    put(records, "driver", lambda: driver)
    put(importlib.metadata, "distributions", lambda name: [name] if name in plugins else [])


def lie(result: str):
    """A forward and backward of which the `result`, "o", "lse" or a field of Gradients, is off in
    the last row of one head."""
    off = lambda name, x: x.at[0, -1, -1].multiply(1.5) if name == result else x

    def forward(*args):
        o, stats = REFERENCE.forward(*args)
        return off("o", o), stats._replace(m=off("lse", stats.m))

    def backward(*args):
        gradients = REFERENCE.backward(*args)._asdict()
        return Gradients(**{name: off(name, x) for name, x in gradients.items()})

    return forward, backward


def raises(*_):
    raise RuntimeError("ptxas fell over\nand so on")


def when_it_runs(act):
    """A forward that compiles, calls act() where it runs, and is right but for that."""

    def forward(problem, tiles, operands):
        o, stats = REFERENCE.forward(problem, tiles, operands)
        return jax.pure_callback(lambda o: (act(), o)[1], o, o), stats

    return forward


hangs, crashes = when_it_runs(lambda: time.sleep(3600)), when_it_runs(os.abort)


FORWARDS = dict(
    honest=REFERENCE.forward, liar=lie("key")[0], raiser=raises, sleeper=hangs, crasher=crashes
)


def fake(
    name: str, forward=None, backward=None, tangent=None, tiles=lambda problem: None
) -> Implementation:
    """An implementation with kernels that runs everything, by these functions."""
    return changed(
        REFERENCE,
        name=name,
        platform="gpu",
        is_dense=False,
        tiles=tiles,
        forward=forward or FORWARDS[name],
        backward=backward or (lie("key")[1] if name == "liar" else REFERENCE.backward),
        has_tangent=lambda tiles: tangent is not None,
        tangent=tangent,
    )


def with_two_orders(in_any_order=None, in_order=None) -> Implementation:
    """A family, "hopper_like", with a backward for each value of deterministic."""
    right = REFERENCE.backward
    backwards = {False: in_any_order or right, True: in_order or right}
    backward = lambda problem, *args: backwards[problem.deterministic](problem, *args)
    return fake("hopper_like", REFERENCE.forward, backward, tiles=lambda p: p.deterministic)


def with_waits(forward, waiting=None) -> Implementation:
    """A family, "blackwell_like", with a forward that relies on the order of products, and one
    that waits."""
    forwards = {False: forward, True: waiting or REFERENCE.forward}
    family = fake(
        "blackwell_like",
        lambda problem, *args: forwards[problem.waits_for_reads](problem, *args),
        tiles=lambda problem: problem.waits_for_reads,
    )
    variants = lambda p: (dataclasses.replace(p, waits_for_reads=waits) for waits in (False, True))
    return changed(family, variants=variants)


def changed(implementation: Implementation, **methods) -> Implementation:
    """The implementation with these functions in place of its methods."""
    new = copy.copy(implementation)
    vars(new).update(methods)
    return new


def replace(put, implementation: Implementation, **methods):
    """Puts the changed implementation in its place in the table."""
    new = changed(implementation, **methods)
    table = (new if each is implementation else each for each in implementations.IMPLEMENTATIONS)
    put(implementations, "IMPLEMENTATIONS", tuple(table))


def install(put, *fakes: Implementation):
    """`put` is monkeypatch.setattr, or setattr where a process ends with it."""
    table = (*fakes, *implementations.IMPLEMENTATIONS)
    put(implementations, "IMPLEMENTATIONS", table)
    put(records, "machine", lambda: GPU)
    put(comparison, "all_sizes", lambda *_, **__: [TINY])
    put(trial, "SHORT", [(True, None)])
    put(verdicts, "_known", {})
    put(verdicts, "_again", {})


def main():
    """python -m pallas_flash with all of them."""
    install(setattr, *map(fake, FORWARDS))
    raise SystemExit(pallas_flash.__main__.main())
