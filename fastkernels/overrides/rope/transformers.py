"""Drop-in rotations for transformers: each model file has a function of its own, most with the same code."""

from __future__ import annotations

import torch

from fastkernels.core.spec import Target
from fastkernels.overrides.rope.rope_nd import rope_nd
from fastkernels.overrides.rope.rotary_emb import rotary_emb


def transformers_apply_rotary_pos_emb(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """apply_rotary_pos_emb of Llama, GPT-NeoX, Phi-3 and the models that copy them; returns new tensors.

    q, k: [B, heads, S, D]; with unsqueeze_dim 2 [B, S, heads, D]. cos, sin: [B or 1, S, rotary_dim], whose second
    half repeats the first. Channels from rotary_dim on stay as they are.
    """
    dtype = torch.promote_types(q.dtype, cos.dtype)  # as of the host's products
    return _rotated(q.to(dtype), k.to(dtype), cos, sin, unsqueeze_dim, True)


def transformers_olmo_apply_rotary_pos_emb(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """apply_rotary_pos_emb of OLMo: as above, computed in the dtype of cos and rounded once, to that of q."""
    rounds = torch.promote_types(q.dtype, cos.dtype) == q.dtype
    return _rotated(q, k, cos, sin, unsqueeze_dim, rounds)


def transformers_glm_apply_rotary_pos_emb(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """apply_rotary_pos_emb of GLM-4: as Llama's, but neighbouring channels are a pair."""
    dtype = torch.promote_types(q.dtype, cos.dtype)
    return _rotated(q.to(dtype), k.to(dtype), cos, sin, unsqueeze_dim, True, False)


def transformers_cohere_apply_rotary_pos_emb(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """apply_rotary_pos_emb of Cohere: neighbouring channels are a pair and have the same angle in cos and sin.

    Computed in float32 and rounded once.
    """
    half = [torch.cat((x[..., ::2], x[..., ::2]), dim=-1).float() for x in (cos, sin)]
    return _rotated(q, k, half[0], half[1], unsqueeze_dim, False, False)


def transformers_ernie4_5_apply_rotary_pos_emb(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """apply_rotary_pos_emb of ERNIE 4.5: as GLM-4's, computed in float32 and rounded once."""
    return _rotated(q, k, cos, sin, unsqueeze_dim, False, False)


def transformers_dinov3_vit_apply_rotary_pos_emb(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **kwargs
) -> tuple[torch.Tensor, torch.Tensor]:
    """apply_rotary_pos_emb of DINOv3: q, k [B, heads, S, D]; cos, sin [P, D] of the last P tokens, the patches."""
    dtype = torch.promote_types(q.dtype, cos.dtype)  # as of the host's products
    new_q, new_k = (rope_nd(x.to(dtype).transpose(1, 2), cos, sin, True) for x in (q, k))
    return new_q.transpose(1, 2), new_k.transpose(1, 2)


def transformers_vjepa2_rotate_queries_or_keys(x, pos):
    """rotate_queries_or_keys of V-JEPA 2, for one axis: x [B, heads, N, D]; pos [N], or [B, heads, N], alike for heads.

    Channels 2j and 2j + 1 are a pair, but the table repeats its angles by halves, as in the model's training.
    """
    half = x.shape[-1] // 2
    omega = 1.0 / 10000 ** (
        torch.arange(half, dtype=x.dtype, device=x.device) / half
    )  # rounded as in the host
    freq = (pos if pos.dim() == 1 else pos[:, 0]).unsqueeze(-1) * omega
    cos, sin = (t.repeat(*[1] * (t.dim() - 1), 2).flatten(0, -2) for t in (freq.cos(), freq.sin()))
    by_token = x.transpose(1, 2)
    given = by_token if pos.dim() == 1 else by_token.flatten(0, 1)[None]
    return rope_nd(given, cos, sin, False).view(by_token.shape).transpose(1, 2)


def _rotated(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads_at: int,
    rounds: bool,
    halves: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """halves: a pair is a channel of each half, else two neighbours."""
    batch, length = q.shape[0], cos.shape[-2]
    half = cos.shape[-1] // 2
    table = torch.cat((cos[..., :half], sin[..., :half]), dim=-1).view(-1, 2 * half)
    positions = torch.arange(table.shape[0], device=q.device)
    if table.shape[0] != batch * length:  # one row of positions for the whole batch
        positions = positions.repeat(batch)
    by_token = [x if heads_at == 2 else x.transpose(1, 2) for x in (q, k)]
    flat = [x.flatten(0, 1) for x in by_token]
    how = (q.shape[-1], table, halves, rounds, rounds)
    functional = getattr(rotary_emb, "functional", None)  # a file for a fork has the op alone
    if functional is not None:
        new = functional(positions, *flat, *how)
    else:
        new = [x.clone(memory_format=torch.contiguous_format) for x in flat]
        rotary_emb(positions, *new, *how)
    back = [n.view(x.shape) for n, x in zip(new, by_token, strict=True)]
    new_q, new_k = (x if heads_at == 2 else x.transpose(1, 2) for x in back)
    return new_q, new_k


# Examples of models with these functions: signatures and semantics are compared with theirs.
_LLAMA = (
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "granite", "smollm3", "gemma",
    "gpt_neox", "phi3", "nemotron",
)  # fmt: skip


def _target(model: str, cls: str = "transformers_apply_rotary_pos_emb") -> Target:
    path = f"transformers.models.{model}.modeling_{model}:apply_rotary_pos_emb"
    return Target("transformers", path, cls, "called_function")


def _nd(model: str, function: str) -> Target:
    path = f"transformers.models.{model}.modeling_{model}:{function}"
    note = "not measured: replaced on request"
    return Target(
        "transformers", path, f"transformers_{model}_{function}", "called_function", default=False, note=note
    )


TARGETS = {
    "rope_nd": (_nd("dinov3_vit", "apply_rotary_pos_emb"), _nd("vjepa2", "rotate_queries_or_keys")),
    "rotary_emb": (
        *(_target(model) for model in _LLAMA),
        _target("olmo2", "transformers_olmo_apply_rotary_pos_emb"),
        _target("glm4", "transformers_glm_apply_rotary_pos_emb"),
        _target("ernie4_5", "transformers_ernie4_5_apply_rotary_pos_emb"),
        _target("cohere2", "transformers_cohere_apply_rotary_pos_emb"),
    ),
}
