"""Compare the kernels between drafts with PyTorch under TRITON_INTERPRET=1; print differences as JSON."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from fastkernels.engine.execution.drafts import draft_kernels
from fastkernels.engine.execution.drafts.draft_kernels import COLUMNS, Held, Rows
from fastkernels.engine.sampling.rows import NewRow
from fastkernels.engine.sampling.sampling_params import SamplingParams
from fastkernels.engine.steps.input_batch import InputBatch
from fastkernels.engine.steps.step import StepInput


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
            "slot": rng.permutation(size), "room": rng.integers(5, 40, size), "unsure": np.zeros(size),
        }  # fmt: skip
        packed = torch.from_numpy(np.stack([columns[name] for name in COLUMNS]).astype(np.int64))
        sizes = tokens.sum(), (drafts + 1).sum()
        # Mostly the same token, so that drafts agree
        ids, sampled = (torch.from_numpy((rng.random(n) < 0.1).astype(np.int64)) for n in sizes)
        want, got = (Rows(*torch.zeros(6, size, dtype=torch.int64).unbind()) for _ in range(2))
        got = Rows(*(t.to(device) for t in got))
        held = Held.zeros(size + 1, count, torch.device("cpu"))
        held.shift[:size] = torch.from_numpy(rng.integers(0, 3, size))
        on_device, last = (
            Held(*(t.to(device, copy=True) for t in held)),
            torch.zeros(size + 1, dtype=torch.int64),
        )
        other = last.to(device, copy=True)
        draft_kernels.accept(packed, ids, sampled, want, count, eagle, held, last)
        moved: Any = [t.to(device) for t in (packed, ids, sampled)]
        draft_kernels.accept_triton(*moved, got, count, eagle, on_device, other)
        found += _compare(f"eagle {eagle}: ", want, Rows(*(t.cpu() for t in got)))
        found += _compare(f"eagle {eagle}: ", held, Held(*(t.cpu() for t in on_device)))
        if not torch.equal(last, other.cpu()) or not last.any():
            found.append(f"last tokens are {other.tolist()}, not {last.tolist()}")
        accepted = (want.offset + held.shift[packed[10]] - packed[4]).tolist()
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
        found += _settled(rng, count, 1 + 2 * case, device)
    return found


def _settled(rng: np.random.Generator, count: int, groups: int, device: str) -> list[str]:
    """Differences of `settle`: prompts, rows with drafts and without, with padding; then of the pass that follows."""
    rows, size, longest = 12, 16, 40
    lens = rng.integers(1, count + 2, rows).astype(np.int32)
    lens[-2:] = 9, 7  # prompts
    keys = (lens + rng.integers(4, 20, rows)).astype(np.int32)
    unsure = (rng.random(rows) < 0.6) & (lens <= count + 1)
    ids = np.concatenate(
        [rng.integers(0, 50, n) if n > count + 1 else np.arange(-1, -1 - n, -1) for n in lens]
    ).astype(np.int64)
    step = StepInput(
        rng.permutation(size)[:rows].astype(np.int64), lens, keys, rng.integers(5, 20, rows), ids, 0,
        np.array([(row, column, rng.integers(1, 99)) for row in range(groups * (size + 1)) for column in range(10)]),
    )  # fmt: skip
    numbers = [rng.integers(0, count + 1, size + 1) for _ in range(3)]
    packed = np.zeros(size, np.int64)
    packed[:rows] = unsure
    made = []
    for where, settle in (("cpu", draft_kernels.settle), (device, draft_kernels.settle_triton)):
        batch = InputBatch(torch.device(where), size, longest, 4, groups)
        batch.update(step.block_updates)
        batch.set_shifts(
            [
                NewRow(int(slot), SamplingParams(), 0, frozenset(), shift=-int(slot) % 3 - 2)
                for slot in step.slots
            ]
        )
        batch.last_tokens.copy_(torch.arange(100, 101 + size))
        drafts = torch.arange(200, 200 + (size + 1) * count).view(-1, count)
        held = Held(*(torch.from_numpy(n).to(where, copy=True) for n in numbers), drafts.to(where, copy=True))
        held.shift[size] = 0
        whole: list[torch.Tensor] = []
        for flags in (torch.from_numpy(packed).to(where), None):
            inputs = batch.load(step, len(ids) + 5, size)
            settle(inputs, batch, held, flags)
            whole += [t.cpu() for t in (*inputs.tensors(), held.shift[:size])]
            batch.last_tokens.zero_()  # the second pass does not read them
        made.append(whole)
    first = made[0][: len(made[0]) // 2]
    if int(first[0].min()) < 0 or not torch.equal(first[8][:rows], made[0][len(first) + 8][:rows]):
        return ["settle leaves unknown ids, or the second pass has other lengths"]
    if torch.equal(first[8][:rows], torch.from_numpy(keys)):
        return ["settle changes no length"]
    return [
        f"settle: tensor {i} is {b.tolist()}, not {a.tolist()}"
        for i, (a, b) in enumerate(zip(*made, strict=True))
        if not torch.equal(a, b)
    ]


def _compare(what: str, want: Any, got: Any) -> list[str]:
    return [
        f"{what}{name} {x.tolist()} {y.tolist()}"
        for name, x, y in zip(want._fields, want, got, strict=True)
        if x.dtype != y.dtype or not torch.equal(x, y)
    ]


if __name__ == "__main__":
    print(json.dumps(problems()))
