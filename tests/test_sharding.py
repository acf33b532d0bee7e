"""On several devices each attends for its own batch rows and heads, and nothing is gathered."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Sizes, bias, qkv
from check import close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_flash import flash_attention, masks

pytestmark = [
    pytest.mark.usefixtures("small_tiles"),
    pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices; conftest asks for four on a CPU"),
]
Z = Sizes(B=4, T=19, S=23, N=4, K=2, H=8, Hv=8)
SPEC = P("data", None, "model", None)


def mesh(kind):
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))


def place(mesh, spec, *arrays):
    return tuple(jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays)


def loss_of(implementation, **kw):
    def loss(q, k, v, bias, lengths):
        o, lse = flash_attention(
            *(q, k, v, bias), key_value_seq_lengths=lengths, implementation=implementation, return_residual=True, **kw
        )
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.where(lse == -jnp.inf, 0.0, lse))

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))


def equal(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        close(x, y, 1e-5)


def test_arrays_on_an_explicit_mesh_stay_where_they_are(implementation, rng):
    q, k, v = qkv(rng, Z)
    b, lengths = bias(rng, "1NTS", Z), np.array([3, 23, 0, 10], np.int32)
    ids = np.sort(rng.integers(0, 3, (Z.B, Z.T))).astype(np.int32)
    key_ids = np.sort(rng.integers(0, 3, (Z.B, Z.S))).astype(np.int32)
    loss = loss_of(implementation, is_causal=True, mask=masks.Documents(ids, key_ids))
    m = mesh(AxisType.Explicit)
    placed = place(m, SPEC, q, k, v)
    spread = loss(*placed, *place(m, P(None, "model"), b), *place(m, P(), lengths))
    equal(spread, loss(q, k, v, b, lengths))
    for gradient in spread[1][:3]:
        assert jax.typeof(gradient).sharding.spec == SPEC
    text = loss.lower(*placed, *place(m, P(None, "model"), b), *place(m, P("data"), lengths)).compile().as_text()
    assert not re.findall(r"= \S+ (all-gather|all-to-all|collective-permute)", text)


def test_one_key_head_serves_query_heads_on_several_devices(implementation, rng):
    q, k, v = qkv(rng, Z._replace(K=1))
    loss = loss_of(implementation, is_causal=True)
    b, lengths = bias(rng, "1N1S", Z), np.full(Z.B, Z.S, np.int32)
    m = mesh(AxisType.Explicit)
    spread = loss(*place(m, SPEC, q), *place(m, P("data"), k, v), *place(m, P(), b, lengths))
    equal(spread, loss(q, k, v, b, lengths))


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])  # Pallas' interpreter has no rule for this check
def test_inside_of_a_checked_shard_map_gradients_of_shared_arrays_are_summed(implementation, rng):
    q, k, v = qkv(rng, Z)
    b, lengths = bias(rng, "1NTS", Z), np.array([3, 23, 0, 10], np.int32)
    specs = SPEC, SPEC, SPEC, P(None, "model"), P("data")

    def attend(q, k, v, b, lengths):
        return flash_attention(q, k, v, b, key_value_seq_lengths=lengths, implementation=implementation)

    mapped = jax.shard_map(attend, mesh=mesh(AxisType.Auto), in_specs=specs, out_specs=SPEC)
    loss = lambda f: jax.jit(jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(f(*x))), argnums=(0, 1, 2, 3)))
    equal(loss(mapped)(q, k, v, b, lengths), loss(attend)(q, k, v, b, lengths))


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])  # the partitioner cannot look into a Pallas kernel
def test_the_partitioner_of_jit_gathers_nothing(implementation, rng):
    q, k, v = place(mesh(AxisType.Auto), SPEC, *qkv(rng, Z))
    f = jax.jit(lambda q, k, v: flash_attention(q, k, v, is_causal=True, implementation=implementation))
    text = f.lower(q, k, v).compile().as_text()
    assert not re.findall(r"= \S+ (all-gather|all-to-all|collective-permute)", text)


def test_sharded_rows_have_a_clear_error(rng):
    q, k, v = place(mesh(AxisType.Explicit), P(None, None, "model"), *qkv(rng, Z._replace(T=24)))
    rows = jax.device_put(q, NamedSharding(mesh(AxisType.Explicit), P(None, "data")))
    with pytest.raises(ValueError, match="query may be sharded along batch and heads"):
        flash_attention(rows, k, v)


def test_key_heads_that_do_not_divide_have_a_clear_error(rng):
    q, k, v = qkv(rng, Z._replace(N=12, K=3))
    (q,) = place(mesh(AxisType.Explicit), SPEC, q)
    with pytest.raises(ValueError, match="the 3 key/value heads must be a multiple of the 2 devices"):
        flash_attention(q, k, v)
