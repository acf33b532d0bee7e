"""kernels/mosaic/row_mask.py, where each thread holds a row: which scores it leaves, by the
oracle."""

import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels.blackwell.tile import LAYOUTS
from pallas_flash.kernels.mosaic import block_info, registers
from pallas_flash.masks.resolved_mask import ResolvedMask
from pallas_flash.tiled import schedule

pytestmark = gpu_interpreter.needs_interpreter

T, S = 200, 150  # of the last tiles some rows and columns are not there
RNG = np.random.default_rng(0)
IDS = [RNG.integers(0, 3, (1, n)).astype(np.int32) for n in (T, S)]  # in no order
LENGTHS = np.array([147], np.int32)
MASKS = {
    "full": (ResolvedMask(S), {}),
    "causal": (ResolvedMask(S, right=0, offset=30), dict(is_causal=True, query_offset=30)),
    "window": (ResolvedMask(S, left=33, right=7), dict(local_window_size=(33, 7))),
    "ids": (
        ResolvedMask(S, query_ids=IDS[0], key_ids=IDS[1], contiguous=np.zeros((1, T), bool)),
        dict(query_segment_ids=IDS[0], key_value_segment_ids=IDS[1]),
    ),
    "lengths": (
        ResolvedMask(S, right=0, query_stop=LENGTHS, key_stop=LENGTHS - 20),
        dict(is_causal=True, query_seq_lengths=LENGTHS, key_value_seq_lengths=LENGTHS - 20),
    ),
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_a_row_in_a_thread_has_the_bits_of_what_it_sees(name, transposed):
    given, arguments = MASKS[name]
    given = given.narrow([*given.BY_BATCH, *given.BY_QUERY, *given.BY_KEY], jnp.asarray)
    resolved, _ = schedule.by_query_tile(given, T, 128, 128)
    arrays, tree = jax.tree.flatten(resolved)
    first_query, first_key = (128, 64) if transposed else (64, 128)
    shape = (128, 64)

    def kernel(*refs):
        *refs, out_gmem = refs
        at = registers.ScoreTile(LAYOUTS, first_query, first_key, shape, transposed)
        loaded = block_info.load_mask(
            LAYOUTS, jax.tree.unflatten(tree, refs), 0, first_query, 128, None, transposed
        )
        x = plgpu.layout_cast(jnp.full(shape, 3.0, jnp.float32), LAYOUTS.tile)
        out_gmem[...] = loaded.select(at)(x, -jnp.inf)

    with gpu_interpreter.parameters() as (interpret, _):
        out = jax.ShapeDtypeStruct(shape, jnp.float32)
        found = jax.jit(plgpu.kernel(kernel, out_type=out, interpret=interpret))(*arrays)
    seen = oracle.visible(1, 1, T, S, arguments)[0, 0]
    seen = np.pad(seen, ((0, 0), (0, 128)))[first_query:, first_key:]  # keys that are not there
    seen = seen.T if transposed else seen
    rows, columns = (min(pair) for pair in zip(shape, seen.shape, strict=True))
    expected = np.where(seen[:rows, :columns], 3.0, -np.inf)
    np.testing.assert_array_equal(np.asarray(found)[:rows, :columns], expected)
