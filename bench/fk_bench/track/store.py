"""Candidates and runs in MLflow. A candidate is a run of its own: its source, its parent, its scores at each level."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fk_bench.core import rows
from fk_bench.core.digests import digest_of
from fk_bench.core.rows import Row

EXPERIMENT = "fastkernels"
LOCAL = Path("fk-bench-runs") / "mlflow"
VARIABLE = "MLFLOW_TRACKING_URI"
TIMEOUT_S, RETRIES = "10", "1"  # of a request to a server, so that one that is down costs seconds
MOST_SOURCE = 1 << 20
EXTRA = 'the package mlflow is not installed: pip install "fastkernels[mlflow]"'
_NAME = re.compile(r"[^A-Za-z0-9_\-. /]")
OP, RUN = "op", "run"  # values of the tag fk.kind


class TrackError(RuntimeError):
    """The store cannot be used; the message says why, and what to do."""


@dataclass(frozen=True)
class Tracked:
    """A candidate in the store. parent: the digest of the one that it was made from."""

    id: str
    op: str
    digest: str
    parent: str
    stage: str
    status: str
    metrics: Mapping[str, float]
    tags: Mapping[str, str]

    @property
    def speedup(self) -> float | None:
        return self.metrics.get("speedup_geomean") if self.status == "ok" else None


class Store:
    """An experiment of MLflow at a tracking URI; by default a folder. Raises TrackError."""

    def __init__(self, uri: str = ""):
        self.uri = uri or os.environ.get(VARIABLE, "") or LOCAL.resolve().as_uri()
        if self.uri.startswith("file:") or "://" not in self.uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # no server and no database are needed
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", TIMEOUT_S)
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", RETRIES)
        try:
            from mlflow import MlflowClient
        except ModuleNotFoundError as error:
            if error.name != "mlflow":
                raise
            raise TrackError(EXTRA) from None
        with _told(self.uri):
            self._client = MlflowClient(self.uri)
            found = self._client.get_experiment_by_name(EXPERIMENT)
            self._experiment = found.experiment_id if found else self._client.create_experiment(EXPERIMENT)

    def log(self, run: Path) -> int:
        """Log a run's rows; returns how many runs of MLflow were made. Those that are there already are left alone."""
        found, _ = rows.read(run / "rows.jsonl" if run.is_dir() else run)
        if not found:
            raise TrackError(f"{run} has no rows")
        with _told(self.uri):
            made = 0
            for key, tags, metrics, source in _records(run, found):
                if not self._search(f"tags.`fk.key` = '{key}'"):
                    self._make({**tags, "fk.key": key}, metrics, source)
                    made += 1
        return made

    def candidates(self, op: str = "", digest: str = "") -> list[Tracked]:
        """Tracked candidates, the oldest first. digest: its beginning suffices."""
        wanted = f"tags.`fk.kind` = '{OP}'" + (f" and tags.`fk.op` = '{_quoted(op)}'" if op else "")
        with _told(self.uri):
            found = [_tracked(r) for r in self._search(wanted)]
        return [c for c in found if c.digest.startswith(digest)]

    def source(self, one: Tracked) -> str:
        """The text of a candidate; '' if it was not kept."""
        with _told(self.uri):
            names = [f.path for f in self._client.list_artifacts(one.id)]
            if not names:
                return ""
            return Path(self._client.download_artifacts(one.id, names[0])).read_text(errors="replace")

    def _make(self, tags: Mapping[str, str], metrics: Mapping[str, float], source: Path | None) -> None:
        run = self._client.create_run(self._experiment, run_name=f"{tags.get('fk.op') or tags['fk.command']}",
                                      tags={k: str(v)[:5000] for k, v in tags.items()})  # fmt: skip
        for name, value in metrics.items():
            if math.isfinite(value):
                self._client.log_metric(run.info.run_id, _NAME.sub("_", name), value)
        if source is not None and source.is_file() and source.stat().st_size <= MOST_SOURCE:
            self._client.log_text(run.info.run_id, source.read_text(errors="replace"), source.name)
        self._client.set_terminated(run.info.run_id)

    def _search(self, text: str) -> list[Any]:
        found: list[Any] = []
        token = None
        while True:
            page = self._client.search_runs(
                [self._experiment],
                text,
                max_results=1000,
                order_by=["attributes.start_time ASC"],
                page_token=token,
            )
            found += page
            token = page.token
            if not token:
                return found


def track(run: Path, uri: str = "") -> str:
    """Log a run that has just ended. A store that fails is reported once, on standard error; returns why, or ''."""
    try:
        Store(uri).log(run)
    except TrackError as error:
        print(f"not tracked: {error}", file=sys.stderr, flush=True)
        return str(error)
    return ""


def wanted(flag: bool) -> bool:
    """Whether a command logs itself: with --track, or with a tracking URI in the environment."""
    return flag or bool(os.environ.get(VARIABLE))


@contextlib.contextmanager
def _told(uri: str) -> Iterator[None]:
    from mlflow.exceptions import MlflowException

    try:
        yield
    except (MlflowException, OSError) as error:
        line = " ".join(str(error).split())[:300]
        raise TrackError(
            f"{uri}: {line}. Start the server, or leave {VARIABLE} out for a local folder"
        ) from None


def _quoted(text: str) -> str:
    return text.replace("'", "")


def _records(
    run: Path, found: Sequence[Row]
) -> Iterator[tuple[str, dict[str, str], dict[str, float], Path | None]]:
    """(key, tags, metrics, source) of each candidate and of the run itself, from the rows alone."""
    folder = run if run.is_dir() else run.parent
    first = found[0]
    common = {
        "fk.run": first.run_id, "fk.commit": first.commit or "", "fk.chip": first.machine.gpu or first.machine.cpu,
        "fk.folder": str(folder),
    }  # fmt: skip
    digests = {r.case["attempt"]: str(r.case.get("digest", "")) for r in found if "attempt" in r.case}
    levels = {str(r.subject.op): str(r.case["level"]) for r in found if "level" in r.case and r.subject.op}
    for row in found:
        op, source = str(row.subject.op or ""), None
        if row.command == "agent-loop" and row.kind in ("attempt", "task") and row.subject.candidate:
            source = Path(row.subject.candidate)
            parent = (
                digests.get(row.case.get("parent"), "") if row.kind == "attempt" else str(row.case["digest"])
            )
            stage = "final" if row.kind == "task" else "stub" if row.case.get("stub") else "attempt"
        elif row.command == "kernels" and row.kind == "op":
            kept = folder / "candidates" / f"{op}.py"
            if not kept.is_file():
                continue
            source, parent, stage = kept, "", "kernels"
        elif row.command == "eval" and row.kind in ("op", "item"):
            continue
        elif row.command == "eval" and row.kind == "score":
            tags = {**common, "fk.kind": RUN, "fk.command": "eval", "fk.set": str(row.case.get("set"))}
            yield (
                f"{row.run_id}/{row.case.get('set')}",
                {**tags, "fk.files": str(row.case.get("files"))},
                row.metrics,
                None,
            )
            continue
        elif row.kind == "run":
            yield (
                f"{row.run_id}/run",
                {**common, "fk.kind": RUN, "fk.command": row.command},
                row.metrics,
                None,
            )
            continue
        else:
            continue
        digest = str(row.case.get("digest") or _digest(source))
        tags = {
            **common, "fk.kind": OP, "fk.command": row.command, "fk.op": op, "fk.level": levels.get(op, ""),
            "fk.digest": digest, "fk.parent": parent, "fk.stage": stage, "fk.status": row.status.value,
            "fk.reason": row.reason, "fk.agent": str(row.case.get("agent", "")),
        }  # fmt: skip
        yield f"{row.run_id}/{op}/{stage}/{row.case.get('attempt', '')}", tags, row.metrics, source


def _digest(source: Path) -> str:
    return digest_of(source) if source.is_file() else ""


def _tracked(run: Any) -> Tracked:
    tags = run.data.tags
    return Tracked(
        run.info.run_id, tags.get("fk.op", ""), tags.get("fk.digest", ""), tags.get("fk.parent", ""),
        tags.get("fk.stage", ""), tags.get("fk.status", ""), dict(run.data.metrics),
        {k: v for k, v in tags.items() if k.startswith("fk.")},
    )  # fmt: skip
