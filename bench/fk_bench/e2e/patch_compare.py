"""`fk-bench patch-compare`: a host against itself, stock and patched in turn, for many models.

The states alternate: stock, patched, stock, patched, stock. Live, that is one engine, patched and undone; before
construction, a process a state. A run of a patched state is compared with the mean of the same run in the two stock
states around it; neighbouring stock states compared with each other show the noise.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from fk_bench.core import machine, rows
from fk_bench.core.output import fail, last_line, table
from fk_bench.core.rows import Row, Status, Subject
from fk_bench.core.stats import paired_ratio
from fk_bench.e2e.host import HostFailed, HostProcess, make_row, prompts_of, vocab_size
from fk_bench.e2e.model_configs import ModelError
from fk_bench.serving.config import ConfigError, comma_list

COMMAND = "patch-compare"
STATES = "stock", "patched"
METRICS = {  # metric: (title, whether more is better)
    "tpot_ms": ("TPOT", False), "ttft_ms": ("TTFT", False), "output_tokens_per_s": ("output tok/s", True),
}  # fmt: skip


@dataclass(frozen=True)
class Load:
    """Requests that start together, tokens of each prompt, and tokens of each output."""

    requests: int
    input_len: int
    output_len: int

    @classmethod
    def parse(cls, text: str) -> Load:
        """From '8x512+128'. Raises ConfigError."""
        count, _, lengths = text.partition("x")
        parts = [count, *lengths.split("+")]
        if len(parts) != 3 or not all(p.isdecimal() and int(p) for p in parts):
            raise ConfigError(f"--loads: {text!r} is not REQUESTSxINPUT+OUTPUT, as in 8x512+128")
        return cls(*map(int, parts))

    def __str__(self) -> str:
        return f"{self.requests}x{self.input_len}+{self.output_len}"


def patch_compare_command(
    models: Annotated[
        list[str] | None, typer.Argument(help="folders, or with random weights names such as llama-3.2-3b")
    ] = None,
    host: Annotated[str, typer.Option(help="vllm or sglang")] = "vllm",
    python: Annotated[str, typer.Option(help="the host's interpreter (default: this one)")] = "",
    loads: Annotated[
        str, typer.Option(help="REQUESTSxINPUT+OUTPUT tokens, comma-separated; all requests start together")
    ] = "1x512+128,8x512+128,32x512+128",
    cycles: Annotated[int, typer.Option(help="times that the host is patched and undone")] = 2,
    repeats: Annotated[int, typer.Option(help="runs of each load in each state, after one more")] = 3,
    before_construction: Annotated[
        bool, typer.Option("--before-construction", help="FASTKERNELS=1 in a process of its own, not live")
    ] = False,
    ops: Annotated[str, typer.Option(help="comma-separated (default: what patch() chooses)")] = "",
    trace: Annotated[bool, typer.Option(help="one more run a load and state, profiled: GPU's time")] = True,
    load_format: Annotated[str, typer.Option(help="dummy: random weights; auto: the checkpoint's")] = "dummy",
    dtype: Annotated[str, typer.Option(help="auto: bfloat16, or float32 on a CPU that emulates it")] = "auto",
    tensor_parallel: Annotated[int, typer.Option(help="GPUs")] = 1,
    gpu_share: Annotated[
        float, typer.Option(help="share of the memory (default: 0.9, on a CPU 0.3)", show_default=False)
    ] = 0.0,
    engine_args: Annotated[str, typer.Option(help="JSON of more arguments of the engine")] = "{}",
    timeout: Annotated[float, typer.Option(help="seconds for a start, a patch or a run")] = 600.0,
    seed: Annotated[int, typer.Option(help="of the prompts, which are new for every run")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="folder of the rows; models that it has already are only shown (default: a new one)"
        ),
    ] = None,
    json_only: Annotated[
        bool, typer.Option("--json", help="only the line of JSON on standard output")
    ] = False,
) -> None:
    """A host against itself, stock and patched in turn: latency a token, throughput and steps, for each model.

    fk-bench patch-compare qwen2.5-7b llama-3.2-3b --python .venv-vllm/bin/python --out run

    A ratio above 1 means that the patched host is better, with a 95% interval; 'noise' is the same for stock against
    stock. Measured by an offline engine, token by token, without a server.
    """
    try:
        plan = [Load.parse(part) for part in comma_list("--loads", loads, str)]
        if host not in ("vllm", "sglang"):
            raise ConfigError(f"--host {host!r}: give vllm or sglang")
        if min(cycles, repeats) < 1:
            raise ConfigError("--cycles and --repeats must be at least 1")
        extra = _json_object(engine_args)
    except ConfigError as error:
        fail(str(error))
    folder = out or Path("fk-bench-runs") / time.strftime(f"{COMMAND}-%Y%m%d-%H%M%S")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "rows.jsonl"
    made, warnings = rows.read(file) if file.exists() else ([], [])
    for warning in warnings:
        print(warning, file=sys.stderr)
    made = [
        row for row in made
        if row.subject.host == host and row.case["before_construction"] == before_construction
    ]  # fmt: skip
    done = {row.subject.model for row in made if row.case["state"] == "end"}
    longest = max((load.input_len + load.output_len for load in plan), default=0) + 16
    most = max((load.requests for load in plan), default=1)
    on_gpu = machine.machine().gpus > 0
    settings: dict[str, Any] = {
        "dtype": machine.fast_dtype() if dtype == "auto" else dtype, "load_format": load_format,
        "max_model_len": longest, "max_num_seqs": max(most, 256 if on_gpu else 8), "kv_tokens": None,
        "gpu": on_gpu, "gpu_share": gpu_share or (0.9 if on_gpu else 0.3), "tensor_parallel": tensor_parallel,
        "engine_args": extra,
    }  # fmt: skip
    failed = []
    for model in models or ():
        if model in done:
            continue
        made = [row for row in made if row.subject.model != model]  # of a run that did not end
        try:
            path = _prepared(model, load_format, folder)
            comparison = _Comparison(
                host, machine.absolute(python or sys.executable), {**settings, "model": path}, folder, timeout,
                before_construction, comma_list("--ops", ops, str) if ops else None,
            )  # fmt: skip
            case = {
                "before_construction": before_construction,
                **{k: settings[k] for k in ("dtype", "load_format", "tensor_parallel")},
            }
            for found in comparison.measure(model, plan, cycles, repeats, trace, seed, case):
                made.append(found)
                rows.append(file, [found])
        except (HostFailed, ModelError, ValueError) as error:
            failed.append(model)
            print(f"{model}: {error}", file=sys.stderr)
    results = summary(made)
    if not json_only:
        show(results)
        if not on_gpu:
            print("on a CPU the ratios say nothing about a GPU")
        print(f"rows: {file}\n")
    last_line({"command": COMMAND, "ok": not failed, "rows": str(file), "failed": failed, "results": results})
    if failed:
        raise SystemExit(1)


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--engine-args is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--engine-args must be an object of arguments, got {text}")
    return found


def _prepared(model: str, load_format: str, folder: Path) -> str:
    from fk_bench.e2e.command import sizes_of

    return sizes_of(model, folder) if load_format == "dummy" else model


class _Comparison:
    """One model in one host."""

    def __init__(
        self, host: str, python: str, settings: dict[str, Any], folder: Path, timeout: float,
        before_construction: bool, ops: Sequence[str] | None,
    ):  # fmt: skip
        self.host, self.python, self.settings, self.folder = host, python, settings, folder
        self.timeout, self.before, self.ops = timeout, before_construction, ops
        self.process: HostProcess | None = None
        self.versions = machine.interpreter(python).versions
        self.vocab = vocab_size(settings["model"])

    def measure(
        self, model: str, loads: Sequence[Load], cycles: int, repeats: int, trace: bool, seed: int,
        case: dict[str, Any],
    ) -> Iterator[Row]:  # fmt: skip
        """All rows of the model, as they are measured. Raises HostFailed."""

        def row(more: dict[str, Any], metrics: dict[str, float], status: Status = Status.OK) -> Row:
            return make_row(
                self.host, {"kind": "toggled", **case, **more}, metrics, command=COMMAND,
                subject=Subject(model=model, host=self.host), versions=self.versions, status=status,
                reason="" if status is Status.OK else "not all tokens were generated",
            )  # fmt: skip

        try:
            for block in range(2 * cycles + 1):
                state = STATES[block % 2]
                change = self._enter(state, block)
                for number in range(
                    -1, repeats
                ):  # run -1 is the first of its load: it may compile or allocate
                    for load in loads:
                        where = {
                            "state": state,
                            "block": block,
                            "run": number,
                            "load": str(load),
                            **vars(load),
                        }
                        found = self._run(load, f"{seed} {model} {block} {number} {load}", "arrivals")
                        metrics, complete = metrics_of(found["arrivals"], load)
                        if number < 0 and change is not None:
                            metrics["change_s"] = change
                        yield row(where, metrics, Status.OK if complete else Status.WRONG)
                if trace and self.settings["gpu"]:
                    for load in loads:
                        yield row(*self._traced(load, state, block, f"{seed} {model} {block} trace {load}"))
            yield row({"state": "end"}, {})
        finally:
            self._stop()

    def _traced(
        self, load: Load, state: str, block: int, seed: str
    ) -> tuple[dict[str, Any], dict[str, float]]:
        where = {"state": state, "block": block, "traced": True, "load": str(load), **vars(load)}
        found = self._run(load, seed, "traced")
        return where, {"kernels_s": found["kernels_us"] / 1e6, "allocations": found["allocations"]}

    def _enter(self, state: str, block: int) -> float | None:
        """Bring the host into a state; the seconds of a live change."""
        if self.process is None or self.before:
            self._stop()
            env = {"FASTKERNELS": "1" if self.before and state == "patched" else "0"}
            if self.ops is not None:
                env["FASTKERNELS_OPS"] = ",".join(self.ops)
            self.process = HostProcess(self.host, self.python, self.settings, self.folder, env=env)
            self.process.answer(self.timeout)
            return None
        work = {"patch": self.ops} if state == "patched" else {"undo": True}
        self.process.tell(work)
        return self.process.answer(self.timeout)["seconds"]

    def _run(self, load: Load, seed: str, kind: str) -> dict[str, Any]:
        assert self.process is not None
        prompts = prompts_of(seed, load.requests, load.input_len, self.vocab)
        self.process.tell({"prompts": prompts, "output_len": load.output_len, "arrivals": True, kind: True})
        return self.process.answer(self.timeout)

    def _stop(self) -> None:
        if self.process is not None:
            self.process.stop()
            self.process = None


def metrics_of(arrivals: Sequence[Sequence[float]], load: Load) -> tuple[dict[str, float], bool]:
    """The metrics of a run, and whether all tokens came. arrivals: seconds to each token of each request.

    A step is the time between two tokens of a request while every request decodes.
    """
    complete = all(len(of_one) == load.output_len for of_one in arrivals)
    if not all(arrivals):
        return {}, False
    seconds = max(of_one[-1] for of_one in arrivals)
    found = {
        "seconds": seconds,
        "output_tokens_per_s": sum(map(len, arrivals)) / seconds,
        "ttft_ms": 1e3 * statistics.fmean(of_one[0] for of_one in arrivals),
    }
    per_token = [(a[-1] - a[0]) / (len(a) - 1) for a in arrivals if len(a) > 1]
    if per_token:
        found["tpot_ms"] = 1e3 * statistics.fmean(per_token)
    begin, end = max(a[0] for a in arrivals), min(a[-1] for a in arrivals)
    steps = [b - a for one in arrivals for a, b in itertools.pairwise(one) if a >= begin and b <= end]
    if steps:
        for name, share in (("p50", 50), ("p90", 90), ("p99", 99), ("max", 100)):
            found[f"step_ms_{name}"] = 1e3 * float(np.percentile(steps, share))
    return found, complete


# -- comparing


def summary(made: Sequence[Row]) -> list[dict[str, Any]]:
    """A line for each model and load: medians of the states, and ratios with their intervals."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in made:
        if "load" in row.case and row.status is Status.OK:
            groups.setdefault((row.subject.model or "", row.case["load"]), []).append(row)
    return [{"model": model, "load": load, **_compared(group)} for (model, load), group in groups.items()]


def _compared(group: Sequence[Row]) -> dict[str, Any]:
    runs = {(row.case["block"], row.case["run"]): row.metrics for row in group if not row.case.get("traced")}
    line: dict[str, Any] = {}
    for metric, (_, more) in METRICS.items():
        for state, parity in zip(STATES, (0, 1), strict=True):
            values = [m[metric] for (b, r), m in runs.items() if b % 2 == parity and r >= 0 and metric in m]
            if values:
                line[f"{state}_{metric}"] = statistics.median(values)
        pairs, noise = _pairs(runs, metric)
        for name, chosen in ((f"{metric}_ratio", pairs), (f"{metric}_noise", noise)):
            if chosen:
                theirs, ours = zip(*chosen, strict=True)
                ratio, interval = paired_ratio(ours, theirs) if more else paired_ratio(theirs, ours)
                line[name], line[f"{name}_ci95"] = ratio, interval
    for state, parity in zip(STATES, (0, 1), strict=True):
        for name in ("step_ms_p50", "step_ms_p99", "step_ms_max"):
            values = [m[name] for (b, r), m in runs.items() if b % 2 == parity and r >= 0 and name in m]
            if values:
                line[f"{state}_{name}"] = statistics.median(values)
        later = [m["seconds"] for (b, r), m in runs.items() if b % 2 == parity and r >= 0]
        firsts = [m["seconds"] for (b, r), m in runs.items() if b % 2 == parity and r < 0]
        if firsts and later:
            line[f"{state}_first_run_ratio"] = max(firsts) / statistics.median(later)
        traced = [r for r in group if r.case.get("traced") and r.case["state"] == state]
        if traced and later:
            busy = statistics.median(r.metrics["kernels_s"] for r in traced)
            line[f"{state}_gpu_busy"] = busy / statistics.median(later)
            line[f"{state}_allocations"] = max(r.metrics["allocations"] for r in traced)
    return line


def _pairs(
    runs: dict[tuple[int, int], dict[str, float]], metric: str
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(stock, patched) of each patched run, and (stock before, stock after) around it."""
    pairs, noise = [], []
    for (block, number), metrics in sorted(runs.items()):
        around = [runs.get((block + step, number), {}).get(metric) for step in (-1, 1)]
        before, after = around
        if block % 2 == 0 or number < 0 or metric not in metrics or before is None or after is None:
            continue
        pairs.append(((before + after) / 2, metrics[metric]))
        noise.append((before, after))
    return pairs, noise


def show(results: Sequence[dict[str, Any]]) -> None:
    """Print a table of ratios, their means over the models, and the steps."""
    if not results:
        print("nothing was measured")
        return
    columns = ["model", "load", *(f"{t} stock / patched" for t, _ in METRICS.values())]
    cells = []
    for line in results:
        both = [
            f"{line.get(f'stock_{m}', math.nan):.4g} / {line.get(f'patched_{m}', math.nan):.4g}"
            for m in METRICS
        ]
        cells.append([line["model"], line["load"], *both])
    table("medians: TPOT and TTFT in ms", columns, cells)
    columns = ["model", "load", *(h for t, _ in METRICS.values() for h in (t, "noise"))]
    cells = [
        [
            line["model"],
            line["load"],
            *(_with_interval(line, f"{m}_{k}") for m in METRICS for k in ("ratio", "noise")),
        ]
        for line in results
    ]
    for load in dict.fromkeys(line["load"] for line in results):
        of_load = [line for line in results if line["load"] == load]
        if len(of_load) > 1:
            cells.append([f"{len(of_load)} models", load, *_means(of_load)])
    table("times better when patched; noise: stock against stock", columns, cells)
    names = ("step_ms_p50", "step_ms_p99", "step_ms_max", "first_run_ratio", "gpu_busy", "allocations")
    used = [name for name in names if any(f"stock_{name}" in line for line in results)]
    cells = [
        [line["model"], line["load"]]
        + [f"{line.get(f'stock_{n}', math.nan):.3g} / {line.get(f'patched_{n}', math.nan):.3g}" for n in used]
        for line in results
    ]
    table("steps of decoding, stock / patched", ["model", "load", *used], cells)


def _with_interval(line: dict[str, Any], name: str) -> str:
    if name not in line:
        return ""
    interval = line[f"{name}_ci95"]
    return f"{line[name]:.3f}" + ("" if interval is None else f" [{interval[0]:.3f}, {interval[1]:.3f}]")


def _means(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Geometric means of the models' ratios, and the least; none of the noise."""
    found = []
    for metric in METRICS:
        values = [line[f"{metric}_ratio"] for line in lines if f"{metric}_ratio" in line]
        mean = math.exp(statistics.fmean(map(math.log, values))) if values else math.nan
        found += [f"{mean:.3f}, least {min(values, default=math.nan):.3f}", ""]
    return found
