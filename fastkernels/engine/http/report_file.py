"""$FASTKERNELS_REPORT: the ops that run in the processes of our server, in the same form as every host's report."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

from fastkernels.core.env import Environment
from fastkernels.engine.engines.engine import Engine
from fastkernels.patch import Request, find_host

log = logging.getLogger("fastkernels")
EVERY = 2.0  # seconds


class ReportFile:
    """A file fastkernels-RANK-PID.json for each rank. Call `write` between two steps, in the engine's thread."""

    def __init__(self, engine: Engine):
        self.engine, self.folder, self._written = engine, Environment.read().report, 0.0
        self._host = find_host(engine) if self.folder else None

    def write(self, force: bool = False) -> None:
        """Write the files, at most every few seconds, each in one move.

        If the folder cannot be written, logs one warning and stops reporting: requests go on.
        """
        if not self.folder or self._host is None or (not force and time.monotonic() - self._written < EVERY):
            return
        self._written = time.monotonic()
        replies = self._host.call(self.engine, Request("report"))
        try:
            for reply in replies:
                _write(Path(self.folder), reply)
        except OSError as error:
            log.warning("FASTKERNELS_REPORT: no more reports, %s", error)
            self.folder = None


def _write(folder: Path, reply: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"fastkernels-{reply['rank']}-{reply['pid']}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(reply))
    part.replace(path)
