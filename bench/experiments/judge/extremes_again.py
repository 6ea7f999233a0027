"""Check the extreme cases that were wrong in published rows again, with the same values.

    python bench/experiments/judge/extremes_again.py FOLDER --device cuda

A row of a wrong case has its values (`--values` of its reason). A case without them is drawn anew, if it still applies.
Rows go to FOLDER/extremes_again.jsonl. The exit status is 1 if a case is wrong or did not run.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "results"
ROWS = RESULTS / "2026-11-28-h200-judge.jsonl.xz"
SECONDS = 150  # of a case, with compiling


def wrong_cases(rows: Path) -> Iterator[tuple[str, str, str]]:
    """(op, case, values or '') of each case that was wrong or raised; rows that sum up an op have no case."""
    with lzma.open(rows, "rt") as file:
        for line in file:
            row = json.loads(line)
            name = row.get("case", {}).get("name")
            if row.get("status", "ok") != "ok" and name:
                values = re.search(r"--values (\S+)", row.get("reason") or "")
                yield row["subject"]["op"], name, values[1] if values else ""


def check(op: str, name: str, values: str, device: str, folder: Path) -> dict[str, str]:
    """The row of one case."""
    which = ["--values", values] if values else ["--cases", "extreme", "--case", name]
    place = folder / f"{op}-{name}".replace(":", "-")
    command = [sys.executable, "-m", "fk_bench.cli", "kernels", op, *which, "--no-time", "--device", device]
    try:
        done = subprocess.run(
            [*command, "--out", str(place)], capture_output=True, text=True, timeout=SECONDS
        )
        output = done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        return {"op": op, "case": name, "status": "timeout", "reason": f"no result in {SECONDS} s"}
    found = (
        [json.loads(line) for line in (place / "rows.jsonl").open()]
        if (place / "rows.jsonl").exists()
        else []
    )
    found = [row for row in found if row.get("case", {}).get("name") == name]
    summary = json.loads(done.stdout.splitlines()[-1]) if done.stdout.endswith("}\n") else {}
    if not found and not values and (summary.get("ops"), summary.get("cases")) == (0, 0):
        return {"op": op, "case": name, "status": "no case", "reason": "the kind does not apply to the op"}
    if not found:
        return {"op": op, "case": name, "status": "not run", "reason": output.strip()[-300:]}
    return {"op": op, "case": name, "status": found[-1]["status"], "reason": found[-1].get("reason") or ""}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--ops", nargs="*", help="only these ops")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--at-once", type=int, default=max((os.cpu_count() or 2) // 2, 1))
    args = parser.parse_args()
    cases = [c for c in dict.fromkeys(wrong_cases(args.rows)) if not args.ops or c[0] in args.ops]
    args.folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.at_once) as pool:
        rows = list(pool.map(lambda case: check(*case, args.device, args.folder), cases))
    with (args.folder / "extremes_again.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    for row in rows:
        print(f"{row['op']:20} {row['case']:28} {row['status']:10} {row['reason'][:160]}")
    wrong = sum(row["status"] not in ("ok", "no case") for row in rows)
    print(f"{len(rows) - wrong} of {len(rows)} right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
