"""The base of all hosts of an item: candidates are checked and put in, and their calls are counted."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from fk_integrations.patching import compilations

import fastkernels
from fastkernels.core import candidate, registry
from fastkernels.patch import PatchError, Report, Request, find_host
from fk_bench.evaluate import placed
from fk_bench.evaluate.reasons import Reason, described
from fk_bench.kernels.judge.processes import deployment


def _failure(reason: Reason, text: str) -> dict[str, Any]:
    return {"reason": reason.value, "text": text[:500], "files": []}


class Patched:
    """A host that may run the candidates of a set, and of none other: ops without a file stay as they are."""

    target: Any  # of fastkernels.patch
    report: Report | None = None

    def __init__(self, options: dict[str, Any]):
        self.options = options
        self._classes: dict[str, tuple[type, ...]] = {}
        self._functions: set[str] = set()  # ops whose candidate has a function
        self._counts: dict[str, int] | None = None  # calls of modules by op, if they are watched
        self._placed: dict[str, tuple[Reason, str] | None] = {}  # by block: see `placed`

    def check(self, files: dict[str, str]) -> dict[str, Any]:
        """Import the files. Returns {"failed": {op: error}}."""
        failed = {}
        for op, path in files.items():
            if (why := self.placed(op)) is not None:
                if why[0] is Reason.NOT_DEPLOYED:
                    failed[op] = _failure(*why)
                continue  # `patch` reports blocks that this model does not have
            try:
                found = candidate.load(op, path)
                self._classes[op] = tuple(found.classes.values())
                self._functions |= {op} if found.function is not None else set()
                if found.function is not None and (spec := registry.get(op)).op is not None:
                    candidate.fit(found.function, spec.op)
            except (Exception, SystemExit) as error:
                failed[op] = described(error)
        return {"failed": failed}

    def patch(self, files: dict[str, str]) -> dict[str, Any]:
        """Put the candidates in. Returns {"patched": whether they are in place, "failed": {op: error}}."""
        unused = {op: _failure(*why) for op in files if (why := self.placed(op)) is not None}
        files = {op: path for op, path in files.items() if op not in unused}
        answer: dict[str, Any] = self._patch(files) if files else {"failed": {}, "patched": True}
        return {**answer, "failed": {**answer["failed"], **unused}}

    def _patch(self, files: dict[str, str]) -> dict[str, Any]:
        find_host(self.target)  # without one, each op would look unused
        try:
            self.report = fastkernels.patch(self.target, ops=list(files), candidates=files)
        except PatchError as error:
            failed = {op: found for op, path in files.items() if (found := self._alone(op, path)) is not None}
            return {"failed": failed, "text": str(error)[:500], "patched": False}
        rows = self.report.rows
        active = {row.op for row in rows if row.state == "active" or row.candidate}
        failed = {}
        for op in files.keys() - active:
            refused = [
                r["text"] for row in rows if row.op == op for r in row.reasons if r["kind"] == "unsupported"
            ]
            reason = Reason.UNSUPPORTED if refused else Reason.UNUSED
            text = (refused or [row.reason for row in rows if row.op == op] or [""])[0]
            failed[op] = _failure(reason, text)
        return {"failed": failed, "patched": True}

    def placed(self, op: str) -> tuple[Reason, str] | None:
        """Why a candidate for a block of a model has no place in this host; None for ops, and for blocks that have."""
        if candidate.is_block(op) and op not in self._placed:
            self._placed[op] = placed.place(op, self.options["host"], self.options["model"])
        return self._placed.get(op)

    def _alone(self, op: str, path: str) -> dict[str, Any] | None:
        """Why the candidate cannot be put in by itself. Ours decides whether the model has a place for the op."""
        try:
            fastkernels.patch(self.target, ops=[op], candidates={op: path}).undo()
        except PatchError as error:
            reason = Reason.UNUSED
            with contextlib.suppress(PatchError):
                fastkernels.patch(self.target, ops=[op]).undo()
                reason = Reason.UNSUPPORTED
            return _failure(reason, str(error))
        return None

    def deployed(self) -> dict[str, Any]:
        """The classes whose own kernels do not run once a compiler has traced them: {"failed": {op: error}}.

        A function of a candidate is one operator for every compiler, so that its kernel runs. A class without a kernel
        that can be counted, and one that cannot be built from a case, pass: other checks judge them.
        """
        device = "cuda" if self.options["gpu"] else "cpu"
        failed = {}
        for op, classes in self._classes.items():
            for cls in classes if op not in self._functions else ():
                if problem := deployment.of_class(registry.get(op), cls, device):
                    text = f"{cls.__name__}: {problem}"
                    failed[op] = _failure(Reason.NOT_DEPLOYED, text)
        return {"failed": failed}

    def compilations(self) -> dict[str, Any]:
        """{"compilations": number} of this process, and of those that hold the model."""
        found = compilations.count()
        if self.remote:
            replies = find_host(self.target).call(self.target, Request("compilations"))
            found += sum(r["compilations"] for r in replies)
        return {"compilations": found}

    def watch(self) -> None:
        """Count calls of modules that are a candidate's class, from now on; slow, so never in a timed process."""

        counts = self._counts = {}

        def count(module: torch.nn.Module, args: Any) -> None:
            of = getattr(
                type(module), "fastkernels", type(module)
            )  # the class that a live class got methods from
            for op, classes in self._classes.items():
                if issubclass(of, classes):
                    counts[op] = counts.get(op, 0) + 1

        torch.nn.modules.module.register_module_forward_pre_hook(count)

    def live(self) -> dict[str, Any]:
        """{"live": {op: calls}, "modules": {op: number}} of the candidates.

        Modules stand for the calls of a class without a function that is in another process, or not watched.
        """
        if self.report is None:
            return {"live": {}, "modules": {}}
        found = dict(self.report.refresh().candidates)
        for row in self.report.active:
            if row.candidate and not found.get(row.op) and row.op in self._classes:
                watched = self._counts is not None and not self.remote
                found[row.op] = (self._counts or {}).get(row.op, 0) if watched else row.modules
        modules: dict[str, int] = {}
        for row in self.report.active:
            modules[row.op] = modules.get(row.op, 0) + row.modules
        return {"live": found, "modules": modules}

    remote = False  # whether the modules are in other processes
