"""Hosts whose models are torch modules of the caller's process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

from fastkernels.core.inductor_repair import lasting
from fastkernels.patch import PatchError, Request
from fk_integrations.core.adapter import Adapter
from fk_integrations.core.instance_class import is_bound_method
from fk_integrations.core.journal import Journal
from fk_integrations.live import asleep
from fk_integrations.live.live_class import restore
from fk_integrations.patching.apply import Patched, apply

STATE = "_fastkernels_patched"
# Models share modules, and all patches of a process share op tables and counters: one request at a time.
_one_at_a_time = threading.RLock()


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
        if request.action not in ("patch", "undo", "report", "reset"):
            raise PatchError(f"unknown action {request.action!r}; known: patch, undo, report, reset")
        with _one_at_a_time:
            return (
                self.before_construction(request) if isinstance(target, str) else self._live(target, request)
            )

    def _live(self, target: Any, request: Request) -> list[dict[str, Any]]:
        asleep.wake_all()
        patched = patched_state(target)
        if patched is not None and not patched.whole:
            _end(target, patched)  # an interrupted patch or undo
            patched = None
        if request.action == "patch":
            patched = self._patch(target, request, patched)
        elif request.action == "undo":
            self._undo(target, request, patched)
            patched = None
        elif patched is not None and not patched.meant_by(request):
            patched = None
        if request.action == "reset" and patched is not None:
            patched.reset()
        return [self.reply(patched.report() if patched is not None else [])]

    def _patch(self, target: Any, request: Request, patched: Patched | None) -> Patched:
        if patched is not None:
            raise PatchError(f"this model is patched already: {UNDO_FIRST}")
        model = self.model(target)
        _check_parts(model)
        made: list[Patched] = []

        def begun(patched: Patched) -> None:
            made.append(patched)
            vars(target)[STATE] = patched

        try:
            patched = apply(self.adapter(), model, request, begun=begun)
            self.around(target, patched.journal)
            forget_compiled(model)
            patched.whole = True
        except BaseException:
            for one in made:
                _end(target, one)
            raise
        return patched

    def _undo(self, target: Any, request: Request, patched: Patched | None) -> None:
        if patched is not None and patched.meant_by(request):
            _check_wrapped(patched.model)
            _end(target, patched)
        if request.patch:
            return
        model = self.model(target)
        for holder, inner in list(_patches_inside(model)):
            _check_wrapped(inner.model)
            _end(holder, inner)
        if restore(model):  # copies, and modules of a patch of another object
            forget_compiled(model)

    def reply(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"rank": 0, "pid": os.getpid(), "host": self.name, "version": self.version()}
        return {**head, "rows": rows, "error": None, "lasting": lasting()}

    async def call_async(self, target: Any, request: Request) -> list[dict[str, Any]]:
        return self.call(target, request)


UNDO_FIRST = "undo that patch first (report.undo(), or fastkernels.unpatch(it) without the report)"


def patched_state(target: Any) -> Patched | None:
    """The patch of this very object, complete or interrupted."""
    found: Patched | None = vars(target).get(STATE)
    return found


def _end(target: Any, patched: Patched) -> None:
    """Undo a patch, and only then forget it."""
    patched.undo()
    forget_compiled(patched.model)
    if vars(target).get(STATE) is patched:
        del vars(target)[STATE]


def _patches_inside(model: Any) -> Iterator[tuple[Any, Patched]]:
    """The patches of a model's parts that were made through these parts."""
    for module in model.modules():
        if (patched := patched_state(module)) is not None:
            yield module, patched


def _check_parts(model: Any) -> None:
    """Raise PatchError if modules are patched through another object, e.g. a second pipeline with the same parts."""
    held = [name for name, module in model.named_modules() if hasattr(type(module), "fastkernels")]
    if held:
        raise PatchError(
            f"{len(held)} modules ({', '.join(held[:2])}{', ...' if held[2:] else ''}) are patched already, through"
            f" another model or pipeline that has them: {UNDO_FIRST}"
        )


def _check_wrapped(model: Any) -> None:
    """Raise PatchError if hooks such as those of CPU offload hold our forward: undo would not end its calls."""
    wrapped = []
    for name, module in model.named_modules():
        own = vars(module).get("forward")
        ours = own is not None and hasattr(type(module), "fastkernels")
        if ours and not is_bound_method(module, own):
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
