"""vLLM's MLP, attention blocks and decoder layers of Llama, Qwen3 and Mixtral; mergers of Qwen's vision towers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from fastkernels.core.forward_context import get_forward_context
from fastkernels.core.spec import Target
from fastkernels.overrides.activation.silu_and_mul import silu_and_mul
from fastkernels.overrides.activation.vllm import VllmSiluAndMul
from fastkernels.overrides.attention.attention import AttentionType
from fastkernels.overrides.attention.vllm import VllmAttention
from fastkernels.overrides.block.attention_sizes import head_size, rope_parameters
from fastkernels.overrides.block.decoder_layer import (
    DecoderLayer,
    SparseDecoderLayer,
    attention_bias,
    check_causal,
    run_layer,
)
from fastkernels.overrides.block.gated_mlp import PackedMLP, check_activation
from fastkernels.overrides.block.patch_merger import EPS, IN_MLP, NAMED, PatchMerger, merge, unlike
from fastkernels.overrides.block.self_attention import HeadNorms, SelfAttention, sliding_window
from fastkernels.overrides.cache.store_kvcache import store_kvcache
from fastkernels.overrides.linear.vllm import (
    VllmColumnParallelLinear,
    VllmMergedColumnParallelLinear,
    VllmQKVParallelLinear,
    VllmRowParallelLinear,
)
from fastkernels.overrides.moe.vllm import VllmMixtralMoE
from fastkernels.overrides.norm.gemma_rms_norm import gemma_rms_norm
from fastkernels.overrides.norm.rms_norm import rms_norm
from fastkernels.overrides.norm.vllm import VllmGemmaRMSNorm, VllmRMSNorm
from fastkernels.overrides.rope.rope_scaling import axes_chosen
from fastkernels.overrides.rope.rope_store_kvcache import rope_store_kvcache
from fastkernels.overrides.rope.rotary_emb import rotary_emb
from fastkernels.overrides.rope.vllm import OF_TABLES, VllmMRotaryEmbedding, get_rope


class VllmLlamaMLP(PackedMLP):
    """vllm.model_executor.models.llama.LlamaMLP; see PackedMLP."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        quant_config: Any = None,
        bias: bool = False,
        prefix: str = "",
        reduce_results: bool = True,
        disable_tp: bool = False,
    ) -> None:
        super().__init__()
        check_activation(hidden_act)
        self.gate_up_proj = VllmMergedColumnParallelLinear(
            hidden_size, [intermediate_size] * 2, bias=bias, quant_config=quant_config,
            prefix=f"{prefix}.gate_up_proj", disable_tp=disable_tp,
        )  # fmt: skip
        self.down_proj = VllmRowParallelLinear(
            intermediate_size, hidden_size, bias=bias, quant_config=quant_config, reduce_results=reduce_results,
            prefix=f"{prefix}.down_proj", disable_tp=disable_tp,
        )  # fmt: skip
        self.act_fn = VllmSiluAndMul()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Our engine's, which may compute the product and its activation at once: linear_silu_and_mul.activated
        activated = getattr(self, "activated", None)
        if activated is not None:
            out, _ = self.down_proj(activated(self.gate_up_proj, x))
            return out
        gate_up, _ = self.gate_up_proj(x)
        out, _ = self.down_proj(silu_and_mul(gate_up))
        return out


class LlamaAttention(SelfAttention):
    """vllm.model_executor.models.llama.LlamaAttention: maps positions [T] and hidden_states [T, H] to [T, H]."""

    def __init__(
        self,
        config: Any,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        max_position_embeddings: int = 8192,
        quant_config: Any = None,
        bias: bool = False,
        bias_o_proj: bool = False,
        cache_config: Any = None,
        prefix: str = "",
        attn_type: str = AttentionType.DECODER,
    ) -> None:
        super().__init__()
        size = head_size(config)
        self.hidden_size, self.head_dim = hidden_size, size
        self.qkv_proj = VllmQKVParallelLinear(
            hidden_size, size, num_heads, num_kv_heads, bias=bias, quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )  # fmt: skip
        self.o_proj = VllmRowParallelLinear(
            num_heads * size,
            hidden_size,
            bias=bias_o_proj,
            quant_config=quant_config,
            prefix=f"{prefix}.o_proj",
        )
        self.rotary_emb = get_rope(size, max_position_embeddings, True, rope_parameters(config))
        self._split_heads()
        self.attn = VllmAttention(
            self.num_heads, size, size**-0.5, num_kv_heads=self.num_kv_heads, cache_config=cache_config,
            quant_config=quant_config, per_layer_sliding_window=sliding_window(config, prefix), attn_type=attn_type,
            prefix=f"{prefix}.attn",
        )  # fmt: skip

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._attend(positions, hidden_states)

    def _fuses(self, qkv: torch.Tensor) -> bool:
        """Return whether one launch replaces the head norms, rotary_emb and store_kvcache.

        It does on a GPU, or where rope_store_kvcache is requested by name, if the separate modules are all ours and
        none of their ops is requested by name.
        """
        norms, apart = self._head_norms(), (rotary_emb, store_kvcache)
        return (
            rope_store_kvcache.requested != "off"
            and (qkv.is_cuda or rope_store_kvcache.requested == "named")
            and not any(op.requested for op in ((*apart, rms_norm, gemma_rms_norm) if norms else apart))
            and type(self.rotary_emb) in (*OF_TABLES, VllmMRotaryEmbedding)
            and type(self.attn) is VllmAttention
            and self.attn.kv_cache is not None
            and all(type(n) is VllmGemmaRMSNorm or _is_plain(n) for n in norms)
            and len({(type(n), n.variance_epsilon) for n in norms}) <= 1
        )

    def _rope_and_store(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        by_head, rope, attn = (-1, self.head_dim), self.rotary_emb, self.attn
        table = rope.cos_sin_cache
        if positions.ndim == 2:
            positions, table = axes_chosen(positions, table, rope.mrope_section, rope.mrope_interleaved)
        norms = self._head_norms()
        weights = [norm.weight for norm in norms] or [None, None]
        rope_store_kvcache(
            positions, q.unflatten(-1, by_head), k.unflatten(-1, by_head), v.unflatten(-1, by_head), *attn.kv_cache,
            get_forward_context().of(attn).slot_mapping, table, rope.is_neox_style, *weights,
            norms[0].variance_epsilon if norms else 1e-6, attn.k_scale, attn.v_scale, *self._rest_of_norms(),
        )  # fmt: skip

    def _rest_of_norms(self) -> tuple[Any, ...]:
        """Return the arguments of rope_store_kvcache after the scales that are not defaults."""
        return (1.0,) if any(type(norm) is VllmGemmaRMSNorm for norm in self._head_norms()) else ()


def _is_plain(norm: Any) -> bool:
    return type(norm) is VllmRMSNorm and norm.variance_size_override is None


class Qwen3Attention(HeadNorms, LlamaAttention):
    """vllm.model_executor.models.qwen3.Qwen3Attention, built from the config; see LlamaAttention.

    attention_bias applies to all four projections, as in the checkpoints and in SGLang.
    """

    def __init__(self, config: Any, cache_config: Any, quant_config: Any, prefix: str) -> None:
        bias = getattr(config, "attention_bias", False)
        super().__init__(
            config, config.hidden_size, config.num_attention_heads, config.num_key_value_heads,
            config.max_position_embeddings, quant_config, bias, bias, cache_config, prefix,
        )  # fmt: skip
        self.q_norm = VllmRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = VllmRMSNorm(self.head_dim, eps=config.rms_norm_eps)


class VllmDecoderLayer(DecoderLayer):
    """Base of vLLM's dense layers; the sum overwrites the residual's memory."""

    def _build_around(self, attention: nn.Module, config: Any, quant_config: Any, prefix: str) -> None:
        self.hidden_size = config.hidden_size
        self.self_attn = attention
        self.mlp = VllmLlamaMLP(
            config.hidden_size, config.intermediate_size, config.hidden_act, quant_config=quant_config,
            bias=getattr(config, "mlp_bias", False), prefix=f"{prefix}.mlp",
        )  # fmt: skip
        self.input_layernorm = VllmRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = VllmRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return run_layer(self, hidden_states, residual, positions=positions)


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
        quant_config, bias = getattr(vllm_config, "quant_config", None), attention_bias(config)
        attention = attn_layer_type(
            config=config, hidden_size=config.hidden_size, num_heads=config.num_attention_heads,
            num_kv_heads=getattr(config, "num_key_value_heads", config.num_attention_heads),
            max_position_embeddings=getattr(config, "max_position_embeddings", 8192), quant_config=quant_config,
            bias=getattr(config, "qkv_bias", bias), bias_o_proj=bias,
            cache_config=getattr(vllm_config, "cache_config", None), prefix=f"{prefix}.self_attn",
        )  # fmt: skip
        self._build_around(attention, config, quant_config, prefix)


class VllmQwen3DecoderLayer_0_26(VllmDecoderLayer):
    """vllm.model_executor.models.qwen3.Qwen3DecoderLayer before 0.32; see VllmDecoderLayer.

    config: a Hugging Face Qwen3Config. per_layer_sliding_window: by default the window of config.layer_types.
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
    """vllm.model_executor.models.qwen3.Qwen3DecoderLayer since 0.32. mrope_positions_factor is ignored."""

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


class VllmMixtralDecoderLayer(SparseDecoderLayer):
    """vllm.model_executor.models.mixtral.MixtralDecoderLayer; config: a Hugging Face MixtralConfig.

    Without a cache_config, the layer attends to config.sliding_window tokens if that is set. Raises ValueError for
    enable_eplb and for activations other than silu.
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
        check_activation(getattr(config, "hidden_act", "silu"))
        self.hidden_size = config.hidden_size
        # vLLM reads the window from its cache_config, which copies it from the model's config.
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


def _inner(sizes: tuple[int, int], quant_config: Any, prefix: str, last: bool) -> nn.Module:
    cls = VllmRowParallelLinear if last else VllmColumnParallelLinear
    return cls(*sizes, bias=True, quant_config=quant_config, prefix=prefix)


class VllmQwen2VisionPatchMerger(PatchMerger):
    """Qwen2VisionPatchMerger, and Qwen2.5-VL's: patches x [P, context_dim] to [P / spatial_merge_size^2, d_model]."""

    parts = IN_MLP

    def __init__(
        self,
        d_model: int,
        context_dim: int,
        norm_layer: Callable[[int], nn.Module] | None = None,
        spatial_merge_size: int = 2,
        quant_config: Any = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.hidden_size = wide = context_dim * spatial_merge_size**2
        self.ln_q = (norm_layer or partial(nn.LayerNorm, eps=EPS))(context_dim)
        first = _inner((wide, wide), quant_config, f"{prefix}.mlp.0", False)
        second = _inner((wide, d_model), quant_config, f"{prefix}.mlp.2", True)
        self.mlp = nn.ModuleList([first, nn.GELU(), second])

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """Return why the activation, which ours does not call, has to run, or None."""
        return unlike(IN_MLP, module)

    needs_host = supports

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return merge(self, IN_MLP, x)


class VllmQwen3VisionPatchMerger(PatchMerger):
    """Qwen3_VisionPatchMerger: as VllmQwen2VisionPatchMerger.

    use_postshuffle_norm: a norm of whole blocks, as of layers within the tower (deepstack)
    """

    parts = NAMED

    def __init__(
        self,
        d_model: int,
        context_dim: int,
        norm_layer: Callable[[int], nn.Module] | None = None,
        spatial_merge_size: int = 2,
        use_postshuffle_norm: bool = False,
        quant_config: Any = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.hidden_size = wide = context_dim * spatial_merge_size**2
        self.use_postshuffle_norm = use_postshuffle_norm
        self.norm = (norm_layer or partial(nn.LayerNorm, eps=EPS))(
            wide if use_postshuffle_norm else context_dim
        )
        self.linear_fc1 = _inner((wide, wide), quant_config, f"{prefix}.linear_fc1", False)
        self.act_fn = nn.GELU()
        self.linear_fc2 = _inner((wide, d_model), quant_config, f"{prefix}.linear_fc2", True)

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """Return why the activation, which ours does not call, has to run, or None."""
        return unlike(NAMED, module)

    needs_host = supports

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return merge(self, NAMED, x)


_MODELS = "vllm.model_executor.models"
_QWEN3 = f"{_MODELS}.qwen3:Qwen3DecoderLayer"
_MLP_NOTE = "by default the host's own layers stay and only silu_and_mul between them is ours"
_LAYER_NOTE = "by default the host's attention and MLP stay and only the norms are ours"
_MIXTRAL_NOTE = "it only calls its parts, which are patched one by one"

_MERGERS = (  # the class with all options first: the judge's
    ("qwen3_vl:Qwen3_VisionPatchMerger", "VllmQwen3VisionPatchMerger"),
    ("qwen2_vl:Qwen2VisionPatchMerger", "VllmQwen2VisionPatchMerger"),
    ("qwen2_5_vl:Qwen2_5_VisionPatchMerger", "VllmQwen2VisionPatchMerger"),
)

TARGETS = {
    "patch_merger": tuple(
        Target("vllm", f"{_MODELS}.{path}", ours, "module", default=False, note="Off by default: not measured in vLLM.")
        for path, ours in _MERGERS
    ),
    "gated_mlp": (
        Target("vllm", f"{_MODELS}.llama:LlamaMLP", "VllmLlamaMLP", "module", default=False, note=_MLP_NOTE),
    ),
    "llama_decoder_layer": (
        Target(
            "vllm", f"{_MODELS}.llama:LlamaDecoderLayer", "VllmLlamaDecoderLayer", "module", default=False,
            note=_LAYER_NOTE,
        ),
    ),
    "qwen3_decoder_layer": (
        Target("vllm", _QWEN3, "VllmQwen3DecoderLayer_0_26", "module", "<0.32", False, _LAYER_NOTE),
        Target("vllm", _QWEN3, "VllmQwen3DecoderLayer", "module", ">=0.32", False, _LAYER_NOTE),
    ),
    "mixtral_decoder_layer": (
        Target(
            "vllm", f"{_MODELS}.mixtral:MixtralDecoderLayer", "VllmMixtralDecoderLayer", "standalone",
            note=_MIXTRAL_NOTE,
        ),
    ),
}  # fmt: skip
