"""Drop-in layers of transformers' RT-DETR: convolutions, norms and activations stay the host's modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.conv.conv_norm_act import conv_norm_act
from fastkernels.overrides.conv.plain_conv import as_is, moves, not_conv
from fastkernels.overrides.conv.timm_activations import activation_of, not_activation
from fastkernels.overrides.linear.modules import changed

FROZEN_EPS = 1e-5  # of RTDetrV2FrozenBatchNorm2d, which has no field for it
BY_NAME = {"relu": nn.ReLU, "silu": nn.SiLU, "gelu": nn.GELU, None: nn.Identity}


# Of transformers.activations, in the names of conv/epilogue.py
OWN = {"SiLUActivation": "silu", "GELUActivation": "gelu", "NewGELUActivation": "gelu_tanh"}


def _activation_of(act: Any) -> str | None:
    """The activation that a module computes, or None: another one, or changed code."""
    found = OWN.get(type(act).__name__)
    return activation_of(act) if found is None or changed(act) else found


def _not_activation(act: Any) -> str | None:
    return None if _activation_of(act) is not None else not_activation(act)


def _act(name: Any) -> nn.Module:
    if name not in BY_NAME:
        raise ValueError(f"activation={name!r} is not supported, only {', '.join(map(str, BY_NAME))}")
    return BY_NAME[name]()


def _not_norm(norm: Any) -> str | None:
    """Return why the op does not compute this batch norm, or None."""
    name = type(norm).__name__
    if not name.endswith(("BatchNorm2d", "FrozenBatchNorm2d")) or getattr(norm, "running_mean", None) is None:
        return f"its norm is a {name}, or has no stored statistics"
    if not isinstance(norm, nn.BatchNorm2d) and "Frozen" not in name:
        return f"its norm is a {name}"
    return None


def _not_pair(conv: Any, norm: Any, act: Any) -> str | None:
    """Return why the op does not compute a convolution with its norm and activation, or None."""
    if (why := not_conv(conv) or _not_norm(norm)) is not None:
        return why
    return _not_activation(act)


def _conv_norm(
    conv: Any, norm: Any, act: Any, x: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """act(norm(conv(x)) + residual): one op where all are plain."""
    frozen = not isinstance(norm, nn.BatchNorm2d)
    plain = _not_pair(conv, norm, act) is None and as_is(conv, x, conv.weight.dtype)
    if not plain or changed(norm) or (norm.training and not frozen):
        y = norm(conv(x))
        return act(y if residual is None else y + residual)
    return conv_norm_act(
        x, conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.weight, norm.bias, residual, *moves(conv),
        _activation_of(act), FROZEN_EPS if frozen else norm.eps, True,
    )  # fmt: skip


_NONE = nn.Identity()


class TransformersRTDetrV2ConvNormLayer(nn.Module):
    """RTDetrV2ConvNormLayer, also of RT-DETR and D-FINE: hidden_state [B, C, H, W]."""

    def __init__(self, config, in_channels, out_channels, kernel_size, stride, padding=None, activation=None):
        super().__init__()
        padding = (kernel_size - 1) // 2 if padding is None else padding
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding=padding, bias=False)
        self.norm = nn.BatchNorm2d(out_channels, config.batch_norm_eps)
        self.activation = _act(activation)

    @staticmethod
    def supports(module: Any) -> str | None:
        return _not_pair(module.conv, module.norm, module.activation)

    def forward(self, hidden_state):
        return _conv_norm(self.conv, self.norm, self.activation, hidden_state)


class TransformersRTDetrV2RepVggBlock(nn.Module):
    """RTDetrV2RepVggBlock, also of RT-DETR: the activation of two convolutions with norms, added."""

    def __init__(self, config: Any):
        super().__init__()
        width = int(config.encoder_hidden_dim * config.hidden_expansion)
        self.conv1 = TransformersRTDetrV2ConvNormLayer(config, width, width, 3, 1, padding=1)
        self.conv2 = TransformersRTDetrV2ConvNormLayer(config, width, width, 1, 1, padding=0)
        self.activation = _act(config.activation_function)

    @staticmethod
    def supports(module: Any) -> str | None:
        own = (TransformersRTDetrV2ConvNormLayer.supports(m) for m in (module.conv1, module.conv2))
        return next((why for why in own if why is not None), None) or _not_activation(module.activation)

    def forward(self, x):
        first, second = self.conv1, self.conv2
        if changed(first) or not isinstance(first.activation, nn.Identity):
            return self.activation(first(x) + second(x))
        return _conv_norm(first.conv, first.norm, self.activation, x, second(x))


class TransformersRTDetrResNetConvLayer(nn.Module):
    """RTDetrResNetConvLayer: input [B, C, H, W]."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any = 3,
        stride: int = 1,
        bias: bool = False,
        dilation: Any = 1,
        groups: int = 1,
        activation: str = "relu",
    ):
        super().__init__()
        self.convolution = nn.Conv2d(
            in_channels, out_channels, kernel_size, stride, kernel_size // 2, dilation, groups, bias
        )
        self.normalization = nn.BatchNorm2d(out_channels)
        self.activation = _act(activation)

    @staticmethod
    def supports(module: Any) -> str | None:
        return _not_pair(module.convolution, module.normalization, module.activation)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _conv_norm(self.convolution, self.normalization, self.activation, hidden_states)


class _ResNetLayer(nn.Module):
    layer: Any
    shortcut: Any
    activation: Any

    @staticmethod
    def supports(module: Any) -> str | None:
        last = module.layer[-1]
        return _not_pair(last.convolution, last.normalization, module.activation)

    def forward(self, hidden_state):
        *first, last = self.layer
        y = hidden_state
        for conv in first:
            y = conv(y)
        residual = self.shortcut(hidden_state)
        if changed(self.layer) or changed(last) or not isinstance(last.activation, nn.Identity):
            return self.activation(last(y) + residual)
        return _conv_norm(last.convolution, last.normalization, self.activation, y, residual)


class _Shortcut(nn.Module):
    """RTDetrResNetShortCut's parameters."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride, bias=False)
        self.normalization = nn.BatchNorm2d(out_channels)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _conv_norm(self.convolution, self.normalization, _NONE, input)


def _pooled(in_channels: int, out_channels: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(2, 2, 0, ceil_mode=True), _Shortcut(in_channels, out_channels, 1))


class TransformersRTDetrResNetBasicLayer(_ResNetLayer):
    """RTDetrResNetBasicLayer: hidden_state [B, C, H, W]."""

    def __init__(
        self,
        config: Any,
        in_channels: int,
        out_channels: int,
        stride: int = 1,
        should_apply_shortcut: bool = False,
    ):
        super().__init__()
        self.shortcut = nn.Identity()
        if should_apply_shortcut:
            pooled = in_channels != out_channels
            self.shortcut = (
                _pooled(in_channels, out_channels) if pooled else _Shortcut(in_channels, out_channels, stride)
            )
        self.layer = nn.Sequential(
            TransformersRTDetrResNetConvLayer(in_channels, out_channels, stride=stride),
            TransformersRTDetrResNetConvLayer(out_channels, out_channels, activation=None),  # type: ignore[arg-type]
        )
        self.activation = _act(config.hidden_act)


class TransformersRTDetrResNetBottleNeckLayer(_ResNetLayer):
    """RTDetrResNetBottleNeckLayer: hidden_state [B, C, H, W]."""

    def __init__(self, config: Any, in_channels: int, out_channels: int, stride: int = 1):
        super().__init__()
        narrow, early = out_channels // 4, config.downsample_in_bottleneck
        self.shortcut = nn.Identity()
        if stride == 2:
            self.shortcut = _pooled(in_channels, out_channels)
        elif in_channels != out_channels or stride != 1:
            self.shortcut = _Shortcut(in_channels, out_channels, stride)
        self.layer = nn.Sequential(
            TransformersRTDetrResNetConvLayer(in_channels, narrow, 1, stride if early else 1),
            TransformersRTDetrResNetConvLayer(narrow, narrow, stride=1 if early else stride),
            TransformersRTDetrResNetConvLayer(narrow, out_channels, 1, activation=None),  # type: ignore[arg-type]
        )
        self.activation = _act(config.hidden_act)


_NOTE = "decided at first calls on a GPU, elsewhere replaced on request"


def _target(file: str, name: str) -> Target:
    return Target(
        "transformers",
        f"transformers.models.{file}:{name}",
        f"Transformers{name}",
        "module",
        default=False,
        note=_NOTE,
        tried=True,
    )


TARGETS = {
    "conv_norm_act": (
        _target("rt_detr_v2.modeling_rt_detr_v2", "RTDetrV2ConvNormLayer"),
        _target("rt_detr_v2.modeling_rt_detr_v2", "RTDetrV2RepVggBlock"),
        _target("rt_detr.modeling_rt_detr_resnet", "RTDetrResNetConvLayer"),
        _target("rt_detr.modeling_rt_detr_resnet", "RTDetrResNetBasicLayer"),
        _target("rt_detr.modeling_rt_detr_resnet", "RTDetrResNetBottleNeckLayer"),
    )
}
