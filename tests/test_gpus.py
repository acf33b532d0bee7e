"""The table of GPUs, as the choice of kernels and the accounting read it."""

import fakes
import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_flash.accounting import GPUS
from pallas_flash.jax_support import gpus, hardware


def facts() -> tuple[float | None, int, float, int]:
    """Of the GPU that a call is for: compute capability, processors, MB of L2, KB of shared memory
    of a program."""
    l2, shared = hardware.l2_cache() / 2**20, hardware.shared_memory() >> 10
    return hardware.compute_capability(), hardware.processors(), l2, shared


def named(kind: str):
    """The context of a mesh that names a kind of GPU and says no more of it."""
    device = AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


OF_KIND = {
    "NVIDIA A100-SXM4-40GB": (8.0, 108, 40, 163),
    "NVIDIA A100 80GB PCIe": (8.0, 108, 40, 163),
    "NVIDIA A800-SXM4-80GB": (8.0, 108, 40, 163),
    "NVIDIA A30": (8.0, 56, 24, 163),
    "NVIDIA A10": (8.6, 72, 6, 99),
    "NVIDIA A10G": (8.6, 72, 6, 99),
    "NVIDIA A40": (8.6, 84, 6, 99),
    "NVIDIA RTX A6000": (8.6, 84, 6, 99),
    "NVIDIA GeForce RTX 3090": (8.6, 82, 6, 99),
    "NVIDIA GeForce RTX 3060": (8.6, 16, 1.5, 99),
    "NVIDIA RTX A400": (8.6, 6, 1, 99),
    "Orin": (8.7, 4, 2, 163),
    "NVIDIA L4": (8.9, 58, 48, 99),
    "NVIDIA L40": (8.9, 142, 96, 99),
    "NVIDIA L40S": (8.9, 142, 96, 99),
    "NVIDIA RTX 6000 Ada Generation": (8.9, 142, 96, 99),
    "NVIDIA GeForce RTX 4090": (8.9, 128, 72, 99),
    "NVIDIA GeForce RTX 4090 Laptop GPU": (8.9, 20, 12, 99),
    "NVIDIA H100 80GB HBM3": (9.0, 132, 50, 227),
    "NVIDIA H100 PCIe": (9.0, 114, 50, 227),
    "NVIDIA H200": (9.0, 132, 50, 227),
    "NVIDIA GH200 480GB": (9.0, 132, 50, 227),
    "NVIDIA B200": (10.0, 148, 126, 227),
    "NVIDIA GB200": (10.0, 148, 126, 227),
    "NVIDIA B300 SXM6 AC": (10.3, 148, 126, 227),
    "NVIDIA GB300": (10.3, 148, 126, 227),
    "NVIDIA GeForce RTX 5090": (12.0, 170, 96, 99),
    "NVIDIA GeForce RTX 5070": (12.0, 20, 24, 99),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": (12.0, 188, 128, 99),
    "NVIDIA RTX PRO 4000 Blackwell": (12.0, 20, 24, 99),
    # nobody says its capability, as where there is no GPU: that of none, and an H100's processors
    "a GPU": (None, 132, 50, 99),
}


@pytest.mark.parametrize("kind", OF_KIND)
def test_a_kind_of_gpu_has_the_facts_of_its_row(kind):
    with named(kind):
        assert facts() == OF_KIND[kind]


def test_each_row_is_that_of_some_kind():
    assert {*map(gpus.find, OF_KIND)} == {*gpus.KINDS.values(), None}


@pytest.mark.parametrize("word", ["RTX A1000", "RTX A3000", "A16", "L20", "H20", "RTX 2080 Ti"])
def test_a_kind_is_not_that_of_a_name_that_begins_alike(word):
    assert gpus.find(f"NVIDIA {word}") is None


OF_CAPABILITY = {
    8.0: (56, 24, 163),
    8.6: (6, 1, 99),
    8.9: (20, 12, 99),
    9.0: (114, 50, 227),
    10.0: (148, 126, 227),
    12.1: (20, 24, 99),  # as 12.0
    11.0: (4, 1, 99),  # as all
}


@pytest.mark.parametrize("capability", OF_CAPABILITY)
def test_a_gpu_in_no_row_has_the_least_of_its_compute_capability(capability):
    with jax.default_device(fakes.Device("a GPU", str(capability), None)):
        assert facts() == (capability, *OF_CAPABILITY[capability])


def test_a_device_knows_its_own_processors():
    with jax.default_device(fakes.Device("NVIDIA GeForce RTX 3060", "8.6", 28)):
        assert facts() == (8.6, 28, 1.5, 99)


@pytest.mark.parametrize("name", GPUS)
def test_kernels_and_accounting_read_the_same_facts(name):
    gpu = GPUS[name]
    with named(gpu.kind):
        capability, processors, l2, shared = facts()
    major, minor = gpu.capability
    assert (capability, processors, l2) == (major + minor / 10, gpu.cores, gpu.l2 / 2**20)
    assert shared == (gpu.shared_memory >> 10) - 1
