"""What the compiler makes of the kernels for an H200, on a machine without one: the code of their
loops, and the memory.

A further kernel is a row of LOOPS: what a step without a mask may cost, and a row of MEMORY: what a
token may.
"""

import json
import pathlib
import subprocess
import sys
from typing import NamedTuple

import pytest
from selection import whole_but

from pallas_flash.accounting import GPUS
from pallas_flash.kernels import hopper
from scripts import gpu_code

SCRIPT = pathlib.Path(__file__).parents[1] / "scripts" / "inspect_kernels.py"
with gpu_code.as_if_on(GPUS["H200"]):
    TOO_OLD = hopper._why_not_here()
pytestmark = pytest.mark.skipif(
    gpu_code.missing() is not None, reason=f"compiling for a GPU: {gpu_code.missing()}"
)


def report(implementation: str, options: str, deterministic: bool | None = None) -> dict:
    """Of scripts/inspect_kernels.py, in a process of its own: jax reads the environment once."""
    if implementation == "hopper" and TOO_OLD:
        pytest.skip(TOO_OLD)
    flag = {None: "", True: "--deterministic", False: "--no-deterministic"}[deterministic]
    command = [
        sys.executable,
        SCRIPT,
        "--json",
        "--gpu",
        "H200",
        "--implementation",
        implementation,
        *options.split(),
        *flag.split(),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:] or done.stdout
    return json.loads(done.stdout)


# ---- loops ----

# options, and how many loops: without a mask; with one before it; and with one behind it too
CASES = {
    "full": ("", 1),
    "causal": ("--causal", 2),
    "key_lengths": ("--key-lengths 4096 1000", 3),
    "documents": ("--causal --documents 8", 3),
    "soft_cap": ("--causal --soft-cap 30 --sinks", 2),  # sinks cost a step nothing
    "max_logits": ("--causal --max-logits", 2),
    "dropout": ("--causal --dropout 0.1", 2),
    "alibi": ("--causal --alibi", 2),
    # the blocks that ask it, then those that all see
    "rule": ("--rule Window(512,512)|GlobalTokens(64)", 2),
    "mask": ("--mask 11TS", 2),  # likewise
    "bias": ("--causal --bias 1NTS", 2),
    "one tile, window": ("--batch 1 --window 1000 17", 3),  # to a program
    "one tile, lengths": ("--batch 1 --key-lengths 1000", 3),
}


class Row(NamedTuple):
    """A kernel in a call."""

    kernel: str
    width: int | tuple[int, int]  # of heads; of keys and of values
    case: str  # of CASES
    instructions: int  # of a step without a mask; 5% more are let pass
    # at least this part of the exponentials, in the loop without a mask
    under_products: float = 0.9
    with_a_mask: float = 0.0  # the same, in the others
    deterministic: bool | None = None
    straight: int = 0  # masked blocks that are known to be one: no loop


LOOPS = [
    Row("forward", 64, "full", 427, deterministic=False),
    # the first half of 128 queries
    Row("dq_dk_dv", 64, "full", 737, deterministic=False, under_products=0.5),
    Row("forward", 64, "documents", 437),
    Row("dk_dv", 64, "documents", 366),
    Row("dq", 64, "documents", 525),
    Row("forward", 128, "full", 478, deterministic=False),
    Row("dq_dk_dv", 128, "full", 500, deterministic=False),
    Row("dq_dk_dv", 128, "causal", 500, deterministic=False),
    Row("dq_dk_dv", 128, "documents", 500, deterministic=False),
    Row("forward", 128, "soft_cap", 794),
    Row("dk_dv", 128, "soft_cap", 695, under_products=0),
    Row("dq", 128, "soft_cap", 646),
    Row("forward", 128, "key_lengths", 471),
    Row("dk_dv", 128, "key_lengths", 406),
    Row("dq", 128, "key_lengths", 357),
    Row("forward", 128, "one tile, window", 482, with_a_mask=0.9),
    Row("forward", (64, 128), "one tile, lengths", 474, with_a_mask=0.9),
    Row("forward", 128, "max_logits", 490),
    Row("forward", (192, 128), "max_logits", 495),
    Row("forward", (128, 64), "dropout", 835),  # with two warpgroups: with three it spills
    Row("dk_dv", (128, 64), "dropout", 849),
    Row("dq", (128, 64), "dropout", 539),
    Row("dq_dk_dv", 128, "dropout", 1003, deterministic=False),
    Row("forward", 64, "alibi", 875),
    Row("dk_dv", 64, "alibi", 593, under_products=0),
    Row("dq", 64, "alibi", 1027),
    Row("forward", 128, "alibi", 926, deterministic=False),
    Row("dq_dk_dv", 128, "alibi", 785, under_products=0, deterministic=False),
    Row("forward", 64, "rule", 436),
    Row("dk_dv", 64, "rule", 349),
    Row("dq", 64, "rule", 526, with_a_mask=0.9),
    Row("forward", 128, "rule", 500, with_a_mask=0.9, deterministic=False),
    Row("dq_dk_dv", 128, "rule", 525, deterministic=False),
    Row("forward", 256, "rule", 471, with_a_mask=0.9),
    Row("dk_dv", 256, "rule", 367, under_products=0),
    Row("dq", 256, "rule", 398),
    Row("forward", 64, "mask", 436, with_a_mask=0.9),
    Row("dk_dv", 64, "mask", 349, with_a_mask=0.9),
    Row("dq", 64, "mask", 525, with_a_mask=0.9),
    Row("forward", 128, "mask", 511, with_a_mask=0.9, deterministic=False),
    Row("dq_dk_dv", 128, "mask", 520, with_a_mask=0.9, deterministic=False),
    Row("forward", 256, "mask", 471, with_a_mask=0.9),
    Row("dk_dv", 256, "mask", 368, under_products=0),
    Row("dq", 256, "mask", 398, with_a_mask=0.9),
    Row("forward", 64, "bias", 698, with_a_mask=0.9),
    Row("dk_dv", 64, "bias", 519, with_a_mask=0.9),
    Row("dq", 64, "bias", 844, with_a_mask=0.9),
    Row("forward", 128, "bias", 755, with_a_mask=0.9, deterministic=False),
    Row("dq_dk_dv", 128, "bias", 697, with_a_mask=0.9, deterministic=False),
    Row("forward", 80, "causal", 451),  # as narrow as the heads
    Row("dk_dv", 80, "causal", 338),
    Row("dq", 80, "causal", 323),
    Row("forward", (64, 128), "causal", 461),
    Row("forward", (128, 64), "causal", 437),
    Row("forward", (128, 256), "causal", 469),
    Row("forward", (192, 192), "causal", 454),
    # from 192/128 on they run under the other consumer's
    Row("dk_dv", (192, 192), "causal", 345, under_products=0, straight=1),
    Row("dq", (192, 192), "causal", 391),
    Row("forward", (192, 128), "causal", 482),
    Row("dk_dv", (192, 128), "causal", 347, under_products=0, straight=1),
    Row("dq", (192, 128), "causal", 378),
    Row("forward", 256, "documents", 461),
    Row("dk_dv", 256, "documents", 372, under_products=0),
    Row("dq", 256, "documents", 398),
]
# each compiles once
CALLS = sorted({(row.width, row.case, row.deterministic) for row in LOOPS}, key=str)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: "-".join(map(str, call)))
def test_the_loops_are_tight(call):
    """No spill in a loop of products, no product that waits for the one before; in the loop without
    a mask, and where a row says so in the others, exponentials under the products; and in the first
    no more instructions than there must be."""
    width, case, deterministic = call
    rows = {
        f"flash_attention_{row.kernel}": row
        for row in LOOPS
        if (row.width, row.case, row.deterministic) == call
    }
    head, value = width if isinstance(width, tuple) else (width, width)
    more, count = CASES[case]
    options = (
        f"--batch 2 --length 4096 --heads 8 --kv-heads 2 --head-size {head} --value-size "
        f"{value} {more}"
    )
    options += " --forward" * (rows.keys() == {"flash_attention_forward"})
    kernels = {
        kernel["name"]: kernel for kernel in report("hopper", options, deterministic)["kernels"]
    }
    for name, row in rows.items():
        kernel = kernels[name]
        loops = kernel["loops"]
        assert len(loops) == count - row.straight, kernel
        assert kernel["warnings"] == {}, "products wait for each other"
        assert not any(loop["kinds"]["spill"] for loop in loops), kernel
        unmasked = min(loops, key=lambda loop: loop["instructions"])
        assert unmasked["under_products"] >= row.under_products, kernel
        assert (
            min((loop["under_products"] for loop in loops if loop is not unmasked), default=1)
            >= row.with_a_mask
        ), kernel
        assert unmasked["instructions"] <= 1.05 * row.instructions, kernel


DECODING = [(64, 64, 274), (128, 128, 320), (192, 128, 317)]


@pytest.mark.parametrize("head, value, instructions", whole_but(DECODING, DECODING[1]))
def test_decoding_has_no_spill_and_its_loops_are_under_the_time_of_a_load(
    head, value, instructions
):
    options = (
        "--forward --batch 2 --length 1 --keys 8192 --heads 64 --kv-heads 8 --head-size "
        f"{head} --value-size {value}"
    )
    (kernel,) = report("hopper", f"{options} --key-lengths 8000 10")["kernels"]
    assert (
        kernel["spill_stores"] == kernel["spill_loads"] == 0
        and kernel["registers"] <= 168
        and kernel["warnings"] == {}
    )
    assert min(loop["instructions"] for loop in kernel["loops"]) <= 1.05 * instructions


# ---- what is stored ----

STORES = r"""
import pathlib, re, sys
from scripts import gpu_code
folder = pathlib.Path(sys.argv[1])
gpu_code.prepare(folder)
import jax, jax.numpy as jnp
from pallas_flash import accounting, flash_attention

attend = lambda x: flash_attention(x, x, x, implementation=sys.argv[2], return_residual=True)
for gpu, length in ("A100-80GB", 64), ("A100-80GB", 256), ("H200", 300):
    gpu_code.compiled(accounting.GPUS[gpu], attend, jax.ShapeDtypeStruct((1, length, 2, 64), jnp.bfloat16))
for ptx in folder.glob("*.ptx"):
    code = ptx.read_text()
    lowest = re.findall(r"mov\.b32\s+(%r\d+), (?:-8388609|0fFF7FFFFF);", code)
    stored = {register for store in re.findall(r"st\.global.*\{(.*)\}", code) for register in re.findall(r"%r\d+", store)}
    print(re.search(r"\.entry (\w+)", code).group(1) if ".entry" in code else "", *stored.intersection(lowest))
"""


@pytest.mark.whole
# flash1's m lies in device memory from the beginning
@pytest.mark.parametrize("implementation", ["triton", "standard"])
def test_no_kernel_stores_as_the_maximum_of_a_row_what_it_begins_with(implementation, tmp_path):
    """Triton made that of the larger of it and a block's maximum, in standard's softmax."""
    command = [sys.executable, "-c", STORES, tmp_path, implementation]
    done = subprocess.run(command, capture_output=True, text=True, cwd=SCRIPT.parents[1])
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [line.split() for line in done.stdout.splitlines() if line.strip()]
    assert len(kernels) >= 3 and all(len(words) == 1 for words in kernels), done.stdout


COPIES = r"""
import pathlib, re, sys
from scripts import gpu_code
folder = pathlib.Path(sys.argv[1])
gpu_code.prepare(folder)
import jax, jax.numpy as jnp
from pallas_flash import accounting, flash_attention

def attend(q, k, v, bias=None):
    return flash_attention(q, k, v, bias, implementation="triton").astype(jnp.float32).sum()

shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
few = shape(1, 1, 2, 64), shape(1, 600, 2, 64), shape(1, 600, 2, 64)
many = shape(1, 300, 2, 128), shape(1, 300, 2, 128), shape(1, 300, 2, 128), shape(1, 2, 300, 300)
for x in few, many:
    gpu_code.compiled(accounting.GPUS["H200"], jax.grad(attend, argnums=tuple(range(len(x)))), *x)
for ptx in folder.glob("*.ptx"):
    words = re.findall(r"wgmma\.(?:mma|wait)|bar\.sync|cp\.async\.c[ag]|\.entry flash_attention_\w+", ptx.read_text())
    if words:
        waited = early = False
        for word in words:
            early |= waited and word.startswith("cp")
            waited = word == "wgmma.wait" or waited and word != "bar.sync"
        print(words[0].split()[1], {"wgmma.mma", "cp.async.cg"} <= {*words}, early)
"""


@pytest.mark.whole
def test_no_block_is_copied_before_all_warps_have_waited_for_their_products(tmp_path):
    """On Hopper a warp waits for its own wgmma alone; those of others may still read what the next
    block is copied over."""
    done = subprocess.run(
        [sys.executable, "-c", COPIES, tmp_path],
        capture_output=True,
        text=True,
        cwd=SCRIPT.parents[1],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [line.split() for line in done.stdout.splitlines()]
    assert all(early == "False" for *_, early in kernels), done.stdout
    assert {name for name, both, _ in kernels if both == "True"} >= {
        f"flash_attention_{x}" for x in ("forward", "dq", "dbias")
    }
    assert sum(name == "flash_attention_dkv" for name, *_ in kernels) == 2, done.stdout


FITS = r"""
import pathlib, sys
from scripts import gpu_code
gpu_code.prepare(pathlib.Path(sys.argv[1]))
import jax, jax.numpy as jnp
from pallas_flash import accounting, flash_attention, scores

kind, capability, shared_memory = sys.argv[2], tuple(map(int, sys.argv[3].split("."))), int(sys.argv[4]) << 10
gpu = accounting.GPUS["A100-80GB"]._replace(kind=kind, capability=capability, shared_memory=shared_memory)
shape = lambda *sizes, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(sizes, dtype)

def gradient(H, more):
    def loss(q, k, v, bias, mask, table):
        other = dict(mask=mask, score_mod=scores.T5Bias(table)) if more else dict(is_causal=True)
        o = flash_attention(q, k, v, bias if more else None, implementation="triton", **other)
        return o.astype(jnp.float32).sum()

    x = [shape(1, 128, 1, H)] * 3 + [shape(1, 1, 128, 128), shape(1, 1, 128, 128, dtype=bool), shape(1, 32, dtype=jnp.float32)]
    gpu_code.compiled(gpu, jax.grad(loss, argnums=(0, 1, 2, 3, 5)), *x)

gradient(128, False)
gradient(256, True)
"""


@pytest.mark.whole
@pytest.mark.parametrize(
    # KB of a multiprocessor; jax traces for no RTX 5090 that is not here, but for its twin
    "kind, capability, shared_memory",
    [
        ("NVIDIA A100-SXM4-80GB", "8.0", 164),
        ("NVIDIA GeForce RTX 4090", "8.9", 100),
        ("NVIDIA RTX PRO 6000 Blackwell", "12.0", 100),
        ("NVIDIA B200", "10.0", 228),
    ],
)
def test_the_portable_kernels_fit_into_the_shared_memory_of_every_gpu(
    kind, capability, shared_memory, tmp_path
):
    command = [sys.executable, "-c", FITS, tmp_path, kind, capability, str(shared_memory)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=SCRIPT.parents[1])
    assert done.returncode == 0, done.stderr[-3000:]


# ---- memory ----

N, H, T = 8, 128, 131072
STATISTICS = 2 * 4 * N  # bytes of a token's lse and delta, float32
FACTOR = 2 * N * H  # of its do, multiplied by a factor
MEMORY = [  # implementation, deterministic, bytes that a token's temporaries may take
    ("triton", None, STATISTICS + FACTOR),
    ("hopper", None, STATISTICS),
    ("hopper", False, STATISTICS + 4 * N * H),  # dQ in float32
]


def temporary_bytes(implementation: str, length: int, deterministic: bool | None = None) -> int:
    """Of forward and backward, beside q, k, v, do and what is returned: o, dq, dk, dv."""
    return report(implementation, f"--length {length} --heads {N} --head-size {H}", deterministic)[
        "temporary_bytes"
    ]


@pytest.mark.parametrize("implementation, deterministic, by_token", MEMORY)
def test_temporaries_are_linear_in_the_length(implementation, deterministic, by_token):
    """A byte for each of 10,000 pairs of a query and a key would exceed it."""
    assert temporary_bytes(implementation, T, deterministic) <= 1.01 * by_token * T


def test_those_of_dense_attention_are_quadratic_and_fit_into_no_gpu():
    scores = 4 * N * T * T
    assert temporary_bytes("reference", T) >= scores > max(gpu.memory for gpu in GPUS.values())


# ---- eight GPUs ----

EIGHT = r"""
import os, pathlib, re, sys
os.environ["XLA_FLAGS"] = "--xla_gpu_experimental_parallel_collective_overlap_limit=2"
from scripts import gpu_code
gpu_code.prepare(pathlib.Path(sys.argv[1]))
import jax, jax.numpy as jnp
from pallas_flash import accounting, flash_attention

implementation = sys.argv[2]
attend = lambda q, k, v: flash_attention(q, k, v, is_causal=True, implementation=implementation).astype(jnp.float32).sum()
x = [jax.ShapeDtypeStruct((2, 4096, heads, 64), jnp.bfloat16) for heads in (8, 4, 4)]
for mesh in dict(axes=dict(data=2, model=4), spec=("data", None, "model")), dict(axes=dict(x=8), explicit=True, spec=(None, "x")):
    code = gpu_code.compiled(accounting.GPUS["H200"], jax.grad(attend, argnums=(0, 1, 2)), *x, **mesh).as_text()
    print(*sorted(set(re.findall(r" (all-gather|all-to-all|collective-permute)(?:-start)?\(", code))))
for body in code.split("\n\n"):
    order = re.findall(r" (conditional|collective-permute-start|collective-permute-done|collective-permute)\(", body)
    if order.count("conditional") == 1 and len(order) > 1:
        print(*(word.removeprefix("collective-permute-") for word in order))
"""
GATHERED_AND_ORDER = """
collective-permute
start conditional done
start start conditional done done
"""


@pytest.mark.whole
@pytest.mark.parametrize("implementation", ["blockwise", "triton", "hopper"])
def test_for_eight_gpus_nothing_is_gathered_and_a_sequence_goes_around_under_its_products(
    implementation, tmp_path
):
    if implementation == "hopper" and TOO_OLD:
        pytest.skip(TOO_OLD)
    command = [sys.executable, "-c", EIGHT, tmp_path, implementation]
    done = subprocess.run(command, capture_output=True, text=True, cwd=SCRIPT.parents[1])
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == GATHERED_AND_ORDER


PACKED = r"""
import pathlib, sys
from scripts import gpu_code
gpu_code.prepare(pathlib.Path(sys.argv[1]))
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from pallas_flash import accounting, flash_attention

def loss(q, k, v, ids):
    o = flash_attention(q, k, v, is_causal=True, query_segment_ids=ids, key_value_segment_ids=ids, implementation="hopper")
    return o.astype(jnp.float32).sum()

x = [jax.ShapeDtypeStruct((8, 1024, heads, 64), jnp.bfloat16) for heads in (8, 4, 4)]
step = lambda *x: jax.shard_map(jax.grad(loss, argnums=(0, 1, 2)), in_specs=P("data"), out_specs=P("data"))(*x)
ids = jax.ShapeDtypeStruct((8, 1024), jnp.int32)
gpu_code.compiled(accounting.GPUS["H100"], step, *x, ids, axes=dict(data=8), spec=("data",))
for kernel in gpu_code.kernels(pathlib.Path(sys.argv[1]), "flash_attention_"):
    print(kernel.name)
"""


@pytest.mark.whole
@pytest.mark.skipif(TOO_OLD is not None, reason=str(TOO_OLD))
def test_packed_documents_in_a_checked_shard_map_compile_for_eight_gpus(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PACKED, tmp_path],
        capture_output=True,
        text=True,
        cwd=SCRIPT.parents[1],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [f"flash_attention_{name}" for name in ("dk_dv", "dq", "forward")]
