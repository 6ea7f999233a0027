"""SGLang: found by `fastkernels.patch`, loaded by SGLang's plugin entry point, patched in each scheduler process.

Known: 0.5.16, 0.5.17 and 0.5.23. Asleep, the plugin only adds Scheduler.fastkernels_rpc; scheduler.py carries out
requests. Engine.collective_rpc returns no value and hides the errors of all ranks but the first, so that each rank
writes its reply to a file in a folder that the request names.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastkernels.core import registry
from fastkernels.core.env import Environment
from fastkernels.patch import PatchError, Request
from fk_integrations.core import versions
from fk_integrations.core.construction import BeforeConstruction

RPC = "fastkernels_rpc"
SCHEDULER = "sglang.srt.managers.scheduler"
IDLE_WAIT_S = 10.0  # an answered request leaves the scheduler a step or two later
REPLY_WAIT_S = 120.0  # of the other pipeline stages, after the first stage has answered


# In every SGLang process


def fastkernels_rpc(self: Any, request: str) -> None:
    """Scheduler.fastkernels_rpc: carry out a Request (JSON, with 'folder': where the reply is to be written)."""
    from fk_integrations.sglang import scheduler

    scheduler.answer(self, request)


def register() -> None:
    """The plugin. With FASTKERNELS=1 a scheduler patches its model as soon as it is loaded, or does not start.

    An invalid request raises here (plugin.py ends the process). The scheduler does the rest; its errors end the start.
    """
    module = sys.modules.get(
        SCHEDULER
    )  # imported in every process that can build a Scheduler: it loads plugins
    scheduler = getattr(module, "Scheduler", None)
    if scheduler is not None:
        setattr(scheduler, RPC, fastkernels_rpc)
    env = Environment.read()
    if not env.enabled:
        return
    request = Request.from_environment(env)
    registry.check_names([*(request.ops or ()), *request.candidates, *request.disable])
    if scheduler is not None and not hasattr(scheduler.__init__, "fastkernels_stock"):
        scheduler.__init__ = _patches_its_model(scheduler.__init__)


def _patches_its_model(stock: Callable[..., None]) -> Callable[..., None]:
    """A Scheduler.__init__ that has its model runner patch the model: after loading, before graphs are captured."""

    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from fk_integrations.sglang import scheduler

        scheduler.patch_after_loading()
        stock(self, *args, **kwargs)

    __init__.fastkernels_stock = stock  # type: ignore[attr-defined]
    return __init__


# In the caller's process


class SglangHost:
    """fastkernels.patch.Host for SGLang."""

    name = "sglang"

    def __init__(self) -> None:
        self._before = BeforeConstruction("sglang", "SGLang", "SGLANG_PLUGINS", self.version)

    def version(self) -> str | None:
        return versions.installed("sglang")

    def matches(self, target: Any) -> bool:
        return any(
            c.__name__ == "Engine" and c.__module__.startswith("sglang.srt.entrypoints")
            for c in type(target).__mro__
        )

    def call(self, target: Any, request: Request) -> list[dict[str, Any]]:
        """See Host. `target`: sglang.Engine, or the string 'sglang' (engines built from now on)."""
        if isinstance(target, str):
            return self._before.call(request)
        refusal = _unreachable(target)
        if refusal is not None:
            raise PatchError(refusal)
        deadline = time.monotonic() + IDLE_WAIT_S
        while True:
            replies = _send(target, request)
            if not any(r.get("busy") for r in replies) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        # No step after a refusal: nothing was changed, and a step crashes an engine with released memory.
        failed = any(r.get("error") and not r.get("refused") for r in replies)
        if failed and request.action in ("patch", "undo") and any(r.get("graphs") for r in replies):
            _check_one_step(target, replies)
        return replies

    async def call_async(self, target: Any, request: Request) -> list[dict[str, Any]]:
        """The same from a running event loop; the engine must be idle."""
        return await asyncio.to_thread(self.call, target, request)


def _unreachable(engine: Any) -> str | None:
    """Why not every process of this engine can be reached; None if they can."""
    args = engine.server_args
    if getattr(args, "nnodes", 1) > 1:
        return "the engine runs on several machines: start it with FASTKERNELS=1 on each of them"
    if getattr(args, "dp_size", 1) > 1 and not getattr(args, "enable_dp_attention", False):
        return "SGLang's RPC reaches one data-parallel replica only: start the engine with FASTKERNELS=1"
    return None


def _send(engine: Any, request: Request) -> list[dict[str, Any]]:
    """One request to all schedulers, and their replies in rank order."""
    with tempfile.TemporaryDirectory(prefix="fastkernels-") as folder:
        message = json.dumps({**json.loads(request.to_json()), "folder": folder})
        try:
            engine.collective_rpc(RPC, request=message)
        except Exception as error:
            if RPC in str(error):
                raise PatchError(
                    "SGLang's schedulers did not load the fastkernels plugin. It must be installed in SGLang's"
                    " environment before the engine starts, and SGLANG_PLUGINS (here"
                    f" {os.environ.get('SGLANG_PLUGINS')!r}) must be unset or name it"
                ) from error
            raise PatchError(
                f"SGLang's schedulers could not be reached: {type(error).__name__}: {error}"
            ) from error
        return _collect(Path(folder))


def _collect(folder: Path) -> list[dict[str, Any]]:
    deadline = time.monotonic() + REPLY_WAIT_S
    while True:
        replies = [json.loads(file.read_text()) for file in folder.glob("*.json")]
        if replies and len(replies) >= replies[0]["world"]:
            return sorted(replies, key=lambda r: r["rank"])
        if time.monotonic() > deadline:
            got = sorted(r["rank"] for r in replies)
            raise PatchError(
                f"only ranks {got} answered within {REPLY_WAIT_S:.0f} s; the others' state is unknown"
            )
        time.sleep(0.01)


def _check_one_step(engine: Any, replies: list[dict[str, Any]]) -> None:
    """Run a step of the restored engine after a failure; add its error to the first one."""
    first = next(r for r in replies if r.get("error"))
    try:
        engine.generate(input_ids=[[1, 2, 3]], sampling_params={"temperature": 0, "max_new_tokens": 2})
    except Exception as error:
        first["error"] += f"; and the restored engine fails a step: {type(error).__name__}: {error}"


HOST = SglangHost()
