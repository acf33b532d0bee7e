"""What the tests of decoding and of pages share."""

import contextlib
import os

import gpu_interpreter
import numpy as np
import oracle
import pytest
from cases import Sizes, qkv
from cases import normal as normal
from check import TOLERANCE, close

from pallas_flash.tiled import quantised, split_kv

IMPLEMENTATIONS = ("blockwise", "triton")
MOSAIC = ("hopper", "ampere")
B, N, K, H, HV = 3, 6, 2, 11, 5
T, PAGES = 5, 6
needs_interpreter = gpu_interpreter.needs_interpreter
ints = lambda *x: np.array(x, np.int32)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


def arrays(rng, T, S, dtype="float32", head=H, value=HV, heads=N):
    return qkv(rng, Sizes(B, T, S, heads, K, head, value), dtype)


def calls(request) -> int:
    """To draw for each implementation: 500 with --whole, else 25; PALLAS_FLASH_EXAMPLES draws more
    or fewer."""
    return int(os.environ.get("PALLAS_FLASH_EXAMPLES", 500 if request.config.option.whole else 25))


def seen(lengths, count) -> dict:
    """What the last `count` of `lengths` tokens of each row see, in words of flash_attention."""
    lengths = dict(query_offset=lengths - count, key_value_seq_lengths=lengths)
    return lengths | dict(is_causal=True, query_seq_lengths=np.broadcast_to(count, B))


def pool(rng, page, lengths, pages=PAGES, sizes=(H, HV), dtype="float32", stored=None, **more):
    """Pages in any order for paged_attention, as its keywords, and the keys and values of each row
    in theirs. The first `shared` pages are those of two rows. Where nobody looks, beyond the
    lengths and before `first`, pages or their scales are NaN, and the table has any numbers.
    `stored` may be one dtype of 8 bits for keys and one for values."""
    count = len(lengths)
    table = rng.permutation(count * pages).astype(np.int32).reshape(count, pages)
    table[1, : more.get("shared", 0)] = table[0, : more.get("shared", 0)]
    first = np.broadcast_to(more.get("first", 0), count)
    is_read = np.zeros((count * pages + 1, page), bool)
    for at, start, stop in zip(table, first, lengths, strict=True):
        token = np.arange(start, stop)
        is_read[at[token // page], token % page] = True
    call, rows = {}, []
    each = stored if isinstance(stored, tuple) else (stored, stored)
    for name, size, stored in zip("kv", sizes, each, strict=True):
        x = rng.normal(size=(*is_read.shape, K, size)) * (1 if name == "k" else more.get("of_v", 1))
        x = x.astype(np.float32 if stored else dtype)
        read = x
        if stored:
            x, scales = map(np.array, quantised.quantise(x, stored))
            read = x.astype(np.float32) * scales[..., None]
            scales[~is_read] = np.nan
            call[f"{name}_scales"] = scales
        rows.append(read[table].reshape(count, pages * page, K, size))
        x[~is_read] = quantised.LARGEST[stored] if stored else np.nan
        call[f"{name}_pages"] = x
    others = count * pages, -7, 10**6
    for at, start, stop, other in zip(table, first, lengths, others, strict=False):
        at[-(-stop // page) :], at[: start // page] = other, others[0]
    return call | dict(page_table=table, lengths=lengths), rows


@contextlib.contextmanager
def without_a_race(implementation, splits, monkeypatch):
    """The Mosaic kernels of an implementation, in so many splits."""
    monkeypatch.setattr(split_kv, "num_splits", lambda *_: splits)
    with gpu_interpreter.kernels(implementation, detect_races=True) as races:
        yield
    assert not races.found


def equal_the_oracle(found, q, rows, of_lse=1e-5, **kw):
    """Output and log-sum-exp, and the largest logits if there are any."""
    zeros = np.zeros((*q.shape[:3], rows[1].shape[3])), np.zeros(q.shape[:3])
    expected = oracle.attention(q, *rows, *zeros, **kw)
    close(found[0], expected[0], TOLERANCE[str(q.dtype)], "output")
    close(found[1], expected[1], of_lse, "lse")
    for largest in found[2:]:
        close(largest, oracle.max_logits(q, rows[0], **kw), of_lse, "largest logits")
