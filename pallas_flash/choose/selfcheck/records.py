"""Stores the verdicts on kernels on this machine in the user's cache folder, a file for each; the
processes of a job, which must all run one program, find the same there."""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from pallas_flash.choose.selfcheck import attempts
from pallas_flash.choose.selfcheck.attempts import Attempt
from pallas_flash.choose.selfcheck.outcome import Verdict
from pallas_flash.jax_support import hardware, jax_internals, options


class Machine(NamedTuple):
    """What a verdict depends on, beside the kernels' variant."""

    gpu: str
    driver: str
    jax: str
    compilers: str
    pallas_flash: str  # a digest of its sources: the version says too little of a checkout


def machine() -> Machine | None:
    """This machine, with the GPU that a call is for; None if the call is for no GPU, or for one
    that is not here: nothing can be tried."""
    gpu = hardware.gpu()
    return (
        None
        if gpu is None
        else Machine(gpu.device_kind, driver(), jax.__version__, compilers(), _sources())
    )


@functools.cache
def driver() -> str:
    """The version of NVIDIA's driver."""
    loaded = pathlib.Path("/proc/driver/nvidia/version")
    with contextlib.suppress(OSError, StopIteration):
        return next(
            word for word in loaded.read_text().split() if word[0].isdigit() and "." in word
        )
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(
            query, capture_output=True, text=True, check=True, timeout=20
        ).stdout.split()[0]
    return "unknown"


COMPILERS = (
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    *("nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc"),
    *("nvidia-nvjitlink-cu12", "nvidia-nvjitlink"),
)


@functools.cache
def compilers() -> str:
    """The versions of what makes code: packages, and each ptxas that XLA and Mosaic may find, which
    a module of the system may have put there."""
    versions = {
        package.name: package.version
        for name in COMPILERS
        for package in importlib.metadata.distributions(name=name)
    }
    named = [f"{name} {version}" for name, version in versions.items()]
    return ", ".join([*named, *dict.fromkeys(map(_ptxas_version, _ptxas_found()))])


def _ptxas_found() -> Iterator[str]:
    """Each ptxas of the CUDA toolkits that jax, XLA's flags and the environment name, of the usual
    folder, and of PATH."""
    named = [jax_internals.cuda_path(), options.value("xla_gpu_cuda_data_dir")]
    named += map(os.environ.get, ("CUDA_ROOT", "CUDA_HOME", "CUDA_PATH"))
    folders = [os.path.join(root, "bin") for root in filter(None, [*named, "/usr/local/cuda"])]
    found = (shutil.which("ptxas", path=path) for path in (*folders, None))
    yield from dict.fromkeys(os.path.realpath(path) for path in found if path)


def _ptxas_version(path: str) -> str:
    """The last line in which a ptxas says its version and build; its size and date where it says
    none."""
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20)
        return f"ptxas {said.stdout.strip().splitlines()[-1]}"
    with contextlib.suppress(OSError):
        file = os.stat(path)
        return f"ptxas of {file.st_size} bytes, {file.st_mtime_ns}"
    return "ptxas"


@functools.cache
def _sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(pathlib.Path(__file__).parents[2].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def folder() -> pathlib.Path:
    return pathlib.Path(
        os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache", "pallas_flash"
    )


def read(variant: Any, machine: Machine) -> dict[str, Any] | None:
    """What was written about the variant on such a machine; None if nothing can be read."""
    # RuntimeError: there is no home folder
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        record = json.loads(_path(variant, machine).read_text())
        return record if isinstance(record, dict) else None
    return None


def write(variant: Any, machine: Machine, verdict: dict[str, Any]) -> str | None:
    """Writes a verdict, whole or not at all, whoever else writes the same, and forgets unfinished
    checks. Returns why it cannot, if it cannot."""
    record = json.dumps(variant._asdict() | machine._asdict() | verdict, indent=1)
    try:
        path = _path(variant, machine)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(record)
        os.replace(file.name, path)
    except (OSError, RuntimeError) as error:
        return str(error)
    attempts.forget(path)
    return None


def unfinished(variant: Any, machine: Machine) -> Attempt | None:
    """The last check that ended with its process."""
    with contextlib.suppress(RuntimeError):
        return attempts.unfinished(_path(variant, machine))
    return None


def attempts_of(variant: Any, machine: Machine) -> str:
    """The files of a variant's unfinished checks, as a shell names them."""
    return f"{_path(variant, machine).with_suffix(f'.*{attempts.SUFFIX}')}"


def begin(variant: Any, machine: Machine) -> contextlib.AbstractContextManager:
    """A context with a check on file, which stays there if the process ends within it."""
    with contextlib.suppress(RuntimeError):
        return attempts.begin(_path(variant, machine))
    return contextlib.nullcontext()


def _path(variant: Any, machine: Machine) -> pathlib.Path:
    digest = hashlib.sha256(json.dumps([variant, machine]).encode()).hexdigest()[:12]
    return folder() / f"{'-'.join(map(str, variant))}-{digest}.json".replace(" ", "-")


WAIT = 300  # seconds for the other processes to reach the same call, and to compile and run a check


def agree(variant, machine: Machine, verdict: Verdict):
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
            f"{folder()}: later jobs take what it records there. Or name an "
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
