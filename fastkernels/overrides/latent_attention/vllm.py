"""vLLM's class of latent attention."""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.core.spec import Target
from fastkernels.overrides.attention.attention import refuse
from fastkernels.overrides.latent_attention.mla_attention import LatentAttention


class VllmMLAAttention_0_26(LatentAttention):
    """vllm.model_executor.layers.attention.mla_attention.MLAAttention of 0.26, without sparse attention.

    q: [T, heads, nope + rope]; kv_c_normed: [T, rank]; k_pe: [T, 1, rope] or [T, rope]; out: output_shape or
    [T, heads * v_head_dim].
    """

    def __init__(
        self,
        num_heads: int,
        scale: float,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        kv_b_proj: Any,
        cache_config: Any = None,
        quant_config: Any = None,
        prefix: str = "",
        attn_backend: type | None = None,
        use_sparse: bool = False,
        indexer: Any = None,
        topk_indices_buffer: torch.Tensor | None = None,
        **extra_impl_args: Any,
    ) -> None:
        refuse(
            prefix or "MLAAttention", quant_config=quant_config, attn_backend=attn_backend, use_sparse=use_sparse,
            indexer=indexer, topk_indices_buffer=topk_indices_buffer, extra_impl_args=extra_impl_args,
        )  # fmt: skip
        super().__init__(
            num_heads, scale, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, kv_lora_rank, kv_b_proj
        )
        self.q_lora_rank, self.layer_name = q_lora_rank, prefix

    def forward(  # type: ignore[override]  # the host's signature
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        output_shape: torch.Size | None = None,
    ) -> torch.Tensor:
        out = self.latent(q, kv_c_normed, k_pe.flatten(1))
        return out if output_shape is None else out.view(output_shape)


class VllmMLAAttention(VllmMLAAttention_0_26):
    """The same since 0.32, without decode context parallelism and windows."""

    def __init__(
        self,
        num_heads: int,
        scale: float,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        kv_b_proj: Any,
        dcp_q_replicate: bool = False,
        cache_config: Any = None,
        quant_config: Any = None,
        prefix: str = "",
        attn_backend: type | None = None,
        use_sparse: bool = False,
        indexer: Any = None,
        topk_indices_buffer: torch.Tensor | None = None,
        index_group_builder: Any = None,
        non_causal_multi_token_decode: bool = False,
        sliding_window: int | None = None,
        prefill_backend_cls: type | None = None,
        **extra_impl_args: Any,
    ) -> None:
        refuse(
            prefix or "MLAAttention", dcp_q_replicate=dcp_q_replicate, index_group_builder=index_group_builder,
            non_causal_multi_token_decode=non_causal_multi_token_decode, sliding_window=sliding_window,
            prefill_backend_cls=prefill_backend_cls,
        )  # fmt: skip
        super().__init__(
            num_heads, scale, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, q_lora_rank, kv_lora_rank, kv_b_proj,
            cache_config, quant_config, prefix, attn_backend, use_sparse, indexer, topk_indices_buffer,
            **extra_impl_args,
        )  # fmt: skip

    def forward(  # type: ignore[override]  # the host's signature
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        output_shape: torch.Size | None = None,
        q_dcp_replicated: torch.Tensor | None = None,
    ) -> torch.Tensor:
        refuse("MLAAttention.forward", q_dcp_replicated=q_dcp_replicated)
        out = self.latent(q, kv_c_normed, k_pe.flatten(1))
        return out if output_shape is None else out.view(output_shape)


_LIVE_MLA = (
    "live, the host's layer stays, and the decode of its backend's implementation is replaced if mla_decode is"
    " requested"
)
_MLA = "vllm.model_executor.layers.attention.mla_attention:MLAAttention"

TARGETS = {
    "mla_decode": (
        Target(
            "vllm",
            _MLA,
            "VllmMLAAttention_0_26",
            "attention",
            "<0.32",
            default=False,
            note=_LIVE_MLA,
        ),
        Target(
            "vllm",
            _MLA,
            "VllmMLAAttention",
            "attention",
            ">=0.32",
            default=False,
            note=_LIVE_MLA,
        ),
    ),
}
