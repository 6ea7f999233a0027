"""Parts that CNNs share, under timm's parameter names. Images are [B, C, H, W] with their channels last in memory.

A model's interface is that of models/vision/dinov3.py, with patches of `PATCH` pixels: of each, the model returns one
hidden state. After loading, batch norms are part of the convolutions before them (`Folded`): cuDNN and cuBLAS add a
bias, but know no norm. Under tensor parallelism every rank computes the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastkernels.core.dispatch import OPS
from fastkernels.core.runtime import ahead
from fastkernels.core.runtime.measured import faster
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.layers.encoder import size_of
from fastkernels.overrides.conv.conv_norm_act import conv_norm_act, fuses_relu
from fastkernels.overrides.conv.squeeze_excite import squeeze_excite
from fastkernels.overrides.linear.linear import linear

PATCH = 32  # the stride of the last stage
Grids = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Style:
    """Settings of all layers of a model.

    activation  see overrides/conv/epilogue.py
    eps         of the batch norms
    same        padding as TensorFlow's 'SAME': more behind than in front where the number is odd
    """

    activation: str
    eps: float = 1e-5
    same: bool = False


def divisible(channels: float, limit: float = 0.9) -> int:
    """The nearest multiple of 8 that is at least `limit` of that number of channels."""
    made = max(8, int(channels + 4) // 8 * 8)
    return made + 8 if made < limit * channels else made


def check_timm(config: Any, variants: Sequence[str], arguments: Sequence[str] = ()) -> None:
    """Raise Unsupported for another variant than these, and for what no CNN here supports.

    arguments: of timm's constructor, which config.model_args may have
    """
    if config.architecture not in variants:
        names = ", ".join(variants)
        raise Unsupported(f"config.architecture={config.architecture!r} is not supported, only {names}")
    if unknown := sorted(set(config.model_args) - {*arguments}):
        raise Unsupported(
            f"config.model_args has {', '.join(unknown)}; supported: {', '.join(arguments) or 'none'}"
        )
    if config.global_pool != "avg":
        raise Unsupported(f"config.global_pool={config.global_pool!r} is not supported, only 'avg'")
    if size_of(config, "image_size") % PATCH:
        raise Unsupported(f"config.image_size={config.image_size} is not a multiple of {PATCH}")


def pixels(patches: torch.Tensor, grid: tuple[int, int], channels: int) -> torch.Tensor:
    """Patches [B, rows * columns, C * PATCH * PATCH] as images [B, C, H, W]."""
    rows, columns = grid
    cut = patches.view(len(patches), rows, columns, channels, PATCH, PATCH)
    return cut.permute(0, 1, 4, 2, 5, 3).reshape(len(patches), rows * PATCH, -1, channels).permute(0, 3, 1, 2)


def encode(
    patches: torch.Tensor, grids: Grids, channels: int, dtype: torch.dtype,
    body: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """Hidden states [T, H] of all images; body maps images of one size, a batch, to features [B, H, rows, columns]."""
    return by_size(
        patches, grids, channels, dtype, lambda images: body(images).permute(0, 2, 3, 1).flatten(1, 2)
    )


def by_size(
    patches: torch.Tensor, grids: Grids, channels: int, dtype: torch.dtype,
    body: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """Rows [T, H] of all images; body maps images of one size, a batch, to rows [B, rows of an image, H]."""
    patches = patches.to(dtype)
    if len(set(grids)) == 1:
        rows, columns = grids[0]
        return body(pixels(patches.view(len(grids), rows * columns, -1), grids[0], channels)).flatten(0, 1)
    images = patches.split([rows * columns for rows, columns in grids])
    found: dict[int, torch.Tensor] = {}
    for grid in set(grids):
        same = [i for i, other in enumerate(grids) if other == grid]
        made = body(pixels(torch.stack([images[i] for i in same]), grid, channels))
        found.update(zip(same, made, strict=True))
    return torch.cat([found[i] for i in range(len(grids))])


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape))


class Conv(nn.Module):
    """A convolution's parameters, channels last, and how it moves over an image."""

    ops = ("conv_norm_act",)

    def __init__(self, channels: int, out: int, kernel: int = 1, stride: int = 1, groups: int = 1,
                 bias: bool = False, padding: int | None = None) -> None:  # fmt: skip
        super().__init__()
        self.kernel, self.stride, self.groups = kernel, stride, groups
        self.padding = (kernel - 1) // 2 if padding is None else padding
        shape = (out, channels // groups, kernel, kernel)
        self.weight = nn.Parameter(torch.empty(shape, memory_format=torch.channels_last))
        self.bias = _empty(out) if bias else None


class BatchNorm(nn.Module):
    """A batch norm's parameters and statistics, which are kept in float32."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = _empty(channels), _empty(channels)
        self.running_mean, self.running_var = (
            nn.Parameter(torch.empty(channels, dtype=torch.float32)) for _ in range(2)
        )
        self.running_mean.fill = 0.0  # type: ignore[attr-defined]  # of random weights


def convolve(
    x: torch.Tensor, conv: Conv, norm: BatchNorm | None, style: Style, activation: str = "none",
    residual: torch.Tensor | None = None, add_first: bool = False,
) -> torch.Tensor:  # fmt: skip
    """activation(norm(conv(x))) + residual; with add_first, activation(norm(conv(x)) + residual)."""
    padding = conv.padding
    if style.same and conv.kernel > 1:
        missing = [max((-(-n // conv.stride) - 1) * conv.stride + conv.kernel - n, 0) for n in x.shape[2:]]
        if missing != [2 * padding] * 2:
            (rows, columns), padding = missing, 0
            x = F.pad(x, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
    found = (None,) * 4
    if norm is not None:
        found = norm.running_mean, norm.running_var, norm.weight, norm.bias  # type: ignore[assignment]
    given = (
        x, conv.weight, conv.bias, *found, residual, (conv.stride,), (padding,), (1,), conv.groups, activation,
        style.eps, add_first,
    )  # fmt: skip
    # A requested candidate, provider or recording always runs, whatever is faster
    if OPS["conv_norm_act"].requested:
        return conv_norm_act(*given)
    fused = fuses_relu(x, conv.weight, conv.bias, found[0], residual, activation, add_first)
    sizes = tuple(conv.weight.shape), conv.stride, padding
    what = *sizes, conv.bias is None, norm is None, residual is None, activation, add_first
    if not fused and _is_dense(conv, padding):
        return ahead.run(lambda: conv_norm_act(*given))
    other = library("conv_norm_act", "library")
    return faster("conv_norm_act", what, x, lambda: conv_norm_act(*given), lambda: other(*given))


def _is_dense(conv: Conv, padding: int) -> bool:
    """Whether ours is cuDNN's convolution with one kernel behind it, as the library's. Nothing is measured then."""
    channels, made = conv.weight.shape[1] * conv.groups, len(conv.weight)
    depthwise = conv.groups == channels == made and channels > 1
    return not depthwise and (conv.groups > 1 or conv.kernel > 1 or padding > 0)


@cache
def library(op: str, provider: str) -> Callable[..., torch.Tensor]:
    """An op by PyTorch, with cuDNN and cuBLAS: the function of that provider."""
    return next(p.fn for p in OPS[op].providers if p.name == provider)


class Folded(nn.Module):
    """Base of modules whose parameters `merge` replaces by fewer ones, after the weights are loaded.

    norms  names of pairs of a convolution and the batch norm behind it; `style` has the norms' epsilon
    """

    style: Style
    norms: Sequence[tuple[str, str]] = ()

    @torch.no_grad()
    def merge(self) -> None:
        """Multiply the weights by the norms' factors, in float32, and round them once. The norms become None."""
        for name, norm_name in self.norms:
            conv, norm = getattr(self, name), getattr(self, norm_name)
            if norm is None:
                continue
            weight, bias = folded(conv, norm, self.style.eps)
            conv.weight.copy_(weight)
            conv.bias = nn.Parameter(bias.to(conv.weight.dtype), conv.weight.requires_grad)
            setattr(self, norm_name, None)


def folded(conv: Conv, norm: BatchNorm, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias, in float32, of the convolution that is the norm of this one."""
    scale = norm.weight.float() * torch.rsqrt(norm.running_var + eps)
    bias = norm.bias.float() - norm.running_mean * scale
    if conv.bias is not None:
        bias += conv.bias.float() * scale
    return conv.weight.float() * scale[:, None, None, None], bias


class ConvBnAct(Folded):
    """A convolution with norm and activation; skip: the input is added."""

    norms = (("conv", "bn1"),)

    def __init__(
        self, style: Style, channels: int, out: int, kernel: int, stride: int, skip: bool = False
    ) -> None:
        super().__init__()
        self.style, self.skip = style, skip and stride == 1 and channels == out
        self.conv, self.bn1 = Conv(channels, out, kernel, stride), BatchNorm(out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return convolve(x, self.conv, self.bn1, self.style, self.style.activation, x if self.skip else None)


class EdgeResidual(Folded):
    """A convolution to more channels and a product to fewer: FusedMBConv."""

    norms = (("conv_exp", "bn1"), ("conv_pwl", "bn2"))

    def __init__(
        self, style: Style, channels: int, out: int, kernel: int, stride: int, expansion: float
    ) -> None:
        super().__init__()
        self.style, self.skip = style, stride == 1 and channels == out
        middle = divisible(channels * expansion)
        self.conv_exp, self.bn1 = Conv(channels, middle, kernel, stride), BatchNorm(middle)
        self.conv_pwl, self.bn2 = Conv(middle, out), BatchNorm(out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = convolve(x, self.conv_exp, self.bn1, self.style, self.style.activation)
        return convolve(wide, self.conv_pwl, self.bn2, self.style, residual=x if self.skip else None)


class SqueezeExcite(nn.Module):
    """Gates of the channels, made of their means."""

    ops = ("squeeze_excite",)

    def __init__(self, style: Style, channels: int, narrow: int) -> None:
        super().__init__()
        self.style = style
        self.conv_reduce, self.conv_expand = (
            Conv(channels, narrow, bias=True),
            Conv(narrow, channels, bias=True),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.conv_reduce, self.conv_expand
        weights = first.weight.flatten(1), second.weight.flatten(1), first.bias, second.bias
        given = x, *weights, self.style.activation, "sigmoid"
        if OPS["squeeze_excite"].requested:
            return squeeze_excite(*given)
        what, other = (len(first.weight), self.style.activation), library("squeeze_excite", "torch")
        return faster("squeeze_excite", what, x, lambda: squeeze_excite(*given), lambda: other(*given))


class InvertedResidual(Folded):
    """A product to more channels, a depthwise convolution, gates, and a product to fewer channels: MBConv.

    ratio  channels of the gates' MLP for each channel of the input
    """

    norms = (("conv_pw", "bn1"), ("conv_dw", "bn2"), ("conv_pwl", "bn3"))

    def __init__(self, style: Style, channels: int, out: int, kernel: int, stride: int, expansion: float,
                 ratio: float) -> None:  # fmt: skip
        super().__init__()
        self.style, self.skip = style, stride == 1 and channels == out
        middle = divisible(channels * expansion)
        self.conv_pw, self.bn1 = Conv(channels, middle), BatchNorm(middle)
        self.conv_dw, self.bn2 = Conv(middle, middle, kernel, stride, groups=middle), BatchNorm(middle)
        self.se = SqueezeExcite(style, middle, round(middle * ratio / expansion))
        self.conv_pwl, self.bn3 = Conv(middle, out), BatchNorm(out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        activation = self.style.activation
        wide = convolve(x, self.conv_pw, self.bn1, self.style, activation)
        wide = self.se(convolve(wide, self.conv_dw, self.bn2, self.style, activation))
        return convolve(wide, self.conv_pwl, self.bn3, self.style, residual=x if self.skip else None)


class ConvNormAct(Folded):
    """A convolution with norm and, if act, activation.

    names  of the two modules in the checkpoint
    fused  the checkpoint has the norm in weight and bias of the convolution
    """

    def __init__(self, style: Style, channels: int, out: int, kernel: int = 1, stride: int = 1, groups: int = 1,
                 act: bool = True, names: tuple[str, str] = ("conv", "bn"), fused: bool = False) -> None:  # fmt: skip
        super().__init__()
        self.style, self.activation, self.names = style, style.activation if act else "none", names
        self.norms = (names,)
        self.add_module(names[0], Conv(channels, out, kernel, stride, groups, bias=fused))
        self.add_module(names[1], None if fused else BatchNorm(out))

    @property
    def parts(self) -> tuple[Conv, BatchNorm | None]:
        conv, norm = (getattr(self, name) for name in self.names)
        return conv, norm

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, add_first: bool = False
    ) -> torch.Tensor:
        return convolve(x, *self.parts, self.style, self.activation, residual, add_first)


class AddedConvs(Folded):
    """The activation of a sum of convolutions of x with norms: one convolution after loading (arXiv 2101.03697).

    branches: {name: the convolution}, of one stride, the one with the largest window first
    """

    ops = ("conv_norm_act",)

    def __init__(self, style: Style, branches: dict[str, ConvNormAct]) -> None:
        super().__init__()
        self.style, self.names = style, tuple(branches)
        for name, module in branches.items():
            self.add_module(name, module)

    @property
    def branches(self) -> list[ConvNormAct]:
        return [self.get_submodule(name) for name in self.names]  # type: ignore[misc]

    @torch.no_grad()
    def merge(self) -> None:
        """Replace the branches by one convolution. Computed in float32, rounded once."""
        first, _ = self.branches[0].parts
        weight = torch.zeros(first.weight.shape, dtype=torch.float32, device=first.weight.device)
        bias = torch.zeros(len(weight), dtype=torch.float32, device=weight.device)
        for branch in self.branches:
            conv, norm = branch.parts
            assert norm is not None
            more, shift = folded(conv, norm, self.style.eps)
            edge = first.padding - conv.padding
            weight += F.pad(more, (edge,) * 4)
            bias += shift
        self.merged = Conv(
            first.weight.shape[1] * first.groups, len(weight), first.kernel, first.stride, first.groups, bias=True
        ).to(weight.device, first.weight.dtype)  # fmt: skip
        self.merged.weight.copy_(weight)
        self.merged.bias.copy_(bias)  # type: ignore[union-attr]
        for name in self.names:
            delattr(self, name)
        self.names = ()

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [B, C, H, W]; residual: added behind the activation."""
        if not self.names:
            return convolve(x, self.merged, None, self.style, self.style.activation, residual)
        *others, last = self.branches
        total = None
        for branch in others:
            total = branch(x, total)
        y = convolve(x, *last.parts, self.style, self.style.activation, total, add_first=True)
        return y if residual is None else y + residual


class UniversalInvertedResidual(nn.Module):
    """MBConv with an optional depthwise convolution in front of it, and the one in the middle optional, too.

    start, middle  sizes of their windows, 0 for none
    """

    def __init__(self, style: Style, channels: int, out: int, start: int, middle: int, stride: int,
                 expansion: float) -> None:  # fmt: skip
        super().__init__()
        self.skip = stride == 1 and channels == out
        wide = divisible(channels * expansion)
        self.dw_start = self.dw_mid = None
        if start:
            first = 1 if middle else stride
            self.dw_start = ConvNormAct(style, channels, channels, start, first, channels, act=False)
        self.pw_exp = ConvNormAct(style, channels, wide)
        if middle:
            self.dw_mid = ConvNormAct(style, wide, wide, middle, stride, wide)
        self.pw_proj = ConvNormAct(style, wide, out, act=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.pw_exp(x if self.dw_start is None else self.dw_start(x))
        wide = wide if self.dw_mid is None else self.dw_mid(wide)
        return self.pw_proj(wide, x if self.skip else None)


class Classifier(nn.Module):
    """The last linear layer: [B, C] to logits [B, classes]."""

    ops = ("linear",)

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.weight, self.bias = _empty(classes, channels), _empty(classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class Stacked(nn.Module):
    """A linear layer whose rows are those of several in the checkpoint, in order: x [..., size] to [..., sum(outs)]."""

    ops = ("linear",)

    def __init__(self, size: int, outs: Sequence[int]) -> None:
        super().__init__()
        self.outs = tuple(outs)
        self.weight, self.bias = _empty(sum(outs), size), _empty(sum(outs))
        for parameter in (self.weight, self.bias):
            parameter.weight_loader = self._load  # type: ignore[attr-defined]

    def _load(self, parameter: nn.Parameter, tensor: torch.Tensor, part: int | None = None) -> None:
        start, count = (0, sum(self.outs)) if part is None else (sum(self.outs[:part]), self.outs[part])
        rows = parameter.data[start : start + count]
        if rows.shape != tensor.shape:
            raise ValueError(f"expected shape {tuple(rows.shape)}")
        rows.copy_(tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)
