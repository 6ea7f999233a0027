"""Quantization to float8 e4m3: a scale a tensor, a token or a group of columns (Micikevicius, arXiv 2209.05433)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.shapes import drawn, rows_of, varied
from fastkernels.core.spec import Case, OpSpec, Target, Tolerance
from fastkernels.overrides.kit.fp8 import (
    FP8,
    GROUP_EPS,
    MIN_ABSMAX,
    Pair,
    check,
    empty_outputs,
    laid_out,
    padded,
    quantize_rows,
    refuse,
    written,
)
from fastkernels.overrides.quant.quantize_fp8_sglang import (
    sglang_per_token_group_quant_fp8,
    sglang_per_token_group_quant_fp8_0_5_16,
    sglang_per_token_group_quant_fp8_0_5_17,
    sglang_per_token_quant_fp8,
    sglang_per_token_quant_fp8_0_5_17,
    sglang_scaled_fp8_quant,
    sglang_static_quant_fp8,
)
from fastkernels.overrides.quant.quantize_fp8_triton import quantize_triton, supports_triton

__all__ = [
    "SPEC",
    "VllmQuantFP8",
    "quantize_fp8",
    "reference",
    "sglang_per_token_group_quant_fp8",
    "sglang_per_token_group_quant_fp8_0_5_16",
    "sglang_per_token_group_quant_fp8_0_5_17",
    "sglang_per_token_quant_fp8",
    "sglang_per_token_quant_fp8_0_5_17",
    "sglang_scaled_fp8_quant",
    "sglang_static_quant_fp8",
    "vllm_per_token_group_quant_fp8",
    "vllm_scaled_fp8_quant",
]


def reference(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    group_size: int = 0,
    scale_ub: torch.Tensor | None = None,
    min_absmax: float = MIN_ABSMAX,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    scale_ue8m0: bool = False,
) -> Pair:
    """x: [..., N]. Returns (values [..., N] in float8 e4m3, scales in float32); values * scales is x, about.

    scale       one value that is given; else the largest absolute value, at least min_absmax, becomes 448:
    group_size  of the tensor (0; scales [1]), of each token (-1; [..., 1]) or of each so many columns ([..., N / g])
    scale_ub    one value: no group's largest value counts for more
    column_major_scales, tma_aligned_scales  where scales lie in memory, see empty_outputs
    scale_ue8m0 scales are powers of two, the next above
    A float64 x gives float64 values that are not rounded.
    """
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    return quantize_rows(y, scale, group_size, scale_ub, min_absmax, scale_ue8m0)


def _reference(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    group_size: int = 0,
    scale_ub: torch.Tensor | None = None,
    min_absmax: float = MIN_ABSMAX,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    scale_ue8m0: bool = False,
) -> Pair:
    check("quantize_fp8", x.shape[-1], scale, group_size)
    found = reference(
        x, scale, group_size, scale_ub, min_absmax, column_major_scales, tma_aligned_scales, scale_ue8m0
    )
    per_tensor = scale is not None or group_size == 0
    return laid_out(found, per_tensor, group_size, column_major_scales, tma_aligned_scales)


def _fake(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    group_size: int = 0,
    scale_ub: torch.Tensor | None = None,
    min_absmax: float = MIN_ABSMAX,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    scale_ue8m0: bool = False,
) -> Pair:
    per_tensor = scale is not None or group_size == 0
    return empty_outputs(x.shape, x.device, per_tensor, group_size, column_major_scales, tma_aligned_scales)


quantize_fp8 = define(
    "quantize_fp8(Tensor x, Tensor? scale=None, int group_size=0, Tensor? scale_ub=None,"
    " float min_absmax=0.001953125, bool column_major_scales=False, bool tma_aligned_scales=False,"
    " bool scale_ue8m0=False) -> (Tensor, Tensor)",
    fake=_fake,
    providers=(
        Provider("triton", quantize_triton, devices=("cuda",), supports=supports_triton),
        Provider("reference", _reference, devices=("cuda", "cpu")),
    ),
)


class GroupShape(NamedTuple):
    """Rows and columns that share a scale, as the host's: (-1, -1) the tensor, (1, -1) a token, (1, 128) a group."""

    row: int
    col: int


class VllmQuantFP8(nn.Module):
    """vllm.model_executor.layers.quantization.input_quant_fp8.QuantFP8: x [..., N] -> (values, scales).

    group_shape is the host's GroupShape or any (row, col). use_ue8m0=None is False: powers of two are for Blackwell.
    Raises ValueError for shapes that are neither a tensor, a token nor a group of columns.
    """

    def __init__(
        self,
        static: bool,
        group_shape: GroupShape,
        num_token_padding: int | None = None,
        column_major_scales: bool = False,
        tma_aligned_scales: bool = False,
        use_ue8m0: bool | None = None,
        compile_native: bool = True,
    ):
        super().__init__()
        self.static = static
        self.group_shape = group_shape
        self.num_token_padding = num_token_padding
        self.column_major_scales = column_major_scales
        self.tma_aligned_scales = tma_aligned_scales
        self.use_ue8m0 = bool(use_ue8m0)
        row, col = group_shape
        self.is_group_quant = row == 1 and col >= 1
        self.use_per_token_if_dynamic = (row, col) == (1, -1)
        if self.is_group_quant:
            self.group_size = col
        if static and (row, col) != (-1, -1):
            raise ValueError(f"QuantFP8: static scales of group_shape {tuple(group_shape)} are not supported")
        if not static and not self.is_group_quant and (row, col) not in ((1, -1), (-1, -1)):
            raise ValueError(f"QuantFP8: group_shape {tuple(group_shape)} is not (-1, -1), (1, -1) or (1, n)")

    def forward(
        self,
        x: torch.Tensor,
        scale: torch.Tensor | None = None,
        scale_ub: torch.Tensor | None = None,
        use_triton: bool = False,
    ) -> Pair:
        if (scale is not None) != self.static:
            raise ValueError("QuantFP8: a scale is for static quantization, and only for that")
        if self.is_group_quant:
            layout = (self.column_major_scales, self.tma_aligned_scales, self.use_ue8m0)
            return quantize_fp8(x, None, self.group_size, None, GROUP_EPS, *layout)
        per_token = not self.static and self.use_per_token_if_dynamic
        if scale_ub is not None and not per_token:
            raise ValueError("QuantFP8: scale_ub is for dynamic scales of tokens")
        q, found = quantize_fp8(x, scale, -1 if per_token else 0, scale_ub)
        return padded((q, found if scale is None else scale), self.num_token_padding, per_token)


def vllm_scaled_fp8_quant(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: torch.Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    output: torch.Tensor | None = None,
    group_shape: tuple[int, int] | None = None,
) -> Pair:
    """vllm._custom_ops.scaled_fp8_quant: input [M, N] -> (values [M, N], scales [1] or [M, 1]).

    Raises ValueError for given scales of more than one value.
    """
    per_token = scale is None and use_per_token_if_dynamic
    q, found = quantize_fp8(input, scale, -1 if per_token else 0, scale_ub if per_token else None)
    found = found if scale is None else scale
    return written(padded((q, found), num_token_padding, per_token), output, None)


def vllm_per_token_group_quant_fp8(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    out_q: torch.Tensor | None = None,
    use_ue8m0: bool | None = None,
) -> Pair:
    """vllm...quantization.utils.fp8_utils.per_token_group_quant_fp8: x [..., N] -> (values, scales [..., N / g])."""
    refuse("per_token_group_quant_fp8", dtype=None if dtype == FP8 else dtype)
    layout = (column_major_scales, tma_aligned_scales, bool(use_ue8m0))
    return written(quantize_fp8(x, None, group_size, None, eps, *layout), out_q, None)


def _inputs(case: Case, device: str, generator: torch.Generator) -> list:
    d = case.dims
    shape = (
        (d["tokens"], d["inner"], d["hidden"])
        if "inner" in d
        else (d["tokens"], d["hidden"] + d.get("pad", 0))
    )
    x = torch.randn(*shape, generator=generator, device=device)
    # Tokens of different sizes, as activations have: a scale of another token would show.
    x = (x * torch.rand(*shape[:-1], 1, generator=generator, device=device).mul(6).exp2()).to(
        getattr(torch, case.dtype)
    )
    scale = torch.rand(1, generator=generator, device=device) * 0.1 + 0.05 if d.get("static") else None
    scale_ub = torch.full((1,), 8.0, device=device) if d.get("upper_bound") else None
    layout = [d.get(name, False) for name in ("column_major", "tma_aligned", "ue8m0")]
    group = d.get("group", 0)
    return [x[..., : d["hidden"]], scale, group, scale_ub, GROUP_EPS if group > 0 else MIN_ABSMAX, *layout]


def _dims_of(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    group_size: int = 0,
    scale_ub: torch.Tensor | None = None,
    min_absmax: float = MIN_ABSMAX,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    scale_ue8m0: bool = False,
) -> dict[str, Any]:
    dims: dict[str, Any] = {**rows_of(x, "inner"), "hidden": x.shape[-1]}
    flags = {
        "static": scale is not None, "upper_bound": scale_ub is not None, "column_major": column_major_scales,
        "tma_aligned": tma_aligned_scales, "ue8m0": scale_ue8m0, "group": group_size,
    }  # fmt: skip
    return {**dims, **{name: value for name, value in flags.items() if value}}


def _vary(case: Case, rng: random.Random) -> Case:
    def draw() -> dict[str, Any]:
        new, group = drawn(case, rng, ("tokens", "inner"), ("hidden",)), max(case.dims.get("group", 1), 1)
        return {**new, "hidden": max(new["hidden"] // group, 1) * group}

    return varied(case, draw, SPEC.bytes_moved, SPEC.flops)


def _build(cls: type, args: list[Any]) -> Callable[[], Any]:
    x, scale, group_size, scale_ub, _, column_major, tma_aligned, ue8m0 = args
    shapes = {0: GroupShape(-1, -1), -1: GroupShape(1, -1)}
    shape = GroupShape(-1, -1) if scale is not None else shapes.get(group_size, GroupShape(1, group_size))
    module = cls(scale is not None, shape, None, column_major, tma_aligned, ue8m0)
    return lambda: module(x, scale, scale_ub)


def _bytes(case: Case) -> int:
    d = case.dims
    values = d["tokens"] * d.get("inner", 1) * d["hidden"]
    group = 1 if d.get("static") else d.get("group", 0)
    scales = 1 if group == 0 or d.get("static") else values // (d["hidden"] if group < 0 else group)
    return values * (torch.finfo(getattr(torch, case.dtype)).bits // 8 + 1) + 4 * scales


def _zero_tokens(args: list[Any]) -> None:
    args[0][::2] = 0


def _one_large(args: list[Any]) -> None:
    if args[0].numel():
        args[0][-1, ..., -1] = 3e4


_NOTE = "the hosts' linear layers and MoE kernels bind the function, or hold the module where no instance is found:"
_NOTE += " for forks and for our engine"
_DTYPE = "the default is the host's fp8 type, whose first definition is AMD's; " + _NOTE
_VLLM = "vllm.model_executor.layers.quantization."
_SGLANG = "sglang.kernels.ops.quantization.fp8_kernel:"
_GROUPS = _SGLANG + "sglang_per_token_group_quant_fp8"
_TOKENS = _SGLANG + "sglang_per_token_quant_fp8"

SPEC = OpSpec(
    name="quantize_fp8",
    level=1,
    reference=reference,
    op=quantize_fp8,
    cases=(
        Case("static_32", {"tokens": 32, "hidden": 4096, "static": True}, weight=64, tags=("model",)),
        Case("tensor_8k", {"tokens": 8192, "hidden": 4096}, weight=1, tags=("model",)),
        Case("token_1", {"tokens": 1, "hidden": 4096, "group": -1}, weight=64, tags=("model",)),
        Case("token_32", {"tokens": 32, "hidden": 14336, "group": -1}, weight=32, tags=("model",)),
        Case("token_8k", {"tokens": 8192, "hidden": 4096, "group": -1}, weight=1, tags=("model",)),
        Case("deepseek_32", {"tokens": 32, "hidden": 7168, "group": 128}, weight=61, tags=("model",)),
        Case(
            "deepseek_4k",
            {"tokens": 4096, "hidden": 7168, "group": 128, "column_major": True, "tma_aligned": True},
            tags=("model",),
        ),
        Case("group_63", {"tokens": 63, "hidden": 384, "group": 128}, tags=("odd",)),
        Case("one", {"tokens": 1, "hidden": 1, "group": -1}, dtype="float32", tags=("odd",)),
        Case("token_1000", {"tokens": 63, "hidden": 1000, "group": -1, "upper_bound": True}, tags=("odd",)),
        Case(
            "token_strided",
            {"tokens": 5, "hidden": 1128, "group": -1, "pad": 8},
            dtype="float16",
            tags=("odd",),
        ),
        Case("static_odd", {"tokens": 7, "hidden": 577, "static": True}, tags=("odd",)),
        Case("static_strided", {"tokens": 9, "hidden": 130, "static": True, "pad": 3}, tags=("odd",)),
        Case("tensor_small", {"tokens": 7, "hidden": 63}, dtype="float32", tags=("odd",)),
        Case("tensor_odd", {"tokens": 33, "hidden": 1000}, dtype="float16", tags=("odd",)),
        Case("tensor_strided", {"tokens": 3, "hidden": 1000, "pad": 1}, dtype="float32", tags=("odd",)),
        Case(
            "ue8m0",
            {"tokens": 19, "hidden": 512, "group": 128, "ue8m0": True},
            dtype="float32",
            tags=("odd",),
        ),
        Case(
            "column_major",
            {"tokens": 5, "hidden": 256, "group": 64, "column_major": True, "tma_aligned": True},
            tags=("odd",),
        ),
        Case("group_48", {"tokens": 5, "hidden": 240, "group": 48, "column_major": True}, tags=("odd",)),
        Case("heads", {"tokens": 3, "inner": 5, "hidden": 64, "group": 32}, dtype="float16", tags=("odd",)),
        Case("no_token", {"tokens": 0, "hidden": 256, "group": 128}, tags=("odd",)),
        Case("no_row", {"tokens": 0, "hidden": 64}, tags=("odd",)),
    ),
    inputs=_inputs,
    bytes_moved=_bytes,
    flops=lambda case: 4 * case.dims["tokens"] * case.dims.get("inner", 1) * case.dims["hidden"],
    # Scales to the bit or one beside it. Values are compared with the quotient that is not rounded: half a step of
    # three bits of mantissa, or of the subnormals' 2^-9, and what the scale's last bit may move.
    tolerance={
        **dict.fromkeys(("float32", "float16", "bfloat16"), Tolerance(0.0, 2.5e-7)),
        "float8_e4m3fn": Tolerance(0.98e-3, 0.06251),
    },
    dims_of=_dims_of,
    vary=_vary,
    extremes={"zero_tokens": _zero_tokens, "one_large": _one_large},
    build=_build,
    targets=(
        Target("vllm", _VLLM + "input_quant_fp8:QuantFP8", "VllmQuantFP8", "standalone", note=_NOTE),
        Target("vllm", "vllm._custom_ops:scaled_fp8_quant", "vllm_scaled_fp8_quant", "function", note=_NOTE),
        Target(
            "vllm",
            _VLLM + "utils.fp8_utils:per_token_group_quant_fp8",
            "vllm_per_token_group_quant_fp8",
            "function",
            note=_NOTE,
        ),
        Target(
            "sglang", _GROUPS, "sglang_per_token_group_quant_fp8_0_5_16", "function", "<0.5.17", note=_NOTE
        ),
        Target(
            "sglang",
            _GROUPS,
            "sglang_per_token_group_quant_fp8_0_5_17",
            "function",
            ">=0.5.17,<0.5.23",
            note=_NOTE,
        ),
        Target("sglang", _GROUPS, "sglang_per_token_group_quant_fp8", "function", ">=0.5.23", note=_NOTE),
        Target("sglang", _TOKENS, "sglang_per_token_quant_fp8_0_5_17", "function", "<0.5.23", note=_DTYPE),
        Target("sglang", _TOKENS, "sglang_per_token_quant_fp8", "function", ">=0.5.23", note=_DTYPE),
        Target("sglang", _SGLANG + "static_quant_fp8", "sglang_static_quant_fp8", "function", note=_NOTE),
        Target("sglang", _SGLANG + "scaled_fp8_quant", "sglang_scaled_fp8_quant", "function", note=_NOTE),
    ),
)
