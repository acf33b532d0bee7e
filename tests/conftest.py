"""Small tiles, so that small inputs have many blocks; fresh but repeatable random inputs."""

import gc
import os
import shutil
import zlib

from jaxlib import version

# XLA's threads: gpu_interpreter.py needs one for each warpgroup, on any machine
os.environ.setdefault("NPROC", "8")
# NumPy's threads wait for each other by spinning, beside other tests
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# tests change tiles; test_selfcheck*.py check the check
os.environ.setdefault("PALLAS_FLASH_SELF_CHECK", "0")
# where a test fails, frames of jax and of the package say why
os.environ.setdefault("JAX_TRACEBACK_FILTERING", "off")
# several test processes may share a GPU
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# XLA's older emitter compiles in a third of the time; from 0.11.2 on it is gone
if version.__version__.startswith("0.10."):
    fast = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{fast} {os.environ.get('XLA_FLAGS', '')}"
# eight devices of two busy processors may keep each other waiting for more than its 40 seconds
if version.__version__.startswith(("0.10.", "0.11.")):
    slow = "--xla_cpu_collective_call_terminate_timeout_seconds=300"
    os.environ["XLA_FLAGS"] = f"{slow} {os.environ.get('XLA_FLAGS', '')}"

import fakes
import jax
import numpy as np
import pytest
import trainer
from jax.experimental.compilation_cache import compilation_cache
from selection import fast_half, mark_for_a_gpu, one_turn

from pallas_flash.choose.selfcheck import comparison
from pallas_flash.kernels.triton import tuning as triton
from pallas_flash.kernels.triton.tuning import Tiles, TritonTiles
from pallas_flash.tiled import blockwise, split_kv

jax.config.update("jax_num_cpu_devices", 8)  # for tests of meshes; all else runs on the first

IMPLEMENTATIONS = ("reference", "blockwise", "triton")


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def pytest_addoption(parser):
    help = (
        "every test with all of its parameters and many drawn calls; without it, the fast half "
        "and tests named by their ids"
    )
    parser.addoption("--whole", action="store_true", help=help)
    help = "with --whole: a sixteenth of the tests, which this number modulo 16 names"
    parser.addoption("--turn", type=int, help=help)
    help = (
        "compile programs as users do; without it most optimizations are off, since most "
        "programs run once, and small"
    )
    parser.addoption("--optimized", action="store_true", help=help)


def pytest_configure(config):
    jax.config.update("jax_disable_most_optimizations", not config.option.optimized)
    # of what is expected: a GPU would round it to TF32
    jax.config.update("jax_default_matmul_precision", "highest")


def pytest_collection_finish(session):
    """Tracing makes many objects and few cycles: those of the imports are searched no more, and new
    ones seldom."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


def pytest_xdist_auto_num_workers():
    """On a GPU as many as share its memory; else xdist counts processors."""
    return 4 if on_gpu() else None


def pytest_itemcollected(item):
    mark_for_a_gpu(item, on_gpu())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """What is refused for the capability of this GPU is no failure."""
    try:
        return (yield)
    except NotImplementedError as error:
        if on_gpu() and "of compute capability" in str(error):
            pytest.skip(str(error))
        raise


@pytest.hookimpl(trylast=True)  # what -k and -m leave
def pytest_collection_modifyitems(config, items):
    whole, turn = config.option.whole, config.option.turn
    if (not whole or turn is not None) and not any("::" in arg for arg in config.args):
        kept = set(one_turn(items, turn) if whole else fast_half(items))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 16, clipped to the lengths where an implementation needs that."""
    # a symbol of jax.export is one block
    at_most_16 = lambda n: min(16, n) if isinstance(n, int) else n
    heads = lambda p: 1 if isinstance(p.batch, int) else None
    by_lists = lambda p, *walk: p.resolved_mask.lists and tiles(p, *walk).lists
    of, tiles = blockwise.Tiles, blockwise.tiles
    small = lambda p: of(at_most_16(p.queries), at_most_16(p.keys), heads(p), p.dtype, heads(p))
    chunk = lambda p, lists: 3 if p.is_static else lists.chunk
    lists = lambda *walk: (known := by_lists(*walk)) and known._replace(chunk=chunk(walk[0], known))
    of_walk = lambda p, *walk: small(p)._replace(lists=lists(p, *walk))
    monkeypatch.setattr(blockwise, "tiles", of_walk)
    monkeypatch.setattr(blockwise.tuning, "SCORES", 1)  # blocks wait for each other
    monkeypatch.setattr(
        triton, "tiles", lambda p: TritonTiles(Tiles(16, 16), Tiles(16, 32), *[Tiles(32, 16)] * 2)
    )


@pytest.fixture
def small_caches(monkeypatch):
    """No copy of keys is small: blockwise decodes whatever is decoding."""
    monkeypatch.setattr(blockwise.tuning, "_decodes", split_kv.is_decoding)
    monkeypatch.setattr(blockwise.tuning, "_remembered", blockwise.tuning._choose)


@pytest.fixture
def small_splits(monkeypatch):
    """Few keys are decoding too, in blocks of 16 and three splits."""
    monkeypatch.setattr(split_kv, "KEYS", 1)
    monkeypatch.setattr(split_kv, "num_splits", lambda *_: 3)
    monkeypatch.setattr(blockwise.tuning, "DECODE_KEYS", 16)
    monkeypatch.setattr(blockwise.tuning, "_remembered", blockwise.tuning._choose)
    monkeypatch.setattr(blockwise.tuning, "_is_one_device", lambda: True)
    of = triton.decode_tiles
    monkeypatch.setattr(triton, "decode_tiles", lambda *args: of(*args)._replace(block_k=16))


@pytest.fixture
def verdict_folder(monkeypatch, tmp_path):
    """The user's cache folder, empty; the check is on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PALLAS_FLASH_SELF_CHECK", "1")
    monkeypatch.delenv("PALLAS_FLASH_IMPLEMENTATION", raising=False)
    return tmp_path / "pallas_flash"


@pytest.fixture
def install(monkeypatch):
    """Puts fakes before all others, as on a GPU that nobody has checked, and as in a new
    process."""

    def install(*names_and_fakes):
        made = (fakes.fake(x) if isinstance(x, str) else x for x in names_and_fakes)
        fakes.install(monkeypatch.setattr, *made)

    return install


@pytest.fixture
def checked(monkeypatch):
    """The names of the implementations that were checked, in order."""
    names, check = [], comparison.check
    monkeypatch.setattr(
        comparison,
        "check",
        lambda which, *args: (names.append(which.name), check(which, *args))[1],
    )
    return names


@pytest.fixture
def optimized(request):
    """For tests of roundings: programs as users have them."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", not request.config.option.optimized)


@pytest.fixture
def rng(request):
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_code():
    """Compiled code of one file is of no use to the next, and takes memory."""
    yield
    jax.clear_caches()


# ---- the toy GPT ----


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
    """Most runs have the same programs."""
    _cache_programs(str(tmp_path_factory.getbasetemp() / "compiled"))
    yield
    _cache_programs(None)


@pytest.fixture
def compiled_anew():
    """For several devices, whose programs cannot be restored: see scripts/gpt_run/devices.py."""
    folder = jax.config.jax_compilation_cache_dir
    _cache_programs(None)
    yield
    _cache_programs(folder)


def _cache_programs(folder: str | None):
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0 if folder is None else 0.0)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    return trainer.write_text(tmp_path_factory.mktemp("text") / "lines.txt")


@pytest.fixture(scope="session")
def finished_run(text, tmp_path_factory):
    """The folder of a run that nothing stopped. It is not to be written."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    trainer.train(*trainer.TINY, "--data", text, "--out", folder, "--tensorboard")
    return folder


@pytest.fixture
def copy(finished_run, tmp_path):
    """Of that folder, to be written."""
    return shutil.copytree(finished_run, tmp_path / "copy")
