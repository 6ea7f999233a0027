"""fastkernels.patch('HOST'): request a patch, through the environment, of every engine that is built from now on."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Any

from fastkernels.core.env import Environment
from fastkernels.patch import PatchError, Request, Row
from fk_integrations.core import reports
from fk_integrations.core.adapter import Adapter
from fk_integrations.patching.apply import absent_rows, plan


class BeforeConstruction:
    """Sets FASTKERNELS and its companions, which the host's processes inherit; undo restores the old values.

    host       name of the host
    title      the host's own spelling of its name, for messages
    allowed    the host's variable that lists which plugins are loaded
    version    the installed version, None if the host is not installed
    changed    called after every change, for a process that has loaded its plugins already
    """

    def __init__(
        self,
        host: str,
        title: str,
        allowed: str,
        version: Callable[[], str | None],
        changed: Callable[[], None] = lambda: None,
    ):
        self.host, self.title, self.allowed, self.version, self.changed = (
            host,
            title,
            allowed,
            version,
            changed,
        )
        self.before: dict[str, str | None] | None = None
        self.patch = ""

    def call(self, request: Request) -> list[dict[str, Any]]:
        """Carry out 'patch', 'undo' or 'report'; see fastkernels.patch.Host.call. Raises PatchError."""
        if request.action == "patch":
            rows = self._planned(request)
            values = self._values(request)
            self.patch = request.patch
            try:
                self._set(values)
            except BaseException:
                self._restore()
                raise
            return [self._reply(rows)]
        if request.patch not in ("", self.patch):
            return [self._reply([])]
        if request.action == "undo":
            self._restore()
            return [self._reply([])]
        if request.action == "report":
            return reports.read(Environment.read().report or "", self.host) or [self._reply([])]
        raise PatchError(f"action {request.action!r} needs a live engine")

    def _restore(self) -> None:
        for name, value in (self.before or {}).items():
            _set_variable(name, value)
        self.before, self.patch = None, ""
        self.changed()

    def _planned(self, request: Request) -> list[Row]:
        if self.before is not None or Environment.read().enabled:
            raise PatchError("FASTKERNELS is set already: undo that patch first (report.undo())")
        version = self.version()
        if version is None:
            raise PatchError(f"{self.title} is not installed in this environment")
        plugins = os.environ.get(self.allowed)
        if plugins is not None and "fastkernels" not in [name.strip() for name in plugins.split(",")]:
            raise PatchError(f"{self.allowed}={plugins!r} keeps our plugin out: add 'fastkernels' to it")
        adapter = Adapter()
        adapter.host, adapter.version = self.host, version
        rows = []
        for spec, target in plan(adapter, request):
            state = "off" if spec.name in request.disable else "planned"
            rows.append(Row(0, spec.name, target.name, 0, state))
        return rows + absent_rows(adapter, request, None, rows)

    def _values(self, request: Request) -> dict[str, str | None]:
        candidates = ",".join(f"{k}={os.path.abspath(v)}" for k, v in request.candidates.items())
        return {
            "FASTKERNELS": "1",
            "FASTKERNELS_OPS": None if request.ops is None else ",".join(request.ops),
            "FASTKERNELS_CANDIDATES": candidates or None,
            "FASTKERNELS_DISABLE": ",".join(request.disable) or None,
            "FASTKERNELS_STRICT": "1" if request.strict else None,
            "FASTKERNELS_REPORT": Environment.read().report or tempfile.mkdtemp(prefix="fastkernels-report-"),
        }

    def _set(self, values: dict[str, str | None]) -> None:
        self.before = {name: os.environ.get(name) for name in values}
        for name, value in values.items():
            _set_variable(name, value)
        self.changed()

    def _reply(self, rows: list[Row]) -> dict[str, Any]:
        shown = [vars(row) for row in rows]
        head = {"rank": 0, "pid": os.getpid(), "host": self.host, "version": self.version()}
        return {**head, "rows": shown, "error": None}


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
