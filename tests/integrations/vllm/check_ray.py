"""vLLM's workers on a Ray cluster of two nodes: all are patched, or none."""

import os
import sys
from pathlib import Path

import psutil
import pytest
from fk_integrations.vllm.host import ENDED
from support.hosts import ray_on_cpu
from support.hosts.vllm_engine import first_logprobs, generate, make_llm

import fastkernels
from fastkernels.patch import PatchError, Request, find_host

OPS = ["rms_norm", "silu_and_mul"]
RAY = (
    Path(__file__).parents[3]
    / ".venv/lib"
    / f"python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
)
HEAD = {"num_cpus": 1, "num_gpus": 1, "include_dashboard": False}
NO_IMPORT = "raise ImportError('fastkernels is not installed on this node')\n"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster with one node; vLLM finds it."""
    if not (RAY / "ray").exists():
        pytest.skip("no Ray in .venv: run `make setup`")
    ray_on_cpu.install(tmp_path_factory.mktemp("ray"), RAY)
    # Ray's memory monitor ends workers if others need the machine's memory
    no_monitor = {"RAY_memory_monitor_refresh_ms": "0"}
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "GLOO_SOCKET_IFNAME": "lo", **no_monitor}
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args=HEAD)
    os.environ |= {"RAY_ADDRESS": made.address, "VLLM_HOST_IP": made.address.partition(":")[0]}
    yield made
    made.shutdown()


def engine():
    return make_llm(os.environ["TINY_LLAMA"], tensor_parallel_size=2, distributed_executor_backend="ray")


def add_node(cluster, **environment):
    return cluster.add_node(num_cpus=1, num_gpus=1, env_vars=environment or None)


def ray_ids(*nodes):
    return [f"Ray node {node.node_id[:12]}" for node in nodes]


def wait_until_ended(pid, seconds=60.0):
    """A worker outlives its node until it notices: meanwhile it still answers, and a patch succeeds."""
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=seconds)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_workers_of_both_nodes_are_patched_and_undone(cluster, monkeypatch):
    second = add_node(cluster)
    monkeypatch.setenv("FASTKERNELS", "1")
    monkeypatch.setenv("FASTKERNELS_OPS", ",".join(OPS))
    llm = engine()
    try:
        host = find_host("vllm")
        replies = host.call(llm, Request("report"))
        found = {(r["rank"], row["op"], row["state"]) for r in replies for row in r["rows"]}
        assert found == {(n, op, "active") for n in (0, 1) for op in OPS}
        fastkernels.unpatch(llm)
        assert not any(r["rows"] for r in host.call(llm, Request("report")))
        stock = generate(llm, 4)
        report = fastkernels.patch(llm, ops=OPS)
        patched = generate(llm, 4)
        report.refresh()
        assert {(r.rank, r.op) for r in report.active if r.calls > 20} == {
            (n, op) for n in (0, 1) for op in OPS
        }
        assert len({*report.pids.values(), os.getpid()}) == 3 and report.verified
        for rank, name in enumerate(ray_ids(cluster.head_node, second)):
            assert report.nodes[rank].endswith(name) and f"{name}: rank {rank}\n" in str(report)
        assert first_logprobs(patched) == pytest.approx(first_logprobs(stock), abs=0.1)
        report.undo()
        assert generate(llm, 4) == stock

        cluster.remove_node(second, allow_graceful=False)
        wait_until_ended(report.pids[1])
        with pytest.raises(PatchError) as error:
            fastkernels.patch(llm, ops=OPS)
        # vLLM may have noticed first, and ended the engine; its log has the rank
        assert f"rank 1 on {ray_ids(second)[0]}" in str(error.value) or ENDED in str(error.value)
    finally:
        llm.llm_engine.engine_core.shutdown()


def test_workers_in_a_compiled_graph_of_ray_are_patched(cluster, monkeypatch):
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    monkeypatch.setenv("VLLM_USE_RAY_WRAPPED_PP_COMM", "0")  # its communicator needs GPUs
    second = add_node(
        cluster, VLLM_HOST_IP="127.0.0.2"
    )  # this executor needs an address of its own for each node
    llm = engine()
    try:
        stock = generate(llm, 4)
        report = fastkernels.patch(llm, ops=OPS)
        patched = generate(llm, 4)
        report.refresh()
        assert {(r.rank, r.op) for r in report.active if r.calls > 20} == {
            (n, op) for n in (0, 1) for op in OPS
        }
        assert [report.nodes[rank].split(", ")[1] for rank in (0, 1)] == ray_ids(cluster.head_node, second)
        assert first_logprobs(patched) == pytest.approx(first_logprobs(stock), abs=0.1)
        report.undo()
        assert generate(llm, 4) == stock
    finally:
        llm.llm_engine.engine_core.shutdown()
        cluster.remove_node(second)


def test_a_node_that_cannot_import_fastkernels_is_named(cluster, tmp_path):
    for package in ("fastkernels", "fk_integrations"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(NO_IMPORT)
    second = add_node(cluster, PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    llm = engine()
    try:
        stock = generate(llm, 4)
        with pytest.raises(PatchError) as error:
            fastkernels.patch(llm, ops=OPS)
        assert "rank 1 (pid" in str(error.value) and "FastKernels is not installed here" in str(error.value)
        assert ray_ids(second)[0] in str(error.value) and "rank 0" not in str(error.value)
        assert generate(llm, 4) == stock
    finally:
        llm.llm_engine.engine_core.shutdown()
        cluster.remove_node(second)
