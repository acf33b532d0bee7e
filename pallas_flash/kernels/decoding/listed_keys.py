"""Attention by lists of keys as decoding. A batch row of decoding is a list, for each head that has
or shares one: its tokens are the queries that have the list, its keys the keys that it names.

An ascending list maps intervals to intervals: of the keys that causality, a window or lengths leave
to a query, it names the keys from one position to another.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_flash.jax_support import pytrees
from pallas_flash.jax_support.pytrees import IntLike
from pallas_flash.kernels.mosaic import registers
from pallas_flash.kernels.mosaic.scheduler import divmod_
from pallas_flash.masks.resolved_mask import ResolvedLists, ResolvedMask
from pallas_flash.problem.arguments import Operands, Problem, shapes
from pallas_flash.problem.page_layout import PageLayout, PageTable
from pallas_flash.tiled.online_softmax import SoftmaxState


@pytrees.dataclass(static=("layout",))
class ListedKeys:
    """The lists of the batch rows of decoding, [B, lists, heads] in this order."""

    entries: jax.Array  # int32 [B | 1, L, lists, n], ascending, each the number of a block
    block: int  # keys of a block
    heads: int
    kv_heads: int
    layout: PageLayout = PageLayout()  # the keys of a batch row are one page

    def rows(self, b: IntLike, position, keys: int, layout):
        """The rows of the matrix of `keys` in which the keys at these positions of batch row b's
        list are, in this layout; any behind its end."""
        batch, number, head = self._place(b)
        entry, key = divmod_(position, self.block) if self.block > 1 else (position, 0)
        entry = jnp.minimum(entry, self.entries.shape[3] - 1)
        batch = batch if self.entries.shape[0] > 1 else 0
        list_place = batch, self._share(head, self.entries.shape[1]), number
        entry = registers.gather(self.entries, *list_place, index=entry, layout=layout)
        return jnp.minimum(entry * self.block + key, keys - 1)

    def matrix(self, ref, b: IntLike, width: int):
        """The keys or values of batch row b, [S, width], in the array of all."""
        batch, _, head = self._place(b)
        batch = batch if ref.shape[0] > 1 else 0
        column = self._share(head, self.kv_heads) * width
        return ref.at[batch, :, pl.ds(column, width)]

    def in_order(self, scales):
        """The scales [batch rows, 1, keys of a list] from the scales of a pool, [P, page, K]."""
        pool = scales.reshape(-1, self.kv_heads)
        rows = self.entries[..., None] * self.block + jnp.arange(self.block, dtype=jnp.int32)
        rows = jnp.moveaxis(rows.reshape(*rows.shape[:3], -1), 1, 2)  # [B, lists, L, keys]
        head = jnp.arange(self.heads)
        head_rows = rows[:, :, head * rows.shape[2] // self.heads]
        kv_head = head[:, None] * self.kv_heads // self.heads
        return pool[head_rows, kv_head].reshape(-1, 1, rows.shape[3])

    def _place(self, b: IntLike) -> tuple[IntLike, IntLike, IntLike]:
        """The batch row, the list and the head of batch row b."""
        b, head = divmod_(b, self.heads)
        return *divmod_(b, self.entries.shape[2]), head

    def _share(self, head: IntLike, count: int) -> IntLike:
        """Which of `count` a head shares with the heads beside it."""
        return 0 if count == 1 else lax.div(head, jnp.int32(self.heads // count))


def heads_of_lists(p: Problem) -> int:
    """The number of heads that have a list and a key/value head each, or share them."""
    return max(p.kv_heads, p.resolved_mask.lists.entries.shape[1])


def decoding_problem(p: Problem) -> Problem:
    """The problem of decoding, whose mask is still to come."""
    lists, heads = p.resolved_mask.lists, heads_of_lists(p)
    _, _, count, n = lists.entries.shape
    return dataclasses.replace(
        p,
        batch=p.batch * count * heads,
        queries=lists.query_block,
        keys=n * lists.block,
        heads=p.heads // heads,
        kv_heads=1,
        resolved_mask=ResolvedMask(n * lists.block),
    )


def as_decoding(p: Problem, x: Operands, pages: PageTable | None, scales) -> tuple:
    """The problem, the operands, the ListedKeys and the scales of decoding. With `pages` keys and
    values are pages, which have `scales` where they are in 8 bits."""
    lists, heads = x.resolved_mask.lists, heads_of_lists(p)
    entries = _ascending(lists)
    mask = _decoding_mask(p, x.resolved_mask, entries)
    table = ListedKeys(entries, lists.block, heads, p.kv_heads)
    kv = x.key, x.value
    if pages is not None:
        table = _in_pages(table, pages)
        kv = jax.tree.map(lambda a: pages.layout.join(a[None]), kv)

    rows = decoding_problem(p)
    q = jnp.pad(x.query, ((0, 0), (0, -p.queries % rows.queries), (0, 0), (0, 0)))
    q = q.reshape(p.batch, -1, rows.queries, heads, rows.heads, p.head_size)
    q = jnp.swapaxes(q, 2, 3).reshape(rows.batch, rows.queries, rows.heads, p.head_size)
    sinks = x.sinks
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks, (rows.batch // heads, p.heads)).reshape(-1, rows.heads)
    operands = x._replace(query=q, key=kv[0], value=kv[1], resolved_mask=mask, sinks=sinks)
    return dataclasses.replace(rows, resolved_mask=shapes(mask)), operands, table, scales


def results(p: Problem, o, stats: SoftmaxState):
    """o [B, T, N, Hv] and the SoftmaxState [B, N, T], from the results of decoding."""
    tokens, heads = o.shape[1], heads_of_lists(p)
    o = o.reshape(p.batch, -1, heads, tokens, *o.shape[2:])
    o = jnp.swapaxes(o, 2, 3).reshape(p.batch, -1, p.heads, o.shape[-1])[:, : p.queries]
    by_row = lambda a: jnp.swapaxes(a.reshape(p.batch, -1, p.heads, tokens), 1, 2)
    stats = jax.tree.map(lambda a: by_row(a).reshape(p.batch, p.heads, -1)[..., : p.queries], stats)
    return o, stats


def _ascending(lists: ResolvedLists):
    """The entries in ascending order without repeats; at the end the number of blocks, for none."""
    return jnp.sort(jnp.minimum(lists.sorted().entries, lists.blocks), axis=-1)


def _decoding_mask(p: Problem, mask: ResolvedMask, entries) -> ResolvedMask:
    """The mask of decoding: which positions of its list each query sees."""
    lists, heads = mask.lists, heads_of_lists(p)
    count, n = entries.shape[2:]
    tokens = lists.query_block
    row = jnp.arange(p.queries, dtype=jnp.int32)[None]
    ends = mask.narrow(ResolvedMask.BY_BATCH, lambda a: a[:, None]).interval(row)
    first_key = entries[:, :, :, None] * lists.block  # [B | 1, L, lists, 1, n]

    def position(key):
        """The position of a key in each batch row of decoding and for each token: the number of
        listed keys before it."""
        key, _ = jnp.broadcast_arrays(jnp.asarray(key, jnp.int32), row)
        key = jnp.pad(key, ((0, 0), (0, -p.queries % tokens))).reshape(-1, 1, count, tokens, 1)
        before = jnp.sum(jnp.clip(key - first_key, 0, lists.block), axis=-1)
        before = jnp.repeat(jnp.moveaxis(before, 1, 2), heads // entries.shape[1], axis=2)
        return jnp.broadcast_to(before, (p.batch, *before.shape[1:])).reshape(-1, tokens)

    is_from_first = isinstance(ends[0], int) and ends[0] == 0
    start, stop = 0 if is_from_first else position(ends[0]), position(ends[1])
    positions = ResolvedMask(n * lists.block)
    if tokens > 1:
        return positions.with_interval(stop.shape, start, stop)
    # as data by batch row, of which kernels compute the blocks that they visit
    if not is_from_first:
        positions = dataclasses.replace(positions, left=0, offset=start[:, 0])
    return positions.with_lengths("key_stop", stop[:, 0])


def _in_pages(table: ListedKeys, pages: PageTable) -> ListedKeys:
    """The table with the numbers of blocks in the pool of pages in place of numbers in a row's
    keys."""
    entries, block = table.entries, table.block
    if pages.page % block:  # blocks that no page has whole
        entries = entries[..., None] * block + jnp.arange(block, dtype=jnp.int32)
        entries, block = entries.reshape(*entries.shape[:3], -1), 1
    per_page = pages.page // block
    row = jnp.arange(len(pages.numbers))[:, None, None, None]
    page = pages.numbers[row, entries // per_page]  # clipped: a kernel copies keys of no list too
    return dataclasses.replace(table, entries=page * per_page + entries % per_page, block=block)
