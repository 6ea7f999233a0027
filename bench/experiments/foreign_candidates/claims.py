"""Which published claims hold on another chip, at held-out sizes, and in real hosts? A page from recorded rows.

A claim is a published speedup above 1. It holds on this chip if all cases are right and the interval of the speedup
is above 1; at other sizes if those are right and their mean speedup is above 1; in a host if an item of that host keeps
the file and the item's interval is above 1. A host's item runs a whole set: its speedup belongs to all kept files.

    python claims.py SUMMARY CLAIMS [EVAL_ROWS ...] > page.md

SUMMARY is summary.jsonl of judge_sets.py, CLAIMS a table (tab) with the columns set, op and speedup, EVAL_ROWS are rows
of `fk-bench eval`.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fk_bench.core.rows import Row, Status, read
from judge_sets import passes

HOSTS = ("vllm", "sglang")
YES, NO, UNKNOWN = "yes", "no", "-"


@dataclass(frozen=True)
class Claim:
    """A file of a set. speedup, held_out: measured here; hosts: {host: 'yes', 'no' or '-' if not measured}."""

    set: str
    op: str
    published: float | None
    right: bool
    speedup: float | None = None
    ci95: tuple[float, float] | None = None
    held_out: float | None = None
    deployed: str = ""
    serving: str = ""
    hosts: Mapping[str, str] = field(default_factory=dict)

    @property
    def claims(self) -> bool:
        return self.published is not None and self.published > 1

    @property
    def on_this_chip(self) -> str:
        if not self.right:
            return NO
        return UNKNOWN if self.ci95 is None else YES if self.ci95[0] > 1 else NO

    @property
    def at_other_sizes(self) -> str:
        if not self.right:
            return NO
        return UNKNOWN if self.held_out is None else YES if self.held_out > 1 else NO


def claims(
    judged: Iterable[Mapping[str, Any]], published: Mapping[tuple[str, str], float], rows: Sequence[Row] = ()
) -> list[Claim]:
    """The claims of all judged files, in the order of sets and ops."""
    items = [r for r in rows if r.kind == "item" and r.case.get("variant", "record") == "record"]
    return [
        Claim(
            row["set"], row["op"], published.get((row["set"], row["op"])), passes(dict(row)), row.get("speedup"),
            tuple(row["ci95"]) if row.get("ci95") else None, row.get("held_out_speedup"), row.get("deployed", ""),
            row.get("serving", ""), {h: in_host(items, h, row["set"], row["op"]) for h in HOSTS},
        )
        for row in sorted(judged, key=lambda r: (r["set"], r.get("op") or ""))
        if "declined" not in row
    ]  # fmt: skip


def in_host(items: Iterable[Row], host: str, name: str, op: str) -> str:
    """Whether an item of this host is faster with the set, and keeps this file."""
    found = UNKNOWN
    for row in items:
        if row.subject.host != host or row.case.get("set") != name:
            continue
        known = {*row.case.get("kept", ()), *(d["op"] for d in row.case.get("dropped", ()))}
        if op not in known:
            continue
        faster = row.status is Status.OK and op in row.case["kept"] and _low(row) > 1
        found = YES if faster else found if found == YES else NO
    return found


def _low(row: Row) -> float:
    """The lower bound of an item's speedup: of the root of throughput times latency."""
    low = [
        row.ci95[f"{phase}_speedup"][0]
        for phase in ("throughput", "latency")
        if f"{phase}_speedup" in row.ci95
    ]
    return math.prod(low) ** (1 / len(low)) if low else 0.0


def page(found: Sequence[Claim]) -> str:
    """A Markdown table of all claims, and their counts."""
    head = [
        "set",
        "op",
        "published",
        "here (95% interval)",
        "other sizes",
        *HOSTS,
        "in compiled code",
        "new batch sizes",
    ]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for c in found:
        here = "wrong" if not c.right else _number(c.speedup)
        if c.right and c.ci95 is not None:
            here += f" ({c.ci95[0]:.3f} to {c.ci95[1]:.3f})"
        cells = [
            c.set, c.op, _number(c.published), here, _number(c.held_out), *(c.hosts.get(h, UNKNOWN) for h in HOSTS),
            _short(c.deployed, "runs"), _short(c.serving, "nothing compiled"),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *counts(found)])


def counts(found: Sequence[Claim]) -> list[str]:
    """How many claims hold, of those that were measured, per question."""
    mine = [c for c in found if c.claims]
    questions = {
        "on this chip": [c.on_this_chip for c in mine],
        "at other sizes": [c.at_other_sizes for c in mine],
        **{f"in {host}": [c.hosts.get(host, UNKNOWN) for c in mine] for host in HOSTS},
    }
    lines = [
        f"{len(found)} files, {sum(c.right for c in found)} right in all cases, {len(mine)} claim a speedup.",
        "",
    ]
    lines += ["| claim holds | yes | no | not measured |", "| --- | --- | --- | --- |"]
    for question, answers in questions.items():
        lines.append(f"| {question} | {' | '.join(str(answers.count(a)) for a in (YES, NO, UNKNOWN))} |")
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _short(problem: str, none: str) -> str:
    return problem.partition(":")[0] if problem else none


def published_of(path: Path) -> dict[tuple[str, str], float]:
    """{(set, op): published speedup}."""
    with path.open(newline="") as file:
        return {(r["set"], r["op"]): float(r["speedup"]) for r in csv.DictReader(file, delimiter="\t")}


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    summary, published, *evaluations = map(Path, sys.argv[1:])
    judged = [json.loads(line) for line in summary.read_text().splitlines()]
    rows = [row for path in evaluations for row in read(path)[0]]
    print(page(claims(judged, published_of(published), rows)))


if __name__ == "__main__":
    main()
