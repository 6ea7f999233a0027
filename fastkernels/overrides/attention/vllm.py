"""vLLM's classes and functions of attention."""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.core.forward_context import get_forward_context
from fastkernels.core.spec import Target
from fastkernels.overrides.attention.attention import AttentionType, PagedAttention, refuse
from fastkernels.overrides.attention.merge_state import merge_state


class VllmAttention(PagedAttention):
    """vllm.model_executor.layers.attention.attention.Attention, decoder only; see PagedAttention.

    query, key, value: [T, heads * head_size] or [T, heads, head_size]; out: output_shape or [T, heads * head_size].
    extra_impl_args: sinks.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        use_alibi_sqrt: bool | None = None,
        cache_config: Any = None,
        quant_config: Any = None,
        logits_soft_cap: float | None = None,
        per_layer_sliding_window: int | None = None,
        prefix: str = "",
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        mm_prefix_clamp_sliding_window: bool = False,
        attn_backend: type | None = None,
        head_size_v: int | None = None,
        **extra_impl_args: Any,
    ) -> None:
        super().__init__()
        sinks = extra_impl_args.pop("sinks", None)
        refuse(
            prefix or "Attention", use_alibi_sqrt=use_alibi_sqrt, quant_config=quant_config,
            attn_type=None if attn_type == AttentionType.DECODER else attn_type, attn_backend=attn_backend,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
            mm_prefix_clamp_sliding_window=mm_prefix_clamp_sliding_window,
            head_size_v=None if head_size_v == head_size else head_size_v, extra_impl_args=extra_impl_args,
        )  # fmt: skip
        window = per_layer_sliding_window
        if window is None:
            window = getattr(cache_config, "sliding_window", None)
        left = None if window is None else window - 1
        self._build(num_heads, head_size, scale, num_kv_heads, left, logits_soft_cap or 0.0)
        if alibi_slopes is not None:
            if len(alibi_slopes) != num_heads:
                raise ValueError(
                    f"{len(alibi_slopes)} ALiBi slopes for {num_heads} heads: one each is needed"
                )
            self.__dict__["alibi_slopes"] = torch.tensor(alibi_slopes, dtype=torch.float32)
        self.__dict__["sinks"] = sinks  # a parameter of the caller, not one more of this module
        self.layer_name = prefix

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output_shape: torch.Size | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        out = self._attend(query, key, value, get_forward_context())
        out = out if output_shape is None else out.view(output_shape)
        return out if output_dtype is None else out.to(output_dtype)


def vllm_merge_attn_states(
    output: torch.Tensor,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output_lse: torch.Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
    output_scale: torch.Tensor | None = None,
) -> None:
    """vllm.v1.attention.ops.merge_attn_states.merge_attn_states: outputs [T, Q, D], lse [Q, T].

    Unlike in the host, outputs can have any strides, and a side without keys can hold NaN.
    """
    new_lse = None if output_lse is None else output_lse.t()
    merge_state(
        prefix_output, prefix_lse.t(), suffix_output, suffix_lse.t(), output, new_lse, prefill_tokens_with_context,
        output_scale,
    )  # fmt: skip


_LIVE = (
    "live, the host's layer stays and its backend's implementation is replaced: attention_prefill, attention_decode;"
    " by default only the decodes of sizes for which a tuned table says that attention_decode is faster"
)
_BOUND = (
    "the host's attention backends bind the function when they are imported: for forks and for our engine"
)

TARGETS = {
    "attention": (
        Target(
            "vllm", "vllm.model_executor.layers.attention.attention:Attention", "VllmAttention", "attention",
            default=False, note=_LIVE,
        ),
    ),
    "merge_state": (
        Target(
            "vllm", "vllm.v1.attention.ops.merge_attn_states:merge_attn_states", "vllm_merge_attn_states", "function",
            note=_BOUND,
        ),
    ),
}  # fmt: skip
