"""Time proposals against the production kernel, in this process, on a model's own weights.

Calls run as in a decode step: in a CUDA graph, one after the other on weights that are not in L2, each after another
small kernel. Rounds of all kernels are interleaved, so that a change of the clock concerns all of them. A step of long
prompts runs at the chip's limit of power, where the clock depends on the kernel: the fastest one is measured again
there, against the host's, each for long enough to get its own clock.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, TypeVar

import torch

from fastkernels.core import registry, tuning
from fastkernels.core.case import Case, Tolerance
from fastkernels.core.dispatch import Provider
from fastkernels.core.tuning import Chip, Entry
from fastkernels.verify.phases import Seconds, timed

log = logging.getLogger("fastkernels")
ROUNDS, CPU_ROUNDS = 60, 15
MOST_PROPOSALS, MOST_CALLS, LEAST_CALLS = 3, 96, 4
# A kernel that is SLOWER times as slow as the fastest one, in each of the first rounds, runs in no more of them
FIRST_ROUNDS, SLOWER = 8, 1.1
# Kernels of long prompts take milliseconds: after LEAST_ROUNDS, rounds end once a point has taken LONGEST_S
LEAST_ROUNDS, LONGEST_S = 20, 1.5
# Tokens from which a kernel has to be the fastest alone, too: seconds of each run, of which the first third settles the
# clock, and pairs of runs.
LONG, ALONE_S, PAIRS = 2048, 0.08, 3
COLD = 2  # the weights of a graph's calls are this many times as large as L2
COMPARED = 1 << 24  # values of two results that are compared at once
SPARE = 512 << 20  # bytes of memory that a measurement leaves free
LATE = "not compiled in time"
T = TypeVar("T")


class NoRoom(RuntimeError):
    """The device has too little free memory for a measurement."""


@dataclass(frozen=True)
class Point:
    """One shape of an op at one set of sizes, and the modules of the model that have it.

    live    the part that the host takes in the measurement
    longer  whether its calls are those of Key.longer
    """

    op: str
    shape: tuple[Any, ...]
    sizes: tuple[int, ...]
    modules: tuple[Any, ...] = field(default=(), compare=False, repr=False)
    live: Live | None = field(default=None, compare=False, repr=False)
    longer: bool = False

    @property
    def long(self) -> bool:
        """Whether it is a call of long prompts."""
        return bool(self.named()[1].get("M", 0) >= LONG)

    @property
    def dims(self) -> dict[str, Any] | None:
        """Dims of its case; None for a longer call that there is not."""
        key = registry.get(self.op).op.key
        values = dict(zip((*key.shape, *key.sizes), (*self.shape, *self.sizes), strict=True))
        found: dict[str, Any] = key.dims(**values)
        if not self.longer:
            return found
        more = None if key.longer is None else key.longer(**values)
        return None if more is None else {**found, **more}

    def named(self) -> tuple[dict[str, Any], dict[str, int]]:
        """Shape and sizes as a table has them."""
        names = registry.get(self.op).op.key.sizes
        return named_shape(self.op, self.shape), dict(zip(names, self.sizes, strict=True))

    def __str__(self) -> str:
        shape, sizes = self.named()
        return f"{self.op} " + " ".join(f"{name}={value}" for name, value in {**shape, **sizes}.items())


def named_shape(op: str, shape: Sequence[Any]) -> dict[str, Any]:
    """Values of a key's shape as a table has them."""
    names = registry.get(op).op.key.shape
    return {
        name: str(value).removeprefix("torch.") if name.endswith("dtype") else value
        for name, value in zip(names, shape, strict=True)
    }


@dataclass(frozen=True)
class Ratio:
    """Time of the production kernel over that of another: median of the rounds and its 95% interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
        """Return the ratio of paired times; the interval is between two of the sorted ratios (a sign test)."""
        found = sorted(b / a for a, b in zip(ours, theirs, strict=True))
        n = len(found)
        reach = math.ceil(0.98 * math.sqrt(n)) + 1
        middle = n / 2
        return cls(
            median(found),
            found[max(math.floor(middle - reach), 0)],
            found[min(math.ceil(middle + reach) - 1, n - 1)],
        )


@dataclass(frozen=True)
class Subject:
    """A proposal: one provider with its parameters."""

    provider: Provider
    params: Mapping[str, Any]

    @property
    def name(self) -> str:
        return " ".join([self.provider.name, *(f"{name}={value}" for name, value in self.params.items())])

    def __call__(self, *args: Any) -> Any:
        return self.provider.fn(*args, **self.params)

    def unsupported(self, args: Sequence[Any]) -> str | None:
        """Return why the provider does not support a call with these parameters, None if it does."""
        supports = self.provider.bound(self.params).supports
        return None if supports is None else supports(*args)


# calls(point, device, generator, bytes to read between two calls of one memory)
Calls = Callable[[Point, torch.device, torch.Generator, int], tuple[list[Any], list[list[Any]]] | None]


@dataclass(frozen=True)
class Live:
    """How a host that is running takes part in the measurement of a point.

    calls  makes the calls of the point on memory that the host has allocated, which kernels only read: one on which
           results are compared, and those that are timed. None, or a result of None: calls are made up for the shape
    host   the host's own code, which proposals are compared with; None: the op's provider of the same kernel
    """

    calls: Calls | None = None
    host: Provider | None = None


@dataclass
class Outcome:
    """The result of a measurement.

    entries  one for each point that was measured; production's own provider where nothing was faster, None where the
             host's kernel is no provider of the op
    said     {point: {proposal: 'RATIO (LOW to HIGH)' or why it was rejected}}
    stopped  why points were left out; None if all were measured
    seconds  of each phase
    bytes    the most device memory that PyTorch took for it, all of which is freed
    """

    entries: list[Entry] = field(default_factory=list)
    said: dict[str, dict[str, str]] = field(default_factory=dict)
    stopped: str | None = None
    seconds: Seconds = field(default_factory=dict)
    bytes: int = 0


def production(op: str, device: str) -> Provider | None:
    """The provider that stands for the host's kernel: the op's baseline; on a CPU else its first provider there.

    None where the host runs another kernel, which cannot be called here.
    """
    spec = registry.get(op)
    there = [p for p in spec.op.providers if p.unavailable(device) is None]
    usual = [p for p in there if p.name != "reference" and spec.baseline in (p.name, p.twin)]
    usual = usual or (there[:1] if device == "cpu" else [])
    return usual[0] if usual else None


def usual(op: str, device: str, own: bool) -> Provider | None:
    """The provider that proposals are compared with: production's, in our `own` engine else its first one."""
    found = production(op, device)
    if found is None and own:
        return next((p for p in registry.get(op).op.providers if p.unavailable(device) is None), None)
    return found


def host_of(point: Point, device: str, own: bool) -> Subject | None:
    """Return what proposals for a point are compared with: the code of the host's own layers, else see `usual`."""
    if point.live is not None and point.live.host is not None:
        return Subject(point.live.host, {})
    found = usual(point.op, device, own)
    return None if found is None else Subject(found, {})


def proposals(point: Point, device: str, chip: Chip) -> list[Subject]:
    """At most three available subjects for a point, and a table's choice, without the production kernel as it is."""
    op = registry.get(point.op).op
    found: list[Subject] = []
    entry = tuning.lookup(op.key, tuning.entries(point.op, chip.name)).find(point.shape, point.sizes)
    there = {p.name for p in op.providers}
    listed = [(e.provider, e.params) for e in (entry,) if e is not None and e.chosen and e.provider in there]
    proposed = list(op.key.propose(point.shape, point.sizes, chip))[:MOST_PROPOSALS]
    for name, params in [*(one for one in listed if one not in proposed), *proposed]:
        provider = next((p for p in op.providers if p.name == name), None)
        if provider is None:
            names = ", ".join(p.name for p in op.providers)
            raise ValueError(f"{point.op}: a proposal names the provider {name!r}; known: {names}")
        usual_call = provider is production(point.op, device) and not params
        if provider.unavailable(device) is None and not usual_call:
            found.append(Subject(provider, params))
    return found


def measure(
    points: Sequence[Point], run: str, device: torch.device, chip: Chip, seconds: float, rounds: int = 0,
    own: bool = False,
) -> Outcome:  # fmt: skip
    """Measure the points in order, at most for about so many seconds. All memory is freed afterwards.

    run  of the entries, a key of a table's runs
    own  for our engine: where production has no kernel for a call, the op's first that does is the one to beat
    """
    end, outcome = time.monotonic() + seconds, Outcome()
    hosts = {p: host for p in points if (host := host_of(p, device.type, own)) is not None}
    points = list(hosts)
    rounds = rounds or (ROUNDS if device.type == "cuda" else CPU_ROUNDS)
    subjects = {point: proposals(point, device.type, chip) for point in points}
    generator = torch.Generator(device).manual_seed(0)
    before = reserved(device)
    with torch.inference_mode():
        try:
            with timed(outcome.seconds, "compile kernels"):
                failed = compiled(subjects, device, generator, time.monotonic() + 0.8 * seconds)
            with timed(outcome.seconds, "time proposals"):
                for point, found in subjects.items():
                    if time.monotonic() > end:
                        outcome.stopped = f"the limit of {seconds:.0f} s was reached"
                        break
                    try:
                        host = hosts[point]
                        _measure_point(
                            point, host, found, failed, run, device, chip, generator, rounds, outcome, own
                        )
                    except (NoRoom, torch.OutOfMemoryError) as error:  # smaller points may fit
                        outcome.stopped = f"too little free memory: {str(error).splitlines()[0]}"
                    except Exception as error:  # of a kernel or of a capture: the point stays with the host
                        text = f"{type(error).__name__}: {error}".splitlines()[0]
                        outcome.said[str(point)] = {"not measured": text}
                        log.warning("%s is not measured and stays with the host: %s", point, text)
                    finally:
                        outcome.bytes = max(outcome.bytes, reserved(device) - before)
        finally:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                gc.collect()
                torch.cuda.empty_cache()
            else:
                trim_heap()
    return outcome


def reserved(device: torch.device) -> int:
    """Bytes of device memory that PyTorch holds; 0 on a CPU, where it holds none for later."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def trim_heap() -> None:
    """Return free memory of the heap to the system: hosts size their caches by what the process holds (glibc only)."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def _measure_point(
    point: Point, host: Subject, found: list[Subject], failed: dict[tuple[Point, str], str], run: str,
    device: torch.device, chip: Chip, generator: torch.Generator, rounds: int, outcome: Outcome, own: bool,
) -> None:  # fmt: skip
    said: dict[str, str] = {}
    right: list[Subject] = []
    check: list[Any] = []
    calls: list[list[Any]] = []
    if found:
        check, calls = checked_and_timed(point, device, generator, COLD * chip.l2_bytes)
    if own and calls and (point.live is None or point.live.host is None):
        # Our engine runs another kernel where production's does not support the call.
        every = host.provider, *registry.get(point.op).op.providers
        there = (p for p in every if p.unavailable(device.type) is None)
        host = Subject(next(p for p in there if p.supports is None or p.supports(*check) is None), {})
    for subject in found:
        reason = failed.get((point, subject.name)) or wrong(point, subject, host, check)
        if reason is None:
            right.append(subject)
        else:
            said[subject.name] = reason
    best, ratio = host, Ratio(1.0, 1.0, 1.0)
    longer: float | None = None
    faster: list[tuple[Subject, Ratio]] = []
    if right:
        most = min(rounds, LEAST_ROUNDS) if point.long else rounds
        times = interleaved([host, *right], calls, device, most, min(FIRST_ROUNDS, rounds))
        for subject, ours in zip(right, times[1:], strict=True):
            here = Ratio.of(ours, times[0][: len(ours)])
            said[subject.name] = f"{here.value:.3f} ({here.low:.3f} to {here.high:.3f})"
            if here.low > 1:
                faster.append((subject, here))
    for subject, here in sorted(faster, key=lambda one: -one[1].value):
        slower, at_longer, note = _slower_when_longer(point, host, subject, device, generator, chip, rounds)
        said[subject.name] += note
        if not slower:
            best, ratio, longer = subject, here, at_longer
            break
    if best is not host and point.long:
        ratio = alone(host, best, calls, device)
        said[best.name] += f", alone {ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
        if ratio.low <= 1:
            best, ratio = host, Ratio(1.0, 1.0, 1.0)
    if best is host and LATE in said.values():  # the next start measures it
        outcome.stopped = "not all kernels were compiled in time"
        return
    shape, sizes = point.named()
    low, high = round(ratio.low, 4), round(ratio.high, 4)
    outcome.said[str(point)] = said
    # The host's code may be none of the op's providers.
    name = best.provider.name if best.provider in registry.get(point.op).op.providers else None
    outcome.entries.append(
        Entry(point.op, shape, sizes, name, host.provider.name, run, dict(best.params),
              round(ratio.value, 4), (low, high), None if best is host else longer, "verified on this chip")
    )  # fmt: skip


def _slower_when_longer(
    point: Point, host: Subject, subject: Subject, device: torch.device, generator: torch.Generator, chip: Chip,
    rounds: int,
) -> tuple[bool, float | None, str]:  # fmt: skip
    """Whether a proposal is slower than the host's kernel in longer calls of the point, the ratio, and a note of it.

    Without room for such calls it is not, as its op has proposed it for them.
    """
    longer = replace(point, longer=True)
    if longer.dims is None:
        return False, None, ""
    try:
        calls = checked_and_timed(longer, device, generator, COLD * chip.l2_bytes)[1]
        theirs, ours = interleaved([host, subject], calls, device, min(rounds, LEAST_ROUNDS))
    except (NoRoom, torch.OutOfMemoryError) as error:
        return False, None, f", longer: too little free memory: {str(error).splitlines()[0]}"
    found = Ratio.of(ours, theirs)
    return (
        found.high < 1,
        round(found.value, 4),
        f", longer {found.value:.3f} ({found.low:.3f} to {found.high:.3f})",
    )


def checked_and_timed(
    point: Point, device: torch.device, generator: torch.Generator, cold_bytes: int
) -> tuple[list[Any], list[list[Any]]]:
    """A call on which results are compared, and the calls that are timed. Raises NoRoom."""
    makes = None if point.live is None else point.live.calls
    made = None if makes is None else makes(point, device, generator, cold_bytes)
    if made is None:
        calls = arguments(point, device, generator, cold_bytes)
        return calls[0], calls
    return made


def several(cold_bytes: int, read: int) -> int:
    """The number of calls that are timed in turn, if each reads so many bytes: until the first one's are cold."""
    return min(max(-(-cold_bytes // max(read, 1)), LEAST_CALLS), MOST_CALLS) if cold_bytes else 1


def arguments(
    point: Point, device: torch.device, generator: torch.Generator, cold_bytes: int
) -> list[list[Any]]:
    """Calls of a point whose weights together have at least `cold_bytes`: the model's own, and then copies of them.

    Where one call reads more than that, all are the same call. Raises NoRoom.
    """
    spec, case = registry.get(point.op), case_of(point)
    key = spec.op.key
    values = dict(zip((*key.shape, *key.sizes), (*point.shape, *point.sizes), strict=True))
    scratch = key.scratch(**values) if key.scratch is not None else 0
    leave_room(device, cold_bytes + spec.bytes_moved(case) + scratch)
    made = spec.inputs(case, device.type if device.index is None else str(device), generator)
    own = [key.own(m, made) for m in point.modules] if key.own is not None else []
    memory = {
        tuple(t.data_ptr() for t in call if isinstance(t, torch.Tensor)): call for call in own or [made]
    }
    calls = list(memory.values())  # each on memory of its own
    size = sum(t.numel() * t.element_size() for t in calls[0] if isinstance(t, torch.Tensor))
    count = several(cold_bytes, size)
    for i in range(count - len(calls)):
        if size >= cold_bytes:
            calls.append(calls[i])
        else:
            calls.append([t.clone() if isinstance(t, torch.Tensor) else t for t in calls[i]])
    return calls[:count]


def case_of(point: Point) -> Case:
    """The case that calls of a point are."""
    spec = registry.get(point.op)
    dims, shape = point.dims, point.named()[0]
    if dims is None:
        raise ValueError(f"{point} has no longer calls")
    return Case("verified", dims, str(shape.get("dtype", spec.cases[0].dtype)))


def leave_room(device: torch.device, needed: int, spare: int = SPARE) -> None:
    """Raise NoRoom unless a measurement can allocate so many bytes. The pools of CUDA graphs do not count as free."""
    if device.type != "cuda":
        return
    needed += spare
    if torch.cuda.mem_get_info(device)[0] < needed:
        torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    if free < needed:
        raise NoRoom(f"{free >> 20} MiB are free, and {needed >> 20} MiB are needed")


def wrong(point: Point, subject: Subject, host: Subject, args: list[Any]) -> str | None:
    """Why a proposal cannot take the place of the host's kernel here; None if it computes the same."""
    if (reason := subject.unsupported(args)) is not None:
        return f"unsupported: {reason}"
    got, want = subject(*args), host(*args)
    spec = registry.get(point.op)
    limit = spec.tolerance_for(case_of(point), want.dtype)
    if close(got, want, limit) or _as_exact(spec, got, want, args):
        return None
    return "its result differs from the production kernel's"


def _as_exact(spec: Any, got: torch.Tensor, want: torch.Tensor, args: list[Any]) -> bool:
    """Whether a result is as near to the reference as production's, whose kernel may round more.

    FlashAttention-3 rounds the weights of an attention to FP8 if the cache is in FP8.
    """
    if not any(isinstance(t, torch.Tensor) and t.dtype == torch.float8_e4m3fn for t in args):
        return False
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    try:
        exact = spec.reference(*args).float()
    except torch.OutOfMemoryError:
        return False
    ours, theirs = ((result.float() - exact).abs().max() for result in (got, want))
    return bool(ours <= theirs) and bool(theirs <= 0.5 * exact.abs().max())


def close(got: torch.Tensor, want: torch.Tensor, limit: Tolerance) -> bool:
    """Whether two results agree: the absolute tolerance is for values of about 1, and these may be smaller."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    if not want.numel():
        return True
    parts = [
        t.reshape(-1).split(COMPARED) for t in (got, want)
    ]  # a float32 copy of a prompt's result is large
    squares = sum(float(b.float().pow(2).sum(dtype=torch.float64)) for b in parts[1])
    scale = min((squares / want.numel()) ** 0.5, 1.0)
    return all(
        bool(((a.float() - b.float()).abs() <= limit.atol * scale + limit.rtol * b.float().abs()).all())
        for a, b in zip(*parts, strict=True)
    )


# -- compiling


def first_and_others(
    points: Mapping[Point, Sequence[T]], name: Callable[[T], str]
) -> tuple[list[tuple[Point, list[T]]], list[tuple[Point, list[T]]]]:
    """The first point of each proposal of an op, and its other points, which mostly need the same kernels.

    Kernels are compiled in this order, so that processes or threads neither compile a kernel twice nor wait for it.
    """
    first, others, seen = [], [], set[tuple[str, str]]()
    for point, found in points.items():
        new = [one for one in found if (point.op, name(one)) not in seen]
        seen |= {(point.op, name(one)) for one in new}
        first.append((point, new))
        others.append((point, [one for one in found if one not in new]))
    return [part for part in first if part[1]], [part for part in others if part[1]]


def compiled(
    subjects: Mapping[Point, list[Subject]], device: torch.device, generator: torch.Generator, end: float
) -> dict[tuple[Point, str], str]:
    """Run every proposal once in threads until the time `end`, so that its kernel is compiled.

    Returns {(point, proposal): why it has no kernel}. NVRTC, Triton's assembler and most of its compiler work without
    Python's lock. A kernel of Triton that failed is tried again here, alone.
    """
    failed: dict[tuple[Point, str], str] = {}
    threads = min(os.cpu_count() or 1, 16)
    futures: dict[Future[str | None], tuple[Point, Subject]] = {}

    def one(subject: Subject, args: list[Any]) -> str | None:
        if time.monotonic() > end:
            return LATE
        try:
            with torch.inference_mode():
                if subject.unsupported(args) is None:
                    subject(*args)
        except torch.OutOfMemoryError:  # says nothing about the kernel
            return None
        except Exception as error:  # of a compiler, of a library
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return None

    current = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index

    def start() -> None:
        """Give a thread the device's context, which launches of the driver's API need."""
        if device.type == "cuda":
            torch.cuda.set_device(current)
            torch.cuda.mem_get_info(current)

    with ThreadPoolExecutor(threads if device.type == "cuda" else 1, initializer=start) as pool:
        first, others = first_and_others(subjects, lambda subject: subject.name)
        for point, found in (*first, *others):
            try:
                inputs = _inputs(point, device, generator, futures)
            except (NoRoom, torch.OutOfMemoryError):  # the measurement needs more, and says so
                continue
            for subject in found:
                futures[pool.submit(one, subject, inputs)] = point, subject
        wait(futures)
    for future, (point, subject) in futures.items():
        reason = future.result()
        if reason is not None and "triton" in subject.provider.name and device.type == "cuda":
            with suppress(NoRoom, torch.OutOfMemoryError):
                reason = one(subject, checked_and_timed(point, device, generator, 0)[0])
        if reason is not None:
            failed[point, subject.name] = reason
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return failed


def _inputs(
    point: Point, device: torch.device, generator: torch.Generator, running: Iterable[Future[Any]]
) -> list[Any]:
    """The arguments of a point. Where the inputs of running calls take the room, they are awaited. Raises NoRoom."""
    try:
        return checked_and_timed(point, device, generator, 0)[0]
    except (NoRoom, torch.OutOfMemoryError):
        wait(running)
    return checked_and_timed(point, device, generator, 0)[0]


# -- timing


def interleaved(
    subjects: Sequence[Callable[..., Any]], calls: Sequence[list[Any]], device: torch.device, rounds: int,
    first: int = 0,
) -> list[list[float]]:  # fmt: skip
    """Seconds of all calls together, by subject and round. The order of the subjects rotates from round to round.

    first  the number of rounds after which only the first subject and those go on that may be the fastest; 0: all do
    """
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    runs = [_replay(subject, calls, device, pool) for subject in subjects]
    times: list[list[float]] = [[] for _ in subjects]
    left, spent = list(range(len(runs))), 0.0
    for i in range(rounds):
        if i >= LEAST_ROUNDS and spent > LONGEST_S:
            break
        if i and i == first:
            left = [0, *(which for which in left[1:] if not slower(times[which], times))]
            if len(left) == 1:
                break
        order = [left[(i + j) % len(left)] for j in range(len(left))]
        for which, seconds in _round(runs, order, device):
            times[which].append(seconds)
            spent += seconds
    return times


def alone(
    host: Callable[..., Any], best: Callable[..., Any], calls: Sequence[list[Any]], device: torch.device
) -> Ratio:
    """Compare two kernels that run for ALONE_S each, in pairs of which every other one is turned around."""
    pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
    runs = [_replay(subject, calls, device, pool) for subject in (host, best)]
    times: list[list[float]] = [[], []]
    for pair in range(PAIRS):
        for which in (pair % 2, 1 - pair % 2):
            times[which].append(_settled(runs[which], device))
    return Ratio.of(times[1], times[0])


def _settled(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a run that is repeated until the clock has settled."""
    one = dict(_round([run], [0], device))[0]
    count = max(round(ALONE_S / max(one, 1e-6)), 3)
    first, rest = [run] * (count // 3), [run] * (count - count // 3)
    if device.type != "cuda":
        for each in first:
            each()
        begin = time.perf_counter()
        for each in rest:
            each()
        return (time.perf_counter() - begin) / len(rest)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for each in first:
        each()
    marks[0].record()
    for each in rest:
        each()
    marks[1].record()
    torch.cuda.synchronize(device)
    return 1e-3 * float(marks[0].elapsed_time(marks[1])) / len(rest)


def slower(ours: Sequence[float], every: Sequence[Sequence[float]]) -> bool:
    """Whether a kernel cannot be the fastest: in each of the rounds, another one was clearly faster."""
    best = min(every, key=median)
    return all(mine > SLOWER * other for mine, other in zip(ours, best, strict=True))


def _replay(
    subject: Callable[..., Any], calls: Sequence[list[Any]], device: torch.device, pool: Any
) -> Callable[[], None]:
    """Make one run of all calls: on a GPU the replay of a graph."""
    if device.type != "cuda":

        def run() -> None:
            for args in calls:
                subject(*args)

        return run
    between = torch.zeros(
        4096, device=device
    )  # for a small kernel between the calls, as norms are in a model
    stream, graph = _stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        subject(*calls[0])  # libraries allocate their workspaces outside of the graph
    torch.cuda.synchronize(device)
    # torch.cuda.graph would collect garbage, which takes long in a host's process.
    with torch.cuda.stream(stream):
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            for args in calls:
                between.add_(1)
                subject(*args)
        finally:
            graph.capture_end()
    torch.cuda.synchronize(device)

    def replay(kept: torch.Tensor = between) -> None:  # the graph writes to it
        graph.replay()

    replay()
    torch.cuda.synchronize(device)
    return replay


_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def _stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)
    return _STREAMS[device]


def _round(
    runs: Sequence[Callable[[], Any]], order: Sequence[int], device: torch.device
) -> Iterator[tuple[int, float]]:
    if device.type != "cuda":
        for which in order:
            begin = time.perf_counter()
            runs[which]()
            yield which, time.perf_counter() - begin
        return
    marks = {which: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for which in order}
    runs[order[0]]()  # not measured: the GPU is busy with it while the next ones are queued
    for which in order:
        marks[which][0].record()
        runs[which]()
        marks[which][1].record()
    torch.cuda.synchronize(device)
    for which in order:
        yield which, 1e-3 * marks[which][0].elapsed_time(marks[which][1])


@contextmanager
def small_workspaces(release: bool) -> Iterator[None]:
    """With `release`, free cuBLAS's workspaces afterwards: a host that profiles its memory then finds none of ours.

    Only before any CUDA graph exists, since graphs refer to them.
    """
    try:
        yield
    finally:
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if release and clear is not None and torch.cuda.is_available():
            clear()
            torch.cuda.empty_cache()
