"""Where it was measured: the device, its clocks and power meanwhile, versions and the commit."""

import contextlib
import datetime
import os
import pathlib
import platform
import statistics
import subprocess
import tempfile

import jax

import pallas_flash

_SAMPLED = ("clocks.sm", "power.draw", "temperature.gpu")  # MHz, W, degrees C
_EVERY_MS = 50


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def device() -> str:
    if jax.default_backend() != "cpu":
        return jax.devices()[0].device_kind
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"CPU, {names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def limits() -> str:
    """What may throttle the GPU."""
    names = "driver_version", "clocks.max.sm", "power.limit", "clocks_throttle_reasons.active"
    try:
        driver, clock, power, reasons = _nvidia_smi(names)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return f"unknown: nvidia-smi gave no answer ({type(error).__name__})"
    return f"driver {driver}, up to {clock} MHz and {power} W, throttle reasons {reasons}"


def _nvidia_smi(names) -> list[str]:
    run = subprocess.run(_query(names), capture_output=True, text=True, check=True, timeout=20)
    values = run.stdout.splitlines()[0].split(", ") if run.stdout else []
    if len(values) != len(names):
        raise ValueError(f"expected {len(names)} values; got {run.stdout!r}")
    return values


def _query(names) -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return [
        "nvidia-smi",
        f"--query-gpu={','.join(names)}",
        "--format=csv,noheader,nounits",
        f"--id={visible or 0}",
    ]


@contextlib.contextmanager
def sensors():
    """Yields a function that afterwards gives the medians of the GPU's clock, power and
    temperature; {} where nvidia-smi gives none."""
    read = {}
    with tempfile.TemporaryFile("w+") as file:
        process = _start_sampling(file)
        try:
            yield lambda: read
        finally:
            if process:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs keeps it
                    process.wait(10)
                file.seek(0)
                read |= _medians(file.read().splitlines())


def _start_sampling(file) -> subprocess.Popen | None:
    if not on_gpu():
        return None
    with contextlib.suppress(OSError):
        return subprocess.Popen(
            [*_query(_SAMPLED), f"--loop-ms={_EVERY_MS}"], stdout=file, stderr=subprocess.DEVNULL
        )


def _medians(lines: list[str]) -> dict[str, float]:
    samples = []
    for line in lines:
        # the last line may be cut, and a sensor may be "[N/A]"
        with contextlib.suppress(ValueError):
            values = [float(text) for text in line.split(",")]
            samples += [values] if len(values) == len(_SAMPLED) else []
    medians = map(statistics.median, zip(*samples, strict=True))
    return dict(zip(_SAMPLED, medians, strict=False))


def facts() -> dict[str, str]:
    """What stands above every measurement."""
    versions = f"jax {jax.__version__}, Python {platform.python_version()}"
    return dict(
        device=device(),
        versions=f"{versions}, pallas_flash {pallas_flash.__version__}",
        commit=commit(),
        date=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
    )


def print_facts(facts: dict[str, str]):
    for name, text in facts.items():
        print(f"{name:<11}{text}", flush=True)


def commit() -> str:
    """The commit, with "-dirty" where files have changed since."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        run = subprocess.run(
            command, cwd=pathlib.Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run.stdout.strip()
