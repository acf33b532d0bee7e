"""Which tiles the Hopper kernels take, what is padded for them, and what they refuse."""

import functools
import re

import fakes
import gpu_interpreter
import jax
import jax.numpy as jnp
import pytest
from check import program

from pallas_flash import dropout, explain, flash_attention
from pallas_flash.kernels import device, hopper
from pallas_flash.kernels.hopper import tuning
from pallas_flash.kernels.mosaic import scheduler

needs_interpreter = pytest.mark.skipif(
    gpu_interpreter.MISSING is not None, reason=str(gpu_interpreter.MISSING)
)


WIDTHS = {  # of the tiles, and their swizzle, and the sizes that arrays have
    (1, 1): (64, 64, 128, 8, 8),
    (40, 64): (64, 64, 128, 40, 64),
    (96, 96): (96, 96, 64, 96, 96),
    (192, 128): (192, 128, 128, 192, 128),
    (80, 24): (80, 32, 32, 80, 32),
    (65, 200): (80, 208, 32, 80, 208),
    (160, 32): (160, 32, 64, 160, 32),
    (120, 250): (128, 256, 128, 128, 256),
}


@pytest.mark.parametrize("sizes", WIDTHS)
def test_tiles_are_no_wider_than_whole_columns_of_them_that_hold_the_heads(sizes):
    q, v = (jax.ShapeDtypeStruct((1, 8, 2, size), jnp.bfloat16) for size in sizes)
    tiles = hopper.tiles(explain(q, q, v).problem).forward
    arrays = (tuning.padded_size(size, tiles.swizzle) for size in sizes)
    assert (tiles.width, tiles.value_width, tiles.swizzle, *arrays) == WIDTHS[sizes]


@needs_interpreter
@pytest.mark.parametrize(
    "head, deterministic", [(80, True), (80, False), (96, True), (96, False), (40, True)]
)
def test_heads_that_are_no_row_of_the_table_are_neither_padded_nor_cut(head, deterministic):
    arrays = [jax.ShapeDtypeStruct((1, 200, heads, head), jnp.bfloat16) for heads in (2, 1, 1, 2)]
    attend = lambda *qkv: flash_attention(
        *qkv, implementation="hopper", is_causal=True, deterministic=deterministic
    )
    with gpu_interpreter.hopper_kernels():
        text = program(lambda *x: jax.vjp(attend, *x[:3])[1](x[3]), *arrays)
    assert text.count("mpmd_map[") == (3 if deterministic else 2)
    assert not re.findall(
        r"\w+\[\d+,\d+,\d+,\d+\] = (?:pad|slice|dynamic_slice|gather|concatenate)\[", text
    )


PADDED = {  # sizes of queries and keys, of heads: what explain says of them
    (
        1023,
        77,
        128,
        128,
    ): "XLA pads arrays in each call, T from 1023 to 1024, S from 77 to 80, and cuts the results",
    (1024, 80, 100, 64): "XLA pads arrays in each call, H from 100 to 112, and cuts the results",
    (8, 16, 40, 24): None,
    # decoding
    (1, 1001, 128, 128): "XLA pads arrays in each call, S from 1001 to 1008",
    (200, 264, 192, 128): None,
}


@needs_interpreter
@pytest.mark.parametrize("sizes", PADDED)
def test_explain_says_what_is_padded_and_nothing_else_is(sizes):
    T, S, H, Hv = sizes
    q, k, v = (
        jax.ShapeDtypeStruct((2, n, 2, size), jnp.bfloat16) for n, size in ((T, H), (S, H), (S, Hv))
    )
    attend = functools.partial(flash_attention, implementation="hopper")
    with gpu_interpreter.hopper_kernels():
        assert explain(q, k, v, implementation="hopper").copies == PADDED[sizes]
        assert (" pad[" in str(jax.make_jaxpr(attend)(q, k, v))) == (PADDED[sizes] is not None)


@pytest.mark.parametrize("head, block_k", [(128, 128), (192, 96), (256, 64)])
def test_random_words_of_dropout_are_shared_within_a_block(head, block_k):
    q = jax.ShapeDtypeStruct((1, 8, 2, head), jnp.bfloat16)
    tiles = hopper.tiles(
        explain(q, q, q, dropout_rate=0.1, dropout_rng=jax.random.key(0)).problem
    ).forward
    assert tiles.block_k == block_k and block_k % dropout.UNIT == 0


# Heads, length: with two tiles to a program 132 processors would have more to do, or nothing; 64
# blocks of keys are many.
ROUNDS = {
    (8, 2048): 1,
    (32, 1024): 1,
    (32, 2048): 2,
    (128, 512): 2,
    (128, 1024): 4,
    (128, 4096): 2,
    (128, 8192): 1,
}


@pytest.mark.parametrize("heads, length", ROUNDS)
def test_short_programs_go_over_several_tiles_where_all_processors_stay_busy(
    heads, length, monkeypatch
):
    monkeypatch.setattr(device, "processors", lambda: 132)
    q = jax.ShapeDtypeStruct((1, length, heads, 128), jnp.bfloat16)
    assert hopper.tiles(explain(q, q, q).problem).forward.tiles_per_program == ROUNDS[heads, length]


@pytest.mark.parametrize(
    "kind, cores, processors", [("NVIDIA H100 PCIe", 114, 114), ("NVIDIA A100", None, 108)]
)
def test_a_mesh_says_how_many_processors_its_gpus_have(kind, cores, processors):
    named = jax.sharding.AbstractDevice(device_kind=kind, num_cores=cores, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=named)):
        assert device.processors() == processors


def test_programs_of_unequal_numbers_of_tiles_are_refused():
    q = jax.ShapeDtypeStruct((1, 3 * 128, 1, 128), jnp.bfloat16)
    with pytest.raises(ValueError, match="got 2 to a program, of 3 to a head"):
        scheduler.query_programs(explain(q, q, q).problem, 128, tiles_per_program=2)


HALF = jax.ShapeDtypeStruct((1, 8, 2, 64), jnp.bfloat16)
REFUSED = {
    "float32": (dict(query=jax.ShapeDtypeStruct(HALF.shape, jnp.float32)), "bfloat16 and float16"),
    "a wide head": (dict(query=jax.ShapeDtypeStruct((1, 8, 2, 300), jnp.bfloat16)), "above 256"),
    "a negative scale": (dict(scale=-1.0), "above 0"),
    "no such GPU": ({}, "compute capability 9.0" if gpu_interpreter.MISSING is None else "jax"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_run_it_refuses_with_a_reason(name, monkeypatch):
    monkeypatch.setattr(device, "compute_capability", lambda: None)
    kw, reason = REFUSED[name]
    q = kw.get("query", HALF)
    call = dict(query=q, key=q, value=q) | kw
    assert reason in explain(**call).why_not["hopper"]
    with pytest.raises(NotImplementedError, match=reason):
        explain(**call, implementation="hopper")


@needs_interpreter
def test_it_is_the_first_choice_on_its_gpus(monkeypatch):
    fakes.plug_in(monkeypatch.setattr, fakes.Device())
    choice = explain(HALF, HALF, HALF)
    assert choice.implementation == "hopper" and choice.tiles == hopper.tiles(choice.problem)
    assert choice.why_not["triton"] == "hopper comes before it"
    for queries, taken in (64, "triton"), (65, "hopper"):  # XLA prepares a mask that is an array
        q = jax.ShapeDtypeStruct((1, queries, 2, 64), jnp.bfloat16)
        assert (
            explain(q, HALF, HALF, mask=jax.ShapeDtypeStruct((2, 1, 8), bool)).implementation
            == taken
        )
