"""A small OpenAI-style server for tests, and the interpreter that starts it.

As a lane's interpreter it answers the probe (`-c ...`) and serves for `-m MODULE ... --port P`. Environment variables
select faults: STUB_NEVER_READY, STUB_DIE_AT=N (dies at the Nth completion), STUB_CRASH (exits at start), STUB_SHIFT=N
(other tokens), STUB_SHORT (one token too few), STUB_CHILD=FILE (a grandchild that ignores SIGTERM, with its pid in
FILE), STUB_DELAY=SECONDS per token, STUB_CALLS=N (calls in the report of a patched process), STUB_SLOTS=N (requests
that generate at once), STUB_LOG=FILE (the path, time and prompt length of every POST), STUB_PROFILER (it has one).

STUB_CACHE=N is a prefix cache of blocks of N tokens. It is reported in the usage, or at /metrics with STUB_METRICS=1,
which also has counters of speculative decoding. STUB_NO_FLUSH: the cache cannot be emptied.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ENV = os.environ
served = 0
CARD = {"id": "stub", "root": ENV.get("STUB_ROOT", "/models/words")}
cache: set[tuple[int, ...]] = set()
counters = {"prefix_cache_hits": 0, "spec_decode_num_drafts": 0, "spec_decode_num_draft_tokens": 0,
            "spec_decode_num_accepted_tokens": 0}  # fmt: skip
slots = threading.Semaphore(int(ENV.get("STUB_SLOTS", "1000")))


def cached(prompt: list[int]) -> int:
    """Tokens of the prompt in the cache; its whole blocks are then there, too."""
    size = int(ENV.get("STUB_CACHE", "0"))
    blocks = [tuple(prompt[:end]) for end in range(size, len(prompt) + 1, size)] if size else []
    found = next((i for i, block in enumerate(blocks) if block not in cache), len(blocks))
    cache.update(blocks)
    counters["prefix_cache_hits"] += found * size
    return found * size


def tokens_for(prompt: list[int] | str, count: int) -> list[int]:
    shift = int(ENV.get("STUB_SHIFT", "0"))
    start = sum(prompt) if isinstance(prompt, list) else len(prompt)
    half = count // 2
    return [(start + i + (shift if i >= half else 0)) % 500 for i in range(count)]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _send(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/metrics" and ENV.get("STUB_METRICS"):
            lines = [f"# TYPE vllm:{k} counter\nvllm:{k}_total {v}" for k, v in counters.items()]
            return self._send(200, "\n".join([*lines, ""]).encode(), "text/plain")
        ready = self.path == "/v1/models" or not ENV.get("STUB_NEVER_READY")
        self._send(200 if ready else 503, json.dumps({"data": [CARD]}).encode())

    def do_POST(self) -> None:
        global served
        if self.headers["content-type"] not in (None, "application/json"):
            return self._send(415, b"{}")
        body = json.loads(self.rfile.read(int(self.headers["content-length"] or 0)) or b"{}")
        if ENV.get("STUB_LOG"):
            line = {"path": self.path, "time": time.monotonic(), "prompt": len(body.get("prompt", ()))}
            with open(ENV["STUB_LOG"], "a") as file:
                file.write(json.dumps(line) + "\n")
        if self.path == "/flush_cache" and not ENV.get("STUB_NO_FLUSH"):
            cache.clear()
            return self._send(200, b"{}")
        if self.path in ("/start_profile", "/stop_profile") and ENV.get("STUB_PROFILER"):
            return self._send(200, b"{}")
        if self.path != "/v1/completions":
            return self._send(404, b"{}")
        served += 1
        if served == int(ENV.get("STUB_DIE_AT", "-1")):
            print("stub: something terrible happened", flush=True)
            os._exit(3)
        ids = tokens_for(body["prompt"], body["max_tokens"] - bool(ENV.get("STUB_SHORT")))
        with slots:
            self._generate(body["prompt"], ids)

    def _generate(self, prompt: list[int] | str, ids: list[int]) -> None:
        hits = cached(prompt) if isinstance(prompt, list) else 0
        counters["spec_decode_num_drafts"] += len(ids)
        counters["spec_decode_num_draft_tokens"] += 4 * len(ids)
        counters["spec_decode_num_accepted_tokens"] += 3 * len(ids)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for i, token in enumerate(ids):
            time.sleep(float(ENV.get("STUB_DELAY", "0.001")))
            last = i == len(ids) - 1
            self._event(
                {
                    "choices": [
                        {"text": "x", "token_ids": [token], "finish_reason": "length" if last else None}
                    ]
                }
            )
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        if ENV.get("STUB_CACHE") and not ENV.get("STUB_METRICS"):
            usage["prompt_tokens_details"] = {"cached_tokens": hits}
        self._event({"choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, event: dict) -> None:
        self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


def probe() -> None:
    hosts = [h for h in ("vllm", "sglang", "fastkernels", "fk_bench") if h != ENV.get("STUB_MISSING")]
    plugins = [] if ENV.get("STUB_MISSING") == "plugin" else ["vllm.general_plugins", "sglang.srt.plugins"]
    print(json.dumps({"versions": {"python": "3", "vllm": "0.32.0"}, "modules": hosts, "plugins": plugins}))


def serve() -> None:
    print("stub: starting", flush=True)
    if ENV.get("STUB_CRASH"):
        sys.exit("stub: cannot start: out of stubs")
    if ENV.get("STUB_CHILD"):
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True)"
        code += "; time.sleep(300)"
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        child.stdout.readline()
        Path(ENV["STUB_CHILD"]).write_text(str(child.pid))
    if ENV.get("FASTKERNELS") == "1" and ENV.get("STUB_CALLS") is not None:
        row = {"op": "rms_norm", "host_class": "RMSNorm", "state": "active", "modules": 3, "fallbacks": {}}
        for rank in (0, 1):
            rows = [
                {**row, "calls": int(ENV["STUB_CALLS"])},
                {**row, "host_class": "Other", "calls": int(ENV["STUB_CALLS"])},
            ]
            report = {
                "rank": rank,
                "pid": os.getpid(),
                "host": "vllm",
                "version": "0",
                "rows": rows,
                "error": None,
            }
            Path(ENV["FASTKERNELS_REPORT"], f"vllm-{rank}-{os.getpid()}.json").write_text(json.dumps(report))
    port = int(sys.argv[sys.argv.index("--port") + 1])
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    probe() if sys.argv[1] == "-c" else serve()
