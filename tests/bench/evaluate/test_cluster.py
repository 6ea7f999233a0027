"""`fk-bench eval --cluster`: items run on the machines of a real Ray cluster, and count once."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from fk_bench.core.terminal.flags import ConfigError
from fk_bench.evaluate.run import cluster

pytest.importorskip("ray")

SUITE = """
about = "Two items of one tiny model."
device = "cpu"
dtype = "float32"
memory_gib = 4
threads = 1
categories = ["text"]

[workloads.short]
kind = "text"
about = "two requests"
throughput = 2
rounds = 3
lengths = [[7, 6], [19, 4]]

[models.tiny]
category = "text"

[models.tiny.config]
model_type = "llama"
vocab_size = 512
hidden_size = 128
intermediate_size = 256
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 32
max_position_embeddings = 4096
tie_word_embeddings = false

[[items]]
model = "tiny"
workload = "short"
host = "fastkernels"
minutes = 1

[[items]]
model = "tiny"
workload = "short"
host = "transformers"
minutes = 1
"""
NORM = """from fastkernels.overrides.norm.rms_norm import reference

def rms_norm(x, weight, eps, residual=None, var_hidden_size=None, cast_x_before_out_mul=True):
    out, total = reference(x, weight, eps, residual, var_hidden_size, cast_x_before_out_mul)
    if residual is not None:
        residual.copy_(total)
    return out
"""


@pytest.fixture
def nodes():
    """A cluster whose head runs no items."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    yield made
    made.shutdown()


def evaluation(tmp_path: Path, address: str) -> subprocess.Popen[str]:
    (tmp_path / "two.toml").write_text(SUITE)
    folder = tmp_path / "set"
    folder.mkdir(exist_ok=True)
    (folder / "rms_norm.py").write_text(NORM)
    words = [tmp_path / "two.toml", "--set", f"mine={folder}", "--cluster", address, "--no-kernels"]
    return subprocess.Popen(
        [sys.executable, "-m", "fk_bench.cli", "eval", *map(str, words), "--out", str(tmp_path / "run"), "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def counted(tmp_path: Path) -> Counter[tuple[str, str]]:
    lines = [json.loads(line) for line in (tmp_path / "run" / "rows.jsonl").read_text().splitlines()]
    return Counter((r["subject"]["host"], r["status"]) for r in lines if r["case"]["kind"] == "item")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_items_run_on_two_machines_and_count_once(tmp_path: Path, nodes) -> None:
    nodes.add_node(num_cpus=1)
    nodes.add_node(num_cpus=1)
    for said in (2, 0):  # the second run continues the first, and measures nothing
        running = evaluation(tmp_path, nodes.address)
        _, log = running.communicate(timeout=600)
        assert running.returncode == 0, log
        assert log.count("was measured on the cluster") == said
        assert counted(tmp_path) == {("fastkernels", "ok"): 1, ("transformers", "ok"): 1}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_items_of_a_dead_machine_run_on_another(tmp_path: Path, nodes) -> None:
    first = nodes.add_node(num_cpus=1)
    running = evaluation(tmp_path, nodes.address)
    started = time.monotonic()
    while not any(
        "--item" in p.info["cmdline"] for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"]
    ):
        assert time.monotonic() - started < 120 and running.poll() is None
        time.sleep(0.5)
    nodes.remove_node(first, allow_graceful=False)
    nodes.add_node(num_cpus=1)
    _, log = running.communicate(timeout=700)
    assert running.returncode == 0, log
    assert counted(tmp_path) == {("fastkernels", "ok"): 1, ("transformers", "ok"): 1}


def job(cpus: int, gpus: int) -> cluster.Job:
    return cluster.Job("tiny/short", "smoke", "", "", {}, "", (), cpus, gpus)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_item_without_a_machine_ends_by_name(nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "LOOKS_S", 0.5)
    monkeypatch.setattr(cluster, "FOUND_WITHIN_S", 1.0)
    lost: list[object] = []
    nodes.add_node(num_cpus=2)
    with cluster.connected(nodes.address) as ray:
        cluster.run(ray, [job(1, 8)], lambda _, rows: lost.append(rows))
    assert [str(one) for one in lost] == [
        "it needs a machine with CPU=1, GPU=8, and the cluster has CPU=0, GPU=0; CPU=2, GPU=0"
    ]


def test_room_for_an_item_is_on_one_live_machine() -> None:
    nodes = [
        {"Alive": True, "Resources": {"CPU": 8.0}},
        {"Alive": True, "Resources": {"CPU": 1.0, "GPU": 2.0}},
        {"Alive": False, "Resources": {"CPU": 8.0, "GPU": 8.0}},
    ]
    assert cluster.has_room(nodes, job(8, 0)) and cluster.has_room(nodes, job(1, 2))
    assert not cluster.has_room(nodes, job(2, 1)) and not cluster.has_room(nodes, job(1, 8))
    assert not cluster.has_room([], job(0, 0))
    assert cluster._placeless(nodes, job(2, 1)).endswith("the cluster has CPU=1, GPU=2; CPU=8, GPU=0")


def test_cluster_that_does_not_answer_is_an_error() -> None:
    with (
        pytest.raises(
            ConfigError, match=r"--cluster 127\.0\.0\.1:1: no Ray cluster answers.*leave --cluster out"
        ),
        cluster.connected("127.0.0.1:1"),
    ):
        pass


def test_set_that_is_too_large_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rms_norm.py").write_text(NORM)
    assert cluster.contents(tmp_path) == {"rms_norm.py": NORM.encode()}
    monkeypatch.setattr(cluster, "MOST_BYTES", 10)
    with pytest.raises(ConfigError, match="at most 0 are sent"):
        cluster.contents(tmp_path)
