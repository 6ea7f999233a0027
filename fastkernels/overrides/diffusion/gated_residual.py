"""Residual y = residual + gate * x of diffusion (DiT) and vision transformers (LayerScale), and the norm behind it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import nn

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.kit.launch import next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import FLOATS
from fastkernels.overrides.linear.modules import autocasts, changed
from fastkernels.overrides.norm.layer_norm import layer_norm


def reference(
    residual: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor | None,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    front: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual, x: [B, T, H]; gate, scale, shift: [B, H] or None; weight, bias of the norm: [H] or None.

    front: tokens of the residual before those in `residual`, [B, F, H] with x [B, F + T, H], or None.

    Returns y = residual + gate * x and layer_norm(y) * (1 + scale) + shift, each computed in at least float32 and
    rounded once; the norm reads the rounded y. Without scale and weight there is no norm: the second result is
    [B, 0, H].
    """
    residual = residual if front is None else torch.cat((front.to(residual.dtype), residual), dim=1)
    acc = torch.promote_types(residual.dtype, torch.float32)
    h = x.to(acc) if gate is None else gate.to(acc)[:, None] * x.to(acc)
    y = (residual.to(acc) + h).to(residual.dtype)
    if scale is None and weight is None:
        return y, y.new_empty(y.shape[0], 0, y.shape[2])
    w, b = (None if t is None else t.to(acc) for t in (weight, bias))
    normed = F.layer_norm(y.to(acc), y.shape[-1:], w, b, eps)
    if scale is not None and shift is not None:
        normed = normed * (1 + scale.to(acc)[:, None]) + shift.to(acc)[:, None]
    return y, normed.to(y.dtype)


@triton.jit(do_not_specialize=["T", "F"])
def _gated_residual_kernel(
    res_ptr, front_ptr, x_ptr, gate_ptr, scale_ptr, shift_ptr, w_ptr, b_ptr, out_ptr, normed_ptr, T, F, res_stride0,
    res_stride1, front_stride0, front_stride1, x_stride0, x_stride1, gate_stride, scale_stride, shift_stride, H, eps,
    HAS_FRONT: tl.constexpr, HAS_GATE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_W: tl.constexpr, HAS_B: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # One program per token, which is loaded once: mean and variance are computed from registers.
    row = tl.program_id(0).to(tl.int64)
    image, token = row // T, row % T
    cols = tl.arange(0, BLOCK)
    inside = cols < H
    res_at = res_ptr + image * res_stride0 + (token - F) * res_stride1 + cols
    if HAS_FRONT:
        if token < F:
            front_at = front_ptr + image * front_stride0 + token * front_stride1 + cols
            res = tl.load(front_at, mask=inside, other=0.0).to(res_ptr.dtype.element_ty)
        else:
            res = tl.load(res_at, mask=inside, other=0.0)
    else:
        res = tl.load(res_at, mask=inside, other=0.0)
    x = tl.load(x_ptr + image * x_stride0 + token * x_stride1 + cols, mask=inside, other=0.0).to(tl.float32)
    if HAS_GATE:
        x *= tl.load(gate_ptr + image * gate_stride + cols, mask=inside, other=0.0).to(tl.float32)
    if HAS_SCALE:  # loaded early, like the gate: all loads are in flight together
        scale = tl.load(scale_ptr + image * scale_stride + cols, mask=inside, other=0.0).to(tl.float32)
        shift = tl.load(shift_ptr + image * shift_stride + cols, mask=inside, other=0.0).to(tl.float32)
    out = (res.to(tl.float32) + x).to(res.dtype)
    tl.store(out_ptr + row * H + cols, out, mask=inside)
    if HAS_SCALE or HAS_W:
        h = out.to(tl.float32)
        centered = tl.where(inside, h - tl.sum(h, axis=0) / H, 0.0)
        if res.dtype == tl.float32:  # as in layer_norm
            centered = tl.where(inside, centered - tl.sum(centered, axis=0) / H, 0.0)
        y = centered * tl.rsqrt(tl.sum(centered * centered, axis=0) / H + eps)
        if HAS_W:
            y *= tl.load(w_ptr + cols, mask=inside, other=0.0).to(tl.float32)
        if HAS_B:
            y += tl.load(b_ptr + cols, mask=inside, other=0.0).to(tl.float32)
        if HAS_SCALE:
            y = y * (1.0 + scale) + shift
        tl.store(normed_ptr + row * H + cols, y.to(res.dtype), mask=inside)


def _check(
    residual: torch.Tensor, x: torch.Tensor, gate: torch.Tensor | None, scale: torch.Tensor | None,
    shift: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None, front: torch.Tensor | None,
) -> None:  # fmt: skip
    shape, before = tuple(residual.shape), 0 if front is None else front.shape[1]
    if len(shape) != 3 or tuple(x.shape) != (shape[0], before + shape[1], shape[2]):
        raise ValueError(
            f"gated_residual: residual {shape} and x {tuple(x.shape)} must be [B, T, H], both alike but for {before}"
            " tokens in front"
        )
    if front is not None and front.shape[::2] != residual.shape[::2]:
        raise ValueError(f"gated_residual: front {tuple(front.shape)} is not [B, F, H] for residual {shape}")
    if (scale is None) != (shift is None):
        raise ValueError("gated_residual: pass both scale and shift, or neither")
    for name, t in (("gate", gate), ("scale", scale), ("shift", shift)):
        if t is not None and t.shape != residual.shape[::2]:
            raise ValueError(f"gated_residual: {name} {tuple(t.shape)} is not [B, H] for residual {shape}")
    for name, v in (("weight", weight), ("bias", bias)):
        if v is not None and v.shape != residual.shape[2:]:
            raise ValueError(f"gated_residual: {name} {tuple(v.shape)} is not [H] for residual {shape}")


def _supports_triton(
    residual: torch.Tensor, x: torch.Tensor, gate: torch.Tensor | None, scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    eps: float = 1e-6, front: torch.Tensor | None = None,
) -> str | None:  # fmt: skip
    if residual.shape[-1] > 32768:
        return f"hidden size {residual.shape[-1]} is over 32768"
    given = {
        "residual": residual,
        "front": front,
        "x": x,
        "gate": gate,
        "scale": scale,
        "shift": shift,
        "weight": weight,
        "bias": bias,
    }
    for name, t in given.items():
        if t is not None and (t.dtype not in FLOATS or t.stride(-1) != 1):
            return f"{name} is {t.dtype} with strides {t.stride()}"
    return None


def _empty(
    residual: torch.Tensor, x: torch.Tensor, gate: torch.Tensor | None, scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None, weight: torch.Tensor | None = None, *_: object, **__: object,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Memory for the two results."""
    normed = 0 if scale is None and weight is None else x.shape[1]
    return residual.new_empty(x.shape), residual.new_empty((len(x), normed, x.shape[2]))


def _triton(
    residual: torch.Tensor, x: torch.Tensor, gate: torch.Tensor | None, scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    eps: float = 1e-6, front: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    _check(residual, x, gate, scale, shift, weight, bias, front)
    out, normed = _empty(residual, x, gate, scale, shift, weight)
    if out.numel() == 0:
        return out, normed
    batch, tokens, hidden = out.shape
    block = next_power_of_2(hidden)
    strides = (0 if t is None else t.stride(0) for t in (gate, scale, shift))
    before = residual if front is None else front
    launch_kernel(
        _gated_residual_kernel, (batch * tokens,),
        residual, before, x, gate, scale, shift, weight, bias, out, normed, tokens, tokens - residual.shape[1],
        *residual.stride()[:2], *before.stride()[:2], *x.stride()[:2], *strides, hidden, eps,
        HAS_FRONT=front is not None, HAS_GATE=gate is not None, HAS_SCALE=scale is not None, HAS_W=weight is not None,
        HAS_B=bias is not None, BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return out, normed


def _reference(
    residual: torch.Tensor, x: torch.Tensor, gate: torch.Tensor | None, scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    eps: float = 1e-6, front: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    _check(residual, x, gate, scale, shift, weight, bias, front)
    out, normed = reference(residual, x, gate, scale, shift, weight, bias, eps, front)
    return out.contiguous(), normed.contiguous()


gated_residual = define(
    "gated_residual(Tensor residual, Tensor x, Tensor? gate, Tensor? scale=None, Tensor? shift=None,"
    " Tensor? weight=None, Tensor? bias=None, float eps=1e-6, Tensor? front=None) -> (Tensor, Tensor)",
    fake=_empty,
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _fuses(norm: Any, x: torch.Tensor) -> bool:
    """Whether the op computes this norm of x."""
    cls: Any = type(norm)
    theirs = cls.__mro__[1] if hasattr(cls, "fastkernels") else cls
    usual = isinstance(norm, nn.LayerNorm) and theirs.__name__ == "LayerNorm" and not changed(norm)
    if not usual or getattr(norm, "_fast_norm", False) or autocasts(x):
        return False
    return norm.weight is not None and norm.normalized_shape == x.shape[-1:] and norm.weight.dtype == x.dtype


def apply_norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """norm(x), by `layer_norm` where that computes it: a compiler reads x twice."""
    if not _fuses(norm, x):
        return norm(x)
    return layer_norm(x, norm.weight, norm.bias, norm.eps)


def add_residual(
    residual: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor | None, between: tuple[Any, ...], norm: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return y = residual + gamma * x and norm(y), or y twice; residual, x: [B, T, H]; gamma: [H] or None.

    between: modules that take x before it is added, which do nothing in inference.
    """
    idle = all((not m.training or isinstance(m, nn.Identity)) and not changed(m) for m in between)
    alike = x.dtype == residual.dtype and (gamma is None or gamma.dtype == x.dtype) and x.dim() == 3
    if not idle or not alike:
        gated_residual.note("its dtypes differ" if idle else "dropped paths or a hook")
        x = x if gamma is None else gamma * x
        for module in between:
            x = module(x)
        y = residual + x
        return y, y if norm is None else norm(y)
    gate = None if gamma is None else gamma.expand(len(x), -1)
    if norm is not None and _fuses(norm, x):
        return gated_residual(residual, x, gate, None, None, norm.weight, norm.bias, norm.eps)
    y, _ = gated_residual(residual, x, gate)
    return y, y if norm is None else norm(y)


def _case(name: str, tag: str, batch: int, tokens: int, hidden: int, dtype: str = "bfloat16", often: float = 1,
          **more: int) -> Case:  # fmt: skip
    return Case(name, {"batch": batch, "tokens": tokens, "hidden": hidden, **more}, dtype, often, (tag,))


SPEC = OpSpec(
    name="gated_residual",
    level=2,
    reference=reference,
    op=gated_residual,
    cases=(  # FLUX.1 at 1024 px: image and text after attention, then after the MLP; blocks of one stream
        _case("flux_image", "model", 1, 4096, 3072, often=19, norm=True),
        _case("flux_text", "model", 1, 512, 3072, often=19, norm=True),
        _case("flux_image_mlp", "model", 1, 4096, 3072, often=19),
        _case("flux_text_mlp", "model", 1, 512, 3072, often=19),
        _case("flux_both", "model", 1, 4608, 3072, often=38),
        _case("flux_joint", "model", 1, 4096, 3072, often=38, fronts=512, front=True),
        _case("siglip2", "model", 1, 256, 1152, often=27, gate=False, weight=True, bias=True),
        _case("dinov3_7b", "model", 1, 261, 4096, often=40, weight=True, bias=True),
        _case("flux_image_4", "model", 4, 4096, 3072, often=19, norm=True),
        _case("one", "odd", 1, 1, 1, "float32"),
        _case("one_normed", "odd", 1, 1, 1, "float32", norm=True),
        _case("odd_63", "odd", 2, 63, 1000, norm=True),
        _case("odd_1128", "odd", 3, 2, 1128, "float16", norm=True),
        _case("affine", "odd", 2, 5, 63, "float32", norm=True, weight=True, bias=True),
        _case("weight", "odd", 3, 7, 129, norm=True, weight=True),
        _case("plain_17", "odd", 3, 17, 577),
        _case("half", "odd", 4, 3, 320, "float16"),
        _case("sum", "odd", 2, 9, 33, "float16", gate=False),
        _case("sum_normed", "odd", 3, 5, 127, gate=False, weight=True, bias=True),
        _case("joint_5", "odd", 2, 5, 70, fronts=3, front=True, norm=True),
        _case("joint_one", "odd", 3, 1, 33, "float32", fronts=1, front=True),
        _case("layer_scale", "odd", 2, 7, 65, "float32", weight=True, bias=True),
    ),
    arguments=(
        Tensor("residual", "batch tokens hidden", mean=0.5),
        Tensor("x", "batch positions hidden"),
        Tensor("gate", "batch hidden", when="gate"),
        Tensor("scale", "batch hidden", when="norm", std=0.3),
        Tensor("shift", "batch hidden", when="norm", std=0.3),
        Tensor("weight", "hidden", when="weight", mean=1, std=0.1),
        Tensor("bias", "hidden", when="bias", std=0.1),
        Scalar("eps", default=1e-6),
        Tensor("front", "batch fronts hidden", when="front", mean=0.5),
    ),
    outputs=(Tensor("out", "batch positions hidden"), Tensor("normed", "batch normed_tokens hidden")),
    axes={
        "batch": Axis.per_call(),
        "tokens": Axis.per_call(),
        "fronts": Axis.per_call(0),
        "positions": Axis(lambda s: s["tokens"] + (s["fronts"] if s["front"] else 0), varies=True),
        "normed_tokens": Axis(lambda s: s["positions"] if s["norm"] or s["weight"] else 0, varies=True),
        "hidden": Axis.width(),
        "gate": Axis.option(True, stated=True),
    },
    flops="(13 if norm else 11 if weight else 2) * batch * positions * hidden",
    activations=("residual", "x"),
    stands_for=("layer_norm",),
)
