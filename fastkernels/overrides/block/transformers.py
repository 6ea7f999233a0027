"""The gated MLPs of transformers' Llama, Gemma and Phi-3 and of the models that copy them; mergers of Qwen's towers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.activation.gelu_and_mul import gelu_and_mul
from fastkernels.overrides.activation.silu_and_mul import silu_and_mul
from fastkernels.overrides.block.gated_gelu_mlp import ERF, TANH, GatedGeluMLP
from fastkernels.overrides.block.gated_mlp import check_activation
from fastkernels.overrides.block.patch_merger import EPS, IN_MLP, NAMED, PatchMerger, merge, unlike
from fastkernels.overrides.block.two_linears import side_by_side
from fastkernels.overrides.linear.modules import changed
from fastkernels.overrides.linear.unlike import not_linear, not_silu
from fastkernels.overrides.norm.transformers import TransformersLlamaRMSNorm


class TransformersLlamaMLP(nn.Module):
    """transformers.models.llama.modeling_llama.LlamaMLP and its like: gate_proj, up_proj, down_proj are nn.Linear.

    config: hidden_size, intermediate_size, hidden_act (silu) and, if there, mlp_bias. x [..., H] to [..., H].
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        check_activation(config.hidden_act)
        self.config = config
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        bias = getattr(config, "mlp_bias", False)
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)
        self.act_fn = nn.SiLU()

    @staticmethod
    def is_for(module: nn.Module) -> bool:
        """Whether this op, not gated_gelu_mlp, is the one to compute or refuse this module."""
        return not _is_gelu(module.act_fn)

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        return not_linear(module, "gate_proj", "up_proj", "down_proj") or not_silu(module, "act_fn")

    @staticmethod
    def needs_host(module: nn.Module) -> str | None:
        """Return why the activation, which ours does not call, has to run, or None."""
        return not_silu(module, "act_fn")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu_and_mul(side_by_side(x, self.gate_proj, self.up_proj)))


class TransformersIdefics2MLP(nn.Module):
    """Idefics2MLP, also of Qwen2.5-VL's images: gate_proj, up_proj, down_proj are nn.Linear. x [..., H]."""

    def __init__(self, hidden_size: int, intermediate_size: int, output_size: int, hidden_act: str):
        super().__init__()
        check_activation(hidden_act)
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, output_size, bias=False)
        self.act_fn = nn.SiLU()

    is_for = staticmethod(TransformersLlamaMLP.is_for)
    supports = staticmethod(TransformersLlamaMLP.supports)
    needs_host = staticmethod(TransformersLlamaMLP.needs_host)

    def forward(self, x):
        return self.down_proj(silu_and_mul(side_by_side(x, self.gate_proj, self.up_proj)))


class TransformersSeedOssMLP(TransformersLlamaMLP):
    """SeedOssMLP: as TransformersLlamaMLP, with dropout of config.residual_dropout in training."""

    def __init__(self, config):
        super().__init__(config)
        self.residual_dropout = config.residual_dropout

    def forward(self, x):
        y = self.down_proj(silu_and_mul(side_by_side(x, self.gate_proj, self.up_proj)))
        return nn.functional.dropout(y, self.residual_dropout, self.training)


class TransformersPhi3MLP(nn.Module):
    """Phi3MLP, also of GLM-4: gate_up_proj (gate rows first) and down_proj are nn.Linear. hidden_states [..., H].

    config: hidden_size, intermediate_size and hidden_act (silu).
    """

    def __init__(self, config):
        super().__init__()
        check_activation(config.hidden_act)
        self.config = config
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation_fn = nn.SiLU()

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        return not_linear(module, "gate_up_proj", "down_proj") or not_silu(module, "activation_fn")

    @staticmethod
    def needs_host(module: nn.Module) -> str | None:
        """Return why the activation, which ours does not call, has to run, or None."""
        return not_silu(module, "activation_fn")

    def forward(self, hidden_states: torch.FloatTensor) -> torch.FloatTensor:
        return self.down_proj(silu_and_mul(self.gate_up_proj(hidden_states)))


class TransformersGraniteMoeSharedMLP(nn.Module):
    """GraniteMoeSharedMLP: input_linear (gate rows first) and output_linear are nn.Linear. hidden_states [..., H].

    config: hidden_size, shared_intermediate_size and hidden_act (silu).
    """

    def __init__(self, config):
        super().__init__()
        check_activation(config.hidden_act)
        self.input_size, self.hidden_size = config.hidden_size, config.shared_intermediate_size
        self.activation = nn.SiLU()
        self.input_linear = nn.Linear(self.input_size, 2 * self.hidden_size, bias=False)
        self.output_linear = nn.Linear(self.hidden_size, self.input_size, bias=False)

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        return not_linear(module, "input_linear", "output_linear") or not_silu(module, "activation")

    @staticmethod
    def needs_host(module: nn.Module) -> str | None:
        """Return why the activation, which ours does not call, has to run, or None."""
        return not_silu(module, "activation")

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.output_linear(silu_and_mul(self.input_linear(hidden_states)))


class TransformersGemmaMLP(GatedGeluMLP):
    """GemmaMLP: as TransformersLlamaMLP, gated by GELU. config: hidden_act is gelu, gelu_new or gelu_pytorch_tanh."""

    def __init__(self, config):
        super().__init__()
        if config.hidden_act not in _GELU:
            raise ValueError(f"hidden_act {config.hidden_act!r} is not supported, only {', '.join(_GELU)}")
        self.config = config
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)
        self.act_fn = nn.GELU(_GELU[config.hidden_act])

    @staticmethod
    def is_for(module: nn.Module) -> bool:
        """Whether this op, not gated_mlp, is the one to compute or refuse this module."""
        return _is_gelu(module.act_fn)

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """Return why our forward does not support this module (ours or the host's), or None."""
        return not_linear(module, "gate_proj", "up_proj", "down_proj")

    @staticmethod
    def needs_host(module: nn.Module) -> str | None:
        """Return why the activation, which ours does not call, has to run, or None."""
        act = module.act_fn
        return "act_fn is not GELU, or has hooks" if changed(act) or not _is_gelu(act) else None

    def forward(self, x):
        approximate = getattr(
            self.act_fn, "approximate", "none" if type(self.act_fn).__name__ in ERF else "tanh"
        )
        return self.down_proj(gelu_and_mul(side_by_side(x, self.gate_proj, self.up_proj), approximate))


class TransformersPatchMerger(PatchMerger):
    """PatchMerger of Qwen2-VL: patches x [P, context_dim] to [P / spatial_merge_size^2, dim]."""

    parts = IN_MLP
    normalizes: Callable[..., nn.Module] = nn.LayerNorm

    def __init__(self, dim: int, context_dim: int, spatial_merge_size: int = 2) -> None:
        super().__init__()
        self.hidden_size = wide = context_dim * spatial_merge_size**2
        self.ln_q = type(self).normalizes(context_dim, eps=EPS)
        self.mlp = nn.Sequential(nn.Linear(wide, wide), nn.GELU(), nn.Linear(wide, dim))

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """Return why the activation, which ours does not call, has to run, or None."""
        return unlike(IN_MLP, module)

    needs_host = supports

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return merge(self, IN_MLP, x)


class TransformersQwen2_5_VLPatchMerger(TransformersPatchMerger):
    """Qwen2_5_VLPatchMerger, also of Qwen2.5-Omni: as TransformersPatchMerger, with RMSNorm."""

    normalizes = TransformersLlamaRMSNorm


class TransformersQwen3VLVisionPatchMerger(PatchMerger):
    """Qwen3VLVisionPatchMerger: as TransformersPatchMerger; use_postshuffle_norm: a norm of whole blocks (deepstack).

    config: hidden_size, spatial_merge_size and out_hidden_size.
    """

    parts = NAMED

    def __init__(self, config, use_postshuffle_norm=False) -> None:
        super().__init__()
        self.hidden_size = wide = config.hidden_size * config.spatial_merge_size**2
        self.use_postshuffle_norm = use_postshuffle_norm
        self.norm = nn.LayerNorm(wide if use_postshuffle_norm else config.hidden_size, eps=EPS)
        self.linear_fc1 = nn.Linear(wide, wide)
        self.act_fn = nn.GELU()
        self.linear_fc2 = nn.Linear(wide, config.out_hidden_size)

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """Return why the activation, which ours does not call, has to run, or None."""
        return unlike(NAMED, module)

    needs_host = supports

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return merge(self, NAMED, x)


_GELU = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}


def _is_gelu(act: object) -> bool:
    return type(act).__name__ in (*ERF, *TANH) or isinstance(act, nn.GELU)


_MODELS = (
    ("llama", "Llama"), ("mistral", "Mistral"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3"), ("smollm3", "SmolLM3"),
    ("granite", "Granite"), ("olmo2", "Olmo2"),
)  # fmt: skip


def _target(model: str, name: str, cls: str) -> Target:
    return Target("transformers", f"transformers.models.{model}.modeling_{model}:{name}", cls, "module")


_MERGERS = (
    ("qwen2_vl", "PatchMerger"), ("qwen2_5_vl", "Qwen2_5_VLPatchMerger"), ("qwen3_vl", "Qwen3VLVisionPatchMerger"),
)  # fmt: skip
_MERGER_NOTE = "Off by default: not measured in transformers."

TARGETS = {
    "gated_mlp": (
        *(_target(model, f"{prefix}MLP", "TransformersLlamaMLP") for model, prefix in _MODELS),
        _target("idefics2", "Idefics2MLP", "TransformersIdefics2MLP"),
        _target("seed_oss", "SeedOssMLP", "TransformersSeedOssMLP"),
        _target("phi3", "Phi3MLP", "TransformersPhi3MLP"),
        _target("granitemoeshared", "GraniteMoeSharedMLP", "TransformersGraniteMoeSharedMLP"),
    ),
    "gated_gelu_mlp": (_target("gemma", "GemmaMLP", "TransformersGemmaMLP"),),
    "patch_merger": tuple(
        replace(_target(model, name, f"Transformers{name}"), default=False, note=_MERGER_NOTE)
        for model, name in _MERGERS
    ),
}
