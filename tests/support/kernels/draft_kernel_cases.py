"""Compare the kernels between drafts with PyTorch under TRITON_INTERPRET=1; print differences as JSON."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from fastkernels.engine.execution import draft_kernels
from fastkernels.engine.execution.draft_kernels import COLUMNS, Rows
from fastkernels.engine.execution.input_batch import InputBatch


def problems(device: str = "cpu") -> list[str]:
    """Return the differences from PyTorch: drafts accepted by force or not, chunks of prompts, rows without room."""
    found: list[str] = []
    for case, eagle in enumerate((True, False)):
        rng, size, count = np.random.default_rng(case), 40, 3
        drafts, own = rng.integers(0, count + 1, size), rng.integers(1, 6, size)
        tokens, more = own + drafts, (rng.random(size) < 0.7) * (not eagle)
        columns = {
            "start": tokens.cumsum() - tokens, "tokens": tokens, "drafts": drafts,
            "place": (drafts + 1).cumsum() - drafts - 1, "offset": rng.integers(0, 50, size),
            "known": np.where(drafts == 0, rng.integers(-1, 9, size), -1),
            "forced": np.where(rng.random(size) < 0.3, drafts // 2, -1),
            "own_start": (tokens + more).cumsum() - tokens - more, "extra": more, "before": rng.integers(0, 20, size),
            "slot": rng.permutation(size), "room": rng.integers(5, 40, size),
        }  # fmt: skip
        packed = torch.from_numpy(np.stack([columns[name] for name in COLUMNS]).astype(np.int64))
        sizes = tokens.sum(), (drafts + 1).sum()
        # Mostly the same token, so that drafts agree
        ids, sampled = (torch.from_numpy((rng.random(n) < 0.1).astype(np.int64)) for n in sizes)
        want, got = (Rows(*torch.zeros(6, size, dtype=torch.int64).unbind()) for _ in range(2))
        got = Rows(*(t.to(device) for t in got))
        draft_kernels.accept(packed, ids, sampled, want, count, eagle)
        moved: Any = [t.to(device) for t in (packed, ids, sampled)]
        draft_kernels.accept_triton(*moved, got, count, eagle)
        found += _compare(f"eagle {eagle}: ", want, Rows(*(t.cpu() for t in got)))
        accepted = (want.offset - packed[4]).tolist()
        if set(accepted) != {0, 1, 2, 3}:
            found.append(f"numbers of accepted drafts are {sorted(set(accepted))}")
        batch = InputBatch(torch.device(device), size, 40, 4, groups=1 + case)
        batch.block_table.copy_(torch.randint(1, 99, batch.block_table.shape))
        on_cpu: Any = SimpleNamespace(
            block_size=4, groups=batch.groups, group_table=lambda group, b=batch: b.group_table(group).cpu()
        )
        for step in (1, 2):
            a = draft_kernels.advance(want, step, 30, on_cpu)
            b = draft_kernels.advance_triton(got, step, 30, batch)
            found += _compare(f"step {step}: ", a, type(b)(*(t.cpu() for t in b)))
            if not 0 < int((a.slot_mapping < 0).sum()) < a.slot_mapping.numel():
                found.append("rows with room and without it are not both tested")
    return found


def _compare(what: str, want: Any, got: Any) -> list[str]:
    return [
        f"{what}{name} {x.tolist()} {y.tolist()}"
        for name, x, y in zip(want._fields, want, got, strict=True)
        if x.dtype != y.dtype or not torch.equal(x, y)
    ]


if __name__ == "__main__":
    print(json.dumps(problems()))
