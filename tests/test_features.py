"""What FEATURES.md says works with what is so."""

import re

import jax
import pytest
from selection import whole_but

from pallas_flash.accounting import GPUS
from scripts import features
from scripts.combined import calls
from scripts.combined.calls import FEATURES
from scripts.combined.transformations import TRANSFORMATIONS, strict
from scripts.gpu_code import as_if_on


def stated(head: str) -> dict[str, dict[str, str]]:
    """The rows of the table with this head: what each says of each implementation, a sentence in
    place of its number."""
    table = features.FILE.read_text().split(f"| {head} |")[1].split("\n", 1)[1].split("\n\n")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[1:]
    ]
    sentences = re.findall(r"^\d+\. (.*)$", table[1], re.M)
    said = lambda cell: sentences[int(cell[4:-1]) - 1] if cell.startswith("no (") else cell
    return {
        name: dict(zip(features.IMPLEMENTATIONS, map(said, cells), strict=True))
        for name, *cells in rows
    }


def test_the_tables_have_every_row():
    assert list(stated("a call with")) == list(FEATURES)
    assert list(stated("under")) == list(TRANSFORMATIONS)


@pytest.mark.parametrize("implementation", features.IMPLEMENTATIONS)
def test_what_an_implementation_refuses_is_refused_in_the_words_of_the_table(implementation):
    if implementation == "hopper" and jax.__version_info__ < (0, 11, 2):
        pytest.skip("its kernels need jax 0.11.2")
    said = {name: row[implementation] for name, row in stated("a call with").items()}
    assert features.refused(implementation) == {
        k: v for k, v in said.items() if v not in (features.YES, features.UNSEEN)
    }


EACH = [
    (name, implementation) for name in TRANSFORMATIONS for implementation in ("blockwise", "triton")
]
FEW = [
    (name, "blockwise") for name in ("`grad`", "64 bits, strict promotion", "a mesh, explicit axes")
]
# as for those: the script runs all of them
SAME = [("`grad`", name) for name in ("reference", "flash1", "standard")]


@pytest.mark.parametrize(("transformation", "implementation"), whole_but([*EACH, *SAME], *FEW))
def test_all_that_an_implementation_takes_is_right_together_or_refused_in_the_words_of_the_table(
    transformation, implementation
):
    assert (
        features.verdict(implementation, transformation)
        == stated("under")[transformation][implementation]
    )


@pytest.mark.parametrize("devices", [1, 2])
def test_with_few_devices_a_mesh_of_more_is_left_out_and_says_so(devices, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [None] * devices)
    left_out = {
        name: features.verdict("blockwise", name)
        for name, of in TRANSFORMATIONS.items()
        if of.devices > devices
    }
    meshes = dict.fromkeys(
        ("a mesh, explicit axes", "a mesh, Auto axes", "rows on an explicit axis"),
        "(needs 4 devices)",
    )
    assert left_out == meshes | (
        dict.fromkeys(["`shard_map`"], "(needs 2 devices)") if devices < 2 else {}
    )
    assert "| (needs 4 devices) |" in features._table("under", {"a mesh": left_out})


@pytest.mark.whole
@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="its kernels need jax 0.11.2")
def test_hopper_lowers_all_that_it_takes_with_64_bits_and_strict_promotion():
    used, refused = calls.arrays("bfloat16"), features.refused("hopper")
    for together in calls.TOGETHER:
        call = calls.Call("hopper", tuple(name for name in together if name not in refused))
        with as_if_on(GPUS["H200"]), strict():
            jax.jit(call.gradients).trace(used).lower(lowering_platforms=("cuda",))


def test_what_means_something_else_under_a_transformation_is_told_apart():
    text = features.FILE.read_text()
    for name, of in TRANSFORMATIONS.items():
        for feature, why in of.apart.items():
            assert f"* {feature} under {name}: {why}" in text
