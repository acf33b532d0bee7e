"""What the package takes from jax beyond the names that jax promises to keep, in one place: a jax
that lacks one of them is refused in one sentence, when the package is imported."""

import contextlib
import importlib
import operator
from typing import Any, NamedTuple

import jax

SUPPORTED = "jax>=0.10.2,<0.13"  # as in pyproject.toml
NEEDED = {
    "jax.ad_checkpoint": "checkpoint_name",
    "jax.core": "ShapedArray.manual_axis_type Tracer.to_concrete_value",
    "jax.experimental.jet": "jet_rules",
    "jax.extend.core": "Literal Primitive jaxpr_as_fun primitives",
    "jax.interpreters.ad": (
        "Zero instantiate_zeros is_undefined_primal primitive_jvps primitive_transposes"
    ),
    "jax.interpreters.batching": "primitive_batchers",
    "jax.interpreters.mlir": (
        "LoweringParameters.for_export ModuleContext.axis_context "
        "ModuleContext.lowering_parameters ModuleContext.platforms lower_fun register_lowering"
    ),
    "jax.lax": "pcast",
    "jax.sharding": "AbstractDevice",
}


def find(module: str, name: str) -> Any:
    """The object of this name, which may have dots, in a module of jax."""
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"pallas_flash runs with {SUPPORTED}; jax {jax.__version__} has no {module}.{name}: "
            f"pip install '{SUPPORTED}'"
        ) from error


for _module, _names in NEEDED.items():
    for _name in _names.split():
        find(_module, _name)

Literal, Primitive, jaxpr_as_fun, primitives = (
    find("jax.extend.core", name) for name in NEEDED["jax.extend.core"].split()
)
jet_rules = find("jax.experimental.jet", "jet_rules")
ad, batching, mlir = (find("jax.interpreters", name) for name in ("ad", "batching", "mlir"))


class Target(NamedTuple):
    """The platforms and the mesh that a program is lowered for."""

    platforms: tuple[str, ...]
    is_export: bool
    mesh: jax.sharding.AbstractMesh | None  # None where jax does not say


def target(ctx) -> Target:
    """Reads the target from the context of a lowering rule."""
    module = ctx.module_context
    mesh = getattr(module.axis_context, "abstract_mesh", None)
    return Target(tuple(module.platforms), module.lowering_parameters.for_export, mesh)


def hide_frames(folder: str):
    """Leaves the files in this folder out of tracebacks that JAX filters, if JAX can be told."""
    with contextlib.suppress(ImportError, TypeError):
        find("jax._src.traceback_util", "register_exclusion")(folder)


@contextlib.contextmanager
def traced_lines():
    """A context in which equations get the source lines that trace them. While JAX transposes or
    lowers an equation, all that it traces has that equation's line otherwise, and so it has here in
    a jax that keeps the line elsewhere."""
    try:
        current = find("jax._src.source_info_util", "_source_info_context")
        before = current.context
        current.context = type(before)(None, before.name_stack)
    except (ImportError, AttributeError, TypeError):  # another jax
        yield
        return
    try:
        yield
    finally:
        current.context = before


def vary_alike(tree: Any) -> Any:
    """Lets all arrays vary over every axis of the mesh that one of them varies over, as operations
    and loops inside of shard_map need. An array that was the same on all devices gets the sum of
    its gradients."""
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves(tree)))

    def vary(x):
        missing = tuple(axes - varying_axes(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)


def varying_axes(x) -> frozenset[str]:
    """The axes of the mesh over which an array varies inside of a shard_map that checks this."""
    return jax.typeof(x).manual_axis_type.varying


def unvarying(arrays: list) -> list:
    """The arrays, which vary over axes of a mesh, typed as if they did not: plgpu.warp_map refuses
    a kernel's arrays that vary."""
    with find("jax._src.config", "_check_vma")(False):
        return [jax.lax.bitcast_convert_type(x, x.dtype) for x in arrays]


# ---- what only arrays on a mesh with Auto axes need. jax has no public place for it ----


def custom_partitioning():
    """jax's decorator, and the set of primitives whose lowering is told the devices."""
    return (
        find("jax.experimental.custom_partitioning", "custom_partitioning"),
        find("jax._src.dispatch", "prim_requires_devices_during_lowering"),
    )


def partitioning_callbacks():
    """The functions that XLA calls back, by their names in the program; their type; and the type of
    a name."""
    return (
        find("jax._src.custom_partitioning", "_sharding_callbacks"),
        find("jax._src.custom_partitioning", "_ShardingCallbackInfo"),
        find("jax.extend.mlir.ir", "StringAttr"),
    )


def cuda_path() -> str | None:
    """The CUDA toolkit that jax names to XLA and Mosaic, or None."""
    with contextlib.suppress(ImportError):
        return find("jax._src.lib", "cuda_path")
    return None


def ptx_isa() -> int:
    """Ten times the version of PTX that Mosaic's compiler knows; 0 where jax does not say."""
    with contextlib.suppress(ImportError):
        return find("jax._src.lib", "mosaic_gpu._mosaic_gpu_ext._get_ptxas_isa_version")()
    return 0


def job() -> Any:
    """The client by which the processes of jax.distributed exchange strings, or None."""
    with contextlib.suppress(ImportError):
        return find("jax._src.distributed", "global_state.client")
    return None
