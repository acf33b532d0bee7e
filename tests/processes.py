"""Programs in a process of their own: they import what this one must not have, or change jax."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def printed_by(code: str, *arguments: str, **environment: str) -> str:
    """What a program prints that begins in the repository and ends without an error."""
    run = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | environment | dict(PYTHONPATH=os.pathsep.join(["tests", *sys.path])),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout
