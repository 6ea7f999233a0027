"""Dense attention with head sizes over 256, as two products of cuBLAS and a softmax between them.

The accumulators of such a head do not fit into the registers of one block of a fused kernel. VAEs of diffusion models
have one head of 512.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import ForOthers
from fastkernels.overrides.kit.launch import next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import FLOATS

MOST_FUSED = 256  # head sizes up to this are for the fused kernels
MOST_BATCH = 65535  # along the second axis of a CUDA grid
SCORES = 64 << 20  # bytes of the scores of some queries, in float32
WEIGHTS = 256 << 20  # bytes of the weights of more queries, whose product with v is one
MOST_KEYS = 32768  # a program of the softmax has a row in its registers
_SMALL = ForOthers(f"it is for head sizes over {MOST_FUSED}")


@triton.jit
def _attention_softmax_kernel(
    x_ptr, out_ptr, n, x_stride_b, x_stride_r, out_stride_b, out_stride_r, factor,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # One program per row. The factor is in units of log2(e), so that the softmax needs exp2 alone.
    follow(OVERLAP)
    row, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x_at = x_ptr + batch * x_stride_b + row * x_stride_r + cols
    x = tl.where(cols < n, tl.load(x_at, mask=cols < n, other=0.0) * factor, float("-inf"))
    p = tl.exp2(x - tl.max(x, 0))
    p *= 1.0 / tl.sum(p, 0)
    out_at = out_ptr + batch * out_stride_b + row * out_stride_r + cols
    tl.store(out_at, p.to(out_ptr.dtype.element_ty), mask=cols < n)


def softmax(x: torch.Tensor, out: torch.Tensor, scale: float) -> None:
    """Write softmax(scale * x) over the last dimension to out; x: [B, R, N] in float32, both with contiguous rows."""
    batch, rows, n = x.shape
    block = next_power_of_2(n)
    launch_kernel(
        _attention_softmax_kernel, (rows, batch), x, out, n, *x.stride()[:2], *out.stride()[:2],
        scale * math.log2(math.e), BLOCK=block, num_warps=min(max(block // 1024, 1), 16),
    )  # fmt: skip


def supports(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, attn_mask: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None, *_: Any,
) -> str | None:  # fmt: skip
    if q.shape[3] <= MOST_FUSED:
        return _SMALL
    if attn_mask is not None or cu_seqlens_q is not None or k.shape[1] > MOST_KEYS:
        return ForOthers(f"it takes up to {MOST_KEYS} keys, no mask and no concatenated sequences")
    if q.dtype not in FLOATS or not q.dtype == k.dtype == v.dtype:
        return ForOthers(f"dtypes {q.dtype}, {k.dtype}, {v.dtype} are not all float16, bfloat16 or float32")
    if q.shape[0] * q.shape[2] > MOST_BATCH:
        return ForOthers(f"{q.shape[0] * q.shape[2]} heads of the batch are over {MOST_BATCH}")
    return None


def _heads_first(x: torch.Tensor, group: int) -> torch.Tensor:
    """[B, S, H, D] as [B * H * group, S, D], a view for one head."""
    x = x.transpose(1, 2)
    return (x.repeat_interleave(group, dim=1) if group > 1 else x).flatten(0, 1)


def _scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    if q.dtype == torch.float32 or q.device.type == "cpu":
        return torch.bmm(q.float(), k.float())
    return torch.bmm(q, k, out_dtype=torch.float32)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *_: Any, scores: int = SCORES,
    weights: int = WEIGHTS,
) -> torch.Tensor:  # fmt: skip
    """Compute attention_dense without a mask.

    scores, weights: bytes of the scores and of the weights that are in memory at a time, as far as one row allows.
    """
    batch, n_q, heads, size = q.shape
    n_k = k.shape[1]
    if not q.numel() or not n_k:
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    group = heads // k.shape[2]
    queries, keys, values = _heads_first(q, 1), _heads_first(k, group).transpose(1, 2), _heads_first(v, group)
    count = batch * heads
    out = torch.empty((count, n_q, size), dtype=q.dtype, device=q.device)
    most = min(_rows(weights, count * n_k * q.itemsize), n_q)
    few = min(_rows(scores, count * n_k * 4), most)
    buffer = torch.empty((count, most, n_k), dtype=q.dtype, device=q.device)
    for start in range(0, n_q, most):
        end = min(start + most, n_q)
        p = buffer[:, : end - start]
        for begin in range(start, end, few):
            last = min(begin + few, end)
            softmax(_scores(queries[:, begin:last], keys), p[:, begin - start : last - start], scale)
        torch.bmm(p, values, out=out[:, start:end])
    if heads == 1:
        return out.view(q.shape)
    return out.view(batch, heads, n_q, size).transpose(1, 2).contiguous()


def _rows(limit: int, bytes_of_row: int) -> int:
    """Return how many rows fit into a limit, whole tiles of a product if there are several."""
    fit = max(limit // bytes_of_row, 1)
    return fit if fit < 128 else fit // 128 * 128
