"""SGLang's classes and functions of attention."""

from __future__ import annotations

from typing import Any

import torch

from fastkernels.core.forward_context import AttentionMetadata, get_forward_context
from fastkernels.core.spec import Target
from fastkernels.overrides.attention.attention import AttentionType, PagedAttention, refuse
from fastkernels.overrides.attention.merge_state import merge_state


class SGLangRadixAttention_0_5_16(PagedAttention):
    """sglang.srt.layers.radix_attention.RadixAttention of 0.5.16, decoder only; see PagedAttention.

    forward_batch: our AttentionMetadata; None: the forward context's. With save_kv_cache=False nothing is stored.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        scaling: float,
        num_kv_heads: int,
        layer_id: int,
        logit_cap: float = 0.0,
        v_head_dim: int = -1,
        sliding_window_size: int = -1,
        is_cross_attention: bool = False,
        pos_encoding_mode: str = "NONE",
        logit_capping_method: str = "tanh",
        quant_config: Any = None,
        attn_type: AttentionType = AttentionType.DECODER,
        use_irope: bool = False,
        prefix: str = "",
    ) -> None:
        super().__init__()
        refuse(
            prefix or f"RadixAttention {layer_id}", is_cross_attention=is_cross_attention, quant_config=quant_config,
            v_head_dim=None if v_head_dim in (-1, head_dim) else v_head_dim, use_irope=use_irope,
            pos_encoding_mode=None if pos_encoding_mode == "NONE" else pos_encoding_mode,
            logit_capping_method=None if logit_capping_method == "tanh" else logit_capping_method,
            attn_type=None if attn_type == AttentionType.DECODER else attn_type,
        )  # fmt: skip
        window = sliding_window_size if sliding_window_size and sliding_window_size > 0 else None
        self._build(num_heads, head_dim, scaling, num_kv_heads, window, logit_cap)
        self.layer_id = layer_id

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        forward_batch: AttentionMetadata | None,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        return self._radix(q, k, v, forward_batch, save_kv_cache, kwargs)

    def _radix(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        forward_batch: AttentionMetadata | None,
        save_kv_cache: bool,
        extra: dict[str, Any],
    ) -> torch.Tensor:
        refuse(f"RadixAttention {self.layer_id}", **extra)
        metadata = get_forward_context() if forward_batch is None else forward_batch
        return self._attend(q, k if save_kv_cache else None, v if save_kv_cache else None, metadata)


class SGLangRadixAttention_0_5_17(SGLangRadixAttention_0_5_16):
    """sglang.srt.layers.radix_attention.RadixAttention from 0.5.17 on; see SGLangRadixAttention_0_5_16."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        forward_batch: AttentionMetadata | None,
        save_kv_cache: bool = True,
        key_value_num_tokens: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if k is not None and v is not None and key_value_num_tokens is not None:
            k, v = k[:key_value_num_tokens], v[:key_value_num_tokens]
        return self._radix(q, k, v, forward_batch, save_kv_cache, kwargs)


class SGLangRadixAttention(SGLangRadixAttention_0_5_17):
    """sglang.srt.layers.radix_attention.RadixAttention; see SGLangRadixAttention_0_5_16."""

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        scaling: float,
        num_kv_heads: int,
        layer_id: int,
        logit_cap: float = 0.0,
        v_head_dim: int = -1,
        sliding_window_size: int = -1,
        is_cross_attention: bool = False,
        pos_encoding_mode: str = "NONE",
        logit_capping_method: str = "tanh",
        quant_config: Any = None,
        attn_type: AttentionType = AttentionType.DECODER,
        use_irope: bool = False,
        prefix: str = "",
        use_prefill_attention_wrapper: bool = True,
    ) -> None:
        super().__init__(
            num_heads, head_dim, scaling, num_kv_heads, layer_id, logit_cap, v_head_dim, sliding_window_size,
            is_cross_attention, pos_encoding_mode, logit_capping_method, quant_config, attn_type, use_irope, prefix,
        )  # fmt: skip


def sglang_merge_state(
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output: torch.Tensor | None = None,
    output_lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """sglang.srt.layers.attention.merge_state.merge_state: outputs [T, Q, D], lse [T, Q]; returns (output, lse).

    If neither side has a key, the output is 0 and the lse -inf; the host's are NaN.
    """
    output = torch.empty_like(prefix_output) if output is None else output
    output_lse = torch.empty_like(prefix_lse) if output_lse is None else output_lse
    merge_state(prefix_output, prefix_lse, suffix_output, suffix_lse, output, output_lse)
    return output, output_lse


_RADIX = "sglang.srt.layers.radix_attention:RadixAttention"
_LIVE = (
    "live, the host's layer stays and its backend's implementation is replaced: attention_prefill, attention_decode;"
    " by default only the decodes of sizes for which a tuned table says that attention_decode is faster"
)
_BOUND = (
    "the host's attention backends bind the function when they are imported: for forks and for our engine"
)


def _radix(cls: str, versions: str) -> Target:
    return Target("sglang", _RADIX, cls, "attention", versions, default=False, note=_LIVE)


TARGETS = {
    "attention": (
        _radix("SGLangRadixAttention_0_5_16", "<0.5.17"),
        _radix("SGLangRadixAttention_0_5_17", ">=0.5.17,<0.5.23"),
        _radix("SGLangRadixAttention", ">=0.5.23"),
    ),
    "merge_state": (
        Target(
            "sglang", "sglang.srt.layers.attention.merge_state:merge_state", "sglang_merge_state", "function",
            note=_BOUND,
        ),
    ),
}  # fmt: skip
