"""Choose the calls of a run to keep: the most frequent signatures and a spread of values, within a size."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fastkernels.capture.calls import digest

SCHEMA = "fastkernels.capture/1"
Values = tuple[tuple[str, Any], ...]  # (argument, digest of its tensor, or its number) of one call


@dataclass(frozen=True)
class Limits:
    """Limits of a saved recording.

    budget      bytes of all tensors; ops have equal shares and pass on the bytes that they do not need
    tensor      bytes of one tensor; values of larger tensors are dropped
    signatures  signatures of one op: the most frequent and a few large ones
    values      sets of values of one signature, spread over the run
    floats      bytes of the rows that are kept of a float tensor; 0: float tensors have no values
    """

    budget: int = 1 << 20
    tensor: int = 256 << 10
    signatures: int = 32
    values: int = 8
    floats: int = 0


SAMPLE = "sample"  # the number of a call, in the values of calls whose floats are kept


@dataclass
class Calls:
    """The calls of one signature. `seen` counts each set of values; `kept` holds the tensors of some sets.

    floats  {set of values: {argument: digest of its rows}}
    """

    args: list[dict[str, Any]]
    count: int = 0
    seen: dict[Values, int] = field(default_factory=dict)
    kept: dict[Values, dict[str, torch.Tensor]] = field(default_factory=dict)
    too_large: set[str] = field(default_factory=set)
    floats: dict[Values, dict[str, str]] = field(default_factory=dict)

    def add(
        self,
        values: Values,
        tensors: Mapping[str, torch.Tensor],
        most: int,
        rng: random.Random,
        floats: Mapping[str, torch.Tensor] | None = None,
        most_bytes: int = 0,
    ) -> None:
        """Count a call. Beyond `most` sets of values, every set has the same chance to be kept (reservoir sampling)."""
        self.count += 1
        self.seen[values] = self.seen.get(values, 0) + 1
        if self.seen[values] > 1 or not values:
            return
        if len(self.kept) >= most:
            if rng.randrange(len(self.seen)) >= most:
                return
            del self.kept[rng.choice(list(self.kept))]
        # A copy: on the CPU the tensor may be a buffer that the engine reuses every step.
        self.kept[values] = {name: tensor.clone() for name, tensor in tensors.items()}
        if floats:
            rows = {name: rows_of(tensor, most_bytes) for name, tensor in floats.items()}
            self.floats[values] = {name: digest(tensor) for name, tensor in rows.items()}
            self.kept[values] |= {self.floats[values][name]: tensor for name, tensor in rows.items()}


def rows_of(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """Rows of a tensor that fit into `most` bytes, evenly spread over those that are not 0, as [rows, channels]."""
    rows = tensor.detach().reshape(-1, tensor.shape[-1])
    room = max(most // max(rows.shape[1] * rows.element_size(), 1), 1)
    if len(rows) > room:
        used = rows.ne(0).any(1).nonzero().flatten()
        used = used if len(used) else torch.arange(len(rows), device=rows.device)
        at = torch.linspace(0, len(used) - 1, min(room, len(used)), device=used.device).long()
        rows = rows[used[at]]
    return rows.to("cpu", copy=True).contiguous()


def choose(calls: Mapping[str, Calls], most: int) -> list[Calls]:
    """Choose three quarters by frequency, the rest by total rows: prompts are few but long."""
    ordered = sorted(calls.values(), key=lambda c: -c.count)
    if len(ordered) <= most:
        return ordered
    frequent = _first(ordered, most - most // 4)
    taken = {id(c) for c in frequent}
    others = sorted((c for c in ordered if id(c) not in taken), key=lambda c: -c.count * _elements(c))
    return frequent + others[: most // 4]


def _first(ordered: Sequence[Calls], most: int) -> list[Calls]:
    """Take the first `most`; among those as frequent as the last one, a spread over the run."""
    last = ordered[most - 1].count
    above, equal = [c for c in ordered if c.count > last], [c for c in ordered if c.count == last]
    room = most - len(above)
    return above + [equal[i * len(equal) // room] for i in range(room)]


def _elements(calls: Calls) -> int:
    """Rows of the first tensor."""
    return next((math.prod(a["shape"]) for a in calls.args if "shape" in a), 1)


def within(
    chosen: Mapping[str, list[Calls]], budget: int
) -> tuple[set[tuple[int, Values]], dict[str, torch.Tensor]]:
    """Return the (signature id, set of values) pairs that fit into the budget, and their tensors by digest."""
    kept: set[tuple[int, Values]] = set()
    tensors: dict[str, torch.Tensor] = {}
    left, waiting = budget, dict(chosen)
    while waiting:  # the op with the smallest need first: the others share its rest
        op = min(waiting, key=lambda name: _needed(waiting[name]))
        left -= _take(waiting[op], left // len(waiting), kept, tensors)
        del waiting[op]
    return kept, tensors


def _needed(calls: Sequence[Calls]) -> int:
    return sum(_bytes(t) for c in calls for tensors in c.kept.values() for t in tensors.values())


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _take(
    calls: Sequence[Calls], share: int, kept: set[tuple[int, Values]], tensors: dict[str, torch.Tensor]
) -> int:
    """Take one set of values of each signature, then a second of each, and so on. Returns the bytes used."""
    used = 0
    orders = [(c, [values for values in c.seen if values in c.kept]) for c in calls]
    for turn in range(max((len(order) for _, order in orders), default=0)):
        for each, order in orders:
            if turn >= len(order):
                continue
            new = {name: t for name, t in each.kept[order[turn]].items() if name not in tensors}
            size = sum(map(_bytes, new.values()))
            if used + size <= share:
                used += size
                tensors.update(new)
                kept.add((id(each), order[turn]))
    return used


def to_json(data: Mapping[str, Any]) -> str:
    """Return JSON with one line per signature and module, so that a diff is readable."""
    body = json.dumps({k: v for k, v in data.items() if k not in ("ops", "modules")}, indent=1)[:-2]
    ops = []
    for name, op in data["ops"].items():
        head = json.dumps({k: v for k, v in op.items() if k != "calls"})[:-1]
        lines = ",\n   ".join(json.dumps(c) for c in op["calls"])
        ops.append(f'  {json.dumps(name)}: {head}, "calls": [\n   {lines}]}}')
    modules = ",\n  ".join(json.dumps(m) for m in data["modules"])
    return f'{body},\n "ops": {{\n' + ",\n".join(ops) + f'}},\n "modules": [\n  {modules}]\n}}\n'
