"""Our own engine as a host: its modules are ours already, so a patch puts a user's candidates into it."""

from __future__ import annotations

import asyncio
import os
import sys
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
        kinds = (("llm", "LLM"), ("engine", "Engine"), ("async_llm", "AsyncLLM"))
        loaded = [(sys.modules.get(f"fastkernels.engine.{module}"), name) for module, name in kinds]
        return any(
            module is not None and isinstance(target, getattr(module, name)) for module, name in loaded
        )

    def call(self, target: Any, request: Request) -> list[dict[str, Any]]:
        if isinstance(target, str):
            return [self._by_name(request)]
        engine = _engine(target)
        if hasattr(target, "call"):  # AsyncLLM: its own thread steps the engine
            return target.call(lambda: _carry_out(engine, request)).result()
        return _carry_out(engine, request)

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
        from fastkernels.engine import candidates

        return candidates.reply(0, [])


def _engine(target: Any) -> Any:
    for name in ("llm_engine", "engine"):  # LLM, AsyncLLM
        if hasattr(target, name):
            return getattr(target, name)
    return target


def _carry_out(engine: Any, request: Request) -> list[dict[str, Any]]:
    """One request in the thread of the engine, on all of its ranks. Errors come back in a reply."""
    from fastkernels.engine import candidates

    patched = engine.patched
    try:
        if request.action == "patch":
            if patched is not None:
                raise PatchError("this engine is patched already: undo that first")
            if engine.has_unfinished_requests():
                raise PatchError("the engine has requests under way: wait until it is idle")
            engine.patched = candidates.Patched(engine.executor, request)
            engine.reset_prefix_cache()  # keys and values of other code
            return engine.patched.replies
        if patched is None:
            raise PatchError("this engine is not patched")
        if request.action == "undo":
            engine.patched = None
            engine.reset_prefix_cache()
            return patched.undo()
        return patched.reset() if request.action == "reset" else patched.report()
    except Exception as error:
        known = isinstance(error, (PatchError, LookupError, ValueError))
        return [candidates.reply(0, [], str(error) if known else f"{type(error).__name__}: {error}")]


HOST = FastKernelsHost()
