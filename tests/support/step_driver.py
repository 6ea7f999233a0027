"""Hand-made steps for a Generate runner without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastkernels.engine.execution.runners.generate import Generate
from fastkernels.engine.options.config import EngineConfig
from fastkernels.engine.sampling.rows import NewRow
from fastkernels.engine.sampling.sampling_params import SamplingParams
from fastkernels.engine.steps.step import PromptTargets, StepInput
from fastkernels.models.common.plans.build import load_config

BLOCK = 4
PROMPT = [5, 17, 300, 4, 4, 90, 211]
OTHER = [9, 8, 7, 401, 33]


def make_runner(folder: Path, **settings: Any) -> Generate:
    defaults: dict[str, Any] = {
        "device": "cpu", "block_size": BLOCK, "num_blocks": 64, "max_model_len": 64, "max_num_seqs": 4,
        "max_num_batched_tokens": 32, "dtype": "float32",
    }  # fmt: skip
    config = EngineConfig(model=str(folder), **{**defaults, **settings})
    return Generate(config, folder, load_config(folder))


class Driver:
    """The engine's state: slots, scattered block tables, lengths. Rows are (slot, token ids)."""

    def __init__(self, runner: Generate, seed: int = 0):
        self.runner = runner
        groups = runner.limits.groups or ((None, 64),)  # a model without paged layers has none
        self.windows = [window for window, _ in groups]
        order = np.random.default_rng(seed)  # shuffled, so that no table is a range
        self.free = [order.permutation(np.arange(1, blocks)).tolist() for _, blocks in groups]
        self.tables: dict[int, list[list[int]]] = {}  # of each group of layers
        self.lens: dict[int, int] = {}
        self.generated: dict[int, int] = {}
        self.new: list[NewRow] = []

    def enter(
        self,
        slot: int,
        params: SamplingParams | None = None,
        prompt: Sequence[int] = (),
        ends: Sequence[int] = (),
    ) -> None:
        """Enter a request into a slot. prompt: for the penalties. The seed is params.seed or 0."""
        self.leave(slot)
        self.tables[slot] = [[] for _ in self.windows]
        self.lens[slot], self.generated[slot] = 0, 0
        params = params or SamplingParams(temperature=0)
        self.new.append(NewRow(slot, params, params.seed or 0, frozenset(ends), prompt))

    def leave(self, slot: int) -> None:
        for free, table in zip(self.free, self.tables.pop(slot, []), strict=False):
            free += [block for block in table if block]

    def step(
        self, rows: Sequence[tuple[int, Sequence[int]]], prompt_targets: Sequence[PromptTargets] = ()
    ) -> StepInput:
        rows = sorted(rows, key=lambda r: len(r[1]) > 1)
        updates = []
        for slot, ids in rows:
            known, size = self.lens[slot], self.runner.config.block_size
            self.lens[slot] += len(ids)
            for group, (free, window) in enumerate(zip(self.free, self.windows, strict=True)):
                table, row = self.tables[slot][group], group * (self.runner.batch.dummy + 1) + slot
                for column in range(max(0, known - window + 1) // size if window else 0):
                    if table[column]:  # no later token sees it
                        free.append(table[column])
                        table[column] = 0
                        updates.append((row, column, 0))
                while len(table) * size < self.lens[slot]:
                    updates.append((row, len(table), free.pop(0)))
                    table.append(updates[-1][2])
        new, self.new = self.new, []
        offsets = np.array([self.generated[s] for s, _ in rows], dtype=np.int64)
        for slot, _ in rows:
            self.generated[slot] += 1
        return StepInput(
            slots=np.array([s for s, _ in rows], dtype=np.int64),
            query_lens=np.array([len(i) for _, i in rows], dtype=np.int32),
            seq_lens=np.array([self.lens[s] for s, _ in rows], dtype=np.int32),
            offsets=offsets,
            input_ids=np.array([t for _, ids in rows for t in ids], dtype=np.int64),
            num_decodes=sum(len(i) == 1 for _, i in rows),
            block_updates=np.array(updates, dtype=np.int32).reshape(-1, 3),
            new_rows=new,
            prompt_targets=prompt_targets,
        )

    def run(self, *rows: tuple[int, Sequence[int]]) -> dict[int, int]:
        step = self.step(rows)
        tokens = self.runner.launch(step).result().token_ids
        return dict(zip(step.slots.tolist(), tokens.tolist(), strict=True))
