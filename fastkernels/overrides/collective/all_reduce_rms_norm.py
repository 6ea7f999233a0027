"""The sum of all ranks' tensors, the residual added to it, and the RMS norm of both."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core import parallel
from fastkernels.core.communicator import Symmetric
from fastkernels.core.dispatch import ForOthers, Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor
from fastkernels.overrides.collective import exchange
from fastkernels.overrides.collective import words as small
from fastkernels.overrides.collective.all_reduce import SMALL, all_reduce
from fastkernels.overrides.collective.exchange import buffer_of, meet
from fastkernels.overrides.collective.words import packed, summed_words, unpacked
from fastkernels.overrides.kit.fp8 import MIN_ABSMAX, empty_outputs, fp8_inverse, fp8_scale, to_fp8
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.norm import rms_norm as norms

WIDEST = 16384  # channels of a row, which one program holds
LEAST = tl.constexpr(MIN_ABSMAX)


def reference(
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    eps: float,
    residual: list[torch.Tensor | None] | None = None,
    group: str = "tp",
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """x: [T, H] of each rank; weight [H] and residual [T, H] are the same in all. Computed in at least float32.

    Returns for each rank (norm of the sum and the residual, the sum and the residual), in x's dtype.
    """
    summed = exchange.total(x)
    found = []
    for t, w, r in zip(x, weight, residual or [None] * len(x), strict=True):
        out, added = norms.reference(
            summed, w.to(summed.dtype), eps, None if r is None else r.to(summed.dtype)
        )
        found.append((out.to(t.dtype), None if added is None else added.to(t.dtype)))
    return found


def _composed(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None, group: str = "tp"
) -> torch.Tensor:
    return norms.rms_norm(all_reduce(x, group), weight, eps, residual)


@triton.jit
def _row_scale(absmax, row, scale_ptr, s_ptr, STATIC: tl.constexpr):
    """The scale that a row is quantized with, which is stored: the given one, or the row's own."""
    if STATIC:
        scale = tl.load(scale_ptr).to(tl.float32)
        tl.store(s_ptr, scale, mask=row == 0)
    else:
        scale = fp8_scale(absmax, LEAST, False)
        tl.store(s_ptr + row, scale)
    return scale


@triton.jit(do_not_specialize=["rows", "each", "polls"])
def _all_reduce_rms_norm_kernel(
    x_ptr, res_ptr, w_ptr, scale_ptr, out_ptr, s_ptr, table_ptr, counter_ptr, failed_ptr, rows, each, H, eps, region,
    flags_at, polls, RANK: tl.constexpr, SIZE: tl.constexpr, HAS_RES: tl.constexpr, QUANT: tl.constexpr,
    STATIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Program b passes `each` whole rows through its own region, as in exchange._exchange_kernel, and norms them.
    b = tl.program_id(0).to(tl.int64)
    count = tl.load(counter_ptr + b) + 1
    half = (2 * b + (count & 1)) * region
    cols = tl.arange(0, BLOCK)
    own = buffer_of(table_ptr, RANK, x_ptr.dtype.element_ty) + half
    mine = tl.minimum(each, rows - b * each)
    for i in range(0, mine):
        value = tl.load(x_ptr + (b * each + i) * H + cols, mask=cols < H)
        tl.store(own + i * H + cols, value, mask=cols < H)
    w = tl.load(w_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)
    meet(table_ptr, failed_ptr, count, flags_at, polls, RANK, SIZE)
    for i in range(0, mine):
        row = (b * each + i) * H + cols
        h = tl.zeros((BLOCK,), dtype=tl.float32)
        for p in tl.static_range(SIZE):
            theirs = buffer_of(table_ptr, p, x_ptr.dtype.element_ty) + half
            h += tl.load(theirs + i * H + cols, mask=cols < H, other=0.0).to(tl.float32)
        if HAS_RES:
            h += tl.load(res_ptr + row, mask=cols < H, other=0.0).to(tl.float32)
            tl.store(res_ptr + row, h.to(res_ptr.dtype.element_ty), mask=cols < H)
        y = h * tl.rsqrt(tl.sum(h * h, axis=0) / H + eps) * w
        if QUANT:
            y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
            scale = _row_scale(tl.max(tl.abs(y), axis=0), b * each + i, scale_ptr, s_ptr, STATIC)
            tl.store(out_ptr + row, to_fp8(y * fp8_inverse(scale)), mask=cols < H)
        else:
            tl.store(out_ptr + row, y.to(out_ptr.dtype.element_ty), mask=cols < H)
    tl.store(counter_ptr + b, count)


@triton.jit(do_not_specialize=["polls"])
def _words_rms_norm_kernel(
    x_ptr, res_ptr, w_ptr, scale_ptr, out_ptr, s_ptr, table_ptr, calls_ptr, failed_ptr, words_at, polls, H, eps,
    RANK: tl.constexpr, SIZE: tl.constexpr, WORDS: tl.constexpr, KIND: tl.constexpr, HAS_RES: tl.constexpr,
    QUANT: tl.constexpr, STATIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # A program has a row of H words, of one number (float32) or two. Quantized, out has the bytes of a word's numbers.
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    inside = cols < H
    at = row * H + cols
    word = tl.load(x_ptr + at, mask=inside, other=0)
    w_low, w_high = unpacked(tl.load(w_ptr + cols, mask=inside, other=0), KIND)
    if HAS_RES:
        r_low, r_high = unpacked(tl.load(res_ptr + at, mask=inside, other=0), KIND)
    low, high = summed_words(
        word, at, inside, table_ptr, calls_ptr, failed_ptr, words_at, tl.num_programs(0) * H, polls, RANK, SIZE, WORDS,
        KIND,
    )  # fmt: skip
    if HAS_RES:
        low += r_low
        high += r_high
        tl.store(res_ptr + at, packed(low, high, KIND), mask=inside)
    if KIND == 0:
        norm = tl.rsqrt(tl.sum(low * low, axis=0) / H + eps)
    else:
        norm = tl.rsqrt(tl.sum(low * low + high * high, axis=0) / (2 * H) + eps)
    normed = packed(low * norm * w_low, high * norm * w_high, KIND)
    if QUANT:
        low, high = unpacked(normed, KIND)  # rounded as the norm would be
        absmax = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), axis=0)
        inverse = fp8_inverse(_row_scale(absmax, row, scale_ptr, s_ptr, STATIC))
        code = to_fp8(low * inverse).to(tl.uint8, bitcast=True)
        if KIND == 0:
            tl.store(out_ptr + at, code, mask=inside)
        else:
            upper = to_fp8(high * inverse).to(tl.uint8, bitcast=True).to(tl.int16) << 8
            tl.store(out_ptr + at, code.to(tl.int16) | upper, mask=inside)
    else:
        tl.store(out_ptr + at, normed, mask=inside)


def _small(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, group: str) -> bool:
    return (
        small.is_small(x, group)
        and x.shape[-1] * x.element_size() % 4 == 0
        and all(t is None or t.dtype == x.dtype for t in (weight, residual))
    )


def _triton(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None, group: str = "tp",
    words: int = -1,
) -> torch.Tensor:  # fmt: skip
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch("all_reduce_rms_norm", x, weight, eps, residual, group, words, out, None, None)
    return out


def launch_quantized(
    op: str, x: torch.Tensor, weight: torch.Tensor, eps: float, scale: torch.Tensor | None,
    residual: torch.Tensor | None, group: str, words: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The same in float8 e4m3, with its scales. words: 1 as words, 0 through the buffer, -1 by size."""
    out, scales = empty_outputs(x.shape, x.device, scale is not None, -1)
    if x.numel() == 0:
        return out, scales if scale is None else scales.copy_(scale)
    _launch(op, x, weight, eps, residual, group, words, out, scale, scales)
    return out, scales


def _launch(
    op: str, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, group: str, words: int,
    out: torch.Tensor, scale: torch.Tensor | None, scales: torch.Tensor | None,
) -> None:  # fmt: skip
    symmetric = exchange.symmetric_of(op, x, group)
    hidden = x.shape[-1]
    rows = x.numel() // max(hidden, 1)
    if rows == 0:
        return
    if words < 0:
        words = _small(x, weight, residual, group) and x.nbytes * (symmetric.size - 1) <= SMALL
    how: dict[str, Any] = {
        "HAS_RES": residual is not None, "QUANT": scales is not None, "STATIC": scale is not None
    }  # fmt: skip
    if words:
        of_row = hidden * x.element_size() // 4
        block = next_power_of_2(of_row)
        # Of a word, two numbers are quantized to two bytes, or one to one.
        result = out.view(
            torch.int32 if scales is None else torch.int16 if x.element_size() == 2 else torch.uint8
        )
        given = (None if t is None else t.view(torch.int32) for t in (x.contiguous(), residual, weight))
        _words_rms_norm_kernel[(rows,)](
            *given, scale, result, scales, *small.state_of(symmetric), of_row, eps, KIND=exchange.SUMS.index(x.dtype),
            BLOCK=block, num_warps=min(max(block // 256, 1), 8), **how, **small.words_of(symmetric),
        )  # fmt: skip
        return
    each = cdiv(rows, Symmetric.BLOCKS)
    _all_reduce_rms_norm_kernel[(cdiv(rows, each),)](
        x.contiguous(), residual, weight, scale, out, scales, symmetric.table, symmetric.counters, symmetric.failed,
        rows, each, hidden, eps, symmetric.room // Symmetric.BLOCKS // x.element_size(), 2 * symmetric.room // 4,
        symmetric.polls, RANK=symmetric.rank, SIZE=symmetric.size, BLOCK=next_power_of_2(hidden), num_warps=8, **how,
    )  # fmt: skip


def fits(
    params: dict[str, int], x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None,
    group: str = "tp",
) -> bool:  # fmt: skip
    return params["words"] == 0 or _small(x, weight, residual, group)


def unsupported(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None, group: str = "tp"
) -> str | None:
    if (reason := exchange.unsupported(x[:0], group, 1, True)) is not None:
        return reason
    symmetric, hidden = parallel.communicator(group).symmetric, x.shape[-1]
    assert symmetric is not None
    if hidden > WIDEST:
        return f"hidden size {hidden} is over {WIDEST}"
    if not weight.is_contiguous() or (residual is not None and not residual.is_contiguous()):
        return "weight and residual must be contiguous"
    each = cdiv(x.numel() // max(hidden, 1), Symmetric.BLOCKS)
    if each * hidden * x.element_size() > symmetric.room // Symmetric.BLOCKS:
        return f"{x.nbytes} bytes are more than the {symmetric.room} of the symmetric buffer"
    return None


def measured(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None, group: str = "tp"
) -> str | None:
    """For messages of which the all-reduce was measured to be faster: its norm is nearly free."""
    if x.nbytes > parallel.communicator(group).faster.get("all_reduce", -1):
        return ForOthers("not measured to be faster in this group")
    return unsupported(x, weight, eps, residual, group)


def _reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None, group: str = "tp"
) -> torch.Tensor:
    parts = exchange.gathered("all_reduce_rms_norm", x, group)
    out, added = reference([exchange.total(parts)], [weight], eps, [residual], group)[0]
    if residual is not None and added is not None:
        residual.copy_(added)
    return out.to(x.dtype)


all_reduce_rms_norm = define(
    'all_reduce_rms_norm(Tensor x, Tensor weight, float eps, Tensor(a!)? residual=None, str group="tp") -> Tensor',
    fake=lambda x, *_: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    providers=(
        Provider("measured", _triton, supports=measured),
        Provider("composed", _composed, devices=exchange.BOTH),
        Provider("triton", _triton, supports=unsupported, params=({"words": 0}, {"words": 1}), fits=fits),
        Provider("reference", _reference, devices=exchange.BOTH),
    ),
)  # fmt: skip

SPEC = OpSpec(
    name="all_reduce_rms_norm",
    level=2,
    reference=reference,
    op=all_reduce_rms_norm,
    calls=("all_reduce", "rms_norm"),
    ranks="ranks",
    replicated=("weight", "residual"),
    same_bits=True,
    arguments=(
        Tensor("x", "tokens hidden"),
        Tensor("weight", "hidden", mean=1, std=0.1),
        Scalar("eps", default=1e-5),
        Tensor("residual", "tokens hidden", when="residual", mutated=True),
        Scalar("group", default="tp"),
    ),
    outputs=(Tensor("out", "tokens hidden"),),
    axes={"ranks": Axis.option(2), "tokens": Axis.per_call(), "hidden": Axis.width()},
    flops="(ranks + 4) * tokens * hidden",
    traffic="2 * (ranks - 1) * tokens * hidden * itemsize(dtype) / ranks",
    activations=("x", "residual"),
    cases=(
        Case("decode_1", {"tokens": 1, "hidden": 4096, "residual": True}, weight=64, tags=("model",)),
        Case("decode_32", {"tokens": 32, "hidden": 4096, "residual": True}, weight=64, tags=("model",)),
        Case("prefill_2k", {"tokens": 2048, "hidden": 4096, "residual": True}, weight=4, tags=("model",)),
        Case("smollm2", {"tokens": 7, "hidden": 576, "residual": True}, weight=1, tags=("model",)),
        Case("one", {"tokens": 1, "hidden": 1}, "float32", tags=("odd",)),
        Case("odd_63", {"tokens": 63, "hidden": 1000, "residual": True}, "float32", tags=("odd",)),
        Case("odd_1128", {"tokens": 3, "hidden": 1128}, "float16", tags=("odd",)),
        Case("odd_257", {"tokens": 5, "hidden": 257, "residual": True}, tags=("odd",)),
        Case("odd_5", {"tokens": 2, "hidden": 5}, tags=("odd",)),
    ),
)
