"""Hosts that are libraries of functions: the library's modules get ours, in this process."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from fastkernels.core import candidate, registry
from fastkernels.core.candidate_scopes import Scope, ops_with_scopes
from fastkernels.core.dispatch import OPS
from fastkernels.core.env import Environment
from fastkernels.core.reasons import Kind, Reason
from fastkernels.core.spec import Target
from fastkernels.overrides.kit.arguments import UnsupportedArgument
from fastkernels.patch import PatchError, Request, Row
from fk_integrations.core import versions
from fk_integrations.core.journal import Journal

SEAM = "library_function"


def _function(path: str) -> Any:
    """Return the library's function at 'module:name', or None."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name, None)


class Swapped:
    """One function of the library in whose place ours runs, and its calls."""

    def __init__(self, name: str, theirs: Callable[..., Any], strict: bool, scope: Scope) -> None:
        self.name, self.theirs, self.strict, self.scope = name, theirs, strict, scope
        self.clear()

    def clear(self) -> None:
        self.calls, self.fallbacks = 0, dict[str, int]()

    def run(self, ours: Callable[..., Any]) -> Callable[..., Any]:
        """Make a function that runs `ours`, but the library's in a call that ours refuses; a fallback."""

        @functools.wraps(self.theirs)
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                if ops_with_scopes:
                    with self.scope:
                        found = ours(*args, **kwargs)
                else:
                    found = ours(*args, **kwargs)
            except UnsupportedArgument as refused:
                if self.strict:
                    raise PatchError(f"{self.name}: {refused}, and the patch is strict") from refused
                self._fell_back(str(refused))
                return self.theirs(*args, **kwargs)
            self.calls += 1
            return found

        return run

    def count(self, reason: str) -> Callable[..., Any]:
        """Make a function that runs the library's, and counts its calls as fallbacks with the reason."""

        @functools.wraps(self.theirs)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._fell_back(reason)
            return self.theirs(*args, **kwargs)

        return run

    def _fell_back(self, reason: str) -> None:
        self.fallbacks = {**self.fallbacks, reason: self.fallbacks.get(reason, 0) + 1}


class FunctionHost:
    """fastkernels.patch.Host for the library `name`: the target is the module, or its name.

    unserved    {op: {path: what it computes}} of functions like those of the op which ours do not replace. A patch with
                the op by name counts their calls.
    """

    def __init__(self, name: str, unserved: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self.name, self._unserved = name, unserved or {}
        self._lock, self._scope = threading.RLock(), Scope(name)
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
                    if request.ops is not None and op not in request.disable:
                        found = self._unserved.get(op, {}).items()
                        self._rows += [self._counted_only(op, path, what) for path, what in found]
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
                if not candidate.install(found, self._journal.add, self._scope):
                    raise PatchError(
                        f"candidate {path}: {self.name} calls functions: give a function {op}(...)"
                    )
            except candidate.CandidateError as error:
                raise PatchError(str(error)) from error

    def _put(self, op: str, target: Target, request: Request) -> tuple[Row, Swapped | None]:
        row = Row(0, op, target.name, 0, "off", provider=Environment.read().provider.get(op, ""), own=True)
        theirs = _function(target.path)
        reason = self._why_off(op, target, theirs, request)
        if reason is not None:
            if request.strict and not reason.kind.harmless:
                raise PatchError(f"{op} ({target.name}): {reason.text}, and the patch is strict")
            row.explain({reason: 0})
            return row, None
        swapped = Swapped(target.name, theirs, request.strict, self._scope)
        row.modules = self._replace(theirs, swapped.run(registry.target_class(target)))
        row.state = "active"
        if op in request.candidates:
            row.candidate = f"function {request.candidates[op]}"
        return row, swapped

    def _counted_only(self, op: str, path: str, what: str) -> tuple[Row, Swapped | None]:
        """The row of a function that stays the library's."""
        name, theirs = path.partition(":")[2], _function(path)
        row = Row(0, op, name, 0, "off", own=True)
        if theirs is None:
            row.explain({Reason(Kind.NOT_IN_HOST, f"{self.name} {self.version()} has no {path}"): 0})
            return row, None
        reason = f"{what}: {self.name}'s code"
        swapped = Swapped(name, theirs, strict=False, scope=self._scope)
        row.modules = self._replace(theirs, swapped.count(reason))
        row.explain({Reason(Kind.OTHER_CLASS, reason): row.modules})
        return row, swapped

    def _replace(self, theirs: Any, ours: Callable[..., Any]) -> int:
        """Put `ours` in each place where a module of the library holds `theirs`; return how many there are."""
        places = 0
        for key, holder in list(sys.modules.items()):
            if holder is None or not f"{key}.".startswith(f"{self.name}."):
                continue
            for attribute, value in list(vars(holder).items()):
                if value is theirs:
                    self._journal.set_attribute(holder, attribute, ours)
                    places += 1
        return places

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
