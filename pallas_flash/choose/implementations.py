"""The table of implementations, in the order of preference. No other file decides by a name."""

from pallas_flash.kernels.ampere import Ampere
from pallas_flash.kernels.blackwell import BLACKWELL
from pallas_flash.kernels.classic import FLASH1, STANDARD
from pallas_flash.kernels.hopper import HOPPER
from pallas_flash.kernels.triton import TRITON
from pallas_flash.problem.implementation import Implementation
from pallas_flash.tiled.blockwise.implementation import BLOCKWISE
from pallas_flash.tiled.reference import REFERENCE

AMPERE = Ampere(HOPPER, BLACKWELL)
IMPLEMENTATIONS = HOPPER, BLACKWELL, AMPERE, TRITON, BLOCKWISE, REFERENCE, FLASH1, STANDARD


def names() -> tuple[str, ...]:
    return tuple(implementation.name for implementation in IMPLEMENTATIONS)


def find(name: str) -> Implementation:
    return IMPLEMENTATIONS[names().index(name)]
