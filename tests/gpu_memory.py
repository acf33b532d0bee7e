"""The host's side of gpu_interpreter: shared memory, asynchronous products and TMA reductions, with
the clocks by which races are found."""

import collections
import functools
import threading

import jax
import numpy as np
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory


def _access(memory, key, transforms=()):
    key = gpu_callbacks.HostAllocationKey.from_array(key)
    return key, memory.access(
        key, jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
    )


def read_registers(memory, thread, *, key):
    return memory.get_buffer_content(*_access(memory, key), thread)[0]


def gather(memory, thread, *, key, transforms, index):
    return memory.get_buffer_content(*_access(memory, key, transforms), thread)[0][index]


def wgmma(
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
            _running(memory, thread, "products").append(clock)
    return token


def _running(memory, thread, what: str):
    """The clocks of the "products" or "copies" that a warpgroup has begun and not yet waited
    for."""
    if not hasattr(memory, "running"):
        memory.running = collections.defaultdict(collections.deque)
    return memory.running[thread, what]


def wait(memory, thread, *, what: str, running: int):
    """The clocks of all but the last, as many as may still be running, become the warpgroup's."""
    if memory.detect_races:
        memory.incr_clock(thread)
        with memory.lock:
            clocks = _running(memory, thread, what)
            while len(clocks) > running:
                memory.clocks[thread].update(clocks.popleft())


def cp_async(
    memory,
    thread,
    *,
    source,
    source_transforms,
    target,
    target_transforms,
    source_info,
    rows=slice(None),
):
    """A copy of rows to shared memory by a clock of its own, which only a wait joins to the
    warpgroup's."""
    (source, read), (target, written) = (
        _access(memory, source, source_transforms),
        _access(memory, target, target_transforms),
    )
    value, *_ = memory.get_buffer_content(source, read, thread)
    memory.store_buffer_content(target, written, value[rows], thread)
    if memory.detect_races:
        clock = memory.incr_clock(thread)
        clock.inc(memory.get_next_tma_thread_id())
        of_copy = clock.generic_clock.copy()
        races = gpu_callbacks.get_races()
        races.check_read(thread, of_copy, source, read, source_info=source_info)
        races.check_write(thread, of_copy, target, written, source_info=source_info)
        with memory.lock:
            _running(memory, thread, "copies").append(clock)


def copy_smem_to_gmem(stock):
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


def not_for_registers(check):
    registers = shared_memory.get_memory_space_idx(gpu_core.MemorySpace.REGS)

    @functools.wraps(check)
    def checked(self, thread, clock, key, *args, **kw):
        if key.memory_space_id != registers:  # those belong to one warpgroup
            return check(self, thread, clock, key, *args, **kw)

    return checked
