"""One host's engine in its own process: `python worker.py JSON`, run by that host's interpreter.

It writes lines of JSON to the original standard output; the host's own output goes to standard error. The first line is
{"version": ...}. Then each input line is work:

    {"run": NAME, "batches": [[i, ...]]}   the sequences or texts of inputs.json, in these batches; answered with
                                           {"seconds": s}, with the outputs in NAME.f32 (see `forced`). With
                                           "staggered": true, half of a batch arrives while the rest decodes
    {"patch": null or [ops], "candidates": {op: file} or null}   answered with {"rows": [[op, state, reason]]}
    {"fault": NAME, or "" to undo it}      plants a fault in place (images, requests); answered with {"planted": bool,
                                           "concerns": bool, "reason": why not}
    {"calls": true}                        answered with {"calls": {op: calls of what the patch put in}}
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# A script's folder is on sys.path, where its modules would shadow packages of the same names.
sys.path[:] = [p for p in sys.path if os.path.abspath(p) != os.path.dirname(os.path.abspath(__file__))]


class Worker:
    def __init__(self, options: dict[str, Any]) -> None:
        self.folder, self.family = Path(options["folder"]), options["family"]
        self.inputs = json.loads((self.folder / "inputs.json").read_text())
        self.report: Any = None
        self.host, self.model = options["host"], options["model"]
        name = "pictures" if options["host"] in ("timm", "diffusers") else options["host"]
        name = "requests" if options["requests"] else name
        engine = importlib.import_module(f"fk_bench.quality.engines.{name}").Engine
        self.engine = engine(options["model"], options)

    def answer(self, work: dict[str, Any]) -> dict[str, Any]:
        start = time.perf_counter()
        if "run" in work:
            self.forced(work) if self.family == "text" else self.encoded(work)
            return {"seconds": time.perf_counter() - start}
        if "patch" in work:
            return {"rows": self.patched(work["patch"], work["candidates"])}
        if "fault" in work:
            from fk_bench.quality.faults import CannotPlant, NoHeads

            try:
                self.engine.plant(work["fault"])
            except CannotPlant as error:
                return {"planted": False, "concerns": not isinstance(error, NoHeads), "reason": str(error)}
            return {"planted": True}
        if self.report is None:
            return {"calls": {}}
        self.report.refresh()
        calls: dict[str, int] = {}
        for row in self.report.rows:
            if row.state == "active":
                calls[row.op] = max(calls.get(row.op, 0), row.calls)
        return {"calls": {**calls, **self.report.candidates}}

    def patched(self, ops: list[str] | None, files: dict[str, str] | None) -> list[list[str]]:
        """[op, state, reason] of each op. Blocks of other models, and in other hosts than our engine, are left out."""
        import fastkernels
        from fastkernels.core.candidate import is_block
        from fk_bench.evaluate.placed import place

        left = {
            op: why[1] for op in filter(is_block, files or ()) if (why := place(op, self.host, self.model))
        }
        if files is not None:
            files = {op: file for op, file in files.items() if op not in left}
            ops = list(files)
        if files is None or files:
            self.report = fastkernels.patch(self.engine.target, ops=ops, candidates=files)
        rows = [] if self.report is None else self.report.rows
        return [
            *([row.op, row.state, row.reason] for row in rows),
            *([op, "left", why] for op, why in left.items()),
        ]

    def forced(self, work: dict[str, Any]) -> None:
        total = sum(len(s["tokens"]) for s in self.inputs)
        for batch in work["batches"]:
            chosen = [self.inputs[i] for i in batch]
            common = {"file": str(self.folder / f"{work['run']}.f32"), "total": total}
            tasks = [{**common, "at": s["at"], "tokens": s["tokens"]} for s in chosen]
            late = {"staggered": True} if work.get("staggered") else {}  # of our engine only
            made = self.engine.decode([s["prompt"] for s in chosen], tasks, **late)
            if wrong := [i for i, m, t in zip(batch, made, tasks, strict=True) if m != t["tokens"]]:
                raise RuntimeError(f"{work['run']}: the tokens of sequences {wrong} could not be forced")

    def encoded(self, work: dict[str, Any]) -> None:
        from fk_bench.quality.forced import rows_of

        for batch in work["batches"]:
            found = self.engine.encode([self.inputs[i] for i in batch])  # [n, D]
            rows = rows_of(str(self.folder / f"{work['run']}.f32"), len(self.inputs), found[0].numel())
            for i, row in zip(batch, found, strict=True):
                rows[i] = row.flatten()
        if hasattr(self.engine, "note"):
            self.engine.note(self.folder / f"{work['run']}.json")


def main() -> None:
    options = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # hosts print to standard output
    worker = Worker(options)
    package = importlib.import_module(options["host"])
    print(json.dumps({"version": getattr(package, "__version__", "")}), file=answers, flush=True)
    from fk_bench.offline import refusals

    for line in sys.stdin:
        with refusals.answered(answers):
            answer = worker.answer(json.loads(line))
        print(json.dumps(answer), file=answers, flush=True)
    worker.engine.close()


if __name__ == "__main__":
    main()
