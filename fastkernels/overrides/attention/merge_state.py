"""Merge two partial attentions of the same queries over different keys (arXiv 2501.01005, section 2.2)."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from fastkernels.core.case import Case, Tolerance
from fastkernels.core.declaration import Axis, Call, Scalar, Tensor, uniform
from fastkernels.core.dispatch import Provider, define
from fastkernels.core.expressions import Expr
from fastkernels.core.spec import OpSpec
from fastkernels.overrides.kit.fp8 import FP8, fp8_inverse, quantized, to_fp8
from fastkernels.overrides.kit.launch import cdiv, next_power_of_2
from fastkernels.overrides.kit.overlap import follow, launch_kernel
from fastkernels.overrides.kit.rows import FLOATS


def reference(
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output: torch.Tensor,
    output_lse: torch.Tensor | None = None,
    tokens_with_context: int | None = None,
    output_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """outputs: [T, Q, D]; lse: [T, Q], natural logarithms of the sums of exponentials.

    A side without keys has lse -inf (inf in FlashAttention 2) and is ignored, whatever its output holds; if both sides
    have none, the output is 0 and the lse -inf. Tokens from tokens_with_context on take the suffix unchanged.
    output_scale, one value: the output is divided by it and stored as float8 e4m3. Returns the new values of output (in
    its dtype; float64 and unrounded for a float64 prefix_output) and of output_lse (None if that is None).
    """
    acc = torch.promote_types(prefix_output.dtype, torch.float32)
    lses = torch.stack((prefix_lse, suffix_lse)).to(acc)
    lses = torch.where(lses == math.inf, -math.inf, lses)
    most = lses.amax(dim=0)
    most = torch.where(most == -math.inf, 0.0, most)
    parts = (lses - most).exp()
    total = parts.sum(dim=0)
    weights = (parts / torch.where(total == 0, 1.0, total)).unsqueeze(-1)
    sides = torch.stack((prefix_output, suffix_output)).to(acc)
    merged = torch.where(weights == 0, 0.0, sides * weights).sum(dim=0)
    lse = total.log() + most
    if tokens_with_context is not None:
        alone = torch.arange(len(merged), device=merged.device)[:, None] >= tokens_with_context
        merged = torch.where(alone.unsqueeze(-1), sides[1], merged)
        lse = torch.where(alone, suffix_lse.to(acc), lse)
    new_lse = None if output_lse is None else lse.to(output_lse.dtype)
    if output_scale is not None:
        return quantized(merged, output_scale.to(acc)), new_lse
    return merged.to(output.dtype), new_lse


@triton.jit(do_not_specialize=["p_lse1", "s_lse1", "out_lse1", "T", "with_context"])
def _merge_state_kernel(
    p_ptr, p_lse_ptr, s_ptr, s_lse_ptr, out_ptr, out_lse_ptr, scale_ptr, p_stride0, p_stride1, p_lse0, p_lse1,
    s_stride0, s_stride1, s_lse0, s_lse1, out_stride0, out_stride1, out_lse0, out_lse1, T, Q, D, with_context,
    HAS_LSE: tl.constexpr, HAS_SCALE: tl.constexpr, BESIDE: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    follow(OVERLAP)
    if BESIDE:  # the heads of a token are contiguous; otherwise these strides are the number of tokens
        p_lse1, s_lse1, out_lse1 = 1, 1, 1
    # A program has a tile of ROWS (token, head) pairs: HEADS heads, which divide Q, of each of its tokens.
    tiles = Q // HEADS
    pair = tl.arange(0, ROWS)
    token = (tl.program_id(0) // tiles * (ROWS // HEADS) + pair // HEADS).to(tl.int64)
    head = (tl.program_id(0) % tiles * HEADS + pair % HEADS).to(tl.int64)
    there = token < T
    alone = token >= with_context
    # Both sides are loaded together with their lse, without waiting for them. A side without keys is therefore read,
    # too, but masked below: not even a NaN comes from it.
    cols = tl.arange(0, BLOCK)
    mask = there[:, None] & (cols < D)[None, :]
    p_at = p_ptr + (token * p_stride0 + head * p_stride1)[:, None] + cols[None, :]
    s_at = s_ptr + (token * s_stride0 + head * s_stride1)[:, None] + cols[None, :]
    p = tl.load(p_at, mask=mask & (token < with_context)[:, None], other=0.0)
    s = tl.load(s_at, mask=mask, other=0.0)
    minus_inf = float("-inf")
    p_lse = tl.load(p_lse_ptr + token * p_lse0 + head * p_lse1, mask=there, other=minus_inf).to(tl.float32)
    given = tl.load(s_lse_ptr + token * s_lse0 + head * s_lse1, mask=there, other=minus_inf).to(tl.float32)
    p_lse = tl.where(alone | (p_lse == float("inf")), minus_inf, p_lse)
    s_lse = tl.where(given == float("inf"), minus_inf, given)
    most = tl.maximum(p_lse, s_lse)
    most = tl.where(most == minus_inf, 0.0, most)
    p_part = tl.exp(p_lse - most)
    s_part = tl.exp(s_lse - most)
    both = p_part + s_part
    if HAS_LSE:
        lse = tl.where(both == 0.0, minus_inf, tl.log(tl.where(both == 0.0, 1.0, both)) + most)
        lse = tl.where(alone, given, lse)
        tl.store(out_lse_ptr + token * out_lse0 + head * out_lse1, lse, mask=there)
    inverse = 1.0 / tl.where(both == 0.0, 1.0, both)
    p_weight = (p_part * inverse)[:, None]
    s_weight = tl.where(alone, 1.0, s_part * inverse)[:, None]
    p_counts = tl.where(p_weight != 0.0, p.to(tl.float32), 0.0)
    s_counts = tl.where(s_weight != 0.0, s.to(tl.float32), 0.0)
    out = p_counts * p_weight + s_counts * s_weight
    out_at = out_ptr + (token * out_stride0 + head * out_stride1)[:, None] + cols[None, :]
    if HAS_SCALE:
        out = out * fp8_inverse(tl.load(scale_ptr).to(tl.float32))
        tl.store(out_at, to_fp8(out), mask=mask)
    else:
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=mask)


def _check(
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output: torch.Tensor,
    output_lse: torch.Tensor | None,
    output_scale: torch.Tensor | None,
) -> None:
    shape = prefix_output.shape
    if prefix_output.dim() != 3:
        raise ValueError(f"merge_state: prefix_output must be [T, Q, D], got shape {tuple(shape)}")
    for name, t, wanted in (
        ("suffix_output", suffix_output, shape), ("output", output, shape), ("prefix_lse", prefix_lse, shape[:2]),
        ("suffix_lse", suffix_lse, shape[:2]), ("output_lse", output_lse, shape[:2]),
    ):  # fmt: skip
        if t is not None and t.shape != wanted:
            raise ValueError(f"merge_state: {name} has shape {tuple(t.shape)}, not {tuple(wanted)}")
    if (output.dtype == FP8) != (output_scale is not None):
        raise ValueError(
            f"merge_state: an output of {output.dtype} with output_scale {output_scale is not None}"
        )


def _supports_triton(
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output: torch.Tensor,
    *_: Any,
) -> str | None:
    for name, t in (("prefix_output", prefix_output), ("suffix_output", suffix_output), ("output", output)):
        if t.dtype not in FLOATS and not (t is output and t.dtype == FP8):
            return f"{name} has dtype {t.dtype}"
        if t.stride(-1) != 1 and t.shape[-1] != 1:
            return f"{name} has strides {t.stride()}: a head must be contiguous"
    if prefix_output.shape[-1] > 1024:
        return f"heads of {prefix_output.shape[-1]} are over 1024"
    return None


def _triton(
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output: torch.Tensor,
    output_lse: torch.Tensor | None = None,
    tokens_with_context: int | None = None,
    output_scale: torch.Tensor | None = None,
) -> None:
    _check(prefix_output, prefix_lse, suffix_output, suffix_lse, output, output_lse, output_scale)
    if output.numel() == 0:
        return
    tokens, heads, size = output.shape
    total, block = tokens * heads, next_power_of_2(size)
    # A tile of 1024 values per side; the few heads of a decode step are spread over an H200's 132 SMs first.
    n_rows = max(1, min(1024 // block, next_power_of_2(cdiv(total, 512))))
    # Where tokens are contiguous in the lse, 8 of them fill a sector of 32 bytes.
    adjacent = 8 if prefix_lse.stride(0) == 1 else 1
    n_heads = min(max(n_rows // adjacent, 1), heads & -heads)  # a power of 2 that divides the heads
    lse0, lse1 = output_lse.stride() if output_lse is not None else (0, 0)
    grid = (cdiv(tokens, n_rows // n_heads) * (heads // n_heads),)
    launch_kernel(
        _merge_state_kernel, grid,
        prefix_output, prefix_lse, suffix_output, suffix_lse, output, output_lse, output_scale,
        *prefix_output.stride()[:2], *prefix_lse.stride(), *suffix_output.stride()[:2], *suffix_lse.stride(),
        *output.stride()[:2], lse0, lse1, tokens, heads, size,
        tokens if tokens_with_context is None else tokens_with_context, HAS_LSE=output_lse is not None,
        HAS_SCALE=output_scale is not None, BESIDE=prefix_lse.stride(1) == suffix_lse.stride(1) == 1 == (lse1 or 1),
        ROWS=n_rows, HEADS=n_heads, BLOCK=block,
        num_warps=max(n_rows * block // 1024, 1),
    )  # fmt: skip


def _reference(
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output: torch.Tensor,
    output_lse: torch.Tensor | None = None,
    tokens_with_context: int | None = None,
    output_scale: torch.Tensor | None = None,
) -> None:
    args = (prefix_output, prefix_lse, suffix_output, suffix_lse, output, output_lse)
    _check(*args, output_scale)
    out, lse = reference(*args, tokens_with_context, output_scale)
    output.copy_(out)
    if output_lse is not None and lse is not None:
        output_lse.copy_(lse)


merge_state = define(
    "merge_state(Tensor prefix_output, Tensor prefix_lse, Tensor suffix_output, Tensor suffix_lse,"
    " Tensor(a!) output, Tensor(b!)? output_lse=None, int? tokens_with_context=None,"
    " Tensor? output_scale=None) -> ()",
    fake=lambda *args: None,
    providers=(
        Provider("triton", _triton, devices=("cuda",), supports=_supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


def _no_key(args: list[Any]) -> None:
    """Make some tokens see no key on one side, the other, or both; those sides hold garbage."""
    for side, tokens in (
        (0, slice(0, None, 3)),
        (2, slice(1, None, 3)),
        (0, slice(2, None, 6)),
        (2, slice(2, None, 6)),
    ):
        args[side][tokens] = 3e4
        args[side + 1][tokens] = -math.inf
    args[1][::6] = math.inf


def _far_apart(args: list[Any]) -> None:
    """Make one side outweigh the other by more than float32 can hold."""
    args[1][::2] = 1e4
    args[3][1::2] = 1e4


def _lse(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return 3 * (call.randn(*reversed(shape)).t() if call["heads_first"] else call.randn(*shape)) + 5


def _values(call: Call) -> dict[str, torch.Tensor]:
    if not call["empty"]:
        return {}
    names = "prefix_output", "prefix_lse", "suffix_output", "suffix_lse"
    sides = [call.tensor(name) for name in names]
    _no_key(sides)
    return dict(zip(names, sides, strict=True))


def _case(name: str, tag: str, dtype: str = "bfloat16", weight: float = 1.0, **dims: Any) -> Case:
    return Case(name, dims, dtype, weight, (tag,))


_SHAPE, _ELEMENTS = "tokens heads head_size", "tokens * heads * head_size"
SPEC = OpSpec(
    name="merge_state",
    level=1,
    by_default=True,
    reference=reference,
    op=merge_state,
    cases=(
        _case("cascade_32", "model", weight=32, tokens=32, heads=32, head_size=128, heads_first=True),
        _case("prefill_4k", "model", tokens=4096, heads=32, head_size=128, heads_first=True),
        _case("deepseek_4k", "model", tokens=4096, heads=128, head_size=128, heads_first=True, context=2048),
        _case("sglang_512", "model", tokens=512, heads=16, head_size=512),
        _case("odd_63", "odd", tokens=63, heads=5, head_size=80),
        _case("one", "odd", "float32", tokens=1, heads=1, head_size=1),
        _case(
            "heads_first", "odd", "float16", tokens=7, heads=3, head_size=128, heads_first=True, no_lse=True
        ),
        _case("context", "odd", tokens=9, heads=4, head_size=64, heads_first=True, context=5),
        _case("no_context", "odd", "float32", tokens=3, heads=2, head_size=33, context=0),
        _case("empty", "odd", "float32", tokens=13, heads=3, head_size=64, empty=True),
        _case("fp8", "odd", tokens=6, heads=4, head_size=96, fp8=True, context=4),
        _case("strided", "odd", "float16", tokens=5, heads=2, head_size=48, pad=3, empty=True),
        _case("no_token", "odd", tokens=0, heads=4, head_size=64),
    ),
    arguments=(
        Tensor("prefix_output", _SHAPE, pad="pad", bytes="merged * heads * head_size * itemsize(dtype)"),
        Tensor("prefix_lse", "tokens heads", "float32", values=_lse, bytes="4 * merged * heads"),
        Tensor("suffix_output", _SHAPE, pad="pad"),
        Tensor("suffix_lse", "tokens heads", "float32", values=_lse),
        # Written, not read
        Tensor("output", _SHAPE, "stored", mutated=True, pad="pad", bytes=f"{_ELEMENTS} * itemsize(stored)"),
        Tensor(
            "output_lse",
            "tokens heads",
            "float32",
            when="not no_lse",
            mutated=True,
            values=_lse,
            bytes="0 if no_lse else 4 * tokens * heads",
        ),
        Scalar("tokens_with_context", "context", default=None),
        Tensor("output_scale", "1", "float32", when="fp8", values=uniform(0.005, 0.025), bytes="0"),
    ),
    axes={
        "tokens": Axis.per_call(),
        "heads": Axis.count(),
        "head_size": Axis.width(),
        "context": Axis.per_call(None, draw=lambda n, rng: None if n is None else rng.randint(0, 2 * n)),
        "merged": Axis(Expr("tokens if context is None else min(context, tokens)"), varies=True),
        "stored": Axis.dtype(Expr("'float8_e4m3fn' if fp8 else dtype")),
        "heads_first": Axis.option(False),  # of the lse in memory
        "empty": Axis.option(False),  # some tokens saw no key
    },
    constraints=("(context or 0) <= tokens",),
    values=_values,
    flops="3 * tokens * heads * head_size",
    tolerance={
        "float32": Tolerance(1e-5, 1e-5),
        "float16": Tolerance(2e-3, 2e-3),
        "bfloat16": Tolerance(1.6e-2, 1.6e-2),
        "float8_e4m3fn": Tolerance(0.98e-3, 0.0626),  # half a step
    },
    activations=("prefix_output", "suffix_output"),
    extremes={"no_key": _no_key, "far_apart": _far_apart},
)
