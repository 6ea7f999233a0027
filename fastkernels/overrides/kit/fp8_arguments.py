"""Arguments of host functions that quantize: unsupported ones, padding and given outputs."""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.overrides.kit.fp8 import FP8, ValuesAndScales


def refuse(function: str, **given: Any) -> None:
    """Raise ValueError for the first argument that is given: the op does not support any of them."""
    for name, value in given.items():
        if value is not None and value is not False:
            shown = f"Tensor{tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise ValueError(f"{function}: {name}={shown} is not supported; use the host's own function")


def padding(x: torch.Tensor, rows: int | None) -> int:
    """The number of rows that x lacks to `rows`."""
    return max((rows or 0) - x.shape[0], 0)


def padded(found: ValuesAndScales, more: int, per_token: bool) -> ValuesAndScales:
    """The pair with that many more rows, of zeros."""
    if more == 0:
        return found
    q, scales = found
    q = torch.cat((q.view(torch.uint8), q.new_zeros((more, q.shape[1]), dtype=torch.uint8))).view(FP8)
    return q, torch.cat((scales, scales.new_zeros(more, 1))) if per_token else scales


def written(
    found: ValuesAndScales, output_q: torch.Tensor | None, output_s: torch.Tensor | None
) -> ValuesAndScales:
    """The pair, copied into the caller's outputs where given."""
    q, scales = found
    return (
        q if output_q is None else output_q.copy_(q),
        scales if output_s is None else output_s.copy_(scales),
    )
