"""Logits of a model with states or a KV cache, computed in steps, against transformers' of one pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fastkernels.core.forward_context import AttentionMetadata, forward_context
from fastkernels.core.layer_state import KVSpec, StateSpec
from fastkernels.models.common.plans import build

IDS = torch.tensor([(i * 37) % 500 for i in range(23)])


@torch.inference_mode()
def check_logits(folder: Path, oracle: Any, splits: list[list[int]]) -> None:
    """Compare two sequences that share steps. splits: the ends of the steps."""
    model: Any = build.build(folder, build.load_config(folder), torch.device("cpu"), torch.float32)
    for layer in model.modules():
        kept = getattr(layer, "keeps", None)
        if isinstance(kept, KVSpec):
            layer.kv_cache = layer.new_cache(20, 4, torch.float32, "cpu")
        elif isinstance(kept, StateSpec):
            layer.states = {name: t + 7 for name, t in kept.new(5, torch.float32, "cpu").items()}
            if hasattr(layer, "begin"):
                layer.begin()
    other = IDS.flip(0)
    want = [oracle.logits(folder, ids.tolist()) for ids in (IDS, other)]
    table = torch.stack([torch.arange(1, 8), torch.arange(8, 15)]).to(torch.int32)
    for ends in splits:
        start, found = 0, [[], []]
        for end in ends:
            ids = torch.cat([s[start:end] for s in (IDS, other)])
            at = torch.arange(start, end)
            places = torch.cat([table[row, at // 4].long() * 4 + at % 4 for row in (0, 1)])
            size = end - start
            step = AttentionMetadata(
                places, torch.tensor([0, size, 2 * size], dtype=torch.int32),
                torch.tensor([end, end], dtype=torch.int32), table, size, end,
                state_slots=torch.tensor([3, 1], dtype=torch.int32), fresh=torch.tensor([start == 0] * 2),
            )  # fmt: skip
            with forward_context(step):
                logits = model.compute_logits(model(ids, at.repeat(2)))
            for parts, part in zip(found, logits.chunk(2), strict=True):
                parts.append(part)
            start = end
        for parts, expected in zip(found, want, strict=True):
            torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=1e-4)
