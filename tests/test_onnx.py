"""The tests of the operator Attention that the package onnx has, with their data and results:
https://onnx.ai/onnx/operators/onnx__Attention.html."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from check import TOLERANCE, close
from selection import whole_but

from pallas_flash import attention_weights, flash_attention, scores

onnx = pytest.importorskip("onnx", reason="onnx is in the extra test")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("small_tiles")]


def _cases() -> dict:
    """Name -> attributes, inputs and outputs of a node."""
    from onnx.backend.test.case import node

    found = {}

    def expect(of, inputs, outputs, name, **_):
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in of.attribute}
        inputs, outputs = (
            dict(zip(filter(None, names), x, strict=True))
            for names, x in ((of.input, inputs), (of.output, outputs))
        )
        found[name.removeprefix("test_attention_")] = attributes, inputs, outputs

    with mock.patch.object(node, "expect", expect):  # the import calls it for each case
        from onnx.backend.test.case.node import attention  # noqa: F401
    return found


CASES = _cases()
TRITON = (  # in the fast half
    "4d_gqa_with_past_and_present_fp16",
    "3d_with_past_and_present_qk_matmul_softcap",
    "4d_causal_nonpad_attn_mask_composition",
    "4d_gqa_causal_nonpad_decode",
    "local_window_with_past",
)


def arguments(of: dict, x: dict):
    """A node's attributes and inputs as arrays and static arguments of flash_attention, equal for
    as many nodes as can share a program; and the outputs that are a cache."""

    def heads_last(name):  # of [B, heads, length, n], or of [B, length, heads * n]
        a, heads = x[name], of.get("q_num_heads" if name == "Q" else "kv_num_heads")
        return a.swapaxes(1, 2) if a.ndim == 4 else a.reshape(*a.shape[:2], heads, -1)

    q, k, v = map(heads_last, "QKV")
    past = x["past_key"].shape[2] if "past_key" in x else 0
    if past:
        k, v = (
            np.concatenate([heads_last(f"past_{name}"), new], 1)
            for name, new in (("key", k), ("value", v))
        )
    (B, T, N, H), S = q.shape, k.shape[1]
    arrays = dict(query=q, key=k, value=v, scale=np.float32(of.get("scale", H**-0.5)))
    window = [of.get(f"{side}_window_size", -1) for side in ("left", "right")]
    static = dict(
        is_causal=bool(of.get("is_causal")),
        local_window_size=tuple(None if n < 0 else n for n in window),
        logits_soft_cap=of.get("softcap"),
    )
    if (lengths := x.get("nonpad_kv_seqlen")) is not None:
        arrays |= dict(key_value_seq_lengths=lengths, query_offset=lengths - T)
    elif static["is_causal"] or window != [-1, -1]:
        static["query_offset"] = past
    if (mask := x.get("attn_mask")) is not None:  # keys that it has no column for are hidden
        is_bool = mask.dtype == bool
        missing = [(0, 0)] * (mask.ndim - 1) + [(0, S - mask.shape[-1])]
        mask = np.pad(mask, missing, constant_values=False if is_bool else -np.inf)
        arrays["mask" if is_bool else "bias"] = np.broadcast_to(mask, (B, N, T, S))
    cache = dict(present_key=k.swapaxes(1, 2), present_value=v.swapaxes(1, 2)) if past else {}
    return arrays, static, cache


@functools.partial(jax.jit, static_argnames=("implementation", "static", "mode"))
def run(arrays: dict, implementation: str, static: tuple, mode: int | None):
    """The output and, as the mode says, logits or weights [B, N, T, S]."""
    static, scale = dict(static), dict(scale=arrays["scale"])
    arrays, cap = dict(arrays), dict(logits_soft_cap=static["logits_soft_cap"])
    if cap["logits_soft_cap"] and "bias" in arrays:  # flash_attention, as jax.nn, caps their sum
        bias, capped = arrays.pop("bias"), scores.SoftCap(static.pop("logits_soft_cap"))
        static["score_mod"] = lambda s, b, h, q, k: capped(s, b, h, q, k) + bias[b, h, q, k]
    qkv = [arrays.pop(name) for name in ("query", "key", "value")]
    options = arrays | static
    attend = functools.partial(flash_attention, *qkv, implementation=implementation)
    if mode is None:
        return attend(**options), None
    of_mode = [scale, scale | cap, options, options][mode]
    weights = attention_weights(*qkv[:2], rows=range(qkv[0].shape[1]), **of_mode)
    if mode == 3:
        return attend(**options), weights
    _, lse = attend(**of_mode, return_residual=True)
    return attend(**options), jnp.log(weights) + lse.mT[..., None]


@pytest.mark.parametrize(
    "implementation, name",
    [("blockwise", name) for name in CASES]
    + whole_but((("triton", name) for name in CASES), *(("triton", name) for name in TRITON)),
)
def test_outputs_are_those_that_onnx_expects(implementation, name):
    of, inputs, expected = CASES[name]
    arrays, static, found = arguments(of, inputs)
    mode = of.get("qk_matmul_output_mode", 0) if "qk_matmul_output" in expected else None
    y, logits = run(arrays, implementation, tuple(static.items()), mode)
    found["Y"] = y.swapaxes(1, 2) if inputs["Q"].ndim == 4 else y.reshape(*y.shape[:2], -1)
    found |= {} if mode is None else dict(qk_matmul_output=logits)
    assert found.keys() == expected.keys()
    for output, x in expected.items():
        close(found[output], x, TOLERANCE[str(x.dtype)], output)


def test_onnx_has_all_cases_that_it_had():
    assert len(CASES) >= 93
