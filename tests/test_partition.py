"""Under jit over a mesh with Auto axes each device computes its own batch rows and heads, and no
row is gathered."""

import functools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Sizes, bias, dense_mask, qkv
from check import equal, value_and_gradients
from jax import export
from jax.experimental import serialize_executable
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, needs_devices, put
from selection import whole_but

import pallas_flash.transforms.partition
from pallas_flash import flash_attention, masks
from pallas_flash.jax_support import jax_internals

pytestmark = [
    pytest.mark.usefixtures("small_tiles"),
    needs_devices,
]
Z = Sizes(B=4, T=5, S=7, N=8, K=4, H=8, Hv=8)
SPEC = P("data", None, "model")
FEW_KEYS = P("data")  # key heads on each device
MOVED = r" = .* (all-gather|all-to-all|collective-permute)"


def on_mesh(spec, *arrays, kind=AxisType.Auto):
    mesh = make_mesh(kind, data=2, model=4)
    return put(mesh, spec, *arrays)


def not_gathered(f, *x):
    """The result of jitted f(*x), of whose program no part moves rows between devices."""
    compiled = f.lower(*x).compile()
    assert not re.findall(MOVED, compiled.as_text())
    return compiled(*x)


LENGTHS = dict(
    key_value_seq_lengths=np.array([3, 7, 0, 5], np.int32),
    query_offset=np.array([2, 0, 3, 1], np.int32),
    is_causal=True,
)
IDS = dict(
    query_segment_ids=np.arange(20).reshape(4, 5) // 3,
    key_value_segment_ids=np.arange(28).reshape(4, 7) // 4,
)
CASES = {
    "key heads that divide": (4, SPEC, "1N1S", "B11S", LENGTHS),
    "key heads that do not divide": (2, FEW_KEYS, "B1TS", "1NT1", IDS),
    "one key head": (
        1,
        FEW_KEYS,
        None,
        "",
        dict(mask=masks.MaskMod(lambda b, h, q, k: (q + b + h) % 3 != k % 3)),
    ),
}


@pytest.mark.whole("triton")
@pytest.mark.parametrize("implementation", ["blockwise", "triton"])
@pytest.mark.parametrize("case", CASES)
def test_rows_of_no_array_and_no_gradient_are_gathered(case, implementation, rng):
    K, key_spec, of_bias, of_mask, kw = CASES[case]
    z = Z._replace(K=K)
    q, k, v = qkv(rng, z)
    b, kw = of_bias and bias(rng, of_bias, z), dict(mask=dense_mask(rng, of_mask, z)) | kw

    def gradients(implementation):
        options = dict(implementation=implementation, return_residual=True)
        attend = functools.partial(flash_attention, **options, **kw)
        return value_and_gradients(attend, (0, 1, 2, 3))

    placed = *on_mesh(SPEC, q), *on_mesh(key_spec, k, v), b
    spread = not_gathered(gradients(implementation), *placed)
    assert [x.sharding.spec for x in spread[1][:3]] == [SPEC, key_spec, key_spec]
    equal(spread, gradients("reference")(q, k, v, b))


@pytest.mark.parametrize("case", whole_but(CASES, "key heads that do not divide"))
def test_nor_are_those_of_a_tangent(case, rng):
    K, key_spec, of_bias, of_mask, kw = CASES[case]
    z = Z._replace(K=K)
    x, dx = ([*qkv(rng, z), *([bias(rng, of_bias, z)] if of_bias else [])] for _ in range(2))
    kw = dict(mask=dense_mask(rng, of_mask, z)) | kw
    of = lambda name: functools.partial(flash_attention, implementation=name, **kw)
    along = lambda name: jax.jit(lambda x, dx: jax.jvp(of(name), x, dx)[1])
    spread = lambda x: (*on_mesh(SPEC, x[0]), *on_mesh(key_spec, *x[1:3]), *x[3:])
    found = not_gathered(along("triton"), spread(x), spread(dx))
    assert found.sharding.spec == SPEC
    equal(found, along("reference")(tuple(x), tuple(dx)))


attend, dense = (
    functools.partial(flash_attention, is_causal=True, implementation=name)
    for name in ("triton", "reference")
)


@pytest.mark.parametrize(
    "spec", [P(None, *SPEC), P("data", None, None, "model")], ids=["whole", "spread"]
)
def test_vmap_keeps_arrays_where_they_are(spec, rng):
    q, k, v = (np.stack([x, x[::-1]]) for x in qkv(rng, Z._replace(B=2, K=8)))
    f = jax.jit(jax.vmap(attend, (0, None, 0)))
    spread = not_gathered(f, *on_mesh(spec, q), k[0], *on_mesh(spec, v))
    assert spread.sharding.spec == spec
    equal(spread, jax.vmap(dense, (0, None, 0))(q, k[0], v))


def test_remat_and_scan_go_around_it(rng):
    x, *_ = qkv(rng, Z._replace(S=5, K=8))

    def layers(attend, x):
        layer = jax.checkpoint(lambda x, _: (x + attend(x, x, x), None))
        return jax.lax.scan(layer, x, None, length=2)[0]

    gradient = lambda attend: value_and_gradients(functools.partial(layers, attend), 0)
    equal(not_gathered(gradient(attend), *on_mesh(SPEC, x)), gradient(dense)(x))


def test_without_a_mesh_of_several_devices_the_program_has_no_trace_of_it(rng):
    x = qkv(rng, Z)
    is_told = lambda *x: "flash_attention_partitioned[" in str(jax.make_jaxpr(attend)(*x))
    with jax.set_mesh(make_mesh(AxisType.Auto, data=1)):
        assert not is_told(*x)
    assert (
        not is_told(*x)
        and not is_told(*on_mesh(SPEC, *x, kind=AxisType.Explicit))
        and is_told(*on_mesh(SPEC, *x))
    )


def test_a_program_is_the_same_each_time_and_another_with_another_mask(rng):
    x = qkv(rng, Z)
    lower = lambda **kw: jax.jit(functools.partial(attend, **kw)).lower(*on_mesh(SPEC, *x))
    # all alive, at addresses of their own
    first, again, other = lower(), lower(), lower(is_causal=False)
    assert "CustomSPMDPartitioning" in first.as_text()
    assert first.as_text() == again.as_text() != other.as_text()
    equal(again.compile()(*on_mesh(SPEC, *x)), dense(*x))


def test_jax_still_names_what_is_called_back_by_its_address():
    """When this fails jax names it by what it computes, and _rename_callback may go."""

    def lower():
        f = custom_partitioning(lambda x: x + 1)
        partition = lambda mesh, x, y: (mesh, lambda x: x + 1, y[0].sharding, (x[0].sharding,))
        f.def_partition(partition, sharding_rule="i -> i")
        return jax.jit(lambda x: f(x)).lower(*on_mesh(P("data"), np.ones(8)))

    first, again = lower(), lower()  # both alive
    assert first.as_text() != again.as_text()


def test_what_is_exported_for_several_devices_calls_nothing_back(rng):
    x = qkv(rng, Z)
    program = export.export(jax.jit(attend))(*on_mesh(SPEC, *x))
    assert program.nr_devices == 8 and "CustomSPMDPartitioning" not in program.mlir_module()
    equal(jax.jit(program.call)(*on_mesh(SPEC, *x)), dense(*x))


def test_what_is_exported_with_its_gradient_or_for_an_abstract_mesh_needs_shard_map(rng):
    """As docs/devices.md says; when jax refuses neither, it may say less."""
    x = on_mesh(SPEC, *qkv(rng, Z._replace(K=8)))
    abstract = NamedSharding(AbstractMesh((2, 4), ("data", "model"), (AxisType.Auto,) * 2), SPEC)
    like = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=abstract) for a in x]
    written = lambda f, *x: export.export(jax.jit(f), platforms=["cpu"])(*x).serialize(vjp_order=1)
    for args in x, like:
        with pytest.raises(ValueError, match="AbstractMesh cannot be used"):
            written(attend, *args)
    specs = dict(in_specs=SPEC, out_specs=SPEC, check_vma=False)
    mapped = jax.shard_map(attend, mesh=abstract.mesh, **specs)
    program = export.deserialize(written(mapped, *like))
    equal(not_gathered(jax.jit(program.call), *x), dense(*x))
    gradient = lambda f: jax.jit(jax.grad(lambda *x: jnp.sum(jnp.sin(f(*x)))))
    equal(gradient(program.call)(*x), gradient(dense)(*x))


def test_a_compiled_program_is_pickled(rng):
    x = qkv(rng, Z)
    compiled = jax.jit(attend).lower(*on_mesh(SPEC, *x)).compile()
    loaded = serialize_executable.deserialize_and_load(*serialize_executable.serialize(compiled))
    equal(loaded(*on_mesh(SPEC, *x)), dense(*x))


@pytest.fixture
def lose(monkeypatch):
    """Takes a name away from what the package finds in jax."""

    def lose(name):
        def find(module, of, find=jax_internals.find):
            if f"{module}.{of}" == name:
                raise ImportError(f"jax has no {name}")
            return find(module, of)

        monkeypatch.setattr(jax_internals, "find", find)
        # which then is imported again
        monkeypatch.delitem(sys.modules, "pallas_flash.transforms.partition")
        monkeypatch.delattr(pallas_flash.transforms, "partition")

    return lose


@pytest.mark.parametrize(
    "name",
    [
        "jax.experimental.custom_partitioning.custom_partitioning",
        "jax._src.dispatch.prim_requires_devices_during_lowering",
    ],
)
def test_a_jax_that_cannot_do_it_gathers_and_says_so(name, rng, lose):
    lose(name)
    x = qkv(rng, Z)
    with pytest.warns(UserWarning, match=f"they are gathered.* has no {name}") as told:
        gathering = jax.jit(lambda *x: attend(*x))(*on_mesh(SPEC, *x))
    assert told[0].filename == __file__  # the caller's line
    equal(gathering, dense(*x))


@pytest.mark.parametrize(
    "name",
    [
        "jax._src.custom_partitioning._sharding_callbacks",
        "jax._src.custom_partitioning._ShardingCallbackInfo",
        "jax.extend.mlir.ir.StringAttr",
    ],
)
def test_a_jax_that_does_not_let_us_name_callbacks_names_them(name, rng, lose):
    lose(name)
    x = qkv(rng, Z)
    lowered = jax.jit(lambda *x: attend(*x)).lower(*on_mesh(SPEC, *x))
    assert "flash_attention " not in lowered.as_text()
    equal(lowered.compile()(*on_mesh(SPEC, *x)), dense(*x))
