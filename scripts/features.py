"""python scripts/features.py [--write]

Runs every feature of flash_attention on every implementation under every transformation, compares
each with the reference, and prints tables: "yes", or the sentence with which it is refused. --write
puts them into pallas_flash/FEATURES.md.
"""

import argparse
import contextlib
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

# scripts/ is no installed package
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from pallas_flash import explain
from pallas_flash.accounting import GPUS
from scripts.combined.calls import FEATURES, INPUTS, TOGETHER, Call, arrays
from scripts.combined.transformations import TRANSFORMATIONS
from scripts.gpu_code import as_if_on

FILE = pathlib.Path(__file__).resolve().parents[1] / "pallas_flash" / "FEATURES.md"
IMPLEMENTATIONS = ("hopper", "triton", "blockwise", "reference", "flash1", "standard")
YES, UNSEEN = "yes", "(unseen)"
TOLERANCE = dict(float32=3e-5, bfloat16=3e-2)


def refused(implementation: str) -> dict[str, str]:
    """The features that an implementation refuses, with its sentence."""
    x = _arrays_for(implementation)
    of = lambda feature: explain(
        *(x[name] for name in INPUTS), **Call(implementation, (feature,)).options(x)
    )
    with as_if_on(GPUS["H200"]) if implementation == "hopper" else contextlib.nullcontext():
        found = {feature: tried(of, feature)[1] for feature in FEATURES}
    return {feature: why_not for feature, why_not in found.items() if why_not}


def verdict(implementation: str, transformation: str) -> str:
    """YES, if all features that the implementation takes are right under the transformation, or the
    sentence that refuses it; how many devices it needs, where there are fewer."""
    of, verdicts = TRANSFORMATIONS[transformation], set()
    if of.devices > len(jax.devices()):
        return f"(needs {of.devices} devices)"
    out = {*refused(implementation), *of.apart}
    for together in TOGETHER:
        features = tuple(name for name in together if name not in out)
        got, why_not = tried(of.run, Call(implementation, features), _arrays_for(implementation))
        verdicts.add(why_not or YES)
        if not why_not:
            _compare(
                got,
                of.plain(Call("reference", features), arrays()),
                f"{implementation}, {transformation}: {features}",
            )
    (only,) = verdicts
    return only


def tried(f: Callable, *args) -> tuple[Any, str | None]:
    """f(*args), or the sentence that refuses it."""
    try:
        return f(*args), None
    except NotImplementedError as error:
        found = re.search(r"cannot run this call: (.*)\. The call: ", str(error))
        return None, found.group(1) if found else str(error)


def _arrays_for(implementation: str) -> dict[str, Any]:
    return arrays("bfloat16" if implementation == "hopper" else "float32")


def _compare(got, expected, what: str):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        tolerance = TOLERANCE[str(a.dtype)] * max(
            1, np.max(np.abs(b), where=np.isfinite(b), initial=0)
        )
        np.testing.assert_allclose(
            np.asarray(a, np.float32), b, rtol=0, atol=tolerance, err_msg=what
        )


# ---- the tables ----


class Tables(NamedTuple):
    """{row: {implementation: YES, UNSEEN or a sentence}}"""

    features: dict[str, dict[str, str]]
    transformations: dict[str, dict[str, str]]


def made() -> Tables:
    here = [name for name in IMPLEMENTATIONS if name != "hopper" or _is_hopper_here()]
    out = {name: refused(name) for name in IMPLEMENTATIONS}
    cells = tqdm([(t, i) for t in TRANSFORMATIONS for i in here], disable=None)
    verdicts = {(t, i): verdict(i, t) for t, i in cells}
    return Tables(
        {
            f: {i: out[i].get(f, YES if i in here else UNSEEN) for i in IMPLEMENTATIONS}
            for f in FEATURES
        },
        {t: {i: verdicts.get((t, i), UNSEEN) for i in IMPLEMENTATIONS} for t in TRANSFORMATIONS},
    )


def _is_hopper_here() -> bool:
    return jax.default_backend() == "gpu" and jax.devices()[0].compute_capability == "9.0"


def written(tables: Tables) -> str:
    apart = [
        f"* {f} under {t}: {why}"
        for t, of in TRANSFORMATIONS.items()
        for f, why in of.apart.items()
    ]
    return TEXT.format(
        features=_table("a call with", tables.features),
        transformations=_table("under", tables.transformations),
        apart="\n".join(apart),
    )


def _table(head: str, rows: dict[str, dict[str, str]]) -> str:
    """Each sentence stands once, below the table, and its number in the cells."""
    is_sentence = lambda cell: cell != YES and not cell.startswith("(")
    sentences = list(
        dict.fromkeys(cell for row in rows.values() for cell in row.values() if is_sentence(cell))
    )
    cell = lambda text: f"no ({sentences.index(text) + 1})" if text in sentences else text
    lines = [
        _line(head, (f"`{name}`" for name in IMPLEMENTATIONS)),
        _line("---", ["---"] * len(IMPLEMENTATIONS)),
    ]
    lines += [_line(name, map(cell, row.values())) for name, row in rows.items()]
    return "\n".join(
        [*lines, "", *(f"{number}. {text}" for number, text in enumerate(sentences, 1))]
    )


def _line(first: str, cells) -> str:
    return f"| {' | '.join([first, *cells])} |"


TEXT = """# What works with what

Made by `python scripts/features.py --write`, which runs all that says yes and compares it with the
dense reference. What a row of the first table says yes to holds under every row of the second that
says yes, all at once: each program that is run has every feature that the implementation takes,
grouped heads, a length that no block divides, a value size that is not the head size, and the
log-sum-exp. (unseen): `explain` takes it for an H200, and its tests run in jax's GPU interpreter;
where these tables were made no GPU was at hand.

{features}

{transformations}

Apart from these:

{apart}
"""


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name} too")
    args = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", 4)  # for the meshes
    jax.config.update("jax_disable_most_optimizations", True)  # each program runs once
    text = written(made())
    print(text)
    if args.write:
        FILE.write_text(text)


if __name__ == "__main__":
    main()
