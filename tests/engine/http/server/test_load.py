"""The server under load: every answer is right or an error, and no resource leaks."""

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
from support.live import metric, wait_for
from support.server_process import ended, marked, start
from support.traffic import CONTEXT, Clients, Reference, asks

MIB = 2**20
GROWTH = 1.0  # MiB per round: the allocator's memory varies by a few MiB, but does not grow in each of several rounds
SOAK = float(os.environ.get("FASTKERNELS_SOAK_SECONDS", 60))
# Fewer blocks than the running sequences want, and a queue that 64 clients can fill: some are preempted, some refused.
TIGHT = ["--max-num-seqs=48", "--num-blocks=64", "--max-waiting=84", "--max-num-batched-tokens=256"]


@pytest.fixture(scope="module")
def reference(tiny):
    return Reference(tiny)


@contextlib.contextmanager
def served(folder, tmp_path, *args, status=0, within=20):
    """(process, url) of a server. Then asserts its exit status (0: ended by SIGTERM) and that no process is left."""
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


# Runs at the start of a process. On SIGUSR1 it writes {class: live objects} of this project's classes to a file.
COUNT_OBJECTS = """
import collections, gc, json, os, signal

def count(*_):
    gc.collect()
    kinds = collections.Counter(type(o) for o in gc.get_objects())
    found = {f"{k.__module__}.{k.__qualname__}": n for k, n in kinds.items() if k.__module__.startswith("fastkernels.")}
    path = os.environ["FASTKERNELS_TEST_OBJECTS"]
    with open(path + ".new", "w") as file:
        json.dump(found, file)
    os.replace(path + ".new", path)

signal.signal(signal.SIGUSR1, count)
"""


@pytest.fixture
def objects(tmp_path, monkeypatch):
    """A function from a server's process, started after this fixture, to {class: live objects} of its classes."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(COUNT_OBJECTS)
    path = tmp_path / "objects.json"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
    monkeypatch.setenv("FASTKERNELS_TEST_OBJECTS", str(path))

    def counts(process):
        path.unlink(missing_ok=True)
        process.send_signal(signal.SIGUSR1)
        wait_for(path.exists)
        return json.loads(path.read_text())

    return counts


def nothing_wrong(clients, *more):
    """Assert that every request was answered correctly, refused with a reason, or abandoned by its client."""
    others = {
        k: v for k, v in clients.ends.items() if k not in ("right", "left", "bad", "refused", "killed", *more)
    }
    assert not others, "\n".join([str(others), *clients.stories[:3]])


@pytest.mark.slow
def test_answers_under_load_are_right(tiny, tmp_path, reference, objects):
    number, killed, pool = 600, 4, asks(150)
    for ask in pool:
        reference(ask)
    with served(tiny, tmp_path, *TIGHT) as (process, url):
        server, levels, clients = psutil.Process(process.pid), [], Clients(url, pool, reference)
        sizes, fds, live = (max(64, number // 4), *[number] * 3), 0, []  # the first one warms up
        for seed, size in enumerate(sizes):
            if not levels:  # few requests are malformed, and a pool starts a thread when it first needs it
                asyncio.run(clients.start_threads())
            asyncio.run(clients.run(size, 64, seed, killed))
            wait_for(lambda: idle(url))
            fds = fds or server.num_fds()
            wait_for(lambda most=fds: server.num_fds() <= most)
            levels.append((server.memory_info().rss / MIB, server.num_threads()))
            live.append(objects(process))
        preemptions = metric(url, "vllm:num_preemptions_total")
        print(f"{clients.ends}, {preemptions:g} preemptions; RSS [MiB] and threads: {levels}")
        nothing_wrong(clients)
        assert sum(clients.ends.values()) == sum(sizes) + len(sizes) * killed
        for end in ("right", "left", "bad", "killed"):
            assert clients.ends[end], end
        assert preemptions and metric(url, "vllm:prefix_cache_hits_total")
        assert metric(url, "fastkernels:failed_steps_total") == 0
        rss, threads = zip(*levels, strict=True)
        assert max(threads) == threads[0]
        # The last step's requests are kept until the next one. A leak grows in every round.
        kinds = {kind for counts in live for kind in counts}
        growth = {kind: min(np.diff([counts.get(kind, 0) for counts in live])) for kind in kinds}
        assert kinds and max(growth.values()) <= 0, growth
        assert min(np.diff(rss)) < GROWTH, rss
    assert "Traceback" not in log_of(tmp_path)


@pytest.mark.slow
def test_worker_killed_under_load_ends_the_server(tiny, tmp_path, reference):
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


@pytest.mark.slow
@pytest.mark.timeout(SOAK + 300)
def test_minutes_of_load_do_not_grow_memory(tiny, tmp_path, reference):
    """Duration: FASTKERNELS_SOAK_SECONDS (60). After the first third, memory may vary by 4 MiB at most."""
    pool = asks(100, seed=2)
    for ask in pool:
        reference(ask)
    with served(tiny, tmp_path, *TIGHT) as (process, url):
        server, clients = psutil.Process(process.pid), Clients(url, pool, reference)
        began, samples, fds = time.monotonic(), [], 0
        over = threading.Event()

        def sample():
            while not over.wait(SOAK / 600):
                samples.append((time.monotonic() - began, server.memory_info().rss / MIB))

        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            seed = 0
            while time.monotonic() - began < SOAK:
                asyncio.run(clients.run(200, 32, seed, killed=1))
                fds, seed = fds or server.num_fds(), seed + 1
        finally:
            over.set()
            sampler.join()
        wait_for(lambda: idle(url) and server.num_fds() <= fds)
        nothing_wrong(clients)
        times, rss = np.array([s for s in samples if s[0] > SOAK / 3]).T
        slope = np.polyfit(times, rss, 1)[0]
        growth = slope * (times[-1] - times[0])
        print(
            clients.ends,
            f"RSS {rss.min():.1f} to {rss.max():.1f} MiB, {growth:+.2f} MiB in {np.ptp(times):.0f} s",
        )
        assert growth < 4, samples[:: len(samples) // 20]
    assert "Traceback" not in log_of(tmp_path)


class Silent:
    """Stalled clients: one sends no request, one half of a body, one requests more than the socket buffers hold.

    They read nothing. With `reads`, the last one does, so that the engine has the same work.
    """

    BODY = {"prompt": [5], "max_tokens": 250, "ignore_eos": True, "stream": True, "n": 16, "logprobs": 20}

    def __init__(self, url, reads):
        host, port = url.removeprefix("http://").split(":")
        self.sockets = [socket.socket() for _ in range(3)]
        for sock in self.sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20 if reads else 2048)
            sock.connect((host, int(port)))
        body = json.dumps(self.BODY).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        self.sockets[1].sendall(head.encode() + body[:10])
        self.sockets[2].sendall(head.encode() + body)
        self.size = 0
        self.reader = threading.Thread(target=self._read) if reads else None
        if self.reader is not None:
            self.reader.start()

    def _read(self):
        self.sockets[2].settimeout(60)
        tail = b""
        while not tail.endswith(b"0\r\n\r\n"):  # the end of a chunked body
            data = self.sockets[2].recv(1 << 16)
            assert data
            self.size, tail = self.size + len(data), (tail + data)[-5:]

    def close(self):
        if self.reader is not None:
            self.reader.join(60)
        for sock in self.sockets:
            sock.close()


@pytest.mark.slow
def test_stalled_client_does_not_slow_others(tiny, tmp_path):
    """Compares stalled and reading clients in alternating rounds."""
    stall = 2.0
    roomy = ("--max-num-seqs", "96", "--num-blocks", "1500", "--stall-timeout", str(stall))
    body = {"prompt": "Hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True}

    async def others(url):
        """Latencies in seconds of 64 clients with two requests each."""
        found = []
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:

            async def work():
                for _ in range(2):
                    began = time.monotonic()
                    assert (await client.post("/v1/completions", json=body)).status_code == 200
                    found.append(time.monotonic() - began)

            await asyncio.gather(*(work() for _ in range(64)))
        return found

    latencies = {True: [], False: []}
    with served(tiny, tmp_path, *roomy) as (_, url):
        asyncio.run(others(url))  # warms up
        for dropped, reads in ((0, True), (1, False), (1, True), (2, False)):
            silent = Silent(url, reads)
            wait_for(lambda: metric(url, "vllm:num_requests_running") >= 16)
            latencies[reads] += asyncio.run(others(url))
            if reads:
                silent.close()
                print(f"the whole answer has {silent.size / MIB:.1f} MiB")
            wait_for(lambda: idle(url))
            wait_for(lambda most=dropped: log_of(tmp_path).count("a client read nothing for 2 sec") == most)
            silent.close()
    median = {reads: statistics.median(found) for reads, found in latencies.items()}
    print({reads: (f"{m:.3f} s", f"{max(latencies[reads]):.3f} s") for reads, m in median.items()})
    assert median[False] < 1.5 * median[True] + 0.05 and max(latencies[False]) < max(latencies[True]) + stall
