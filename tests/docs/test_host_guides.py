"""Guides about hosts and models, followed literally on a CPU with tiny models."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fk_bench.serving.process import free_port
from support import guides
from support.guides import of, starting
from support.tiny import make_tiny_encoder, make_tiny_pipeline

from fastkernels.core.tuning import Entry, Table

ROOT = Path(__file__).parents[2]
START, PATCH, BENCHMARK, COVERAGE, FOREIGN, EXPLAIN, TUNE = (
    ROOT / "docs" / f"{page}.md"
    for page in (
        "start", "patch", "benchmark", "coverage", "foreign-candidates", "explain", "tune",
    )
)  # fmt: skip
# Arguments and variables of tiny servers on a CPU
ON_A_CPU = {
    "vllm": "--enforce-eager --max-model-len 256",
    "sglang": "--device cpu --attention-backend torch_native --sampling-backend pytorch --disable-cuda-graph"
    " --max-total-tokens 4096",
}
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def python_of(host: str) -> str:
    file = ROOT / f".venv-{host}" / "bin" / "python"
    if not file.is_file():
        pytest.skip(f"{file} does not exist: make setup")
    return str(file)


def with_hosts(line: str, *hosts: str) -> str:
    """The line with the interpreters of these hosts; the guides write PATH/bin/python."""
    for host in hosts:
        line = re.sub(rf"\b{host}=PATH(/bin/python)?(?!\S)", f"{host}={python_of(host)}", line)
    return line


@pytest.fixture
def words(tiny: Path) -> dict[str, str]:
    return {name: str(tiny) for name in ("MODEL", "FOLDER", "PATH", "llama-3.1-8b", "qwen3-8b")}


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """A file that computes what the op's reference does, in the folder that the guides name."""
    guides.run("fk-bench stubs --op rms_norm --out candidates/", tmp_path)
    return tmp_path / "candidates" / "rms_norm.py"


def test_doctor_lines_of_the_start_page(tmp_path: Path) -> None:
    short, everything, machine = starting(START, "fk-bench doctor")
    assert "nothing is broken" in guides.run(short, tmp_path)
    assert len(guides.run(everything, tmp_path).splitlines()) > 100
    (line,) = guides.run(machine, tmp_path).splitlines()
    assert json.loads(line)["ok"]


@pytest.mark.parametrize("host", ["vllm", "sglang"])
def test_server_of_the_start_page_is_patched(host: str, tiny: Path, tmp_path: Path) -> None:
    (line,) = (
        line
        for line in starting(START, "FASTKERNELS=1 vllm serve", "FASTKERNELS=1 python -m sglang")
        if host in line
    )
    assert "left to the host" in log_of_server(
        line, host, {"meta-llama/Llama-3.1-8B-Instruct": tiny}, tmp_path
    )


def test_server_of_the_tune_page_takes_a_table(tiny: Path, tmp_path: Path) -> None:
    (line,) = starting(TUNE, "FASTKERNELS=1 FASTKERNELS_TUNED")
    (tmp_path / "run").mkdir()
    entry = Entry(
        "linear", {"N": 128, "K": 128, "dtype": "bfloat16"}, {"M": 1}, None, baseline="onednn", run="r1"
    )
    (tmp_path / "run" / "cpu.json").write_text(Table("cpu", {"r1": {}}, (entry,)).to_json())
    words: dict[str, object] = {
        "FASTKERNELS_TUNED=RUN/CHIP.json": "FASTKERNELS_TUNED=run/cpu.json", "FOLDER": tiny,
    }  # fmt: skip
    log = log_of_server(line, "vllm", words, tmp_path)
    assert "left to the host: linear: weight has shape (0,): the host packed or freed it" in log
    assert "no tuned table of this device" not in log


def log_of_server(line: str, host: str, given: Mapping[str, object], folder: Path) -> str:
    """Run the line of a server until it answers; its log."""
    port, python = free_port(), python_of(host)
    bin_folder = Path(python).parent
    line = " ".join(str(given.get(word, word)) for word in shlex.split(line))
    environment = {**os.environ, **VARIABLES, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(
            f"{line} {ON_A_CPU[host]} --host 127.0.0.1 --port {port}", shell=True, cwd=folder, env=environment,
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        for _ in range(800):
            assert server.poll() is None, (folder / "log").read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        else:
            raise TimeoutError((folder / "log").read_text()[-3000:])
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
    return (folder / "log").read_text()


def test_fork_of_the_patch_page_imports_our_file(tmp_path: Path) -> None:
    into, printed = starting(PATCH, "fk-bench export rms_norm")
    code = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"
    found = subprocess.run([python_of("vllm"), "-P", "-c", code], capture_output=True, text=True, check=True)
    module = Path("model_executor/layers/layernorm.py")
    copied = tmp_path / "fork" / "vllm" / module
    copied.parent.mkdir(parents=True)
    shutil.copytree(
        Path(found.stdout.strip()), tmp_path / "fork" / "vllm", dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.json"),
    )  # fmt: skip
    before = copied.read_text()
    guides.run(into, tmp_path, {"FORK": str(tmp_path / "fork")})
    added = copied.read_text().removeprefix(before)
    (name,) = re.findall(r"from vllm\.\S+?\.(\w+) import", added)
    file = copied.with_name(f"{name}.py").read_text()
    assert "fastkernels" not in re.sub(r"#.*|\"\"\".*?\"\"\"", "", file, flags=re.DOTALL)
    assert "class " in guides.run(printed, tmp_path)


def test_python_of_the_patch_page(tiny: Path, stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastkernels import LLM

    monkeypatch.chdir(stub.parent)
    stub.rename("my_kernel.py")
    found: dict[str, Any] = {}
    for block in guides.blocks(PATCH, "python"):
        llm = LLM(str(tiny), device="cpu")
        scope: dict[str, Any] = {"llm": llm}
        exec(block, scope)
        llm.generate("a", use_tqdm=False)
        found |= {row.op: row for row in scope["report"].refresh().rows}
        scope["report"].undo()
        if "candidates" not in block:
            assert {*found} == {"rms_norm", "linear"}
    assert found["rms_norm"].candidate.endswith("my_kernel.py") and found["rms_norm"].calls > 0


def test_offline_lines_of_the_benchmark_page(tmp_path: Path, words: dict[str, str], stub: Path) -> None:
    for line in starting(
        BENCHMARK, "fk-bench e2e MODEL --hosts", "fk-bench e2e MODEL --startup", "fk-bench e2e --scheduler-only",
        "fk-bench e2e MODEL --candidate",
    ):  # fmt: skip
        last = of(guides.run(with_hosts(line, "vllm"), tmp_path, words))
        assert last["ok"] and last["results"], line


def test_image_lines_of_the_benchmark_page(tmp_path: Path) -> None:
    folders = {
        "transformers": str(make_tiny_encoder(tmp_path / "encoder", "dinov3")),
        "diffusers": str(make_tiny_pipeline(tmp_path / "pipeline")),
    }
    for line in starting(
        BENCHMARK, "fk-bench e2e vit_7b_patch16_dinov3 --hosts timm", "fk-bench e2e FOLDER --hosts"
    ):
        host = line.partition("--hosts ")[2].split()[0]
        given = {
            "vit_7b_patch16_dinov3": "vit_tiny_patch16_224",
            "FOLDER": folders.get(host, ""),
            "1024": "32",
        }
        last = of(guides.run(f"{line} --rounds 1 --lanes stock,patched --dtype float32", tmp_path, given))
        assert last["ok"] and {r["lane"] for r in last["results"]} == {"stock", "patched"}, line


def test_servers_of_the_benchmark_page_are_compared(tmp_path: Path, words: dict[str, str]) -> None:
    """Our lane alone: tests/bench/serving has those of the hosts, which take minutes."""
    (line,) = starting(BENCHMARK, "fk-bench serve-compare --model MODEL --lanes vllm")
    small = "--num-prompts 2 --rounds 2 --input-len 16 --output-len 8 --agreement-prompts 2"
    line = with_hosts(line, "vllm", "sglang").replace("--concurrency 1,32", "--concurrency 1,2")
    line = line.replace("vllm,vllm+fk,sglang,sglang+fk,fastkernels", "fastkernels")
    last = of(guides.run(f"{line} {small}", tmp_path, words))
    run = tmp_path / Path(last["rows"]).parent
    assert last["ok"] and (run / "report.html").is_file()
    diff, report = starting(BENCHMARK, "fk-bench diff", "fk-bench report")
    assert of(guides.run(diff, tmp_path, {"RUN_A": str(run), "RUN_B": str(run)}))["ok"]
    (run / "report.html").unlink()
    guides.run(report, tmp_path, {"RUN": str(run)})
    assert (run / "report.html").is_file() and (run / "results.csv").is_file()


def test_model_of_the_explain_page(tmp_path: Path, words: dict[str, str]) -> None:
    for line in starting(EXPLAIN, "fk-bench explain PATH"):
        given = {**words, "8192": "1024"}  # tokens: the tiny model has 2048 positions
        assert of(guides.run(line, tmp_path, given))["ok"], line
    (block,) = guides.blocks(EXPLAIN, "python")
    exec(block, {})


def test_architecture_of_the_coverage_page(tmp_path: Path) -> None:
    (line,) = starting(COVERAGE, "fk-bench coverage --arch gpt_oss")
    (row,) = of(guides.run(line, tmp_path))["rows"]
    assert row["verdict"] == "runs"


THEIR_CLASS = """
import torch
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6, elementwise_affine=True):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size)) if elementwise_affine else None

    def forward(self, x, residual=None):
        if residual is not None:
            residual = x + residual
        y = (x if residual is None else residual).float()
        y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        y = y if self.weight is None else y * self.weight
        return y if residual is None else (y, residual)
"""


def test_set_of_the_foreign_candidates_page(tmp_path: Path) -> None:
    """A class of another author is found, adapted and judged, case by case; its limits are in the rows."""
    (tmp_path / "their-set" / "L1").mkdir(parents=True)
    (tmp_path / "their-set" / "L1" / "rms_norm.py").write_text(THEIR_CLASS)
    (line,) = starting(FOREIGN, "fk-bench kernels rms_norm --candidate their-set/")
    last = of(guides.run(f"{line} --case decode_32 --case odd_63 --no-time", tmp_path))
    assert last["ok"] and last["failed"] == 0 and last["cases"] > 0
