"""Compiles a function for a GPU that need not be there, and reads what became of its kernels.

`prepare` must come before jax is imported, which reads the environment once; so this runs in a
process of its own, and nothing here imports the package: a `gpu` is one of
`pallas_flash.accounting.GPUS`, and comes from the caller.
"""

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
    there = {
        "jax-cuda13-plugin": importlib.util.find_spec("jax_cuda13_plugin"),
        "jax-cuda13-pjrt": importlib.util.find_spec("jax_plugins"),
        "nvidia-cuda-nvcc": ptxas,
        "nvidia-nvvm": ptxas and pathlib.Path(ptxas).parents[1].joinpath("nvvm").exists(),
        "nvidia-cuda-nvdisasm": shutil.which("nvdisasm", path=_PATH),
    }
    lacking = [name for name, found in there.items() if not found]
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
    """The context in which code is traced for `gpu`, or for a mesh of several with these axes, and
    `explain` speaks of it."""
    import jax
    from jax.sharding import AbstractDevice, AbstractMesh

    device = AbstractDevice(device_kind=gpu.kind, num_cores=gpu.cores, platform="gpu")
    names, sizes, types = _axes(axes, explicit)
    return jax.sharding.use_abstract_mesh(
        AbstractMesh(sizes, names, axis_types=types, abstract_device=device)
    )


def compiled(
    gpu,
    function,
    *shapes,
    axes: dict[str, int] | None = None,
    explicit: bool = False,
    spec: tuple = (),
):
    """`function` compiled for `gpu`; shapes are pytrees of jax.ShapeDtypeStruct, on a mesh all
    sharded by `spec`."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    major, minor = gpu.capability
    more = dict(
        major=major,
        minor=minor,
        fpus=64 if major == 8 else 128,
        block=gpu.shared_memory - 1024,
        ghz=gpu.clock / 1e9,
    )
    names, sizes, types = _axes(axes, explicit)
    # which XLA turns on by itself for a GPU that is here
    more["feature"] = "feature_extension: ACCELERATED_FEATURES" if major >= 12 else ""
    target, devices = TARGET.format(**gpu._asdict(), **more), math.prod(sizes)
    topology = topologies.get_topology_desc(
        "described", "cuda", target_config=target, topology=f"1x1x{devices}"
    )
    mesh = Mesh(np.reshape(topology.devices, sizes), names, axis_types=types)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
    with as_if_on(gpu, axes, explicit):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).compile()


def _axes(axes: dict[str, int] | None, explicit: bool):
    """Names, sizes and types of the axes of a mesh; of one device by default."""
    from jax.sharding import AxisType

    axes = axes or dict(x=1)
    return (
        tuple(axes),
        tuple(axes.values()),
        (AxisType.Explicit if explicit else AxisType.Auto,) * len(axes),
    )


# ---- reading ----


class Loop(NamedTuple):
    """The innermost loop over tiles: a step of it, as each warp runs it."""

    instructions: int
    # how many of each kind in KINDS; "spill" moves what registers do not hold
    kinds: dict[str, int]
    # the part of the exponentials that run under wgmma; None where there is no wgmma
    under_products: float | None


class Kernel(NamedTuple):
    name: str
    registers: int  # of a thread
    shared_memory: int  # bytes of a program
    stack: int  # bytes of a thread
    spill_stores: int
    spill_loads: int
    warnings: dict[str, str]  # of ptxas: that products wait for each other
    loops: list[Loop]  # in the order of the code


def kernels(folder: pathlib.Path, prefix: str) -> list[Kernel]:
    """The kernels in `folder` whose names begin with `prefix`, in the order of their names."""
    found = []
    for ptx in sorted(folder.glob("*.ptx")):
        # some files hold constants alone
        entry = re.search(rf"\.entry ({prefix}\w*)", ptx.read_text())
        if entry:
            found.append(_kernel(ptx, entry.group(1).removesuffix("_mosaic_gpu_kernel")))
    return sorted(found, key=lambda kernel: kernel.name)


def _kernel(ptx: pathlib.Path, name: str) -> Kernel:
    cubin = ptx.with_suffix(".cubin")
    target = re.search(r"\.target (\w+)", ptx.read_text()).group(1)
    log = _run("ptxas", f"-arch={target}", "-O3", "-v", ptx, "-o", cubin).stderr
    number = lambda pattern: int(re.search(pattern, log).group(1))
    return Kernel(
        name=name,
        registers=number(r"Used (\d+) registers"),
        shared_memory=_shared_memory(ptx.parent, name),
        stack=number(r"(\d+) bytes stack frame"),
        spill_stores=number(r"(\d+) bytes spill stores"),
        spill_loads=number(r"(\d+) bytes spill loads"),
        warnings=dict(
            re.findall(r"\((C75\d\d)\) (.*?)(?: (?:in|for the) function.*)?$", log, re.M)
        ),
        loops=[_loop(body) for body in loops(_run("nvdisasm", "-c", cubin).stdout)],
    )


def compiler() -> str:
    """Its versions, since another one makes other code."""
    import jax

    release = re.search(r"release ([\d.]+)", _run("ptxas", "--version").stdout).group(1)
    return f"jax {jax.__version__}, ptxas {release}"


def _run(tool: str, *args):
    done = subprocess.run([shutil.which(tool, path=_PATH), *args], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tool} of {shutil.which(tool, path=_PATH)}: {done.stderr.strip()}")
    return done


def _shared_memory(folder: pathlib.Path, name: str) -> int:
    """It is asked for at the launch: Mosaic notes it beside the kernel, XLA in its list of
    launches."""
    for path in folder.glob(f"{name}_*.resources.txt"):
        return int(re.search(r"smem_scratch_bytes=(\d+)", path.read_text()).group(1))
    launches = "".join(path.read_text() for path in folder.glob("*.thunk_sequence.txt"))
    return int(re.search(rf"\b{name} .*shared_memory: (\d+)", launches).group(1))


def loops(sass: str) -> list[list[str]]:
    """The instructions of each innermost loop with exponentials, in nvdisasm's listing of a
    kernel."""
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
    holds = lambda span, word: any(word in instruction for instruction in code[slice(*span)])
    # What seldom happens stands behind the end of the kernel, and jumps back from there into its
    # loop: no loop of its own.
    spans = [s for s in spans if holds(s, "MUFU.EX2") and "EXIT" not in code[slice(*s)]]
    inner = lambda s: not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)
    return [code[slice(*s)] for s in sorted(spans) if inner(s)]


# The first pattern that an instruction's name begins with. Uniform instructions (U...) are their
# namesakes, once for a warp.
KINDS = {
    "products": r"HGMMA|HMMA",
    "exp2": r"MUFU\.EX2",
    "float": r"FFMA|FADD|FMUL|FMNMX|FSEL|FSET|FCHK|MUFU|HADD|HMUL|HFMA|HMNMX",
    "convert": r"F2F|I2F|F2I|I2I|FRND",
    "spill": r"LDL|STL",
    "shared": r"LDS|STS|ATOMS",
    "barrier": r"BAR|SYNCS|WARPGROUP|DEPBAR|LDGDEPBAR|MEMBAR|FENCE|WARPSYNC|NANOSLEEP|ELECT|BSSY"
    r"|BSYNC|ERRBAR|CCTL",
    "device": r"LDG|STG|RED|ATOM|UTMA|UBLK|LDC|ULDC",
    "move": r"MOV|UMOV|IMAD\.MOV|CS2R|S2R|S2UR|R2UR|SHFL|PRMT|UPRMT|R2P|P2R",
    "other": "",  # integers, predicates, branches
}


def kind(instruction: str) -> str:
    """The row of KINDS that an instruction belongs to."""
    name = re.sub(r"^@!?U?P\w+\s+", "", instruction)
    return next(kind for kind, pattern in KINDS.items() if re.match(pattern, name))


def _loop(body: list[str]) -> Loop:
    kinds = [kind(instruction) for instruction in body]
    return Loop(len(body), {name: kinds.count(name) for name in KINDS}, under_products(body))


def under_products(body: list[str]) -> float | None:
    """The part of a loop's exponentials that run while wgmma products are in flight; None where it
    has no wgmma.

    Products are asynchronous: a group, which ends with `gsb0`, is in flight until a wait (DEPBAR)
    leaves fewer running.
    """
    running, begun, under = 0, False, []
    for instruction in body * 2:  # the second time round, with what the first has left in flight
        if "HGMMA" in instruction:
            begun = "gsb0" not in instruction
            running += not begun
        elif wait := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\w+)", instruction):
            running = min(running, int(wait.group(1), 16))
        elif "MUFU.EX2" in instruction:
            under.append(running > 0 or begun)
    if not any("HGMMA" in instruction for instruction in body):
        return None
    under = under[len(under) // 2 :]
    return sum(under) / len(under)
