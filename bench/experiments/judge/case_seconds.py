"""Where the time of a kernels run goes: seconds a case by phase, from its rows.

python bench/experiments/judge/case_seconds.py RUN/rows.jsonl
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

from fk_bench.core.rows import read

if __name__ == "__main__":
    found, _ = read(Path(sys.argv[1]))
    cases = [r for r in found if r.kind == "case" and "wall_s" in r.metrics]
    spent: Counter[str] = Counter()
    for row in cases:
        spent.update(row.case.get("seconds", {}))
    wall = sum(r.metrics["wall_s"] for r in cases)
    for phase, seconds in spent.most_common():
        print(f"{phase:20} {seconds / len(cases):8.3f} s a case")
    slow = sorted(cases, key=lambda r: -r.metrics["wall_s"])[:10]
    print("longest:", ", ".join(f"{r.subject.op}:{r.case['name']} {r.metrics['wall_s']:.1f}" for r in slow))
    each = round(wall / max(len(cases), 1), 3)
    print(json.dumps({"cases": len(cases), "seconds": round(wall, 1), "seconds_a_case": each}))
