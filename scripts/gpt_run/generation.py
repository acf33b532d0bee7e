"""Text from a model: prompts of different lengths, in one batch, byte by byte."""

import codecs
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from scripts.gpt_run.options import BYTES


class Sampling(NamedTuple):
    """How the next byte is drawn: from softmax(logits / temperature), among the likeliest bytes."""

    temperature: float  # 0: the likeliest byte
    top_k: int | None = None  # how many of the likeliest
    top_p: float = 1.0  # the fewest whose probabilities add up to it


def choose(logits, keys, sampling: Sampling):
    """The next byte [B] of logits [B, V], with a key per row."""
    logits = logits[:, :BYTES]
    if sampling.temperature == 0:
        return jnp.argmax(logits, -1)
    logits, order = jax.lax.top_k(logits / sampling.temperature, sampling.top_k or BYTES)
    p = jax.nn.softmax(logits)
    likelier = jnp.cumsum(p, -1) - p  # 0 for the first, which always stays
    logits = jnp.where(likelier < sampling.top_p, logits, -jnp.inf)
    drawn = jax.vmap(jax.random.categorical)(keys, logits)
    return jnp.take_along_axis(order, drawn[:, None], -1)[:, 0]


def generate(structure, parameters, prompts: list[bytes], length: int, sampling: Sampling, seed):
    """Yields the bytes [B] that come next, `length` times, from a model with a window: its caches
    hold no more than that. What a row draws follows from the seed and its prompt, and for equal
    prompts from their order."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    model = nnx.merge(structure, parameters)
    chunk = min(model.config.window, lengths.max())
    tokens = np.zeros((len(prompts), -(-lengths.max() // chunk) * chunk), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = np.frombuffer(prompt, np.uint8)
    copies = np.array([prompts[:i].count(prompt) for i, prompt in enumerate(prompts)])
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), copies)

    @functools.partial(jax.jit, donate_argnums=1)
    def read(parameters, caches, logits, tokens, counts):
        new, caches = nnx.merge(structure, parameters)(tokens, caches, lengths=counts)
        last = jnp.take_along_axis(new, jnp.maximum(counts, 1)[:, None, None] - 1, 1)[:, 0]
        return jnp.where(counts[:, None] > 0, last, logits), caches

    @functools.partial(jax.jit, donate_argnums=1)
    def step(parameters, caches, logits, i):
        byte = choose(logits, jax.vmap(jax.random.fold_in, (0, None))(keys, i), sampling)
        logits, caches = nnx.merge(structure, parameters)(byte[:, None], caches)
        return byte.astype(jnp.uint8), logits[:, 0], caches

    logits = jnp.float32(0)
    caches = model.init_rolling_cache(len(prompts), chunk)
    for start in range(0, tokens.shape[1], chunk):
        counts = np.clip(lengths - start, 0, chunk)
        chunk_tokens = tokens[:, start : start + chunk]
        logits, caches = read(parameters, caches, logits, chunk_tokens, counts)
    byte = None
    for i in range(length):
        previous = byte
        byte, logits, caches = step(parameters, caches, logits, i)
        if previous is not None:  # read while the next one is computed
            yield np.asarray(previous)
    yield np.asarray(byte)


class Row:
    """The text after one prompt: bytes go in, printable text comes out, up to the stop string."""

    def __init__(self, stop: bytes = b""):
        self.stop = stop
        self.count = 0
        self.is_done = False
        self.text = ""
        self.held = b""
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, byte: int):
        if self.is_done:
            return
        self.held += bytes([byte])
        self.count += 1
        if self.stop and self.held.endswith(self.stop):
            self.held = self.held.removesuffix(self.stop)
            return self.finish()
        # what may be the beginning of the stop string is held back
        starts = (self.stop[:n] for n in range(len(self.stop) - 1, 0, -1))
        ready = self.held.removesuffix(next(filter(self.held.endswith, starts), b""))
        self.text += self.decoder.decode(ready)
        self.held = self.held[len(ready) :]

    def finish(self):
        """No more bytes come: what is held back is text."""
        self.text += self.decoder.decode(self.held, final=True)
        self.held = b""
        self.is_done = True

    def take(self) -> str:
        """The text since the last call."""
        text, self.text = self.text, ""
        return printable(text)


def printable(text: str) -> str:
    """Without what would control the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def print_texts(prompts: list[bytes], headings: list[str], generated, stop: str = "") -> int:
    """The text of each prompt: the first as it comes, the others when it is their turn. Returns how
    many bytes were generated."""
    rows = [Row(stop.encode()) for _ in prompts]
    try:
        _print_rows(rows, prompts, headings, generated)
    except KeyboardInterrupt:
        print(flush=True)  # what is said next begins a line
        raise
    return sum(row.count for row in rows)


def _print_rows(rows: list[Row], prompts: list[bytes], headings: list[str], generated):
    for prompt, heading, row in zip(prompts, headings, rows, strict=True):
        text = heading + printable(prompt.decode(errors="replace"))
        print(text + row.take(), end="", flush=True)
        while not row.is_done and (new := next(generated, None)) is not None:
            for each, byte in zip(rows, new, strict=True):
                each.add(int(byte))
            print(row.take(), end="", flush=True)
        row.finish()
        print(row.take())
