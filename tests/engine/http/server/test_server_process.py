"""The server process: start and end."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
import time

import httpx
import psutil
import pytest
import typer
from fk_bench.serving.serve import serve
from support.commands import fk_bench_here
from support.live import metric, wait_for
from support.server_process import FK_BENCH, ended, start

LONG = {"prompt": [5], "ignore_eos": True, "stream": True}


class Reader(threading.Thread):
    """A thread that reads a stream to its end."""

    def __init__(self, url, max_tokens):
        super().__init__()
        self.url, self.max_tokens, self.lines, self.begun = url, max_tokens, [], threading.Event()
        self.start()
        assert self.begun.wait(120)

    def run(self):
        body = {**LONG, "max_tokens": self.max_tokens}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                self.lines += [line] if line else []
                self.begun.set()

    @property
    def last(self):
        """The last event before [DONE]."""
        self.join(120)
        assert self.lines[-1] == "data: [DONE]"
        return json.loads(self.lines[-2][6:])


def test_sigterm_finishes_running_requests(tiny, tmp_path):
    report = tmp_path / "report"
    process, url = start(tiny, env={"FASTKERNELS_REPORT": str(report)})
    reader = Reader(url, 400)  # longer than the requests below
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: httpx.get(f"{url}/health").status_code == 503)
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["message"] == "the server is shutting down"
    assert httpx.get(f"{url}/health").status_code == 503
    assert reader.last["choices"][0]["finish_reason"] == "length"
    status, errors = ended(process)
    assert status == 0 and "Traceback" not in errors
    (file,) = report.glob("fastkernels-0-*.json")
    rows = {r["op"]: r for r in json.loads(file.read_text())["rows"]}
    assert rows["rms_norm"]["calls"] > 0 and rows["rms_norm"]["modules"] == 5


def test_request_longer_than_the_drain_gets_an_error(tiny):
    process, url = start(tiny, "--drain-timeout", "0.5", "--max-model-len", "2000", "--host", "0.0.0.0")
    reader = Reader(url, 1900)
    process.send_signal(signal.SIGTERM)
    assert reader.last["error"] == {
        "message": "the server is shutting down", "type": "overloaded_error", "param": None, "code": 503,
    }  # fmt: skip
    status, errors = ended(process)
    assert status == 0 and "Traceback" not in errors
    assert errors.count("0.0.0.0 accepts requests from the network without an API key") == 1


@pytest.mark.parametrize(
    "signals", [(signal.SIGINT,), pytest.param((signal.SIGTERM, signal.SIGTERM), marks=pytest.mark.slow)]
)
def test_ctrl_c_and_second_signal_end_at_once(tiny, signals):
    process, url = start(tiny, "--max-model-len", "2000")
    reader = Reader(url, 1900)
    began = time.monotonic()
    for number in signals:
        process.send_signal(number)
        time.sleep(0.1)
    assert reader.last["error"]["code"] == 503
    status, errors = ended(process)
    assert status == 0 and time.monotonic() - began < 25 and "Traceback" not in errors
    assert "open to the network" not in errors


def test_bad_start_is_reported_without_traceback(tiny, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cases = [
            ([str(tiny), "--port", port], "choose another --port"),
            ([str(tiny), "--port", "99999"], "65535"),
            ([str(tiny), "--host", "192.0.2.1"], "choose another --host"),
            ([str(tmp_path), "--port", "0"], "config.json"),
            (
                [str(tiny), "--max-model-len", "0"],
                "--max-model-len 0: 0 is less than 1",
            ),
            ([str(tiny), "--dtype", "int3"], "--dtype 'int3' is not one of"),
            (
                [str(tiny), "--max-num-batched-tokens", "2", "--max-num-seqs", "3"],
                "--max-num-batched-tokens 2 is less than --max-num-seqs 3",
            ),
            ([str(tiny), "--served-model-name", " "], "--served-model-name is ' '"),
            ([str(tiny), "--speculative-config", '{"method": "x"}'], "--speculative-config"),
        ]
        done = subprocess.run([*FK_BENCH, *cases[0][0]], capture_output=True, text=True, timeout=240)
        assert done.returncode != 0 and cases[0][1] in done.stderr and "Traceback" not in done.stderr
        for args, message in cases[1:]:
            done = fk_bench_here("serve", *args)
            assert done.returncode != 0 and message in done.stderr


def test_dead_engine_ends_the_server(tiny):
    """Kills one of two workers during a stream."""
    process, url = start(tiny, "--tensor-parallel-size", "2", "--max-model-len", "2000")
    reader = Reader(url, 1900)
    waiting = threading.Thread(
        target=lambda: answers.append(
            httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 1500})
        )
    )
    answers: list[httpx.Response] = []
    waiting.start()
    workers = [c for c in psutil.Process(process.pid).children() if "worker" in " ".join(c.cmdline())]
    assert len(workers) == 1
    wait_for(lambda: metric(url, "vllm:num_requests_running") == 2)
    workers[0].kill()
    assert reader.last["error"]["code"] == 503 and "rank 1" in reader.last["error"]["message"]
    waiting.join(120)
    assert answers[0].status_code == 503 and answers[0].headers["retry-after"]
    status, errors = ended(process, 120)
    assert status == 1 and "the engine has ended" in errors


def test_origins_that_are_no_json_list_are_refused(capsys):
    with pytest.raises(typer.Exit):
        serve("nowhere", allowed_origins="https://a.example")
    assert "--allowed-origins must be a JSON list of strings" in capsys.readouterr().err
