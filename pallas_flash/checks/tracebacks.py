"""Tracebacks end at the user's line, without frames of the package: as JAX hides its own, unless
JAX_TRACEBACK_FILTERING is "off"."""

import pathlib
import traceback
import types

import jax

from pallas_flash.jax_support import jax_internals

PACKAGE = str(pathlib.Path(__file__).parents[1])
jax_internals.hide_frames(
    PACKAGE
)  # where an error passes through jax.jit and other functions of jax


def hide_frames(error: Exception):
    """Removes the package's frames from the traceback of an error that leaves it."""
    if jax.config.jax_traceback_filtering == "off":
        return
    shown = None
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            shown = types.TracebackType(shown, frame, frame.f_lasti, line)
    error.__traceback__ = shown
