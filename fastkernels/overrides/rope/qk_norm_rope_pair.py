"""`qk_norm_rope` of FLUX's queries and keys, in one launch that reads cosines and sines once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import functional
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.rope.qk_norm_rope import _check, _fake, _rotated, _triton, qk_norm_rope

Call = tuple[Any, ...]  # arguments of qk_norm_rope
AT_ONCE = 4096  # elements of each tensor that a program computes


@triton.jit
def _positioned(x, w, cos, sin, D, eps, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    h = x.to(tl.float32)
    h *= tl.rsqrt(tl.sum(h * h, axis=1) / D + eps)[:, None]
    h = (h * w.to(tl.float32)).to(x.dtype).to(tl.float32)
    return _rotated(h, cos, sin, HEADS, BLOCK).to(x.dtype)


@triton.jit
def _pair_kernel(
    q_ptr, k_ptr, text_q_ptr, text_k_ptr, q_w_ptr, k_w_ptr, text_q_w_ptr, text_k_w_ptr, cos_ptr, sin_ptr, q_out_ptr,
    k_out_ptr, S, St, H, D, x_b, x_t, x_h, text_b, text_t, text_h, eps, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // (S + St), row % (S + St)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None].to(tl.int64)
    cols = tl.arange(0, BLOCK)[None, :]
    known = cols < D
    inside = (heads < H) & known
    cos = tl.load(cos_ptr + token * D + cols, mask=known, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * D + cols, mask=known, other=0.0).to(tl.float32)
    if token < St:
        at = batch * text_b + token * text_t + heads * text_h + cols
        q, q_w = (
            tl.load(text_q_ptr + at, mask=inside, other=0.0),
            tl.load(text_q_w_ptr + cols, mask=known, other=0.0),
        )
        k, k_w = (
            tl.load(text_k_ptr + at, mask=inside, other=0.0),
            tl.load(text_k_w_ptr + cols, mask=known, other=0.0),
        )
    else:
        at = batch * x_b + (token - St) * x_t + heads * x_h + cols
        q, q_w = tl.load(q_ptr + at, mask=inside, other=0.0), tl.load(q_w_ptr + cols, mask=known, other=0.0)
        k, k_w = tl.load(k_ptr + at, mask=inside, other=0.0), tl.load(k_w_ptr + cols, mask=known, other=0.0)
    out_at = (row * H + heads) * D + cols
    tl.store(q_out_ptr + out_at, _positioned(q, q_w, cos, sin, D, eps, HEADS, BLOCK), mask=inside)
    tl.store(k_out_ptr + out_at, _positioned(k, k_w, cos, sin, D, eps, HEADS, BLOCK), mask=inside)


def _launched(of_q: Call, of_k: Call) -> tuple[torch.Tensor, torch.Tensor]:
    q, q_weight, cos, sin, eps, *text_q = of_q
    k, k_weight, _, _, _, *text_k = of_k
    outs = _fake(*of_q[:6]), _fake(*of_k[:6])
    batch, tokens, heads, size = outs[0].shape
    block = next_power_of_2(size)
    at_once = min(AT_ONCE // block, next_power_of_2(heads))
    front_q, w_q = (q, q_weight) if text_q[0] is None else text_q
    front_k, w_k = (k, k_weight) if text_k[0] is None else text_k
    launch_kernel(
        _pair_kernel, (batch * tokens, cdiv(heads, at_once)),
        q, k, front_q, front_k, q_weight, k_weight, w_q, w_k, cos, sin, *outs, q.shape[1],
        tokens - q.shape[1], heads, size, *q.stride()[:3], *front_q.stride()[:3], eps,
        HEADS=at_once, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return outs


def _alike(of_q: Call, of_k: Call) -> bool:
    """Whether one launch computes both: tensors of the same shapes and strides, and weights, all of one dtype."""
    pairs = [(of_q[i], of_k[i]) for i in ((0, 1) if of_q[5] is of_k[5] is None else (0, 1, 5, 6))]
    return of_q[0].numel() > 0 and all(
        a is not None and b is not None and (a.shape, a.stride()) == (b.shape, b.stride())
        and a.dtype == b.dtype == of_q[0].dtype
        for a, b in pairs
    )  # fmt: skip


def _pair(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor | None, k_weight: torch.Tensor | None, cos: torch.Tensor,
    sin: torch.Tensor, eps: float, text_q: torch.Tensor | None = None, text_k: torch.Tensor | None = None,
    text_q_weight: torch.Tensor | None = None, text_k_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    calls = (
        (q, q_weight, cos, sin, eps, text_q, text_q_weight),
        (k, k_weight, cos, sin, eps, text_k, text_k_weight),
    )
    of_q, of_k = (qk_norm_rope._pick(q.device.type, args, {}).fn for args in calls)
    if of_q is _triton and of_k is _triton and _alike(*calls):
        _check(q, q_weight, cos, sin, text_q, text_q_weight)
        return _launched(*calls)
    return of_q(*calls[0]), of_k(*calls[1])


_qk_norm_rope_pair = functional(
    "qk_norm_rope_pair(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, float eps,"
    " Tensor? text_q=None, Tensor? text_k=None, Tensor? text_q_weight=None, Tensor? text_k_weight=None)"
    " -> (Tensor, Tensor)",
    _pair,
    lambda q, k, q_weight, k_weight, cos, sin, eps, text_q=None, text_k=None, *weights: (
        _fake(q, None, cos, sin, eps, text_q), _fake(k, None, cos, sin, eps, text_k),
    ),
)  # fmt: skip


def norm_rope_pair(of_q: Call, of_k: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """qk_norm_rope(*of_q), qk_norm_rope(*of_k), of the same cosines, sines and eps."""
    q, q_weight, cos, sin, eps, text_q, text_q_weight = of_q
    k, k_weight, _, _, _, text_k, text_k_weight = of_k
    text = text_q, text_k, text_q_weight, text_k_weight
    return _qk_norm_rope_pair(q, k, q_weight, k_weight, cos, sin, eps, *text)


Parts = tuple[torch.Tensor, torch.Tensor | None]  # queries or keys of the image, and of the text


def positioned(attn: Any, q: Parts, k: Parts, rotary: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalize queries and keys of image and text, put the text in front, and rotate both."""
    of_q, of_k = _arguments(attn, "q", q, rotary), _arguments(attn, "k", k, rotary)
    if of_q is not None and of_k is not None and of_q[4] == of_k[4]:
        return norm_rope_pair(of_q, of_k)
    return (
        _in_parts(attn, "q", q, rotary) if of_q is None else qk_norm_rope(*of_q),
        _in_parts(attn, "k", k, rotary) if of_k is None else qk_norm_rope(*of_k),
    )


def _norms(attn: Any, part: str, text: torch.Tensor | None) -> list[Any]:
    """Norms of the image and of the text."""
    names = (f"norm_{part}",) if text is None else (f"norm_{part}", f"norm_added_{part}")
    return [getattr(attn, name) for name in names]


def _arguments(attn: Any, part: str, given: Parts, rotary: Any) -> tuple[Any, ...] | None:
    """Arguments of `qk_norm_rope` for queries or keys; None if it does not compute what their norms compute."""
    x, text = given
    norm, *of_text = _norms(attn, part, text)
    if rotary is None or not all(_is_plain(n, x) and n.eps == norm.eps for n in (norm, *of_text)):
        qk_norm_rope.leave("no rotation, or norms that are not plain RMS norms of one eps")
        return None
    cos, sin = (t.to(x.device) for t in rotary)
    return x, norm.weight, cos, sin, norm.eps, text, of_text[0].weight if of_text else None


def _in_parts(attn: Any, part: str, given: Parts, rotary: Any) -> torch.Tensor:
    """The same with the layer's own norms."""
    x, text = given
    norm, *of_text = _norms(attn, part, text)
    x = norm(x) if text is None else torch.cat((of_text[0](text), norm(x)), dim=1)
    return x if rotary is None else _rotate(x, *rotary)


def _is_plain(norm: Any, x: torch.Tensor) -> bool:
    """Whether this is torch's RMS norm over the heads, which no other patch, hook or offload has changed."""
    cls = type(norm)
    # Where first calls decide, and where code is compiled, this op stands for the norm as well.
    tried = getattr(cls, "fastkernels_tried", False) and cls.__mro__[1] is torch.nn.RMSNorm
    if not (cls is torch.nn.RMSNorm or tried) or norm.eps is None or len(norm.normalized_shape) != 1:
        return False
    own = "forward" in vars(norm) or norm._forward_hooks or norm._forward_pre_hooks
    return not own and (norm.weight is None or norm.weight.dtype == x.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate neighboring pairs of x [B, S, H, D] by angles whose cosines and sines are [S, D]."""
    cos, sin = (t.to(x.device)[:, None] for t in (cos, sin))
    h = x.float()
    turned = torch.stack((-h[..., 1::2], h[..., ::2]), dim=-1).flatten(-2)
    return (h * cos + turned * sin).to(x.dtype)
