"""Values that are the first columns of the keys (MLA): the same as a copy of these columns, in
every call and derivative."""

import functools

import decoding
import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import normal
from check import equal, value_and_gradients
from decoding import (
    MOSAIC,
    B,
    arrays,
    equal_the_oracle,
    ints,
    needs_interpreter,
    pool,
    seen,
    without_a_race,
)
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, needs_devices, put
from selection import whole_but

from pallas_flash import (
    context_parallel,
    explain,
    explain_paged,
    flash_attention,
    flash_attention_jvp,
    paged_attention,
    paged_cache,
)
from pallas_flash.accounting import GPUS
from pallas_flash.choose.selfcheck import comparison
from pallas_flash.jax_support import hardware
from pallas_flash.tiled import split_kv
from scripts.bench.gpu_code import as_if_on

pytestmark = pytest.mark.usefixtures("small_caches")
H, HV, N = 24, 16, 4
ALL = dict(return_residual=True, return_max_logits=True)
OPTIONS = dict(
    is_causal=True,
    query_offset=ints(50, 298, -2),
    key_value_seq_lengths=ints(53, 301, 0),
    logits_soft_cap=2.0,
    local_window_size=(99, 0),
    sinks=np.linspace(-1, 1, N, dtype=np.float32),
    score_mod=lambda s, b, h, i, j: s - 0.01 * (h + 1) * (i - j),
)
IMPLEMENTATIONS = "blockwise", "triton", "reference", "flash1", "standard"


def both(f, q, k):
    """f(q, k, value, value_size) of a value that is None, and of the copy."""
    return f(q, k, None, HV), f(q, k, k[..., :HV], None)


def attend(q, k, v, size, **options):
    return flash_attention(q, k, v, value_size=size, **ALL, **options)


def latents(rng, T, S=301, heads=N, dtype="float32"):
    return list(map(jnp.asarray, arrays(rng, T, S, dtype, H, heads=heads)[:2]))


@pytest.mark.whole("triton")
@pytest.mark.parametrize("T", [3, 40])
@pytest.mark.parametrize("implementation", whole_but(IMPLEMENTATIONS, "blockwise", "triton"))
def test_results_and_derivatives_are_those_of_the_copy(implementation, T, rng):
    options = OPTIONS if implementation in IMPLEMENTATIONS[:3] else {}

    def run(q, k, v, size):
        v_of = lambda k: v if v is None else k[..., :HV]
        of = lambda q, k: attend(q, k, v_of(k), size, implementation=implementation, **options)
        return value_and_gradients(of, (0, 1))(q, k)

    equal(*both(run, *latents(rng, T)), 1e-6)


def test_forward_mode_and_second_derivatives_are_those_of_the_copy(rng):
    q, k = latents(rng, 3)

    def along(q, k, v, size):
        of_v = () if v is None else (v,)
        primals = q, k, *(of_v or (None,))
        return flash_attention_jvp(primals, primals, value_size=size, **ALL)

    equal(*both(along, q, k), 1e-6)
    loss = lambda k, v_of, size: jnp.sum(jnp.sin(attend(q, k, v_of(k), size)[0]))
    second = lambda *of: jax.jvp(jax.grad(lambda k: loss(k, *of)), (k,), (k,))
    equal(second(lambda k: None, HV), second(lambda k: k[..., :HV], None), 1e-6)


@pytest.mark.parametrize("in_axes", [(0, 0), (0, None)])
def test_under_vmap_it_is_the_same(in_axes, rng):
    q, k = latents(rng, 2)
    k = k if in_axes[1] == 0 else k[0]
    of_one = lambda v_of, size: lambda q, k: attend(q, k, v_of(k), size)
    mapped = [
        jax.vmap(of_one(*of), in_axes)(q, k)
        for of in ((lambda k: None, HV), (lambda k: k[..., :HV], None))
    ]
    equal(*mapped, 1e-6)


@needs_devices
@pytest.mark.parametrize("kind", ["Explicit", "Auto", "shard_map", "Ring", "AllToAll"])
def test_on_a_mesh_it_is_the_same(kind, rng):
    q, k = (jnp.asarray(normal(rng, 2, n, heads, H)) for n, heads in ((256, 4), (256, 4)))
    q = q if kind in ("Ring", "AllToAll") else q[:, :2]
    expected = attend(q, k, None, HV)
    mesh = make_mesh(AxisType.Explicit if kind == "Explicit" else AxisType.Auto, x=2)
    of_rows = kind in ("Ring", "AllToAll")
    spec = P(None, "x") if of_rows else P("x")
    context = getattr(context_parallel, kind)("x") if of_rows else None
    run = lambda q, k: attend(q, k, None, HV, context=context)
    if kind not in ("Explicit", "Auto"):
        run = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)
    equal(jax.jit(run)(*put(mesh, spec, q, k)), expected)


PAGES = {"as they are": None, "in 8 bits": "int8"}


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("kind", PAGES)
@pytest.mark.parametrize("implementation", ["blockwise", "triton", "reference"])
def test_pages_of_keys_alone_equal_the_oracle(implementation, kind, rng):
    """NaN where nobody looks, an empty row, ragged tokens too."""
    stored = PAGES[kind]
    lengths, count = ints(29, 48, 0), ints(5, 2, 0)
    call, rows = pool(rng, 8, lengths, sizes=(H, HV), stored=stored, shared=3)
    keys = {name: x for name, x in call.items() if not name.startswith("v_")}
    q = normal(rng, B, 5, N, H)
    kw = dict(v_pages=None, value_size=HV, implementation=implementation, return_residual=True)
    found = jax.jit(functools.partial(paged_attention, **kw))(q, **keys, query_seq_lengths=count)
    equal_the_oracle(found, q, (rows[0], rows[0][..., :HV]), **seen(lengths, count))
    ragged = q[0, :5], ints(0, 4, 5, 5)
    kw |= dict(cu_seqlens_q=ragged[1])
    o, _ = paged_attention(ragged[0], **keys, **kw)
    expected, _ = paged_attention(
        ragged[0],
        **keys | dict(v_pages=keys["k_pages"][..., :HV]),
        **{name: x for name, x in kw.items() if name not in ("v_pages", "value_size")},
        **(dict(v_scales=keys["k_scales"]) if stored else {}),
    )
    equal(o, expected, 1e-6)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_cache_of_keys_alone_takes_tokens_without_values(dtype, rng):
    sizes = dict(batch=B, max_length=24, kv_heads=1, head_size=H, pages=9, page=8, dtype=dtype)
    cache = paged_cache(**sizes, values_are_keys=True)
    new, more, q = (
        jnp.asarray(normal(rng, B, n, heads, H)) for n, heads in ((9, 1), (3, 1), (1, N))
    )

    @jax.jit
    def step(cache, new, more, q):
        cache = cache.append(new, None, ints(9, 2, 5))
        cache = cache.append(more.reshape(-1, 1, H), None, cu_seqlens=ints(0, 3, 6, 9))
        return cache.attend(q, value_size=HV)

    keys = [jnp.concatenate([new[b, :n], more[b]]) for b, n in enumerate((9, 2, 5))]
    expected = [
        flash_attention(q[b : b + 1], k[None], None, value_size=HV)[0] for b, k in enumerate(keys)
    ]
    equal(step(cache, new, more, q), jnp.stack(expected), 1e-5 if dtype == "float32" else 3e-2)
    with pytest.raises(ValueError, match="value must be None to match the cache"):
        cache.append(new, new)
    with pytest.raises(TypeError, match="value must be an array"):
        paged_cache(**sizes).append(new, None)


# ---- by Mosaic ----

# head and value size, heads, page (None: contiguous), what pages are stored in, whether there are
# values beside the keys; in one split slots of shared memory are used again
BY_MOSAIC = {
    "MLA": (576, 512, 128, None, None, False),
    "MLA, pages": (576, 512, 16, 64, None, False),
    "MLA, small pages": (576, 512, 16, 8, None, False),
    "MLA, in 8 bits": (576, 512, 72, 16, "float8_e4m3fn", False),
    "MLA, pages of 64 in 8 bits": (576, 512, 16, 64, "int8", False),  # and float16
    "one warpgroup": (320, 256, 8, None, None, False),
    "one warpgroup, in 8 bits": (320, 256, 8, 64, "int8", False),
    "narrow": (80, 64, 8, None, None, False),
    "wide heads": (512, 512, 8, None, None, True),
    "wide values": (128, 512, 8, None, None, True),
    "heads of 320": (320, 320, 8, None, None, True),
    "wide heads, pages in 8 bits": (512, 384, 8, 64, "float8_e5m2", True),
}


@pytest.fixture
def on(request, monkeypatch):
    """on(implementation): its kernels, in one split."""
    monkeypatch.setattr(split_kv, "num_splits", lambda *_: 1)
    return gpu_interpreter.kernels


@needs_interpreter
@pytest.mark.parametrize("name", whole_but(BY_MOSAIC, "MLA, in 8 bits"))
@pytest.mark.parametrize("implementation", MOSAIC)
def test_by_mosaic_output_lse_and_maxima_equal_the_oracle_without_a_race(
    implementation, name, rng, monkeypatch
):
    """With sinks, a window, a soft cap; NaN where nobody looks, and an empty row."""
    head, size, heads, page, stored, has_values = BY_MOSAIC[name]
    monkeypatch.setattr(decoding, "K", 1)
    T, lengths = 2, ints(150, 256, 0)
    dtype = "float16" if stored == "int8" else "bfloat16"
    of_pages = page or 64, lengths, 256 // (page or 64), (head, size), dtype, stored
    call, rows = pool(rng, *of_pages)
    q = normal(rng, B, T, heads, head, dtype=dtype)
    small = 3e-5 if stored else 1.0  # scales that float16 does not hold
    rows = [x * small if stored else x for x in rows]
    call |= {name: call[name] * np.float32(small) for name in call if name.endswith("scales")}
    kw = dict(logits_soft_cap=2.0, sinks=np.linspace(-1, 1, heads, dtype=np.float32))
    kw |= dict(local_window_size=(200, 0))
    options = kw | ALL | dict(implementation=implementation)
    if not has_values:
        call = {n: x for n, x in call.items() if n[:2] != "v_"} | dict(v_pages=None)
        rows[1], options["value_size"] = rows[0][..., :size], size
    of_rows = seen(lengths, T)
    with without_a_race(implementation, 1, monkeypatch):
        if page:
            found = paged_attention(q, **call, **options)
        else:
            k, v = (np.where(np.isnan(x.astype(np.float32)), 0, x).astype(x.dtype) for x in rows)
            for b, length in enumerate(lengths):
                k[b, length:], v[b, length:] = np.nan, np.inf
            v = v if has_values else None
            assert "decoding " in str(explain(q, k, v, **options, **of_rows).tiles)
            found = flash_attention(q, k, v, **options, **of_rows)
    k, v = (x.astype(np.float32) for x in rows)
    found = found[0].astype(jnp.float32) / small, *found[1:]
    equal_the_oracle(found, q, (k, v / small), **of_rows, **kw)


@needs_interpreter
@pytest.mark.parametrize("implementation", whole_but(MOSAIC, "hopper"))
def test_by_mosaic_gradients_are_those_of_the_copy(implementation, rng, on):
    q, k = (normal(rng, 1, n, heads, 576, dtype="bfloat16") for n, heads in ((1, 3), (256, 1)))

    def gradients(name):
        attend = functools.partial(flash_attention, value_size=512, implementation=name)
        loss = lambda q, k: jnp.sum(jnp.sin(attend(q, k, None).astype(jnp.float32)))
        return jax.jit(jax.grad(loss, (0, 1)))(q, k)

    with on(implementation):
        found = gradients(implementation)
    equal(found, gradients("blockwise"), 3e-2)


@needs_interpreter
def test_warpgroups_that_do_not_wait_for_each_other_are_a_race(rng, on, monkeypatch):
    from pallas_flash.kernels.mma import tile

    monkeypatch.setattr(tile, "named_barrier", lambda *_: None)
    q, k = (normal(rng, 1, n, heads, 576, dtype="bfloat16") for n, heads in ((1, 3), (256, 1)))
    with on("ampere", detect_races=True) as races:
        flash_attention(q, k, None, value_size=512, implementation="ampere")
    assert races.found


@needs_interpreter
def test_where_shared_memory_does_not_hold_the_queries_the_reason_says_so(rng, on):
    q, k = (normal(rng, 1, n, 1, 576, dtype="bfloat16") for n in (1, 256))
    call = dict(query=q, key=k, value=None, value_size=512)
    with on("ampere"):
        assert explain(**call, implementation="ampere").tiles.decode.warpgroups == 2
        hardware.shared_memory = lambda: 99 << 10
        reason = "decoding needs 124 KB of shared memory, and this GPU has 99"
        assert reason in explain(**call).why_not["ampere"]


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="an older jax lacks the kernels")
def test_explain_says_how_many_bytes_of_a_token_are_read():
    array = lambda *shape, dtype="bfloat16": jax.ShapeDtypeStruct(shape, dtype)
    q, k, v = array(4, 1, 128, 576), array(4, 8192, 1, 576), array(4, 8192, 1, 512)
    rows = array(4, 128, dtype="int32"), array(4, dtype="int32")
    in_8_bits = array(512, 64, 1, 576, dtype="int8"), None, *rows
    scales = dict(k_scales=array(512, 64, 1, dtype="float32"))
    with as_if_on(GPUS["H200"]):
        of_keys = explain(q, k, None, value_size=512)
        assert "reads           1152 bytes of each token and key/value head" in str(of_keys)
        assert of_keys.implementation == "hopper" and of_keys.tiles.decode.warpgroups == 2
        assert explain_paged(q, *in_8_bits, value_size=512, **scales).token_bytes == 580
        for T in (2, 4):  # speculative decoding
            q = array(4, T, 128, 576)
            assert explain(q, k, None, value_size=512, is_causal=True).token_bytes == 1152
            assert explain_paged(q, *in_8_bits, value_size=512, **scales).token_bytes == 580
        q = array(4, 5, 128, 576)
        reason = "decoding has up to 512 rows, T N / K; got 5 x 128"
        assert reason in explain(q, k, None, value_size=512).why_not["hopper"]
        assert reason in explain_paged(q, *in_8_bits, value_size=512, **scales).why_not["hopper"]
        assert explain(array(4, 1, 64, 576), k, v, implementation="hopper").token_bytes == 2176


@pytest.mark.parametrize("head, most", [(256, 64), (264, 512)])
def test_a_key_head_has_eight_tiles_of_rows_where_no_other_kernel_knows_its_size(head, most):
    def decodes(rows):
        q, k = (jax.ShapeDtypeStruct((1, *n, head), "bfloat16") for n in ((1, rows), (512, 1)))
        return split_kv.is_decoding(explain(q, k, None, value_size=256).problem)

    assert decodes(most) and not decodes(most + 1)


def test_the_self_check_is_of_a_call_without_values():
    q, k = (jax.ShapeDtypeStruct((1, *n), "bfloat16") for n in ((1, 4, 24), (300, 1, 24)))
    problem = explain(q, k, None, value_size=16).problem
    (sizes,) = comparison.all_sizes(problem)
    small, operands, _ = comparison.make(problem, sizes)
    assert small.values_are_keys and operands.value is None
    assert (small.head_size, small.value_size) == (32, 16)
