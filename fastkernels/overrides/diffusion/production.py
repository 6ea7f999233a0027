"""Baselines of this family: what diffusers runs, eagerly and compiled, called with the ops' arguments."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastkernels.core.baseline import Baseline, inductor
from fastkernels.overrides.diffusion import geglu as gated
from fastkernels.overrides.diffusion import rope_axes as positions
from fastkernels.overrides.diffusion import timestep_embedding as steps
from fastkernels.overrides.kit.libraries import T, from_torch


def _ada_layer_norm(
    x: T, scale: T, shift: T, weight: T | None = None, bias: T | None = None, eps: float = 1e-6, front: T | None = None
) -> T:  # fmt: skip
    x = x if front is None else torch.cat((front, x), dim=1)
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps) * (1 + scale[:, None]) + shift[:, None]


def _gated_residual(
    residual: T, x: T, gate: T | None, scale: T | None = None, shift: T | None = None, weight: T | None = None,
    bias: T | None = None, eps: float = 1e-6, front: T | None = None,
) -> tuple[T, T]:  # fmt: skip
    residual = residual if front is None else torch.cat((front, residual), dim=1)
    y = residual + (x if gate is None else gate[:, None] * x)
    if scale is None or shift is None:
        normed = y.new_empty(y.shape[0], 0, y.shape[2])
        return y, normed if weight is None else F.layer_norm(y, y.shape[-1:], weight, bias, eps)
    return y, _ada_layer_norm(y, scale, shift, weight, bias, eps)


def _group_norm(
    x: T, num_groups: int, weight: T | None = None, bias: T | None = None, eps: float = 1e-5, silu: bool = False,
    shift: T | None = None,
) -> T:  # fmt: skip
    x = x if shift is None else x + shift.reshape(*shift.shape, *[1] * (x.dim() - 2))
    y = torch.group_norm(x, num_groups, weight, bias, eps)
    return F.silu(y) if silu else y


BASELINES: dict[str, tuple[Baseline, ...]] = {
    "ada_layer_norm": (*from_torch(_ada_layer_norm), inductor("ada_layer_norm")),
    "gated_residual": (*from_torch(_gated_residual), inductor("gated_residual")),
    "geglu": (*from_torch(gated.reference), inductor("geglu")),
    "group_norm": (*from_torch(_group_norm), inductor("group_norm")),
    "rope_axes": (*from_torch(positions.reference), inductor("rope_axes")),
    "timestep_embedding": (*from_torch(steps.reference), inductor("timestep_embedding")),
}
