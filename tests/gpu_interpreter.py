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

import contextlib
import functools
import inspect
import threading
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import ptx_values
import pytest
from jax._src import callback
from jax._src import core as jax_core

from pallas_flash.caches import attend
from pallas_flash.devices import sharding
from pallas_flash.jax_support import gpus, hardware
from pallas_flash.kernels.blackwell import tuning as blackwell
from pallas_flash.kernels.blackwell.tile_sizes import ForwardTiles
from pallas_flash.kernels.hopper import tuning
from pallas_flash.transforms import autodiff, equation

try:
    import gpu_memory
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

needs_interpreter = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

DEADLOCK_SECONDS = 60.0


class Races:
    """Of all kernels that have run; jax keeps those of the last."""

    def __init__(self):
        self.states = []

    def state(self, *args, **kw):
        """In place of jax's, of a kernel."""
        self.states.append(race_detection_state.GPURaceDetectionState(*args, **kw))
        return self.states[-1]

    @property
    def found(self) -> bool:
        return any(state.races_found for state in self.states)


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
        counted = gpu_callbacks, "GPURaceDetectionState", races.state
        for owner, name, new in (*_replacements(), counted):
            stack.enter_context(mock.patch.object(owner, name, new))
        try:
            yield params.InterpretGPUParams(**options), races
        except BaseException:
            gpu_callbacks.reset_gpu_interpret_mode_state()
            raise


@contextlib.contextmanager
def kernels(implementation: str, detect_races: bool = False, tma: bool = False):
    """Lets Mosaic kernels run here, on a GPU of theirs if there is one, else in the interpreter;
    others, which Pallas' own interpreter runs, need nothing. What runs by mma copies by TMA on
    Hopper; for `ampere` by cp.async with the tiles of an A100, or by TMA with those of an RTX 5090,
    and on a GPU by what it has. Small calls run what large ones do where gradients may be added in
    any order. Where races are looked for no product relies on the order in which it was begun.
    Yields Races, of which the interpreter alone finds any: a test that needs one is not marked
    `gpu`."""
    here = hardware.compute_capability() or 0.0
    match implementation:
        case "hopper":
            is_here, has_tma, memory_of = here == 9.0, True, 9.0
        case "blackwell":
            is_here, has_tma, memory_of = here in (10.0, 10.3), True, 10.0
        case "ampere":
            is_here, has_tma, memory_of = here >= 8.0, tma, None if tma else 8.0
        case _:
            yield Races()
            return
    one_kernel = mock.patch.object(tuning, "ONE_KERNEL_KEYS", 0)
    # which the clocks do not know
    no_order = mock.patch.object(ForwardTiles, "relies_on_order", False)
    two_tiles = mock.patch.object(blackwell, "_row_tiles", lambda p, _: _row_tiles(p, 1))
    with one_kernel, two_tiles, no_order if detect_races else contextlib.nullcontext():
        with _with_tma(has_tma, memory_of), _kernels(is_here, detect_races) as races:
            yield races


hopper_kernels, ampere_kernels = (
    functools.partial(kernels, implementation) for implementation in ("hopper", "ampere")
)


_tiles, _row_tiles = blackwell._tiles, blackwell._row_tiles  # whatever a test puts there


def _with_tma(tma: bool, memory_of: float | None = None):
    """And the rest of a compute capability, where there is no GPU that says it."""
    if hardware.compute_capability():
        return contextlib.nullcontext()
    size = gpus.least(memory_of).architecture.program_bytes
    says = dict(has_tma=tma, shared_memory=size, mosaic_capability=memory_of or 12.0)
    return mock.patch.multiple(hardware, **{name: lambda x=x: x for name, x in says.items()})


@contextlib.contextmanager
def _kernels(are_here: bool, detect_races: bool):
    if are_here:
        yield Races()
        return
    with parameters(detect_races) as (options, races):
        hardware.interpret = options
        hardware.interpret_effects = frozenset(params.get_interpret_effects())
        _clear_caches()
        try:
            yield races
        finally:
            hardware.interpret, hardware.interpret_effects = None, frozenset()
            _clear_caches()


def _clear_caches():
    for jitted in autodiff.attend, autodiff._attention, attend._attend_jit:
        jitted.clear_cache()
    equation._compiled.cache_clear()
    sharding._program_once.cache_clear()
    _tiles.cache_clear()


def record_products(monkeypatch) -> list:
    """The warpgroups that begin a product from here on, one entry for each product."""
    products, wgmma = [], gpu_memory.wgmma

    def recorded(**kw):
        products.append(kw["thread"])
        return wgmma(**kw)

    monkeypatch.setattr(gpu_memory, "wgmma", recorded)
    return products


def _replacements():
    checks = race_detection_state.GPURaceDetectionState
    return [
        (jaxpr_interpret.JaxprInterpreter, "interpret", _interpret),
        (gpu_callbacks, "wgmma", gpu_memory.wgmma),
        (
            gpu_callbacks,
            "copy_smem_to_gmem",
            gpu_memory.copy_smem_to_gmem(gpu_callbacks.copy_smem_to_gmem),
        ),
        (checks, "check_read", gpu_memory.not_for_registers(checks.check_read)),
        (checks, "check_write", gpu_memory.not_for_registers(checks.check_write)),
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
    turn, initialise = threading.Lock(), gpu_callbacks._initialize_shared_memory
    clean_up = gpu_callbacks._clean_up_shared_memory

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
        later = variables([*jaxpr.outvars, *(v for eqn in jaxpr.eqns[i:] for v in eqn.invars)])
        kept = [v for v in written if v in set(later)]
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


def _wait(self, token, what: str, running: int):
    return _call(self, functools.partial(gpu_memory.wait, what=what, running=running), token)


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
    token = _wait(self, token, "products", 0)
    out = []
    for value, key, ref, var in zip(values, keys, is_ref, eqn.outvars, strict=True):
        if not ref:
            if not isinstance(var, jax_core.DropVar):
                token, value = _call(self, gpu_memory.read_registers, token, var.aval, key=key)
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
        token = _wait(self, token, "products", n)
    token, value = self._interpret_wgmma_accumulator_deref_p(eqn, token, lambda: values)
    return token, [value]


def _wgmma_wait(self, eqn, token, values):
    return _wait(self, token, "products", eqn.params["n"]), []


def _inline_mgpu(self, eqn, token, values):
    function = eqn.params["mgpu_fn"]
    at = inspect.getclosurevars(function).nonlocals
    if compute := _OF_VALUES.get(function.__name__):
        return token, [compute(at, *values)]
    match function.__name__:
        case "iota_in_layout":
            return token, [jnp.arange(eqn.outvars[0].aval.size, dtype=jnp.int32)]
        case "relabel":
            return token, values
        case "load_rows":
            ((ref, transforms),) = _references(eqn, values)
            read = dict(key=ref, transforms=transforms, index=())
            token, value = _call(self, gpu_memory.gather, token, eqn.outvars[0].aval, **read)
            return token, [value]
        case "gather":
            ((ref, transforms), *index) = _references(eqn, values)
            read = dict(key=ref, transforms=transforms, index=tuple(index))
            token, value = _call(self, gpu_memory.gather, token, eqn.outvars[0].aval, **read)
            return token, [value]
        case "copy_rows":
            source, rows, target = _references(eqn, values)
            return _cp_async(self, eqn, token, source, target, rows=rows), []
        case "wait_for_cp_async":
            return _wait(self, token, "copies", at["running"]), []
    return self._interpret_inline_mgpu_p(eqn, token, lambda: values)


def _references(eqn, values) -> list:
    """The arguments of an inline function, a reference with the transforms before it."""
    count = eqn.params["pytree_args"].num_leaves
    transforms = eqn.params["pytree_ref_transforms"].unflatten(values[count:])
    return [
        value if of_value is None else jaxpr_interpret.resolve_ref(var.aval, value, of_value)
        for var, value, of_value in zip(eqn.invars, values[:count], transforms, strict=False)
    ]


# Inline functions of values alone, which close over the names in `at`


def _columns_by_warp(_, x):
    """8 columns of 32 for each of four warps."""
    by_warp = x.reshape(len(x), -1, 4, 8).transpose(2, 0, 1, 3)
    return by_warp.reshape(4 * len(x), -1)


def _dot_by_warp(_, *values):
    acc, a, b = (x.astype(jnp.float32) for x in values)
    a, b = a.reshape(4, 16, -1), b.reshape(-1, 4, 8, b.shape[1]).swapaxes(0, 1)
    return acc + (a @ b.reshape(4, -1, b.shape[-1])).reshape(acc.shape)


def _select_by_bits(at, x, *words):
    bit = jnp.arange(x.shape[1], dtype=jnp.uint32) % 32 ^ at["flip"]
    words = jnp.repeat(jnp.stack(words, 1), 32, 1)[:, : x.shape[1]].astype(jnp.uint32)
    return jnp.where(words >> bit & 1 == 1, x, at["other"])


def _bits(is_set):
    return jnp.sum(is_set << jnp.arange(32, dtype=jnp.uint32), -1, dtype=jnp.uint32)


def _bit_interval(_, start, after):
    bit = jnp.arange(32)
    return _bits((bit >= start[:, None]) & (bit < 32 - after[:, None]))


def _lanes_equal(_, x, others):
    of_warp = jnp.repeat(others.reshape(-1, 32), 32, axis=0)
    return _bits(x[:, None] == of_warp)


def _widen_bytes(at, x):
    """By a table for each place in a word, of words whose other bytes are 0."""
    place, dtype = np.arange(4, dtype=np.uint32)[:, None], at["result"].dtype
    pairs = ptx_values.results(at["code"], np.arange(256, dtype=np.uint32) << 8 * place)
    table = [pairs[n // 2][n] >> 16 * (n % 2) & 0xFFFF for n in range(4)]
    widened = jnp.asarray(np.uint16(table))[jnp.arange(4), x.view(jnp.uint8).reshape(-1, 4)]
    return jax.lax.bitcast_convert_type(widened.reshape(x.shape), dtype)


_OF_VALUES = dict(
    some_below_one=lambda _, x: jnp.any(x < 1).astype(jnp.int32),
    shift_into_float32=lambda _, x: x.astype(jnp.float32),
    warp=lambda *_: jnp.int32(0),  # a warpgroup is one thread
    columns_by_warp=_columns_by_warp,
    dot_by_warp=_dot_by_warp,
    select_by_bits=_select_by_bits,
    widen_bytes=_widen_bytes,
    bit_interval=_bit_interval,
    lanes_equal=_lanes_equal,
    lane_xor=lambda _, x, distance: x[jnp.arange(x.size) ^ distance],
    lane_of_eight=lambda _, x, number: x[jnp.arange(x.size) & ~7 | number],
)


def _mma(self, eqn, token, values):
    acc, a, b = values
    return token, [acc + jnp.dot(a.astype(acc.dtype), b.astype(acc.dtype))]


def _copy_gmem_to_smem(self, eqn, token, values):
    """cp.async, where there is no barrier."""
    if eqn.params["has_barrier"]:
        return self._interpret_copy_gmem_to_smem_p(eqn, token, lambda: values)
    source, target, *flat = values
    trees = [eqn.params[f"{end}_transforms_treedef"] for end in ("src", "dst")]
    count = trees[0].num_leaves
    leaves = flat[:count], flat[count : count + trees[1].num_leaves]
    ends = [
        jaxpr_interpret.resolve_ref(var.aval, ref, jax.tree.unflatten(tree, part))
        for ref, var, tree, part in zip((source, target), eqn.invars, trees, leaves, strict=False)
    ]
    return _cp_async(self, eqn, token, *ends), []


def _cp_async(self, eqn, token, source, target, **rows):
    copy = functools.partial(gpu_memory.cp_async, source_info=eqn.source_info)
    ends = dict(source=source[0], source_transforms=source[1])
    ends |= dict(target=target[0], target_transforms=target[1])
    return _call(self, copy, token, **ends, **rows)


RULES = {}
if not MISSING:
    RULES = {
        gpu.inline_mgpu_p: _inline_mgpu,
        gpu.mma_p: _mma,
        gpu.copy_gmem_to_smem_p: _copy_gmem_to_smem,
        discharge.run_state_p: _run_state,
        gpu.wgmma_accumulator_deref_p: _accumulator_load,
        gpu.wgmma_wait_p: _wgmma_wait,
    }


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
