"""Context parallelism, one sequence on several devices: the schemes, and what each device computes
in them."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_flash import checks, dropout, masks
from pallas_flash.checks import unexpected
from pallas_flash.checks.sizes import Sizes
from pallas_flash.devices import ring, sharding
from pallas_flash.devices.shared_arrays import array_axes, collect_arrays, with_arrays
from pallas_flash.problem import arguments
from pallas_flash.problem.arguments import Operands, Problem
from pallas_flash.problem.call import Call
from pallas_flash.problem.implementation import Pass


@dataclasses.dataclass(frozen=True, repr=False)
class Context:
    """A scheme of context parallelism. `axis` names the axis or axes of the mesh along which the
    sequence is sharded: device i holds the i-th part. Under jit with Auto axes, `batch` and `heads`
    name the axes that batch rows and heads are sharded along, since the arrays' types do not
    tell."""

    axis: str | tuple[str, ...]
    batch: str | tuple[str, ...] | None = None
    heads: str | tuple[str, ...] | None = None
    CHUNKS = 1  # of the sequence in each device's part

    def __post_init__(self):
        for field in dataclasses.fields(self):
            axis = getattr(self, field.name)
            if axis is None and field.name != "axis":
                continue
            names = sharding.axis_names(axis) if isinstance(axis, str | tuple) else ()
            if "" in (*names, axis) or not names or not all(isinstance(x, str) for x in names):
                raise TypeError(
                    f"{type(self).__name__}.{field.name} must be the name of an axis of the mesh, "
                    f"or a tuple of them; got {axis!r}."
                )

    @property
    def names(self) -> tuple[str, ...]:
        return sharding.axis_names(self.axis)

    def __repr__(self):
        named = [
            f", {name}={axis!r}"
            for name, axis in (("batch", self.batch), ("heads", self.heads))
            if axis is not None
        ]
        return f"{type(self).__name__}({self.axis!r}{''.join(named)})"


@unexpected.refused
@dataclasses.dataclass(frozen=True, repr=False)
class Ring(Context):
    """Ring attention: keys and values go around the devices, and each device's queries attend to
    the keys that it holds at that step.

    Examples:
      >>> import jax
      >>> from jax.sharding import NamedSharding, PartitionSpec
      >>> from pallas_flash import flash_attention
      >>> from pallas_flash.context_parallel import Ring
      >>> mesh = jax.sharding.Mesh(jax.devices()[:1], "context")  # or all devices
      >>> x = jax.random.normal(jax.random.key(0), (1, 64, 4, 16))
      >>> x = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "context")))
      >>> attend = jax.jit(flash_attention, static_argnames=("is_causal", "context"))
      >>> attend(x, x, x, is_causal=True, context=Ring("context")).shape
      (1, 64, 4, 16)
    """


@unexpected.refused
@dataclasses.dataclass(frozen=True, repr=False)
class Zigzag(Context):
    """A ring with equal work for all devices under a causal mask: each holds a chunk from the front
    of the sequence and one from its back. Every array along the sequence must be in the order of
    `zigzag`, a bias or mask array along both its axes."""

    CHUNKS = 2


@unexpected.refused
@dataclasses.dataclass(frozen=True, repr=False)
class AllToAll(Context):
    """Each device computes all queries and keys of its share of the heads, and returns its part of
    the sequence (DeepSpeed's Ulysses). The numbers of query and key heads must be multiples of the
    number of devices; a single key head may be on all."""


@unexpected.refused
def zigzag(x, devices: int, axis: int = 1):
    """Reorders an array, or a tree of arrays (a batch, positions, ids), from the order of the
    sequence to the order of `Zigzag`. `axis` is split into two chunks for each of `devices`; the
    first device gets the first and the last chunk."""
    return _reorder_chunks(x, _zigzag_order(checks.count("devices", devices)), axis)


@unexpected.refused
def unzigzag(x, devices: int, axis: int = 1):
    """The inverse of `zigzag`."""
    order = np.argsort(_zigzag_order(checks.count("devices", devices)))
    return _reorder_chunks(x, order, axis)


def _zigzag_order(devices: int) -> np.ndarray:
    front = np.arange(devices)
    return np.stack([front, 2 * devices - 1 - front], 1).reshape(-1)


def _reorder_chunks(x, order, axis: int):
    if not checks.is_int(axis):
        raise TypeError(f"axis must be a static int; got {checks.description(axis)}.")

    def reordered(x):
        if not checks.is_array(x) or not -x.ndim <= axis < x.ndim:
            raise ValueError(
                f"x must be arrays with an axis {axis}, of the sequence; got "
                f"{checks.description(x)}."
            )
        at, n = axis % x.ndim, x.shape[axis]
        if n % len(order):
            raise ValueError(
                f"zigzag cuts an axis into {len(order)} chunks, two for each device; got {n} along "
                f"axis {axis}."
            )
        chunks = x.reshape(*x.shape[:at], len(order), -1, *x.shape[at + 1 :])
        lies = jax.typeof(chunks).sharding
        if any(lies.spec):  # on explicit axes of a mesh: it stays there
            return chunks.at[(slice(None),) * at + (order,)].get(out_sharding=lies).reshape(x.shape)
        return chunks.take(order, at).reshape(x.shape)

    return jax.tree.map(reordered, x)


# ---- inside of a shard_map: what this device computes


def _device_count(scheme: Context) -> int:
    try:
        return math.prod(map(lax.axis_size, scheme.names))
    except NameError:
        raise ValueError(
            f"context={scheme} needs a mesh with the axis {scheme.axis!r}: that of the arrays, of "
            "jax.set_mesh, or of a "
            "jax.shard_map around."
        ) from None


def _gather_integers(scheme: Context, call: Call, devices: int) -> Call:
    """The call with its integers by row or key gathered from all devices, since they are small, and
    in the order of the sequence."""

    def whole(path, x):
        letters = array_axes(path, call)
        if len(letters) != 2 or letters[1] not in "TS":
            return x
        x = lax.all_gather(x, scheme.names, axis=x.ndim - 1, tiled=True)
        return unzigzag(x, devices, -1) if scheme.CHUNKS == 2 else x

    return with_arrays(call, {path: whole(path, x) for path, x in collect_arrays(call).items()})


def plan_ring(scheme: Context, call: Call) -> tuple[ring.Loop, Problem, Problem, Operands]:
    """The loop, the problem of a pair in it, and the problem and operands of all pairs. The call is
    in canonical form, with this device's shard of each array."""
    devices, C = _device_count(scheme), scheme.CHUNKS
    query, key, value = arguments.arrays(call)
    lead, (T, N, _), (S, K) = query.shape[:-3], query.shape[-3:], key.shape[-3:-1]
    for name, n in dict(query=T, key=S).items():
        if n % C:
            raise ValueError(
                f"{scheme} cuts the rows of a device into two chunks; got {n} rows of {name}."
            )
    B, call = math.prod(lead), _gather_integers(scheme, call, devices)
    sizes = lambda T: Sizes(lead or (1,), dict(B=B, T=T, S=devices * S, N=N, K=K))
    all_rows = arguments.visible(sizes(devices * T), call)
    loop = ring.Loop.shortest(scheme.names, devices, C, all_rows, devices * T)

    numbers = loop.chunk_indices(lax.axis_index(scheme.names))
    chunked = lambda x: x.reshape(B * C, x.shape[-3] // C, *x.shape[-2:])
    local = dict(query=chunked(query), key=chunked(key))
    local |= {} if value is None else dict(value=chunked(value))
    local |= dict(bias=None, mask=None, score_mod=None)
    if call.dropout_seeds is not None:
        seeds = call.dropout_seeds.reshape(B, 1, N, 2)
        local["dropout_seeds"] = _chunk_seeds(seeds, numbers * (T // C), S // C)
    resolved_mask = all_rows.slice_chunks(B, numbers, T // C)
    problem, operands = arguments.normalise(call.replace(**local, resolved_mask=resolved_mask))

    score, mask = call.score_mod, None if isinstance(call.mask, masks.Mask) else call.mask
    if score is not None:
        score = arguments.bind_score_mod(sizes(devices * T), call, query.dtype)
        score = score.slice_chunks(B, numbers * (T // C))
    bias = sizes(T).dense("bias", call.bias, query.dtype)
    mask = sizes(T).dense("mask", mask, bool)
    operands = operands._replace(bias=bias, mask=mask, score=score)
    problem = problem.for_part(operands)
    return loop, ring.pair_problem(loop, problem, operands), problem, operands


def _chunk_seeds(seeds, first, keys: int):
    """The seeds of each chunk of rows, from its first row."""
    if keys % dropout.UNIT:
        raise ValueError(
            f"dropout over a ring takes chunks of keys that are multiples of {dropout.UNIT}; got "
            f"{keys}."
        )
    return dropout.moved(seeds, first[:, None]).reshape(-1, *seeds.shape[2:])


def exchange_heads(scheme: AllToAll, call: Call) -> Call:
    """The call for all rows and this device's part of the heads."""
    devices, axis = _device_count(scheme), scheme.names
    query, key, _ = arguments.arrays(call)
    (N, K), lead = (query.shape[-2], key.shape[-2]), query.ndim - 3
    if N % devices or (K % devices and K != 1):
        takes = f"{scheme} takes heads that are multiples of its {devices} devices, or one key head"
        raise ValueError(f"{takes}; got N = {N}, K = {K}. Ring takes any.")
    call = _gather_integers(scheme, call, devices)
    rows = lambda x, at: lax.all_gather(x, axis, axis=at, tiled=True)
    swap = lambda x, heads, at: lax.all_to_all(x, axis, heads, at, tiled=True)
    mine = lambda x, at: lax.dynamic_slice_in_dim(
        x, lax.axis_index(axis) * (N // devices), N // devices, at
    )

    def local(path, x):
        letters = array_axes(path, call)
        at = {letter: x.ndim - len(letters) + i for i, letter in enumerate(letters)}
        if path[0] in ("query", "key", "value"):
            return swap(x, lead + 1, lead) if x.shape[lead + 1] > 1 else rows(x, lead)
        heads = x.shape[at["N"]] if at.get("N", -1) >= 0 else 1
        if heads not in (1, N):  # N / devices would pass for a device's share
            raise ValueError(f"{path[0]} must be of all {N} query heads, or of 1; got {heads}.")
        has_heads = heads > 1
        has_rows = "NT" in letters and x.shape[at["T"]] > 1
        if has_heads and has_rows:
            return swap(x, at["N"], at["T"])
        return mine(x, at["N"]) if has_heads else rows(x, at["T"]) if has_rows else x

    return with_arrays(call, {path: local(path, x) for path, x in collect_arrays(call).items()})


@dataclasses.dataclass(frozen=True)
class UlyssesPass(Pass):
    """A pass of AllToAll: the caller holds a part of the rows of all heads, and the implementation
    computes all rows of a part of the heads. It takes the operands of `_localize_rows`, and takes
    and returns o, the softmax state, lse, do and delta of this device's rows of all heads.

    So the residual is this device's rows of o, which the caller keeps anyway, and delta is computed
    from these rows and exchanged, one scalar for each row. `exchange_heads` exchanges Q, K and V
    beforehand."""

    axis: tuple[str, ...]

    def __call__(self, problem: Problem, tiles, x: Operands, *rest):
        x = _localize_heads(self.axis, problem, x)
        swapped = lambda y, whole, cut: lax.all_to_all(y, self.axis, cut, whole, tiled=True)
        if self.name == "forward":
            o, stats = self.inner(problem, tiles, x)
            rows, tree = jax.tree.flatten(stats)
            return swapped(o, 2, 1), jax.tree.unflatten(tree, swapped(jnp.stack(rows), 2, 3))
        lse, do, delta = rest
        rows, tree = jax.tree.flatten((lse, delta))
        lse, delta = jax.tree.unflatten(tree, swapped(jnp.stack(rows), 3, 2))
        return self.inner(problem, tiles, x, lse, swapped(do, 1, 2), delta)


def _localize_rows(axis: tuple[str, ...], problem: Problem, x: Operands, sinks) -> Operands:
    """The operands of this device's heads with what autodiff.py combines with o and do: the sinks
    of all heads, and which of this device's rows are within their lengths."""
    if sinks is not None:
        sinks = checks.sinks(sinks, problem.heads * lax.axis_size(axis)).astype(x.sinks.dtype)
    return x._replace(
        sinks=sinks, resolved_mask=x.resolved_mask.shift_rows(_first_row(axis, problem))
    )


def _localize_heads(axis: tuple[str, ...], problem: Problem, x: Operands) -> Operands:
    """The inverse of `_localize_rows`."""
    sinks, N = x.sinks, problem.heads
    sinks = None if sinks is None else lax.dynamic_slice_in_dim(sinks, lax.axis_index(axis) * N, N)
    return x._replace(
        sinks=sinks, resolved_mask=x.resolved_mask.shift_rows(-_first_row(axis, problem))
    )


def _first_row(axis: tuple[str, ...], problem: Problem):
    return lax.axis_index(axis) * (problem.queries // lax.axis_size(axis))


# ---- outside: the context of a call, and what it sends


def check(context):
    """Raises if this is neither a context nor None."""
    if not isinstance(context, Context | None):
        raise TypeError(
            "context must be None, Ring(axis), Zigzag(axis) or AllToAll(axis) of "
            f"context_parallel; got {context!r}."
        )


def resolve_context(call: Call) -> Call:
    """The call with its context; if it names none, a Ring where its rows lie on a mesh with
    explicit axes."""
    context = call.context
    if context is None and (axis := sharding.find_row_axes(call)) is not None:
        context = Ring(axis)
    check(context)
    if context is None:
        return call
    if not isinstance(mask := call.mask, masks.Mask):
        return call.replace(context=context)
    whole = [type(part).__name__ for part in masks.leaves(mask) if not part.is_divisible]
    if whole:
        raise NotImplementedError(
            f"{whole[0]} take sequences that are whole on a device; got context={context}. Shard "
            "the batch or the heads."
        )
    # the types of all blocks are of no use to one device
    return call.replace(mask=masks.without_block_types(mask), context=context)


def _describe_ring(scheme: Context, loop: ring.Loop, problem: Problem) -> str:
    """What a ring sends, in words. The problem is that of all chunks and heads."""
    p, size = problem, np.dtype(problem.dtype).itemsize
    numbers = p.batch * p.keys * p.kv_heads * (p.head_size + p.value_size)
    hops = max(loop.steps - 1, 0) + (loop.steps > 0 and loop.first != 0)
    if hops == 0:
        return f"{scheme} of {loop.devices} devices: nothing is sent"
    each = (
        f"each of {loop.devices} devices sends {_bytes(numbers * size)} of K and V a step, in "
        f"{hops} of {loop.steps} steps"
    )
    again = "once more than that" if loop.steps > 1 else "as often"
    return (
        f"{scheme}: {each}; the backward {again}, and {_bytes(numbers * max(size, 4))} of dK "
        "and dV a step"
    )


def plan_pass(scheme: Context, call: Call) -> tuple[Problem, Problem, Operands, tuple]:
    """The problem that an implementation is chosen for, the problem and operands of a device, and
    what `Choice.wrap` puts around each pass."""
    if not isinstance(scheme, AllToAll):
        loop, pair, problem, operands = plan_ring(scheme, call)
        return pair, problem, operands, (ring.RingPass, loop)
    problem, operands = arguments.normalise(exchange_heads(scheme, call))
    operands = _localize_rows(scheme.names, problem, operands, call.sinks)
    return problem, problem, operands, (UlyssesPass, scheme.names)


def plan(scheme: Context, call: Call) -> tuple[Problem, str]:
    """The problem of a device, or of a pair in its ring, and what the device sends, in words."""
    inner, problem, _, (_, loop) = plan_pass(scheme, call)
    if isinstance(scheme, AllToAll):
        return inner, _describe_all_to_all(scheme, inner, _device_count(scheme))
    return inner, _describe_ring(scheme, loop, problem)


def _describe_all_to_all(scheme: Context, problem: Problem, devices: int) -> str:
    """What an exchange of rows for heads sends, in words. The problem is that of a device."""
    p, size = problem, np.dtype(problem.dtype).itemsize
    sent = lambda numbers, size: p.batch * numbers * size * (devices - 1) // devices
    rows = p.queries * p.heads + p.keys * p.kv_heads
    qkvo = sent(rows * (p.head_size + p.value_size), size)
    statistics = sent(2 * p.queries * p.heads, np.dtype(checks.sums(p.dtype)).itemsize)
    sends = (
        f"each of {devices} devices sends {_bytes(qkvo)} of Q, K, V and O and at most "
        f"{_bytes(statistics)} of statistics"
    )
    return f"{scheme}: {sends}, in one step; the backward as much again"


def _bytes(n: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.4g} {unit}"
        n /= 1024
    return f"{n:.4g} GiB"
