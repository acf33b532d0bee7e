"""scripts/inspect_kernels.py as its user meets it, its counts, and how it reads the machine code
that a compiler wrote."""

import json
import math
import pathlib
import subprocess
import sys

import jax
import numpy as np
import oracle
import pytest

from pallas_flash import explain
from pallas_flash.accounting import GPUS, name_of
from scripts import gpu_code, inspect_kernels

HALF = jax.ShapeDtypeStruct((1, 512, 2, 64), "bfloat16")


def parsed(command: str):
    parser = inspect_kernels.make_parser()
    return inspect_kernels.parse(parser, command.split()), parser


def explained(command: str):
    args, parser = parsed(command)
    return inspect_kernels.explained(args, inspect_kernels.call_of(args), parser)


# ---- what it says ----


def run(*command):
    script = pathlib.Path(inspect_kernels.__file__)
    return subprocess.run([sys.executable, str(script), *command], capture_output=True, text=True)


def test_a_refused_call_is_an_exit_status_with_the_reason_and_the_work():
    done = run("--gpu", "H200", "--implementation", "hopper", "--dtype", "float32")
    assert done.returncode == 1, done.stderr
    assert (
        "refused         implementation 'hopper' cannot run this call: wgmma multiplies bfloat16 "
        "and float16" in done.stdout
    )
    assert "backward, 5 products" in done.stdout


def test_a_report_is_the_choice_the_work_and_either_the_kernels_or_why_there_are_none():
    command = (
        "--gpu A100 --length 512 --heads 2 --head-size 64 --dtype float32 --causal --forward"
    ).split()
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert (
        "implementation  triton" in done.stdout
        and "not hopper      wgmma multiplies" in done.stdout
    )
    if gpu_code.missing():
        assert (
            f"Nothing was compiled for the NVIDIA A100-SXM4-80GB: {gpu_code.missing()}"
            in done.stdout
        )
        return
    lines = {line.split("  ")[0]: line.split() for line in done.stdout.splitlines()}
    assert int(lines["flash_attention_forward"][1]) <= 255  # registers
    loop = dict(zip(lines[""], lines["flash_attention_forward, loop 1"][3:], strict=False))
    assert int(loop["float"]) > 500 and int(loop["exp2"]) > 0 and loop["products"] == "0", (
        "float32 has no matrix unit"
    )


def test_json_has_the_same_and_nothing_else_is_printed():
    done = run("--gpu", "H100", "--head-size", "300", "--json")
    report = json.loads(done.stdout)
    assert report["implementation"] == "blockwise" and "above 256" in report["why_not"]["triton"]
    assert report["work"][0]["least_seconds"] == max(report["work"][0]["seconds"].values())
    assert ("not_compiled" in report) == (gpu_code.missing() is not None) and report.get(
        "kernels", []
    ) == []


@pytest.mark.parametrize(
    "command, message",
    [
        ("--window 1 2 3", "--window takes one number or two; got 3."),
        (
            "--batch 2 --key-lengths 5",
            "--key-lengths takes one number for each of the 2 batch rows; got 1.",
        ),
        ("--mask TS", "must be BNTS, with a 1 in place of each axis that is broadcast; got 'TS'"),
        ("--gpu K80", "invalid choice: 'K80'"),
        ("--heads 3 --kv-heads 2", "got N = 3, K = 2"),
        ("--implementation fast", "must be None or one of"),
        ("--documents 2 --keys 99", "give key_value_segment_ids too"),
    ],
)
def test_a_wrong_argument_is_explained(command, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        explained(command)
    assert message in capsys.readouterr().err


def test_without_the_wheels_it_names_them_and_how_to_install_them(monkeypatch):
    monkeypatch.setattr(gpu_code.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(gpu_code.shutil, "which", lambda name, path: None)
    names = (
        "jax-cuda13-plugin, jax-cuda13-pjrt, nvidia-cuda-nvcc, nvidia-nvvm, nvidia-cuda-nvdisasm"
    )
    assert gpu_code.missing() == f"it needs {names}: pip install -e '.[compile]'"


# ---- the choice on a GPU that is not here ----


@pytest.mark.parametrize(
    "gpu, capability", [("A100-80GB", "8.0"), ("H100", "9.0"), ("H200", "9.0")]
)
def test_the_choice_is_that_of_the_gpu_that_the_abstract_mesh_names(gpu, capability):
    here = explain(HALF, HALF, HALF)
    with gpu_code.as_if_on(GPUS[gpu]):
        choice = explain(HALF, HALF, HALF)
        asked = explain(HALF, HALF, HALF, implementation="triton")
    assert asked.implementation == "triton"
    has_hopper = capability == "9.0" and jax.__version_info__ >= (0, 11, 2)
    assert choice.implementation == ("hopper" if has_hopper else "triton")
    if capability == "8.0" and jax.__version_info__ >= (0, 11, 2):
        assert choice.why_not["hopper"].endswith("this one has 8.0")
    assert explain(HALF, HALF, HALF) == here, "it lasts as long as the context"


KINDS = {
    "NVIDIA A100-PCIE-40GB": "A100-40GB",
    "NVIDIA A100 80GB PCIe": "A100-80GB",
    "NVIDIA H100 PCIe": "H100",
    "NVIDIA L40S": None,
}


@pytest.mark.parametrize("kind", [*KINDS, *(gpu.kind for gpu in GPUS.values())])
def test_a_gpu_is_known_by_its_kind(kind):
    assert name_of(kind) == (KINDS | {gpu.kind: name for name, gpu in GPUS.items()})[kind]


# ---- what it counts ----

CALLS = {
    "full": "--keys 53 --heads 6 --kv-heads 2",
    "causal": "--causal --heads 2",
    "causal, offset": "--causal --query-offset 16 --keys 53",
    "window": "--window 7",
    "window of two sides": "--window 9 2 --keys 53 --query-offset -3",
    "lengths": "--key-lengths 5 37 --query-lengths 0 20 --causal",
    "documents": "--documents 3 --causal",
}


@pytest.mark.parametrize("name", CALLS)
def test_pairs_are_those_that_brute_force_counts(name):
    args, _ = parsed(f"--batch 2 --length 37 {CALLS[name]}")
    call = {key: x for key, x in inspect_kernels.call_of(args).items() if x is not None}
    seen = oracle.visible(2, args.heads, 37, args.keys, call)
    assert inspect_kernels.visible_pairs(args) == np.sum(seen)


def test_pairs_of_a_rule_are_those_that_brute_force_counts():
    args, _ = parsed(
        "--batch 2 --length 37 --rule Dilated(3)|GlobalTokens(2) --causal --key-lengths 5 37"
    )
    i, j = np.ogrid[:37, :37]
    seen = (((i - j) % 3 == 0) | (i < 2) | (j < 2)) & (j <= i)
    assert inspect_kernels.visible_pairs(args) == args.heads * sum(
        np.sum(seen & (j < length)) for length in (5, 37)
    )


def test_work_is_counted_from_shapes_and_pairs():
    report = explained(
        "--gpu H100 --batch 2 --length 64 --keys 48 --heads 6 --kv-heads 2 --head-size 24 "
        "--value-size 40"
    )
    forward, one, two = report["work"]
    B, T, S, N, K, H, Hv = 2, 64, 48, 6, 2, 24, 40
    product = lambda width: 2 * B * N * T * S * width
    assert forward["flops"] == product(H) + product(Hv)
    assert one["flops"] == 3 * product(H) + 2 * product(Hv)
    assert two["flops"] - one["flops"] == product(H) + product(Hv), "Q K^T and dO V^T once more"
    assert [w["exponentials"] for w in report["work"]] == [B * N * T * S * n for n in (1, 1, 2)]
    q, k, v, o, row = (
        math.prod(shape)
        for shape in ((B, T, N, H), (B, S, K, H), (B, S, K, Hv), (B, T, N, Hv), (B, T, N))
    )
    assert forward["bytes"] == 2 * (q + k + v + o) + 4 * row
    assert one["bytes"] == 2 * 2 * (q + k + v + o) + 2 * 4 * row
    assert two["bytes"] == 2 * 3 * (q + k + v + o) + 4 * 4 * row


def test_dense_arrays_are_bytes_to_move():
    plain, dense = (
        explained(f"--length 64 --keys 48 --heads 6 {more}")["work"]
        for more in ("", "--bias 1NTS --mask BN1S")
    )
    bias, mask = 2 * 6 * 64 * 48, 6 * 48
    more = [after["bytes"] - before["bytes"] for before, after in zip(plain, dense, strict=True)]
    assert more == [bias + mask, 2 * bias + mask, 3 * bias + 2 * mask]


def test_the_slowest_part_bounds_the_time():
    assert GPUS["H200"].exponentials == pytest.approx(3.87e12, rel=1e-2)
    (work, *_) = explained("--gpu H200 --length 16384 --heads 16 --head-size 128 --causal")["work"]
    assert (
        work["least_seconds"]
        == work["seconds"]["products"]
        == pytest.approx(1100e9 / 989e12, rel=1e-3)
    )
    (work, *_) = explained("--gpu H200 --length 16384 --heads 16 --head-size 128 --window 0")[
        "work"
    ]
    assert (
        work["least_seconds"]
        == work["seconds"]["memory"]
        == pytest.approx(269e6 / 4.8e12, rel=1e-2)
    )
    (half, *_), (single, *_) = (
        explained(f"--gpu A100 --dtype {dtype}")["work"] for dtype in ("float16", "float32")
    )
    assert single["seconds"]["products"] == pytest.approx(16 * half["seconds"]["products"])


# ---- how it reads machine code ----

SASS = """
.text.kernel:
        /*0000*/                   MUFU.EX2 R0, R0 ;
.L_x_1:
        /*0010*/                   UIADD3 UR4, UR4, 0x1, URZ ;
.L_x_2:
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0040*/                   MUFU.EX2 R1, R2 ;
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0060*/                   MUFU.EX2 R1, R2 ;
        /*0070*/              @!P0 STL [R1], R3 ;
        /*0080*/               @P1 BRA `(.L_x_2) ;
        /*0090*/              @!P2 BRA `(.L_x_1) ;
.L_x_4:
        /*00a0*/                   FADD R3, R3, R4 ;
        /*00b0*/               @P1 BRA `(.L_x_4) ;
        /*00c0*/                   EXIT ;
.L_x_3:
        /*00d0*/                   MUFU.EX2 R1, R2 ;
        /*00e0*/                   BRA `(.L_x_1) ;
"""


def test_a_loop_is_an_innermost_one_with_exponentials():
    (body,) = gpu_code.loops(SASS)
    assert len(body) == 7 and body[0].startswith("HGMMA") and body[-1].startswith("@P1 BRA")


WAIT = "WARPGROUP.DEPBAR.LE gsb0, "
BODIES = {
    "a wait before": (["HGMMA x, gsb0", WAIT + "0x0", "MUFU.EX2"], 0),
    "half of them": (["HGMMA x", "MUFU.EX2", "HGMMA x, gsb0", WAIT + "0x0", "MUFU.EX2"], 0.5),
    "one of two groups still runs": (
        ["HGMMA x, gsb0", "HGMMA y, gsb0", WAIT + "0x1", "MUFU.EX2", WAIT + "0x0"],
        1,
    ),
    "begun in the step before": (["MUFU.EX2", WAIT + "0x0", "HGMMA x, gsb0"], 1),
    "no wgmma": (["HMMA.16816.F32", "MUFU.EX2"], None),
}


@pytest.mark.parametrize("name", BODIES)
def test_exponentials_run_under_products_that_nobody_has_waited_for(name):
    body, part = BODIES[name]
    assert gpu_code.under_products(body) == part


INSTRUCTIONS = {
    "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR12], RZ, !UPT": "products",
    "@P1 MUFU.EX2 R16, R114": "exp2",
    "MUFU.RCP R2, R3": "float",
    "FMNMX.NAN R2, R3, R4, !PT": "float",
    "F2FP.BF16.F32.PACK_AB R2, R3, R4": "convert",
    "@!P0 LDL.LU R4, [R1]": "spill",
    "LDSM.16.M88.4 R4, [R5]": "shared",
    "LDS R4, [R5]": "shared",
    "LDGDEPBAR": "barrier",
    "WARPGROUP.DEPBAR.LE gsb0, 0x1": "barrier",
    "@!UPT UTMALDG.4D [UR8], [UR10]": "device",
    "IMAD.MOV.U32 R3, RZ, RZ, R4": "move",
    "IMAD R3, R4, R5, R6": "other",
    "@!P1 BRA `(.L_x_1)": "other",
}


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_an_instruction_is_of_its_kind(instruction):
    assert gpu_code.kind(instruction) == INSTRUCTIONS[instruction]
