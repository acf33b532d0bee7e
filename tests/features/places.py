"""Where the arrays of a call may lie on several devices."""

import contextlib
import functools
import math
import re
from typing import Any, NamedTuple

import jax
import numpy as np
from check import strict_64_bits
from features.calls import GATHERED, LETTERS, TOGETHER, Call, arrays, assert_equal, refused
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_flash.context_parallel import AllToAll, Ring, Zigzag, unzigzag, zigzag

BY_HEAD = dict(B="one", N="other", K="other")
BY_ROW = dict(B="one", T="other", S="other")
LONG = dict(T=256, S=256, K=4)  # dropout cuts chunks of keys that are multiples of 32
OUTPUTS = dict(o="BTNV", lse="BTN", largest="BTN")
BATCH_FROM_0 = "each device counts its batch rows from 0"
BY_CONTEXT = dict.fromkeys(
    ("`mask`: `masks.KeyLists` of blocks", GATHERED),
    "they take sequences that are whole on a device",
)
OF_BATCH = {"dropout": BATCH_FROM_0, "`mask`: `masks.MaskMod`": BATCH_FROM_0}


class Place(NamedTuple):
    """On a mesh with the axes `one` and `other`."""

    kind: AxisType
    axes: dict[str, str]  # on which each letter of LETTERS lies
    mesh: tuple[int, int] = (2, 2)
    sizes: dict[str, int] = {}
    context: Any = None
    is_mapped: bool = False  # by a shard_map that checks what varies
    exceptions: dict[str, str] = {}  # features that mean something else there, and what

    def spec(self, letters: str) -> P:
        return P(*map(self.axes.get, letters.replace("TS", "T.")))  # what has rows has all keys

    def make_mesh(self):
        return jax.make_mesh(self.mesh, ("one", "other"), axis_types=(self.kind,) * 2)

    def in_order(self, x, order):
        """Arrays by name, with `zigzag` or `unzigzag` along the sequence if the context is so."""
        if not isinstance(self.context, Zigzag):
            return x
        for name, letters in (LETTERS | OUTPUTS).items():
            for axis in (i for i, letter in enumerate(letters) if name in x and letter in "TS"):
                x = x | {name: order(x[name], self.mesh[1], axis)}
        return x

    def in_shard_map(self, call, x, **options):
        specs = {name: self.spec(LETTERS[name]) for name in x}
        options |= dict(mesh=self.make_mesh(), in_specs=(specs,), out_specs=self.spec("BTN"))
        return jax.shard_map(call, **options)

    def gradients_and_outputs(self, call: Call, x):
        """And the text of their program."""
        x, mesh = self.in_order(x, zigzag), self.make_mesh()
        at = lambda name: NamedSharding(mesh, self.spec((LETTERS | OUTPUTS)[name]))
        x = {name: jax.device_put(a, at(name)) for name, a in x.items()}
        run = self.in_shard_map(call, x) if self.is_mapped else call
        with contextlib.nullcontext() if self.is_mapped else jax.set_mesh(mesh):
            program = jax.jit(lambda x: call.gradients_and_outputs(x, run)).lower(x).compile()
        gradients, outputs = program(x)
        outputs = dict(zip(OUTPUTS, outputs, strict=False))
        for name, a in [*outputs.items(), *((name, gradients[name]) for name in call.inputs)]:
            assert a.sharding.is_equivalent_to(at(name), a.ndim), name
        return *(self.in_order(a, unzigzag) for a in (gradients, outputs)), program.as_text()


ROWS = Place(AxisType.Explicit, BY_ROW, exceptions=BY_CONTEXT)
SCHEMES = {"a ring": Ring, "zigzag": Zigzag, "all to all": AllToAll}
PLACES = {
    "explicit axes": Place(AxisType.Explicit, BY_HEAD),
    "explicit axes, one key head": Place(
        AxisType.Explicit, dict(B="one", N="other"), sizes=dict(K=1)
    ),
    "Auto axes": Place(AxisType.Auto, BY_HEAD),
    "a checked shard_map": Place(AxisType.Auto, dict(B="one"), is_mapped=True, exceptions=OF_BATCH),
}
for name, scheme in SCHEMES.items():
    context = scheme("other", batch="one")
    PLACES[name] = Place(AxisType.Explicit, BY_ROW, (2, 4), LONG, context, False, BY_CONTEXT)
    PLACES[f"{name}, in a checked shard_map"] = Place(
        AxisType.Auto, BY_ROW, (2, 4), LONG, scheme("other"), True, OF_BATCH | BY_CONTEXT
    )


@functools.cache
def expected(features, sizes):
    call, x = Call("reference", features), arrays(**dict(sizes))
    gradients, outputs = jax.jit(call.gradients_and_outputs)(call.used(x))
    assert all(np.any(gradient) for gradient in gradients.values())
    return gradients, dict(zip(OUTPUTS, outputs, strict=False))


def check_place(implementation: str, place: Place, is_strict: bool = False):
    """All features together are right, and no float by row is gathered where rows are whole."""
    left_out = {*refused(implementation), *place.exceptions}
    for together in TOGETHER:
        features = tuple(name for name in together if name not in left_out)
        call, x = Call(implementation, features, place.context), arrays(**place.sizes)
        with strict_64_bits() if is_strict else contextlib.nullcontext():
            *got, text = place.gradients_and_outputs(call, call.used(x))
        assert_equal(got, expected(features, tuple(place.sizes.items())), features)
        moved = r"= (?:f|bf|pred)\d*\[([\d,]+)\]\S* (?:all-gather|all-to-all|collective-permute)"
        sizes = (math.prod(map(int, shape.split(","))) for shape in re.findall(moved, text))
        # the table of lists that are a rule beside others is whole on each device
        assert place.context or max(sizes, default=0) < math.prod(x["query"].shape[:3])
