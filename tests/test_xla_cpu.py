"""What XLA does slowly on a CPU is the same in the form that the package takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash.jax_support import xla_cpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("at", [(0,), (0, 1), (0, 2)], ids=str)
def test_tokens_are_put_at_their_slots_in_any_axes_and_those_beyond_are_dropped(rng, at, dtype):
    shape, tokens = (8, 7, 6), (2, 3)
    x, new = (rng.integers(-9, 9, n) for n in (shape, (*tokens, *np.delete(shape, at))))
    index = [slice(None)] * (at[-1] + 1)
    for axis in at:
        slots = rng.permutation(8)[:6]  # none twice; some are beyond an axis
        index[axis] = np.where(np.arange(6) < 5, slots, shape[axis]).reshape(tokens)
    index = tuple(index)
    expected = jnp.asarray(x).at[index].set(new, mode="drop")
    x, new = (jnp.asarray(a, dtype) for a in (x, new))
    put = jax.jit(lambda x, new: xla_cpu.put(x, index, new))
    found = [put(x, new)] if dtype == "int8" else jax.jvp(put, (x, new), (x, new))
    for part in found:
        np.testing.assert_array_equal(np.asarray(part, np.float32), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2"])
def test_slices_and_gathers_are_the_same_and_so_are_their_tangents(rng, dtype):
    x = jnp.asarray(rng.integers(-9, 9, (6, 4)), dtype)
    index, start = jnp.array([[5, 0], [2, 2]]), jnp.int32(3)
    wide = x.astype(jnp.float32)
    for copy, expected in (
        (lambda x: xla_cpu.gather(x, index), wide[index]),
        (lambda x: xla_cpu.dynamic_slice(x, [start, 0], [2, 4]), wide[3:5]),
    ):
        for part in jax.jvp(jax.jit(copy), (x,), (x,)):
            assert part.dtype == x.dtype
            np.testing.assert_array_equal(part.astype(jnp.float32), expected)
