"""A pass of an implementation as one equation with four rules.

Under vmap it is one call of more batch rows; over an axis of an explicit mesh a jax.shard_map; on a
mesh with Auto axes what XLA's partitioner makes of it. Kernels in a program for a platform that has
none are blockwise's.

Within jit the device that will run the program is unknown. A call that is traced where a GPU is the
default takes its kernels; blockwise replaces them in a program that is lowered for another
platform, and is traced only then.
"""

import dataclasses
import functools
import itertools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_flash.devices import sharding
from pallas_flash.devices.shared_arrays import operand_axes, rows_axes, with_indices
from pallas_flash.jax_support import hardware, jax_internals
from pallas_flash.jax_support.jax_internals import mlir
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.problem.implementation import Choice, Implementation, Pass
from pallas_flash.problem.log_base import LogBase
from pallas_flash.tiled import blockwise
from pallas_flash.tiled.blockwise.implementation import blockwise_tangent
from pallas_flash.tiled.online_softmax import DeltaTerms, RowScale, SoftmaxState, finite
from pallas_flash.transforms import equation

ON_PLATFORM = {
    platform: equation.primitive(f"flash_attention_on_{platform}")
    for platform in set(hardware.PLATFORMS.values())
}
ANYWHERE = equation.primitive("flash_attention_call")
_log = logging.getLogger("pallas_flash")


@dataclasses.dataclass(frozen=True)
class ByPlatform(equation.Rules):
    """Lowers `run`, or `run_elsewhere` where kernels were traced for their platform and the program
    is lowered for another one; kernels that were requested by name raise there."""

    implementation: Implementation
    is_requested: bool
    traced_on: str  # the platform of the device that the call was traced for

    @property
    def needs_platform(self) -> bool:
        """Whether `run` is for the platform of its kernels alone. Kernels that were requested by
        name and that Pallas' interpreter can run are used everywhere."""
        runs_anywhere = self.is_requested and self.implementation.is_interpretable
        return self.implementation.platform == self.traced_on and not runs_anywhere

    @property
    def primitive(self):
        return ON_PLATFORM[self.traced_on] if self.needs_platform else ANYWHERE

    def run_elsewhere(self, like, *args):
        """The results of `run` by blockwise, in the form of `like`."""
        raise NotImplementedError

    def lower(self, ctx, *leaves, jaxpr, **trees):
        self._warn(jax_internals.target(ctx), jaxpr)
        return super().lower(ctx, *leaves, jaxpr=jaxpr, **trees)

    def lower_elsewhere(self, ctx, *leaves, jaxpr, in_tree, out_tree):
        name = self.implementation.name
        if self.is_requested:
            raise NotImplementedError(
                f"implementation {name!r} runs on {self.traced_on.upper()}s only, but the program "
                'is lowered for another platform; implementation=None takes "blockwise" there.'
            )
        like = jax.tree.unflatten(out_tree, jaxpr.out_avals)
        flat = self.flat(functools.partial(self.run_elsewhere, like), in_tree=in_tree)
        with hardware.on_cpu():
            return mlir.lower_fun(flat, multiple_results=True)(ctx, *leaves)

    def _warn(self, target: jax_internals.Target, jaxpr):
        """Warns of a program for a platform with kernels that calls an implementation without,
        chosen by default for a call that was traced for another one, or that is exported with
        Triton kernels."""
        has_kernels = [x for x in target.platforms if x in hardware.PLATFORMS]
        missed = [x for x in has_kernels if hardware.PLATFORMS[x] != self.traced_on]
        if missed and not self.is_requested:
            device = hardware.PLATFORMS[missed[0]].upper()
            _once(
                f'a program for {missed[0]} runs "{self.implementation.name}", not the {device} '
                f"kernels, since it was not traced for a {device}. Trace it where a {device} is "
                "the default device, or under jax.sharding.use_abstract_mesh with a "
                f"{device} as abstract_device."
            )
        if has_kernels and target.is_export and "pallas_call" in str(jaxpr):
            _once(
                "the exported program contains Triton kernels, for which jax guarantees no "
                "compatibility: jax.export needs disabled_checks="
                '[jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]. '
                'implementation="blockwise" has none.'
            )


for _target, _platform in hardware.PLATFORMS.items():
    mlir.register_lowering(ON_PLATFORM[_platform], equation.lower, platform=_target)
for _primitive in ON_PLATFORM.values():
    mlir.register_lowering(_primitive, functools.partial(equation.lower, method="lower_elsewhere"))


@functools.cache
def _once(text: str):
    _log.warning("pallas_flash: %s", text)


def like_kernels(stats: SoftmaxState, like: SoftmaxState, log_base: LogBase) -> SoftmaxState:
    """A SoftmaxState in base e, converted to the log base and the fields of kernels."""
    top = None if like.top is None else log_base.from_e(stats.largest)
    if like.l is None:
        return SoftmaxState(log_base.from_e(stats.lse(LogBase.E)), None, top)
    return stats._replace(m=finite(log_base.from_e(stats.m)), top=top)


NO_CALLBACK = (
    "a mask_mod or score_mod that calls jax.pure_callback does not run on a mesh with Auto axes, "
    "where XLA would end the process. Give the mesh explicit axes, or call within jax.shard_map."
)


@dataclasses.dataclass(frozen=True)
class KernelPass(ByPlatform, Pass):
    """A pass that is the equation of a problem wherever it is called."""

    takes_delta_terms = True
    # of Explicit axes a vmap may map one; over Auto axes XLA's partitioner may spread the pass
    mesh: AxisType | None
    # the tangent of kernels that nobody requested: checked where it is first asked for
    checked_tangent: Callable
    # (implementation, problem) -> whether kernels that nobody requested pass that check
    is_right: Callable
    problem: Problem | None = None
    tiles: Any = None

    def bind_pass(self, problem: Problem, tiles, operands: Operands, *rows):
        return dataclasses.replace(self, problem=problem, tiles=tiles).bind(operands, *rows)

    __call__ = bind_pass

    @property
    def run(self):
        if self.mesh is AxisType.Auto:  # the partitioned equation is around another
            return functools.partial(self.on_device, self.problem, self.tiles)
        return self.run_here

    def run_here(self, operands: Operands, *rows):
        problem, operands = self.implementation.convert(self.problem, operands)
        if self.name == "tangent" and not self.is_requested:
            return self.checked_tangent(self.implementation, problem, self.tiles, operands, *rows)
        return self.inner(problem, self.tiles, operands, *rows)

    @property
    def primitive(self):
        return _partition().primitive if self.mesh is AxisType.Auto else super().primitive

    @property
    def on_device(self) -> "KernelPass":
        """The pass on one device of the mesh."""
        return dataclasses.replace(self, mesh=None, maps=())

    def axes(self, arrays, in_tree) -> tuple:
        """The operands and the pass's other arguments with a string in place of each array: a
        letter for each axis. The arrays have the axes of the vmaps too."""
        mapped = lambda n: sum(axes[n] is not None for axes in self.maps)
        like = lambda n, x: jax.ShapeDtypeStruct(x.shape[mapped(n) :], x.dtype)
        operands, *rows = jax.tree.unflatten(in_tree, list(map(like, itertools.count(), arrays)))
        axes = operand_axes(self.problem, operands)
        return axes, *rows_axes(axes, tuple(rows))

    # ---- under vmap ----

    def batch(self, size, leaves, in_axes, *, jaxpr, in_tree, out_tree):
        trees = dict(in_tree=in_tree, out_tree=out_tree)
        if self.mesh is AxisType.Auto:
            return super().batch(size, leaves, in_axes, jaxpr=jaxpr, **trees)
        if self.mesh is AxisType.Explicit:
            mapped = next(x for x, axis in zip(leaves, in_axes, strict=True) if axis == 0)
            if (axis := jax.typeof(mapped).sharding.spec[0]) is not None:
                return self._over_mesh(axis, leaves, in_axes, in_tree)
        merged = self._merge(size, leaves, in_axes, in_tree)
        problem = None if merged is None else self.problem.for_part(merged[0])
        if problem is None or self.implementation.why_not(self.implementation.converted(problem)):
            side_by_side = self.within(in_axes)._for_calls(size)
            jaxpr = jax.make_jaxpr(side_by_side.flat(**trees))(*leaves)
            return side_by_side._bind(leaves, jaxpr, jaxpr.out_avals, **trees)
        results = self(problem, self.implementation.tiles_like(self.tiles, problem), *merged)
        split = lambda y: y.reshape(size, self.problem.batch, *y.shape[1:])
        return list(map(split, jax.tree.leaves(results)))

    def _for_calls(self, size: int) -> "KernelPass":
        """The pass of `size` calls side by side. A backward in any order adds to zeros that it is
        given, and jax runs such kernels one call after another: the one in order runs instead."""
        problem, tiles = self.problem, self.tiles
        if self.name == "backward":
            for other in self.implementation.variants(problem):
                is_new = other.deterministic and not problem.deterministic
                if is_new and (self.is_requested or self.is_right(self.implementation, other)):
                    problem, tiles = (
                        other,
                        self.implementation.tiles(self.implementation.converted(other)),
                    )
        tiles = self.implementation.for_calls(tiles, self.implementation.converted(problem), size)
        return dataclasses.replace(self, problem=problem, tiles=tiles)

    def _over_mesh(self, axis, leaves, in_axes, in_tree):
        """The results of calls that lie on this axis of an explicit mesh."""
        # not of the jaxpr, which was traced on another mesh
        on_device = functools.partial(self.on_device, self.problem, self.tiles)
        mapped = jax.shard_map(
            jax.vmap(self.flat(on_device, in_tree=in_tree), in_axes),
            in_specs=tuple(P() if in_axis is None else P(axis) for in_axis in in_axes),
            out_specs=P(axis),
            axis_names=set(sharding.axis_names(axis)),
            check_vma=False,
        )
        return mapped(*leaves)

    def _merge(self, size: int, leaves, in_axes, in_tree) -> list | None:
        """The arguments of one call that does what `size` calls do. None if merging would copy a
        query, key or value that they share, or a bias or mask of several batch rows. None too if
        each call has an array without batch rows, or its gradient: sinks, arrays of a rule. Many
        tangents at one place are worth the copies."""
        if self.maps or self.implementation.is_dense:
            return None
        is_mapped = [axis == 0 for axis in in_axes]
        axes, *row_axes = self.within(in_axes).axes(leaves, in_tree)
        differs, *rows_differ = jax.tree.unflatten(in_tree, is_mapped)
        if not (differs.query and differs.key and differs.value) and self.name != "tangent":
            return None
        if self.name == "backward":  # each call has its own gradient of what all share
            gradients = jax.tree.map(lambda _: True, differs.differentiable)
            differs = differs.with_differentiable(gradients._replace(sinks=differs.sinks))
        for name in ("bias", "mask"):
            shape = getattr(self.problem, name)
            if shape is not None and not getattr(differs, name):
                if shape[0] != 1:  # which may be a symbol
                    return None
                axes = axes._replace(**{name: ""})  # one row serves all
        has_rows = [letters.startswith("B") for letters in jax.tree.leaves((axes, *row_axes))]
        differs = jax.tree.leaves((differs, *rows_differ))
        if any(d and not has for d, has in zip(differs, has_rows, strict=True)):
            return None

        def merge(a, mapped):
            a = a if mapped else jnp.broadcast_to(a, (size, *a.shape))
            return a.reshape(size * self.problem.batch, *a.shape[2:])

        each = zip(leaves, is_mapped, has_rows, strict=True)
        arrays = [merge(a, mapped) if has else a for a, mapped, has in each]
        x, *rows = jax.tree.unflatten(in_tree, arrays)
        # rules count the batch rows of each call from 0
        batch = jnp.tile(jnp.arange(self.problem.batch, dtype=jnp.int32), size)
        return [with_indices(x, batch=batch), *rows]

    # ---- when the program is lowered ----

    def lower(self, ctx, *leaves, **parameters):
        if self.mesh is AxisType.Auto and _partition().may_spread(ctx):
            return _partition().lower(self, ctx, *leaves, **parameters)
        return super().lower(ctx, *leaves, **parameters)

    def run_elsewhere(self, like, x: Operands, *rows):
        problem, log_base = self.problem, self.implementation.log_base(self.problem)
        tiles = blockwise.tiles(problem).for_gradient()
        if self.name == "tangent":
            return blockwise_tangent(log_base, problem, x, *rows)
        if self.name == "forward":
            o, stats = blockwise.forward(problem, tiles, x)
            return o, like_kernels(stats, like[1], log_base)
        # do and delta have a factor that kernels expect, and lse is without it: P gets it
        lse, do, delta = rows
        if isinstance(delta, DeltaTerms):
            delta = delta.sum(do, problem.kept, lse == jnp.inf)
        rows = RowScale(log_base.to_e(lse), jnp.ones_like(lse), None)
        return blockwise.backward(problem, tiles, x, rows, do, delta)


# ---- around a choice ----


def wrap(
    choice: Choice,
    operands: Operands,
    is_requested: bool,
    checked_tangent: Callable,
    is_right: Callable,
) -> Choice:
    """The choice, each pass a `KernelPass` on the mesh that the operands lie on. The reference is
    products and sums, which vmap maps and XLA's partitioner cuts by themselves."""
    mesh, is_dense = None, choice.implementation.is_dense
    if sharding.has_explicit_axes(operands.query):
        mesh = AxisType.Explicit
    elif not is_dense and sharding.is_on_auto_mesh(operands) and _can_partition(operands):
        mesh = AxisType.Auto
    if is_dense and mesh is None:
        return choice
    traced_on, checked = hardware.here().platform, (checked_tangent, is_right)
    choice = choice.wrap(KernelPass, is_requested, traced_on, mesh, *checked)
    if mesh is AxisType.Auto:
        # jax looks into the jaxpr of a program for equations whose lowering needs the devices
        return choice._replace(traces_at_once=True)
    return choice._replace(reverse_only=mesh is AxisType.Explicit)


def _partition():
    # not at the top: it needs of jax what is not public
    from pallas_flash.transforms import partition

    return partition


def _can_partition(operands: Operands) -> bool:
    mods = operands.resolved_mask.mask_mod, operands.score
    if any("pure_callback" in mod.primitives for mod in filter(None, mods)):
        raise NotImplementedError(NO_CALLBACK)
    try:
        _partition()
    except (ImportError, AttributeError) as error:
        lacks = (
            f"jax {jax.__version__} lacks what keeps arrays on a mesh with Auto axes where they are"
        )
        warnings.warn(f"{lacks}: they are gathered. {error}", stacklevel=8)
        return False
    return True
