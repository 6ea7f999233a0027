"""Figures of vLLM's, SGLang's and guidellm's benchmarks against those of serve-compare, on the same running server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.environments import cache_root
from support.server_process import start
from support.serving.attached import attached
from support.tiny import make_tiny_llama

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
# One request at a time: at a higher concurrency, clients differ in how closely their requests follow each other, and
# requests that arrive together wait for each other before the server counts their time.
REQUESTS, CONCURRENCY, INPUT, OUTPUT = 12, 1, 64, 32
GUIDELLM = "guidellm==0.8.1"
# Other work on the machine changes the server's speed from one minute to the next. Its own histograms see that, too, so
# a client's figures are compared with them; what is left of the noise is this factor.
MARGIN = 1.3
Figures = dict[str, float]
Client = Callable[[Path, str, Path], Figures]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """(folder of the model, URL) of our server in a process of its own."""
    folder = make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")
    with open(folder.parent / "log", "w") as log:
        process, url = start(folder, log=log, num_blocks=2000)
        try:
            yield folder, url
        finally:
            process.terminate()
            process.wait(20)


def run(*command: object) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FASTKERNELS", "PYTHONPATH"))}
    env = {**kept, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(c) for c in command], env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def interpreter(host: str) -> Path:
    python = ROOT / f".venv-{host}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no .venv-{host}: run `make setup`")
    return python


def vllm_bench(folder: Path, url: str, out: Path) -> Figures:
    run(
        interpreter("vllm"), "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai", "--base-url",
        url, "--endpoint", "/v1/completions", "--model", folder, "--dataset-name", "random", "--random-input-len",
        INPUT, "--random-output-len", OUTPUT, "--num-prompts", REQUESTS, "--max-concurrency", CONCURRENCY,
        "--ignore-eos", "--num-warmups", CONCURRENCY, "--seed", 1, "--save-result", "--result-dir", out,
        "--result-filename", "vllm.json",
    )  # fmt: skip
    return _of_vllm_and_sglang(json.loads((out / "vllm.json").read_text()))


def sglang_bench(backend: str) -> Client:
    def bench(folder: Path, url: str, out: Path) -> Figures:
        run(
            interpreter("sglang"), "-m", "sglang.bench_serving", "--backend", backend, "--base-url", url, "--model",
            folder, "--dataset-name", "random-ids", "--random-input-len", INPUT, "--random-output-len", OUTPUT,
            "--random-range-ratio", "1.0", "--num-prompts", REQUESTS, "--max-concurrency", CONCURRENCY,
            "--warmup-requests", CONCURRENCY, "--seed", 2, "--output-file", out / "sglang.jsonl",
        )  # fmt: skip
        return _of_vllm_and_sglang(json.loads((out / "sglang.jsonl").read_text().splitlines()[-1]))

    return bench


def _of_vllm_and_sglang(found: Figures) -> Figures:
    assert found["completed"] == REQUESTS and found["total_output_tokens"] == REQUESTS * OUTPUT
    return {
        "output_tokens_per_s": found["output_throughput"],
        "ttft_ms_mean": found["mean_ttft_ms"],
        "tpot_ms_mean": found["mean_tpot_ms"],
    }


def guidellm(folder: Path, url: str, out: Path) -> Figures:
    """In an environment of its own: its requirements conflict with those of the hosts."""
    environment = cache_root() / GUIDELLM.replace("==", "-")
    if not (environment / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
        torch = f"torch=={version('torch')}"  # the newest may be a CUDA build, with 5 GB of libraries
        subprocess.run([str(environment / "bin/pip"), "install", "-q", GUIDELLM, torch], check=True)
        (environment / "complete").touch()
    run(
        environment / "bin/guidellm", "run", "--disable-console", "--backend",
        f"kind=openai_http,target={url},model={folder},request_format=/v1/completions", "--profile",
        f"kind=concurrent,streams={CONCURRENCY}", "--constraint", f"kind=max_requests,count={REQUESTS}", "--data",
        f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}", "--tokenizer",
        f"kind=huggingface_auto,model={folder}", "--output", f"kind=json,path={out / 'guidellm.json'}",
    )  # fmt: skip
    (benchmark,) = json.loads((out / "guidellm.json").read_text())["benchmarks"]
    found = benchmark["metrics"]
    assert found["request_totals"]["successful"] == REQUESTS
    # its "time per output token" counts the first token, too; its inter-token latency is the field's TPOT
    return {
        "output_tokens_per_s": found["output_tokens_per_second"]["successful"]["mean"],
        "ttft_ms_mean": found["time_to_first_token_ms"]["successful"]["mean"],
        "tpot_ms_mean": found["inter_token_latency_ms"]["successful"]["mean"],
    }


def serve_compare(folder: Path, url: str, out: Path) -> Figures:
    options = {
        "concurrency": (CONCURRENCY,),
        "num_prompts": (REQUESTS,),
        "input_len": INPUT,
        "output_len": OUTPUT,
    }
    _, rows = attached(folder, url, out, "fastkernels", rounds=2, **options)
    names = ("output_tokens_per_s", "ttft_ms_mean", "tpot_ms_mean")
    return {name: sum(row.metrics[name] for row in rows) / len(rows) for name in names}


def histograms(url: str) -> Figures:
    """Sums and counts of the server's latencies."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    return {s.name: s.value for f in families for s in f.samples if s.name.endswith(("_sum", "_count"))}


def against_server(client: Client, folder: Path, url: str, out: Path) -> Figures:
    """A client's TTFT and TPOT against those of the server's histograms, and the number of requests at work on average.

    TTFT is a difference in ms, the time of HTTP, which a slower server does not change; TPOT is a ratio.
    """
    before = histograms(url)
    figures = client(folder, url, out)
    after = histograms(url)

    def mean_ms(name: str) -> float:
        grown = [after[f"vllm:{name}_{part}"] - before[f"vllm:{name}_{part}"] for part in ("sum", "count")]
        return 1e3 * grown[0] / grown[1]

    return {
        "ttft": figures["ttft_ms_mean"] - mean_ms("time_to_first_token_seconds"),
        "whole ttft": figures["ttft_ms_mean"],
        "tpot": figures["tpot_ms_mean"] / mean_ms("request_time_per_output_token_seconds"),
        "at work": figures["output_tokens_per_s"] / OUTPUT * mean_ms("e2e_request_latency_seconds") / 1e3,
    }


@pytest.mark.parametrize(
    "client",
    [
        pytest.param(vllm_bench, id="vllm"),
        pytest.param(sglang_bench("vllm"), id="sglang-openai"),
        pytest.param(sglang_bench("sglang"), id="sglang-native"),
        pytest.param(guidellm, id="guidellm"),
    ],
)
def test_figures_agree_within_noise(client: Client, server: tuple[Path, str], tmp_path: Path) -> None:
    """A busy machine delays a few of 12 requests by 100 ms, so that one of three attempts must agree."""
    folder, url = server
    problems = []
    for attempt in range(3):
        out = tmp_path / str(attempt)
        out.mkdir()
        ours = [against_server(serve_compare, folder, url, out / "before")]
        theirs = against_server(client, folder, url, out)
        ours.append(against_server(serve_compare, folder, url, out / "after"))
        noise = (MARGIN - 1) * max(o.pop("whole ttft") for o in (theirs, *ours))
        wrong = {}
        for name, found in theirs.items():
            low, high = min(o[name] for o in ours), max(o[name] for o in ours)
            least, most = (low - noise, high + noise) if name == "ttft" else (low / MARGIN, high * MARGIN)
            if not least <= found <= most:
                wrong[name] = f"{found:.3f}, ours {low:.3f} to {high:.3f}, accepted {least:.3f} to {most:.3f}"
        if not wrong:
            return
        problems.append(wrong)
    pytest.fail(f"three attempts disagree: {problems}")


def test_loads_on_our_server(server: tuple[Path, str], tmp_path: Path) -> None:
    """Prefix hits of our engine (blocks of 16 tokens) with a trace, conversations and a search; none without."""
    folder, url = server
    lines = [(0, 40, 4, [1, 2, 3]), (200, 48, 4, [1, 2, 4]), (700, 32, 4, [5, 6])]
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(dict(zip(keys, line, strict=True))) + "\n" for line in lines))
    line, rows = attached(
        folder, url, tmp_path / "run", "fastkernels", rounds=2, loads=("c=2,turns=3,prompts=2", "c=4,prompts=8"),
        trace=str(trace), trace_block_size=16, search=("concurrency=1-2",), slo={"ttft": 60e3}, input_len=32,
        output_len=16,
    )  # fmt: skip
    cached = {(r.case["load"], r.case.get("turns", 1)): r.metrics["cached_prompt_tokens"] for r in rows}
    assert cached["trace", 1] == 32
    # Turns of 32, 80 and 128 prompt tokens; the engine has computed all but the last token of the turn before.
    assert cached["concurrency", 3] == 2 * (32 + 80)
    assert cached["concurrency", 1] == cached["max_concurrency", 1] == 0
    assert {r.case["flushed_by"] for r in rows} == {"/reset_prefix_cache"}
    assert {r.metrics["max_concurrency_within_slo"] for r in rows if r.case["load"] == "max_concurrency"} == {
        2.0
    }
    assert (
        all("raise its upper limit" in warning for warning in line["warnings"]) and len(line["warnings"]) == 2
    )
