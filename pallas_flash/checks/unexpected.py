"""What a call is told whose arguments do not fit the callable: which one was meant, which are
missing, or which need their names. Tracebacks end at the user's line, without frames of the
package: as JAX hides its own, unless JAX_TRACEBACK_FILTERING is "off"."""

import difflib
import functools
import inspect
import os
import pathlib
import re
import traceback
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn, TypeVar

import jax

from pallas_flash.checks.names import BY_CALLABLE, FLAX, NEEDLESS, OURS, TOO_MANY, Hints
from pallas_flash.jax_support import jax_internals

F = TypeVar("F", bound=Callable)
FEW = 9  # arguments of a callable, which an error lists


def refuse(function: str, given: Collection[str], known: Collection[str]):
    """Raises where a name is none of the function's arguments."""
    unknown = [name for name in given if name not in known]
    if not unknown:
        return
    listed = " and ".join(map(repr, unknown))
    text = f"{function}() got {'an ' * (len(unknown) == 1)}unexpected keyword argument"
    text += f"{'s' * (len(unknown) > 1)} {listed}"
    if function == "flash_attention" and FLAX.intersection(unknown):
        text += ". For Flax's modules pass attention_fn=pallas_flash.flax.attention_fn"
    hints = BY_CALLABLE.get(function, {})
    told = {}
    for name in unknown:
        if hint := _hint(name, known, hints):
            told.setdefault(hint, []).append(name)
    told = [hint.replace("{}", " and ".join(names)) for hint, names in told.items()]
    raise TypeError(" ".join([f"{text}.", *(told or _short(known))]))


def _short(names: Collection[str]) -> list[str]:
    """The arguments in words, if they are few."""
    return [f"It takes {', '.join(names) or 'no arguments'}."] * (len(names) <= FEW)


def _hint(name: str, known: Collection[str], hints: Hints) -> str | None:
    hint = hints.get(name, OURS.get(name, ()))
    texts = (hint,) if isinstance(hint, str) else hint
    if name not in (*hints, *OURS, *NEEDLESS, *FLAX):
        texts = tuple(difflib.get_close_matches(name.lower(), known, 1))
    for text in texts:
        if re.match(r"\w+", text)[0] in known:
            return f"Did you mean {text}" + ("" if "?" in text else "?")
        if name in hints:
            return text
    return f"Leave {{}} out: {NEEDLESS[name]}." if name in NEEDLESS else None


def refused(f: F) -> F:
    """Decorates a function, or a class for its constructor. Where Python finds that the arguments
    of a call do not fit, the error has the names that were meant. Tracebacks end at the user's
    line."""
    if isinstance(f, type):
        setattr(f, "__init__", refused(f.__init__))  # noqa: B010, type checkers know it frozen
        return f

    @functools.wraps(f)
    def checked(*args, **kwargs):
        try:
            try:
                return f(*args, **kwargs)
            except TypeError as error:
                if error.__traceback__.tb_next is not None:  # f has begun
                    raise
                text = str(error)
            _explain(f, args, kwargs, text)
        except Exception as error:
            hide_frames(error)
            raise

    return checked  # type: ignore[return-value]


def bind(f: Callable, args: tuple, kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
    """The arguments by name of a call f(*args, **kwargs), or its error."""
    try:
        return inspect.signature(f).bind(*args, **kwargs)
    except TypeError as error:
        text = f"{_name(f)}() {'got ' * str(error).startswith('multiple')}{error}"
    _explain(f, args, kwargs, text)


def _explain(f: Callable, args: tuple, kwargs: Mapping[str, Any], text: str) -> NoReturn:
    """Raises the error of a call whose arguments Python refused with `text`."""
    function, known = _name(f), dict(inspect.signature(f).parameters)
    options = [known.pop(name) for name, x in [*known.items()] if x.kind == x.VAR_KEYWORD]
    if next(iter(known), None) == "self":
        known.pop("self")
        args = args[1:]
    if not options:
        refuse(function, kwargs, known)
    places = [name for name, x in known.items() if x.kind != x.KEYWORD_ONLY]
    if len(args) > len(places):
        named = [name for name in known if name not in places]
        others = f" Pass the others by name: {', '.join(named)}." * bool(named)
        hint = f" {TOO_MANY[function]}" if function in TOO_MANY else others
        raise TypeError(
            f"{function}() takes {', '.join(places) or 'no arguments'}; got {len(args)} "
            f"argument{'s' * (len(args) > 1)} without a name.{hint}"
        )
    text = re.sub(r"^\S+\(\)", f"{function}()", text)
    text = re.sub(r"required (positional|keyword-only) argument", "required argument", text)
    needed = [name for name, x in known.items() if x.default is x.empty]
    raise TypeError(" ".join([f"{text}.", *(_short(known) or _short(needed))]))


def _name(f: Callable) -> str:
    """The name by which a user calls it."""
    return f.__qualname__.removesuffix(".__init__")


PACKAGE = str(pathlib.Path(__file__).parents[1]) + os.sep
# where an error passes through jax.jit or another function of jax
jax_internals.hide_frames(PACKAGE)


def hide_frames(error: Exception):
    """Removes the package's frames from the traceback of an error that leaves it."""
    if jax.config.jax_traceback_filtering == "off":
        return
    shown = None
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            shown = types.TracebackType(shown, frame, frame.f_lasti, line)
    error.__traceback__ = shown
