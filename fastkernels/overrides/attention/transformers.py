"""Drop-in attention for transformers' vision encoders; the projections stay the host's modules.

Each class stands for those of other models whose forward computes the same. The host's attention function must be
`sdpa`, the default: the others return weights, or mask in another way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.attention.attention_dense import attend, attention_dense
from fastkernels.overrides.kit.modules import changed
from fastkernels.overrides.rope.transformers import transformers_dinov3_vit_apply_rotary_pos_emb

Pair = tuple[torch.Tensor, torch.Tensor]


def _elsewhere(module: Any) -> str | None:
    """Why the host computes a module's attention in another way, or None."""
    chosen = "causal" if module.is_causal else module.config._attn_implementation
    return None if chosen == "sdpa" else f"its attention function is {chosen!r}, not 'sdpa'"


def _elsewhere_unless_causal(module: Any) -> str | None:
    chosen = module.config._attn_implementation
    return None if chosen == "sdpa" else f"its attention function is {chosen!r}, not 'sdpa'"


def _extra(given: dict[str, Any], *names: str) -> str | None:
    """Why the host's function does more with one of these keyword arguments, or None."""
    other = [name for name in ("position_bias", "cache", *names) if given.get(name) is not None]
    return f"attention with {other[0]}" if other else None


def _theirs(module: Any, reason: str) -> Any:
    """The host's forward of a live module, for a call that ours does not support."""
    attention_dense.note(reason)
    host: Any = type(module).__mro__[1]
    return host.forward.__get__(module)


class _Projections(nn.Module):
    """Four linear layers with the host's names, the last of them `out`."""

    q_proj: Any
    k_proj: Any
    v_proj: Any
    out_proj: Any
    o_proj: Any

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
        projected = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in projected)
        found = attend(q, k, v, self.scale, attention_mask, self.dropout * self.training)
        return self.out_proj(found), None


class TransformersCLIPAttention(_Projections):
    """CLIPAttention, also of AltCLIP, CLIPSeg and X-CLIP, for images and texts: as above, causal where requested."""

    def __init__(self, config):
        super().__init__()
        self._project(config, "out_proj")
        self.embed_dim, self.num_heads = config.hidden_size, config.num_attention_heads
        self.scale = self.head_dim**-0.5
        self.dropout = config.attention_dropout

    supports = staticmethod(_elsewhere_unless_causal)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs):
        if (reason := _elsewhere_unless_causal(self) or _extra(kwargs)) is not None:
            return _theirs(self, reason)(hidden_states, attention_mask, **kwargs)
        causal = kwargs.get("is_causal")
        causal = self.is_causal if causal is None else causal
        causal = causal and attention_mask is None and hidden_states.shape[1] > 1
        dropout = self.dropout * self.training
        projected = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in projected)
        found = attend(q, k, v, self.scale, attention_mask, dropout, causal)
        return self.out_proj(found), None


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
        if (reason := _elsewhere(self) or _extra(kwargs, "is_causal")) is not None:
            return _theirs(self, reason)(hidden_states, attention_mask, **kwargs)
        dropout = self.attention_dropout * self.training
        projected = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in projected)
        return self.o_proj(attend(q, k, v, self.scaling, attention_mask, dropout)), None


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
        if (reason := _elsewhere(self) or _extra(kwargs, "is_causal")) is not None:
            return _theirs(self, reason)(hidden_states, attention_mask, position_embeddings, **kwargs)
        projected = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in projected)
        assert position_embeddings is not None, "position_embeddings is missing"
        turned = transformers_dinov3_vit_apply_rotary_pos_emb(
            q.transpose(1, 2), k.transpose(1, 2), *position_embeddings
        )
        q, k = (t.transpose(1, 2) for t in turned)
        found = attend(q, k, v, self.scaling, attention_mask, self.dropout * self.training)
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
    ok = type(inner) is nn.MultiheadAttention and not changed(inner) and inner.in_proj_bias is not None
    ok = ok and inner.batch_first and inner.bias_k is None and not inner.add_zero_attn and not inner.dropout
    return None if ok else "its attention is no plain MultiheadAttention of torch, or has a hook"


def _pooled(head: Any, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The learned query's vector of x [B, S, C]: [B, C]; mask: added to the scores [B, 1, 1, S]."""
    inner, sizes = head.attention, (x.shape[-1], 2 * x.shape[-1])
    (wq, wkv), (bq, bkv) = inner.in_proj_weight.split(sizes), inner.in_proj_bias.split(sizes)
    q = nn.functional.linear(head.probe, wq, bq).unflatten(-1, (inner.num_heads, -1))
    k, v = nn.functional.linear(x, wkv, bkv).unflatten(-1, (2, inner.num_heads, -1)).unbind(2)
    y = inner.out_proj(attend(q.expand(len(x), -1, -1, -1), k, v, q.shape[-1] ** -0.5, mask))
    return (y + head.mlp(head.layernorm(y)))[:, 0]


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
