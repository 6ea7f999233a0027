"""The result of a profile, the same for all tools. Times are microseconds of one call of an op, or of one step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

TIMELINE = 4000  # spans of a page


@dataclass(frozen=True)
class Kernel:
    """All launches of one kernel; on a CPU, of one operator.

    time_us     of all launches together
    memory_pct, tensor_pct  device memory's bandwidth and tensor cores, against their peaks
    occupancy_pct  warps per cycle against the most that an SM holds; limit: what allows no more
    registers   of a thread; spills: instructions that access spilled registers; shared_kib: of a block
    stalls      the main reasons why warps wait
    """

    name: str
    launches: float
    time_us: float
    memory_pct: float | None = None
    tensor_pct: float | None = None
    occupancy_pct: float | None = None
    limit: str = ""
    registers: int | None = None
    spills: int | None = None
    shared_kib: float | None = None
    stalls: str = ""


@dataclass(frozen=True)
class OpTime:
    """All calls of an op in a step, and the judge's floor for them; `floor_us` is None for an op of unknown cost."""

    op: str
    calls: float
    time_us: float
    floor_us: float | None = None


@dataclass(frozen=True)
class Span:
    """A kernel or operator on the timeline, and the op that it is part of; `launches` is 0 for a later piece of one."""

    name: str
    start_us: float
    end_us: float
    op: str = ""
    launches: int = 1


@dataclass(frozen=True)
class Profile:
    """wall_us: from the first kernel's start to the last one's end; gaps: without any kernel in between."""

    tool: str
    device: str
    kernels: Sequence[Kernel] = ()
    ops: Sequence[OpTime] = ()
    spans: Sequence[Span] = field(default=(), repr=False)
    wall_us: float = 0.0
    busy_us: float = 0.0
    gaps: float = 0.0
    largest_gap_us: float = 0.0
    launches: float = 0.0

    @property
    def gaps_us(self) -> float:
        return max(0.0, self.wall_us - self.busy_us)


def profile_of(tool: str, device: str, spans: Iterable[Span], repeats: int) -> Profile:
    """Kernels by time, ops by time, and gaps of `repeats` equal calls or steps."""
    ordered = sorted(spans, key=lambda s: (s.start_us, s.end_us))
    if not ordered:
        return Profile(tool, device)
    busy, gaps, largest, reached = 0.0, 0, 0.0, ordered[0].start_us
    by_name: dict[str, list[Span]] = {}
    by_op: dict[str, list[Span]] = {}
    for span in ordered:
        if span.start_us > reached:
            gaps += 1
            largest = max(largest, span.start_us - reached)
        busy += max(0.0, span.end_us - max(span.start_us, reached))
        reached = max(reached, span.end_us)
        by_name.setdefault(span.name, []).append(span)
        by_op.setdefault(span.op, []).append(span)
    start = ordered[0].start_us
    return Profile(
        tool, device,
        sorted(
            (Kernel(n, _launches(of) / repeats, _time(of) / repeats) for n, of in by_name.items()),
            key=lambda k: -k.time_us,
        ),
        sorted((OpTime(op, 0.0, _time(of) / repeats) for op, of in by_op.items() if op), key=lambda o: -o.time_us),
        [replace(s, start_us=s.start_us - start, end_us=s.end_us - start) for s in ordered],
        (reached - start) / repeats, busy / repeats, gaps / repeats, largest, _launches(ordered) / repeats,
    )  # fmt: skip


def with_ops(found: Profile, calls: Mapping[str, float], floors: Mapping[str, float | None]) -> Profile:
    """The profile with the number of calls and the floor of each op; ops without a kernel are listed, too."""
    times = {o.op: o.time_us for o in found.ops}
    ops = [OpTime(op, n, times.get(op, 0.0), floors.get(op)) for op, n in calls.items()]
    return replace(found, ops=sorted(ops, key=lambda o: -o.time_us))


def metrics(one: Kernel | OpTime) -> dict[str, float]:
    """The numbers of a kernel or an op, for a row."""
    values = {f.name: getattr(one, f.name) for f in fields(one)}
    return {k: float(v) for k, v in values.items() if isinstance(v, (int, float))}


def _launches(of: Iterable[Span]) -> int:
    return sum(s.launches for s in of)


def _time(of: Iterable[Span]) -> float:
    return sum(s.end_us - s.start_us for s in of)
