"""Measure the quality of a patched host on real text: its distance from float32 and from the unpatched host.

    quality.py --host vllm --model SmolLM2 --out rows.jsonl [--every-kernel] [--way start]

The method, the runs and the goals are in README.md. --way live patches the engine that was measured, start another one
before construction; engine measures our own engine, eager the host without compiled code and graphs. --every-kernel
makes a table that sends the model's shapes to our linear and attention kernels. The exit status is 1 if a goal is
missed or could not be measured:

    KL(exact || patched) / KL(exact || host) at most --ratio;  |perplexity patched / host - 1| at most --perplexity
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # bench/

from experiments.quality import quality_exact
from experiments.quality.quality_plan import OTHERS, Plan, english, plan, table, tokens_of
from experiments.quality.quality_record import EXACT, HOST, write

TOP = 20  # tokens whose probabilities are compared one by one in a prefill
# Prefixes of our kernels' names in a trace; _Z begins mangled C++ names of other kernels.
OURS = re.compile(r"_(?![ZC])\w+$|skinny_linear|wgmma_linear|fastkernels::")
# A batch's prompts must fit into one step: a partial prompt would add a row of logits.
SETTINGS = {"max_model_len": 1024, "max_num_batched_tokens": 16384}


class Runs:
    """The runs of one engine, in a child process."""

    def __init__(self, args: argparse.Namespace) -> None:
        module = f"experiments.quality.quality_{'fastkernels' if args.child == 'engine' else args.host}"
        self.args, self.folder = args, args.folder
        self.plan = Plan.load(args.folder / "plan.json")
        options = {**SETTINGS, **(json.loads(args.engine) if args.child != "engine" else {})}
        engine = importlib.import_module(module).Engine
        if args.child == "eager":
            options |= engine.eager
        self.engine = engine(str(args.model), options, TOP)
        try:
            self.forced("check", self.plan.batches("decode", "check")[0][:2], 4)
        except Exception as error:
            if not hasattr(engine, "plain"):
                raise
            print(f"again with {engine.plain}, since {type(error).__name__}: {error}", flush=True)
            self.engine.close()
            self.engine = engine(str(args.model), {**options, **engine.plain}, TOP)

    def forced(self, run: str, batch: list[int], new: int | None = None) -> None:
        """Run decode steps of these sequences with forced tokens; at most `new` tokens of each."""
        chosen = [self.plan.decode[i] for i in batch]
        tasks = [
            {
                "folder": str(self.folder), "run": run, "sequence": i, "at": s.at, "total": self.plan.total,
                "tokens": s.tokens[:new],
            }
            for i, s in zip(batch, chosen, strict=True)
        ]  # fmt: skip
        made = self.engine.decode([s.prompt for s in chosen], tasks)
        wrong = [i for i, m, t in zip(batch, made, tasks, strict=True) if m != t["tokens"]]
        if wrong:
            raise RuntimeError(f"{run}: the tokens of sequences {wrong} could not be forced")

    def run(self, run: str) -> None:
        start = time.monotonic()
        for batch in self.plan.batches("decode", run):
            self.forced(run, batch)
        middle = time.monotonic()
        for batch in self.plan.batches("prefill", run):
            found = self.engine.prefill([self.plan.prefill[i].tokens for i in batch])
            for i, places in zip(batch, found, strict=True):
                tops = [list(top.items()) for _, top in places]
                write(self.folder, f"{run}-prefill", i, {"logprob": [own for own, _ in places], "top": tops})
        now = time.monotonic()
        print(f"{run}: decode {middle - start:.1f} s, prefill {now - middle:.1f} s", flush=True)

    def traced(self) -> dict[str, int]:
        """Return launches of our kernels, by name, in a few decode steps of the first batch, which replay graphs."""
        from fastkernels.patch import Request, find_host

        host = find_host(self.args.host)
        host.call(self.engine.target, Request("trace_start"))
        self.forced("trace", self.plan.batches("decode", "trace")[0], 8)
        replies = host.call(self.engine.target, Request("trace_stop"))
        launches = [item for r in replies for item in r["kernels"].items()]
        return {name: n for name, n in launches if OURS.match(name)}

    def note(self, rows: list[dict[str, Any]]) -> None:
        kernels: dict[str, int] = {}
        try:
            kernels = self.traced() if self.args.child != "engine" else {}
        except Exception as error:
            print(f"no trace: {type(error).__name__}: {error}", flush=True)
        versions = {self.args.host: self.engine.version()}
        runner = getattr(self.engine, "runner", None)  # vLLM's first or second model runner
        (self.folder / "live.json").write_text(
            json.dumps({"rows": rows, "versions": versions, "kernels": kernels, "runner": runner})
        )

    def live(self) -> None:
        import fastkernels

        self.host()
        candidates = json.loads(self.args.candidates)
        ops = self.args.ops.split(",") if self.args.ops else None
        report = fastkernels.patch(self.engine.target, ops=ops, candidates=candidates or None)
        self.run("patched")
        report.refresh()
        print(report, flush=True)
        self.note(report.to_dict()["rows"])

    def host(self) -> None:
        for run in (HOST, *self.args.others.split(",")):
            self.run(run)

    def ours(self) -> None:
        self.run("patched")
        self.note(self.engine.rows() if self.args.child == "engine" else [])

    def start(self) -> None:
        from fk_integrations.core import reports

        self.run("patched")
        replies = reports.read(os.environ["FASTKERNELS_REPORT"], self.args.host)
        self.note([row for reply in replies for row in reply["rows"]])


def child(args: argparse.Namespace, part: str, environment: dict[str, str], seconds: float) -> str:
    """Run a part in its own session with shared output; return '' or the problem."""
    command = [
        sys.executable, __file__, "--host", args.host, "--model", str(args.model), "--out", str(args.out),
        "--others", args.others, "--engine", args.engine, "--candidates", args.candidates,
        "--ops", args.ops, "--folder", str(args.folder), "--child", part,
    ]  # fmt: skip
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        status = process.wait(timeout=max(seconds, 1))
        return f"{part}: exit status {status}" if status else ""
    except subprocess.TimeoutExpired:
        return f"{part}: time limit of {seconds:.0f} s exceeded"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # engine cores and schedulers too
        process.wait()


def measure(args: argparse.Namespace) -> list[str]:
    """Perform all runs in child processes; return the problems."""
    until = time.monotonic() + args.seconds
    clean = {n: v for n, v in os.environ.items() if n not in ("FASTKERNELS", "FASTKERNELS_REPORT")}
    if args.every_kernel:
        from fk_bench.core import machine

        path = args.folder / "table.json"
        config = json.loads((args.model / "config.json").read_text())
        path.write_text(table(config, machine.machine().gpu or "cpu", SETTINGS["max_model_len"]))
        clean["FASTKERNELS_TUNED"] = str(path)
    parts = [("live", clean)]
    if args.way == "start":
        candidates = ",".join(f"{op}={file}" for op, file in json.loads(args.candidates).items())
        clean |= {"FASTKERNELS_CANDIDATES": candidates} if candidates else {}
        clean |= {"FASTKERNELS_OPS": args.ops} if args.ops else {}
        patched = {**clean, "FASTKERNELS": "1", "FASTKERNELS_REPORT": str(args.folder / "reports")}
        parts = [("host", clean), ("start", patched)]
    elif args.way == "engine":
        parts = [("host", clean), ("engine", clean)]
    elif args.way == "eager":
        parts = [("host", clean), ("eager", clean)]
    parts.insert(0, (EXACT, clean))
    return [e for part, env in parts if (e := child(args, part, env, until - time.monotonic()))]


def idle(rows: list[dict[str, Any]], every: bool, linear: str = "linear") -> list[str]:
    """Return the ops that should have run and did not. `every`: those that only run by a table.

    linear: the op of the model's linear layers, linear or linear_fp8.
    """
    ran = {r["op"] for r in rows if r["state"] == "active" and r["calls"] > 0}
    wanted = {linear: {linear}, "attention": {"attention", "attention_decode"}} if every else {}
    found = [] if ran else ["nothing of ours ran"]
    for op, names in wanted.items():
        if not ran & names:
            why = [r.get("reason") or json.dumps(r.get("left", {})) for r in rows if r["op"] in names]
            found.append(f"{op} did not run: {'; '.join(dict.fromkeys(why)) or 'not in the report'}")
    return found


def record(args: argparse.Namespace, found: list[dict[str, Any]], errors: list[str]) -> int:
    """Write the rows; return the number of wrong ones. Rows of a single batch size have no goal."""
    from experiments.quality.quality_summary import problem
    from fk_bench.core import machine
    from fk_bench.core.rows import Row, Status, Subject, append

    live = args.folder / "live.json"
    nothing: dict[str, Any] = {"rows": [], "versions": {}, "kernels": {}, "runner": None}
    noted = json.loads(live.read_text()) if live.exists() else nothing
    common: dict[str, Any] = {
        "run_id": f"quality-{args.host}", "command": "quality", "machine": machine.machine(), "baseline": args.host,
        "commit": machine.commit(), "versions": noted["versions"],
        "subject": Subject(host=args.host, model=args.model.name),
    }  # fmt: skip
    setting = {
        "way": args.way,
        "every_kernel": args.every_kernel,
        "text": str(args.text or "pydoc_data.topics"),
    }
    rows = []
    for group in found:
        wrong = problem(group["metrics"], args.ratio, args.perplexity) if group["batch"] == "all" else ""
        group["said"] = wrong or ("goals met" if group["batch"] == "all" else "")
        case = {"kind": "quality", "phase": group["phase"], "batch": group["batch"], **setting}
        status = Status.WRONG if wrong else Status.OK
        measured = {"metrics": group["metrics"], "ci95": group["ci95"]}
        rows.append(Row(**common, status=status, reason=wrong, case=case, **measured))
    fp8 = "quantization_config" in json.loads((args.model / "config.json").read_text())
    every = args.every_kernel and machine.machine().gpu is not None
    still = idle(noted["rows"], every, "linear_fp8" if fp8 else "linear") if args.way != "eager" else []
    wrong = "; ".join([*errors, *still])
    status = Status.FAILED if wrong else Status.OK
    case = {"kind": "live", **setting, **{name: noted[name] for name in ("rows", "kernels", "runner")}}
    rows.append(Row(**common, status=status, reason=wrong, case=case))
    append(args.out, rows)
    show(args, found, noted, wrong)
    return sum(row.status != Status.OK for row in rows)


def show(args: argparse.Namespace, found: list[dict[str, Any]], live: dict[str, Any], wrong: str) -> None:
    from fk_bench.core.output import table as print_table

    def cells(group: dict[str, Any], **names: str) -> list[str]:
        return [
            f"{group['metrics'][name]:{how}}" if name in group["metrics"] else "-"
            for name, how in names.items()
        ]

    shown, against = [], []
    for group in found:
        where = [group["phase"], group["batch"], *cells(group, tokens=".0f")]
        ratio = cells(group, exact_ratio=".3f")[0]
        if interval := group["ci95"].get("exact_ratio"):
            ratio += " ({:.3f}, {:.3f})".format(*interval)
        kls = cells(group, kl_exact_host=".3e", kl_exact_patched=".3e")
        rest = cells(group, perplexity_host=".4f", perplexity_rel_other="+.4%", perplexity_rel_patched="+.4%")
        shown.append([*where, *kls, ratio, *rest, group["said"]])
        for run in (*OTHERS, "patched"):
            names = {f"kl_{run}": ".3e", f"logprob_max_abs_diff_{run}": ".3f", f"same_best_{run}": ".4f"}
            against.append([*where, run, *cells(group, **names, **{f"perplexity_{run}": ".4f"})])
    title = f"{args.model.name} in {args.host}: KL from float32, nats a token"
    columns = [
        "phase",
        "batch",
        "tokens",
        "KL host",
        "KL patched",
        "patched / host",
        "perplexity",
        "other",
        "patched",
    ]
    print_table(title, [*columns, "goals"], shown)
    columns = [
        "phase",
        "batch",
        "tokens",
        "run",
        "KL",
        "max |log-prob. diff.|",
        "same best token",
        "perplexity",
    ]
    print_table("Every run against the host", columns, against)
    ran = [
        f"{r['op']} ({r['modules']} modules, {r['calls']} calls)"
        for r in live["rows"]
        if r["state"] == "active"
    ]
    print(f"ours: {', '.join(ran) or 'nothing'}")
    print(f"launched in a few decode steps: {json.dumps(live['kernels'])}")
    if wrong:
        print(f"FAILED: {wrong}")


def pairs(text: str) -> dict[int, int]:
    return {int(a): int(b) for a, b in (item.split(":") for item in text.split(",") if item)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", choices=("vllm", "sglang"), required=True)
    parser.add_argument(
        "--model", type=Path, required=True, help="a folder: config.json, weights, tokenizer.json"
    )
    parser.add_argument("--out", type=Path, required=True, help="rows are appended (JSONL)")
    parser.add_argument("--text", type=Path, help="default: Python's documentation")
    parser.add_argument("--way", choices=("live", "start", "engine", "eager"), default="live")
    parser.add_argument(
        "--every-kernel", action="store_true", help="use our linear and attention kernels regardless of speed"
    )
    parser.add_argument(
        "--decode", type=pairs, default=pairs("32:20480,8:4096,1:1024"), help="batch:tokens, ..."
    )
    parser.add_argument("--prompts", default="64,192,320,448", help="lengths, in turn")
    parser.add_argument("--new", type=int, default=128, help="tokens forced after each prompt")
    parser.add_argument("--prefill", type=pairs, default=pairs("16:20440"), help="batch:tokens")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence in a prefill")
    parser.add_argument(
        "--others", default=",".join(OTHERS), help="further unpatched runs; `other` is required"
    )
    parser.add_argument("--ratio", type=float, default=1.2, help="largest ratio of divergences")
    parser.add_argument("--perplexity", type=float, default=0.001, help="largest relative difference")
    parser.add_argument("--engine", default="{}", help="more settings of the host's engine, JSON")
    parser.add_argument(
        "--candidates", default="{}", help="a user's kernels instead of ours: {op: file}, JSON"
    )
    parser.add_argument("--ops", default="", help="comma-separated (default: what patch() chooses)")
    parser.add_argument(
        "--seconds", type=float, default=540, help="time limit of all runs; later runs are left out"
    )
    parser.add_argument("--work", type=Path, help="folder for temporary logits, 0.2 MB a token")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child == EXACT:
        quality_exact.run(args.folder, args.model, Plan.load(args.folder / "plan.json"), TOP)
        return
    if args.child:
        runs = Runs(args)
        try:
            runs.ours() if args.child in ("engine", "eager") else getattr(runs, args.child)()
        finally:
            runs.engine.close()
        return
    from experiments.quality.quality_summary import groups

    text = args.text.read_text() if args.text else english()
    cut = plan(
        tokens_of(args.model, text), args.decode, [int(n) for n in args.prompts.split(",")], args.new,
        next(iter(args.prefill.items()), (1, 0)), args.length,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="quality-", dir=args.work) as folder:
        args.folder = Path(folder)
        cut.save(args.folder / "plan.json")
        errors = measure(args)
        wrong = record(args, groups(cut, args.folder), errors)
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
