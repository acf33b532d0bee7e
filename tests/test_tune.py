"""scripts/tune.py as its user meets it, with kernels in Pallas' interpreter at tiny sizes."""

import re
from typing import NamedTuple

import fakes
import pytest

from pallas_flash.choose import implementations
from pallas_flash.kernels.triton.tuning import Tiles, TritonTiles
from scripts import tune

TINY = (
    "--interpret --implementation triton --batch 1 --length 32 --heads 2 --kv-heads 1 "
    "--head-size 16 --dtype float32"
)
TINY += " --repeats 2"


def run(arguments=""):
    return tune.main([*TINY.split(), *arguments.split()])


@pytest.mark.whole
def test_every_kernel_is_swept_by_its_own_pass_and_the_row_is_valid_tiles(capsys):
    assert run("--sweep block_k=16,32") == 0
    printed = capsys.readouterr().out
    passes = re.findall(r"^(\w+), by the time of the (\w+)$", printed, re.MULTILINE)
    by = dict(forward="forward", dkv="backward", dq="backward", tangent="jvp")
    assert passes == [*by.items()]
    assert printed.count("in use") == 4 and printed.count("| 16 ") == 4
    row = eval(printed.splitlines()[-1], dict(TritonTiles=TritonTiles, Tiles=Tiles))
    assert isinstance(row, TritonTiles) and all(
        getattr(row, kernel).block_k in (16, 32) for kernel in by
    )


def test_a_candidate_that_is_wrong_or_raises_is_reported_and_never_the_row(capsys, monkeypatch):
    triton = implementations.find("triton")

    def forward(problem, tiles, operands):
        o, lse = triton.forward(problem, tiles, operands)
        if tiles.forward.num_stages == 3:
            raise RuntimeError("the blocks do not fit into shared memory")
        return (o * 2 if tiles.forward.num_stages == 1 else o), lse

    fakes.replace(monkeypatch.setattr, triton, forward=forward)
    assert run("--kernels forward --sweep num_stages=1,3") == 0
    printed = capsys.readouterr().out
    assert re.search(r"^\| 1 +\| wrong .*o is off by 1.0e\+00", printed, re.MULTILINE)
    assert re.search(
        r"^\| 3 +\| failed .*RuntimeError: the blocks do not fit into shared memory",
        printed,
        re.MULTILINE,
    )
    assert "num_stages=2" in printed.splitlines()[-1]


def test_documents_and_windows_are_part_of_the_call(capsys):
    more = "--documents 3 --window 5 --deterministic"
    assert run(f"--kernels forward --sweep num_warps=8 {more}") == 0
    assert "causal window 5 3 documents, deterministic=True\n" in capsys.readouterr().out


class Flat(NamedTuple):
    width: int
    block_k: int
    split: bool = False


class Nested(NamedTuple):
    forward: Flat
    fused: Flat | None
    dq: Flat


def test_tiles_of_any_form_are_swept():
    flat = Flat(64, 128)
    assert tune.split_by_kernel(flat) == [tune.Kernel(None, "forward")]
    assert tune.split_by_kernel(Nested(flat, None, flat)) == [
        tune.Kernel("forward", "forward"),
        tune.Kernel("dq", "backward"),
    ]
    kernel = tune.Kernel("dq", "backward")
    assert kernel.replace(Nested(flat, None, flat), Flat(64, 32)) == Nested(
        flat, None, Flat(64, 32)
    )
    tried = tune.candidates(flat, dict(block_k=(32, 128), split=(False, True), other=(1, 2)))
    assert tried == [flat, Flat(64, 32), Flat(64, 32, True), Flat(64, 128, True)]


def test_an_implementation_that_cannot_run_the_shape_says_why():
    with pytest.raises(
        SystemExit,
        match=r"tune\.py: implementation 'hopper' cannot run this call: it needs a GPU",
    ):
        run("--implementation hopper")
