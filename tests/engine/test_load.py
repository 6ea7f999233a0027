"""The server under load: every answer is right or an error, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import threading
import time
import uuid

import httpx
import numpy as np
import psutil
import pytest
from live import metric, wait_for
from server_process import ended, marked, start
from traffic import CONTEXT, Clients, Reference, asks

MIB = 2**20
SOAK = float(os.environ.get("FASTKERNELS_SOAK_SECONDS", 600))
# Fewer blocks than the running sequences want, and a queue that 64 clients can fill: some are preempted, some refused.
TIGHT = ("--max-num-seqs", "48", "--num-blocks", "64", "--max-waiting", "56", "--max-num-batched-tokens", "256")


@pytest.fixture(scope="module")
def reference(tiny):
    return Reference(tiny)


@contextlib.contextmanager
def served(folder, tmp_path, *args, status=0, within=20):
    """(process, url) of a server that ends with this status, at SIGTERM where that is 0, and leaves no process."""
    mark = uuid.uuid4().hex
    with open(tmp_path / "server.log", "w+") as log:
        process, url = start(
            folder, "--max-model-len", str(CONTEXT), *args, env={"FASTKERNELS_TEST": mark}, log=log
        )
        try:
            yield process, url
            if status == 0:
                process.send_signal(signal.SIGTERM)
            assert ended(process, within)[0] == status
            assert marked("FASTKERNELS_TEST", mark) == []
        finally:
            for left in marked("FASTKERNELS_TEST", mark):
                left.kill()
            process.wait(10)


def log_of(tmp_path):
    return (tmp_path / "server.log").read_text()


def idle(url):
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return all(metric(url, f"vllm:{name}") == 0 for name in names)


def nothing_wrong(clients, *more):
    """Every request was answered right, refused for a reason, or left by its client."""
    others = {k: v for k, v in clients.ends.items() if k not in ("right", "left", "bad", "refused", "killed", *more)}
    assert not others, (others, clients.stories[:3])


@pytest.mark.parametrize(
    ("number", "different", "killed"), [(80, 30, 2), pytest.param(2000, 250, 8, marks=pytest.mark.slow)]
)
def test_under_load_answers_are_right_and_nothing_is_left(tiny, tmp_path, reference, number, different, killed):
    pool = asks(different)
    for ask in pool:
        reference(ask)
    with served(tiny, tmp_path, *TIGHT) as (process, url):
        server, levels, clients = psutil.Process(process.pid), [], Clients(url, pool, reference)
        for load in range(3):  # the first one warms up
            asyncio.run(clients.run(number, 64, seed=load, killed=killed))
            wait_for(lambda: idle(url))
            levels.append((server.memory_info().rss, server.num_threads()))
            if load == 0:
                fds = server.num_fds()
        wait_for(lambda: server.num_fds() <= fds)
        print(metric(url, "vllm:num_preemptions_total"), clients.ends, [f"{rss / MIB:.1f} MiB, {threads} threads" for rss, threads in levels])
        nothing_wrong(clients)
        assert sum(clients.ends.values()) == 3 * (number + killed)
        for end in ("right", "left", "bad", "killed"):
            assert clients.ends[end], end
        assert metric(url, "vllm:num_preemptions_total") and metric(url, "vllm:prefix_cache_hits_total")
        assert metric(url, "fastkernels:failed_steps_total") == 0
        (_, before), (first, _), (second, after) = levels
        assert after <= before and second - first < 4 * MIB
    assert "Traceback" not in log_of(tmp_path)


def test_a_worker_that_is_killed_under_load_ends_the_server(tiny, tmp_path, reference):
    pool = asks(24, seed=1)
    for ask in pool:
        reference(ask)
    with served(tiny, tmp_path, "--tensor-parallel-size", "2", *TIGHT, status=1) as (process, url):
        (worker,) = [c for c in psutil.Process(process.pid).children() if "worker" in " ".join(c.cmdline())]
        clients = Clients(url, pool, reference)
        asyncio.run(clients.run(80, 24, seed=1, middle=worker.kill))
        print(clients.ends)
        nothing_wrong(clients, "error", "unreached")
        assert clients.ends["right"] and clients.ends["error"]
    assert "the engine has ended: " in log_of(tmp_path)
