"""The values of a collective's calls: what each rank passes, in the judge's private memory, and what it must get."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastkernels.core.spec import OpSpec
from fk_bench.kernels.judge.correctness.cases import Trial
from fk_bench.kernels.judge.correctness.errors import Errors, Expected, compare
from fk_bench.kernels.judge.memory import layout
from fk_bench.kernels.judge.memory.slots import Out, scalable, written_arguments

Args = list[list[Any]]  # the arguments of each rank


def place(device: str, rank: int) -> str:
    """The device of a rank: ranks on GPUs have one each."""
    return f"{device}:{rank}" if device == "cuda" else device


class RankSlots:
    """One rank's arguments of `count` calls, as `Arena` publishes them. device: its kind; where: the rank's own."""

    def __init__(self, spec: OpSpec, first: list[Any], outs: list[Out], count: int, where: str):
        self.count, self.device, self.where, self.outs = count, where.partition(":")[0], where, outs
        self.may_change = {i for i in written_arguments(spec) if i < len(first) and first[i] is not None}
        self.layout = layout.describe(first, 1 << 62, self.may_change)
        self.plan, self.out_bytes = self.layout.to_json(), sum(o.nbytes for o in outs)
        self.private = torch.zeros(
            max(self.layout.arena_bytes(count), layout.ALIGN), dtype=torch.uint8, device=where
        )
        self.grid = self.private[: count * self.layout.stride].view(count, self.layout.stride)

    def args_of(self, slot: int) -> list[Any]:
        return layout.bind(self.plan, self.private, slot, self.count)

    def read_only(self) -> list[tuple[int, int]]:
        """(offset, bytes) in a slot of each region that the op does not write."""
        written = {
            a["tensor"]["region"] for i, a in enumerate(self.layout.args)
            if i in self.may_change and isinstance(a, dict) and "tensor" in a
        }  # fmt: skip
        regions = enumerate(self.layout.regions)
        return [(r["offset"], r["nbytes"]) for i, r in regions if i not in written and r["nbytes"]]


class Values:
    """The calls of a case over all ranks. Each rank's values are on its own device, the oracle is on rank 0's."""

    def __init__(self, spec: OpSpec, trial: Trial, count: int, device: str):
        self.spec, self.case, self.device, self._make = spec, trial.case, device, trial.make
        case = trial.case
        self.size = int(case.dims[spec.ranks])
        self.places = [place(device, rank) for rank in range(self.size)]
        first = self.draw()
        self.mutated = [i for i in written_arguments(spec) if i < len(first[0]) and first[0][i] is not None]
        outs = [
            [Out(t.dtype, tuple(t.shape)) for t in outputs]
            for outputs, _ in (self.split(r) for r in self.results(first))
        ]
        self.ranks = [RankSlots(spec, first[r], outs[r], count, where) for r, where in enumerate(self.places)]

    def home(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors on the oracle's device."""
        return [t.to(self.places[0]) for t in tensors]

    def draw(self) -> Args:
        """New arguments of one call, from secret seeds; replicated ones are rank 0's."""
        made = []
        for where in self.places:
            generator = torch.Generator(where).manual_seed(secrets.randbits(62))
            made.append(self._make(where, generator))
        for name in self.spec.replicated:
            i = self.spec.position(name)
            for args, where in zip(made[1:], self.places[1:], strict=True):
                args[i] = made[0][i] if made[0][i] is None else made[0][i].to(where, copy=True)
        return made

    def put(self, slot: int, args: Args) -> None:
        """Give a call these arguments."""
        for of_rank, mine in zip(self.ranks, args, strict=True):
            for into, value in zip(layout.tensors(of_rank.args_of(slot)), layout.tensors(mine), strict=True):
                into.copy_(value)

    def args(self, slot: int) -> Args:
        return [r.args_of(slot) for r in self.ranks]

    def results(self, args: Args, wide: bool = False) -> list[Any]:
        """The results of the reference for each rank, from copies of the arguments; wide: in float64."""

        def copied(t: torch.Tensor) -> torch.Tensor:
            dtype = torch.float64 if wide and t.is_floating_point() else t.dtype
            return t.to(self.places[0], dtype, copy=True)

        lists = []
        for values in zip(*args, strict=True):
            tensors = isinstance(values[0], torch.Tensor)
            lists.append([copied(t) for t in values] if tensors else values[0])
        return list(self.spec.reference(*lists))

    def split(self, result: Any) -> tuple[list[torch.Tensor], dict[int, torch.Tensor]]:
        """(outputs, new values of written arguments) of one rank."""
        values = [v for v in (result if isinstance(result, (tuple, list)) else (result,)) if v is not None]
        if not self.mutated:
            return values, {}
        n = len(values) - len(self.mutated)
        return values[:n], dict(zip(self.mutated, values[n:], strict=True))

    def errors(
        self, slot: int, got: Sequence[Sequence[torch.Tensor]], allowed: float | None, baseline: Errors
    ) -> Errors:
        """Compare what all ranks have written in a call, outputs first, with the oracle's in float64."""
        args, total = self.args(slot), Errors()
        want = self.results(args, wide=True)
        native: list[Any] = []

        def run(rank: int) -> Callable[[], list[torch.Tensor]]:
            def of_rank() -> list[torch.Tensor]:
                native.extend([] if native else self.results(args))
                outputs, written = self.split(native[rank])
                return [*outputs, *written.values()]

            return of_rank

        for rank, mine in enumerate(got):
            outputs, written = self.split(want[rank])
            dtypes = [o.dtype for o in self.ranks[rank].outs] + [args[rank][i].dtype for i in written]
            expected = Expected(outputs, written, run(rank), dtypes)
            errors = compare(self.spec, self.case, self.home(mine), expected, allowed, (), baseline)
            if errors.problem:
                errors.problem = f"rank {rank}: {errors.problem}"
                return errors
            total = total.worse(errors)
        return total


def activations(spec: OpSpec, args: list[Any]) -> list[torch.Tensor]:
    """The tensors of a rank whose values can be anything, and are not those of the other ranks."""
    own = [i for i in spec.activations if spec.arguments[i].name not in spec.replicated and i < len(args)]
    return [args[i] for i in own if isinstance(args[i], torch.Tensor) and scalable(args[i])]


Situation = Callable[
    [OpSpec, Args, Args | None, int], None
]  # (op, new arguments, those of the last call, a rank)


def _zero_rank(spec: OpSpec, args: Args, last: Args | None, rank: int) -> None:
    for t in activations(spec, args[rank]):
        t.zero_()


def _zero_others(spec: OpSpec, args: Args, last: Args | None, rank: int) -> None:
    for r in range(len(args)):
        if r != rank:
            _zero_rank(spec, args, last, r)


def _repeated_rank(spec: OpSpec, args: Args, last: Args | None, rank: int) -> None:
    if last is not None:
        for into, t in zip(activations(spec, args[rank]), activations(spec, last[rank]), strict=True):
            into.copy_(t)


def _repeated_others(spec: OpSpec, args: Args, last: Args | None, rank: int) -> None:
    for r in range(len(args)):
        if r != rank:
            _repeated_rank(spec, args, last, r)


def _equal(spec: OpSpec, args: Args, last: Args | None, rank: int) -> None:
    for mine in args:
        for into, t in zip(activations(spec, mine), activations(spec, args[rank]), strict=True):
            into.copy_(t)


def _one_value(spec: OpSpec, args: Args, last: Args | None, rank: int) -> None:
    for r, mine in enumerate(args):
        for t in activations(spec, mine):
            t.fill_(0.75 if r == rank else -0.5)


def _large_rank(spec: OpSpec, args: Args, last: Args | None, rank: int) -> None:
    for t in activations(spec, args[rank]):
        t.mul_(64)


def _tiny(spec: OpSpec, args: Args, last: Args | None, rank: int) -> None:
    for mine in args:
        for t in activations(spec, mine):
            t.mul_(2.0**-12)


SITUATIONS: dict[str, Situation] = {
    "zero rank": _zero_rank, "zero others": _zero_others, "repeated rank": _repeated_rank,
    "repeated others": _repeated_others, "equal ranks": _equal, "one value": _one_value, "large rank": _large_rank,
    "tiny": _tiny,
}  # fmt: skip
