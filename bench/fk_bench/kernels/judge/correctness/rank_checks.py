"""Whether all ranks of a candidate compute a collective correctly: with any values, and with any rank late."""

from __future__ import annotations

import random
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from fk_bench.kernels.judge.correctness.checks import REFERENCE, Checked, Chosen, Wrong, same_bits
from fk_bench.kernels.judge.correctness.errors import Errors
from fk_bench.kernels.judge.correctness.rank_values import SITUATIONS, Args, Values
from fk_bench.kernels.judge.memory import layout
from fk_bench.kernels.judge.memory.arena import Arena
from fk_bench.kernels.judge.memory.slots import poison
from fk_bench.kernels.judge.processes.runner_process import RunnerError
from fk_bench.kernels.judge.processes.team import Team

RANDOM = random.SystemRandom()
LATE_S = 0.03  # a rank is up to so late
OWNED = 4  # calls in a row whose results must stay: buffers are used in turn
TRIED = 2  # calls of each situation
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def lateness(size: int) -> list[float]:
    """Seconds by which each rank is late: one of them, or each by another time."""
    if RANDOM.random() < 0.5:
        late = RANDOM.randrange(size)
        return [RANDOM.uniform(0, LATE_S) if r == late else 0.0 for r in range(size)]
    return [RANDOM.uniform(0, LATE_S) for _ in range(size)]


def on(device: torch.device) -> AbstractContextManager[Any]:
    """The context in which a GPU is the current one; no other device needs it."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@dataclass
class Lane:
    """One side of a case: its ranks, and the memory that the judge shares with each of them.

    outputs  of each rank, by slot, if they are not in its arena: where captured calls put them
    """

    team: Team
    arenas: list[Arena]
    outputs: list[list[list[torch.Tensor]]] = field(default_factory=list)

    def publish(self, slot: int, count: int | None = 1) -> None:
        for arena in self.arenas:
            with on(arena.bytes.device):
                arena.publish(slot, count)

    def outputs_of(self, rank: int, slot: int) -> list[torch.Tensor]:
        return self.outputs[rank][slot] if self.outputs else self.arenas[rank].output_views(slot)

    def poison(self, slot: int) -> None:
        """Overwrite a call's outputs, except memory that is also an argument."""
        for rank, arena in enumerate(self.arenas):
            first, size = arena.bytes.data_ptr(), arena.out_start
            views = self.outputs_of(rank, slot)
            poison([v for v in views if not self.outputs or not 0 <= v.data_ptr() - first < size])

    def wait(self) -> None:
        """Wait for the judge's own work on the ranks' GPUs."""
        for arena in self.arenas:
            if arena.bytes.is_cuda:
                torch.cuda.synchronize(arena.bytes.device)

    def written(self, slot: int) -> list[list[torch.Tensor]]:
        """Copies of what each rank has written in a call: outputs, then arguments."""
        found = [
            [v.clone() for v in (*self.outputs_of(r, slot), *(a.args_of(slot)[i] for i in sorted(a.slots.may_change)))]
            for r, a in enumerate(self.arenas)
        ]  # fmt: skip
        self.wait()
        return found

    def call(self, slot: int) -> list[list[torch.Tensor]]:
        """Make an eager call to which some ranks come late; returns what all wrote. Raises RunnerError, Wrong."""
        self.publish(slot)
        self.poison(slot)
        self.wait()
        late = lateness(self.team.size)
        self.replies = self.team.ask("call", late=late, slot=slot, out=slot)
        self.team.stop()
        for rank, reply in enumerate(self.replies):
            if reply.aliases:
                raise Wrong(f"rank {rank}: output {reply.aliases[0]} shares memory with an argument")
        return self.written(slot)


@dataclass
class RankChecks:
    """The checks of one case. allowed, of_baseline: the baseline's errors, once they are known."""

    values: Values
    allowed: float | None = None
    of_baseline: Errors = field(default_factory=Errors)
    errors: Errors = field(default_factory=Errors)
    passed_over: dict[str, str] = field(default_factory=dict)
    estimates: dict[str, float] = field(default_factory=dict)  # rough seconds of a call of each baseline
    last: Args | None = None

    def fill(self, slot: int, situation: str = "") -> None:
        """Give a call new values; of a situation, in which a drawn rank differs."""
        args = self.values.draw()
        if situation:
            SITUATIONS[situation](self.values.spec, args, self.last, RANDOM.randrange(self.values.size))
        self.values.put(slot, args)
        self.last = args

    def verdict(self, lane: Lane, slot: int, got: list[list[torch.Tensor]], where: str) -> None:
        """Raises Wrong if a rank's result is not the oracle's, or an argument has changed."""
        errors = self.values.errors(slot, got, self.allowed, self.of_baseline)
        if errors.problem:
            raise Wrong(where + errors.problem)
        self.errors = self.errors.worse(errors)
        for rank, arena in enumerate(lane.arenas):
            if arena.changed(slot):
                raise Wrong(f"{where}rank {rank}: an argument was written, but the op does not write it")
        if self.values.spec.same_bits:
            for rank, mine in enumerate(got[1:], 1):
                if not all(map(same_bits, self.values.home(got[0]), self.values.home(mine))):
                    raise Wrong(f"{where}ranks 0 and {rank} differ in their bits, but all must get the same")

    # -- the baseline

    def choose(self, lane: Lane, names: list[str]) -> Chosen:
        """The fastest of these baselines that is correct. Raises RunnerError if its ranks are lost."""
        best = Chosen()
        for name in sorted(names, key=lambda n: n == REFERENCE):
            if name == REFERENCE and best.name:
                break
            self.fill(0)
            try:
                used = lane.team.ask("use", baseline=name)
                if refused := next((u.unsupported for u in used if u.unsupported), None):
                    self.passed_over[name] = refused
                    continue
                errors = self.values.errors(0, lane.call(0), None, Errors())
                if errors.problem and len(names) > 1:
                    self.passed_over[name] = errors.problem
                    continue
                for slot in range(self.values.ranks[0].count):
                    self.fill(slot)
                    lane.publish(slot)
                seconds = max(r.seconds for r in lane.team.ask("estimate", calls=len(lane.arenas[0].cells)))
            except RunnerError as error:
                self.passed_over[name] = str(error)
                if error.fatal:
                    raise
                continue
            self.estimates[name] = seconds
            if not best.name or seconds < best.seconds:
                best = Chosen(name, errors, max(seconds, 1e-9))
        if best.name:
            lane.team.ask("use", baseline=best.name)
            self.allowed, self.of_baseline = best.errors.rms, best.errors
        return best

    # -- the candidate

    def first(self, lane: Lane, compiled: bool) -> Checked:
        """Check calls in all situations, and once under torch.compile. Raises Wrong, RunnerError."""
        begin = time.perf_counter()
        self.fill(0)
        got = lane.call(0)
        first_s = time.perf_counter() - begin
        self.verdict(lane, 0, got, "")
        live: dict[str, int] = {}
        for reply in lane.replies:
            live |= reply.live
        self._again(lane, got)
        for name in RANDOM.sample(list(SITUATIONS), len(SITUATIONS)):
            for turn in range(TRIED):
                slot = turn % 2
                self.fill(slot, "" if name.startswith("repeated") and turn == 0 else name)
                self.verdict(lane, slot, lane.call(slot), f"with {name} ({self._late()}): ")
        self._owned(lane)
        if compiled:
            self.fill(0)
            lane.publish(0)
            lane.poison(0)
            lane.wait()
            lane.team.ask("compiled", slot=0, out=0)
            lane.team.stop()
            self.verdict(lane, 0, lane.written(0), "under torch.compile(fullgraph=True): ")
        return Checked(self.errors, first_s, live)

    def _late(self) -> str:
        return "ranks come late by chance"

    def _again(self, lane: Lane, before: list[list[torch.Tensor]]) -> None:
        """The same call again, with other ranks late: the same bits, if the op declares it."""
        if not self.values.spec.same_bits:
            return
        for rank, (mine, old) in enumerate(zip(lane.call(0), before, strict=True)):
            if not all(map(same_bits, mine, old)):
                raise Wrong(f"rank {rank}: two calls with the same values differ in their bits")

    def _owned(self, lane: Lane) -> None:
        """Results must stay when the arguments change, and when the next call is made."""
        kept = []
        for slot in range(OWNED):
            self.fill(slot)
            kept.append(lane.call(slot))
        for slot in range(OWNED):
            for arena in lane.arenas:
                for i, a in enumerate(arena.args_of(slot)):
                    for t in layout.tensors(a) if i not in arena.slots.may_change else ():
                        if t.numel():
                            t.view(WORDS[t.element_size()]).bitwise_xor_(1)
            lane.poison(slot)
            lane.wait()
            lane.team.ask("copy", out=slot)
            lane.team.stop()
            for rank, arena in enumerate(lane.arenas):
                for i, v in enumerate(arena.output_views(slot)):
                    if not same_bits(v, kept[slot][rank][i]):
                        raise Wrong(
                            f"rank {rank}: output {i} changes after the call, with an input or with the next call"
                        )
