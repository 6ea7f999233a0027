"""Write a data set."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastkernels.core import registry
from fk_bench.core.rows import Row
from fk_bench.evaluate.adapters.sets import PLAIN, CandidateSet
from fk_bench.trace import verdicts
from fk_bench.trace.schema import INDEX, TraceError
from fk_bench.trace.solutions import solution
from fk_bench.trace.workloads import LIMIT, Entry, entries, entry, place, save


class DataSet:
    """A data set that is being written: `definitions`, `entries` by uuid, counts, and `left_out` by op."""

    def __init__(self, root: Path, limit: int = LIMIT):
        self.root, self.limit = root, limit
        self.definitions: dict[str, Mapping[str, Any]] = {}
        self.entries: dict[str, Entry] = {}
        self.left_out: dict[str, Counter[str]] = {}
        self.solutions: dict[str, str] = {}  # by definition
        self.verdicts: list[tuple[Entry, dict[str, Any]]] = []
        self.traces = 0

    def add_cases(self, op: str, sources: tuple[str, ...], captures: Path | None) -> int:
        """Write the op's cases as Workloads; returns their number. Raises CaptureError."""
        before = len(self.entries)
        for found in entries(op, sources, captures, self.limit):
            if isinstance(found, Entry):
                self._add(found)
            else:
                self._leave_out(op, found)
        return len(self.entries) - before

    def add_candidates(self, candidates: CandidateSet) -> None:
        """Write a Solution for each candidate and each definition of its op."""
        for one in candidates.candidates:
            mine = [d for d in self.definitions.values() if d["op_type"] == one.op]
            if one.layout != PLAIN:
                self._leave_out(
                    one.op, f"{one.source.name} has the layout {one.layout}: only plain candidates"
                )
                continue
            if not mine:
                self._leave_out(one.op, f"{one.path.name} has no definition here")
            for found in mine:
                try:
                    document = solution(one.op, one.path, found, candidates.name)
                except TraceError as reason:
                    self._leave_out(one.op, str(reason))
                    continue
                folder = self.root / "solutions" / candidates.name / one.op
                folder.mkdir(parents=True, exist_ok=True)
                _write(folder / f"{document['name']}.json", document)
                self.solutions[found["name"]] = document["name"]

    def add_run(self, rows: Sequence[Row]) -> None:
        """Write the Workloads of a run's cases; `add_candidates` and `finish` write the Traces."""
        captured = {(e.op, e.case.name): e for e in self.entries.values()}
        for row in rows:
            op = str(row.subject.op)
            try:
                if row.subject.candidate is None:
                    raise TraceError("rows of our own kernels have no Solution")
                if op not in registry.op_modules():
                    raise TraceError("a block of a model has no definition")
                is_captured = row.case.get("source") == "captured"
                found = captured.get((op, str(row.case.get("name")))) if is_captured else None
                if found is None:
                    found = _entry(op, row, self.limit)
                self.verdicts.append((found, verdicts.evaluation(row)))
            except TraceError as reason:
                self._leave_out(op, str(reason))
                continue
            self._add(found)

    def finish(self) -> None:
        """Write the Traces, and what the schema has no place for: names, weights, and what is left out."""
        for found, evaluation in self.verdicts:
            if (name := self.solutions.get(found.definition["name"])) is None:
                self._leave_out(found.op, "a verdict whose candidate is no Solution here")
                continue
            line = {**found.line, "solution": name, "evaluation": evaluation}
            _append(place(self.root, "traces", found.definition, ".jsonl"), line)
            self.traces += 1
        cases = {
            number: {"op": e.op, "name": e.case.name, "weight": e.case.weight}
            for number, e in self.entries.items()
        }
        left_out = {op: dict(reasons) for op, reasons in self.left_out.items()}
        _write(self.root / INDEX, {"schema": "fastkernels.trace/1", "cases": cases, "left_out": left_out})

    def _add(self, found: Entry) -> None:
        number = found.workload["uuid"]
        if number in self.entries:
            return
        name = found.definition["name"]
        if name not in self.definitions:
            self.definitions[name] = found.definition
            _write(place(self.root, "definitions", found.definition, ".json"), found.definition)
        self.entries[number] = found
        save(self.root, found)
        _append(place(self.root, "workloads", found.definition, ".jsonl"), found.line)

    def _leave_out(self, op: str, reason: str) -> None:
        self.left_out.setdefault(op, Counter())[reason] += 1


def write(
    root: Path,
    ops: Sequence[str],
    sources: tuple[str, ...],
    captures: Path | None = None,
    candidates: CandidateSet | None = None,
    rows: Sequence[Row] = (),
    limit: int = LIMIT,
    tell: Callable[[str, int], None] = lambda op, count: None,
) -> DataSet:
    """Write a data set into an empty folder. Raises TraceError, CaptureError."""
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise TraceError(f"{root} exists: choose a new folder, or an empty one")
    root.mkdir(parents=True, exist_ok=True)
    made = DataSet(root, limit)
    for op in ops:
        tell(op, made.add_cases(op, sources, captures))
    made.add_run([r for r in rows if r.subject.op in ops])
    if candidates is not None:
        made.add_candidates(candidates)
    made.finish()
    return made


def _entry(op: str, row: Row, limit: int) -> Entry:
    try:
        return entry(registry.get(op), verdicts.case_of(row), limit)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"case {row.case.get('name')} has dims that are none of the op") from error


def _write(file: Path, document: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _append(file: Path, document: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(document) + "\n")
