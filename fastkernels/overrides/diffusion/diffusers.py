"""Drop-in parts of diffusers' transformers and UNets; linear layers, convolutions and dropout stay the host's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.diffusion.ada_layer_norm import ada_layer_norm
from fastkernels.overrides.diffusion.geglu import geglu
from fastkernels.overrides.diffusion.group_norm import group_norm
from fastkernels.overrides.diffusion.modulation import modulation
from fastkernels.overrides.diffusion.timestep_embedding import timestep_embedding
from fastkernels.overrides.linear.modules import changed
from fastkernels.overrides.linear.unlike import not_silu


def _not_layer_norm(norm: Any) -> str | None:
    """Why the op does not compute a norm, or None."""
    cls: Any = type(norm)
    theirs = cls.__mro__[1] if hasattr(cls, "fastkernels") else cls
    if not isinstance(norm, nn.LayerNorm) or theirs.__name__ not in ("LayerNorm", "FP32LayerNorm"):
        return f"its norm is {cls.__name__}, not LayerNorm"
    if len(norm.normalized_shape) != 1 or norm.eps is None:
        return f"its norm is over {tuple(norm.normalized_shape)} with eps {norm.eps}"
    return "its norm's forward was replaced by other code" if changed(norm) else None


def _unsupported(norm: Any, x: torch.Tensor, scale: torch.Tensor) -> str | None:
    if scale.dtype != x.dtype:  # the host's result is of the wider dtype
        return f"x is {x.dtype}, its scale {scale.dtype}"
    return _not_layer_norm(norm)


def _modulated(norm: Any, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """norm(x) * (1 + scale) + shift; x: [B, T, H], scale and shift: [B, H]."""
    reason = _unsupported(norm, x, scale)
    if reason is not None:
        ada_layer_norm.note(reason)
        return norm(x) * (1 + scale[:, None]) + shift[:, None]
    return ada_layer_norm(x, scale, shift, norm.weight, norm.bias, norm.eps)


class _Modulated(nn.Module):
    """A module whose layer norm is modulated by a linear layer."""

    checks_calls = True

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not compute the norm in this module, or None."""
        return _not_layer_norm(module.norm)


def _plain_norm(dim: int, norm_type: str) -> nn.LayerNorm:
    if norm_type != "layer_norm":
        raise ValueError(f"norm_type {norm_type!r} is not supported: only 'layer_norm'")
    return nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6)


class DiffusersAdaLayerNormZero(_Modulated):
    """diffusers' AdaLayerNormZero: x [B, T, H], emb [B, H]. Returns the modulated x, and gates, shift, scale [B, H]."""

    def __init__(
        self, embedding_dim: int, num_embeddings: int | None = None, norm_type="layer_norm", bias=True
    ):
        super().__init__()
        if num_embeddings is not None:
            raise ValueError(
                "AdaLayerNormZero: an embedding of labels (num_embeddings) is only supported live"
            )
        self.emb: Any = None
        self.silu = nn.SiLU()
        self.linear = nn.Linear(embedding_dim, 6 * embedding_dim, bias=bias)
        self.norm = _plain_norm(embedding_dim, norm_type)

    def forward(
        self,
        x: torch.Tensor,
        timestep: torch.Tensor | None = None,
        class_labels: torch.Tensor | None = None,
        hidden_dtype: torch.dtype | None = None,
        emb: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        if self.emb is not None:
            emb = self.emb(timestep, class_labels, hidden_dtype=hidden_dtype)
        shift, scale, gate, *mlp = modulation(self.linear, self.silu(emb)).chunk(6, dim=1)
        return _modulated(self.norm, x, scale, shift), gate, *mlp


class DiffusersAdaLayerNormZeroSingle(_Modulated):
    """diffusers' AdaLayerNormZeroSingle: x [B, T, H], emb [B, H]. Returns the modulated x and a gate [B, H]."""

    def __init__(self, embedding_dim: int, norm_type="layer_norm", bias=True):
        super().__init__()
        self.silu = nn.SiLU()
        self.linear = nn.Linear(embedding_dim, 3 * embedding_dim, bias=bias)
        self.norm = _plain_norm(embedding_dim, norm_type)

    def forward(self, x: torch.Tensor, emb: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        shift, scale, gate = modulation(self.linear, self.silu(emb)).chunk(3, dim=1)
        return _modulated(self.norm, x, scale, shift), gate


class DiffusersAdaLayerNormContinuous(_Modulated):
    """diffusers' AdaLayerNormContinuous: x [B, T, H], conditioning_embedding [B, C]; with a layer norm."""

    def __init__(
        self,
        embedding_dim: int,
        conditioning_embedding_dim: int,
        elementwise_affine=True,
        eps=1e-5,
        bias=True,
        norm_type="layer_norm",
    ):
        super().__init__()
        if norm_type != "layer_norm":
            raise ValueError(f"norm_type {norm_type!r} is not supported: only 'layer_norm'")
        self.silu = nn.SiLU()
        self.linear = nn.Linear(conditioning_embedding_dim, embedding_dim * 2, bias=bias)
        self.norm = nn.LayerNorm(embedding_dim, eps, elementwise_affine, bias)

    def forward(self, x: torch.Tensor, conditioning_embedding: torch.Tensor) -> torch.Tensor:
        scale, shift = modulation(self.linear, self.silu(conditioning_embedding).to(x.dtype)).chunk(2, dim=1)
        return _modulated(self.norm, x, scale, shift)


class DiffusersGEGLU(nn.Module):
    """diffusers' GEGLU: hidden_states [..., dim_in] to [..., dim_out], values times the GELU of a gate."""

    def __init__(self, dim_in: int, dim_out: int, bias: bool = True):
        super().__init__()
        self.proj = nn.Linear(dim_in, dim_out * 2, bias=bias)

    def forward(self, hidden_states, *args, **kwargs) -> torch.Tensor:
        return geglu(
            self.proj(hidden_states)
        )  # more arguments (`scale`) are deprecated, and ignored by the host


class DiffusersTimesteps(nn.Module):
    """diffusers' Timesteps: timesteps [N] to [N, num_channels] in float32."""

    def __init__(self, num_channels: int, flip_sin_to_cos: bool, downscale_freq_shift: float, scale: int = 1):
        super().__init__()
        self.num_channels = num_channels
        self.flip_sin_to_cos = flip_sin_to_cos
        self.downscale_freq_shift = downscale_freq_shift
        self.scale = scale

    def forward(self, timesteps: torch.Tensor) -> torch.Tensor:
        if timesteps.dtype == torch.float64:
            timesteps = timesteps.float()
        how = (self.num_channels, self.flip_sin_to_cos, self.downscale_freq_shift, self.scale)
        return timestep_embedding(timesteps, *how)


def _normed(norm: Any, x: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
    """SiLU of the group norm of x [B, C, H, W] + shift [B, C]."""
    if changed(norm):
        group_norm.note("other code was put around its norm")
        return nn.functional.silu(norm(x if shift is None else x + shift[:, :, None, None]))
    if x.is_cuda and torch.is_autocast_enabled("cuda"):
        x = x.float()
    return group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps, True, shift)


def _conv_normed(norm: Any, conv: Any, x: torch.Tensor, temb: torch.Tensor | None) -> torch.Tensor:
    """SiLU of the group norm of conv(x) + temb; a plain convolution leaves adding its bias to the norm."""
    plain = type(conv) is nn.Conv2d and type(conv.weight) is nn.Parameter and not changed(conv)
    if not plain or (temb is not None and temb.shape[1:] != (conv.out_channels, 1, 1)):
        x = conv(x)
        return _normed(norm, x if temb is None else x + temb)
    x, shift = conv._conv_forward(x, conv.weight, None), conv.bias
    if temb is not None:
        shift = temb[:, :, 0, 0] if shift is None else temb[:, :, 0, 0] + shift
    return _normed(norm, x, None if shift is None else shift.expand(len(x), -1))


class DiffusersResnetBlock2D(nn.Module):
    """diffusers' ResnetBlock2D without resampling: input_tensor [B, C, H, W], temb [B, temb_channels].

    Its two group norms run together with the SiLU behind them, the second one with the time embedding before it, too.
    """

    def __init__(
        self,
        *,
        in_channels: int,
        out_channels: int | None = None,
        conv_shortcut: bool = False,
        dropout: float = 0.0,
        temb_channels: int = 512,
        groups: int = 32,
        groups_out: int | None = None,
        pre_norm: bool = True,
        eps: float = 1e-6,
        non_linearity: str = "swish",
        skip_time_act: bool = False,
        time_embedding_norm: str = "default",
        kernel: torch.Tensor | None = None,
        output_scale_factor: float = 1.0,
        use_in_shortcut: bool | None = None,
        up: bool = False,
        down: bool = False,
        conv_shortcut_bias: bool = True,
        conv_2d_out_channels: int | None = None,
    ):
        super().__init__()
        if up or down or non_linearity not in ("swish", "silu") or time_embedding_norm == "scale_shift":
            raise ValueError(
                "ResnetBlock2D: only SiLU, an added time embedding and no resampling are supported"
            )
        out_channels = in_channels if out_channels is None else out_channels
        last = conv_2d_out_channels or out_channels
        self.time_embedding_norm, self.skip_time_act = time_embedding_norm, skip_time_act
        self.output_scale_factor = output_scale_factor
        self.norm1 = nn.GroupNorm(groups, in_channels, eps=eps)
        self.conv1 = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1)
        self.time_emb_proj = None if temb_channels is None else nn.Linear(temb_channels, out_channels)
        self.norm2 = nn.GroupNorm(groups if groups_out is None else groups_out, out_channels, eps=eps)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(out_channels, last, kernel_size=3, padding=1)
        self.nonlinearity = nn.SiLU()
        self.upsample = self.downsample = None
        shortcut = in_channels != last if use_in_shortcut is None else use_in_shortcut
        self.conv_shortcut = nn.Conv2d(in_channels, last, 1, bias=conv_shortcut_bias) if shortcut else None

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not support this block (ours or the host's), or None."""
        if module.upsample is not None or module.downsample is not None:
            return "it changes the image's size"
        if module.time_embedding_norm == "scale_shift":
            return "its time embedding scales and shifts (time_embedding_norm='scale_shift')"
        for norm in (module.norm1, module.norm2):
            if not isinstance(norm, nn.GroupNorm):
                return f"its norm is {type(norm).__name__}, not GroupNorm"
            if changed(norm):
                return "its norm's forward was replaced by other code"
        found = type(module.nonlinearity).__name__
        return None if isinstance(module.nonlinearity, nn.SiLU) else f"its activation is {found}, not SiLU"

    @staticmethod
    def needs_host(module: Any) -> str | None:
        """Return why the activation, which ours calls only for the time embedding, has to run, or None."""
        return not_silu(module, "nonlinearity")

    def forward(self, input_tensor: torch.Tensor, temb: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        x = _normed(self.norm1, input_tensor)
        if self.time_emb_proj is not None:
            temb = temb if self.skip_time_act else self.nonlinearity(temb)
            temb = modulation(self.time_emb_proj, temb)[:, :, None, None]
        added = temb if self.time_embedding_norm == "default" else None
        x = self.conv2(self.dropout(_conv_normed(self.norm2, self.conv1, x, added)))
        if self.conv_shortcut is not None:
            input_tensor = self.conv_shortcut(input_tensor.contiguous() if self.training else input_tensor)
        x = input_tensor + x
        return x if self.output_scale_factor == 1 else x / self.output_scale_factor


_NOTE = "decided at first calls on a GPU, elsewhere replaced on request"


def _target(module: str, name: str, seam: str, compiled: bool = False) -> Target:
    path = f"diffusers.models.{module}:{name}"
    return Target(
        "diffusers", path, f"Diffusers{name}", seam, default=False, note=_NOTE, tried=True, compiled=compiled
    )


TARGETS = {
    "ada_layer_norm": (
        # FLUX.1, compiled, a block's norm of the image: 34 us in Inductor's kernel, ours of more tokens 25
        _target("normalization", "AdaLayerNormZero", "module", compiled=True),
        _target("normalization", "AdaLayerNormZeroSingle", "module"),
        _target("normalization", "AdaLayerNormContinuous", "module"),
    ),
    "geglu": (_target("activations", "GEGLU", "module"),),
    "timestep_embedding": (_target("embeddings", "Timesteps", "leaf"),),
    # SDXL, 1024 px, 4 steps, bfloat16, channels last: 55 ms of convolutions and norms, in the compiled host 68 (H100,
    # with upsample_conv); 58 and 66 (H200)
    "group_norm": (_target("resnet", "ResnetBlock2D", "module", compiled=True),),
}
