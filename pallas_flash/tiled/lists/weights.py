"""The softmax weights of the keys that lists name, summed over the query heads of each list."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.tiled.blockwise.tuning import Tiles
from pallas_flash.tiled.lists import by_query
from pallas_flash.tiled.lists.entries import Entries
from pallas_flash.tiled.lists.list_heads import ListHead, list_heads
from pallas_flash.tiled.lists.tile import Tile


def listed_weights(problem: Problem, tiles: Tiles, x: Operands, lse):
    """exp(s - lse), [B, L, T, n * block], in the order of the entries of the lists: 0 for what a
    query does not see. lse is [B, N, T]."""
    p, lists = problem, problem.resolved_mask.lists.entries.shape[1]
    sharing = list_heads(p) // lists  # with one list, each of another key head

    def one_list(number):
        of_head = lambda i: _of_head(
            ListHead.take(p, tiles, x, number * sharing + i), tiles, x, lse
        )
        add = lambda total, i: (total + of_head(i), None)
        total, _ = lax.scan(add, of_head(0), jnp.arange(1, sharing, dtype=jnp.int32))
        return total

    each = jnp.arange(p.batch * lists, dtype=jnp.int32)
    weights = jax.vmap(one_list)(each) if tiles.lists.at_once else lax.map(one_list, each)
    return weights.reshape(p.batch, lists, *weights.shape[1:])


def _of_head(head: ListHead, tiles: Tiles, x: Operands, lse):
    """The weights of a list head, [T, n * block]."""
    logits = head.logits
    query = head.queries(x.query, tiles.dtype)
    key = head.by_block(x.key, tiles.dtype)

    def step(nothing, _, tile: Tile, entries: Entries, q, lse):
        s = logits.of_products(*tile.products(q, entries.gather(tile, key)))
        # lse may be -inf where a bias hides all keys
        seen = tile.visible & (s != -jnp.inf)
        p = jnp.where(seen, jnp.exp(s * logits.exponent_scale - lse), 0)
        return nothing, jnp.sum(p, 2)

    return by_query.WALK.each_tile(head, tiles, step, (), None, query, head.each_row(lse))[1]
