"""DESIGN.md: its loops run and are exact, its links lead somewhere, and its pictures show what the
code does today."""

import doctest
import re

import jax
import numpy as np
import oracle
import pytest
from cases import normal
from pictures import assert_same
from processes import ROOT

from pallas_flash import explain, masks
from pallas_flash.kernels.hopper import tile_sizes, tuning
from pallas_flash.masks.resolved_mask import ResolvedMask
from scripts import draw_design

DESIGN = ROOT / "docs" / "DESIGN.md"
TEXT = DESIGN.read_text()
PROSE = re.sub(r"```.*?```|`[^`\n]*`", "", TEXT, flags=re.S)
LINKS = sorted(set(re.findall(r"\]\(([^)\s]+)\)", PROSE)))
PICTURES = ("memory", "tiles", "timeline", "mma")
OF_MASKS = ("masks", "alignment", "lists")  # docs/masks.md shows these


# ---- the loops ----


@pytest.fixture(scope="module")
def doctests():
    """What the code defines, and how its doctests went."""
    examples = doctest.DocTestParser().get_doctest(TEXT, {}, DESIGN.name, str(DESIGN), 0)
    with jax.default_matmul_precision("highest"):
        results = doctest.DocTestRunner().run(examples, clear_globs=False)
        yield examples.globs, results


@pytest.fixture
def names(doctests):
    return doctests[0]


@pytest.mark.whole
def test_the_code_runs_and_prints_what_the_text_says(doctests):
    assert doctests[1] == (0, TEXT.count("\n>>> "))


def one_head(rng, T, S, H, Hv, size=1.0):
    """q, k, v, do and dlse of one head, and oracle.attention of them."""
    q, k, v, do = (normal(rng, *shape) for shape in [(T, H), (S, H), (S, Hv), (T, Hv)])
    q, dlse = size * q, normal(rng, T)
    by_head = [x[None, :, None] for x in (q, k, v, do)]
    o, lse, gradients = oracle.attention(*by_head, dlse[None, :, None], scale=1.0)
    return (q, k, v, do, dlse), (o[0, :, 0], lse[0, :, 0], [x[0, :, 0] for x in gradients[:3]])


@pytest.mark.parametrize(
    "T, S, H, Hv, size", [(1, 1, 3, 2, 1.0), (19, 61, 8, 5, 1.0), (33, 16, 4, 4, 300.0)]
)
@pytest.mark.parametrize(
    "loop", ["dense", "three_passes", "two_passes", "flash1", "flash2", "flash3", "flash4"]
)
def test_a_loop_gives_dense_attention(names, loop, T, S, H, Hv, size, rng):
    (q, k, v, *_), (o, lse, _) = one_head(rng, T, S, H, Hv, size)
    actual_o, actual_lse = jax.jit(names[loop])(q, k, v)
    # logits of hundreds have an ulp of 3e-5
    np.testing.assert_allclose(actual_o, o, atol=3e-6 * size, rtol=1e-5)
    np.testing.assert_allclose(actual_lse, lse, atol=1e-5, rtol=1e-6)


def test_the_loop_of_the_backward_gives_the_gradients_of_dense_attention(names, rng):
    (q, k, v, do, dlse), (o, lse, expected) = one_head(rng, 19, 61, 8, 5)
    actual = jax.jit(names["backward"])(*(np.float32(x) for x in (q, k, v, o, lse, do, dlse)))
    for gradient, wanted in zip(actual, expected, strict=True):
        np.testing.assert_allclose(gradient, wanted, atol=1e-5, rtol=1e-5)


def test_the_masked_loop_leaves_a_row_without_keys_empty(names):
    o, lse = names["masked"](*(names[x] for x in "qkv"), ResolvedMask(53, right=0, offset=-3))
    assert not np.any(o[:3]) and np.all(np.isneginf(lse[:3])) and np.all(np.isfinite(lse[3:]))


class Counted:
    """An array that counts the elements read from it."""

    def __init__(self, x):
        self.x, self.shape, self.read = x, x.shape, 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, rows):
        self.read += self.x[rows].size
        return self.x[rows]


@pytest.mark.parametrize(
    "loop, formula", [("flash1", draw_design.moved_flash1), ("flash2", draw_design.moved_flash2)]
)
def test_the_loops_read_what_the_picture_of_the_memory_counts(names, loop, formula):
    # M, or block_q
    z, tile = draw_design.Sizes(T=37, S=53, H=16), dict(flash1=1024, flash2=16)[loop]
    arrays = {
        name: Counted(jax.numpy.ones((length, z.H)))
        for name, length in dict(q=z.T, k=z.S, v=z.S).items()
    }
    names[loop](*arrays.values(), tile)
    expected = formula(z, tile).read
    assert {name: x.read for name, x in arrays.items()} == {name: expected[name] for name in arrays}


# ---- the text ----


def test_the_pictures_are_shown_and_readme_links_the_text():
    assert {f"design/{name}.svg" for name in PICTURES} <= set(LINKS)
    assert "(docs/DESIGN.md)" in (ROOT / "README.md").read_text()
    page = (ROOT / "docs/masks.md").read_text()
    assert all(f"(design/{name}.svg)" in page for name in OF_MASKS)


def test_inline_formulas_hold_nothing_that_github_takes_for_markdown():
    assert PROSE.count("$") % 2 == 0
    for formula in re.finditer(r"\$[^$]*\$", PROSE):
        assert not re.search(r"\n|[*<>]|\\[^a-zA-Z]|\W_", formula.group()), formula
        around = PROSE[formula.start() - 1] + PROSE[formula.end()]
        assert not re.search(r"[\w-]", around), f"it touches a word: {formula}"


# ---- the pictures ----


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    draw_design.main(["--out", str(folder)])
    return folder


@pytest.mark.whole
@pytest.mark.parametrize("name", draw_design.PICTURES)
def test_a_picture_is_what_the_script_draws_today(name, drawn):
    committed = DESIGN.parent / "design" / f"{name}.svg"
    assert_same(committed, drawn / f"{name}.svg", "stale: run python scripts/draw_design.py")


EXAMPLES = {
    "causal": dict(is_causal=True),
    "causal window (30, 0)": dict(local_window_size=(30, 0)),
    "window (20, 12)": dict(local_window_size=(20, 12)),
    "documents": dict(query_segment_ids=np.repeat(np.arange(4), [20, 36, 12, 28])[None]),
    "documents, causal": dict(
        is_causal=True, query_segment_ids=np.repeat(np.arange(4), [20, 36, 12, 28])[None]
    ),
    "lengths: 70 queries, 60 keys": dict(query_seq_lengths=70, key_value_seq_lengths=60),
}


def test_the_picture_of_tiles_is_the_truth():
    assert EXAMPLES.keys() == draw_design.example_masks().keys()
    size = draw_design.BLOCK
    for name, mask in draw_design.example_masks().items():
        types = np.asarray(draw_design.block_mask(mask).second.block_types)[0, 0]
        visible = oracle.visible(1, 1, draw_design.LENGTH, draw_design.LENGTH, EXAMPLES[name])[0, 0]
        for i, j in np.ndindex(types.shape):
            tile = visible[i * size : (i + 1) * size, j * size : (j + 1) * size]
            assert types[i, j] == int(tile.any()) + int(tile.all()), f"{name}: tile {i}, {j}"


def test_the_picture_of_alignments_is_the_truth():
    for name, mask in draw_design.alignments().items():
        types = np.asarray(mask.second.block_types)[0, 0]
        T, S = types.shape
        first = S - T if "bottom-right" in name else 0  # the last key that query 0 sees
        visible = np.arange(S) <= np.arange(T)[:, None] + first
        assert name.startswith(f"T = {T}, S = {S}\n") and ((types > 0) == visible).all(), name


def test_the_picture_of_lists_is_the_truth():
    query, key = np.ogrid[: draw_design.TOKENS, : draw_design.TOKENS]
    for name, mask in draw_design.example_lists().items():
        lists, *causal = masks.leaves(mask)
        chosen = lists.indices[:, 0][query[:, 0] // lists.query_block]
        visible = (chosen[:, None] == key[..., None] // lists.block).any(2)
        visible &= key <= query if causal else True
        types = masks.create_block_mask(mask, *visible.shape, block=1).second.block_types
        assert ((np.asarray(types)[0, 0] > 0) == visible).all(), name


def test_the_timeline_is_of_the_kernel_as_it_is_tuned():
    words = "head size 128, two consumers of 64 queries, blocks of 128 keys, and two slots"
    assert words in TEXT.replace("\n", " ")
    x = jax.ShapeDtypeStruct((1, 4096, 1, 128), "bfloat16")
    problem = explain(x, x, x, deterministic=True).problem
    tiles = tuning.tiles(problem).forward
    assert (tiles.warpgroups, tile_sizes.ROWS, tiles.block_k, tiles.stages) == (2, 64, 128, 2)
    assert tiles.block_q == draw_design.ROWS


def test_the_rates_in_the_text_are_those_of_the_picture():
    for gpu in draw_design.GPUS.values():
        quotient = re.search(
            rf"{int(gpu.products / 1e12)} / ([\d.]+) = (\d+)", TEXT.replace("\n", " ")
        )
        assert float(quotient[1]) == round(gpu.bandwidth / 1e12, 2)
        assert int(quotient[2]) == round(gpu.products / gpu.bandwidth)
