"""What the checks inside the hosts' environments share (tests/integrations/test_engines.py starts them)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
    """Both candidates of `folder` have run in every rank that the report is of, and it says where."""
    live = report.refresh().candidates
    assert set(live) == {"rms_norm", "silu_and_mul"} and all(live.values()), live
    for row in report.active:
        assert row.candidate == f"function {folder / row.op}.py" and row.modules, row
        assert row.candidate in str(report)


@pytest.fixture
def candidate(tmp_path: Path) -> Callable[[str], str]:
    """candidate(source) -> the path of a file that holds it."""

    def write(source: str) -> str:
        (tmp_path / "candidate.py").write_text(source)
        return str(tmp_path / "candidate.py")

    return write
