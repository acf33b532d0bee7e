"""A sequence on eight devices, counted and not run: temporaries, bytes that are sent, and blocks
that each device visits."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import backend
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from pallas_flash import context_parallel, flash_attention, masks, schedule
from scripts.bench.cases import Case
from scripts.bench.report import print_table

DEVICES = 8
SCHEMES = (
    context_parallel.Ring("context"),
    context_parallel.Zigzag("context"),
    context_parallel.AllToAll("context"),
)
BLOCK, COUNTED = 64, 8192  # the block, and T, of what devices visit


def simulated() -> list:
    """Eight CPU devices, whatever this machine has."""
    if jax.config.jax_num_cpu_devices < DEVICES:
        backend.clear_backends()
        jax.config.update("jax_num_cpu_devices", DEVICES)
    return jax.devices("cpu")[:DEVICES]


@functools.cache
def compiled(implementation: str, case: Case, scheme=None):
    """Forward and backward, alone on one device (None) or on eight."""
    devices = simulated()
    sharding = SingleDeviceSharding(devices[0])
    if scheme is not None:
        sharding = NamedSharding(
            Mesh(np.array(devices), scheme.names, axis_types=(AxisType.Explicit,)),
            P(None, *scheme.names),
        )
    q, k, v, do = (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in case.shapes())

    def both(q, k, v, do):
        attend = functools.partial(
            flash_attention, is_causal=case.causal, implementation=implementation, context=scheme
        )
        o, vjp = jax.vjp(attend, q, k, v)
        return o, *vjp(do)

    return jax.jit(both).lower(q, k, v, do).compile()


def temporaries(implementation: str, case: Case, scheme=None) -> int:
    return compiled(implementation, case, scheme).memory_analysis().temp_size_in_bytes


def bytes_sent(hlo: str) -> int:
    """By a device, at most: what the collectives of a compiled program give, as often as the loops
    around them go."""
    bodies = {}
    for line in hlo.splitlines():
        if head := re.match(r"(ENTRY )?%([\w.-]+) .*{$", line):
            body = bodies.setdefault("ENTRY" if head[1] else head[2], [])
        elif " = " in line:
            body.append(line)

    @functools.cache
    def sent(name: str) -> int:
        return sum(map(by, bodies[name]))

    def by(line: str) -> int:
        found = re.search(
            r" = (.*?) (all-to-all|all-gather|reduce-scatter|collective-permute|all-reduce)"
            r"(-start)?\(",
            line,
        )
        if found:
            size = sum(
                _bytes(*shape) for shape in re.findall(r"\b([a-z]+\d+)\[([\d,]*)\]", found[1])
            )
            return size if found[2] == "collective-permute" else _of_all(found[2], size)
        of = sum(
            sent(name)
            for name in re.findall(r"(?:body|to_apply|calls|[a-z_]+_computation)=%([\w.-]+)", line)
        )
        of += sum(
            sent(name)
            for branches in re.findall(r"branch_computations={(.*?)}", line)
            for name in branches[1:].split(", %")
        )
        times = re.search(r'"known_trip_count":{"n":"(\d+)"}', line)
        if of and " while(" in line:
            return of * int(times[1])  # a loop that sends has a known length
        return of

    return sent("ENTRY")


def _bytes(dtype: str, sizes: str) -> int:
    return (
        int(re.search(r"\d+", dtype)[0])
        // 8
        * int(np.prod([int(n) for n in sizes.split(",") if n], initial=1))
    )


def _of_all(name: str, size: int) -> int:
    """Of a collective among all, with what it gives to each: nobody sends to itself."""
    share = {"all-to-all": 1, "all-gather": 1, "reduce-scatter": DEVICES, "all-reduce": 2}[name]
    return share * size * (DEVICES - 1) // DEVICES


def visited(chunks: int, T: int = COUNTED) -> np.ndarray:
    """The blocks of queries and keys that each device visits under a causal mask, in plain order or
    with two chunks in zigzag."""
    n = DEVICES * chunks
    causal = masks.resolve([masks.Causal()], 1, T, T, 0)

    def of_pair(a, b):
        pair = causal.of_chunks(1, a[None], T // n).of_keys(b * (T // n), T // n)
        blocks = schedule.by_query_tile(pair, T // n, BLOCK, BLOCK)[1]
        return jnp.sum(blocks[..., 3] - blocks[..., 0])

    by_chunk = jax.jit(jax.vmap(jax.vmap(of_pair, (None, 0)), (0, None)))(
        jnp.arange(n), jnp.arange(n)
    ).sum(1)
    in_order = by_chunk if chunks == 1 else context_parallel.zigzag(by_chunk, DEVICES, axis=0)
    return np.asarray(in_order).reshape(DEVICES, chunks).sum(1)


def count(implementations: list[str], cases: list[Case]) -> list[dict]:
    """Prints tables of it; returns their rows."""
    rows = []
    for case in cases:
        for name in implementations:
            alone = temporaries(name, case)
            rows.append(
                dict(
                    case=str(case),
                    implementation=name,
                    scheme="one device",
                    temporaries=alone,
                    part="",
                    sent=0,
                )
            )
            for scheme in SCHEMES:
                each = temporaries(name, case, scheme)
                sent = bytes_sent(compiled(name, case, scheme).as_text())
                row = dict(
                    case=str(case),
                    implementation=name,
                    scheme=str(scheme),
                    temporaries=each,
                    part=f"1/{alone / each:.1f}",
                )
                rows.append(row | dict(sent=sent))
    print(f"\nForward+backward on {DEVICES} devices, compiled for CPUs and not run; of each device")
    megabytes = lambda n: f"{n / 1e6:,.1f}"
    table = [
        (
            x["case"],
            x["implementation"],
            x["scheme"],
            megabytes(x["temporaries"]),
            x["part"],
            megabytes(x["sent"]),
        )
        for x in rows
    ]
    print_table(
        ("case", "implementation", "scheme", "temporaries, MB", "of one device's", "sent, MB"),
        table,
    )
    print(
        f"\nBlocks of {BLOCK} queries and {BLOCK} keys that a device visits, causal, T = {COUNTED}"
    )
    work = {"plain order": visited(1), "zigzag": visited(2)}
    table = [(name, n.min(), n.max(), f"{n.max() / n.min():.2f}") for name, n in work.items()]
    print_table(("order", "smallest", "largest", "largest / smallest"), table)
    return rows
