"""The Mosaic kernels in jax's GPU interpreter, each family in each of its ways: output, gradients
and tangents of every case; races; padding; the same bits; meshes and vmap. A further family is a
row of kernel_cases.py."""

import functools
import itertools
import pkgutil
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import qkv
from check import TOLERANCE, close
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from kernel_cases import (
    ABOVE_256,
    ANY_ORDER,
    BIASES,
    CASES,
    FAMILIES,
    LONG_BY_MMA,
    ORDERS,
    PROPERTIES,
    SCORED,
    SCORED_ABOVE_256,
    SCORES,
    drawn,
    growing,
    has_own_kernels,
    sizes,
)
from selection import whole_but

from pallas_flash import flash_attention, masks
from pallas_flash.kernels.hopper import backward_dkv, tuning

pytestmark = gpu_interpreter.needs_interpreter


def kernels(family, **kw):
    implementation, copies = FAMILIES[family]
    return gpu_interpreter.kernels(implementation, **copies, **kw)


def attend(family, *x, **options):
    """By a family's kernels, those that are deterministic unless the options say otherwise; or the
    reference."""
    implementation, _ = FAMILIES.get(family, ("reference", {}))
    options = dict(deterministic=True) | options
    return flash_attention(*x, **options, implementation=implementation)


def results(family, call, without=()):
    """All that a call gives, by name, of one program; tangents but for some floats."""
    # a dense mask too: as a constant XLA would interpret all that is computed of it
    arrays = {x: a for x, a in call.options.items() if isinstance(a, np.ndarray | jax.Array)}
    static = {x: a for x, a in call.options.items() if x not in arrays}
    largest_too = call.oracle is not None

    def outputs(floats, arrays):
        options = static | arrays | floats
        if (slopes := options.pop("slopes", None)) is not None:
            options["score_mod"] = options["score_mod"](slopes)
        return attend(family, **options, return_residual=True, return_max_logits=largest_too)

    @jax.jit
    def everything(floats, along, cotangents, arrays):
        def first(floats):
            o, lse, *largest = outputs(floats, arrays)
            return (o, lse), largest

        (o, lse), pull, largest = jax.vjp(first, floats, has_aux=True)
        found = dict(output=o, lse=lse, **({"largest logits": largest[0]} if largest else {}))
        do, dlse = cotangents
        (gradients,) = pull((do.astype(o.dtype), dlse))
        found |= {f"gradient by {x}": a for x, a in gradients.items()}
        x = {x: floats[x] for x in along}
        of_tangents = lambda x: first(floats | x)[0]
        tangents = jax.jvp(of_tangents, (x,), (along,))[1]
        return found | dict(zip(("tangent of output", "tangent of lse"), tangents, strict=True))

    along = {x: a for x, a in call.tangents.items() if x not in without}
    return jax.tree.map(np.asarray, everything(call.floats, along, call.cotangents, arrays))


@functools.cache  # the families share them
def expected(name, without=()):
    """Of CASES in float64, but for tangents; else by dense attention in float32."""
    call = drawn(name)
    wide = lambda x: jax.tree.map(lambda a: np.asarray(a, np.float32), x)
    call = call._replace(floats=wide(call.floats), tangents=wide(call.tangents))
    found = results("reference", call._replace(cotangents=wide(call.cotangents)), without)
    if call.oracle is None:
        return found
    q, k, v = (call.floats[x] for x in ("query", "key", "value"))
    o, lse, gradients = oracle.attention(q, k, v, *call.cotangents, **call.oracle)
    of = zip(("query", "key", "value", "bias", "sinks"), gradients, strict=False)
    found |= {f"gradient by {x}": a for x, a in of if a is not None}
    largest = oracle.max_logits(q, k, **call.oracle)
    return found | {"output": o, "lse": lse, "largest logits": largest}


def with_garbage(call, garbage):
    """The same with garbage in all rows beyond the lengths, or behind the last sequence."""
    lengths = [call.options.get(f"{x}_seq_lengths", ()) for x in ("query", "key_value")]
    if isinstance(mask := call.options.get("mask"), masks.Varlen):
        lengths = [ends[:, -1] for ends in (mask.cu_seqlens_q, mask.cu_seqlens_k)]
    lengths = dict(zip(("query", "key", "value"), (*lengths, lengths[1]), strict=True))
    do, dlse = map(np.array, call.cotangents)
    copies = [{x: np.array(a) for x, a in y.items()} for y in (call.floats, call.tangents)]
    arrays = [(x, a) for y in copies for x, a in y.items()] + [("query", do), ("query", dlse)]
    for (x, a), value in zip(arrays, itertools.cycle(garbage), strict=False):
        for row, length in enumerate(lengths.get(x, ())):
            a[row, length:] = value
    return call._replace(floats=copies[0], tangents=copies[1], cotangents=(do, dlse))


def agrees(family, name, without=(), **kw):
    call, wanted = drawn(name), expected(name, without)
    with kernels(family, **kw) as races:
        found = results(family, with_garbage(call, (np.nan, np.inf, -np.inf)), without)
    dtype = str(call.floats["query"].dtype)
    assert found["output"].dtype == dtype and found["lse"].dtype == np.float32
    for x, a in found.items():
        close(a, wanted[x], 1e-5 if x in ("lse", "largest logits") else TOLERANCE[dtype], x)
    assert not np.any(found["output"][wanted["lse"] == -np.inf])
    return races


def with_each(families, cases):
    """Each case with each family that has kernels of its own for it."""
    return [row for row in itertools.product(families, cases) if has_own_kernels(*row)]


def spread(cases):
    """Each case with one family, in turn."""
    return zip(itertools.cycle(FAMILIES), cases, strict=False)


def in_turn(cases):
    """Each case with each implementation, whose ways of copying take turns."""
    for implementation in dict.fromkeys(name for name, _ in FAMILIES.values()):
        ways = [family for family, (name, _) in FAMILIES.items() if name == implementation]
        rows = zip(itertools.cycle(ways), cases, strict=False)
        yield from (row for row in rows if has_own_kernels(*row))


# each with one family
FAST = [
    "everything",
    "heads of 80",
    "soft cap, sinks",
    "heads of 11 and 72",
    "window, causal",
    "heads of 64 and 128",
    "one query, one key",
    "heads of 256",
    "lists of keys",  # whose gradients and tangents are blockwise's
]
# of five tiles of columns two consumers own three each
SHARED_COLUMNS = ("hopper", "heads of 160, soft cap")
# ids and a window where a thread holds a row
IDS = ("blackwell", "scattered documents")
BY_ANOTHER = ("blackwell", "heads of 256")
FAST_SCORED = [
    ("hopper", "a mask by batch row"),
    ("hopper", "a rule by position"),
    ("hopper", "dropout, heads of 192 and 128"),
    ("blackwell", "a score_mod, dropout"),
    ("blackwell", "a bias by head and pair"),
    ("ampere by cp.async", "a bias to the ends of float32"),
    ("ampere by cp.async", "dropout, heads of 160 and 136"),
    ("ampere by TMA", "a score_mod, dropout"),
    ("ampere by TMA", "a rule by pair"),
    ("blackwell", "lists of blocks by head"),
]
BY_MMA = [family for family, (name, _) in FAMILIES.items() if name == "ampere"]
# of heads above 256
ABOVE = [("hopper", name) for name in ABOVE_256 | SCORED_ABOVE_256]
ABOVE += zip(itertools.cycle(BY_MMA), ABOVE_256 | SCORED_ABOVE_256, strict=False)
FAST_ABOVE = (
    ("hopper", "heads of 512"),
    ("hopper", "heads of 512, dropout"),
    (BY_MMA[0], "heads of 512"),
    (BY_MMA[1], "heads of 64 and 512"),
)
FAST_SCORES = [
    ("hopper", "by key, wide heads"),
    ("ampere by cp.async", "by key, and by query"),  # several reads of one entry
    ("ampere by TMA", "T5's buckets"),
    ("hopper", "a bias (1, 1, 67, 70)"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "family, name",
    [
        *whole_but([*with_each(FAMILIES, CASES), BY_ANOTHER], *spread(FAST), SHARED_COLUMNS, IDS),
        *whole_but(in_turn(SCORED), *FAST_SCORED),
        *whole_but(ABOVE, *FAST_ABOVE),
        *whole_but([*with_each(FAMILIES, SCORES), *spread(BIASES)], *FAST_SCORES),
    ],
)
def test_output_gradients_and_tangents_are_those_of_dense_attention(family, name):
    agrees(family, name)


@pytest.mark.gpu
@pytest.mark.whole
def test_blockwise_has_the_gradients_of_scores_for_which_there_are_no_tiles(monkeypatch):
    module = "pallas_flash.kernels.mma.score_gradients"
    monkeypatch.setattr(f"{module}.score_tiles", lambda problem: None)
    monkeypatch.delattr(f"{module}.score_gradients")
    agrees("ampere by cp.async", "a bias and a score_mod")


# of which there are no tangents
WITHOUT = {"no key": ("key",), "key": ("query", "value"), "value": ("query", "key")}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "family, some", whole_but(itertools.product(["hopper", *BY_MMA], WITHOUT), ("hopper", "no key"))
)
def test_so_are_tangents_along_some_of_the_arrays(family, some):
    agrees(family, "heads of 80", WITHOUT[some])


# ---- races ----

# Blackwell's P lies over S, and P and dS over dP, of heads of 128
FAST_RACES = spread(["long, heads of 128, in any order"] * 2 + ["long, heads of 64"] * 2)
WIDEST = [("hopper", f"long, heads of {size}") for size in ("512", "64 and 512", "320")]
OF_BLACKWELL = ["long, heads of 64, by 128", "long, heads of 128, one tile of queries"]
LONG = [
    name
    for name in PROPERTIES
    if name.startswith("long") and ("hopper", name) not in WIDEST and name not in OF_BLACKWELL
]
RACES = [*with_each(FAMILIES, LONG), *WIDEST, *(("blackwell", name) for name in OF_BLACKWELL)]
RACES += itertools.product(BY_MMA, LONG_BY_MMA)


@pytest.mark.gpu
@pytest.mark.parametrize("family, name", whole_but(RACES, *FAST_RACES, *WIDEST))
def test_there_is_no_race(family, name):
    assert not agrees(family, name, detect_races=True).found


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    whole_but(["long, heads of 128", "long, heads of 64", "padding, sinks"], "long, heads of 128"),
)
def test_there_is_no_race_where_the_producer_adds_dq(name, monkeypatch):
    rows = tuple(row._replace(dq_by_producer=True) for row in backward_dkv.FUSED_TILES)
    monkeypatch.setattr(backward_dkv, "FUSED_TILES", rows)
    monkeypatch.setattr(tuning, "_tiles", tuning._tiles.__wrapped__)  # which remembers no choice
    assert not agrees("hopper", f"{name}, in any order", detect_races=True).found


class LeftOut(NamedTuple):
    family: str
    where: str  # in pallas_flash.kernels
    instead: Callable = lambda *args, **kw: None
    is_forward: bool = False  # or of the backward
    options: dict = {}
    lengths: tuple[int, int] | None = None
    head_size: int = 64
    barrier: str = ""  # of a kernel's Memory: its waits alone are left out


LEFT_OUT = {
    "hopper, forward: the wait for a block": LeftOut(
        "hopper", "hopper.sync.TmaRing.wait", is_forward=True
    ),
    "hopper, forward: the wait for its release": LeftOut(
        "hopper", "hopper.sync.TmaRing._release_barrier", is_forward=True
    ),
    "hopper, forward: the wait for a product": LeftOut(
        "hopper",
        "hopper.tile.await_sum",
        lambda acc, running=0: plgpu.wgmma_accumulator_load(acc, wait_n=9),
        is_forward=True,
    ),
    **{
        f"hopper, forward: {what}": LeftOut("hopper", where, is_forward=True, head_size=512)
        for what, where in (
            ("the wait for P", "hopper.sync.Handoff.wait"),
            ("the wait until P was read", "hopper.sync.Handoff.wait_for_release"),
            ("the fence after P and o are there", "mosaic.tma.fence"),
        )
    },
    "hopper: the wait for a block": LeftOut("hopper", "hopper.sync.TmaRing.wait"),
    "hopper: the meeting before dS is read": LeftOut(
        "hopper", "hopper.dkv_consumer.DkvConsumer.barrier", options=ANY_ORDER
    ),
    **{
        f"hopper, heads of 512: {what}": LeftOut("hopper", f"hopper.{where}", head_size=512)
        for what, where in (
            ("the meetings before P, dP and dS are read", "dkv_consumer.DkvConsumer.barrier"),
            ("the meetings around dQ's epilogue", "backward_dq.DqConsumer.sync_owners"),
        )
    },
    "hopper: the fence after lse and delta are read": LeftOut("hopper", "mosaic.tma.fence"),
    "ampere: the meeting before parts of S are added": LeftOut(
        "ampere by cp.async", "mma.tile.named_barrier", is_forward=True, head_size=512
    ),
    **{
        f"{family}: the wait for a block": LeftOut(
            family, "mma.tile.CopyRing.wait", lambda ring, t: ring.at(t)
        )
        for family in BY_MMA
    },
    "ampere by TMA: the meeting before the only slot is written": LeftOut(
        "ampere by TMA", "mma.tile.release", head_size=128
    ),
}
BARRIERS = {
    "forward": "q_full k_full v_full k_free v_free s_full s_free p_free p_full p_read "
    "alpha_full o_full",
    "backward_dq": "q_full do_full o_full k_full v_full k_free v_free s_full s_free dp_full "
    "ds_full delta_full dq_full dq_written",
    # but for q_free, which shows no race: perhaps since do, with a slot less, is waited for before
    "backward_dkv": "k_full v_full q_full do_full do_free s_full s_free dp_full dp_loaded p_full "
    "ds_full step_done done",
}
LENGTHS = {"forward": (256, 512), "backward_dq": (128, 512), "backward_dkv": (512, 128)}
P_APART = "s_free", "p_free"  # barriers of the forward where P has columns of its own
LEFT_OUT |= {
    f"blackwell, {kernel}: the waits for {barrier}": LeftOut(
        "blackwell",
        f"blackwell.{kernel}._kernel",
        is_forward=kernel == "forward",
        lengths=LENGTHS[kernel],
        head_size=64 if kernel == "forward" and barrier in P_APART else 128,
        barrier=barrier,
    )
    for kernel, barriers in BARRIERS.items()
    for barrier in barriers.split()
}
LEFT_OUT |= {
    f"blackwell, forward: {what}": LeftOut(
        "blackwell", where, is_forward=True, lengths=(256, 512), head_size=128
    )
    for what, where in (
        ("the wait for loads by a warp", "blackwell.tile.await_loads"),
        ("the wait for stores by a warp", "blackwell.tile.await_stores"),
        ("the fence before TMA reads", "blackwell.forward.plgpu.commit_smem"),
        ("the wait until TMA has read", "blackwell.forward.plgpu.wait_smem_to_gmem"),
    )
}
# What the interpreter says where it ends before the race: which of the two comes first, the threads
# decide
ERRORS = (
    "no threads observed phase",  # a barrier was passed twice that nobody waited for
    "to alias have disjoint lifetimes",  # tensor memory was read as what was not written there
    "read-side operations completed before kernel finished",
)


def without_waits(kernel, barrier):
    """A Blackwell kernel without the waits for a field of its Memory."""

    def run(program, *refs, **static):
        memory, _ = refs[-1]
        left_out, wait = jax.tree.leaves(getattr(memory, barrier)), plgpu.barrier_wait
        is_left_out = lambda b: any(getattr(b, "ref", b) is x for x in left_out)
        wait_for_others = lambda b: None if is_left_out(b) else wait(b)
        with mock.patch.object(plgpu, "barrier_wait", wait_for_others):
            return kernel(program, *refs, **static)

    return run


@pytest.mark.parametrize(
    "name",
    whole_but(
        LEFT_OUT,
        *(name for name in LEFT_OUT if "the wait for a" in name),
        *(f"blackwell, forward: the waits for {barrier}" for barrier in ("p_full", *P_APART)),
    ),
)
def test_without_it_there_is_a_race(name, rng, monkeypatch):
    row = LEFT_OUT[name]
    where, instead = f"pallas_flash.kernels.{row.where}", row.instead
    if row.barrier:
        instead = without_waits(pkgutil.resolve_name(where), row.barrier)
    monkeypatch.setattr(where, instead)
    monkeypatch.setattr(gpu_interpreter, "DEADLOCK_SECONDS", 20.0)  # a busy machine takes above 5
    length = 128 * 64 // row.head_size * (4 if row.is_forward else 1)
    lengths = row.lengths or (256, length)
    q, k, v = growing(*qkv(rng, sizes(*lengths, row.head_size, N=1), jnp.bfloat16))
    of_output = functools.partial(attend, row.family, **row.options)
    of_gradients = jax.grad(lambda *x: jnp.sum(of_output(*x).astype(jnp.float32)), (0, 1, 2))
    found = False
    # which thread comes first decides whether one run sees it: of the waits for v_full two of three
    # do; and on a busy machine the interpreter may give up a wait too early
    for _ in range(10):
        try:
            with kernels(row.family, detect_races=True) as races:
                run = of_output if row.is_forward else jax.jit(of_gradients)
                jax.block_until_ready(run(q, k, v))
        except jax.errors.JaxRuntimeError as error:
            found = any(what in str(error) for what in ERRORS)
        if found := found or races.found:
            break
    assert found


# ---- bits ----


def same(found, expected, ends_apart=()):
    """Bit by bit, but for what is added up in any order."""
    for x, a in expected.items():
        tolerance = 1e-2 if x in ends_apart else 0
        np.testing.assert_allclose(*map(np.float32, (found[x], a)), rtol=0, atol=tolerance)


PADDING = [(family, "padding") for family in FAMILIES]
PADDING += [("ampere by cp.async", "padding, scores"), ("hopper", "padding, sinks, in any order")]


@pytest.mark.gpu
@pytest.mark.parametrize("family, name", whole_but(PADDING, *PADDING[:2]))
def test_garbage_in_padding_changes_no_bit_nor_does_a_second_call(family, name):
    call = drawn(name)
    with kernels(family):
        clean, dirty = (
            results(family, with_garbage(call, garbage))
            for garbage in ([0.0], [np.nan, np.inf, -np.inf])
        )
    same(dirty, clean, ["gradient by query"] if name.endswith("any order") else [])


@pytest.mark.gpu
@pytest.mark.parametrize("name", whole_but(ORDERS, "hopper in any order"))
def test_on_a_mesh_and_inside_of_a_checked_shard_map_it_gives_the_same(name, rng):
    """On one device: in jax's interpreter, on several, one waits in vain for the barriers of the
    others."""
    family, options = ORDERS[name]

    def gradients(q, k, v, ids):
        ids = dict(query_segment_ids=ids, key_value_segment_ids=ids)

        def loss(*x):
            o = attend(family, *x, is_causal=True, **ids, **options)
            return jnp.sum(jnp.sin(o.astype(jnp.float32))), o

        of, o = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
        return dict(zip(("dq", "dk", "dv", "o"), (*of, o), strict=True))

    ids = np.sort(rng.integers(0, 3, (2, 67))).astype(np.int32)
    x = (*qkv(rng, sizes(67, 67, 64, B=2), jnp.bfloat16), ids)
    mesh = lambda kind: jax.make_mesh((1,), ("data",), axis_types=(kind,))
    data, ends_apart = P("data"), ["dq"] if options else []
    spread = NamedSharding(mesh(AxisType.Explicit), data)
    inside = jax.shard_map(gradients, mesh=mesh(AxisType.Auto), in_specs=data, out_specs=data)
    with kernels(family):
        expected = jax.jit(gradients)(*x)
        on_a_mesh = jax.jit(gradients)(*(jax.device_put(a, spread) for a in x))
        assert jax.typeof(on_a_mesh["o"]).sharding.spec[0] == "data"
        same(on_a_mesh, expected, ends_apart)
        same(jax.jit(inside)(*x), expected, ends_apart)


@pytest.mark.gpu
@pytest.mark.parametrize("name", whole_but(ORDERS, "hopper in any order"))
def test_kernels_that_jax_maps_since_values_are_shared_give_what_more_batch_rows_give(name, rng):
    family, options = ORDERS[name]

    def gradients(q, k, v, length):
        lengths = dict(key_value_seq_lengths=length)
        o, vjp = jax.vjp(lambda *x: attend(family, *x, **options, **lengths), q, k, v)
        return dict(zip(("dq", "dk", "dv"), vjp(o), strict=True))

    q, k, v = qkv(rng, sizes(67, 131, 64, B=2, N=1), jnp.bfloat16)
    lengths = jnp.array([131, 40], jnp.int32)
    with kernels(family):
        mapped = jax.jit(jax.vmap(gradients, (0, 0, None, 0)))(q, k, v[0], lengths)
        rows = jax.jit(gradients)(q, k, jnp.stack([v[0]] * 2), lengths)
    same(mapped, rows, ["dq"] if options else [])
