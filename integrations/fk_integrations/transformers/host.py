"""transformers: norms, gated MLPs and activations of a live model.

transformers repeats the same few lines under a hundred class names. Norms and MLPs are therefore recognized by a
fingerprint of their forward's body; the listed targets are examples, used to compare signatures. An activation is one
class that all models share, recognized by its path and the fingerprint of its source, as in other hosts.
"""

from __future__ import annotations

import ast
import inspect
import os
import sys
import textwrap
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

from fastkernels.core import registry
from fastkernels.core.reasons import Kind, Reason
from fastkernels.core.spec import OpSpec, Target
from fastkernels.patch import PatchError, Request
from fk_integrations.core import versions
from fk_integrations.core.adapter import Adapter
from fk_integrations.core.apply import Patched, apply

STATE = "_fastkernels_patched"
# {op: {fingerprint of a forward's body: a class that has it}}
FORWARDS: dict[str, dict[str, str]] = {
    "rms_norm": {"50b8139e32eaccc8": "LlamaRMSNorm"},
    "gated_mlp": {"5b8abf7af12a4b42": "LlamaMLP", "8380185829972097": "Idefics2MLP"},
    "t5_layer_norm": {"6e5716cbae314fd4": "T5LayerNorm"},
}
# {op: (end of the name, attributes)} of classes that may compute it
LOOKS_LIKE = {
    "rms_norm": ("RMSNorm", ("weight",)),
    "gated_mlp": ("MLP", ("gate_proj", "up_proj", "down_proj")),
}
ATTRIBUTES = {
    "rms_norm": ("weight", "variance_epsilon"),
    "t5_layer_norm": ("weight", "variance_epsilon"),
    "gated_mlp": ("gate_proj", "up_proj", "down_proj", "act_fn"),
}


def installed_version() -> str | None:
    return versions.installed("transformers")


def forward_fingerprint(cls: Any) -> str:
    """The fingerprint of the current forward's body, '' if its source cannot be read."""
    return _body_fingerprint(getattr(cls.__dict__.get("forward"), "__code__", None))


@cache
def _body_fingerprint(code: Any) -> str:
    try:
        source = textwrap.dedent(inspect.getsource(code))  # not of the function, which may be a wrapper's
    except (OSError, TypeError):
        return ""
    function = ast.parse(source).body[0]
    if not isinstance(function, ast.FunctionDef):
        return ""
    lines = source.splitlines()[function.body[0].lineno - 1 : function.end_lineno]
    return versions.fingerprint("\n".join(lines))


@cache
def _listed() -> set[str]:
    """The paths of all listed targets."""
    targets = (registry.get(name).targets_for("transformers") for name in registry.op_names())
    return {target.path for several in targets for target in several}


class TransformersAdapter(Adapter):
    """Targets are the model's classes with a known forward, and the listed activations."""

    host = "transformers"

    def __init__(self) -> None:
        self.version = installed_version() or ""

    def targets(self, spec: OpSpec, model: Any) -> list[Target]:
        known = FORWARDS.get(spec.name)
        listed = spec.targets_for(self.host, self.version)
        classes: dict[Any, Any] = {
            type(m): m for m in model.modules() if type(m).__module__.startswith("transformers.")
        }
        if known is None or not listed:
            paths = {f"{c.__module__}:{c.__qualname__}" for c in classes}
            return [t for t in listed if t.path in paths]
        return [
            replace(listed[0], path=f"{c.__module__}:{c.__qualname__}", note="")
            for c, module in classes.items()
            if forward_fingerprint(c) in known and all(hasattr(module, a) for a in ATTRIBUTES[spec.name])
        ]

    def unrecognized(self, op: str, model: Any) -> dict[Reason, int]:
        """Modules that look like a norm or MLP of the op by name and attributes, and that no op replaces."""
        found: Counter[Reason] = Counter()
        for module in model.modules() if op in LOOKS_LIKE else ():
            cls: Any = type(module)
            (end, attributes), path = LOOKS_LIKE[op], f"{cls.__module__}:{cls.__qualname__}"
            theirs = cls.__module__.startswith("transformers.") and not hasattr(cls, "fastkernels")
            if (
                not theirs
                or not cls.__name__.endswith(end)
                or not all(hasattr(module, a) for a in attributes)
            ):
                continue
            if path not in _listed() and all(forward_fingerprint(cls) not in f for f in FORWARDS.values()):
                name = path.replace(":", ".")
                found[Reason(Kind.OTHER_CLASS, f"{name}, whose forward is not one that {op} replaces")] += 1
        return dict(found)

    def unknown(self, target: Target, host_class: Any) -> Reason | None:
        if any(forward_fingerprint(host_class) in known for known in FORWARDS.values()):
            return None  # `targets` has compared the source
        return super().unknown(target, host_class)


class TransformersHost:
    """fastkernels.patch.Host for a transformers model, or a torch module that contains parts of one."""

    name = "transformers"

    def version(self) -> str | None:
        return installed_version()

    def matches(self, target: Any) -> bool:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(target, torch.nn.Module):
            return False
        return any(type(m).__module__.startswith("transformers.") for m in target.modules())

    def call(self, target: Any, request: Request) -> list[dict[str, Any]]:
        """See Host. The model lives in this process."""
        if isinstance(target, str):
            raise PatchError("transformers models are patched live: pass the model, not the host's name")
        patched: Patched | None = vars(target).get(STATE)
        if request.action == "patch":
            if patched is not None:
                raise PatchError("this model is patched already: undo that patch first (report.undo())")
            patched = apply(TransformersAdapter(), target, request)
            vars(target)[STATE] = patched
            _forget_compiled(target)
        elif request.action == "undo" and patched is not None:
            del vars(target)[STATE]
            patched.undo()
            patched = None
            _forget_compiled(target)
        elif request.action == "reset" and patched is not None:
            patched.reset()
        elif request.action not in ("undo", "report", "reset"):
            raise PatchError(f"unknown action {request.action!r}; known: patch, undo, report, reset")
        rows = patched.report() if patched is not None else []
        return [
            {
                "rank": 0,
                "pid": os.getpid(),
                "host": self.name,
                "version": self.version(),
                "rows": rows,
                "error": None,
            }
        ]

    async def call_async(self, target: Any, request: Request) -> list[dict[str, Any]]:
        return self.call(target, request)


def _forget_compiled(model: Any) -> None:
    """Drop code that torch.compile made for the old classes; the next call compiles again."""
    import torch

    compiled = (
        type(m).__name__ == "OptimizedModule" or m._compiled_call_impl is not None for m in model.modules()
    )
    if any(compiled):
        torch.compiler.reset()


HOST = TransformersHost()
