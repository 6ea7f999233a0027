"""Arguments of FP8 linear layers."""

from __future__ import annotations

import torch

from fastkernels.overrides.linear.kernels import linear_fp8_scales as scales

FP8 = torch.float8_e4m3fn


def randn(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def args(m: int = 32, n: int = 48, k: int = 144, kind: int = scales.ROW) -> list[torch.Tensor]:
    size = {
        scales.TENSOR: ((1,), (1,)), scales.ROW: ((m, 1), (n,)),
        scales.BLOCK: ((m, scales.blocks(k)), (scales.blocks(n), scales.blocks(k))),
    }[kind]  # fmt: skip
    return [randn(m, k).to(FP8), randn(n, k, seed=1).to(FP8), torch.rand(*size[0]), torch.rand(*size[1])]
