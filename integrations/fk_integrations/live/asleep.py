"""Modules whose eager calls are the host's have the host's class, until code is compiled or a CUDA graph is captured.

A wrapper of ours around each such call would cost an eager model more than it can gain: its CPU is the limit. One
module for each size stays awake and sees the shapes of new calls; see trials.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch._dynamo.callback import callback_handler

from fk_integrations.core.instance_class import change_class, is_bound_method

FIRST_CALL = "_fastkernels_first_call"  # the decisions of a module
TALLY = "_fastkernels_calls"
_groups: WeakSet[Group] = WeakSet()


@dataclass
class _Sleeper:
    holder: Any
    live: type
    host: type
    kept: dict[str, Any]


class Group:
    """The sleeping modules of one trial, or of all trials of a patch.

    together  whether one module stays awake for all; else one of each size
    allowed   whether modules may sleep. Never again once code was compiled, whose guards know the modules' classes
    """

    def __init__(self, together: bool = False) -> None:
        self.together, self.allowed = together, True
        self.awake: dict[Any, Any] = {}  # {size: the one that stays awake}
        self.asleep: dict[int, _Sleeper] = {}
        _groups.add(self)

    def stays_awake(self, module: Any, sizes: Any) -> bool:
        """Whether this is the module that sees the shapes of new calls: the first one that is given."""
        return self.awake.setdefault(None if self.together else sizes, module) is module

    def sleep(self, holder: Any) -> None:
        """Give an object the host's class and nothing of ours, so that a copy of it has nothing of ours either."""
        if not self.allowed or not _watch():
            return
        live: Any = type(holder)
        kept = {key: vars(holder)[key] for key in (FIRST_CALL, TALLY) if key in vars(holder)}
        self.asleep[id(holder)] = _Sleeper(holder, live, live.__mro__[1], kept)
        change_class(holder, live.__mro__[1])
        for key in kept:
            del vars(holder)[key]

    def wake(self) -> None:
        """Give all objects the live classes again; one that other code has changed meanwhile stays as it is.

        Hooks of CPU offload, for example, set a `forward` of the object, which calls that of the host's class.
        """
        for key, sleeper in list(self.asleep.items()):
            holder, own = sleeper.holder, vars(sleeper.holder).get("forward")
            if type(holder) is sleeper.host and (own is None or is_bound_method(holder, own)):
                vars(holder).update(sleeper.kept)
                change_class(holder, sleeper.live)
            self.asleep.pop(key, None)


def wake_all(for_good: bool = False) -> None:
    """Wake all modules: before the patcher looks at a model, and before code is captured or, for good, compiled."""
    for group in list(_groups):
        group.allowed = group.allowed and not for_good
        group.wake()
    for owner, name, _ in _PLACES:
        found = vars(owner).get(name)
        if (theirs := getattr(found, "wakes_before", None)) is not None:
            if owner is callback_handler:
                delattr(owner, name)
            else:
                setattr(owner, name, theirs)


# Where torch begins to capture a CUDA graph and to compile. torch.compiler.reset() would remove a registered callback.
_PLACES: tuple[tuple[Any, str, bool], ...] = (
    (torch.cuda.CUDAGraph, "capture_begin", False),
    (callback_handler, "run_start_callbacks", True),
)


def _watch() -> bool:
    """Let torch wake the modules from now until `wake_all`; False if this torch has no such places."""
    if not all(hasattr(owner, name) for owner, name, _ in _PLACES):
        return False
    for owner, name, for_good in _PLACES:
        theirs = getattr(owner, name)
        if not hasattr(theirs, "wakes_before"):
            setattr(owner, name, _waking(theirs, for_good))
    return True


def _waking(theirs: Callable[..., Any], for_good: bool) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        wake_all(for_good)
        return theirs(*args, **kwargs)

    run.wakes_before = theirs  # type: ignore[attr-defined]
    return run
