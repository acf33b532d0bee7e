"""What is measured: a call of attention as data, the arithmetic that it asks for, and the suite of
cases for a GPU."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

RESULTS = {
    "forward": ("o",),
    "backward": ("dq", "dk", "dv"),
    "forward+backward": ("o", "dq", "dk", "dv"),
}
PASSES = tuple(RESULTS)


class Case(NamedTuple):
    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    dtype: str
    causal: bool
    Hv: int | None = None  # None: H
    # a query sees its own key and the window - 1 before it; only with `causal`
    window: int | None = None
    documents: int | None = None  # packed into each row, in lengths drawn at random
    # the first keys, which all later queries see; only with `window`, without documents
    global_tokens: int | None = None

    def __str__(self):
        value = f" Hv{self.Hv}" if self.Hv else ""
        return (
            f"B{self.B} T{self.T} S{self.S} N{self.N} K{self.K} H{self.H}{value} {self.dtype} "
            f"{self.mask}"
        )

    @property
    def mask(self) -> str:
        words = ["causal" if self.causal else "full"]
        words += [f"window {self.window}"] if self.window else []
        words += [f"{self.documents} documents"] if self.documents else []
        words += [f"{self.global_tokens} global tokens"] if self.global_tokens else []
        return " ".join(words)

    @property
    def value_size(self) -> int:
        return self.Hv or self.H

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Of query, key, value, and the output's gradient."""
        sizes = (
            (self.T, self.N, self.H),
            (self.S, self.K, self.H),
            (self.S, self.K, self.value_size),
        )
        return [
            jax.ShapeDtypeStruct((self.B, *size), jnp.dtype(self.dtype))
            for size in (*sizes, (*sizes[0][:2], self.value_size))
        ]

    def inputs(self) -> list[jax.Array]:
        """Query, key, value, and the output's gradient: the same arrays each time, until
        `forget_inputs`."""
        return _inputs(self)

    def document_lengths(self) -> np.ndarray:
        """Of each row alike: neither equal nor multiples of a block."""
        if not self.documents:
            return np.array([self.T])
        cuts = np.random.default_rng(0).choice(
            np.arange(1, self.T), self.documents - 1, replace=False
        )
        return np.diff([0, *np.sort(cuts), self.T])

    def segment_ids(self) -> np.ndarray:
        """int32 [B, T]"""
        lengths = self.document_lengths()
        return np.tile(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths), (self.B, 1))

    def visible(self) -> jax.Array:
        """Whether each query sees each key, bool [1, 1, T, S]; every row has the same mask."""
        row, key = jnp.arange(self.T)[:, None], jnp.arange(self.S)
        seen = row >= key if self.causal else jnp.ones((self.T, self.S), bool)
        if self.window:
            seen &= (key > row - self.window) | (key < (self.global_tokens or 0))
        if self.documents:
            ids = self.segment_ids()[0]
            seen &= ids[:, None] == ids
        return seen[None, None]

    def pairs(self) -> float:
        """Of a query and a key that it sees, in one head of one row: exact, but for the usual half
        of a causal mask alone."""
        if not (self.window or self.documents):
            return self.T * self.S * (0.5 if self.causal else 1)
        return float(sum(self._pairs_of(int(length)) for length in self.document_lengths()))

    def _pairs_of(self, length: int) -> int:
        if not self.causal:
            return length**2
        window = min(self.window or length, length)
        # keys before the window, of the last query
        far = min(self.global_tokens or 0, length - window)
        return (
            _triangle(window)
            + (length - window) * window
            + _triangle(far)
            + (length - window - far) * far
        )

    def bytes(self) -> int:
        """Of query, key, value and output."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in self.shapes())

    def flops(self, passes: str) -> float:
        """Two for each product of numbers: q k^T and p v forward; q k^T again, do v^T, and dq, dk,
        dv backward."""
        H, Hv = self.H, self.value_size
        each = dict(forward=H + Hv, backward=3 * H + 2 * Hv)
        return 2 * self.B * self.N * self.pairs() * sum(each[name] for name in passes.split("+"))


@functools.cache
def _inputs(case: Case) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    return [
        jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, case.shapes(), strict=True)
    ]


def forget_inputs():
    """Frees them: of a large cache two do not fit into a GPU."""
    _inputs.cache_clear()


def _triangle(n: int) -> int:
    return n * (n + 1) // 2


def decoding(batches, lengths, **shape) -> list[Case]:
    """One new token a row, that sees all S keys."""
    return [Case(B=B, T=1, S=S, causal=False, **shape) for B in batches for S in lengths]


LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
QUICK = (
    (128, 4096, True),
    (128, 16384, True),
    (64, 4096, True),
    (256, 4096, True),
    (128, 4096, False),
)


def suite(
    dtype: str, quick: bool = False, tokens: int = 16384, hidden: int = 2048, lengths=LENGTHS
) -> list[Case]:
    """Every case has `tokens` tokens in all. What tells most comes first, should the time run out;
    quick stops there."""

    def case(H, T, causal, N=None, K=None, **more):
        N = N or hidden // H
        return Case(max(1, tokens // T), T, T, N, K or N, H, dtype, causal, **more)

    longest, long = lengths[-1], lengths[-2]
    masks = [
        case(128, longest, True, documents=16),
        # 64 query heads on 8, where hidden is 2048
        case(128, long, True, N=hidden // 32, K=hidden // 256),
        case(192, long, True, N=hidden // 128, Hv=128),  # multi-head latent attention
        case(128, longest, True, window=longest // 16),
        case(128, longest, True, window=longest // 16, global_tokens=64),
    ]
    first = [case(*shape) for shape in QUICK if shape[1] in lengths] + masks
    rest = [case(H, T, causal) for causal in (True, False) for H in (128, 64, 256) for T in lengths]
    return first if quick else first + [one for one in rest if one not in first]
