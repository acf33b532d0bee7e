"""Loads, stores and launches of kernels by `pl.pallas_call` in Pallas' interpreter, which XLA runs
on every device."""

import jax.numpy as jnp


def load(ref, inside, other):
    """Loads the tile `ref`, with `other` where `inside` is False; None loads all of it."""
    x = ref[...]
    return x if inside is None else jnp.where(inside, x, jnp.asarray(other, x.dtype))


def store(ref, x, inside):
    """Writes the tile x to `ref` where `inside` is True; None writes all of it."""
    ref[...] = x if inside is None else jnp.where(inside, x, ref[...])


def barrier():
    """Lets every thread read what the others wrote: the interpreter has one."""


def parameters(tiles) -> None:
    """How a `pl.pallas_call` is compiled on a GPU; None: nowhere."""
