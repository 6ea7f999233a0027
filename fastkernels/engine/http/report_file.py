"""$FASTKERNELS_REPORT: which ops run in the processes of a server, as every host writes it."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

from fastkernels.core.env import Environment
from fastkernels.engine import candidates
from fastkernels.engine.llm_engine import LLMEngine

log = logging.getLogger("fastkernels")
EVERY = 2.0  # seconds


class ReportFile:
    """A file fastkernels-RANK-PID.json for each rank. For the engine's thread: it asks the ranks between two steps."""

    def __init__(self, engine: LLMEngine):
        self.engine, self.folder, self._written = engine, Environment.read().report, 0.0

    def write(self, force: bool = False) -> None:
        """Write the files, at most every few seconds. Readers never see half of one.

        A folder that cannot be written is no reason to end requests: a warning says so, once.
        """
        if not self.folder or (not force and time.monotonic() - self._written < EVERY):
            return
        self._written = time.monotonic()
        patched = self.engine.patched
        replies = patched.report() if patched is not None else self.engine.executor.call(_unpatched)
        try:
            for reply in replies:
                _write(Path(self.folder), reply)
        except OSError as error:
            log.warning("FASTKERNELS_REPORT: no more reports, %s", error)
            self.folder = None


def _write(folder: Path, reply: candidates.Reply) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"fastkernels-{reply['rank']}-{reply['pid']}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(reply))
    part.replace(path)


def _unpatched(runner: Any) -> candidates.Reply:
    return candidates.reply(runner.rank, candidates.RankPatch(candidates.rows(runner)).report())
