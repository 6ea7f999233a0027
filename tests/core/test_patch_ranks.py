"""A patch of several ranks is in all of them or in none, within an event loop and without one."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from fastkernels.patch import PatchError, Request, patch, patch_async


class Engine:
    """A live object of two ranks: which of them are patched, and the requests to the host."""

    def __init__(self) -> None:
        self.patched: set[int] = set()
        self.asked: list[str] = []


class TwoRanks:
    """A host whose second rank fails, swaps another number of modules, or waits.

    how  'works', 'fails', 'differs', 'nothing', 'breaks' or 'waits'
    """

    name = "two-ranks"

    def __init__(self, how: str):
        self.how = how
        self.began = asyncio.Event()

    def matches(self, target: Any) -> bool:
        return isinstance(target, Engine)

    def _reply(self, target: Engine, rank: int, request: Request) -> dict[str, Any]:
        reply = {"rank": rank, "pid": rank, "host": self.name, "version": "1", "rows": [], "error": None}
        if request.action == "undo":
            target.patched.discard(rank)
        elif rank and self.how == "fails":
            return reply | {"error": "PatchError: no such class"}
        else:
            target.patched.add(rank)
            state = "off" if self.how == "nothing" else "active"
            modules = 4 if rank and self.how == "differs" else 3
            row = {"rank": rank, "op": "rms_norm", "host_class": "Norm", "modules": modules, "state": state}
            reply["rows"] = [row]
        return reply

    def call(self, target: Engine, request: Request) -> list[dict[str, Any]]:
        target.asked.append(request.action)
        first = self._reply(target, 0, request)
        if request.action == "patch" and self.how == "breaks":
            raise RuntimeError("a pipe broke")
        return [first, self._reply(target, 1, request)]

    async def call_async(self, target: Engine, request: Request) -> list[dict[str, Any]]:
        replies = self.call(target, request)
        self.began.set()
        if self.how == "waits":
            await asyncio.sleep(0.05)
        return replies


@pytest.fixture
def host_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    def made(how: str) -> TwoRanks:
        host = TwoRanks(how)
        monkeypatch.setattr(sys.modules["fastkernels.patch"], "find_host", lambda target: host)
        return host

    return made


def patched_by(asynchronous: bool, engine: Engine) -> Any:
    return asyncio.run(patch_async(engine, "rms_norm")) if asynchronous else patch(engine, "rms_norm")


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ("fails", PatchError, "rank 1 .*no such class"),
        ("differs", PatchError, r"ranks \[1\] patched something else than rank 0; undone"),
        ("nothing", PatchError, "nothing to patch"),
        ("breaks", RuntimeError, "a pipe broke"),
    ],
)
def test_failed_patch_is_undone_in_every_rank(
    host_of: Any, asynchronous: bool, how: str, error: type[Exception], says: str
) -> None:
    host_of(how)
    engine = Engine()
    with pytest.raises(error, match=says):
        patched_by(asynchronous, engine)
    assert engine.asked == ["patch", "undo"] and not engine.patched


@pytest.mark.parametrize("asynchronous", [False, True])
def test_patch_of_all_ranks_stays(host_of: Any, asynchronous: bool) -> None:
    host_of("works")
    engine = Engine()
    report = patched_by(asynchronous, engine)
    assert engine.asked == ["patch"] and engine.patched == {0, 1} and report.patched_modules == 6


@pytest.mark.parametrize("cancellations", [1, 2])
def test_cancelled_patch_is_undone_in_every_rank(host_of: Any, cancellations: int) -> None:
    """Also if the undo is cancelled, too."""
    host = host_of("waits")
    engine = Engine()

    async def run() -> None:
        task = asyncio.ensure_future(patch_async(engine, "rms_norm"))
        await host.began.wait()
        for _ in range(cancellations):
            task.cancel()
            await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert engine.asked == ["patch", "undo"] and not engine.patched
