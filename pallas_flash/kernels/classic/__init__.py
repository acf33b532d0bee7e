"""Standard attention and FlashAttention's first algorithm, as Pallas kernels to compare with.

jax's Triton lowering compiles them for a GPU. In a jax without it Pallas' interpreter runs them on
every device, also on a GPU, as a loop of XLA's operations: exact, and slow.
"""

import abc
from types import ModuleType

from pallas_flash.kernels import Family, pallas_call, why_no_tiles

EARLIER = "an earlier algorithm, for comparison only: select it by name"


class Classic(Family):
    """An earlier algorithm, whose kernels are in one module. Blockwise is its forward mode."""

    @property
    @abc.abstractmethod
    def kernels(self) -> ModuleType:
        """Its module, with functions `why_not`, `tiles`, `forward` and `backward`."""

    def import_kernels(self):
        return self.kernels

    def why_not(self, problem):
        in_general = why_no_tiles(problem) or pallas_call.why_not(problem) or self.why_no_import
        return in_general or self.kernels.why_not(problem)

    def why_not_by_default(self, problem):
        return EARLIER

    def tiles(self, problem):
        return self.kernels.tiles(problem)

    def forward(self, problem, tiles, x):
        return self.kernels.forward(problem, tiles, x)

    def backward(self, problem, tiles, x, lse, do, delta):
        return self.kernels.backward(problem, tiles, x, lse, do, delta)

    def has_tangent(self, tiles):
        return False

    def remark(self):
        return pallas_call.remark()


class Flash1(Classic):
    """FlashAttention's first algorithm."""

    name = "flash1"

    @property
    def kernels(self):
        from pallas_flash.kernels.classic import flash1

        return flash1


class Standard(Classic):
    """Standard attention, a kernel for each of its steps."""

    name = "standard"

    @property
    def kernels(self):
        from pallas_flash.kernels.classic import standard

        return standard


FLASH1, STANDARD = Flash1(), Standard()
