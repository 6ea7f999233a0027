"""Real vLLM on the CPU: each file of tests/hosts/vllm/check_*.py is run by pytest inside .venv-vllm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
CHECKS = sorted((Path(__file__).parent / "vllm").glob("check_*.py"))
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-vllm: run `make setup`"),
]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of the checks, made by the environment that reads it."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    make = [str(PYTHON), str(ROOT / "tests" / "support" / "tiny.py"), str(folder / "model")]
    subprocess.run(make, check=True, env=dict(os.environ, HF_HUB_OFFLINE="1"), stdout=sys.stderr)
    return folder / "model"


@pytest.mark.parametrize("check", CHECKS, ids=lambda p: p.stem.removeprefix("check_"))
def test_vllm(check: Path, tiny: Path, tmp_path: Path) -> None:
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("FASTKERNELS", "VLLM_", "PYTEST"))
    }
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1" if check.stem == "check_tensor_parallel" else "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if check.stem in ("check_eager", "check_before") else "1",
        "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
        "TINY_LLAMA": str(tiny),
    }
    command = [str(PYTHON), "-m", "pytest", "-p", "no:cacheprovider", "-x", str(check)]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        _end(process)
    assert process.returncode == 0, f"{' '.join(command)}\n{output[-6000:]}"


def _end(process: subprocess.Popen[str]) -> None:
    """The whole session: engine cores and workers too."""
    import signal

    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
