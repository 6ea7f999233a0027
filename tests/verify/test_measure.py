"""Proposals measured against the production kernel, on the CPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastkernels.core import registry
from fastkernels.core.case import Tolerance
from fastkernels.core.dispatch import Provider
from fastkernels.core.tuning import Chip, Entry
from fastkernels.verify import measure
from fastkernels.verify.measure import Point, Ratio

CHIP = Chip("Imaginary X1", sms=7, memory_bytes_per_s=1e11, l2_bytes=1 << 14)
CPU = torch.device("cpu")


class Clock:
    """The time that kernels take here, so that a busy machine changes no result."""

    monotonic = staticmethod(time.monotonic)
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "time", CLOCK)


def after(seconds: float, change: Callable[[torch.Tensor], torch.Tensor] = lambda y: y) -> Any:
    def product(x: Any, weight: Any, bias: Any = None, **params: Any) -> torch.Tensor:
        CLOCK.now += 1e-3 + seconds
        return change(F.linear(x, weight, bias))

    return product


def refuse(*args: Any) -> str:
    return "never"


def broken(*args: Any) -> None:
    raise OSError("no compiler")


PROVIDERS = (
    Provider("usual", after(1e-3), devices=("cpu",)),
    Provider("quick", after(0), devices=("cpu",), params=({"tile": 4},)),
    Provider("slow", after(3e-3), devices=("cpu",)),
    Provider("wrong", after(0, lambda y: y * 1.1), devices=("cpu",)),
    Provider("nan", after(0, lambda y: y * float("nan")), devices=("cpu",)),
    Provider("picky", after(0), devices=("cpu",), supports=refuse),
    Provider("broken", broken, devices=("cpu",)),
    Provider("elsewhere", after(0), devices=("cuda",)),
)


@pytest.fixture
def linear() -> Iterator[Any]:
    op = registry.get("linear").op
    before = op.providers, op.key
    op.providers = PROVIDERS
    yield op
    op.providers, op.key = before


def outcome(op: Any, several: Sequence[str], seconds: float = 60.0, modules: Any = ()) -> measure.Outcome:
    asked = []

    def propose(shape: Any, sizes: Any, chip: Chip) -> Any:
        asked.append((shape, sizes, chip))
        return [(name, {"tile": 4} if name == "quick" else {}) for name in several]

    op.key = replace(op.key, propose=propose)
    point = Point("linear", (24, 16, torch.float32), (3,), modules)
    found = measure.measure([point], "r1", CPU, CHIP, seconds)
    assert asked == [((24, 16, torch.float32), (3,), CHIP)]
    return found


@pytest.mark.parametrize("loser", ["slow", "wrong", "nan", "picky", "broken"])
def test_only_a_right_and_faster_proposal_wins(linear: Any, loser: str) -> None:
    (entry,) = outcome(linear, [loser]).entries
    assert (entry.provider, entry.baseline, entry.faster) == ("usual", "usual", False)
    found = outcome(linear, [loser, "quick", "elsewhere"])
    (entry,) = found.entries
    assert (entry.provider, entry.params, entry.faster) == ("quick", {"tile": 4}, True)
    assert entry.speedup > 1.5 and 1 < entry.ci95[0] <= entry.speedup <= entry.ci95[1]
    assert entry.shape == {"N": 24, "K": 16, "dtype": "float32"} and entry.sizes == {"M": 3}
    (said,) = found.said.values()
    texts = {"slow": "0.", "wrong": "its result", "nan": "its result", "picky": "unsupported: never"}
    assert said[loser].startswith(texts.get(loser, "OSError: no compiler"))
    assert set(said) == {loser, "quick tile=4"}


class Hot:
    """A product that is fast until it has run `after` times on end."""

    def __init__(self, after: int) -> None:
        self.after, self.runs, self.at = after, 0, 0.0

    def __call__(self, x: Any, weight: Any, bias: Any = None) -> torch.Tensor:
        self.runs = self.runs + 1 if self.at == CLOCK.now else 1
        CLOCK.now += 1e-3 if self.runs < self.after else 3e-3
        self.at = CLOCK.now
        return F.linear(x, weight, bias)


@pytest.mark.parametrize(("after", "faster"), [(20, False), (10**6, True)])
def test_long_prompts_run_what_is_faster_alone(linear: Any, after: int, faster: bool) -> None:
    linear.providers = (*PROVIDERS, Provider("hot", Hot(after), devices=("cpu",)))
    linear.key = replace(linear.key, propose=lambda *args: [("hot", {})])
    for tokens, chosen in ((measure.LONG - 1, True), (measure.LONG, faster)):
        point = Point("linear", (24, 16, torch.float32), (tokens,))
        found = measure.measure([point], "r1", CPU, CHIP, 60.0)
        (entry,) = found.entries
        assert (entry.provider == "hot") == entry.faster == chosen
        (said,) = found.said.values()
        assert said["hot"].startswith("2.0") and (", alone " in said["hot"]) == (tokens == measure.LONG)


def test_the_production_kernel_is_no_proposal(linear: Any) -> None:
    found = outcome(linear, ["usual"])
    assert found.said == {"linear N=24 K=16 dtype=float32 M=3": {}} and not found.entries[0].faster


def test_an_unknown_provider_is_an_error(linear: Any) -> None:
    with pytest.raises(ValueError, match="a proposal names the provider 'other'; known: usual, quick"):
        outcome(linear, ["other"])


def test_our_engine_compares_with_what_supports_the_call(linear: Any) -> None:
    usual, quick, slow, *_ = PROVIDERS
    linear.providers = replace(usual, supports=refuse), PROVIDERS[-1], slow, quick
    linear.key = replace(linear.key, propose=lambda *_: [("quick", {"tile": 4})])
    points = [Point("linear", (24, 16, torch.float32), (3,), ())]
    (entry,) = measure.measure(points, "r1", CPU, CHIP, 60.0, own=True).entries
    assert (entry.provider, entry.baseline) == ("quick", "slow")
    (entry,) = measure.measure(points, "r1", CPU, CHIP, 60.0).entries  # a host runs its own kernel
    assert (entry.provider, entry.baseline) == ("quick", "usual")


def test_choice_of_a_table_is_proposed_first(linear: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    point = Point("linear", (24, 16, torch.float32), (4,))
    listed = Entry("linear", *point.named(), "quick", "usual", "r", {"tile": 2}, speedup=1.2, ci95=(1.1, 1.3))
    monkeypatch.setattr(measure.tuning, "entries", lambda op, chip: [listed])
    linear.key = replace(linear.key, propose=lambda *args: [("slow", {}), ("quick", {"tile": 4})])
    names = [subject.name for subject in measure.proposals(point, "cpu", CHIP)]
    assert names == ["quick tile=2", "slow", "quick tile=4"]
    linear.key = replace(linear.key, propose=lambda *args: [("slow", {}), ("quick", {"tile": 2})])
    names = [subject.name for subject in measure.proposals(point, "cpu", CHIP)]
    assert names == ["slow", "quick tile=2"]


def test_only_three_proposals_are_measured(linear: Any) -> None:
    (said,) = outcome(linear, ["slow", "wrong", "nan", "quick"]).said.values()
    assert set(said) == {"slow", "wrong", "nan"}


def test_an_error_concerns_only_its_point(linear: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(subjects: Any, calls: Any, *rest: Any) -> Any:
        if len(calls[0][0]) == 3:
            raise RuntimeError("capture failed\nand more")
        return timed(subjects, calls, *rest)

    timed = measure.interleaved
    monkeypatch.setattr(measure, "interleaved", capture)
    linear.key = replace(linear.key, propose=lambda *args: [("quick", {"tile": 4})])
    points = [Point("linear", (24, 16, torch.float32), (m,)) for m in (3, 4)]
    found = measure.measure(points, "r1", CPU, CHIP, 60.0)
    assert [(e.sizes["M"], e.provider) for e in found.entries] == [(4, "quick")]
    assert found.said[str(points[0])] == {"not measured": "RuntimeError: capture failed"}


def test_points_past_the_time_limit_have_no_entry(linear: Any) -> None:
    found = outcome(linear, ["quick"], seconds=0)
    assert not found.entries and found.stopped == "the limit of 0 s was reached"


def test_too_little_memory_stops_and_says_so(linear: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*args: Any) -> None:
        raise measure.NoRoom("1 MiB are free, and 2 MiB are needed")

    monkeypatch.setattr(measure, "leave_room", no_room)
    found = outcome(linear, ["quick"])
    assert not found.entries
    assert found.stopped == "too little free memory: 1 MiB are free, and 2 MiB are needed"


def test_points_without_room_leave_the_others(linear: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave_room(device: torch.device, needed: int) -> None:
        if needed > 2 * CHIP.l2_bytes + 10_000:
            raise measure.NoRoom("too large")

    monkeypatch.setattr(measure, "leave_room", leave_room)
    linear.key = replace(linear.key, propose=lambda *args: [("quick", {"tile": 4})])
    points = [Point("linear", (24, 16, torch.float32), (m,)) for m in (3000, 4)]
    found = measure.measure(points, "r1", CPU, CHIP, 60.0)
    assert [(e.sizes["M"], e.provider) for e in found.entries] == [(4, "quick")]
    assert found.stopped == "too little free memory: too large" and list(found.said) == [str(points[1])]


def test_a_point_that_exhausts_memory_leaves_the_others(linear: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of free memory cannot know what the values of a large case take while they are made."""

    def inputs(point: Any, *rest: Any) -> Any:
        if point.sizes == (3000,):
            raise torch.OutOfMemoryError("CUDA out of memory.\nMore")
        return made(point, *rest)

    made = measure.arguments
    monkeypatch.setattr(measure, "arguments", inputs)
    linear.key = replace(linear.key, propose=lambda *args: [("quick", {"tile": 4})])
    points = [Point("linear", (24, 16, torch.float32), (m,)) for m in (3000, 4)]
    found = measure.measure(points, "r1", CPU, CHIP, 60.0)
    assert [(e.sizes["M"], e.provider) for e in found.entries] == [(4, "quick")]
    assert found.stopped == "too little free memory: CUDA out of memory."


def test_a_host_measures_with_its_kernel_on_its_memory(linear: Any) -> None:
    def calls(point: Point, device: torch.device, generator: torch.Generator, cold: int) -> Any:
        x, weight, _ = measure.arguments(point, device, generator, 0)[0]
        return [x, weight, None], [[x, memory, None]] * 2

    def kernel(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        CLOCK.now += 1e-4
        seen.append(weight is memory)
        return F.linear(x, weight)

    memory, seen = torch.zeros(24, 16), list[bool]()
    linear.key = replace(linear.key, propose=lambda *args: [("quick", {"tile": 4})])
    live = measure.Live(calls, Provider("theirs", kernel))
    point = Point("linear", (24, 16, torch.float32), (4,), live=live)
    (entry,) = measure.measure([point], "r1", CPU, CHIP, 60.0).entries
    assert (entry.provider, entry.baseline, entry.faster) == (None, "theirs", False)
    assert seen[0] is False and all(seen[1:])  # compared on values of its own, timed on the host's memory


def test_a_point_whose_kernels_were_late_is_not_settled(linear: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    late: dict[Any, str] = {}
    monkeypatch.setattr(measure, "compiled", lambda subjects, *rest: late)
    linear.key = replace(linear.key, propose=lambda *args: [("quick", {"tile": 4}), ("slow", {})])
    point = Point("linear", (24, 16, torch.float32), (3,))
    late[point, "slow"] = measure.LATE  # the other one wins anyway
    found = measure.measure([point], "r1", CPU, CHIP, 60.0)
    assert [e.provider for e in found.entries] == ["quick"] and found.stopped is None
    late[point, "quick tile=4"] = measure.LATE
    found = measure.measure([point], "r1", CPU, CHIP, 60.0)
    assert not found.entries and not found.said and found.stopped == "not all kernels were compiled in time"


def test_clear_losers_run_in_the_first_rounds_only() -> None:
    def kernel(seconds: float) -> Callable[..., None]:
        def run() -> None:
            CLOCK.now += seconds

        return run

    def rounds(*several: float, first: int = 8) -> list[int]:
        times = measure.interleaved([kernel(s) for s in several], [[]], CPU, 15, first)
        return [len(each) for each in times]

    assert rounds(2.0, 3.0, 1.0, 1.05) == [15, 8, 15, 15]  # the host's kernel, the first one, always stays
    assert rounds(2.0, 2.3, 3.0) == [8, 8, 8]  # nothing is left to compare
    assert rounds(2.0, 3.0, first=0) == [15, 15]
    assert not measure.slower([2.0, 1.0, 2.0], [[1.0, 1.0, 1.0]])  # not in each round


def test_calls_use_the_models_weights_and_exceed_the_cache() -> None:
    modules = []
    for _ in range(2):
        modules.append(nn.Linear(16, 24))
    point = Point("linear", (24, 16, torch.float32), (3,), tuple(modules))
    calls = measure.arguments(point, CPU, torch.Generator().manual_seed(0), 1 << 14)
    assert [c[1].data_ptr() for c in calls[:2]] == [m.weight.data_ptr() for m in modules]
    assert calls[0][2] is modules[0].bias and calls[0][0].shape == (3, 16)
    size = sum(t.numel() * t.element_size() for t in calls[0])
    assert len(calls) * size >= 1 << 14 > (len(calls) - 1) * size
    assert len({t.data_ptr() for c in calls for t in c[1:]}) == 2 * len(calls)
    modules[0].skip_bias_add = True  # type: ignore[assignment]
    assert measure.arguments(point, CPU, torch.Generator(), 0)[0][2] is None


def test_interval_of_equal_kernels_contains_one() -> None:
    noise = torch.rand(2, 60, generator=torch.Generator().manual_seed(1)).add_(1).tolist()
    found = Ratio.of(*noise)
    assert found.low < 1 < found.high and found.low <= found.value <= found.high
    assert Ratio.of([1.0] * 60, [2.0] * 60) == Ratio(2.0, 2.0, 2.0)


def test_small_results_are_compared_by_their_own_size() -> None:
    limit, want = Tolerance(1e-2, 1e-2), 1e-4 * torch.randn(1000)
    assert measure.close(want * 1.005, want, limit)
    assert not measure.close(torch.zeros(1000), want, limit)
    assert not measure.close(want[:-1], want, limit)


def test_compiler_threads_use_the_current_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without an index, as `fk-bench tune` names it, is the current one."""
    used: list[Any] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(measure, "arguments", lambda *_: [[torch.ones(2)]])
    ran: list[str] = []

    def racing(x: torch.Tensor) -> None:
        ran.append(threading.current_thread().name)
        if len(ran) == 1:
            raise RuntimeError("two threads at once")

    subject = measure.Subject(Provider("triton-two", racing, devices=("cuda",)), {})
    found = measure.compiled(
        {Point("linear", (), ()): [subject]}, torch.device("cuda"), torch.Generator(), float("inf")
    )
    assert not found and used == [3]
    assert len(ran) == 2 and ran[0] != ran[1] == threading.current_thread().name  # Triton's are tried again


def test_result_more_exact_than_production_is_right() -> None:
    """FlashAttention-3 rounds weights to FP8 next to a cache in FP8: ours is compared with the reference, too."""
    point = Point("attention_decode", (4, 2, 16, 16, 0, torch.float8_e4m3fn), (2, 40))
    args = measure.arguments(point, torch.device("cpu"), torch.Generator().manual_seed(0), 0)[0]
    assert args[0].dtype == args[1].dtype == torch.float8_e4m3fn
    reference = registry.get("attention_decode").reference
    noise = torch.randn(args[0].shape, generator=torch.Generator().manual_seed(1)) * 0.05

    def subject(by: float) -> measure.Subject:
        def fn(*given: Any) -> torch.Tensor:
            found = reference(*given)
            return (found.float() + by * noise * found.float().abs().max()).to(found.dtype)

        return measure.Subject(Provider("made-up", fn), {})

    host = subject(1.0)
    assert measure.wrong(point, subject(0.0), host, args) is None
    assert measure.wrong(point, subject(-3.0), host, args) is not None
    assert measure.wrong(point, subject(0.0), subject(30.0), args) is not None  # neither is right


@pytest.mark.parametrize("other", [False, True])
def test_kernel_slower_in_longer_calls_is_not_chosen(linear: Any, other: bool) -> None:
    def short_only(x: Any, weight: Any, bias: Any = None) -> torch.Tensor:
        CLOCK.now += 5e-4 if len(x) < 5 else 5e-3
        return F.linear(x, weight, bias)

    names = ["short", *(["quick"] if other else [])]
    linear.providers = (*PROVIDERS, Provider("short", short_only, devices=("cpu",)))
    linear.key = replace(
        linear.key,
        propose=lambda *args: [(name, {"tile": 4} if name == "quick" else {}) for name in names],
        longer=lambda N, K, dtype, M: {"tokens": (64,)} if M == 3 else None,
    )
    points = [Point("linear", (24, 16, torch.float32), (m,)) for m in (3, 4)]
    found = measure.measure(points, "r1", CPU, CHIP, 60.0)
    assert [entry.provider for entry in found.entries] == ["quick" if other else "usual", "short"]
    assert [entry.longer is not None for entry in found.entries] == [other, False]
    said, at_four = found.said.values()
    assert ", longer 0." in said["short"] and "longer" not in at_four["short"]
