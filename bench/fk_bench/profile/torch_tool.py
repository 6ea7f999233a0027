"""torch's profiler: works everywhere, also without a GPU, and knows no hardware counters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from fk_bench.profile.data import Profile, Span, profile_of, with_ops
from fk_bench.profile.target import Target, op_of, op_ranges, prepare


def run(target: Target) -> Profile:
    """Profile the target in this process. On a CPU, operators, without those inside them, stand for kernels."""
    from torch.profiler import ProfilerActivity, profile, record_function

    call = prepare(target)
    cuda = target.device == "cuda"
    open_ranges: list[Any] = []

    def enter(name: str) -> None:
        open_ranges.append(record_function(name).__enter__())

    def leave() -> None:
        open_ranges.pop().__exit__(None, None, None)

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with op_ranges(enter, leave) as calls, profile(activities=activities) as found:
        for _ in range(target.repeats):
            call()
        if cuda:
            torch.cuda.synchronize()
    events = [e for e in found.events() or [] if e.device_type == torch.autograd.DeviceType.CPU]
    owners = {e.id: _op_around(e) for e in events}
    if cuda:
        spans = list(device_spans(found.profiler.kineto_results.events(), owners))  # type: ignore[union-attr]
    else:
        spans = [piece for e in events for piece in own_time(e, owners[e.id])]
    made = profile_of("torch", target.device, spans, target.repeats)
    return with_ops(made, {op: n / target.repeats for op, n in calls.items()}, {})


def device_spans(events: Iterable[Any], owners: Mapping[int, str]) -> Iterator[Span]:
    """Kernels and copies of Kineto's events. owners: op by the id of the operator that launched them."""
    for event in events:
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            start = event.start_ns() / 1e3
            op = owners.get(event.linked_correlation_id(), "")
            yield Span(event.name(), start, start + event.duration_ns() / 1e3, op)


def own_time(event: Any, op: str) -> Iterator[Span]:
    """The pieces of an operator's time in which no operator inside it runs."""
    reached, first = event.time_range.start, 1
    inside = sorted((c.time_range.start, c.time_range.end) for c in event.cpu_children)
    for start, end in [*inside, (event.time_range.end, event.time_range.end)]:
        if start > reached:
            yield Span(event.name, reached, start, op, first)
            first = 0
        reached = max(reached, end)


def _op_around(event: Any) -> str:
    """The op in whose range an operator is; '' for none."""
    while event is not None:
        if op := op_of(event.name):
            return op
        event = event.cpu_parent
    return ""
