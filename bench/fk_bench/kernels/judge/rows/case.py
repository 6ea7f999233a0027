"""One case from first call to last batch: the memory of both sides, the checks, the times."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastkernels.core.spec import Case, OpSpec
from fk_bench.kernels.judge.batches.batches import SINGLES, Batches
from fk_bench.kernels.judge.batches.calls import Calls
from fk_bench.kernels.judge.batches.lane import Lane, Timed
from fk_bench.kernels.judge.clock import call_times
from fk_bench.kernels.judge.correctness.cases import Trial
from fk_bench.kernels.judge.correctness.checks import Checks, Wrong
from fk_bench.kernels.judge.correctness.extremes import HEAVY
from fk_bench.kernels.judge.memory.arena import Arena
from fk_bench.kernels.judge.memory.slots import Slots
from fk_bench.kernels.judge.processes.runner_process import RunnerError, RunnerProcess
from fk_bench.kernels.judge.rows.verdict import Evidence

CHECKED = 3  # slots of the untimed checks
HARD_BYTES = 64 << 20  # of a timed case's arguments, above which no extreme values are tried
RANDOM = random.SystemRandom()
LEAST_SLOTS = 8  # CPU: calls of a side in a round, which wait for each other in turn
WAKE_S = 1.5e-3  # CPU: seconds of a slot's four requests outside its calls
SLOWER = 4  # a batch of the slower side may last so many times the usual length


@dataclass(frozen=True)
class Plan:
    """The effort spent on a case.

    rounds, seconds  most rounds, and the target for all of them together; there are at least `least`
    batch_s          target of a batch of N calls, on a CPU of a round; max_calls: the largest N
    memory           bytes of inputs and outputs
    hard             kinds of extreme values that are also tried
    """

    device: str
    rounds: int
    least: int
    seconds: float
    batch_s: float
    max_calls: int
    memory: int
    hard: int = 4


class CaseRun:
    """A case on two sides. `evidence` fills while it runs; no exception of a candidate leaves `run`."""

    def __init__(
        self, spec: OpSpec, trial: Trial, sides: tuple[RunnerProcess, RunnerProcess], files: tuple[int, int],
        mode: str, plan: Plan, floor_s: Callable[[Case], float], identity: bool = False, cls: str | None = None,
    ) -> None:  # fmt: skip
        self.spec, self.trial, self.plan, self.mode, self.identity = spec, trial, plan, mode, identity
        self.candidate, self.baseline = sides
        self.cls = cls
        self.cost: Case = trial.case
        self._floor_s = floor_s  # of a case, on this machine
        self.evidence = Evidence(wants_times=trial.timed, floor_s=floor_s(trial.case))
        self._files, self._arenas = files, list[Arena]()

    def run(
        self, baselines: Sequence[str], compiled: bool, timed: bool, last: Sequence[str] = ()
    ) -> Evidence:
        """Check and time the case. compiled: also under torch.compile; timed: False to check only.

        last  the baselines that only serve if no other one does
        """
        seen = self.evidence
        seen.wants_times = seen.wants_times and timed and self.trial.recipe is None
        checks = Checks(self.spec, self.trial.case, self.mode)
        checks.nonfinite = self.trial.is_nonfinite
        seen.passed_over, seen.unmade, seen.uncalled = checks.passed_over, checks.unmade, checks.uncalled
        try:
            slots, candidate, baseline = self._open(CHECKED, CHECKED)
            # A call without output may launch nothing, and need not take any time.
            seen.has_output = any(t.numel() for t in candidate.output_views(0))
            seen.wants_times = seen.wants_times and seen.has_output
            # The cost may depend on values, such as which experts have a token.
            if self.spec.dims_of is not None:
                self.cost = self.spec.case_of(slots.masters[0], self.trial.case.name)
            if self.spec.counted:  # the case itself has the most that a count can be
                costs = [self.spec.case_of(m, self.trial.case.name) for m in slots.masters]
                seen.floor_s = min(seen.floor_s, *map(self._floor_s, costs))
            self.candidate.stop()
            seen.chosen = checks.choose(self.baseline, baseline, slots, baselines, last)
            self.baseline.stop()
            if self.identity and seen.chosen.name:
                self.candidate.ask("use", baseline=seen.chosen.name)
                # Prepared weights are not those of every batch; with itself as the candidate only times matter.
                every = range(len(slots.outs))
                checks.unchecked = every if seen.chosen.prepares else seen.chosen.unchecked
            repeats = 2 if self.trial.timed and self.trial.recipe is None else 0
            seen.checked = checks.first(self.candidate, candidate, slots, repeats, compiled)
            if seen.chosen.seconds and slots.layout.stride + slots.layout.shared <= HARD_BYTES:
                hard = self.trial.hard
                for name in _drawn(sorted(hard), self.plan.hard):
                    sides, arenas = (self.candidate, self.baseline), (candidate, baseline)
                    checks.hard(sides, arenas, slots, name, hard[name], name in self.trial.nonfinite)
            if seen.wants_times and seen.chosen.seconds:
                own = self._estimate()
                seen.timed = self._time(checks, own, 1)
                if longer := self._again(seen.timed):
                    seen.timed = self._time(checks, own, longer)
        except Wrong as error:
            seen.wrong, seen.recipe = str(error), error.recipe
        except RunnerError as error:
            seen.failure = error
        except RuntimeError as error:  # in the judge itself: no memory for the oracle
            seen.broken = f"{type(error).__name__}: {str(error)[:300]}"
        finally:
            self._close()
        if seen.checked is not None:
            seen.checked.errors = checks.errors
        return seen

    def _estimate(self) -> float:
        """Rough seconds of the candidate's call. Its claim sets only the length of batches, never a time."""
        if self.plan.device == "cpu":
            return self.evidence.chosen.seconds
        return max(self.candidate.ask("estimate", calls=CHECKED).seconds, 1e-6)

    def _again(self, timed: Timed) -> int:
        """How much longer the batches of a second attempt must be, after a disturbance; 0: none is needed."""
        if call_times.charge(timed.candidate, timed.baseline) > 0:
            return 2  # in longer batches the cost of starting them matters less
        if call_times.unsteady(timed.baseline, timed.again) or not timed.candidate.steady:
            return 0  # more rounds did not help
        sides = timed.candidate, timed.baseline
        return 1 if call_times.invalid(*sides, 0.0) or call_times.counted_alone(*sides) else 0

    def _time(self, checks: Checks, own: float, longer: int) -> Timed:
        fast, slow = sorted((self.evidence.chosen.seconds, own))
        cuda, plan = self.plan.device == "cuda", self.plan
        n = self._calls(fast, slow, longer)
        # On a GPU a round has six batches, on a CPU each slot is called once on both sides.
        count, round_s = (
            (2 * n + SINGLES, 4.5 * n * (fast + slow)) if cuda else (n, n * (fast + slow + WAKE_S))
        )
        slots, candidate, baseline = self._open(count, 0 if cuda else count)
        rounds = max(plan.least, min(plan.rounds, int(plan.seconds / round_s)))
        prepares = self.evidence.chosen.prepares
        lanes = (
            Lane(self.candidate, candidate, prepares=prepares and self.identity),
            Lane(self.baseline, baseline, prepares=prepares),
        )
        if cuda:
            return Batches(slots, n, *lanes, checks, rounds).run()
        return Calls(slots, *lanes, checks, rounds).run()

    def _calls(self, fast: float, slow: float, longer: int) -> int:
        """N, within memory. On a GPU there are 2N slots: enough for the faster side, not too many for the slower one.

        On a CPU there are N slots, and fewer for calls that take long.
        """
        slots = self._slots
        per_slot = 4 * slots.layout.stride + slots.out_bytes * (3 if self.plan.device == "cuda" else 2)
        total = (self.plan.memory - 3 * slots.layout.shared) // max(per_slot, 1)
        if self.plan.device == "cpu":
            wanted = int(self.plan.batch_s / (fast + slow + WAKE_S))
            return max(4, min(longer * max(wanted, LEAST_SLOTS), self.plan.max_calls, total) // 2 * 2)
        fits = (total - SINGLES) // 3
        wanted = int(self.plan.batch_s / max(fast, 1e-7)) + 1
        most = int(SLOWER * self.plan.batch_s / max(slow, 1e-7)) + 1
        return max(2, min(longer * min(wanted, most, self.plan.max_calls), fits))

    def _make(self, generator: torch.Generator) -> list[Any]:
        args = self.trial.make(self.plan.device, generator)
        if self.trial.edit is not None:
            self.trial.edit(args)
        return args

    def _open(self, count: int, out_slots: int) -> tuple[Slots, Arena, Arena]:
        """New slots, and an arena for each side that nothing else shares."""
        self._close()
        slots = self._slots = Slots(
            self.spec, self._make, self.plan.device, count, self.mode, self.trial.rolls, cls=self.cls,
            recipe=self.trial.recipe,
        )  # fmt: skip
        if (
            self.mode == "module"
        ):  # modules are built around their weights, and prepare what they derive from them
            slots.fill([0] * slots.count)
        outs = [o.to_json() for o in slots.outs]
        for side, fd in zip((self.candidate, self.baseline), self._files, strict=True):
            arena = Arena(slots, out_slots, fd)
            self._arenas.append(arena)
            if self.mode == "module":
                arena.publish()
            side.ask("case", arena.fds, plan=slots.plan, cells=arena.cells, arena=arena.place, outs=outs)
        return slots, self._arenas[0], self._arenas[1]

    def _close(self) -> None:
        """Free the case in both processes and in the judge."""
        if self._arenas:
            for side in (self.candidate, self.baseline):
                if side.alive:
                    with contextlib.suppress(RunnerError):
                        side.ask("free")
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()
        self.__dict__.pop("_slots", None)


def _drawn(names: Sequence[str], most: int) -> list[str]:
    """So many of these kinds of extreme values; of several one is heavy tails, which show most in long rows."""
    first = [n for n in names if n == HEAVY and most > 1]
    others = [n for n in names if n != HEAVY]
    return [*first, *RANDOM.sample(others, min(most - len(first), len(others)))]
