"""Compiles a function for a GPU that need not be there, and reads the machine code of its kernels.

`prepare` must come before jax is imported, which reads the environment once. So this runs in a
separate process, and nothing here imports the package: the caller passes a `gpu`, one of
`pallas_flash.accounting.GPUS`.
"""

import functools
import importlib.util
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
from typing import NamedTuple

TARGET = """
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} {feature} }}
  core_count: {cores}
  fpus_per_core: {fpus}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: {registers}
  registers_per_core_limit: {registers}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {block}
  shared_memory_per_core: {shared_memory}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  clock_rate_ghz: {ghz}
  memory_bandwidth: {bandwidth:.0f}
  l2_cache_size: {l2}
  device_memory_size: {memory}
}}
platform_name: "CUDA"
device_description_str: "{kind}"
runtime_version {{ major: 13 }}
dnn_version_info {{ major: 9 minor: 12 }}
"""


# ---- compiling ----

_WHEEL = pathlib.Path(sysconfig.get_paths()["purelib"], "nvidia", "cu13", "bin")
_PATH = f"{_WHEEL}{os.pathsep}{os.environ.get('PATH', '')}"


def missing() -> str | None:
    """Why nothing can be compiled here, and what to do; None where it can."""
    ptxas = shutil.which("ptxas", path=_PATH)
    found = {
        "jax-cuda13-plugin": importlib.util.find_spec("jax_cuda13_plugin"),
        "jax-cuda13-pjrt": importlib.util.find_spec("jax_plugins"),
        "nvidia-cuda-nvcc": ptxas,
        "nvidia-nvvm": ptxas and pathlib.Path(ptxas).parents[1].joinpath("nvvm").exists(),
        "nvidia-cuda-nvdisasm": shutil.which("nvdisasm", path=_PATH),
    }
    lacking = [name for name, where in found.items() if not where]
    return f"it needs {', '.join(lacking)}: pip install -e '.[compile]'" if lacking else None


def prepare(folder: pathlib.Path):
    """Sets the environment such that jax compiles without a GPU and writes the kernels' code into
    an empty `folder`."""
    assert "jax" not in sys.modules, "jax has read the environment already"
    os.environ |= dict(
        JAX_PLATFORMS="cpu",
        JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
        TF_CPP_MIN_LOG_LEVEL="3",
        PATH=_PATH,
        MOSAIC_GPU_DUMP_TO=str(folder),
        XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder} "
        "--xla_dump_emitter_re=ptx",
    )


def as_if_on(gpu, axes: dict[str, int] | None = None, explicit: bool = False):
    """The context in which code is traced, and `explain` answers, for `gpu`, or for a mesh of
    several with these axes."""
    import jax
    from jax.sharding import AbstractDevice, AbstractMesh

    # a mesh of explicit axes has to be that of the arguments, whose devices are jax's own
    kind = AbstractDevice if explicit else _described(gpu.capability)
    device = kind(device_kind=gpu.kind, num_cores=gpu.cores, platform="gpu")
    names, sizes, types = _axes(axes, explicit)
    return jax.sharding.use_abstract_mesh(
        AbstractMesh(sizes, names, axis_types=types, abstract_device=device)
    )


@functools.cache
def _described(capability: tuple[int, int]) -> type:
    """A device that says its compute capability: for one that does not Mosaic compiles as for
    9.0."""
    from jax.sharding import AbstractDevice

    said = ".".join(map(str, capability))
    return type("Described", (AbstractDevice,), dict(compute_capability=said))


def compiled(
    gpu,
    function,
    *shapes,
    axes: dict[str, int] | None = None,
    explicit: bool = False,
    spec: tuple = (),
):
    """`function` compiled for `gpu`. Shapes are pytrees of jax.ShapeDtypeStruct; on a mesh all are
    sharded by `spec`."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    names, sizes, types = _axes(axes, explicit)
    topology = topologies.get_topology_desc(
        "described", "cuda", target_config=_target(gpu), topology=f"1x1x{math.prod(sizes)}"
    )
    mesh = Mesh(np.reshape(topology.devices, sizes), names, axis_types=types)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
    with as_if_on(gpu, axes, explicit):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).compile()


def _target(gpu) -> str:
    """The description of `gpu` that XLA compiles for."""
    major, minor = gpu.capability
    more = dict(major=major, minor=minor, fpus=64 if gpu.capability == (8, 0) else 128)
    # XLA sets it by itself for a GPU that is here
    more["feature"] = "feature_extension: ACCELERATED_FEATURES" if major >= 12 else ""
    return TARGET.format(**gpu._asdict(), **more, block=gpu.cta_memory, ghz=gpu.clock / 1e9)


def _axes(axes: dict[str, int] | None, explicit: bool):
    """Names, sizes and types of a mesh's axes; by default of one device."""
    from jax.sharding import AxisType

    axes = axes or dict(x=1)
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return tuple(axes), tuple(axes.values()), (kind,) * len(axes)


# ---- reading ----


class Loop(NamedTuple):
    """A step of an innermost loop over tiles, as each warp runs it."""

    instructions: int
    kinds: dict[str, int]  # instructions of each kind in KINDS
    # the fraction of exponentials that overlap with wgmma; None where there is no wgmma
    under_products: float | None
    product_flops: int  # of a warp; 0 by tcgen05, whose sizes are not in the code
    # of a multiprocessor's shared memory, for the accesses of a warp, and a quarter of those of the
    # wgmma products of its warpgroup
    shared_cycles: float
    from_registers: float | None  # the part of the wgmma products whose left operand is there


class Kernel(NamedTuple):
    name: str
    registers: int  # per thread
    shared_memory: int  # bytes per CTA
    stack: int  # bytes per thread
    spill_stores: int
    spill_loads: int
    warnings: dict[str, str]  # of ptxas: that it serializes wgmma
    loops: list[Loop]  # in the order of the code


def kernels(folder: pathlib.Path, prefix: str) -> list[Kernel]:
    """The kernels in `folder` whose names begin with `prefix`, by name."""
    names = {}
    for ptx in folder.glob("*.ptx"):
        # some files hold only constants
        if entry := re.search(rf"\.entry ({prefix}\w*)", ptx.read_text()):
            names[ptx] = entry[1].removesuffix("_mosaic_gpu_kernel")
    return [_kernel(ptx, names[ptx]) for ptx in sorted(names, key=lambda ptx: (names[ptx], ptx))]


def _kernel(ptx: pathlib.Path, name: str) -> Kernel:
    cubin = ptx.with_suffix(".cubin")
    target = re.search(r"\.target (\w+)", ptx.read_text()).group(1)
    log = _run("ptxas", f"-arch={target}", "-O3", "-v", ptx, "-o", cubin).stderr

    def read(pattern: str) -> int:
        return int(re.search(pattern, log).group(1))

    return Kernel(
        name=name,
        registers=read(r"Used (\d+) registers"),
        shared_memory=_shared_memory(ptx.parent, name),
        stack=read(r"(\d+) bytes stack frame"),
        spill_stores=read(r"(\d+) bytes spill stores"),
        spill_loads=read(r"(\d+) bytes spill loads"),
        warnings=dict(
            re.findall(r"\((C75\d\d)\) (.*?)(?: (?:in|for the) function.*)?$", log, re.M)
        ),
        loops=[_loop(body) for body in loops(_run("nvdisasm", "-c", cubin).stdout)],
    )


def compiler() -> str:
    """Versions of jax and ptxas, which the code depends on."""
    import jax

    release = re.search(r"release ([\d.]+)", _run("ptxas", "--version").stdout).group(1)
    return f"jax {jax.__version__}, ptxas {release}"


def _run(tool: str, *args):
    done = subprocess.run([shutil.which(tool, path=_PATH), *args], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tool} of {shutil.which(tool, path=_PATH)}: {done.stderr.strip()}")
    return done


def _shared_memory(folder: pathlib.Path, name: str) -> int:
    """Requested at launch: Mosaic dumps it beside the kernel, XLA in its list of thunks."""
    for path in folder.glob(f"{name}_*.resources.txt"):
        return int(re.search(r"smem_scratch_bytes=(\d+)", path.read_text()).group(1))
    launches = "".join(path.read_text() for path in folder.glob("*.thunk_sequence.txt"))
    return int(re.search(rf"\b{name} .*shared_memory: (\d+)", launches).group(1))


OF_TILES = r"MUFU\.EX2|UTC\w*MMA|LDTM"


def loops(sass: str) -> list[list[str]]:
    """The instructions of each innermost loop over tiles, in a kernel that nvdisasm lists: it has
    exponentials, or begins products of tcgen05, or loads from tensor memory."""
    code, labels = [], {}
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label.group(1)] = len(code)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            code.append(instruction.group(1))
    spans = []
    for end, instruction in enumerate(code):
        if (branch := re.search(r"\bBRA\b.*\((\.L\w+)\)", instruction)) and labels.get(
            branch.group(1), end + 1
        ) <= end:
            spans.append((labels[branch.group(1)], end + 1))
    is_of_tiles = lambda span: any(re.search(OF_TILES, x) for x in code[slice(*span)])
    # rare paths stand behind the kernel's EXIT and jump back into its loop: they are no loops
    spans = [s for s in spans if is_of_tiles(s) and "EXIT" not in code[slice(*s)]]
    inner = lambda s: not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)
    return [code[slice(*s)] for s in sorted(spans) if inner(s)]


# By the first pattern that an instruction's name begins with. "spill" is local memory.
KINDS = {
    "products": r"HGMMA|HMMA|UTC\w*MMA",
    "exp2": r"MUFU\.EX2",
    "float": r"FFMA|FADD|FMUL|FMNMX|FSEL|FSET|FCHK|MUFU|HADD|HMUL|HFMA|HMNMX",
    "convert": r"F2F|I2F|F2I|I2I|FRND",
    "spill": r"LDL|STL",
    "shared": r"LDS|STS|ATOMS",
    "tensor memory": r"LDTM|STTM",
    "barrier": r"BAR|UTCBAR|SYNCS|WARPGROUP|DEPBAR|LDGDEPBAR|MEMBAR|FENCE|WARPSYNC|NANOSLEEP|ELECT"
    r"|BSSY|BSYNC|ERRBAR|CCTL",
    "device": r"LDG|STG|RED|ATOM|UTMA|UBLK|LDC|ULDC",
    "move": r"MOV|UMOV|IMAD\.MOV|CS2R|S2R|S2UR|R2UR|SHFL|PRMT|UPRMT|R2P|P2R",
    "other": "",  # integers, predicates, branches
}


def kind(instruction: str) -> str:
    """The key of KINDS that an instruction belongs to."""
    name = re.sub(r"^@!?U?P\w+\s+", "", instruction)
    return next(kind for kind, pattern in KINDS.items() if re.match(pattern, name))


def _loop(body: list[str]) -> Loop:
    kinds = [kind(instruction) for instruction in body]
    counts = {name: kinds.count(name) for name in KINDS}
    wgmma = list(filter(None, map(_wgmma, body)))
    by_mma = sum(" HMMA" in f" {instruction}" for instruction in body)
    flops = sum(2 * 64 * n * 16 // 4 for n, _ in wgmma) or 4096 * by_mma
    return Loop(
        len(body),
        counts,
        under_products(body),
        flops,
        sum(map(shared_cycles, body)),
        sum(in_registers for _, in_registers in wgmma) / len(wgmma) if wgmma else None,
    )


def _wgmma(instruction: str) -> tuple[int, bool] | None:
    """The columns of a wgmma product of 64 rows and a depth of 16, and whether its left operand is
    in registers."""
    found = re.search(r"HGMMA\.64x(\d+)x16\.\S+ R\d+, (\w+)", instruction)
    return found and (int(found[1]), found[2] != "gdesc")


def shared_cycles(instruction: str) -> float:
    """Cycles for which a warp's access keeps shared memory busy, at 128 bytes each without bank
    conflicts. A warpgroup's product reads 16 rows of its right operand for each of the columns, in
    16 bits, and 64 rows of the left one, unless registers hold it."""
    if product := _wgmma(instruction):
        columns, in_registers = product
        return (columns + 64 * (not in_registers)) * 16 * 2 / 128 / 4
    name, *modifiers = re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0].split(".")
    if not re.match(r"LDSM|STSM|LDGSTS|LDS$|STS$|ATOMS", name):
        return 0
    matrices_or_bits = {"4": 4, "128": 4, "2": 2, "64": 2}  # of 128 bytes, or of each lane
    return matrices_or_bits.get(modifiers[-1], 1) if modifiers else 1


def units(gpu, loop: Loop) -> dict[str, float] | None:
    """The cycles of each unit of a multiprocessor for a step, over those of its tensor cores; None
    where the loop has no products.

    Each of four schedulers issues an instruction a cycle, and has a tensor core and the units of 4
    exponentials a cycle; they share the shared memory.
    """
    if not loop.product_flops:
        return None
    schedulers = 4
    tensor = loop.product_flops * schedulers * gpu.cores * gpu.clock / gpu.products
    cycles = {
        "shared memory": schedulers * loop.shared_cycles,
        "issue": loop.instructions,
        "exponentials": 32 // 4 * loop.kinds["exp2"],
    }
    return {unit: count / tensor for unit, count in cycles.items()}


def under_products(body: list[str]) -> float | None:
    """The fraction of a loop's exponentials that run while wgmma products are in flight; None where
    it has no wgmma.

    Products are asynchronous: a group, which ends with `gsb0`, is in flight until a wait (DEPBAR)
    leaves fewer.
    """
    if not any("HGMMA" in instruction for instruction in body):
        return None
    groups, is_open, overlaps = 0, False, []
    for instruction in body * 2:  # the second step starts with what the first left in flight
        if "HGMMA" in instruction:
            is_open = "gsb0" not in instruction
            groups += not is_open
        elif wait := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\w+)", instruction):
            groups = min(groups, int(wait.group(1), 16))
        elif "MUFU.EX2" in instruction:
            overlaps.append(groups > 0 or is_open)
    second = overlaps[len(overlaps) // 2 :]
    return sum(second) / len(second)
