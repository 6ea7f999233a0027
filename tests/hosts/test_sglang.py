"""Real SGLang on the CPU: each file of tests/hosts/sglang/check_*.py is run by pytest inside .venv-sglang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
CHECKS = sorted((Path(__file__).parent / "sglang").glob("check_*.py"))
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-sglang: run `make setup`"),
]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of the checks, made by the environment that reads it."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    make = [str(PYTHON), str(ROOT / "tests" / "support" / "tiny.py"), str(folder / "model")]
    subprocess.run(make, check=True, env=dict(os.environ, HF_HUB_OFFLINE="1"), stdout=sys.stderr)
    return folder / "model"


@pytest.mark.parametrize("check", CHECKS, ids=lambda p: p.stem.removeprefix("check_"))
def test_sglang(check: Path, tiny: Path, tmp_path: Path) -> None:
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("FASTKERNELS", "SGLANG_", "PYTEST"))
    }
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TINY_LLAMA": str(tiny)}
    if check.stem == "check_tensor_parallel":
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"
    command = [str(PYTHON), "-m", "pytest", "-p", "no:cacheprovider", "-x", str(check)]
    with open(
        tmp_path / "log", "w+"
    ) as log:  # not a pipe: a scheduler that outlives its parent would hold it open
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=240)
        finally:
            _end(process)
        log.seek(0)
        assert code == 0, f"{' '.join(command)}\n{log.read()[-6000:]}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """The whole session: schedulers and detokenizers too."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
