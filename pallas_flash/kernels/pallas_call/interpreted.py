"""Loads, stores and launches of kernels by `pl.pallas_call` in Pallas' interpreter, which XLA runs
on every device."""

import jax.numpy as jnp


def load(ref, inside, other):
    """The tile `ref`, with `other` where `inside` is False; None: all of it."""
    x = ref[...]
    return x if inside is None else jnp.where(inside, x, jnp.asarray(other, x.dtype))


def store(ref, x, inside):
    """Writes the tile x to `ref` where `inside` is True; None: all of it."""
    ref[...] = x if inside is None else jnp.where(inside, x, ref[...])


def barrier():
    """Every thread may read afterwards what the others wrote before: there is one thread."""


def run(call, tiles, *args):
    """The results of a `pl.pallas_call`, whose other arguments `call` has."""
    return call(interpret=True)(*args)
