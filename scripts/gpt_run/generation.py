"""Text from a model: prompts of different lengths, in one batch, byte by byte."""

import codecs
import collections
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from scripts.gpt_run.options import BYTES


class Sampling(NamedTuple):
    """How the next byte is drawn: from softmax(logits / temperature), of the likeliest bytes
    alone."""

    temperature: float  # 0: the likeliest byte
    top_k: int | None = None  # how many of the likeliest
    top_p: float = 1.0  # the fewest whose probabilities add up to it


def choose(logits, keys, sampling: Sampling):
    """The next byte [B] of logits [B, V], each row with a key of its own."""
    import jax
    import jax.numpy as jnp

    logits = logits[:, :BYTES]
    if sampling.temperature == 0:
        return jnp.argmax(logits, -1)
    logits, order = jax.lax.top_k(logits / sampling.temperature, sampling.top_k or BYTES)
    p = jax.nn.softmax(logits)
    before = jnp.cumsum(p, -1) - p  # of the likelier ones; 0 for the first, which always stays
    drawn = jax.vmap(jax.random.categorical)(
        keys, jnp.where(before < sampling.top_p, logits, -jnp.inf)
    )
    return jnp.take_along_axis(order, drawn[:, None], -1)[:, 0]


class Programs(NamedTuple):
    """The two compiled programs of a generation: the prompts at once, then a byte at a time."""

    begin: Callable  # parameters -> state
    step: Callable  # parameters, state -> (state, the byte of each row [B])


def compiled(
    structure, parameters, prompts: list[bytes], length: int, sampling: Sampling, seed: int
) -> Programs:
    """Compiled for these prompts and up to `length` bytes after each; keys and values are computed
    once, and of a model with a window those out of sight are forgotten.

    What a row draws follows from the seed and its prompt, and for equal prompts from their order:
    the rows beside it change nothing.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = np.frombuffer(prompt, np.uint8)
    keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.key(seed), row))(
        np.array(earlier_equals(prompts))
    )

    def begin(parameters):
        model = nnx.merge(structure, parameters)
        if model.config.window is None:
            logits, caches = model(
                tokens, model.init_cache(len(prompts), tokens.shape[1] + length), lengths=lengths
            )
            return (
                jnp.take_along_axis(logits, lengths[:, None, None] - 1, 1)[:, 0],
                caches,
                jnp.int32(0),
            )
        piece = min(model.config.window, tokens.shape[1])
        pieces = -(-tokens.shape[1] // piece)
        padded = np.pad(tokens, ((0, 0), (0, pieces * piece - tokens.shape[1]))).reshape(
            len(prompts), pieces, piece
        )

        def read(state, piece_and_number):
            last, caches = state
            tokens, number = piece_and_number
            count = jnp.clip(lengths - number * piece, 0, piece)
            logits, caches = model(tokens, caches, lengths=count)
            new = jnp.take_along_axis(logits, jnp.maximum(count, 1)[:, None, None] - 1, 1)[:, 0]
            return (jnp.where(count[:, None] > 0, new, last), caches), None

        start = (
            jnp.zeros((len(prompts), model.config.vocab_size), jnp.float32),
            model.init_rolling_cache(len(prompts), piece),
        )
        (logits, caches), _ = jax.lax.scan(
            read, start, (padded.swapaxes(0, 1), np.arange(pieces, dtype=np.int32))
        )
        return logits, caches, jnp.int32(0)

    def step(parameters, state):
        logits, caches, number = state
        token = choose(logits, jax.vmap(jax.random.fold_in, (0, None))(keys, number), sampling)
        logits, caches = nnx.merge(structure, parameters)(token[:, None], caches)
        return (logits[:, 0], caches, number + 1), token.astype(jnp.uint8)

    state = jax.eval_shape(begin, parameters)
    return Programs(
        jax.jit(begin).lower(parameters).compile(),
        jax.jit(step, donate_argnums=1).lower(parameters, state).compile(),
    )


def earlier_equals(prompts: list[bytes]) -> list[int]:
    """For each prompt how many before it are the same."""
    seen = collections.Counter()
    numbers = []
    for prompt in prompts:
        numbers.append(seen[prompt])
        seen[prompt] += 1
    return numbers


def generate(programs: Programs, parameters, length: int) -> Iterator[np.ndarray]:
    """The bytes [B] that come next, `length` times; each is read while the next one is computed."""
    state, before = programs.begin(parameters), None
    for _ in range(length):
        state, token = programs.step(parameters, state)
        if before is not None:
            yield np.asarray(before)
        before = token
    yield np.asarray(before)


class Row:
    """What is written after one prompt: bytes go in, text that can be shown comes out, up to the
    stop string."""

    def __init__(self, stop: bytes = b""):
        self.stop, self.count, self.is_done = stop, 0, False
        self._text, self._held = "", b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, byte: int):
        """One more byte. What may be the beginning of the stop string is held back."""
        if self.is_done:
            return
        self._held, self.count = self._held + bytes([byte]), self.count + 1
        if self.stop and self._held.endswith(self.stop):
            self._held = self._held.removesuffix(self.stop)
            return self.finish()
        keep = max(
            (n for n in range(1, len(self.stop)) if self._held.endswith(self.stop[:n])), default=0
        )
        ready = len(self._held) - keep
        self._text += self._decoder.decode(self._held[:ready])
        self._held = self._held[ready:]

    def finish(self):
        """No more bytes come: what is held back is text."""
        self._text += self._decoder.decode(self._held, final=True)
        self._held, self.is_done = b"", True

    def take(self) -> str:
        """The text since the last time."""
        text, self._text = self._text, ""
        return printable(text)


def printable(text: str) -> str:
    """Without what would steer the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
