"""The function under JAX's transformations, on every implementation."""

import functools
import re

import check
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BROADCASTS, Sizes, bias, dense_mask, normal, qkv
from check import strict_64_bits, value_and_gradients
from selection import whole_but

from pallas_flash import flash_attention, masks, scores
from pallas_flash.transforms import equation

pytestmark = pytest.mark.usefixtures("small_tiles")
Z = Sizes(T=19, S=23, N=2, K=1, H=8, Hv=8)


def attend(implementation, **kw):
    return functools.partial(flash_attention, implementation=implementation, **kw)


equal = functools.partial(check.equal, tolerance=5e-6)


@pytest.mark.whole("triton")
@pytest.mark.parametrize("axes", [(0, 0, 0), (3, 0, 1), (0, None, None), (None, 1, 2)], ids=str)
def test_vmap_over_any_axis_equals_a_loop_with_gradients(axes, implementation, rng):
    moved = lambda x, axis: (
        x if axis is None else np.moveaxis(np.stack([x, x[::-1] + 0.5]), 0, axis)
    )
    q, k, v = (moved(x, axis) for x, axis in zip(qkv(rng, Z), axes, strict=True))
    lengths = np.array([[9, 23], [17, 2]], np.int32)

    def f(q, k, v, lengths):
        more = dict(is_causal=True, query_offset=4, key_value_seq_lengths=lengths)
        more |= dict(mask=masks.Window(lengths[0], None))
        return value_and_gradients(attend(implementation, **more))(q, k, v)

    check.vmap_is_a_loop(f, (*axes, 0), q, k, v, lengths)


def test_what_one_of_two_vmaps_shares_has_the_sum_of_the_gradients(rng):
    q, k, _ = qkv(rng, Z)
    q, k = np.stack([q, q + 1]), np.stack([k, k[::-1], k + 1])

    def run(name):
        call = lambda q, k: attend(name, is_causal=True)(q, k, k)
        by_keys = lambda q, k: jax.vmap(functools.partial(call, q))(k)
        return value_and_gradients(jax.vmap(by_keys, (0, None)), (0, 1))(q, k)

    equal(run("blockwise"), run("reference"))


def _calls(jaxpr) -> list:
    """The passes of a program, in order, without those that lie side by side under vmap."""
    found = []
    for eqn in jaxpr.eqns:
        is_pass = eqn.primitive.name == "flash_attention_call" and not eqn.params["rules"].maps
        found += [eqn.params["rules"]] if is_pass else []
        if "rules" in eqn.params and eqn.params["jaxpr"] is None:
            run = equation.as_function(**eqn.params)
            found += _calls(jax.make_jaxpr(run)(*(x.aval for x in eqn.invars)).jaxpr)
        inner = [getattr(x, "jaxpr", x) for x in eqn.params.values()]
        found += [call for x in inner if hasattr(x, "eqns") for call in _calls(x)]
    return found


# What three calls have, beside q, k and v: for each argument its value and whether each call has
# its own. And whether forward and backward are one call; else jax maps what they are made of.
MAPPED = {
    "nothing else": (lambda rng: {}, True, True),
    "documents of its own, lengths of all": (
        lambda rng: dict(
            query_segment_ids=(np.sort(rng.integers(0, 3, (3, 2, 19))).astype(np.int32), True),
            key_value_segment_ids=(np.sort(rng.integers(0, 3, (2, 23))).astype(np.int32), False),
            key_value_seq_lengths=(np.array([21, 9], np.int32), False),
        ),
        True,
        True,
    ),
    "a bias and a mask of its own": (
        lambda rng: dict(
            bias=(np.stack([bias(rng, "BN1S", Z) for _ in range(3)]), True),
            mask=(np.stack([dense_mask(rng, "BNTS", Z) for _ in range(3)]), True),
        ),
        True,
        True,
    ),
    "a bias of all, for each batch row": (
        lambda rng: dict(bias=(bias(rng, "BNTS", Z), False)),
        False,
        True,
    ),
    "a bias of all batch rows": (lambda rng: dict(bias=(bias(rng, "1NTS", Z), False)), True, False),
    "sinks of all, an offset of its own": (
        lambda rng: dict(
            sinks=(np.float32([0.3, -1]), False), query_offset=(np.array([3, 0, 5], np.int32), True)
        ),
        True,
        True,
    ),
    "sinks of its own": (
        lambda rng: dict(sinks=(np.float32([[0.3, -1], [1, 2], [-3, 0]]), True)),
        False,
        False,
    ),
    "a score_mod and a rule that count batch rows": (
        lambda rng: dict(
            score_mod=(lambda s, b, h, q, k: s * (1 + b) + 0.1 * h, False),
            mask=(masks.MaskMod(lambda b, h, q, k: (q + k + b) % 3 > 0), False),
        ),
        True,
        True,
    ),
    "tables of all": (
        lambda rng: dict(score_mod=(scores.T5Bias(normal(rng, 2, 8)), False)),
        True,
        False,
    ),
    "a dropout key of all": (
        lambda rng: dict(dropout_rate=(0.3, False), dropout_rng=(jax.random.key(1), False)),
        True,
        True,
    ),
    "a dropout key of its own": (
        lambda rng: dict(
            dropout_rate=(0.3, False), dropout_rng=(jax.random.split(jax.random.key(1), 3), True)
        ),
        True,
        True,
    ),
}


@pytest.mark.parametrize(
    "case",
    whole_but(
        MAPPED,
        "documents of its own, lengths of all",
        "a bias of all, for each batch row",
        "sinks of its own",
        "a score_mod and a rule that count batch rows",
        "a dropout key of its own",
    ),
)
def test_mapped_calls_are_one_call_of_more_batch_rows_where_nothing_large_is_copied(case, rng):
    given, forward, backward = MAPPED[case]
    given = given(rng)
    x = tuple(np.stack([part, part[::-1] * 0.5, part + 1]) for part in qkv(rng, Z))
    own, fixed = (
        {name: a for name, (a, mapped) in given.items() if mapped == wanted}
        for wanted in (True, False)
    )

    def f(x, own):
        attend = lambda x, own: flash_attention(*x, implementation="blockwise", **own, **fixed)
        floats = {name: a for name, a in own.items() if name in ("bias", "sinks")}
        of = lambda x, floats: attend(x, own | floats)
        return value_and_gradients(of, (0, 1))(x, floats)

    together = [("forward", 6)] * forward + [("backward", 6)] * backward
    calls = _calls(jax.make_jaxpr(jax.vmap(f))(x, own).jaxpr)
    assert [(rules.name, rules.problem.batch) for rules in calls] == together
    check.vmap_is_a_loop(f, (0, 0), x, own)


def test_calls_that_share_keys_do_not_copy_them(rng):
    q, k, v = qkv(rng, Z)
    program = jax.make_jaxpr(jax.vmap(lambda q: attend("blockwise")(q, k, v)))(np.stack([q] * 3))
    assert _calls(program.jaxpr) == [] and not re.search(r"f32\[(3,2|6),23,1,8\]", str(program))


def test_many_tangents_at_one_place_are_one_call_of_more_batch_rows(rng):
    x, along = qkv(rng, Z), np.stack([qkv(rng, Z)[0] for _ in range(3)])
    f = lambda name, dq: jax.jvp(lambda q: attend(name)(q, *x[1:]), x[:1], (dq,))
    mapped = lambda name: jax.vmap(functools.partial(f, name))
    calls = _calls(jax.make_jaxpr(mapped("triton"))(along).jaxpr)
    found = [(rules.name, rules.problem.batch) for rules in calls]
    assert found == [("forward", 2), ("tangent", 6)]
    equal(*(jax.jit(mapped(name))(along) for name in ("triton", "reference")))


def test_mapped_calls_decode_where_all_of_them_together_would_but_not_where_a_backward_follows(
    monkeypatch,
):
    monkeypatch.undo()  # small_tiles
    q, k = (jax.ShapeDtypeStruct((9, 1, *shape, 64), jnp.float32) for shape in ((1, 8), (2048, 4)))
    mapped = jax.vmap(attend("blockwise"))
    calls = lambda f: _calls(jax.make_jaxpr(f)(q, k, k).jaxpr)
    decodes = lambda f: [bool(c.tiles.decode) for c in calls(f) if c.name == "forward"]
    assert decodes(mapped) == [True]
    assert decodes(jax.grad(lambda *x: mapped(*x).sum())) == [False]


def test_no_calls_at_all_may_be_mapped(implementation, rng):
    q, k, v = qkv(rng, Z)
    both = lambda x: jax.vmap(jax.value_and_grad(lambda x: attend(implementation)(*x).sum()))(x)
    empty = both(tuple(a[None][:0] for a in (q, k, v)))
    assert jax.tree.map(jnp.shape, empty) == ((0,), tuple((0, *a.shape) for a in (q, k, v)))


no_names = pytest.mark.skipif(
    getattr(jax.config, "jax_remat3", False), reason="it keeps nothing by name: docs/training.md"
)


def with_and_without_remat(implementation):
    """A loss, the same where output and log-sum-exp are kept by name, and where nothing is."""
    f = lambda q, k, v: jnp.sum(jnp.sin(attend(implementation)(jnp.tanh(q), k, v)))
    names = "flash_attention_out", "flash_attention_lse"
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    return f, jax.checkpoint(f, policy=policy), jax.checkpoint(f)


@no_names
@pytest.mark.whole("reference", "triton")
def test_remat_by_name_keeps_output_and_lse_and_nothing_is_kept_without_names(
    implementation, rng, capsys
):
    q, k, v = qkv(rng, Z)
    f, kept, nothing = with_and_without_remat(implementation)
    equal(*(jax.jit(jax.grad(g, argnums=(0, 1, 2)))(q, k, v) for g in (f, kept)))
    # o, and of lse m and l; the dense backward computes the weights again
    residuals = 1 if implementation == "reference" else 3
    for g, saved in (kept, residuals), (nothing, 0):
        jax.ad_checkpoint.print_saved_residuals(g, q, k, v)
        assert (
            sum("from the argument" not in line for line in capsys.readouterr().out.splitlines())
            == saved
        )


@pytest.mark.whole("reference", "blockwise")
def test_gradients_of_biases_of_any_shape_are_traced_with_64_bits_and_strict_promotion(
    implementation, rng
):
    x = qkv(rng, Z, "bfloat16")
    gradient = jax.grad(lambda bias: jnp.sum(attend(implementation)(*x, bias), dtype=jnp.float32))
    with strict_64_bits():
        for letters in BROADCASTS:
            b = bias(rng, letters, Z)
            assert jax.typeof(jax.eval_shape(gradient, b)) == jax.typeof(b)


@pytest.mark.parametrize("keys", [Z.S, 256], ids=["", "decoding"])
def test_half_precision_is_summed_in_float32_where_promotion_is_strict(keys, implementation, rng):
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in qkv(rng, Z._replace(S=keys)))
    kw = dict(scale=jnp.full(Z.N, 0.3), key_value_seq_lengths=[5, 23])
    if implementation not in ("flash1", "standard"):
        kw |= dict(score_mod=scores.Alibi(jnp.ones(Z.N, jnp.bfloat16)))
    f = lambda q, k, v: jnp.sum(attend(implementation, **kw)(q, k, v).astype(jnp.float32))
    with jax.numpy_dtype_promotion("strict"):
        gradients = jax.eval_shape(jax.grad(f, argnums=(0, 1, 2)), q, k, v)
    assert [x.dtype for x in gradients] == [jnp.bfloat16] * 3


@pytest.mark.parametrize("name", ["triton", "flash1", "standard"])
def test_what_is_evaluated_while_tracing_takes_no_kernel_and_says_so(name, rng):
    x = qkv(rng, Z)

    def evaluated(y, implementation):
        with jax.ensure_compile_time_eval():
            return y + np.asarray(flash_attention(*x, implementation=implementation)).sum()

    assert np.isfinite(jax.jit(evaluated, static_argnums=1)(0.0, None))
    with pytest.raises(NotImplementedError, match=r"jax\.ensure_compile_time_eval would evaluate"):
        jax.jit(evaluated, static_argnums=1)(0.0, name)


@no_names
def test_remat_by_name_runs_the_forward_kernel_once(rng):
    q, k, v = qkv(rng, Z)
    calls = lambda g: _calls(jax.make_jaxpr(jax.grad(g))(q, k, v).jaxpr)
    count = lambda g: sum(call.name == "forward" for call in calls(g))
    plain, kept, again = map(count, with_and_without_remat("triton"))
    assert plain == kept < again


@pytest.mark.whole("reference", "triton")
def test_nan_checks_and_leak_checks_pass(implementation, rng):
    q, k, v = qkv(rng, Z)
    # the first rows see no key
    f = lambda q, k, v: attend(implementation, is_causal=True, query_offset=-3)(q, k, v)
    expected = f(q, k, v)
    with jax.debug_nans(True), jax.checking_leaks():
        loss = lambda *x: jnp.sum(jnp.sin(f(*x)))
        o, _ = jax.jit(lambda *x: (f(*x), jax.grad(loss, argnums=(0, 1, 2))(*x)))(q, k, v)
    equal(o, expected)


def test_a_mask_or_score_keeps_its_structure_whatever_stands_in_its_leaves_places():
    """Equinox' filters and optax.masked put bools there, and Equinox takes None for a leaf."""
    table, ids = jnp.ones(4), np.zeros((1, 4), np.int32)
    where = masks.MaskMod(lambda b, h, q, k: table[k] > q)
    for x in (
        masks.KeyStarts([3]),
        masks.Causal() & masks.Documents(ids, ids),
        masks.create_block_mask(where, 4, 4),
        scores.Alibi(table),
    ):
        flags = jax.tree.map(lambda _: True, x)
        assert (
            jax.tree.structure(flags)
            == jax.tree.structure(x)
            == jax.tree.structure(jax.tree.map(lambda _: 0, flags))
        )
        everywhere = jax.tree.map(lambda _: True, x, is_leaf=lambda x: x is None)
        assert jax.tree.leaves(jax.tree.map(lambda flag, x: x, everywhere, x)) == jax.tree.leaves(x)


@pytest.mark.parametrize("implementation", ["blockwise", "triton"])
def test_a_jaxpr_has_no_line_of_more_than_1200_characters(implementation):
    x = jax.ShapeDtypeStruct((1, 64, 2, 16), jnp.float32)
    loss = lambda q, k, v: attend(implementation, is_causal=True)(q, k, v).sum()
    printed = str(jax.make_jaxpr(jax.grad(loss))(x, x, x))
    assert max(map(len, printed.splitlines())) < 1200 and "<lambda>" not in printed
