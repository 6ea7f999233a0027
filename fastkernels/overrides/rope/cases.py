"""Axes and values that the rotary embedding ops share."""

from __future__ import annotations

import torch

from fastkernels.core.declaration import Axis, Call
from fastkernels.core.expressions import Expr
from fastkernels.overrides.rope.rope_tables import cos_sin_table, inverse_frequencies

AXES: dict[str, Axis] = {
    "tokens": Axis.per_call(),
    "heads": Axis.count(),
    "head_size": Axis.width(),
    "rotary_dim": Axis.width(Expr("head_size"), stated=True),
    "max_positions": Axis.width(4096, stated=True),
    "distinct": Axis.counted(lambda a: a.positions.unique().numel(), Expr("min(tokens, max_positions)")),
    "positions": Axis.dtype("int64"),
    "neox": Axis.option(True, stated=True),
}
CONSTRAINTS = ("head_size % 2 == 0", "rotary_dim % 2 == 0", "rotary_dim <= head_size")
TABLE_BYTES = "distinct * rotary_dim * itemsize(cache)"


def random_positions(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = call["max_positions"]
    return torch.randint(0, count, shape, generator=call.generator, device=call.device).to(dtype)


def table(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return cosines and sines of Llama 3's frequencies, [max_positions, rotary_dim]."""
    return cos_sin_table(inverse_frequencies(500000.0, shape[1]), shape[0]).to(call.device, dtype)
