"""A script for TRITON_INTERPRET=1: compare the norms' kernels with float32 products that are rounded once or twice.

Uses float16, because the interpreter truncates bfloat16. The kernels add squares in a different order than torch, so a
few values in a thousand differ in the last bit; with the wrong number of roundings, one in five differs. At the end,
rows of equal float32 values are normalized: the rounding of their mean must not show.
"""

from __future__ import annotations

import torch

from fastkernels.overrides.diffusion import ada_layer_norm, gated_residual
from fastkernels.overrides.norm import layer_norm, rms_norm
from fastkernels.overrides.quant import rms_norm_quant_fp8
from fastkernels.overrides.rope import rope_store_kvcache

EPS, FEW = 1e-5, 0.01


def some(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


def normed(x: torch.Tensor, weight: torch.Tensor, first: bool) -> torch.Tensor:
    y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)
    y = y.half().float() if first else y
    return (y * weight.float()).half()


def apart(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, first: bool, what: str) -> None:
    for wanted, right in ((first, True), (not first, False)):
        share = float((found != normed(x, weight, wanted)).float().mean())
        assert (share < FEW) == right, f"{what}, cast_x_before_out_mul={wanted}: {share:.1%} differ"


def main() -> None:
    for hidden in (64, 576):  # several rows per program, and one
        x, weight = some(16, hidden, seed=0), some(hidden, seed=1)
        for first in (False, True):
            found = rms_norm._triton(x, weight, EPS, None, None, first)
            apart(found, x, weight, first, f"rms_norm of {hidden}")
    # float8 has fewer bits than float16, so that fewer values differ.
    q = rms_norm_quant_fp8._triton(x, weight, EPS)[0]
    shares = []
    for first in (False, True):
        wanted = rms_norm_quant_fp8.quantize_rows(
            normed(x, weight, first).float(), None, -1, None, 1 / 512, False
        )
        shares.append(int((q.float() != wanted[0].float()).sum()))
    assert shares[0] < shares[1] / 3, f"rms_norm_quant_fp8: {shares} of {q.numel()} values differ"
    heads, size = 4, 64
    query, key, weight = some(16, heads, size, seed=2), some(16, 2, size, seed=3), some(size, seed=4)
    turned, cache = query.clone(), torch.zeros(2, 16, 2, size, dtype=torch.float16)
    table = torch.cat([torch.ones(8, size // 2), torch.zeros(8, size // 2)], dim=-1).half()  # rotates by zero
    rope_store_kvcache._triton(
        torch.zeros(16, dtype=torch.int64), turned, key, key, cache, cache.clone(), torch.arange(16), table, True,
        weight, weight, EPS,
    )  # fmt: skip
    apart(turned, query, weight, False, "rope_store_kvcache's queries")
    apart(cache[0], key, weight, False, "rope_store_kvcache's keys")

    x = torch.full((1, 2, 75), 0.7)  # the sum of 75 of them is rounded
    nothing, one = torch.zeros(1, 75), torch.ones(75)
    for name, y in (
        ("layer_norm", layer_norm._triton(x, None, None, EPS)),
        ("ada_layer_norm", ada_layer_norm._triton(x, nothing, nothing, None, None, EPS)),
        ("gated_residual", gated_residual._triton(x, x, None, None, None, one, None, EPS)[1]),
    ):
        assert float(y.abs().max()) < 1e-6, f"{name} of equal values is {y.flatten()[0]}"


if __name__ == "__main__":
    main()
