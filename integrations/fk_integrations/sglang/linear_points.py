"""Linear layers as a patch measures them in an engine with little free memory: no weight is made or copied."""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.core import registry
from fastkernels.core.case import Case
from fastkernels.verify.measure import LEAST_CALLS, Point, leave_room, several

SPARE = 192 << 20  # bytes that stay free, of which cuBLAS takes its workspaces


def calls(
    point: Point, device: torch.device, generator: torch.Generator, cold_bytes: int
) -> tuple[list[Any], list[list[Any]]] | None:
    """See measure.Live.calls. None if the layers' weights would stay in L2."""
    spec = registry.get(point.op)
    key = spec.op.key
    (n, k, dtype), (m,) = point.shape, point.sizes
    layers = list({layer.weight.data_ptr(): layer for layer in point.modules}.values())
    size = n * k * dtype.itemsize
    if not layers or size * len(layers) < cold_bytes:
        return None
    leave_room(device, (LEAST_CALLS * n + k) * m * dtype.itemsize, SPARE)
    case = Case("verified", key.dims(N=1, K=k, dtype=dtype, M=m), str(point.named()[0]["dtype"]))
    x = spec.inputs(case, device.type if device.index is None else str(device), generator)
    made = [key.own(layer, x) for layer in layers]
    count = several(cold_bytes, size)
    return made[0], [made[i % len(made)] for i in range(count)]
