"""What the tests of decoding and of pages share."""

import os

import gpu_interpreter
import numpy as np
import pytest

IMPLEMENTATIONS = ("blockwise", "triton")
MOSAIC = ("hopper", "ampere")
B, N, K, H, HV = 3, 6, 2, 11, 5
T, PAGES = 5, 6
needs_interpreter = pytest.mark.skipif(
    gpu_interpreter.MISSING is not None, reason=str(gpu_interpreter.MISSING)
)
ints = lambda *x: np.array(x, np.int32)


def arrays(rng, T, S, dtype="float32", head=H, value=HV, heads=N):
    shapes = (B, T, heads, head), (B, S, K, head), (B, S, K, value)
    return [rng.normal(size=shape).astype(np.float32).astype(dtype) for shape in shapes]


def calls(request) -> int:
    """To draw for each implementation: 500 with --whole, else 25; PALLAS_FLASH_EXAMPLES draws more
    or fewer."""
    return int(os.environ.get("PALLAS_FLASH_EXAMPLES", 500 if request.config.option.whole else 25))
