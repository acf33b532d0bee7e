"""scripts/inspect_kernels.py as its user meets it, its counts, and how it reads the machine code
that a compiler wrote."""

import json
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from pallas_flash import explain
from pallas_flash.accounting import GPUS, name_of
from pallas_flash.choose import implementations
from scripts import inspect_kernels
from scripts.bench import gpu_code

HALF = jax.ShapeDtypeStruct((1, 512, 2, 64), "bfloat16")


def explained(call: str, gpu: str = "H200"):
    parser = inspect_kernels.make_parser()
    return inspect_kernels.explain_call(inspect_kernels.parse(parser, [call, "--gpu", gpu]), parser)


# ---- what it says ----

REFUSED = r"refused +implementation 'hopper' cannot run this call: (it needs jax .* Also: )?wgmma"
NOT_COMPILED = re.escape(
    f"Nothing was compiled for the NVIDIA A100-SXM4-80GB: {gpu_code.missing()}"
)
# float32 has no matrix unit: instructions, products, exponentials, and hundreds of others
LOOP = r"\| flash_attention_forward, loop 1 \| \d+ +\| 0 +\| [1-9]\d* +\| \d{3,} "
SAID = {  # the command: its exit status, and what it prints
    "implementation='hopper', dtype='float32' --gpu H200": (
        1,
        [REFUSED],
    ),
    "T=512, N=2, H=64, dtype='float32', is_causal=True --gpu A100 --forward": (
        0,
        [
            "implementation  triton",
            "not hopper      it needs a GPU .* 8.0. Also: .*wgmma multiplies",
            NOT_COMPILED if gpu_code.missing() else LOOP,
        ],
    ),
    "H=600 --gpu H100 --json": (
        0,
        ['"implementation": "blockwise"', "above 256", "(not_)?compile"],
    ),
}


@pytest.mark.parametrize("command", SAID)
def test_a_report_is_the_choice_the_work_and_either_the_kernels_or_why_there_are_none(command):
    script, (status, expected) = pathlib.Path(inspect_kernels.__file__), SAID[command]
    call, *options = command.split(" --")
    words = [word for option in options for word in f"--{option}".split()]
    done = subprocess.run(
        [sys.executable, str(script), call, *words], capture_output=True, text=True
    )
    assert done.returncode == status, done.stderr
    assert [pattern for pattern in expected if not re.search(pattern, done.stdout)] == []
    if "json" in command:  # and nothing else is printed
        json.loads(done.stdout)
        return
    assert "flash1" not in done.stdout, "an earlier algorithm, which nobody selects by chance"


WRONG = {  # what is said, and the call
    "must be keyword arguments, as K=4, is_causal=True; ValueError('got 4 ": "4",
    "must be keyword arguments, as K=4, is_causal=True; SyntaxError": "T=",
    "got an unexpected keyword argument 'heads'": "heads=4",
    "local_window_size must be": "local_window_size=(1, 2, 3)",
    "key_value_seq_lengths must be": "B=2, key_value_seq_lengths=[5]",
    "mask must be": "mask=array(5, dtype=bool)",
    "got N = 3, K = 2": "N=3, K=2",
    "must be None or one of": "implementation='fast'",
    "Pass key_value_segment_ids too": "S=99, query_segment_ids=np.zeros((B, T))",
    "invalid choice: 'K80'": "",
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_argument_is_explained(message, capsys):
    with pytest.raises(SystemExit, match="2"):
        explained(WRONG[message], "K80" if "K80" in message else "H200")
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("call", re.findall(r"^  '(.*)'$", inspect_kernels.__doc__, re.MULTILINE))
def test_the_calls_in_its_help_are_explained(call):
    assert explained(call).keys() & {"implementation", "refused"}


def test_without_the_wheels_it_names_them_and_how_to_install_them(monkeypatch):
    monkeypatch.setattr(gpu_code.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(gpu_code.shutil, "which", lambda name, path: None)
    names = (
        "jax-cuda13-plugin, jax-cuda13-pjrt, nvidia-cuda-nvcc, nvidia-nvvm, nvidia-cuda-nvdisasm"
    )
    assert gpu_code.missing() == f"it needs {names}: pip install -e '.[compile]'"


# ---- the choice on a GPU that is not here ----


@pytest.mark.parametrize(
    "gpu, capability, mosaic",
    [
        ("A100-80GB", "8.0", "ampere"),
        ("H100", "9.0", "hopper"),
        ("H200", "9.0", "hopper"),
        ("B200", "10.0", "blackwell"),
        ("B300", "10.3", "blackwell"),
    ],
)
def test_the_choice_is_that_of_the_gpu_that_the_abstract_mesh_names(gpu, capability, mosaic):
    here = explain(HALF, HALF, HALF)
    with gpu_code.as_if_on(GPUS[gpu]):
        choice = explain(HALF, HALF, HALF)
        named = explain(HALF, HALF, HALF, implementation="triton")
        tiles = implementations.find(choice.implementation).tiles(choice.problem)
    assert named.implementation == "triton"
    has_mosaic = jax.__version_info__ >= (0, 11, 2)
    assert choice.implementation == (mosaic if has_mosaic else "triton") and choice.tiles == tiles
    said = {"triton": f"{mosaic} comes before it"}
    said |= {"hopper": f"this one has {capability}"} if capability != "9.0" else {}
    said |= {"ampere": "blackwell's: ask for it by name"} if mosaic == "blackwell" else {}
    assert not has_mosaic or all(choice.why_not[name].endswith(said[name]) for name in said)
    assert explain(HALF, HALF, HALF) == here, "it lasts as long as the context"


KINDS = {
    "NVIDIA A100-PCIE-40GB": "A100-40GB",
    "NVIDIA A100 80GB PCIe": "A100-80GB",
    "NVIDIA H100 PCIe": "H100",
    "NVIDIA L40S": None,
    "NVIDIA GH200 480GB": "H200",
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
}


@pytest.mark.parametrize("kind", [*KINDS, *(gpu.kind for gpu in GPUS.values())])
def test_a_gpu_is_known_by_its_kind(kind):
    assert name_of(kind) == (KINDS | {gpu.kind: name for name, gpu in GPUS.items()})[kind]


@pytest.mark.parametrize("gpu, fpus, block", [("A100-80GB", 64, 163), ("RTX-4090", 128, 99)])
def test_xla_is_told_the_units_and_the_shared_memory_of_the_gpu(gpu, fpus, block):
    said = gpu_code._target(GPUS[gpu])
    assert f"fpus_per_core: {fpus}\n" in said
    assert f"shared_memory_per_block_optin: {block << 10}\n" in said


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


def test_a_loop_is_an_innermost_one_with_exponentials_products_of_tcgen05_or_loads_of_them():
    (body,) = gpu_code.loops(SASS)
    assert len(body) == 7 and body[0].startswith("HGMMA") and body[-1].startswith("@P1 BRA")
    for of_tcgen05 in "LDTM.x32 R3, tmem[UR4]", "UTCHMMA gdesc[UR8], gdesc[UR10]":
        assert len(gpu_code.loops(SASS.replace("FADD R3, R3, R4", of_tcgen05))) == 2


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
def test_exponentials_are_overlapped_by_products_not_yet_waited_for(name):
    body, share = BODIES[name]
    assert gpu_code.under_products(body) == share


INSTRUCTIONS = {  # its kind, and the cycles in which it keeps shared memory busy
    # of the 64 and the 16 cycles of a warpgroup's product
    "HGMMA.64x256x16.F32.BF16 R24, R4, gdesc[UR12].tnspB, R24, gsb0": ("products", 64 / 4),
    "@P0 HGMMA.64x64x16.F32.BF16 R24, gdesc[UR12], RZ, !UPT": ("products", (16 + 16) / 4),
    "@P1 MUFU.EX2 R16, R114": ("exp2", 0),
    "MUFU.RCP R2, R3": ("float", 0),
    "FMNMX.NAN R2, R3, R4, !PT": ("float", 0),
    "F2FP.BF16.F32.PACK_AB R2, R3, R4": ("convert", 0),
    "@!P0 LDL.LU R4, [R1]": ("spill", 0),
    "LDSM.16.MT88.4 R4, [R5]": ("shared", 4),
    "@P0 LDSM.16.M88.2 R4, [R5]": ("shared", 2),
    "LDS R4, [R5]": ("shared", 1),
    "STS.64 [R5], R6": ("shared", 2),
    "UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], !UPT": ("products", 0),
    "@P0 LDTM.x32 R4, tmem[UR9]": ("tensor memory", 0),
    "STTM.x16 tmem[UR9], R4": ("tensor memory", 0),
    "UTCBAR [UR4], URZ": ("barrier", 0),
    "LDGDEPBAR": ("barrier", 0),
    "WARPGROUP.DEPBAR.LE gsb0, 0x1": ("barrier", 0),
    "@!UPT UTMALDG.4D [UR8], [UR10]": ("device", 0),
    "LDGSTS.E.BYPASS.LTC128B.128 [R1], desc[UR4][R2.64]": ("device", 4),
    "LDG.E.128 R4, [R6]": ("device", 0),
    "IMAD.MOV.U32 R3, RZ, RZ, R4": ("move", 0),
    "IMAD R3, R4, R5, R6": ("other", 0),
    "@!P1 BRA `(.L_x_1)": ("other", 0),
}


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_an_instruction_is_of_its_kind_and_keeps_shared_memory_busy_for_its_bytes(instruction):
    said = gpu_code.kind(instruction), gpu_code.shared_cycles(instruction)
    assert said == INSTRUCTIONS[instruction]


def test_units_are_the_cycles_of_a_multiprocessor_over_those_of_its_tensor_cores():
    body = ["HMMA.16816.F32"] * 4 + ["LDSM.16.M88.4 R4, [R5]"] * 2 + ["MUFU.EX2", "FADD"]
    units = lambda gpu: gpu_code.units(GPUS[gpu], gpu_code._loop(body))
    # 8 cycles of a scheduler for each product on an A100, 32 on a GeForce
    for gpu, cycles in {"A100-80GB": 8, "RTX-4090": 32, "RTX-5090": 32}.items():
        of_products = dict(zip(("shared memory", "issue", "exponentials"), (32, 8, 8), strict=True))
        expected = {unit: n / (4 * cycles) for unit, n in of_products.items()}
        assert units(gpu) == pytest.approx(expected, rel=0.01)
    body = ["HGMMA.64x64x16.F32.BF16 R24, gdesc[UR12], R24, gsb0", "MUFU.EX2"]
    loop = gpu_code._loop(body)
    assert gpu_code.units(GPUS["H100"], loop)["shared memory"] == pytest.approx(1, rel=0.01)
    assert loop.from_registers == 0
    for body in ["FFMA", "MUFU.EX2"], ["UTCHMMA gdesc[UR4], gdesc[UR6]"]:
        assert gpu_code.units(GPUS["B200"], gpu_code._loop(body)) is None
