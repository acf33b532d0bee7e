"""The arguments of `flash_attention` as type checkers know them, and a signature as help() shows
it, line by line."""

import inspect
from collections.abc import Callable
from typing import Literal, TypedDict

from jaxtyping import Array, Float, Int

from pallas_flash.checks import AnyArray
from pallas_flash.context_parallel import Context
from pallas_flash.dropout import Shared

Implementation = Literal[
    "hopper", "ampere", "triton", "blockwise", "reference", "flash1", "standard", "xla", "cudnn"
]
# (score, b, h, q_idx, kv_idx) -> score
ScoreMod = Callable[[Array, Array, Array, Array, Array], Array]


class Options(TypedDict, total=False):
    """The arguments of `flash_attention` that are named and do not change what it returns: the type
    of a dict `options` in `flash_attention(query, key, value, **options)`. Of a dict[str, Any] a
    type checker cannot know what the call returns."""

    scale: float | Float[AnyArray, "..."] | None
    is_causal: bool
    query_seq_lengths: Int[AnyArray, "*B"] | None
    key_value_seq_lengths: Int[AnyArray, "*B"] | None
    local_window_size: int | tuple[int | None, int | None] | None
    implementation: Implementation | None
    query_offset: int | Int[AnyArray, "*#B"]
    query_segment_ids: Int[AnyArray, "*B T"] | None
    key_value_segment_ids: Int[AnyArray, "*B S"] | None
    logits_soft_cap: float | None
    sinks: Float[AnyArray, "N"] | None
    dropout_rate: float
    dropout_rng: Array | Shared | None
    deterministic: bool | None
    context: Context | None
    score_mod: ScoreMod | None
    value_size: int | None


class _InLines(inspect.Signature):
    """A signature with a line for each parameter; its annotations are text."""

    def __str__(self):
        lines, is_named = [], False
        for x in self.parameters.values():
            if x.kind == x.KEYWORD_ONLY and not is_named:
                lines, is_named = [*lines, "*"], True
            annotation = "" if x.annotation is x.empty else f": {x.annotation}"
            lines.append(
                f"{x.name}{annotation}" + ("" if x.default is x.empty else f" = {x.default!r}")
            )
        return (
            "(\n" + "".join(f"    {line},\n" for line in lines) + f") -> {self.return_annotation}"
        )

    def format(self, **_):  # what help() calls from Python 3.13 on
        return str(self)


def in_lines(f: Callable) -> None:
    """Lets help() show the signature of a function with annotations from __future__ line by
    line."""
    signature = inspect.signature(f)
    shown = _InLines(
        list(signature.parameters.values()), return_annotation=signature.return_annotation
    )
    setattr(f, "__signature__", shown)  # noqa: B010, type checkers know no such attribute
