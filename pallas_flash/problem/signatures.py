"""Types that the public functions share, and a signature as help() shows it, line by line."""

import inspect
from collections.abc import Callable
from typing import Literal

from jaxtyping import Array

Implementation = Literal[
    "hopper",
    "blackwell",
    "ampere",
    "triton",
    "blockwise",
    "reference",
    "flash1",
    "standard",
    "xla",
    "cudnn",
]
# (score, b, h, q_idx, kv_idx) -> score
ScoreMod = Callable[[Array, Array, Array, Array, Array], Array]


class _InLines(inspect.Signature):
    """A signature with a line for each parameter; its annotations are text."""

    def __str__(self):
        lines, is_named = [], False
        for x in self.parameters.values():
            if x.kind == x.KEYWORD_ONLY and not is_named:
                lines, is_named = [*lines, "*"], True
            name = f"**{x.name}" if x.kind == x.VAR_KEYWORD else x.name
            annotation = "" if x.annotation is x.empty else f": {x.annotation}"
            lines.append(
                f"{name}{annotation}" + ("" if x.default is x.empty else f" = {x.default!r}")
            )
        returned = self.return_annotation
        arrow = "" if returned is self.empty else f" -> {returned}"
        return "(\n" + "".join(f"    {line},\n" for line in lines) + f"){arrow}"

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
