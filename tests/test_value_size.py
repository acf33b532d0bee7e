"""Values that are the first columns of the keys (MLA): the same as a copy of these columns, in
every call and derivative."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import normal
from check import equal
from decoding import B, arrays, equal_the_oracle, ints, pool, seen
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, needs_devices, put
from selection import whole_but

from pallas_flash import (
    context_parallel,
    flash_attention,
    flash_attention_jvp,
    paged_attention,
)

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


@pytest.mark.parametrize("T", [3, 40])
@pytest.mark.parametrize("implementation", whole_but(IMPLEMENTATIONS, "blockwise", "triton"))
def test_results_and_derivatives_are_those_of_the_copy(implementation, T, rng):
    options = OPTIONS if implementation in IMPLEMENTATIONS[:3] else {}

    def value_and_gradients(q, k, v, size):
        def loss(q, k):
            o, lse, _ = found = attend(
                q, k, v_of(k), size, implementation=implementation, **options
            )
            return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.where(lse > -jnp.inf, lse, 0.0)), found

        v_of = lambda k: v if v is None else k[..., :HV]
        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(q, k)

    equal(*both(value_and_gradients, *latents(rng, T)), 1e-6)


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
