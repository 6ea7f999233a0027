"""What the checks inside the hosts' environments share (tests/hosts/test_engines.py starts them)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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


@pytest.fixture
def candidate(tmp_path: Path) -> Callable[[str], str]:
    """candidate(source) -> the path of a file that holds it."""

    def write(source: str) -> str:
        (tmp_path / "candidate.py").write_text(source)
        return str(tmp_path / "candidate.py")

    return write
