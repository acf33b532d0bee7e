"""What is the Blackwell kernels' alone: who sums delta, and the parts of a group of heads."""

import functools
import re

import gpu_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Sizes, qkv
from check import TOLERANCE, close, program
from gpu_interpreter import needs_interpreter
from selection import whole_but

from pallas_flash import explain, flash_attention, masks
from pallas_flash.choose import implementations
from pallas_flash.jax_support import hardware
from pallas_flash.kernels.blackwell import tuning

attend = functools.partial(flash_attention, implementation="blackwell")
CAUSAL = dict(is_causal=True)


def tiles(x, **options):
    return implementations.BLACKWELL.tiles(explain(*x, **options).problem)


# Heads, options: whether the kernel of dQ sums delta, and XLA reads o nowhere
DELTA = {
    "heads of 40": ((40, 40), {}, True),
    "heads of 128": ((128, 128), dict(logits_soft_cap=2.0), True),
    "o beside one slot of values": ((192, 128), {}, False),
    "sinks": ((64, 64), dict(sinks=np.zeros(2, np.float32)), False),
    "a bias": ((64, 64), dict(bias=np.zeros((1, 1, 72, 1), np.float32)), False),
    "a score_mod": ((64, 64), dict(score_mod=lambda s, *_: s + 1), False),
}


@needs_interpreter
@pytest.mark.parametrize("name", DELTA)
def test_xla_sums_delta_only_where_the_kernel_of_dq_does_not(name):
    (size, value_size), options, sums_delta = DELTA[name]
    q, v = (jax.ShapeDtypeStruct((1, 72, 2, n), jnp.bfloat16) for n in (size, value_size))
    pull = lambda do, *x: jax.vjp(functools.partial(attend, **options), *x)[1](do)
    with gpu_interpreter.kernels("blackwell"):
        text = program(pull, v, q, q, v)
    assert (re.search(r"reduce_sum\[\s*axes=\(3,\)", text) is None) == sums_delta


# Batch, heads, of keys, length, mask: parts, for 148 processors. A step is a block of queries of a
# head.
PARTS = {
    (1, 32, 8, 4096, "causal"): 1,  # 256 programs
    (1, 32, 4, 2048, "full"): 2,  # 128 of 64 steps for 64 of 128
    (1, 32, 4, 2048, "causal"): 4,  # of which half are short, so 256 fill the gaps
    (1, 32, 1, 2048, "full"): 8,
    (1, 32, 8, 2048, "full"): 1,  # 256 of a half are two rounds
    (1, 71, 1, 2048, "causal"): 71,
    (1, 16, 8, 256, "full"): 1,  # 4 steps, for which no sum leaves twice
    (1, 32, 1, 8192, "window"): 2,
}


@needs_interpreter
@pytest.mark.parametrize("batch, heads, kv_heads, length, mask", PARTS)
def test_a_group_of_heads_has_as_few_programs_as_keep_processors_busy(
    batch, heads, kv_heads, length, mask, monkeypatch
):
    monkeypatch.setattr(hardware, "processors", lambda: 148)
    options = dict(full={}, causal=CAUSAL, window=dict(local_window_size=(511, 0)))[mask]
    x = [jax.ShapeDtypeStruct((batch, length, n, 128), jnp.bfloat16) for n in (heads, kv_heads)]
    t = tiles([*x, x[1]], **options).dkv
    assert t.group_parts == PARTS[batch, heads, kv_heads, length, mask]


BOTTOM_RIGHT = dict(query_offset=169, **CAUSAL)
IN_LISTS = dict(
    mask=masks.Window(64, 64) | masks.GlobalTokens(4),  # of blocks
    dropout_rate=0.25,
    dropout_rng=jax.random.key(0),
)


@pytest.mark.gpu
@needs_interpreter
@pytest.mark.parametrize("head, options", [(128, BOTTOM_RIGHT), (72, IN_LISTS)], ids=["128", "72"])
@pytest.mark.parametrize("parts", whole_but((1, 2, 4), 1, 2))
def test_a_group_of_heads_in_parts_has_the_gradients_of_the_whole_group(
    head, options, parts, rng, monkeypatch
):
    with_parts = lambda t, p, processors: t._replace(group_parts=parts)
    monkeypatch.setattr(tuning, "_with_parts", with_parts)
    monkeypatch.setattr(tuning, "_tiles", tuning._tiles.__wrapped__)  # which remembers no choice
    z = Sizes(B=1, T=131, S=300, N=8, K=2, H=head, Hv=head)
    x = qkv(rng, z, jnp.bfloat16)
    gradients = lambda f, x: jax.grad(lambda x: jnp.sum(f(*x, **options) ** 2))(x)
    wide = [a.astype(np.float32) for a in x]
    expected = gradients(functools.partial(flash_attention, implementation="reference"), wide)
    with gpu_interpreter.kernels("blackwell", detect_races=True) as races:
        found = gradients(attend, x)
    for name, a, b in zip(("dq", "dk", "dv"), found, expected, strict=True):
        assert a.dtype == jnp.bfloat16 and a.shape == b.shape
        close(a, b, TOLERANCE["bfloat16"], name)
    assert not races.found
