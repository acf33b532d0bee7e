"""jax's options, as a program of its own has them; the flags in XLA_FLAGS, as XLA reads them."""

import contextlib
import functools
import os
import pathlib
import re

import jax

# What changes the programs that jax traces, or whether they may run. Options of the compiler and of
# its cache stay: jax decides once in a process whether it uses a cache.
DEFAULTS = dict(
    array_garbage_collection_guard="allow",
    check_tracer_leaks=False,
    debug_infs=False,
    debug_key_reuse=False,
    debug_nans=False,
    default_matmul_precision=None,
    default_prng_impl="threefry2x32",
    disable_jit=False,
    enable_checks=False,
    enable_x64=False,
    legacy_prng_key="allow",
    no_execution=False,
    no_tracing=False,
    numpy_dtype_promotion="standard",
    numpy_rank_promotion="allow",
    threefry_partitionable=True,
    transfer_guard="allow",
)


@contextlib.contextmanager
def defaults():
    """A context with jax's defaults in place of what the environment, jax.config or a context of
    this thread set. A thread inherits no transformation, and no context but those of jax.config."""
    with contextlib.ExitStack() as stack:
        for name, value in DEFAULTS.items():
            if hasattr(jax, name):  # another jax may lack some
                stack.enter_context(getattr(jax, name)(value))
        yield


DETERMINISM = "xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops"
# a flag and its value, in quotes or up to the next space
_FLAG = re.compile(r"""\s*--([-\w]*)(?:="((?:\\.|[^"\\])*)"?|='([^']*)'?|=?(\S*))""", re.A | re.S)


def determinism() -> str | None:
    """The flag that asks for the same bits in every run, or None."""
    return _determinism(os.environ.get("XLA_FLAGS", ""))


def value(name: str) -> str | None:
    """The value of a flag; None: it is not set."""
    return _flags(os.environ.get("XLA_FLAGS", "")).get(name)


@functools.cache  # an eager call asks each time
def _determinism(text: str) -> str | None:
    is_set = lambda name: _flags(text).get(name, "no").lower() in ("", "1", "true")
    return next((f"--{name}" for name in filter(is_set, DETERMINISM)), None)


@functools.cache  # XLA reads a file once, too
def _flags(text: str) -> dict[str, str]:
    if text and not text.lstrip().startswith("-"):  # it names a file of flags
        try:
            text = pathlib.Path(text).read_text(errors="replace")
        except OSError:  # XLA, which would have ended the process, started before it was set
            return {}
    values, end = {}, 0
    while match := _FLAG.match(text, end):
        name, *parts = match.groups(default="")
        values[name] = "".join(parts)  # the last one counts
        end = match.end()
    return values
