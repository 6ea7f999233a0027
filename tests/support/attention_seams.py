"""Shared by tests of the attention seams: a batch on shuffled blocks with its expected output, and a CPU's table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fastkernels.core import tuning
from fastkernels.core.tuning import Entry, Table
from fastkernels.overrides.attention.attention_decode import attention_decode
from fastkernels.overrides.attention.attention_prefill import attention_prefill
from fastkernels.overrides.cache.store_kvcache import store_kvcache

HEADS, KV_HEADS, D, BLOCK = 6, 2, 32, 16
# Drafts: each sequence has three draft tokens to verify and one of its own.
BATCHES = pytest.mark.parametrize(
    "queries", [[1, 1, 1], [63, 1, 7], [5], [4, 4, 4]], ids=["decode", "mixed", "prefill", "drafts"]
)
WINDOWS = pytest.mark.parametrize("window", [-1, 8])


class Batch:
    """Sequences of 33, 0 and 20 tokens and then `queries` more, on shuffled blocks of which 0 is never used."""

    def __init__(self, queries: list[int]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.queries, self.context = queries, [33, 0, 20][: len(queries)]
        self.lengths = [c + n for c, n in zip(self.context, queries, strict=True)]
        blocks = [-(-n // BLOCK) for n in self.lengths]
        self.blocks = sum(blocks) + 1
        self.table = torch.zeros(len(queries), max(blocks), dtype=torch.int32)
        order = torch.randperm(sum(blocks), generator=generator).int() + 1
        for row, ids in zip(self.table, order.split(blocks), strict=True):
            row[: len(ids)] = ids
        self.keys = [torch.randn(n, KV_HEADS, D, generator=generator) for n in self.lengths]
        self.values = [torch.randn(n, KV_HEADS, D, generator=generator) for n in self.lengths]
        self.slots = [
            torch.tensor([int(self.table[i, p // BLOCK]) * BLOCK + p % BLOCK for p in range(n)])
            for i, n in enumerate(self.lengths)
        ]
        self.query = torch.randn(sum(queries), HEADS, D, generator=generator)
        self.starts = torch.tensor([0, *torch.tensor(queries).cumsum(0)], dtype=torch.int32)
        self.seq_lens = torch.tensor(self.lengths, dtype=torch.int32)

    def new(self, rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([r[c:] for r, c in zip(rows, self.context, strict=True)])

    def expected(self, window: int, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """[T, HEADS, D], computed in float64. A query sees itself and `window` keys before it, or all (-1).

        sinks: [HEADS], the logit of one more key without a value
        """
        parts = []
        for q, k, v in zip(self.query.split(self.queries), self.keys, self.values, strict=True):
            mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
            mask = mask if window < 0 else mask.triu(len(k) - len(q) - window)
            heads = [t.double().transpose(0, 1) for t in (q, k, v)]
            out = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)
            if sinks is not None:
                k = heads[1].repeat_interleave(HEADS // KV_HEADS, 0)
                scores = (heads[0] @ k.transpose(1, 2) * D**-0.5).masked_fill(~mask, float("-inf"))
                out = out * torch.sigmoid(scores.logsumexp(-1) - sinks.double()[:, None])[..., None]
            parts.append(out.transpose(0, 1).float())
        return torch.cat(parts)


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """use(context, provider='reference'): a CPU's table for decodes of up to four sequences with that context."""
    ops = (attention_decode, attention_prefill, store_kvcache)

    def put(context: int, provider: str = "reference") -> None:
        shape = {
            "heads": HEADS, "kv_heads": KV_HEADS, "head_size": D, "block_size": BLOCK, "window": 0, "dtype": "float32",
        }  # fmt: skip
        sizes, won = {"batch": 4, "context": context}, {"speedup": 1.3, "ci95": (1.2, 1.4)}
        entry = Entry("attention_decode", shape, sizes, provider, "native", "r1", **won)  # type: ignore[arg-type]
        (tmp_path / "cpu.json").write_text(Table("cpu", {"r1": {}}, (entry,)).to_json())
        monkeypatch.setenv("FASTKERNELS_TUNED", str(tmp_path))
        tuning._by_op.cache_clear()
        for op in ops:
            op.reset()

    yield put
    monkeypatch.undo()
    tuning._by_op.cache_clear()
    for op in ops:
        op.reset()
