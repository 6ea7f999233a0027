"""Made-up rows of each kind, and a checkout of documents for `fk-bench tables`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fk_bench import cli
from fk_bench.core.rows import Machine, Row, Subject, append

H200 = Machine(gpu="NVIDIA H200", gpus=1, cpu="cpu", cores=16)


def row(command: str, kind: str, subject: dict[str, Any], metrics: dict[str, float], **more: Any) -> Row:
    case = {"kind": kind, **more.pop("case", {})}
    defaults = {"run_id": "run", "time": "2026-11-22T10:00:00+00:00", "commit": "abcdef123", "machine": H200}
    fields = {**defaults, "versions": {"torch": "2.11.0", "vllm": "0.26.0"}, **more}
    return Row(command=command, case=case, subject=Subject(**subject), metrics=metrics, **fields)


def served(
    lane: str, ms: list[float], requests: int = 1, model: str = "Llama-3.1-8B shapes, random weights",
    other: tuple[int, int] | None = None, base: str = "vllm", ranks: int = 1, run_id: str = "run",
) -> list[Row]:  # fmt: skip
    """Rounds of a lane with these times per token, its 'lane' row and its summary.

    other  tokens in and out, if they are not the run's
    """
    subject = {"lane": lane, "host": lane.removesuffix("+fk"), "model": model}
    case = {
        "load": "concurrency",
        "value": requests,
        "input_len": 512,
        "output_len": 128,
        "dtype": "bfloat16",
    }
    if other is not None:
        case |= {"input_len": other[0], "output_len": other[1], "run_lengths": [512, 128]}
    made = []
    for i, each in enumerate(ms):
        metrics = {"itl_ms_p50": each, "tpot_ms_p50": each, "ttft_ms_p50": 10 * each}
        metrics |= {"itl_ms_p99": 3 * each, "tpot_ms_p99": 2 * each, "ttft_ms_p99": 20 * each}
        metrics |= {"output_tokens_per_s": 1000 / each}
        made.append(row("serve-compare", "round", subject, metrics, case=case, round=i, run_id=run_id))
    lane_case: dict[str, Any] = {"server_command": ["serve"]}
    if ranks > 1:
        lane_case["server_command"] += ["--tensor-parallel-size", str(ranks)]
    if lane.endswith("+fk"):
        lane_case["patched_ops"] = {"rms_norm": 65, "attention": 32}
    made.append(row("serve-compare", "lane", subject, {}, case=lane_case, run_id=run_id))
    return [*made, row("serve-compare", "summary", subject, {}, case=case, baseline=base, run_id=run_id)]


def judged(op: str, name: str, ours: float, theirs: float, dims: dict[str, Any], **more: Any) -> Row:
    metrics = {"time_us_p50": ours, "baseline_us_p50": theirs, "speedup": theirs / ours}
    case = {"name": name, "source": "random", "dtype": "bfloat16", "weight": 1.0, "dims": dims}
    baseline = more.pop("baseline", "vllm")
    return row("kernels", "case", {"op": op}, metrics, case=case, baseline=baseline, **more)


def ended(op: str) -> Row:
    return row("kernels", "op", {"op": op}, {})


def timed(provider: str, tokens: int, out: int, us: float, params: str = "") -> Row:
    case = {"tokens": tokens, "layer": "layer", "out": out, "in": 4096, "params": params}
    return row("skinny_linear", "time", {"op": "linear", "provider": provider}, {"us": us}, case=case)


def checkout(folder: Path, text: str) -> Path:
    """Make a checkout whose README is `text`, with rows of vLLM and patched vLLM; return its root."""
    (folder / "bench/results").mkdir(parents=True)
    (folder / "docs/reports").mkdir(parents=True)
    (folder / "README.md").write_text(text)
    for name in ("docs/performance.md", "docs/reports/2026-11-chip.md"):
        (folder / name).write_text("Nothing here.\n")
    found = [*served("vllm", [4.0, 4.2, 4.4]), *served("vllm+fk", [2.0, 2.1, 2.2])]
    append(folder / "bench/results/2026-11-22-h200-servers-vllm.jsonl", found)
    (folder / "bench/results/tables.json").write_text('{"hosts": ["servers-vllm"]}')
    return folder


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(["tables", *args])
    return int(end.value.code or 0)
