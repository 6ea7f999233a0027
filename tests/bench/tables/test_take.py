"""`fk-bench tables --take` and --out: the rows of a run of `make bench-h200`, put where documents are made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fk_bench.core.rows import append
from fk_bench.serving.config import ConfigError
from fk_bench.tables import command as tables
from fk_bench.tables.command import Results
from support.table_rows import checkout, row, run, served

ROOT = Path(__file__).resolve().parents[3]


def test_rows_of_a_run_are_taken_without_the_paths_of_the_machine(tmp_path: Path) -> None:
    run_folder, results = tmp_path / "run", tmp_path / "results"
    (run_folder / "servers-vllm").mkdir(parents=True)
    results.mkdir()
    found = served("vllm", [1.0, 1.1], model="/home/me/model")
    found[-2].case["server_command"] = ["/home/me/python", "serve", "--port", "1"]
    append(run_folder / "servers-vllm/rows.jsonl", found)
    (results / "tables.json").write_text('{"servers": ["old"], "kernels": ["old"], "pays": ["servers"]}')
    name, models = "2026-11-22-h200-servers-vllm", {"model": "A model"}
    assert tables.take(run_folder, results, models) == [name]
    text = (results / f"{name}.jsonl").read_text()
    assert "/home" not in text and '"model": "A model"' in text and '["...", "serve", "--port", "1"]' in text
    said = {"servers": [name], "kernels": ["old"], "pays": ["servers"]}
    assert json.loads((results / "tables.json").read_text()) == said
    assert Results(results).text("servers").startswith("A model, bfloat16")
    assert tables.take(run_folder, results, models) == [name]  # the same rows once
    append(run_folder / "servers-vllm/rows.jsonl", served("sglang", [1.0]))
    assert tables.take(run_folder, results, models) == [f"{name}-2"]
    assert (results / f"{name}.jsonl").read_text() == text
    assert Results(results).files("pays") == [f"{name}-2"]


def test_every_file_with_rows_of_a_run_is_taken_and_models_by_their_folders(tmp_path: Path) -> None:
    """Not what has none: prompts, the parts that ended, files of a run's work."""
    run_folder, results = tmp_path / "run", tmp_path / "results"
    for folder in ("servers-fp8", "servers-tp2", "logs", "work/inner"):
        (run_folder / folder).mkdir(parents=True)
    results.mkdir()
    append(run_folder / "servers-fp8/rows.jsonl", served("sglang", [1.0], model="/a/b/model-fp8"))
    append(run_folder / "servers-tp2/rows.jsonl", served("sglang", [1.0], model="/a/b/model"))
    append(run_folder / "quality.jsonl", [row("quality", "quality", {"host": "vllm"}, {"kl_ratio": 1.0})])
    (run_folder / "prompts.jsonl").write_text('{"prompt": "0: a"}\n')
    (run_folder / "logs/parts.jsonl").write_text('{"part": "linear", "status": "ok"}\n')
    append(run_folder / "work/inner/rows.jsonl", served("vllm", [1.0]))
    taken = tables.take(run_folder, results, {"model": "Shapes", "model-fp8": "Shapes in FP8"})
    assert taken == [f"2026-11-22-h200-{n}" for n in ("quality", "servers-fp8", "servers-tp2")]
    assert sorted(p.stem for p in results.glob("*.jsonl")) == sorted(taken)
    assert Results(results).text("servers servers-fp8").startswith("Shapes in FP8, bfloat16")
    assert Results(results).text("servers servers-tp2").startswith("Shapes, bfloat16")
    assert json.loads((results / "tables.json").read_text()) == {}  # no group has all of its files
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"--take .*empty: no file there has rows"):
        tables.take(tmp_path / "empty", results)


def test_the_rows_of_a_whole_run_are_taken_and_its_documents_written(tmp_path: Path) -> None:
    """What was measured on two days, under the names that `make bench-h200` gives it."""
    kept, run_folder = ROOT / "bench/results", tmp_path / "run"
    names = {
        "servers-vllm": "2026-11-22-h200-serve-compare-graphs",
        "servers-tp2": "2026-11-22-h200-serve-compare-tp2",
        "servers-ragged-vllm": "2026-11-22-h200-serve-compare-ragged",
        "servers-256-sglang": "2026-11-22-h200-serve-compare-256-sglang",
        "explain": "2026-11-22-h200-explain",
        "startup": "2026-11-22-h200-startup",
    }
    flat = {
        "skinny-linear": "2026-11-21-h200-wgmma-linear",
        "skinny-linear-tp2": "2026-11-22-h200-skinny-linear-tp2",
        "decode-attention": "2026-11-21-h200-decode-attention",
        "decode-step": "2026-11-21-h200-decode-step",
        "linear-fp8": "2026-11-22-h200-linear-fp8",
        "host-step": "2026-11-22-h200-host-step",
    }
    for name, file in names.items():
        (run_folder / name).mkdir(parents=True)
        (run_folder / name / "rows.jsonl").write_text((kept / f"{file}.jsonl").read_text())
    for name, file in flat.items():
        (run_folder / f"{name}.jsonl").write_text((kept / f"{file}.jsonl").read_text())
    judged = (kept / "2026-11-21-h200-kernels-all.jsonl").read_text().splitlines(True)
    ops = sorted({json.loads(line)["subject"].get("op") or "" for line in judged})
    for i, name in enumerate(tables.GROUPS["kernels"]):  # a part judges ops that no other does
        mine = [x for x in judged if (json.loads(x)["subject"].get("op") or "") in ops[i::4]]
        (run_folder / name).mkdir()
        (run_folder / name / "rows.jsonl").write_text("".join(mine))
    root = checkout(tmp_path / "root", "<!-- table: servers -->\n<!-- end -->\n")
    (root / "bench/results/2026-11-22-h200-servers-vllm.jsonl").unlink()
    (root / "docs/performance.md").write_text("<!-- table: kernels -->\n<!-- end -->\n")
    (root / "docs/performance-log.md").write_text(
        "<!-- table: realized -->\n<!-- end -->\n<!-- table: servers servers-tp2 -->\n<!-- end -->\n"
    )
    assert run("--root", str(root), "--take", str(run_folder)) == 0
    said = json.loads((root / "bench/results/tables.json").read_text())
    assert set(said) == set(tables.GROUPS)
    assert said["servers"] == ["2026-11-22-h200-servers-vllm"] and said["pays"] == list(tables.GROUPS["pays"])
    found = {p.stem.partition("-h200-")[2] for p in (root / "bench/results").glob("*.jsonl")}
    assert {*names, *flat, *tables.GROUPS["kernels"]} <= found
    assert "| 64 | vllm |  | 4941 |" in (root / "README.md").read_text()
    log = (root / "docs/performance-log.md").read_text()
    assert "| vllm | 8 | 4.94 | 4.38 |" in log and "|  | fastkernels | vllm | 339.9 (1.131" in log
    judge = (root / "docs/performance.md").read_text()
    whole = Results(kept).text("kernels 2026-11-21-h200-kernels-all").splitlines()
    assert [x for x in whole if x.startswith("| ")] == [x for x in judge.splitlines() if x.startswith("| ")]
    assert run("--root", str(root), "--check") == 0


def test_all_tables_of_a_run_say_what_is_missing(tmp_path: Path) -> None:
    append(tmp_path / "servers-vllm.jsonl", served("vllm", [1.0]))
    append(tmp_path / "servers-tp2.jsonl", served("vllm", [2.0], model="/x/m"))
    args = ("--results", str(tmp_path), "--out", str(tmp_path / "tables.md"), "--model-name", "m=A model")
    assert run(*args) == 0
    text = (tmp_path / "tables.md").read_text()
    assert "| 1 | vllm |  | 1000 | 1.00 |  |  |" in text and "no rows 'kernels-norms'" in text
    # Of no group: after those of the groups
    others = [f"{t} servers-tp2" for t in ("servers", "servers-tails")]
    assert [x[3:] for x in text.splitlines() if x.startswith("## ")] == [*tables.TABLES, *others]
    assert "A model, bfloat16" in text.partition("## servers servers-tp2")[2]
