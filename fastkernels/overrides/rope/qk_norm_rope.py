"""Queries or keys of joint attention: RMS norm over each head, text in front of the image, rotary positions (FLUX)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import FLOATS

NUMBERS = 2048  # the largest head size
AT_ONCE = 1024  # elements of a program, unless a head has more: 16 bytes for each thread of four warps


def reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
    text: torch.Tensor | None = None,
    text_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """x: [B, S, H, D]; text: [B, St, H, D] or None; weight, text_weight: [D] or None; cos, sin: [St + S, D].

    Each is normalized with its weight and rounded, then channels 2j and 2j + 1 are rotated. Computed in at least
    float32; returns [B, St + S, H, D] in x's dtype.
    """
    acc = torch.promote_types(x.dtype, torch.float32)
    parts = []
    for part, w in ((text, text_weight), (x, weight)):
        if part is not None:
            h = part.to(acc)
            y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
            parts.append((y if w is None else y * w.to(acc)).to(x.dtype))
    h = torch.cat(parts, dim=1).to(acc)
    turned = torch.stack((-h[..., 1::2], h[..., ::2]), dim=-1).flatten(-2)
    return (h * cos.to(acc)[:, None] + turned * sin.to(acc)[:, None]).to(x.dtype)


@triton.jit
def _normed(x_ptr, w_ptr, cols, heads, H, D, stride_h, eps, HAS_W: tl.constexpr):
    # The norm of heads [HEADS, 1], rounded to x's dtype
    inside = (heads < H) & (cols < D)
    x = tl.load(x_ptr + heads.to(tl.int64) * stride_h + cols, mask=inside, other=0.0)
    h = x.to(tl.float32)
    h *= tl.rsqrt(tl.sum(h * h, axis=1) / D + eps)[:, None]
    if HAS_W:
        h *= tl.load(w_ptr + cols, mask=cols < D, other=0.0).to(tl.float32)
    return h.to(x.dtype).to(tl.float32)


@triton.jit
def _rotated(h, cos, sin, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    # Both numbers of a pair are in one thread: loads of single neighbors would take a memory instruction each.
    first, second = tl.split(tl.reshape(h, (HEADS, BLOCK // 2, 2)))
    cos_first, cos_second = tl.split(tl.reshape(cos, (1, BLOCK // 2, 2)))
    sin_first, sin_second = tl.split(tl.reshape(sin, (1, BLOCK // 2, 2)))
    y = tl.join(first * cos_first - second * sin_first, second * cos_second + first * sin_second)
    return tl.reshape(y, (HEADS, BLOCK))


@triton.jit
def _qk_norm_rope_kernel(
    x_ptr, text_ptr, w_ptr, text_w_ptr, cos_ptr, sin_ptr, out_ptr, S, St, H, D, x_b, x_t, x_h, text_b, text_t, text_h,
    eps, HAS_W: tl.constexpr, HAS_TEXT_W: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // (S + St), row % (S + St)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    cos = tl.load(cos_ptr + token * D + cols, mask=cols < D, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * D + cols, mask=cols < D, other=0.0).to(tl.float32)
    if token < St:
        h = _normed(
            text_ptr + batch * text_b + token * text_t, text_w_ptr, cols, heads, H, D, text_h, eps, HAS_TEXT_W
        )
    else:
        h = _normed(x_ptr + batch * x_b + (token - St) * x_t, w_ptr, cols, heads, H, D, x_h, eps, HAS_W)
    y = _rotated(h, cos, sin, HEADS, BLOCK)
    out_at = out_ptr + (row * H + heads) * D + cols
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=(heads < H) & (cols < D))


def _check(
    x: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, text: torch.Tensor | None,
    text_weight: torch.Tensor | None,
) -> None:  # fmt: skip
    shape, texts = tuple(x.shape), 0 if text is None else text.shape[1]
    if x.dim() != 4 or shape[3] % 2:
        raise ValueError(f"qk_norm_rope: x must be [B, S, H, D] with an even D, got {shape}")
    front, table, width = (shape[0], texts, *shape[2:]), (texts + shape[1], shape[3]), shape[3:]
    for name, t, sizes in (
        ("text", text, front), ("cos", cos, table), ("sin", sin, table), ("weight", weight, width),
        ("text_weight", text_weight, width),
    ):  # fmt: skip
        if t is not None and tuple(t.shape) != sizes:
            raise ValueError(f"qk_norm_rope: {name} must be {sizes} for x {shape}, got {tuple(t.shape)}")


def _supports_triton(
    x: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, eps: float,
    text: torch.Tensor | None = None, text_weight: torch.Tensor | None = None,
) -> str | None:  # fmt: skip
    if x.shape[-1] > NUMBERS:
        return f"head size {x.shape[-1]} is over {NUMBERS}"
    for name, t in (("x", x), ("text", text)):
        if t is not None and (t.dtype not in FLOATS or t.stride(-1) != 1 or t.dtype != x.dtype):
            return f"{name} has dtype {t.dtype} and strides {tuple(t.stride())}: one float dtype, heads contiguous"
    for name, t in (("weight", weight), ("text_weight", text_weight), ("cos", cos), ("sin", sin)):
        if t is not None and (t.dtype not in FLOATS or not t.is_contiguous()):
            return f"{name}: unsupported dtype or strides"
    return None


def _triton(
    x: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, eps: float,
    text: torch.Tensor | None = None, text_weight: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    _check(x, weight, cos, sin, text, text_weight)
    out = _fake(x, weight, cos, sin, eps, text)
    if out.numel() == 0:
        return out
    batch, tokens, heads, size = out.shape
    block = next_power_of_2(size)
    at_once = min(max(AT_ONCE // block, 1), next_power_of_2(heads))
    in_front = x if text is None else text
    launch_kernel(
        _qk_norm_rope_kernel, (batch * tokens, cdiv(heads, at_once)),
        x, in_front, weight, text_weight, cos, sin, out, x.shape[1], tokens - x.shape[1], heads, size,
        *x.stride()[:3], *in_front.stride()[:3], eps, HAS_W=weight is not None, HAS_TEXT_W=text_weight is not None,
        HEADS=at_once, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


def _reference(
    x: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, eps: float,
    text: torch.Tensor | None = None, text_weight: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    _check(x, weight, cos, sin, text, text_weight)
    return reference(x, weight, cos, sin, eps, text, text_weight).contiguous()


def _fake(
    x: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, eps: float,
    text: torch.Tensor | None = None, text_weight: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    tokens = x.shape[1] + (0 if text is None else text.shape[1])
    return torch.empty(x.shape[0], tokens, *x.shape[2:], dtype=x.dtype, device=x.device)


qk_norm_rope = define(
    "qk_norm_rope(Tensor x, Tensor? weight, Tensor cos, Tensor sin, float eps, Tensor? text=None,"
    " Tensor? text_weight=None) -> Tensor",
    fake=_fake,
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _case(name: str, tag: str, batch: int, tokens: int, texts: int, heads: int, head_size: int,
          dtype: str = "bfloat16", weight: float = 1, **more: bool) -> Case:  # fmt: skip
    dims = {"batch": batch, "tokens": tokens, "heads": heads, "head_size": head_size, **more}
    if texts:
        dims |= {"texts": texts, "text": True}
    return Case(name, dims, dtype, weight, (tag,))


SPEC = OpSpec(
    name="qk_norm_rope",
    level=2,
    reference=reference,
    op=qk_norm_rope,
    cases=(  # FLUX.1 at 1024 px: blocks of two streams, and of one
        _case("flux_joint", "model", 1, 4096, 512, 24, 128, weight=38),
        _case("flux_single", "model", 1, 4608, 0, 24, 128, weight=76),
        _case("one", "odd", 1, 1, 0, 1, 2, "float32"),
        _case("odd_63", "odd", 2, 63, 5, 3, 16),
        _case("odd_head", "odd", 3, 7, 2, 5, 40, "float16"),
        _case("plain", "odd", 2, 9, 4, 3, 6, "float32", weights=False),
        _case("half", "odd", 1, 33, 1, 3, 128, "float16"),
        _case("wide", "odd", 1, 5, 3, 9, 72, weights=False),
        _case("single", "odd", 2, 17, 0, 2, 64, "float32"),
    ),
    arguments=(
        Tensor("x", "batch tokens heads head_size"),
        Tensor("weight", "head_size", when="weights", mean=1, std=0.1),
        Tensor("cos", "positions head_size", "float32", std=0.7),
        Tensor("sin", "positions head_size", "float32", std=0.7),
        Scalar("eps", default=1e-6),
        Tensor("text", "batch texts heads head_size", when="text"),
        Tensor("text_weight", "head_size", when="text and weights", mean=1, std=0.1),
    ),
    outputs=(Tensor("out", "batch positions heads head_size"),),
    axes={
        "batch": Axis.per_call(),
        "tokens": Axis.per_call(),
        "texts": Axis.per_call(0),
        "positions": Axis(lambda s: s["tokens"] + (s["texts"] if s["text"] else 0), varies=True),
        "heads": Axis.count(),
        "head_size": Axis.width(),
        "weights": Axis.option(True, stated=True),
    },
    constraints=("head_size % 2 == 0",),
    flops="10 * batch * positions * heads * head_size",
    stands_for=("rms_norm",),
)
