"""Hosts that are libraries of functions: the library's modules get ours, in this process."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from fastkernels.core import candidate, registry
from fastkernels.core.dispatch import OPS
from fastkernels.core.env import Environment
from fastkernels.core.reasons import Kind, Reason
from fastkernels.core.spec import Target
from fastkernels.overrides.kit.arguments import UnsupportedArgument
from fastkernels.patch import PatchError, Request, Row
from fk_integrations.core import versions
from fk_integrations.core.journal import Journal

SEAM = "library_function"


class Swapped:
    """One function of the library in whose place ours runs, and its calls."""

    def __init__(self, op: str, target: Target, theirs: Callable[..., Any], strict: bool) -> None:
        self.op, self.target, self.theirs, self.strict = op, target, theirs, strict
        self.clear()

    def clear(self) -> None:
        self.calls, self.fallbacks = 0, dict[str, int]()

    def run(self, ours: Callable[..., Any]) -> Callable[..., Any]:
        """Make a function that runs `ours`, but the library's in a call that ours refuses; a fallback."""

        @functools.wraps(self.theirs)
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                found = ours(*args, **kwargs)
            except UnsupportedArgument as refused:
                if self.strict:
                    raise PatchError(f"{self.target.name}: {refused}, and the patch is strict") from refused
                self.fallbacks = {**self.fallbacks, str(refused): self.fallbacks.get(str(refused), 0) + 1}
                return self.theirs(*args, **kwargs)
            self.calls += 1
            return found

        return run


class FunctionHost:
    """fastkernels.patch.Host for the library `name`: the target is the module, or its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.RLock()
        self._forget()

    def _forget(self) -> None:
        self._journal, self._id = Journal(), ""
        self._rows: list[tuple[Row, Swapped | None]] = []

    def version(self) -> str | None:
        return versions.installed(self.name)

    def matches(self, target: Any) -> bool:
        return isinstance(target, ModuleType) and target.__name__ == self.name

    async def call_async(self, target: Any, request: Request) -> list[dict[str, Any]]:
        return self.call(target, request)

    def call(self, target: Any, request: Request) -> list[dict[str, Any]]:
        """See fastkernels.patch.Host. One patch is in place at a time: it is the process's."""
        if request.action not in ("patch", "undo", "report", "reset"):
            raise PatchError(f"unknown action {request.action!r}; known: patch, undo, report, reset")
        with self._lock:
            if request.action == "patch":
                self._patch(request)
            elif request.patch and request.patch != self._id:
                return [self._reply([])]
            elif request.action == "undo":
                self._journal.undo()
                self._forget()
            elif request.action == "reset":
                for _, swapped in self._rows:
                    if swapped is not None:
                        swapped.clear()
            return [self._reply([self._counted(*pair) for pair in self._rows])]

    def _patch(self, request: Request) -> None:
        if self._id:
            raise PatchError(f"{self.name} is patched already: undo that patch first")
        if self.version() is None:
            raise PatchError(f"{self.name} is not installed")
        self._id = request.patch or "unnamed"
        try:
            importlib.import_module(self.name)
            self._install(request)
            for op in registry.op_names():
                if request.ops is None or op in {*request.ops, *request.candidates}:
                    for target in registry.get(op).targets_for(self.name):
                        self._rows.append(self._put(op, target, request))
        except BaseException:
            self._journal.undo()
            self._forget()
            raise

    def _install(self, request: Request) -> None:
        """Run candidates' functions in their ops. Raises PatchError for a candidate without one."""
        for op, path in request.candidates.items():
            if op in request.disable:
                continue
            if not registry.get(op).targets_for(self.name):
                row = Row(0, op, f"{op}()", 0, "off")
                row.explain({Reason(Kind.NOT_IN_HOST, f"{self.name} has no function of this op"): 0})
                self._rows.append((row, None))
                continue
            try:
                found = candidate.load(op, path)
                if not candidate.install(found, self._journal.add):
                    raise PatchError(
                        f"candidate {path}: {self.name} calls functions: give a function {op}(...)"
                    )
            except candidate.CandidateError as error:
                raise PatchError(str(error)) from error

    def _put(self, op: str, target: Target, request: Request) -> tuple[Row, Swapped | None]:
        row = Row(0, op, target.name, 0, "off", provider=Environment.read().provider.get(op, ""), own=True)
        module, _, name = target.path.partition(":")
        theirs: Any = getattr(importlib.import_module(module), name, None)
        reason = self._why_off(op, target, theirs, request)
        if reason is not None:
            if request.strict and not reason.kind.harmless:
                raise PatchError(f"{op} ({target.name}): {reason.text}, and the patch is strict")
            row.explain({reason: 0})
            return row, None
        swapped = Swapped(op, target, theirs, request.strict)
        ours = swapped.run(registry.target_class(target))
        holders = [
            m
            for key, m in list(sys.modules.items())
            if m is not None and f"{key}.".startswith(f"{self.name}.")
        ]
        for holder in holders:
            for attribute, value in list(vars(holder).items()):
                if value is theirs:
                    self._journal.set_attribute(holder, attribute, ours)
                    row.modules += 1
        row.state = "active"
        if op in request.candidates:
            row.candidate = f"function {request.candidates[op]}"
        return row, swapped

    def _why_off(self, op: str, target: Target, theirs: Any, request: Request) -> Reason | None:
        version = self.version() or ""
        if op in request.disable:
            return Reason(Kind.DISABLED, "FASTKERNELS_DISABLE")
        wanted = request.ops is not None or op in request.candidates
        if not wanted and not (registry.get(op).by_default and target.default):
            return Reason(Kind.LEFT_TO_HOST, "not requested, and not known to be faster")
        if theirs is None or not target.applies_to(version):
            return Reason(Kind.NOT_IN_HOST, f"{self.name} {version} has no {target.path}")
        return versions.unknown(self.name, version, target.path, theirs)

    def _counted(self, row: Row, swapped: Swapped | None) -> dict[str, Any]:
        if swapped is not None:
            row.calls, row.fallbacks = swapped.calls, dict(swapped.fallbacks)
            left = sum(swapped.fallbacks.values())
            row.proof = "calls" if swapped.calls else "fell back" if left else ""
            row.left = dict(OPS[row.op].left) if row.op in OPS else {}
        return vars(row) | {"fallbacks": dict(row.fallbacks)}

    def _reply(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"rank": 0, "pid": os.getpid(), "host": self.name, "version": self.version()}
        return {**head, "rows": rows, "error": None}
