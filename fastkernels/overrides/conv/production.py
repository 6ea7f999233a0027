"""Baselines of this family: PyTorch's kernels (cuDNN), eager and compiled, called with the ops' arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from fastkernels.core.baseline import Baseline, inductor
from fastkernels.overrides.conv import grid_sample as places
from fastkernels.overrides.conv import interpolate as sizes
from fastkernels.overrides.conv import pool as windows
from fastkernels.overrides.conv.epilogue import activated, finished
from fastkernels.overrides.kit.libraries import T, from_torch

Ints = Sequence[int]


def _batch_norm(
    x: T, mean: T, var: T, weight: T | None = None, bias: T | None = None, eps: float = 1e-5, activation: str = "none"
) -> T:  # fmt: skip
    return activated(F.batch_norm(x, mean, var, weight, bias, eps=eps), activation)


def _convolution(
    x: T, weight: T, bias: T | None, stride: Ints, padding: Ints, dilation: Ints, groups: int, transposed: bool,
    output_padding: Ints,
) -> T:  # fmt: skip
    return torch.convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)


def _conv_norm_act(
    x: T, weight: T, bias: T | None, mean: T | None, var: T | None, norm_weight: T | None, norm_bias: T | None,
    residual: T | None, stride: Ints, padding: Ints, dilation: Ints, groups: int, activation: str, eps: float,
    add_first: bool = False,
) -> T:  # fmt: skip
    y = torch.conv2d(x, weight, bias, list(stride), list(padding), list(dilation), groups)
    if mean is not None:
        y = F.batch_norm(y, mean, var, norm_weight, norm_bias, eps=eps)
    return finished(y, activation, residual, add_first)


def _squeeze_excite(
    x: T, reduce_weight: T, expand_weight: T, reduce_bias: T | None, expand_bias: T | None, activation: str, gate: str
) -> T:  # fmt: skip
    h = F.conv2d(x.mean((2, 3), keepdim=True), reduce_weight[:, :, None, None], reduce_bias)
    h = F.conv2d(activated(h, activation), expand_weight[:, :, None, None], expand_bias)
    return x * activated(h, gate)


def _global_response_norm(x: T, weight: T, bias: T, eps: float = 1e-6) -> T:
    norms = x.norm(p=2, dim=1, keepdim=True)
    return x + torch.addcmul(bias, weight, x * (norms / (norms.mean(dim=-1, keepdim=True) + eps)))


def _patch_embedding(x: T, weight: T, bias: T | None = None) -> T:
    flat = x.shape[2] == weight.shape[2] == 1  # images: cuDNN's kernels for two dimensions
    if flat:
        return F.conv2d(x[:, :, 0], weight[:, :, 0], bias, stride=weight.shape[3:]).permute(0, 2, 3, 1)[
            :, None
        ]
    return F.conv3d(x, weight, bias, stride=weight.shape[2:]).permute(0, 2, 3, 4, 1)


def _upsample_conv(x: T, weight: T, bias: T | None = None) -> T:
    return F.conv2d(F.interpolate(x, scale_factor=2.0), weight, bias, padding=1)


def _conv1d_norm_mish(
    x: T, weight: T, bias: T | None, norm_weight: T, norm_bias: T, num_groups: int, eps: float = 1e-5,
    scale: T | None = None, shift: T | None = None, residual: T | None = None,
) -> T:  # fmt: skip
    y = F.conv1d(x, weight, bias, padding=weight.shape[2] // 2)
    y = F.mish(torch.group_norm(y, num_groups, norm_weight, norm_bias, eps))  # F.group_norm refuses one value
    if scale is not None and shift is not None:
        y = scale[:, :, None] * y + shift[:, :, None]
    return y if residual is None else y + residual


BASELINES: dict[str, tuple[Baseline, ...]] = {
    "batch_norm": (*from_torch(_batch_norm), inductor("batch_norm")),
    "conv1d_norm_mish": (*from_torch(_conv1d_norm_mish), inductor("conv1d_norm_mish")),
    "conv_norm_act": (*from_torch(_conv_norm_act), inductor("conv_norm_act")),
    "convolution": from_torch(_convolution),
    "global_response_norm": (*from_torch(_global_response_norm), inductor("global_response_norm")),
    "grid_sample": from_torch(places.reference),
    "interpolate": (*from_torch(sizes.reference), inductor("interpolate")),
    "patch_embedding": from_torch(_patch_embedding),
    "pool": from_torch(windows.reference),
    "squeeze_excite": (*from_torch(_squeeze_excite), inductor("squeeze_excite")),
    "upsample_conv": from_torch(_upsample_conv),
}
