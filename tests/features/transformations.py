"""Every transformation that a call may be under, and what it must equal."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from check import strict_64_bits
from features.calls import Call
from features.places import PLACES, ROWS
from jax import export

from pallas_flash import flash_attention_jvp
from pallas_flash.accounting import GPUS
from scripts.bench.gpu_code import as_if_on

NO_TRITON = (
    "jax promises no compatibility for Triton kernels, and exports them with disabled_checks="
    '[jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")] alone'
)


class Transformation(NamedTuple):
    """`run` transforms a call; its result must be that of `plain` with the reference."""

    run: Callable[[Call, dict], Any]
    plain: Callable[[Call, dict], Any]
    exceptions: dict[str, str] = {}  # features that mean something else under it, and what


def _stacked(x):
    return {name: jnp.stack([a, a[::-1]]) for name, a in x.items()}


def _loop(f):
    def run(call, x):
        each = [f(call, {name: a[i] for name, a in _stacked(x).items()}) for i in range(2)]
        return jax.tree.map(lambda *a: jnp.stack(a), *each)

    return run


def _vmap(f):
    """Over the first axis of some arrays, the last of others, and not over the rest, which are the
    same in both."""

    def run(call, x):
        places = {name: (0, a.ndim)[i % 2] for i, (name, a) in enumerate(x.items())}
        moved = {name: jnp.moveaxis(a, 0, places[name]) for name, a in _stacked(x).items()}
        return jax.jit(jax.vmap(lambda x: f(call, x), in_axes=(places,)))(moved)

    return run


def _gradient_of_vmaps(call, x):
    """Of a vmap in a vmap."""
    twice = {name: jnp.stack([a, a[::-1]]) for name, a in _stacked(x).items()}
    learned, rest = call.split(twice)
    loss = lambda learned: jnp.sum(jax.vmap(jax.vmap(call.loss))(learned | rest))
    return jax.jit(jax.grad(loss))(learned)


def _gradient_of_loops(call, x):
    return _loop(lambda call, x: _loop(Call.gradients)(call, x))(call, x)


def _learned(f):
    """Of the call as a function of the arrays with a gradient, and these arrays."""

    def run(call, x):
        learned, rest = call.split(x)
        of = lambda method: lambda learned: method(call, learned | rest)
        return jax.jit(lambda learned: f(of, learned))(learned)

    return run


_jacobian = _learned(lambda of, x: jax.jacrev(lambda x: of(Call.__call__)(x)[0][0, -1, 0, :2])(x))


def _forward_mode(call, x):
    names = [*call.inputs, *(["bias"] if "`bias`" in call.features else [])]
    options = call.arguments(x)
    primals = [options.pop(name) for name in names]
    tangents = [jnp.cos(a) for a in primals]
    return jax.jit(lambda *a: flash_attention_jvp(a[: len(names)], a[len(names) :], **options))(
        *primals, *tangents
    )


def _along(f, x):
    """The derivative of f at a tree of arrays, along their cosines."""
    return jax.jvp(f, (x,), (jax.tree.map(jnp.cos, x),))[1]


_forward = _learned(lambda of, x: _along(of(Call.__call__), x))
_reverse_over_forward = _learned(lambda of, x: jax.grad(lambda x: _along(of(Call.loss), x))(x))
_forward_over_reverse = _learned(lambda of, x: _along(of(Call.gradients), x))


@_learned
def _reverse_over_reverse(of, x):
    cosines = jax.tree.map(jnp.cos, x)

    def loss(x):
        products = jax.tree.map(jnp.vdot, of(Call.gradients)(x), cosines)
        return sum(jax.tree.leaves(products))

    return jax.grad(loss)(x)


def _layers(in_scan):
    def run(call, x):
        learned, rest = call.split(x)
        start = learned["query"]

        def layer(query, _):
            o, *_ = call(learned | rest | dict(query=query))
            o = o[..., : query.shape[-1]]
            return query + jnp.pad(o, [(0, 0)] * 3 + [(0, query.shape[-1] - o.shape[-1])]), None

        def loss(query):
            if in_scan:
                return jnp.sum(jnp.sin(jax.lax.scan(layer, query, None, length=2)[0]))
            return jnp.sum(jnp.sin(layer(layer(query, None)[0], None)[0]))

        return jax.jit(jax.grad(loss))(start)

    return run


@_learned
def _checkpoint(of, x):
    names = "flash_attention_out", "flash_attention_lse"
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    return jax.grad(jax.checkpoint(of(Call.loss), policy=policy))(x)


def _export(call, x):
    """As a CPU loads it; of Triton kernels also as a GPU would, which need not be here."""
    used = call.used(x)
    if call.implementation in ("triton", "flash1", "standard"):
        try:
            with as_if_on(GPUS["A100-80GB"]):
                export.export(jax.jit(call.gradients), platforms=["cuda"])(used)
        except ValueError as error:
            if "no compatibility guarantees" not in str(error):
                raise
            raise NotImplementedError(NO_TRITON) from None
    program = export.export(jax.jit(call.gradients))(used).serialize()
    return export.deserialize(program).call(used)


def _strict(call, x):
    with strict_64_bits():
        return jax.jit(call.gradients)(call.used(x))


def _donated(call, x):
    copies = {name: jnp.array(a) for name, a in call.used(x).items()}
    return jax.jit(call.gradients, donate_argnums=0)(copies)


def _in(place):
    return lambda call, x: place.gradients_and_outputs(call, call.used(x))[0]


def _shard_map(call, x):
    used, place = call.used(x), PLACES["a checked shard_map"]
    mapped = place.in_shard_map(call, used, check_vma=False)
    return jax.jit(mapped)(used)


def forward(call, x):
    return jax.jit(call)(x)


def gradients(call, x):
    return jax.jit(call.gradients)(x)


TRANSFORMATIONS = {
    "`jit`": Transformation(forward, lambda call, x: call(x)),
    "`grad`": Transformation(gradients, gradients),
    "`vmap`, axes of any place": Transformation(_vmap(lambda call, x: call(x)), _loop(forward)),
    "`vmap` of `grad`": Transformation(_vmap(Call.gradients), _loop(gradients)),
    "`grad` of nested `vmap`": Transformation(_gradient_of_vmaps, _gradient_of_loops),
    "`jacrev`": Transformation(_jacobian, _jacobian),
    "`flash_attention_jvp`": Transformation(_forward_mode, _forward_mode),
    "`jvp`": Transformation(_forward, _forward),
    "`grad` of `jvp`": Transformation(_reverse_over_forward, _reverse_over_forward),
    "`jvp` of `grad`": Transformation(_forward_over_reverse, _forward_over_reverse),
    "`grad` of `grad`": Transformation(_reverse_over_reverse, _reverse_over_reverse),
    "`checkpoint` by name": Transformation(_checkpoint, gradients),
    "`scan` over layers": Transformation(_layers(True), _layers(False)),
    "`jax.export` through bytes": Transformation(_export, gradients),
    "64 bits, strict promotion": Transformation(_strict, gradients),
    "donated arguments": Transformation(_donated, gradients),
    "a mesh, explicit axes": Transformation(_in(PLACES["explicit axes"]), gradients),
    "a mesh, Auto axes": Transformation(_in(PLACES["Auto axes"]), gradients),
    "rows on an explicit axis": Transformation(_in(ROWS), gradients, ROWS.exceptions),
    "`shard_map`": Transformation(_shard_map, forward, PLACES["a checked shard_map"].exceptions),
}
