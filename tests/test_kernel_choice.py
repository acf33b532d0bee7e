"""Which calls the Mosaic kernels take, what they refuse and with which words, and what GPUs give
them."""

import functools
import re

import fakes
import jax
import jax.numpy as jnp
import pytest
from decoding import needs_interpreter
from processes import printed_by
from selection import needs_mosaic

from pallas_flash import explain, explain_paged, flash_attention, masks, scores
from pallas_flash.accounting import GPUS
from pallas_flash.choose.implementations import AMPERE, BLACKWELL, HOPPER
from pallas_flash.choose.selfcheck import verdicts
from pallas_flash.jax_support import hardware
from pallas_flash.kernels.mosaic import operations
from pallas_flash.tiled import split_kv
from scripts.bench.gpu_code import as_if_on

FAMILIES = {family.name: family for family in (HOPPER, BLACKWELL, AMPERE)}


def shaped(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


HALF = shaped(1, 8, 2, 64)
ROWS, BYTES = jnp.ones((8, 8)), jnp.arange(8, dtype=jnp.uint8)
rule = lambda seen: dict(mask=masks.MaskMod(seen))
REFUSED = {  # what all families say, the query, and options
    "bfloat16 and float16; got float32": (shaped(1, 8, 2, 64, dtype="float32"), {}),
    "above .* do not fit into registers; got H = 520": (shaped(1, 8, 2, 520), {}),
    "must be above 0; got -1": (HALF, dict(scale=-1.0)),
    "may only be indexed down to scalars.*; got `reduce_sum`": (
        HALF,
        rule(lambda b, h, q, k: jnp.sum(ROWS[q]) > k),
    ),
    r"numbers of 8 bits \(u8\), for which Mosaic GPU": (
        HALF,
        rule(lambda b, h, q, k: BYTES[q] > BYTES[k]),
    ),
    "needs floor, which Mosaic GPU does not know": (
        HALF,
        rule(lambda b, h, q, k: jnp.floor(q / 3) > k),
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("reason", REFUSED)
def test_what_they_do_not_run_they_refuse_with_a_reason(reason, family, monkeypatch):
    monkeypatch.setattr(operations, "why_no_gpu", lambda *_: None)
    q, options = REFUSED[reason]
    assert re.search(reason, explain(q, q, q, **options).why_not[family])
    with pytest.raises(NotImplementedError, match=reason):
        explain(q, q, q, **options, implementation=family)


def test_arrays_that_no_int32_counts_are_refused_with_a_reason():
    def reasons(seen):
        options = rule(lambda b, h, q, k: seen[q, k])
        found.append(explain(HALF, HALF, HALF, **options).why_not)

    found = []
    jax.eval_shape(reasons, shaped(2**16, 2**15, dtype=bool))
    for name in (*FAMILIES, "triton"):
        reason = "an array of 2^31 elements or more, which int32 cannot index; got (65536, 32768)"
        assert reason in found[0][name]


DECODING = {
    "nothing else": ({}, True),
    "a score_mod": (dict(score_mod=scores.SoftCap(2.0)), True),
    "a mask": (dict(mask=shaped(1, 1, 1, 300, dtype=bool)), False),
    "a bias": (dict(bias=shaped(1, 2, 1, 300)), False),
    "a rule": (dict(mask=masks.Window(40, 40) | masks.GlobalTokens(4)), False),
}


@pytest.mark.parametrize("name", DECODING)
def test_one_query_is_decoding_beside_what_changes_no_array(name):
    options, is_decoding = DECODING[name]
    problem = explain(shaped(1, 1, 2, 64), *[shaped(1, 300, 2, 64)] * 2, **options).problem
    assert split_kv.is_decoding(problem) == is_decoding
    for family in FAMILIES.values():
        assert (family.tiles(problem).decode is not None) == is_decoding


# on the 148 processors of a B200: 256 queries a program would leave some idle, or half of them
# have no queries
@needs_interpreter
@pytest.mark.parametrize(
    "B, T, N, H, row_tiles, in_order",
    [
        (1, 2048, 8, 128, 1, [True, False]),
        (1, 2048, 16, 128, 2, [True, False]),
        (64, 128, 16, 128, 1, [True, False]),
        (64, 640, 16, 192, 2, [True, False]),
        (1, 2048, 16, 64, 2, [True]),  # P has columns of its own
    ],
)
def test_a_b200_has_the_tiles_that_keep_it_busy_and_a_variant_that_waits_for_reads(
    B, T, N, H, row_tiles, in_order
):
    q, k, v = (shaped(B, T, N, size) for size in (H, H, min(H, 128)))
    with as_if_on(GPUS["B200"]):
        problem = explain(q, k, v, implementation="blackwell").problem
        found = [BLACKWELL.tiles(each).forward for each in BLACKWELL.variants(problem)]
        schemes = {verdicts.variant_of(BLACKWELL, each) for each in BLACKWELL.variants(problem)}
    assert [(t.row_tiles, t.in_order) for t in found] == [(row_tiles, order) for order in in_order]
    assert len(schemes) == len(in_order)


SHORT_OF = {  # a GPU, head sizes: who decodes, and what is said of shared memory
    ("RTX-4090", 576, 512): ("blockwise", 124),
    ("RTX-5090", 576, 512): ("blockwise", 125),
    ("RTX-4090", 512, 512): ("ampere", 144),
    ("A100-80GB", 576, 512): ("ampere", None),
    ("A100-80GB", 512, 512): ("ampere", None),
}


@needs_mosaic
@pytest.mark.parametrize("gpu, head, value", SHORT_OF)
def test_explain_says_which_gpus_lack_shared_memory_to_decode_wide_heads(gpu, head, value):
    q, k, v = (shaped(2, n, heads, head) for n, heads in ((1, 8), (4096, 1), (4096, 1)))
    latent, lengths = head > value, shaped(2, dtype="int32")
    options = dict(value_size=value) if latent else {}
    taken, needed = SHORT_OF[gpu, head, value]
    with as_if_on(GPUS[gpu]):
        found = explain(q, k, None if latent else v, **options)
        pages = [shaped(9, 64, 1, head), None if latent else shaped(9, 64, 1, value)]
        paged = explain_paged(q, *pages, shaped(2, 64, dtype="int32"), lengths, **options)
    reason = (
        f"split-KV decoding needs {needed} KB of shared memory, and this GPU has 99; got H = {head}"
    )
    said = found.why_not["ampere"] if taken == "blockwise" else found.copies or ""
    assert found.implementation == taken and (reason in said) == (needed is not None)
    assert ("registers" in said, said.count("decoding needs")) == (False, int(needed is not None))
    assert paged.why_not.get("ampere", "").count(reason) == (needed is not None)


def test_without_a_gpu_nothing_is_said_of_its_shared_memory(monkeypatch):
    monkeypatch.setattr(hardware, "compute_capability", lambda: None)
    q, k = shaped(2, 1, 8, 576), shaped(2, 4096, 1, 576)
    for reason in map(explain(q, k, None, value_size=512).why_not.get, FAMILIES):
        assert "compute capability" in reason
        assert "registers" not in reason and "shared memory" not in reason


# ---- by GPU ----


@needs_interpreter
def test_hopper_takes_a_mask_that_is_an_array_from_65_queries_on(monkeypatch):
    fakes.plug_in(monkeypatch.setattr, fakes.Device())
    for queries, taken in (64, "triton"), (65, "hopper"):  # XLA prepares a mask that is an array
        mask = shaped(2, 1, 8, dtype=bool)
        choice = explain(shaped(1, queries, 2, 64), HALF, HALF, mask=mask)
        assert choice.implementation == taken


@pytest.mark.parametrize(
    "kind, cores, processors", [("NVIDIA H100 PCIe", 114, 114), ("NVIDIA A100", None, 108)]
)
def test_a_mesh_says_how_many_processors_its_gpus_have(kind, cores, processors):
    named = jax.sharding.AbstractDevice(device_kind=kind, num_cores=cores, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=named)):
        assert hardware.processors() == processors


PADDED = {  # a GPU, head sizes: what XLA pads for copies by TMA, or for an mma
    ("A100-80GB", 64, 64): None,
    ("A100-80GB", 72, 72): "H from 72 to 80, Hv from 72 to 80",
    ("A100-80GB", 8, 200): "H from 8 to 32, Hv from 200 to 224",  # blocks of 16 rows
    ("A100-80GB", 320, 512): "T from 300 to 320",  # queries of whole tiles
    ("RTX-4090", 64, 64): None,
    ("RTX-4090", 300, 24): "T from 300 to 320, H from 300 to 320, Hv from 24 to 64",
    ("RTX-5090", 64, 64): "T from 300 to 304, S from 300 to 304",
    ("H200", 64, 64): "T from 300 to 304, S from 300 to 304",
}


@needs_interpreter
@pytest.mark.parametrize("gpu, head, value", PADDED)
def test_each_gpu_is_given_its_copies_and_explain_says_what_is_padded(gpu, head, value):
    x = [shaped(2, 300, 4, size) for size in (head, head, value)]
    padded = PADDED[gpu, head, value]
    with as_if_on(GPUS[gpu]):
        choice, named = explain(*x), explain(*x, implementation="ampere")
    assert choice.implementation == ("hopper" if gpu == "H200" else "ampere")
    assert named.tiles.forward.tma == (gpu in ("RTX-5090", "H200"))
    assert named.copies == (padded and f"XLA pads arrays in each call, {padded}")


@needs_interpreter
@pytest.mark.parametrize(
    "capability, faster",
    [((9, 0), None), ((10, 0), "blackwell"), ((10, 3), "blackwell"), ((11, 0), "cuDNN")],
)
def test_explain_says_what_multiplies_faster_than_by_mma(capability, faster):
    x = [shaped(2, 300, 4, 64)] * 3
    with as_if_on(GPUS["H200"]._replace(kind="a GPU", capability=capability)):
        named, choice = explain(*x, implementation="ampere"), explain(*x)
    said = re.search(r"^remark +this GPU's tensor cores .* (.*use tcgen05)$", str(named), re.M)
    assert (said and faster in said[0]) == (faster and True)
    assert (choice.remark is None) == (faster != "cuDNN")


@needs_interpreter
@pytest.mark.parametrize("gpu", ["A100-80GB", "RTX-5090"])
def test_decoding_lowers_for_keys_of_no_whole_blocks(gpu):
    x = shaped(1, 1, 2, 64), *[shaped(1, 301, 2, 64)] * 2
    attend = functools.partial(flash_attention, implementation="ampere")
    with as_if_on(GPUS[gpu]):
        jax.jit(attend).trace(*x).lower(lowering_platforms=("cuda",))


@needs_interpreter
@pytest.mark.parametrize(
    "gpu, head, lacking",
    [
        ("A100-80GB", 256, ""),
        ("RTX-4090", 256, "; forward mode by blockwise"),
        ("A100-80GB", 512, "; reverse and forward mode by blockwise"),
    ],
)
def test_where_kernels_have_no_tiles_for_derivatives_blockwise_has_them(gpu, head, lacking):
    x = shaped(1, 128, 2, head)
    each = lambda of: jax.jit(lambda x, dx: of(lambda x: flash_attention(x, x, x), x, dx))
    along = each(lambda f, x, dx: jax.jvp(f, (x,), (dx,)))
    back = each(lambda f, x, dx: jax.vjp(f, x)[1](dx))
    with as_if_on(GPUS[gpu]):
        found = explain(x, x, x, implementation="ampere")
        codes = (f.trace(x, x).lower(lowering_platforms=("cuda",)).as_text() for f in (along, back))
        has_tangent, has_dq = (
            f"flash_attention_{name}" in code
            for name, code in zip(("tangent", "dq"), codes, strict=True)
        )
    assert found.derivatives.endswith(f"of second by blockwise{lacking}")
    assert has_tangent == ("forward mode" in str(found.tiles)) == ("forward" not in lacking)
    assert has_dq == ("dq" in str(found.tiles)) == ("reverse" not in lacking)


# In a process of its own: jax's Triton module must not have been imported
WITHOUT_TRITON = """
import sys

sys.modules["jax.experimental.pallas.triton"] = None
import gpu_interpreter
import jax
import jax.numpy as jnp

from pallas_flash import explain, flash_attention

q, table = jnp.ones((1, 5, 1, 64), jnp.bfloat16), jnp.ones(5)


def loss(x):
    rule = lambda s, b, h, i, j: s * x[j]
    return flash_attention(q, q, q, x, score_mod=rule, implementation="hopper").sum()


with gpu_interpreter.hopper_kernels():
    print(jax.jit(jax.grad(loss)).lower(table).out_info.shape)
print(explain(q, q, q, implementation="reference").why_not["triton"])
"""


@needs_interpreter
def test_without_jaxs_triton_biases_and_captured_arrays_have_gradients():
    shape, triton = printed_by(WITHOUT_TRITON).splitlines()
    assert shape == "(5,)"
    assert "cannot be imported" in triton


INTERPRETED = """
import sys

sys.modules["jax.experimental.pallas.triton"] = None
import jax
import numpy as np
from cases import Sizes, qkv
from check import check

from pallas_flash import accounting, explain
from scripts.bench.gpu_code import as_if_on

z, rng = Sizes(B=1, T=20, S=33, H=8, Hv=16), np.random.default_rng(0)
call = dict(
    local_window_size=(7, 9),
    key_value_seq_lengths=np.array([29], np.int32),
    sinks=np.zeros(z.N, np.float32),
)
for name in sys.argv[1:]:
    check(rng, *qkv(rng, z), name, **call)
    x = jax.ShapeDtypeStruct((1, 64, 1, 64), "bfloat16")
    with as_if_on(accounting.GPUS["H200"]):
        print(explain(x, x, x, implementation=name).remark)
"""


@pytest.mark.whole
def test_without_jaxs_triton_the_earlier_algorithms_are_interpreted():
    names = "flash1", "standard"
    remarks = printed_by(INTERPRETED, *names).splitlines()
    assert len(remarks) == len(names) and all("no Triton lowering" in text for text in remarks)
