"""Programs of test_compiled.py, which compile for absent GPUs and print what they read in the code.
Each runs in a process of its own, since jax reads the environment once:
python -m tests.gpu_programs NAME FOLDER [ARGUMENT ...]
"""

import functools
import itertools
import os
import pathlib
import re
import sys

from scripts.bench import gpu_code


def row_maxima(folder: pathlib.Path, implementation: str):
    """Prints the kernels, each with the registers stored to global memory that hold the lowest
    float32, with which a row's maximum begins."""
    attend = lambda x: _attend(implementation)(x, x, x, return_residual=True)
    for gpu, length in ("A100-80GB", 64), ("A100-80GB", 256), ("H200", 300):
        gpu_code.compiled(_gpus()[gpu], attend, _shape(1, length, 2, 64))
    for ptx in folder.glob("*.ptx"):
        code = ptx.read_text()
        lowest = re.findall(r"mov\.b32\s+(%r\d+), (?:-8388609|0fFF7FFFFF);", code)
        stores = "".join(re.findall(r"st\.global.*\{(.*)\}", code))
        stored = {*re.findall(r"%r\d+", stores)}
        entry = re.search(r"\.entry (\w+)", code)
        print(entry.group(1) if entry else "", *stored.intersection(lowest))


def block_copies(folder: pathlib.Path):
    """Prints the Triton kernels for Hopper: their names, whether they have wgmma and asynchronous
    copies, and whether a copy begins after a wait for wgmma without a barrier between."""
    few = _shape(1, 1, 2, 64), _shape(1, 600, 2, 64), _shape(1, 600, 2, 64)
    many = *[_shape(1, 300, 2, 128)] * 3, _shape(1, 2, 300, 300)
    for x in few, many:
        gradient = _gradient(_attend("triton"), len(x))
        gpu_code.compiled(_gpus()["H200"], gradient, *x)
    pattern = r"wgmma\.(?:mma|wait)|bar\.sync|cp\.async\.c[ag]|\.entry flash_attention_\w+"
    for ptx in folder.glob("*.ptx"):
        if words := re.findall(pattern, ptx.read_text()):
            has_waited = is_early = False
            for word in words:
                is_early |= has_waited and word.startswith("cp")
                has_waited = word == "wgmma.wait" or (has_waited and word != "bar.sync")
            print(words[0].split()[1], {"wgmma.mma", "cp.async.cg"} <= {*words}, is_early)


def shared_memory(folder: pathlib.Path, kind: str, capability: str, kilobytes: str):
    """Compiles the largest Triton kernels for a GPU of this kind."""
    import jax.numpy as jnp

    from pallas_flash import scores

    gpu = _gpus()["A100-80GB"]._replace(
        kind=kind,
        capability=tuple(map(int, capability.split("."))),
        shared_memory=int(kilobytes) << 10,
    )
    attend = _attend("triton")
    plain = lambda q, k, v: attend(q, k, v, is_causal=True)
    gpu_code.compiled(gpu, _gradient(plain, 3), *[_shape(1, 128, 1, 128)] * 3)
    gpu_code.compiled(gpu, _tangent(plain), *[_shape(1, 128, 1, 256, dtype=jnp.float32)] * 6)

    def with_everything(q, k, v, bias, table, mask):
        return attend(q, k, v, bias, mask=mask, score_mod=scores.T5Bias(table))

    dense = 1, 1, 128, 128
    x = _shape(*dense), _shape(1, 32, dtype=jnp.float32), _shape(*dense, dtype=bool)
    x = [_shape(1, 128, 1, 256)] * 3 + [*x]
    gpu_code.compiled(gpu, _gradient(with_everything, 5), *x)
    without_mask = lambda *floats: with_everything(*floats, jnp.ones(dense, bool))
    gpu_code.compiled(gpu, _tangent(without_mask), *x[:5] * 2)


def roles(folder: pathlib.Path, gpu: str, head: str):
    """Prints each role of the Blackwell kernels: its kernel, the registers that setmaxnreg leaves
    it, and those that its code uses."""
    # two tiles to a program, and no whole blocks, which alone have a mask
    x = [_shape(32, 500, 2, int(head))] * 3
    gpu_code.compiled(_gpus()[gpu], _gradient(_attend("blackwell"), 3), *x)
    gpu_code.kernels(folder, "flash_attention_")  # which assembles them
    for cubin in folder.glob("*.cubin"):
        sass = gpu_code._run("nvdisasm", "-c", cubin).stdout
        name = re.search(r"\.text\.(\w+)_mosaic_gpu_kernel", sass).group(1)
        for limit, used in registers_of_roles(sass):
            print(name, limit, used)


def publications(folder: pathlib.Path, gpu: str, head: str):
    """Prints of each loop of the Blackwell forward's softmax how many of its exponentials stand
    before each arrival at an mbarrier, and how many there are."""
    x = [_shape(4, 1024, 64, int(head))] * 3  # two tiles to a program
    gpu_code.compiled(_gpus()[gpu], _attend("blackwell"), *x)
    gpu_code.kernels(folder, "flash_attention_forward")  # which assembles it
    (cubin,) = folder.glob("*.cubin")
    for loop in gpu_code.loops(gpu_code._run("nvdisasm", "-c", cubin).stdout):
        counts = [*itertools.accumulate("MUFU.EX2" in x for x in loop)]
        if counts[-1]:
            published = (n for n, x in zip(counts, loop, strict=True) if "SYNCS.ARRIVE" in x)
            print(*published, counts[-1])


def bias_loads(folder: pathlib.Path):
    """Prints the bits of each load from global memory by the Blackwell forward with a bias."""
    x = [_shape(1, 512, 2, 64)] * 3
    attend = lambda q, k, v, bias: _attend("blackwell")(q, k, v, bias)
    gpu_code.compiled(_gpus()["B200"], attend, *x, _shape(1, 2, 512, 512))
    gpu_code.kernels(folder, "flash_attention_forward")
    (cubin,) = folder.glob("*.cubin")
    print(*re.findall(r"\bLDG?\.E\.?(\w*)", gpu_code._run("nvdisasm", "-c", cubin).stdout))


def registers_of_roles(sass: str) -> list[tuple[int, int]]:
    """Of each setmaxnreg in a kernel that nvdisasm lists: its number, and how many registers the
    code uses that a warp may reach from there, wherever it lies."""
    code, labels = [], {}
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L\w+):", line):
            labels[label.group(1)] = len(code)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            code.append(instruction.group(1))

    def following(at: int) -> list[int]:
        """The instructions that may come after one."""
        always = re.match(r"(EXIT|RET|BRA|BRX)\b(?!.*\b!?U?P\d)", code[at])
        targets = [labels[name] for name in re.findall(r"\((\.L\w+)\)", code[at])]
        assert targets or not re.search(r"\bBRX|\bJMX", code[at]), "an indirect branch"
        return targets if always else [*targets, at + 1]

    found = []
    for start, instruction in enumerate(code):
        if limit := re.search(r"USETMAXREG.*\b0x(\w+)", instruction):
            reached, todo = set(), [start + 1]
            while todo:
                if (at := todo.pop()) not in reached and at < len(code):
                    reached.add(at)
                    todo += following(at)
            found.append((int(limit.group(1), 16), max(_registers(code[at]) for at in reached)))
    return found


def _registers(instruction: str) -> int:
    """The highest register that an instruction names, and those that follow it as one value, from
    1 on."""
    numbers = [int(n) for n in re.findall(r"\bR(\d+)\b", instruction)]
    words = re.search(r"(?:LDTM|STTM)\S*\.x(\d+)", instruction)
    bits = re.search(r"^(?:@!?U?P\w+ )?(?:LD|ST)\S*\.(64|128)\b", instruction)
    size = int(words.group(1)) if words else int(bits.group(1)) // 32 if bits else 1
    return max(numbers, default=-1) + size


def collectives(folder: pathlib.Path, implementation: str):
    """Prints the collectives on a mesh of data and heads, then those of a ring, and the order of
    its sends and products in each step."""
    attend = functools.partial(_attend(implementation), is_causal=True)
    x = [_shape(2, 4096, heads, 64) for heads in (8, 4, 4)]
    heads = dict(axes=dict(data=2, model=4), spec=("data", None, "model"))
    ring = dict(axes=dict(x=8), explicit=True, spec=(None, "x"))
    for mesh in heads, ring:
        program = gpu_code.compiled(_gpus()["H200"], _gradient(attend, 3), *x, **mesh)
        code = program.as_text()
        names = re.findall(r" (all-gather|all-to-all|collective-permute)(?:-start)?\(", code)
        print(*sorted({*names}))
    for body in code.split("\n\n"):
        order = re.findall(r" (conditional|collective-permute(?:-start|-done)?)\(", body)
        if order.count("conditional") == 1 and len(order) > 1:
            print(*(word.removeprefix("collective-permute-") for word in order))


def packed_documents(folder: pathlib.Path):
    """Prints the kernels of packed documents in a shard_map that checks."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    def attend(q, k, v, ids):
        ids = dict(query_segment_ids=ids, key_value_segment_ids=ids)
        return _attend("hopper")(q, k, v, is_causal=True, **ids)

    data = PartitionSpec("data")
    step = lambda *x: jax.shard_map(_gradient(attend, 3), in_specs=data, out_specs=data)(*x)
    x = [_shape(8, 2048, heads, 64) for heads in (8, 4, 4)]
    x.append(_shape(8, 2048, dtype=jnp.int32))
    gpu_code.compiled(_gpus()["H100"], step, *x, axes=dict(data=8), spec=("data",))
    for kernel in gpu_code.kernels(folder, "flash_attention_"):
        print(kernel.name)


def around_decoding(folder: pathlib.Path, implementation: str):
    """Prints of one token beside a cache, without lengths and with them, the operations that XLA
    runs beside the kernel, those of integers first."""
    import jax.numpy as jnp

    q, k, lengths = _shape(1, 1, 64, 128), _shape(1, 32768, 8, 128), _shape(1, dtype=jnp.int32)
    attend = _attend(implementation)
    masked = lambda q, k, lengths: attend(q, k, k, key_value_seq_lengths=lengths)
    for call in (lambda q, k, _: attend(q, k, k)), masked:
        code = gpu_code.compiled(_gpus()["H200"], call, q, k, lengths).as_text()
        (entry,) = re.findall(r"^ENTRY.*?^}", code, re.M | re.S)
        made = re.findall(r" = (.*?) (?:fusion|copy|sort|reduce|while)\(", entry)
        print(*sorted(made, key=lambda kind: "s32" not in kind), sep="; ")


def pages(folder: pathlib.Path, implementation: str, gpu: str, stored: str, *sizes: str):
    """Prints of a token beside pages of 8 bits the instructions of a block without a mask, and the
    bytes spilled. Of two sizes of heads the values are columns of the keys (MLA)."""
    from pallas_flash import paged_attention

    head, value_size = map(int, sizes)
    rows, heads, kv_heads = (16, 128, 1) if head != value_size else (16, 64, 8)
    pages = _shape(1000, 64, kv_heads, head, dtype=stored)
    of_rows = _shape(rows, 128, dtype="int32"), _shape(rows, dtype="int32")
    scales = _shape(*pages.shape[:3], dtype="float32")

    def attend(q, k, v, table, lengths, scales):
        both = dict(k_scales=scales, v_scales=scales)
        if head != value_size:
            v, both = None, dict(k_scales=scales, value_size=value_size)
        return paged_attention(q, k, v, table, lengths, implementation=implementation, **both)

    q = _shape(rows, 1, heads, head)
    gpu_code.compiled(_gpus()[gpu], attend, q, pages, pages, *of_rows, scales)
    (kernel,) = gpu_code.kernels(folder, "flash_attention_")
    fewest = min(loop.instructions for loop in kernel.loops)
    print(fewest, kernel.spill_stores + kernel.spill_loads)


def _gpus():
    from pallas_flash import accounting

    return accounting.GPUS


def _shape(*sizes, dtype="bfloat16"):
    import jax

    return jax.ShapeDtypeStruct(sizes, dtype)


def _attend(implementation: str):
    from pallas_flash import flash_attention

    return functools.partial(flash_attention, implementation=implementation)


def _tangent(attend):
    """Of arguments and their tangents."""
    import jax

    return lambda *x: jax.jvp(attend, x[: len(x) // 2], x[len(x) // 2 :])


def _gradient(attend, arguments: int):
    """By the first arguments."""
    import jax

    loss = lambda *x: attend(*x).astype("float32").sum()
    return jax.grad(loss, argnums=tuple(range(arguments)))


if __name__ == "__main__":
    name, folder, *arguments = sys.argv[1:]
    if name == "collectives":
        os.environ["XLA_FLAGS"] = "--xla_gpu_experimental_parallel_collective_overlap_limit=2"
    gpu_code.prepare(pathlib.Path(folder))
    globals()[name](pathlib.Path(folder), *arguments)
