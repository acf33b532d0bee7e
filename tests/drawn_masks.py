"""Masks joined by &, | and ~, drawn by hypothesis, each with what it shows by comparing numbers in
NumPy."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from cases import lists, sequence_ends
from hypothesis import strategies as st

from pallas_flash import masks


class Drawn(NamedTuple):
    mask: masks.Mask
    seen: Callable  # of batch row, head, row, position and key, which broadcast
    # of the queries and keys of the Varlen in it that has both, which says where each query is
    ends: Any = None
    # beyond which are no queries: of QueryLengths and Varlen that no | or ~ made a rule
    lengths: Any = None

    def __and__(self, other):
        lengths = [x for x in (self.lengths, other.lengths) if x is not None]
        found = self._joined(other, self.mask & other.mask, np.logical_and)
        return found._replace(lengths=np.min(lengths, axis=0) if lengths else None)

    def __or__(self, other):
        return self._joined(other, self.mask | other.mask, np.logical_or)

    def __invert__(self):
        return Drawn(~self.mask, lambda *at: ~self.seen(*at), self.ends)

    def _joined(self, other, mask, join):
        ends = self.ends if other.ends is None else other.ends
        return Drawn(mask, lambda *at: join(self.seen(*at), other.seen(*at)), ends)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stripes(masks.Mask):
    """A user's own mask, which asks for row, position and an array for each row."""

    first: Any
    ARRAYS = {"first": "BT"}

    def interval(self, row, position):
        return self.first - row % 3, self.first + position % 11


def ints(shape, low, high):
    return st.integers(0, 2**32 - 1).map(
        lambda seed: np.random.default_rng(seed).integers(low, high + 1, shape).astype(np.int32)
    )


def sequences(z, size):
    return ints((z.B, 4), 0, size).map(sequence_ends)


def alone(z) -> list[st.SearchStrategy]:
    """Masks of every kind, for Sizes."""
    number = st.integers(1, 20)

    def documents(ids):
        of_q, of_k = ids
        return Drawn(masks.Documents(of_q, of_k), lambda b, h, i, p, j: of_q[b, i] == of_k[b, j])

    def rule(table):
        read, numbers = jnp.asarray(table), np.asarray(table)
        mask = masks.MaskMod(lambda b, h, q, k: (q + 2 * k + h + read[b, h]) % 5 > 1)
        return Drawn(mask, lambda b, h, i, p, j: (p + 2 * j + h + numbers[b, h]) % 5 > 1)

    def stripes(first):
        start = lambda b, i: first[b, i] - i % 3
        return Drawn(
            Stripes(first), lambda b, h, i, p, j: (j >= start(b, i)) & (j < first[b, i] + p % 11)
        )

    def varlen(ends):
        return Drawn(
            masks.Varlen(ends),
            lambda b, h, i, p, j: oracle.sequences(ends, ends, z.B, z.T, z.S)[0][b, i, j],
            lengths=ends[:, -1],
        )

    return [
        st.just(Drawn(masks.Causal(), lambda b, h, i, p, j: j <= p)),
        st.tuples(number, number, st.sampled_from([int, np.array])).map(
            lambda w: Drawn(
                masks.Window(w[2](w[0]), w[1]),
                lambda b, h, i, p, j: (j >= p - w[0]) & (j <= p + w[1]),
            )
        ),
        number.map(lambda n: Drawn(masks.Chunked(n), lambda b, h, i, p, j: p // n == j // n)),
        number.map(lambda n: Drawn(masks.Dilated(n), lambda b, h, i, p, j: (p - j) % n == 0)),
        number.map(lambda n: Drawn(masks.GlobalTokens(n), lambda b, h, i, p, j: (p < n) | (j < n))),
        ints((z.B, z.N), 0, 9).map(rule),
        ints(z.B, -2, z.S + 3).map(
            lambda n: Drawn(masks.KeyLengths(n), lambda b, h, i, p, j: j < n[b])
        ),
        ints(z.B, -2, z.S + 3).map(
            lambda n: Drawn(masks.KeyStarts(n), lambda b, h, i, p, j: j >= n[b])
        ),
        ints(z.B, -2, z.T + 3).map(
            lambda n: Drawn(masks.QueryLengths(n), lambda b, h, i, p, j: i < n[b], lengths=n)
        ),
        ints(z.B, 0, z.S).map(
            lambda n: Drawn(masks.PrefixLM(n), lambda b, h, i, p, j: (j <= p) | (j < n[b]))
        ),
        st.tuples(ints((z.B, z.T), 0, 3), ints((z.B, z.S), 0, 3)).map(documents),
        ints((z.B, z.T), -3, z.S).map(stripes),
        sequences(z, min(z.T, z.S)).map(varlen),
        key_lists(z, 64),
    ]


@st.composite
def key_lists(draw, z, pairs: int):
    """Lists whose entries name at least so many pairs of a query and a key, or two of them joined
    by &."""
    sizes = [(block, rows) for block in (1, 3, 16, 64, 200) for rows in (1, 2, 8, 64, 100)]
    block, query_block = draw(st.sampled_from([x for x in sizes if x[0] * x[1] >= pairs]))

    def one():
        L, B = draw(st.sampled_from([1, z.K, z.N])), draw(st.sampled_from([1, z.B]))
        n = draw(st.sampled_from([1, 2, 5, -(-z.S // block) + 3]))
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        named = lists(rng, z, block, query_block, L, n, B)
        seen = oracle.listed(*named, z.B, z.N, z.T, z.S)
        return Drawn(masks.KeyLists(*named), lambda b, h, i, p, j: seen[b, h, i, j])

    return one() & one() if draw(st.integers(0, 3)) == 0 else one()


def apart(z):
    """A Varlen whose sequences say where their queries are."""
    seen = lambda ends: lambda b, h, i, p, j: oracle.sequences(*ends, z.B, z.T, z.S)[0][b, i, j]
    return st.tuples(sequences(z, z.T), sequences(z, z.S)).map(
        lambda ends: Drawn(masks.Varlen(*ends), seen(ends), ends)
    )


@st.composite
def joined(draw, z, offset, is_apart: bool, gathers: bool):
    """Masks of every kind joined by &, | and ~, some with a map of their blocks; beside them lists
    of keys, which are in no | and ~, if it gathers."""
    one = st.one_of(*alone(z))

    def mapped(drawn):  # a map is of positions that one number says
        if drawn.ends is not None or not isinstance(offset, int) or not draw(st.booleans()):
            return drawn
        sizes = dict(block=16, query_offset=offset, batch=z.B, heads=z.N)
        return drawn._replace(mask=masks.create_block_mask(drawn.mask, z.T, z.S, **sizes))

    def tree(depth):
        if depth == 0:
            return draw(one)
        match draw(st.sampled_from("&|~|~")):
            case "&":
                return tree(depth - 1) & tree(draw(st.integers(0, depth - 1)))
            case "|":
                return mapped(tree(depth - 1)) | tree(draw(st.integers(0, depth - 1)))
            case _:
                return ~mapped(tree(depth - 1))

    found = tree(draw(st.integers(1, 3)))
    if is_apart:
        more = draw(apart(z))
        found = draw(
            st.sampled_from([lambda: found | more, lambda: found & ~more, lambda: ~(found & more)])
        )()
    found = mapped(found)
    return found & draw(key_lists(z, 1)) if gathers and draw(st.booleans()) else found
