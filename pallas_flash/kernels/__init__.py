"""Pallas kernels, one folder for each family of GPUs; and what the families share as
implementations."""

import abc
import functools

import jax
import jax.numpy as jnp

from pallas_flash.jax_support import hardware
from pallas_flash.problem.arguments import Gradients, Operands, Problem
from pallas_flash.problem.implementation import Implementation, no_empty_axis
from pallas_flash.tiled.blockwise.implementation import blockwise_tangent


def joined(*reasons: str | None) -> str | None:
    """All reasons in one text, each once, or None. The first is what the machine lacks: no other
    call mends that."""
    also = ". Also: "
    each = also.join(filter(None, reasons)).split(also)
    return also.join(dict.fromkeys(each)) or None


class Family(Implementation):
    """A family of kernels. Its methods import them when they are first needed, and with them Mosaic
    or Triton."""

    platform = "gpu"

    @abc.abstractmethod
    def import_kernels(self) -> None:
        """Imports all kernels. Another jax may lack a module, a name in it, or what a name was good
        for."""

    @functools.cached_property
    def why_no_import(self) -> str | None:
        """Why the kernels cannot be imported here, or None."""
        try:
            self.import_kernels()
        except Exception as error:
            return f"its kernels cannot be imported with jax {jax.__version__}: {error}"
        return None

    def why_not_by_default(self, problem):
        if hardware.here().platform == self.platform:
            return None
        device = self.platform.upper()
        return f"the call is not for a {device}: it would run in Pallas' interpreter, slowly"

    def log_base(self, problem):
        return problem.log_base

    def has_tangent(self, tiles):
        return tiles.tangent is not None

    def tangent_by_kernel(self, problem: Problem, tiles, x: Operands, dx: Gradients, rows, o, dlse):
        """`tangent` where the kernels have tiles, but for what the tangents of arrays that a
        score_mod reads contribute."""
        raise NotImplementedError(f"{self.name} has no kernel for forward mode")

    def tangent(self, problem, tiles, x, dx, rows, o, dlse):
        fits = self.has_tangent(tiles)
        if fits and not jax.tree.leaves(dx.captured):
            return self.tangent_by_kernel(problem, tiles, x, dx, rows, o, dlse)
        for_blockwise = Gradients(None, None, None, captured=dx.captured) if fits else dx
        args = problem, x, for_blockwise, rows, o, dlse
        do, dlse = blockwise_tangent(self.log_base(problem), *args)
        others = dx._replace(captured=jax.tree.map(lambda _: None, dx.captured))
        if fits and jax.tree.leaves(others):
            args = problem, tiles, x, others, rows, o, jnp.zeros_like(dlse)
            by_kernel = self.tangent_by_kernel(*args)
            do, dlse = do + by_kernel[0], dlse + by_kernel[1]
        return do, dlse


def why_no_tiles(problem: Problem) -> str | None:
    """Why no Pallas kernel can tile a problem, or None."""
    symbols = [
        str(n) for n in (problem.batch, problem.queries, problem.keys) if not isinstance(n, int)
    ]
    if symbols:
        return f"a kernel's grid must be static; got the symbolic dimensions {', '.join(symbols)}"
    if getattr(jax.config, "eager_constant_folding", False):  # under ensure_compile_time_eval
        return (
            "its kernels must be traced, and jax.ensure_compile_time_eval would evaluate their "
            "operations eagerly"
        )
    return no_empty_axis(problem)
