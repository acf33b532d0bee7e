"""Compiles the Hopper kernels for an H200 on a machine without a GPU, and reports what ptxas made of them.

`python compile_for_gpu.py WIDTH CASE...` prints a JSON object: for each case registers, spilled bytes, warnings that products are
serialized, and the instructions of each innermost loop of products and exponentials. It needs the wheels of jax's CUDA plugin,
nvcc (ptxas) and nvdisasm, but no GPU and no driver. It runs as a process of its own: jax reads the environment on import.
"""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile

import jax
import jax.numpy as jnp

_BIN = pathlib.Path(sysconfig.get_paths()["purelib"], "nvidia", "cu13", "bin")
_WHEELS = {
    "jax-cuda13-plugin": importlib.util.find_spec("jax_cuda13_plugin") is not None,
    "jax-cuda13-pjrt": importlib.util.find_spec("jax_plugins") is not None,
    "nvidia-cuda-nvcc": (_BIN / "ptxas").exists(),
    "nvidia-cuda-nvdisasm": (_BIN / "nvdisasm").exists(),
}
_LACKING = [name for name, there in _WHEELS.items() if not there]
MISSING = f"compiling for a GPU needs {', '.join(_LACKING)}, which are not installed" if _LACKING else None
if not MISSING and not hasattr(__import__("jax.experimental.pallas.mosaic_gpu", fromlist=["x"]), "InterpretGPUParams"):
    MISSING = f"the Hopper kernels need jax 0.11.2 or newer; this is {jax.__version__}"

SERIALIZED = ("C7510", "C7512", "C7513", "C7514", "C7515")
KIND, CORES = "NVIDIA H200", 132
TARGET = f"""
gpu_device_info {{
  cuda_compute_capability {{ major: 9 minor: 0 }}
  core_count: {CORES}
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  device_memory_size: 151000000000
}}
platform_name: "CUDA"
device_description_str: "{KIND}"
runtime_version {{ major: 13 }}
dnn_version_info {{ major: 9 minor: 12 }}
"""


def compiled(function, *shapes):
    """`function` compiled for an H200; shapes are pytrees of jax.ShapeDtypeStruct."""
    from jax.experimental import topologies
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

    topology = topologies.get_topology_desc("h200", "cuda", target_config=TARGET, topology="1x1x1")
    sharding = NamedSharding(Mesh(topology.devices, "x"), PartitionSpec())
    device = AbstractDevice(device_kind=KIND, num_cores=CORES, platform="gpu")
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).compile()


def report(ptx: pathlib.Path):
    """What ptxas says of a kernel, and its loops."""
    cubin = ptx.with_suffix(".cubin")
    command = [_BIN / "ptxas", "-arch=sm_90a", "-O3", "-v", ptx, "-o", cubin]
    log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    number = lambda pattern: int(re.search(pattern, log).group(1))
    return dict(
        registers=number(r"Used (\d+) registers"),
        spilled=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        serialized=[code for code in SERIALIZED if code in log],
        loops=[_loop(body) for body in _loops(cubin)],
    )


def _loop(body: list[str]):
    """`overlapped` is the part of the exponentials that comes before the wait for the last product."""
    at = lambda word: [i for i, instruction in enumerate(body) if word in instruction]
    exponentials, wait = at("MUFU.EX2"), max(at("WARPGROUP.DEPBAR"))
    return dict(
        instructions=len(body),
        spills=len(at("LDL") + at("STL")),
        overlapped=sum(i < wait for i in exponentials) / len(exponentials),
    )


def _loops(cubin: pathlib.Path):
    """The instructions of each innermost loop with products and exponentials."""
    sass = subprocess.run([_BIN / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
    code, labels = [], {}
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label.group(1)] = len(code)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(instruction.group(1))
    spans = []
    for end, instruction in enumerate(code):
        if (branch := re.search(r"\bBRA\b.*\((\.L\w+)\)", instruction)) and labels.get(branch.group(1), end + 1) <= end:
            spans.append((labels[branch.group(1)], end + 1))
    holds = lambda span, word: any(word in instruction for instruction in code[slice(*span)])
    # A wait that has to sleep does so far behind its loop, and jumps back into it: no loop of its own.
    spans = [s for s in spans if holds(s, "HGMMA") and holds(s, "MUFU.EX2") and not holds(s, "NANOSLEEP")]
    inner = lambda s: not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)
    return [code[slice(*s)] for s in spans if inner(s)]


def forward(width: int, case: str):
    """The hopper forward of a call, and its shapes."""
    from pallas_flash import arguments
    from pallas_flash.attention import flash_attention
    from pallas_flash.kernels import hopper

    B, T, N, K = 2, 4096, 8, 2
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    static, arrays = {
        "full": ({}, {}),
        "causal": (dict(is_causal=True), {}),
        "key_lengths": ({}, dict(key_value_seq_lengths=ints(B))),
        "documents": (dict(is_causal=True), dict(query_segment_ids=ints(B, T))),
        "soft_cap": (dict(is_causal=True, logits_soft_cap=30.0), {}),
    }[case]
    defaults = dict(flash_attention.__kwdefaults__, bias=None, mask=None)
    own = {name: value for name, value in defaults.items() if name not in ("implementation", "return_residual")}

    def call(q, k, v, arrays):
        problem, operands = arguments.normalise(q, k, v, **own | static | arrays)
        return hopper.forward(problem, hopper.tiles(problem), operands)

    half = lambda heads: jax.ShapeDtypeStruct((B, T, heads, width), jnp.bfloat16)
    return call, (half(N), half(K), half(K), arrays)


def main(width: str, *cases: str):
    reports = {}
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["MOSAIC_GPU_DUMP_TO"] = folder
            function, shapes = forward(int(width), case)
            compiled(function, *shapes)
            (ptx,) = pathlib.Path(folder).glob("*.ptx")
            reports[case] = report(ptx)
    print(json.dumps(reports))


if __name__ == "__main__":
    assert "JAX_PLATFORMS" in os.environ, "set JAX_PLATFORMS=cpu before Python starts"
    os.environ.update(JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1", MOSAIC_GPU_DUMP_PTX="1", TF_CPP_MIN_LOG_LEVEL="3")
    os.environ["PATH"] = f"{_BIN}{os.pathsep}{os.environ['PATH']}"
    main(*sys.argv[1:])
