"""Drop-in attention for timm: the projections, norms and embeddings stay the host's modules and formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastkernels.core.spec import Target
from fastkernels.overrides.dense_attention.attention_dense import attend
from fastkernels.overrides.dense_attention.timm_projections import in_one_kernel
from fastkernels.overrides.dense_attention.windows import attend_in_windows, position_bias, relative_positions
from fastkernels.overrides.linear.modules import changed
from fastkernels.overrides.rope.rope_nd import rope_nd


def _norms(
    module: nn.Module, wanted: tuple[bool, bool, int, int], norm_layer: Any, dd: dict[str, Any]
) -> None:
    """Set q_norm and k_norm (qk_norm, over the head size) and norm (scale_norm, over all heads)."""
    qk_norm, scale_norm, head_dim, attn_dim = wanted
    if (qk_norm or scale_norm) and norm_layer is None:
        raise ValueError("qk_norm and scale_norm need a norm_layer")
    module.q_norm = norm_layer(head_dim, **dd) if qk_norm else nn.Identity()
    module.k_norm = norm_layer(head_dim, **dd) if qk_norm else nn.Identity()
    module.norm = norm_layer(attn_dim, **dd) if scale_norm else nn.Identity()


def _project(module: Any, x: torch.Tensor) -> torch.Tensor:
    return module.proj_drop(module.proj(x))


def _dropout(module: Any) -> float:
    return module.attn_drop.p if module.training else 0.0


def _rotate(x: torch.Tensor, rope: torch.Tensor, half: bool) -> torch.Tensor:
    """Rotate x [B, H, N, D] by rope [..., N, 2 D]: sines, then cosines. half: pairs are D / 2 apart, not neighbors."""
    sin, cos = rope.chunk(2, dim=-1)
    if half:
        a, b = x.chunk(2, dim=-1)
        turned = torch.cat((-b, a), dim=-1)
    else:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return (x * cos + turned * sin).to(x.dtype)


def _with_rope(module: Any, x: torch.Tensor, rope: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Rotate x [B, N, H, D] except for its prefix tokens, which have no position; the result has that dtype."""
    if rope is None:
        return x
    if rope.dim() == 2 and x.shape[1] - len(rope) == module.num_prefix_tokens:
        sin, cos = rope.chunk(2, dim=-1)
        return rope_nd(x, cos, sin, getattr(module, "rotate_half", False)).to(dtype)
    rope_nd.note("positions of each image or head")
    heads, half = x.transpose(1, 2), getattr(module, "rotate_half", False)
    prefix, patches = heads.tensor_split((module.num_prefix_tokens,), dim=2)
    patches = _rotate(patches, rope, half)
    return torch.cat((prefix, patches), dim=2).to(dtype).transpose(1, 2)


def _turned(module: Any, qkv: torch.Tensor, rope: torch.Tensor | None) -> Sequence[torch.Tensor]:
    """Queries, keys and values of qkv [B, N, 3, H, D], the first two normalized and rotated; in one op if possible."""
    q, k, v = qkv.unbind(2)
    plain = all(isinstance(n, nn.Identity) and not changed(n) for n in (module.q_norm, module.k_norm))
    if plain and rope is not None and rope.dim() == 2:
        both = _with_rope(module, qkv[:, :, :2].flatten(2, 3), rope, v.dtype)
        return *both.unflatten(2, (2, -1)).unbind(2), v
    return *(_with_rope(module, t, rope, v.dtype) for t in (module.q_norm(q), module.k_norm(k))), v


def only_hosts(module: Any) -> str | None:
    """Return why a part that ours does not call has to run, or None: hooks of these read the attention weights."""
    found = [
        n for n in ("attn_drop", "softmax") if (p := getattr(module, n, None)) is not None and changed(p)
    ]
    return f"other code was put around its {found[0]}" if found else None


class _Parts(nn.Module):
    """Submodules that only some configurations have."""

    needs_host = staticmethod(only_hosts)

    qkv: Any
    q: Any
    relative_coords_table: Any
    relative_position_index: Any
    q_proj: Any
    k_proj: Any
    v_proj: Any
    q_norm: Any
    k_norm: Any
    gate: Any


class TimmAttention(_Parts):
    """timm.layers.Attention: x [B, N, dim] to [B, N, dim_out]; attn_mask broadcasts to [B, heads, N, N]."""

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        attn_head_dim: int | None = None,
        dim_out: int | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        gated: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: Any = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.num_heads = num_heads
        self.head_dim = attn_head_dim or dim // num_heads
        self.attn_dim = num_heads * self.head_dim
        self.scale = self.head_dim**-0.5
        self.fused_attn = True
        self.qkv = nn.Linear(dim, self.attn_dim * 3, bias=qkv_bias, **dd)
        _norms(self, (qk_norm, scale_norm, self.head_dim, self.attn_dim), norm_layer, dd)
        self.attn_drop = nn.Dropout(attn_drop)
        self.gate = nn.Linear(dim, self.attn_dim, bias=qkv_bias, **dd) if gated else None
        self.proj = nn.Linear(self.attn_dim, dim_out or dim, bias=proj_bias, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(
        self, x: torch.Tensor, attn_mask: torch.Tensor | None = None, is_causal: bool = False
    ) -> torch.Tensor:
        return _project(self, before_projection(self, x, None, attn_mask, is_causal))


class TimmAttentionRope(_Parts):
    """timm.layers.AttentionRope: TimmAttention with rotary positions and, unfused, fewer key than query heads."""

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        dim_out: int | None = None,
        qkv_bias: bool = True,
        qkv_fused: bool = True,
        num_prefix_tokens: int = 1,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        attn_head_dim: int | None = None,
        norm_layer: Any = None,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        rotate_half: bool = False,
        gated: bool = False,
        num_kv_heads: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.num_kv_groups = self.num_heads // self.num_kv_heads
        self.head_dim = attn_head_dim or dim // num_heads
        self.attn_dim, self.kv_dim = self.head_dim * num_heads, self.head_dim * self.num_kv_heads
        self.scale = self.head_dim**-0.5
        self.num_prefix_tokens = num_prefix_tokens
        self.fused_attn = True
        self.rotate_half = rotate_half
        self.qkv = self.q_proj = self.k_proj = self.v_proj = None
        if qkv_fused:
            if self.num_kv_groups > 1:
                raise ValueError("fewer key than query heads need qkv_fused=False")
            self.qkv = nn.Linear(dim, self.attn_dim * 3, bias=qkv_bias, **dd)
        else:
            self.q_proj = nn.Linear(dim, self.attn_dim, bias=qkv_bias, **dd)
            self.k_proj = nn.Linear(dim, self.kv_dim, bias=qkv_bias, **dd)
            self.v_proj = nn.Linear(dim, self.kv_dim, bias=qkv_bias, **dd)
        _norms(self, (qk_norm, scale_norm, self.head_dim, self.attn_dim), norm_layer, dd)
        self.attn_drop = nn.Dropout(attn_drop)
        self.gate = nn.Linear(dim, self.attn_dim, bias=qkv_bias, **dd) if gated else None
        self.proj = nn.Linear(self.attn_dim, dim_out or dim, bias=proj_bias, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(
        self,
        x,
        rope: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ):
        return _project(self, before_projection(self, x, rope, attn_mask, is_causal))


class TimmEvaAttention(_Parts):
    """timm.models.eva.EvaAttention, also of DINOv3: rotary positions, and no bias of the keys."""

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = True,
        qkv_fused: bool = True,
        qkv_bias_separate: bool = False,
        num_prefix_tokens: int = 1,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        attn_head_dim: int | None = None,
        norm_layer: Any = None,
        qk_norm: bool = False,
        scale_norm: bool = True,
        rotate_half: bool = False,
        gated: bool = False,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.num_heads = num_heads
        self.head_dim = attn_head_dim or dim // num_heads
        attn_dim = self.head_dim * num_heads
        self.scale = self.head_dim**-0.5
        self.num_prefix_tokens = num_prefix_tokens
        self.fused_attn = True
        self.qkv_bias_separate = qkv_bias_separate
        self.rotate_half = rotate_half
        self.qkv = self.q_proj = self.k_proj = self.v_proj = None
        self.q_bias = self.k_bias = self.v_bias = None
        if qkv_fused:
            self.qkv = nn.Linear(dim, attn_dim * 3, bias=False, **dd)
            if qkv_bias:
                del self.k_bias
                self.q_bias, self.v_bias = (nn.Parameter(torch.zeros(attn_dim, **dd)) for _ in range(2))
                self.register_buffer("k_bias", torch.zeros(attn_dim, **dd), persistent=False)
        else:
            self.q_proj = nn.Linear(dim, attn_dim, bias=qkv_bias, **dd)
            self.k_proj = nn.Linear(dim, attn_dim, bias=False, **dd)
            self.v_proj = nn.Linear(dim, attn_dim, bias=qkv_bias, **dd)
        _norms(self, (qk_norm, scale_norm, self.head_dim, attn_dim), norm_layer, dd)
        self.attn_drop = nn.Dropout(attn_drop)
        self.gate = nn.Linear(dim, attn_dim, bias=qkv_bias, **dd) if gated else None
        self.proj = nn.Linear(attn_dim, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(
        self,
        x,
        rope: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ):
        return _project(self, before_projection(self, x, rope, attn_mask, is_causal))


def before_projection(
    module: Any, x: torch.Tensor, rope: torch.Tensor | None = None, attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return what the output projection of an Attention, AttentionRope or EvaAttention, ours or the host's, takes."""
    if (found := in_one_kernel(module, x, rope)) is not None:
        q, k, v = found
    elif module.qkv is None:
        layers = (module.q_proj, module.k_proj, module.v_proj)
        q, k, v = (layer(x).unflatten(-1, (-1, module.head_dim)) for layer in layers)
        q, k = (_with_rope(module, t, rope, v.dtype) for t in (module.q_norm(q), module.k_norm(k)))
    else:
        packed = _packed(module, x) if hasattr(module, "q_bias") else module.qkv(x)
        q, k, v = _turned(module, packed.unflatten(-1, (3, module.num_heads, module.head_dim)), rope)
    attended = module.norm(attend(q, k, v, module.scale, attn_mask, _dropout(module), is_causal))
    gate = getattr(module, "gate", None)  # timm 1.0.27 and later
    return attended if gate is None else attended * gate(x).sigmoid()


def _packed(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Queries, keys and values [B, N, 3 * attn_dim]; the three biases are parameters of their own."""
    if module.q_bias is None:
        return module.qkv(x)
    bias = torch.cat((module.q_bias, module.k_bias, module.v_bias))
    if module.qkv_bias_separate:
        return module.qkv(x) + bias
    return F.linear(x, module.qkv.weight, bias)


class _Mlp(nn.Module):
    """The MLP behind timm's attention pooling, with timm's names."""

    def __init__(self, dim: int, hidden: int, act_layer: Any, dd: dict[str, Any]) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden, **dd)
        self.act = act_layer()
        self.fc2 = nn.Linear(hidden, dim, **dd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.act(self.fc1(x)))


class TimmAttentionPoolLatent(_Parts):
    """timm.layers.AttentionPoolLatent: learned queries attend to x [B, N, in_features]; returns [B, out_features]."""

    def __init__(
        self,
        in_features: int,
        out_features: int | None = None,
        embed_dim: int | None = None,
        num_heads: int = 8,
        feat_size: int | None = None,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        q_proj: bool = True,
        qk_norm: bool = False,
        latent_len: int = 1,
        latent_dim: int | None = None,
        pos_embed: str = "",
        pool_type: str = "token",
        norm_layer: Any = None,
        act_layer: Any = nn.GELU,
        drop: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        width, out = embed_dim or in_features, in_features if out_features is None else out_features
        self.num_heads, self.head_dim = num_heads, width // num_heads
        self.feat_size, self.scale, self.pool, self.fused_attn = (
            feat_size,
            self.head_dim**-0.5,
            pool_type,
            True,
        )
        if pos_embed == "abs" and feat_size is None:
            raise ValueError("pos_embed='abs' needs feat_size")
        self.pos_embed = (
            nn.Parameter(torch.zeros(feat_size or 0, in_features, **dd)) if pos_embed == "abs" else None
        )
        self.latent_dim, self.latent_len = latent_dim or width, latent_len
        if not q_proj and self.latent_dim != width:
            raise ValueError(f"q_proj=False needs a latent_dim of {width}, got {self.latent_dim}")
        self.latent = nn.Parameter(torch.zeros(1, latent_len, self.latent_dim, **dd))
        nn.init.trunc_normal_(self.latent, std=self.latent_dim**-0.5)
        self.q = nn.Linear(self.latent_dim, width, bias=qkv_bias, **dd) if q_proj else nn.Identity()
        self.kv = nn.Linear(width, width * 2, bias=qkv_bias, **dd)
        norm = norm_layer or nn.LayerNorm
        self.q_norm = norm(self.head_dim, **dd) if qk_norm else nn.Identity()
        self.k_norm = norm(self.head_dim, **dd) if qk_norm else nn.Identity()
        self.proj = nn.Linear(width, out, **dd) if out else nn.Identity()
        self.proj_drop = nn.Dropout(drop)
        self.norm = norm_layer(out, **dd) if out and norm_layer is not None else nn.Identity()
        self.mlp = _Mlp(out, int(out * mlp_ratio), act_layer, dd) if out else None
        self.out_features = out or width

    def forward(self, x, attn_mask: torch.Tensor | None = None):
        if self.pos_embed is not None:
            x = x + self.pos_embed.to(x.dtype)
        q = self.q(self.latent).unflatten(-1, (self.num_heads, self.head_dim))
        k, v = self.kv(x).unflatten(-1, (2, self.num_heads, self.head_dim)).unbind(2)
        q, k = self.q_norm(q).expand(len(x), -1, -1, -1), self.k_norm(k)
        x = self.proj_drop(self.proj(attend(q, k, v, self.scale, attn_mask)))
        if self.mlp is not None:
            x = x + self.mlp(self.norm(x))
        return x[:, 0] if self.pool == "token" else x.mean(1) if self.pool == "avg" else x


class TimmWindowAttention(_Parts):
    """timm.models.swin_transformer_v2.WindowAttention: cosine attention within windows, with a learned position bias.

    x [windows * B, N, dim]; mask [windows, N, N], added to the scores, or None.
    """

    def __init__(
        self,
        dim: int,
        window_size: tuple[int, int],
        num_heads: int,
        qkv_bias: bool = True,
        qkv_bias_separate: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        pretrained_window_size: tuple[int, int] = (0, 0),
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        pretrained = pretrained_window_size
        self.dim, self.window_size, self.num_heads = dim, window_size, num_heads
        self.pretrained_window_size = (
            (pretrained, pretrained) if isinstance(pretrained, int) else tuple(pretrained)
        )
        self.qkv_bias_separate = qkv_bias_separate
        self.logit_scale = nn.Parameter(torch.full((num_heads, 1, 1), math.log(10), **dd))
        self.cpb_mlp = nn.Sequential(
            nn.Linear(2, 512, **dd), nn.ReLU(inplace=True), nn.Linear(512, num_heads, bias=False, **dd)
        )
        self.qkv = nn.Linear(dim, dim * 3, bias=False, **dd)
        self.q_bias = self.k_bias = self.v_bias = None
        if qkv_bias:
            del self.k_bias
            self.q_bias, self.v_bias = (nn.Parameter(torch.zeros(dim, **dd)) for _ in range(2))
            self.register_buffer("k_bias", torch.zeros(dim, **dd), persistent=False)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)
        self.softmax = nn.Softmax(dim=-1)
        table, index = relative_positions(window_size, self.pretrained_window_size)
        self.register_buffer("relative_coords_table", table.to(self.proj.weight), persistent=False)
        self.register_buffer("relative_position_index", index.to(device), persistent=False)

    @staticmethod
    def needs_host(module: Any) -> str | None:
        return only_hosts(module) or ("dropout" if _dropout(module) else None)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = _packed(self, x).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        bias = position_bias(self.cpb_mlp, self.relative_coords_table, self.relative_position_index)
        attended = attend_in_windows((q, k, v), self.logit_scale, bias, mask)
        return self.proj_drop(self.proj(attended))


_NOTE = "decided at first calls on a GPU, elsewhere replaced on request"


def _target(module: str, name: str) -> Target:
    path = f"{module}:{name}"
    return Target("timm", path, f"Timm{name}", "module", default=False, note=_NOTE, tried=True, compiled=True)


TARGETS = {
    "attention_dense": (
        _target("timm.layers.attention", "Attention"),
        _target("timm.layers.attention", "AttentionRope"),
        _target("timm.models.eva", "EvaAttention"),
        _target("timm.layers.attention_pool", "AttentionPoolLatent"),
    ),
    # SwinV2-B, 256 px, bfloat16: 1.29 to 1.38 times the compiled host's images per second
    "window_attention": (_target("timm.models.swin_transformer_v2", "WindowAttention"),),
}
