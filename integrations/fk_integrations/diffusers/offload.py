"""Quick answers to a pipeline's questions for the device and the dtype of its models, before its first kernel.

For each, diffusers visits all modules of a model in search of hooks, while the GPU waits; after the last step it does
so to reset them. In patched models the same searches take a fraction of that time (docs/reports/2026-11-27-h100.md).
"""

from __future__ import annotations

import gc
import importlib
import threading
from collections.abc import Callable, Iterable
from functools import cache, wraps
from itertools import compress, repeat
from operator import contains, is_, itemgetter
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from fk_integrations.core.journal import Journal

_HOOKS = "_diffusers_hook"  # an attribute of modules
_GROUPS, _CASTING = "group_offloading", "layerwise_casting"  # names of hooks


class _Found(threading.local):
    """The hooks of models while the host answers one question."""

    by_model: dict[nn.Module, list[Any]] | None = None


_found = _Found()
_CHILDREN = itemgetter("_modules")
_models: WeakKeyDictionary[nn.Module, _Tree | None] = WeakKeyDictionary()  # that are patched
_replaced: list[Callable[[], None]] = []  # the ways back


def search_quickly(models: Iterable[nn.Module], journal: Journal) -> None:
    """Answer quickly for these models until the journal is undone; all others stay with the host's code."""
    new = [m for m in models if m not in _models]
    if not new:
        return

    def back() -> None:
        for model in new:
            _models.pop(model, None)
        while not _models and _replaced:
            _replaced[-1]()
            _replaced.pop()

    journal.add(back)
    if not _replaced:
        hooks = importlib.import_module("diffusers.hooks")
        _replace(hooks.group_offloading, "_get_top_level_group_offload_hook", _group_hook)
        _replace(hooks.HookRegistry, "reset_stateful_hooks", _reset)
        _replace(importlib.import_module("diffusers.models.modeling_utils"), "get_parameter_dtype", _dtype)
        _search_once(importlib.import_module("diffusers.pipelines.pipeline_utils").DiffusionPipeline)
    _models.update(dict.fromkeys(new))


def _replace(home: Any, name: str, quick: Callable[..., Any]) -> None:
    """Replace a function of a module or class; `quick` returns NotImplemented where the host's code has to run."""
    theirs = getattr(home, name, None)
    if theirs is None:
        return

    @wraps(theirs)
    def ours(*args: Any, **kwargs: Any) -> Any:
        found = NotImplemented if torch.compiler.is_compiling() else quick(*args, **kwargs)
        return theirs(*args, **kwargs) if found is NotImplemented else found

    def back() -> None:
        if getattr(home, name) is ours:
            setattr(home, name, theirs)

    _replaced.append(back)
    setattr(home, name, ours)


def _search_once(pipelines: Any) -> None:
    """Search each model once for the device of a pipeline: the host does so up to three times, and changes nothing."""
    theirs = vars(pipelines).get("_execution_device")
    if not isinstance(theirs, property):
        return

    def ours(self: Any) -> Any:
        before, _found.by_model = _found.by_model, {}
        try:
            return theirs.__get__(self)
        finally:
            _found.by_model = before

    shown = property(ours, doc=theirs.__doc__)

    def back() -> None:
        if pipelines._execution_device is shown:
            pipelines._execution_device = theirs

    _replaced.append(back)
    pipelines._execution_device = shown


def _group_hook(module: nn.Module) -> Any:
    if module not in _models:
        return NotImplemented
    return next((hook for r in _registries(module) if (hook := r.get_hook(_GROUPS)) is not None), None)


def _dtype(parameter: nn.Module) -> Any:
    """The dtype of the first parameter, unless hooks or lists of modules in float32 have a say."""
    module = parameter  # the host's name of this argument
    if module not in _models or any(r.get_hook(_CASTING) is not None for r in _registries(module)):
        return NotImplemented
    first = next(module.parameters(), None)
    if first is None or not first.is_floating_point() or getattr(module, "_keep_in_fp32_modules", None):
        return NotImplemented
    return first.dtype


def _reset(self: Any, recurse: bool = True) -> Any:
    """Nothing to do, unless a hook keeps a state."""
    module = self._module_ref
    if not recurse or module not in _models:
        return NotImplemented
    hooks = (hook for registry in (self, *_registries(module)) for hook in registry.hooks.values())
    return NotImplemented if any(hook._is_stateful for hook in hooks) else None


def _registries(root: nn.Module) -> list[Any]:
    """The hooks of all modules, in the order of root.modules()."""
    if _found.by_model is not None and root in _found.by_model:
        return _found.by_model[root]
    tree = _models.get(root)
    found = tree.registries() if tree is not None else None
    if found is None:  # the first question, or other modules than at the last one
        _models[root] = _Tree(root)
        found = [getattr(module, _HOOKS) for module in root.modules() if hasattr(module, _HOOKS)]
    if _found.by_model is not None:
        _found.by_model[root] = found
    return found


class _Tree:
    """The modules that a visit has found. It keeps none alive, and looks again without a step of Python for each."""

    def __init__(self, root: nn.Module) -> None:
        modules = list(root.modules())
        self.known = all(type(vars(m).get("_modules")) is dict for m in modules)  # not so in TorchScript
        if not self.known:
            return
        place = {id(module): i for i, module in enumerate([*modules, None])}
        links, self.counts = _links([*map(vars, modules)])
        self.links = [place.get(id(child), -1) for child in links]  # of each module's children in `modules`
        self.refs = [*map(ref, modules)]
        self.classes = [*map(type, modules)]
        self.unusual = [i for i, cls in enumerate(self.classes) if _unusual(cls)]

    def registries(self) -> list[Any] | None:
        """The hooks of the modules, or None if root.modules() may return others."""
        if not self.known:
            return None
        modules: list[Any] = [*map(ref.__call__, self.refs)]
        if [*map(type, modules)] != self.classes:
            return None
        own = [*map(vars, modules)]
        links, counts = _links(own)
        before = map([*modules, None].__getitem__, self.links)
        if counts != self.counts or not all(map(is_, links, before)):
            return None
        marks = [*map(contains, own, repeat(_HOOKS))]
        for i in self.unusual:
            marks[i] = hasattr(modules[i], _HOOKS)
        return [getattr(module, _HOOKS) for module in compress(modules, marks)]


def _links(own: list[Any]) -> tuple[list[Any], list[int]]:
    """The children of modules with these attributes, and the number of each module's."""
    children = [*map(_CHILDREN, own)]
    # The values of the dicts, in order. With anything else in them, the links differ, and a visit follows.
    return gc.get_referents(*children), [*map(len, children)]


@cache
def _unusual(cls: Any) -> bool:
    """Whether an attribute may exist that is not in an instance."""
    return cls.__getattr__ is not nn.Module.__getattr__ or hasattr(cls, _HOOKS)
