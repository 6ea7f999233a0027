"""Drop-in attention for transformers' vision encoders; the projections stay the host's modules.

Each class stands for those of other models whose forward computes the same. The host's attention function must be
`sdpa`, the default: the others return weights, or mask in another way.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.attention.attention_dense import attend, attention_dense
from fastkernels.overrides.kit.modules import changed
from fastkernels.overrides.rope.transformers import transformers_dinov3_vit_apply_rotary_pos_emb

Pair = tuple[torch.Tensor, torch.Tensor]


def _elsewhere(module: Any) -> str | None:
    """Why the host computes a module's attention in another way, or None."""
    chosen = module.config._attn_implementation
    return None if chosen == "sdpa" else f"its attention function is {chosen!r}, not 'sdpa'"


def _unusual(module: Any, given: dict[str, Any]) -> str | None:
    """The same for a call with these keyword arguments, which the host hands to its function."""
    other = [name for name in ("position_bias", "cache") if given.get(name) is not None]
    return _elsewhere(module) or (f"attention with {other[0]}" if other else None)


def _theirs(module: Any, reason: str) -> Any:
    """The host's forward of a live module, for a call that ours does not support."""
    attention_dense.note(reason)
    host: Any = type(module).__mro__[1]
    return host.forward.__get__(module)


def _heads(module: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Queries, keys and values [B, S, heads, head_dim] of x [B, S, C]."""
    return [p(x).unflatten(-1, (-1, module.head_dim)) for p in (module.q_proj, module.k_proj, module.v_proj)]


def _attended(
    module: Any, qkv: list[torch.Tensor], mask: torch.Tensor | None, scale: float, dropout: float,
    is_causal: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """[B, S, heads * head_dim]. is_causal: by default the module's; a mask or a single query takes precedence."""
    causal = (module.is_causal if is_causal is None else is_causal) and mask is None and qkv[0].shape[1] > 1
    return attend(*qkv, scale, mask, dropout if module.training else 0.0, causal)  # type: ignore[misc]


class _Projections(nn.Module):
    """Four linear layers with the host's names, the last of them `out`."""

    def _project(self, config: Any, out: str, biases: tuple[bool, bool, bool, bool] = (True,) * 4) -> None:
        self.config, width = config, config.hidden_size
        heads = config.num_attention_heads
        self.head_dim = getattr(config, "head_dim", None) or width // heads
        inner = heads * self.head_dim
        self.is_causal = False
        for name, bias in zip(("q_proj", "k_proj", "v_proj"), biases, strict=False):
            setattr(self, name, nn.Linear(width, inner, bias=bias))
        setattr(self, out, nn.Linear(inner, width, bias=biases[3]))


class TransformersSiglipAttention(_Projections):
    """SiglipAttention, also of SigLIP 2, Idefics and AIMv2: hidden_states [B, S, C] to the same, and None."""

    def __init__(self, config):
        super().__init__()
        self._project(config, "out_proj")
        self.embed_dim, self.num_heads = config.hidden_size, config.num_attention_heads
        self.scale = self.head_dim**-0.5
        self.dropout = config.attention_dropout

    supports = staticmethod(_elsewhere)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs):
        if (reason := _elsewhere(self)) is not None:
            return _theirs(self, reason)(hidden_states, attention_mask, **kwargs)
        qkv = _heads(self, hidden_states)
        return self.out_proj(_attended(self, qkv, attention_mask, self.scale, self.dropout)), None


class TransformersCLIPAttention(_Projections):
    """CLIPAttention, also of AltCLIP, CLIPSeg and X-CLIP, for images and texts: as above, with an optional causal mask."""

    def __init__(self, config):
        super().__init__()
        self._project(config, "out_proj")
        self.embed_dim, self.num_heads = config.hidden_size, config.num_attention_heads
        self.scale = self.head_dim**-0.5
        self.dropout = config.attention_dropout

    supports = staticmethod(_elsewhere)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs):
        if (reason := _unusual(self, kwargs)) is not None:
            return _theirs(self, reason)(hidden_states, attention_mask, **kwargs)
        qkv, causal = _heads(self, hidden_states), kwargs.get("is_causal")
        return self.out_proj(_attended(self, qkv, attention_mask, self.scale, self.dropout, causal)), None


class TransformersViTAttention(_Projections):
    """ViTAttention, also of DeiT, BEiT, DINOv2, ViT-MAE and ViT-MSN: hidden_states [B, S, C] to the same, and None."""

    def __init__(self, config):
        super().__init__()
        self._project(config, "o_proj", (config.qkv_bias,) * 3 + (True,))
        self.num_attention_heads = config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_probs_dropout_prob

    supports = staticmethod(_elsewhere)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs):
        if (reason := _unusual(self, kwargs)) is not None:
            return _theirs(self, reason)(hidden_states, attention_mask, **kwargs)
        qkv, causal = _heads(self, hidden_states), kwargs.get("is_causal")
        found = _attended(self, qkv, attention_mask, self.scaling, self.attention_dropout, causal)
        return self.o_proj(found), None


class TransformersDINOv3ViTAttention(_Projections):
    """DINOv3ViTAttention: as TransformersViTAttention, with rotary positions of the patches."""

    def __init__(self, config):
        super().__init__()
        self._project(
            config, "o_proj", (config.query_bias, config.key_bias, config.value_bias, config.proj_bias)
        )
        self.embed_dim, self.num_heads = config.hidden_size, config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.dropout = config.attention_dropout

    supports = staticmethod(_elsewhere)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: Pair | None = None,
        **kwargs,
    ):
        if (reason := _unusual(self, kwargs)) is not None:
            return _theirs(self, reason)(hidden_states, attention_mask, position_embeddings, **kwargs)
        q, k, v = _heads(self, hidden_states)
        assert position_embeddings is not None, "position_embeddings is missing"
        turned = transformers_dinov3_vit_apply_rotary_pos_emb(
            q.transpose(1, 2), k.transpose(1, 2), *position_embeddings
        )
        qkv, causal = [*(t.transpose(1, 2) for t in turned), v], kwargs.get("is_causal")
        found = _attended(self, qkv, attention_mask, self.scaling, self.dropout, causal)
        return self.o_proj(found), None


class _Mlp(nn.Module):
    """The MLP behind attention pooling, with the host's names."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        acts = {"gelu_pytorch_tanh": nn.GELU("tanh"), "gelu": nn.GELU()}
        if config.hidden_act not in acts:
            raise ValueError(f"hidden_act {config.hidden_act!r} is not supported, only {', '.join(acts)}")
        self.config, self.activation_fn = config, acts[config.hidden_act]
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.activation_fn(self.fc1(hidden_states)))


def _not_plain(head: Any) -> str | None:
    """Why a pooling head's attention is not the computation of its weights alone, or None."""
    inner = head.attention
    if type(inner) is not nn.MultiheadAttention:
        return f"its attention is {type(inner).__name__}, not torch's MultiheadAttention"
    if changed(inner) or changed(inner.out_proj):
        return "its attention has a hook, or a forward of other code"
    plain = inner.batch_first and inner.in_proj_weight is not None and inner.in_proj_bias is not None
    if not plain or inner.bias_k is not None or inner.add_zero_attn or inner.dropout:
        return "its attention has separate projections, no biases, or dropout"
    return None


def _pooled(head: Any, hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The learned query's vector of hidden [B, S, C]: [B, C]; mask: added to the scores [B, 1, 1, S]."""
    inner, size = head.attention, hidden.shape[-1]
    wq, wkv = inner.in_proj_weight.split((size, 2 * size))
    bq, bkv = inner.in_proj_bias.split((size, 2 * size))
    q = F.linear(head.probe, wq, bq).unflatten(-1, (inner.num_heads, -1)).expand(len(hidden), -1, -1, -1)
    k, v = F.linear(hidden, wkv, bkv).unflatten(-1, (2, inner.num_heads, -1)).unbind(2)
    x = inner.out_proj(attend(q, k, v, q.shape[-1] ** -0.5, mask))
    return (x + head.mlp(head.layernorm(x)))[:, 0]


class TransformersSiglipMultiheadAttentionPoolingHead(nn.Module):
    """SiglipMultiheadAttentionPoolingHead: hidden_state [B, S, C] to [B, C]."""

    def __init__(self, config):
        super().__init__()
        size = config.hidden_size
        self.probe = nn.Parameter(torch.randn(1, 1, size))
        self.attention = nn.MultiheadAttention(size, config.num_attention_heads, batch_first=True)
        self.layernorm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.mlp = _Mlp(config)

    supports = staticmethod(_not_plain)

    def forward(self, hidden_state):
        if (reason := _not_plain(self)) is not None:
            return _theirs(self, reason)(hidden_state)
        return _pooled(self, hidden_state, None)


class TransformersSiglip2MultiheadAttentionPoolingHead(TransformersSiglipMultiheadAttentionPoolingHead):
    """Siglip2MultiheadAttentionPoolingHead: the same; attention_mask [B, S] is 0 for padding."""

    def __init__(self, config):
        super().__init__(config)
        self.config, self.num_heads = config, config.num_attention_heads

    def forward(self, hidden_state: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        reason = _not_plain(self)
        if reason is None and attention_mask is not None and attention_mask.dim() != 2:
            reason = f"a mask of {attention_mask.dim()} dimensions"
        if reason is not None:
            return _theirs(self, reason)(hidden_state, attention_mask)
        added = None
        if attention_mask is not None:
            padding = attention_mask[:, None, None] == 0
            added = hidden_state.new_zeros(padding.shape).masked_fill(
                padding, torch.finfo(hidden_state.dtype).min
            )
        return _pooled(self, hidden_state, added)


_NOTE = "decided at first calls on a GPU, elsewhere replaced on request"


def _target(model: str, name: str, cls: str = "") -> Target:
    path = f"transformers.models.{model}.modeling_{model}:{name}"
    return Target(
        "transformers", path, f"Transformers{cls or name}", "module", default=False, note=_NOTE, tried=True
    )


TARGETS = {
    "attention_dense": (
        _target("siglip", "SiglipAttention"),
        _target("siglip2", "Siglip2Attention", "SiglipAttention"),
        _target("clip", "CLIPAttention"),
        _target("vit", "ViTAttention"),
        _target("dinov3_vit", "DINOv3ViTAttention"),
        _target("siglip", "SiglipMultiheadAttentionPoolingHead"),
        _target("siglip2", "Siglip2MultiheadAttentionPoolingHead"),
    )
}
