"""Drop-in layers and blocks of timm's CNNs: convolutions and norms stay the host's modules, with its weights."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.conv.batch_norm import batch_norm
from fastkernels.overrides.conv.conv_norm_act import conv_norm_act
from fastkernels.overrides.conv.global_response_norm import global_response_norm
from fastkernels.overrides.conv.plain_conv import as_is, moves, not_conv
from fastkernels.overrides.conv.squeeze_excite import squeeze_excite
from fastkernels.overrides.conv.timm_activations import act_of, activation_of, not_activation
from fastkernels.overrides.linear.modules import autocasts, changed
from fastkernels.overrides.norm.timm import TimmLayerNorm, TimmLayerNorm2d


def not_norm(norm: Any) -> str | None:
    """Return why the op does not compute this batch norm and its activation, or None."""
    name = type(norm).__name__
    if name not in ("BatchNorm2d", "BatchNormAct2d", "TimmBatchNormAct2d") or not isinstance(
        norm, nn.BatchNorm2d
    ):
        return f"its norm is a {name}"
    if norm.running_mean is None:
        return "its norm has no stored statistics"
    drop, act = getattr(norm, "drop", None), getattr(norm, "act", None)
    if drop is not None and type(drop) is not nn.Identity:
        return f"its norm has a {type(drop).__name__}"
    return None if act is None else not_activation(act)


def conv_norm(conv: Any, norm: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """norm(conv(x)) + residual, with the norm's activation: one op where both are plain."""
    plain = not_conv(conv) is None and as_is(conv, x, conv.weight.dtype)
    if plain and norm is None:
        return conv_norm_act(x, conv.weight, conv.bias, None, None, None, None, residual, *moves(conv))
    # A hook may have come since the patch, or training mode, in which a norm measures its input.
    if not plain or not_norm(norm) is not None or changed(norm) or norm.training:
        y = conv(x) if norm is None else norm(conv(x))
        return y if residual is None else y + residual
    activation = activation_of(norm.act) if hasattr(norm, "act") else "none"
    assert activation is not None
    return conv_norm_act(
        x, conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.weight, norm.bias, residual,
        *moves(conv), activation, norm.eps,
    )  # fmt: skip


def _idle(module: Any) -> bool:
    """Whether a stochastic depth or a scale passes on what it gets."""
    if changed(module):
        return False
    return type(module) is nn.Identity or (type(module).__name__ == "DropPath" and not module.training)


def _close(block: Any, conv: Any, norm: Any, x: torch.Tensor, shortcut: torch.Tensor) -> torch.Tensor:
    """The last convolution of a block, its stochastic depth and its residual."""
    if block.has_skip and _idle(block.drop_path):
        return conv_norm(conv, norm, x, shortcut)
    x = conv_norm(conv, norm, x)
    return block.drop_path(x) + shortcut if block.has_skip else x


def _unsupported(module: Any, *pairs: tuple[str, str]) -> str | None:
    """Return why the op does not compute one of these (convolution, norm), by name, or None."""
    for names in pairs:
        conv, norm = (getattr(module, name) for name in names)
        if (why := not_conv(conv) or not_norm(norm)) is not None:
            return why
    return None


def _conv(channels: int, out: int, kernel: int, stride: int = 1, dilation: int = 1, groups: int = 1,
          padding: Any = "", bias: bool = False, **dd: Any) -> nn.Conv2d:  # fmt: skip
    """timm's convolution, padded so that stride 1 keeps the size. Raises ValueError for other padding by name."""
    if padding not in ("", None) and not isinstance(padding, int):
        raise ValueError(f"padding={padding!r} is not supported, only '' and numbers")
    if not isinstance(padding, int):
        padding = (stride - 1 + dilation * (kernel - 1)) // 2
    return nn.Conv2d(channels, out, kernel, stride, padding, dilation, groups, bias, **dd)


def _norm(layer: Any, act_layer: Any, channels: int, **options: Any) -> TimmBatchNormAct2d:
    """The norm that timm makes of a batch norm's class and an activation. Raises ValueError for other norms."""
    given: dict[str, Any] = {}
    if isinstance(layer, functools.partial):
        layer, given = layer.func, dict(layer.keywords)
    if layer not in (nn.BatchNorm2d, TimmBatchNormAct2d, "batchnorm2d", "batchnorm"):
        raise ValueError(f"norm_layer={layer!r} is not supported, only torch.nn.BatchNorm2d")
    return TimmBatchNormAct2d(channels, act_layer=act_layer, **{**given, **options})


def _groups(group_size: int | None, channels: int) -> int:
    return channels // group_size if group_size else 1


def divisible(channels: float) -> int:
    """timm's make_divisible: the nearest multiple of 8, at least nine tenths of the number."""
    made = max(8, int(channels + 4) // 8 * 8)
    return made + 8 if made < 0.9 * channels else made


class TimmBatchNormAct2d(nn.BatchNorm2d):
    """timm.layers.BatchNormAct2d: x [B, num_features, H, W] to the same, in its memory format."""

    supports = staticmethod(not_norm)

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        apply_act: bool = True,
        act_layer: Any = nn.ReLU,
        act_kwargs: Any = None,
        inplace: bool = True,
        drop_layer: Any = None,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.drop = drop_layer() if drop_layer is not None else nn.Identity()
        self.act = act_of(act_layer, act_kwargs) if apply_act else nn.Identity()

    @staticmethod
    def needs_host(module: Any) -> str | None:
        """Return why the activation, which ours does not call, has to run, or None."""
        return "other code was put around its activation" if changed(module.act) else None

    def forward(self, x):
        activation = activation_of(self.act)
        if self.training or self.running_mean is None or activation is None or changed(self.drop):
            return self.act(self.drop(nn.BatchNorm2d.forward(self, x)))
        y = batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.eps, activation)
        return self.drop(y)


class TimmConvNormAct(nn.Module):
    """timm.layers.ConvNormAct: x [B, in_channels, H, W] to [B, out_channels, ...]."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 1,
        stride: int = 1,
        padding: Any = "",
        dilation: int = 1,
        groups: int = 1,
        bias: bool = False,
        apply_norm: bool = True,
        apply_act: bool = True,
        norm_layer: Any = nn.BatchNorm2d,
        act_layer: Any = nn.ReLU,
        aa_layer: Any = None,
        drop_layer: Any = None,
        conv_kwargs: Any = None,
        norm_kwargs: Any = None,
        act_kwargs: Any = None,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        if not apply_norm or aa_layer is not None:
            raise ValueError("only convolutions with a norm and without anti-aliasing are supported")
        dd = {"device": device, "dtype": dtype}
        self.conv = _conv(
            in_channels, out_channels, kernel_size, stride, dilation, groups, padding, bias,
            **{**dd, **(conv_kwargs or {})},
        )  # fmt: skip
        more = {**dd, **(norm_kwargs or {}), **({"drop_layer": drop_layer} if drop_layer else {})}
        self.bn = _norm(
            norm_layer, act_layer, out_channels, apply_act=apply_act, act_kwargs=act_kwargs, **more
        )
        self.aa = None

    @property
    def in_channels(self) -> int:
        return self.conv.in_channels

    @property
    def out_channels(self) -> int:
        return self.conv.out_channels

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        return _unsupported(module, ("conv", "bn"))

    def forward(self, x):
        x = conv_norm(self.conv, self.bn, x)
        aa = getattr(self, "aa", None)
        return x if aa is None else aa(x)


class TimmConvBnAct(nn.Module):
    """timm's ConvBnAct: x [B, in_chs, H, W] to [B, out_chs, ...]."""

    def __init__(
        self,
        in_chs: int,
        out_chs: int,
        kernel_size: int,
        stride: int = 1,
        dilation: int = 1,
        group_size: int = 0,
        pad_type: Any = "",
        skip: bool = False,
        act_layer: Any = nn.ReLU,
        norm_layer: Any = nn.BatchNorm2d,
        aa_layer: Any = None,
        drop_path_rate: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        _only_in_timm(aa_layer=aa_layer, drop_path_rate=drop_path_rate)
        dd = {"device": device, "dtype": dtype}
        self.has_skip = skip and stride == 1 and in_chs == out_chs
        groups = _groups(group_size, in_chs)
        self.conv = _conv(in_chs, out_chs, kernel_size, stride, dilation, groups, pad_type, **dd)
        self.bn1 = _norm(norm_layer, act_layer, out_chs, **dd)
        self.aa, self.drop_path = nn.Identity(), nn.Identity()

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        return _unsupported(module, ("conv", "bn1"))

    def feature_info(self, location):
        if location == "expansion":
            return {"module": "bn1", "hook_type": "forward", "num_chs": self.conv.out_channels}
        return {"module": "", "num_chs": self.conv.out_channels}

    def forward(self, x):
        if _idle(self.aa):
            return _close(self, self.conv, self.bn1, x, x)
        y = self.aa(conv_norm(self.conv, self.bn1, x))
        return self.drop_path(y) + x if self.has_skip else y


def _only_in_timm(**given: Any) -> None:
    """Raise ValueError for options that only the host's own classes build."""
    for name, value in given.items():
        if value:
            raise ValueError(f"{name}={value!r} is not supported here, only in a model of timm")


def _start(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Space to depth, in front of some blocks."""
    return x if block.conv_s2d is None else conv_norm(block.conv_s2d, block.bn_s2d, x)


class _Bottleneck(nn.Module):
    """Parts of blocks that widen channels and narrow them again."""

    conv_s2d: Any
    bn_s2d: Any
    _last: str

    def feature_info(self, location):
        last = getattr(self, self._last)
        if location == "expansion":
            return {"module": self._last, "hook_type": "forward_pre", "num_chs": last.in_channels}
        return {"module": "", "num_chs": last.out_channels}


class TimmDepthwiseSeparableConv(_Bottleneck):
    """timm's DepthwiseSeparableConv: x [B, in_chs, H, W] to [B, out_chs, ...]."""

    _last = "conv_pw"

    def __init__(
        self,
        in_chs: int,
        out_chs: int,
        dw_kernel_size: int = 3,
        stride: int = 1,
        dilation: int = 1,
        group_size: int = 1,
        pad_type: str = "",
        noskip: bool = False,
        pw_kernel_size: int = 1,
        pw_act: bool = False,
        s2d: int = 0,
        act_layer: Any = nn.ReLU,
        norm_layer: Any = nn.BatchNorm2d,
        aa_layer: Any = None,
        se_layer: Any = None,
        drop_path_rate: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        _only_in_timm(s2d=s2d, aa_layer=aa_layer, drop_path_rate=drop_path_rate)
        dd = {"device": device, "dtype": dtype}
        self.has_skip = stride == 1 and in_chs == out_chs and not noskip
        self.has_pw_act = pw_act
        self.conv_s2d = self.bn_s2d = None
        groups = _groups(group_size, in_chs)
        self.conv_dw = _conv(in_chs, in_chs, dw_kernel_size, stride, dilation, groups, pad_type, **dd)
        self.bn1 = _norm(norm_layer, act_layer, in_chs, **dd)
        self.aa = nn.Identity()
        self.se = se_layer(in_chs, act_layer=act_layer, **dd) if se_layer else nn.Identity()
        self.conv_pw = _conv(in_chs, out_chs, pw_kernel_size, padding=pad_type, **dd)
        self.bn2 = _norm(norm_layer, act_layer, out_chs, apply_act=pw_act, **dd)
        self.drop_path = nn.Identity()

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        return _unsupported(module, ("conv_dw", "bn1"), ("conv_pw", "bn2"))

    def forward(self, x):
        y = conv_norm(self.conv_dw, self.bn1, _start(self, x))
        return _close(self, self.conv_pw, self.bn2, self.se(self.aa(y)), x)


class TimmInvertedResidual(_Bottleneck):
    """timm's InvertedResidual: x [B, in_chs, H, W] to [B, out_chs, ...]."""

    _last = "conv_pwl"

    def __init__(
        self,
        in_chs: int,
        out_chs: int,
        dw_kernel_size: int = 3,
        stride: int = 1,
        dilation: int = 1,
        group_size: int = 1,
        pad_type: str = "",
        noskip: bool = False,
        exp_ratio: float = 1.0,
        exp_kernel_size: int = 1,
        pw_kernel_size: int = 1,
        s2d: int = 0,
        act_layer: Any = nn.ReLU,
        norm_layer: Any = nn.BatchNorm2d,
        aa_layer: Any = None,
        se_layer: Any = None,
        conv_kwargs: Any = None,
        drop_path_rate: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        _only_in_timm(s2d=s2d, aa_layer=aa_layer, conv_kwargs=conv_kwargs, drop_path_rate=drop_path_rate)
        dd = {"device": device, "dtype": dtype}
        self.has_skip = in_chs == out_chs and stride == 1 and not noskip
        self.conv_s2d = self.bn_s2d = None
        wide = divisible(in_chs * exp_ratio)
        groups = _groups(group_size, wide)
        self.conv_pw = _conv(in_chs, wide, exp_kernel_size, padding=pad_type, **dd)
        self.bn1 = _norm(norm_layer, act_layer, wide, **dd)
        self.conv_dw = _conv(wide, wide, dw_kernel_size, stride, dilation, groups, pad_type, **dd)
        self.bn2 = _norm(norm_layer, act_layer, wide, **dd)
        self.aa = nn.Identity()
        self.se = se_layer(wide, act_layer=act_layer, **dd) if se_layer else nn.Identity()
        self.conv_pwl = _conv(wide, out_chs, pw_kernel_size, padding=pad_type, **dd)
        self.bn3 = _norm(norm_layer, act_layer, out_chs, apply_act=False, **dd)
        self.drop_path = nn.Identity()

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        return _unsupported(module, ("conv_pw", "bn1"), ("conv_dw", "bn2"), ("conv_pwl", "bn3"))

    def forward(self, x):
        y = conv_norm(self.conv_pw, self.bn1, _start(self, x))
        y = conv_norm(self.conv_dw, self.bn2, y)
        return _close(self, self.conv_pwl, self.bn3, self.se(self.aa(y)), x)


class TimmEdgeResidual(_Bottleneck):
    """timm's EdgeResidual: x [B, in_chs, H, W] to [B, out_chs, ...]."""

    _last = "conv_pwl"

    def __init__(
        self,
        in_chs: int,
        out_chs: int,
        exp_kernel_size: int = 3,
        stride: int = 1,
        dilation: int = 1,
        group_size: int = 0,
        pad_type: str = "",
        force_in_chs: int = 0,
        noskip: bool = False,
        exp_ratio: float = 1.0,
        pw_kernel_size: int = 1,
        act_layer: Any = nn.ReLU,
        norm_layer: Any = nn.BatchNorm2d,
        aa_layer: Any = None,
        se_layer: Any = None,
        drop_path_rate: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        _only_in_timm(aa_layer=aa_layer, drop_path_rate=drop_path_rate)
        dd = {"device": device, "dtype": dtype}
        wide = divisible((force_in_chs if force_in_chs > 0 else in_chs) * exp_ratio)
        groups = _groups(group_size, wide)
        self.has_skip = in_chs == out_chs and stride == 1 and not noskip
        self.conv_exp = _conv(in_chs, wide, exp_kernel_size, stride, dilation, groups, pad_type, **dd)
        self.bn1 = _norm(norm_layer, act_layer, wide, **dd)
        self.aa = nn.Identity()
        self.se = se_layer(wide, act_layer=act_layer, **dd) if se_layer else nn.Identity()
        self.conv_pwl = _conv(wide, out_chs, pw_kernel_size, padding=pad_type, **dd)
        self.bn2 = _norm(norm_layer, act_layer, out_chs, apply_act=False, **dd)
        self.drop_path = nn.Identity()

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        return _unsupported(module, ("conv_exp", "bn1"), ("conv_pwl", "bn2"))

    def forward(self, x):
        y = self.se(self.aa(conv_norm(self.conv_exp, self.bn1, x)))
        return _close(self, self.conv_pwl, self.bn2, y, x)


class TimmUniversalInvertedResidual(nn.Module):
    """timm's UniversalInvertedResidual: x [B, in_chs, H, W] to [B, out_chs, ...]."""

    def __init__(
        self,
        in_chs: int,
        out_chs: int,
        dw_kernel_size_start: int = 0,
        dw_kernel_size_mid: int = 3,
        dw_kernel_size_end: int = 0,
        stride: int = 1,
        dilation: int = 1,
        group_size: int = 1,
        pad_type: str = "",
        noskip: bool = False,
        exp_ratio: float = 1.0,
        act_layer: Any = nn.ReLU,
        norm_layer: Any = nn.BatchNorm2d,
        aa_layer: Any = None,
        se_layer: Any = None,
        conv_kwargs: Any = None,
        drop_path_rate: float = 0.0,
        layer_scale_init_value: float | None = 1e-5,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        _only_in_timm(
            aa_layer=aa_layer, drop_path_rate=drop_path_rate, layer_scale_init_value=layer_scale_init_value
        )
        start, middle, end = dw_kernel_size_start, dw_kernel_size_mid, dw_kernel_size_end
        if stride > 1 and not (start or middle or end):
            raise ValueError(f"stride={stride} needs a depthwise convolution")
        shared = {"padding": pad_type, "act_layer": act_layer, "norm_layer": norm_layer, "device": device,
                  "dtype": dtype}  # fmt: skip
        wide = divisible(in_chs * exp_ratio)

        def depthwise(channels: int, kernel: int, first: int, apply_act: bool, kwargs: Any) -> nn.Module:
            if not kernel:
                return nn.Identity()
            return TimmConvNormAct(
                channels, channels, kernel, stride=first, dilation=dilation, groups=_groups(group_size, channels),
                apply_act=apply_act, **shared, **kwargs,
            )  # fmt: skip

        more = conv_kwargs or {}
        self.has_skip = in_chs == out_chs and stride == 1 and not noskip
        self.dw_start = depthwise(in_chs, start, 1 if middle else stride, False, more)
        self.pw_exp = TimmConvNormAct(in_chs, wide, 1, **shared, **more)
        self.dw_mid = depthwise(wide, middle, stride, True, more)
        self.se = (
            se_layer(wide, act_layer=act_layer, device=device, dtype=dtype) if se_layer else nn.Identity()
        )
        self.pw_proj = TimmConvNormAct(wide, out_chs, 1, apply_act=False, **shared, **more)
        self.dw_end = depthwise(out_chs, end, 1 if start or middle else stride, False, more)
        self.layer_scale, self.drop_path = nn.Identity(), nn.Identity()

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        return _unsupported(module.pw_exp, ("conv", "bn")) or _unsupported(module.pw_proj, ("conv", "bn"))

    def feature_info(self, location):
        conv = self.pw_proj.conv
        if location == "expansion":
            return {"module": "pw_proj.conv", "hook_type": "forward_pre", "num_chs": conv.in_channels}
        return {"module": "", "num_chs": conv.out_channels}

    def forward(self, x):
        y = self.se(_layer(self.dw_mid, _layer(self.pw_exp, _layer(self.dw_start, x))))
        last, behind = self.pw_proj, (self.dw_end, self.layer_scale, self.drop_path)
        if self.has_skip and not changed(last) and last.aa is None and all(map(_idle, behind)):
            return conv_norm(last.conv, last.bn, y, x)
        y = self.layer_scale(_layer(self.dw_end, _layer(last, y)))
        return self.drop_path(y) + x if self.has_skip else y


def _layer(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """A ConvNormAct, ours or the host's, or the identity."""
    if (
        type(layer).__name__ not in ("ConvNormAct", "TimmConvNormAct")
        or changed(layer)
        or layer.aa is not None
    ):
        return layer(x)
    return conv_norm(layer.conv, layer.bn, x)


class _ConvNeXtMlp(nn.Module):
    """The MLP of a block, with timm's parameter names: linear layers or 1x1 convolutions, and response norm or none."""

    def __init__(
        self, size: int, wide: int, act: nn.Module, convolutions: bool, grn: bool, dd: dict[str, Any]
    ) -> None:
        super().__init__()
        layer: Any = functools.partial(nn.Conv2d, kernel_size=1) if convolutions else nn.Linear
        self.fc1, self.act = layer(size, wide, **dd), act
        self.grn = (
            TimmGlobalResponseNorm(wide, channels_last=not convolutions, **dd) if grn else nn.Identity()
        )
        self.fc2 = layer(wide, size, **dd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.grn(self.act(self.fc1(x))))


class TimmConvNeXtBlock(nn.Module):
    """timm.models.convnext.ConvNeXtBlock: its depthwise convolution is ours; x [B, in_chs, H, W]."""

    gamma: Any

    def __init__(
        self,
        in_chs: int,
        out_chs: int | None = None,
        kernel_size: int = 7,
        stride: int = 1,
        dilation: Any = (1, 1),
        mlp_ratio: float = 4,
        conv_mlp: bool = False,
        conv_bias: bool = True,
        use_grn: bool = False,
        ls_init_value: float | None = 1e-6,
        act_layer: Any = "gelu",
        norm_layer: Any = None,
        drop_path: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        out = out_chs or in_chs
        _only_in_timm(drop_path=drop_path)
        if out != in_chs or stride != 1 or dilation not in (1, (1, 1)):
            raise ValueError(
                "blocks with a downsampled shortcut are not supported here, only in a model of timm"
            )
        dd = {"device": device, "dtype": dtype}
        self.use_conv_mlp = conv_mlp
        self.conv_dw = _conv(in_chs, out, kernel_size, groups=in_chs, bias=conv_bias, **dd)
        norm = norm_layer or (TimmLayerNorm2d if conv_mlp else TimmLayerNorm)
        self.norm = norm(out, **dd)
        self.mlp = _ConvNeXtMlp(out, int(mlp_ratio * out), act_of(act_layer), conv_mlp, use_grn, dd)
        self.gamma = None if ls_init_value is None else nn.Parameter(torch.full((out,), ls_init_value, **dd))
        self.shortcut, self.drop_path = nn.Identity(), nn.Identity()

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        return not_conv(module.conv_dw)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x
        x = conv_norm(self.conv_dw, None, x)
        if self.use_conv_mlp:
            x = self.mlp(self.norm(x))
        else:
            x = self.mlp(self.norm(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        if self.gamma is not None:
            x = x.mul(self.gamma.reshape(1, -1, 1, 1))
        return self.drop_path(x) + self.shortcut(shortcut)


def _excite(module: Any, x: torch.Tensor, first: Any, act: Any, second: Any) -> torch.Tensor | None:
    """x times its gates in one op; None where other code has to run."""
    layers, functions = (first, second), [activation_of(act), activation_of(module.gate)]
    plain = all(not_conv(layer) is None and as_is(layer, x, layer.weight.dtype) for layer in layers)
    if not plain or None in functions:
        return None
    weights = (layer.weight.flatten(1) for layer in layers)
    return squeeze_excite(x, *weights, first.bias, second.bias, *functions)


class TimmSqueezeExcite(nn.Module):
    """timm's SqueezeExcite of EfficientNets: x [B, in_chs, H, W] to the same."""

    def __init__(
        self,
        in_chs: int,
        rd_ratio: float = 0.25,
        rd_channels: int | None = None,
        act_layer: Any = nn.ReLU,
        gate_layer: Any = nn.Sigmoid,
        force_act_layer: Any = None,
        rd_round_fn: Any = None,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        narrow = (rd_round_fn or round)(in_chs * rd_ratio) if rd_channels is None else rd_channels
        self.conv_reduce = _conv(in_chs, narrow, 1, bias=True, device=device, dtype=dtype)
        self.act1 = act_of(force_act_layer or act_layer)
        self.conv_expand = _conv(narrow, in_chs, 1, bias=True, device=device, dtype=dtype)
        self.gate = act_of(gate_layer)

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        return _not_excited(module, "conv_reduce", "act1", "conv_expand")

    def forward(self, x):
        y = _excite(self, x, self.conv_reduce, self.act1, self.conv_expand)
        if y is not None:
            return y
        return x * self.gate(self.conv_expand(self.act1(self.conv_reduce(x.mean((2, 3), keepdim=True)))))


class TimmSEModule(nn.Module):
    """timm.layers.SEModule, also called SqueezeExcite there: x [B, channels, H, W] to the same."""

    def __init__(
        self,
        channels: int,
        rd_ratio: float = 1.0 / 16,
        rd_channels: int | None = None,
        rd_divisor: int = 8,
        add_maxpool: bool = False,
        bias: bool = True,
        act_layer: Any = nn.ReLU,
        norm_layer: Any = None,
        gate_layer: Any = "sigmoid",
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        _only_in_timm(add_maxpool=add_maxpool, norm_layer=norm_layer)
        self.add_maxpool = add_maxpool
        narrow = rd_channels or max(
            rd_divisor, int(channels * rd_ratio + rd_divisor / 2) // rd_divisor * rd_divisor
        )
        self.fc1 = _conv(channels, narrow, 1, bias=bias, device=device, dtype=dtype)
        self.bn = nn.Identity()
        self.act = act_of(act_layer)
        self.fc2 = _conv(narrow, channels, 1, bias=bias, device=device, dtype=dtype)
        self.gate = act_of(gate_layer)

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        if module.add_maxpool or type(module.bn) is not nn.Identity:
            return "it has a maximum or a norm"
        return _not_excited(module, "fc1", "act", "fc2")

    def forward(self, x):
        y = None if changed(self.bn) else _excite(self, x, self.fc1, self.act, self.fc2)
        if y is not None:
            return y
        return x * self.gate(self.fc2(self.act(self.bn(self.fc1(x.mean((2, 3), keepdim=True))))))


def _not_excited(module: Any, first: str, act: str, second: str) -> str | None:
    for name in (first, second):
        conv = getattr(module, name)
        if (why := not_conv(conv)) is not None:
            return why
        if conv.kernel_size != (1, 1):
            return f"its {name} has windows of {conv.kernel_size}"
    for name in (act, "gate"):
        if activation_of(getattr(module, name)) is None:
            return f"its {name} is {type(getattr(module, name)).__name__}"
    return None


class TimmGlobalResponseNorm(nn.Module):
    """timm.layers.GlobalResponseNorm: x [B, H, W, dim], or [B, dim, H, W] with channels_last=False."""

    def __init__(
        self, dim: int, eps: float = 1e-6, channels_last: bool = True, device: Any = None, dtype: Any = None
    ):
        super().__init__()
        self.eps = eps
        self.spatial_dim, self.channel_dim, self.wb_shape = (
            ((1, 2), -1, (1, 1, 1, -1)) if channels_last else ((2, 3), 1, (1, -1, 1, 1))
        )
        self.weight = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))

    def forward(self, x):
        if autocasts(x) or x.dtype != self.weight.dtype:  # PyTorch's rules for two dtypes
            norms = x.norm(p=2, dim=self.spatial_dim, keepdim=True)
            scaled = x * (norms / (norms.mean(dim=self.channel_dim, keepdim=True) + self.eps))
            return x + torch.addcmul(self.bias.view(self.wb_shape), self.weight.view(self.wb_shape), scaled)
        if self.channel_dim == -1:
            return global_response_norm(x.flatten(1, 2), self.weight, self.bias, self.eps).view(x.shape)
        y = global_response_norm(x.flatten(2).transpose(1, 2), self.weight, self.bias, self.eps)
        return y.transpose(1, 2).unflatten(2, x.shape[2:])


_NOTE = "decided at first calls on a GPU, elsewhere replaced on request"


def _target(path: str, seam: str = "module") -> Target:
    name = path.partition(":")[2]
    return Target("timm", f"timm.{path}", f"Timm{name}", seam, default=False, note=_NOTE, tried=True)


TARGETS = {
    "batch_norm": (_target("layers.norm_act:BatchNormAct2d", "leaf"),),
    "conv_norm_act": (
        _target("layers.conv_bn_act:ConvNormAct"),
        *(
            _target(f"models._efficientnet_blocks:{name}")
            for name in (
                "ConvBnAct", "DepthwiseSeparableConv", "EdgeResidual", "InvertedResidual", "UniversalInvertedResidual",
            )
        ),
        _target("models.convnext:ConvNeXtBlock"),
    ),
    "global_response_norm": (_target("layers.grn:GlobalResponseNorm", "leaf"),),
    "squeeze_excite": (
        _target("layers.squeeze_excite:SEModule"),
        _target("models._efficientnet_blocks:SqueezeExcite"),
    ),
}  # fmt: skip
