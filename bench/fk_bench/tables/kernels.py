"""The table of judged kernels."""

from __future__ import annotations

from collections.abc import Iterator

from fk_bench.core import scores
from fk_bench.explain.tables import Table
from fk_bench.tables.origin import Files, flat, origin


def kernels(files: Files) -> Iterator[Table]:
    """The judge's ops, two a line: weighted geometric mean, number of cases, worst and best case.

    Cases of an op whose run did not finish are left out, and the title names them.
    """
    found = flat(files)
    cases = scores.latest(found)
    ended = {(r.run_id, r.subject.op) for r in found if r.command == "kernels" and r.kind == "op"}
    whole = [r for r in cases if (r.run_id, r.subject.op) in ended]
    if not whole:
        return
    lines = []
    for score in sorted(scores.scores(whole)[0], key=lambda s: s.op):
        mine = [r.metrics["speedup"] for r in whole if r.subject.op == score.op and "speedup" in r.metrics]
        ends = [f"{end(mine):.2f}" if mine else "" for end in (min, max)]
        failed = f", {score.failed} failed" if score.failed else ""
        mean = "" if score.speedup is None else f"{score.speedup:.2f}"
        lines.append([score.op, mean, f"{score.timed}{failed}", *ends])
    half = -(-len(lines) // 2)
    right = [*lines[half:], *[[""] * 5] * (2 * half - len(lines))]
    left: dict[str, int] = {}
    for row in cases:
        if (row.run_id, row.subject.op) not in ended:
            left[str(row.subject.op)] = left.get(str(row.subject.op), 0) + 1
    total = scores.score("all", whole)
    unfinished = ", ".join(f"{op} ({n})" for op, n in sorted(left.items()))
    title = f"{total.timed} cases timed of {total.cases}, {total.failed} failed ({origin(whole, files)})"
    title += f"; cases of unfinished runs are left out: {unfinished}:" if unfinished else ":"
    columns = ["op", "speedup", "cases", "worst", "best"]
    yield title, [*columns, "", *columns], [[*a, "", *b] for a, b in zip(lines[:half], right, strict=True)]
