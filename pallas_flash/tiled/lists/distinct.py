"""Entries of lists without repeats."""

import dataclasses

import jax.numpy as jnp
from jax import lax

from pallas_flash.jax_support import xla_cpu
from pallas_flash.masks.resolved_lists import ResolvedLists
from pallas_flash.tiled import schedule

AT_A_TIME = 8  # lists, in a step of a loop


def distinct(lists: ResolvedLists) -> ResolvedLists:
    """The lists with ResolvedLists.NONE in place of repeated entries. A CPU sorts slowly: it writes
    the position of each entry to a table of all blocks, and the last one stays."""
    has_symbols = not all(isinstance(n, int) for n in lists.entries.shape)  # of jax.export
    if has_symbols or not xla_cpu.on_cpu():
        return lists.sorted()
    at = jnp.arange(lists.entries.shape[-1], dtype=jnp.int32)[None]
    row = jnp.arange(AT_A_TIME, dtype=jnp.int32)[:, None]

    def step(position, entries):
        place = row, jnp.minimum(entries, lists.blocks)
        position = position.at[place].set(jnp.broadcast_to(at, entries.shape))
        return position, jnp.where(position[place] == at, entries, lists.NONE)

    flat = lists.entries.reshape(-1, at.size)
    count = schedule.ceil_div(len(flat), AT_A_TIME)
    whole = jnp.pad(flat, ((0, count * AT_A_TIME - len(flat)), (0, 0)))
    position = jnp.zeros_like(flat, shape=(AT_A_TIME, lists.blocks + 1))
    _, whole = lax.scan(step, position, whole.reshape(count, AT_A_TIME, -1))
    entries = whole.reshape(-1, at.size)[: len(flat)].reshape(lists.entries.shape)
    return dataclasses.replace(lists, entries=entries)
