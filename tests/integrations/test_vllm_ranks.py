"""A patch of vLLM that does not reach every rank is refused by name, and nothing changes."""

from __future__ import annotations

import asyncio
import json
import os
from types import SimpleNamespace
from typing import Any

import pytest
from fk_integrations.vllm import host

from fastkernels.patch import PatchError, Request


def reply(rank: int) -> str:
    return json.dumps(
        {"rank": rank, "pid": rank, "host": "vllm", "version": "0.33.0", "rows": [], "error": None}
    )


def config(ranks: int, backend: str = "ray") -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            world_size=ranks, distributed_executor_backend=backend, use_ray=backend == "ray", nnodes=1
        )
    )


class LLMEngine:
    """An engine whose executor returns the replies of some of its ranks."""

    def __init__(self, ranks: int, answers: list[int]) -> None:
        self.vllm_config, self.answers, self.sent = config(ranks), answers, []  # type: ignore[var-annotated]
        self.engine_core = SimpleNamespace()

    def has_unfinished_requests(self) -> bool:
        return False

    is_sleeping = has_unfinished_requests

    def reset_prefix_cache(self) -> bool:
        return True

    def collective_rpc(self, method: str, args: tuple[str]) -> list[str]:
        self.sent.append(json.loads(args[0])["action"])
        return [reply(rank) for rank in self.answers]


def test_patch_is_not_sent_if_a_rank_is_silent() -> None:
    engine = LLMEngine(2, [0])
    match = r"only 1 of 2 ranks \(0\) answered through vLLM's executor \(ray\): start the engine with FASTKERNELS=1"
    with pytest.raises(PatchError, match=match):
        host.HOST.call(engine, Request("patch"))
    assert engine.sent == ["report"]


def test_patch_is_sent_if_every_rank_answers() -> None:
    engine = LLMEngine(2, [1, 0])
    assert [r["rank"] for r in host.HOST.call(engine, Request("patch"))] == [0, 1]
    assert engine.sent == ["report", "patch"]


def test_replies_of_all_data_parallel_engines_count() -> None:
    async def utility(method: str, *args: Any, engine: int) -> list[str]:
        return [reply(2 * engine), reply(2 * engine + 1)]

    core = SimpleNamespace(core_engines=[0, 1], _call_utility_async=utility)
    engine = SimpleNamespace(engine_core=core, vllm_config=config(2, "mp"))
    found = asyncio.run(host.rpc_async(engine, Request("report")))
    assert [r["rank"] for r in found] == [0, 1, 2, 3]


def test_workers_on_ray_get_our_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
    monkeypatch.delenv(name, raising=False)
    for ours in [n for n in os.environ if n.startswith("FASTKERNELS")]:
        monkeypatch.delenv(ours)
    host.copy_to_ray()
    assert name not in os.environ
    monkeypatch.setenv("FASTKERNELS_DISABLE", "rms_norm")
    host.copy_to_ray()
    host.copy_to_ray()
    assert os.environ[name] == "FASTKERNELS"
    monkeypatch.setenv(name, "MINE_")
    host.copy_to_ray()
    assert os.environ[name] == "MINE_,FASTKERNELS"
