"""Where our engine's time goes at many requests, step by step, without a server. By hand, on a GPU.

    python bench/scenarios/engine_trace.py --out rows.jsonl [--loads 64x512x128,256x1024x128] [--budget 8192]

Llama-3.1-8B's shapes, random weights, greedy. Each load (requests x prompt x output tokens) comes at once, in each of
WAYS, and again one by one through AsyncLLM, whose coroutines read deltas. A row of kind `load` has shares of the wall
time: `busy` is the device's, from a step's first operation to its last; `gap` from one step's last to the next one's
first; `late` counts steps whose launch began when the device had nothing left to do. Steps are eager, or graphs (mixed,
decode); `steps` in the case lists every one, in COLUMNS. Rows of kind `kernel` are of steps under torch's profiler,
full ones with decodes, and decodes alone; `idle_us` there is the time in which no kernel ran.
--device cpu --quick runs a tiny model and tiny loads: its times mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from decode_step import llama_folder
from graph_clock import Run

from fastkernels import SamplingParams
from fastkernels.engine.async_llm import AsyncLLM
from fastkernels.engine.config import EngineConfig
from fastkernels.engine.execution.attention import ops
from fastkernels.engine.execution.step import Pending, StepInput, StepOutput
from fastkernels.engine.llm_engine import LLMEngine
from fastkernels.engine.sampling.sampling_params import RequestOutputKind
from fastkernels.engine.scheduling import scheduler

COLUMNS = (
    "kind", "tokens", "rows", "decodes", "late", "gap_ms", "gpu_ms", "schedule_ms", "launch_ms", "wait_ms", "rest_ms",
)  # fmt: skip
KINDS = ("eager", "mixed", "decode")
Load = tuple[int, int, int]  # requests, tokens of a prompt, tokens of an output
AS_IT_IS = "as it is"
# What is changed: of which module, or of the graphs if there are some
WAYS: dict[str, tuple[Any, str, Any]] = {
    AS_IT_IS: (scheduler, "PARTS", scheduler.PARTS),
    "full steps": (scheduler, "LEAST_TOKENS", 1 << 30),
    "attention in one call": (ops, "DECODES_APART", 1 << 30),
    "no graph over 512": (None, "_mixed", 512),
}


def make_config(options: argparse.Namespace, budget: int) -> EngineConfig:
    folder = llama_folder(options.quick, options.model_len)
    return EngineConfig(
        str(folder), load_format="dummy", skip_tokenizer_init=True, device=options.device,
        max_num_batched_tokens=budget, max_model_len=options.model_len, async_scheduling=True,
    )  # fmt: skip


class Stamp:
    """A moment of the device's stream; on a CPU, of the clock."""

    def __init__(self, cuda: bool) -> None:
        self.event = torch.cuda.Event(enable_timing=True) if cuda else None
        self.at = time.perf_counter()
        if self.event is not None:
            self.event.record()

    def since(self, before: Stamp) -> float:
        """Milliseconds, once both have passed."""
        if self.event is None or before.event is None:
            return 1e3 * (self.at - before.at)
        return before.event.elapsed_time(self.event)

    def passed(self) -> bool:
        return self.event is None or self.event.query()


@dataclass
class Record:
    """A step: what it was, its stamps, and milliseconds of the CPU."""

    kind: str
    step: StepInput
    late: bool
    first: Stamp
    last: Stamp
    launch: float


@dataclass
class Tracer:
    """Wraps an engine's parts. A turn of the loop launches a step and collects the one before."""

    engine: LLMEngine
    cuda: bool
    records: list[Record] = field(default_factory=list)
    turns: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        executor, planner = self.engine.executor, self.engine.scheduler
        self.engine.blocks.reset_cache()
        self._launch, self._schedule, self._step = executor.launch, planner.schedule, self.engine.step
        executor.launch, planner.schedule = self.launch, self.schedule  # type: ignore[method-assign]
        self.engine.step = self.step  # type: ignore[method-assign]

    def close(self) -> None:
        """Finish the step under way, and take the wraps off."""
        while self.engine.has_unfinished_requests():
            self.engine.step()
        del self.engine.step, self.engine.executor.launch, self.engine.scheduler.schedule

    def launch(self, step: StepInput) -> Pending:
        graphs = self.engine.runner.graphs
        before = dict(graphs.replays) if graphs is not None else {}
        late = not self.records or self.records[-1].last.passed()
        first, start = Stamp(self.cuda), time.perf_counter()
        pending = self._launch(step)
        took, last = 1e3 * (time.perf_counter() - start), Stamp(self.cuda)
        kinds = [k for k, n in before.items() if graphs is not None and graphs.replays[k] > n]
        self.records.append(Record(kinds[0] if kinds else "eager", step, late, first, last, took))
        self.turns[-1]["launch"] = took
        return _Waited(pending, self.turns)

    def schedule(self) -> Any:
        start = time.perf_counter()
        batch = self._schedule()
        self.turns[-1]["schedule"] = 1e3 * (time.perf_counter() - start)
        return batch

    def step(self) -> Any:
        turn = {"schedule": 0.0, "launch": 0.0, "wait": 0.0}
        self.turns.append(turn)
        start = time.perf_counter()
        found = self._step()
        turn["rest"] = 1e3 * (time.perf_counter() - start) - sum(turn.values())
        return found

    def table(self) -> list[list[Any]]:
        """Steps in COLUMNS. A step's CPU times are of the turn that launched it: what it collects is another's."""
        turns = [t for t in self.turns if t["launch"]]
        rows, before = [], None
        for record, turn in zip(self.records, turns, strict=True):
            gap = 0.0 if before is None else record.first.since(before.last)
            s, gpu, before = record.step, record.last.since(record.first), record
            times = (gap, gpu, turn["schedule"], record.launch, turn["wait"], turn["rest"])
            shape = (len(s.input_ids), len(s.slots), s.num_decodes, int(record.late))
            rows.append([record.kind, *shape, *(round(t, 3) for t in times)])
        return rows


class _Waited:
    def __init__(self, pending: Pending, turns: list[dict[str, float]]) -> None:
        self._pending, self._turns = pending, turns

    def result(self) -> StepOutput:
        start = time.perf_counter()
        found = self._pending.result()
        self._turns[-1]["wait"] = 1e3 * (time.perf_counter() - start)
        return found


@contextlib.contextmanager
def in_way(engine: LLMEngine, way: str) -> Iterator[None]:
    holder, name, value = WAYS[way]
    if holder is None:
        holder = engine.runner.graphs
        value = [size for size in getattr(holder, name, ()) if size <= value]
    old = getattr(holder, name, None)
    if holder is not None:
        setattr(holder, name, value)
    try:
        yield
    finally:
        if holder is not None:
            setattr(holder, name, old)


def sizes(text: str) -> Load:
    count, prompt, output = (int(n) for n in text.split("x"))
    return count, prompt, output


def requests(load: Load, seed: int, vocab: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, vocab) for _ in range(load[1])] for _ in range(load[0])]


def at_once(engine: LLMEngine, load: Load, prompts: list[list[int]]) -> tuple[list[float], float]:
    """(seconds to each first token, seconds in all). All are queued before the first step."""
    params = SamplingParams(
        temperature=0, ignore_eos=True, max_tokens=load[2], output_kind=RequestOutputKind.FINAL_ONLY
    )
    firsts: list[float] = []
    begin = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    while engine.has_unfinished_requests():
        engine.step()
        firsts += engine.take_stats().ttft
    return firsts, time.perf_counter() - begin


async def one_by_one(llm: AsyncLLM, load: Load, prompts: list[list[int]]) -> tuple[list[float], float]:
    """The same by coroutines that read deltas, as the server's do. Times are where these have the tokens."""
    params = SamplingParams(
        temperature=0, ignore_eos=True, max_tokens=load[2], output_kind=RequestOutputKind.DELTA
    )
    firsts: list[float] = []
    begin = time.perf_counter()

    async def one(i: int) -> None:
        first = True
        async for _ in llm.generate(prompts[i], params, str(i)):
            if first:
                firsts.append(time.perf_counter() - begin)
            first = False

    await asyncio.gather(*(one(i) for i in range(len(prompts))))
    return firsts, time.perf_counter() - begin


def report(run: Run, how: str, case: dict[str, Any], load: Load, tracer: Tracer,
           firsts: list[float], seconds: float) -> None:  # fmt: skip
    if run.cuda:
        torch.cuda.synchronize()
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in tracer.table()]
    total, metrics = 1e3 * seconds, {}
    for kind in KINDS:
        of = [r for r in rows if r["kind"] == kind]
        if of:
            ms, tokens = sum(r["gpu_ms"] for r in of), sum(r["tokens"] for r in of)
            metrics |= {
                f"{kind}_steps": len(of), f"{kind}_share": ms / total, f"{kind}_ms_per_1k_tokens": 1e3 * ms / tokens,
                f"{kind}_ms_p50": statistics.median(r["gpu_ms"] for r in of),
                f"{kind}_late": sum(r["late"] for r in of), f"{kind}_gap_ms": sum(r["gap_ms"] for r in of),
                f"{kind}_launch_ms_p50": statistics.median(r["launch_ms"] for r in of),
            }  # fmt: skip
    sums = {c: sum(r[c] for r in rows) / total for c in COLUMNS[5:]}
    firsts = sorted(1e3 * f for f in firsts)
    right = len(firsts) == load[0]
    run.row(
        "load", how, {**case, "columns": COLUMNS, "steps": tracer.table()},
        "" if right else f"{len(firsts)} first tokens of {load[0]} requests", quiet=True,
        ttft_ms_p50=statistics.median(firsts), ttft_ms_max=firsts[-1], ttft_ms_min=firsts[0], seconds=seconds,
        output_tokens_per_s=load[0] * load[2] / seconds, steps=len(rows), busy=sums["gpu_ms"], gap=sums["gap_ms"],
        cpu_schedule=sums["schedule_ms"], cpu_launch=sums["launch_ms"], cpu_wait=sums["wait_ms"],
        cpu_rest=sums["rest_ms"], **metrics,
    )  # fmt: skip
    said = {
        "s": seconds,
        "busy": sums["gpu_ms"],
        "gap": sums["gap_ms"],
        "ttft_p50": statistics.median(firsts),
    }
    words = " ".join(f"{k}={v:.4g}" for k, v in {**said, **metrics}.items())
    run.summary.append(f"{how:<11} {case['load']:<13} {case['way']}: {words}")
    print(run.summary[-1], flush=True)


def kernels(run: Run, engine: LLMEngine, load: Load, name: str, when: Callable[[StepInput], bool]) -> None:
    """Rows of what runs in a few steps after the first for which `when` is true: us and launches a step."""
    engine.blocks.reset_cache()
    seen: list[StepInput] = []
    launch = engine.executor.launch

    def watched(step: StepInput) -> Pending:
        seen.append(step)
        return launch(step)

    engine.executor.launch = watched  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=load[2])
    for i, prompt in enumerate(requests(load, 99, engine.hf_config.vocab_size)):
        engine.add_request(f"p{i}", prompt, params)
    while engine.has_unfinished_requests() and not (seen and when(seen[-1])):
        engine.step()
    torch.cuda.synchronize()
    before, steps = len(seen), 4
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    engine.abort_all()
    engine.executor.launch = launch  # type: ignore[method-assign]
    steps = len(seen) - before
    on_device = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((e.time_range.start, e.time_range.end) for e in on_device)
    if not steps or not spans:
        run.row("kernel", "all", {"steps": name}, "no such step came", "skipped")
        return
    idle, end = 0.0, spans[0][0]
    for start, stop in spans:
        idle, end = idle + max(0.0, start - end), max(end, stop)
    tokens = [len(s.input_ids) for s in seen[before:]]
    case = {"steps": name, "tokens": tokens, "decodes": [s.num_decodes for s in seen[before:]]}
    run.row(
        "kernel",
        "all",
        case,
        us=(end - spans[0][0]) / steps,
        idle_us=idle / steps,
        launches=len(spans) / steps,
    )
    for found in sorted(profile.key_averages(), key=lambda e: -e.device_time_total)[:24]:
        if found.device_time_total:
            us = found.device_time_total / steps
            run.row("kernel", found.key[:100], {"steps": name}, launches=found.count / steps, us=us)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--loads", default="64x512x128,32x512x8,1x600x8,1x1000x8,8x600x8,256x1024x128")
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a step")
    parser.add_argument("--model-len", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="a tiny model and tiny loads")
    options = parser.parse_args()
    run = Run("engine_trace", "engine", options)
    loads = [sizes(load) for load in options.loads.split(",")]
    if options.quick:
        options.budget, loads = 512, [(8, 64, 12), (16, 100, 8)]
    largest = max(loads, key=lambda load: load[0] * (load[1] + load[2]))
    llm = AsyncLLM(make_config(options, options.budget))
    engine = llm.engine
    for seed, load in enumerate([largest, *loads]):  # the first is not counted
        todo = [("at once", way) for way in WAYS]
        for how, way in [*todo, ("one by one", AS_IT_IS)] if seed else todo[:1]:
            case = {"load": "x".join(map(str, load)), "budget": options.budget, "way": way}
            if run.left() < 10 and seed:
                run.row("load", how, case, "out of time", "skipped")
                continue
            prompts = requests(load, seed, engine.hf_config.vocab_size)
            tracer = llm.call(partial(Tracer, engine, run.cuda)).result()
            with in_way(engine, way):
                if how == "at once":
                    firsts, seconds = llm.call(partial(at_once, engine, load, prompts)).result()
                else:
                    firsts, seconds = asyncio.run(one_by_one(llm, load, prompts))
                llm.call(tracer.close).result()
            if seed:
                report(run, how, case, load, tracer, firsts, seconds)
    if run.cuda:
        half, all_decode = largest[0] // 2, (largest[0], largest[1], 2 * largest[2])
        for load, way, name, when in (
            (largest, AS_IT_IS, "full, half decode", lambda s: s.num_decodes >= half),
            (largest, "attention in one call", "the same, one call", lambda s: s.num_decodes >= half),
            (
                all_decode,
                AS_IT_IS,
                "decodes alone",
                lambda s: s.num_decodes == len(s.input_ids) == largest[0],
            ),
        ):
            with in_way(engine, way):
                llm.call(partial(kernels, run, engine, load, name, when)).result()
    print("\n".join(run.summary))
    llm.shutdown()
    raise SystemExit(1 if run.wrong else 0)


if __name__ == "__main__":
    main()
