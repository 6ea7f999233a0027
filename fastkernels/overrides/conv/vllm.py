"""Drop-in convolutions of vLLM's vision towers (vllm.model_executor.layers.conv): patch embeddings alone."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.conv.patch_embedding import embedded, without_overlap


class _WithoutOverlap(nn.Module):
    applies = staticmethod(without_overlap)
    num_dim: int
    kernel_size: Any
    stride: Any
    padding: Any
    dilation: Any

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] | Literal["same", "valid"] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        *,
        params_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes: dict[str, Any] = {
            "kernel_size": kernel_size,
            "stride": stride,
            "padding": padding,
            "dilation": dilation,
        }
        if padding == "valid":
            sizes["padding"] = 0
        for name, size in sizes.items():
            setattr(self, name, (size,) * self.num_dim if isinstance(size, int) else size)
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.padding_mode = padding_mode
        if self.stride != self.kernel_size or any(self.padding) or {*self.dilation, groups} != {1}:
            raise ValueError(
                f"{type(self).__name__} takes a stride that is the kernel's size, without padding, dilation and groups,"
                f" not {sizes} and {groups} groups"
            )
        made = torch.empty(out_channels, in_channels, *self.kernel_size, dtype=params_dtype)
        self.weight = nn.Parameter(made)
        self.bias = nn.Parameter(made.new_empty(out_channels)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return embedded(self, x)

    forward_native = forward


class VllmConv2dLayer(_WithoutOverlap):
    """Conv2dLayer whose stride is its kernel size, without padding, dilation and groups: x [B, C, H, W]."""

    num_dim = 2


class VllmConv3dLayer(_WithoutOverlap):
    """Conv3dLayer whose stride is its kernel size, as VllmConv2dLayer: x [B, C, T, H, W]."""

    num_dim = 3


def _target(name: str) -> Target:
    path = f"vllm.model_executor.layers.conv:{name}"
    return Target(
        "vllm", path, f"Vllm{name}", "leaf", default=False, note="Off by default: not measured in vLLM."
    )


TARGETS = {"patch_embedding": (_target("Conv2dLayer"), _target("Conv3dLayer"))}
