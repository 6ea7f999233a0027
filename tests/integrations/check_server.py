"""A server with FASTKERNELS=1 is patched by the environment alone; if it cannot be, its start fails with the reason."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request

from fk_bench.serving.process import free_port
from support.checks import candidate
from support.hosts.servers import COMMANDS, HOST, post, wait_until_ready

__all__ = ["candidate"]  # a fixture
TITLE = {"vllm": "vLLM", "sglang": "SGLang"}[HOST]


def serve(tmp_path, **environment):
    port = free_port()
    command = [sys.executable, "-m", *COMMANDS[HOST], "--host", "127.0.0.1", "--port", str(port)]
    with open(tmp_path / "log", "w") as log:
        environment = {**os.environ, "FASTKERNELS": "1", **environment}
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    return server, f"http://127.0.0.1:{port}"


def written_after_calls(file):
    """A report, which the worker writes every second, when it holds the calls of 8 tokens."""
    for _ in range(300):
        report = json.loads(file.read_text())
        if all(r["calls"] >= 8 * r["modules"] for r in report["rows"] if r["state"] == "active"):
            break
        time.sleep(0.2)
    return report


def check_status(url, ops):
    """GET /fastkernels is the report of all workers."""
    status = json.load(urllib.request.urlopen(url + "/fastkernels", timeout=60))
    assert {row["op"] for row in status["rows"]} == {*ops} and status["errors"] == {}
    assert (status["host"], status["patched_modules"], status["verified"]) == (HOST, 7, True)
    (rms_norm,) = [row for row in status["rows"] if row["op"] == "rms_norm"]
    assert rms_norm["calls"] >= 8 * 5 and rms_norm["state"] == "active"


def test_server_patched_by_environment(tmp_path):
    reports = tmp_path / "reports"
    ops = "rms_norm,silu_and_mul,attention,sampling"
    environment = {"FASTKERNELS_OPS": ops, "FASTKERNELS_PROVIDER": f"rms_norm:{HOST}"}
    server, url = serve(tmp_path, FASTKERNELS_REPORT=str(reports), **environment)
    try:
        wait_until_ready(server, url)
        body = {"model": "tiny", "prompt": "ab", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        assert post(url + "/v1/completions", body)["usage"]["completion_tokens"] == 8
        if HOST == "vllm":
            check_status(url, ops.split(","))
        (file,) = reports.glob(f"{HOST}-0-*.json")
        worker = written_after_calls(file)
        os.kill(worker["pid"], signal.SIGKILL)  # the report file must survive
    finally:
        server.send_signal(signal.SIGINT if HOST == "vllm" else signal.SIGTERM)
        server.wait(timeout=60)
    rows = {r["op"]: r for r in json.loads(file.read_text())["rows"]}
    assert worker["pid"] != server.pid and worker["error"] is None
    assert rows["rms_norm"]["state"] == "active" and rows["rms_norm"]["calls"] >= 8 * 5
    assert (rows["rms_norm"]["provider"], rows["rms_norm"]["fallbacks"]) == (HOST, {})
    assert rows["silu_and_mul"]["calls"] >= 8 * 2 and not rows["silu_and_mul"]["provider"]
    if HOST == "vllm":  # its KV cache on a CPU is packed for its own kernels
        assert rows["attention"]["state"] == "off" and "packed" in rows["attention"]["reason"]
        patched = "rank 0: 7 modules patched", "  patched: rms_norm (5 RMSNorm), silu_and_mul (2 SiluAndMul)"
    else:
        patched = (
            "rank 0: 9 modules patched",
            "  patched: rms_norm (5 RMSNorm), silu_and_mul (2 SiluAndMul), ",
        )
        assert rows["attention"]["modules"] == 2 and rows["attention"]["calls"] >= 8 * 2 * 2
    log = (tmp_path / "log").read_text()
    for line in (*patched, "  unsupported: sampling: not in a live host"):
        assert log.count(line) == 1, line


def test_an_unknown_op_ends_the_start_with_the_reason(tmp_path):
    server, _ = serve(tmp_path, FASTKERNELS_OPS="rms_nrom")
    assert server.wait(timeout=200) != 0
    reason = f"FASTKERNELS=1, but {TITLE} cannot be patched: FASTKERNELS_OPS: unknown op 'rms_nrom'."
    assert reason in (tmp_path / "log").read_text()


def test_candidate_with_an_import_error_ends_the_start(tmp_path, candidate):
    path = candidate("import nothing_of_that_name\n")
    server, _ = serve(tmp_path, FASTKERNELS_OPS="rms_norm", FASTKERNELS_CANDIDATES=f"rms_norm={path}")
    assert server.wait(timeout=200) != 0
    assert "nothing_of_that_name" in (tmp_path / "log").read_text()
