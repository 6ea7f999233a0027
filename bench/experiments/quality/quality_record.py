"""quality.py, inside a host's engine: force the text's tokens in decode steps, and compare the raw logits there.

A request carries a task as JSON: {"folder", "run", "sequence", "at", "total", "tokens"}. Each of its steps gives one
row of logits. Run HOST stores its rows in folder/logits.f32, from row `at` of `total`. All other runs compare their
rows with that file, which runs in other processes can read, and every run with folder/exact.f32, the logits in float32
(quality_exact.py). Then all tokens but the text's are masked, so that any sampler takes that one. The results of a
sequence are a line of folder/RUN.jsonl.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

HOST = "host"  # the reference run
LOGITS = "logits.f32"
EXACT = "exact"  # the model in float32, computed outside the engine
EXACT_LOGITS = "exact.f32"
_kept: dict[tuple[str, int, int, str], torch.Tensor] = {}


@dataclass
class Progress:
    """One request: its task and the results of `compare` for each step so far."""

    task: dict[str, Any]
    kl: list[float] = field(default_factory=list)
    logprob: list[float] = field(default_factory=list)
    same: list[float] = field(default_factory=list)
    kl_exact: list[float] = field(default_factory=list)

    @property
    def done(self) -> int:
        return len(self.kl)

    @property
    def token(self) -> int:
        return self.task["tokens"][self.done]

    @property
    def slot(self) -> int:
        return self.task["at"] + self.done

    def add(self, kl: float, logprob: float, same: float, kl_exact: float | None = None) -> None:
        self.kl.append(kl)
        if kl_exact is not None:
            self.kl_exact.append(kl_exact)
        self.logprob.append(logprob)
        self.same.append(same)
        if self.done == len(self.task["tokens"]):
            found = {"kl": self.kl, "logprob": self.logprob, "same": self.same}
            if self.kl_exact:
                found["kl_exact"] = self.kl_exact
            write(Path(self.task["folder"]), self.task["run"], self.task["sequence"], found)


def write(folder: Path, run: str, sequence: int, found: dict[str, list[Any]]) -> None:
    with open(folder / f"{run}.jsonl", "a") as file:
        file.write(json.dumps({"sequence": sequence, **found}) + "\n")


def kept(folder: str, total: int, vocabulary: int, name: str = LOGITS) -> torch.Tensor:
    """Open the logits file [total, vocabulary] in float32, creating it if needed."""
    key = (folder, total, vocabulary, name)
    if key not in _kept:
        path = Path(folder, name)
        file = torch.from_file(str(path), shared=True, size=total * vocabulary, dtype=torch.float32)
        _kept[key] = file.view(total, vocabulary)
    return _kept[key]


def compare(
    logits: torch.Tensor, reference: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compare in float64. logits, reference: [n, vocabulary]; tokens: [n].

    Return for each row KL(reference || logits) in nats, the token's log-probability by `logits`, and 1 if the most
    probable tokens agree.
    """
    q = torch.log_softmax(logits.double(), -1)
    p = torch.log_softmax(reference.double(), -1)
    gaps = torch.where(p.isneginf(), 0.0, p - q)  # skip logits of -inf
    same = (logits.argmax(-1) == reference.argmax(-1)).double()
    return (p.exp() * gaps).sum(-1), q.gather(-1, tokens[:, None])[:, 0], same


def step(logits: torch.Tensor, requests: list[tuple[int, Progress]]) -> None:
    """Handle one step: compare and mask logits [batch, vocabulary] in place, for each (row, request)."""
    requests = [(row, r) for row, r in requests if r.done < len(r.task["tokens"])]
    if not requests:
        return
    rows = torch.tensor([row for row, _ in requests], device=logits.device)
    tokens = torch.tensor([r.token for _, r in requests], device=logits.device)
    slots = torch.tensor([r.slot for _, r in requests])
    task = requests[0][1].task
    found = logits[rows].float()
    reference = kept(task["folder"], task["total"], logits.shape[1])
    if task["run"] == HOST:
        reference[slots] = found.cpu()
        wanted = found
    else:
        wanted = reference[slots].to(found.device)
    values = torch.stack(compare(found, wanted, tokens)).tolist()
    if Path(task["folder"], EXACT_LOGITS).exists():
        exact = kept(task["folder"], task["total"], logits.shape[1], EXACT_LOGITS)[slots]
        values.append(compare(found, exact.to(found.device), tokens)[0].tolist())
    logits[rows] = float("-inf")
    logits[rows, tokens] = 0.0
    for (_, request), *numbers in zip(requests, *values, strict=True):
        request.add(*numbers)


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
