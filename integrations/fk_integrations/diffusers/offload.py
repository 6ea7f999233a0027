"""Quick answers to a pipeline's questions for the device and the dtype of its models, before its first kernel.

For each, diffusers visits all modules of a model in search of hooks, while the GPU waits. In patched models the same
searches take a fraction of that time (docs/reports/2026-11-27-h100.md).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache, wraps
from typing import Any, cast
from weakref import WeakSet

from torch import nn

from fk_integrations.core.journal import Journal

_HOOKS = "_diffusers_hook"  # an attribute of modules
_GROUPS, _CASTING = "group_offloading", "layerwise_casting"  # names of hooks
_models: WeakSet[nn.Module] = WeakSet()  # that are patched
_replaced: list[Callable[[], None]] = []  # the ways back


def search_quickly(models: Iterable[nn.Module], journal: Journal) -> None:
    """Answer quickly for these models until the journal is undone; all others stay with the host's code."""
    new = [m for m in models if m not in _models]
    if not new:
        return
    if not _models:
        _replace("diffusers.hooks.group_offloading", "_get_top_level_group_offload_hook", _group_hook)
        _replace("diffusers.models.modeling_utils", "get_parameter_dtype", _dtype)
    _models.update(new)

    def back() -> None:
        _models.difference_update(new)
        while not _models and _replaced:
            _replaced.pop()()

    journal.add(back)


def _replace(path: str, name: str, quick: Callable[[nn.Module], Any]) -> None:
    """Replace a function of a module; `quick` returns NotImplemented where the host's code has to run."""
    home = importlib.import_module(path)
    theirs = getattr(home, name, None)
    if theirs is None:
        return

    @wraps(theirs)
    def ours(module: nn.Module) -> Any:
        found = quick(module) if module in _models else NotImplemented
        return theirs(module) if found is NotImplemented else found

    def back() -> None:
        if getattr(home, name) is ours:
            setattr(home, name, theirs)

    setattr(home, name, ours)
    _replaced.append(back)


def _group_hook(module: nn.Module) -> Any:
    return next((hook for r in _registries(module) if (hook := r.get_hook(_GROUPS)) is not None), None)


def _dtype(module: nn.Module) -> Any:
    """The dtype of the first parameter, unless hooks or lists of modules in float32 have a say."""
    casting = any(r.get_hook(_CASTING) is not None for r in _registries(module))
    first = next(module.parameters(), None)
    if (
        casting
        or first is None
        or not first.is_floating_point()
        or getattr(module, "_keep_in_fp32_modules", None)
    ):
        return NotImplemented
    return first.dtype


def _registries(root: nn.Module) -> Iterator[Any]:
    """The hooks of all modules, in the order of root.modules()."""
    seen: set[int] = set()
    rest: list[nn.Module | None] = [root]
    while rest:
        module = rest.pop()
        if module is None or id(module) in seen:
            continue
        seen.add(id(module))
        own, kind = module.__dict__, cast(Any, type(module))
        if _HOOKS in own or (_unusual(kind) and hasattr(module, _HOOKS)):
            yield getattr(module, _HOOKS)
        if children := own.get("_modules") or module._modules:
            rest.extend(reversed(children.values()))


@cache
def _unusual(cls: Any) -> bool:
    """Whether an attribute may exist that is not in an instance."""
    return cls.__getattr__ is not nn.Module.__getattr__ or hasattr(cls, _HOOKS)
