"""The cache of pages: where tokens go, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import normal
from decoding import B, H, K, T, ints

from pallas_flash import (
    paged_cache,
)

pytestmark = pytest.mark.usefixtures("small_caches")


def empty(pages, max_length=24):
    return paged_cache(B, max_length, K, H, pages=pages, page=8, dtype="float32")


def filled(cache, rng, counts):
    """The cache with counts[n][b] more tokens of row b in step n, and the keys of each row in
    order."""
    rows = [np.zeros((0, K, H), np.float32) for _ in range(B)]
    append = jax.jit(type(cache).append, donate_argnums=0)
    for count in counts:
        new = normal(rng, B, T, K, H)
        cache = append(cache, new, 2 * new, ints(*count))
        rows = [np.concatenate([row, new[b, : count[b]]]) for b, row in enumerate(rows)]
    return cache, rows


def holds(cache, b, row):
    length = int(cache.lengths[b])
    keys = np.asarray(cache.k_pages[cache.page_table[b]]).reshape(-1, K, H)[:length]
    np.testing.assert_array_equal(keys, row[:length])
    return length


def test_tokens_are_found_where_they_were_appended(rng):
    cache, rows = filled(
        empty(8),
        rng,
        [(5, 0, 2), (4, 5, 5), (5, 1, 0)],
    )
    assert [holds(cache, b, row) for b, row in enumerate(rows)] == [14, 6, 7]
    assert sorted(cache.users.tolist()) == [0] * 4 + [1] * 4  # no page is two rows'


def test_without_a_free_page_or_entry_tokens_are_left_out_and_the_others_stay_right(rng):
    cache, rows = filled(empty(3, 16), rng, [(5, 5, 5)] * 4)
    assert [holds(cache, b, row) for b, row in enumerate(rows)] == [8, 8, 8]
    cache, rows = filled(empty(9, 16), rng, [(5, 0, 1)] * 4)
    assert [holds(cache, b, row) for b, row in enumerate(rows)] == [16, 0, 4]


def test_shared_pages_are_free_when_the_last_row_releases_them(rng):
    cache, rows = filled(empty(6), rng, [(5, 3, 0)] * 4)
    cache = jax.jit(type(cache).share)(cache, 0, 1)
    assert holds(cache, 1, rows[0]) == 16 and sorted(cache.users.tolist()) == [0, 0, 0, 1, 2, 2]
    cache, more = filled(cache, rng, [(0, 5, 0)])
    assert (
        holds(cache, 0, rows[0]) == 20
        and holds(cache, 1, np.concatenate([rows[0][:16], more[1]])) == 21
    )
    cache = cache.release(np.array([True, False, False]))
    assert sorted(cache.users.tolist()) == [0, 0, 0, 1, 1, 1]
    assert not cache.release(np.array([False, True, False])).users.any()


def test_more_tokens_than_there_are_count_as_those_and_fewer_than_none_as_none(rng):
    cache = empty(8)
    new = jnp.ones((B, 3, K, H))
    assert cache.append(new, new, count=[9, -1, 2]).lengths.tolist() == [3, 0, 2]


@pytest.mark.parametrize("source, target", [(0, 3), (0, -1), (-1, 1), (3, 1)])
def test_to_share_with_no_row_changes_nothing_where_it_is_traced(source, target, rng):
    cache, _ = filled(empty(6), rng, [(5, 3, 0)] * 2)
    shared = jax.jit(type(cache).share)(cache, source, target)
    for name in ("page_table", "lengths", "users"):
        np.testing.assert_array_equal(getattr(shared, name), getattr(cache, name))


NEW = jnp.ones((2, 3, 2, 8))
MISUSED = {
    "one head for all": (
        lambda cache: cache.append(NEW[:, :, :1], NEW),
        r"key must be .* = \(2, 3, 2, 8\) .* got \(2, 3, 1, 8\)",
    ),
    "fewer values": (
        lambda cache: cache.append(NEW, NEW[:, :1]),
        r"value must be .* = \(2, 3, 2, 8\) .* got \(2, 1, 2, 8\)",
    ),
    "numbers of rows": (
        lambda cache: cache.release(np.array([0])),
        r"rows must be bool \[B\] = \(2,\), True: .* int32 \(1,\)",
    ),
    "tokens of other rows": (
        lambda cache: cache.append(NEW, NEW, [1, 2, 3]),
        r"count must be int32 \[B\] = \(2,\), or one for all rows; got \(3,\)",
    ),
    "room for other rows": (
        lambda cache: cache.reserve([1, 2, 3]),
        r"tokens must be int32 \[B\] = \(2,\), or .* got \(3,\)",
    ),
    "several rows": (
        lambda cache: cache.share(0, jnp.array([1, 0])),
        r"target must be the number of one row; got \(2,\)",
    ),
    "no such row": (
        lambda cache: cache.share(0, -1),
        "target must be the number of a row, from 0 to 1; got -1",
    ),
}


@pytest.mark.parametrize("name", MISUSED)
def test_what_a_cache_would_broadcast_or_drop_in_silence_raises(name):
    misuse, message = MISUSED[name]
    with pytest.raises(ValueError, match=message):
        misuse(paged_cache(2, 16, 2, 8, pages=4, page=8, dtype="float32"))


@pytest.mark.parametrize("dtype", ["uint8", "int16", "bool"])
def test_a_cache_is_of_floats_or_of_8_bits_that_have_scales(dtype):
    with pytest.raises(
        TypeError, match=f"must be a float's, or int8, float8_e4m3fn or float8_e5m2; got {dtype}"
    ):
        paged_cache(batch=1, max_length=8, kv_heads=1, head_size=8, pages=1, page=8, dtype=dtype)
