"""fastkernels.patch('HOST') for hosts of this process: patch every model that is built from now on."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

from fastkernels.patch import PatchError, Request, Row
from fk_integrations.core.adapter import Adapter
from fk_integrations.core.journal import Journal
from fk_integrations.live.live_class import restore
from fk_integrations.patching.apply import absent_rows, plan
from fk_integrations.patching.in_process import UNDO_FIRST, InProcessHost, patched_state

log = logging.getLogger("fastkernels")


class Later:
    """A request that waits for models.

    hook   hook(built, journal) changes the host so that built(model) is called for each new model
    built  the models and pipelines that were patched
    rest   {pipeline: its other modules}, of one with modules that were patched before, in another pipeline
    parts  all modules that were patched; a pipeline that is gone may have left some of them to another one
    """

    def __init__(self, host: InProcessHost, hook: Callable[[Callable[[Any], None], Journal], None]):
        self.host, self.hook = host, hook
        self.request: Request | None = None
        self.journal = Journal()
        self.built: weakref.WeakSet[Any] = weakref.WeakSet()
        self.rest: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self.parts: weakref.WeakSet[Any] = weakref.WeakSet()

    def call(self, request: Request) -> list[dict[str, Any]]:
        """Carry out 'patch', 'undo', 'report' or 'reset'. Raises PatchError."""
        if request.action == "patch":
            if self.request is not None:
                raise PatchError(f"{self.host.name} is patched already: {UNDO_FIRST}")
            if self.host.version() is None:
                raise PatchError(f"{self.host.name} is not installed in this environment")
            self.journal.undo()  # what an interrupted undo has left
            rows = self._planned(request)
            self.request = request
            try:
                self.hook(self.patch, self.journal)
            except BaseException:
                self.journal.undo()
                self.request = None
                raise
            return [self.host.reply([vars(row) for row in rows])]
        if request.patch and (self.request is None or self.request.patch != request.patch):
            return [self.host.reply([])]
        alive = [model for model in (*self.built, *self.rest.values()) if patched_state(model) is not None]
        if request.action == "undo":
            for model in alive:
                self.host.call(model, request)
            for part in self.parts:
                restore(part)
            self.journal.undo()
            for made in (self.built, self.rest, self.parts):
                made.clear()
            self.request = None
            return [self.host.reply([])]
        if request.action not in ("report", "reset"):
            raise PatchError(f"unknown action {request.action!r}; known: patch, undo, report, reset")
        replies = [reply for model in alive for reply in self.host.call(model, request)]
        return [self.host.reply([row for reply in replies for row in reply["rows"]])]

    def patch(self, model: Any) -> None:
        """Patch a new model. A model without anything to replace stays as it is, unless the request is strict."""
        assert self.request is not None
        before = self.rest.pop(model, model)
        try:
            if patched_state(before) is not None:  # built in two steps
                self.host.call(before, Request("undo", patch=self.request.patch))
                self.parts.difference_update(self.host.parts(before).values())
            parts = self.host.parts(model)
            new = {name: part for name, part in parts.items() if part not in self.parts}
            if len(new) == len(parts):
                self.host.call(model, self.request)
                self.built.add(model)
            elif new:
                self.rest[model] = type(self.host.model(model))(new)
                self.host.call(self.rest[model], self.request)
            self.parts.update(new.values())
        except PatchError as error:
            if self.request.strict:
                raise
            log.warning("%s: %s stays as it is: %s", self.host.name, type(model).__name__, error)

    def _planned(self, request: Request) -> list[Row]:
        adapter: Adapter = self.host.adapter()
        rows = []
        for spec, target in plan(adapter, request):
            state = "off" if spec.name in request.disable else "planned"
            rows.append(Row(0, spec.name, target.name, 0, state))
        return rows + absent_rows(adapter, request, None, rows)
