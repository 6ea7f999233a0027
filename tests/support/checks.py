"""Shared by the checks inside the hosts' environments, which tests/integrations/test_engines.py starts."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LEAVES = ["rms_norm", "silu_and_mul", "rotary_emb"]
PROMPTS = ["Hello my name is", "The quick brown fox", "ab"]
RMS_NORM_BUG = "def rms_norm(x, weight, eps, *args):\n    raise ValueError('a bug in the candidate')\n"
RMS_NORM_TWICE = (
    "import torch\n"
    "def rms_norm(x, weight, eps, residual=None, var_hidden_size=None, cast_x_before_out_mul=True):\n"
    "    h = x.float() if residual is None else x.float() + residual.float()\n"
    "    if residual is not None:\n"
    "        residual.copy_(h)\n"
    "    return (2 * h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight\n"
)
# The same in a class, with weights that it doubles itself
RMS_NORM_PREPARED = (
    "import torch\n"
    "class VllmRMSNorm(torch.nn.Module):\n"
    "    def prepare(self):\n"
    "        self.doubled = 2 * self.weight\n"
    "    def forward(self, x, residual=None):\n"
    "        h = x.float() if residual is None else x.float() + residual.float()\n"
    "        if residual is not None:\n"
    "            residual.copy_(h)\n"
    "        y = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(x.dtype)\n"
    "        return y * self.doubled if residual is None else (y * self.doubled, residual)\n"
)
RMS_NORM_NAN = "def rms_norm(x, weight, eps, *args):\n    return x * float('nan')\n"
# It passes a trial step of up to three tokens
RMS_NORM_LATE_BUG = (
    "def rms_norm(x, weight, eps, *args):\n"
    "    if x.shape[0] > 3:\n"
    "        raise ValueError('a bug in the candidate')\n"
    "    return x\n"
)
RMS_NORM_EXIT = "import sys\ndef rms_norm(*args):\n    sys.exit(3)\n"
RMS_NORM_ENDLESS = (
    "import time\n"
    "def rms_norm(*args):\n"
    "    while True:\n"
    "        try:\n"
    "            time.sleep(60)\n"
    "        except Exception:\n"
    "            pass\n"
)
IMPORT_EXIT = "import sys\nsys.exit(3)\n"
ONLY_RANK_1_FAILS = (
    "import os\n"
    "import torch.distributed as dist\n"
    "if dist.is_initialized() and dist.get_rank() == 1:\n"
    "    raise RuntimeError('not on this rank')\n"
    "from fastkernels.overrides.norm.rms_norm import _reference as rms_norm\n"
)
SILU_AND_MUL = (
    "import torch\n"
    "def silu_and_mul(x):\n"
    "    gate, up = x.float().chunk(2, dim=-1)\n"
    "    return (torch.nn.functional.silu(gate) * up).to(x.dtype)\n"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of two candidates: a norm that is twice too large, an activation that is right."""
    made = tmp_path / "candidates"
    made.mkdir()
    (made / "rms_norm.py").write_text(RMS_NORM_TWICE)
    (made / "silu_and_mul.py").write_text(SILU_AND_MUL)
    return made


def check_folder(report: Any, folder: Path) -> None:
    """Both candidates of `folder` have run in every rank of the report, which names the places."""
    live = report.refresh().candidates
    assert set(live) == {"rms_norm", "silu_and_mul"} and all(live.values()), live
    for row in report.active:
        assert row.candidate == f"function {folder / row.op}.py" and row.modules, row
        assert row.candidate in str(report)


def check_all_left(report: Any, host: str) -> None:
    """A default patch on a CPU changed nothing, and the report gives the reasons."""
    assert not report.active and not report.verified and report.patched_modules == 0
    assert {kind.value for row in report.rows for kind in row.kinds} == {"left_to_host", "no_such_module"}
    left = {row.op for row in report.rows if row.kinds[0].left}
    assert {"rms_norm", "silu_and_mul", "rotary_emb"} <= left
    assert str(report).startswith(f"{host}: everything was left to the host\n")
    assert "left to the host: on a CPU our rms_norm is plain PyTorch" in str(report)


def check_own_kernels(report: Any, host: str, calls: dict[str, int]) -> None:
    """The host's own kernels ran inside our ops, so often, and nothing else is patched."""
    assert report.verified and {row.op: row.calls for row in report.active} == calls
    assert all(row.provider == host and not row.fallbacks for row in report.active)
    assert str(report).count(f"; provider {host}") == len(calls)


@pytest.fixture
def candidate(tmp_path: Path) -> Callable[[str], str]:
    """candidate(source) -> the path of a file that holds it."""

    def write(source: str) -> str:
        (tmp_path / "candidate.py").write_text(source)
        return str(tmp_path / "candidate.py")

    return write


def interrupted(run: Callable[[], object], seconds: float) -> bool:
    """Whether Ctrl-C, sent to this process after so many seconds, ended run()."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        run()
        timer.cancel()
        timer.join()  # the signal of a timer that has fired is raised here
    except KeyboardInterrupt:
        return True
    return False
