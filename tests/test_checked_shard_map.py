"""Inside of a shard_map that checks what varies all that a row sees may be data: on four GPUs that
are not there, traced."""

import functools
from unittest import mock

import jax
import numpy as np
import pytest
from cases import MASKS, RULES, Sizes, arguments, bias, dense_mask, qkv
from jax.sharding import PartitionSpec as P
from selection import whole_but

from pallas_flash import flash_attention, masks
from pallas_flash.accounting import GPUS
from pallas_flash.context_parallel import AllToAll, Ring, Zigzag
from pallas_flash.kernels.hopper import tuning
from pallas_flash.kernels.mosaic import operations
from scripts.bench import gpu_code

Z = Sizes(B=2, T=256, S=256, N=4, K=4, H=64, Hv=64)
CASES = MASKS | {
    "an array by batch row": lambda rng, z: dict(mask=dense_mask(rng, "B1TS", z)),
    "an array of the keys, and a bias": lambda rng, z: dict(
        mask=dense_mask(rng, "B11S", z), bias=bias(rng, "BN1S", z)
    ),
    "first keys": lambda rng, z: dict(mask=masks.KeyStarts(np.array([0, 3], np.int32))),
    "a rule, and all else": lambda rng, z: dict(
        rule=RULES["dilated"][0], **MASKS["everything"](rng, z)
    ),
}
CONTEXTS = {"ring": Ring("other"), "zigzag": Zigzag("other"), "all to all": AllToAll("other")}
FLOATS = "query", "key", "value", "bias"

four_gpus = functools.partial(gpu_code.as_if_on, GPUS["H100"], dict(data=2, other=2))
with four_gpus():
    TOO_OLD = operations.why_no_gpu("a Hopper GPU", lambda capability: capability == 9.0)


def skip_if_too_old(implementation):
    if implementation in ("hopper", "ampere") and TOO_OLD:
        pytest.skip(TOO_OLD)


def check(implementation, case, context=None):
    """Output and log-sum-exp vary over the mesh as the query does, and gradients as what they are
    of. On the axis `other` lie heads, or with a context rows."""
    skip_if_too_old(implementation)
    rng = np.random.default_rng(0)
    call = arguments(CASES[case](rng, Z)) | dict(
        zip(("query", "key", "value"), qkv(rng, Z, "bfloat16"), strict=True)
    )
    arrays = {name: x for name, x in call.items() if hasattr(x, "shape") or name == "mask"}
    static = {name: x for name, x in call.items() if name not in arrays}
    static |= dict(implementation=implementation, context=context, return_residual=True)
    static |= dict(deterministic=context is None)
    row, head = ("other", None) if context else (None, "other")
    of = dict.fromkeys(("query", "key", "value"), P("data", row, head)) | dict(bias=P("data", head))
    of |= dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), P("data", row))
    specs = {name: of.get(name, P("data")) for name in arrays}
    if "mask" in arrays:  # one number is on all devices
        specs["mask"] = jax.tree.map(lambda x: P("data") if x.ndim else P(), arrays["mask"])
    floats = {name: arrays[name] for name in FLOATS if name in arrays}

    def step(arrays):
        attend = lambda floats: flash_attention(**arrays | floats, **static)
        outputs, vjp = jax.vjp(attend, {name: arrays[name] for name in floats})
        return attend(arrays), outputs, vjp(outputs)[0]

    with (
        four_gpus(),
        mock.patch.object(tuning, "ONE_KERNEL_KEYS", 0),
    ):  # the backward of large calls
        out_specs = of["query"], of["query"], {name: specs[name] for name in floats}
        mapped = jax.shard_map(step, in_specs=(specs,), out_specs=out_specs)
        _, (o, lse), gradients = jax.eval_shape(mapped, arrays)
    assert (o.shape, lse.shape) == (call["value"].shape, call["query"].shape[:3])
    assert {name: (x.shape, x.dtype) for name, x in gradients.items()} == {
        name: (x.shape, x.dtype) for name, x in floats.items()
    }


EACH = [
    (implementation, case)
    for implementation in ("hopper", "ampere", "triton", "blockwise", "reference")
    for case in CASES
]
EACH += [("flash1", "everything"), ("standard", "everything")]
MOSAIC = [
    ("hopper", "documents_causal"),
    ("hopper", "an array by batch row"),
    ("ampere", "a rule, and all else"),
]


@pytest.mark.parametrize(
    "implementation, case",
    whole_but(EACH, *MOSAIC, ("triton", "everything"), ("blockwise", "everything")),
)
def test_all_that_a_row_sees_may_be_data(implementation, case):
    check(implementation, case)


ALONG = [
    (i, c, case)
    for i in ("hopper", "triton", "blockwise", "reference")
    for c in CONTEXTS
    for case in ("causal", "everything")
]


@pytest.mark.parametrize(
    "implementation, context, case", whole_but(ALONG, ("hopper", "zigzag", "causal"))
)
def test_rows_may_lie_on_the_devices_too(implementation, context, case):
    check(implementation, case, CONTEXTS[context])


@pytest.mark.parametrize("implementation", whole_but(["hopper", "triton"], "hopper"))
def test_rules_may_read_what_varies(implementation):
    skip_if_too_old(implementation)

    def gradients(q, k, v, slopes, ids):
        def attend(q, k, v, slopes):
            mask = masks.MaskMod(lambda b, h, i, j: ids[b, i] == ids[b, j])
            bent = lambda s, b, h, i, j: s - slopes[b, h] * (i - j)
            return flash_attention(
                q, k, v, mask=mask, score_mod=bent, implementation=implementation
            )

        o, vjp = jax.vjp(attend, q, k, v, slopes)
        return vjp(o)

    x = (
        *qkv(np.random.default_rng(0), Z, "bfloat16"),
        np.ones((Z.B, Z.N), np.float32),
        np.zeros((Z.B, Z.T), np.int32),
    )
    with four_gpus():
        mapped = jax.shard_map(gradients, in_specs=P("data"), out_specs=P("data"))
        assert [a.shape for a in jax.eval_shape(mapped, *x)] == [a.shape for a in x[:4]]
