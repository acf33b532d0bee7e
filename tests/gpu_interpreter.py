"""Runs Mosaic GPU kernels on the CPU, in jax's GPU interpreter, with what it lacks in jax 0.11.2
and 0.12.0.1.

jax simulates shared memory, TMA, barriers and warpgroups (as threads), and finds races with vector
clocks. This adds: `run_state` with accumulators; wgmma with an operand in registers; wgmma as the
asynchronous reader of shared memory that it is, ordered only by the waits; TMA reductions;
registers left out of the race detection; an error where a barrier is waited for in vain, and where
the store of a vector leaves its row. It also saves most of the time: a kernel is compiled once
instead of once a warpgroup, and callbacks take NumPy arrays as they are.

Every warpgroup holds a thread of XLA's CPU pool while it waits, and the pool has as many as the
machine has cores: tests set NPROC (conftest.py) before jax starts, or the last warpgroup may never
get a thread. TMA and wgmma run at once, so that a missing wait shows as a race, not as a wrong
number.
"""

import collections
import contextlib
import functools
import threading
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import callback
from jax._src import core as jax_core

from pallas_flash import autodiff
from pallas_flash.kernels import device

try:
    from jax._src.pallas.mosaic.interpret import thread_map
    from jax._src.pallas.mosaic_gpu import core as gpu_core
    from jax._src.pallas.mosaic_gpu import primitives as gpu
    from jax._src.pallas.mosaic_gpu.interpret import (
        gpu_callbacks,
        jaxpr_interpret,
        params,
        race_detection_state,
        shared_memory,
    )
    from jax._src.state import discharge
    from jax._src.state import types as state_types

    MISSING = (
        None
        if hasattr(gpu_callbacks, "call_named_barrier")
        else "its GPU interpreter knows no named barriers"
    )
except ImportError as error:
    MISSING = f"its GPU interpreter lacks {error.name}"
if MISSING:
    MISSING = f"jax {jax.__version__} is too old to run Mosaic GPU kernels on a CPU: {MISSING}"

DEADLOCK_SECONDS = 60.0


class Races:
    found = False


@contextlib.contextmanager
def parameters(detect_races: bool = False):
    """Yields (what to pass as `interpret=` to a kernel, Races); Races.found says afterwards whether
    there were any. It is for CPUs: it starts programs from callbacks of a program, which a GPU
    would wait for for ever."""
    if jax.default_backend() != "cpu":
        pytest.skip(
            "jax's GPU interpreter runs on a CPU alone; here only a Hopper GPU runs the kernels "
            "for it"
        )
    # models functions called bar_op
    options = dict(detect_races=detect_races, inline_mgpu="_hack_model_inline_mgpu_tokamax")
    if "on_race" in params.InterpretGPUParams.__dataclass_fields__:
        options["on_race"] = "print"
    races = Races()
    with contextlib.ExitStack() as stack:
        for owner, name, new in _replacements():
            stack.enter_context(mock.patch.object(owner, name, new))
        try:
            yield params.InterpretGPUParams(**options), races
        except BaseException:
            races.found = detect_races and gpu_callbacks.get_races().races_found
            gpu_callbacks.reset_gpu_interpret_mode_state()
            raise
        races.found = detect_races and gpu_callbacks.get_races().races_found


@contextlib.contextmanager
def hopper_kernels(detect_races: bool = False):
    """Lets `implementation="hopper"` run here, on a Hopper GPU if there is one, else in the
    interpreter. Yields Races, of which the interpreter alone finds any: a test that needs one is
    not marked `gpu`."""
    if device.compute_capability() == 9.0:
        yield Races()
        return
    with parameters(detect_races) as (options, races):
        device.interpret = options
        autodiff._attend_jit.clear_cache()
        try:
            yield races
        finally:
            device.interpret = None
            autodiff._attend_jit.clear_cache()


def _replacements():
    checks = race_detection_state.GPURaceDetectionState
    return [
        (jaxpr_interpret.JaxprInterpreter, "interpret", _interpret),
        (gpu_callbacks, "wgmma", _wgmma),
        (gpu_callbacks, "copy_smem_to_gmem", _copy_smem_to_gmem(gpu_callbacks.copy_smem_to_gmem)),
        (checks, "check_read", _not_for_registers(checks.check_read)),
        (checks, "check_write", _not_for_registers(checks.check_write)),
        (shared_memory.Barrier, "__init__", _with_deadline(shared_memory.Barrier.__init__)),
        (thread_map, "_run_jaxpr", _compiled_once()),
        (callback, "io_callback_impl", _io_callback_of_numpy),
        (shared_memory, "_to_int", _to_int(shared_memory._to_int)),
        (jaxpr_interpret, "DeviceInfo", functools.partial(SimpleNamespace, **ONE_DEVICE)),
        *_one_after_another(),
    ]


# no kernel here speaks to another device's
ONE_DEVICE = dict(device_id=0, num_devices=1, axis_indices={}, axis_sizes={})


def _one_after_another():
    """Kernels of several devices run one after another, each as if alone: jax's end together, and
    wait in vain for a device that runs none, or another one."""
    turn, initialise, clean_up = (
        threading.Lock(),
        gpu_callbacks._initialize_shared_memory,
        gpu_callbacks._clean_up_shared_memory,
    )

    def begin(**kw):
        if not turn.acquire(timeout=DEADLOCK_SECONDS):
            raise TimeoutError(
                f"another device's kernel did not end in {DEADLOCK_SECONDS} s: a deadlock, or "
                "NPROC is too small"
            )
        return initialise(**kw)

    def end(token):
        token = clean_up(token)
        turn.release()
        return token

    return [
        (gpu_callbacks, "_initialize_shared_memory", begin),
        (gpu_callbacks, "_clean_up_shared_memory", end),
    ]


# A step of the interpreter: the equations of a jaxpr, those below by these rules, the runs between
# them by jax's.


def _interpret(
    self, jaxpr, token, *args, stock=None if MISSING else jaxpr_interpret.JaxprInterpreter.interpret
):
    ours = [i for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive in RULES]
    if not ours:
        return stock(self, jaxpr, token, *args)
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))
    read = lambda v: v.val if isinstance(v, jax_core.Literal) else env[v]
    variables = lambda xs: list(dict.fromkeys(v for v in xs if not isinstance(v, jax_core.Literal)))

    done = 0
    for i in [*ours, len(jaxpr.eqns)]:
        between = jaxpr.eqns[done:i]
        written = variables(v for eqn in between for v in eqn.outvars)
        needed = [
            v for v in variables(v for eqn in between for v in eqn.invars) if v not in set(written)
        ]
        later = {
            v
            for v in variables([*jaxpr.outvars, *(v for eqn in jaxpr.eqns[i:] for v in eqn.invars)])
        }
        kept = [v for v in written if v in later]
        part = SimpleNamespace(constvars=[], invars=needed, eqns=between, outvars=kept)
        token, values = stock(self, part, token, *map(read, needed))
        env.update(zip(kept, values, strict=True))
        if i < len(jaxpr.eqns):
            eqn = jaxpr.eqns[i]
            token, values = RULES[eqn.primitive](self, eqn, token, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, values, strict=True))
        done = i + 1
    return token, [read(v) for v in jaxpr.outvars]


def _call(self, function, token, result=None, **kw):
    """Calls `function(shared memory, thread, ...)` on the host, in the order of the token; returns
    token[, its result]."""

    @gpu_callbacks.fail_on_exception
    def on_host(*, token, thread, mesh_location, **kw):
        value = function(gpu_callbacks._get_shared_memory(), thread, **kw)
        return token if result is None else (token, value)

    shapes = gpu_callbacks.TOKEN_SHAPE_DTYPE
    shapes = shapes if result is None else (shapes, result)
    return callback.io_callback(
        on_host, shapes, token=token, thread=self.thread, mesh_location=self.mesh_location, **kw
    )


def _run_state(self, eqn, token, values):
    """Values become buffers in registers while the body runs; at its end all products are waited
    for."""
    jaxpr = eqn.params["jaxpr"]
    is_ref = [isinstance(v.aval, state_types.AbstractRef) for v in eqn.invars]
    keys = []
    for value, ref in zip(values, is_ref, strict=True):
        if not ref:
            token, value = _allocate(self, token, value, eqn.source_info)
        keys.append(value)
    token, _ = self.interpret(jaxpr, token, *keys)
    token = _call(self, functools.partial(_wait_for_products, n=0), token)
    out = []
    for value, key, ref, var in zip(values, keys, is_ref, eqn.outvars, strict=True):
        if not ref:
            if not isinstance(var, jax_core.DropVar):
                token, value = _call(self, _read_registers, token, var.aval, key=key)
            token = gpu_callbacks.call_deallocate_buffer(
                token=token,
                mesh_location=self.mesh_location,
                thread=self.thread,
                allocation_key_as_array=key,
                source_info=eqn.source_info,
            )
        out.append(value)
    return token, out


def _allocate(self, token, value, source_info):
    token, request = gpu_callbacks.call_make_allocation_request_array(
        token=token,
        compute_unit=self.thread,
        memory_space_id=shared_memory.get_memory_space_idx(gpu_core.MemorySpace.REGS),
        initial_ref_count=1,
    )
    return gpu_callbacks.call_allocate_buffer(
        token=token,
        mesh_location=self.mesh_location,
        thread=self.thread,
        allocation_request_as_array=request,
        value=value,
        source_info=source_info,
    )


def _accumulator_load(self, eqn, token, values):
    if (n := eqn.params["wait_n"]) is not None:
        token = _call(self, functools.partial(_wait_for_products, n=n), token)
    token, value = self._interpret_wgmma_accumulator_deref_p(eqn, token, lambda: values)
    return token, [value]


def _wgmma_wait(self, eqn, token, values):
    return _call(self, functools.partial(_wait_for_products, n=eqn.params["n"]), token), []


def _inline_mgpu(self, eqn, token, values):
    if eqn.params["mgpu_fn"].__name__ == "some_below_one":
        return token, [jnp.any(values[0] < 1).astype(jnp.int32)]
    if eqn.params["mgpu_fn"].__name__ == "gather":
        token, value = _call(
            self, _gather, token, eqn.outvars[0].aval, key=values[0], index=values[1]
        )
        return token, [value]
    return self._interpret_inline_mgpu_p(eqn, token, lambda: values)


RULES = {}
if not MISSING:
    RULES = {
        gpu.inline_mgpu_p: _inline_mgpu,
        discharge.run_state_p: _run_state,
        gpu.wgmma_accumulator_deref_p: _accumulator_load,
        gpu.wgmma_wait_p: _wgmma_wait,
    }


# On the host.


def _access(memory, key, transforms=()):
    key = gpu_callbacks.HostAllocationKey.from_array(key)
    return key, memory.access(
        key, jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
    )


def _read_registers(memory, thread, *, key):
    return memory.get_buffer_content(*_access(memory, key), thread)[0]


def _gather(memory, thread, *, key, index):
    return memory.get_buffer_content(*_access(memory, key), thread)[0][index]


def _wgmma(
    *,
    token,
    mesh_location,
    thread,
    acc_allocation_key_as_array,
    acc_transforms,
    a_allocation_key_as_array,
    a_transforms,
    b_allocation_key_as_array,
    b_transforms,
    source_info=None,
):
    """accumulator += a b, where reads of shared memory get a clock of their own that only a wait
    joins to the warpgroup's."""
    memory = gpu_callbacks._get_shared_memory()
    clock = None
    if memory.detect_races:
        clock = memory.incr_clock(thread)
        clock.inc(memory.get_next_tma_thread_id())

    def operand(key, transforms):
        key = np.asarray(key)
        if key.shape != gpu_callbacks.HostAllocationKey.shape_and_dtype().shape:
            return key  # no key but the values, from registers
        key, place = _access(memory, key, transforms)
        value, *_ = memory.get_buffer_content(key, place, thread)
        if clock is not None:
            gpu_callbacks.get_races().check_read(
                thread, clock.async_smem_clock.copy(), key, place, source_info=source_info
            )
        return value

    key, place = _access(memory, acc_allocation_key_as_array, acc_transforms)
    acc, *_ = memory.get_buffer_content(key, place, thread)
    a, b = (
        operand(a_allocation_key_as_array, a_transforms),
        operand(b_allocation_key_as_array, b_transforms),
    )
    with np.errstate(invalid="ignore"):  # NaN and Inf may be in the padding
        result = acc + a.astype(acc.dtype) @ b.astype(acc.dtype)
    memory.store_buffer_content(key, place, result, thread)
    if clock is not None:
        with memory.lock:
            _products(memory, thread).append(clock)
    return token


def _products(memory, thread):
    """The clocks of the products that a warpgroup has issued and not yet waited for."""
    if not hasattr(memory, "products"):
        memory.products = collections.defaultdict(collections.deque)
    return memory.products[thread]


def _wait_for_products(memory, thread, *, n):
    if memory.detect_races:
        memory.incr_clock(thread)
        with memory.lock:
            products = _products(memory, thread)
            while len(products) > n:
                memory.clocks[thread].update(products.popleft())


def _copy_smem_to_gmem(stock):
    stays_in_its_row = gpu_callbacks.fail_on_exception(_stays_in_its_row)

    def copy(*, reduction_op, **kw):
        if reduction_op is None:
            stays_in_its_row(kw["dst_allocation_key_as_array"], kw["dst_transforms"])
            return stock(reduction_op=None, **kw)
        return reduce(reduction_op=reduction_op, **kw)

    @gpu_callbacks.fail_on_exception
    def reduce(
        *, token, mesh_location, thread, predicate, source_info, reduction_op, commit_group, **kw
    ):
        del commit_group
        if predicate is not None or getattr(reduction_op, "name", reduction_op).lower() != "add":
            raise NotImplementedError(f"a reduction {reduction_op} with predicate {predicate}")
        memory = gpu_callbacks._get_shared_memory()
        (source, read), (target, written) = (
            _access(memory, kw[f"{end}_allocation_key_as_array"], kw[f"{end}_transforms"])
            for end in ("src", "dst")
        )
        clock = memory.incr_clock(thread) if memory.detect_races else None
        task = gpu_callbacks.AsyncCopySmemToGmemTask(
            mesh_location, thread, source, read, target, written, source_info, clock
        )
        memory.execute_async_task(functools.partial(_add, task))
        return token

    return copy


def _stays_in_its_row(key, transforms):
    """Mosaic makes the store of a vector a plain bulk copy without a tensor map, and clips it where
    the whole array ends: what hangs over the end of a row is written to the next."""
    memory = gpu_callbacks._get_shared_memory()
    key, place = _access(memory, key, transforms)
    shape = memory.buffer_shape_and_dtype(key).shape
    axes = [
        (part.stop, size)
        for part, size in zip(place.range, shape, strict=True)
        if isinstance(part, slice)
    ]
    if len(axes) == 1 and any(stop > size for stop, size in axes):
        raise IndexError(
            f"a vector is stored at {place.range} of an array {tuple(shape)}: the end goes to the "
            "next row"
        )


_ADDING = threading.Lock()


def _add(task, tma_thread_id):
    """A TMA copy that adds to what is there: atomic, so that reductions do not race with each
    other."""
    memory = gpu_callbacks._get_shared_memory()
    task.pre_read(tma_thread_id, memory)
    value, *_ = memory.get_buffer_content(task.src_allocation_key, task.src_access, task.thread)
    shape = tuple(memory.buffer_shape_and_dtype(task.dst_allocation_key).shape)
    inside = gpu_callbacks._clip_store_to_shape(task.dst_access, value, shape)
    if inside is not None:
        place, value = inside
        with _ADDING:
            old, *_ = memory.get_buffer_content(task.dst_allocation_key, place, task.thread)
            memory.store_buffer_content(task.dst_allocation_key, place, old + value, task.thread)
    if memory.detect_races:
        task.clock.inc(tma_thread_id)
        task.write_clock = task.clock.copy()
    task.post_write(tma_thread_id, memory)


def _not_for_registers(check):
    registers = shared_memory.get_memory_space_idx(gpu_core.MemorySpace.REGS)

    @functools.wraps(check)
    def checked(self, thread, clock, key, *args, **kw):
        if key.memory_space_id != registers:  # those belong to one warpgroup
            return check(self, thread, clock, key, *args, **kw)

    return checked


class _Condition(threading.Condition):
    def wait(self, timeout=None):
        if not super().wait(timeout or DEADLOCK_SECONDS):
            raise TimeoutError(
                f"nothing arrived at a barrier for {DEADLOCK_SECONDS} s: a deadlock, or NPROC is "
                "too small"
            )
        return True


def _with_deadline(init):
    def initialise(self, *args, **kw):
        init(self, *args, **kw)
        self.cv.__class__ = _Condition

    return initialise


def _compiled_once():
    compiled, lock = {}, threading.Lock()

    def run(jaxpr, consts, *args):
        with lock:
            if id(jaxpr) not in compiled:
                traced = jax.jit(thread_map._run, static_argnums=0).trace(jaxpr, consts, *args)
                # with the jaxpr, so that its id stays its own
                compiled[id(jaxpr)] = jaxpr, traced.lower().compile()
        compiled[id(jaxpr)][1](consts, *args)

    return run


def _io_callback_of_numpy(*args, result_avals, callback, sharding, ordered):
    return [np.asarray(x) for x in callback(*map(np.asarray, args))]


def _to_int(stock):
    return lambda x: int(x) if isinstance(x, np.ndarray | np.generic) else stock(x)
