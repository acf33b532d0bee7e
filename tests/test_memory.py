"""What programs take, of which nothing is run: blockwise's temporaries, and the temporaries, bytes
sent and blocks visited by each of eight devices that hold a sequence."""

import functools
import re

import check
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from selection import whole_but

from pallas_flash import context_parallel, flash_attention, masks
from pallas_flash.devices import ring
from pallas_flash.tiled import blockwise, schedule

DEVICES = 8
RING, ZIGZAG, ALL_TO_ALL = (
    scheme("context")
    for scheme in (context_parallel.Ring, context_parallel.Zigzag, context_parallel.AllToAll)
)


def compiled(attend, T, N, K=None, H=64, is_sharded=False):
    """Forward and backward of a causal call; sharded, on eight devices."""
    sharding = None
    if is_sharded:
        mesh = jax.make_mesh((DEVICES,), ("context",), axis_types=(AxisType.Explicit,))
        sharding = NamedSharding(mesh, P(None, "context"))
    x = lambda heads: jax.ShapeDtypeStruct((1, T, heads, H), jnp.float32, sharding=sharding)

    def both(q, k, v, do):
        o, vjp = jax.vjp(functools.partial(attend, is_causal=True), q, k, v)
        return o, *vjp(do)

    return jax.jit(both).lower(x(N), x(K or N), x(K or N), x(N)).compile()


def ours(implementation, scheme=None):
    return functools.partial(flash_attention, implementation=implementation, context=scheme)


@functools.cache
def temporary_bytes(implementation, T, N, K=None, scheme=None):
    attend = jax.nn.dot_product_attention
    if implementation != "jax.nn":
        attend = ours(implementation, scheme)
    program = compiled(attend, T, N, K, is_sharded=scheme is not None)
    return program.memory_analysis().temp_size_in_bytes


@pytest.fixture
def one_device(monkeypatch):
    monkeypatch.setattr(blockwise.tuning, "_is_one_device", lambda: True)


def test_65536_tokens_take_less_than_300_megabytes():
    assert temporary_bytes("blockwise", 65536, 1) < 300e6


@pytest.mark.parametrize("T", [16384, 32768])
def test_temporaries_grow_at_most_linearly(T):
    assert temporary_bytes("blockwise", 2 * T, 1) <= 2.1 * temporary_bytes("blockwise", T, 1)


def test_4096_tokens_take_an_eighth_of_the_memory_of_jax_nn():
    assert temporary_bytes("blockwise", 4096, 4) <= temporary_bytes("jax.nn", 4096, 4) / 8


def test_4096_tokens_take_70_megabytes_where_a_head_goes_at_a_time(one_device):
    program = compiled(ours("blockwise"), 4096, 4)
    assert program.memory_analysis().temp_size_in_bytes < 70e6


def attend_bytes(query, key, offset=None, gradient=False, **kw):
    """Temporaries of a call on one device, whose `offset` is an int, or the shape of an array."""

    def attend(q, k, v, *at):
        at = dict(query_offset=at[0]) if at else {} if offset is None else dict(query_offset=offset)
        return flash_attention(q, k, v, implementation="blockwise", **at, **kw)

    run = attend
    if gradient:
        run = jax.grad(lambda *x: attend(*x).astype(jnp.float32).sum(), (0, 1, 2))
    arrays = () if offset is None or isinstance(offset, int) else (offset,)
    return check.temporary_bytes(run, query, key, key, *arrays)


@pytest.mark.parametrize(
    "T, S, N, K, H, mask, kw",
    [
        (1, 8192, 8, 2, 64, "causal", {}),  # read where they lie
        (512, 16384, 32, 8, 64, "causal", {}),
        (512, 16384, 32, 8, 64, "window", {}),
        (256, 16384, 16, 4, 64, "causal", dict(gradient=True)),
        (64, 16384, 32, 1, 96, "window", {}),
        (1032, 16384, 8, 2, 64, "causal", dict(logits_soft_cap=30.0)),
        (512, 16384, 8, 2, 64, "causal", dict(score_mod=lambda s, b, h, i, j: s - h * (i - j) / 9)),
    ],
)
def test_a_chunk_behind_a_long_cache_takes_no_more_memory_where_its_offset_is_an_int(
    T, S, N, K, H, mask, kw, one_device
):
    x = [jax.ShapeDtypeStruct((1, n, heads, H), jnp.float32) for n, heads in ((T, N), (S, K))]
    visible = dict(is_causal=True) if mask == "causal" else dict(local_window_size=(S // 2, 0))
    as_array = jax.ShapeDtypeStruct((1,), jnp.int32)
    least = min(attend_bytes(*x, as_array, **visible, **kw), attend_bytes(*x, **kw))
    assert attend_bytes(*x, S - T, **visible, **kw) <= 1.3 * least


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "B, T, S, N, kw",
    [
        (8, 1, 8192, 8, {}),  # decoding
        (8, 17, 8192, 8, {}),
        (4, 1024, 1024, 16, {}),
        (4, 1024, 1024, 16, dict(gradient=True)),
        (1, 4096, 4096, 16, dict(local_window_size=(256, 0), gradient=True)),
    ],
)
def test_no_call_in_16_bits_has_all_of_an_operand_in_float32(B, T, S, N, kw, dtype, one_device):
    x = lambda dtype: [jax.ShapeDtypeStruct((B, n, N, 64), dtype) for n in (T, S)]
    as_array = jax.ShapeDtypeStruct((B,), jnp.int32) if T < S else None
    wide, found = (
        attend_bytes(*x(d), as_array, is_causal=True, **kw) for d in (jnp.float32, dtype)
    )
    assert found <= 1.3 * wide


CHUNKS = {  # the heads, the size of keys and values, the dtype
    "groups": (32, 8, 128, "bfloat16"),
    "groups, copied": (8, 2, 64, "float32"),
    "a key head for each": (8, 8, 64, "float32"),
    "one key head": (4, 1, 128, "bfloat16"),
    "latents": (128, 1, 576, "bfloat16"),
}
LENGTHS = 9, 17, 24, 33, 48, 65, 100, 160, 300, 600


@pytest.mark.parametrize("S", whole_but([16384, 65536], 65536))
@pytest.mark.parametrize("T", whole_but(LENGTHS, 24, 160))
@pytest.mark.parametrize("name", whole_but(CHUNKS, "groups"))
def test_a_chunk_of_a_prompt_copies_a_block_of_its_cache_at_a_time_under_any_mask(
    name, T, S, one_device
):
    """20 MB is what one block may take where the keys are not copied."""
    if name == "a key head for each" and not blockwise.tuning.LOOPS_ARE_FAST:
        pytest.skip("jax 0.10 has blocks here, which it multiplies faster than in loops")
    N, K, H, dtype = CHUNKS[name]
    x = [jax.ShapeDtypeStruct((1, n, heads, H), dtype) for n, heads in ((T, N), (S, K))]
    as_array, window = jax.ShapeDtypeStruct((1,), jnp.int32), dict(local_window_size=(S // 2, 0))
    causal = dict(is_causal=True)
    masks = (S - T, causal), (as_array, causal), (None, {}), (S - T, window)
    found = [attend_bytes(*x, offset, **kw) for offset, kw in masks]
    rows = 4 * T * N * H  # of o, in the dtype of sums
    assert max(found) <= max(1.3 * min(found), 20e6 if K == 1 else 5.3e6) + rows


# T, N, K, the sizes of keys and values, the block of a list and how many there are
BY_LISTS = {
    "2048 keys of 8192, latents": (8192, 8, 1, 192, 128, 1, 2048),
    "512 keys of 4096, latents": (4096, 8, 1, 192, 128, 1, 512),
    "16 blocks of 64, a group of 16": (4096, 16, 1, 64, 64, 64, 16),
    "3 blocks of 512": (4096, 4, 4, 64, 64, 512, 3),
}


@pytest.mark.parametrize("name", whole_but(BY_LISTS, "16 blocks of 64, a group of 16"))
def test_lists_take_no_more_memory_than_causality_and_two_copies_of_them(name, one_device):
    T, N, K, H, Hv, block, n = BY_LISTS[name]
    shapes = (1, T, N, H), (1, T, K, H), (1, T, K, Hv), (1, T, K, n), (1, T, N, Hv)
    x = list(map(jax.ShapeDtypeStruct, shapes, (*[jnp.float32] * 3, jnp.int32, jnp.float32)))

    def temporaries(make_mask):
        def both(q, k, v, indices, do):
            options = dict(mask=make_mask(indices), is_causal=True, implementation="blockwise")
            o, pull = jax.vjp(functools.partial(flash_attention, **options), q, k, v)
            return o, pull(do)

        return check.temporary_bytes(both, *x)

    by_lists = temporaries(lambda indices: masks.KeyLists(indices, block))
    assert by_lists <= temporaries(lambda _: None) + 2 * 4 * T * K * n


# ---- a sequence on eight devices ----


@pytest.mark.whole
@pytest.mark.parametrize(
    "implementation, kv_heads, schemes",
    [
        ("blockwise", 1, (RING, ZIGZAG)),
        ("blockwise", 8, (RING, ZIGZAG, ALL_TO_ALL)),
        ("triton", 8, (RING, ZIGZAG)),
    ],
)
def test_each_of_eight_devices_has_a_sixth_of_the_temporaries_of_one_alone(
    implementation, kv_heads, schemes
):
    shape = implementation, 65536, 8, kv_heads
    most = max(temporary_bytes(*shape, scheme) for scheme in schemes)
    assert most <= temporary_bytes(*shape) / 6


COLLECTIVE = re.compile(
    r" = (.*?) (all-to-all|all-gather|reduce-scatter|collective-permute|all-reduce)(-start)?\("
)
# of an array in the result of a collective among all devices; none sends to itself
SHARES = {"all-to-all": 1, "all-gather": 1, "reduce-scatter": DEVICES, "all-reduce": 2}


def bytes_sent(hlo: str) -> int:
    """By a device, at most: the results of a compiled program's collectives, times the trip counts
    of the loops around them."""
    bodies = {}
    for line in hlo.splitlines():
        if head := re.match(r"(ENTRY )?%([\w.-]+) .*{$", line):
            body = bodies.setdefault("ENTRY" if head[1] else head[2], [])
        elif " = " in line:
            body.append(line)

    @functools.cache
    def sent(name: str) -> int:
        return sum(map(sent_by, bodies[name]))

    def sent_by(line: str) -> int:
        if collective := COLLECTIVE.search(line):
            arrays = re.findall(r"\b[a-z]+(\d+)\[([\d,]*)\]", collective[1])
            size = sum(int(bits) // 8 * np.prod(eval(f"[{shape}]")) for bits, shape in arrays)
            if collective[2] == "collective-permute":
                return int(size)
            return int(SHARES[collective[2]] * size * (DEVICES - 1) // DEVICES)
        called = re.findall(r"(?:body|to_apply|calls|[a-z_]+_computation)=%([\w.-]+)", line)
        for branches in re.findall(r"branch_computations={%(.*?)}", line):
            called += branches.split(", %")
        total = sum(map(sent, called))
        if total and " while(" in line:
            # a loop that sends has a known trip count
            total *= int(re.search(r'"known_trip_count":{"n":"(\d+)"}', line)[1])
        return total

    return sent("ENTRY")


@pytest.mark.parametrize("scheme", [RING, ZIGZAG, ALL_TO_ALL], ids=str)
def test_devices_send_keys_values_and_their_gradients_once_around_and_no_more(scheme):
    program = compiled(ours("blockwise", scheme), 512, 8, H=16, is_sharded=True)
    # of one device's rows: K, V forward; K, V, dK, dV backward, once around
    unit = 512 // 8 * 8 * 16 * 4
    # rows: m, l; m, 1 / l, dlse, delta
    exchanged = (8 * unit + 6 * 4 * 512) * 7 // 8
    expected = exchanged if scheme == ALL_TO_ALL else (7 * 2 + 8 * 4) * unit
    assert bytes_sent(program.as_text()) == expected


@pytest.mark.whole
def test_some_heads_at_a_time_send_as_many_bytes_as_all(monkeypatch):
    sent = lambda: bytes_sent(
        compiled(ours("blockwise", RING), 512, 8, 2, H=16, is_sharded=True).as_text()
    )
    together = sent()
    monkeypatch.setattr(ring, "ROWS", 64)
    jax.clear_caches()
    assert sent() == together == 46 * 512 // 8 * 2 * 16 * 4


@pytest.mark.parametrize("chunks", [1, 2])
def test_zigzag_gives_all_devices_equal_work_under_a_causal_mask(chunks):
    """Counted in blocks of 64 by 64, which each device visits for its chunks of the queries."""
    T, block, count = 8192, 64, DEVICES * chunks
    size = T // count
    causal = masks.resolve([masks.Causal()], 1, T, T, 0)

    def visited(queries, keys):
        pair = causal.slice_chunks(1, queries[None], size).slice_keys(keys * size, size)
        blocks = schedule.by_query_tile(pair, size, block, block)[1]
        return jnp.sum(blocks[..., 3] - blocks[..., 0])

    each = jnp.arange(count)
    by_chunk = jax.jit(jax.vmap(jax.vmap(visited, (None, 0)), (0, None)))(each, each).sum(1)
    if chunks == 2:
        by_chunk = context_parallel.zigzag(by_chunk, DEVICES, axis=0)
    by_device = by_chunk.reshape(DEVICES, chunks).sum(1)
    most = by_device.max() / by_device.min()
    assert most <= 1.1 if chunks == 2 else most > 5
