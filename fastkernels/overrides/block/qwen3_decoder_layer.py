"""One layer of a Qwen3 model: a Llama layer whose attention normalizes each query and key head before the rope."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fastkernels.core.spec import OpSpec, Target
from fastkernels.overrides.block import dense_calls as _dense_calls
from fastkernels.overrides.block.decoder_layer import (
    SGLangDecoderLayer,
    VllmDecoderLayer,
    check_causal,
    run_layer,
    run_on_stream,
)
from fastkernels.overrides.block.layer_calls import MUTATES, TOLERANCE, layer_cases
from fastkernels.overrides.block.llama_attention import HeadNorms, LlamaAttention, SGLangLlamaAttention
from fastkernels.overrides.norm.sglang import SGLangRMSNorm
from fastkernels.overrides.norm.vllm import VllmRMSNorm


class Qwen3Attention(HeadNorms, LlamaAttention):
    """vllm.model_executor.models.qwen3.Qwen3Attention, built from the config; see LlamaAttention.

    As in the checkpoints and in SGLang, attention_bias is that of all four projections.
    """

    def __init__(self, config: Any, cache_config: Any, quant_config: Any, prefix: str) -> None:
        bias = getattr(config, "attention_bias", False)
        super().__init__(
            config, config.hidden_size, config.num_attention_heads, config.num_key_value_heads,
            config.max_position_embeddings, quant_config, bias, bias, cache_config, prefix,
        )  # fmt: skip
        self.q_norm = VllmRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = VllmRMSNorm(self.head_dim, eps=config.rms_norm_eps)


class SGLangQwen3Attention(HeadNorms, SGLangLlamaAttention):
    """sglang.srt.models.qwen3.Qwen3Attention, built from the config; see LlamaAttention."""

    def __init__(self, config: Any, layer_id: int, quant_config: Any, prefix: str) -> None:
        super().__init__(config, layer_id, quant_config, prefix, getattr(config, "attention_bias", False))
        self.q_norm = SGLangRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = SGLangRMSNorm(self.head_dim, eps=config.rms_norm_eps)


class VllmQwen3DecoderLayer_0_26(VllmDecoderLayer):
    """vllm.model_executor.models.qwen3.Qwen3DecoderLayer before 0.32; see VllmDecoderLayer.

    config: a Hugging Face Qwen3Config. per_layer_sliding_window: None for what config.layer_types says.
    """

    def __init__(
        self,
        config: Any,
        cache_config: Any = None,
        quant_config: Any = None,
        prefix: str = "",
        per_layer_sliding_window: int | None = None,
    ) -> None:
        super().__init__()
        check_causal(config)
        if getattr(config, "dual_chunk_attention_config", None):
            raise ValueError("config.dual_chunk_attention_config is not supported")
        attention = Qwen3Attention(config, cache_config, quant_config, f"{prefix}.self_attn")
        if per_layer_sliding_window is not None:
            attention.attn.window_left = per_layer_sliding_window - 1  # vLLM's windows count the token itself
        self._build_around(attention, config, quant_config, prefix)


class VllmQwen3DecoderLayer(VllmQwen3DecoderLayer_0_26):
    """vllm.model_executor.models.qwen3.Qwen3DecoderLayer from 0.32 on. mrope_positions_factor: without effect here."""

    def __init__(
        self,
        config: Any,
        cache_config: Any = None,
        quant_config: Any = None,
        prefix: str = "",
        per_layer_sliding_window: int | None = None,
        mrope_positions_factor: int = 4,
    ) -> None:
        super().__init__(config, cache_config, quant_config, prefix, per_layer_sliding_window)


class _SGLangQwen3DecoderLayer(SGLangDecoderLayer):
    """alt_stream, on which SGLang normalizes the keys beside the queries, is not used."""

    def __init__(
        self,
        config: Any,
        layer_id: int = 0,
        start_layer: int = 0,
        quant_config: Any = None,
        prefix: str = "",
        alt_stream: torch.cuda.Stream | None = None,
    ) -> None:
        super().__init__()
        attention = SGLangQwen3Attention(config, layer_id, quant_config, f"{prefix}.self_attn")
        self._build_around(attention, config, quant_config, prefix)


class SGLangQwen3DecoderLayer_0_5_16(_SGLangQwen3DecoderLayer):
    """sglang.srt.models.qwen3.Qwen3DecoderLayer before 0.5.23; the residual's memory is overwritten with the sum."""

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: Any,
        residual: torch.Tensor | None,
        post_residual_addition: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is not None and post_residual_addition is not None:
            residual = residual + post_residual_addition
        return run_layer(self, hidden_states, residual, positions=positions, forward_batch=forward_batch)


class SGLangQwen3DecoderLayer(_SGLangQwen3DecoderLayer):
    """sglang.srt.models.qwen3.Qwen3DecoderLayer: hidden_states [T, H] is the residual stream, and so is the result.

    capture_output serves SGLang's own boundaries between layers: it raises ValueError.
    """

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: Any,
        post_residual_addition: torch.Tensor | None = None,
        capture_output: Any = None,
    ) -> torch.Tensor:
        if post_residual_addition is not None:
            hidden_states = hidden_states + post_residual_addition
        return run_on_stream(self, positions, hidden_states, forward_batch, capture_output)


_VLLM = "vllm.model_executor.models.qwen3:Qwen3DecoderLayer"
_SGLANG = "sglang.srt.models.qwen3:Qwen3DecoderLayer"
_NOTE = "the host's attention and MLP stay, the norms are ours; put in only when named"
_BOUNDARY = "the host's layer hands the residual to objects that gather and reduce: patch its parts"

SPEC = OpSpec(
    name="qwen3_decoder_layer",
    level=3,
    reference=_dense_calls.reference,
    cases=layer_cases(
        {"hidden": 4096, "heads": 32, "kv_heads": 8, "head_size": 128, "intermediate": 12288},
        {"hidden": 72, "heads": 6, "kv_heads": 2, "head_size": 12, "intermediate": 100},
    ),
    inputs=partial(_dense_calls.inputs, head_norms=True),
    bytes_moved=_dense_calls.bytes_moved,
    flops=_dense_calls.flops,
    tolerance=TOLERANCE,
    dims_of=_dense_calls.dims_of,
    vary=_dense_calls.vary,
    activations=(1, 2),
    build=_dense_calls.build,
    mutates=MUTATES,
    calls=("rms_norm",),
    parts=("attention", "gated_mlp", "parallel_linear", "rotary_emb", "rope_store_kvcache"),
    targets=(
        Target("vllm", _VLLM, "VllmQwen3DecoderLayer_0_26", "module", "<0.32", False, _NOTE),
        Target("vllm", _VLLM, "VllmQwen3DecoderLayer", "module", ">=0.32", False, _NOTE),
        Target("sglang", _SGLANG, "SGLangQwen3DecoderLayer_0_5_16", "standalone", "<0.5.23", note=_BOUNDARY),
        Target("sglang", _SGLANG, "SGLangQwen3DecoderLayer", "standalone", ">=0.5.23", note=_BOUNDARY),
    ),
)
