"""The cache of pages: where tokens go, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import normal
from decoding import B, H, K, T, ints, seen
from selection import whole_but

from pallas_flash import flash_attention, paged_cache, scores

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


@pytest.mark.parametrize(
    "pages, max_length, counts, lengths",
    [
        (8, 24, [(5, 0, 2), (4, 5, 5), (5, 1, 0)], [14, 6, 7]),
        (3, 16, [(5, 5, 5)] * 4, [8, 8, 8]),  # without a free page tokens are left out
        (9, 16, [(5, 0, 1)] * 4, [16, 0, 4]),  # or an entry of the table
    ],
)
def test_tokens_are_found_where_they_were_appended(pages, max_length, counts, lengths, rng):
    cache, rows = filled(empty(pages, max_length), rng, counts)
    assert [holds(cache, b, row) for b, row in enumerate(rows)] == lengths
    used = sum(-(-length // 8) for length in lengths)
    assert sorted(cache.users.tolist()) == [0] * (pages - used) + [1] * used  # no page is two rows'


def test_shortage_says_beforehand_whether_an_append_loses_tokens(rng):
    append = jax.jit(type(cache := empty(5, 16)).append)
    shortage, new, fits = jax.jit(type(cache).shortage), jnp.ones((B, T, K, H)), set()
    for _ in range(40):
        if rng.random() < 0.3:
            cache = cache.release(rng.random(B) < 0.5)
        count = rng.integers(0, T + 1, B).astype(np.int32)
        lacking, before = shortage(cache, count), cache
        cache = append(cache, new, new, count)
        lost = np.asarray(cache.lost - before.lost)
        assert (lost == count - (cache.lengths - before.lengths)).all() and (lost >= 0).all()
        assert bool(lost.any()) == bool(lacking.pages or lacking.tokens.any())
        assert (lost >= lacking.tokens).all()
        if lacking.pages:  # with as many more there are enough
            held = before.users.at[np.flatnonzero(before.users)[: lacking.pages]].set(0)
            assert not shortage(before._replace(users=held), count).pages
        fits.add((bool(lacking.pages), bool(lacking.tokens.any())))
    assert len(fits) == 4


def test_a_row_that_lost_tokens_takes_no_more_until_it_is_released(rng):
    cache, rows = filled(empty(3), rng, [(5, 5, 5)] * 2)
    assert (cache.lost.tolist(), cache.lengths.tolist()) == ([2, 2, 2], [8, 8, 8])
    cache = cache.release(np.array([False, True, False]))
    cache, more = filled(cache, rng, [(1, 4, 0)])  # there is a page now, but not after a gap
    assert (cache.lost.tolist(), cache.lengths.tolist()) == ([3, 0, 2], [8, 4, 8])
    assert holds(cache, 0, rows[0]) == 8 and holds(cache, 1, more[1]) == 4
    cache = cache.share(0, 2)  # the full pages before the gap
    assert (cache.lost.tolist(), cache.lengths.tolist()) == ([3, 0, 0], [8, 4, 8])


FULL = {  # what is said, and the call
    "append lacks 1 page: it needs 2, and 1 of 4 is free. Release .*.pages=": lambda cache, new: (
        cache.append(new, new, [0, 9, 0])
    ),
    "^append lacks 1 page": lambda cache, new: cache.append(
        new[0], new[0], cu_seqlens=[0, 0, 1, 9]
    ),
    "reserve lacks 4 pages: it needs 5, .* row 2 has 16 tokens": lambda cache, _: cache.reserve(9),
    "row 2 has 16 tokens .* take 9 more: its .* holds 24. Make .* max_length": lambda cache, new: (
        cache.append(new, new, [0, 0, 9])
    ),
    "row 1 lost 3 tokens, and takes no more until it is released": lambda cache, new: (
        cache._replace(lost=jnp.array([0, 3, 0])).append(new, new, [0, 1, 0])
    ),
}


@pytest.mark.parametrize("message", FULL)
def test_outside_of_jit_tokens_that_do_not_fit_raise_and_inside_they_do_not(message):
    new = jnp.ones((B, 9, K, H))
    cache = empty(4).append(new, new, [8, 0, 9]).append(new, new, [0, 0, 7])
    fill = FULL[message]
    with pytest.raises(ValueError, match=message):
        fill(cache, new)
    assert message.startswith("reserve") or jax.jit(fill)(cache, new).lost.any()
    assert cache.append(new, new, [0, 0, 8]).lengths.tolist() == [8, 0, 24]  # what fits


ATTEND = {
    "float32": ({}, {}),
    "int8": (dict(dtype="int8"), {}),
    "keys in 8 bits": (dict(dtype="int8", value_dtype="float32"), {}),
    "keys alone": (dict(values_are_keys=True), dict(value_size=5)),
    "keys alone in 8 bits": (dict(values_are_keys=True, dtype="int8"), dict(value_size=5)),
}


@pytest.mark.parametrize("name", whole_but(ATTEND, "float32", "keys alone in 8 bits"))
def test_attend_gives_a_row_that_lost_tokens_nan_and_the_others_what_their_keys_give(name, rng):
    kind, options = ATTEND[name]
    options = options | dict(return_residual=True, return_max_logits=True)
    sizes = dict(max_length=16, kv_heads=K, head_size=H, pages=5, page=8, dtype="float32")
    cache = paged_cache(B, **sizes | kind)
    key, value, query = (
        jnp.asarray(normal(rng, B, n, heads, H)) for n, heads in ((20, K), (20, K), (2, 2 * K))
    )
    value, count = None if cache.v_pages is None else value, ints(20, 12, 7)

    @jax.jit
    def step(cache):
        cache = cache.append(key, value, count)
        tokens = jnp.concatenate([query[0, :1], query[0, :1], query[1], query[2, 1:]])
        ragged = cache.attend(tokens, cu_seqlens_q=ints(1, 2, 4, 5), **options)
        return cache.attend(query, **options), ragged, cache.lost

    padded, ragged, lost = step(cache)
    assert lost.tolist() == [4, 0, 0]
    for b in (1, 2):
        row, n = slice(b, b + 1), count[b]
        values = None if value is None else value[row, :n]
        rows, at = (query[row], key[row, :n], values), dict(query_offset=int(n) - 2)
        expected = flash_attention(*rows, is_causal=True, **at, **options)
        atol = 0.1 if "dtype" in kind else 2e-6
        for x, y in zip(padded, expected, strict=True):
            np.testing.assert_allclose(x[row], y, atol=atol)
    for x, y in zip(padded, ragged, strict=True):
        assert jnp.isnan(x[0]).all() and jnp.isnan(y[1]).all()
        np.testing.assert_allclose(y[2:], jnp.concatenate([x[1], x[2, 1:]]), atol=2e-6)
    assert not ragged[0][0].any()  # a token of no row


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


def test_where_count_is_traced_more_than_all_tokens_are_all_and_fewer_than_none_none():
    cache = empty(8)
    new = jnp.ones((B, 3, K, H))
    assert jax.jit(type(cache).append)(cache, new, new, ints(9, -1, 2)).lengths.tolist() == [
        3,
        0,
        2,
    ]


def attends(found, cache, query, count, **kw):
    """Asserts that the first count[b] queries of each row are its last tokens, and the others 0."""
    rows, options = [], seen(np.asarray(cache.lengths), count) | kw
    for pages, scales in (cache.k_pages, cache.k_scales), (cache.v_pages, cache.v_scales):
        row = np.asarray(pages[cache.page_table], np.float32)
        row = row if scales is None else row * scales[cache.page_table][..., None]
        rows.append(row.reshape(B, -1, K, H))
    query = query[:, : found.shape[1]]
    zeros = np.zeros(query.shape), np.zeros(query.shape[:3])
    expected = oracle.attention(query, *rows, *zeros, **options)
    np.testing.assert_allclose(found, expected[0], atol=2e-6)


@pytest.mark.parametrize("stored", ["float32", "int8"])
def test_a_padded_prompt_then_single_tokens_then_a_refill_attend_without_a_word(stored, rng):
    """Inside of jit, where the cache alone says which queries are real."""
    new, query = (jnp.asarray(normal(rng, B, T, heads, H)) for heads in (K, 2 * K))
    cache = paged_cache(B, 24, K, H, pages=9, page=8, dtype=stored)

    @jax.jit
    def fill(cache, count):
        cache = cache.release(count > 0).append(new, -new, count)
        return cache, cache.attend(query)

    def token(cache, at):
        one = lambda x: jax.lax.dynamic_slice_in_dim(x, at, 1, 1)
        cache = cache.append(one(new), -one(new), ints(1, 0, 0))
        return cache, cache.attend(one(query))

    cache, found = fill(cache, prompt := ints(T, 2, 0))
    attends(found, cache, query, prompt)
    cache, found = jax.jit(functools.partial(jax.lax.scan, token))(cache, jnp.arange(3))
    attends(found[2], cache, query[:, 2:], ints(1, 1, 0))
    cache, found = fill(cache, refill := ints(0, 4, 3))
    attends(found, cache, query, refill)
    assert cache.lengths.tolist() == [T + 3, 4, 3]


def test_other_queries_than_those_of_the_last_append_are_the_last_or_where_they_are_said_to_be(rng):
    new, query = (jnp.asarray(normal(rng, B, T, heads, H)) for heads in (K, 2 * K))
    count, ends = ints(T, 2, 0), ints(0, 2, 4, 5)
    cache = empty(9).append(new, -new, count)
    attends(cache.attend(query[:, :2]), cache, query, ints(2, 2, 0))
    of_another_sequence = cache.attend(query, is_causal=False)
    attends(of_another_sequence, cache, query, ints(T, T, 0), is_causal=False)
    begin = cache.attend(query, query_offset=ints(0, 0, 0))
    attends(begin, cache, query, ints(T, T, 0), query_offset=0)
    assert cache.release(count > 2).share(1, 0).appended.tolist() == [0, 2, 0]
    cache = cache.append(new[0], -new[0], cu_seqlens_q=ends)
    by_name = [cache.attend(query[0], **{n: ends}) for n in ("cu_seqlens", "cu_seqlens_q")]
    np.testing.assert_array_equal(*by_name)
    attends(cache.attend(query, query_seq_lengths=np.diff(ends)), cache, query, np.diff(ends))


@pytest.mark.parametrize("source, target", [(0, 3), (0, -1), (-1, 1), (3, 1), (0, 0)])
def test_to_share_with_itself_or_no_row_changes_nothing_where_it_is_traced(source, target, rng):
    cache, _ = filled(empty(6), rng, [(5, 3, 0)] * 2)
    shared = jax.jit(type(cache).share)(cache, source, target)
    for name in ("page_table", "lengths", "users"):
        np.testing.assert_array_equal(getattr(shared, name), getattr(cache, name))


NEW = jnp.ones((2, 3, 2, 8))
MISUSED = {
    r"key must be .* = \(2, 3, 2, 8\) .* got \(2, 3, 1, 8\)": lambda cache: cache.append(
        NEW[:, :, :1], NEW
    ),
    r"value must be .* = \(2, 3, 2, 8\) .* got \(2, 1, 2, 8\)": lambda cache: cache.append(
        NEW, NEW[:, :1]
    ),
    r"rows must be bool \[B\] = \(2,\), True: .* int32 \(1,\)": lambda cache: cache.release(
        np.array([0])
    ),
    r"count must be int32 \[B\] = \(2,\), or one for all rows; got \(3,\)": lambda cache: (
        cache.append(NEW, NEW, [1, 2, 3])
    ),
    r"tokens must be int32 \[B\] = \(2,\), or .* got \(3,\)": lambda cache: cache.reserve(
        [1, 2, 3]
    ),
    r"target must be the number of one row; got \(2,\)": lambda cache: cache.share(
        0, jnp.array([1, 0])
    ),
    "target must be the number of a row, from 0 to 1; got -1": lambda cache: cache.share(0, -1),
    r"count must be 0 to the 3 tokens given; got \[4, -5\]": lambda cache: cache.append(
        NEW, NEW, [4, -5]
    ),
    r"tokens must be 0 or more; got \[-1, -1\]": lambda cache: cache.reserve(-1),
    r"tokens must be 0 or more; got \[0, -1\]": lambda cache: cache.shortage(jnp.array([0, -1])),
    r"key must be float32, .* quantises it. Got int32. .* key.astype\(.* times its": lambda cache: (
        cache.append(NEW.astype(int), NEW)
    ),
    "value must be float32, .* Got float8_e4m3fn": lambda cache: cache.append(
        NEW, NEW.astype("float8_e4m3fn")
    ),
    "value_dtype must be None with values_are_keys, .* have their dtype; got int8": lambda _: (
        paged_cache(2, 16, 2, 8, pages=4, values_are_keys=True, value_dtype="int8")
    ),
    r"attend\(\) passes the cache's own lengths: .* query_seq_lengths says how": lambda cache: (
        cache.attend(NEW, lengths=[1, 2])
    ),
    "cu_seqlens and cu_seqlens_q are two names of one argument; got both": lambda cache: (
        cache.attend(NEW[0], cu_seqlens=[0, 1, 2], cu_seqlens_q=[0, 1, 2])
    ),
    "count cannot go with cu_seqlens, which says": lambda cache: cache.append(
        NEW[0], NEW[0], 1, cu_seqlens=[0, 1, 2]
    ),
    r"cu_seqlens must be int32 \[B \+ 1\] = \(3,\); got \(2,\)": lambda cache: cache.append(
        NEW[0], NEW[0], cu_seqlens=[0, 1]
    ),
    r"cu_seqlens must ascend, .* to the 3 tokens at most; got \[0, 1, 4\]": lambda cache: (
        cache.attend(NEW[0], cu_seqlens=[0, 1, 4])
    ),
    "as many keys as real queries, .* got 2 queries and 1 keys in row 1: query_": lambda cache: (
        cache.append(NEW, NEW, [3, 1]).attend(NEW[:, :2])
    ),
    "got 2 queries and 1 keys in row 1: append adds the keys of new tokens first": lambda cache: (
        cache.append(NEW, NEW, [0, 1]).attend(NEW[0], cu_seqlens=[0, 1, 3])
    ),
    r"key_value_segment_ids of Alibi must be .* = \(2, 16\), .* got \(2, 3\)": lambda cache: (
        cache.append(NEW, NEW).attend(
            NEW, score_mod=scores.Alibi(jnp.ones((5, 2)), np.zeros((2, 3), int))
        )
    ),
}


@pytest.mark.parametrize("message", MISUSED)
def test_what_a_cache_would_broadcast_or_drop_in_silence_raises(message):
    with pytest.raises((ValueError, TypeError), match=message):
        MISUSED[message](paged_cache(2, 16, 2, 8, pages=4, page=8, dtype="float32"))
