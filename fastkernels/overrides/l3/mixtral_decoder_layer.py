"""One layer of a Mixtral model: norm, attention, norm, sparse experts, with the residual carried beside."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from fastkernels.overrides.l1.rms_norm import SGLangRMSNorm, VllmRMSNorm
from fastkernels.overrides.l1.rms_norm import reference as rms_norm_reference
from fastkernels.overrides.l2 import sparse_moe
from fastkernels.overrides.l2.sparse_moe import SGLangMixtralMoE, VllmMixtralMoE
from fastkernels.overrides.l3._llama_attention import LlamaAttention, SGLangLlamaAttention
from fastkernels.spec import Case, OpSpec, Target


def reference(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weights: dict[str, torch.Tensor],
    attention: Any,
    top_k: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer around an attention function of [T, H]; weights: input_layernorm, post_attention_layernorm, and gate,
    w1, w2 of sparse_moe's reference. Returns (hidden states, residual); their sum is the residual stream.
    """
    residual = torch.zeros_like(x) if residual is None else residual
    h, residual = rms_norm_reference(x, weights["input_layernorm"], eps, residual)
    h, residual = rms_norm_reference(attention(h), weights["post_attention_layernorm"], eps, residual)
    assert residual is not None
    return sparse_moe.reference(h, weights["gate"], weights["w1"], weights["w2"], top_k), residual


def _check(config: Any) -> None:
    act = getattr(config, "hidden_act", "silu")
    if act != "silu":
        raise ValueError(f"hidden_act {act!r} is not supported, only 'silu'")


class _DecoderLayer(nn.Module):
    """What the hosts' layers share. hidden_states, residual: [T, H]; residual is None in the first layer.

    The residual's memory is overwritten with the sum.
    """

    self_attn: nn.Module
    block_sparse_moe: nn.Module
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    def _run(
        self, hidden_states: torch.Tensor, residual: torch.Tensor | None, **inputs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """inputs: what self_attn takes beside the hidden states."""
        if residual is None:
            residual, hidden_states = hidden_states, self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(hidden_states=hidden_states, **inputs)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.block_sparse_moe(hidden_states), residual


class VllmMixtralDecoderLayer(_DecoderLayer):
    """vllm.model_executor.models.mixtral.MixtralDecoderLayer; config: a Hugging Face MixtralConfig.

    Without a cache_config that says otherwise the layer attends to config.sliding_window tokens, where that is set.
    Raises ValueError for enable_eplb and for an activation that is not silu.
    """

    def __init__(
        self,
        config: Any,
        cache_config: Any = None,
        quant_config: Any = None,
        prefix: str = "",
        enable_eplb: bool = False,
    ) -> None:
        super().__init__()
        _check(config)
        self.hidden_size = config.hidden_size
        # vLLM takes the window from its cache_config, which took it from the model's config.
        cache_config = cache_config or SimpleNamespace(sliding_window=getattr(config, "sliding_window", None))
        self.self_attn = LlamaAttention(
            config, config.hidden_size, config.num_attention_heads, config.num_key_value_heads,
            config.max_position_embeddings, quant_config, cache_config=cache_config, prefix=f"{prefix}.self_attn",
        )  # fmt: skip
        self.block_sparse_moe = VllmMixtralMoE(
            config.num_local_experts, config.num_experts_per_tok, config.hidden_size, config.intermediate_size,
            quant_config=quant_config, prefix=f"{prefix}.block_sparse_moe", enable_eplb=enable_eplb,
        )  # fmt: skip
        self.input_layernorm = VllmRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = VllmRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._run(hidden_states, residual, positions=positions)


class _SGLangDecoderLayer(_DecoderLayer):
    """As in the host, config.sliding_window is not read."""

    def __init__(self, config: Any, layer_id: int = 0, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        _check(config)
        self.hidden_size = config.hidden_size
        self.self_attn = SGLangLlamaAttention(config, layer_id, quant_config, f"{prefix}.self_attn")
        self.block_sparse_moe = SGLangMixtralMoE(
            config.num_local_experts, config.num_experts_per_tok, config.hidden_size, config.intermediate_size,
            layer_id, quant_config=quant_config, prefix=f"{prefix}.block_sparse_moe",
        )  # fmt: skip
        self.input_layernorm = SGLangRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = SGLangRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class SGLangMixtralDecoderLayer_0_5_17(_SGLangDecoderLayer):
    """sglang.srt.models.mixtral.MixtralDecoderLayer before 0.5.23; see _SGLangDecoderLayer."""

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: Any,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._run(hidden_states, residual, positions=positions, forward_batch=forward_batch)


class SGLangMixtralDecoderLayer(_SGLangDecoderLayer):
    """sglang.srt.models.mixtral.MixtralDecoderLayer: hidden_states [T, H] is the residual stream, and so is the result.

    In SGLang the stream is carried by the layers' boundaries, which also gather and reduce.
    """

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any
    ) -> torch.Tensor:
        hidden, stream = self._run(
            hidden_states.clone(), None, positions=positions, forward_batch=forward_batch
        )
        return hidden + stream


def _inputs(case: Case, device: str, generator: torch.Generator) -> list:
    x, gate, w1, w2, top_k = sparse_moe.SPEC.inputs(case, device, generator)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=device)

    norms = {
        name: (1 + 0.1 * randn(x.shape[1])).to(x.dtype)
        for name in ("input_layernorm", "post_attention_layernorm")
    }
    weights = {**norms, "gate": gate, "w1": w1, "w2": w2}
    return [x, randn(*x.shape).to(x.dtype), weights, torch.neg, top_k, 1e-5]


def _bytes(case: Case) -> int:
    size = torch.finfo(getattr(torch, case.dtype)).bits // 8
    return sparse_moe.SPEC.bytes_moved(case) + 2 * size * case.dims["hidden"] * (1 + case.dims["tokens"])


_VLLM = "vllm.model_executor.models.mixtral:MixtralDecoderLayer"
_SGLANG = "sglang.srt.models.mixtral:MixtralDecoderLayer"
_NOTE = "it only calls its parts, which are patched one by one"

SPEC = OpSpec(
    name="mixtral_decoder_layer",
    level=3,
    reference=reference,
    cases=sparse_moe.SPEC.cases,
    inputs=_inputs,
    bytes_moved=_bytes,
    flops=sparse_moe.SPEC.flops,
    calls=("rms_norm", "linear", "topk_softmax", "fused_experts"),
    targets=(
        Target("vllm", _VLLM, "VllmMixtralDecoderLayer", "standalone", note=_NOTE),
        Target("sglang", _SGLANG, "SGLangMixtralDecoderLayer_0_5_17", "standalone", "<0.5.23", note=_NOTE),
        Target("sglang", _SGLANG, "SGLangMixtralDecoderLayer", "standalone", ">=0.5.23", note=_NOTE),
    ),
)
