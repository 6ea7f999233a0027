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
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

from fastkernels.core.cancellation import or_undone
from fastkernels.core.candidate import CandidateError
from fastkernels.core.env import Environment
from fastkernels.core.runtime.trial import import_in_child
from fastkernels.patch import PatchError, Request
from fk_integrations.core import versions
from fk_integrations.patching.construction import BeforeConstruction

RPC = "fastkernels_rpc"
ON_RAY = "sglang.srt.ray."
NO_PLUGINS = "SGLang's schedulers on Ray load no plugins: start it without Ray, on each machine with --nnodes"
SCHEDULER = "sglang.srt.managers.scheduler"
IDLE_WAIT_S = 10.0  # an answered request leaves the scheduler a step or two later
RPC_WAIT_S = 1800.0  # in addition to the deadline of trials: graphs may be captured again
REPLY_WAIT_S = 120.0  # of the other pipeline stages, after the first stage has answered
LATE_WAIT_MS = 5000  # for the message with which a scheduler confirms a request that has been carried out
_interrupted: WeakSet[Any] = (
    WeakSet()
)  # engines whose socket may still get the confirmation of an earlier request


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
    if f"{ON_RAY}engine" in sys.modules or "--use-ray" in sys.argv:
        raise PatchError(NO_PLUGINS)
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
        if request.action == "patch" and _in_a_loop():
            raise PatchError("an event loop runs in this thread: use `await fastkernels.patch_async(engine)`")
        replies = self._carry_out(target, request)
        if not _in_a_loop() and _needs_step(target, request, replies):
            replies = self._after_step(target, request, replies, _run_step(target))
        return replies

    async def call_async(self, target: Any, request: Request) -> list[dict[str, Any]]:
        """The same from a running event loop; the engine must be idle. A cancelled patch is undone."""
        if isinstance(target, str):
            return self._before.call(request)
        undo = partial(asyncio.to_thread, self._carry_out, target, Request("undo", patch=request.patch))
        replies: list[dict[str, Any]] = await or_undone(
            self._call_async(target, request), undo if request.action == "patch" else None
        )
        return replies

    async def _call_async(self, engine: Any, request: Request) -> list[dict[str, Any]]:
        replies = await asyncio.to_thread(self._carry_out, engine, request)
        if _needs_step(engine, request, replies):
            failure = await _step(engine)
            replies = await asyncio.to_thread(self._after_step, engine, request, replies, failure)
        return replies

    def _carry_out(self, engine: Any, request: Request) -> list[dict[str, Any]]:
        """One request to an engine that is idle within IDLE_WAIT_S."""
        refusal = _unreachable(engine)
        if refusal is not None:
            raise PatchError(refusal)
        if request.action == "patch":
            try:
                import_in_child(request.candidates, Environment.read().trial_s)
            except CandidateError as error:
                raise PatchError(str(error)) from error
        deadline = time.monotonic() + IDLE_WAIT_S
        while True:
            replies = _send(engine, request)
            if not any(r.get("busy") for r in replies) or time.monotonic() > deadline:
                return replies
            time.sleep(0.05)

    def _after_step(
        self, engine: Any, request: Request, replies: list[dict[str, Any]], failure: str | None
    ) -> list[dict[str, Any]]:
        """The replies after a step: of a patch those of the trial, else the failure added to the first error."""
        if any(r.get("error") for r in replies):
            if failure is not None:
                first = next(r for r in replies if r.get("error"))
                first["error"] += f"; and the restored engine fails a step: {failure}"
            return replies
        trial = _send(engine, Request("trial_end"))
        if failure is not None and not any(r.get("error") for r in trial):
            trial[0]["error"] = failure
        if any(r.get("error") for r in trial):
            undone = self._carry_out(engine, Request("undo", patch=request.patch))
            for reply, undo in zip(trial, undone, strict=True):
                if undo.get("error"):
                    also = f"the engine could not be put back and must be restarted: {undo['error']}"
                    reply["error"] = "; ".join(filter(None, [reply.get("error"), also]))
        return trial


def _needs_step(engine: Any, request: Request, replies: list[dict[str, Any]]) -> bool:
    """Whether a step is to be run: the trial of a patch, or the first one of an engine that was restored."""
    if any(r.get("paused") for r in replies):
        return False
    if getattr(engine.server_args, "disaggregation_mode", "null") != "null":
        return False
    if any(r.get("error") for r in replies):
        # No step after a refusal: nothing was changed, and a step crashes an engine with released memory.
        failed = any(r.get("error") and not r.get("refused") for r in replies)
        return failed and request.action in ("patch", "undo") and any(r.get("graphs") for r in replies)
    active = any(row["state"] == "active" for r in replies for row in r["rows"])
    return request.action == "patch" and active


def _in_a_loop() -> bool:
    """Whether an event loop runs in this thread that cannot run another step meanwhile, as nest_asyncio's can."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return False
    return not getattr(loop, "_nest_patched", False)


def _run_step(engine: Any) -> str | None:
    loop = getattr(engine, "loop", None) or asyncio.get_event_loop()
    if loop.is_running() and _in_another_thread(loop):
        return asyncio.run_coroutine_threadsafe(_step(engine), loop).result()
    failure: str | None = loop.run_until_complete(_step(engine))
    return failure


def _in_another_thread(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is not loop
    except RuntimeError:
        return True


async def _step(engine: Any) -> str | None:
    """Run a prefill and a decode; None, or why it failed. Raises PatchError if it does not end."""
    limit = 2 * Environment.read().trial_s + 60  # a scheduler ends the trial of its modules earlier
    try:
        if getattr(engine.tokenizer_manager, "is_generation", True):
            sampling = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
            run = engine.async_generate(input_ids=[[1, 2, 3]], sampling_params=sampling)
        else:
            run = engine.async_encode("a")
        await asyncio.wait_for(run, limit)
    except asyncio.TimeoutError:
        raise PatchError(
            f"a step of the changed engine did not end within {limit:g} s; it must be restarted"
        ) from None
    except Exception as error:
        return f"a step failed: {type(error).__name__}: {error}"
    return None


def _unreachable(engine: Any) -> str | None:
    """Why not every process of this engine can be reached; None if they can."""
    if engine.send_to_rpc is None:
        return "the engine has ended (it was shut down), so nothing is left to patch or undo"
    args = engine.server_args
    if any(c.__module__.startswith(ON_RAY) for c in type(engine).__mro__):
        return NO_PLUGINS
    if getattr(args, "nnodes", 1) > 1:
        return "the engine runs on several machines: start it with FASTKERNELS=1 on each of them"
    if getattr(args, "dp_size", 1) > 1 and not getattr(args, "enable_dp_attention", False):
        return "SGLang's RPC reaches one data-parallel replica only: start the engine with FASTKERNELS=1"
    return None


def _send(engine: Any, request: Request) -> list[dict[str, Any]]:
    """One request to all schedulers, and their replies in rank order."""
    with tempfile.TemporaryDirectory(prefix="fastkernels-") as folder:
        message = json.dumps({**json.loads(request.to_json()), "folder": folder})
        socket = engine.send_to_rpc
        wait_s = RPC_WAIT_S + Environment.read().trial_s
        limit, socket.RCVTIMEO = socket.RCVTIMEO, int(1000 * wait_s)
        late = engine in _interrupted
        try:
            _interrupted.add(engine)
            engine.collective_rpc(RPC, request=message)
            if not late:
                _interrupted.discard(engine)
        except Exception as error:
            if RPC in str(error):
                raise PatchError(
                    "SGLang's schedulers did not load the fastkernels plugin. It must be installed in SGLang's"
                    " environment before the engine starts, and SGLANG_PLUGINS (here"
                    f" {os.environ.get('SGLANG_PLUGINS')!r}) must be unset or name it"
                ) from error
            if not (
                late and isinstance(error, AssertionError)
            ):  # of the earlier request; files tell about this one
                raise PatchError(
                    f"SGLang's schedulers could not be reached: {type(error).__name__}: {error}"
                ) from error
        finally:
            socket.RCVTIMEO = limit
        replies = _collect(Path(folder), wait_s if late else REPLY_WAIT_S)
        if late:
            wait_ms = LATE_WAIT_MS
            while socket.poll(wait_ms):
                socket.recv_multipart()
                wait_ms = 0
            _interrupted.discard(engine)
        return replies


def _collect(folder: Path, wait_s: float) -> list[dict[str, Any]]:
    deadline = time.monotonic() + wait_s
    while True:
        replies = [json.loads(file.read_text()) for file in folder.glob("*.json")]
        if replies and len(replies) >= replies[0]["world"]:
            return sorted(replies, key=lambda r: r["rank"])
        if time.monotonic() > deadline:
            got = sorted(r["rank"] for r in replies)
            raise PatchError(f"only ranks {got} answered within {wait_s:.0f} s; the others' state is unknown")
        time.sleep(0.01)


HOST = SglangHost()
