"""Every exported file in a copy of the real hosts: models that use its classes give the host's tokens and logits."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.tiny import LLAMA3_ROPE, make_tiny

from fastkernels.core import registry
from fastkernels.export import fork
from fastkernels.export.exporter import ExportError, fork_targets

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
TESTS = Path(__file__).parents[1]
VERSIONS = {"vllm": "0.32.0", "sglang": "0.5.23", "transformers": "5.24.0"}
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "llama3": LLAMA3_ROPE,
}
MODELS = {
    "vllm": (*(f"llama-{rope}" for rope in ROPES), "qwen3", "gemma", "gemma2", "olmo2", "mixtral", "gpt_oss"),
    "sglang": ("llama-linear", "llama-yarn", "llama-llama3", "qwen3", "gemma2"),
    "transformers": ("llama-yarn", "qwen2", "qwen3", "granite", "mistral", "mixtral", "olmo2", "gemma"),
}
# Kernels of ours that these models must have run
KERNELS = {
    "vllm": {"_rms_norm_kernel", "_rms_norm_heads_kernel", "_silu_and_mul_kernel"},
    "sglang": {"_rms_norm_kernel", "_rms_norm_heads_kernel"},
    "transformers": {"_rms_norm_kernel", "_rms_norm_heads_kernel", "_rotary_emb_kernel"},
}
OTHERS = {"vllm": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"}}


def _python(host: str) -> str:
    file = TESTS.parent / f".venv-{host}" / "bin" / "python"
    if host == "transformers":
        return sys.executable
    if not file.is_file():
        pytest.skip(f"{file} does not exist: make setup")
    return str(file)


def _checkpoint(folder: Path, name: str) -> Path:
    kind, _, rope = name.partition("-")
    differs: dict[str, Any] = {"max_position_embeddings": 512}
    if rope:
        differs["rope_parameters"] = {"rope_theta": 10000.0, **ROPES[rope]}
    if kind == "qwen3":
        differs["hidden_size"] = 320  # rows of more than 256 channels run another kernel
    if kind == "gemma2":
        differs["final_logit_softcapping"] = None  # SGLang's kernel for it needs a GPU
    return make_tiny(folder / name, kind, "bfloat16" if kind == "gpt_oss" else "float32", **differs)


def _forked(host: str, folder: Path, ops: list[str]) -> Path:
    """A folder with a copy of the host's package that has the ops' files. Unchanged files are links."""
    code = f"import importlib.util as u; print(u.find_spec({host!r}).submodule_search_locations[0])"
    found = subprocess.run([_python(host), "-P", "-c", code], capture_output=True, text=True, check=True)
    shutil.copytree(found.stdout.strip(), folder / host, copy_function=_link)
    for op in ops:
        assert fork.put(op, host, VERSIONS[host], folder)
    return folder


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def _outputs(
    host: str, checkpoints: list[Path], work: Path, site: Path | None
) -> tuple[dict[str, Any], set[str]]:
    """Outputs of the models, and our kernels that ran in Triton's interpreter."""
    kernels, out = work / "kernels.txt", work / "outputs.json"
    kernels.write_text("")
    paths = [*([str(site)] if site else []), str(TESTS / "support" / "forked_site")]
    env = {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": str(int(site is not None)),
        "FORKED_KERNELS": str(kernels), "HF_HUB_OFFLINE": "1", **OTHERS.get(host, {}),
    }  # fmt: skip
    command = [
        _python(host),
        "-P",
        str(TESTS / "support" / "forked.py"),
        host,
        str(out),
        *map(str, checkpoints),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text()), set(kernels.read_text().split())


def _difference(ours: Any, theirs: Any) -> str:
    if isinstance(ours, str):
        return ours
    for (tokens, logprobs), (expected, given) in zip(ours, theirs, strict=True):
        most = max(abs(a - b) for a, b in zip(logprobs, given, strict=True))
        if tokens != expected or most > 2e-2:
            return f"tokens {tokens}, not {expected}; log probabilities differ by {most:.3g}"
    return ""


@pytest.mark.parametrize("host", VERSIONS)
def test_models_in_a_fork_give_the_hosts_outputs(host: str, tmp_path: Path) -> None:
    ops = [op for op in registry.op_names() if _has_file(op, host)]
    checkpoints = [_checkpoint(tmp_path / "models", name) for name in MODELS[host]]
    theirs, _ = _outputs(host, checkpoints, tmp_path, None)
    assert all(not isinstance(found, str) for found in theirs.values()), theirs
    ours, kernels = _outputs(host, checkpoints, tmp_path, _forked(host, tmp_path / "all", ops))
    wrong = {name: text for name, found in ours.items() if (text := _difference(found, theirs[name]))}
    if wrong:
        name = next(iter(wrong))
        guilty = [op for op in ops if _differs(host, tmp_path / "models" / name, theirs[name], tmp_path, op)]
        pytest.fail(f"{wrong}; with one file alone, {name} differs for {', '.join(guilty) or 'none'}")
    assert kernels >= KERNELS[host]


def _has_file(op: str, host: str) -> bool:
    try:
        return bool(fork_targets(registry.get(op), host, VERSIONS[host]))
    except ExportError:
        return False


def _differs(host: str, model: Path, theirs: Any, work: Path, op: str) -> bool:
    ours, _ = _outputs(host, [model], work, _forked(host, work / op, [op]))
    return bool(_difference(ours[model.name], theirs))
