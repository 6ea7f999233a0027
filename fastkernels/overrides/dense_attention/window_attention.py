"""Cosine attention within windows, with a position bias and a mask of each window: SwinV2 (arXiv 2111.09883)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from fastkernels.core.case import Case
from fastkernels.core.declaration import Axis, Tensor
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.kit.launch import cdiv, multiprocessors, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import FLOATS

WHOLE = 128  # most keys whose scores with a block of queries are in registers at once
MOST_SCALE = math.log(100.0)
SHORTEST = 1e-12  # length by which a query or key is divided, as in F.normalize


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, logit_scale: torch.Tensor, bias: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """q, k, v: [B, N, H, D], a window of N tokens each; logit_scale: [H]; bias: [H, N, N]; mask: [W, N, N] or None.

    Queries and keys are divided by their lengths, their products multiplied by exp(logit_scale), at most 100; bias and
    mask are added. Window i has mask i % W. Computed in at least float32, rounded once; returns [B, N, H, D] in q's
    dtype.
    """
    acc = torch.promote_types(q.dtype, torch.float32)
    long_q, long_k = (F.normalize(t.to(acc), dim=-1, eps=SHORTEST) for t in (q, k))
    scale = logit_scale.to(acc).clamp(max=MOST_SCALE).exp()[:, None, None]
    scores = torch.einsum("bqhd,bkhd->bhqk", long_q, long_k) * scale + bias.to(acc)
    if mask is not None:
        scores = scores + mask.to(acc)[:, None].repeat(len(q) // len(mask), 1, 1, 1)
    return torch.einsum("bhqk,bkhd->bqhd", torch.softmax(scores, dim=-1), v.to(acc)).to(q.dtype)


@triton.jit
def _added(bias_ptr, mask_ptr, head, window, rows, cols, N, MASK: tl.constexpr):
    # Bias and mask of the scores, in units of log2(e): the softmax needs exp2 alone
    at = rows[:, None] * N + cols[None, :]
    inside = (rows < N)[:, None] & (cols < N)[None, :]
    added = tl.load(bias_ptr + head * N * N + at, mask=inside, other=0.0).to(tl.float32)
    if MASK:
        added += tl.load(mask_ptr + window * N * N + at, mask=inside, other=0.0).to(tl.float32)
    return tl.where((cols < N)[None, :], added * 1.4426950408889634, float("-inf"))


@triton.jit
def _scores(q, k, of_q, added, SHORTEST: tl.constexpr, PRECISION: tl.constexpr):
    # The product is of q and k as they are: their lengths divide it.
    wide = k.to(tl.float32)
    of_k = 1.0 / tl.maximum(tl.sqrt(tl.sum(wide * wide, 1)), SHORTEST)
    return tl.dot(q, tl.trans(k), input_precision=PRECISION) * of_q[:, None] * of_k[None, :] + added


@triton.jit(do_not_specialize=["images"])
def _window_attention_kernel(
    q_ptr, k_ptr, v_ptr, logit_scale_ptr, bias_ptr, mask_ptr, out_ptr, images, W, N, H, D, q_b, q_t, q_h, k_b, k_t, k_h,
    v_b, v_t, v_h, MASK: tl.constexpr, EACH: tl.constexpr, WHOLE: tl.constexpr, SHORTEST: tl.constexpr,
    MOST_SCALE: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # A program per (head, window and block of queries, EACH images). If the keys are one block (WHOLE), bias and mask
    # are loaded once for all of these images.
    follow(OVERLAP)
    blocks = tl.cdiv(N, BLOCK_M)
    head, column = tl.program_id(0) % H, tl.program_id(0) // H  # a window's heads are neighbours in memory
    window, first = (column // blocks) % W, column // (blocks * W) * EACH
    rows = (column % blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols, dims = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    known = (dims < D)[None, :]
    scale = (
        tl.exp(tl.minimum(tl.load(logit_scale_ptr + head).to(tl.float32), MOST_SCALE)) * 1.4426950408889634
    )
    if WHOLE:
        added = _added(bias_ptr, mask_ptr, head, window, rows, cols, N, MASK)
    for image in range(first, tl.minimum(first + EACH, images)):
        batch = (image * W + window).to(tl.int64)
        of_rows = (rows < N)[:, None] & known
        q_at = q_ptr + batch * q_b + head * q_h + rows[:, None] * q_t + dims[None, :]
        k_at = k_ptr + batch * k_b + head * k_h + cols[:, None] * k_t + dims[None, :]
        v_at = v_ptr + batch * v_b + head * v_h + cols[:, None] * v_t + dims[None, :]
        q = tl.load(q_at, mask=of_rows, other=0.0)
        wide = q.to(tl.float32)
        of_q = scale / tl.maximum(tl.sqrt(tl.sum(wide * wide, 1)), SHORTEST)
        if WHOLE:
            of_cols = (cols < N)[:, None] & known
            k = tl.load(k_at, mask=of_cols, other=0.0)
            v = tl.load(v_at, mask=of_cols, other=0.0)
            scores = _scores(q, k, of_q, added, SHORTEST, PRECISION)
            p = tl.exp2(scores - tl.max(scores, 1)[:, None])
            total = tl.sum(p, 1)
            out = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        else:
            top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            for begin in range(0, N, BLOCK_N):
                of_cols = (begin + cols < N)[:, None] & known
                k = tl.load(k_at + begin * k_t, mask=of_cols, other=0.0)
                v = tl.load(v_at + begin * v_t, mask=of_cols, other=0.0)
                more = _added(bias_ptr, mask_ptr, head, window, rows, begin + cols, N, MASK)
                scores = _scores(q, k, of_q, more, SHORTEST, PRECISION)
                new_top = tl.maximum(top, tl.max(scores, 1))
                p = tl.exp2(scores - new_top[:, None])
                decay = tl.exp2(top - new_top)
                total = total * decay + tl.sum(p, 1)
                out = out * decay[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
                top = new_top
        out_at = out_ptr + ((batch * N + rows[:, None]) * H + head) * D + dims[None, :]
        tl.store(out_at, (out / total[:, None]).to(q.dtype), mask=of_rows)


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, logit_scale: torch.Tensor, bias: torch.Tensor,
    mask: torch.Tensor | None,
) -> None:  # fmt: skip
    if q.dim() != 4 or q.shape != k.shape or q.shape != v.shape:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"window_attention: q, k and v must be [B, N, H, D], all alike, got {shapes}")
    batch, tokens, heads, _ = q.shape
    if logit_scale.shape != (heads,) or bias.shape != (heads, tokens, tokens):
        raise ValueError(
            f"window_attention: logit_scale {tuple(logit_scale.shape)} and bias {tuple(bias.shape)} are not [H] and"
            f" [H, N, N] of q {tuple(q.shape)}"
        )
    if mask is not None and (mask.shape[1:] != (tokens, tokens) or len(mask) == 0 or batch % len(mask)):
        raise ValueError(
            f"window_attention: mask {tuple(mask.shape)} is not [W, N, N] of q {tuple(q.shape)}, B a multiple of W"
        )


def _supports_triton(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, logit_scale: torch.Tensor, bias: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> str | None:  # fmt: skip
    if q.dtype not in FLOATS or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"dtypes {q.dtype}, {k.dtype}, {v.dtype} are not one of float16, bfloat16 and float32"
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 matrices as integers"
    if q.shape[3] > 128:
        return f"head size {q.shape[3]} is over 128"
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.stride(-1) != 1:
            return f"{name} has strides {tuple(t.stride())}: the last dimension must be contiguous"
    return None


def _triton(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, logit_scale: torch.Tensor, bias: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    _check(q, k, v, logit_scale, bias, mask)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    batch, tokens, heads, size = q.shape
    windows, mask = (1, None) if mask is None else (len(mask), mask.contiguous())
    images = batch // windows
    whole = tokens <= WHOLE
    block_n = max(next_power_of_2(tokens), 16) if whole else 64
    block_m = min(block_n, 64)
    columns = windows * cdiv(tokens, block_m)
    # As many images for a program as leave each SM several programs
    most = heads * columns * images // (8 * multiprocessors(q.device))
    each = next(n for n in (8, 4, 2, 1) if n <= max(most, 1)) if whole else 1
    exact = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    launch_kernel(
        _window_attention_kernel, (heads * columns * cdiv(images, each),),
        q, k, v, logit_scale, bias.contiguous(), mask, out, images, windows, tokens, heads, size, *q.stride()[:3],
        *k.stride()[:3], *v.stride()[:3], MASK=mask is not None, EACH=each, WHOLE=whole, SHORTEST=SHORTEST,
        MOST_SCALE=MOST_SCALE, PRECISION=exact if q.dtype == torch.float32 else "tf32", BLOCK_M=block_m,
        BLOCK_N=block_n, BLOCK_D=max(next_power_of_2(size), 16), num_warps=8 if block_n > 64 else 4,
    )  # fmt: skip
    return out


def _reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, logit_scale: torch.Tensor, bias: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    _check(q, k, v, logit_scale, bias, mask)
    return reference(q, k, v, logit_scale, bias, mask).contiguous()


window_attention = define(
    "window_attention(Tensor q, Tensor k, Tensor v, Tensor logit_scale, Tensor bias, Tensor? mask=None) -> Tensor",
    fake=lambda q, *_: torch.empty(q.shape, dtype=q.dtype, device=q.device),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _case(name: str, tag: str, images: int, windows: int, tokens: int, heads: int, head_size: int,
          dtype: str = "bfloat16", often: float = 1, masked: bool = True) -> Case:  # fmt: skip
    dims = {
        "batch": images * windows,
        "windows": windows,
        "tokens": tokens,
        "heads": heads,
        "head_size": head_size,
    }
    return Case(name, {**dims, "masked": masked}, dtype, often, (tag,))


SPEC = OpSpec(
    name="window_attention",
    level=1,
    reference=reference,
    op=window_attention,
    cases=(  # SwinV2-B with windows of 8 x 8 on 8 images of 256 px; SwinV2-L with 12 x 12 on 192 px
        _case("swinv2_b_1", "model", 8, 64, 64, 4, 32),
        _case("swinv2_b_1_plain", "model", 8, 64, 64, 4, 32, masked=False),
        _case("swinv2_b_3", "model", 8, 4, 64, 16, 32, often=9),
        _case("swinv2_b_3_plain", "model", 8, 4, 64, 16, 32, often=9, masked=False),
        _case("swinv2_l_12", "model", 8, 1, 144, 24, 32, often=18, masked=False),
        _case("tokens_75", "odd", 2, 2, 75, 2, 16, "float16"),
        _case("one", "odd", 1, 1, 1, 1, 1, "float32"),
        _case("plain_9", "odd", 3, 1, 9, 2, 33, "float32", masked=False),
        _case("odd_49", "odd", 2, 3, 49, 3, 16, "float16"),
        _case("images_9", "odd", 9, 2, 16, 1, 8, "float32"),
        _case("tokens_130", "odd", 1, 2, 130, 2, 24, "float32"),
        _case("masks_5", "odd", 2, 5, 7, 1, 64),
        _case("half", "odd", 5, 1, 25, 2, 40, masked=False),
    ),
    arguments=(
        Tensor("q", "batch tokens heads head_size"),
        Tensor("k", "batch tokens heads head_size"),
        Tensor("v", "batch tokens heads head_size"),
        Tensor("logit_scale", "heads", mean=3, std=1.5),
        Tensor("bias", "heads tokens tokens", mean=8, std=2),
        Tensor("mask", "windows tokens tokens", when="masked", std=3),
    ),
    outputs=(Tensor("out", "batch tokens heads head_size"),),
    axes={
        "batch": Axis.per_call(),
        "windows": Axis.count(),
        "tokens": Axis.count(),
        "heads": Axis.count(),
        "head_size": Axis.width(),
    },
    constraints=("batch % windows == 0", "tokens <= 1024"),
    flops="4 * batch * tokens * tokens * heads * head_size",
    activations=("v",),  # the result is linear in the values
    contained="q",
)  # fmt: skip
