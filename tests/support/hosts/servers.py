"""Servers of vLLM and SGLang on the CPU, with the tiny Llama of the checks."""

import json
import os
import time
import urllib.request

HOST = os.environ["CHECKED_HOST"]
COMMANDS = {
    "vllm": [
        "vllm.entrypoints.cli.main", "serve", os.environ["TINY_LLAMA"], "--enforce-eager", "--max-model-len", "256",
        "--served-model-name", "tiny",
    ],
    "sglang": [
        "sglang.launch_server", "--model-path", os.environ["TINY_LLAMA"], "--device", "cpu", "--attention-backend",
        "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph", "--max-total-tokens", "4096",
        "--served-model-name", "tiny",
    ],
}  # fmt: skip


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=60))


def wait_until_ready(server, url, tries=600):
    for _ in range(tries):
        try:
            return urllib.request.urlopen(url + "/health", timeout=5)
        except OSError:
            assert server.poll() is None, "the server ended"
            time.sleep(0.5)
    raise TimeoutError(url)
