"""What rms_norm_quant_fp8 is tried with: the inputs of a case, its dimensions, bytes and flops, other cases like it."""

from __future__ import annotations

import random
from typing import Any

import torch

from fastkernels.core.shapes import drawn, rows_of, varied
from fastkernels.core.spec import Case
from fastkernels.overrides.kit.fp8 import MIN_ABSMAX


def inputs(case: Case, device: str, generator: torch.Generator) -> list:
    d = case.dims
    width = d["hidden"] + d.get("pad", 0)
    shape = (d["tokens"], d["inner"], width) if "inner" in d else (d["tokens"], width)
    dtype = getattr(torch, case.dtype)

    def randn() -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)[..., : d["hidden"]]

    weight = 1 + 0.1 * torch.randn(d["hidden"], generator=generator, device=device).to(dtype)
    scale = torch.rand(1, generator=generator, device=device) * 0.01 + 0.005 if d.get("static") else None
    residual = randn() if d.get("residual") else None
    scale_ub = torch.full((1,), 2.0, device=device) if d.get("upper_bound") else None
    layout = (d.get("column_major", False), d.get("tma_aligned", False))
    return [randn(), weight, 1e-5, scale, d.get("group", -1), residual, scale_ub, MIN_ABSMAX, *layout]


def dims_of(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None = None,
    group_size: int = -1,
    residual: torch.Tensor | None = None,
    scale_ub: torch.Tensor | None = None,
    min_absmax: float = MIN_ABSMAX,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
) -> dict[str, Any]:
    dims: dict[str, Any] = {**rows_of(x, "inner"), "hidden": x.shape[-1], "group": group_size}
    flags = {
        "static": scale is not None, "residual": residual is not None, "upper_bound": scale_ub is not None,
        "column_major": column_major_scales, "tma_aligned": tma_aligned_scales,
    }  # fmt: skip
    return {**dims, **{name: True for name, value in flags.items() if value}}


def vary(case: Case, rng: random.Random) -> Case:
    def draw() -> dict[str, Any]:
        new, group = drawn(case, rng, ("tokens", "inner"), ("hidden",)), max(case.dims.get("group", 1), 1)
        return {**new, "hidden": max(new["hidden"] // group, 1) * group}

    return varied(case, draw, bytes_moved, flops)


def bytes_moved(case: Case) -> int:
    d = case.dims
    n_rows = d["tokens"] * d.get("inner", 1)
    size = torch.finfo(getattr(torch, case.dtype)).bits // 8
    group = d.get("group", -1)
    scales = 1 if d.get("static") else n_rows * (1 if group < 0 else d["hidden"] // group)
    read = 3 if d.get("residual") else 1
    return n_rows * d["hidden"] * (read * size + 1) + d["hidden"] * size + 4 * scales


def flops(case: Case) -> int:
    return 7 * case.dims["tokens"] * case.dims.get("inner", 1) * case.dims["hidden"]


def zero_tokens(args: list[Any]) -> None:
    args[0][::2] = 0
    if args[5] is not None:
        args[5][::2] = 0


def zero_weight(args: list[Any]) -> None:
    args[1].zero_()
