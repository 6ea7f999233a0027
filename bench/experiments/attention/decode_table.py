"""Make tuned-table entries for attention_decode from the rows of decode_attention.py.

    decode_table.py rows-0.jsonl rows-1.jsonl --out table.json [--add nvidia-h200.json]

An entry covers a shape, a batch and a bucket of contexts (the graph's capacity). Its cases are all that such a graph
may meet: equal lengths up to the bucket, and mixed lengths. Each parameter set is rated by its worst case against FA3.
The best set is written with the geometric mean of its cases as speedup and the interval from their rounds. The entry
is null, which leaves these calls to the host, if the set is over 3% slower than FA3 in a case or not faster over all.
Times are of graphs for the smallest timed capacity that covers the bucket. vLLM's FA3 needs blocks of 16 keys or more;
smaller blocks (SGLang's have one key) are compared with its time for 16. Needs pydantic, no GPU.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/

from experiments.attention.decode_attention_check import LAYOUTS, OURS, SETS, Layout, label
from experiments.common.graph_clock import ROUNDS
from fk_bench.core.machine import commit
from fk_bench.core.rows import Row, Status, read
from fk_bench.core.stats import geometric_mean, t975

from fastkernels.core import tuning as tuned
from fastkernels.core.tuning import REACH, Entry, Table, TableError

OP, BASELINE = "attention_decode", "fa3"
BUCKETS = (2048, 8192, 32768, 131072)  # contexts; an entry applies down to a quarter of its bucket
FLOOR = 0.97  # smallest speedup over FA3 in the worst case
USUAL = 16  # keys per block: FA3's minimum


class Point(NamedTuple):
    """The shape, batch and bucket of an entry."""

    layout: Layout
    batch: int
    bucket: int


class Choice(NamedTuple):
    """A provider's parameter set at a point: FA3's time over its own by case, with 95% intervals."""

    name: str  # 'provider params'
    ratios: dict[str, float]
    intervals: dict[str, tuple[float, float]]

    @property
    def worst(self) -> str:
        return min(self.ratios, key=self.ratios.__getitem__)

    @property
    def mean(self) -> float:
        return geometric_mean([*self.ratios.values()])[0]

    @property
    def ci95(self) -> tuple[float, float]:
        """Interval of the mean, rounded outwards; starts at 0 with a single round."""
        found = geometric_mean([*self.ratios.values()], intervals=[*self.intervals.values()])[1]
        return (math.floor(found[0] * 1e3) / 1e3, math.ceil(found[1] * 1e3) / 1e3) if found else (0.0, 0.0)

    @property
    def wins(self) -> bool:
        return self.ratios[self.worst] >= FLOOR and self.ci95[0] > 1


def named(row: Row) -> str | None:
    """Return BASELINE or "provider params" for a row; None for parameters that no provider has any more."""
    provider, params = str(row.subject.provider), row.case.get("params", "")
    if provider == BASELINE:
        return provider
    return f"{provider} {params}" if params in map(label, SETS.get(provider, ())) else None


def times(rows: Iterable[Row]) -> dict[tuple[Layout, int, int], dict[str, dict[str, Row]]]:
    """Return {(layout, batch, capacity): {case: {"provider params" or BASELINE: row}}} of the last run of each case."""
    found: dict[Any, dict[str, dict[str, Row]]] = {}
    runs: dict[Any, str] = {}
    for row in rows:
        if (row.command, row.kind, row.status, row.subject.op) != ("decode_attention", "time", Status.OK, OP):
            continue
        c, name = row.case, named(row)
        if name is not None and "capacity" in c:
            place = (Layout(*(c[n] for n in Layout._fields)), c["batch"], c["capacity"])
            case = f"{c['context']}" if c["model"] in LAYOUTS else c["model"]
            mine = found.setdefault(place, {}).setdefault(case, {})
            if runs.setdefault((place, case), row.run_id) != row.run_id:
                runs[place, case] = row.run_id
                mine.clear()
            mine[name] = row
    for (layout, *rest), cases in found.items():
        for case, mine in cases.items():
            usual = found.get((layout._replace(block_size=USUAL), *rest), {}).get(case, {})
            if layout.block_size < USUAL and BASELINE in usual:
                mine.setdefault(BASELINE, usual[BASELINE])
    return found


def choices(cases: dict[str, dict[str, Row]]) -> list[Choice]:
    """Return the sets that were timed in all of these cases, the best first."""
    names = set.intersection(*(set(mine) for mine in cases.values()))
    if BASELINE not in names:
        raise ValueError(f"no time of {BASELINE} in every case of {', '.join(cases)}: nothing to compare")
    found = []
    for name in sorted(names - {BASELINE}):
        ratios, intervals = {}, {}
        for case, mine in cases.items():
            theirs, ours = mine[BASELINE].metrics, mine[name].metrics
            ratios[case] = theirs["us"] / ours["us"]
            spread = math.hypot(*(m.get("us_sd", math.inf) / m["us"] for m in (theirs, ours)))
            half = t975(ROUNDS - 1) * spread / math.sqrt(ROUNDS)
            intervals[case] = ratios[case] * math.exp(-half), ratios[case] * math.exp(min(half, 99.0))
        found.append(Choice(name, ratios, intervals))
    return sorted(found, key=lambda c: -c.ratios[c.worst])


def at_points(rows: Iterable[Row], buckets: Iterable[int]) -> dict[Point, list[Choice]]:
    """Return the choices of every point with times near its bucket (equal lengths in its last quarter)."""
    timed = times(rows)
    found = {}
    for layout, batch in dict.fromkeys(place[:2] for place in timed):
        capacities = sorted(place[2] for place in timed if place[:2] == (layout, batch))
        for bucket in buckets:
            capacity = next((c for c in capacities if c >= bucket), None)
            if capacity is None:
                continue
            cases = timed[layout, batch, capacity]
            mine = {name: c for name, c in cases.items() if not name.isdigit() or int(name) <= bucket}
            if any(name.isdigit() and int(name) * REACH >= bucket for name in mine):
                found[Point(layout, batch, bucket)] = choices(mine)
    return found


def entry(point: Point, best: Choice, run: str) -> Entry:
    shape = {**point.layout.dims, "window": 0, "dtype": "bfloat16"}
    sizes = {"batch": point.batch, "context": point.bucket}
    if not best.wins:
        return Entry(OP, shape, sizes, None, BASELINE, run)
    provider, params = best.name.split()
    chosen = OURS[provider](*map(int, params.split("/")))
    return Entry(OP, shape, sizes, provider, BASELINE, run, chosen, round(best.mean, 3), best.ci95)


def table(rows: list[Row], run: str, buckets: Iterable[int] = BUCKETS) -> tuple[Table, list[str]]:
    """Return the table and a line for each entry. Raises ValueError if nothing can be compared."""
    found = at_points(rows, buckets)
    if not found:
        raise ValueError("no row has a capacity: run `decode_attention.py --capacity 2048,131072`")
    last = rows[-1]
    about = {
        "date": last.time[:10], "commit": last.commit or commit() or "unknown", "versions": last.versions,
        "machine": {"gpu": last.machine.gpu, "gpus": last.machine.gpus},
        "measured": "alone: graphs of calls of equal and of mixed lengths; of each set of parameters the worst case"
        " counts, and the speedup is the geometric mean; bench/experiments/attention/decode_attention.py,"
        " decode_table.py",
    }  # fmt: skip
    entries, lines = [], []
    for point, all_of_them in found.items():
        best, *others = all_of_them
        made = entry(point, best, run)
        entries.append(made)
        where = f"{'/'.join(map(str, point.layout))} batch {point.batch:>3} up to {point.bucket:>6}"
        said = [
            f"{c.name} worst {c.ratios[c.worst]:.3f} ({c.worst}), mean {c.mean:.3f}"
            for c in (best, *others[:1])
        ]
        lines.append(f"{where}: {'ours' if made.faster else 'null'}  {'; then '.join(said)}")
    return Table(str(last.machine.gpu), {run: about}, tuple(entries)), lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, nargs="+", help="rows of decode_attention.py with --capacity")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--add", type=Path, help="a table whose other entries are kept, such as nvidia-h200.json"
    )
    parser.add_argument("--run", default="decode-attention", help="name of the measurement in the table")
    options = parser.parse_args()
    try:
        made, lines = table([row for path in options.rows for row in read(path)[0]], options.run)
        if options.add:
            made = tuned.read(options.add).merged(made)
    except (OSError, ValueError, TableError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    options.out.write_text(made.to_json())
    tuned.read(options.out)  # validate
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
