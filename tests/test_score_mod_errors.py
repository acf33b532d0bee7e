"""What is said of a score_mod with a mistake, and of what an implementation lacks for one."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import explain, flash_attention, scores

IDS = jnp.arange(40, dtype=jnp.int32) // 3
SHAPES = r"is called once, with scalars,.* it raised "
FLOATS = IDS * 1.0
MISTAKES = {
    "no function": (
        0.5,
        r"a function score_mod\(score, b, h, q_idx, .*\) that .*; got the float 0.5",
    ),
    "too few": (lambda s: s, r"raised TypeError: .*takes 1 positional argument but 5 were given"),
    "a bool": (
        lambda s, b, h, q, k: q >= k,
        r"of the score's dtype, float32\[\]; got bool\[\]. To hide keys, pass a mask",
    ),
    "an int": (lambda s, b, h, q, k: q - k, r"float32\[\]; got int32\[\]"),
    "half": (lambda s, b, h, q, k: s.astype(jnp.bfloat16), r"float32\[\]; got bfloat16\[\]"),
    "many": (lambda s, b, h, q, k: s + jnp.arange(3.0), r"float32\[\]; got float32\[3\]"),
    "a shape": (lambda s, b, h, q, k: s / s.shape[-1], SHAPES + "IndexError"),
    "a softmax": (lambda s, b, h, q, k: jax.nn.softmax(s, axis=-1), SHAPES + "ValueError"),
    "of NumPy": (
        lambda s, b, h, q, k: s + np.ones(4)[h],
        "NumPy takes no traced values: .* jnp.asarray for arrays",
    ),
    "a function of NumPy": (
        lambda s, b, h, q, k: np.where(q < k, s, 0),
        r"bool\[\]\. NumPy takes .*: use jnp",
    ),
    "a row": (
        lambda s, b, h, q, k: s + jnp.sum(IDS.reshape(20, 2)[b]),
        r"may only be indexed down to scalars.*; got `reduce_sum` of an array of shape \(2,\)",
    ),
    "in a loop": (
        lambda s, b, h, q, k: jax.lax.fori_loop(0, 3, lambda i, s: s + FLOATS[k + i], s),
        r"got `scan` of an array of shape \(40,\)\. Index it before the loop or branch",
    ),
    "by score": (
        lambda s, b, h, q, k: s + FLOATS[s.astype(int)],
        "by b, h, q_idx and kv_idx; got an index that depends on the score",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_says_what_was_expected(name):
    score_mod, text = MISTAKES[name]
    q = jnp.ones((1, 4, 2, 8))
    with pytest.raises(TypeError, match=text):
        flash_attention(q, q, q, score_mod=score_mod)


def test_kernels_name_the_operation_that_they_lack():
    q = jnp.ones((1, 4, 2, 8))

    def odd(score, b, h, q_idx, kv_idx):
        return jax.lax.erf(score)

    text = r"odd needs erf.*, which jax's Triton lowering does not know for tiles"
    with pytest.raises(NotImplementedError, match=text):
        flash_attention(q, q, q, score_mod=odd, implementation="triton")
    loop = lambda s, b, h, q, k: jax.lax.fori_loop(0, 3, lambda _, s: s * s, s)
    # the gradient does
    with pytest.raises(NotImplementedError, match=r"needs scan in reverse, which jax's Triton"):
        flash_attention(q, q, q, score_mod=loop, implementation="triton")
    x, cap = [q.astype(jnp.bfloat16)] * 3, scores.SoftCap(3.0)
    of_classic = dict(
        flash1="no gradients for the arrays", standard="needs the scores before score_mod"
    )
    for name, text in of_classic.items():
        with pytest.raises(NotImplementedError, match=text):
            flash_attention(*x, score_mod=cap, implementation=name)
    why_not = lambda score_mod: explain(*x, score_mod=score_mod).why_not["hopper"]
    assert re.search(
        r"odd needs .*\berf\b.*, which Mosaic GPU does not know for registers", why_not(odd)
    )
    assert "needs scan," in why_not(
        lambda s, b, h, q, k: jax.lax.fori_loop(0, 3, lambda _, s: 2 * s, s)
    )
    assert "needs fmod," in why_not(lambda s, b, h, q, k: s % 2.0)
    assert "registers" not in why_not(
        lambda s, b, h, q, k: scores.Alibi((0.5, 2.0))(jnp.tanh(s), b, h, q, k)
    )


def test_a_score_mod_is_refused_on_no_mesh_that_is_not_refused_elsewhere():
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",))):
        score_mod = lambda s, b, h, q, k: jnp.maximum(s, abs(s) / 2)
        x = [jax.ShapeDtypeStruct((1, 4, 2, 8), jnp.float32)] * 3
        assert explain(*x, score_mod=score_mod, implementation="triton").implementation == "triton"
