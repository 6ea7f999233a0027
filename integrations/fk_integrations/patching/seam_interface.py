"""Seam: a place in a host where our code goes in. Each is one file in fk_integrations/seams, found by its stem."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from fastkernels.core.reasons import Kind, Reason
from fastkernels.core.spec import Target
from fk_integrations.core.adapter import Adapter
from fk_integrations.core.instance_class import change_class
from fk_integrations.core.journal import Journal
from fk_integrations.core.lookalikes import with_reason
from fk_integrations.live import trials
from fk_integrations.live.eager_steps import keep_pinned
from fk_integrations.live.live_class import live_class
from fk_integrations.live.tally import Tally
from fk_integrations.live.trials import Trial

FOLDER = Path(__file__).resolve().parents[1] / "seams"


@dataclass(frozen=True)
class Swap:
    """One module that is to run our class `ours`.

    by_table  only calls that a tuned table lists as faster run ours
    trial     decides at the first calls whether ours runs; None: always
    differentiable  the op, if calls of the module may need gradients; see live_class.inference_only
    tally     counts the calls of the row's modules; None where the process has one model
    op        the op's name, for a seam in which the host makes the change (HostOp)
    captures  whether the host captures a graph now: only then and in compiled code do calls run ours; None: in all
    """

    adapter: Adapter
    module: Any
    host_class: type
    ours: type
    journal: Journal
    by_table: bool = False
    trial: Trial | None = None
    differentiable: str = ""
    tally: Tally | None = None
    op: str = ""
    captures: Callable[[], bool] | None = None


class Seam:
    """How a module gets our code. Subclasses hold no state.

    live      whether the seam exists in a loaded model; the others are for forks and our own engine
    optional  whether an unsupported module counts as left to the host when the op was not requested
    order     targets of seams with lower numbers are handled first
    every_step  whether a model calls its modules in every step or never; others may wait for a decode
    decided  whether the first calls of its modules may decide between the host and ours
    counted  whether calls of its modules prove a row, because its op has no function that counts
    short    whether a call of its modules may take the CPU longer than the GPU: see live.eager_steps
    tallies  whether the seam counts the calls of each row in every host: a module may have several rows
    """

    live = True
    optional = False
    order = 0
    every_step = False
    decided = False
    counted = False
    short = False
    tallies = False

    def modules(self, adapter: Adapter, model: Any, op: str, host_class: type) -> list[Any]:
        """The modules of exactly this host class, each once; a subclass may have been changed by other code."""
        return [m for m in adapter.modules(model) if type(m) is host_class]

    def passed_over(self, model: Any, host_class: type, known: Callable[[str], bool]) -> list[Reason]:
        """A reason for each module of the same kind that no target covers.

        known  whether a class, by its path, is a target
        """
        return []

    def swap(self, swap: Swap) -> Reason | None:
        """Make the change, noted in the journal; None, or why nothing was changed."""
        raise NotImplementedError(f"{type(self).__name__} is not for live models")


def set_live_class(swap: Swap) -> None:
    """Change a module's class, to one whose first calls decide if the swap has a trial."""
    live = live_class(
        swap.host_class,
        swap.ours,
        trial=swap.trial,
        differentiable=swap.differentiable,
        captures=swap.captures,
        candidates="" if swap.tally is None else swap.tally.scope.candidates,
    )
    if swap.captures is not None:
        keep_pinned(swap.module, swap.journal)
    swap.journal.set_class(swap.module, live)
    if swap.tally is not None:
        swap.tally.add(swap.module, swap.module, swap.journal)
    if swap.trial is not None:
        back = partial(change_class, swap.module, swap.host_class)
        swap.trial.begin(swap.module, trials.sizes_of(swap.module), back, swap.journal)


def other_classes(model: Any, host_class: type, known: Callable[[str], bool]) -> list[Reason]:
    """A reason for each module of a subclass of the host's class, or of another class with its name."""
    found: list[Reason] = []
    for module in model.modules():
        kind: Any = type(module)
        derived = issubclass(kind, host_class)
        if kind is host_class or hasattr(kind, "fastkernels") or not (derived or _namesake(kind, host_class)):
            continue
        if not known(f"{kind.__module__}:{kind.__qualname__}"):
            what = "a subclass" if derived else "another class of that name"
            host = host_class.__module__.partition(".")[0]
            found.append(Reason(Kind.OTHER_CLASS, with_reason(kind, host, what)))
    return found


def _namesake(kind: type, host_class: type) -> bool:
    return kind.__name__ == host_class.__name__ and not kind.__module__.startswith("torch.")


def host_class(target: Target) -> Any:
    """The host's class or function that a target replaces; None if this version of the host has none."""
    module, _, name = target.path.partition(":")
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def names() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.py") if file.stem != "__init__")


@cache
def find(name: str) -> Seam:
    """The seam of that name. Raises LookupError if there is no such file, or if it defines several seams or none."""
    if name not in names():
        raise LookupError(f"unknown seam {name!r}. Known: {', '.join(names())}")
    module = importlib.import_module(f"fk_integrations.seams.{name}")
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Seam) and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise LookupError(f"{module.__file__} defines {len(found)} seams, not one")
    return found[0]()
