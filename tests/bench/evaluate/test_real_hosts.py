"""Whole items in real hosts: vLLM and SGLang in their own environments, and timm compiled. Each takes minutes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from fk_bench.evaluate import suites
from fk_bench.evaluate.reasons import Reason
from fk_bench.evaluate.run import selftest
from fk_bench.evaluate.run.items import ItemRun, Measured
from fk_bench.evaluate.run.side import Launcher, set_files
from fk_bench.info.stubs import source

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[3]
HOSTS = [pytest.param(host, marks=getattr(pytest.mark, host)) for host in ("vllm", "sglang")]
SUITE = suites.read(
    {
        "threads": 1,
        "workloads": {
            "w": {"kind": "text", "about": "", "throughput": 3, "rounds": 3, "lengths": [[14, 8], [5, 10]]},
            "i": {"kind": "images", "about": "", "throughput": 2, "rounds": 3, "calls": 2},
        },
        "models": {
            "m": {
                "category": "text",
                "config": {
                    "model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256,
                    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
                    "max_position_embeddings": 512, "tie_word_embeddings": False,
                },
            },
            "v": {
                "category": "image", "timm": "vit_tiny_patch16_224", "arguments": {"img_size": 64, "depth": 4},
                "image_size": 64,
            },
        },
        "items": [
            {"model": "m", "workload": "w", "host": "vllm", "timeout": 300},
            {"model": "m", "workload": "w", "host": "sglang", "timeout": 300},
            {"model": "v", "workload": "i", "host": "timm", "timeout": 300, "compiled": True},
        ],
    },
    "test",
)  # fmt: skip
HEAD = "import torch\nimport torch.nn.functional as F\n\n\n"
WRONG = HEAD + "def silu_and_mul(x):\n    return torch.zeros_like(x[..., : x.shape[-1] // 2])\n"
COMPILED = (
    HEAD
    + """@torch.compile(backend="eager", dynamic={dynamic})
def _silu_and_mul(x):
    d = x.shape[-1] // 2
    return F.silu(x[..., :d]) * x[..., d:]


def silu_and_mul(x):
    return _silu_and_mul(x)
"""
)
PLAIN = HEAD + "class TorchGELU(torch.nn.GELU):\n    def forward(self, x):\n        return F.gelu(x)\n"
LEAVES = """from pathlib import Path
from types import SimpleNamespace

import torch
from fk_bench.evaluate.adapters import native

EXTENSION = native.Extension(Path("."), "gelu", ["gelu.cu"], {})
EXTENSION._module = SimpleNamespace(gelu=torch._C._nn.gelu)  # as if it had been built
native.EXTENSIONS.append(EXTENSION)


class TorchGELU(torch.nn.GELU):
    def forward(self, x):
        return torch.nn.functional.gelu(x) if torch.compiler.is_compiling() else EXTENSION.gelu(x)
"""


@pytest.fixture(scope="module")
def launcher():
    pythons = {
        h: str(p) for h in ("vllm", "sglang") if (p := ROOT / f".venv-{h}" / "bin" / "python").exists()
    }
    with Launcher(pythons, 6 << 30, threads=1) as made:
        yield made


def measure(launcher: Launcher, host: str, files: Mapping[str, str]) -> Measured:
    if host != "timm" and host not in launcher.pythons:
        pytest.skip(f"no .venv-{host}: run `make setup`")
    entry = next(e for e in SUITE.entries if e.item.host == host)
    readable = set_files({Path(path).parent for path in files.values()})
    return ItemRun(entry, SUITE, launcher, "float32", 5, print).measure(files, readable)


def written(folder: Path, **texts: str) -> dict[str, str]:
    for op, text in texts.items():
        (folder / f"{op}.py").write_text(text)
    return {op: str(folder / f"{op}.py") for op in texts}


@pytest.mark.parametrize("host", HOSTS)
def test_do_nothing_set_runs_whole(launcher, host, tmp_path):
    found = measure(launcher, host, selftest.write(host, tmp_path))
    assert found.outcome is not None and found.outcome.correctness == pytest.approx(1.0, abs=1e-4), found.text
    assert {"rms_norm", "rotary_emb", "silu_and_mul"} <= {*found.found.kept}
    assert found.calibration is not None and found.calibration.sensitive, found.calibration
    assert not found.found.dropped


@pytest.mark.parametrize("host", HOSTS)
def test_wrong_file_is_dropped_and_the_good_one_kept(launcher, host, tmp_path):
    files = written(tmp_path, silu_and_mul=WRONG, rms_norm=source("rms_norm"))
    found = measure(launcher, host, files)
    assert found.found.kept == ("rms_norm",) and found.live["rms_norm"]
    (dropped,) = found.found.dropped
    assert (dropped.op, dropped.reason) == ("silu_and_mul", Reason.INCORRECT)
    assert found.outcome is not None and found.outcome.correctness == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("host", HOSTS)
def test_compilation_in_a_worker_is_seen(launcher, host, tmp_path):
    found = measure(launcher, host, written(tmp_path, silu_and_mul=COMPILED.format(dynamic=False)))
    assert found.outcome is None
    (dropped,) = found.found.dropped
    assert dropped.reason is Reason.COMPILES_WHILE_SERVING, dropped.text


@pytest.mark.parametrize("host", HOSTS)
def test_code_compiled_once_for_all_sizes_is_kept(launcher, host, tmp_path):
    found = measure(launcher, host, written(tmp_path, silu_and_mul=COMPILED.format(dynamic=True)))
    assert found.outcome is not None and found.live["silu_and_mul"], found.text


def test_plain_class_runs_in_a_compiled_host(launcher, tmp_path):
    found = measure(launcher, "timm", written(tmp_path, gelu=PLAIN))
    assert found.outcome is not None and found.outcome.correctness == pytest.approx(1.0, abs=1e-4), found.text
    assert found.live["gelu"]


def test_class_that_leaves_while_compiled_is_not_run(launcher, tmp_path):
    found = measure(launcher, "timm", written(tmp_path, gelu=LEAVES))
    assert found.outcome is None and not found.found.kept
    (dropped,) = found.found.dropped
    assert dropped.reason is Reason.NOT_DEPLOYED and "torch.compile" in dropped.text
