"""FEATURES.md: what works with what. Its tables are what running every feature on every
implementation under every transformation gives, compared with the reference.

PYTHONPATH=. JAX_PLATFORMS=cpu python tests/test_features.py

writes the file, in some minutes.
"""

import pathlib
import re

import jax
import pytest
from check import strict_64_bits
from features import decoding
from features.calls import (
    EXPLAINED,
    FEATURES,
    GATHERED,
    INTERPRETED,
    TOGETHER,
    WITHOUT_A_ROW,
    Call,
    alone,
    arrays,
    assert_equal,
    inputs,
    reason,
    refused,
)
from features.places import PLACES, SCHEMES, check_place
from features.transformations import TRANSFORMATIONS
from selection import whole_but
from tqdm import tqdm

from pallas_flash import explain
from pallas_flash.accounting import GPUS
from pallas_flash.choose import implementations
from pallas_flash.choose.selfcheck import specs
from scripts.bench.gpu_code import as_if_on

FILE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "FEATURES.md"
RUN_HERE = ("triton", "blockwise", "reference", "flash1", "standard")
YES, ACCEPTED = "yes", "accepted"
TEXT = """# What works with what

Made by `tests/test_features.py`, run as its docstring says. *Yes* was run on a CPU, and its result
compared with the dense reference: of `blackwell` in jax's GPU interpreter, one feature at a time
with its gradients. *Accepted* was **not run**: `explain` takes the call for an H200 (`hopper`) or
an A100 (`ampere`). What has run of these two are the kernels' own tests, in jax's GPU interpreter,
and [94 variants on an H100](../scripts/results.md#an-h100). The table of transformations has no
columns for the three.

The others ran the features of the first table together, in two programs for each implementation and
transformation: a program has all features that the implementation supports, grouped heads, a length
that no block size divides, values whose head size is not the keys', and the log-sum-exp. Above
heads of 256 `blockwise` computes the gradients of `blackwell` and `ampere`, and forward mode of all
three; where single keys are listed, both of all three. A union and a complement of masks are the
operators `|` and `~`.

| a call with | {columns} |
{features}

Decoding and caches: two rows of 2299 and 700 keys. *Of a copy*: the pages are first copied in
order, and the implementation attends to the copy.

| a call over | {columns} |
{decoding}

| under | {header} |
{transformations}

Exceptions:

{exceptions}
"""


def verdict(implementation: str, transformation: str) -> str:
    """YES if all features that an implementation supports are right together under a
    transformation, else why it is refused."""
    how = TRANSFORMATIONS[transformation]
    left_out = {*refused(implementation), *how.exceptions}
    for together in TOGETHER:
        features = tuple(name for name in together if name not in left_out)
        try:
            got = how.run(Call(implementation, features), inputs(implementation))
        except NotImplementedError as error:
            return reason(error)
        expected = how.plain(Call("reference", features), arrays())
        assert_equal(got, expected, features)
    return YES


# ---- the file ----


def supported(implementation: str) -> str:
    return ACCEPTED if implementation in {*EXPLAINED} - {*INTERPRETED} else YES


def text() -> str:
    columns = (*EXPLAINED, *RUN_HERE)
    reasons = {name: refused(name) for name in columns}
    for name in INTERPRETED:
        for feature in tqdm([f for f in FEATURES if f not in reasons[name]], disable=None):
            alone(name, feature)
    features = {f: [reasons[i].get(f, supported(i)) for i in columns] for f in FEATURES}
    names = lambda columns: " | ".join(f"`{name}`" for name in columns)
    calls = {
        row: [decoding.verdict(row, i, supported(i)) for i in columns]
        for row in tqdm(decoding.DECODING, disable=None)
    }
    return TEXT.format(
        columns=names(columns),
        header=names(RUN_HERE),
        features=table(features),
        decoding=table(calls),
        transformations=table(
            {t: [verdict(i, t) for i in RUN_HERE] for t in tqdm(TRANSFORMATIONS, disable=None)}
        ),
        exceptions="\n".join(f"* {line}" for line in exceptions()),
    )


def table(rows: dict[str, list[str]]) -> str:
    """Each reason stands once, below the table, and its number in the cells."""
    cells = [cell for row in rows.values() for cell in row]
    reasons = list(dict.fromkeys(cell for cell in cells if not cell.startswith((YES, ACCEPTED))))
    cell = lambda text: f"no ({reasons.index(text) + 1})" if text in reasons else text
    lines = [["---"] * (1 + len(next(iter(rows.values()))))]
    lines += [[name, *map(cell, row)] for name, row in rows.items()]
    notes = (f"{number}. {text}" for number, text in enumerate(reasons, 1))
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *notes]).rstrip()


def exceptions() -> list[str]:
    how = TRANSFORMATIONS.items()
    return [f"{f} under {t}: {why}" for t, x in how for f, why in x.exceptions.items()]


def stated(head: str) -> dict[str, dict[str, str]]:
    """The rows of the table with this head: what each says of each implementation, a reason in
    place of its number."""
    header, rest = FILE.read_text().split(f"| {head} |")[1].split("\n", 1)
    columns = re.findall(r"`(\w+)`", header)
    lines, notes, *_ = rest.split("\n\n")
    reasons = re.findall(r"^\d+\. (.*)$", notes, re.M)
    said = lambda cell: reasons[int(cell[4:-1]) - 1] if cell.startswith("no (") else cell
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines()[1:]
    ]
    return {name: dict(zip(columns, map(said, cells), strict=True)) for name, *cells in rows}


# ---- the tests ----


def test_the_tables_have_every_row():
    known = {name for name, one in specs.FEATURES.items() if one in FEATURES.values()}
    assert known == specs.FEATURES.keys() - {*WITHOUT_A_ROW}
    assert list(stated("a call with")) == list(FEATURES)
    assert list(stated("a call over")) == list(decoding.DECODING)
    assert list(stated("under")) == list(TRANSFORMATIONS)
    assert all(f"* {line}\n" in FILE.read_text() for line in exceptions())


def skip_without_mosaic(implementation):
    if implementation in EXPLAINED and jax.__version_info__ < (0, 11, 2):
        pytest.skip("its kernels need jax 0.11.2")


@pytest.mark.parametrize("implementation", [*EXPLAINED, *RUN_HERE])
def test_what_an_implementation_refuses_is_refused_in_the_words_of_the_table(implementation):
    skip_without_mosaic(implementation)
    said = {name: row[implementation] for name, row in stated("a call with").items()}
    assert refused(implementation) == {k: v for k, v in said.items() if v not in (YES, ACCEPTED)}


@pytest.mark.parametrize("feature", whole_but(FEATURES, "`bias`"))
@pytest.mark.parametrize("implementation", INTERPRETED)
def test_a_feature_that_an_interpreted_implementation_takes_is_right_by_itself(
    implementation, feature
):
    skip_without_mosaic(implementation)
    if stated("a call with")[feature][implementation] == YES:
        alone(implementation, feature)


OVER_CACHES = [(name, one) for name in decoding.DECODING for one in [*EXPLAINED, *RUN_HERE]]
CHEAP = [(name, one) for name in decoding.DECODING for one in EXPLAINED if one not in INTERPRETED]
CHEAP += [("`paged_attention`", one) for one in INTERPRETED]
CHEAP += [(name, "blockwise") for name in [*decoding.DECODING][:3]]


@pytest.mark.parametrize(("name", "implementation"), whole_but(OVER_CACHES, *CHEAP))
def test_a_call_over_caches_is_right_as_the_table_says(name, implementation):
    skip_without_mosaic(implementation)
    said = stated("a call over")[name][implementation]
    assert decoding.verdict(name, implementation, supported(implementation)) == said


EACH = [(name, implementation) for name in TRANSFORMATIONS for implementation in RUN_HERE[:3]]
FEW = [(name, "blockwise") for name in ("`grad`", "`vmap` of `grad`", "64 bits, strict promotion")]
# the others run in full where the file is written
SAME = [(how, name) for how in ("`grad`", "64 bits, strict promotion") for name in RUN_HERE[3:]]


@pytest.mark.parametrize(("transformation", "implementation"), whole_but([*EACH, *SAME], *FEW))
def test_all_that_an_implementation_takes_is_right_together_or_refused_in_the_words_of_the_table(
    transformation, implementation
):
    assert (
        verdict(implementation, transformation) == stated("under")[transformation][implementation]
    )


MAPPED = [name for name, place in PLACES.items() if place.is_mapped]
ON_DEVICES = [("blockwise", name, False) for name in PLACES]
ON_DEVICES += [("blockwise", name, True) for name in SCHEMES]
# Pallas' interpreter has no rule for what a shard_map checks: test_checked_shard_map.py
ON_DEVICES += [("triton", name, False) for name in PLACES if name not in MAPPED]
ON_DEVICES += [("reference", name, False) for name in PLACES]
ON_DEVICES += [(name, "all to all", False) for name in ("flash1", "standard")]
FAST = [("blockwise", name, False) for name in [*PLACES][:4]] + [("blockwise", "a ring", True)]


@pytest.mark.parametrize(("implementation", "place", "strict"), whole_but(ON_DEVICES, *FAST))
def test_all_features_together_are_on_several_devices_what_they_are_on_one(
    implementation, place, strict
):
    check_place(implementation, PLACES[place], strict)


@pytest.mark.whole
def test_hopper_lowers_all_that_it_takes_with_64_bits_and_strict_promotion():
    skip_without_mosaic("hopper")
    used, reasons = arrays("bfloat16"), {*refused("hopper"), GATHERED}
    for together in TOGETHER:
        call = Call("hopper", tuple(name for name in together if name not in reasons))
        with as_if_on(GPUS["H200"]), strict_64_bits():
            jax.jit(call.gradients).trace(used).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("gpu", ["A100-80GB", "RTX-4090", "RTX-5090", "H100", "B200"])
def test_without_jaxs_triton_every_call_of_16_bits_has_kernels_on_every_gpu(gpu, monkeypatch):
    skip_without_mosaic("hopper")
    monkeypatch.setattr(implementations.TRITON, "why_no_import", "this jax has no Triton")

    def taken(dtype, features):
        x = arrays(dtype)
        with as_if_on(GPUS[gpu]):
            return explain(**Call(None, features).arguments(x))

    mosaic = dict(H100="hopper", B200="blackwell").get(gpu, "ampere")
    together = [tuple(name for name in names if name != GATHERED) for names in TOGETHER]
    for features in [*((name,) for name in FEATURES), *together]:
        for dtype in "bfloat16", "float16":
            found = taken(dtype, features)
            assert found.implementation == mosaic, (dtype, features, found)
    assert taken("float32", ()).implementation == "blockwise"


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)  # for the meshes
    jax.config.update("jax_disable_most_optimizations", True)  # each program runs once
    FILE.write_text(text())
