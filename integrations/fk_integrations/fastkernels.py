"""Our own engine as a host: its modules are ours already, so a patch puts a user's candidates into it."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import asdict
from typing import Any

from fastkernels import __version__
from fastkernels.patch import PatchError, Request

VARIABLE = "FASTKERNELS_CANDIDATES"


class FastKernelsHost:
    """Live: fastkernels.LLM, LLMEngine or AsyncLLM. By name: engines built later read FASTKERNELS_CANDIDATES."""

    name = "fastkernels"

    def __init__(self) -> None:
        self._before: list[str | None] = []

    def version(self) -> str | None:
        return __version__

    def matches(self, target: Any) -> bool:
        kinds = (("llm", "LLM"), ("llm_engine", "LLMEngine"), ("async_llm", "AsyncLLM"))
        loaded = [(sys.modules.get(f"fastkernels.engine.{module}"), name) for module, name in kinds]
        return any(
            module is not None and isinstance(target, getattr(module, name)) for module, name in loaded
        )

    def call(self, target: Any, request: Request) -> list[dict[str, Any]]:
        if isinstance(target, str):
            return [self._by_name(request)]
        engine = _engine(target)
        if hasattr(target, "call"):  # AsyncLLM: its own thread steps the engine
            return [target.call(lambda: _carry_out(engine, request)).result()]
        return [_carry_out(engine, request)]

    async def call_async(self, target: Any, request: Request) -> list[dict[str, Any]]:
        return await asyncio.to_thread(self.call, target, request)

    def _by_name(self, request: Request) -> dict[str, Any]:
        if request.action == "patch":
            pairs = [f"{op}={os.path.abspath(path)}" for op, path in request.candidates.items()]
            self._before.append(os.environ.get(VARIABLE))
            os.environ[VARIABLE] = ",".join(pairs)
        elif request.action == "undo" and self._before:
            before = self._before.pop()
            os.environ.pop(VARIABLE, None)
            if before is not None:
                os.environ[VARIABLE] = before
        return _reply([])


def _engine(target: Any) -> Any:
    for name in ("llm_engine", "engine"):  # LLM, AsyncLLM
        if hasattr(target, name):
            return getattr(target, name)
    return target


def _reply(rows: list[dict[str, Any]], error: str | None = None) -> dict[str, Any]:
    head = {"rank": 0, "pid": os.getpid(), "host": "fastkernels", "version": __version__}
    return {**head, "rows": rows, "error": error}


def _carry_out(engine: Any, request: Request) -> dict[str, Any]:
    """One request in the process and thread of the engine. Errors come back in the reply."""
    from fastkernels.engine import candidates

    patched = engine.patched
    try:
        if request.action == "patch":
            if patched is not None:
                raise PatchError("this engine is patched already: undo that first")
            if engine.has_unfinished_requests():
                raise PatchError("the engine has requests under way: wait until it is idle")
            patched = engine.patched = candidates.apply(engine.runner, request)
        elif patched is None:
            raise PatchError("this engine is not patched")
        elif request.action == "undo":
            patched.undo()
            engine.patched = None
        elif request.action == "reset":
            patched.reset()
    except Exception as error:
        known = isinstance(error, (PatchError, LookupError, ValueError))
        return _reply([], str(error) if known else f"{type(error).__name__}: {error}")
    return _reply([asdict(row) for row in patched.report()])


HOST = FastKernelsHost()
