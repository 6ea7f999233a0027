"""Tests of `fk-bench tables --take` and --out: the rows of a `make bench-h200` run, and the documents made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fk_bench.core.rows import append, read_text, stem
from fk_bench.core.terminal.flags import ConfigError
from fk_bench.tables.command import TABLES, text
from fk_bench.tables.results import GROUPS, Results, take
from support.table_rows import checkout, row, run, served

ROOT = Path(__file__).resolve().parents[3]


def test_taken_rows_have_no_machine_paths(tmp_path: Path) -> None:
    run_folder, results = tmp_path / "run", tmp_path / "results"
    (run_folder / "servers-vllm").mkdir(parents=True)
    results.mkdir()
    found = [
        *served("vllm", [1.0, 1.1], model="/home/me/model"),
        *served("vllm+fk", [1.0], model="/home/me/model"),
    ]
    found[-2].case["server_command"] = ["/home/me/python", "serve", "--port", "1"]
    found[-2].metrics["ttft_ms"] = 12.3456789
    append(run_folder / "servers-vllm/rows.jsonl", found)
    (results / "tables.json").write_text('{"hosts": ["old"], "kernels": ["old"], "steps": ["servers-vllm"]}')
    name, models = "2026-11-22-h200-servers-vllm", {"model": "A model"}
    assert take(run_folder, results, models) == [name]
    taken = read_text(results / f"{name}.jsonl.xz")
    assert (
        "/home" not in taken and '"model": "A model"' in taken and '["...", "serve", "--port", "1"]' in taken
    )
    assert '"ttft_ms": 12.3457' in taken
    mapping = {"hosts": ["old"], "kernels": ["old"], "steps": ["servers-vllm"]}  # no group is complete
    assert json.loads((results / "tables.json").read_text()) == mapping
    assert "| A model | vLLM | 1 |" in text("hosts servers-vllm", Results(results))
    assert take(run_folder, results, models) == [name]  # the same rows only once
    append(run_folder / "servers-vllm/rows.jsonl", served("sglang", [1.0]))
    assert take(run_folder, results, models) == [f"{name}-2"]
    assert read_text(results / f"{name}.jsonl.xz") == taken


def test_every_row_file_of_a_run_is_taken(tmp_path: Path) -> None:
    """Prompts, logs and files of a part's working folder are not rows of the run."""
    run_folder, results = tmp_path / "run", tmp_path / "results"
    for folder in ("servers-fp8", "servers-tp2", "logs", "work/inner"):
        (run_folder / folder).mkdir(parents=True)
    results.mkdir()
    for name, model in (("servers-fp8", "/a/b/model-fp8"), ("servers-tp2", "/a/b/model")):
        for lane in ("sglang", "sglang+fk"):
            append(run_folder / name / "rows.jsonl", served(lane, [1.0], model=model, base="sglang"))
    append(run_folder / "quality.jsonl", [row("quality", "quality", {"host": "vllm"}, {"kl_ratio": 1.0})])
    (run_folder / "prompts.jsonl").write_text('{"prompt": "0: a"}\n')
    (run_folder / "logs/parts.jsonl").write_text('{"part": "linear", "status": "ok"}\n')
    append(run_folder / "work/inner/rows.jsonl", served("vllm", [1.0]))
    taken = take(run_folder, results, {"model": "Shapes", "model-fp8": "Shapes in FP8"})
    assert taken == [f"2026-11-22-h200-{n}" for n in ("quality", "servers-fp8", "servers-tp2")]
    assert sorted(stem(p) for p in results.glob("*.jsonl.xz")) == sorted(taken)
    assert "| Shapes in FP8 | SGLang |" in text("hosts servers-fp8", Results(results))
    assert "| Shapes | SGLang |" in text("hosts servers-tp2", Results(results))
    assert json.loads((results / "tables.json").read_text()) == {}
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"--take .*empty: no rows there"):
        take(tmp_path / "empty", results)


def test_rows_of_a_whole_run_become_documents(tmp_path: Path) -> None:
    """Rows of the repository under the names that `make bench-h200` writes."""
    kept, run_folder = ROOT / "bench/results", tmp_path / "run"
    sources = {
        "servers-vllm": "servers-vllm", "servers-sglang": "servers-sglang", "servers-fp8": "servers-fp8",
        "servers-tp2": "servers-tp2", "servers-256-vllm": "servers-256", "servers-256-sglang": "servers-mixtral",
        "explain": "explain",
    }  # fmt: skip
    for name in ("patch-models", "patch-engine"):
        (run_folder / name).mkdir(parents=True)
        text_of = read_text(kept / "2026-11-24-h200-patch-models.jsonl.xz")
        (run_folder / name / "rows.jsonl").write_text(text_of)
    flat = {
        "skinny-linear": "skinny-linear",
        "decode-attention": "decode-attention",
        "linear-fp8": "skinny-linear-tp2",
    }
    for name, file in sources.items():
        (run_folder / name).mkdir(parents=True)
        (run_folder / name / "rows.jsonl").write_text(read_text(kept / f"2026-11-22-h200-{file}.jsonl.xz"))
    for name, file in flat.items():
        (run_folder / f"{name}.jsonl").write_text(read_text(kept / f"2026-11-22-h200-{file}.jsonl.xz"))
    judged = read_text(kept / "2026-11-22-h200-kernels.jsonl.xz").splitlines(True)
    ops = sorted({json.loads(line)["subject"].get("op") or "" for line in judged})
    for i, name in enumerate(GROUPS["kernels"]):  # each part judges its own ops
        mine = [x for x in judged if (json.loads(x)["subject"].get("op") or "") in ops[i::4]]
        (run_folder / name).mkdir()
        (run_folder / name / "rows.jsonl").write_text("".join(mine))
    root = checkout(tmp_path / "root", "<!-- table: summary -->\n<!-- end -->\n")
    (root / "bench/results/2026-11-22-h200-servers-vllm.jsonl").unlink()
    (root / "docs/performance.md").write_text("<!-- table: kernels -->\n<!-- end -->\n")
    (root / "docs/reports/2026-11-chip.md").write_text("<!-- table: realized -->\n<!-- end -->\n")
    assert run("--root", str(root), "--take", str(run_folder)) == 0
    mapping = json.loads((root / "bench/results/tables.json").read_text())
    assert set(mapping) == set(GROUPS)
    assert mapping["steps"] == [*GROUPS["steps"][:-1], "2026-11-22-h200-servers-vllm"]
    assert mapping["summary"] == ["2026-11-22-h200-servers-vllm", "2026-11-22-h200-servers-sglang"]
    assert "| vLLM | 64 | 8.49 | 7.68 | **1.11x** |" in (root / "README.md").read_text()
    assert "| vllm | 8 | 4.94 | 4.27 |" in (root / "docs/reports/2026-11-chip.md").read_text()
    judge = (root / "docs/performance.md").read_text()
    whole = text("kernels 2026-11-22-h200-kernels", Results(kept)).splitlines()
    assert [x for x in whole if x.startswith("| ")] == [x for x in judge.splitlines() if x.startswith("| ")]
    assert run("--root", str(root), "--check") == 0


def test_out_writes_all_tables_and_names_missing_rows(tmp_path: Path) -> None:
    append(tmp_path / "servers-vllm.jsonl", [*served("vllm", [2.0]), *served("vllm+fk", [1.0])])
    other = [*served("vllm", [2.0], model="/x/m"), *served("vllm+fk", [1.6], model="/x/m")]
    append(tmp_path / "servers-ragged-vllm.jsonl", other)
    args = ("--results", str(tmp_path), "--out", str(tmp_path / "tables.md"), "--model-name", "m=A model")
    assert run(*args) == 0
    written = (tmp_path / "tables.md").read_text()
    assert "| Llama-3.1-8B | vLLM | 1 | 512, 128 | 2.00 | 1.00 | 2.000 |" in written
    assert "no rows 'kernels-norms'" in written and "kernels: no rows.\n" in written
    # files in no group follow the groups
    others = [f"{t} servers-ragged-vllm" for t in ("hosts", "tails", "loads", "engine")]
    assert [x[3:] for x in written.splitlines() if x.startswith("## ")] == [*TABLES, *others]
    assert "| A model | vLLM | 1 | 512, 128 | 2.00 | 1.60 | 1.250 |" in written
