"""Rows of evaluations and of the judge, made by the code that writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fk_bench.core.rows import Machine, Row, Status, Subject, append
from fk_bench.evaluate.macro_eval import Item
from fk_bench.evaluate.run import results
from fk_bench.evaluate.run.results import Context

ITEMS = (
    Item("text", "llama", "chat", "vllm"), Item("text", "qwen", "chat", "sglang"),
    Item("image", "vit", "pictures", "timm"),
)  # fmt: skip
CHIP = "NVIDIA H200"


def context(name: str, chip: str = CHIP, digest: str = "d1", files: str = "f1") -> Context:
    machine = Machine(gpu=chip, gpus=1, cpu="cpu", cores=8)
    return Context(f"run-{name}", "abc123", machine, {"torch": "2.13"}, "mine", digest, {name: files})


def item_row(of: Context, name: str, item: Item, t: float, latency: float, c: float, **case: Any) -> Row:
    known = {"category": item.category, "workload": item.workload, "ranks": item.ranks, "level": item.level}
    values = {
        "kind": results.ITEM, "variant": "record", **known, "kept": ["rms_norm"], "dropped": [], "unused": [], **case
    }  # fmt: skip
    return of.row(
        name, values, Subject(model=item.model, host=item.host), status=Status.OK if c >= 0.9 else Status.WRONG,
        metrics={"throughput_speedup": t, "latency_speedup": latency, "correctness": c,
                 "discrepancy": 0.1 * (1 - c), "noise": 0.0},
    )  # fmt: skip


def case_row(
    op: str,
    name: str,
    speedup: float | None,
    status: Status = Status.OK,
    case: dict[str, Any] | None = None,
    **more: Any,
) -> Row:
    metrics = {} if speedup is None else {"speedup": speedup, "time_us_p50": 1.0}
    return Row(
        run_id="k", command="kernels", status=status,
        subject=Subject(op=op, provider="candidate", candidate=f"{op}.py"),
        machine=Machine(gpu=CHIP, gpus=1, cpu="cpu", cores=8), metrics=metrics, commit="abc123",
        case={"kind": "case", "name": name, "source": "random", "dtype": "bfloat16", "level": 1, **(case or {})},
        **more,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Path]:
    """Write a run's folder with these rows; returns it."""

    def make(name: str, rows: list[Row]) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        append(folder / "rows.jsonl", rows)
        return folder

    return make


@pytest.fixture
def submission(tmp_path: Path) -> Callable[..., Path]:
    """A submission that is right, with these fields changed; None leaves one out."""
    from fk_bench.evaluate.adapters.sets import read_set

    def make(**changed: Any) -> Path:
        folder = tmp_path / f"submission-{len(list(tmp_path.iterdir()))}"
        (folder / "candidates").mkdir(parents=True)
        (folder / "candidates" / "silu_and_mul.py").write_text(
            "import torch\n\n\ndef silu_and_mul(x):\n    d = x.shape[-1] // 2\n"
            "    return torch.nn.functional.silu(x[..., :d]) * x[..., d:]\n"
        )
        fields = {
            "name": "fast",
            "author": "A. Author",
            "licence": "Apache-2.0",
            "agent": "codex",
            "tokens": 1200,
        } | changed
        lines = [f"{k} = {v!r}".replace("'", '"') for k, v in fields.items() if v is not None]
        (folder / "submission.toml").write_text("\n".join(lines) + "\n")
        found = read_set("fast", folder / "candidates")
        of = context("fast", files=results.digest_of(found.folder, found.files))
        append(folder / "rows.jsonl", [item_row(of, "fast", i, 1.2, 1.2, 1.0) for i in ITEMS])
        return folder

    return make
