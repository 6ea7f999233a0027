"""One case: both sides are set up for it, checked against the oracle, and timed batch by batch."""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fastkernels.core.spec import OpSpec
from fk_bench.kernels.judge.clock.timing import Samples
from fk_bench.kernels.judge.correctness.cases import Trial
from fk_bench.kernels.judge.correctness.errors import Errors, compare, expect
from fk_bench.kernels.judge.memory import ipc, layout
from fk_bench.kernels.judge.memory.slots import FLUSH_BYTES, Slots, poison
from fk_bench.kernels.judge.processes.runner_process import RunnerError, RunnerProcess

REFERENCE = "reference"
TRACED = 32  # calls traced by CUPTI
LEAST_S = 1e-6  # lower bound for a candidate's own estimate, which only sets the length of batches
POISONED = 32  # outputs per batch
SLOWER = 4  # a batch of the slower side may last so many times the usual length
# Larger arguments are not copied on the clock; their later state is checked
SMALL = 64 << 20
# In these rounds, and in the last, the oracle checks two timed calls of a batch; in the others one
CHECKED_ROUNDS = 4


class Wrong(Exception):
    """The candidate's outputs are incorrect; the message says which and how."""


@dataclass
class Plan:
    """The effort spent on a case."""

    device: str
    rounds: int
    seconds: float  # target for all rounds together; there are at least three
    batch_s: float  # target of a batch of N calls
    max_calls: int
    memory: int  # bytes of inputs and outputs


@dataclass
class Checked:
    """Result of the untimed part: errors of both sides, the chosen baseline, and the ops that ran."""

    errors: Errors
    baseline_errors: Errors
    baseline: str
    seconds: float  # per call of the faster side; 0: it cannot be timed
    slower: float = 0.0
    first_s: float = 0.0
    live: dict[str, int] = field(default_factory=dict)


@dataclass
class Sampled:
    """Copies of a call's outputs and small arguments, made by the judge when the clock stopped."""

    slot: int
    outputs: list[torch.Tensor]
    args: list[torch.Tensor]


@dataclass
class Timed:
    """Result of the timed part, on the judge's clock; `again` is a second set of batches of the baseline."""

    candidate: Samples
    baseline: Samples
    again: Samples
    traced: dict[str, Any] = field(default_factory=dict)


class CaseJudge:
    """A case on both sides. A failure of the candidate is a RunnerError or Wrong; the caller makes rows of these."""

    def __init__(
        self,
        spec: OpSpec,
        trial: Trial,
        candidate: RunnerProcess,
        baseline: RunnerProcess,
        mode: str,
        plan: Plan,
        arena: int,
    ) -> None:
        self.spec, self.trial, self.plan, self.mode, self.arena = spec, trial, plan, mode, arena
        self.candidate, self.baseline = candidate, baseline
        self.slots: Slots
        self.cost = trial.case
        self.passed_over: dict[str, str] = {}  # {baseline: why it does not support this case}

    def _make(self, generator: torch.Generator) -> list[Any]:
        args = self.trial.make(self.plan.device, generator)
        if self.trial.edit is not None:
            self.trial.edit(args)
        return args

    def _open(self, count: int, out_slots: int) -> Slots:
        slots = Slots(
            self.spec, self._make, self.plan.device, count, self.mode, out_slots, self.arena, self.trial.timed
        )
        plan, outs = slots.layout.to_json(), [o.to_json() for o in slots.outs]
        self._both("case", plan=plan, slots=count, arena=slots.place, outs=outs)
        return slots

    def _both(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """Send a command to both sides and return both answers. Never used for timed work."""
        sides = (self.candidate, self.baseline)
        for side in sides:
            side.begin(do, **arguments)
        return [side.end() for side in sides]

    def close(self) -> None:
        """Free the case in both processes and in the judge."""
        for side in (self.candidate, self.baseline):
            if side.alive:
                with contextlib.suppress(RunnerError):
                    side.ask("free")
        self.__dict__.pop("slots", None)

    # -- checks

    def check(self, baselines: list[str], compiled: bool) -> Checked:
        """Check both sides on fresh values, call by call. Raises Wrong, RunnerError."""
        self.slots = slots = self._open(count := 3, count)
        if self.spec.dims_of is not None:  # the cost may depend on values, such as which experts have a token
            self.cost = self.spec.case_of(slots.masters[0], self.trial.case.name)
        name, base_errors, seconds = self._choose(baselines)
        slots.fill([0] * count)
        slower = seconds
        if (
            seconds and self.plan.device == "cuda" and self.trial.timed
        ):  # batches must be long enough for the faster side
            own = max(self.candidate.ask("estimate", calls=count)["seconds"], LEAST_S)
            seconds, slower = min(seconds, own), max(seconds, own)
            slots.fill([0] * count)
        first = time.perf_counter()
        errors, live = self._eager(self.candidate, base_errors.rms)
        first = time.perf_counter() - first
        for _ in range(2 if self.trial.timed else 0):
            slots.refresh()
            again, _ = self._eager(self.candidate, base_errors.rms)
            errors = errors.worse(again)
        if compiled:
            slots.refresh()
            slots.poison()
            self.candidate.ask("compiled", slot=1, out=1)
            self._verdict(1, slots.output_views(1), base_errors.rms, "under torch.compile(fullgraph=True): ")
        return Checked(errors, base_errors, name, seconds, slower, first, live)

    def _choose(self, baselines: list[str]) -> tuple[str, Errors, float]:
        """The fastest baseline that is correct here, or the reference; its process is left using it.

        Seconds are 0 if nothing can be timed; the candidate is then checked but not compared.
        """
        best: tuple[float, str, Errors] | None = None
        for name in sorted(baselines, key=lambda n: n == REFERENCE):
            if name == REFERENCE and best is not None:
                break
            self.slots.fill([0] * self.slots.count)
            try:
                answer = self.baseline.ask("use", baseline=name)
                if refused := answer.get("unsupported"):
                    self.passed_over[name] = refused
                    continue
                errors = self._outputs(self.baseline, 0, answer.get("unchecked", ()))
                if errors.problem and len(baselines) > 1:
                    self.passed_over[name] = errors.problem
                    continue
                seconds = self.baseline.ask("estimate", calls=self.slots.count)["seconds"]
            except RunnerError as error:
                self.passed_over[name] = str(error)
                if error.fatal:
                    raise
                continue
            if best is None or seconds < best[0]:
                best = (seconds, name, errors)
        if best is None:
            return "", Errors(), 0.0
        self.baseline.ask("use", baseline=best[1])
        return best[1], best[2], best[0]

    def _eager(self, side: RunnerProcess, allowed: float) -> tuple[Errors, dict[str, int]]:
        """Call slots 0 and 1 in turn: both outputs must be correct, the first also after the second call."""
        slots, live = self.slots, {}
        slots.poison()
        for s in (0, 1):
            answer = side.ask("call", slot=s, out=s, again=0 if s else None)
            if answer["aliases"] and self.mode == "op":
                raise Wrong(f"output {answer['aliases'][0]} shares memory with an argument")
            live = answer["live"]
        errors = self._verdict(0, slots.output_views(0), allowed)
        return errors.worse(self._verdict(1, slots.output_views(1), allowed)), live

    def _outputs(self, side: RunnerProcess, slot: int, unchecked: Sequence[int]) -> Errors:
        """The errors of one eager call, without a verdict."""
        self.slots.poison()
        self.passed_over |= side.ask("call", slot=slot, out=slot)["refused"]
        return self._errors(slot, self.slots.output_views(slot), None, unchecked)

    def _errors(
        self, slot: int, outputs: list[torch.Tensor], allowed: float | None, unchecked: Sequence[int] = ()
    ) -> Errors:
        want = expect(self.spec, self.trial.case, self.slots.private_args(slot), self.mode)
        written = [self.slots.args_of(slot)[i] for i in want.written]
        return compare(self.spec, self.trial.case, [*outputs, *written], want, allowed, unchecked)

    def _verdict(self, slot: int, outputs: list[torch.Tensor], allowed: float, where: str = "") -> Errors:
        errors = self._errors(slot, outputs, allowed)
        if errors.problem:
            raise Wrong(where + errors.problem)
        self._untouched(slot)
        return errors

    def _untouched(self, slot: int) -> None:
        """Raise Wrong if an argument that the op does not write has changed."""
        args = self.slots.args_of(slot)
        expected = iter(self.slots.expected(slot))
        for i, a in enumerate(args):
            for t in layout.tensors(a):
                before = next(expected)
                if i not in self.slots.may_change and not torch.equal(_bits(t), _bits(before)):
                    raise Wrong(f"argument {i} was written, but the op does not write it")

    # -- times

    def time(self, checked: Checked, longer: int = 1) -> Timed:
        """Time interleaved batches of both sides; the clock stops when the judge has the sampled outputs. Raises Wrong.

        longer  multiplies the number of calls in a batch, as far as memory allows
        """
        n = self._calls(checked, longer)
        cuda = self.plan.device == "cuda"
        self.slots = slots = self._open(2 * n, 0 if cuda else 2 * n)
        slots.refresh()
        mappings = [ipc.Mapping(), ipc.Mapping()]
        if cuda:
            made = self._both("capture", n=n)
            found = [self._map(a["outputs"], m) for a, m in zip(made, mappings, strict=True)]
        else:
            found = [[slots.output_views(s) for s in range(2 * n)]] * 2
        outputs = dict(zip(("candidate", "baseline"), found, strict=True))
        del found
        timed = Timed(Samples(n), Samples(n), Samples(n))
        if cuda:
            timed.traced = self.candidate.ask("trace", calls=min(TRACED, 2 * n))
        round_s = 4.5 * n * (checked.seconds + checked.slower)  # six batches
        self.rounds = max(3, min(self.plan.rounds, int(self.plan.seconds / round_s)))
        flush = torch.zeros(FLUSH_BYTES // 4, device="cuda") if cuda else None
        try:
            for warm in (True, False):
                for r in range(1 if warm else self.rounds):
                    self._round(r, warm, n, timed, outputs, flush, checked)
        finally:
            self.candidate.pause(False)
            outputs.clear()  # before their memory is unmapped
            for mapping in mappings:
                mapping.close()
        return timed

    def _round(
        self, r: int, warm: bool, n: int, timed: Timed, outputs: Any, flush: Any, checked: Checked
    ) -> None:
        batches = [(w, d) for w in ("candidate", "baseline", "again") for d in (False, True)]
        random.SystemRandom().shuffle(batches)
        for who, double in batches:
            name = "baseline" if who == "again" else who
            side = getattr(self, name)
            start = 0 if double else n * secrets.randbelow(2)
            count = 2 * n if double else n
            poisoned = self._prepare(start, count, outputs[name], flush, who == "candidate")
            if self.candidate.caged:  # its threads must not run during the baseline's batch
                self.candidate.pause(name == "baseline")
            seconds, events, sampled = self._batch(side, start, count, outputs[name], flush)
            if not warm:
                getattr(timed, who).add(double, seconds, events)
            if name == "candidate":
                self._check_batch(r, sampled, [outputs[name][s] for s in poisoned], checked)

    def _prepare(
        self, start: int, count: int, outputs: list[list[torch.Tensor]], flush: Any, fresh: bool
    ) -> list[int]:
        """Prepare a batch: fresh values (the baseline is trusted and does not need them), some poisoned outputs (chosen
        independently of the checked ones), a cold cache. Returns the poisoned slots."""
        if fresh:
            self.slots.refresh()
        picked = random.SystemRandom().sample(range(start, start + count), min(count, POISONED))
        first = self.slots.arena.data_ptr()
        for s in picked:  # except memory that is also an argument
            poison(
                [
                    v
                    for v in outputs[s]
                    if flush is None or not 0 <= v.data_ptr() - first < self.slots.arena.nbytes
                ]
            )
        if flush is not None:
            flush.sum()
            torch.cuda.synchronize()
        return picked

    def _batch(
        self, side: RunnerProcess, start: int, count: int, outputs: list[list[torch.Tensor]], flush: Any
    ) -> tuple[float, float | None, list[Sampled]]:
        """Time one batch; the clock stops when the judge has the outputs of sampled calls."""
        picked = {start + secrets.randbelow(count), start + count - 1}
        places = [(s, outputs[s], layout.tensors(self.slots.args_of(s))) for s in picked]
        side.ask("ready")  # it may have been paused
        begin = time.perf_counter()
        answer = side.ask("run", start=start, count=count)
        held = [
            Sampled(s, [v.clone() for v in views], [t.clone() if t.nbytes < SMALL else t for t in args])
            for s, views, args in places
        ]
        if flush is not None:
            torch.cuda.synchronize()
        return time.perf_counter() - begin, answer.get("events_s"), held

    def _check_batch(
        self, r: int, sampled: list[Sampled], poisoned: list[list[torch.Tensor]], checked: Checked
    ) -> None:
        """Check outputs of timed calls: sampled ones are correct (in early and late rounds), poisoned ones written."""
        full = r < CHECKED_ROUNDS or r == self.rounds - 1
        for held in sampled if full else sampled[:1]:
            want = expect(self.spec, self.trial.case, self.slots.private_args(held.slot), self.mode)
            args = layout.replaced(self.slots.masters[0], held.args)
            written = [args[i] for i in want.written]
            allowed = checked.baseline_errors.rms
            errors = compare(self.spec, self.trial.case, [*held.outputs, *written], want, allowed)
            if errors.problem:
                raise Wrong(f"in a timed call: {errors.problem}")
            checked.errors = checked.errors.worse(errors)
            self._untouched(held.slot)
        for v in (v for views in poisoned for v in views):
            raw = v.reshape(-1).view(torch.uint8)
            if v.is_floating_point() and raw.numel() and bool((raw == 0xFF).all()):
                raise Wrong("a timed call wrote nothing")

    def _calls(self, checked: Checked, longer: int) -> int:
        """N for slots of 2N calls: long enough to time the faster side, not too long on the slower, within memory."""
        per_slot = self.slots.layout.stride + self.slots.out_bytes * (3 if self.plan.device == "cuda" else 1)
        fits = self.plan.memory // max(2 * per_slot, 1)
        wanted = int(self.plan.batch_s / max(checked.seconds, 1e-7)) + 1
        most = int(SLOWER * self.plan.batch_s / max(checked.slower, 1e-7)) + 1
        return max(2, min(longer * min(wanted, most, self.plan.max_calls), fits))

    def _map(self, shared: list[list[dict[str, Any]]], mapping: ipc.Mapping) -> list[list[torch.Tensor]]:
        """Map a side's own output memory. Calls must not share any of it."""
        found, places = [], set()
        for result in shared:
            views = []
            for out, place in zip(self.slots.outs, result, strict=True):
                if not out.bytes:
                    views.append(torch.empty(out.shape, dtype=out.dtype, device="cuda"))
                    continue
                if place["nbytes"] < out.bytes:
                    raise Wrong(f"an output has {place['nbytes']} bytes instead of {out.bytes}")
                raw = self._bytes(place, mapping)
                key = raw.data_ptr()
                if key in places:
                    raise Wrong("two calls returned the same memory: the first one's result is lost")
                places.add(key)
                views.append(raw.view(out.dtype).as_strided(out.shape, place["stride"]))
            found.append(views)
        return found

    def _bytes(self, place: dict[str, Any], mapping: ipc.Mapping) -> torch.Tensor:
        if "arena" in place:
            return self.slots.arena[place["arena"] :][: place["nbytes"]]
        return mapping.bytes_at(place)


def _bits(t: torch.Tensor) -> torch.Tensor:
    """The values as integers, so that NaN equals itself."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.contiguous().view(kinds[t.element_size()])
