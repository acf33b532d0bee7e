"""On several devices each attends for its own batch rows and heads, and nothing is gathered."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Sizes, bias, normal, qkv
from check import equal, value_and_gradients
from decoding import B, H, N, ints, pool
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, needs_devices, put
from selection import whole_but

from pallas_flash import flash_attention, masks, paged_attention, paged_cache

pytestmark = [
    pytest.mark.usefixtures("small_tiles"),
    needs_devices,
]
Z = Sizes(B=4, T=19, S=23, N=4, K=2, H=8, Hv=8)
SPEC = P("data", None, "model", None)


def mesh():
    return make_mesh(data=2, model=2)


def place(spec, *arrays, on=None):
    return put(on or mesh(), spec, *arrays)


def assert_nothing_moves(f, *x):
    text = f.lower(*x).compile().as_text()
    assert not re.findall(r"= \S+ (all-gather|all-to-all|collective-permute)", text)


@pytest.mark.skipif(
    not hasattr(jax.sharding, "no_collectives"), reason="an older jax has no no_collectives"
)
@pytest.mark.parametrize("implementation", ["reference", "blockwise", "triton"])
def test_nothing_is_sent_but_for_the_sum_of_a_shared_biass_gradient(implementation, rng):
    x = *place(SPEC, *qkv(rng, Z)), *place(P(None, "model"), bias(rng, "1NTS", Z))
    attend = functools.partial(flash_attention, is_causal=True, implementation=implementation)

    def gradients(of, q, k, v, bias):
        rest = dict(bias=bias) if of == 3 else {}
        o, pull = jax.vjp(lambda *x: attend(*x, **rest), *(q, k, v, bias)[:of])
        return pull(o)

    with jax.sharding.no_collectives({"data", "model"}):
        jax.eval_shape(functools.partial(gradients, 3), *x)
        with pytest.raises(Exception, match="Collective across axis 'data' is forbidden"):
            jax.eval_shape(functools.partial(gradients, 4), *x)
    with jax.sharding.no_collectives({"model"}):
        jax.eval_shape(functools.partial(gradients, 4), *x)


def by_arrays(q, k, v, table, ids, implementation="blockwise"):
    """A mask and a score that read arrays of their own."""
    mask = masks.MaskMod(lambda b, h, i, j: ids[b, i] != ids[b, j])
    bent = lambda s, b, h, i, j: s + table[h, (i - j) % 5] * ids[b, j]
    return flash_attention(q, k, v, mask=mask, score_mod=bent, implementation=implementation)


def test_a_checked_shard_map_beside_explicit_axes_says_that_no_rule_reads_what_varies(rng):
    q, k, v = qkv(rng, Z._replace(S=Z.T))
    x, rows = (q, k, v, np.ones((Z.N, 5), np.float32), np.zeros((Z.B, Z.T), np.int32)), P("data")
    specs = rows, rows, rows, P(), rows
    along = dict(in_specs=specs, out_specs=rows, axis_names={"data"})
    with jax.set_mesh(mesh()):
        x = [place(spec, a)[0] for a, spec in zip(x, specs, strict=True)]
        with pytest.raises(
            NotImplementedError,
            match="give that shard_map check_vma=False, or name all axes of the mesh in it",
        ):
            jax.eval_shape(jax.shard_map(by_arrays, **along), *x)
        unchecked = jax.shard_map(by_arrays, check_vma=False, **along)
        assert jax.eval_shape(unchecked, *x).shape == (*q.shape[:3], Z.Hv)


def test_key_heads_that_do_not_divide_have_a_clear_error(rng):
    q, k, v = qkv(rng, Z._replace(N=12, K=3))
    (q,) = place(SPEC, q)
    with pytest.raises(
        ValueError, match="the 3 key/value heads must be a multiple of the 2 devices"
    ):
        flash_attention(q, k, v)


SMALL = Sizes(B=4, T=5, S=8, N=4, K=2, H=8, Hv=8)
AS = {  # the arrays' places on a mesh of two by two; None: not on the mesh
    "all of them on every device": dict(query=P(), key=P(), value=P(), bias=P(), lengths=P()),
    "keys by batch, the query on every device": dict(query=P(), key=P("data"), value=P("data")),
    "the query by batch, keys by head": dict(
        query=P("data"), key=P(None, None, "model"), value=P(None, None, "model")
    ),
    "the query and the keys by the same axis": dict(
        query=P("data"), key=P(None, None, "data"), bias=P(None, "data")
    ),
    "the query by the axis of the keys' rows": dict(
        query=P(None, None, "data"), key=P(None, "data"), value=P(None, "data")
    ),
    "nothing but the bias": dict(bias=P(None, "model")),
    "nothing but the lengths": dict(lengths=P("data")),
}


@pytest.mark.parametrize("places", AS)
def test_arrays_may_be_anywhere_on_an_explicit_mesh(places):
    rng = np.random.default_rng(0)
    arrays = dict(zip(("query", "key", "value"), qkv(rng, SMALL), strict=True))
    arrays |= dict(bias=bias(rng, "1NTS", SMALL), lengths=np.array([3, 8, 0, 5], np.int32))
    options = dict(is_causal=True, implementation="reference", return_residual=True)
    attend = lambda q, k, v, bias, lengths: flash_attention(
        q, k, v, bias, key_value_seq_lengths=lengths, **options
    )
    run = value_and_gradients(attend, (0, 1, 2, 3))
    placed = {name: place(spec, arrays[name])[0] for name, spec in AS[places].items()}
    equal(run(*(arrays | placed).values()), run(*arrays.values()))


@pytest.mark.whole("reference", "triton")
def test_a_mesh_of_one_device_and_one_that_was_set_change_nothing(implementation, rng):
    q, k, v = qkv(rng, SMALL)
    attend = value_and_gradients(functools.partial(flash_attention, implementation=implementation))
    one = make_mesh(data=1)
    expected = attend(q, k, v)
    equal(attend(*place(P(), q, k, v, on=one)), expected)
    with jax.set_mesh(mesh()):
        equal(attend(q, k, v), expected)


OVER = [
    (("data", "model"), "reference"),
    (("data",), "reference"),
    (("data",), "blockwise"),
    (("data",), "triton"),
]


@pytest.mark.parametrize("names, implementation", whole_but(OVER, OVER[0], OVER[2]))
def test_vmap_goes_over_an_axis_of_the_mesh(names, implementation, rng):
    m = make_mesh(**dict.fromkeys(names, 4 // len(names)))
    arrays = [x[:, None] for x in qkv(rng, SMALL)]
    f = functools.partial(flash_attention, is_causal=True, implementation=implementation)
    loss = value_and_gradients(jax.vmap(lambda *x: f(*x)))
    spread = loss(*place(P("data"), *arrays, on=m))
    equal(spread, loss(*arrays))
    assert jax.typeof(spread[1][0]).sharding.spec[0] == "data"


def test_a_call_outside_of_jit_is_compiled_once(rng):
    q, k, v = place(P("data"), *qkv(rng, SMALL))
    attend = lambda **kw: jax.block_until_ready(
        flash_attention(q, k, v, implementation="reference", **kw)
    )
    attend(is_causal=True)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event)
    )
    attend(is_causal=True)
    assert not [event for event in compiled if "compile" in event]
    attend(is_causal=True, scale=0.5)
    assert [event for event in compiled if "compile" in event]


class Pairs(masks.Mask):
    """A user's mask, that no pytree knows."""

    def interval(self, row, position):
        return position // 2 * 2, position // 2 * 2 + 2


def test_masks_of_every_kind_go_along(rng):
    q, k, v = qkv(rng, SMALL)
    window = masks.Window(np.array(2), None)
    attend = lambda *x, prefix: flash_attention(
        *x, mask=Pairs() & masks.PrefixLM(prefix) & window, implementation="reference"
    )
    prefix = np.array([1, 3, 0, 7], np.int32)
    spread = place(P("data"), q, k, v)
    equal(attend(*spread, prefix=prefix), attend(q, k, v, prefix=prefix))
    equal(attend(*spread, prefix=prefix.tolist()), attend(q, k, v, prefix=prefix))


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_rows_of_any_array_may_be_sharded_and_head_sizes_may_not(name, rng):
    call = dict(zip(("query", "key", "value"), qkv(rng, SMALL._replace(T=8, S=8)), strict=True))
    more = dict(is_causal=True, implementation="reference")
    attend = lambda x: flash_attention(**call | {name: x}, **more)
    spread = attend(*place(P(None, "data"), call[name]))
    equal(spread, attend(call[name]))
    assert jax.typeof(spread).sharding.spec[1] == "data"
    with pytest.raises(ValueError, match=f"{name} must not be sharded along its last axis"):
        attend(*place(P(None, None, None, "data"), call[name]))


@pytest.mark.parametrize(
    "more", [{}, dict(dropout_rate=0.1, dropout_rng=jax.random.key(0))], ids=["", "dropout"]
)
def test_what_is_no_query_is_told_as_without_a_mesh(more):
    (x,) = place(SPEC, jnp.ones((2, 8, 4, 8)))
    with pytest.raises(TypeError, match="query must be an array; got NoneType"):
        flash_attention(None, x, x, **more)
    with pytest.raises(ValueError, match=r"query must be \[.*3 axes or more; got \(4, 8\)"):
        flash_attention(jnp.ones((4, 8)), x, x, **more)


# ---- pages ----

# the places of the query, of the pages and of the rows' data on a mesh of three by two;
# implementation
PAGED = {
    "all of them on every device": (P(), P(), P(), "blockwise"),
    "the batch and the heads": (SPEC, P(None, None, "model"), P("data"), "blockwise"),
    "the batch and the heads, in 8 bits": (SPEC, P(None, None, "model"), P("data"), "blockwise"),
    "the batch and the heads, triton": (SPEC, P(None, None, "model"), P("data"), "triton"),
    "nothing but the pages' heads": (None, P(None, None, "model"), None, "blockwise"),
    "nothing but the rows' data": (None, None, P("data"), "blockwise"),
}


def paged_call(rng, stored=None):
    call, _ = pool(rng, 8, ints(5, 24, 13), 3, stored=stored)
    return call | dict(
        query=normal(rng, B, 3, N, H), query_seq_lengths=ints(3, 1, 2), sinks=normal(rng, N)
    )


@pytest.mark.parametrize("places", PAGED)
def test_pages_on_an_explicit_mesh_stay_where_they_are(places, rng):
    *specs, name = PAGED[places]
    call = paged_call(rng, "int8" if "8 bits" in places else None)
    of = {name: specs[1] for name in ("k_pages", "v_pages", "k_scales", "v_scales") if name in call}
    of |= dict(query=specs[0]) | dict.fromkeys(("page_table", "lengths"), specs[2])
    mesh = make_mesh(data=3, model=2)
    placed = {n: put(mesh, spec, call[n])[0] for n, spec in of.items() if spec is not None}
    slopes = jnp.asarray(normal(rng, B, N))
    options = dict(
        score_mod=lambda s, b, h, i, j: s + slopes[b, h] * (i - j),
        implementation=name,
        return_residual=True,
    )
    attend = jax.jit(lambda call: paged_attention(**call, **options))
    equal(attend(call | placed), attend(call))
    assert_nothing_moves(attend, call | placed)


def new_cache(pages):
    return paged_cache(4, 24, 2, 8, pages=pages, page=8, dtype="float32")


BY_HEAD = dict.fromkeys(("k_pages", "v_pages"), P(None, None, "model"))


def place_cache(cache, specs):
    arrays = {name: x for name, x in cache._asdict().items() if x is not None}
    return cache._replace(**{n: place(specs.get(n, P()), x)[0] for n, x in arrays.items()})


@pytest.mark.parametrize("name", ["blockwise", "triton"])
def test_ragged_tokens_on_an_explicit_mesh_are_spread_by_heads(name, rng):
    heads = P(None, "model")
    cache = new_cache(20)
    ends = np.array([0, 3, 4, 4, 9], np.int32)
    query, key, slopes = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((9, 4, 8), (9, 2, 8), (4, 4))
    )

    def step(query, key, cache):
        cache = cache.append(key, key, cu_seqlens=ends)
        mod = lambda s, b, h, i, j: s + slopes[b, h] * (i - j)
        more = dict(cu_seqlens_q=ends, score_mod=mod, implementation=name, return_residual=True)
        return cache.attend(query, **more), cache

    placed = place_cache(cache, BY_HEAD)
    (o, lse), spread = jax.jit(step)(*place(heads, query, key), placed)
    equal(((o, lse), spread), jax.jit(step)(query, key, cache))
    assert jax.typeof(o).sharding.spec[1] == "model"
    assert jax.typeof(spread.k_pages) == jax.typeof(placed.k_pages)


def test_a_cache_whose_table_lies_by_batch_reserves_appends_shares_and_releases(rng):
    cache = new_cache(9)
    new = normal(rng, 4, 9, 2, 8)
    placed = place_cache(cache, BY_HEAD | dict(page_table=P("data"), lengths=P("data")))

    def used(cache, new, count, rows):
        cache = cache.reserve(count).append(new, new, count).share(0, 3)
        return cache.append(new, new, count).release(rows).share(3, 1)

    arrays = new, np.array([9, 3, 8, 5], np.int32), np.array([True, False, True, False])
    expected = jax.jit(used)(cache, *arrays)
    for spec in P(), P("data"):
        spread = jax.jit(used)(placed, *place(spec, *arrays))
        equal(spread, expected)
        assert jax.tree.map(jax.typeof, spread) == jax.tree.map(jax.typeof, placed)


def test_on_an_explicit_mesh_a_full_cache_says_so_and_attends_with_nan(rng):
    cache = new_cache(7)
    places = BY_HEAD | dict.fromkeys(("page_table", "lengths", "lost", "appended"), P("data"))
    new, query = (jnp.asarray(normal(rng, 4, 9, heads, 8)) for heads in (2, 4))

    @jax.jit
    def step(cache, new, query):
        lacking, cache = cache.shortage(9), cache.append(new, new)
        return cache.attend(query, return_residual=True), lacking, cache.lost

    o, lacking, lost = expected = step(cache, new, query)
    assert lost.tolist() == [0, 0, 0, 1] and lacking.pages == 1 and jnp.isnan(o[0][3]).all()
    placed = place_cache(cache, places), *place(P("data", None, "model"), new, query)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-6), step(*placed), expected)
    with pytest.raises(ValueError, match="append lacks 1 page"):
        placed[0].append(*placed[1:2] * 2)


REFUSED = {
    "pages that lie on several devices": dict(k_pages=P("data")),
    "tokens that do": dict(query=P(None, "data")),
    "pages whose heads lie where the batch does": dict(
        query=P("data"), k_pages=P(None, None, "data")
    ),
    "rows that are not where the query's are": dict(query=P("data"), lengths=P("model")),
}


@pytest.mark.parametrize("places", REFUSED)
def test_where_pages_cannot_be_is_refused_in_words(places):
    shapes = dict(query=(4, 2, 4, 8), k_pages=(12, 8, 2, 8), v_pages=(12, 8, 2, 5))
    call = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    call |= dict(page_table=np.zeros((4, 3), int), lengths=np.full(4, 9))
    call |= {name: place(spec, call[name])[0] for name, spec in REFUSED[places].items()}
    with pytest.raises(
        ValueError,
        match=r"may be sharded as .* here: .* pages by heads alone; got .* jax\.reshard moves it",
    ):
        paged_attention(**call)
