"""Kernels that read pages in place: how they are called, and how they are self-checked."""

import functools

import jax
import jax.numpy as jnp

from pallas_flash.choose.selfcheck import comparison, small_problems
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.problem.implementation import Choice, PageReader
from pallas_flash.problem.page_layout import Pages, PageTable
from pallas_flash.tiled import quantised
from pallas_flash.transforms import autodiff


def attend(
    problem: Problem, pages: Pages, implementation: PageReader, x: Operands, numbers, scales
):
    """o and the SoftmaxState by an implementation that reads pages: `x` has them as keys and
    values, `numbers` [B, pages] has the pages of each batch row. Scales are None where there
    are none."""
    tiles = implementation.page_tiles(problem, pages)
    table = PageTable(numbers, pages.page, pages.layout)
    scales = (*scales, scales[0])[:2]  # the keys' scales, where keys are the values
    x = x.with_values(problem)
    with jax.named_scope(problem.scope):
        return implementation.forward_from_pages(problem, tiles, x, table, scales)


def entry_point(pages: Pages) -> comparison.EntryPoint:
    """How the self-check calls kernels that read such pages."""
    keys = -(-small_problems.SIZES["keys"] // pages.page) * pages.page
    name = " ".join(filter(None, (f"pages of {pages.page}", pages.stored, pages.alone)))
    results, widen = (functools.partial(f, pages) for f in (_results, _widen))
    sizes, convert = dict(keys=keys), lambda _, problem: problem  # it reads lists in pages
    return comparison.EntryPoint(name, results, widen=widen, sizes=sizes, convert=convert)


def _results(pages: Pages, p: Problem, choice: Choice, operands: Operands, cotangents):
    """The outputs for keys and values that are put into pages, the last of a row first."""
    if not isinstance(choice.implementation, PageReader):
        return comparison.outputs(*autodiff.attend(p, choice, operands))
    numbers = jnp.arange(p.batch * p.keys // pages.page, dtype=jnp.int32)
    numbers = numbers.reshape(p.batch, -1)[:, ::-1]
    in_pages = lambda x: pages.layout.split(x, pages.page)[numbers.ravel()]
    arrays, scales = zip(*jax.tree.map(in_pages, [*_quantise(pages, operands)]), strict=True)
    operands = operands._replace(**dict(zip(("key", "value"), arrays, strict=False)))
    o, stats = attend(p, pages, choice.implementation, operands, numbers, scales)
    log_base = choice.implementation.log_base(p)
    return comparison.outputs(o, *autodiff.lse_and_largest(log_base, p, operands, stats))


def _widen(pages: Pages, operands: Operands) -> Operands:
    """The operands in float32, keys and values as their 8 bits stand for them."""
    arrays = (
        x if scales is None else x.astype(jnp.float32) * scales[..., None]
        for x, scales in _quantise(pages, operands)
    )
    operands = operands._replace(**dict(zip(("key", "value"), arrays, strict=False)))
    return comparison.widen(operands)


def _quantise(pages: Pages, x: Operands):
    """Yields keys, and values if there are any, each with its scales, None where it is not in 8
    bits."""
    for name, array in dict(keys=x.key, values=x.value).items():
        if array is not None:
            in_8_bits = pages.is_in_8_bits(name)
            yield quantised.quantise(array, pages.stored) if in_8_bits else (array, None)
