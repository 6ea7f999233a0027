"""Nsight Systems: the timeline of a step, from the SQLite file of `nsys profile --export sqlite`."""

from __future__ import annotations

import sqlite3
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from fk_bench.profile.data import Profile, Span, profile_of
from fk_bench.profile.target import op_of

KERNELS, COPIES = "CUPTI_ACTIVITY_KIND_KERNEL", ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")
RUNTIME, RANGES, STRINGS = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "StringIds"


def command(nsys: str, out: Path, program: Sequence[str]) -> list[str]:
    """The command line that profiles a program between start and stop of CUDA's profiler."""
    return [
        nsys, "profile", "--trace", "cuda,nvtx", "--capture-range", "cudaProfilerApi", "--capture-range-end", "stop",
        "--export", "sqlite", "--force-overwrite", "true", "--output", str(out), *program,
    ]  # fmt: skip


def read(file: Path, repeats: int, device: str = "cuda") -> Profile:
    """Kernels, gaps and the timeline by op. Raises ValueError for a file that has no kernels or is no export."""
    if not file.is_file():
        raise ValueError(f"nsys wrote no {file}")
    try:
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as base:
            tables = {name for (name,) in base.execute("select name from sqlite_master where type = 'table'")}
            if KERNELS not in tables:
                raise ValueError(f"{file}: nsys recorded no kernel")
            spans = _spans(base, tables)
    except sqlite3.Error as error:
        raise ValueError(f"{file} is no export of nsys: {error}") from None
    return profile_of("nsys", device, spans, repeats)


def _spans(base: sqlite3.Connection, tables: set[str]) -> list[Span]:
    names = dict(base.execute(f"select id, value from {STRINGS}")) if STRINGS in tables else {}
    called: dict[int, tuple[int, int]] = {}
    if RUNTIME in tables:
        rows = base.execute(f"select correlationId, start, globalTid from {RUNTIME}")
        called = {correlation: (start, thread) for correlation, start, thread in rows}
    ranges = _ranges(base, names) if RANGES in tables else {}
    rows = base.execute(f"select start, end, shortName, correlationId from {KERNELS}")
    found = [(s, e, str(names.get(n, n)), c) for s, e, n, c in rows]
    for table in COPIES:
        if table in tables:
            name = table.rpartition("_")[2].lower()
            found += [
                (s, e, name, c) for s, e, c in base.execute(f"select start, end, correlationId from {table}")
            ]
    return [Span(n, s / 1e3, e / 1e3, _op(called.get(c), ranges)) for s, e, n, c in found]


def _ranges(base: sqlite3.Connection, names: dict[int, str]) -> dict[int, list[tuple[int, int, str]]]:
    """{thread: (start, end, op)} of the ranges of our ops that are in no other one, in order."""
    by_thread: dict[int, list[tuple[int, int, str]]] = {}
    rows = base.execute(
        f"select start, end, text, textId, globalTid from {RANGES} where end is not null order by start"
    )
    for start, end, text, number, thread in rows:
        op = op_of(str(text or names.get(number, "")))
        known = by_thread.setdefault(thread, [])
        if op and not (known and start < known[-1][1]):
            known.append((start, end, op))
    return by_thread


def _op(call: tuple[int, int] | None, ranges: dict[int, list[tuple[int, int, str]]]) -> str:
    """The op whose range has the launch."""
    if call is None:
        return ""
    start, thread = call
    known = ranges.get(thread, [])
    at = bisect_right(known, start, key=lambda r: r[0]) - 1
    return known[at][2] if at >= 0 and start <= known[at][1] else ""
