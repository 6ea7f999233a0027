"""Times of all providers for one call: alone, in a captured CUDA graph, with inputs rotating through a pool.

For `explain` only. Scores come from the judge, which isolates candidates and checks more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from fastkernels.core import registry, tuning
from fastkernels.core.spec import Case, OpSpec
from fk_bench.core import machine
from fk_bench.core.baselines import baselines
from fk_bench.kernels.judge.clock import roofline
from fk_bench.kernels.judge.clock.call_times import Samples
from fk_bench.kernels.judge.correctness.cases import Trial
from fk_bench.kernels.judge.correctness.errors import Expected, compare, expect
from fk_bench.kernels.judge.memory import layout

OURS = "ours/"  # prefix of the providers of our own op
REFERENCE = OURS + "reference"
TUNED = OURS + "tuned"  # the choice of dispatch for the call, by the chip's table
# The hosts' own kernels, by the names of baselines. Library kernels are the same under our op.
HOSTS: dict[str, tuple[str, ...]] = {
    "vllm": ("vllm", "fa3", "cublas", "onednn", "torch"),
    "sglang": ("sglang", "sgl_kernel", "fa3", "cublas", "onednn", "torch"),
}
LIBRARIES = ("fa3", "cublas", "onednn")
MOST = 128  # sets of inputs
ROUNDS = 7
BATCH_S = {"cuda": 1e-3, "cpu": 2e-4}  # target seconds of the shorter batch
Function = Callable[..., Any]


@dataclass(frozen=True)
class Contender:
    """One implementation of an op. kind: as in core.baseline.Baseline, or 'ours'; absent: why it cannot run here."""

    name: str
    kind: str
    make: Callable[[], Function]
    refuses: Callable[..., str | None] | None = None
    unchecked: tuple[int, ...] = ()
    absent: str | None = None


@dataclass(frozen=True)
class ProviderTime:
    """Microseconds of one call by this provider, or the reason why there are none."""

    name: str
    kind: str
    us: float | None = None
    problem: str = ""


@dataclass(frozen=True)
class Measured:
    """A call with all providers. host: the one the host runs; ours: what patching would run; best: the fastest.

    reasons  {'host' | 'ours': why the time is missing, 'check': why outputs were not checked}
    """

    all: tuple[ProviderTime, ...] = ()
    host: ProviderTime | None = None
    ours: ProviderTime | None = None
    best: ProviderTime | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)


def contenders(op: str, device: str, compilers: bool = False) -> list[Contender]:
    """Providers of an op from production and from us, including those that cannot run here. The last is plain PyTorch.

    compilers: include the reference through torch.compile, which takes seconds per shape.
    """
    offered = [b for b in baselines(op, "production", device) if b.kind != "reference"]
    found = [
        Contender(b.name, b.kind, b.make, b.supports, b.unchecked, b.available() or _no_graph(b, device))
        for b in offered
        if compilers or b.kind != "compiler"
    ]
    ours = registry.get(op).op
    if ours.key is not None and tuning.entries(op, tuning.chip_of(device)):
        found.append(Contender(TUNED, "ours", partial(_itself, ours.run)))
    for provider, absent in ours.order(device):
        made = partial(_itself, provider.fn)
        found.append(Contender(OURS + provider.name, "ours", made, provider.supports, (), absent))
    return found


def _itself(fn: Function) -> Function:
    return fn


def _no_graph(baseline: Any, device: str) -> str | None:
    return (
        None if baseline.graph or device == "cpu" else f"{baseline.name} cannot be captured in a CUDA graph"
    )


def measure(op: str, case: Case, device: str, host: str, compilers: bool = False) -> Measured:
    """Time every provider that can run the call here and whose outputs are right."""
    spec = registry.get(op)
    if device == "cpu":
        trial = Trial("random", case, lambda where, generator: spec.inputs(case, where, generator))
        if (reason := trial.gpu_only(spec)) is not None:
            return Measured(reasons={"host": reason, "ours": reason})
    try:
        with torch.inference_mode():
            timed, unchecked = time_all(spec, case, device, contenders(op, device, compilers))
    except (torch.cuda.OutOfMemoryError, MemoryError) as error:
        reason = f"its inputs do not fit in memory: {' '.join(str(error).split())[:200]}"
        return Measured(reasons={"host": reason, "ours": reason})
    if device == "cuda":
        torch.cuda.empty_cache()
    found = choose(op, host, timed)
    return replace(found, reasons={**found.reasons, "check": unchecked}) if unchecked else found


def choose(op: str, host: str, timed: Sequence[ProviderTime]) -> Measured:
    """Pick the host's provider, ours and the fastest."""
    good = {t.name: t for t in timed if t.us is not None}
    names = [n for n in HOSTS[host] if n in good and good[n].kind == "host"]
    names += [OURS + n for n in HOSTS[host] if n in LIBRARIES and OURS + n in good]
    ours = [t for t in timed if t.kind == "ours" and t.us is not None]
    reasons = {}
    if not names:
        tried = [f"{t.name}: {t.problem}" for t in timed if t.kind == "host" and t.name in HOSTS[host]]
        reasons["host"] = "; ".join(tried) or f"no known provider of {host} for {op}"
    if not ours:
        reasons["ours"] = "; ".join(f"{t.name}: {t.problem}" for t in timed if t.kind == "ours")
    return Measured(
        tuple(timed), good[names[0]] if names else None, ours[0] if ours else None,
        min(good.values(), key=lambda t: t.us or 0.0, default=None), reasons,
    )  # fmt: skip


def time_all(
    spec: OpSpec, case: Case, device: str, found: Sequence[Contender]
) -> tuple[list[ProviderTime], str]:
    """Check each contender on fresh inputs, then time all of them in interleaved rounds. Also returns why outputs were
    not checked, or ''."""
    pool, unchecked = _pool(spec, case, device), ""
    want: Expected | None = None
    try:
        want = expect(spec, case, _make(spec, case, device, 0), "op")
    except (RuntimeError, MemoryError) as error:
        unchecked = (
            f"outputs were not checked, no memory for the reference: {' '.join(str(error).split())[:200]}"
        )
    problems: dict[str, str] = {}
    batches: dict[str, Batch] = {}
    for c in found:
        if c.absent is not None:
            problems[c.name] = c.absent
        elif c.name == REFERENCE and any(name.startswith(OURS) for name in batches):
            problems[c.name] = "plain PyTorch, a fallback for calls that no other provider of ours supports"
        elif c.refuses is not None and (refused := c.refuses(*pool[0])) is not None:
            problems[c.name] = refused
        else:
            try:
                fn = c.make()
                problems[c.name] = (
                    _wrong(spec, case, device, fn, want, c.unchecked) if want is not None else ""
                )
                if not problems[c.name]:
                    batches[c.name] = Batch(fn, pool, device)
            except Exception as error:  # another version of the library, or no memory: try the next provider
                problems[c.name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    del want
    for number in range(2 * ROUNDS):
        again = [
            b for b in batches.values() if number < ROUNDS or b.unsteady
        ]  # more rounds after a disturbance
        for batch in again if number % 2 else reversed(again):
            batch.round()
    floor = _floor_us(spec, case, device)
    return [_result(c, batches.get(c.name), problems[c.name], floor) for c in found], unchecked


def _floor_us(spec: OpSpec, case: Case, device: str) -> float | None:
    gpu = roofline.peaks(machine.machine().gpu) if device == "cuda" else None
    return roofline.floor_us(spec.bytes_moved(case), spec.flops(case), case.dtype, gpu)


def _result(contender: Contender, batch: Batch | None, problem: str, floor: float | None) -> ProviderTime:
    if batch is None:
        return ProviderTime(contender.name, contender.kind, None, problem)
    found = batch.samples
    if batch.unsteady:
        scatter = f"times scatter too much: {1e6 * found.time:.1f} +- {1e6 * found.spread:.1f} us"
        return ProviderTime(contender.name, contender.kind, None, scatter)
    us = 1e6 * found.time
    problem = roofline.too_fast(us, floor)
    return ProviderTime(contender.name, contender.kind, None if problem else us, problem)


def _make(spec: OpSpec, case: Case, device: str, seed: int) -> list[Any]:
    return spec.inputs(case, device, torch.Generator(device).manual_seed(seed))


def _pool(spec: OpSpec, case: Case, device: str) -> list[list[Any]]:
    """Sets of inputs that together are twice as large as L2, so that a call reads its weights from memory. Calls with
    little traffic get MOST sets, most of which stay in L2, as in a step, where the previous call has just written them.
    """
    first = _make(spec, case, device, 1)
    if device == "cpu":
        return [first, _make(spec, case, device, 2)]
    gpu = roofline.peaks(machine.machine().gpu)
    l2 = 1e6 * gpu.l2_mb if gpu is not None else 128e6
    held = sum(t.nbytes for t in layout.tensors(first))
    wanted = min(1 + int(2 * l2 / max(spec.bytes_moved(case), 1)), MOST)
    fits = torch.cuda.mem_get_info()[0] // 4 // max(held, 1)
    return [first, *(_make(spec, case, device, s) for s in range(2, 1 + max(2, min(wanted, fits))))]


def _wrong(
    spec: OpSpec, case: Case, device: str, fn: Function, want: Expected, unchecked: tuple[int, ...]
) -> str:
    """The problem with its outputs; '' if they are right."""
    args = _make(spec, case, device, 0)
    result = fn(*args)
    values = list(result) if isinstance(result, (tuple, list)) else [result]
    got = [v for v in values if v is not None] + [args[i] for i in want.written]
    if len(got) != len(want.all()):
        return f"{len(got)} outputs instead of {len(want.all())}"
    problem = compare(spec, case, got, want, None, unchecked).problem
    return f"wrong: {problem}" if problem else ""


class Batch:
    """Timed batches of n and 2n calls of a provider, with rotating inputs."""

    def __init__(self, fn: Function, pool: list[list[Any]], device: str) -> None:
        self._fn, self._pool, self._cuda = fn, pool, device == "cuda"
        self._graph = self._capture() if self._cuda else None
        self._turns = 1
        self._run(1)
        self._turns = max(1, min(int(BATCH_S[device] / max(self._run(1), 1e-7)), 4096))
        self.samples = Samples(self._turns * len(pool))

    @property
    def unsteady(self) -> bool:
        scatters = self._cuda and self.samples.spread > 0.3 * self.samples.time
        return self.samples.time <= 0 or scatters  # CPU times are never used, steady or not

    def round(self) -> None:
        for double in (False, True):
            self.samples.add(double, self._run(self._turns * (1 + double)), None)

    def _capture(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._once()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._once()
        return graph

    def _once(self) -> None:
        for args in self._pool:
            self._fn(*args)

    def _run(self, turns: int) -> float:
        """Seconds of `turns` passes through the pool."""
        if self._graph is None:
            start = time.perf_counter()
            for _ in range(turns):
                self._once()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(turns):
            self._graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
