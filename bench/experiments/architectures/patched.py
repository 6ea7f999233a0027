"""Our kernels in a reference's model: put in, and compared with the reference's own before anything is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fk_bench.core.terminal.text import printable

import fastkernels
from fastkernels.core import registry

# Largest norm of the difference of outputs, over that of the outputs, of models of a few layers
LIMITS = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 6e-2}
# Rounding errors grow with depth. A model may have this multiple of the stock model's own: both are estimates.
MORE = 1.5


class Differs(Exception):
    """The patched model's outputs are not the reference's, or none of our kernels ran."""


@torch.no_grad()
def put_in(
    target: Any, call: Callable[[], Any], dtype: torch.dtype, exact: Callable[[], Any] | None = None
) -> dict[str, float]:
    """Patch a model with every op that its host has a place for. Returns metrics of its rows.

    target  of fastkernels.patch
    call    call(): outputs of the model, one tensor; the same inputs and random numbers each time
    exact   exact(): the outputs of the same model in float32, unpatched. Then the error against them may be MORE times
            the stock model's; without, the difference from the stock model has one of LIMITS

    Raises Differs, and fastkernels.PatchError if nothing is patched.
    """
    wanted = None if exact is None else exact().float().clone()
    stock = call().float().clone()
    report = fastkernels.patch(target, ops=registry.op_names())
    found = call().float()
    report.refresh()
    ran = {row.op: row.calls for row in report.active if row.calls and row.proof != "fell back"}
    print(
        printable(f"patched: {', '.join(f'{op} {n}' for op, n in sorted(ran.items())) or 'nothing'}"),
        flush=True,
    )
    for row in report.active:
        for why, count in row.fallbacks.items():
            print(printable(f"  {row.op} ({row.host_class}) fell back {count} times: {why}"), flush=True)
    if not ran:
        raise Differs("patched, but the model ran none of our kernels")
    if found.shape != stock.shape:
        raise Differs(f"patched: outputs are {list(found.shape)}, those of the reference {list(stock.shape)}")
    name = str(dtype).removeprefix("torch.")
    difference = _distance(found, stock)
    metrics = {"difference": difference, "patched_modules": float(report.patched_modules)}
    if wanted is None:
        if not difference <= LIMITS[dtype]:
            raise Differs(
                f"patched: outputs differ by {difference:.2g} of their norm from the reference's; "
                f"{LIMITS[dtype]:g} is the limit in {name}"
            )
        return metrics
    error, stock_error = _distance(found, wanted), _distance(stock, wanted)
    if not error <= max(MORE * stock_error, LIMITS[torch.float32]):
        raise Differs(
            f"patched: outputs in {name} differ by {error:.2g} of their norm from float32, the reference's by"
            f" {stock_error:.2g}; {MORE:g} times that is the limit"
        )
    return {**metrics, "error": error, "stock_error": stock_error}


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm().clamp_min(1e-30)).item()


def by_value(rows: torch.Tensor) -> torch.Tensor:
    """Detections [B, N, numbers], each number sorted: near ties among random weights change their order."""
    return rows.sort(1).values
