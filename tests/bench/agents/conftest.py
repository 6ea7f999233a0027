"""Fixtures: settings of one small case, and slow stubs whose speed is a constant in their source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fk_bench.agents.budget import TaskBudget
from fk_bench.agents.session import Session, Settings
from fk_bench.agents.tasks import write
from fk_bench.core.rows import Row, Status, Subject
from fk_bench.kernels.judge import Options

OP, CASE = "silu_and_mul", "smollm2"
# Of tests/cheats: each fails in every draw of values
CHEATS = ("stale_memory", "early_exit", "claims_skipped", "compile_only", "patched_reference")
BLOCKS = '''"""Works through the rows in blocks."""

import torch

BLOCK = {block}


def silu_and_mul(x):
    half = x.shape[-1] // 2
    flat = x.reshape(-1, x.shape[-1])
    out = torch.empty(*x.shape[:-1], half, dtype=x.dtype, device=x.device)
    rows = out.view(-1, half)
    for i in range(0, flat.shape[0], BLOCK):
        part = flat[i : i + BLOCK]
        rows[i : i + BLOCK] = torch.nn.functional.silu(part[:, :half]) * part[:, half:]
    return out
'''


@pytest.fixture
def settings() -> Callable[..., Settings]:
    """Settings with these limits: attempts see one small case, the final score has the held-out ones."""

    def make(**limits: int | float) -> Settings:
        options = Options(device="cpu", rounds=3, seconds=0.3, timeout=60)
        label = {"agent": "test", "command": "", "mode": "independent", "suffix": ""}
        return Settings.of(options, TaskBudget(**limits), label, (CASE,), ("held-out",))  # type: ignore[arg-type]

    return make


def begin(session: Session, text: str = "") -> Path:
    """Start the task of OP in a session; returns its folder. text: the stub, instead of the op's own."""
    folder = session.run / "tasks" / OP / "work"
    own = session.run / f"{OP}.py"
    if text:
        own.write_text(text)
    stub = write(OP, folder, session.settings.budget, "cpu", (CASE,), begin=own if text else None)
    session.start(OP, 1, stub)
    return folder


def row(name: str, status: Status = Status.OK, reason: str = "", **metrics: float) -> Row:
    case = {
        "kind": "case",
        "name": name,
        "source": "random",
        "dtype": "float32",
        "dims": {"T": 3},
        "weight": 1.0,
    }
    return Row(
        run_id="r", command="kernels", status=status, reason=reason, subject=Subject(op="rms_norm"), case=case,
        metrics=metrics, ci95={"speedup": (1.0, 2.0)} if "speedup" in metrics else {}, baseline="cublas",
    )  # fmt: skip
