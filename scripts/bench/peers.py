"""Who is measured: the implementations of pallas_flash and their peers, each an adapter of a few
lines."""

import functools
import importlib.metadata
import importlib.util
import logging
import sys
import types
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash import explain, flash_attention, masks
from scripts.bench.cases import PASSES, Case


class Contender(NamedTuple):
    name: str
    # (case, q, k, v, **operands) -> o; NotImplementedError says that it cannot do the case
    attend: Callable
    # None: it can be asked for this case; else the reason
    why_not: Callable[[Case], str | None] = lambda case: None
    # further arrays of a call, made before it
    operands: Callable[..., dict] = lambda case, k, v: {}
    package: str = "jax"  # whose version is noted
    modules: tuple[str, ...] = ()  # that `attend` imports
    before_import: Callable[[], None] = lambda: None
    passes: tuple[str, ...] = PASSES
    dtype: str | None = None  # the only one of 16 bits that it takes: it gets its inputs in that
    is_torch: bool = False
    note: str = ""  # what a reader of its numbers must know

    def takes(self, case: Case) -> Case:
        return case._replace(dtype=self.dtype) if self.dtype and case.dtype != "float32" else case

    @property
    def is_peer(self) -> bool:
        return self.package != "pallas-flash"

    @property
    def is_foreign(self) -> bool:
        """Other code than jax's and ours, which may take the process or its CUDA context with
        it."""
        return bool(self.modules)

    def missing(self) -> str | None:
        packages = (name.partition(".")[0] for name in self.modules)
        absent = [name for name in packages if importlib.util.find_spec(name) is None]
        return f"no module {', '.join(absent)}" if absent else None

    def load(self):
        """Imports what `attend` will, before several threads do."""
        if self.modules and self.modules[-1] not in sys.modules:
            self.before_import()
            for name in self.modules:
                importlib.import_module(name)

    def version(self) -> str:
        try:
            return f"{self.package} {importlib.metadata.version(self.package)}"
        except importlib.metadata.PackageNotFoundError:
            return f"{self.package}, version unknown"


def contender(name: str) -> Contender:
    """A peer, or pallas_flash's implementation of that name; "NAME fused" is its backward in any
    order of additions."""
    return next((peer for peer in PEERS if peer.name == name), None) or _ours(name)


# ---- pallas_flash ----


def _ours(name: str) -> Contender:
    implementation = name.removesuffix(" fused")
    fused = implementation != name
    options = lambda case: dict(
        is_causal=case.causal,
        local_window_size=_window(case),
        mask=_rule(case),
        implementation=implementation,
        **dict(deterministic=False) if fused else {},
    )

    def why_not(case):
        try:
            explain(*case.shapes()[:3], **options(case), **_ids(case))
        except NotImplementedError as error:
            return str(error)

    attend = lambda case, q, k, v, **x: flash_attention(q, k, v, **options(case), **x)
    # the forward is the same
    passes = tuple(name for name in PASSES if name != "forward") if fused else PASSES
    return Contender(name, attend, why_not, _ids, package="pallas-flash", passes=passes)


def _ids(case: Case, *kv) -> dict:
    return dict(query_segment_ids=case.segment_ids()) if case.documents else {}


def _window(case: Case) -> tuple[int, int] | None:
    return (case.window - 1, 0) if case.window and not case.global_tokens else None


def _rule(case: Case) -> masks.Mask | None:
    return (
        masks.Window(case.window - 1, 0) | masks.GlobalTokens(case.global_tokens)
        if case.global_tokens
        else None
    )


# ---- peers ----


def _dense(case: Case, *kv) -> dict:
    return dict(mask=case.visible()) if case.documents or case.global_tokens else {}


def _jax_nn(implementation: str) -> Callable:
    def attend(case, q, k, v, mask=None):
        options = dict(
            mask=mask,
            is_causal=case.causal,
            local_window_size=_window(case),
            implementation=implementation,
        )
        return jax.nn.dot_product_attention(q, k, v, **options)

    return attend


def _decode_attention(case: Case, q, k, v):
    from jax.experimental.pallas.ops.gpu import decode_attention

    return decode_attention.gqa(q[:, 0], k, v)[:, None]


def _decode_why_not(case: Case) -> str | None:
    if jax.default_backend() != "gpu":
        return "it needs a GPU"
    return (
        f"it takes one new token; got T = {case.T}"
        if case.T > 1
        else _plain(case._replace(T=case.S))
    )


def _paged_attention(case: Case, q, k, v, k_pages, v_pages, table):
    from jax.experimental.pallas.ops.gpu import paged_attention

    q = q[:, 0] * case.H**-0.5  # it does not scale
    return paged_attention.paged_attention(
        q, k_pages, v_pages, table, None, k_splits=min(16, table.shape[1])
    )[:, None]


def _pages(case: Case, k, v) -> dict:
    """The caches of all rows in pages [K, B * S / PAGE, PAGE, H]; it is not timed how they get
    there."""
    # one copy, of up to 17 GB
    as_pages = jax.jit(lambda x: jnp.moveaxis(x.reshape(-1, PAGE, case.K, case.H), 2, 0))
    table = jnp.arange(case.B * case.S // PAGE, dtype=jnp.int32).reshape(case.B, -1)
    return dict(k_pages=as_pages(k), v_pages=as_pages(v), table=table)


def _paged_why_not(case: Case) -> str | None:
    if importlib.util.find_spec(f"{PALLAS}.paged_attention") is None:
        return f"jax {jax.__version__} has no {PALLAS}.paged_attention any more"
    if reason := _decode_why_not(case):
        return reason
    pages = case.S // PAGE
    if case.S % PAGE or pages & (pages - 1) or case.H & (case.H - 1):
        return (
            f"its blocks are powers of two: of S, in pages of {PAGE} keys, and H; got S = "
            f"{case.S}, H = {case.H}"
        )
    return None


def _jax_nn_why_not(case: Case) -> str | None:
    return "it wants values of the keys' head size" if case.value_size != case.H else None


def _cudnn_why_not(case: Case) -> str | None:
    if jax.default_backend() != "gpu":
        return "it needs an NVIDIA GPU"
    return (
        "it takes bfloat16 and float16 only" if case.dtype == "float32" else _jax_nn_why_not(case)
    )


def _mgpu(case: Case, q, k, v):
    from jax.experimental.pallas.ops.gpu import attention_mgpu as mgpu

    # as its own main() picks them: the longest block of keys that fits; the backward as its tests
    # have it
    blocks = dict.fromkeys(
        ("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), None if case.causal else 64
    )
    config = mgpu.TuningConfig(
        block_q=64,
        block_kv=max(64, 16384 // case.H),
        max_concurrent_steps=2,
        causal=case.causal,
        **blocks,
    )
    return mgpu.attention(q, k, v, config)


def _plain(case: Case) -> str | None:
    """For those that know causal and full."""
    extras = [
        case.window and "window",
        case.documents and "documents",
        case.value_size != case.H and "value size of its own",
    ]
    extras += [case.T != case.S and "lengths that differ"]
    return f"it has no {', no '.join(filter(None, extras))}" if any(extras) else None


def _tokamax(case: Case, q, k, v, mask=None):
    import tokamax

    options = dict(
        mask=mask, is_causal=case.causal, local_window_size=_window(case), implementation="mosaic"
    )
    return tokamax.dot_product_attention(q, k, v, **options)


def _before_tokamax():
    # it warns of every shape that it was not tuned for
    logging.getLogger("absl").setLevel(logging.ERROR)
    # a large profiler, which only tokamax's own benchmarks use
    if importlib.util.find_spec("xprof") is None:
        for name in ("xprof", "xprof.cli", "xprof.cli.tools"):
            sys.modules[name] = types.ModuleType(name)
        sys.modules["xprof.cli.tools"].get_kernel_stats_tool = None


def _fa3(case: Case, q, k, v, starts=None):
    from flash_attn3_jax import flash_mha, flash_mha_varlen

    options = dict(is_causal=case.causal, window_size=_window(case) or (-1, -1))
    if starts is None:
        return flash_mha(q, k, v, **options)
    flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    longest = int(case.document_lengths().max())
    return flash_mha_varlen(
        *flat, starts, max_seqlen_q=longest, max_seqlen_k=longest, **options
    ).reshape(q.shape)


def _starts(case: Case, *kv) -> dict:
    """Of the documents of all rows, behind each other."""
    lengths = np.tile(case.document_lengths(), case.B)
    return dict(starts=np.cumsum([0, *lengths], dtype=np.int32)) if case.documents else {}


def _fa3_why_not(case: Case) -> str | None:
    sizes = case.H, case.value_size
    if case.global_tokens:
        return "it has no global tokens"
    return (
        None
        if sizes == (128, 128)
        else f"its wheel holds head size 128 only; got H = {sizes[0]}, Hv = {sizes[1]}"
    )


def _dew(case: Case, q, k, v):
    from dew_flash_attn import flash_mha

    return flash_mha(q, k, v, is_causal=case.causal)


def _jla(case: Case, q, k, v, segment_ids=None, *, backward: str):
    from jla.ops.mosaic_gpu.attention import flash_attention

    return flash_attention(
        q, k, v, segment_ids=segment_ids, sliding_window=case.window, backward=backward
    )


def _jla_why_not(case: Case, backward: str) -> str | None:
    from jla.ops.mosaic_gpu.attention import supported

    if not case.causal:
        return "it is causal only"
    if case.global_tokens:
        return "it has no global tokens"
    if backward == "fused" and case.value_size != case.H:
        return "its fused backward wants values of the keys' head size"
    return supported(*case.shapes()[:3])


def _jla_contender(name: str, backward: str, passes=PASSES) -> Contender:
    return Contender(
        name,
        functools.partial(_jla, backward=backward),
        functools.partial(_jla_why_not, backward=backward),
        lambda case, *kv: dict(segment_ids=case.segment_ids()) if case.documents else {},
        package="jax-linear-attention",
        modules=("jla.ops.mosaic_gpu.attention",),
        passes=passes,
    )


def _sdpa(case: Case, q, k, v, mask=None):
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    causal, grouped = case.causal and mask is None, case.N != case.K
    return scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, enable_gqa=grouped
    ).transpose(1, 2)


FA3 = (
    "in the machine code of flash-attn3-jax 0.2.3 the loops without a mask wait for all products "
    "before the exponentials;"
    " published for FlashAttention-3 are 648 TFLOP/s full and 616 causal, forward, head size 128, "
    "16384 long, an H100 SXM"
)
PALLAS = "jax.experimental.pallas.ops.gpu"
PAGE = 64  # keys, of a paged cache
PEERS = [
    Contender("jax.nn/xla", _jax_nn("xla"), _jax_nn_why_not, _dense),
    Contender("jax.nn/cudnn", _jax_nn("cudnn"), _cudnn_why_not, _dense),
    Contender(
        "attention_mgpu",
        _mgpu,
        _plain,
        modules=("absl", f"{PALLAS}.attention_mgpu"),
        dtype="float16",
    ),  # its buffers are, whatever it is given
    Contender(
        "decode_attention",
        _decode_attention,
        _decode_why_not,
        modules=(f"{PALLAS}.decode_attention",),
        passes=PASSES[:1],
    ),
    Contender("paged_attention", _paged_attention, _paged_why_not, _pages, passes=PASSES[:1]),
    Contender(
        "tokamax",
        _tokamax,
        operands=_dense,
        package="tokamax",
        modules=("tokamax",),
        before_import=_before_tokamax,
    ),
    Contender(
        "fa3",
        _fa3,
        _fa3_why_not,
        _starts,
        package="flash-attn3-jax",
        modules=("flash_attn3_jax",),
        note=FA3,
    ),
    Contender("dew", _dew, _plain, package="dew-flash-attn-cu13", modules=("dew_flash_attn",)),
    _jla_contender("jla", "ranged"),
    _jla_contender("jla fused", "fused", PASSES[1:]),
    Contender(
        "torch",
        _sdpa,
        operands=lambda case, *kv: (
            dict(mask=case.visible()) if case.documents or case.window else {}
        ),
        package="torch",
        modules=("torch",),
        is_torch=True,
    ),
]
