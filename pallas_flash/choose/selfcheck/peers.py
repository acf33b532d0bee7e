"""What the self-check found in the other processes of a job, which must all run one program."""

import time

import jax

from pallas_flash.choose.selfcheck import records
from pallas_flash.choose.selfcheck.outcome import Verdict
from pallas_flash.jax_support import jax_internals

WAIT = 300  # seconds for the other processes to reach the same call, and to compile and run a check


def agree(variant, machine: records.Machine, verdict: Verdict):
    """Tells the other processes what this one found. Kernels that failed are left only if all found
    the same, which is waited for; else RuntimeError, which says what to do. Those that are right
    wait for nobody: where they failed elsewhere, that process raises."""
    processes = jax.process_count()
    if processes == 1:
        return
    job, me = jax_internals.job(), jax.process_index()
    name = lambda process: f"pallas_flash/{variant}/{process}"
    mine = "unknown" if verdict.unknown else "wrong" if verdict.wrong else "right"
    if job is not None:
        job.key_value_set(name(me), mine, allow_overwrite=True)
    if mine == "right":
        return
    reason = "what could not be checked may be right elsewhere"
    if not verdict.unknown:
        others = {n: name(n) for n in range(processes) if n != me}
        reason = _difference(job, others, mine)
    if reason:
        raise RuntimeError(
            f"the self-check of {variant} failed on this {machine.gpu}, in process {me} of "
            f"{processes}: {verdict.why_not}. All processes of a job must run one program, and "
            f"{reason}. Run python -m pallas_flash on each host, or on one of those that share "
            f"{records.folder()}: later jobs take what it records there. Or name an "
            "implementation in all processes, by PALLAS_FLASH_IMPLEMENTATION or implementation=."
        )


def _difference(job, others: dict[int, str], mine: str) -> str | None:
    """Which other process did not find the same, in words; None: all did."""
    if job is None:
        return "jax.distributed, by which they could compare, is not running"
    end = time.monotonic() + WAIT
    for process, name in others.items():
        milliseconds = max(1, int(1000 * (end - time.monotonic())))
        try:
            found = job.blocking_key_value_get(name, milliseconds)
        except jax.errors.JaxRuntimeError:
            return f"process {process} did not say within {WAIT} s what it found"
        if found != mine:
            return f"process {process} found it {found}"
    return None
