"""The sum of all ranks' tensors and the residual, its RMS norm, and the norm in float8 e4m3: what a product takes."""

from __future__ import annotations

import torch

from fastkernels.core.dispatch import Provider, define
from fastkernels.core.spec import Axis, Case, OpSpec, Scalar, Tensor, Tolerance, uniform
from fastkernels.overrides.collective import all_reduce_rms_norm as normed
from fastkernels.overrides.collective import exchange
from fastkernels.overrides.collective.all_reduce import all_reduce
from fastkernels.overrides.kit.fp8 import (
    MIN_ABSMAX,
    ValuesAndScales,
    check,
    empty_outputs,
    fp8_refusal,
    quantize_rows,
)
from fastkernels.overrides.quant import rms_norm_quant_fp8 as quant

NAME = "all_reduce_rms_norm_quant_fp8"


def reference(
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    eps: float,
    scale: list[torch.Tensor | None] | None = None,
    residual: list[torch.Tensor | None] | None = None,
    group: str = "tp",
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """x: [T, H] of each rank; weight [H], scale [1] and residual [T, H] are the same in all.

    Returns for each rank (values [T, H] in float8 e4m3, scales in float32: the given one, or one per token [T, 1];
    the sum and the residual in x's dtype). The norm is rounded to x's dtype before it is quantized. A float64 x gives
    float64 values that are not rounded. A rank's scale maps a token's absolute maximum, at least 1 / 512, to 448.
    """
    summed = exchange.total(x)
    found = []
    none: list[torch.Tensor | None] = [None] * len(x)
    for t, w, s, r in zip(x, weight, scale or none, residual or none, strict=True):
        h = summed if r is None else summed + r.to(summed.dtype)
        y = h * torch.rsqrt(h.pow(2).mean(dim=-1, keepdim=True) + eps) * w.to(summed.dtype)
        values, scales = quantize_rows(y.to(t.dtype).to(summed.dtype), s, -1, None, MIN_ABSMAX, False)
        found.append((values, scales, None if r is None else h.to(t.dtype)))
    return found


def _composed(
    x: torch.Tensor, weight: torch.Tensor, eps: float, scale: torch.Tensor | None = None,
    residual: torch.Tensor | None = None, group: str = "tp",
) -> ValuesAndScales:  # fmt: skip
    return quant.rms_norm_quant_fp8(all_reduce(x, group), weight, eps, scale, -1, residual)


def _triton(
    x: torch.Tensor, weight: torch.Tensor, eps: float, scale: torch.Tensor | None = None,
    residual: torch.Tensor | None = None, group: str = "tp", words: int = -1,
) -> ValuesAndScales:  # fmt: skip
    check(NAME, x.shape[-1], scale, -1)
    return normed.launch_quantized(NAME, x, weight, eps, scale, residual, group, words)


def _fits(
    params: dict[str, int], x: torch.Tensor, weight: torch.Tensor, eps: float, scale: torch.Tensor | None = None,
    residual: torch.Tensor | None = None, group: str = "tp",
) -> bool:  # fmt: skip
    return normed.fits(params, x, weight, eps, residual, group)


def _unsupported(
    x: torch.Tensor, weight: torch.Tensor, eps: float, scale: torch.Tensor | None = None,
    residual: torch.Tensor | None = None, group: str = "tp",
) -> str | None:  # fmt: skip
    return fp8_refusal(x.device) or normed.unsupported(x, weight, eps, residual, group)


def _measured(
    x: torch.Tensor, weight: torch.Tensor, eps: float, scale: torch.Tensor | None = None,
    residual: torch.Tensor | None = None, group: str = "tp",
) -> str | None:  # fmt: skip
    """For messages of which the all-reduce was measured to be faster, see all_reduce_rms_norm."""
    return fp8_refusal(x.device) or normed.measured(x, weight, eps, residual, group)


def _reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, scale: torch.Tensor | None = None,
    residual: torch.Tensor | None = None, group: str = "tp",
) -> ValuesAndScales:  # fmt: skip
    check(NAME, x.shape[-1], scale, -1)
    parts = exchange.gathered(NAME, x, group)
    n = len(parts)
    values, scales, added = reference(parts, [weight] * n, eps, [scale] * n, [residual] * n, group)[0]
    if residual is not None and added is not None:
        residual.copy_(added)
    return values, scales


def _fake(
    x: torch.Tensor, weight: torch.Tensor, eps: float, scale: torch.Tensor | None = None,
    residual: torch.Tensor | None = None, group: str = "tp",
) -> ValuesAndScales:  # fmt: skip
    return empty_outputs(x.shape, x.device, scale is not None, -1)


all_reduce_rms_norm_quant_fp8 = define(
    "all_reduce_rms_norm_quant_fp8(Tensor x, Tensor weight, float eps, Tensor? scale=None,"
    ' Tensor(a!)? residual=None, str group="tp") -> (Tensor, Tensor)',
    fake=_fake,
    providers=(
        Provider("measured", _triton, supports=_measured),
        Provider("composed", _composed, devices=exchange.BOTH),
        Provider("triton", _triton, supports=_unsupported, params=({"words": 0}, {"words": 1}), fits=_fits),
        Provider("reference", _reference, devices=exchange.BOTH),
    ),
)

SPEC = OpSpec(
    name=NAME,
    level=2,
    reference=reference,
    op=all_reduce_rms_norm_quant_fp8,
    calls=("all_reduce", "rms_norm_quant_fp8"),
    ranks="ranks",
    replicated=("weight", "scale", "residual"),
    same_bits=True,
    arguments=(
        Tensor("x", "tokens hidden"),
        Tensor("weight", "hidden", mean=1, std=0.1),
        Scalar("eps", default=1e-5),
        Tensor("scale", "1", "float32", when="static", values=uniform(0.005, 0.015), bytes="0"),
        Tensor("residual", "tokens hidden", when="residual", mutated=True),
        Scalar("group", default="tp"),
    ),
    outputs=(
        Tensor("values", "tokens hidden", "float8_e4m3fn"),
        Tensor("scales", {"static": "1", "": "tokens 1"}, "float32"),
    ),
    axes={"ranks": Axis.option(2), "tokens": Axis.per_call(), "hidden": Axis.width()},
    flops="(ranks + 6) * tokens * hidden",
    traffic="2 * (ranks - 1) * tokens * hidden * itemsize(dtype) / ranks",
    activations=("x", "residual"),
    # Values: half a float8 step, and where sum and residual cancel, half a step of a sum in bfloat16: 448 / 512 twice.
    tolerance={
        "float32": Tolerance(1e-6, 2e-6),
        "float16": Tolerance(2e-3, 2e-3),
        "bfloat16": Tolerance(1.6e-2, 1.6e-2),
        "float8_e4m3fn": Tolerance(1.8, 0.08),
    },
    cases=(
        Case("decode_1", {"tokens": 1, "hidden": 4096, "residual": True}, weight=64, tags=("model",)),
        Case("decode_32", {"tokens": 32, "hidden": 4096, "residual": True}, weight=64, tags=("model",)),
        Case(
            "static_32",
            {"tokens": 32, "hidden": 4096, "residual": True, "static": True},
            weight=64,
            tags=("model",),
        ),
        Case("prefill_2k", {"tokens": 2048, "hidden": 4096, "residual": True}, weight=4, tags=("model",)),
        Case(
            "smollm2",
            {"tokens": 7, "hidden": 576, "residual": True, "static": True},
            weight=1,
            tags=("model",),
        ),
        Case("one", {"tokens": 1, "hidden": 1}, "float32", tags=("odd",)),
        Case("odd_63", {"tokens": 63, "hidden": 1000, "residual": True}, "float32", tags=("odd",)),
        Case("odd_1128", {"tokens": 3, "hidden": 1128}, "float16", tags=("odd",)),
        Case("odd_257", {"tokens": 5, "hidden": 257, "residual": True}, tags=("odd",)),
        Case("odd_5", {"tokens": 2, "hidden": 5, "static": True}, tags=("odd",)),
    ),
)
