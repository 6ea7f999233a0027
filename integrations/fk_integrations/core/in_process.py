"""Hosts whose models are torch modules of the caller's process."""

from __future__ import annotations

import os
from typing import Any

from fastkernels.patch import PatchError, Request
from fk_integrations.core.adapter import Adapter
from fk_integrations.core.apply import Patched, apply
from fk_integrations.core.journal import Journal

STATE = "_fastkernels_patched"


class InProcessHost:
    """fastkernels.patch.Host for live models of this process. Subclassed by each host."""

    name = ""

    def version(self) -> str | None:
        raise NotImplementedError

    def matches(self, target: Any) -> bool:
        raise NotImplementedError

    def adapter(self) -> Adapter:
        raise NotImplementedError

    def model(self, target: Any) -> Any:
        """The torch module that holds all modules of the object that the user has passed."""
        return target

    def parts(self, target: Any) -> dict[str, Any]:
        """{name: module} of the models of a pipeline; any other object is one model."""
        model = self.model(target)
        return {"": model} if model is target else dict(model.named_children())

    def around(self, target: Any, journal: Journal) -> None:
        """Change what the host does around the modules of an object that is patched now."""

    def before_construction(self, request: Request) -> list[dict[str, Any]]:
        """Carry out a request for `fastkernels.patch('NAME')`."""
        raise PatchError(f"{self.name} models are patched live: pass the model, not the host's name")

    def call(self, target: Any, request: Request) -> list[dict[str, Any]]:
        """See fastkernels.patch.Host."""
        if isinstance(target, str):
            return self.before_construction(request)
        patched: Patched | None = vars(target).get(STATE)
        if request.action == "patch":
            if patched is not None:
                raise PatchError("this model is patched already: undo that patch first (report.undo())")
            model = self.model(target)
            _check_parts(model)
            patched = apply(self.adapter(), model, request)
            self.around(target, patched.journal)
            vars(target)[STATE] = patched
            forget_compiled(model)
        elif request.action == "undo" and patched is not None:
            _check_wrapped(patched.model)
            del vars(target)[STATE]
            patched.undo()
            forget_compiled(patched.model)
            patched = None
        elif request.action == "reset" and patched is not None:
            patched.reset()
        elif request.action not in ("undo", "report", "reset"):
            raise PatchError(f"unknown action {request.action!r}; known: patch, undo, report, reset")
        return [self.reply(patched.report() if patched is not None else [])]

    def reply(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"rank": 0, "pid": os.getpid(), "host": self.name, "version": self.version()}
        return {**head, "rows": rows, "error": None}

    async def call_async(self, target: Any, request: Request) -> list[dict[str, Any]]:
        return self.call(target, request)


def _check_parts(model: Any) -> None:
    """Raise PatchError if modules are patched through another object, e.g. a second pipeline with the same parts."""
    held = [name for name, module in model.named_modules() if hasattr(type(module), "fastkernels")]
    if held:
        raise PatchError(
            f"{len(held)} modules ({', '.join(held[:2])}{', ...' if held[2:] else ''}) are patched already, through"
            " another model or pipeline that has them or from which they were copied: undo that patch first"
        )


def _check_wrapped(model: Any) -> None:
    """Raise PatchError if hooks such as those of CPU offload hold our forward: undo would not end its calls."""
    wrapped = []
    for name, module in model.named_modules():
        own = vars(module).get("forward")
        if own is None or not hasattr(type(module), "fastkernels"):
            continue
        if getattr(own, "__func__", None) is type(module).forward:
            del module.forward  # removed hooks leave the method behind, bound to the instance
        else:
            wrapped.append(name)
    if wrapped:
        raise PatchError(
            f"{len(wrapped)} replaced modules ({', '.join(wrapped[:2])}{', ...' if wrapped[2:] else ''}) were wrapped"
            " after the patch, as CPU offload does: remove these hooks, then undo; or offload first, then patch"
        )


def forget_compiled(model: Any) -> None:
    """Drop code that torch.compile made for the old classes; the next call compiles again."""
    import torch

    compiled = (
        type(m).__name__ == "OptimizedModule" or m._compiled_call_impl is not None for m in model.modules()
    )
    if any(compiled):
        torch.compiler.reset()
