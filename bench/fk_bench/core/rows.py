"""Result rows: one append-only JSONL schema, the only source of tables, plots and reports.

A run appends to a `.jsonl` file. Published files are compressed, `.jsonl.xz`; `read` and `read_text` accept both.
"""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Iterable
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

SCHEMA = "fastkernels.row/1"
SUFFIX, COMPRESSED = ".jsonl", ".jsonl.xz"


class Status(str, Enum):
    """The outcome of a measurement. All but OK and SKIPPED count as a failure of the run."""

    OK = "ok"
    FAILED = "failed"  # it ran with errors: failed requests, or our kernels did not run
    DIED = "died"  # the process ended unexpectedly
    TIMEOUT = "timeout"  # not ready, or not finished, in time
    INVALID = "invalid"  # the numbers must not be used; the reason says why
    WRONG = "wrong"  # incorrect output
    UNSUPPORTED = "unsupported"
    SKIPPED = "skipped"
    # of a candidate's kernel
    REJECTED = "rejected"  # by the static scan
    COMPILE_ERROR = "compile_error"  # the import failed, or a compiler did
    RUNTIME_ERROR = "runtime_error"  # a call raised
    SIGNATURE_MISMATCH = "signature_mismatch"  # names, arguments, shapes or dtypes differ from the op's
    CRASH = "crash"  # the process exited or was ended by a signal
    OOM = "oom"


class Untimed(str, Enum):
    """The reason why a case that is `ok` has no speedup: case['untimed']. All but the first two count as not timed."""

    NOT_WANTED = "checked only"  # extreme values, or a run with --no-time
    NO_OUTPUT = "without output"
    NO_BASELINE = "no baseline"
    UNSTEADY = "the baseline's times scatter"
    UNRESOLVED = "scatter hides the time of a call"


class Machine(BaseModel):
    model_config = ConfigDict(extra="forbid")

    gpu: str | None = None
    gpus: int = 0
    cpu: str = ""
    cores: int = 0


class Subject(BaseModel):
    """The subject of a measurement: an op, a model or a lane, by provider or candidate, in a host."""

    model_config = ConfigDict(extra="forbid")

    op: str | None = None
    model: str | None = None
    lane: str | None = None
    host: str | None = None
    provider: str | None = None
    candidate: str | None = None


class Row(BaseModel):
    """One result.

    case      the conditions, as plain JSON; case['kind'] is the kind of row within its command
    round     number of the round; None for a measurement without rounds
    metrics   name with unit: number ('ttft_ms_p50': 12.3); metrics without a value are left out
    baseline  the lane or provider that this result is compared with
    ci95      metric: [low, high]
    provisional  why the speedup is no score: production's libraries are missing. Tables and comparisons refuse the row
    """

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_: str = Field(default=SCHEMA, alias="schema")
    run_id: str
    time: str = Field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    commit: str | None = None
    command: str
    machine: Machine = Field(default_factory=Machine)
    versions: dict[str, str] = Field(default_factory=dict)
    status: Status = Status.OK
    reason: str = ""
    subject: Subject = Field(default_factory=Subject)
    case: dict[str, Any] = Field(default_factory=dict)
    round: int | None = None
    metrics: dict[str, float] = Field(default_factory=dict)
    baseline: str | None = None
    ci95: dict[str, tuple[float, float]] = Field(default_factory=dict)
    provisional: str = ""

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True)

    @property
    def kind(self) -> str:
        return str(self.case.get("kind", ""))


def provisional(rows: Iterable[Row]) -> str:
    """The first reason why these rows are no scores; '' if all are."""
    return next((r.provisional for r in rows if r.provisional), "")


def append(path: Path, rows: Iterable[Row]) -> None:
    """Append rows; they are on disk when this returns. An incomplete last line is closed first.

    Raises ValueError for a compressed file.
    """
    if path.name.endswith(COMPRESSED):
        raise ValueError(
            f"{path}: rows are appended to {SUFFIX} files; write_compressed writes a published file"
        )
    text = "".join(row.to_json() + "\n" for row in rows)
    with open(path, "a+b") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                text = "\n" + text
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def replace(path: Path, rows: Iterable[Row]) -> None:
    """Replace the file by one with these rows; an interruption leaves the old file."""
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    append(new, rows)
    os.replace(new, path)


def write_compressed(path: Path, text: str) -> None:
    """Write a published file. It has no time stamp: the same text gives the same bytes."""
    best = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "pb": 0}  # for text
    path.write_bytes(lzma.compress(text.encode(), filters=[best]))


def read_text(path: Path) -> str:
    """Return the lines of a row file, compressed or not."""
    data = path.read_bytes()
    return (lzma.decompress(data) if path.name.endswith(COMPRESSED) else data).decode(errors="replace")


def stem(path: Path) -> str:
    """Return the name of a row file without its suffixes."""
    return path.name.removesuffix(".xz").removesuffix(SUFFIX)


def read(path: Path) -> tuple[list[Row], list[str]]:
    """The rows of a file, and a warning for each line that is not a row, such as one cut off by a kill."""
    rows: list[Row] = []
    warnings: list[str] = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            rows.append(Row.model_validate(json.loads(line)))
        except json.JSONDecodeError:
            warnings.append(f"{path}:{number}: half-written line, skipped")
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            warnings.append(f"{path}:{number}: not a result row ({where}: {first['msg']}), skipped")
    return rows, warnings
