"""python -m scripts.history.compiled GPU BATCH LENGTH HEADS HEAD_SIZE

Compiles forward and backward of each generation for a GPU that need not be there, and prints in
JSON what temporaries XLA gives them. In a process of its own, since jax reads once for what it
compiles.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

from scripts import gpu_code

ROOT = pathlib.Path(__file__).parents[2]


def temporaries(gpu: str, p) -> tuple[dict[str, int], str]:
    """Bytes by generation, and the GPU; or none, and why."""
    if missing := gpu_code.missing():
        return {}, missing
    sizes = p.batch, p.queries, p.heads, p.head_size
    command = [sys.executable, "-m", "scripts.history.compiled", gpu, *map(str, sizes)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        return {}, done.stderr.strip().rpartition("\n")[2]
    return json.loads(done.stdout), gpu


def main(gpu: str, *sizes: str):
    with tempfile.TemporaryDirectory() as folder:
        gpu_code.prepare(pathlib.Path(folder))
        print(json.dumps(_compiled(gpu, *map(int, sizes))))


def _compiled(gpu: str, *sizes: int) -> dict[str, int]:
    import jax

    from pallas_flash import accounting as a
    from scripts.history.counts import GENERATIONS, the_problem, tiles_of

    found, p = {}, the_problem(*sizes)
    q = jax.ShapeDtypeStruct((p.batch, p.queries, p.heads, p.head_size), p.dtype)
    for name in GENERATIONS:

        def both(q, k, v, do, name=name):
            o, vjp = jax.vjp(a.attention(name.partition(", ")[0], tiles_of(name, p)), q, k, v)
            return o, *vjp(do)

        found[name] = (
            gpu_code.compiled(a.GPUS[gpu], both, q, q, q, q).memory_analysis().temp_size_in_bytes
        )
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
