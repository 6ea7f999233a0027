"""The folder of a run: rows as they are made, a section of the page for each model, and what a second run continues."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fk_bench.core import rows
from fk_bench.core.rows import Row
from fk_bench.core.terminal.flags import ConfigError
from fk_bench.e2e.pictures import report
from fk_bench.e2e.pictures.measure import COSTS, Settings


class Saved:
    """Results in a folder.

    made_with  settings of the run; a folder with results of others is refused (ConfigError)
    """

    def __init__(self, folder: Path, made_with: dict[str, Any]):
        self.folder, self.rows, self.page = folder, folder / "rows.jsonl", folder / "report.html"
        file, text = folder / "settings.json", json.dumps(made_with, indent=1, default=str)
        if file.exists() and file.read_text() != text:
            raise ConfigError(f"{folder} has results of other settings ({file}): choose another --out")
        file.write_text(text)

    def add(self, made: Sequence[Row]) -> None:
        rows.append(self.rows, made)

    def of(self, model: str) -> list[Row]:
        return [row for row in self._read() if row.subject.model == model]

    def _read(self) -> list[Row]:
        return rows.read(self.rows)[0] if self.rows.exists() else []

    def rest(self, settings: Settings) -> Settings:
        """The settings of what is still to measure. Rows of unfinished batches go, but for those of failed lanes."""
        kept, todo, skip = [], [], {}
        found: dict[Any, list[Row]] = {}
        for row in self._read():
            if row.subject.model != settings.model:
                kept.append(row)
            elif row.subject.lane is not None:  # a row of the whole model is a failure to open it
                found.setdefault(row.case["batch"], []).append(row)
        for batch in dict.fromkeys((*found, *settings.batches)):
            own = found.get(batch, [])
            failed = {str(row.subject.lane) for row in own if row.round is None and row.kind != COSTS}
            rounds = {(row.subject.lane, row.round) for row in own if row.kind != COSTS}
            wanted = (
                (lane, r) for lane in settings.lanes if lane not in failed for r in range(settings.rounds)
            )
            if batch not in settings.batches or rounds.issuperset(wanted):
                kept += own
            else:
                kept += [row for row in own if row.round is None and row.kind != COSTS]
                todo.append(batch)
                skip[batch] = failed
        if self.rows.exists():
            rows.replace(self.rows, kept)
        return replace(settings, batches=tuple(todo), skip=skip)

    def add_section(self, model: str, section: dict[str, Any]) -> None:
        """Keep a model's part of the page, and write the page."""
        folder = self.folder / "sections"
        folder.mkdir(exist_ok=True)
        (folder / f"{report.file_name(model)}.json").write_text(json.dumps(section))
        self.write_page()

    def write_page(self) -> None:
        """Write the page of all models that have rows."""
        runs: list[report.Run] = []
        by_model: dict[str, list[Row]] = {}
        for row in self._read():
            by_model.setdefault(str(row.subject.model), []).append(row)
        for model, made in by_model.items():
            file = self.folder / "sections" / f"{report.file_name(model)}.json"
            if file.exists():
                runs.append((made, json.loads(file.read_text())))
            elif any(row.round is not None for row in made):
                runs.append((made, report.section(made, [])))
        if runs:
            report.write(self.page, runs)
