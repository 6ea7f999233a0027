"""Logits of a language-model head: x W^T + b, scaled, with an optional soft cap c tanh(y / c) (Gemma 2)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import nn

from fastkernels.core import assemble
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, Expr, OpSpec, Scalar, Tensor, fan_in
from fastkernels.overrides.embedding.vocab_parallel import UnquantizedEmbedding
from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.linear import linear as gemm


def reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    soft_cap: float | None = None,
    scale_first: bool = False,
    float32: bool = False,
) -> torch.Tensor:
    """hidden: [..., D]; weight: [V, D]; bias: [V]. Returns [..., V], rounded to hidden's dtype.

    scale_first: scale, then cap (SGLang); otherwise cap, then scale (vLLM). float32: return the rounded values as
    float32.
    """
    acc = torch.promote_types(hidden.dtype, torch.float32)
    y = hidden.to(acc) @ weight.to(acc).t()
    if bias is not None:
        y = y + bias.to(acc)
    y = cap_and_scale(y, scale, soft_cap, scale_first)
    y = y.to(hidden.dtype)  # both hosts round the product, even if the logits are returned as float32
    return y.to(acc) if float32 else y


def cap_and_scale(y: torch.Tensor, scale: float, soft_cap: float | None, scale_first: bool) -> torch.Tensor:
    if scale_first:
        y = y * scale
    if soft_cap is not None:
        y = torch.tanh(y / soft_cap) * soft_cap
    return y if scale_first else y * scale


SMALL = 1 << 16  # logits


@triton.jit
def _cap_kernel(
    in_ptr, out_ptr, n, scale_before, scale_after, cap, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(in_ptr + at, mask=at < n, other=0.0).to(tl.float32) * scale_before
    if HAS_CAP:
        # tanh(z) = 2 sigmoid(2 z) - 1, which does not overflow.
        y = (2.0 * tl.sigmoid(2.0 * y / cap) - 1.0) * cap
    tl.store(out_ptr + at, (y * scale_after).to(out_ptr.dtype.element_ty), mask=at < n)


def finish_triton(
    y: torch.Tensor, scale: float, soft_cap: float | None, scale_first: bool, float32: bool
) -> torch.Tensor:
    """Scale and cap the product y in place if its dtype allows it."""
    dtype = torch.float32 if float32 else y.dtype
    if scale == 1.0 and soft_cap is None:
        return y.to(dtype)
    out = y if y.dtype == dtype else torch.empty(y.shape, dtype=dtype, device=y.device)
    n = y.numel()
    if n:
        block = 1024 if n > SMALL else 256  # with few logits, more and shorter programs
        launch_kernel(
            _cap_kernel, (cdiv(n, block),),
            y, out, n, scale if scale_first else 1.0, 1.0 if scale_first else scale, soft_cap or 1.0,
            HAS_CAP=soft_cap is not None, BLOCK=block,
        )  # fmt: skip
    return out


def _supports_triton(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *rest: Any
) -> str | None:
    return gemm.supports_triton(hidden, weight, bias)


def _with(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a provider that computes the product with product(hidden, weight, bias)."""

    def run(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        scale: float = 1.0,
        soft_cap: float | None = None,
        scale_first: bool = False,
        float32: bool = False,
    ) -> torch.Tensor:
        y = product(hidden.to(weight.dtype), weight, bias)
        return finish_triton(y, scale, soft_cap, scale_first, float32)

    return run


def _onednn(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    soft_cap: float | None = None,
    scale_first: bool = False,
    float32: bool = False,
) -> torch.Tensor:
    y = gemm.linear_onednn(hidden.to(weight.dtype), weight, bias)
    dtype = torch.float32 if float32 else y.dtype
    if scale == 1.0 and soft_cap is None:
        return y.to(dtype)
    return cap_and_scale(y.float(), scale, soft_cap, scale_first).to(dtype)


def _fake(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    soft_cap: float | None = None,
    scale_first: bool = False,
    float32: bool = False,
) -> torch.Tensor:
    dtype = torch.float32 if float32 else hidden.dtype
    return torch.empty((*hidden.shape[:-1], weight.shape[0]), dtype=dtype, device=hidden.device)


logits_processor = define(
    "logits_processor(Tensor hidden, Tensor weight, Tensor? bias=None, float scale=1.0, float? soft_cap=None,"
    " bool scale_first=False, bool float32=False) -> Tensor",
    fake=_fake,
    providers=(
        # The provider that linear picks, or its candidate.
        Provider("linear", _with(gemm.linear.run), devices=("cuda",)),
        Provider("cublas", _with(F.linear), devices=("cuda",)),
        Provider("onednn", _onednn, devices=("cpu",)),
        Provider("triton", _with(gemm.linear_triton), devices=("cuda",), supports=_supports_triton),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
)


def _build(cls: type, args: list[Any]) -> Callable[[], Any]:
    hidden, weight, bias, scale, soft_cap, scale_first, float32 = assemble.filled(
        args, 7, None, 1.0, None, False, False
    )
    head: Any = nn.Module()
    head.weight, head.bias = nn.Parameter(weight, requires_grad=False), None
    head.tp_size, head.quant_method = 1, UnquantizedEmbedding()
    rows = weight.shape[0]
    either = soft_cap is None or scale == 1.0  # the order does not matter
    if assemble.takes(cls, "config"):
        if bias is not None or not float32 or not (scale_first or either):
            raise ValueError(f"{cls.__name__} returns float32, scales first and adds no bias")
        config = SimpleNamespace(vocab_size=rows, final_logit_softcapping=soft_cap)
        module = assemble.make(cls, hidden, config, logit_scale=None if scale == 1.0 else scale)
        metadata = SimpleNamespace(extend_seq_lens=None, extend_return_logprob=False)
        return lambda: module(None, hidden, head, metadata).next_token_logits
    if float32 or (scale_first and not either):
        raise ValueError(f"{cls.__name__} returns the hidden states' dtype and scales last")
    module = assemble.make(cls, hidden, rows, scale=scale, soft_cap=soft_cap)
    return partial(module, head, hidden, bias)


SPEC = OpSpec(
    name="logits_processor",
    level=1,
    by_default=True,
    reference=reference,
    op=logits_processor,
    by_table=gemm.linear,
    cases=(
        Case("decode_1", {"tokens": 1, "hidden": 4096, "vocab": 128256}, tags=("model",)),
        Case("decode_32", {"tokens": 32, "hidden": 4096, "vocab": 128256}, tags=("model",)),
        Case(
            "gemma2_32", {"tokens": 32, "hidden": 3584, "vocab": 256000, "soft_cap": 30.0}, weight=0.1, tags=("model",)
        ),
        Case("one", {"tokens": 1, "hidden": 1, "vocab": 1}, dtype="float32", tags=("odd",)),
        Case("odd_63", {"tokens": 3, "hidden": 63, "vocab": 1000, "bias": True}, tags=("odd",)),
        Case("capped", {"tokens": 5, "hidden": 72, "vocab": 129, "soft_cap": 0.5, "scale": 2.0}, tags=("odd",)),
        Case(
            "scaled_first",
            {"tokens": 2, "hidden": 40, "vocab": 65, "soft_cap": 1.5, "scale": 0.5, "scale_first": True},
            dtype="float32", tags=("odd",),
        ),
        Case("smollm2", {"tokens": 1, "hidden": 576, "vocab": 800}, tags=("odd",)),
        Case("scaled", {"tokens": 9, "hidden": 33, "vocab": 257, "scale": 0.125}, dtype="float16", tags=("odd",)),
        Case("to_float32", {"tokens": 7, "hidden": 64, "vocab": 31, "float32": True}, tags=("odd",)),
    ),
    arguments=(
        Tensor("hidden", "tokens hidden"),
        Tensor("weight", "vocab hidden", values=fan_in),
        Tensor("bias", "vocab", when="bias", bytes="0"),
        Scalar("scale", default=1.0, stated=True),
        Scalar("soft_cap", default=None),
        Scalar("scale_first", default=False),
        Scalar("float32", default=False),
    ),
    outputs=(Tensor("logits", "tokens vocab", "logits_dtype"),),
    axes={
        "tokens": Axis.per_call(),
        "hidden": Axis.width(),
        "vocab": Axis.width(),
        "logits_dtype": Axis.dtype(Expr("'float32' if float32 else dtype")),
    },
    flops="2 * tokens * hidden * vocab",
    build=_build,
    tolerance=gemm.SPEC.tolerance,
    baseline="cublas",
)  # fmt: skip
