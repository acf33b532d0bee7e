"""What is measured: a call of attention as data, its FLOPs, and the lists of cases."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash.choose.selfcheck import specs

RESULTS = {
    "forward": ("o",),
    "backward": ("dq", "dk", "dv"),
    "forward+backward": ("o", "dq", "dk", "dv"),
    "jvp": ("o", "tangent"),
}
*PASSES, JVP = RESULTS  # what every contender has, and forward mode
# features of pallas_flash alone that leave the mask, and so the FLOPs, as they are
FEATURES = "a bias", "a score_mod", "arrays of a score_mod", "a soft cap", "sinks", "dropout"


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
    documents: int | None = None  # packed into each row, of random lengths
    # the first keys, which all later queries see; only with `window`, without documents
    global_tokens: int | None = None
    values_are_keys: bool = False  # the values are the keys' first columns
    extras: str = ""  # of FEATURES, joined by ", "

    def __str__(self):
        keys = f" S{self.S}" if self.S != self.T else ""
        kv_heads = f"/{self.K}" if self.K != self.N else ""
        value_size = f"/{self.Hv}" if self.Hv else ""
        value_size += " of the keys" if self.values_are_keys else ""
        shape = f"B{self.B} T{self.T}{keys} N{self.N}{kv_heads} H{self.H}{value_size}"
        return f"{shape} {self.dtype} {self.mask}"

    @property
    def mask(self) -> str:
        words = ["causal" if self.causal else "full"]
        words += [f"window {self.window}"] if self.window else []
        words += [f"{self.documents} documents"] if self.documents else []
        words += [f"{self.global_tokens} global tokens"] if self.global_tokens else []
        words += [f"with {self.extras}"] if self.extras else []
        return " ".join(words)

    @property
    def value_size(self) -> int:
        return self.Hv or self.H

    def features(self) -> list[str]:
        """What it needs that some implementations lack."""
        features = {
            "full mask": not self.causal,
            "window": self.window,
            "documents": self.documents,
            "global tokens": self.global_tokens,
            "value size other than H": self.value_size != self.H,
            "float32": self.dtype == "float32",
        }
        return [name for name, is_needed in features.items() if is_needed]

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of query, key, value, and the output's gradient."""
        B, T, S, N, K, H, Hv = *self[:6], self.value_size
        sizes = (B, T, N, H), (B, S, K, H), (B, S, K, Hv), (B, T, N, Hv)
        return [jax.ShapeDtypeStruct(size, jnp.dtype(self.dtype)) for size in sizes]

    def inputs(self) -> list[jax.Array]:
        """Query, key, value, and the output's gradient: the same arrays until `free_inputs`."""
        return _inputs(self)

    def extra_features(self) -> list[specs.Feature]:
        return [specs.FEATURES[name] for name in self.extras.split(", ") if name]

    def extra_arrays(self) -> dict[str, np.ndarray]:
        """The arrays of its further features."""
        letters = {k: axes for each in self.extra_features() for k, axes in each.arrays.items()}
        return specs.draw(letters, self._asdict(), np.random.default_rng(0), self.dtype)

    def document_lengths(self) -> np.ndarray:
        """Lengths of the documents of a row: the same in each row, no multiples of a block."""
        if not self.documents:
            return np.array([self.T])
        rng = np.random.default_rng(0)
        cuts = rng.choice(np.arange(1, self.T), self.documents - 1, replace=False)
        return np.diff([0, *np.sort(cuts), self.T])

    def segment_ids(self) -> np.ndarray:
        """int32 [B, T]"""
        lengths = self.document_lengths()
        return np.tile(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths), (self.B, 1))

    def dense_mask(self) -> jax.Array:
        """Whether each query sees each key, bool [1, 1, T, S]; every row has the same mask."""
        row, key = jnp.arange(self.T)[:, None], jnp.arange(self.S)
        visible = row >= key if self.causal else jnp.ones((self.T, self.S), bool)
        if self.window:
            visible &= (key > row - self.window) | (key < (self.global_tokens or 0))
        if self.documents:
            ids = self.segment_ids()[0]
            visible &= ids[:, None] == ids
        return visible[None, None]

    def pairs(self) -> float:
        """Visible pairs of a query and a key in one head of one row: exact, but half of T x S for a
        plain causal mask, by convention."""
        if not (self.window or self.documents):
            return self.T * self.S * (0.5 if self.causal else 1)
        lengths = self.document_lengths()
        if not self.causal:
            return float((lengths**2).sum())
        before = np.concatenate([np.arange(1, n + 1) for n in lengths])  # keys up to its own
        window = np.minimum(before, self.window or self.T)
        return float((window + np.minimum(before - window, self.global_tokens or 0)).sum())

    def bytes(self) -> int:
        """Bytes of query, key, value and output."""
        query, key, value, output = self.shapes()
        arrays = [query, key, output] if self.values_are_keys else [query, key, value, output]
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)

    def flops(self, passes: str) -> float:
        """Two for each multiply-add: q k^T and p v forward; q k^T again, do v^T, and dq, dk, dv
        backward; in forward mode the forward's, and its derivatives by each of their operands."""
        H, Hv = self.H, self.value_size
        widths = {"forward": H + Hv, "backward": 3 * H + 2 * Hv, JVP: 3 * (H + Hv)}
        return 2 * self.B * self.N * self.pairs() * sum(widths[name] for name in passes.split("+"))


@functools.cache
def _inputs(case: Case) -> list[jax.Array]:
    keys, shapes = jax.random.split(jax.random.key(0), 4), case.shapes()
    found = [jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, shapes, strict=True)]
    if case.values_are_keys:
        found[2] = found[1][..., : case.value_size]
    return found


def free_inputs():
    """Two large caches do not fit into a GPU."""
    _inputs.cache_clear()


# ---- lists of cases ----


def _with_features(args, B: int, T: int, S: int, causal: bool) -> Case:
    heads = args.heads, args.kv_heads, args.head_size
    return Case(B, T, S, *heads, args.dtype, causal, extras=", ".join(args.features))


def by_length(args) -> list[Case]:
    """One shape at several lengths, T = S; without a batch size 16384 tokens in all."""
    return [
        _with_features(args, B, T, T, args.causal)
        for T in args.lengths
        for B in args.batch or [max(1, TOKENS // T)]
    ]


def decoding(args) -> list[Case]:
    """One new token per row, which sees all S keys of its cache."""
    return [_with_features(args, B, 1, S, causal=False) for B in args.batch for S in args.lengths]


def latents(args) -> list[Case]:
    """Decoding beside latents (MLA): one key head of 576 columns, of which 512 are the values."""
    latent = dict(K=1, H=576, Hv=512, values_are_keys=True)
    return [case._replace(**latent) for case in decoding(args)]


TOKENS, HIDDEN = 16384, 2048  # in each case of the suite
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def all_tokens(H, T, causal=True, N=None, K=None, dtype="bfloat16", **more) -> Case:
    """A case of the suite's tokens in all, and of its hidden size unless there are N heads."""
    N = N or HIDDEN // H
    return Case(TOKENS // T, T, T, N, K or N, H, dtype, causal, **more)


def one_token(B, S, dtype="bfloat16") -> Case:
    """A case of one new token in each of B rows, beside S keys."""
    return Case(B, 1, S, 64, 8, 128, dtype, causal=False)


def suite(args) -> list[Case]:
    """The most telling cases come first, should the time run out; --quick has those alone, and
    some that decode."""
    case = functools.partial(all_tokens, dtype=args.dtype)
    token = functools.partial(one_token, dtype=args.dtype)
    first = [
        case(128, 4096),
        case(128, 16384),
        case(64, 4096),
        case(128, 16384, causal=False),
        case(256, 4096),
        case(512, 4096),
        case(64, 16384),
        token(64, 8192),
        token(1, 32768),
        case(128, 16384, documents=16),
        case(192, 8192, N=16, Hv=128),  # multi-head latent attention
        case(128, 8192, N=64, K=8),
        *(case(128, T) for T in (512, 1024, 2048)),
        case(64, 16384, causal=False),
        case(128, 16384, window=1024),
        case(256, 16384, causal=False),
        token(8, 8192),
    ]
    if args.quick:
        return first
    rest = [case(H, T, causal) for causal in (True, False) for H in (128, 64, 256) for T in LENGTHS]
    rest = [case(128, 16384, window=1024, global_tokens=64), *rest]
    return [one for one in dict.fromkeys(first + rest) if one.T > 1]


def telling(case: Case, args) -> list[str]:
    """The passes that are measured: not all of them for the cases of --quick."""
    if not args.quick or args.cases != "suite" or len(args.passes) == 1:
        return args.passes
    is_one_of_two = case.T == 4096 and case.H in (64, 128)
    left_out = PASSES[1:] if case.T == 1 else []
    return [name for name in args.passes if name not in left_out and (name != JVP or is_one_of_two)]
