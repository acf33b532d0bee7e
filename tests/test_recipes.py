"""docs/recipes.md: each recipe is at most ten lines, and agrees with its dense formula in float64,
gradients too."""

import ast
import functools
import pathlib
import re
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from check import equal

from pallas_flash import flash_attention, masks, paged_cache

PAGE = (pathlib.Path(__file__).parents[1] / "docs" / "recipes.md").read_text()
CODE = "".join(re.findall(r"```python\n(.*?)```", PAGE, re.S))
RECIPES = {
    node.name: node
    for node in ast.parse(CODE).body
    if isinstance(node, ast.FunctionDef | ast.ClassDef)
}


class Case(NamedTuple):
    recipe: str
    inputs: dict[str, Any]  # shapes of floats, which get gradients, and arrays
    formula: Any  # of the inputs in float64, by name
    options: dict[str, Any] = {}


B, T, S, N, K, H = 2, 12, 12, 4, 2, 4
i, j = np.arange(T)[:, None], np.arange(S)
Q, KV = (B, T, N, H), (B, S, K, H)
QKV = dict(q=Q, k=KV, v=KV)


def dense(q, k, v, seen, bias=0.0, scale=None, cap=None, sinks=-np.inf):
    """Output, log-sum-exp [B, T, N] and weights [B, N, T, S]; seen and bias broadcast to the
    weights. Every query sees a key or has a sink, or its output is 0."""
    k, v = (np.repeat(x, q.shape[-2] // x.shape[-2], -2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = scale * np.einsum("...tnh,...snh->...nts", q, k) + bias
    logits = logits if cap is None else cap * np.tanh(logits / cap)
    e = np.where(seen, np.exp(logits), 0)
    sums = e.sum(-1, keepdims=True) + np.exp(np.broadcast_to(sinks, N)[:, None, None])
    p = e / np.where(sums == 0, 1, sums)
    lse = np.log(np.where(sums == 0, 1, sums))[..., 0].swapaxes(-1, -2)
    return np.einsum("...nts,...snh->...tnh", p, v), lse, p


def attention(*args, **options):
    return dense(*args, **options)[0]


def gradient(f, x):
    """Of a real f, exact: f(x + 1e-30 i) = f(x) + 1e-30 i f'(x)."""
    found = np.zeros_like(x)
    for at in np.ndindex(x.shape):
        moved = x.astype(np.complex128)
        moved[at] += 1e-30j
        found[at] = f(moved).imag / 1e-30
    return found


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def causal(**more):
    return functools.partial(attention, seen=j <= i, **more)


def within(window, **more):
    return functools.partial(attention, seen=(j <= i) & (j > i - window), **more)


def mla(q, latent, k_rope, w_k, w_v):
    k, v = (np.einsum("bsc,cnh->bsnh", latent, w) for w in (w_k, w_v))
    return causal()(q, np.concatenate([k, np.repeat(k_rope, N, 2)], 3), v)


LISTS = np.array([[[[3, 0, 7, -1]], [[4, 4, 1, 0]]], [[[9, 2, 10, 11]], [[-1, 5, 11, 0]]]])


def mla_decode(q, cache, length, w_k, w_v, chosen=None):
    latent, k_rope = np.split(cache, [w_k.shape[0]], 2)
    k, v = (np.einsum("bsc,cnh->bsnh", latent, w) for w in (w_k, w_v))
    k = np.concatenate([k, np.repeat(k_rope[:, :, None], N, 2)], 3)
    position = length[:, None] - q.shape[1] + np.arange(q.shape[1])
    seen = j <= position[:, None, :, None]
    return attention(q, k, v, seen if chosen is None else seen & listed(chosen))


def triangle_attention(q, k, v, bias, mask, gate):
    bias, rows = bias.transpose(0, 3, 1, 2), range(q.shape[1])
    o = [attention(q[:, n], k[:, n], v[:, n], mask[:, n, None, None], bias) for n in rows]
    return np.stack(o, 1) * sigmoid(gate)


def forgetting(q, k, v, log_f):
    bias = np.zeros((B, N, T, S), log_f.dtype)
    for query, key in np.ndindex(T, S):
        bias[:, :, query, key] = log_f[:, key + 1 : query + 1].sum(1)
    return causal(bias=bias)(q, k, v)


def block_diffusion(q, k, v, tokens=6, size=2):
    def sees(query, key):
        of_query, of_key = query % tokens // size, key % tokens // size
        if key < tokens:  # noisy
            return query < tokens and of_query == of_key
        return of_key < of_query if query < tokens else of_key <= of_query

    return attention(q, k, v, np.array([[sees(a, b) for b in range(S)] for a in range(T)]))


def listed(chosen, size=1, rows=1, keys=S):
    """[B, N, T, S]: which keys the lists name, [B, T / rows, 1, K or N, n] numbers of blocks."""
    seen = (np.arange(keys) // size == chosen[..., None]).any(3).transpose(0, 2, 1, 3)
    return seen.repeat(N // seen.shape[1], 1).repeat(rows, 2)


def largest(scores, n, forced=None):
    """The n largest of the last axis, of real parts, forced ones first; -1 in place of -inf."""
    scores = scores.real if forced is None else np.where(forced, np.inf, scores.real)
    chosen = np.argsort(-scores, -1, kind="stable")[..., :n]
    return np.where(np.take_along_axis(scores, chosen, -1) == -np.inf, -1, chosen)


def means(x, size):
    return x.reshape(x.shape[0], -1, size, *x.shape[2:]).mean(2)


def local_and_global(x, weights, window=4, every=2):
    for layer, (w_q, w_k, w_v, w_o) in enumerate(weights):
        q, k, v = (np.einsum("btd,dnh->btnh", x, w) for w in (w_q, w_k, w_v))
        o = within(window if (layer + 1) % every else T)(q, k, v)
        x = x + np.einsum("btnh,dnh->btd", o, w_o)
    return x


def moba(q, k, v, size=2, top=3):
    blocks = np.pad(k, ((0, 0), (0, -T % size), (0, 0), (0, 0)))
    gate = np.einsum("btnh,bjnh->btnj", q, means(blocks, size)).real
    own, block = (np.arange(T) // size)[:, None, None], np.arange(gate.shape[3])
    chosen = largest(np.where(block > own, -np.inf, gate), top, forced=block == own)
    return attention(q, k, v, listed(chosen, size) & (j <= i))


def nsa(q, k, v, k_c, v_c, gates, size=2, top=4, window=4):
    block, own = np.arange(S // size), i[..., None] // size
    groups = q.reshape(B, T, K, -1, H)
    e = np.exp(np.einsum("btkgh,bjkh->btkgj", groups, k_c).real * H**-0.5)
    e = np.where((block + 1) * size <= i[..., None, None] + 1, e, 0)
    weights = (e / np.maximum(e.sum(-1, keepdims=True), 1e-300)).sum(3)
    near = (block == own) | (block == own - 1) | (block == 0)
    chosen = largest(weights, top, forced=near)
    compressed = dense(q, k_c, v_c, (block + 1) * size <= i + 1)[0]
    selected = attention(q, k, v, listed(chosen, size) & (j <= i))
    return gates[0] * compressed + gates[1] * selected + gates[2] * within(window)(q, k, v)


def indexer_loss(scores, weights):
    """The KL divergence of [..., n], from weights without a gradient."""
    p = weights.real / weights.real.sum(-1, keepdims=True)
    q = np.where(p > 0, np.exp(scores), 0)
    q = q / q.sum(-1, keepdims=True)
    return (p * (np.log(np.where(p > 0, p, 1)) - np.log(np.where(p > 0, q, 1)))).sum(-1).mean()


def dsa(q, latents, index_q, index_k, index_w, top=5, rank=3, scale=0.4):
    products = np.einsum("btmc,bsc->btms", index_q, index_k)
    scores = np.einsum("btms,btm->bts", np.where(products.real > 0, products, 0), index_w)
    seen = listed(largest(np.where(j <= i, scores, -np.inf), top)[:, :, None])
    k = latents[:, :, None]
    o, _, p = dense(q, k, k[..., :rank], seen, scale=scale)
    return o, indexer_loss(scores, p.sum(1))


def v4(q, compressed, tokens, sinks, chosen=None, ratio=2, window=3):
    ended = np.broadcast_to((np.arange(S // ratio) + 1) * ratio <= i + 1, (B, 1, T, S // ratio))
    if chosen is not None:
        ended = ended & (np.arange(S // ratio) == chosen[..., None]).any(2)[:, None]
    near = np.broadcast_to((j <= i) & (j > i - window), (B, 1, T, S))
    k = np.concatenate([compressed, tokens], 1)[:, :, None]
    return dense(q, k, k, np.concatenate([ended, near], 3), sinks=sinks)[:2]


def msa(q, k, v, scores, size=2, top=3):
    past = (j <= i)[:, None]
    blocks = np.where(past, scores.real, -np.inf).reshape(B, T, K, -1, size).max(4)
    own = np.arange(S // size) == (np.arange(T) // size)[:, None, None]
    seen = listed(largest(blocks, top, forced=own), size) & (j <= i)
    o, _, p = dense(q, k, v, seen)
    return o, indexer_loss(scores, p.reshape(B, K, -1, T, S).sum(2).swapaxes(1, 2))


def vsa(q, k, v, gate, size=2, top=3):
    coarse = dense(means(q, size), means(k, size), means(v, size), True)[0]
    chosen = largest(np.einsum("binh,bjnh->binj", means(q, size), means(k, size)), top)
    return gate * coarse.repeat(size, 1) + attention(q, k, v, listed(chosen, size, size))


def cascade(q, k_prefix, v_prefix, k, v, length):
    after = lambda prefix, x: np.concatenate([np.stack([prefix] * B), x], 1)
    k, v = after(k_prefix, k), after(v_prefix, v)
    position = len(k_prefix) + length[:, None] - q.shape[1] + np.arange(q.shape[1])
    return attention(q, k, v, np.arange(k.shape[1]) <= position[:, None, :, None])


PARENTS = np.array([0, 0, 0, 1, 3, 2, 5], np.int32)
LINES = [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 1, 3, 4}, {0, 2, 5}, {0, 2, 5, 6}]


def tree_attention(q, k_cache, v_cache, length, k, v, parents):
    of_tree = np.array([[token in line for token in range(7)] for line in LINES])
    of_cache = j < length[:, None, None]
    seen = np.concatenate([of_cache.repeat(7, 1), np.stack([of_tree] * B)], 2)[:, None]
    return attention(q, np.concatenate([k_cache, k], 1), np.concatenate([v_cache, v], 1), seen)


def step_with_qk_clip(params, x, threshold=20.0):
    project = lambda w: np.einsum("btd,dnh->btnh", x, w)

    def loss(name, w):
        q, k, v = (project(w if name == each else params[each]) for each in "qkv")
        return np.mean((causal()(q, k, v) - x[:, :, None]) ** 2)

    new = {w: params[w] - 0.1 * gradient(functools.partial(loss, w), params[w]) for w in "qkv"}
    logits = np.einsum("btnh,bsnh->bnts", project(params["q"]), project(params["k"])) * H**-0.5
    largest = np.where(j <= i, logits, -np.inf).max((0, 2, 3))
    assert largest.min() < threshold < largest.max()
    shrink = np.where(largest > threshold, threshold / largest, 1)[:, None] ** 0.5
    return new | dict(q=new["q"] * shrink, k=new["k"] * shrink)


draw = np.random.default_rng(0).normal
STEP = dict(params={name: draw(size=(H, N, H)) for name in "qkv"}, x=draw(size=(B, T, H)))


TOKAMAX = SimpleNamespace(  # of local_window_size=(5, 2), is_causal=False and both lengths
    causal_mask=SimpleNamespace(offset=2, window_size=8),
    bool_mask=np.ones((B, 1, T, S), bool) & (j != 3),
    q_end=np.array([[[T]], [[T]]]),
    k_end=np.array([[[S]], [[20]]]),
)
IDS = (np.arange(T) >= np.array([[8], [3]])).astype(np.int32)


def maxtext(kind):
    of_layer = dict(sliding_window_size=3, chunk_attn_window_size=5, attn_logits_soft_cap=3.0)
    layer = SimpleNamespace(attention_type=SimpleNamespace(name=kind), **of_layer)
    return dict(self=layer, segment_ids=IDS, positions=None, model_mode="train")


def maxtext_formula(seen, q, k, v, sinks=-np.inf):
    seen = seen & (j <= i) & (IDS[:, :, None] == IDS[:, None])[:, None]
    return attention(q, k, v, seen, scale=1.0, cap=3.0, sinks=np.ravel(sinks))


PREFIX = dict(k_prefix=(11, K, H), v_prefix=(11, K, H), length=np.array([5, 17], np.int32))
CHOSEN = np.hstack([i // 2 - 1, i // 4, i * 0 + 2, i * 0 - 1])  # [T, 4], of pairs of tokens
CHOSEN = np.stack([CHOSEN, CHOSEN[:, ::-1] + 1])
CACHES = dict(q=Q, compressed=(B, S // 2, H), tokens=(B, S, H), sinks=(N,))
PAIRS = dict(q=(B, T, 2 * N, H), k=(B, T, 2 * N, H), v=(B, T, N, 2 * H))
CASES = [
    Case("gpt_oss", QKV | dict(sinks=(N,)), within(5), dict(layer=0, window=5)),
    Case("gpt_oss", QKV | dict(sinks=(N,)), causal(), dict(layer=1, window=5)),
    Case("gemma_2", QKV, within(5, cap=50.0, scale=0.7), dict(layer=2, window=5, scale=0.7)),
    Case("gemma_3", QKV, within(5, scale=1 / 16), dict(layer=4, window=5)),
    Case("gemma_3", QKV, causal(scale=1 / 16), dict(layer=5, window=5)),
    Case(
        "local_and_global",
        dict(x=(B, T, 3), weights=(2, 4, 3, N, H)),
        local_and_global,
        dict(window=4, every=2),
    ),
    Case(
        "mla",
        dict(q=(B, T, N, 7), latent=(B, S, 6), k_rope=(B, S, 1, 2), w_k=(6, N, 5), w_v=(6, N, 5)),
        mla,
    ),
    Case(
        "mla_decode",
        dict(q=(B, 2, N, 7), cache=(B, S, 8), w_k=(6, N, 5), w_v=(6, N, 5))
        | dict(length=np.array([5, 24], np.int32)),
        mla_decode,
    ),
    Case(
        "triangle_attention",
        dict.fromkeys(["q", "k", "v", "gate"], (2, 3, 5, N, H))
        | dict(bias=(2, 5, 5, N), mask=np.arange(30).reshape(2, 3, 5) % 4 > 0),
        triangle_attention,
    ),
    Case("off_by_one", QKV, lambda q, k, v: causal(sinks=np.zeros(N))(q, k, v)),
    Case("gated", QKV | dict(gate=Q), lambda gate, **x: causal()(**x) * sigmoid(gate)),
    Case(
        "differential",
        PAIRS | dict(lam=(N, 1)),
        lambda q, k, v, lam: (
            causal()(q[:, :, 0::2], k[:, :, 0::2], v)
            - lam * causal()(q[:, :, 1::2], k[:, :, 1::2], v)
        ),
    ),
    Case(
        "differential_2",
        QKV | dict(q=(B, T, 2 * N, H), lam=(B, T, N, 1)),
        lambda q, k, v, lam: (
            causal()(q[:, :, 0::2], k, v) - sigmoid(lam) * causal()(q[:, :, 1::2], k, v)
        ),
    ),
    Case("forgetting", QKV | dict(log_f=(B, T, N)), forgetting),
    Case("block_causal", QKV, functools.partial(attention, seen=j // 5 <= i // 5), dict(size=5)),
    Case("block_diffusion", QKV, block_diffusion, dict(tokens=6, size=2)),
    Case("moba", dict(q=Q, k=Q, v=Q), moba, dict(size=2, top=3)),
    Case("moba", dict(q=Q, k=Q, v=Q), functools.partial(moba, size=5), dict(size=5, top=3)),
    Case("moba", dict(q=Q, k=Q, v=Q), functools.partial(moba, size=40), dict(size=40, top=3)),
    Case(
        "nsa",
        QKV | dict(k_c=(B, S // 2, K, H), v_c=(B, S // 2, K, H), gates=(3, B, T, N, 1)),
        nsa,
        dict(size=2, top=4, window=4),
    ),
    Case(
        "dsa",
        dict(q=(B, T, N, 7), latents=(B, S, 7))
        | dict(index_q=(B, T, 3, 2), index_k=(B, S, 2), index_w=(B, T, 3)),
        dsa,
        dict(top=5, rank=3, scale=0.4),
    ),
    Case("v4", CACHES | dict(chosen=CHOSEN), v4, dict(ratio=2, window=3)),
    Case("v4", CACHES, v4, dict(ratio=2, window=3)),
    Case(
        "msa",
        QKV | dict(scores=(B, T, K, S)),
        msa,
        dict(size=2, top=3),
    ),
    Case("vsa", dict(q=Q, k=Q, v=Q, gate=Q), vsa, dict(size=2, top=3)),
    Case("cascade", QKV | PREFIX | dict(q=(B, 2, N, H)), cascade),
    Case(
        "tree_attention",
        dict(q=(B, 7, N, H), k=(B, 7, K, H), v=(B, 7, K, H), k_cache=KV, v_cache=KV)
        | dict(length=np.array([0, 17], np.int32), parents=PARENTS),
        tree_attention,
    ),
    Case("step_with_qk_clip", STEP, step_with_qk_clip, dict(threshold=20.0)),
    Case(
        "for_tokamax",
        QKV | dict(bias=(N, 1, S)),
        functools.partial(
            attention,
            seen=TOKAMAX.bool_mask & (j <= i + 2) & (j >= i - 5) & (j < TOKAMAX.k_end[..., None]),
            scale=0.3,
            cap=5.0,
        ),
        dict(mask=TOKAMAX, logits_scale=0.3, logits_soft_cap=5.0, precision=None, q_sharding=None),
    ),
    Case(
        "for_maxtext",
        QKV | dict(sinks=(1, N, 1, 1)),
        functools.partial(maxtext_formula, j > i - 3),
        maxtext("LOCAL_SLIDING"),
    ),
    Case(
        "for_maxtext",
        QKV,
        functools.partial(maxtext_formula, i // 5 == j // 5),
        maxtext("CHUNK"),
    ),
]
IN_PAGES = {"mla_decode_in_pages", "nsa_by_pages"}  # without gradients
WITHIN = {"nsa_blocks", "indexer_scores", "indexer_loss"}  # recipes that others call
NAMESPACE = {}
exec(compile(CODE, "recipes.md", "exec"), NAMESPACE)


def recipe_of(case):
    recipe = NAMESPACE[case.recipe]
    if case.recipe == "block_diffusion":  # it makes a mask
        return lambda q, k, v: flash_attention(q, k, v, mask=recipe(**case.options))
    if case.recipe == "dsa":
        scores = NAMESPACE["indexer_scores"]
        return lambda q, latents, index_q, index_k, index_w: recipe(
            q, latents, scores(index_q, index_k, index_w), **case.options
        )
    if case.recipe == "msa":
        past = (j <= i)[:, None]
        return lambda q, k, v, scores: recipe(
            q, k, v, np.where(past, 0, -np.inf).astype(np.float32) + scores, **case.options
        )
    return functools.partial(recipe, **case.options)


@functools.partial(jax.jit, static_argnums=0)
def output_and_gradients(f, x, arrays, do):
    o, vjp = jax.vjp(lambda x: f(**x, **arrays), x)
    return o, vjp(do)[0]


SLOW = "nsa", "msa", "vsa", "differential", "v4"  # "dsa", "moba" and the others are like these
ROWS = [
    pytest.param(case, id=case.recipe, marks=[pytest.mark.whole] * (case.recipe in SLOW))
    for case in CASES
]


@pytest.mark.parametrize("case", ROWS)
def test_a_recipe_is_its_dense_formula_with_its_gradients(case, rng):
    arrays = {name: x for name, x in case.inputs.items() if not isinstance(x, tuple)}
    x = {
        name: rng.normal(size=shape)
        for name, shape in case.inputs.items()
        if isinstance(shape, tuple)
    }
    o = case.formula(**x, **arrays)
    do = jax.tree.map(lambda o: rng.normal(size=o.shape), o)

    def product(name, moved):
        o = case.formula(**x | {name: moved}, **arrays)
        return sum(map(np.vdot, *map(jax.tree.leaves, (do, o))))

    expected = {name: gradient(functools.partial(product, name), x[name]) for name in x}
    narrow = functools.partial(
        jax.tree.map, lambda a: a.astype(np.float32) if a.dtype == np.float64 else a
    )
    found = output_and_gradients(recipe_of(case), narrow(x), narrow(arrays), narrow(do))
    equal(found, (o, expected), 1e-5)


@pytest.mark.parametrize(
    "dtype, atol, chosen", [("float32", 1e-5, None), ("int8", 0.05, None), ("float32", 1e-5, LISTS)]
)
def test_mla_in_pages_is_the_dense_formula(dtype, atol, chosen, rng):
    shapes = dict(q=(B, 2, N, 7), cache=(B, S, 8), w_k=(6, N, 5), w_v=(6, N, 5))
    x = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    length = np.array([5, 12], np.int32)
    expected = mla_decode(**x, length=length, chosen=chosen)
    x = {name: a.astype(np.float32) for name, a in x.items()}
    pool = paged_cache(B, S, 1, 8, pages=4, page=8, dtype=dtype, values_are_keys=True)
    pool = pool.append(x.pop("cache")[:, :, None], None, count=length)
    mask = None if chosen is None else masks.KeyLists(chosen)
    equal(NAMESPACE["mla_decode_in_pages"](pool=pool, mask=mask, **x), expected, atol)


def test_nsa_by_pages_is_the_dense_formula(rng):
    shapes = dict(q=(B, 40, N, H), k=(B, 40, K, H), v=(B, 40, K, 3))
    x = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    own = np.broadcast_to(np.arange(40) // 8, (B, K, 40)).swapaxes(1, 2)
    chosen = np.stack([own // 2, own, np.full_like(own, -1)], 3).astype(np.int32)
    chosen[..., 0] = np.where(chosen[..., 0] == own, -1, chosen[..., 0])
    chosen[1, :, 1, 2] = np.where(own[1, :, 1] > 3, 3, -1)
    seen = listed(chosen, 8, keys=40) & np.tril(np.ones((40, 40), bool))
    found = NAMESPACE["nsa_by_pages"](**x, chosen=chosen, size=8)
    equal(found, attention(**x, seen=seen), 1e-5)


def test_every_recipe_is_at_most_ten_lines_and_has_a_case():
    lines = CODE.splitlines()
    size = lambda node: sum(map(bool, lines[node.lineno - 1 : node.end_lineno]))
    assert {name: size(node) for name, node in RECIPES.items() if size(node) > 10} == {}
    classes = {name for name, node in RECIPES.items() if isinstance(node, ast.ClassDef)}
    assert {case.recipe for case in CASES} == {*RECIPES} - classes - IN_PAGES - WITHIN
