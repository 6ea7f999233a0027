"""Adaptive layer normalization, y = layer_norm(x) * (1 + scale) + shift (Peebles and Xie, arXiv 2212.09748)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.kit.launch import next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import FLOATS


def reference(
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    front: torch.Tensor | None = None,
) -> torch.Tensor:
    """x: [B, T, H]; scale, shift: [B, H]; weight, bias of the norm: [H] or None; front: tokens before x, [B, F, H].

    Computed in at least float32, rounded once; returns [B, F + T, H] in x's dtype.
    """
    x = x if front is None else torch.cat((front.to(x.dtype), x), dim=1)
    acc = torch.promote_types(x.dtype, torch.float32)
    w, b = (None if t is None else t.to(acc) for t in (weight, bias))
    y = F.layer_norm(x.to(acc), x.shape[-1:], w, b, eps)
    return (y * (1 + scale.to(acc)[:, None]) + shift.to(acc)[:, None]).to(x.dtype)


@triton.jit
def _ada_layer_norm_kernel(
    x_ptr, front_ptr, scale_ptr, shift_ptr, w_ptr, b_ptr, out_ptr, T, F, x_stride0, x_stride1, front_stride0,
    front_stride1, scale_stride, shift_stride, H, eps,
    HAS_FRONT: tl.constexpr, HAS_W: tl.constexpr, HAS_B: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # One program per token, which is loaded once: mean and variance are computed from registers.
    row = tl.program_id(0).to(tl.int64)
    image, token = row // T, row % T
    cols = tl.arange(0, BLOCK)
    inside = cols < H
    x_at = x_ptr + image * x_stride0 + (token - F) * x_stride1 + cols
    if HAS_FRONT:
        if token < F:
            front_at = front_ptr + image * front_stride0 + token * front_stride1 + cols
            x = tl.load(front_at, mask=inside, other=0.0).to(x_ptr.dtype.element_ty)
        else:
            x = tl.load(x_at, mask=inside, other=0.0)
    else:
        x = tl.load(x_at, mask=inside, other=0.0)
    scale = tl.load(scale_ptr + image * scale_stride + cols, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + image * shift_stride + cols, mask=inside, other=0.0).to(tl.float32)
    h = x.to(tl.float32)
    centered = tl.where(inside, h - tl.sum(h, axis=0) / H, 0.0)
    if x.dtype == tl.float32:  # as in layer_norm
        centered = tl.where(inside, centered - tl.sum(centered, axis=0) / H, 0.0)
    y = centered * tl.rsqrt(tl.sum(centered * centered, axis=0) / H + eps)
    if HAS_W:
        y *= tl.load(w_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    if HAS_B:
        y += tl.load(b_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * H + cols, (y * (1.0 + scale) + shift).to(x.dtype), mask=inside)


def _check(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None,
    front: torch.Tensor | None,
) -> None:  # fmt: skip
    shape = tuple(x.shape)
    if x.dim() != 3:
        raise ValueError(f"ada_layer_norm: x must be [B, T, H], got shape {shape}")
    for name, t in (("scale", scale), ("shift", shift)):
        if tuple(t.shape) != (shape[0], shape[2]):
            raise ValueError(f"ada_layer_norm: {name} {tuple(t.shape)} is not [B, H] for x {shape}")
    for name, v in (("weight", weight), ("bias", bias)):
        if v is not None and v.shape != x.shape[-1:]:
            raise ValueError(f"ada_layer_norm: {name} {tuple(v.shape)} is not for x {shape}")
    if front is not None and (front.dim() != 3 or front.shape[::2] != x.shape[::2]):
        raise ValueError(f"ada_layer_norm: front {tuple(front.shape)} is not [B, F, H] for x {shape}")


def _supports_triton(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, eps: float = 1e-6,
    front: torch.Tensor | None = None,
) -> str | None:  # fmt: skip
    if x.shape[-1] > 65536:
        return f"hidden size {x.shape[-1]} is over 65536"
    given = {"x": x, "front": front, "scale": scale, "shift": shift, "weight": weight, "bias": bias}
    for name, t in given.items():
        if t is not None and (t.dtype not in FLOATS or t.stride(-1) != 1):
            return f"{name} is {t.dtype} with strides {t.stride()}"
    return None


def _fake(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, eps: float = 1e-6, front: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    tokens = x.shape[1] + (0 if front is None else front.shape[1])
    return torch.empty((x.shape[0], tokens, x.shape[2]), dtype=x.dtype, device=x.device)


def _triton(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, eps: float = 1e-6,
    front: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    _check(x, scale, shift, weight, bias, front)
    out = _fake(x, scale, shift, front=front)
    if out.numel() == 0:
        return out
    batch, tokens, hidden = out.shape
    block = next_power_of_2(hidden)
    before = x if front is None else front
    launch_kernel(
        _ada_layer_norm_kernel, (batch * tokens,),
        x, before, scale, shift, weight, bias, out, tokens, tokens - x.shape[1], *x.stride()[:2], *before.stride()[:2],
        scale.stride(0), shift.stride(0), hidden, eps, HAS_FRONT=front is not None, HAS_W=weight is not None,
        HAS_B=bias is not None, BLOCK=block, num_warps=min(max(block // 1024, 1), 16),
    )  # fmt: skip
    return out


def _reference(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, eps: float = 1e-6,
    front: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    _check(x, scale, shift, weight, bias, front)
    return reference(x, scale, shift, weight, bias, eps, front).contiguous()


ada_layer_norm = define(
    "ada_layer_norm(Tensor x, Tensor scale, Tensor shift, Tensor? weight=None, Tensor? bias=None, float eps=1e-6,"
    " Tensor? front=None) -> Tensor",
    fake=_fake,
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _odd(name: str, batch: int, tokens: int, hidden: int, dtype: str = "float32", **more: int) -> Case:
    return Case(name, {"batch": batch, "tokens": tokens, "hidden": hidden, **more}, dtype, tags=("odd",))


SPEC = OpSpec(
    name="ada_layer_norm",
    level=2,
    reference=reference,
    op=ada_layer_norm,
    cases=(  # FLUX.1 at 1024 px: image, text, both, in one tensor or two
        Case("flux_image", {"batch": 1, "tokens": 4096, "hidden": 3072}, weight=19, tags=("model",)),
        Case("flux_text", {"batch": 1, "tokens": 512, "hidden": 3072}, weight=19, tags=("model",)),
        Case("flux_both", {"batch": 1, "tokens": 4608, "hidden": 3072}, weight=38, tags=("model",)),
        Case(
            "flux_joint", {"batch": 1, "tokens": 4096, "hidden": 3072, "fronts": 512, "front": True}, weight=38,
            tags=("model",),
        ),
        Case("flux_both_4", {"batch": 4, "tokens": 4608, "hidden": 3072}, weight=38, tags=("model",)),
        _odd("one", 1, 1, 1),
        _odd("odd_63", 2, 63, 1000, "bfloat16"),
        _odd("odd_1128", 3, 2, 1128, "float16"),
        _odd("affine", 2, 5, 63, weight=True, bias=True),
        _odd("weight", 3, 7, 129, "bfloat16", weight=True),
        _odd("tokens_17", 1, 17, 576),
        _odd("half", 4, 3, 320, "float16", weight=True, bias=True),
        _odd("joint_9", 2, 9, 70, "bfloat16", fronts=4, front=True),
        _odd("joint_one", 3, 1, 33, fronts=1, front=True, weight=True),
    ),
    arguments=(
        Tensor("x", "batch tokens hidden", mean=0.5),
        Tensor("scale", "batch hidden", std=0.3),
        Tensor("shift", "batch hidden", std=0.3),
        Tensor("weight", "hidden", when="weight", mean=1, std=0.1),
        Tensor("bias", "hidden", when="bias", std=0.1),
        Scalar("eps", default=1e-6),
        Tensor("front", "batch fronts hidden", when="front", mean=0.5),
    ),
    outputs=(Tensor("out", "batch positions hidden"),),
    axes={
        "batch": Axis.per_call(),
        "tokens": Axis.per_call(),
        "fronts": Axis.per_call(0),
        "positions": Axis(lambda s: s["tokens"] + (s["fronts"] if s["front"] else 0), varies=True),
        "hidden": Axis.width(),
    },
    flops="10 * batch * positions * hidden",
    stands_for=("layer_norm",),
)  # fmt: skip
