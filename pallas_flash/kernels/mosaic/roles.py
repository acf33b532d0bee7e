"""Warpgroups of a program: which do what, and with how many registers (warp specialization), and
how they wait for each other."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.jax_support.pytrees import IntLike

REGISTERS = 512  # of a processor, for one thread of each warpgroup
WARPGROUP = 128  # threads


def named_barrier(operation: str, barrier: IntLike, num_threads: int):
    # jax's GPU interpreter knows an inline function by this name and by the names that it closes
    # over.
    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
    def bar_op(_, barrier_id):
        mgpu.utils.inline_ptx(f"bar.{operation} $0, {num_threads};", barrier_id.registers[()])

    bar_op(jnp.asarray(barrier, jnp.int32))


class Role(NamedTuple):
    """What some neighbouring warpgroups do."""

    run: Callable[[IntLike], None]  # in each, by its number in the program
    warpgroups: int = 1
    registers: int | None = None  # of each thread; None: as many as it starts with


def specialize(*roles: Role):
    """Runs all roles of a program, each in warpgroups of its own, in this order."""
    number, first = lax.axis_index("warpgroup"), 0
    at_start = REGISTERS // sum(role.warpgroups for role in roles)
    for role in roles:
        end = first + role.warpgroups
        inside = (number >= first) & (number < end) if first else number < end
        pl.when(inside)(functools.partial(_run, role, number, at_start))
        first = end


def _run(role: Role, number: IntLike, at_start: int):
    if role.registers is not None:
        action = "increase" if role.registers > at_start else "decrease"
        plgpu.set_max_registers(role.registers, action=action)
    role.run(number)
