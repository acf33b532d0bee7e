"""The one-time self-check of an implementation's kernels on this machine, before a GPU runs them by
default."""

import concurrent.futures
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax

from pallas_flash.choose.selfcheck import comparison, outcome, records, specs
from pallas_flash.choose.selfcheck.comparison import FLASH_ATTENTION, EntryPoint
from pallas_flash.choose.selfcheck.outcome import Verdict
from pallas_flash.jax_support import hardware, options
from pallas_flash.problem.arguments import Problem
from pallas_flash.problem.implementation import Implementation

LIMIT = 300  # seconds; kernels that run longer hang
CRASHES = 2  # checks that ended with their process: one may have been killed, by a scheduler say
AGAIN = 10  # a check that could not finish is repeated after this many times its duration

_log = logging.getLogger("pallas_flash")


class Right(NamedTuple):
    """The first of several variants that is right, None if all failed; and why each before it
    failed, by its scheme."""

    problem: Problem | None
    failed: dict[str, str] = {}

    @property
    def why_not(self) -> str | None:
        """The failures in words, each with its scheme where there are several."""
        if len(self.failed) < 2:
            return next(iter(self.failed.values()), None)
        return "; ".join(map(": ".join, self.failed.items()))


def first_right(
    implementation: Implementation,
    problems: Iterable[Problem],
    entry: EntryPoint = FLASH_ATTENTION,
    check: bool = True,
    instead: str = "the next implementation, which explain() names",
) -> Right:
    """Runs the self-check of variants until one passes, and warns of those that failed; `instead`
    is what runs where all did. Without `check` nothing runs, and what is not known is right."""
    failed, new, right = {}, {}, None
    for problem in problems:
        key = _key(implementation, problem, entry)
        verdict, is_new = _verdict(key, implementation, problem, entry, check)
        if verdict is None or verdict.why_not is None:
            instead, right = f"{key and key.variant}, which is right", problem
            break
        failed[key.variant.scheme] = verdict.why_not
        new |= {key: verdict.why_not} if is_new else {}
    for key, why_not in new.items():
        warnings.warn(_warning(*key, why_not, instead), RuntimeWarning, stacklevel=2)
    return Right(right, failed)


def is_known(
    implementation: Implementation, problem: Problem, entry: EntryPoint = FLASH_ATTENTION
) -> bool:
    """Whether `first_right` would not run the self-check of this variant."""
    key = _key(implementation, problem, entry)
    return _verdict(key, implementation, problem, entry, check=False)[0] is not None


# ---- what is known of the kernels ----


class Variant(NamedTuple):
    """A set of kernels that are right or wrong together."""

    implementation: str
    head_size: int  # as the kernels pad it
    value_size: int
    dtype: str
    # the order of the backward's sums, and whatever else selects other kernels: decoding, dropout,
    # arguments, pages
    scheme: str

    def __str__(self):
        v = self
        return f"{v.implementation} {v.head_size}/{v.value_size} {v.dtype}, {v.scheme}"


class Key(NamedTuple):
    """What a verdict is on."""

    variant: Variant
    machine: records.Machine


TRUSTED = Verdict({})
_known: dict[Key, Verdict] = {}
# when kernels with an unknown verdict may be checked again
_again: dict[Key, float] = {}
_one_at_a_time = threading.Lock()


def variant_of(
    implementation: Implementation, problem: Problem, entry: EntryPoint = FLASH_ATTENTION
) -> Variant:
    problem = entry.convert(implementation, problem)
    # other entry points have no backward
    in_any_order = entry is FLASH_ATTENTION and implementation.adds_in_any_order(problem)
    order = "in any order" if in_any_order else "deterministic"
    waits = "waits for reads" if problem.waits_for_reads else None
    scheme = ", ".join(filter(None, [order, waits, *specs.variants(problem), entry.name]))
    return Variant(implementation.name, *comparison.widths(problem).values(), problem.dtype, scheme)


def _key(implementation: Implementation, problem: Problem, entry: EntryPoint) -> Key | None:
    """The key of the verdict on kernels; None if they are trusted."""
    machine = records.machine() if implementation.own_kernels and not _trusts() else None
    return None if machine is None else Key(variant_of(implementation, problem, entry), machine)


def _verdict(
    key: Key | None,
    implementation: Implementation,
    problem: Problem,
    entry: EntryPoint,
    check: bool,
) -> tuple[Verdict | None, bool]:
    """The verdict on kernels, None if it is not known and `check` is False; and whether it has just
    been asked of a self-check or its record."""
    if key is None:
        return TRUSTED, False
    if not check:
        return _known.get(key) or _recorded(*key), False
    with _one_at_a_time:
        is_new = key not in _known or (
            _known[key].unknown is not None and time.monotonic() >= _again[key]
        )
        if is_new:
            verdict = _recorded(*key) or _run_check(implementation, problem, entry, *key)
            records.agree(*key, verdict)
            _known[key] = verdict
        return _known[key], is_new


def _trusts() -> bool:
    value = os.environ.get("PALLAS_FLASH_SELF_CHECK") or "1"
    if value not in ("0", "1"):
        raise ValueError(
            "PALLAS_FLASH_SELF_CHECK must be 0 (trust the kernels), 1 or unset (check them once); "
            f"got {value!r}."
        )
    return value == "0"


def _recorded(variant: Variant, machine: records.Machine) -> Verdict | None:
    if saved := records.read(variant, machine):
        return Verdict(**{name: saved[name] for name in Verdict._fields})
    last = records.unfinished(variant, machine)
    if last is None or last.number < CRASHES:
        return None
    return outcome.crashes(last, records.attempts_of(variant, machine))


def record(variant: Variant, machine: records.Machine, verdict: Verdict) -> bool:
    """Records a verdict, unless it is unknown. Returns whether a later process knows it."""
    why_not = None if verdict.unknown else records.write(variant, machine, verdict._asdict())
    if why_not:
        _log.warning(
            "pallas_flash cannot save the result of the self-check of %s, and will repeat it: %s",
            variant,
            why_not,
        )
    return not (why_not or verdict.unknown)


def _run_check(
    implementation: Implementation,
    problem: Problem,
    entry: EntryPoint,
    variant: Variant,
    machine: records.Machine,
) -> Verdict:
    """Tells the user, checks the kernels and records the verdict."""
    _announce(variant, machine)
    start = time.monotonic()
    with records.begin(variant, machine):
        verdict, gpu_is_lost = _check(implementation, problem, entry)
        is_recorded = record(variant, machine, verdict)
    now = time.monotonic()
    _again[variant, machine] = now + AGAIN * (now - start)
    if gpu_is_lost:
        _known[variant, machine] = verdict
        raise RuntimeError(_lost(variant, machine, verdict, is_recorded))
    return verdict


def _announce(variant: Variant, machine: records.Machine):
    _log.warning(
        "pallas_flash: one-time self-check of %s on this %s (python -m pallas_flash runs it ahead "
        "of time, in an isolated process)",
        variant,
        machine.gpu,
    )
    if last := records.unfinished(variant, machine):
        _log.warning(
            "pallas_flash: its last self-check ended with the process (%s); if this one does too, "
            "later processes will not take %s",
            last,
            variant.implementation,
        )


def _check(
    implementation: Implementation, problem: Problem, entry: EntryPoint
) -> tuple[Verdict, bool]:
    """Checks kernels: the verdict, and whether this process can no longer use the GPU."""
    try:
        problem = entry.convert(implementation, problem)
        sizes = comparison.all_sizes(problem, **entry.sizes)
        # without a limit: compilers may be slow
        ready = _in_a_thread(lambda: comparison.check(implementation, problem, sizes, entry))
        return _in_a_thread(ready, LIMIT), False
    except TimeoutError:
        return outcome.hangs(LIMIT), True
    except Exception as error:
        return outcome.fails(error), outcome.loses_gpu(error)


def _in_a_thread(f: Callable, limit: float | None = None):
    """f() in a new thread, which inherits the GPU of the caller, but no transformation, mesh or
    option of jax; TimeoutError after `limit` s."""
    result, gpu = concurrent.futures.Future(), hardware.gpu()

    def run():
        try:
            with options.defaults(), jax.default_device(gpu):
                result.set_result(f())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result.result(limit)


def _warning(variant: Variant, machine: records.Machine, why_not: str, instead: str) -> str:
    return (
        f"pallas_flash: self-check of {variant} failed on this {machine.gpu}: {why_not}. Falling "
        f"back to {instead}; python -m pallas_flash checks again."
    )


def _lost(variant: Variant, machine: records.Machine, verdict: Verdict, is_recorded: bool) -> str:
    then = f"it will no longer take {variant.implementation}" if is_recorded else "it checks again"
    return (
        f"the self-check of {variant} failed on this {machine.gpu}: {verdict.why_not}. This "
        f"process can no longer use the GPU. Restart the process: {then}. "
        "PALLAS_FLASH_IMPLEMENTATION selects an implementation for all calls."
    )
