"""FlashAttention-3 as a provider of mla_decode, with both libraries' entry points simulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastkernels.overrides.attention import fa3
from fastkernels.overrides.latent_attention import mla_fa3
from fastkernels.overrides.latent_attention.mla_decode import reference

SCALE = 192**-0.5


def arguments() -> list[Any]:
    g = torch.Generator().manual_seed(0)
    q, cache = torch.randn(2, 5, 576, generator=g).bfloat16(), torch.randn(4, 16, 576, generator=g).bfloat16()
    lens, table = torch.tensor([20, 7], dtype=torch.int32), torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    return [q, cache, lens, table, 20, SCALE, 512]


def joined(q: Any, key: Any, value: Any, q_v: Any, lens: Any, table: Any, scale: float) -> torch.Tensor:
    queries, cache = torch.cat([q_v, q], -1), torch.cat([value, key], -1).squeeze(2)
    return reference(queries, cache, lens, table, int(lens.max()), scale, 512)


def of_vllm(
    q: Any, k: Any, v: Any, max_q: int, starts: Any, max_k: int, seqused_k: Any, q_v: Any, softmax_scale: float,
    causal: bool, block_table: Any, out: Any, fa_version: int,
) -> None:  # fmt: skip
    assert max_q == 1 and starts.tolist() == [0, 1, 2] and causal and fa_version == 3
    out.copy_(joined(q, k, v, q_v, seqused_k, block_table, softmax_scale))


def of_package(
    q: Any, k: Any, v: Any, qv: Any, cache_seqlens: Any, page_table: Any, cu_seqlens_q: Any, max_seqlen_q: int,
    softmax_scale: float, causal: bool,
) -> torch.Tensor:  # fmt: skip
    assert max_seqlen_q == 1 and cu_seqlens_q.tolist() == [0, 1, 2] and causal
    return joined(q, k, v, qv, cache_seqlens, page_table, softmax_scale)


@pytest.mark.parametrize("entry", [(of_vllm, True), (of_package, False)])
def test_result_is_the_references(entry: tuple[Any, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa3, "entry_point", lambda: entry)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    args = arguments()
    out = torch.empty(2, 5, 512, dtype=torch.bfloat16)
    assert mla_fa3.decode(*args, out=out) is out
    assert torch.equal(out, reference(*args)) and torch.equal(mla_fa3.decode(*args), out)


def test_unsupported_calls_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa3, "_capability", lambda index: (9, 0))
    q, cache, lens, table, *rest = arguments()
    q, cache = q.half(), cache.half()  # Triton's rules for bfloat16 on a CPU come first
    assert mla_fa3.supports(q, cache, lens, table, *rest) is None
    refused: dict[str, list[Any]] = {
        "512 + 64 channels": [q, cache, lens, table, *rest[:2], 500],
        "without a scale": [q, cache, lens, table, *rest, 0.5],
        "not int32": [q, cache, lens.long(), table, *rest],
        "rows must be contiguous": [
            q,
            cache.transpose(1, 2).contiguous().transpose(1, 2),
            lens,
            table,
            *rest,
        ],
        "needs float16 or bfloat16": [q.float(), cache.float(), lens, table, *rest],
        "multiples of 16": [q, cache[:, :10], lens, table, *rest],
        "which can be NaN": [q.repeat(1, 20, 1), cache.repeat(1, 4, 1), lens, table, *rest],
    }
    for text, args in refused.items():
        assert text in str(mla_fa3.supports(*args)), text
    monkeypatch.setattr(fa3, "_capability", lambda index: (10, 0))
    assert "Hopper" in str(mla_fa3.supports(q, cache, lens, table, *rest))
