"""Choice without tables: a cost model proposes kernels and parameters for a shape without measurements.

An op describes each candidate by the terms of its time: bytes at memory speed, work of the busiest SM, costs of a
split. The model is their weighted sum. bench/experiments/selection/fit.py fits the weights to measured points and
writes fastkernels/tuned/selection/OP.json.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

from fastkernels.core.tuning import SHIPPED, Chip

SCHEMA = "fastkernels.selection/1"
FOLDER = SHIPPED / "selection"
MOST = 3  # proposals for a call
HOPPER = 9  # compute capability of the chips that the CUDA C++ kernels run on
# Bytes per second and SM of an H200: the assumption for a chip whose memory speed is unknown
SPEED = 4.917e12 / 132


class ModelError(ValueError):
    """A model's file cannot be used; the message names it."""


class Candidate(NamedTuple):
    """A parameter set that suits a call.

    kind    of kernels whose times are described by the same weights
    terms   microseconds that its time may be made of
    kernel  equal for sets that run the same kernel on this call
    """

    provider: str
    params: Mapping[str, Any]
    kind: str
    terms: tuple[float, ...]
    kernel: Hashable


@dataclass(frozen=True)
class Model:
    """The weights of an op: {kind: one for each term}. fitted: the points, the date, the error."""

    op: str
    weights: Mapping[str, tuple[float, ...]]
    fitted: Mapping[str, Any]

    def us(self, candidate: Candidate) -> float:
        """Return the estimated microseconds of a call."""
        return sum(map(mul, self.weights[candidate.kind], candidate.terms))

    def best(self, candidates: Iterable[Candidate], most: int = MOST) -> list[Candidate]:
        """Return the fastest candidates by estimate, at most `most`, each with another kernel.

        Candidates of a kind that was never measured are left out. Of equal ones, the first stays.
        """
        known = [c for c in candidates if c.kind in self.weights]
        found: dict[Hashable, Candidate] = {}
        for candidate in sorted(known, key=self.us):
            found.setdefault((candidate.provider, candidate.kernel), candidate)
            if len(found) == most:
                break
        return list(found.values())

    def proposals(
        self, candidates: Iterable[Candidate], most: int = MOST
    ) -> tuple[tuple[str, dict[str, Any]], ...]:
        """Return what `Key.propose` returns: (provider, its params), the best first."""
        return tuple((c.provider, dict(c.params)) for c in self.best(candidates, most))

    def to_json(self) -> str:
        """Return the file's text, one kind a line."""
        weights = ",\n".join(f"    {json.dumps(k)}: {json.dumps(list(w))}" for k, w in self.weights.items())
        head = f'{{\n  "schema": "{SCHEMA}",\n  "op": {json.dumps(self.op)},\n'
        return head + f'  "fitted": {json.dumps(dict(self.fitted))},\n  "weights": {{\n{weights}\n  }}\n}}\n'


def read(path: Path) -> Model:
    """The model of a file. Raises ModelError."""
    try:
        data = json.loads(path.read_text())
        if data["schema"] != SCHEMA:
            raise ModelError(f"selection model {path}: its schema is {data['schema']!r}, not {SCHEMA}")
        weights = {kind: tuple(map(float, each)) for kind, each in data["weights"].items()}
        return Model(data["op"], weights, data["fitted"])
    except ModelError:
        raise
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ModelError(f"selection model {path}: {type(error).__name__}: {error}") from None


@lru_cache(maxsize=16)
def model(op: str) -> Model:
    """The shipped model of an op. Raises ModelError."""
    return read(FOLDER / f"{op}.json")


def memory_us(size: float, chip: Chip) -> float:
    """Return the microseconds in which all SMs read so many bytes from memory."""
    return 1e6 * size / (chip.memory_bytes_per_s or SPEED * chip.sms)


def sm_us(size: float) -> float:
    """Return the microseconds in which one SM reads so many bytes at its share of an H200's memory speed."""
    return 1e6 * size / SPEED
