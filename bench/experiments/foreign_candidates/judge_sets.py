"""How many claims of foreign candidates hold on this chip, at sizes that were held out, and in a compiled host?

Judges each candidate of each set (a subfolder of SETS) on a few cases and as many with other sizes, in short rounds, in
the cage. The static scan is reported, not enforced. A second process tests whether the kernel runs under torch.compile
and whether new batch sizes compile it; it runs the candidate without a cage: use a machine that nothing depends on.
Resumes: what OUT/summary.jsonl has is not judged again.

    python judge_sets.py SETS OUT [--device cuda] [--only rms_norm,gelu] [--limit SECONDS]
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fk_bench.core.rows import append
from fk_bench.evaluate.adapters.foreign_files import digest_of
from fk_bench.evaluate.adapters.sets import SetFile, read_set
from fk_bench.kernels.judge import Options, judge_ops
from fk_bench.kernels.judge.scan.scan import rejections, scan

from fastkernels.core import candidate, registry

CASES = 4  # of the op's own; as many have other sizes
PROBE_S = 120


def cases_of(op: str, device: str) -> tuple[Any, ...]:
    """The first cases of models, and as many with other sizes, drawn anew."""
    spec = registry.get(op)
    own = sorted(spec.cases, key=lambda c: "model" not in c.tags)
    if device == "cpu":
        own = [c for c in own if spec.bytes_moved(c) < 1 << 20] or own
    rng = random.Random(secrets.randbits(64))
    chosen, seen = list(own[:CASES]), {repr(c.dims) for c in own}
    for number, case in enumerate(own[:CASES]):
        other = spec.vary(case, rng)
        if other is not None and repr(other.dims) not in seen:
            chosen.append(type(case)(f"held_out_{number}", other.dims, other.dtype, case.weight, case.tags))
    return tuple(chosen)


def judged(file: SetFile, device: str, rows: Path) -> dict[str, Any]:
    """The verdict on one candidate: statuses of own and held-out cases, the speedup, the scan."""
    options = Options(
        device=device, cases=(), task=cases_of(file.op, device), rounds=3, seconds=0.3, timeout=180.0, op_budget=240.0,
        scan=False, timed=device == "cuda", hard=1,
    )  # fmt: skip
    found = judge_ops([file.op], {file.op: file.path}, options, lambda row: append(rows, [row]))
    cases = [r for r in found if r.kind == "case"]
    held = [r for r in cases if str(r.case["name"]).startswith("held_out")]
    total = found[-1]
    reasons = Counter(
        f"{r.status.value}: {r.reason}"[:160].split("\n")[0] for r in cases if r.status.value != "ok"
    )
    return {
        "own": dict(Counter(r.status.value for r in cases if r not in held)),
        "held_out": dict(Counter(r.status.value for r in held)),
        "speedups": {r.case["name"]: round(r.metrics["speedup"], 3) for r in cases if "speedup" in r.metrics},
        "speedup": total.metrics.get("speedup_geomean"), "ci95": total.ci95.get("speedup_geomean"),
        "reasons": dict(reasons.most_common(3)),
        "scan": [
            why for f in (file.path, *(s for s in candidate.sources(file.path) if s.suffix == ".py"))
            if (why := rejections(scan(f, file.op)))
        ],
    }  # fmt: skip


def probe(op: str, path: str, device: str) -> dict[str, Any]:
    """Whether the kernel runs under torch.compile, and what new batch sizes compile."""
    from fk_bench.evaluate import deployment

    spec, function = registry.get(op), candidate.load(op, path).function
    call = deployment.call_of(spec, function, device)
    if call is None:
        return {"probe": "the op has no axis of tokens"}
    found: dict[str, Any] = {}
    import torch

    case = next(c for c in spec.cases if "model" in c.tags)
    made = lambda: spec.inputs(case, device, torch.Generator(device).manual_seed(0))  # noqa: E731
    for name, measure in (
        ("deployed", lambda: deployment.deployment(function, made)),
        ("serving", lambda: deployment.compiles_while_serving(call)),
    ):
        try:
            found[name] = (
                measure().problem or "yes" if name == "deployed" else measure().problem or "compiles nothing"
            )
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:200]
    return found


def probed(file: SetFile, device: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--probe", file.op, str(file.path), device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        return {"probe": f"no answer within {PROBE_S} s"}
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {"probe": " ".join(done.stderr.split())[-200:]}


def table(summary: Path) -> str:
    rows = [json.loads(line) for line in summary.read_text().splitlines()]
    lines = [
        "set      op                     own ok  held-out ok  speedup  scan      under torch.compile / while serving"
    ]
    for r in rows:
        if "declined" in r:
            continue
        own, held = r["own"], r["held_out"]
        ok = [f"{c.get('ok', 0)}/{sum(c.values())}" for c in (own, held)]
        speed = f"{r['speedup']:.2f}" if r.get("speedup") else "-"
        where = f"{r.get('deployed', r.get('probe', '-'))} / {r.get('serving', '-')}"
        scan_of = "rejects" if r["scan"] else "passes"
        lines.append(f"{r['set']:8} {r['op']:22} {ok[0]:>7} {ok[1]:>12} {speed:>8}  {scan_of:8}  {where}")
    declined = Counter(r["set"] for r in rows if "declined" in r)
    return "\n".join([*lines, f"declined: {dict(declined)}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sets", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="")
    parser.add_argument("--limit", type=float, default=480.0)
    args = parser.parse_args()
    start, summary = time.perf_counter(), args.out / "summary.jsonl"
    args.out.mkdir(parents=True, exist_ok=True)
    done = {(r["set"], r.get("op") or r["file"], r.get("digest")) for r in _lines(summary)}
    for folder in sorted(p for p in args.sets.iterdir() if p.is_dir()):
        found = read_set(folder.name, folder, args.out / "adapted" / folder.name)
        for d in found.declined:
            key = (folder.name, str(d.path.relative_to(folder)), None)
            if key not in done:
                _add(summary, {"set": folder.name, "file": key[1], "declined": d.reason})
        for file in found.candidates:
            digest = digest_of({str(i): f for i, f in enumerate([file.path, *candidate.sources(file.path)])})
            if (folder.name, file.op, digest) in done or (args.only and file.op not in args.only.split(",")):
                continue
            if time.perf_counter() - start > args.limit:
                print("time is up: run the same command again to go on", file=sys.stderr)
                print(table(summary))
                return
            begin = time.perf_counter()
            row = {"set": folder.name, "op": file.op, "file": file.source.name, "digest": digest}
            row |= judged(file, args.device, args.out / "rows.jsonl") | probed(file, args.device)
            _add(summary, row | {"seconds": round(time.perf_counter() - begin, 1)})
    print(table(summary))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _add(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row)[:300], file=sys.stderr, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--probe"]:
        print(json.dumps(probe(*sys.argv[2:5])))
    else:
        main()
