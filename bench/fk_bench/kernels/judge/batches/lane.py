"""The parts of a timed case: two lanes with their memory, sampled calls, and the times."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fk_bench.core.rows import Status
from fk_bench.core.wall_time import PHASES
from fk_bench.kernels.judge.clock.call_times import Samples
from fk_bench.kernels.judge.correctness.checks import Checks, Wrong
from fk_bench.kernels.judge.memory import ipc, layout
from fk_bench.kernels.judge.memory.arena import Arena
from fk_bench.kernels.judge.memory.outputs import BadPlace, map_outputs
from fk_bench.kernels.judge.memory.place import Place
from fk_bench.kernels.judge.memory.slots import Slots, poison
from fk_bench.kernels.judge.processes.messages import Traced
from fk_bench.kernels.judge.processes.runner_process import RunnerError, RunnerProcess


@dataclass
class Lane:
    """One side in a timed case: its process, its memory, and the places of its outputs by slot.

    prepares  it runs a baseline that prepares weights
    """

    side: RunnerProcess
    arena: Arena
    outputs: list[list[torch.Tensor]] = field(default_factory=list)
    prepares: bool = False

    def changing(self, slot: int) -> list[torch.Tensor]:
        """The arguments of a call that the op may write, in this memory."""
        args = enumerate(self.arena.args_of(slot))
        return [t for i, a in args if i in self.arena.slots.may_change for t in layout.tensors(a)]

    def sample(self, slot: int) -> Sampled:
        """Copies of what a call has written, on a GPU not yet complete."""
        return Sampled(
            slot, [v.clone() for v in self.outputs[slot]], [t.clone() for t in self.changing(slot)]
        )

    def poison(self, slot: int) -> None:
        """Overwrite a call's outputs, except memory that is also an argument."""
        first, size = self.arena.bytes.data_ptr(), self.arena.bytes.nbytes
        cuda = self.arena.slots.device == "cuda"
        poison([v for v in self.outputs[slot] if not cuda or not 0 <= v.data_ptr() - first < size])

    def prepare(self, start: int, count: int) -> None:
        """Let a baseline prepare the weights of these slots, neither captured nor timed, as a host does at load.

        Calls whose outputs are not compared use the weights of an earlier one, which take as long.
        """
        if self.prepares and self.side.trusted:
            self.arena.publish(start, count)
            self.side.ask("prepare", start=start, count=count)
            self.side.stop()


@dataclass
class Sampled:
    """Copies of a call's outputs and written arguments, made by the judge before the side could change them."""

    slot: int
    outputs: list[torch.Tensor]
    args: list[torch.Tensor]

    def check(self, checks: Checks, slots: Slots, arena: Arena) -> None:
        """Raises Wrong."""
        checks.sampled(slots, arena, self.slot, self.outputs, self.args)


@dataclass
class Timed:
    """Times of both sides; `again` is a second set of batches, or on a CPU of calls, of the baseline.

    traced    the candidate's claim
    priority  CPU: whether real-time priority was on, or why it was off
    """

    candidate: Samples
    baseline: Samples
    again: Samples
    traced: Traced = field(default_factory=Traced)
    priority: str = "on"


@PHASES.of("memory")
def mapped(
    arena: Arena,
    places: list[list[Place]],
    mapping: ipc.Mapping,
    own: bool,
    trusted: bool,
    who: str = "",
) -> list[list[torch.Tensor]]:
    """The outputs of all slots of a process, where it says that they lie.

    own  it is the candidate's: a bad place is Wrong, and the baseline's a RunnerError. who: in front of the message
    """
    try:
        return map_outputs(arena, places, mapping, over_inputs=trusted)
    except BadPlace as error:
        if own:
            raise Wrong(f"{who}{error}") from None
        raise RunnerError(Status.WRONG, f"{who}{error}", False, "baseline") from None


def check_written(outputs: list[torch.Tensor]) -> None:
    """Raises Wrong if one of these outputs of floats still is what the judge poisoned it with."""
    left = [
        (v.reshape(-1).view(torch.uint8) == 0xFF).all() for v in outputs if v.is_floating_point() and v.numel()
    ]  # fmt: skip
    if left and bool(torch.stack(left).any()):
        raise Wrong("a timed call wrote nothing")
