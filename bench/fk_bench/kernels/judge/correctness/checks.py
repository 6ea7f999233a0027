"""Whether a candidate's outputs are correct: eager calls, compiled calls, and outputs of timed calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fastkernels.core.spec import Case, OpSpec
from fk_bench.core.rows import Status
from fk_bench.core.wall_time import PHASES
from fk_bench.kernels.judge.correctness.errors import Errors, Expected, compare, expect
from fk_bench.kernels.judge.memory import layout
from fk_bench.kernels.judge.memory.arena import Arena
from fk_bench.kernels.judge.memory.slots import Slots, poison
from fk_bench.kernels.judge.processes.messages import Used
from fk_bench.kernels.judge.processes.runner_process import RunnerError, RunnerProcess

REFERENCE = "reference"
AT_ONCE = 1 << 24  # values of outputs that are compared at once
SUSPECTS = 4  # calls whose outputs differ most from the baseline's are compared with the oracle


class Wrong(Exception):
    """The candidate's outputs are incorrect; the message says which and how. recipe: of the slot, see Slots."""

    def __init__(self, reason: str, recipe: dict[str, Any] | None = None):
        super().__init__(reason)
        self.recipe = recipe


@dataclass
class Chosen:
    """The fastest baseline that is correct for the case; `seconds` per call, 0 if none serves it.

    unchecked  positions of outputs that it may return in another correct way
    prepares   it prepares weights before its calls are captured or timed
    """

    name: str = ""
    errors: Errors = field(default_factory=Errors)
    seconds: float = 0.0
    unchecked: Sequence[int] = ()
    prepares: bool = False


@dataclass
class Checked:
    """The first calls of the candidate: its errors, seconds until they returned, and the ops that it says ran."""

    errors: Errors
    first_s: float
    live: dict[str, int]


class Checks:
    """The checks of one case. `allowed` and `of_baseline` are the baseline's own errors, once they are known."""

    def __init__(self, spec: OpSpec, case: Case, mode: str):
        self.spec, self.case, self.mode = spec, case, mode
        self.allowed, self.of_baseline = 0.0, Errors()
        self.chosen = ""  # the baseline
        self._natively = False  # errors of this case are larger than those of rounding
        self.errors = Errors()
        self.nonfinite = False  # NaN and infinity count as the same
        self.passed_over: dict[str, str] = {}  # {baseline: why it does not serve this case}
        self.unmade: dict[str, str] = {}  # {baseline: the error with which its library does not load}
        self.uncalled: dict[str, str] = {}  # {baseline: the error of its call}
        self.unchecked: Sequence[
            int
        ] = ()  # outputs that are not compared: of a baseline in the candidate's place

    # -- the baseline

    def choose(
        self, side: RunnerProcess, arena: Arena, slots: Slots, names: Sequence[str], last: Sequence[str] = ()
    ) -> Chosen:
        """The fastest of these baselines that is correct here; its process is left using it. Those of `last` and the
        reference only serve if no other one does.

        The candidate is stopped meanwhile, so it cannot disturb the errors that become tolerances.
        """
        best: Chosen | None = None
        least = {*last, REFERENCE}
        for name in sorted(names, key=lambda n: n in least):
            if name in least and best is not None and best.name not in least:
                break
            slots.fill([0] * slots.count)
            arena.publish()
            used: Used | None = None
            try:
                used = side.ask("use", baseline=name)
                if used.unsupported:
                    self.passed_over[name] = used.unsupported
                    continue
                arena.poison()
                self.passed_over |= side.ask("call", slot=0, out=0).refused
                errors = self._errors(slots, arena, 0, arena.output_views(0), None, used.unchecked)
                if errors.problem and len(names) > 1:
                    self.passed_over[name] = errors.problem
                    continue
                seconds = side.ask("estimate", calls=slots.count).seconds
            except RunnerError as error:
                self.passed_over[name] = str(error)
                (self.unmade if used is None else self.uncalled)[name] = str(error)
                if error.fatal:
                    raise
                continue
            if best is None or seconds < best.seconds:
                best = Chosen(name, errors, max(seconds, 1e-9), used.unchecked, used.prepares)
        if best is None:
            return Chosen()
        side.ask("use", baseline=best.name)
        self.chosen = best.name
        self.allowed, self.of_baseline = best.errors.rms, best.errors
        return best

    # -- the candidate, untimed

    def first(self, side: RunnerProcess, arena: Arena, slots: Slots, repeats: int, compiled: bool) -> Checked:
        """Check calls on several sets of fresh values. Raises Wrong, RunnerError."""
        slots.fill([0] * slots.count)
        arena.publish()
        begin = time.perf_counter()
        live = self._eager(side, arena, slots)
        first_s = time.perf_counter() - begin
        for _ in range(repeats):
            side.stop()
            slots.refresh()
            arena.publish()
            self._eager(side, arena, slots)
        if compiled:
            slots.refresh()
            arena.publish()
            arena.poison()
            side.ask("compiled", slot=1, out=1)
            self._verdict(slots, arena, 1, arena.output_views(1), "under torch.compile(fullgraph=True): ")
        return Checked(self.errors, first_s, live)

    def hard(
        self, sides: tuple[RunnerProcess, RunnerProcess], arenas: tuple[Arena, Arena], slots: Slots, name: str,
        change: Callable[[list[Any]], None], nonfinite: bool = False,
    ) -> None:  # fmt: skip
        """Check calls on extreme values of the timed shape, unless the baseline itself fails on them.

        Without it a candidate may be right for the shapes of extreme values only. Raises Wrong, RunnerError.
        """
        (candidate, baseline), (arena, other) = sides, arenas
        self.nonfinite = nonfinite
        try:
            self._hard(candidate, baseline, arena, other, slots, name, change)
        finally:
            self.nonfinite = False

    def _hard(
        self, candidate: RunnerProcess, baseline: RunnerProcess, arena: Arena, other: Arena, slots: Slots, name: str,
        change: Callable[[list[Any]], None],
    ) -> None:  # fmt: skip
        candidate.stop()
        slots.edit(change)
        other.publish()
        other.poison()
        try:
            # It may refuse these values: an id without a row ends a process that uses a GPU.
            if baseline.ask("use", baseline=self.chosen).unsupported:
                return
            baseline.ask("call", slot=0, out=0)
        except RunnerError as error:
            if error.fatal:
                raise
            return
        errors = self._errors(slots, other, 0, other.output_views(0), None, self.unchecked)
        baseline.stop()
        if errors.problem:
            return
        usual = self.allowed, self.of_baseline
        self.allowed, self.of_baseline = max(self.allowed, errors.rms), errors.worse(self.of_baseline)
        arena.publish()
        try:
            self._eager(candidate, arena, slots)
        except Wrong as wrong:
            recipe = None if wrong.recipe is None else {**wrong.recipe, "edit": name}
            raise Wrong(f"with extreme values ({name}): {wrong}", recipe) from None
        self.allowed, self.of_baseline = usual

    def _eager(self, side: RunnerProcess, arena: Arena, slots: Slots) -> dict[str, int]:
        """Call slots 0 and 1 in turn. Then change all inputs: the results of both calls must not change with them."""
        arena.poison()
        live: dict[str, int] = {}
        for s in (0, 1):
            answer = side.ask("call", slot=s, out=s)
            if answer.aliases and self.mode == "op":
                raise Wrong(f"output {answer.aliases[0]} shares memory with an argument")
            live = answer.live
        for s in (0, 1):
            self._verdict(slots, arena, s, arena.output_views(s))
        side.stop()
        written = [arena.output_views(s) for s in (0, 1)]
        before = [[v.clone() for v in views] for views in written]
        for s in (0, 1):
            for i, a in enumerate(arena.args_of(s)):
                for t in layout.tensors(a) if i not in slots.own else ():
                    _flip(t)
        arena.poison()
        for s in (0, 1):
            side.ask("copy", out=s)
        for views, kept in zip(written, before, strict=True):
            for i, (v, k) in enumerate(zip(views, kept, strict=True)):
                if not same_bits(v, k):
                    raise Wrong(
                        f"output {i} changes after the call, with an input or with the next call's result"
                    )
        side.stop()
        arena.publish()
        return live

    # -- timed calls

    def sampled(
        self, slots: Slots, arena: Arena, slot: int, outputs: list[torch.Tensor], written: list[torch.Tensor]
    ) -> None:
        """Check a call whose outputs and written arguments were copied before the clock stopped. Raises Wrong."""
        args = list(slots.args_of(slot))
        values = iter(written)
        for i, a in enumerate(args):
            if i in slots.may_change:
                args[i] = layout.mapped(a, lambda _: next(values))
        want = self._expect(slots, slot)
        got = [*outputs, *(args[i] for i in want.written)]
        errors = self._compare(got, want, self.allowed, self.unchecked)
        self._take(errors, "in a timed call: ", slots, slot)
        if arena.changed(slot):
            raise Wrong("an argument was written, but the op does not write it")

    @PHASES.of("compare")
    def kept(self, side: RunnerProcess, arena: Arena, slots: Slots, slot: int) -> None:
        """CPU: the result of a timed call, copied once more after the batch, is the same, also after all inputs of
        its slot have changed that the call does not write.

        So it is neither a view of an input nor memory that a later call has used. Raises Wrong, RunnerError.
        """
        views = arena.output_views(slot)
        if not views:
            return
        side.stop()
        before = [v.clone() for v in views]
        for i, a in enumerate(arena.args_of(slot)):
            for t in layout.tensors(a) if i not in slots.own else ():
                _flip(t)
        poison(views)
        try:
            side.ask("copy", out=slot)
        except RunnerError as error:
            if error.fatal or error.status is Status.INVALID:
                raise
            raise Wrong(f"in a timed call: its result cannot be copied again: {error}") from None
        side.stop()
        for i, (v, k) in enumerate(zip(views, before, strict=True)):
            if not same_bits(v, k):
                raise Wrong(
                    f"in a timed call: output {i} changes after the call, with an input or with a later call"
                )
        arena.publish(slot, 1)

    @PHASES.of("compare")
    def same(
        self, slots: Slots, mine: Arena, outputs: list[list[torch.Tensor]], others: list[list[torch.Tensor]]
    ) -> None:
        """Compare the outputs of all calls with the baseline's on the same values.

        The oracle decides: it runs for the calls whose outputs differ most from the baseline's.
        """
        ranked = self._ranked(slots, outputs, others) if self.spec.ranking is not None else (outputs, others)
        distances = self.distances(*ranked)
        for slot in distances.topk(min(SUSPECTS, len(outputs))).indices.tolist():
            self._verdict(slots, mine, slot, outputs[slot], f"in timed call {slot} of {len(outputs)}: ")
        if mine.changed():
            raise Wrong("an argument was written, but the op does not write it")

    def _ranked(
        self, slots: Slots, outputs: list[list[torch.Tensor]], others: list[list[torch.Tensor]]
    ) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
        """The outputs with scores in place of a ranking's ids, whose distances say nothing."""
        ranking = self.spec.ranking
        assert ranking is not None
        at, found = ranking.ids, ([list(o) for o in outputs], [list(o) for o in others])
        for slot, pair in enumerate(zip(*found, strict=True)):
            same = torch.equal(pair[0][at], pair[1][at])
            for side in pair:
                if same:
                    side[at] = torch.zeros_like(side[at], dtype=torch.float32)
                    continue
                scores, may = ranking.score(side[at], *slots.args_of(slot))
                side[at] = torch.where(may | (side[at] < 0), scores.float(), torch.nan)
        return found

    @staticmethod
    def distances(outputs: list[list[torch.Tensor]], others: list[list[torch.Tensor]]) -> torch.Tensor:
        """How much the outputs of each call differ; infinite for NaN on one side only. Many calls at once."""
        total = torch.zeros(len(outputs), device=outputs[0][0].device if outputs[0] else "cpu")
        for a, b in zip(zip(*outputs, strict=True), zip(*others, strict=True), strict=True):
            if not a[0].numel():
                continue
            many = max(1, AT_ONCE // a[0].numel())
            for start in range(0, len(a), many):
                part = slice(start, start + many)
                x, y = (torch.stack(side[part]).flatten(1).to(torch.float32) for side in (a, b))
                d = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, (x - y).abs())
                total[part] = torch.maximum(total[part], torch.nan_to_num(d, nan=torch.inf).amax(1))
        return total

    # -- verdicts

    def _errors(
        self, slots: Slots, arena: Arena, slot: int, outputs: list[torch.Tensor], allowed: float | None,
        unchecked: Sequence[int] = (),
    ) -> Errors:  # fmt: skip
        want = self._expect(slots, slot)
        written = [arena.args_of(slot)[i] for i in want.written]
        return self._compare([*outputs, *written], want, allowed, unchecked)

    def _expect(self, slots: Slots, slot: int) -> Expected:
        """The oracle's result for a slot, from memory that no other process sees."""
        dtypes = None if self._natively else [out.dtype for out in slots.outs]
        return expect(self.spec, self.case, slots.args_of(slot), self.mode, dtypes)

    def _compare(
        self, got: list[torch.Tensor], want: Expected, allowed: float | None, unchecked: Sequence[int]
    ) -> Errors:
        errors = compare(
            self.spec, self.case, got, want, allowed, unchecked, self.of_baseline, self.nonfinite
        )
        self._natively = self._natively or want.needed
        return errors

    def _verdict(
        self, slots: Slots, arena: Arena, slot: int, outputs: list[torch.Tensor], where: str = ""
    ) -> None:
        self._take(
            self._errors(slots, arena, slot, outputs, self.allowed, self.unchecked), where, slots, slot
        )
        if arena.changed(slot):
            raise Wrong("an argument was written, but the op does not write it")

    def _take(self, errors: Errors, where: str, slots: Slots, slot: int) -> None:
        if errors.problem:
            raise Wrong(where + errors.problem, slots.recipe_of(slot))
        self.errors = self.errors.worse(errors)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all values are equal; NaN equals itself."""
    return torch.equal(_bits(a), _bits(b))


def _bits(t: torch.Tensor) -> torch.Tensor:
    """The values as integers, so that NaN equals itself."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.contiguous().view(kinds[t.element_size()])


def _flip(t: torch.Tensor) -> None:
    """Change every value, without caring for what it means."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if t.numel():
        t.view(kinds[t.element_size()]).bitwise_xor_(1)
