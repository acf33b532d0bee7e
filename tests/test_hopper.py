"""The Hopper kernels against the oracle, in jax's GPU interpreter."""

import contextlib
import re

import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import MASKS, Sizes, arguments, qkv
from check import TOLERANCE, close, program
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from selection import whole_but

from pallas_flash import explain, flash_attention
from pallas_flash.kernels import device, hopper
from pallas_flash.kernels.hopper import sync

needs_interpreter = pytest.mark.skipif(
    gpu_interpreter.MISSING is not None, reason=str(gpu_interpreter.MISSING)
)


def forward(q, k, v, **kw):
    found = flash_attention(q, k, v, implementation="hopper", return_residual=True, **arguments(kw))
    return tuple(map(np.asarray, found))


def agrees(q, k, v, **kw):
    """Output, lse and the largest logits are the oracle's."""
    o, lse, largest = forward(q, k, v, return_max_logits=True, **kw)
    expected_o, expected_lse, _ = oracle.attention(
        q, k, v, np.zeros(o.shape), np.zeros(lse.shape), **kw
    )
    close(largest, oracle.max_logits(q, k, **kw), 1e-5, "largest logits")
    assert o.dtype == q.dtype and lse.dtype == np.float32
    close(o, expected_o, TOLERANCE[str(q.dtype)], "output")
    close(lse, expected_lse, 1e-5, "lse")


# Several query tiles and key blocks that hang over both ends; at 64 a tile is 192 x 128, at 128 it
# is 128 x 128.
SIZES = Sizes(B=2, T=203, S=309, N=2, K=1, H=64, Hv=64)
BIG_ENOUGH = {
    "window": dict(local_window_size=70),
    "window_left": dict(local_window_size=(100, 0)),
    "window_causal_offset": dict(
        local_window_size=(200, 4), is_causal=True, query_offset=np.array([-9, 106], np.int32)
    ),
}
MASK_NAMES = (
    "full causal_bottom_right causal_offset_by_batch window window_left window_causal_offset "
    "key_lengths query_lengths "
    "documents_causal documents_scattered prefix_window_lengths everything"
).split()


@pytest.mark.gpu
@needs_interpreter
@pytest.mark.parametrize("name", whole_but(MASK_NAMES, "full", "everything"))
def test_every_mask_gives_the_oracles_output_and_lse(name, rng):
    kw = BIG_ENOUGH.get(name) or MASKS[name](rng, SIZES)
    with gpu_interpreter.hopper_kernels():
        agrees(*qkv(rng, SIZES, jnp.bfloat16), **kw)


OTHER_SIZES = {
    "128, grouped": Sizes(B=1, T=131, S=257, N=6, K=2, H=128, Hv=128),
    "192": Sizes(B=1, T=67, S=131, N=1, K=1, H=192, Hv=192),
    "256": Sizes(B=1, T=131, S=140, N=1, K=1, H=256, Hv=256),
    "192 and 128, grouped": Sizes(B=1, T=131, S=257, N=2, K=1, H=192, Hv=128),
    "64 and 128": Sizes(B=1, T=67, S=131, N=2, K=2, H=64, Hv=128),
    "128 and 64": Sizes(B=1, T=67, S=131, N=2, K=2, H=128, Hv=64),
    "128 and 256": Sizes(B=1, T=67, S=67, N=2, K=2, H=128, Hv=256),
    "one query, one key": Sizes(B=1, T=1, S=1, N=1, K=1, H=64, Hv=64),
    "padded heads": Sizes(B=1, T=37, S=53, N=1, K=1, H=11, Hv=72),
    "heads of 80 and 40": Sizes(B=1, T=67, S=131, N=2, K=1, H=80, Hv=40),
    "heads of 160": Sizes(B=1, T=67, S=131, N=2, K=2, H=160, Hv=160),
    "whole tiles": Sizes(B=1, T=192, S=256, N=1, K=1, H=64, Hv=64),
}


@pytest.mark.gpu
@needs_interpreter
@pytest.mark.parametrize(
    "name",
    whole_but(
        OTHER_SIZES,
        "128, grouped",
        "64 and 128",
        "one query, one key",
        "padded heads",
        "heads of 80 and 40",
    ),
)
def test_every_size_gives_the_oracles_output_and_lse(name, rng):
    with gpu_interpreter.hopper_kernels():
        agrees(*qkv(rng, OTHER_SIZES[name], jnp.float16), scale=0.2)


@pytest.mark.gpu
@needs_interpreter
def test_a_soft_cap_gives_the_oracles_output_and_lse(rng):
    with gpu_interpreter.hopper_kernels():
        q, k, v = qkv(rng, OTHER_SIZES["128, grouped"], jnp.bfloat16)
        agrees(np.asarray(3 * q), k, v, is_causal=True, logits_soft_cap=2.0)


@pytest.mark.gpu
@needs_interpreter
def test_maxima_that_grow_by_little_and_by_much_give_the_oracles_output_and_lse(rng):
    q, k, v = qkv(rng, Sizes(B=1, T=131, S=700, N=1, K=1, H=128, Hv=128), jnp.bfloat16)
    # blocks come from the last to the first
    k = k * np.linspace(8, 0.1, 700, dtype=k.dtype)[:, None, None]
    q[:, ::2] /= 8
    with gpu_interpreter.hopper_kernels():
        agrees(q, k, v)


@pytest.mark.gpu
@needs_interpreter
@pytest.mark.parametrize(
    "width, value_width",
    whole_but([(64, 64), (128, 128), (192, 128), (64, 128), (256, 256)], (128, 128)),
)
def test_there_is_no_race(width, value_width, rng):
    z = Sizes(B=1, T=2 * 192, S=700, N=1, K=1, H=width, Hv=value_width)
    with gpu_interpreter.hopper_kernels(detect_races=True) as races:
        agrees(*qkv(rng, z, jnp.bfloat16), is_causal=True, query_offset=316)
    assert not races.found


# The tiles of a program see three blocks of keys and then one, or one and then three: its second
# tile is the first to use a slot.
SEVERAL = {
    "fewer": dict(is_causal=True, query_offset=-150),
    "more": dict(local_window_size=(100, 400), query_offset=200),
}


@pytest.mark.gpu
@needs_interpreter
@pytest.mark.parametrize(
    "head, name",
    whole_but([(128, "fewer"), (128, "more"), (64, "fewer"), (64, "more")], (128, "more")),
)
def test_a_program_that_goes_over_several_tiles_has_no_race(head, name, rng, monkeypatch):
    monkeypatch.setattr(device, "processors", lambda: 1)
    q, k, v = qkv(
        rng,
        Sizes(B=1, T=500 if head == 128 else 760, S=300, N=1, K=1, H=head, Hv=head),
        jnp.bfloat16,
    )
    assert hopper.tiles(explain(q, k, v).problem).forward.tiles_per_program == 2
    with gpu_interpreter.hopper_kernels(detect_races=True) as races:
        agrees(q, k, v, **SEVERAL[name])
    assert not races.found


@needs_interpreter
@pytest.mark.parametrize("wait", whole_but(["wait", "_release_barrier"], "wait"))
def test_without_a_wait_there_is_a_race(wait, rng, monkeypatch):
    monkeypatch.setattr(sync.TmaRing, wait, lambda *args: None)
    monkeypatch.setattr(gpu_interpreter, "DEADLOCK_SECONDS", 5.0)
    z = Sizes(B=1, T=128, S=512, N=1, K=1, H=128, Hv=128)
    # the interpreter may also give up, where nobody has seen that a block was there, on a busy
    # machine early
    for _ in range(3):
        with (
            contextlib.suppress(jax.errors.JaxRuntimeError),
            gpu_interpreter.hopper_kernels(detect_races=True) as races,
        ):
            forward(*qkv(rng, z, jnp.bfloat16))
        if races.found:
            break
    assert races.found


def mesh(kind):
    """Of one device: on several, jax's interpreter waits in vain at the barriers of the second."""
    return jax.make_mesh((1,), ("data",), axis_types=(kind,))


ON_A_MESH = Sizes(B=2, T=67, S=131, N=2, K=1, H=128, Hv=128)


@pytest.mark.gpu
@needs_interpreter
def test_arrays_on_an_explicit_mesh_stay_where_they_are(rng):
    arrays = qkv(rng, ON_A_MESH, jnp.bfloat16)
    sharding = NamedSharding(mesh(AxisType.Explicit), P("data"))
    with gpu_interpreter.hopper_kernels():
        o = flash_attention(
            *(jax.device_put(x, sharding) for x in arrays), implementation="hopper", is_causal=True
        )
        assert jax.typeof(o).sharding.spec[0] == "data"
        np.testing.assert_array_equal(np.asarray(o), forward(*arrays, is_causal=True)[0])


@pytest.mark.gpu
@needs_interpreter
def test_inside_of_a_checked_shard_map_it_gives_the_same(rng):
    arrays = qkv(rng, ON_A_MESH, jnp.bfloat16)
    attend = lambda q, k, v: flash_attention(q, k, v, implementation="hopper", is_causal=True)
    with gpu_interpreter.hopper_kernels():
        o = jax.jit(
            jax.shard_map(attend, mesh=mesh(AxisType.Auto), in_specs=P("data"), out_specs=P("data"))
        )(*arrays)
        np.testing.assert_array_equal(np.asarray(o), forward(*arrays, is_causal=True)[0])


# In how many blocks of 128 lie the keys that the rows of each of three consumers see; a row that
# sees none counts as one block.
BLOCKS = {
    "causal": (dict(is_causal=True), (1, 1, 2)),
    "window": (dict(local_window_size=(0, 64)), (1, 2, 1)),
    "a later window": (dict(local_window_size=(0, 10), query_offset=100), (2, 1, 2)),
    "lengths": (dict(is_causal=True, query_seq_lengths=np.array([64], np.int32)), (1, 1, 1)),
}


@needs_interpreter
@pytest.mark.parametrize("name", whole_but(BLOCKS, "a later window"))
def test_a_consumer_multiplies_only_the_blocks_that_its_own_rows_need(name, rng, monkeypatch):
    kw, blocks = BLOCKS[name]
    products = gpu_interpreter.record_products(monkeypatch)
    with gpu_interpreter.hopper_kernels():
        agrees(*qkv(rng, Sizes(B=1, T=192, S=512, N=1, K=1, H=64, Hv=64), jnp.bfloat16), **kw)
    assert len(products) == 2 * sum(blocks)


@pytest.mark.gpu
@needs_interpreter
@pytest.mark.parametrize("garbage", whole_but([np.nan, np.inf], np.nan))
def test_garbage_in_padding_changes_no_bit(garbage, rng):
    lengths = dict(
        query_seq_lengths=np.array([100, 203], np.int32),
        key_value_seq_lengths=np.array([309, 130], np.int32),
    )
    q, k, v = qkv(rng, SIZES, jnp.bfloat16)
    with gpu_interpreter.hopper_kernels():
        clean = forward(q, k, v, is_causal=True, **lengths)
        q[0, 100:], k[1, 130:], v[1, 130:] = garbage, garbage, -garbage
        dirty = forward(q, k, v, is_causal=True, **lengths)
    for a, b in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(a, b)


@needs_interpreter
@pytest.mark.parametrize("deterministic", [True, False])
def test_of_arrays_that_end_at_lengths_no_more_than_a_block_is_copied(deterministic):
    arrays = [jax.ShapeDtypeStruct((2, 512, heads, 64), jnp.bfloat16) for heads in (2, 1, 1, 2)]
    lengths = np.array([300, 7], np.int32)
    options = dict(
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation="hopper",
        deterministic=deterministic,
    )
    with gpu_interpreter.hopper_kernels():
        text = program(
            lambda *x: jax.vjp(lambda *qkv: flash_attention(*qkv, **options), *x[:3])[1](x[3]),
            *arrays,
        )
    copied = set(
        re.findall(r"bf16\[2,(\d+),\d+,\d+\] = (?:pad|slice|select_n|gather|concatenate)\[?", text)
    )
    assert "512" not in copied and "128" in copied


@pytest.mark.gpu
@needs_interpreter
def test_a_row_that_sees_no_key_gives_zero(rng):
    with gpu_interpreter.hopper_kernels():
        o, lse = forward(
            *qkv(rng, SIZES, jnp.bfloat16),
            key_value_seq_lengths=np.array([0, 7], np.int32),
            is_causal=True,
        )
        assert np.all(o[0] == 0) and np.all(lse[0] == -np.inf) and np.all(np.isfinite(lse[1]))
