"""Eager calls of a host that serves from CUDA graphs.

A step that is not captured is bound by the CPU unless it is large. A call of ours goes through torch's dispatcher and a
launcher in Python, which takes longer than the host's own call: with ours, SGLang's prompts of 512 tokens took 33 ms
instead of 25 (Ministral-8B, H200). So eager calls of modules that no user has named run the host's code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from fastkernels.core import dispatch
from fk_integrations.core.journal import Journal
from fk_integrations.live.decorated import wrapper

PINNED = "_forward_method"  # the bound method that a dispatching class of a host calls
THEIRS = "_fastkernels_eager"  # what PINNED was before the patch


@cache
def captured_only(
    theirs: Callable[..., Any], ours: Callable[..., Any], captures: Callable[[], bool]
) -> Callable[..., Any]:
    """Make a method that runs `ours` where a graph is captured, code is compiled or calls are recorded, else `theirs`.

    captures  whether the host captures a graph now
    """

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if captures() or torch.compiler.is_compiling() or dispatch.recorded():
            return ours(self, *args, **kwargs)
        pinned = vars(self).get(THEIRS)
        return theirs(self, *args, **kwargs) if pinned is None else pinned(*args, **kwargs)

    return wrapper(run, ours)


def keep_pinned(module: Any, journal: Journal) -> None:
    """Note the host's method that a module is bound to, before a change of its class binds it to ours."""
    pinned = vars(module).get(PINNED)
    if pinned is not None:
        vars(module)[THEIRS] = pinned
        journal.add(lambda: vars(module).pop(THEIRS, None))
