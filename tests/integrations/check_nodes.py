"""One server on two nodes, both on this machine: every rank is patched, or the server does not start."""

import json
import os
import signal
import subprocess
import sys
import urllib.request

import pytest
from fk_bench.serving.process import free_port
from support.hosts.servers import COMMANDS, HOST, post, wait_until_ready

PORT = {"vllm": "--master-port", "sglang": "--dist-init-addr"}[HOST]
OPTIONS = {
    "vllm": ["--tensor-parallel-size", "2", "--nnodes", "2", "--master-addr", "127.0.0.1"],
    "sglang": ["--tp-size", "2", "--nnodes", "2"],
}[HOST]
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
    "FASTKERNELS_OPS": "rms_norm,silu_and_mul",
}
SECOND = ["--node-rank", "1", *(["--headless"] if HOST == "vllm" else [])]


@pytest.fixture
def start(tmp_path):
    """start(patched of node 0, patched of node 1): the two processes, and the address of the first."""
    processes = []

    def start(*patched):
        port, http = free_port(), free_port()
        at = str(port) if HOST == "vllm" else f"127.0.0.1:{port}"
        for node, on in enumerate(patched):
            rest = ["--host", "127.0.0.1", "--port", str(http), "--node-rank", "0"] if node == 0 else SECOND
            command = [sys.executable, "-m", *COMMANDS[HOST], *OPTIONS, PORT, at, *rest]
            environment = {**os.environ, **ENVIRONMENT, "FASTKERNELS_REPORT": str(tmp_path / "reports")}
            if on:
                environment |= {"FASTKERNELS": "1", "FASTKERNELS_PROVIDER": f"rms_norm:{HOST}"}
            with open(tmp_path / f"log{node}", "w") as log:
                made = subprocess.Popen(
                    command, env=environment, stdout=log, stderr=log, start_new_session=True
                )
            processes.append(made)
        return processes, f"http://127.0.0.1:{http}"

    yield start
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        process.wait()


def test_every_rank_of_both_nodes_is_patched(start, tmp_path):
    (first, _), url = start(True, True)
    wait_until_ready(first, url, tries=800)
    body = {"model": "tiny", "prompt": "ab", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    assert post(url + "/v1/completions", body)["usage"]["completion_tokens"] == 8
    files = sorted((tmp_path / "reports").glob(f"{HOST}-*.json"))
    assert [file.name.split("-")[1] for file in files] == ["0", "1"]
    for file in files:
        rows = {row["op"]: row for row in json.loads(file.read_text())["rows"]}
        assert (rows["rms_norm"]["state"], rows["rms_norm"]["modules"]) == ("active", 5)
    if HOST == "vllm":
        status = json.load(urllib.request.urlopen(url + "/fastkernels", timeout=60))
        assert [*status["pids"]] == ["0", "1"] and status["patched_modules"] == 14 and status["verified"]


def test_a_node_without_the_patch_ends_the_start_by_name(start, tmp_path):
    (first, _), _ = start(True, False)
    assert first.wait(timeout=400) != 0
    assert (
        "rank 1 has not loaded the patch: set FASTKERNELS=1 on every node" in (tmp_path / "log0").read_text()
    )
