"""Token agreement: whether two servers, or one server twice, generate the same greedy tokens.

agreement(a, b) = mean over prompts of (length of the common prefix) / (length of the longer output)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fk_bench.core.rows import Row, Status
from fk_bench.serving.load.client import Client, Prompt


class AgreementError(RuntimeError):
    """A request of the agreement phase failed."""


@dataclass
class Outputs:
    """Two greedy runs of the same prompts on one lane. `unit` is 'tokens', or 'characters' if no ids were sent."""

    unit: str
    first: list[list[Any]]
    second: list[list[Any]]
    flushed_by: str | None = None

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def load(cls, path: Path) -> Outputs | None:
        """None if the file is missing or incomplete."""
        try:
            return cls(**json.loads(path.read_text()))
        except (FileNotFoundError, json.JSONDecodeError, TypeError):
            return None

    @property
    def self_agreement(self) -> float:
        return agreement(self.first, self.second)


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    n = 0
    for x, y in zip(a, b):  # noqa: B905 (it ends with the shorter one)
        if x != y:
            break
        n += 1
    return n


def agreement(a: Sequence[Sequence[Any]], b: Sequence[Sequence[Any]]) -> float:
    """The mean over prompts, in [0, 1]; two empty outputs agree. Raises ValueError for different numbers of prompts."""
    if len(a) != len(b) or not a:
        raise ValueError(f"agreement needs the same prompts on both sides, got {len(a)} and {len(b)}")
    shares = []
    for x, y in zip(a, b):  # noqa: B905
        longer = max(len(x), len(y))
        shares.append(common_prefix(x, y) / longer if longer else 1.0)
    return sum(shares) / len(shares)


def with_base(lane: Outputs, base: Outputs) -> float | None:
    """The mean of first run with first run and second with second; None if the units differ."""
    if lane.unit != base.unit:
        return None
    return (agreement(lane.first, base.first) + agreement(lane.second, base.second)) / 2


async def collect(client: Client, prompts: Sequence[Prompt]) -> Outputs:
    """Both runs, one request at a time (so batching is the same in all lanes), with empty caches before each.

    Raises AgreementError with the server's error if a request fails.
    """
    runs, flushed, unit = [], None, "tokens"
    for _ in range(2):
        flushed = await client.flush()
        traces = [await client.stream(p) for p in prompts]
        failed = [t.error for t in traces if t.error]
        if failed:
            raise AgreementError(f"{len(failed)} of {len(traces)} requests failed: {failed[0]}")
        if any(t.output_tokens and not t.token_ids for t in traces):
            unit = "characters"
        runs.append(traces)
    first, second = ([list(t.token_ids if unit == "tokens" else t.text) for t in run] for run in runs)
    return Outputs(unit, first, second, flushed)


def fill(row: Row, mine: Outputs, base_name: str, base: Outputs | None, least_share: float) -> None:
    """Put the agreements of a lane into its row; WRONG below `least_share` of the base's agreement with itself.

    The token_agreement of the base lane is its agreement with itself.
    """
    row.baseline = base_name
    row.case.update(unit=mine.unit, flushed_by=mine.flushed_by)
    row.metrics["self_agreement"] = mine.self_agreement
    if base is None:
        row.reason = f"no agreement with {base_name}: it has no output"
        return
    value = mine.self_agreement if row.subject.lane == base_name else with_base(mine, base)
    if value is None:
        row.reason = f"no agreement with {base_name}: one sent token ids, the other did not"
        return
    row.metrics["token_agreement"] = value
    least = least_share * base.self_agreement
    if value < least:
        row.status = Status.WRONG
        row.reason = f"token agreement with {base_name} is {value:.3f}, below {least:.3f} (--min-agreement)"
