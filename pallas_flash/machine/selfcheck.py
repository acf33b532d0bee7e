"""Whether this machine runs an implementation's own kernels right: tried once, before they are taken unasked on a GPU."""

import concurrent.futures
import dataclasses
import logging
import os
import threading
import warnings
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import autodiff, backends, decode, dropout, masks
from pallas_flash.arguments import Operands, Problem
from pallas_flash.backends import Backend, Choice
from pallas_flash.kernels import device
from pallas_flash.machine import records
from pallas_flash.rules.score import Score

LIMIT = 300  # seconds; a check that takes longer hangs
SIZES = dict(batch=2, queries=523, keys=709, heads=8, kv_heads=2)  # blocks that need a mask, blocks that need none, ragged ones
WIDTH = 16  # multiples of this tell heads apart in the kernels
ROWS = 64  # that are compared as one vector: a single row of a gradient may be zero but for rounding
RULE = masks.Where(lambda b, h, q, k: ((q // 256 + k // 256 + h) % 3 > 0) | (k < 4), "RULE")  # blocks of all kinds, by head
TOLERANCE = dict(float32=1e-4, bfloat16=2e-2, float16=4e-3)
MORE = "a rule", "a mask", "a bias", "a score_mod"  # with any of them kernels are right or wrong by themselves

_log = logging.getLogger("pallas_flash")


# ---- what runs a call ----


def choose(problem: Problem, implementation: str | None = None, check: bool = True) -> Choice:
    """What was asked for, by the call or else the environment, or the first that is taken unasked and not wrong on this machine.
    Without `check` nothing runs, and what was never checked counts as right."""
    return backends.choose(problem, asked_for(implementation), lambda backend: why_not(backend, problem, check))


def asked_for(implementation: str | None = None) -> str | None:
    """The implementation that a call names, or else PALLAS_FLASH_IMPLEMENTATION."""
    if implementation not in (None, *backends.OF_JAX_NN):
        return implementation
    name = os.environ.get("PALLAS_FLASH_IMPLEMENTATION") or None
    if name is not None and name not in backends.NAMES:
        raise ValueError(f"PALLAS_FLASH_IMPLEMENTATION must be unset or one of {', '.join(backends.NAMES)}; got {name!r}.")
    return name


def why_not(backend: Backend, problem: Problem, check: bool = True) -> str | None:
    """Why the kernels are not taken unasked on this machine; None where they are right or trusted."""
    verdict = _verdict(backend, problem, check)
    return f"wrong on this machine: {verdict.wrong}" if verdict and verdict.wrong else None


def reasons(problem: Problem, choice: Choice, implementation: str | None) -> tuple[dict[str, str], str | None]:
    """For each implementation that `choose` did not take, why; and on what condition it took the one it took."""
    asked, conditions = asked_for(implementation), []
    if implementation in backends.OF_JAX_NN:
        conditions.append(f"chosen: {implementation!r} is a name of jax.nn, and chooses as None does")
    why = backends.why_not_taken(
        problem, choice.backend, asked is not None, lambda backend: why_not(backend, problem, check=False)
    )
    if asked is None and not _verdict(choice.backend, problem, check=False):
        conditions.append("if this machine's check finds it right: the first call checks it, or python -m pallas_flash")
    elif asked not in (None, implementation):
        conditions.append("as PALLAS_FLASH_IMPLEMENTATION asks")
    return why, ", ".join(conditions) or None


# ---- what is known of the kernels ----


class Variant(NamedTuple):
    """Kernels that are right or wrong together."""

    implementation: str
    head_size: int  # as wide as the kernels make it
    value_size: int
    dtype: str
    scheme: str  # of the backward; and whether the forward is decoding, weights are dropped, and what else there is

    def __str__(self):
        v = self
        return f"{v.implementation} {v.head_size}/{v.value_size} {v.dtype}, {v.scheme}"


class Verdict(NamedTuple):
    errors: dict[str, float]
    wrong: str | None  # what is; None: they are right


TRUSTED = Verdict({}, None)
_known: dict[tuple[Variant, records.Machine], Verdict] = {}
_one_at_a_time = threading.Lock()


def variant_of(backend: Backend, problem: Problem) -> Variant:
    same = backend.tiles(problem) == backend.tiles(dataclasses.replace(problem, deterministic=True))
    scheme = "deterministic" if same else "in any order"
    scheme += ", decoding" * decode.takes(problem) + ", dropout" * (problem.dropped > 0)
    scheme += ", the largest logits" * problem.max_logits
    scheme += "".join(f", {name}" for name in _more(problem))
    return Variant(backend.name, *_widths(problem), problem.dtype, scheme)


def _more(problem: Problem) -> list[str]:
    """What it has of MORE."""
    p = problem
    return [name for name, x in zip(MORE, (p.visibility.where, p.mask, p.bias, p.score), strict=True) if x is not None]


def _widths(problem: Problem) -> list[int]:
    return [-(-size // WIDTH) * WIDTH for size in (problem.head_size, problem.value_size)]


def _verdict(backend: Backend, problem: Problem, check: bool) -> Verdict | None:
    """None: it is not known, and `check` is not asked for."""
    machine = records.machine() if backend.own_kernels and not _trusts() else None
    if machine is None:
        return TRUSTED
    key = variant_of(backend, problem), machine
    if not check:
        return _known.get(key) or _recorded(*key)
    with _one_at_a_time:
        if key not in _known:
            _known[key] = _recorded(*key) or _tried(backend, problem, *key)
            if _known[key].wrong:
                warnings.warn(_warning(*key, _known[key]), RuntimeWarning, stacklevel=2)
        return _known[key]


def _trusts() -> bool:
    asked = os.environ.get("PALLAS_FLASH_SELF_CHECK") or "1"
    if asked not in ("0", "1"):
        raise ValueError(f"PALLAS_FLASH_SELF_CHECK must be 0 (trust the kernels), 1 or unset (check them once); got {asked!r}.")
    return asked == "0"


def _recorded(variant: Variant, machine: records.Machine) -> Verdict | None:
    record = records.read(variant, machine)
    return None if record is None else Verdict(record["errors"], record["wrong"])


def record(variant: Variant, machine: records.Machine, verdict: Verdict):
    if why_not := records.write(variant, machine, verdict._asdict()):
        _log.warning("pallas_flash cannot record that it checked %s, and will check again: %s", variant, why_not)


def _tried(backend: Backend, problem: Problem, variant: Variant, machine: records.Machine) -> Verdict:
    """Tells the user, tries the kernels and records what was found."""
    _log.warning(
        "pallas_flash checks its kernels on this %s, once: %s (python -m pallas_flash does it ahead of time)",
        machine.gpu,
        variant,
    )
    try:
        verdict = _in_a_thread(lambda: check(backend, problem, trials(problem)), LIMIT)
    except TimeoutError:
        _known[variant, machine] = hangs(LIMIT)
        record(variant, machine, hangs(LIMIT))
        raise RuntimeError(
            f"the check of {variant} on this {machine.gpu} did not end within {LIMIT} s, and the GPU may hang with it. "
            f"Start again: {variant.implementation} will not be taken. PALLAS_FLASH_IMPLEMENTATION names another for all calls."
        ) from None
    except Exception as error:  # of the compiler, the GPU or the memory; another day may be better, so there is no record
        return fails(error)
    record(variant, machine, verdict)
    return verdict


def hangs(limit: float) -> Verdict:
    return Verdict({}, f"its check did not end within {limit:g} s")


def fails(error: Exception) -> Verdict:
    return Verdict({}, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")


def _in_a_thread(f: Callable, limit: float):
    """f() in a thread of its own, where of the caller the GPU holds that its call is for, and no transformation, mesh or option;
    TimeoutError after `limit` s."""
    result, gpu = concurrent.futures.Future(), device.gpu()

    def run():
        try:
            with jax.default_device(gpu):
                result.set_result(f())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result.result(limit)


def _warning(variant: Variant, machine: records.Machine, verdict: Verdict) -> str:
    return (
        f"pallas_flash does not take {variant} unasked on this {machine.gpu}: {verdict.wrong}. The next implementation serves, "
        "and explain() says which; python -m pallas_flash checks again."
    )


# ---- the check ----


def trials(problem: Problem) -> list[dict[str, int]]:
    """The sizes of the problems that are tried, the last with so many heads that programs go over several tiles."""
    if decode.takes(problem):
        return [SIZES | dict(queries=3)]
    processors = device.processors()
    return [SIZES, SIZES | dict(batch=1, queries=509, heads=2 * processors, kv_heads=processors)]


def check(backend: Backend, problem: Problem, trials: list[dict[str, int]]) -> Verdict:
    """Compares output, log-sum-exp and gradients with the reference's in float32, on small problems of the same variant."""
    errors = [_errors(backend, *trial(problem, sizes)) for sizes in trials]
    largest = {name: max((e[name] for e in errors), key=lambda e: (e != e, e)) for name in errors[0]}
    tolerance = TOLERANCE[problem.dtype]
    wrong = [f"{name} is off by {e:.1e}" for name, e in largest.items() if not e <= tolerance]  # nan is not
    return Verdict(largest, f"{', '.join(wrong)}; the tolerance is {tolerance:.0e}" if wrong else None)


def _errors(backend: Backend, small: Problem, operands: Operands, cotangents: tuple) -> dict[str, float]:
    found = run(small, Choice(backend, backend.tiles(small)), operands, cotangents)
    reference = next(backend for backend in backends.BACKENDS if backend.name == "reference")
    exact = dataclasses.replace(small, dtype="float32")
    wanted = run(exact, Choice(reference, reference.tiles(exact)), *jax.tree.map(_exact, (operands, cotangents)))
    return {name: error(found[name], wanted[name]) for name in wanted}


def trial(problem: Problem, sizes: dict[str, int]) -> tuple[Problem, Operands, tuple]:
    """A small problem of the same variant, masked at both ends of the keys; its operands; the cotangents of o and lse."""
    width, value_width = _widths(problem)
    p = dataclasses.replace(problem, **sizes, head_size=width, value_size=value_width, scale=width**-0.5)
    lengths = p.keys - p.keys // 7 * np.arange(p.batch, dtype=np.int32)
    rules = [masks.Causal(), masks.KeyLengths(jax.device_put(lengths)), *([RULE] if p.visibility.where is not None else [])]
    offset = p.keys - p.queries
    visibility = masks.resolve(rules, p.batch, p.queries, p.keys, offset)
    seeds = dropout.seeds(jax.random.key(0), p.batch, p.heads) if p.dropped else None
    rng = np.random.default_rng(0)
    normal = lambda *shape: jax.device_put(rng.standard_normal(shape, np.float32).astype(jnp.dtype(p.dtype)))
    bias = None if p.bias is None else normal(1, p.heads, p.queries, p.keys)
    score = None if p.score is None else Score.of_call(far_is_less, jnp.float32, offset)
    row, key = np.arange(p.queries)[:, None] // 256, np.arange(p.keys) // 256  # of empty, partial and full blocks
    mask = None if p.mask is None else jax.device_put(rng.random((p.batch, 1, p.queries, p.keys)) < (row + key + 1) % 3 / 2)
    q, k = normal(p.batch, p.queries, p.heads, width), normal(p.batch, p.keys, p.kv_heads, width)
    v, do = normal(p.batch, p.keys, p.kv_heads, value_width), normal(p.batch, p.queries, p.heads, value_width)
    dlse = normal(p.batch, p.heads, p.queries).astype(jnp.float32)
    operands = Operands(q, k, v, bias, None, mask, visibility, seeds, score)
    return dataclasses.replace(p, soft_cap=None).of_part(operands), operands, (do, dlse)


def far_is_less(s, b, h, q, k):
    """The score_mod of trials."""
    return s - 0.01 * (h + 1) * jnp.abs(q - k)


def _exact(x):
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


def run(problem: Problem, choice: Choice, operands: Operands, cotangents: tuple) -> dict[str, np.ndarray]:
    """o, lse, the largest logits if they are asked for, and the gradients, each [B, length, heads, ...]."""

    by_length = lambda x: jnp.swapaxes(x, 1, 2)

    @jax.jit
    def both(operands, cotangents):
        def attend(q, k, v, bias):
            o, *numbers = autodiff.attend(problem, choice, operands._replace(query=q, key=k, value=v, bias=bias))
            return (o, numbers[0]), numbers[1]

        (o, lse), vjp, largest = jax.vjp(attend, *operands[:4], has_aux=True)
        dq, dk, dv, dbias = vjp(cotangents)
        found = dict(o=o, lse=by_length(lse)[..., None], dq=dq, dk=dk, dv=dv)
        found |= {} if largest is None else dict(largest=by_length(largest)[..., None])
        return found if dbias is None else found | dict(dbias=by_length(dbias))

    return jax.device_get(both(operands, cotangents))


def error(x, want) -> float:
    """The largest relative error of ROWS neighbouring rows of a head."""

    def size(x):  # [B, blocks, heads]
        squares = np.square(x).sum(-1)
        return np.sqrt(np.add.reduceat(squares, range(0, squares.shape[1], ROWS), axis=1))

    x, want = (a.astype(np.float64) for a in (x, want))
    return float(np.max(size(x - want) / np.maximum(size(want), 1e-3)))
