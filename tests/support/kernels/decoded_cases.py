"""Interpret MXFP4 experts whose weights are decoded to memory before the product; print a JSON line for each case."""

from __future__ import annotations

import json

import torch

from fastkernels.core.spec import Case
from fastkernels.overrides.kit import mxfp4
from fastkernels.overrides.moe import biased_gemm
from fastkernels.overrides.moe import fused_experts_swigluoai as op

SIZES = {"tokens": 21, "experts": 5, "topk": 2, "hidden": 64, "intermediate": 96, "mxfp4": True}
TILES = "16/32/32/1/4/2/d"


def unpacked(dtype: torch.dtype) -> bool:
    g = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (3, 5, 48), dtype=torch.uint8, generator=g)
    scales = torch.randint(118, 130, (3, 5, 3), dtype=torch.uint8, generator=g)
    out = torch.full((3, 5, 96), torch.nan, dtype=dtype)
    mxfp4.unpack(packed, scales, out)
    return torch.equal(out, mxfp4.dequantize(packed, scales, dtype))


def error(experts_at_once: int, **more: bool) -> float:
    """The relative error of the op's Triton kernel with so many decoded matrices in memory."""
    biased_gemm.SCRATCH = experts_at_once * 2 * SIZES["intermediate"] * SIZES["hidden"] * 4
    case = Case("experts", {**SIZES, **more}, "float32")
    args = op.SPEC.inputs(case, "cpu", torch.Generator().manual_seed(1))
    want = op.reference(*args)
    return float((op._triton(*args, tiles=TILES) - want).norm() / want.norm())


def main() -> None:
    for dtype in (torch.float32, torch.float16):
        print(json.dumps({"case": f"unpacked {dtype}", "right": unpacked(dtype)}))
    for name, count, more in (
        ("all", 5, {}),
        ("two at a time", 2, {}),
        ("elsewhere", 2, {"elsewhere": True}),
    ):
        print(json.dumps({"case": name, "right": error(count, **more) < 1e-5}))


if __name__ == "__main__":
    main()
