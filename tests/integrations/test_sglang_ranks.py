"""A live patch of SGLang is refused by name where its RPC does not reach every rank."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fk_integrations.sglang.host import HOST, register

from fastkernels.patch import PatchError, Request


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nnodes": 2}, "the engine runs on several machines: start it with FASTKERNELS=1 on each of them"),
        ({"dp_size": 2}, "reaches one data-parallel replica only: start the engine with FASTKERNELS=1"),
    ],
)
def test_unreachable_ranks_refuse_a_live_patch(arguments: dict[str, Any], message: str) -> None:
    engine = SimpleNamespace(send_to_rpc=object(), server_args=SimpleNamespace(**arguments))
    for action in ("patch", "undo"):
        with pytest.raises(PatchError, match=message):
            HOST.call(engine, Request(action))


def test_sglang_on_ray_is_refused_live() -> None:
    kind = type("RayEngine", (SimpleNamespace,), {"__module__": "sglang.srt.ray.engine"})
    engine = kind(send_to_rpc=object(), server_args=SimpleNamespace())
    with pytest.raises(PatchError, match="schedulers on Ray load no plugins: start it without Ray"):
        HOST.call(engine, Request("patch"))


def test_sglang_on_ray_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTKERNELS", "1")
    monkeypatch.setattr(sys, "argv", ["launch_server", "--use-ray"])
    with pytest.raises(PatchError, match="schedulers on Ray load no plugins"):
        register()
    monkeypatch.setattr(sys, "argv", ["launch_server"])
    monkeypatch.setitem(sys.modules, "sglang.srt.ray.engine", ModuleType("engine"))
    with pytest.raises(PatchError, match="schedulers on Ray load no plugins"):
        register()
