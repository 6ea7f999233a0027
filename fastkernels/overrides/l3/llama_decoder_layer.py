"""One layer of a Llama model: norm, attention, norm, gated MLP, with the residual carried beside the hidden states."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.overrides.l1.rms_norm import SGLangRMSNorm, VllmRMSNorm, rms_norm
from fastkernels.overrides.l1.rms_norm import reference as rms_norm_reference
from fastkernels.overrides.l2 import gated_mlp
from fastkernels.overrides.l2.gated_mlp import SGLangLlamaMLP, VllmLlamaMLP
from fastkernels.overrides.l3._llama_attention import LlamaAttention, SGLangLlamaAttention
from fastkernels.spec import Case, OpSpec, Target


def reference(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weights: dict[str, torch.Tensor],
    attention: Any,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer around an attention function of [T, H]; weights: input_layernorm, post_attention_layernorm,
    gate_up [2 I, H], down [H, I]. Returns (hidden states, residual); their sum is the residual stream.
    """
    residual = torch.zeros_like(x) if residual is None else residual
    h, residual = rms_norm_reference(x, weights["input_layernorm"], eps, residual)
    h, residual = rms_norm_reference(attention(h), weights["post_attention_layernorm"], eps, residual)
    assert residual is not None
    return gated_mlp.reference(h, weights["gate_up"], weights["down"]), residual


def _unsupported_norm(norm: Any) -> str | None:
    """None if a norm's attributes say all that it does: weight, variance_epsilon and SGLang's order of rounding."""
    if not type(norm).__name__.endswith("RMSNorm") and "RMSNorm_" not in type(norm).__name__:
        return f"a norm is {type(norm).__name__}, not RMSNorm"
    for name, off in (
        ("variance_size_override", None), ("fp32_residual", False), ("override_orig_dtype", None),
        ("x_pad_to_multiple", 0), ("has_weight", True),
    ):  # fmt: skip
        if getattr(norm, name, off) != off:
            return f"a norm has {name}={getattr(norm, name)!r}"
    return None


def _norm(norm: Any, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """Normalize x + residual (None: x); residual becomes the sum."""
    # vLLM always rounds before the product with the weight, SGLang's norms carry a flag.
    cast_first = getattr(norm, "cast_x_before_out_mul", True)
    return rms_norm(x, norm.weight, norm.variance_epsilon, residual, None, cast_first)


class _DecoderLayer(nn.Module):
    """What the hosts' layers share. hidden_states, residual: [T, H]; residual is None in the first layer.

    The residual's memory is overwritten with the sum.
    """

    self_attn: nn.Module
    mlp: nn.Module
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """None if our forward serves this module (ours or the host's), else the reason."""
        for name in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"):
            if not hasattr(module, name):
                return f"it has no {name}"
        return _unsupported_norm(module.input_layernorm) or _unsupported_norm(module.post_attention_layernorm)


class VllmLlamaDecoderLayer(_DecoderLayer):
    """vllm.model_executor.models.llama.LlamaDecoderLayer; see _DecoderLayer.

    vllm_config: vLLM's, or None if `config` (a Hugging Face LlamaConfig) is given.
    """

    def __init__(
        self,
        vllm_config: Any,
        prefix: str = "",
        config: Any = None,
        attn_layer_type: type[nn.Module] = LlamaAttention,
    ) -> None:
        super().__init__()
        if config is None and vllm_config is None:
            raise ValueError("LlamaDecoderLayer needs a vllm_config or a config")
        config = config or vllm_config.model_config.hf_config
        quant_config = getattr(vllm_config, "quant_config", None)
        if not getattr(config, "is_causal", True):
            raise ValueError("config.is_causal=False (bidirectional attention) is not supported")
        bias = getattr(config, "attention_bias", False) or getattr(config, "bias", False)
        self.hidden_size = config.hidden_size
        self.self_attn = attn_layer_type(
            config=config, hidden_size=config.hidden_size, num_heads=config.num_attention_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", config.num_attention_heads),
            max_position_embeddings=getattr(config, "max_position_embeddings", 8192), quant_config=quant_config,
            bias=getattr(config, "qkv_bias", bias), bias_o_proj=bias,
            cache_config=getattr(vllm_config, "cache_config", None), prefix=f"{prefix}.self_attn",
        )  # fmt: skip
        self.mlp = VllmLlamaMLP(
            config.hidden_size, config.intermediate_size, config.hidden_act, quant_config=quant_config,
            bias=getattr(config, "mlp_bias", False), prefix=f"{prefix}.mlp",
        )  # fmt: skip
        self.input_layernorm = VllmRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = VllmRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = _norm(self.input_layernorm, hidden_states, residual)
        residual = hidden_states if residual is None else residual
        hidden = self.self_attn(positions=positions, hidden_states=hidden)
        hidden = _norm(self.post_attention_layernorm, hidden, residual)
        return self.mlp(hidden), residual


class _SGLangDecoderLayer(_DecoderLayer):
    def _build(self, config: Any, layer_id: int, quant_config: Any, prefix: str) -> None:
        bias = getattr(config, "attention_bias", False) or getattr(config, "bias", False)
        self.hidden_size = config.hidden_size
        self.self_attn = SGLangLlamaAttention(config, layer_id, quant_config, f"{prefix}.self_attn", bias)
        self.mlp = SGLangLlamaMLP(
            config.hidden_size, config.intermediate_size, config.hidden_act, quant_config, f"{prefix}.mlp"
        )
        self.input_layernorm = SGLangRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = SGLangRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class SGLangLlamaDecoderLayer_0_5_16(_SGLangDecoderLayer):
    """sglang.srt.models.llama.LlamaDecoderLayer before 0.5.23; see _DecoderLayer."""

    def __init__(
        self, config: Any, layer_id: int = 0, start_layer: int = 0, quant_config: Any = None, prefix: str = ""
    ) -> None:
        super().__init__()
        self._build(config, layer_id, quant_config, prefix)

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: Any,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = _norm(self.input_layernorm, hidden_states, residual)
        residual = hidden_states if residual is None else residual
        hidden = self.self_attn(positions=positions, hidden_states=hidden, forward_batch=forward_batch)
        hidden = _norm(self.post_attention_layernorm, hidden, residual)
        return self.mlp(hidden), residual


class SGLangLlamaDecoderLayer(_SGLangDecoderLayer):
    """sglang.srt.models.llama.LlamaDecoderLayer: hidden_states [T, H] is the residual stream, and so is the result.

    In SGLang the stream is carried by the layers' boundaries, which also gather and reduce: capture_output and
    stage_boundaries=False, which serve those, raise ValueError.
    """

    def __init__(
        self,
        config: Any,
        layer_id: int = 0,
        start_layer: int = 0,
        quant_config: Any = None,
        prefix: str = "",
        stage_boundaries: bool = True,
    ) -> None:
        super().__init__()
        if not stage_boundaries:
            raise ValueError("stage_boundaries=False is for SGLang's subclasses of its own layer")
        self._build(config, layer_id, quant_config, prefix)

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: Any,
        capture_output: Any = None,
    ) -> torch.Tensor:
        if capture_output is not None:
            raise ValueError("capture_output needs SGLang's own layer boundaries")
        hidden = _norm(self.input_layernorm, hidden_states, None)
        hidden = self.self_attn(positions=positions, hidden_states=hidden, forward_batch=forward_batch)
        stream = hidden_states.clone()
        hidden = _norm(self.post_attention_layernorm, hidden, stream)
        return self.mlp(hidden) + stream


def _inputs(case: Case, device: str, generator: torch.Generator) -> list:
    x, gate_up, down = gated_mlp.SPEC.inputs(case, device, generator)
    norms = {
        name: (1 + 0.1 * torch.randn(x.shape[-1], generator=generator, device=device)).to(x.dtype)
        for name in ("input_layernorm", "post_attention_layernorm")
    }
    residual = torch.randn(x.shape, generator=generator, device=device).to(x.dtype)
    return [x, residual, {**norms, "gate_up": gate_up, "down": down}, torch.neg, 1e-5]


def _bytes(case: Case) -> int:
    size = torch.finfo(getattr(torch, case.dtype)).bits // 8
    return gated_mlp.SPEC.bytes_moved(case) + 2 * size * case.dims["hidden"] * (1 + case.dims["tokens"])


_VLLM = "vllm.model_executor.models.llama:LlamaDecoderLayer"
_SGLANG = "sglang.srt.models.llama:LlamaDecoderLayer"
_NOTE = "the host's attention and MLP stay, the norms are ours; put in only when named"

SPEC = OpSpec(
    name="llama_decoder_layer",
    level=3,
    reference=reference,
    cases=gated_mlp.SPEC.cases,
    inputs=_inputs,
    bytes_moved=_bytes,
    flops=gated_mlp.SPEC.flops,
    calls=("rms_norm",),
    targets=(
        Target("vllm", _VLLM, "VllmLlamaDecoderLayer", "module", default=False, note=_NOTE),
        Target("sglang", _SGLANG, "SGLangLlamaDecoderLayer_0_5_16", "module", "<0.5.23", False, _NOTE),
        Target(
            "sglang", _SGLANG, "SGLangLlamaDecoderLayer", "standalone", ">=0.5.23",
            note="the host's layer hands the residual to boundary objects that gather and reduce: patch its parts",
        ),
    ),
)  # fmt: skip
