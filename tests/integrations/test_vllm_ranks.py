"""A patch of vLLM that does not reach every rank is refused by name, and nothing changes."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
from fk_integrations.vllm import every_node, host

from fastkernels.patch import PatchError, Request


def reply(rank: int) -> str:
    return json.dumps(
        {"rank": rank, "pid": rank, "host": "vllm", "version": "0.33.0", "rows": [], "error": None}
    )


def config(ranks: int) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            world_size=ranks, distributed_executor_backend="mp", use_ray=False, nnodes=1
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
    match = r"only 1 of 2 ranks \(0\) answered through vLLM's executor \(mp\): start the engine with FASTKERNELS=1"
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
    engine = SimpleNamespace(engine_core=core, vllm_config=config(2))
    found = asyncio.run(host.rpc_async(engine, Request("report")))
    assert [r["rank"] for r in found] == [0, 1, 2, 3]


class Executor:
    """vLLM's executor, as far as a request needs it."""

    is_failed = False

    def __init__(self, *workers: Any, hangs: bool = False) -> None:
        self.workers, self.hangs, self.released = workers, hangs, Event()

    def collective_rpc(self, method: Any, args: tuple[str]) -> list[str]:
        if self.hangs:
            self.is_failed = True
            self.released.wait(60)
        self.sent = cloudpickle.dumps(method)
        return [pickle.loads(self.sent)(worker, *args) for worker in self.workers]


def worker(rank: int, **more: Any) -> Any:
    return SimpleNamespace(rank=rank, vllm_config=config(2), **more)


def test_rank_without_fastkernels_is_named() -> None:
    with_ours = worker(0, fastkernels_rpc=lambda request: reply(0))
    found = every_node.every_node(SimpleNamespace(model_executor=Executor(with_ours, worker(1))), "{}")
    first, second = map(json.loads, found)
    assert (first["rank"], first["error"]) == (0, None)
    assert (second["rank"], second["error"]) == (1, every_node.MISSING) and second["node"]


WITHOUT_OURS = """
import json, pickle, sys
from types import SimpleNamespace as N
sys.modules["fastkernels"] = sys.modules["fk_integrations"] = None  # an import of them fails
worker = N(rank=3, vllm_config=N(parallel_config=N(world_size=4)))
print(pickle.load(sys.stdin.buffer)(worker, "{}"))
"""


def test_rank_answers_where_fastkernels_cannot_be_imported() -> None:
    executor = Executor(worker(0))
    every_node.every_node(SimpleNamespace(model_executor=executor), "{}")
    command = [sys.executable, "-c", WITHOUT_OURS]
    found = json.loads(subprocess.run(command, input=executor.sent, capture_output=True, check=True).stdout)
    assert (found["rank"], found["error"]) == (3, every_node.MISSING)


def test_lost_worker_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(every_node, "LOOKS_S", 0.01)
    executor = Executor(hangs=True)
    with pytest.raises(every_node.WorkerLost, match="vLLM has lost a worker, and ends the engine"):
        every_node.every_node(SimpleNamespace(model_executor=executor), "{}")
    executor.released.set()


class OnRay:
    """An executor with actors of a real Ray cluster, which has failed once an actor is gone, as RayExecutorV2 has."""

    def __init__(self, ray: Any, nodes: list[str]) -> None:
        class Worker:
            def __init__(self, rank: int) -> None:
                parallel = SimpleNamespace(world_size=2)
                self.rank, self.vllm_config = rank, SimpleNamespace(parallel_config=parallel)

            def run(self, sent: bytes, *args: str) -> str:
                return pickle.loads(sent)(self, *args)

        self.ray, self.is_failed, at = (
            ray,
            False,
            ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy,
        )
        self.ray_worker_handles = [
            SimpleNamespace(rank=rank, node_id=node) for rank, node in enumerate(nodes)
        ]
        kind = ray.remote(num_cpus=0)(Worker)
        self.actors = [
            kind.options(scheduling_strategy=at(node, soft=False)).remote(n) for n, node in enumerate(nodes)
        ]

    def collective_rpc(self, method: Any, args: tuple[str]) -> list[str]:
        try:
            return self.ray.get([actor.run.remote(cloudpickle.dumps(method), *args) for actor in self.actors])
        except self.ray.exceptions.RayError:
            self.is_failed = True
            raise


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_nodes_of_a_ray_cluster_are_named(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    for package in ("fastkernels", "fk_integrations"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise ImportError\n")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = made.add_node(num_cpus=1, env_vars={"PYTHONPATH": str(tmp_path)})
    try:
        ray.init(address=made.address, log_to_driver=False)
        core = SimpleNamespace(model_executor=OnRay(ray, [made.head_node.node_id, second.node_id]))
        found = [json.loads(one) for one in every_node.every_node(core, "{}")]
        assert [one["error"] for one in found] == [every_node.MISSING] * 2
        assert [one["node"].split(", ")[1] for one in found] == [
            f"Ray node {node.node_id[:12]}" for node in (made.head_node, second)
        ]
        made.remove_node(second, allow_graceful=False)
        os.kill(found[1]["pid"], signal.SIGKILL)  # it would outlive its node for some seconds
        with pytest.raises(every_node.WorkerLost, match=f"; lost: rank 1 on Ray node {second.node_id[:12]}$"):
            every_node.every_node(core, "{}")
    finally:
        ray.shutdown()
        made.shutdown()


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
