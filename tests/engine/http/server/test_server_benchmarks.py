"""vLLM's and SGLang's serving benchmarks run against our server."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from support.live import live_server
from support.tiny import make_tiny_vlm

from fastkernels.engine.http.requests.config import ServerConfig

ROOT = Path(__file__).resolve().parents[4]
REQUESTS, INPUT, OUTPUT = 4, 16, 8


def environment(host):
    """(interpreter of the host, marks of its tests)."""
    python = ROOT / f".venv-{host}" / "bin" / "python"
    missing = pytest.mark.skipif(not python.exists(), reason=f"no .venv-{host}: run `make setup`")
    return python, [getattr(pytest.mark, host), missing]


VLLM, SGLANG = environment("vllm"), environment("sglang")


@pytest.fixture(scope="module")
def url(tiny):
    with live_server(tiny) as (url, _):
        yield url


def run(python, *arguments):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FASTKERNELS", "PYTHONPATH"))}
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(python), "-m", *arguments], env={**kept, **quiet}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize(
    ("backend", "path"),
    [
        ("openai", "/v1/completions"),
        pytest.param("openai-chat", "/v1/chat/completions", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("python", [pytest.param(VLLM[0], marks=VLLM[1])])
@pytest.mark.slow
def test_vllm_bench_serve(url, tiny, tmp_path, python, backend, path):
    run(
        python, "vllm.entrypoints.cli.main", "bench", "serve", "--backend", backend, "--base-url", url,
        "--model", "tiny", "--endpoint", path, "--tokenizer", str(tiny), "--dataset-name", "random",
        "--num-prompts", str(REQUESTS), "--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT),
        "--ignore-eos", "--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json",
    )  # fmt: skip
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == REQUESTS and result["total_output_tokens"] == REQUESTS * OUTPUT
    assert result["mean_ttft_ms"] > 0 and result["mean_itl_ms"] > 0


@pytest.mark.parametrize(
    "backend", [pytest.param(b, marks=pytest.mark.slow) for b in ("vllm", "sglang", "sglang-oai-chat")]
)
@pytest.mark.parametrize("python", [pytest.param(SGLANG[0], marks=SGLANG[1])])
def test_sglang_bench_serving(url, tiny, tmp_path, python, backend):
    result = tmp_path / "result.jsonl"
    run(
        python, "sglang.bench_serving", "--backend", backend, "--base-url", url, "--model", "tiny", "--flush-cache",
        "--tokenizer", str(tiny), "--dataset-name", "random-ids", "--num-prompts", str(REQUESTS),
        "--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT), "--random-range-ratio", "1.0",
        "--output-file", str(result),
    )  # fmt: skip
    (line,) = result.read_text().splitlines()
    found = json.loads(line)
    assert found["completed"] == REQUESTS and found["total_output_tokens"] == REQUESTS * OUTPUT
    assert found["mean_ttft_ms"] > 0


@pytest.mark.parametrize("python", [pytest.param(VLLM[0], marks=VLLM[1])])
@pytest.mark.slow
def test_vllm_bench_serve_with_images(tmp_path, python):
    model = make_tiny_vlm(tmp_path / "vlm", "qwen2_vl")
    with live_server(model, ServerConfig("tiny"), max_model_len=512) as (url, _):
        run(
            python, "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai-chat", "--base-url", url,
            "--model", "tiny", "--endpoint", "/v1/chat/completions", "--tokenizer", str(model),
            "--dataset-name", "random-mm", "--random-mm-bucket-config", "{(40, 24, 1): 1.0}",
            "--random-mm-base-items-per-request", "2", "--random-mm-limit-mm-per-prompt", '{"image": 2, "video": 0}',
            "--num-prompts", str(REQUESTS), "--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT),
            "--ignore-eos", "--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json",
        )  # fmt: skip
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == REQUESTS and result["total_output_tokens"] == REQUESTS * OUTPUT
    assert result["mean_ttft_ms"] > 0
