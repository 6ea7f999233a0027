"""The two sides of a collective: the ranks of the candidate and of the baseline, and the evidence of each case."""

from __future__ import annotations

import contextlib
import random
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastkernels.core.spec import Case, OpSpec
from fk_bench.capture.replay import captured_cases
from fk_bench.core.rows import Status
from fk_bench.kernels.judge.batches.lane import Timed
from fk_bench.kernels.judge.batches.rank_batches import SINGLES, RankBatches, TooMany
from fk_bench.kernels.judge.batches.rank_calls import RankCalls
from fk_bench.kernels.judge.clock import roofline
from fk_bench.kernels.judge.correctness.cases import Trial, maker
from fk_bench.kernels.judge.correctness.checks import Wrong
from fk_bench.kernels.judge.correctness.rank_checks import Lane, RankChecks, on
from fk_bench.kernels.judge.correctness.rank_values import Values
from fk_bench.kernels.judge.memory.arena import Arena
from fk_bench.kernels.judge.processes.calling import calling
from fk_bench.kernels.judge.processes.messages import Loaded
from fk_bench.kernels.judge.processes.runner_process import RunnerError, TimeBudget
from fk_bench.kernels.judge.processes.sides import Sides
from fk_bench.kernels.judge.processes.team import Team
from fk_bench.kernels.judge.rows.options import Options
from fk_bench.kernels.judge.rows.verdict import Evidence

DEATHS = 3  # after so many deaths the candidate's ranks are not restarted for the op's other cases
SLOTS = 6  # of checked calls; on a CPU also the timed calls of a round
ROUNDS = {"cpu": (3, 6), "cuda": (5, 30)}  # least and most
BATCH_S, MOST_CALLS = 4e-3, 256  # GPUs: target seconds of N calls, and the largest N
SLOWER = 4  # a batch of the slower side may last so many times the target
HELD_OUT = 2  # cases of unseen sizes
IDS = "topk_ids"  # the argument with the experts of each token


def trials(spec: OpSpec, options: Options) -> list[Trial]:
    """The cases of a collective that so many ranks can have: its own, those of captured runs, and unseen sizes.

    Each is checked in all situations of its ranks.
    """
    own = [replace(c, dims={**c.dims, spec.ranks: options.ranks}) for c in (options.task or spec.cases)]
    own = [c for c in own if all(r(spec.declaration.sizes(c.dims, c.dtype)) for r in spec.declaration.rules)]
    found = [Trial("task" if options.task else "random", c, maker(spec, c)) for c in own]
    if not options.task and "held-out" in options.cases:
        rng = random.Random(secrets.randbits(128))
        here = [t.case for t in found if options.device == "cuda" or t.gpu_only(spec) is None]
        varied = [spec.vary(c, rng) for c in rng.sample(here, min(HELD_OUT, len(here)))]
        held = [replace(c, dims={**c.dims, spec.ranks: options.ranks}) for c in varied]
        found += [Trial("held-out", c, maker(spec, c)) for c in held]
    if not options.task and "captured" in options.cases:
        found += _captured(spec, options)
    if not options.task and "random" not in options.cases:
        found = [t for t in found if t.source != "random"]
    found = [t for t in found if not options.names or t.case.name in options.names]
    if options.most:
        runs = sorted(found, key=lambda t: (t.gpu_only(spec) is not None, "model" not in t.case.tags))
        sources = dict.fromkeys(t.source for t in runs)
        found = [t for s in sources for t in [t for t in runs if t.source == s][: options.most]]
    return found


def _captured(spec: OpSpec, options: Options) -> list[Trial]:
    """The message sizes of captured runs that so many ranks can have, with the number of their calls.

    Each rank routes its tokens as a captured call of that size did. Other values are new.
    """
    cases: dict[tuple[Any, ...], Case] = {}
    routed: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    for captured in captured_cases(spec.name, options.captures):
        case = replace(captured.case, dims={**captured.case.dims, spec.ranks: options.ranks})
        if not all(r(spec.declaration.sizes(case.dims, case.dtype)) for r in spec.declaration.rules):
            continue
        key = case.dtype, *case.dims.items()
        cases[key] = replace(case, weight=case.weight + cases[key].weight) if key in cases else case
        if IDS in captured.values:
            routed.setdefault(key, []).append(captured.values[IDS])
    found = [
        Trial("captured", case, _routing(spec, case, routed.get(key, []))) for key, case in cases.items()
    ]
    return sorted(found, key=lambda t: -t.case.weight)


def _routing(
    spec: OpSpec, case: Case, sets: list[torch.Tensor]
) -> Callable[[str, torch.Generator], list[Any]]:
    """A maker of arguments with one of these sets of experts' numbers, its tokens in another order."""
    make = maker(spec, case)
    if not sets:
        return make

    def routed(device: str, generator: torch.Generator) -> list[Any]:
        args, at = make(device, generator), spec.position(IDS)
        ids = sets[int(torch.randint(len(sets), (), generator=generator, device=device))].to(device)
        order = torch.randperm(len(ids), generator=generator, device=device)
        args[at] = ids[order].to(args[at].dtype)
        return args

    return routed


@dataclass
class RankRun:
    """A case that was run. cost: the case, for bytes and operations."""

    cost: Case


class RankPair:
    """The ranks of both sides of an op, restarted when one has ended; the interface of `rows.pair.Pair`."""

    provisional = ""

    def __init__(
        self, sides: Sides, options: Options, spec: OpSpec, candidates: Mapping[str, Path],
        gpu: str | None = None,
    ) -> None:  # fmt: skip
        self._peaks = roofline.peaks(gpu)
        self._sides, self.options, self.spec, self.candidates = sides, options, spec, candidates
        self.calling = calling(spec, candidates.get(spec.name))
        self.choice: tuple[str, dict[str, Any]] | None = None
        self.deployment: dict[str, str] | None = None
        self.loaded: dict[str, Loaded] = {}
        self.busy_s = 0.0
        self._teams: dict[str, Team] = {}
        self._compiled = options.identity
        self._failure: RunnerError | None = None
        self._deaths = 0
        self._most_calls = MOST_CALLS
        self._budget = TimeBudget(options.op_budget, "op")

    def close(self, failed: bool = False) -> None:
        """Release the ranks of both sides: a candidate's end; ours serve the next op unless something failed."""
        for who, team in self._teams.items():
            if not team.trusted:
                team.close()
            elif failed:
                self._sides.lost_group(who, team.size)
        self._teams.clear()

    def probe(self) -> None:
        """Nothing: deployment is not probed over several ranks."""

    def _open(self) -> tuple[Team, Team]:
        """Both sides, loaded, each a group of its own. Raises RunnerError."""
        o = self.options
        for who in ("candidate", "baseline"):
            if who in self._teams:
                continue
            mine, against = self.candidates, None
            if who == "baseline" or o.identity:
                against = o.against
                mine = {self.spec.name: Path(against)} if against.endswith(".py") else {}
            files = list(mine.values())
            team = (
                self._start(who, files)
                if files
                else self._sides.group(who, o.ranks, partial(self._start, who))
            )
            self._teams[who] = team
            team.timeout, team.budgets = o.timeout, (self._budget,) if mine and who == "candidate" else ()
            self.loaded[who] = team.ask(
                "load", op=self.spec.name, device=o.device,
                candidates={n: str(Path(p).resolve()) for n, p in mine.items()},
                against=None if mine else against, cls=None, threads=1,
            )[0]  # fmt: skip
        return self._teams["candidate"], self._teams["baseline"]

    def _start(self, who: str, files: Sequence[Path] = ()) -> Team:
        team = Team(self._sides, who, self.options.ranks, self.options.timeout, files)
        try:
            team.join(self.options.device)
        except BaseException:
            team.close()
            raise
        return team

    def run(self, trial: Trial) -> tuple[Evidence, RankRun | None]:
        """The evidence of one case."""
        self.busy_s = 0.0
        if self.options.device == "cpu" and (reason := trial.gpu_only(self.spec)) is not None:
            return Evidence(refused=(Status.SKIPPED, reason)), None
        if self.calling.problem or self.calling.cls is not None:
            problem = self.calling.problem or f"{self.spec.name} is judged by its function"
            return Evidence(refused=(Status.SIGNATURE_MISMATCH, problem)), None
        if self._failure is None and self._budget.left <= 0:
            self._failure = RunnerError(
                Status.TIMEOUT, f"not run: the op's {self._budget.seconds:g} s are used", True, "candidate"
            )
        if self._failure is not None:
            return Evidence(failure=self._failure), None
        seen = Evidence(wants_times=trial.timed and self.options.timed)
        self._limits(trial.case, seen)
        teams: tuple[Team, ...] = ()
        try:
            teams = self._open()
            before = sum(t.busy_s for t in teams)
            if self.candidates:
                teams[0].budgets = (self._budget, TimeBudget(self.options.case_budget, "case"))
            self._judge(trial, teams, seen)
            self.busy_s = sum(t.busy_s for t in teams) - before
        except Wrong as error:
            seen.wrong = str(error)
        except RunnerError as error:
            seen.failure = error
        except RuntimeError as error:  # in the judge itself: no memory for the oracle
            seen.broken = f"{type(error).__name__}: {str(error)[:300]}"
        if self.options.device == "cuda":
            torch.cuda.empty_cache()  # both sides need what the oracle has used
        if seen.failure is not None or seen.wrong:
            # A rank may still be in the middle of a call that the others have left.
            self._lost(seen.failure, loading="candidate" not in self.loaded)
        return seen, RankRun(trial.case)

    def _limits(self, case: Case, seen: Evidence) -> None:
        """Note what the GPU and its link allow."""
        spec = self.spec
        memory = roofline.floor_us(spec.bytes_moved(case), spec.flops(case), case.dtype, self._peaks) or 0.0
        link = self._peaks.link_gb_per_s if self._peaks is not None else 0.0
        sent = spec.traffic(case) / link / 1e3 if spec.traffic is not None and link else 0.0
        seen.floor_s, seen.link_gb_per_s = 1e-6 * max(memory, sent), link

    def _judge(self, trial: Trial, teams: tuple[Team, ...], seen: Evidence) -> None:
        values = Values(self.spec, trial, SLOTS, self.options.device)
        checks, own = RankChecks(values), 0.0
        with self._lanes(teams, values) as (candidate, baseline):
            seen.passed_over, seen.estimates = checks.passed_over, checks.estimates
            seen.has_output = any(o.bytes for r in values.ranks for o in r.outs)
            candidate.team.stop()
            loaded = self.loaded["baseline"]
            seen.chosen = checks.choose(baseline, list(loaded.baselines) or [self.options.against])
            baseline.team.stop()
            if self.options.identity and seen.chosen.name:
                candidate.team.ask("use", baseline=seen.chosen.name)
            try:
                seen.checked = checks.first(candidate, not self._compiled)
                self._compiled = True
                seen.wants_times = seen.wants_times and seen.has_output
                timed = seen.wants_times and seen.chosen.seconds > 0
                if timed and self.options.device == "cpu":
                    calls = RankCalls(checks, candidate, baseline, SLOTS, self._rounds())
                    seen.timed = calls.run()
                elif timed:
                    own = max(r.seconds for r in candidate.team.ask("estimate", calls=SLOTS))
            finally:
                if seen.checked is not None:
                    seen.checked.errors = checks.errors
        if own:
            seen.timed = self._batches(trial, teams, checks, (seen.chosen.seconds, max(own, 1e-6)))

    def _rounds(self) -> int:
        least, most = ROUNDS[self.options.device]
        return max(least, min(self.options.rounds, most))

    def _batches(
        self, trial: Trial, teams: tuple[Team, ...], checks: RankChecks, estimates: tuple[float, float]
    ) -> Timed:
        """GPUs: the times of both sides, in slots of their own. estimates: rough seconds of a call of each."""
        one, fast, slow = checks.values.ranks[0], min(estimates), max(estimates)
        fits = self._sides.memory // max(3 * one.layout.stride + 2 * one.out_bytes, 1) - SINGLES
        wanted = max(2, min(int(BATCH_S / fast), int(SLOWER * BATCH_S / slow), self._most_calls, fits // 2))
        while True:
            values = Values(self.spec, trial, 2 * wanted + SINGLES, self.options.device)
            again = replace(checks, values=values, last=None)
            try:
                with self._lanes(teams, values, checked=False) as (candidate, baseline):
                    return RankBatches(again, candidate, baseline, wanted, self._rounds()).run()
            except TooMany as error:
                if wanted == 2:
                    raise RunnerError(Status.FAILED, str(error), False, error.who) from None
                self._most_calls = wanted = wanted // 2
            finally:
                checks.errors = again.errors

    @contextlib.contextmanager
    def _lanes(
        self, teams: tuple[Team, ...], values: Values, checked: bool = True
    ) -> Iterator[tuple[Lane, Lane]]:
        """Both sides with slots for these values. checked: with outputs in the judge's memory, too."""
        lanes: list[Lane] = []
        try:
            for team in teams:
                lanes.append(Lane(team, []))
                self._open_lane(lanes[-1], values, checked)
            yield lanes[0], lanes[1]
        finally:
            for lane in lanes:
                with contextlib.suppress(RunnerError):
                    if lane.team.alive:
                        lane.team.ask("free")
                for arena in lane.arenas:
                    with on(arena.device):
                        arena.close()

    @staticmethod
    def _open_lane(lane: Lane, values: Values, checked: bool) -> None:
        team, arenas = lane.team, lane.arenas
        theirs = team.trusted and values.device == "cuda"
        for v, fd in zip(values.ranks, team.arenas, strict=True):
            with on(torch.device(v.where)):
                arenas.append(Arena(v, v.count if checked else 0, fd, theirs))  # type: ignore[arg-type]

        def place(rank: int) -> dict[str, Any]:
            arena = arenas[rank]
            outs = [o.to_json() for o in values.ranks[rank].outs]
            return {"plan": values.ranks[rank].plan, "cells": arena.cells, "arena": arena.place, "outs": outs}

        replies = team.ask("case", each=place, fds=lambda rank: arenas[rank].fds)
        for rank, (arena, reply) in enumerate(zip(arenas, replies, strict=True)):
            if not theirs:
                continue
            if reply.memory is None or reply.memory.handle is None or reply.memory.offset is None:
                raise RunnerError(Status.FAILED, f"rank {rank} has allocated no memory", False, team.who)
            with on(arena.device):
                arena.attach(reply.memory.handle, reply.memory.offset)

    def _lost(self, error: RunnerError | None, loading: bool) -> None:
        self._deaths += 1
        self.close(failed=True)
        if error is not None and (loading or self._deaths >= DEATHS):
            more = "" if loading else f"; not restarted after {DEATHS} failures"
            self._failure = RunnerError(error.status, f"{error}{more}", True, error.who)
