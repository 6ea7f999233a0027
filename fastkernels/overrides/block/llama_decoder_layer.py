"""One layer of a Llama model: norm, attention, norm, gated MLP, with the residual carried beside the hidden states."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

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
from fastkernels.overrides.block.llama_attention import LlamaAttention, SGLangLlamaAttention


def _bias(config: Any) -> bool:
    return getattr(config, "attention_bias", False) or getattr(config, "bias", False)


class VllmLlamaDecoderLayer(VllmDecoderLayer):
    """vllm.model_executor.models.llama.LlamaDecoderLayer; see VllmDecoderLayer.

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
        check_causal(config)
        quant_config, bias = getattr(vllm_config, "quant_config", None), _bias(config)
        attention = attn_layer_type(
            config=config, hidden_size=config.hidden_size, num_heads=config.num_attention_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", config.num_attention_heads),
            max_position_embeddings=getattr(config, "max_position_embeddings", 8192), quant_config=quant_config,
            bias=getattr(config, "qkv_bias", bias), bias_o_proj=bias,
            cache_config=getattr(vllm_config, "cache_config", None), prefix=f"{prefix}.self_attn",
        )  # fmt: skip
        self._build_around(attention, config, quant_config, prefix)


class SGLangLlamaDecoderLayer_0_5_16(SGLangDecoderLayer):
    """sglang.srt.models.llama.LlamaDecoderLayer before 0.5.23; the residual's memory is overwritten with the sum."""

    def __init__(
        self, config: Any, layer_id: int = 0, start_layer: int = 0, quant_config: Any = None, prefix: str = ""
    ) -> None:
        super().__init__()
        name = f"{prefix}.self_attn"
        attention = SGLangLlamaAttention(config, layer_id, quant_config, name, _bias(config))
        self._build_around(attention, config, quant_config, prefix)

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: Any,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return run_layer(self, hidden_states, residual, positions=positions, forward_batch=forward_batch)


class SGLangLlamaDecoderLayer(SGLangDecoderLayer):
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
        name = f"{prefix}.self_attn"
        attention = SGLangLlamaAttention(config, layer_id, quant_config, name, _bias(config))
        self._build_around(attention, config, quant_config, prefix)

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: Any,
        capture_output: Any = None,
    ) -> torch.Tensor:
        return run_on_stream(self, positions, hidden_states, forward_batch, capture_output)


_VLLM = "vllm.model_executor.models.llama:LlamaDecoderLayer"
_SGLANG = "sglang.srt.models.llama:LlamaDecoderLayer"
_NOTE = "the host's attention and MLP stay, the norms are ours; put in only when named"

SPEC = OpSpec(
    name="llama_decoder_layer",
    level=3,
    reference=_dense_calls.reference,
    cases=layer_cases(
        {"hidden": 4096, "heads": 32, "kv_heads": 8, "head_size": 128, "intermediate": 14336},
        {"hidden": 72, "heads": 6, "kv_heads": 2, "head_size": 12, "intermediate": 100},
    ),
    inputs=_dense_calls.inputs,
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
        Target("vllm", _VLLM, "VllmLlamaDecoderLayer", "module", default=False, note=_NOTE),
        Target("sglang", _SGLANG, "SGLangLlamaDecoderLayer_0_5_16", "module", "<0.5.23", False, _NOTE),
        Target(
            "sglang", _SGLANG, "SGLangLlamaDecoderLayer", "standalone", ">=0.5.23",
            note="the host's layer hands the residual to boundary objects that gather and reduce: patch its parts",
        ),
    ),
)  # fmt: skip
