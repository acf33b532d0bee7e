"""Who is measured: the implementations of pallas_flash and their peers, each an adapter of a few
lines. A further peer is a function and a row of PEERS."""

import functools
import importlib.metadata
import importlib.util
import logging
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_flash import explain, flash_attention, masks
from pallas_flash.choose.selfcheck import specs
from scripts.bench import tiles
from scripts.bench.cases import JVP, PASSES, Case


class Contender(NamedTuple):
    name: str
    # (case, q, k, v, **operands) -> o; NotImplementedError says that it cannot run the case
    attend: Callable
    # why it cannot run a case, beside what it `lacks`; None if it can
    refuses: Callable[[Case], str | None] = lambda case: None
    # further arrays of a call, from its keys and values; not timed
    operands: Callable[..., dict] = lambda case, k, v: {}
    lacks: tuple[str, ...] = ()  # of Case.features()
    needs_gpu: bool = False
    package: str = "jax"  # whose version is noted
    modules: tuple[str, ...] = ()  # that `attend` imports
    before_import: Callable[[], None] = lambda: None
    passes: tuple[str, ...] = tuple(PASSES)
    is_torch: bool = False
    note: str = ""  # what a reader of its times must know

    @property
    def is_peer(self) -> bool:
        return self.package != "pallas-flash"

    @property
    def is_foreign(self) -> bool:
        """Code that is neither jax's nor ours, and may crash the process or corrupt its CUDA
        context."""
        return bool(self.modules)

    def why_not(self, case: Case) -> str | None:
        """The reason why it cannot run the case, or None."""
        if self.needs_gpu and jax.default_backend() != "gpu":
            return "it needs a GPU"
        if self.is_peer and case.extras:
            return f"pallas_flash alone is timed with {case.extras}"
        lacking = [name for name in case.features() if name in self.lacks]
        return f"it has no {', no '.join(lacking)}" if lacking else self.refuses(case)

    def missing(self) -> str | None:
        packages = (name.partition(".")[0] for name in self.modules)
        absent = [name for name in packages if importlib.util.find_spec(name) is None]
        return f"no module {', '.join(absent)}" if absent else None

    def load(self):
        """Imports what `attend` imports, before several threads do."""
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
    """A peer, or an implementation of pallas_flash: "hopper", its backward with deterministic=True,
    "hopper deterministic", or in one kernel, "hopper fused", or given documents by cu_seqlens,
    "hopper varlen"; each with other tiles behind a colon, "hopper: dq.stages=2, dkv.stages=3"."""
    return next((peer for peer in PEERS if peer.name == name), None) or _ours(name)


# ---- pallas_flash ----

DETERMINISTIC, FUSED, VARLEN = "deterministic", "fused", "varlen"


def _ours(name: str) -> Contender:
    call, _, fields = name.partition(": ")
    implementation, _, kind = call.partition(" ")
    if kind not in ("", DETERMINISTIC, FUSED, VARLEN):
        raise ValueError(
            "after an implementation of pallas_flash stands nothing, deterministic, fused or "
            f"varlen; got {name!r}."
        )
    changes = tiles.parse(fields) if fields else []
    change = functools.partial(tiles.changed, changes=changes) if changes else None
    one = ours(name, implementation, kind, change)
    # the forward of another backward is the same
    return one._replace(passes=tuple(PASSES[1:])) if kind in (DETERMINISTIC, FUSED) else one


def ours(
    name: str, implementation: str, kind: str = "", change: Callable[[Any], Any] | None = None
) -> Contender:
    """An implementation of pallas_flash, by the tiles that `change` makes of its."""
    run = flash_attention
    if change or kind == FUSED:
        run = functools.partial(tiles.attend, change, kind == FUSED)

    def attend(case, q, k, v, cu_seqlens=None, **operands):
        options = _options(case, implementation, kind)
        v = None if case.values_are_keys else v
        if cu_seqlens is None:
            made = specs.arguments(case.extra_features(), operands)
            return run(q, k, v, **options | operands | made)
        packed = (x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v))
        o = run(*packed, **options | dict(mask=masks.Varlen(cu_seqlens)))
        return o.reshape(*q.shape[:-1], -1)

    def refuses(case):
        if kind == VARLEN and (case.extras or not case.documents):
            return "it is for documents"
        try:
            of_case = tiles_of(case, implementation, kind)
            if change:
                change(of_case)
            elif kind in (DETERMINISTIC, FUSED) and of_case == tiles_of(case, implementation):
                return "the kernels are the same by default"
        except NotImplementedError as error:
            return str(error)

    operands = _cu_seqlens if kind == VARLEN else _operands
    passes = (*PASSES, JVP)
    return Contender(name, attend, refuses, operands, package="pallas-flash", passes=passes)


def tiles_of(case: Case, implementation: str, kind: str = "") -> Any:
    """The tiles that a call takes; NotImplementedError where the implementation cannot run it."""
    query, key, value, _ = case.shapes()
    value = None if case.values_are_keys else value
    operands = _operands(case)
    options = _options(case, implementation, kind) | operands
    options |= specs.arguments(case.extra_features(), operands)
    found = explain(query, key, value, **options)
    return tiles.one_kernel(found.problem, implementation) if kind == FUSED else found.tiles


def _options(case: Case, implementation: str, kind: str) -> dict:
    """Arguments of flash_attention, except for arrays."""
    mask, window = None, _window(case)
    if case.global_tokens:
        mask = masks.Window(*window) | masks.GlobalTokens(case.global_tokens)
        window = None
    return dict(
        is_causal=case.causal,
        local_window_size=window,
        mask=mask,
        implementation=implementation,
        deterministic=True if kind == DETERMINISTIC else None,
        value_size=case.Hv if case.values_are_keys else None,
    )


def _operands(case: Case, *kv) -> dict:
    ids = dict(query_segment_ids=case.segment_ids()) if case.documents else {}
    return ids | case.extra_arrays()


# ---- peers ----


def _window(case: Case) -> tuple[int, int] | None:
    return (case.window - 1, 0) if case.window else None


def _dense_mask(case: Case, *kv) -> dict:
    """A dense mask for documents and global tokens, which these peers cannot be told otherwise."""
    return dict(mask=case.dense_mask()) if case.documents or case.global_tokens else {}


def _like_jax_nn(call: Callable, case: Case, q, k, v, mask=None, **options):
    window = None if case.global_tokens else _window(case)
    return call(q, k, v, mask=mask, is_causal=case.causal, local_window_size=window, **options)


def _jax_nn(implementation: str) -> Callable:
    attend = jax.nn.dot_product_attention
    return functools.partial(_like_jax_nn, attend, implementation=implementation)


def _decode_attention(case: Case, q, k, v):
    from jax.experimental.pallas.ops.gpu import decode_attention

    return decode_attention.gqa(q[:, 0], k, v)[:, None]


def _refuse_prefill(case: Case) -> str | None:
    return f"it takes one new token; got T = {case.T}" if case.T > 1 else None


def _tokamax(case: Case, *args, **operands):
    import tokamax

    attend = tokamax.dot_product_attention
    return _like_jax_nn(attend, case, *args, **operands, implementation="mosaic")


def _before_tokamax():
    # it warns of every shape that it was not tuned for
    logging.getLogger("absl").setLevel(logging.ERROR)
    # a large profiler, which only tokamax's own benchmarks use
    if importlib.util.find_spec("xprof") is None:
        for name in ("xprof", "xprof.cli", "xprof.cli.tools"):
            sys.modules[name] = types.ModuleType(name)
        sys.modules["xprof.cli.tools"].get_kernel_stats_tool = None


def _fa3(case: Case, q, k, v, cu_seqlens=None):
    from flash_attn3_jax import flash_mha, flash_mha_varlen

    options = dict(is_causal=case.causal, window_size=_window(case) or (-1, -1))
    if cu_seqlens is None:
        return flash_mha(q, k, v, **options)
    packed = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    longest = int(case.document_lengths().max())
    options |= dict(max_seqlen_q=longest, max_seqlen_k=longest)
    return flash_mha_varlen(*packed, cu_seqlens, **options).reshape(q.shape)


def _cu_seqlens(case: Case, *kv) -> dict:
    lengths = np.tile(case.document_lengths(), case.B)
    return dict(cu_seqlens=np.cumsum([0, *lengths], dtype=np.int32)) if case.documents else {}


def _refuse_fa3(case: Case) -> str | None:
    if (case.H, case.value_size) != (128, 128):
        return f"its wheel has head size 128 only; got H = {case.H}, Hv = {case.value_size}"


def _jla(case: Case, q, k, v, segment_ids=None, *, backward: str):
    from jla.ops.mosaic_gpu.attention import flash_attention

    options = dict(sliding_window=case.window, backward=backward)
    return flash_attention(q, k, v, segment_ids=segment_ids, **options)


def _refuse_jla(case: Case) -> str | None:
    from jla.ops.mosaic_gpu.attention import supported

    return supported(*case.shapes()[:3])


def _sdpa(case: Case, q, k, v, mask=None):
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    options = dict(is_causal=case.causal and mask is None, enable_gqa=case.N != case.K)
    return scaled_dot_product_attention(q, k, v, mask, **options).transpose(1, 2)


FA3 = (
    "in the machine code of flash-attn3-jax 0.2.3 the loops without a mask wait for all products "
    "before the exponentials; published for FlashAttention-3 are 648 TFLOP/s full and 616 causal, "
    "forward, head size 128, 16384 long, an H100 SXM"
)
PALLAS = "jax.experimental.pallas.ops.gpu"
PLAIN = ("window", "documents", "value size other than H")  # that it lacks
JLA = Contender(
    "jla",
    functools.partial(_jla, backward="ranged"),
    _refuse_jla,
    lambda case, *kv: dict(segment_ids=case.segment_ids()) if case.documents else {},
    ("full mask", "global tokens"),
    package="jax-linear-attention",
    modules=("jla.ops.mosaic_gpu.attention",),
)
PEERS = [
    Contender(
        "jax.nn/xla",
        _jax_nn("xla"),
        operands=_dense_mask,
        lacks=PLAIN[2:],
        passes=(*PASSES, JVP),
    ),
    Contender(
        "jax.nn/cudnn",
        _jax_nn("cudnn"),
        operands=_dense_mask,
        lacks=("float32", *PLAIN[2:]),
        needs_gpu=True,
    ),
    Contender(
        "decode_attention",
        _decode_attention,
        _refuse_prefill,
        lacks=PLAIN,
        needs_gpu=True,
        modules=(f"{PALLAS}.decode_attention",),
        passes=tuple(PASSES[:1]),
    ),
    Contender(
        "tokamax",
        _tokamax,
        operands=_dense_mask,
        package="tokamax",
        modules=("tokamax",),
        before_import=_before_tokamax,
    ),
    Contender(
        "fa3",
        _fa3,
        _refuse_fa3,
        _cu_seqlens,
        lacks=("global tokens",),
        package="flash-attn3-jax",
        modules=("flash_attn3_jax",),
        note=FA3,
    ),
    JLA,
    JLA._replace(
        name="jla fused",
        attend=functools.partial(_jla, backward="fused"),
        lacks=(*JLA.lacks, *PLAIN[2:]),
        passes=tuple(PASSES[1:]),
    ),
    Contender(
        "torch",
        _sdpa,
        operands=lambda case, *kv: (
            dict(mask=case.dense_mask()) if case.documents or case.window else {}
        ),
        package="torch",
        modules=("torch",),
        is_torch=True,
    ),
]
