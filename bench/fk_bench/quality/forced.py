"""Forced decode steps inside a host's engine: store the raw logits of each step, then let only the given token through.

A request carries a task as JSON: {"file", "total", "at", "tokens"}. Each of its steps gives one row of logits, which
goes to row `at` + step of the file [total, vocabulary] in float32. All tokens but the task's are then masked, so that
any sampler takes that one. The rows are compared in another process, which runs no kernel of a candidate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_open: dict[tuple[str, int], torch.Tensor] = {}


@dataclass
class Progress:
    """One request and the number of its steps so far."""

    task: dict[str, Any]
    done: int = 0


def rows_of(file: str, total: int, vocabulary: int) -> torch.Tensor:
    """Open a file of logits [total, vocabulary] in float32, creating it if needed."""
    key = (file, vocabulary)
    if key not in _open:
        shared = torch.from_file(file, shared=True, size=total * vocabulary, dtype=torch.float32)
        _open[key] = shared.view(total, vocabulary)
    return _open[key]


def read_rows(file: Path, total: int, vocabulary: int | None = None) -> torch.Tensor:
    """Read such a file; columns after the vocabulary are a host's padding. Raises ValueError for another size."""
    size = file.stat().st_size // 4
    columns = size // total
    if columns * total != size or columns < (vocabulary or 1):
        raise ValueError(
            f"{file.name} has {size} values, {total} rows of {vocabulary or 'any size'} were expected"
        )
    rows = torch.from_file(str(file), size=size, dtype=torch.float32).view(total, columns)
    return rows[:, :vocabulary].clone()  # the file may go


def store(logits: torch.Tensor, tasks: Sequence[dict[str, Any]], step: int) -> None:
    """Store row i of logits [n, vocabulary] as this step of task i."""
    file = rows_of(tasks[0]["file"], tasks[0]["total"], logits.shape[1])
    file[torch.tensor([task["at"] + step for task in tasks])] = logits.float().cpu()


def step(logits: torch.Tensor, requests: Sequence[tuple[int, Progress]]) -> None:
    """Store and mask logits [batch, vocabulary] in place, for each (row, request)."""
    for row, request in requests:
        if request.done < len(tokens := request.task["tokens"]):
            store(logits[row][None], [request.task], request.done)
            logits[row] = float("-inf")
            logits[row, tokens[request.done]] = 0.0
            request.done += 1


def force_in(sampler: Any) -> None:
    """Make a sampler take the task's tokens for requests with a task; other requests are unaffected.

    sampler: of vLLM's second model runner, or any with add_request(req_idx, prompt_len, sampling_params) and
    sampler(logits, input_batch), where input_batch.idx_mapping_np has the req_idx of each row.
    """
    base = type(sampler)

    class Forcing(base):  # type: ignore[misc, valid-type]
        def add_request(self, req_idx: int, prompt_len: int, sampling_params: Any) -> None:
            super().add_request(req_idx, prompt_len, sampling_params)
            task = (sampling_params.extra_args or {}).get("task")
            if task is None:
                self.tasks.pop(req_idx, None)
            else:
                self.tasks[req_idx] = Progress(task)

        def __call__(self, logits: torch.Tensor, input_batch: Any) -> Any:
            rows = enumerate(input_batch.idx_mapping_np.tolist())
            forced = [(row, self.tasks[i]) for row, i in rows if i in self.tasks]
            if forced:
                logits = logits.to(torch.float32, copy=True)
                step(logits, forced)
            return super().__call__(logits, input_batch)

    sampler.__class__, sampler.tasks = Forcing, {}
