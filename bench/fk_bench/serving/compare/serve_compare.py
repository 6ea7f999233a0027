"""serve-compare: each lane is a real server in its own process and environment, measured in interleaved rounds.

RUN/run.json       options            RUN/rows.jsonl      the results
RUN/report.html    the report         RUN/servers/LANE/   log, command, environment, reports of patched processes
RUN/requests/      every request      RUN/agreement/      the tokens of the agreement phase
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from fk_bench.core import machine
from fk_bench.core.pages import model_name
from fk_bench.core.rows import Status
from fk_bench.core.terminal.flags import ConfigError
from fk_bench.core.terminal.progress import Display, minutes
from fk_bench.serving import agreement, lanes, summary
from fk_bench.serving.config import OWN, CompareConfig, Level
from fk_bench.serving.estimate import AGREEMENT, START, Estimate
from fk_bench.serving.fleet import Fleet, Running
from fk_bench.serving.lanes import Lane
from fk_bench.serving.load import datasets, metrics, replay
from fk_bench.serving.load.client import Client
from fk_bench.serving.measure import PROFILE, WARM_UP, Loads, Measured, longest, watched
from fk_bench.serving.process import ServerError
from fk_bench.serving.run_record import Record

COMMAND = "serve-compare"


class Compare:
    """One run. `lane_list` is validated; `out` may hold an earlier, unfinished run with the same options."""

    def __init__(self, config: CompareConfig, lane_list: Sequence[Lane], out: Path, console: Console):
        self.config, self.lanes, self.out, self.console = config, list(lane_list), out, console
        self.names = [lane.name for lane in self.lanes]
        data = datasets.load(
            config.dataset, config.model, config.seed or 0, config.input_len, config.output_len,
            config.dataset_path, config.ignore_eos,
        )  # fmt: skip
        self.data, self.loads = data, Loads(config, data)
        self.fixed = data.agreement(config.agreement_prompts, config.agreement_len)
        self.record = Record(out, COMMAND, config.model)
        self.done = self.record.finished()
        self.warnings: list[str] = []
        self.fleet = Fleet(config, self.lanes, self._sizing(), out, self.record)

    def _sizing(self) -> lanes.Sizing:
        config = self.config
        needs = self.loads.needs()
        needs += [(1, longest(self.fixed), longest(self.fixed))] if self.fixed else []
        held = max(tokens for _, _, tokens in needs)
        floor = 65536 if machine.machine().gpus else 8192
        kv_tokens = config.kv_tokens or max(floor, -(-held * 5 // 4 // 1024) * 1024)
        return lanes.Sizing(
            max_model_len=config.max_model_len or max(tokens for _, tokens, _ in needs),
            max_num_seqs=max(16, *(together for together, _, _ in needs)),
            kv_tokens=kv_tokens,
            residents=self._residents(),
            tensor_parallel=config.tensor_parallel,
            dtype=machine.fast_dtype() if config.dtype == "auto" else config.dtype,
            together=config.together,
            kv_bytes=self._kv_bytes() if config.together else None,
        )

    def _kv_bytes(self) -> int | None:
        file = Path(self.config.model) / "config.json"
        half = self.config.dtype != "float32"
        return lanes.kv_bytes(json.loads(file.read_text())) if half and file.is_file() else None

    def _residents(self) -> int:
        """Servers that run at once: a host and its '+fk' on a GPU; on a CPU as many as fit in memory."""
        if self.config.resident:
            return self.config.resident
        if machine.machine().gpus:
            return min(2, len(self.lanes))
        # vLLM, SmolLM2-135M, 2 CPU cores: 3.5 GB, 2026-11-21
        each = 3.5e9 + 1.2 * weight_bytes(self.config.model)
        return max(1, min(len(self.lanes), int(0.9 * psutil.virtual_memory().available / each)))

    def run(self) -> dict[str, Any]:
        """Measure what is missing; returns the one-line summary. Servers are always ended."""
        config = self.config
        todo = [lane for lane in self.lanes if self._pending(lane)]
        plan = self._plan(todo)
        estimate = sum(seconds for _, seconds in plan.values())
        with Display(self.console, plan) as display:
            forced = [
                summary.synthetic_warning(e.name, e.synthetic_acceptance)
                for e in todo
                if e.synthetic_acceptance
            ]
            for warning in (*self.record.warnings, *forced):
                display.line(f"warning: {warning}")
            sizing = self.fleet.sizing
            display.line(
                f"serve-compare of {model_name(config.model)}: {len(todo)} of {len(self.lanes)} lanes to measure, at "
                f"{', '.join(level.label for level in config.levels)}, {config.rounds} rounds, {sizing.dtype}, "
                f"{sizing.residents} servers at a time; about {minutes(estimate)}; results in {self.out}"
            )
            try:
                for group in lanes.groups(todo, self.fleet.sizing.residents):
                    self._group(group, display)
            finally:
                self.fleet.stop_all()
        self._agreement_rows()
        return self._finish()

    def _plan(self, todo: Sequence[Lane]) -> dict[str, tuple[int, float]]:
        """{kind of step: (steps, estimated seconds)}, for the progress and the time left."""
        step = Estimate(self.config, weight_bytes(self.config.model), bool(machine.machine().gpus))
        plan = {START: (len(todo), sum(step.start(lane) for lane in todo))}
        for level in self.config.levels:
            counts = [len(self._left(lane, level)) for lane in todo]
            plan[level.label] = sum(counts), sum(step.rounds(level, n) for n in counts if n)
        agreements = sum(self._agreement_left(lane) for lane in todo)
        plan[AGREEMENT] = agreements, agreements * step.agreement()
        return plan

    def _pending(self, lane: Lane) -> bool:
        rounds = any(self._left(lane, level) for level in self.config.levels)
        return rounds or self._agreement_left(lane) or not self.record.lane_ok(lane.name)

    def _left(self, lane: Lane, level: Level) -> list[int]:
        return [r for r in range(self.config.rounds) if (lane.name, level, r) not in self.done]

    def _agreement_left(self, lane: Lane) -> bool:
        return bool(self.fixed) and agreement.Outputs.load(self._agreement_file(lane.name)) is None

    def _agreement_file(self, name: str) -> Path:
        return self.out / "agreement" / f"{name}.json"

    def _group(self, group: Sequence[Lane], display: Display) -> None:
        config = self.config
        self.fleet.start(group, display)
        for level in config.levels:
            waiting = [running for running in self.fleet.running if self._left(running.lane, level)]
            for running in waiting:
                self._guarded(running, display, level, WARM_UP)
            for r in range(config.rounds):
                for running in waiting:
                    if running in self.fleet.running and r in self._left(running.lane, level):
                        self._guarded(running, display, level, r)
            for running in [
                running for running in waiting if config.profile and running in self.fleet.running
            ]:
                self._guarded(running, display, level, PROFILE)
        for running in [running for running in self.fleet.running if self._agreement_left(running.lane)]:
            self._guarded(running, display, None, 0)
        for running in list(self.fleet.running):
            display.doing(f"{running.lane.name} stops")
            self.fleet.stop(running)

    def _guarded(self, running: Running, display: Display, level: Level | None, r: int) -> None:
        """One step of a lane. If its server ends, that is a failed row, and the run continues without the lane."""
        name = running.lane.name
        phases = {WARM_UP: "warm-up", PROFILE: "profile"}
        what = "agreement" if level is None else f"{level.label} {phases.get(r, f'round {r + 1}')}"
        display.doing(f"{name} {what}")
        try:
            if level is None:
                self._agree(running)
            elif r == WARM_UP:
                self._warm_up(running, display, level)
            elif r == PROFILE:
                self._profile(running, display, level)
            else:
                self._measure(running, display, level, r)
        except (ServerError, agreement.AgreementError) as error:
            status = Status(error.status) if isinstance(error, ServerError) else Status.FAILED
            display.line(f"{name} {what}: {error}")
            case = {"kind": "agreement"} if level is None else self._case(level, r)
            row = self.record.row(running.lane, status, str(error), case)
            row.round = None if level is None else max(0, r)
            self.record.add(row)
            if isinstance(error, ServerError):
                self.fleet.drop(running, status, str(error))
        if r >= 0:
            display.advance(AGREEMENT if level is None else level.label)

    def _warm_up(self, running: Running, display: Display, level: Level) -> None:
        traces = asyncio.run(self.loads.warm_up(running, level))
        failed = [t.error for t in traces if not t.ok]
        if failed:
            display.line(
                f"{running.lane.name} {level.label} warm-up: {len(failed)} requests failed: {failed[0]}"
            )

    def _measure(self, running: Running, display: Display, level: Level, r: int) -> None:
        if level.search:
            found, probes = asyncio.run(self.loads.search(running, level, r))
            for at, probe in probes:
                row = self.record.row(
                    running.lane, Status.OK, "", {**self._case(at, r), **probe.case, "kind": "probe"}
                )
                row.round, row.metrics = r, probe.metrics
                self.record.add(row)
        else:
            found = asyncio.run(self.loads.measure(running, level, r))
        row = self.record.row(running.lane, *load_status(found), {**self._case(level, r), **found.case})
        row.round, row.metrics = r, found.metrics
        self._save_requests(running.lane.name, level, r, found.traces)
        self.record.add(row)
        if row.status is Status.OK:
            self.done.add((running.lane.name, level, r))
        shown = [row.metrics.get(k, math.nan) for k in ("output_tokens_per_s", "ttft_ms_p50", "tpot_ms_p50")]
        text = "{:8.1f} tok/s  TTFT {:7.1f} ms  TPOT {:6.1f} ms".format(*shown)
        if level.search:
            text = f"{level.search} {found.metrics[f'max_{level.search}_within_slo']:g}  {text}"
        bad = "" if row.status is Status.OK else f"  {row.status.value}: {row.reason}"
        where = f"{running.lane.name:<12} {level.label:<6} round {r + 1}/{self.config.rounds}"
        display.line(f"{where}  {text}{bad}")
        if found.warning:
            display.line(f"warning: {' '.join(where.split())}: {found.warning}")
            self.warnings.append(f"{' '.join(where.split())}: {found.warning}")

    def _profile(self, running: Running, display: Display, level: Level) -> None:
        traces, problem = asyncio.run(self.loads.profile(running, level))
        case = {**self._case(level, 0), "kind": "profile", "num_prompts": len(traces)}
        if running.server is not None:
            case["folder"] = str(self.fleet.profiles(running.lane).relative_to(self.out))
        status = Status.UNSUPPORTED if problem else Status.OK
        self.record.add(self.record.row(running.lane, status, problem, case))
        if problem:
            display.line(f"{running.lane.name} {level.label} profile: {problem}")

    def _agree(self, running: Running) -> None:
        async def collect() -> agreement.Outputs:
            async with Client(running.url, running.model, self.config.request_timeout) as http:
                return await watched(running, agreement.collect(http, self.fixed))

        asyncio.run(collect()).save(self._agreement_file(running.lane.name))

    def _agreement_rows(self) -> None:
        """Agreements are computed at the end, because a lane's base may run in a later group."""
        outputs = {
            name: agreement.Outputs.load(self._agreement_file(name)) for name in self.names if self.fixed
        }
        for lane in self.lanes:
            mine = outputs.get(lane.name)
            if mine is not None:
                base = lanes.base_of(lane.name, self.names, self.config.base)
                case = {
                    "kind": "agreement",
                    "prompts": len(self.fixed),
                    "output_len": self.config.agreement_len,
                }
                row = self.record.row(lane, Status.OK, "", case)
                agreement.fill(
                    row, mine, base, outputs.get(base), self.config.min_agreement if lane.patched else 0.0
                )
                self.record.add(row)

    def _finish(self) -> dict[str, Any]:
        """Write summary rows and the HTML report; return the JSON line."""
        from fk_bench.serving.report import csv_file, numbers, page, requests, verdict

        known = {lane.name: lane for lane in self.lanes}
        for cell in summary.cells(self.record.rows):
            if cell.lane in known:
                case = {**self._case(cell.level, 0), "kind": "summary", "rounds_done": sorted(cell.rounds)}
                row = self.record.row(known[cell.lane], Status.OK, "", case)
                row.metrics, row.ci95 = cell.mean, cell.ci95
                row.baseline = lanes.base_of(cell.lane, self.names, self.config.base)
                self.record.add(row)
        results = summary.lanes(self.record.rows, self.names)
        top = summary.highest(self.config.levels)
        complete = all(not self._left(lane, level) for lane in self.lanes for level in self.config.levels)
        synthetic = summary.synthetic_warnings(self.record.rows)
        return {
            "command": COMMAND,
            "ok": complete and all(not result.problems for result in results),
            "report": str(page.render(self.out)),
            "csv": str(self.out / csv_file.NAME),
            "rows": str(self.record.path),
            "at": top.label,
            "checked": summary.checked(results),
            "verdict": verdict.lines(
                results,
                numbers.baselines(self.record.rows, self.names),
                requests.measured_rounds(self.record.rows),
            ),
            "warnings": [*self.fleet.warnings, *self.warnings, *synthetic],
            "lanes": [summary.lane_line(result, top) for result in results],
        }

    def _case(self, level: Level, r: int) -> dict[str, Any]:
        config = self.config
        input_len, output_len = config.lengths(level)
        case = {
            "kind": "round", "load": level.kind, "value": level.value, "dataset": config.dataset,
            "input_len": input_len, "output_len": output_len, "num_prompts": config.prompts_at(level),
            "seed": self.loads.seed + max(0, r), "dtype": self.fleet.sizing.dtype,
        }  # fmt: skip
        if not level.own_lengths:
            case[summary.RUN_LENGTHS] = [config.input_len, config.output_len]
        if own := level.to_case():
            case[OWN] = own
        prefix, turns = config.prefix_of(level), config.turns_of(level)
        if prefix[0]:
            case["prefix_len"], case["prefix_groups"] = prefix
        if turns > 1:
            case["turns"] = turns
        if level.kind != "concurrency" and config.burstiness != 1:
            case["burstiness"] = config.burstiness
        if level.kind == "ramp":
            case["ramp_up_strategy"] = config.ramp_up_strategy
        if level.kind == "trace":
            sample = self.loads.trace
            case["trace"] = Path(config.trace or "").name
            case["input_len"] = round(sum(r.input_len for r in sample) / len(sample))
            case["output_len"] = round(sum(r.output_len for r in sample) / len(sample))
        if level.search:
            case["slo_attainment"] = config.slo_attainment
        if config.slo:
            case["slo_ms"] = dict(config.slo)
        if self.data.repeated:
            case["prompts_repeated"] = True
        return case

    def _save_requests(self, lane: str, level: Level, r: int, traces: Sequence[metrics.Trace]) -> None:
        file = self.out / "requests" / f"{lane}.{level.label}.r{r}.jsonl"
        file.parent.mkdir(exist_ok=True)
        start = min(t.sent for t in traces)
        file.write_text("".join(json.dumps(t.to_dict(start)) + "\n" for t in traces))


def load_status(found: Measured) -> tuple[Status, str]:
    """Whether a load is valid: no failed request, and the requested lengths."""
    traces = found.traces
    failed = [t.error for t in traces if not t.ok]
    if failed:
        return Status.FAILED, f"{len(failed)} of {len(traces)} requests failed: {failed[0]}"
    for trace in traces:
        prompt = trace.request
        assert prompt is not None
        if prompt.ignore_eos and trace.output_tokens != prompt.output_len:
            return (
                Status.INVALID,
                f"a request got {trace.output_tokens} tokens instead of {prompt.output_len}",
            )
        if isinstance(prompt.tokens, list) and trace.prompt_tokens not in (None, len(prompt.tokens)):
            return (
                Status.INVALID,
                f"a prompt of {len(prompt.tokens)} tokens was counted as {trace.prompt_tokens}",
            )
    return Status.OK, ""


def weight_bytes(model: str) -> int:
    """Size of a local model's safetensors files; 0 if it is not local."""
    folder = Path(model)
    return sum(f.stat().st_size for f in folder.glob("*.safetensors")) if folder.is_dir() else 0


def prepare(config: CompareConfig, out: Path, resume: bool) -> CompareConfig:
    """Create or check the run's folder and write run.json. Raises ConfigError."""
    if not resume and (out / "rows.jsonl").exists():
        raise ConfigError(
            f"--out: {out} already holds a run. Continue it with --resume {out}, or choose another folder."
        )
    if Path(config.model).is_dir():
        config = replace(config, model=str(Path(config.model).absolute()))
    out.mkdir(parents=True, exist_ok=True)
    if (
        config.seed is None
    ):  # so that no prompt of this run is in the cache of a server that served another run
        config = replace(config, seed=secrets.randbelow(2**31))
    if config.trace is not None and not resume:
        found = replay.read_trace(config.trace, config.trace_block_size, config.trace_requests)
        config = replace(config, trace=str(Path(config.trace).absolute()), trace_requests=len(found))
    config.save(out / "run.json")
    return config
