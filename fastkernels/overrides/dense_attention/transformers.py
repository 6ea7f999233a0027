"""Drop-in attention for transformers' vision encoders; the projections stay the host's modules.

Each class stands for those of other models whose forward computes the same. The host's attention function must be
`sdpa`, the default: the others return weights, or mask in another way. SwinV2 has no choice of functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.dense_attention.attention_dense import attend, attention_dense
from fastkernels.overrides.dense_attention.window_attention import window_attention
from fastkernels.overrides.dense_attention.windows import attend_in_windows, position_bias, relative_positions
from fastkernels.overrides.linear.modules import changed
from fastkernels.overrides.rope.linear_rope import rotated_products
from fastkernels.overrides.rope.rope_nd import rope_nd
from fastkernels.overrides.rope.transformers import transformers_dinov3_vit_apply_rotary_pos_emb

CosSin = tuple[torch.Tensor, torch.Tensor]


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
    return _hosts(module)


def _hosts(module: Any) -> Any:
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
        return self.out_proj(attend(q, k, v, self.scale, attention_mask, self.dropout * self.training)), None


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
        position_embeddings: CosSin | None = None,
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


class TransformersSam3Attention(_Projections):
    """Sam3Attention: query [B, S, C] to key and value [B, K, C]. The mask may be added biases of cells."""

    def __init__(self, config):
        super().__init__()
        self._project(config, "o_proj")
        self.hidden_size, self.num_attention_heads = config.hidden_size, config.num_attention_heads
        self.scaling = self.head_dim**-0.5

    supports = staticmethod(_elsewhere)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs,
    ):
        if (reason := _elsewhere(self) or _extra(kwargs, "is_causal")) is not None:
            return _theirs(self, reason)(query, key, value, attention_mask, **kwargs)
        projected = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in projected)
        return self.o_proj(attend(q, k, v, self.scaling, attention_mask)), None


class TransformersSam3ViTRoPEAttention(_Projections):
    """Sam3ViTRoPEAttention: hidden_states [B, rows, columns, C] to the same, with rotations of the cells."""

    def __init__(self, config):
        super().__init__()
        self._project(config, "o_proj")
        self.hidden_size, self.num_attention_heads = config.hidden_size, config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout

    supports = staticmethod(_elsewhere)

    def forward(self, hidden_states: torch.Tensor, position_embeddings: CosSin, **kwargs):
        if (reason := _elsewhere(self) or _extra(kwargs, "is_causal")) is not None:
            return _theirs(self, reason)(hidden_states, position_embeddings, **kwargs)
        projected = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        q, k, v = (t.flatten(1, 2).unflatten(-1, (-1, self.head_dim)) for t in projected)
        cos, sin = (t.view(t.shape[-2:]) for t in position_embeddings)
        q, k = (rope_nd(t, cos, sin, False) for t in (q, k))
        found = attend(q, k, v, self.scaling, None, self.attention_dropout * self.training)
        return self.o_proj(found).view(hidden_states.shape), None


class TransformersYolosSelfAttention(nn.Module):
    """YolosSelfAttention, also of DPT, ViTPose and, before transformers 5.18, DINOv2: without the output projection."""

    def __init__(self, config):
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads
        if width % heads:
            raise ValueError(f"hidden_size {width} is not a multiple of num_attention_heads {heads}")
        self.config, self.num_attention_heads, self.all_head_size = config, heads, width
        self.attention_head_size = width // heads
        self.dropout_prob = config.attention_probs_dropout_prob
        self.scaling = self.attention_head_size**-0.5
        self.is_causal = False
        self.query, self.key, self.value = (nn.Linear(width, width, bias=config.qkv_bias) for _ in range(3))

    supports = staticmethod(_elsewhere)

    def forward(self, hidden_states: torch.Tensor, **kwargs):
        if (reason := _elsewhere(self) or _extra(kwargs)) is not None:
            return _theirs(self, reason)(hidden_states, **kwargs)
        projected = self.query(hidden_states), self.key(hidden_states), self.value(hidden_states)
        q, k, v = (t.unflatten(-1, (-1, self.attention_head_size)) for t in projected)
        return attend(q, k, v, self.scaling, None, self.dropout_prob * self.training), None


def _not_rotated(module: Any) -> str | None:
    """Why the host computes a module's attention or rotations in another way, or None."""
    size = module.attention_head_size
    return _elsewhere(module) or (f"an odd head size of {size}" if size % 2 else None)


class TransformersVJEPA2RopeAttention(nn.Module):
    """VJEPA2RopeAttention: hidden_states [B, S, C] to the same, and None; position_mask [B, S]: positions of tokens.

    A third of a head's channels each turns by frame, row and column; what is left over stays as it is.
    """

    def __init__(self, config, hidden_size: int = 1024, num_attention_heads: int = 16):
        super().__init__()
        if hidden_size % num_attention_heads:
            raise ValueError(
                f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_attention_heads}"
            )
        self.config, self.hidden_size, self.num_attention_heads = config, hidden_size, num_attention_heads
        self.attention_head_size, self.all_head_size = hidden_size // num_attention_heads, hidden_size
        self.query, self.key, self.value = (
            nn.Linear(hidden_size, hidden_size, bias=config.qkv_bias) for _ in range(3)
        )
        self.proj = nn.Linear(hidden_size, hidden_size)
        self.dropout_prob = config.attention_probs_dropout_prob
        self.dropout = nn.Dropout(self.dropout_prob)
        self.grid_size = config.crop_size // config.patch_size
        self.grid_depth = config.frames_per_clip // config.tubelet_size
        self.d_dim = self.h_dim = self.w_dim = self.attention_head_size // 3 // 2 * 2
        self.scaling = self.attention_head_size**-0.5
        self.is_causal = False

    supports = staticmethod(_not_rotated)

    def forward(self, hidden_states, position_mask: torch.Tensor | None = None):
        shape = hidden_states.shape[:2] if position_mask is None else position_mask.shape
        other = f"positions of shape {tuple(shape)}" if shape != hidden_states.shape[:2] else None
        if (reason := _not_rotated(self) or other) is not None:
            return _theirs(self, reason)(hidden_states, position_mask)
        layers, heads = (self.query, self.key, self.value), (-1, self.attention_head_size)
        table = _table_3d(self, hidden_states.unflatten(-1, heads), position_mask)
        found = rotated_products(layers, hidden_states, *table, False) if position_mask is None else None
        projected = [layer(hidden_states) for layer in layers] if found is None else found
        q, k, v = (t.unflatten(-1, heads) for t in projected)
        if found is None:
            # Positions of a mask have a row of the table for each token of the batch
            batch = len(q) if position_mask is None else 1
            q, k = (rope_nd(t.reshape(batch, -1, *t.shape[2:]), *table, False).view(t.shape) for t in (q, k))
        return self.proj(attend(q, k, v, self.scaling, None, self.dropout_prob * self.training)), None


def _table_3d(module: Any, x: torch.Tensor, positions: torch.Tensor | None) -> CosSin:
    """Cosines and sines of the tokens of x [B, S, H, D]: [S, D]; of positions [B, S]: [B * S, D].

    Channels 2j and 2j + 1 are a pair, but the angles repeat by halves of a third, as in the model's training. They are
    rounded to x's dtype, as in the host.
    """
    side, half = module.grid_size, module.d_dim // 2
    omega = 1.0 / 10000 ** (torch.arange(half, dtype=x.dtype, device=x.device) / half)
    ids = torch.arange(x.shape[1], device=x.device) if positions is None else positions.flatten()
    axes = torch.stack((ids // side**2, ids % side**2 // side, ids % side), dim=1)
    turned = (axes[..., None] * omega).repeat(1, 1, 2).flatten(1)
    angles = nn.functional.pad(turned, (0, x.shape[-1] - turned.shape[1]))
    cos, sin = torch.stack((angles.cos(), angles.sin()))  # one kernel of compiled code
    return cos, sin


def _hooked(module: Any) -> str | None:
    """Why a hook has to see a module's attention weights, or None."""
    return "its dropout has a hook" if changed(module.dropout) else None


class TransformersSwinv2SelfAttention(nn.Module):
    """Swinv2SelfAttention: hidden_states [B * windows, N, C] to a tuple of the same; attention_mask [windows, N, N]."""

    relative_coords_table: torch.Tensor
    relative_position_index: torch.Tensor

    def __init__(self, config, dim, num_heads, window_size, pretrained_window_size=[0, 0]):  # noqa: B006
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"dim {dim} is not a multiple of num_heads {num_heads}")
        self.num_attention_heads, self.attention_head_size = num_heads, dim // num_heads
        self.all_head_size = dim
        self.window_size = window_size if isinstance(window_size, Iterable) else (window_size, window_size)
        self.pretrained_window_size = pretrained_window_size
        self.logit_scale = nn.Parameter(torch.full((num_heads, 1, 1), math.log(10)))
        self.continuous_position_bias_mlp = nn.Sequential(
            nn.Linear(2, 512), nn.ReLU(inplace=True), nn.Linear(512, num_heads, bias=False)
        )
        table, index = self.create_coords_table_and_index()
        self.register_buffer("relative_coords_table", table, persistent=False)
        self.register_buffer("relative_position_index", index, persistent=False)
        self.query, self.key, self.value = (
            nn.Linear(dim, dim, bias=bias) for bias in (config.qkv_bias, False, config.qkv_bias)
        )
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    supports = staticmethod(_hooked)

    def create_coords_table_and_index(self):
        table, index = relative_positions(tuple(self.window_size), tuple(self.pretrained_window_size))
        return table.to(next(self.continuous_position_bias_mlp.parameters()).dtype), index

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        output_attentions: bool | None = False,
    ):
        if output_attentions or self.dropout.p * self.training or _hooked(self):
            window_attention.note("weights as a result, dropout or a hook")
            return _hosts(self)(hidden_states, attention_mask, output_attentions)
        heads = self.num_attention_heads
        projected = self.query(hidden_states), self.key(hidden_states), self.value(hidden_states)
        q, k, v = (t.unflatten(-1, (heads, -1)) for t in projected)
        mlp = self.continuous_position_bias_mlp
        bias = position_bias(mlp, self.relative_coords_table, self.relative_position_index)
        mask = None if attention_mask is None else 2 * attention_mask  # the host adds it twice
        return (attend_in_windows((q, k, v), self.logit_scale, bias, mask),)


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
    q = q.expand(len(x), -1, -1, -1)
    y = inner.out_proj(attend(q, k, v, q.shape[-1] ** -0.5, mask))
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
        dims = 2 if attention_mask is None else attention_mask.dim()
        other = None if dims == 2 else f"a mask of {dims} dimensions"
        if (reason := _not_plain(self) or other) is not None:
            return _theirs(self, reason)(hidden_state, attention_mask)
        x, low = hidden_state, torch.finfo(hidden_state.dtype).min
        added = None if attention_mask is None else attention_mask[:, None, None].eq(0).to(x) * low
        return _pooled(self, x, added)


_NOTE = "decided at first calls on a GPU, elsewhere replaced on request"


def _target(model: str, name: str, cls: str = "") -> Target:
    path, ours = f"transformers.models.{model}.modeling_{model}:{name}", f"Transformers{cls or name}"
    return Target("transformers", path, ours, "module", default=False, note=_NOTE, tried=True, compiled=True)


TARGETS = {
    "attention_dense": (
        _target("siglip", "SiglipAttention"),
        _target("siglip2", "Siglip2Attention", "SiglipAttention"),
        _target("clip", "CLIPAttention"),
        _target("vit", "ViTAttention"),
        _target("yolos", "YolosSelfAttention"),
        _target("dinov3_vit", "DINOv3ViTAttention"),
        # ViT-L, 2,048 tokens, bfloat16: 1.49 to 1.51 times the compiled host's videos per second
        _target("vjepa2", "VJEPA2RopeAttention"),
        _target("sam3", "Sam3Attention"),
        _target("sam3", "Sam3ViTRoPEAttention"),
        _target("siglip", "SiglipMultiheadAttentionPoolingHead"),
        _target("siglip2", "Siglip2MultiheadAttentionPoolingHead"),
    ),
    "window_attention": (_target("swinv2", "Swinv2SelfAttention"),),
}
