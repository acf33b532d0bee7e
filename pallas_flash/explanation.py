"""`explain`: what `flash_attention` would run for a call, and why."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import attention, checks, context_parallel
from pallas_flash.accounting import token_bytes
from pallas_flash.caches import attend, paged
from pallas_flash.checks import unexpected
from pallas_flash.choose import dispatch, selection
from pallas_flash.choose.dispatch import axis_to_map, map_calls
from pallas_flash.devices.shared_arrays import canonicalize
from pallas_flash.jax_support import hardware, options
from pallas_flash.kernels.classic import EARLIER
from pallas_flash.masks.resolved_mask import ResolvedLists
from pallas_flash.problem import arguments
from pallas_flash.problem.call import Call
from pallas_flash.problem.implementation import Implementation

BITWISE = "bitwise deterministic"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `flash_attention` would run for a call, and why; made to be printed."""

    problem: arguments.Problem
    implementation: str
    tiles: Any  # the block sizes of that implementation, None where it has none
    derivatives: str  # the modes, and their order
    why_not: dict[str, str]  # for each other implementation, why it was not taken
    condition: str | None = None  # on which the implementation is taken
    # what devices that hold parts of a sequence send; the problem is then that of a pair of parts
    context: str | None = None
    # what is copied in each call, since the implementation cannot read it where it lies
    copies: str | None = None
    # how many calls of this problem run side by side, if a bias or mask broadcasts over a part of
    # the leading axes
    calls: int | None = None
    remark: str | None = None  # about the implementation on this GPU
    # what decoding by kernels reads for each token of a cache and key/value head
    token_bytes: int | None = None
    backward: str | None = None  # the order in which it adds, and why
    lists: str | None = None  # what becomes of lists of keys, where it gathers none

    def __str__(self):
        """The explanation in lines, without the earlier algorithms, which nobody selects by
        chance."""
        broadcasts = "a bias or mask broadcasts over some of the leading axes alone"
        token = "token" if self.problem.resolved_mask.lists is None else "listed token"
        reads = f"{self.token_bytes} bytes of each {token} and key/value head"
        rows = {
            "call": self.problem,
            "implementation": ", ".join(filter(None, (self.implementation, self.condition))),
            "tiles": self.tiles,
            "lists": self.lists,
            "derivatives": self.derivatives,
            "backward": self.backward,
            "context": self.context,
            "calls": f"{self.calls} of these: {broadcasts}" if self.calls else None,
            "copies": self.copies,
            "reads": reads if self.token_bytes else None,
            "remark": self.remark,
        }
        others = self.why_not.items()
        rows |= {f"not {name}": why for name, why in others if why != EARLIER}
        return "\n".join(f"{name:<15} {x}" for name, x in rows.items() if x is not None)


@unexpected.refused
def explain(*args: Any, **kwargs: Any) -> Explanation:
    """What `flash_attention` would run for these arguments, arrays or `jax.ShapeDtypeStruct`s, and
    why. Computes nothing.

    Examples:
      >>> import jax
      >>> from pallas_flash import explain
      >>> q = k = v = jax.ShapeDtypeStruct((2, 100, 8, 64), "float32")
      >>> explanation = explain(q, k, v, is_causal=True, implementation="blockwise")
      >>> explanation.implementation, explanation.derivatives
      ('blockwise', 'every mode, of first and second order')
      >>> explanation.why_not["reference"]
      'blockwise was selected by name'
    """
    call, _ = attention.make_call(*args, **kwargs)
    for name in ("query", "key", "value"):
        if isinstance(x := getattr(call, name), tuple | list) and all(map(checks.is_int, x)):
            raise TypeError(
                f"{name} must be an array or a jax.ShapeDtypeStruct; got the {type(x).__name__} "
                f'{x}. Of a shape make one: jax.ShapeDtypeStruct(shape, "bfloat16").'
            )
    with hardware.at(call.arguments().values()):
        problem, context = checks.from_shapes(_problem_of, call)
        name = selection.requested(call.implementation)
        called, objections = problem, selection.Objections(problem)
        problem, choice = selection.choose(called, name, check=False)
        why_not, condition = selection.reasons(
            choice.implementation, call.implementation, objections
        )
        is_whole = context or axis_to_map(call) is None
        calls = None if is_whole else math.prod(call.query.shape[:-3]) // problem.batch
        converted = choice.implementation.converted(problem)
        copies = choice.implementation.copies(converted)
        decoding = getattr(choice.tiles, "decode", None)
        columns = _columns(problem, decoding)
        itemsizes = [np.dtype(problem.dtype).itemsize] * len(columns)
        bytes_read = token_bytes(columns, itemsizes) if decoding else None
        in_context = "reverse mode, of first order"
        derivatives = in_context if context else choice.implementation.derivatives(choice.tiles)
        remark = choice.implementation.remark()
        backward = _backward(choice.implementation, converted, call.deterministic)
        if problem.deterministic != called.deterministic:
            backward = f"{BITWISE}: the one that adds in any order failed its self-check"
        lists = None if converted is problem else _as_table(problem.resolved_mask.lists)
    return Explanation(
        problem,
        choice.implementation.name,
        choice.tiles,
        derivatives,
        why_not,
        condition,
        context,
        copies,
        calls,
        remark,
        bytes_read,
        backward,
        lists,
    )


def _backward(
    implementation: Implementation, problem: arguments.Problem, asked: bool | None
) -> str:
    """The order in which the backward adds, and why."""
    if not implementation.adds_in_any_order(dataclasses.replace(problem, deterministic=False)):
        return f"{implementation.name} has one for this call, whatever deterministic is"
    order = BITWISE if problem.deterministic else "adds in any order"
    why = f"deterministic={asked}"
    if asked is None:
        flag = options.determinism() or "no flag that asks for determinism"
        why += f", and XLA_FLAGS has {flag}"
    return f"{order}: {why}"


def _as_table(lists: ResolvedLists) -> str:
    """What a table of the lists' blocks shows, in words."""
    n, blocks = lists.entries.shape[-1], lists.blocks
    n = min(n, blocks) if isinstance(blocks, int) else n
    return (
        f"a table: each names up to {n} of {blocks} blocks, and those that none names are skipped"
    )


def _columns(problem: arguments.Problem, decoding) -> tuple[int, ...]:
    """The columns of a key, and of a value where decoding with these tiles reads it too."""
    p = problem
    reads_keys_alone = p.values_are_keys and getattr(decoding, "reads_values_in_keys", False)
    return (p.head_size,) if reads_keys_alone else (p.head_size, p.value_size)


@unexpected.refused
def explain_paged(*args: Any, **kwargs: Any) -> Explanation:
    """What `paged_attention` would run for these arguments, arrays or `jax.ShapeDtypeStruct`s, and
    why; whether it reads the pages where they lie, or copies them. Computes nothing."""

    def plan(call):
        args, kwargs = call
        return attend.plan(made := paged.bind_call(*args, **kwargs)), made.implementation

    with hardware.at(jax.tree.leaves((args, kwargs))):
        (problem, pages), name = checks.from_shapes(plan, (args, kwargs))
        objections = attend.Objections(problem, pages=pages)
        implementation = attend.choose(problem, pages, name, check=False)
        why_not, condition = selection.reasons(implementation, name, objections)
        bytes_read = None
        if attend.gathers_pages(implementation, problem, pages):
            tiles, copies = implementation.tiles(problem), implementation.copies(problem)
            copies = "; ".join(filter(None, ("all pages in the table, in order", copies)))
        else:
            tiles = implementation.page_tiles(problem, pages)
            lists = problem.resolved_mask.lists
            read = f"pages of {pages.page} keys" if lists is None else "keys that lists name"
            copies = f"nothing: {read} are read where they lie"
            columns = _columns(problem, tiles)
            bytes_read = token_bytes(columns, pages.itemsizes(problem.dtype)[: len(columns)])
    return Explanation(
        problem,
        implementation.name,
        tiles,
        "none",
        why_not,
        condition,
        copies=copies,
        token_bytes=bytes_read,
    )


def _problem_of(call: Call) -> tuple[arguments.Problem, str | None]:
    """The problem of a call, and None; if a sequence lies on several devices, the problem of each,
    and what they send."""
    call, plans = context_parallel.resolve_context(call), []

    def note(call: Call):
        if call.context is None:
            plans.append((arguments.normalise(call)[0], None))
        else:
            plans.append(context_parallel.plan(call.context, call))
        o = jnp.zeros_like(call.query, shape=(*call.query.shape[:-1], plans[-1][0].value_size))
        return o, o[..., 0], None

    if call.context is not None:
        dispatch.map_over_mesh(note, call)
    else:
        map_calls(note, call if axis_to_map(call) is None else canonicalize(call))
    return plans[0]
