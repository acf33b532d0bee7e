"""Lists of keys: what brute force says, by a table and by each walk over them; work and memory; and
under transformations."""

import functools
import operator
import re

import check
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import GATHERED, TABLES, Sizes, bias, lists, normal, qkv
from check import program, value_and_gradients
from drawn_masks import Drawn
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, needs_devices, put
from selection import whole_but
from walks import EVERY_WALK, walking

from pallas_flash import explain, flash_attention, masks
from pallas_flash.masks.resolution import with_table
from pallas_flash.masks.resolved_mask import ResolvedLists, ResolvedMask
from pallas_flash.tiled import blockwise
from pallas_flash.tiled.lists.tuning import DENSE

pytestmark = pytest.mark.usefixtures("small_tiles")
Z = Sizes(B=2, T=19, S=37, N=4, K=2, H=5, Hv=3)
EACH = {**TABLES, **GATHERED}
equal = functools.partial(check.equal, tolerance=5e-6)


@pytest.fixture(params=[*EVERY_WALK, "reference"])
def way(request, monkeypatch):
    """The implementation of a walk, or the reference."""
    if request.param == "reference":
        return "reference"
    return walking(monkeypatch, request.param)


# ---- what lists show ----

FAST = "lists, documents, a prefix", "lists of keys, causal", "lists of 32 keys, a rule"


@pytest.mark.parametrize("name", whole_but(EACH, *FAST))
def test_each_walk_gives_the_oracles_output_and_gradients(name, way, rng):
    z = Sizes()
    sinks = dict(sinks=normal(rng, z.N)) if "causal" in name else {}
    check.check(rng, *qkv(rng, z), way, **EACH[name](rng, z), **sinks)


def test_lists_joined_by_and_show_the_keys_that_all_of_them_name(way, rng):
    several = (3, 2, 1, 20), (3, 2, Z.K, 30, 1), (3, 2, Z.N, 25), (16, 8, 1, 3)
    named = [lists(rng, Z, *sizes) for sizes in several]
    seen = np.logical_and.reduce([oracle.listed(*x, Z.B, Z.N, Z.T, Z.S) for x in named])
    mask = functools.reduce(operator.and_, [masks.KeyLists(*x) for x in named])
    drawn = Drawn(mask, lambda b, h, i, p, j: seen[b, h, i, j])
    check.check(rng, *qkv(rng, Z), way, drawn=drawn)


def test_a_query_whose_list_names_nothing_gives_zero_and_has_no_gradient(way, rng):
    indices, *sizes = lists(rng, Z, 1, 1, n=4)
    indices[:, ::2] = -1
    check.check(rng, *qkv(rng, Z), way, lists=(indices, *sizes))


def curved(table):
    """A score_mod whose logarithm is no number where the key comes later."""
    return lambda s, b, h, i, j: (
        jnp.sin(s * table[h, 0]) + table[h, 1 + abs(i - j) % 3] - 0.1 * jnp.log(i - j + 1.0 + b)
    )


LENGTHS = dict(
    query_seq_lengths=np.array([19, 7], np.int32), key_value_seq_lengths=np.array([20, 37])
)
BESIDE = {  # floats, which are differentiated, and options
    "dropout, sinks, a soft cap": lambda rng: (
        dict(sinks=normal(rng, Z.N)),
        dict(logits_soft_cap=2.0, dropout_rate=0.3, dropout_rng=jax.random.key(1)),
    ),
    "a bias by pair, a score_mod, an offset": lambda rng: (
        dict(bias=bias(rng, "BNTS", Z), table=normal(rng, Z.N, 4)),
        dict(is_causal=True, query_offset=np.array([9, 20], np.int32)),
    ),
    "a bias by key, lengths, the largest logits": lambda rng: (
        dict(bias=bias(rng, "1N1S", Z)),
        dict(return_max_logits=True, **LENGTHS),
    ),
    "values that are keys, ids, a window": lambda rng: (
        {},
        dict(value=None, value_size=2, local_window_size=(12, 9))
        | dict(query_segment_ids=rng.integers(0, 2, (Z.B, Z.T)))
        | dict(key_value_segment_ids=rng.integers(0, 2, (Z.B, Z.S))),
    ),
}
SHAPES = {"keys": (1, 1, Z.K, 14), "blocks": (8, 2, Z.N, 3), "blocks of 64 pairs": (16, 4, 1, 2)}


def everything(implementation, options, floats, along):
    """All outputs, gradients, and tangents along `along`."""

    def attend(floats):
        floats = dict(floats)
        more = {} if (table := floats.pop("table", None)) is None else dict(score_mod=curved(table))
        options_ = dict(options, implementation=implementation, return_residual=True)
        outputs = flash_attention(**floats, **options_, **more)
        return tuple(jnp.where(x == -jnp.inf, 0, x) for x in outputs)

    loss = lambda floats: sum(jnp.sum(jnp.sin(x)) for x in attend(floats)[:2])
    tangents = jax.jvp(lambda x: attend(x)[:2], (floats,), (along,))[1]
    return attend(floats), jax.grad(loss)(floats), tangents


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("beside", BESIDE)
def test_in_float64_a_call_is_that_of_the_dense_mask_to_rounding(beside, shape, way, rng):
    block, query_block, L, n = SHAPES[shape]
    named = lists(rng, Z, block, query_block, L, n)
    floats, options = BESIDE[beside](rng)
    floats = dict(zip(("query", "key", "value"), qkv(rng, Z), strict=True)) | floats
    if "value" in options:
        del floats["value"]
    with jax.enable_x64(True):
        floats, along = (
            {name: np.float64(x) + 0.1 * i for name, x in floats.items()} for i in range(2)
        )
        run = lambda name, mask: jax.jit(functools.partial(everything, name, options | mask))
        found = run(way, dict(mask=masks.KeyLists(*named)))(floats, along)
        dense = dict(mask=oracle.listed(*named, Z.B, Z.N, Z.T, Z.S))
        check.equal(found, run("reference", dense)(floats, along), 1e-12)


@pytest.mark.parametrize("walk", EVERY_WALK)
def test_nan_in_keys_that_no_list_names_and_in_padding_changes_no_bit(walk, monkeypatch, rng):
    implementation, lengths = walking(monkeypatch, walk), np.array([Z.T, 11], np.int32)
    # those that an entry of -1 may stand for are named by none: the first and the last
    indices = 2 * rng.integers(1, Z.S // 2, (Z.B, Z.T, Z.K, 6)).astype(np.int32)
    indices[rng.random(indices.shape) < 0.3] = -1
    indices[..., 0] = Z.S
    named = np.isin(np.arange(Z.S), indices)
    options = dict(query_seq_lengths=lengths, implementation=implementation)

    @jax.jit
    def run(q, k, v, do):
        attend = lambda *x: flash_attention(*x, mask=masks.KeyLists(indices), **options)
        o, pull = jax.vjp(attend, q, k, v)
        return o, pull(do), jax.jvp(attend, (q, k, v), (q, k, v))[1]

    q, k, v = qkv(rng, Z)
    do = normal(rng, *q.shape[:3], Z.Hv)
    clean = run(q, k, v, do)
    k[:, ~named], v[:, ~named], q[1, 11:], do[1, 11:] = np.nan, np.inf, np.nan, np.nan
    jax.tree.map(np.testing.assert_array_equal, clean, run(q, k, v, do))


# ---- work and memory ----


@pytest.mark.parametrize(
    "T, N, K, block, query_block, n, walk",
    [
        (4096, 16, 1, 64, 1, 16, "by key"),
        (1024, 16, 1, 64, 1, 16, "dense"),  # nearly all that a causal mask shows
        (4096, 4, 4, 512, 1, 3, "by key"),
        (4096, 4, 4, 64, 64, 6, "by query"),
        (4096, 8, 1, 1, 1, 384, "by query"),
        (4096, 8, 1, 1, 1, 2048, "dense"),
    ],
)
def test_one_cpu_goes_over_lists_by_the_walk_that_costs_least(
    T, N, K, block, query_block, n, walk, monkeypatch
):
    monkeypatch.undo()  # small_tiles
    monkeypatch.setattr(blockwise.tuning, "_is_one_device", lambda: True)
    array = lambda *shape: jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    indices = jax.ShapeDtypeStruct((1, T // query_block, K, n), jnp.int32)
    mask = masks.KeyLists(indices, block, query_block) & masks.Causal()
    key = array(T, K, 64)
    found = explain(array(T, N, 64), key, key, mask=mask, implementation="blockwise")
    assert found.tiles.lists.walk == walk
    how = {"by key": "a block after the other", "by query": "gathered", "dense": "as a mask"}
    assert how[walk] in str(found.tiles) and f"({walk}: estimated at 0." in str(found.tiles)


LONG = 8192


def attend_by(indices, block, query_block, implementation):
    return lambda q, k, v: flash_attention(
        q, k, v, mask=masks.KeyLists(indices, block, query_block), implementation=implementation
    )


@pytest.mark.parametrize("query_block", [1, 64])
@pytest.mark.parametrize("implementation", ["blockwise", "triton"])
def test_no_array_of_a_call_by_lists_of_blocks_has_as_many_elements_as_there_are_pairs(
    implementation, query_block, monkeypatch
):
    monkeypatch.undo()  # small_tiles
    monkeypatch.setattr(blockwise.tuning, "_is_one_device", lambda: True)
    x = jax.ShapeDtypeStruct((1, LONG, 2, 64), jnp.float32)
    indices = jax.ShapeDtypeStruct((1, LONG // query_block, 2, 8), jnp.int32)

    def gradients(q, k, v, indices):
        attend = attend_by(indices, 64, query_block, implementation)
        return jax.grad(lambda *x: jnp.sum(attend(*x)), (0, 1, 2))(q, k, v)

    assert check.largest_array(program(gradients, x, x, x, indices)) < LONG**2 / 16


@pytest.mark.usefixtures("optimized")
def test_a_table_of_lists_that_a_program_closes_over_is_made_when_it_runs(rng):
    """XLA would make it while it compiles, for seconds."""
    mask = ResolvedMask(
        512, lists=ResolvedLists.from_indices(np.int32([[[[3, 1]] * 8]]), 8, 64, 512)
    )
    text = (
        jax.jit(lambda: with_table(mask, 1, 512).mask_mod.block_types).lower().compile().as_text()
    )
    assert " while(" in text or " scatter(" in text


@pytest.mark.usefixtures("optimized")
def test_lists_that_a_program_closes_over_are_sorted_when_it_runs(monkeypatch, rng):
    """XLA would sort constants while it compiles, for seconds."""
    indices = np.int32(rng.integers(-1, 512, (1, 1, 512, 64)))
    of = lambda x: ResolvedLists.from_indices(x, 1, 1, 512)
    for run in (lambda: of(indices).sorted(), lambda: of(indices).within(of(indices[..., :32]))):
        assert " sort(" in jax.jit(run).lower().compile().as_text()
    walking(monkeypatch, "by key")
    q, attend = jnp.ones((1, 512, 1, 8)), attend_by(np.swapaxes(indices, 1, 2), 1, 1, "blockwise")
    assert " sort(" in jax.jit(lambda q: attend(q, q, q)).lower(q).compile().as_text()


# ---- elsewhere ----

BY = {  # walks over lists of keys and of blocks, a table of blocks, and dense attention
    "by query": (1, 1, "blockwise"),
    "by key": (16, 1, "blockwise"),
    DENSE: (3, 2, "blockwise"),
    "by table": (8, 8, "triton"),
    "reference": (1, 1, "reference"),
}


@pytest.fixture(params=whole_but(BY, "by query", "by key"))
def by(request, monkeypatch):
    """The block, query_block and implementation of a row of BY."""
    if request.param in EVERY_WALK:
        walking(monkeypatch, request.param)
    return BY[request.param]


def gradients_by(by):
    block, query_block, implementation = by

    def run(q, k, v, indices):
        options = dict(is_causal=True, query_offset=9, implementation=implementation)
        mask = masks.KeyLists(indices, block, query_block)
        attend = functools.partial(flash_attention, mask=mask, return_residual=True, **options)
        return value_and_gradients(attend)(q, k, v)

    return run


def indices_of(rng, by, L, n=5, **sizes):
    return lists(rng, Z._replace(**sizes), *by[:2], L, n)[0]


VMAPS = [(0, 0, 0, 0), (None, None, None, 3), (0, None, 0, None), (1, 0, None, 1)]


@pytest.mark.parametrize(
    "axes",
    [axes if axes in VMAPS[1:3] else pytest.param(axes, marks=pytest.mark.whole) for axes in VMAPS],
    ids=str,
)
def test_vmap_goes_over_lists_queries_and_keys_each_or_shares_them(axes, by, rng):
    x = *qkv(rng, Z), indices_of(rng, by, Z.K)
    moved = lambda x, axis: x if axis is None else np.stack([x, x[::-1]], axis)
    x = [moved(a, axis) for a, axis in zip(x, axes, strict=True)]
    check.vmap_is_a_loop(gradients_by(by), axes, *x)


DATA, MODEL = P("data"), P(None, None, "model")
BOTH = P("data", None, "model")
PLACES = {  # L, and the places of the query, of keys and values, and of the indices
    "rows, and a list for each head": ("N", BOTH, BOTH, BOTH),
    "rows, and a list for each key head": ("K", BOTH, BOTH, BOTH),
    "rows, and one list": ("1", BOTH, BOTH, DATA),
    "heads, and lists of all rows": ("N", MODEL, MODEL, MODEL),
    "query heads of one key head": ("1", BOTH, DATA, DATA),
    "query heads of one key head, with lists of their own": ("N", BOTH, DATA, BOTH),
    "the indices on every device": ("K", BOTH, BOTH, P()),
}


@needs_devices
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", whole_but(PLACES, *list(PLACES)[::2]))
def test_on_a_mesh_lists_lie_where_their_rows_and_heads_do_and_nothing_moves(name, kind, by, rng):
    L, *places, of_lists = PLACES[name]
    z = Z._replace(B=4, K=1 if "one key head" in name else 2)
    indices = indices_of(rng, by, dict(N=z.N, K=z.K).get(L, 1), B=1 if "all rows" in name else 4)
    x, mesh = (*qkv(rng, z), indices), make_mesh(kind, data=2, model=2)
    specs = places[0], places[1], places[1], of_lists
    spread = [put(mesh, spec, a)[0] for a, spec in zip(x, specs, strict=True)]
    run = jax.jit(gradients_by(by))
    equal(run(*spread), run(*x))
    text = run.lower(*spread).compile().as_text()
    assert not re.findall(r"= \S+ (all-gather|all-to-all|collective-permute)", text)


@needs_devices
def test_where_key_heads_are_fewer_than_devices_each_has_the_lists_of_its_own(by, rng):
    x, mesh = (*qkv(rng, Z), indices_of(rng, by, Z.K)), make_mesh(AxisType.Auto, model=4)
    spread = [put(mesh, spec, a)[0] for a, spec in zip(x, (MODEL, P(), P(), P()), strict=True)]
    run = jax.jit(gradients_by(by))
    equal(run(*spread), run(*x))


@needs_devices
@pytest.mark.parametrize("checked", [True, False])
def test_in_a_shard_map_each_device_has_the_lists_of_its_rows(checked, by, rng):
    if checked and by == BY["by table"]:
        pytest.skip("jax's interpreter of Triton kernels says not what varies")
    x = *qkv(rng, Z._replace(B=4)), indices_of(rng, by, Z.K, B=4)
    mesh = make_mesh(AxisType.Auto, data=4)
    options = dict(mesh=mesh, in_specs=DATA, out_specs=DATA, check_vma=checked)
    run = gradients_by(by)
    equal(jax.jit(jax.shard_map(run, **options))(*x), jax.jit(run)(*x))


def test_rematted_layers_of_a_scan_have_lists_each(by, rng):
    x, indices = normal(rng, 2, 19, 4, 8), [indices_of(rng, by, 4, S=19) for _ in range(3)]
    block, query_block, implementation = by

    def layer(x, indices):
        mask = masks.KeyLists(indices, block, query_block)
        return x + flash_attention(x, x, x, mask=mask, implementation=implementation), None

    rematted = lambda x, indices: jax.lax.scan(jax.checkpoint(layer), x, indices)[0]
    loop = lambda x, indices: functools.reduce(lambda x, i: layer(x, i)[0], indices, x)
    found, expected = (
        value_and_gradients(functools.partial(f, indices=i), 0)(x)
        for f, i in ((rematted, jnp.stack(indices)), (loop, indices))
    )
    equal(found, expected)


def test_lists_are_a_pytree_of_their_indices_and_compare_and_hash_as_masks_do(rng):
    indices = indices_of(rng, (8, 8), 1)
    mask = masks.KeyLists(indices, 8, 8)
    (leaf,), tree = jax.tree.flatten(mask)
    assert leaf is indices and jax.tree.unflatten(tree, [leaf]) == mask
    alike = masks.KeyLists(indices.copy(), block=8, query_block=8)
    assert mask == alike and hash(mask) == hash(alike)
    others = masks.KeyLists(indices, 8, 16), masks.KeyLists(indices + 1, 8, 8)
    assert all(mask != other for other in others) and mask & alike == alike & mask
    assert repr(mask) == f"KeyLists(int32{list(indices.shape)}, block=8, query_block=8)"


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_calls_with_other_lists_of_equal_shape_share_one_program_which_may_donate_them(rng):
    traced, x = [], qkv(rng, Z)

    @functools.partial(jax.jit, donate_argnums=3)
    def run(q, k, v, mask):
        traced.append(mask)
        return flash_attention(q, k, v, mask=mask, implementation="blockwise")

    for _ in range(2):
        indices = indices_of(rng, (1, 1), 1)
        found = run(*x, masks.KeyLists(jnp.asarray(indices)))
        seen = oracle.listed(indices, 1, 1, Z.B, Z.N, Z.T, Z.S)
        equal(found, flash_attention(*x, mask=seen, implementation="reference"))
    assert len(traced) == 1
