"""Steps of data-parallel ranks that share experts: what each rank has to know of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fastkernels.engine.steps.step import StepInput, Together


def idle_step(dummy: int) -> StepInput:
    """The step of a data-parallel rank without requests: one token of the dummy slot, which is never read."""
    one = np.ones(1, dtype=np.int32)
    zero = np.zeros(1, dtype=np.int64)
    return StepInput(np.array([dummy]), one, one, zero, zero, 1, np.empty((0, 3), dtype=np.int32))


def step_together(steps: Sequence[StepInput | None], idle: StepInput) -> list[StepInput]:
    """A step for each rank, with what all have in common. None: the rank has no requests, and gets the idle step."""
    given = [step for step in steps if step is not None]
    verify = any(step.drafts is not None for step in given) and all(map(_has_only_drafts, given))
    nexts = [step.next_drafts for step in given if step.next_drafts is not None]
    common = Together(
        tokens=max(len(step.input_ids) for step in given),
        rows=max(len(step.slots) for step in given),
        decode=all(len(step.input_ids) == len(step.slots) for step in given),
        verify=verify,
        # A graph that verifies drafts may go on to the chain, for which ranks without a graph then have to come, too.
        proposes=any(verify or each.count for each in nexts),
    )
    # Behind its sampling a masked step goes on to the draft model's passes, for which all ranks come together.
    masked = any(step.masked for step in given) and bool(nexts)
    return [
        replace(step, together=common, masked=masked or step.masked)
        for step in (step or idle for step in steps)
    ]


def _has_only_drafts(step: StepInput) -> bool:
    """Whether each row has one token and its drafts, as in a graph of steps with drafts."""
    drafts = 0 if step.drafts is None else step.drafts
    others = step.masked or step.media is not None or len(step.prompt_targets)
    return not others and bool((step.query_lens == drafts + 1).all()) and int(step.offsets.min()) >= 0
