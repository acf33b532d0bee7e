"""jax's options, as a program of its own has them."""

import contextlib

import jax

# What changes the programs that jax traces, or whether they may run. Options of the compiler and of
# its cache stay: jax decides once in a process whether it uses a cache.
DEFAULTS = dict(
    array_garbage_collection_guard="allow",
    check_tracer_leaks=False,
    debug_infs=False,
    debug_key_reuse=False,
    debug_nans=False,
    default_matmul_precision=None,
    default_prng_impl="threefry2x32",
    disable_jit=False,
    enable_checks=False,
    enable_x64=False,
    legacy_prng_key="allow",
    no_execution=False,
    no_tracing=False,
    numpy_dtype_promotion="standard",
    numpy_rank_promotion="allow",
    threefry_partitionable=True,
    transfer_guard="allow",
)


@contextlib.contextmanager
def defaults():
    """A context with jax's defaults in place of what the environment, jax.config or a context of
    this thread set. A thread inherits no transformation, and no context but those of jax.config."""
    with contextlib.ExitStack() as stack:
        for name, value in DEFAULTS.items():
            if hasattr(jax, name):  # another jax may lack some
                stack.enter_context(getattr(jax, name)(value))
        yield
