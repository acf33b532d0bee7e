"""The outcome of a check: kernels are right, wrong, or could not be checked; and which of these an
error means."""

import contextlib
import re
from collections.abc import Iterator
from typing import NamedTuple

from pallas_flash.choose.selfcheck.attempts import Attempt


class Verdict(NamedTuple):
    """The verdict on kernels: they passed if nothing is wrong or unknown."""

    errors: dict[str, float]
    wrong: str | None = None  # what is wrong; final
    unknown: str | None = None  # why they could not be checked; a later check may succeed

    @property
    def why_not(self) -> str | None:
        """Why kernels are not run by default; None: they passed."""
        if self.unknown:
            return f"not checked on this machine: {self.unknown}"
        return f"wrong on this machine: {self.wrong}" if self.wrong else None


def hangs(limit: float) -> Verdict:
    return Verdict({}, f"its check did not finish within {limit:g} s")


def crashes(last: Attempt, files: str) -> Verdict:
    """The verdict on kernels whose checks, of which this is the last and `files` the traces, ended
    with their process."""
    ended = f"its check ended the process {last.number} times, the last time {last}"
    return Verdict({}, f"{ended}; it crashes, unless all were killed: then delete {files}")


# ---- errors ----


def _cuda(names: str) -> str:
    return f"CUDA_ERROR_({'|'.join(names.split())})\\b"


# by kernels that read, jump or stay where they must not
FAULTS = _cuda(
    "ILLEGAL_ADDRESS MISALIGNED_ADDRESS INVALID_ADDRESS_SPACE ILLEGAL_INSTRUCTION INVALID_PC "
    "HARDWARE_STACK_ERROR ASSERT TENSOR_MEMORY_LEAK LAUNCH_FAILED LAUNCH_TIMEOUT"
)
# by the hardware and other programs
OTHERS_FAULTS = _cuda("ECC_UNCORRECTABLE NVLINK_UNCORRECTABLE CONTAINED CONTEXT_IS_DESTROYED")
# ptxas calls these fatal too
TRANSIENT = "memory allocation failure|could not (be )?open"
# by a compiler, or by the driver that loads and launches what it made
REFUSALS = "|".join(
    [
        *("NotImplementedError", "unimplemented", "shared memory", "(ptxas|nvlink) (error|fatal)"),
        _cuda("INVALID_PTX UNSUPPORTED_PTX_VERSION INVALID_IMAGE NO_BINARY_FOR_GPU"),
        _cuda("LAUNCH_OUT_OF_RESOURCES"),
    ]
)


class Earlier(Exception):
    """Raised for a fault that the GPU had before it ran kernels."""


def failed(text: str) -> Verdict:
    """The verdict for the text of an error. Errors that are not the kernels' fault, as a lack of
    memory, may be transient."""
    if line := _line(FAULTS, text):
        return Verdict({}, f"its kernels fault: {line}")
    if (line := _line(REFUSALS, text)) and not _line(TRANSIENT, text):
        return Verdict({}, f"the compiler rejects it: {line}")
    return Verdict({}, unknown=text.partition("\n")[0].removesuffix("."))


def fails(error: Exception) -> Verdict:
    text = f"{type(error).__name__}: {error}"
    return Verdict({}, unknown=str(error)) if isinstance(error, Earlier) else failed(text)


def loses_gpu(error: Exception) -> bool:
    """Whether no program of this process can use the GPU from now on."""
    return _line(f"{FAULTS}|{OTHERS_FAULTS}", str(error)) is not None


@contextlib.contextmanager
def before_kernels() -> Iterator[None]:
    """A context in which kernels have not run yet: they are not the cause of its faults."""
    try:
        yield
    except Exception as error:
        if not loses_gpu(error):
            raise
        text = str(error).partition("\n")[0]
        raise Earlier(f"the GPU failed before its kernels ran: {text}") from error


def _line(pattern: str, text: str) -> str | None:
    """The first line that matches."""
    lines = (line.removesuffix(".") for line in text.splitlines())
    return next((line for line in lines if re.search(pattern, line, re.I)), None)
