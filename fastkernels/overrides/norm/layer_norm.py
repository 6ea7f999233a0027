"""Layer normalization, y = (x - mean(x)) / sqrt(var(x) + eps) * w + b (Ba et al., arXiv 1607.06450)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import nn

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, Expr, OpSpec, Scalar, Tensor
from fastkernels.overrides.kit.launch import next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import FLOATS, rows, unsupported_vector


def reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """x: [..., H]; weight, bias: [H] or None. Computed in at least float32; returns x's shape and dtype."""
    acc = torch.promote_types(x.dtype, torch.float32)
    w, b = (None if t is None else t.to(acc) for t in (weight, bias))
    return F.layer_norm(x.to(acc), x.shape[-1:], w, b, eps).to(x.dtype)


@triton.jit
def _layer_norm_kernel(
    x_ptr, w_ptr, b_ptr, out_ptr, n_inner, stride0, stride1, H, eps,
    HAS_W: tl.constexpr, HAS_B: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # One program per row, which is loaded once: mean and variance are computed from registers.
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < H
    x = tl.load(x_ptr + (row // n_inner) * stride0 + (row % n_inner) * stride1 + cols, mask=inside, other=0.0)
    if HAS_W:  # loaded early, as in rms_norm
        w = tl.load(w_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    if HAS_B:
        b = tl.load(b_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    h = x.to(tl.float32)
    centered = tl.where(inside, h - tl.sum(h, axis=0) / H, 0.0)
    if x.dtype == tl.float32:  # the mean's own rounding would show where all values are nearly equal
        centered = tl.where(inside, centered - tl.sum(centered, axis=0) / H, 0.0)
    y = centered * tl.rsqrt(tl.sum(centered * centered, axis=0) / H + eps)
    if HAS_W:
        y *= w
    if HAS_B:
        y += b
    tl.store(out_ptr + row * H + cols, y.to(x.dtype), mask=inside)


def _check(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.shape != x.shape[-1:]:
            raise ValueError(f"layer_norm: {name} {tuple(t.shape)} is not for x {tuple(x.shape)}")


def _supports_triton(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> str | None:
    if x.shape[-1] > 65536:
        return f"hidden size {x.shape[-1]} is over 65536"
    if x.dtype not in FLOATS:
        return f"x has dtype {x.dtype}, not float16, bfloat16 or float32"
    return unsupported_vector(weight, "weight") or unsupported_vector(bias, "bias")


def _triton(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    _check(x, weight, bias)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    found = rows(x)
    if found is None:  # channels of an image that are not adjacent: PyTorch copies them first, too
        x = x.contiguous()
        found = 1, x.shape[-1], 0
    hidden = x.shape[-1]
    block = next_power_of_2(hidden)
    grid = (x.numel() // hidden,)
    launch_kernel(
        _layer_norm_kernel, grid,
        x, weight, bias, out, *found, hidden, eps, HAS_W=weight is not None, HAS_B=bias is not None,
        BLOCK=block, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return out


def _reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    _check(x, weight, bias)
    return reference(x, weight, bias, eps)


layer_norm = define(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor",
    fake=lambda x, weight, bias, eps: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def one_more(weight: torch.Tensor | None) -> torch.Tensor | None:
    """The factor of a norm that stores its weight minus one, in the weight's dtype (Nemotron)."""
    return None if weight is None else weight + 1


def unsupported_shape(module: Any) -> str | None:
    """Why our ops do not compute this norm with torch's attributes, or None."""
    if len(module.normalized_shape) != 1:
        return f"it normalizes the last {len(module.normalized_shape)} dimensions, not one"
    return "eps is None: its value depends on torch's version" if module.eps is None else None


def unsupported_weight(module: Any) -> str | None:
    """Why a norm's weight does not fit our ops, or None."""
    shape = tuple(module.weight.shape)
    return None if len(shape) == 1 else f"weight has shape {shape}: each head has its own"


class CohereLayerNorm(nn.Module):
    """Base of vLLM's and SGLang's LayerNorm of Command R, without bias: (hidden_states [..., H], residuals)."""

    def __init__(self, param_shape=None, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(param_shape))
        self.variance_epsilon = eps

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        return unsupported_weight(module)

    def forward(self, hidden_states, residuals=None):
        return layer_norm(hidden_states, self.weight, None, self.variance_epsilon), residuals


_FLOAT32 = {"parameters": "float32"}

SPEC = OpSpec(
    name="layer_norm",
    level=1,
    by_default=True,
    reference=reference,
    op=layer_norm,
    cases=(  # GPT-2 XL; DeepSeek-V3.2's indexer keys, with parameters in float32; SigLIP so400m on 16 images
        Case("decode_1", {"tokens": 1, "hidden": 1600}, weight=97, tags=("model",)),
        Case("decode_32", {"tokens": 32, "hidden": 1600}, weight=97, tags=("model",)),
        Case("prefill_8k", {"tokens": 8192, "hidden": 1600}, weight=2, tags=("model",)),
        Case("indexer_32", {"tokens": 32, "hidden": 128, **_FLOAT32}, weight=61, tags=("model",)),
        Case("images_16", {"tokens": 11664, "hidden": 1152}, weight=2, tags=("model",)),
        Case("one", {"tokens": 1, "hidden": 1}, dtype="float32", tags=("odd",)),
        Case("odd_63", {"tokens": 63, "hidden": 1000}, tags=("odd",)),
        Case("odd_1128", {"tokens": 3, "hidden": 1128, "bias": False}, dtype="float16", tags=("odd",)),
        Case("mixed", {"tokens": 7, "hidden": 576, **_FLOAT32}, tags=("odd",)),
        Case("plain", {"tokens": 5, "hidden": 63, "weight": False, "bias": False}, "float32", tags=("odd",)),
        Case("heads_odd", {"tokens": 5, "heads": 9, "hidden": 64, "weight": False}, tags=("odd",)),
    ),
    arguments=(
        Tensor("x", "tokens heads? hidden", mean=0.5),
        Tensor("weight", "hidden", "parameters", when="weight", mean=1, std=0.1),
        Tensor("bias", "hidden", "parameters", when="bias", std=0.1),
        Scalar("eps", default=1e-5),
    ),
    outputs=(Tensor("out", "tokens heads? hidden"),),
    axes={
        "tokens": Axis.per_call(),
        "heads": Axis.count(),
        "hidden": Axis.width(),
        "parameters": Axis.dtype(Expr("dtype")),
        "weight": Axis.option(True, stated=True),
        "bias": Axis.option(True, stated=True),
    },
    constructor={
        "hidden_size": "hidden",
        "dim": "hidden",
        "num_channels": "hidden",
        "normalized_shape": "hidden",
        "param_shape": "hidden",
        "elementwise_affine": "weight",
        "affine": "weight",
        "bias": "bias",
        "dtype": "parameters",
    },
    flops="8 * tokens * heads * hidden",
    batch_invariant=True,  # one program per row
)
