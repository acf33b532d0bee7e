"""A sequence that lies on several devices gives what it gives on one, and of keys and values only
parts travel."""

import contextlib
import functools
import re

import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import MASKS, RULES, Sizes, arguments, bias, dense_mask, normal, qkv
from check import TOLERANCE, close, cotangents, equal, value_and_gradients
from decoding import needs_interpreter
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, needs_devices, put
from selection import whole_but

from pallas_flash import explain, flash_attention, masks, scores
from pallas_flash.context_parallel import AllToAll, Ring, Zigzag, unzigzag, zigzag
from pallas_flash.devices import ring

pytestmark = [
    pytest.mark.usefixtures("small_tiles"),
    needs_devices,
]
Z = Sizes(B=2, T=40, S=56, N=4, K=4, H=8, Hv=4)
ROWS = P("data", "context")
FLOATS = "query", "key", "value", "bias", "sinks", "table"
SCHEMES = {"ring": Ring("context"), "zigzag": Zigzag("context"), "all to all": AllToAll("context")}


def mesh(kinds=(AxisType.Explicit, AxisType.Explicit)):
    return jax.make_mesh((2, 4), ("data", "context"), axis_types=kinds)


def spread(*x, spec=ROWS):
    return put(mesh(), spec, *x)


def in_order(context, x, axes, order=zigzag):
    """x in the order of the context along some axes, or with `unzigzag` back."""
    for axis in axes if isinstance(context, Zigzag) else ():
        x = order(x, 4, axis) if x.shape[axis] > 1 else x
    return x


def axes_of(name, x):
    """The axes of an argument that lie along the sequence."""
    dense = tuple(axis for axis in (-2, -1) if np.ndim(x) >= -axis)
    return dict(query=(1,), key=(1,), value=(1,), bias=dense, mask=dense).get(
        name, (-1,) if name.endswith("_ids") else ()
    )


def run(call, static, cotangents, m=None, context=None):
    """o, lse and the gradients of all floats, of one device or of those of a mesh."""
    to = lambda name, x: in_order(context, x, axes_of(name, x)) if hasattr(x, "shape") else x
    call = {name: to(name, x) for name, x in call.items()}
    cotangents = tuple(in_order(context, x, (1,)) for x in cotangents)
    if m is not None:
        at = lambda name: NamedSharding(m, ROWS if name in ("query", "key", "value") else P())
        call = {name: jax.device_put(x, at(name)) for name, x in call.items()}
        cotangents = put(m, ROWS, *cotangents)
    floats = {name: call.pop(name) for name in FLOATS if name in call}

    def outputs_and_gradients(floats, rest, cotangents):
        options = dict(**rest, **static, context=context, return_residual=True)
        outs, vjp = jax.vjp(lambda floats: flash_attention(**scored(floats), **options), floats)
        return outs, vjp(cotangents)[0]

    # or what hides all from all were on one device
    with jax.set_mesh(m) if m is not None else contextlib.nullcontext():
        found = jax.jit(outputs_and_gradients)(floats, call, cotangents)
    outs, gradients = jax.tree.map(np.asarray, found)
    back = lambda x, axes: in_order(context, x, axes, unzigzag)
    gradients = {name: back(x, axes_of(name, x)) for name, x in gradients.items()}
    return [back(x, (1,)) for x in outs], gradients


def scored(of):
    """The floats with a score_mod in place of the table [N, 7] that it reads."""
    of = dict(of)
    if (table := of.pop("table", None)) is not None:
        of["score_mod"] = lambda s, b, h, q, k: (
            jnp.tanh(s) * table[h, (q - k) % 7] + 0.1 * b * jnp.abs(q - k)
        )
    return of


def check(context, case, implementation, z=Z):
    """As the oracle says, or where that knows nothing of a feature, one device."""
    rng = np.random.default_rng(3)
    q, k, v = qkv(rng, z)
    case, cotangents_ = case(rng, z), cotangents(rng, q, v)
    kw = arguments(case) | dict(query=q, key=k, value=v)
    call = {name: x for name, x in kw.items() if hasattr(x, "shape") or name == "mask"}
    static = {name: x for name, x in kw.items() if name not in call}
    static["implementation"] = implementation
    outs, gradients = run(call, static, cotangents_, mesh(), context)
    if "dropout_rate" in case or "table" in case:
        expected, wanted = run(call, static, cotangents_)
    else:
        *expected, wanted = oracle.attention(q, k, v, *cotangents_, **case)
        wanted = dict(zip(FLOATS, wanted, strict=False))
    equal(outs, list(expected))
    for name, gradient in gradients.items():
        close(gradient, wanted[name], 1e-5, name)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("mask", whole_but(MASKS, "causal", "window_right", "everything"))
def test_a_sequence_on_several_devices_gives_what_it_gives_on_one(mask, scheme):
    check(SCHEMES[scheme], MASKS[mask], "blockwise")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rule", whole_but(RULES, "by batch, with lengths"))
def test_a_rule_of_positions_is_asked_for_those_of_the_whole_sequence(rule, scheme):
    function, more = RULES[rule]
    check(SCHEMES[scheme], lambda rng, z: dict(rule=function, **more), "blockwise")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_block_mask_of_all_is_asked_as_its_rule(scheme):
    rule = masks.MaskMod(lambda b, h, q, k: (q - k) % 3 != 1)
    q, k, v = qkv(np.random.default_rng(0), Z)
    attend = lambda q, k, v, **kw: flash_attention(q, k, v, implementation="blockwise", **kw)
    block_mask = masks.create_block_mask(rule, Z.T, Z.S, block=16)
    placed = spread(*(in_order(SCHEMES[scheme], x, (1,)) for x in (q, k, v)))
    mapped = attend(*placed, mask=block_mask, context=SCHEMES[scheme])
    back = in_order(SCHEMES[scheme], np.asarray(mapped), (1,), unzigzag)
    close(back, attend(q, k, v, mask=rule), 1e-5)


FEATURES = {
    "a bias": lambda rng, z: dict(is_causal=True, bias=bias(rng, "BNTS", z)),
    "a bias of the keys, and sinks": lambda rng, z: dict(
        bias=bias(rng, "1N1S", z), sinks=np.append(np.arange(z.N - 1), np.inf).astype(np.float32)
    ),
    "a bias of the queries, and a mask": lambda rng, z: dict(
        bias=bias(rng, "11T1", z), mask=dense_mask(rng, "BNTS", z)
    ),
    "a mask of the keys": lambda rng, z: dict(mask=dense_mask(rng, "B11S", z)),
    "a score_mod over sequences": lambda rng, z: dict(
        table=rng.normal(size=(z.N, 7)).astype(np.float32), **MASKS["varlen"](rng, z)
    ),
    "dropout": lambda rng, z: dict(is_causal=True, dropout_rate=0.4, dropout_rng=jax.random.key(5)),
}


# dropout and all else: test_features.py
@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("feature", [*FEATURES][:-1])
def test_biases_masks_and_rules_are_the_same_on_several_devices(feature, scheme):
    check(SCHEMES[scheme], FEATURES[feature], "blockwise")


@pytest.mark.parametrize("scheme", ["ring", "zigzag"])
@pytest.mark.parametrize(
    "feature",
    whole_but(["a bias of the keys, and sinks", "dropout"], "a bias of the keys, and sinks"),
)
def test_some_heads_go_around_before_the_others(feature, scheme, monkeypatch):
    monkeypatch.setattr(ring, "ROWS", 8)
    z = Z._replace(N=8, K=2) if feature != "dropout" else Z._replace(T=256, S=256, N=8, K=2)
    q, k = spread(*(np.ones((z.B, z.T, n, z.H)) for n in (z.N, z.K)))
    pair = explain(q, k, k, context=SCHEMES[scheme]).problem
    assert pair.kv_heads == 1 and pair.heads < z.N // z.K
    check(SCHEMES[scheme], FEATURES[feature], "blockwise", z)


@pytest.mark.parametrize("scheme", whole_but(SCHEMES, "all to all"))
def test_beyond_its_lengths_all_may_be_nan_where_there_are_sinks(scheme, rng):
    z, stop = Z._replace(S=Z.T), np.array([7, 31], np.int32)
    inside = np.arange(z.T) < stop[:, None]
    q, k, v, do = (normal(rng, z.B, z.T, z.N, z.H) for _ in range(4))
    dlse = rng.normal(size=do.shape[:3]).astype(np.float32)

    def call(fill):
        filled = lambda x: np.where(
            inside.reshape(*inside.shape, *[1] * (x.ndim - 2)), x, np.float32(fill)
        )
        call = dict(query=filled(q), key=filled(k), value=filled(v), sinks=sinks)
        call |= dict(query_seq_lengths=stop, key_value_seq_lengths=stop)
        return call, dict(implementation="blockwise"), (filled(do), filled(dlse))

    sinks = np.arange(z.N, dtype=np.float32)
    found, expected = run(*call(np.nan), mesh(), SCHEMES[scheme]), run(*call(0.0))
    equal(found, expected)


# ---- inside of a shard_map, and under jit


attend = functools.partial(flash_attention, is_causal=True, implementation="blockwise")


@pytest.mark.parametrize(
    "kinds", [(AxisType.Explicit, AxisType.Auto), (AxisType.Auto, AxisType.Explicit)], ids=str
)
def test_batch_and_rows_may_lie_on_axes_of_different_kinds(kinds):
    x = qkv(np.random.default_rng(0), Z)
    placed = put(mesh(kinds), ROWS, *x)
    along = dict(context=Ring("context", batch="data"))
    assert explain(*placed, **along).problem.batch == 1
    found = value_and_gradients(functools.partial(attend, **along))(*placed)
    equal(found, value_and_gradients(attend)(*x))


def by_rows(f, **kw):
    """f in a shard_map over the axis of the rows alone."""
    along = P(None, "context")
    return jax.shard_map(
        f, in_specs=(along, along, along), out_specs=along, axis_names={"context"}, **kw
    )


@pytest.mark.parametrize("scheme", whole_but(["ring", "all to all"], "ring"))
def test_a_shard_map_over_the_rows_leaves_other_axes_explicit(scheme):
    x, context = qkv(np.random.default_rng(0), Z), SCHEMES[scheme]
    with jax.set_mesh(mesh()):
        placed = spread(*x)
        unchecked = by_rows(functools.partial(attend, context=context), check_vma=False)
        found = value_and_gradients(unchecked)(*placed)
        checked = by_rows(functools.partial(attend, context=context))
        with pytest.raises(
            NotImplementedError, match="no gradient of a shard_map inside of one that checks"
        ):
            value_and_gradients(checked)(*placed)
        close(jax.jit(checked)(*placed), jax.jit(unchecked)(*placed), 1e-6)
    equal(found, value_and_gradients(attend)(*x))


def test_two_axes_of_the_mesh_are_one_ring():
    x = qkv(np.random.default_rng(0), Z)
    f = jax.jit(functools.partial(attend, query_offset=5))
    close(f(*spread(*x, spec=P(None, ("data", "context")))), f(*x), 1e-5)


def test_keys_travel_and_nothing_is_gathered():
    sharding = NamedSharding(make_mesh(context=8), P(None, "context"))
    x = jax.ShapeDtypeStruct((1, 64, 1, 64), jnp.float32, sharding=sharding)
    for kw in ({}, dict(context=Zigzag("context"), is_causal=False)):
        gradient = jax.grad(lambda *x: jnp.sum(attend(*x, **kw)), argnums=(0, 1, 2))
        text = jax.jit(gradient).lower(x, x, x).compile().as_text()
        assert "collective-permute" in text
        assert not re.findall(r" = .* (all-gather|all-to-all)", text)


@pytest.mark.gpu
@pytest.mark.whole
@needs_interpreter
@pytest.mark.parametrize("more", ["nothing more", "alibi", "a mask and a bias"])
def test_the_kernels_for_hopper_go_around_too(rng, more):
    z = Sizes(B=1, T=128, S=128, N=1, K=1, H=64, Hv=64)
    z = z._replace(N=2, K=2) if more == "alibi" else z
    q, k, v = (jnp.asarray(x) for x in qkv(rng, z, "float16"))
    slopes, bias = np.float32([0.05, 0.3]), np.float32(rng.normal(size=(128, 128)))
    mask = rng.random((128, 128)) < 0.7

    def gradients(q, k, v, name):
        def attend(q, k, v, slopes, bias):
            call = dict(bias=bias, mask=mask) if more == "a mask and a bias" else {}
            call |= dict(score_mod=scores.Alibi(slopes)) if more == "alibi" else {}
            call |= dict(deterministic=more != "nothing more")
            return flash_attention(q, k, v, is_causal=True, implementation=name, **call)

        o, vjp = jax.vjp(attend, q, k, v, slopes, bias)
        return o, *vjp(jnp.sin(o))

    two = jax.make_mesh(
        (2,), ("context",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2]
    )
    there = jax.device_put((q, k, v), NamedSharding(two, P(None, "context")))
    with gpu_interpreter.hopper_kernels(detect_races=True) as races:
        found = jax.jit(gradients, static_argnums=3)(*there, "hopper")
        jax.block_until_ready(found)
    assert not races.found
    equal(found, gradients(q, k, v, "reference"), TOLERANCE["float16"])
