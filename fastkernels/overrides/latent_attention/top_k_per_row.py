"""The positions of the k largest logits of each row, in ascending order: the selection of sparse attention (DSA)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Permutable, Scalar, Tensor, Tolerance
from fastkernels.overrides.kit.launch import next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel


def reference(logits: torch.Tensor, topk: int, row_ends: torch.Tensor | None = None) -> torch.Tensor:
    """logits: [T, N]; row_ends: [T] int32: a row's logits from there on are not read; None: all are.

    Returns [T, topk] int32: positions in ascending order, and -1 after them where fewer can be chosen. -inf and NaN are
    never chosen. Among equal logits the first are.
    """
    _check(logits, topk, row_ends)
    tokens, n = logits.shape
    at = torch.arange(n, device=logits.device)
    open_ = logits > float("-inf")
    if row_ends is not None:
        open_ &= at < row_ends[:, None]
    ranked = torch.where(open_, logits, float("-inf")).sort(dim=-1, descending=True, stable=True).indices
    # Rank the positions, as -inf sorts after everything else; then sort those that were chosen.
    some = ranked[:, :topk]
    chosen = torch.where(open_.gather(1, some), some, n).sort(dim=-1).values
    out = torch.full((tokens, topk), -1, dtype=torch.int32, device=logits.device)
    out[:, : chosen.shape[1]] = torch.where(chosen < n, chosen, -1).to(torch.int32)
    return out


@triton.jit
def _ordered(x, open_):
    """Unsigned integers in the order of floats, 0 for those that cannot be chosen."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0 and 0 are equal
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) ^ -0x80000000
    return tl.where(open_, bits, 0).to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["N"])
def _topk_kernel(
    logits_ptr, ends_ptr, out_ptr, stride, N, K, HAS_ENDS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    # One program per row finds the k-th largest logit digit by digit (radix select), then writes the positions.
    row = tl.program_id(0).to(tl.int64)
    end = N
    if HAS_ENDS:
        end = tl.minimum(tl.load(ends_ptr + row), N)
    at = logits_ptr + row * stride
    bins = tl.arange(0, 256)
    prefix = tl.zeros([], tl.uint32)  # the leading digits of the k-th largest
    wanted = tl.zeros([], tl.int32) + K  # to be chosen among those with this prefix
    for digit in tl.static_range(4):
        counts = tl.zeros([256], tl.int32)
        for begin in range(0, end, BLOCK):
            cols = begin + tl.arange(0, BLOCK)
            x = tl.load(at + cols, mask=cols < end, other=float("-inf")).to(tl.float32)
            open_ = x > float("-inf")
            key = _ordered(x, open_)
            if digit > 0:
                open_ &= (key >> (32 - 8 * digit)) == prefix
            own = ((key >> (24 - 8 * digit)) & 0xFF).to(tl.int32)
            counts += tl.histogram(own, 256, mask=open_).to(tl.int32)
        # Larger digits come first; without enough candidates the digit is 0, below which all keys are.
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
        found = tl.sum((above >= wanted).to(tl.int32), 0)
        wanted -= tl.sum(tl.where(bins == found, above, 0), 0)
        prefix = (prefix << 8) | found.to(tl.uint32)
    written, equal = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for begin in range(0, end, BLOCK):
        cols = begin + tl.arange(0, BLOCK)
        x = tl.load(at + cols, mask=cols < end, other=float("-inf")).to(tl.float32)
        open_ = x > float("-inf")
        key = _ordered(x, open_)
        same = (open_ & (key == prefix)).to(tl.int32)
        early = (same == 1) & (equal + tl.cumsum(same, 0) <= wanted)
        chosen = ((open_ & (key > prefix)) | early).to(tl.int32)
        place = written + tl.cumsum(chosen, 0) - 1
        tl.store(out_ptr + row * K + place, cols, mask=chosen == 1)
        written += tl.sum(chosen, 0)
        equal += tl.sum(same, 0)
    for begin in range(0, K, BLOCK_K):
        rest = begin + tl.arange(0, BLOCK_K)
        tl.store(out_ptr + row * K + rest, -1, mask=(rest >= written) & (rest < K))


def _check(logits: torch.Tensor, topk: int, row_ends: torch.Tensor | None) -> None:
    if logits.dim() != 2:
        raise ValueError(f"top_k_per_row: logits must be [T, N], got {tuple(logits.shape)}")
    if topk < 1:
        raise ValueError(f"top_k_per_row: topk {topk} is not above 0")
    if row_ends is not None and row_ends.shape != logits.shape[:1]:
        raise ValueError(
            f"top_k_per_row: row_ends must be [T] = ({logits.shape[0]},), got {tuple(row_ends.shape)}"
        )


def _supports_triton(logits: torch.Tensor, topk: int, row_ends: torch.Tensor | None = None) -> str | None:
    if logits.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"dtype {logits.dtype} is not float32, float16 or bfloat16"
    if logits.stride(-1) != 1 or (row_ends is not None and row_ends.stride(-1) != 1):
        return "the last dimension of logits and row_ends must be contiguous"
    return None


def _triton(logits: torch.Tensor, topk: int, row_ends: torch.Tensor | None = None) -> torch.Tensor:
    _check(logits, topk, row_ends)
    tokens, n = logits.shape
    out = torch.empty(tokens, topk, dtype=torch.int32, device=logits.device)
    if tokens == 0:
        return out
    launch_kernel(
        _topk_kernel, (tokens,), logits, out if row_ends is None else row_ends, out, logits.stride(0), n, topk,
        HAS_ENDS=row_ends is not None, BLOCK=min(max(next_power_of_2(max(n, 1)), 128), 2048),
        BLOCK_K=min(next_power_of_2(topk), 1024), num_warps=8,
    )  # fmt: skip
    return out


top_k_per_row = define(
    "top_k_per_row(Tensor logits, int topk, Tensor? row_ends=None) -> Tensor",
    fake=lambda logits, topk, row_ends=None: logits.new_empty(logits.shape[0], topk, dtype=torch.int32),
    providers=(
        Provider("triton", _triton, supports=_supports_triton),
        Provider("reference", reference, devices=("cuda", "cpu")),
    ),
)


def _case(name: str, tokens: int, n: int, topk: int, tag: str, dtype: str = "float32", **more: Any) -> Case:
    return Case(name, {"tokens": tokens, "n": n, "topk": topk, **more}, dtype, tags=(tag,))


def _ends(call: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Rows of different lengths, the first and the last among them empty and full."""
    made = (call.rand(*shape) * (call["n"] + 1)).to(dtype)
    made[:1], made[-1:] = 0, call["n"]
    return made


def _equal(args: list[Any]) -> None:
    args[0].fill_(0.5)


def _masked(args: list[Any]) -> None:
    args[0][:, ::2] = float("-inf")


def _zeros(args: list[Any]) -> None:
    args[0].mul_((args[0] > 0.5).to(args[0].dtype))  # both zeros, as behind a ReLU


_EXACT = Tolerance(0.0, 0.0)
SPEC = OpSpec(
    name="top_k_per_row",
    level=1,
    reference=reference,
    op=top_k_per_row,
    cases=(
        _case("decode_1", 1, 16384, 2048, "model", row_ends=True),
        _case("decode_32", 32, 4096, 2048, "model", row_ends=True),
        _case("prefill_4k", 4096, 4096, 2048, "model"),
        _case("one", 1, 1, 1, "odd"),
        _case("odd", 7, 131, 17, "odd", row_ends=True),
        _case("fewer", 3, 5, 9, "odd"),
        _case("long", 2, 5000, 100, "odd", row_ends=True),
        _case("half", 5, 300, 64, "odd", "float16"),
        _case("many_ties", 4, 700, 33, "odd", "bfloat16", row_ends=True),
    ),
    arguments=(
        Tensor("logits", "tokens n"),
        Scalar("topk"),
        Tensor("row_ends", "tokens", "int32", when="row_ends", values=_ends),
    ),
    outputs=(Tensor("positions", "tokens topk", "int32"),),
    axes={"tokens": Axis.per_call(), "n": Axis.per_call(), "topk": Axis.count()},
    permutable=lambda logits, topk, row_ends=None: Permutable((0,) if row_ends is None else (0, 2), (0,)),
    flops="5 * tokens * n",
    extremes={"equal_logits": _equal, "half_masked": _masked, "zeros": _zeros},
    tolerance=dict.fromkeys(("float32", "float16", "bfloat16"), _EXACT),
    batch_invariant=True,
)
