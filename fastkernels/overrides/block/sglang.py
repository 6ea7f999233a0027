"""SGLang's MLP, attention blocks and decoder layers of Llama, Qwen3 and Mixtral; mergers of Qwen's vision towers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.activation.sglang import SGLangSiluAndMul
from fastkernels.overrides.activation.silu_and_mul import silu_and_mul
from fastkernels.overrides.attention.sglang import SGLangRadixAttention
from fastkernels.overrides.block.attention_sizes import head_size, rope_parameters
from fastkernels.overrides.block.decoder_layer import (
    DecoderLayer,
    SparseDecoderLayer,
    attention_bias,
    run_layer,
)
from fastkernels.overrides.block.gated_mlp import PackedMLP, check_activation
from fastkernels.overrides.block.patch_merger import EPS, IN_MLP, NAMED, PatchMerger, merge, unlike
from fastkernels.overrides.block.self_attention import HeadNorms, SelfAttention
from fastkernels.overrides.linear.parallel_linear import Row
from fastkernels.overrides.linear.sglang import (
    SGLangColumnParallelLinear,
    SGLangMergedColumnParallelLinear,
    SGLangMergedColumnParallelLinear_0_5_16,
    SGLangQKVParallelLinear,
    SGLangRowParallelLinear,
    SGLangRowParallelLinear_0_5_17,
)
from fastkernels.overrides.moe.sglang import SGLangMixtralMoE
from fastkernels.overrides.norm.sglang import SGLangRMSNorm
from fastkernels.overrides.rope.vllm import get_rope


class SGLangLlamaMLP_0_5_16(PackedMLP):
    """sglang.srt.models.llama.LlamaMLP before 0.5.23; see PackedMLP."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        quant_config: Any = None,
        prefix: str = "",
        reduce_results: bool = True,
        tp_rank: int | None = None,
        tp_size: int | None = None,
        use_dp_attention_reduce: bool = False,
    ) -> None:
        super().__init__()
        check_activation(hidden_act)
        self.gate_up_proj = SGLangMergedColumnParallelLinear_0_5_16(
            hidden_size, [intermediate_size] * 2, bias=False, quant_config=quant_config,
            prefix=f"{prefix}.gate_up_proj", tp_rank=tp_rank, tp_size=tp_size,
        )  # fmt: skip
        self.down_proj: Row = SGLangRowParallelLinear_0_5_17(
            intermediate_size, hidden_size, bias=False, quant_config=quant_config, reduce_results=reduce_results,
            prefix=f"{prefix}.down_proj", use_dp_attention_reduce=use_dp_attention_reduce, tp_rank=tp_rank,
            tp_size=tp_size,
        )  # fmt: skip
        self.act_fn = SGLangSiluAndMul()

    def forward(self, x: torch.Tensor, forward_batch: Any = None) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(x)
        out, _ = self.down_proj(silu_and_mul(gate_up))
        return out


class SGLangLlamaMLP(PackedMLP):
    """sglang.srt.models.llama.LlamaMLP; see PackedMLP."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        quant_config: Any = None,
        prefix: str = "",
        reduce_results: bool = True,
        parallel_group: Any = "tp",
        use_dp_attention_reduce: bool = False,
    ) -> None:
        super().__init__()
        check_activation(hidden_act)
        self.gate_up_proj = SGLangMergedColumnParallelLinear(
            hidden_size, [intermediate_size] * 2, bias=False, quant_config=quant_config,
            prefix=f"{prefix}.gate_up_proj", parallel_group=parallel_group,
        )  # fmt: skip
        self.down_proj: Row = SGLangRowParallelLinear(
            intermediate_size, hidden_size, bias=False, quant_config=quant_config, reduce_results=reduce_results,
            prefix=f"{prefix}.down_proj", use_dp_attention_reduce=use_dp_attention_reduce,
            parallel_group=parallel_group,
        )  # fmt: skip
        self.act_fn = SGLangSiluAndMul()

    def forward(self, x: torch.Tensor, forward_batch: Any = None) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(x)
        out, _ = self.down_proj(silu_and_mul(gate_up))
        return out


class SGLangLlamaAttention(SelfAttention):
    """sglang.srt.models.llama.LlamaAttention, built from the config: [T] and [T, H] to [T, H]."""

    def __init__(
        self, config: Any, layer_id: int = 0, quant_config: Any = None, prefix: str = "", bias: bool = False
    ) -> None:
        super().__init__()
        size, heads = head_size(config), config.num_attention_heads
        self.hidden_size, self.head_dim = config.hidden_size, size
        self.qkv_proj = SGLangQKVParallelLinear(
            config.hidden_size, size, heads, config.num_key_value_heads, bias=bias, quant_config=quant_config,
            prefix=f"{prefix}.qkv_proj",
        )  # fmt: skip
        self.o_proj = SGLangRowParallelLinear(
            heads * size, config.hidden_size, bias=bias, quant_config=quant_config, prefix=f"{prefix}.o_proj"
        )
        neox = getattr(config, "rope_is_neox_style", True)
        positions = getattr(config, "max_position_embeddings", 8192)
        self.rotary_emb = get_rope(size, positions, neox, rope_parameters(config))
        self._split_heads()
        self.attn = SGLangRadixAttention(
            self.num_heads, size, size**-0.5, self.num_kv_heads, layer_id, prefix=f"{prefix}.attn"
        )

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any
    ) -> torch.Tensor:
        return self._attend(positions, hidden_states, forward_batch)


class SGLangQwen3Attention(HeadNorms, SGLangLlamaAttention):
    """sglang.srt.models.qwen3.Qwen3Attention, built from the config; see SGLangLlamaAttention."""

    def __init__(self, config: Any, layer_id: int, quant_config: Any, prefix: str) -> None:
        super().__init__(config, layer_id, quant_config, prefix, getattr(config, "attention_bias", False))
        self.q_norm = SGLangRMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = SGLangRMSNorm(self.head_dim, eps=config.rms_norm_eps)


class SGLangDecoderLayer(DecoderLayer):
    """Base of SGLang's dense layers, whose forwards differ by version."""

    def _build_around(self, attention: nn.Module, config: Any, quant_config: Any, prefix: str) -> None:
        self.hidden_size = config.hidden_size
        self.self_attn = attention
        self.mlp = SGLangLlamaMLP(
            config.hidden_size, config.intermediate_size, config.hidden_act, quant_config, f"{prefix}.mlp"
        )
        self.input_layernorm = SGLangRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = SGLangRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


def run_on_stream(
    layer: Any, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any, capture_output: Any
) -> torch.Tensor:
    """Run a layer of SGLang since 0.5.23: hidden_states [T, H] and the result are the residual stream."""
    if capture_output is not None:
        raise ValueError("capture_output needs SGLang's own layer boundaries")
    inputs = {"positions": positions, "forward_batch": forward_batch}
    hidden, stream = run_layer(layer, hidden_states.clone(), None, **inputs)
    return hidden + stream


class SGLangLlamaDecoderLayer_0_5_16(SGLangDecoderLayer):
    """sglang.srt.models.llama.LlamaDecoderLayer before 0.5.23; the sum overwrites the residual's memory."""

    def __init__(
        self, config: Any, layer_id: int = 0, start_layer: int = 0, quant_config: Any = None, prefix: str = ""
    ) -> None:
        super().__init__()
        name = f"{prefix}.self_attn"
        attention = SGLangLlamaAttention(config, layer_id, quant_config, name, attention_bias(config))
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
    """sglang.srt.models.llama.LlamaDecoderLayer: hidden_states and result [T, H] are the residual stream.

    In SGLang, boundary objects between layers pass the stream on, gather and reduce. Raises ValueError for
    capture_output and stage_boundaries=False, which serve these objects.
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
        attention = SGLangLlamaAttention(config, layer_id, quant_config, name, attention_bias(config))
        self._build_around(attention, config, quant_config, prefix)

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: Any,
        capture_output: Any = None,
    ) -> torch.Tensor:
        return run_on_stream(self, positions, hidden_states, forward_batch, capture_output)


class _SGLangQwen3DecoderLayer(SGLangDecoderLayer):
    """alt_stream, on which SGLang normalizes keys concurrently with queries, is ignored."""

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
    """sglang.srt.models.qwen3.Qwen3DecoderLayer before 0.5.23; the sum overwrites the residual's memory."""

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
    """sglang.srt.models.qwen3.Qwen3DecoderLayer: hidden_states and result [T, H] are the residual stream.

    Raises ValueError for capture_output, which serves SGLang's boundary objects between layers.
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


class _SGLangMixtralDecoderLayer(SparseDecoderLayer):
    """Base of both versions; config.sliding_window is ignored, as in SGLang."""

    def __init__(self, config: Any, layer_id: int = 0, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        check_activation(getattr(config, "hidden_act", "silu"))
        self.hidden_size = config.hidden_size
        self.self_attn = SGLangLlamaAttention(config, layer_id, quant_config, f"{prefix}.self_attn")
        self.block_sparse_moe = SGLangMixtralMoE(
            config.num_local_experts, config.num_experts_per_tok, config.hidden_size, config.intermediate_size,
            layer_id, quant_config=quant_config, prefix=f"{prefix}.block_sparse_moe",
        )  # fmt: skip
        self.input_layernorm = SGLangRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = SGLangRMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class SGLangMixtralDecoderLayer_0_5_17(_SGLangMixtralDecoderLayer):
    """sglang.srt.models.mixtral.MixtralDecoderLayer before 0.5.23; see _SGLangMixtralDecoderLayer."""

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: Any,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._run(hidden_states, residual, positions=positions, forward_batch=forward_batch)


class SGLangMixtralDecoderLayer(_SGLangMixtralDecoderLayer):
    """sglang.srt.models.mixtral.MixtralDecoderLayer: hidden_states and result [T, H] are the residual stream.

    In SGLang, boundary objects between layers pass the stream on, gather and reduce.
    """

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any
    ) -> torch.Tensor:
        hidden, stream = self._run(
            hidden_states.clone(), None, positions=positions, forward_batch=forward_batch
        )
        return hidden + stream


def _inner(
    sizes: tuple[int, int], quant_config: Any, prefix: str, last: bool, group: Any = "tp"
) -> nn.Module:
    cls = SGLangRowParallelLinear if last else SGLangColumnParallelLinear
    return cls(*sizes, bias=True, quant_config=quant_config, prefix=prefix, parallel_group=group)


class SGLangQwen2VisionPatchMerger(PatchMerger):
    """Qwen2VisionPatchMerger: patches x [P, context_dim] to [P / spatial_merge_size^2, d_model]."""

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


class SGLangQwen2_5_VisionPatchMerger(PatchMerger):
    """Qwen2_5_VisionPatchMerger: as SGLangQwen2VisionPatchMerger, with RMSNorm. x: [..., context_dim]

    padded_context_dim: of the MLP, which may be wider so that tensor parallelism divides it
    """

    parts = IN_MLP

    def __init__(
        self,
        dim: int,
        context_dim: int,
        padded_context_dim: int,
        spatial_merge_size: int = 2,
        quant_config: Any = None,
        prefix: str = "",
        use_data_parallel: bool = False,
        cast_x_before_out_mul: bool = False,
        force_native_norm: bool = False,
    ) -> None:
        super().__init__()
        self.hidden_size = wide = context_dim * spatial_merge_size**2
        self.padded_context_dim = inner = padded_context_dim * spatial_merge_size**2
        self.ln_q = SGLangRMSNorm(
            context_dim, eps=EPS, cast_x_before_out_mul=cast_x_before_out_mul, force_native=force_native_norm
        )
        group = "replicated" if use_data_parallel else "tp"
        first = _inner((wide, inner), quant_config, f"{prefix}.mlp.0", False, group)
        second = _inner((inner, dim), quant_config, f"{prefix}.mlp.2", True, group)
        self.mlp = nn.ModuleList([first, nn.GELU(), second])

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """Return why the activation, which ours does not call, has to run, or None."""
        return unlike(IN_MLP, module)

    needs_host = supports

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return merge(self, IN_MLP, x.reshape(-1, x.shape[-1]))


class SGLangQwen3VLMoeVisionPatchMerger(PatchMerger):
    """Qwen3VLMoeVisionPatchMerger, of Qwen3-VL with and without experts: as SGLangQwen2_5_VisionPatchMerger.

    use_postshuffle_norm: a norm of whole blocks, as of layers within the tower (deepstack)
    disable_merger_proj: the norm alone; unsupported
    """

    parts = NAMED

    def __init__(
        self,
        dim: int,
        context_dim: int,
        padded_context_dim: int,
        norm_layer: Callable[[int], nn.Module] | None = None,
        spatial_merge_size: int = 2,
        use_postshuffle_norm: bool = False,
        quant_config: Any = None,
        prefix: str = "",
        use_data_parallel: bool = False,
        parallel_group: Any = None,
        disable_merger_proj: bool = False,
    ) -> None:
        super().__init__()
        if disable_merger_proj:
            raise ValueError("disable_merger_proj=True is not supported: such a merger is a norm alone")
        self.hidden_size = wide = context_dim * spatial_merge_size**2
        self.padded_context_dim = inner = padded_context_dim * spatial_merge_size**2
        self.use_postshuffle_norm, self.disable_merger_proj = use_postshuffle_norm, False
        self.norm = (norm_layer or partial(nn.LayerNorm, eps=EPS))(
            wide if use_postshuffle_norm else context_dim
        )
        group = "replicated" if use_data_parallel else parallel_group or "attn_tp"
        self.linear_fc1 = _inner((wide, inner), quant_config, f"{prefix}.linear_fc1", False, group)
        self.act_fn = nn.GELU()
        self.linear_fc2 = _inner((inner, dim), quant_config, f"{prefix}.linear_fc2", True, group)

    @staticmethod
    def supports(module: nn.Module) -> str | None:
        """Return why the host's code has to run: there are no products, or an activation that ours does not call."""
        if getattr(module, "disable_merger_proj", False):
            return "disable_merger_proj leaves the norm alone"
        return unlike(NAMED, module)

    needs_host = supports

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return merge(self, NAMED, x)


_MODELS = "sglang.srt.models"
_MLP = f"{_MODELS}.llama:LlamaMLP"
_LLAMA = f"{_MODELS}.llama:LlamaDecoderLayer"
_QWEN3 = f"{_MODELS}.qwen3:Qwen3DecoderLayer"
_MIXTRAL = f"{_MODELS}.mixtral:MixtralDecoderLayer"
_MLP_NOTE = "by default the host's own layers stay and only silu_and_mul between them is ours"
_LAYER_NOTE = "by default the host's attention and MLP stay and only the norms are ours"
_BOUNDARY_NOTE = (
    "the host's layer passes the residual to boundary objects that gather and reduce: patch its parts"
)
_MIXTRAL_NOTE = "it only calls its parts, which are patched one by one"

_MERGERS = (  # the class with all options first: the judge's
    ("qwen3_vl:Qwen3VLMoeVisionPatchMerger", "SGLangQwen3VLMoeVisionPatchMerger"),
    ("qwen2_vl:Qwen2VisionPatchMerger", "SGLangQwen2VisionPatchMerger"),
    ("qwen2_5_vl:Qwen2_5_VisionPatchMerger", "SGLangQwen2_5_VisionPatchMerger"),
)
_MERGER_NOTE = "Off by default: not measured in SGLang."

TARGETS = {
    "patch_merger": tuple(
        Target("sglang", f"sglang.srt.models.{path}", ours, "module", ">=0.5.23", False, _MERGER_NOTE)
        for path, ours in _MERGERS
    ),
    "gated_mlp": (
        Target("sglang", _MLP, "SGLangLlamaMLP_0_5_16", "module", "<0.5.23", False, _MLP_NOTE),
        Target("sglang", _MLP, "SGLangLlamaMLP", "module", ">=0.5.23", False, _MLP_NOTE),
    ),
    "llama_decoder_layer": (
        Target("sglang", _LLAMA, "SGLangLlamaDecoderLayer_0_5_16", "module", "<0.5.23", False, _LAYER_NOTE),
        Target("sglang", _LLAMA, "SGLangLlamaDecoderLayer", "standalone", ">=0.5.23", note=_BOUNDARY_NOTE),
    ),
    "qwen3_decoder_layer": (
        Target(
            "sglang", _QWEN3, "SGLangQwen3DecoderLayer_0_5_16", "standalone", "<0.5.23", note=_BOUNDARY_NOTE
        ),
        Target("sglang", _QWEN3, "SGLangQwen3DecoderLayer", "standalone", ">=0.5.23", note=_BOUNDARY_NOTE),
    ),
    "mixtral_decoder_layer": (
        Target(
            "sglang",
            _MIXTRAL,
            "SGLangMixtralDecoderLayer_0_5_17",
            "standalone",
            "<0.5.23",
            note=_MIXTRAL_NOTE,
        ),
        Target("sglang", _MIXTRAL, "SGLangMixtralDecoderLayer", "standalone", ">=0.5.23", note=_MIXTRAL_NOTE),
    ),
}
