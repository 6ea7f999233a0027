"""What PyTorch and libraries over it ship: cuBLAS, ATen's kernels, Inductor, FLA and transformers."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
import torch.nn.functional as F

from fk_bench.kernels.judge.baselines.baselines import (
    Baseline,
    Function,
    _provider,
    dense,
    filled,
    first,
    same,
)

T = torch.Tensor
BOTH = ("cuda", "cpu")


def _torch(fn: Function, refuses: Any = None) -> tuple[Baseline, ...]:
    return (Baseline("torch", "host", lambda: fn, refuses=refuses, devices=BOTH),)


def _gemm(fn: Function) -> tuple[Baseline, ...]:
    """The hosts' own call too; named for the library behind it on each device."""
    return tuple(
        Baseline(name, "host", lambda: fn, devices=(device,))
        for name, device in (("cublas", "cuda"), ("onednn", "cpu"))
    )


def _linear(x: T, weight: T, bias: T | None = None) -> T:
    return F.linear(x, weight, bias)


def _logits(
    hidden: T, weight: T, bias: T | None = None, scale: float = 1.0, soft_cap: float | None = None,
    scale_first: bool = False, float32: bool = False,
) -> T:  # fmt: skip
    logits = F.linear(hidden, weight, bias)
    if float32:
        logits = logits.float()
    if scale_first and scale != 1.0:
        logits = logits * scale
    if soft_cap is not None:
        logits = torch.tanh(logits / soft_cap) * soft_cap
    return logits if scale_first or scale == 1.0 else logits * scale


def _embedding(input_ids: T, weight: T, *_: Any) -> T:
    return F.embedding(input_ids, weight)


def _no_embedding(input_ids: T, weight: T, org_start: int = 0, org_end: int = -1, *_: Any) -> str | None:
    return None if org_end < 0 else "a vocabulary split over ranks is more than one kernel of torch"


def _layer_norm(x: T, weight: T | None, bias: T | None, eps: float) -> T:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _no_layer_norm(x: T, weight: T | None, bias: T | None, eps: float) -> str | None:
    return same(x, weight, bias)


class Filters:
    """(all greedy, any top_k, any top_p) of a batch, which a host knows on the CPU before it calls its sampler.

    Here they are read from the arguments, but not while a CUDA graph is captured: then the last call's of this shape
    hold, which is the warm-up's.
    """

    def __init__(self) -> None:
        self.known: dict[torch.Size, tuple[bool, bool, bool]] = {}

    def __call__(self, logits: T, temperature: T, top_k: T, top_p: T) -> tuple[bool, bool, bool]:
        if not (logits.is_cuda and torch.cuda.is_current_stream_capturing()):
            some_k = ((top_k > 0) & (top_k < logits.shape[-1])).any()
            flags = torch.stack([(temperature <= 1e-5).all(), some_k, (top_p < 1.0).any()]).tolist()
            self.known[logits.shape] = (flags[0], flags[1], flags[2])
        return self.known[logits.shape]


def no_sampling(logits: T, temperature: T, top_k: T, top_p: T, min_p: T, *_: Any) -> str | None:
    greedy = temperature <= 1e-5
    if bool(greedy.any()) and not bool(greedy.all()):
        return "a batch with greedy and drawn rows is more than one call of the host's"
    if bool((min_p > 0).any()):
        return "the hosts filter by min_p in a step of its own"
    return None


def _sampling() -> Function:
    filters = Filters()

    def sampling(logits: T, temperature: T, top_k: T, top_p: T, *_: Any) -> T:
        greedy, has_k, has_p = filters(logits, temperature, top_k, top_p)
        if greedy:
            return logits.argmax(dim=-1)
        x = logits.float().div_(temperature[:, None])
        if not has_k and not has_p:
            return (x.softmax(dim=-1) / torch.empty_like(x).exponential_()).argmax(dim=-1)
        values, ids = x.sort(dim=-1, descending=True)
        if has_k:
            last = values.gather(
                1, torch.where(top_k > 0, top_k, x.shape[-1]).clamp_max(x.shape[-1]).long()[:, None] - 1
            )
            values = values.masked_fill(values < last, -torch.inf)
        probs = values.softmax(dim=-1)
        probs = probs.masked_fill(probs.cumsum(dim=-1) - probs >= top_p[:, None], 0.0)
        return ids.gather(1, (probs / torch.empty_like(probs).exponential_()).argmax(dim=-1, keepdim=True))[
            :, 0
        ]

    return sampling


def _compiled(op: str) -> Baseline:
    """The reference through Inductor, one graph a shape: what a host gets from torch.compile without a kernel of its
    own (vLLM compiles its forward_native where no custom op is enabled)."""

    def make() -> Function:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of processes beside the runner
        import torch._dynamo.config as dynamo

        for name in ("recompile_limit", "accumulated_recompile_limit"):
            if hasattr(dynamo, name):
                setattr(dynamo, name, 1024)  # beyond the limit it would silently run eagerly
        return torch.compile(_provider(op, "reference"), dynamic=False, fullgraph=True)

    return Baseline("inductor", "compiler", make)


def _l2_norm(module: str) -> Any:
    def make() -> Function:
        l2norm_fwd = importlib.import_module(module).l2norm_fwd

        def l2_norm(x: T, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> T:
            found = l2norm_fwd(x, eps, output_dtype)
            return found[0] if isinstance(found, tuple) else found  # FLA's has what its backward needs too

        return l2_norm

    return make


def _dense(x: T, *_: Any) -> str | None:
    return first(dense(x), filled(x))


def _gelu(x: T, approximate: str = "none") -> T:
    return F.gelu(x, approximate=approximate)


def _t5_layer_norm() -> Function:
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    def t5_layer_norm(x: T, weight: T, eps: float) -> T:
        if (x.shape[-1], eps) not in norms:
            norms[x.shape[-1], eps] = T5LayerNorm(x.shape[-1], eps)
        module = norms[x.shape[-1], eps]
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        return module(x)

    norms: dict[tuple[int, float], torch.nn.Module] = {}
    return t5_layer_norm


COMPILED = (
    "rms_norm", "gemma_rms_norm", "layer_norm", "silu_and_mul", "gelu_and_mul", "rotary_emb", "embedding", "gelu",
    "quick_gelu", "relu2", "l2_norm", "t5_layer_norm", "moe_sum", "merge_state", "quantize_fp8", "silu_mul_quant_fp8",
    "rms_norm_quant_fp8", "grouped_topk",
)  # fmt: skip
_NOISE = "it draws with other noise"
_VLLM_FLA = "vllm.third_party.flash_linear_attention.ops"
_LIBRARIES: dict[str, tuple[Baseline, ...]] = {
    "linear": _gemm(_linear),
    "logits_processor": _gemm(_logits),
    "embedding": _torch(_embedding, _no_embedding),
    "layer_norm": _torch(_layer_norm, _no_layer_norm),
    "sampling": (
        Baseline("torch", "library", _sampling, refuses=no_sampling, differs=_NOISE, unchecked=(0,)),
    ),
    "l2_norm": (
        Baseline("fla", "library", _l2_norm("fla.modules.l2norm"), ("fla",), refuses=_dense),
        Baseline("vllm", "host", _l2_norm(f"{_VLLM_FLA}.l2norm"), ("vllm",), refuses=_dense),
    ),
    "gelu": _torch(_gelu),
    "t5_layer_norm": (Baseline("transformers", "host", _t5_layer_norm, ("transformers",), BOTH),),
}  # fmt: skip
ADAPTERS: dict[str, tuple[Baseline, ...]] = {
    op: (*_LIBRARIES.get(op, ()), *((_compiled(op),) if op in COMPILED else ()))
    for op in dict.fromkeys((*_LIBRARIES, *COMPILED))
}
