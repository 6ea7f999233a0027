"""Helpers of module tests: a small config, parameter values, a batch over a paged KV cache."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from fastkernels.core.forward_context import AttentionMetadata
from fastkernels.overrides.attention import attention

CONFIG = SimpleNamespace(
    hidden_size=72, intermediate_size=100, num_attention_heads=6, num_key_value_heads=2, head_dim=12, vocab_size=130,
    hidden_act="silu", rms_norm_eps=1e-5, max_position_embeddings=256, mlp_bias=False, attention_bias=False,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, final_logit_softcapping=None,
    residual_dropout=0.0, shared_intermediate_size=100,
)  # fmt: skip


def randn(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def fill(module: nn.Module) -> dict[str, torch.Tensor]:
    """Fill every parameter with distinct values and return the state dict."""
    for i, p in enumerate(module.parameters()):
        with torch.no_grad():
            p.copy_(randn(*p.shape, seed=i) / (p.shape[-1] ** 0.5 if p.dim() > 1 else 4) + (p.dim() == 1))
    return module.state_dict()


def metadata(q_lens: list[int], seq_lens: list[int], block_size: int) -> AttentionMetadata:
    """Return the metadata of a batch; sequence i has the blocks 1 + i * n and following, so no two share a block."""
    per = -(-max(seq_lens) // block_size)
    table = torch.arange(1, 1 + per * len(seq_lens), dtype=torch.int32).view(len(seq_lens), per)
    slots = [
        int(table[i, p // block_size]) * block_size + p % block_size
        for i, (q, s) in enumerate(zip(q_lens, seq_lens, strict=True))
        for p in range(s - q, s)
    ]
    starts = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    return AttentionMetadata(torch.tensor(slots), starts, lens, table, max(q_lens), max(seq_lens))


def bind_cache(module: nn.Module, blocks: int, block_size: int) -> None:
    for m in module.modules():
        if isinstance(m, attention.PagedAttention):
            shape = (blocks, block_size, m.num_kv_heads, m.head_size)
            m.kv_cache = (torch.full(shape, 99.0), torch.full(shape, -99.0))
