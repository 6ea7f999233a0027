"""Classes of transformers that listed targets stand for, recognized by what their forward computes."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from functools import cache
from typing import Any

from fastkernels.core import registry
from fastkernels.core.spec import Target
from fk_integrations.core import versions
from fk_integrations.core.adapter import class_path
from fk_integrations.live.decorated import host_function, plain_function

MODELS = "transformers.models."


def installed_version() -> str | None:
    return versions.installed("transformers")


def semantics(cls: type) -> str:
    """Semantics of the current forward of a class, as recorded for targets; '' if its source cannot be read."""

    def method(name: str) -> ast.FunctionDef | None:
        return _parsed(getattr(host_function(vars(cls).get(name)), "__code__", None))

    return versions.semantics(method) if method("forward") is not None else ""


def function_semantics(function: Any) -> str:
    """Semantics of a function, as recorded for targets; '' if its source cannot be read."""
    node = _parsed(getattr(host_function(plain_function(function)), "__code__", None))
    return versions.semantics({node.name: node}.get, node.name) if node is not None else ""


# In models of images, the frequencies of three axes are put together first.
_RETURNS_HALVES = re.compile(r"return torch\.cat\([(\[](\w+), \1[)\]], dim=-1\)")


@cache
def repeats(source: type) -> str:
    """The channels to which a class of rotary embeddings gives one frequency.

    'halves': j and j + rotary_dim / 2; 'pairs': 2 j and 2 j + 1; '' for another class.
    """
    try:
        code = inspect.getsource(source)
    except (OSError, TypeError):
        return ""
    if "torch.cat((freqs, freqs), dim=-1)" in code or _RETURNS_HALVES.search(code):
        return "halves"
    return "pairs" if "torch.repeat_interleave(freqs, 2, dim=-1)" in code else ""


@cache
def _parsed(code: Any) -> ast.FunctionDef | None:
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
    except (OSError, TypeError):  # not of the function, which may be a wrapper's
        return None
    return node if isinstance(node, ast.FunctionDef) else None


@cache
def known(path: str) -> frozenset[str]:
    """Semantics of the forward of a target's class, in the recorded versions that the target is for."""
    targets = [t for op in registry.op_names() for t in registry.get(op).targets if t.path == path]
    recorded = (
        data["classes"].get(path, {})
        for version, data in versions.recorded("transformers").items()
        if not targets or any(t.applies_to(version) for t in targets)
    )
    return frozenset(entry["semantics"] for entry in recorded if "semantics" in entry)


@cache
def listed_paths() -> set[str]:
    """The paths of all listed targets."""
    targets = (registry.get(name).targets_for("transformers") for name in registry.op_names())
    return {target.path for several in targets for target in several}


@cache
def _by_semantics() -> dict[str, list[tuple[str, Target]]]:
    """{what a forward computes: (op, target)} of the targets that are classes of a model.

    Without attention and the layers around it, which are `tried`: they are matched by their parts.
    """
    found: dict[str, list[tuple[str, Target]]] = {}
    for op in registry.op_names():
        for target in registry.get(op).targets_for("transformers", installed_version()):
            if (
                target.path.startswith(MODELS)
                and target.seam not in ("function", "called_function")
                and not target.tried
            ):
                for semantics in known(target.path):
                    found.setdefault(semantics, []).append((op, target))
    return found


@cache
def _by_path() -> dict[str, tuple[str, Target]]:
    """{path: (op, target)} of the targets outside models: of transformers, and of torch."""
    found: dict[str, tuple[str, Target]] = {}
    for op in registry.op_names():
        spec = registry.get(op)
        for host in ("transformers", "torch"):
            for target in spec.targets_for(host, versions.installed(host)):
                if not target.path.startswith(MODELS):
                    found[target.path] = (op, target)
    return found


def is_listed(module: Any) -> bool:
    """Whether a target covers this module, by its path or by what its forward computes."""
    cls = type(module)
    path = class_path(cls)
    if not path.startswith(MODELS):
        if path not in _by_path():
            return False
        applies = getattr(registry.target_class(_by_path()[path][1]), "applies", None)
        return applies is None or bool(applies(module))
    found = semantics(cls)
    return bool(found) and any(found in known(listed) for listed in listed_paths())


def target_of(module: Any) -> tuple[str, Target] | None:
    """(op, target) of the listed class that this module's class is, or whose forward computes the same; or None."""
    cls = type(module)
    path = class_path(cls)
    if not path.startswith(MODELS):
        return _by_path().get(path)
    same = _by_semantics().get(semantics(cls), [])
    return next(((op, target) for op, target in same if is_for(target, module)), None)


def is_for(target: Target, module: Any) -> bool:
    """Whether the op is what this module computes: that of an MLP depends on its activation, not on its class."""
    test = getattr(registry.target_class(target), "is_for", None)
    return test is None or test(module)
