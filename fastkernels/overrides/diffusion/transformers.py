"""Drop-in layers of transformers' vision encoders with LayerScale; attention, MLP, norms and scales stay modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.dense_attention.transformers import (
    TransformersDINOv3ViTAttention,
    TransformersViTAttention,
    TransformersYolosSelfAttention,
)
from fastkernels.overrides.diffusion.gated_residual import add_residual
from fastkernels.overrides.linear.modules import changed


class LayerScale(nn.Module):
    """One factor for each channel, named like the host's."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.lambda1 = nn.Parameter(config.layerscale_value * torch.ones(config.hidden_size))

    def forward(self, hidden_state: torch.Tensor) -> torch.Tensor:
        return hidden_state * self.lambda1


class _Mlp(nn.Module):
    """An MLP with names of the host's; `names` are those of its two linear layers and its activation."""

    def __init__(
        self, config: Any, names: tuple[str, str, str], sizes: tuple[int, int], bias: bool = True
    ) -> None:
        super().__init__()
        acts = {"gelu": nn.GELU(), "gelu_pytorch_tanh": nn.GELU("tanh"), "silu": nn.SiLU(), "relu": nn.ReLU()}
        if config.hidden_act not in acts:
            raise ValueError(f"hidden_act {config.hidden_act!r} is not supported, only {', '.join(acts)}")
        self.names = names
        setattr(self, names[0], nn.Linear(*sizes, bias=bias))
        setattr(self, names[1], nn.Linear(*sizes[::-1], bias=bias))
        setattr(self, names[2], acts[config.hidden_act])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, act = (getattr(self, name) for name in self.names)
        return second(act(first(x)))


def _factors(module: Any) -> tuple[torch.Tensor | None, tuple[Any, ...]]:
    """The factors of a LayerScale; or None and the module, which computes itself."""
    plain = (
        type(module).__name__.endswith("LayerScale") and hasattr(module, "lambda1") and not changed(module)
    )
    return (module.lambda1, ()) if plain else (None, (module,))


class _Layer(nn.Module):
    """A layer whose LayerScale and residual run together, after attention with the norm behind them, too."""

    norm1: Any
    norm2: Any
    attention: Any
    mlp: Any
    layer_scale1: Any
    layer_scale2: Any
    drop_path: Any

    @staticmethod
    def supports(module: Any) -> str | None:
        """Return why our forward does not support this layer (ours or the host's), or None."""
        scales = (m for m in (module.layer_scale1, module.layer_scale2) if _factors(m)[1])
        other = (m for m in scales if not isinstance(m, nn.Identity))
        return next((f"its scale is {type(m).__name__}, or has a hook" for m in other), None)


def _rest(layer: Any, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """Everything behind attention."""
    (first, more), (second, others) = _factors(layer.layer_scale1), _factors(layer.layer_scale2)
    x, normed = add_residual(residual, attended, first, (*more, layer.drop_path), layer.norm2)
    return add_residual(x, layer.mlp(normed), second, (*others, layer.drop_path))[0]


class TransformersDinov2Layer(_Layer):
    """Dinov2Layer, also with registers: hidden_states [B, S, C] to the same."""

    def __init__(self, config) -> None:
        super().__init__()
        if config.drop_path_rate or config.use_swiglu_ffn:
            raise ValueError(
                "TransformersDinov2Layer: drop_path_rate and use_swiglu_ffn are only supported live"
            )
        size = config.hidden_size
        self.norm1, self.norm2 = (nn.LayerNorm(size, eps=config.layer_norm_eps) for _ in range(2))
        self.attention = TransformersViTAttention(config)
        self.layer_scale1, self.layer_scale2 = LayerScale(config), LayerScale(config)
        self.drop_path = nn.Identity()
        self.mlp = _Mlp(config, ("fc1", "fc2", "activation_fn"), (size, int(size * config.mlp_ratio)))

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs
    ) -> torch.Tensor:
        attended, _ = self.attention(self.norm1(hidden_states), attention_mask=attention_mask, **kwargs)
        return _rest(self, hidden_states, attended)


class _Dinov2Attention517(nn.Module):
    """The attention of DINOv2 before transformers 5.18, with the names of its layers: x [B, S, C] to the same."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.hidden_size
        self.attention = TransformersYolosSelfAttention(config)
        self.output = nn.ModuleDict({"dense": nn.Linear(size, size)})
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.output["dense"](self.attention(x)[0]))


class TransformersDinov2Layer_5_17(_Layer):
    """Dinov2Layer before 5.18, also with registers: attention returns one tensor, and there is no mask."""

    def __init__(self, config) -> None:
        super().__init__()
        if config.drop_path_rate or config.use_swiglu_ffn:
            raise ValueError(
                "TransformersDinov2Layer_5_17: drop_path_rate and use_swiglu_ffn are only supported live"
            )
        size = config.hidden_size
        self.norm1, self.norm2 = (nn.LayerNorm(size, eps=config.layer_norm_eps) for _ in range(2))
        self.attention = _Dinov2Attention517(config)
        self.layer_scale1, self.layer_scale2 = LayerScale(config), LayerScale(config)
        self.drop_path = nn.Identity()
        self.mlp = _Mlp(config, ("fc1", "fc2", "activation"), (size, int(size * config.mlp_ratio)))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return _rest(self, hidden_states, self.attention(self.norm1(hidden_states)))


class TransformersDINOv3ViTLayer(_Layer):
    """DINOv3ViTLayer: the same, with rotary positions."""

    def __init__(self, config):
        super().__init__()
        if config.drop_path_rate or config.use_gated_mlp:
            raise ValueError(
                "TransformersDINOv3ViTLayer: drop_path_rate and use_gated_mlp are only supported live"
            )
        size = config.hidden_size
        self.norm1, self.norm2 = (nn.LayerNorm(size, eps=config.layer_norm_eps) for _ in range(2))
        self.attention = TransformersDINOv3ViTAttention(config)
        self.layer_scale1, self.layer_scale2 = LayerScale(config), LayerScale(config)
        self.drop_path = nn.Identity()
        names = "up_proj", "down_proj", "act_fn"
        self.mlp = _Mlp(config, names, (size, config.intermediate_size), config.mlp_bias)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs,
    ) -> torch.Tensor:
        attended, _ = self.attention(
            self.norm1(hidden_states), attention_mask=attention_mask, position_embeddings=position_embeddings,
            **kwargs,
        )  # fmt: skip
        return _rest(self, hidden_states, attended)


_NOTE = "decided at first calls on a GPU, elsewhere replaced on request"


def _target(model: str, name: str, versions: str = "", cls: str = "") -> Target:
    path = f"transformers.models.{model}.modeling_{model}:{name}"
    return Target(
        "transformers",
        path,
        f"Transformers{cls or name}",
        "module",
        default=False,
        note=_NOTE,
        tried=True,
        versions=versions,
    )


TARGETS = {
    "gated_residual": (
        _target("dinov2", "Dinov2Layer", ">=5.18"),
        _target("dinov2", "Dinov2Layer", "<5.18", "Dinov2Layer_5_17"),
        _target("dinov3_vit", "DINOv3ViTLayer"),
    )
}
