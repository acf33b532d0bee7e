"""The flags in XLA_FLAGS, as XLA reads them."""

import functools
import os
import pathlib
import re

DETERMINISM = "xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops"
# a flag and its value, in quotes or up to the next space
_FLAG = re.compile(r"""\s*--([-\w]*)(?:="((?:\\.|[^"\\])*)"?|='([^']*)'?|=?(\S*))""", re.A | re.S)


def determinism() -> str | None:
    """The flag that asks for the same bits in every run, or None."""
    return _determinism(os.environ.get("XLA_FLAGS", ""))


@functools.cache  # XLA reads a file once, too
def _determinism(text: str) -> str | None:
    if text and not text.lstrip().startswith("-"):  # it names a file of flags
        try:
            text = pathlib.Path(text).read_text(errors="replace")
        except OSError:  # XLA, which would have ended the process, started before it was set
            return None
    is_set, end = {}, 0
    while match := _FLAG.match(text, end):
        name, *values = match.groups(default="")
        is_set[name] = "".join(values).lower() in ("", "1", "true")  # the last one counts
        end = match.end()
    return next((f"--{name}" for name in DETERMINISM if is_set.get(name)), None)
