"""Every mask on a small full grid against brute force: what is seen, which blocks are visited,
which need no mask."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import KINDS, MASKS, Sizes, arguments, qkv

from pallas_flash import checks, masks
from pallas_flash.attention import normalised
from pallas_flash.masks import block_types, sequences
from pallas_flash.masks.resolved_mask import ResolvedMask
from pallas_flash.tiled import schedule

Z = Sizes(T=23, S=29, N=1, K=1, H=1, Hv=1)
BLOCKS = [(4, 4), (8, 3), (5, 16), (32, 32)]


def resolved_mask(rng, kw) -> ResolvedMask:
    return normalised(*qkv(rng, Z), **arguments(kw))[1].resolved_mask


def rows_of(v: ResolvedMask, b: int, row):
    at = v.narrow(ResolvedMask.BY_BATCH, lambda x: jnp.asarray(x)[b])
    return at.narrow(ResolvedMask.BY_QUERY, lambda x: jnp.asarray(x)[b][row])


END = 2**31 - 1
WIDE = {  # far away, or wider than int32
    "window": lambda: dict(local_window_size=END),
    "window of the last position": lambda: dict(local_window_size=(END, 0), query_offset=END),
    "window of the first position": lambda: dict(local_window_size=(0, END), query_offset=-END),
    "last position": lambda: dict(is_causal=True, local_window_size=(END - 9, 3), query_offset=END),
    "first position": lambda: dict(is_causal=True, query_offset=-END - 1),
    "positions by batch": lambda: dict(
        is_causal=True, local_window_size=20, query_offset=np.array([END, 9], np.int32)
    ),
    "far windows by batch": lambda: dict(
        local_window_size=(END, END - 7), query_offset=np.array([END, -END], np.int32)
    ),
    "far windows of arrays": lambda: dict(
        window=(np.array([END - 9, 3]), END + np.zeros((), int)), query_offset=[END, -END - 1]
    ),
    "windows of arrays, far away": lambda: dict(
        window=np.array([[2**30, END], [END, 5]]), query_offset=np.array([END, -END])
    ),
    "prefix": lambda: dict(prefix=np.array([3, -END]), query_offset=np.array([END, -END])),
    "lengths": lambda: dict(
        key_value_seq_lengths=np.array([-END, END]),
        query_seq_lengths=[END, 7],
        local_window_size=(3, 9),
        query_offset=5,
    ),
    "ids of 64 bits": lambda: dict(
        query_segment_ids=np.arange(2 * Z.T).reshape(2, -1) % 3 * 2**32 + 1,
        key_value_segment_ids=np.arange(2 * Z.S).reshape(2, -1) % 4 * 2**32 + 1,
    ),
    "ids of two widths": lambda: dict(
        query_segment_ids=np.arange(2 * Z.T, dtype=np.uint32).reshape(2, -1) % 3 - 1,
        key_value_segment_ids=np.arange(2 * Z.S, dtype=np.int32).reshape(2, -1) % 4 - 1,
    ),
}


@pytest.mark.parametrize("name", [*MASKS, *WIDE])
def test_the_interval_and_ids_say_what_brute_force_says(name, rng):
    kw = MASKS[name](rng, Z) if name in MASKS else WIDE[name]()
    v, seen = resolved_mask(rng, kw), oracle.visible(Z.B, 1, Z.T, Z.S, kw)[:, 0]
    row = np.arange(Z.T, dtype=np.int32)
    for b in range(Z.B):
        at = rows_of(v, b, row)
        start, stop = (np.broadcast_to(end, Z.T)[:, None] for end in at.interval(row))
        ids = () if at.query_ids is None else (at.query_ids[:, None], at.key_ids[b][None])
        np.testing.assert_array_equal(at.visible(start, stop, np.arange(Z.S), *ids), seen[b])


@pytest.mark.parametrize("block_q, block_k", BLOCKS)
@pytest.mark.parametrize("name", MASKS)
def test_visited_blocks_hold_all_that_is_seen_and_full_blocks_nothing_else(
    name, block_q, block_k, rng
):
    kw = MASKS[name](rng, Z)
    v, seen = resolved_mask(rng, kw), oracle.visible(Z.B, 1, Z.T, Z.S, kw)[:, 0]
    q_tiles, k_tiles = -(-Z.T // block_q), -(-Z.S // block_k)
    rows = np.minimum(np.arange(q_tiles)[:, None] * block_q + np.arange(block_q), Z.T - 1)

    def of_keys(b, row):
        at = rows_of(v, b, row)
        return jnp.stack(
            jnp.broadcast_arrays(
                *schedule.key_blocks(*at.interval(row), at.contiguous, block_k).ends
            )
        )

    @jax.jit
    def both(b, rows):
        by_row = jax.vmap(jax.vmap(of_keys, in_axes=(None, 0)), in_axes=(0, None))
        return by_row(b, rows), schedule.query_blocks(v, Z.T, block_q, block_k)

    by_query, by_key = (np.broadcast_to(x, (Z.B, *x.shape[1:])) for x in both(np.arange(Z.B), rows))
    seen = np.pad(seen, ((0, 0), (0, 0), (0, -Z.S % block_k)))  # keys that are not there
    tile = lambda b, i, j: seen[b, i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k]
    scattered = "scattered" in name  # such a document reaches from its first to its last key
    gaps = scattered or v.query_ids is not None  # what a tile's rows see together may have gaps
    for b in range(Z.B):
        for i in range(q_tiles):
            blocks = schedule.Blocks(*by_query[b, i])
            _check(blocks, [tile(b, i, j) for j in range(k_tiles)], False, not scattered)
        for j in range(k_tiles):
            blocks = schedule.Blocks(*by_key[b, j])
            _check(blocks, [tile(b, i, j) for i in range(q_tiles)], Z.T % block_q != 0, not gaps)


BANDS = [(None, 0, 0), (None, 0, -60), (30, 0, 5), (0, 10, 100), (70, 70, 0), (10, None, -20)]


@pytest.mark.parametrize("left, right, offset", BANDS)
def test_a_kernel_computes_the_blocks_of_a_band_from_its_first_and_last_row(left, right, offset):
    v = masks.resolve([masks.Window(left, right)], 1, Z.T, Z.S, offset)
    for size, block in BLOCKS:
        for first in range(0, Z.T, size):
            last = min(first + size, Z.T) - 1
            blocks = schedule.known_blocks(v, np.int32(first), np.int32(last), block)
            expected = schedule.key_blocks(*v.interval(np.arange(first, last + 1)), None, block)
            if expected.first < expected.last:
                np.testing.assert_array_equal(blocks.ends, expected.ends)


def _check(blocks, tiles, last_hangs_over, tight):
    first, full_first, full_last, last = (int(x) for x in blocks.ends)
    assert 0 <= first <= full_first <= full_last <= last <= len(tiles)
    for number, tile in enumerate(tiles):
        if tile.any():
            assert first <= number < last, f"block {number} is seen and not visited: {blocks}"
        if full_first <= number < full_last:
            assert tile.all(), f"block {number} needs a mask: {blocks}"
            assert not (last_hangs_over and number == len(tiles) - 1), (
                f"block {number} needs bounds: {blocks}"
            )
    if tight and first < last:
        assert tiles[first].any() and tiles[last - 1].any(), (
            f"the ends are visited in vain: {blocks}"
        )
        full = sum(tile.all() for tile in tiles[: len(tiles) - last_hangs_over])
        assert full_last - full_first == full, f"some are masked in vain: {blocks}"


def bucket_mates(bits: int) -> np.ndarray:
    """Two ids of one bucket."""
    ids = jnp.arange(1 << bits, 3 << bits, dtype=jnp.int32)
    other = int(ids[np.asarray(sequences._bucket(ids, bits)) == 7][0])
    return np.array([7, other], np.int32)


PACKED = np.repeat(np.arange(12), [40, 1, 0, 60, 33, 7, 0, 90, 2, 5, 31, 31])
IDS = {  # of keys, and of queries if they are others
    "in order": (PACKED,),
    "padded behind with 0": (np.append(PACKED + 1, [0] * 50),),
    "padded behind with -1": (np.append(PACKED, [-1] * 50),),
    "padded before": (np.append([-7] * 50, PACKED),),
    "padded between": (np.where(np.arange(PACKED.size) % 9 < 7, PACKED + 1, 0),),
    "backward": (PACKED[::-1],),
    "a document in two parts": (np.repeat([0, 1, 0, 2], 31),),
    "each alone": (np.arange(300),),
    "one": (np.zeros(300),),
    "scattered": (np.arange(300) * 5 % 7,),
    "far apart": ((PACKED * 37 % 64 - 20) << 20,),
    "the ends of int32": (np.repeat([2**31 - 1, -(2**31), 0, -1], 31),),
    "others than the queries'": (PACKED, np.arange(-5, 200) // 9),
    "a single key": (np.array([3]), np.arange(5)),
}


@pytest.mark.parametrize("name", IDS)
def test_a_query_sees_from_the_first_to_the_last_key_with_its_id(name):
    keys, queries = (np.array(x, np.int32) for x in (IDS[name][0], IDS[name][-1]))
    start, stop, contiguous = map(np.asarray, sequences._runs_of_row(queries, jnp.asarray(keys)))
    for n, query in enumerate(queries):
        found = np.flatnonzero(keys == query)
        expected = (found[0], found[-1] + 1) if found.size else (0, 0)
        assert (start[n], stop[n]) == expected
        assert contiguous[n] == (0 < found.size == stop[n] - start[n])


def test_ids_that_share_a_bucket_share_a_range_that_needs_a_mask():
    first, second = bucket_mates(sequences.MIN_BUCKET_BITS)
    keys = jnp.repeat(jnp.array([1, first, second, 2], jnp.int32), 10)
    start, stop, contiguous = sequences._runs_of_row(keys, keys)
    assert start.tolist() == [0] * 10 + [10] * 20 + [30] * 10
    assert stop.tolist() == [10] * 10 + [30] * 20 + [40] * 10
    assert contiguous.tolist() == [True] * 10 + [False] * 20 + [True] * 10
    alone = sequences._runs_of_row(jnp.array([second], jnp.int32), keys[:20])
    assert not alone[2].any()  # the range is another id's


def shown(mask, batch=2, heads=2, size=40):
    """Which pairs a mask shows, bool [B, N, T, S]."""
    arrays = lambda part: dataclasses.replace(
        part,
        **{name: jnp.asarray(x) for name in part.ARRAYS if (x := getattr(part, name)) is not None},
    )
    mask = masks.with_leaves(mask, map(arrays, masks.leaves(mask)))
    resolved = masks.resolve(masks.conjuncts(mask), batch, size, size, 0)
    found = block_types.visible_pairs(resolved, batch, heads, *[jnp.arange(size)] * 2)
    return np.broadcast_to(found, (batch, heads, size, size))


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_mask_shows_what_its_formula_says_also_within_and_or_not(name):
    mask, formula = KINDS[name]
    at = np.indices((2, 2, 40, 40))
    expected, third = formula(*at), (at[2] - at[3]) % 3 == 0
    np.testing.assert_array_equal(shown(mask), expected)
    drawn = np.array([line.split() for line in masks.draw(mask, 40, 40, heads=2).splitlines()])
    first, last = drawn[:, :40] == "1", drawn[:, -40:] == "1"
    np.testing.assert_array_equal((first, last), (expected[0, 0], expected[-1, -1]))
    np.testing.assert_array_equal(shown(~mask), ~expected)
    np.testing.assert_array_equal(shown(mask | masks.Dilated(3)), expected | third)
    np.testing.assert_array_equal(shown(mask & masks.Dilated(3)), expected & third)
    leaves, tree = jax.tree.flatten(mask)
    assert len(leaves) == sum(getattr(mask, field) is not None for field in mask.ARRAYS)
    assert repr(jax.tree.unflatten(tree, leaves)) == repr(mask)


def test_the_complement_of_a_far_window_is_what_lies_beyond_it():
    at = np.indices((2, 2, 40, 40))
    np.testing.assert_array_equal(shown(~masks.Window(END, 0)), at[3] > at[2])


def test_every_kind_of_mask_is_among_the_cases():
    kinds = {
        name for name, x in vars(masks).items() if isinstance(x, type) and issubclass(x, masks.Mask)
    }
    assert kinds - {"Mask", "BlockMask", "BlockTypes"} <= set(KINDS)


def test_a_mask_prints_as_words():
    v = masks.resolve([masks.Causal(), masks.KeyLengths(np.array([3]))], 1, 4, 4, 2)
    assert str(v) == "causal, query offset 2, key lengths"
    assert str(masks.resolve([], 1, 4, 4, 7)) == "full"


def test_traced_ids_lengths_and_offsets_of_64_bits_keep_their_meaning():
    with jax.enable_x64(True):
        a, b = np.array([[1, 2**32 + 1, -(2**40)]]), np.array([[2**32 + 1, 1]])
        ids = jax.jit(lambda **named: checks.ids(named))(a=a, b=b)
        lengths = jax.jit(lambda x: checks.ints("x", x))(np.array([-(2**40), 5, 2**32]))
    np.testing.assert_array_equal(
        ids[0][:, :, None] == ids[1][:, None], a[:, :, None] == b[:, None]
    )
    np.testing.assert_array_equal(lengths, [-END - 1, 5, END])
    assert {x.dtype for x in (*ids, lengths)} == {np.dtype("int32")}


def test_ids_that_jax_would_cut_to_32_bits_are_refused():
    with pytest.raises(
        TypeError,
        match="a and b must be integers of one dtype, or fit into int32; got int32 and int64",
    ):
        jax.jit(lambda a: checks.ids(dict(a=a, b=np.array([2**40]))))(np.array([1], np.int32))


class Interval(masks.Mask):
    """Whatever a user may return."""

    def __init__(self, *ends):
        self.ends = ends

    def interval(self, row, position):
        return self.ends


@pytest.mark.parametrize(
    "start, stop",
    [
        (-(2**40), 2**40),
        (np.int32(5), np.int32(-END)),
        (np.uint32(3), np.uint64(2**63)),
        (np.int8(2), 9),
        (None, 9),
        (9, None),
        (None, None),
    ],
)
def test_an_interval_of_any_integers_and_open_sides_means_what_it_says(start, stop, rng):
    at = rows_of(resolved_mask(rng, dict(mask=Interval(start, stop))), 0, np.arange(Z.T))
    seen = at.visible(
        *(end[:, None] for end in at.interval(np.arange(Z.T))), np.arange(Z.S, dtype=np.int32)
    )
    start, stop = int(start or 0), Z.S if stop is None else int(stop)
    np.testing.assert_array_equal(
        seen, np.broadcast_to([start <= j < stop for j in range(Z.S)], seen.shape)
    )


MISTAKES = {
    "floats": (
        Interval(0, 2.0),
        TypeError,
        r"Interval.interval\(\) must return integers, the keys .* got float64",
    ),
    "one end": (Interval(0), TypeError, r"must return \(start, stop\); got tuple"),
    "keys": (
        Interval(0, np.zeros(Z.S, int)),
        ValueError,
        r"must return what broadcasts to \[B, T\] = \(2, 23\); got \(29,\)",
    ),
    "nothing": (
        masks.Mask(),
        NotImplementedError,
        r"Mask needs a method interval\(self, row, position\)",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mask_with_a_mistake_says_which(name, rng):
    mask, error, text = MISTAKES[name]
    with pytest.raises(error, match=text):
        resolved_mask(rng, dict(mask=mask))


def test_and_or_and_not_take_no_masks():
    one, other = masks.Causal(), masks.Chunked(3)
    for join in (lambda: one and other, lambda: one or other, lambda: not one):
        with pytest.raises(
            TypeError, match=r"a mask is not a bool: combine masks with &, \| and ~"
        ):
            join()


@pytest.mark.parametrize(
    "other",
    [np.ones((2, 3), bool), jax.numpy.ones((2, 3), bool), True],
    ids=["numpy", "jax", "bool"],
)
def test_a_mask_meets_no_array_and_says_where_arrays_go(other):
    for join in (lambda: masks.Causal() & other, lambda: other & masks.Causal()):
        with pytest.raises(
            TypeError,
            match=r"& joins two objects of pallas_flash\.masks; got .*Pass an array alone as mask=",
        ):
            join()
