"""serve-compare: every lane a real server in its own process and environment, loaded in interleaved rounds.

RUN/run.json       options            RUN/rows.jsonl      the results
RUN/report.html    the report         RUN/servers/LANE/   log, command, environment, reports of patched processes
RUN/requests/      every request      RUN/agreement/      the tokens of the agreement phase
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from . import agreement, client, datasets, lanes, machine, metrics, process, rows, summary
from .client import Client, Prompt
from .config import CompareConfig, ConfigError, Level
from .estimate import estimate_s
from .lanes import Lane
from .process import Server, ServerError
from .progress import Display, minutes
from .rows import Row, Status, Subject

COMMAND = "serve-compare"


class Running:
    """A lane whose server answers."""

    def __init__(self, lane: Lane, url: str, model: str, server: Server | None, started: Row):
        self.lane, self.url, self.model, self.server, self.started = lane, url, model, server, started

    def check(self) -> None:
        """Raises ServerError when the process has ended."""
        if self.server is not None and not self.server.alive():
            raise self.server.death()


class Compare:
    """One run. `lanes` are checked already; `out` may hold an earlier, unfinished run of the same options."""

    def __init__(self, config: CompareConfig, lane_list: Sequence[Lane], out: Path, console: Console):
        self.config, self.lanes, self.out, self.console = config, list(lane_list), out, console
        self.path = out / "rows.jsonl"
        self.rows: list[Row] = []
        if self.path.is_file():
            self.rows, warnings = rows.read(self.path)
            for warning in warnings:
                console.print(f"warning: {warning}", markup=False, highlight=False)
        self.run_id = self.rows[0].run_id if self.rows else uuid.uuid4().hex[:12]
        self.data = datasets.load(
            config.dataset, config.model, config.seed, config.input_len, config.output_len,
            config.dataset_path, config.ignore_eos,
        )  # fmt: skip
        self.hands = self._deal()
        self.fixed = self.data.agreement(config.agreement_prompts, config.agreement_len)
        self.sizing = self._sizing()
        self.running: list[Running] = []
        finished = [r for r in summary.latest(self.rows) if r.kind == "round" and r.status is Status.OK]
        self.done = {(r.subject.lane, summary.level_of(r), r.round) for r in finished}

    def _deal(self) -> dict[tuple[Level, int], list[Prompt]]:
        """All prompts, dealt before anything runs, so that every lane (and a resumed run) gets the same. -1: warm-up."""
        hands = {(lv, -1): self.data.draw(f"warm-up {lv.label}", -1, lv.warmup) for lv in self.config.levels}
        for r in range(self.config.rounds):
            for level in self.config.levels:
                hands[level, r] = self.data.draw(level.label, r, self.config.prompts_at(level))
        return hands

    def _sizing(self) -> lanes.Sizing:
        config = self.config
        prompts = [p for hand in self.hands.values() for p in hand] + self.fixed
        lengths = [(len(p.tokens) if isinstance(p.tokens, list) else 2048) + p.output_len for p in prompts]
        longest = -(-(max(lengths) + 64) // 64) * 64
        together = max([*config.concurrency, *(64 for _ in config.rate)])
        floor = 65536 if machine.machine().gpus else 8192
        kv_tokens = config.kv_tokens or max(floor, -(-together * longest * 5 // 4 // 1024) * 1024)
        return lanes.Sizing(
            config.max_model_len or longest, max(16, together), kv_tokens, self._resident(), config.tensor_parallel
        )

    def _resident(self) -> int:
        """Servers that are up at once: on a GPU a host and its '+fk', on a CPU as many as the memory holds."""
        if self.config.resident:
            return self.config.resident
        if machine.machine().gpus:
            return min(2, len(self.lanes))
        import psutil

        each = 3.5e9 + 1.2 * weight_bytes(self.config.model)  # vLLM 3.5 GB with SmolLM2-135M, 2 cores, 2026-11-21
        return max(1, min(len(self.lanes), int(0.9 * psutil.virtual_memory().available / each)))

    # The run

    def run(self) -> dict[str, Any]:
        """Measure what is not measured yet; returns the one-line summary. Servers are stopped whatever happens."""
        config = self.config
        todo = [lane for lane in self.lanes if self._pending(lane)]
        steps = sum(len(self._rounds_left(lane, level)) for lane in todo for level in config.levels) + 2 * len(todo)
        estimate = estimate_s(config, todo, weight_bytes(config.model), bool(machine.machine().gpus))
        grouped = lanes.groups(todo, self.sizing.residents)
        with Display(self.console, steps) as display:
            display.line(f"serve-compare of {config.model}: {len(todo)} of {len(self.lanes)} lanes to measure, at "
                         f"{', '.join(level.label for level in config.levels)}, {config.rounds} rounds; "
                         f"about {minutes(estimate)}; results in {self.out}")  # fmt: skip
            try:
                for group in grouped:
                    self._group(group, display)
            finally:
                self._stop_all()
        self._agreement_rows()
        return self.finish()

    def _pending(self, lane: Lane) -> bool:
        rounds = any(self._rounds_left(lane, level) for level in self.config.levels)
        return rounds or self._agreement_left(lane) or not self._lane_row_ok(lane)

    def _rounds_left(self, lane: Lane, level: Level) -> list[int]:
        return [r for r in range(self.config.rounds) if (lane.name, level, r) not in self.done]

    def _agreement_left(self, lane: Lane) -> bool:
        return bool(self.fixed) and agreement.Outputs.load(self._agreement_file(lane.name)) is None

    def _lane_row_ok(self, lane: Lane) -> bool:
        return any(r.kind == "lane" and r.subject.lane == lane.name and r.status is Status.OK for r in self.rows)

    def _agreement_file(self, name: str) -> Path:
        return self.out / "agreement" / f"{name}.json"

    def _group(self, group: Sequence[Lane], display: Display) -> None:
        for lane in group:
            self._start(lane, display)
        for level in self.config.levels:
            waiting = [r for r in self.running if self._rounds_left(r.lane, level)]
            for running in waiting:
                display.doing(f"{running.lane.name} {level.label} warm-up")
                self._guarded(running, display, level, -1)
            for r in range(self.config.rounds):
                for running in [w for w in waiting if w in self.running]:
                    if r in self._rounds_left(running.lane, level):
                        display.doing(f"{running.lane.name} {level.label} round {r + 1}/{self.config.rounds}")
                        self._guarded(running, display, level, r)
                        display.advance()
        for running in [r for r in self.running if self._agreement_left(r.lane)]:
            display.doing(f"{running.lane.name} agreement")
            self._guarded(running, display, None, None)
            display.advance()
        for running in list(self.running):
            self._stop(running, display)

    def _guarded(self, running: Running, display: Display, level: Level | None, r: int | None) -> None:
        """One step of a lane. A server that ends is a failed row and a lane less, not the end of the run."""
        try:
            if level is None or r is None:
                self._agree(running)
            else:
                self._measure(running, display, level, r)
        except (ServerError, RuntimeError) as error:
            died = isinstance(error, ServerError)
            status = Status(error.status) if isinstance(error, ServerError) else Status.FAILED
            display.line(f"{running.lane.name}: {error}")
            case = {"kind": "agreement"} if level is None else self._case(level, r)
            row = self._row(running.lane, status, str(error), case)
            row.round = None if r == -1 else r
            self._add(row)
            if died:
                self._drop(running, status, str(error))

    # Servers

    def _start(self, lane: Lane, display: Display) -> None:
        display.doing(f"{lane.name} starts")
        folder = self.out / "servers" / lane.name
        row = self._row(lane, Status.OK, "", {"kind": "lane"})
        server: Server | None = None
        try:
            if lane.url is not None:
                running = Running(lane, lane.url, process.served_model(lane.url), None, row)
                row.case["url"] = lane.url
            else:
                server = self._launch(lane, folder, row)
                running = Running(lane, server.url, self._served_name(), server, row)
                self.running.append(running)
                row.metrics["ready_s"] = server.wait_ready(self.config.ready_timeout)
        except BaseException as error:
            self.running = [r for r in self.running if r.lane is not lane]
            if server is not None:
                server.stop()
            if not isinstance(error, (ServerError, OSError)):
                raise
            row.status = Status(getattr(error, "status", "failed"))
            row.reason = str(error)
            self._add(row)
            display.line(f"{lane.name}: {row.reason}")
            return
        if running not in self.running:
            self.running.append(running)
        display.line(f"{lane.name}: ready at {running.url}" + (f" after {row.metrics['ready_s']:.0f} s" if server else ""))
        display.advance()

    def _launch(self, lane: Lane, folder: Path, row: Row) -> Server:
        config = self.config
        port = process.free_port() if config.port is None else config.port + self.lanes.index(lane)
        process.check_port(port)
        shutil.rmtree(folder / "report", ignore_errors=True)
        (folder / "cwd").mkdir(parents=True, exist_ok=True)
        (folder / "report").mkdir()
        argv = lanes.command(lane, config.model, self._served_name(), port, self.sizing)
        env = lanes.environment(lane, config.model, (folder / "report").absolute())
        (folder / "command.sh").write_text(lanes.shell_line(env, argv) + "\n")
        (folder / "environment.json").write_text(json.dumps({"added": env, "removed": [k for k in env if not env[k]]}, indent=1))
        log = folder / "server.log"
        row.case.update(server_command=argv, env=env, log=str(log.relative_to(self.out)), port=port)
        return Server(lane.name, argv, env, folder / "cwd", log.absolute(), port)

    def _served_name(self) -> str:
        return Path(self.config.model).name or self.config.model

    def _stop(self, running: Running, display: Display) -> None:
        """End a lane that did its work, and write its row: what was patched, and whether it ran."""
        row = running.started
        display.doing(f"{running.lane.name} stops")
        if running.server is not None:
            if not running.server.alive():
                row.status, row.reason = Status.DIED, str(running.server.death())
            running.server.stop()
            self._patched(running.lane, row)
        self.running.remove(running)
        self._add(row)

    def _patched(self, lane: Lane, row: Row) -> None:
        found = lanes.read_reports(self.out / "servers" / lane.name / "report")
        row.metrics["patched_modules"], row.metrics["patched_calls"] = found["patched_modules"], found["patched_calls"]
        row.case["patched_ops"], row.case["patch_notes"] = found["ops"], found["notes"]
        if lane.patched and row.status is Status.OK and not found["patched_calls"]:
            why = "; ".join(found["notes"]) or (
                "its processes wrote no report" if not found["processes"] else "modules were patched, but no call was counted"
                if found["patched_modules"] else "no module was patched"
            )  # fmt: skip
            row.status, row.reason = Status.FAILED, f"our kernels did not run in lane {lane.name}: {why}"

    def _drop(self, running: Running, status: Status, reason: str) -> None:
        row = running.started
        row.status, row.reason = status, reason
        if running.server is not None:
            running.server.stop()
            self._patched(running.lane, row)
        self.running.remove(running)
        self._add(row)

    def _stop_all(self) -> None:
        for running in self.running:
            if running.server is not None:
                running.server.stop(grace_s=5.0)
        self.running.clear()

    # Measurements

    def _measure(self, running: Running, display: Display, level: Level, r: int) -> None:
        prompts = self.hands[level, r]
        traces = asyncio.run(self._load(running, prompts, level, self.config.seed + r))
        running.check()
        if r < 0:
            failed = [t.error for t in traces if t.error]
            if failed:
                display.line(f"{running.lane.name} {level.label} warm-up: {len(failed)} of {len(traces)} failed: {failed[0]}")
            return
        row = self._row(running.lane, *judge(traces, prompts), self._case(level, r))
        row.round = r
        found = metrics.summarize(traces, machine.machine().gpus and self.config.tensor_parallel, self.config.slo)
        row.metrics = {k: v for k, v in found.items() if math.isfinite(v)}
        self._save_requests(running.lane.name, level, r, traces)
        self._add(row)
        if row.status is Status.OK:
            self.done.add((running.lane.name, level, r))
        m = row.metrics
        text = (f"{m.get('output_tokens_per_s', 0):8.1f} tok/s  TTFT {m.get('ttft_ms_p50', math.nan):7.1f} ms  "
                f"TPOT {m.get('tpot_ms_p50', math.nan):6.1f} ms")  # fmt: skip
        bad = "" if row.status is Status.OK else f"  {row.status.value}: {row.reason}"
        display.line(f"{running.lane.name:<12} {level.label:<6} round {r + 1}/{self.config.rounds}  {text}{bad}")

    async def _load(self, running: Running, prompts: Sequence[Prompt], level: Level, seed: int) -> list[metrics.Trace]:
        async with Client(running.url, running.model, self.config.request_timeout) as http:
            if level.kind == "concurrency":
                work: Any = client.closed_loop(http, prompts, int(level.value))
            else:
                work = client.poisson(http, prompts, level.value, seed)
            return await self._watched(running, work)

    async def _watched(self, running: Running, work: Any) -> Any:
        """The result of `work`; ServerError at once when the server ends meanwhile."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=0.25)
                running.check()
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _agree(self, running: Running) -> None:
        async def collect() -> agreement.Outputs:
            async with Client(running.url, running.model, self.config.request_timeout) as http:
                return await self._watched(running, agreement.collect(http, self.fixed))

        asyncio.run(collect()).save(self._agreement_file(running.lane.name))

    def _agreement_rows(self) -> None:
        names = [lane.name for lane in self.lanes]
        outputs = {name: agreement.Outputs.load(self._agreement_file(name)) for name in names} if self.fixed else {}
        for lane in self.lanes:
            mine = outputs.get(lane.name)
            if mine is None:
                continue
            base_name = lanes.base_of(lane.name, names, self.config.base)
            base = outputs.get(base_name)
            case = {"kind": "agreement", "prompts": len(self.fixed), "output_len": self.config.agreement_len,
                    "unit": mine.unit, "flushed_by": mine.flushed_by}  # fmt: skip
            row = self._row(lane, Status.OK, "", case)
            row.baseline = base_name
            row.metrics["self_agreement"] = mine.self_agreement
            value = None if base is None else mine.self_agreement if base_name == lane.name else agreement.with_base(mine, base)
            if value is None:
                row.reason = f"no agreement with {base_name}: " + ("it has no output" if base is None else "no token ids")
            else:
                row.metrics["token_agreement"] = value
            if lane.patched and value is not None and base is not None:
                least = self.config.min_agreement * base.self_agreement
                if value < least:
                    row.status = Status.WRONG
                    row.reason = f"token agreement with {base_name} is {value:.3f}, less than {least:.3f} (--min-agreement)"
            self._add(row)

    # Results

    def finish(self) -> dict[str, Any]:
        """Summary rows, the HTML report, and the one-line JSON."""
        from . import report

        names = [lane.name for lane in self.lanes]
        for cell in summary.cells(self.rows):
            lane = next((known for known in self.lanes if known.name == cell.lane), None)
            if lane is not None:
                row = self._row(lane, Status.OK, "", {**self._case(cell.level, None), "kind": "summary"})
                row.case["rounds_done"] = sorted(cell.rounds)
                row.metrics, row.ci95, row.baseline = cell.mean, cell.ci95, lanes.base_of(lane.name, names, self.config.base)
                self._add(row)
        results = summary.lanes(self.rows, names)
        top = summary.highest(self.config.levels)
        lines = [summary.lane_line(result, top) for result in results]
        complete = all(not self._rounds_left(lane, level) for lane in self.lanes for level in self.config.levels)
        return {
            "command": COMMAND,
            "ok": complete and all(not result.problems for result in results),
            "report": str(report.render(self.out)),
            "rows": str(self.path),
            "at": top.label,
            "lanes": lines,
        }

    def _case(self, level: Level, r: int | None) -> dict[str, Any]:
        config = self.config
        case = {
            "kind": "round", "load": level.kind, "value": level.value, "dataset": config.dataset,
            "input_len": config.input_len, "output_len": config.output_len, "num_prompts": config.prompts_at(level),
            "seed": config.seed + max(0, r or 0),
        }  # fmt: skip
        if config.slo:
            case["slo_ms"] = dict(config.slo)
        if self.data.repeated:
            case["prompts_repeated"] = True
        return case

    def _row(self, lane: Lane, status: Status, reason: str, case: dict[str, Any]) -> Row:
        versions = machine.interpreter(lane.python).versions if lane.url is None else {}
        return Row(
            run_id=self.run_id, commit=machine.commit(), command=COMMAND, machine=machine.machine(), versions=versions,
            status=status, reason=reason, case=case,
            subject=Subject(model=self.config.model, lane=lane.name, host=lane.host, provider="fk" if lane.patched else None),
        )  # fmt: skip

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        rows.append(self.path, [row])

    def _save_requests(self, lane: str, level: Level, r: int, traces: Sequence[metrics.Trace]) -> None:
        file = self.out / "requests" / f"{lane}.{level.label}.r{r}.jsonl"
        file.parent.mkdir(exist_ok=True)
        start = min(t.sent for t in traces)
        lines = [
            {"sent_s": t.sent - start, "chunks_s": [round(c.time - t.sent, 6) for c in t.chunks],
             "chunk_tokens": [c.tokens for c in t.chunks], "prompt_tokens": t.prompt_tokens,
             "output_tokens": t.output_tokens, "finish_reason": t.finish_reason, "error": t.error}
            for t in traces
        ]  # fmt: skip
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def judge(traces: Sequence[metrics.Trace], prompts: Sequence[Prompt]) -> tuple[Status, str]:
    """Whether a load may be used: no failed request, and the lengths that were asked for."""
    failed = [t.error for t in traces if not t.ok]
    if failed:
        return Status.FAILED, f"{len(failed)} of {len(traces)} requests failed: {failed[0]}"
    for trace, prompt in zip(traces, prompts):  # noqa: B905
        if prompt.ignore_eos and trace.output_tokens != prompt.output_len:
            return Status.INVALID, f"a request got {trace.output_tokens} tokens, {prompt.output_len} were asked for"
        if isinstance(prompt.tokens, list) and trace.prompt_tokens not in (None, len(prompt.tokens)):
            return Status.INVALID, f"a prompt of {len(prompt.tokens)} tokens was counted as {trace.prompt_tokens}"
    return Status.OK, ""


def weight_bytes(model: str) -> int:
    """Size of a local model's safetensors; 0 when it is not local."""
    folder = Path(model)
    return sum(f.stat().st_size for f in folder.glob("*.safetensors")) if folder.is_dir() else 0


def prepare(config: CompareConfig, out: Path, resume: bool) -> CompareConfig:
    """Make the run's folder, or check it; writes run.json. Raises ConfigError."""
    if not resume and (out / "rows.jsonl").exists():
        raise ConfigError(f"--out: {out} holds a run already. Go on with it by --resume {out}, or choose another folder.")
    if Path(config.model).is_dir():
        from dataclasses import replace

        config = replace(config, model=str(Path(config.model).absolute()))
    out.mkdir(parents=True, exist_ok=True)
    config.save(out / "run.json")
    return config
