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


def run(call, tiles, *args):
    """The results of a `pl.pallas_call`; `call` binds all but the way it is lowered."""
    return call(interpret=True)(*args)
