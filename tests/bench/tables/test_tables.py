"""Tests of `fk-bench tables`: documents match the rows, and tables of made-up rows have the right numbers."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from fk_bench import cli
from fk_bench.core.rows import Row, append, stem
from fk_bench.core.terminal.flags import ConfigError
from fk_bench.tables import figure, layers, servers
from fk_bench.tables.command import FIGURES, RESULTS, TABLES, rewritten
from fk_bench.tables.kernels import kernels
from fk_bench.tables.results import GROUPS, Results
from support.table_rows import checkout, ended, judged, row, run, served, timed

FIGURE = next(name for name in FIGURES if name.endswith("speedup.svg"))
ROOT = Path(__file__).resolve().parents[3]
SPEEDUP = "| 4.20 | 2.10 | 2.000 (2.000 to 2.000) | 2.000 (2.000 to 2.000) |"

# -- documents


def test_documents_match_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["tables", "--check", "--root", str(ROOT)])
    assert not end.value.code, capsys.readouterr().out


def test_changed_number_is_found_and_rewritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = checkout(tmp_path, "Before.\n\n<!-- table: hosts -->\n<!-- end -->\n\nAfter.\n")
    assert run("--check", "--root", str(root)) == 1 and run("--root", str(root)) == 0
    readme = root / "README.md"
    right = readme.read_text()
    assert f"| Llama-3.1-8B | vLLM | 1 | 512, 128 {SPEEDUP}" in right
    assert right.startswith("Before.\n\n<!-- table: hosts -->\nMedians of requests")
    assert right.endswith("<!-- end -->\n\nAfter.\n") and run("--check", "--root", str(root)) == 0
    readme.write_text(right.replace("| 2.10 |", "| 2.09 |"))
    capsys.readouterr()
    assert run("--check", "--root", str(root)) == 1
    printed = capsys.readouterr()
    assert "-| Llama-3.1-8B | vLLM | 1 | 512, 128 | 4.20 | 2.09 |" in printed.out
    assert "+| Llama-3.1-8B | vLLM | 1 | 512, 128 | 4.20 | 2.10 |" in printed.out
    assert json.loads(printed.out.splitlines()[-1])["changed"] == ["README.md"]
    assert "run `fk-bench tables`" in printed.err
    assert readme.read_text() != right and run("--root", str(root)) == 0 and readme.read_text() == right


def test_reports_are_documents_too(tmp_path: Path) -> None:
    root = checkout(tmp_path, "Nothing here.\n")
    report = root / "docs/reports/2026-11-chip.md"
    report.write_text("<!-- table: tails servers-vllm -->\n<!-- end -->\n")
    assert (
        run("--root", str(root)) == 0 and "| 84.00 | 42.00 | 2.000 (2.000 to 2.000) |" in report.read_text()
    )


def test_figure_is_made_where_a_document_shows_it(tmp_path: Path) -> None:
    root = checkout(tmp_path, "Nothing here.\n")
    assert run("--root", str(root)) == 0 and not (root / FIGURE).exists()
    (root / "README.md").write_text(f"![speedup]({FIGURE})\n")
    assert run("--check", "--root", str(root)) == 1 and run("--root", str(root)) == 0
    drawn = (root / FIGURE).read_text()
    assert "Llama-3.1-8B, vLLM, 1 requests at a time: 2.000x" in drawn
    (root / FIGURE).write_text(drawn.replace("2.00", "3.00"))
    assert run("--check", "--root", str(root)) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table: hosts gone -->\n<!-- end -->\n", "no rows 'gone' in .*gone.jsonl.*bench-h200"),
        ("<!-- table: speed -->\n<!-- end -->\n", "unknown table 'speed'; tables: summary"),
        ("<!-- table: kernels servers-vllm -->\n<!-- end -->\n", "servers-vllm has no row for it"),
        ("<!-- table: hosts -->\n", "without its own `<!-- end -->`"),
        ("<!-- table: hosts -->\n<!-- table: hosts -->\n<!-- end -->\n", "without its own `<!-- end -->`"),
    ],
)
def test_bad_marker_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    root = checkout(tmp_path, text)
    with pytest.raises(ConfigError, match=f"README.md: .*{message}"):
        rewritten(text, Results(root / RESULTS), "README.md")
    assert run("--root", str(root)) == 2 and (root / "README.md").read_text() == text


def test_files_are_found_newest_first_or_by_mapping(tmp_path: Path) -> None:
    for name in (
        "2026-11-21-h200-servers",
        "2026-12-01-h200-servers",
        "2026-12-02-h200-other-servers",
        "mine",
    ):
        append(tmp_path / f"{name}.jsonl", served("vllm", [1.0]))
    results = Results(tmp_path)
    assert stem(results.find("servers")) == "2026-12-01-h200-servers"
    judged_in = ["kernels-norms", "kernels-attention", "kernels-experts", "kernels-layers"]
    others = ["skinny-linear", "decode-attention", "explain", "servers-vllm"]
    assert results.files("steps") == [*judged_in, *others]
    (tmp_path / "tables.json").write_text(
        '{"hosts": ["mine"], "steps": ["hosts", "x"], "2026-11-a": ["y", "mine"]}'
    )
    assert results.files("hosts") == ["mine"] and results.files("steps") == ["mine", "x"]
    assert results.files("2026-11-a", "hosts", "z") == ["y", "mine", "z"]
    (tmp_path / "tables.json").write_text('{"servers": ["mine"]}')
    with pytest.raises(ConfigError, match="unknown group servers; groups: summary"):
        results.files("hosts")


# -- bench/results


def test_every_group_names_existing_files_and_has_a_table() -> None:
    results = Results(ROOT / RESULTS)
    for group in results.groups():
        if group in GROUPS and group not in json.loads((ROOT / RESULTS / "tables.json").read_text()):
            continue
        assert all(results.find(file).is_file() for file in results.files(group)), group
    assert {group for _, group in TABLES.values()} <= set(GROUPS)


def test_results_are_small_and_indexed() -> None:
    files = list((ROOT / RESULTS).iterdir())
    index = (ROOT / RESULTS / "README.md").read_text()
    rows = {stem(f) for f in files if f.name.endswith(".jsonl.xz")}
    assert sum(f.stat().st_size for f in files) <= 1_000_000
    indexed = {line.split("`")[1] for line in index.splitlines() if line.startswith("| `")}
    assert rows == indexed


# -- tables of made-up rows


def test_ragged_prompts_show_their_mean_length() -> None:
    found = [*served("vllm", [4.0, 4.0]), *served("vllm+fk", [2.0, 2.0])]
    ((_, _, cells),) = servers.hosts({"a": found})
    assert cells[0][3] == "512, 128"
    rounds = [r for r in found if r.kind == "round"]
    for made, tokens in zip(rounds, (300.0, 450.0, 300.0, 450.0), strict=True):
        made.case["dataset"] = "prompts"
        made.metrics |= {"requests": 2.0, "requests_failed": 0.0, "prompt_tokens": tokens}
    rounds[1].metrics |= {
        "requests": 4.0,
        "requests_failed": 1.0,
    }  # the prompt of a failed request is not counted
    ((_, _, cells),) = servers.hosts({"a": found})
    assert cells[0][3] == "~167, 128"  # 1500 tokens of 9 requests


def test_lanes_of_two_runs_are_never_compared() -> None:
    files = {"a": [*served("vllm", [4.0]), *served("vllm+fk", [2.0], run_id="other")]}
    assert servers.pairs(files) == []
    assert len(servers.pairs({"a": [*served("vllm", [4.0]), *served("vllm+fk", [2.0])]})) == 1


def test_loads_of_other_lengths_have_their_own_table() -> None:
    found = [
        r
        for other, ms in (((2048, 8), 6.0), (None, 2.0))
        for lane, faster in (("vllm", 1.0), ("vllm+fk", 2.0))
        for r in served(lane, [ms / faster], 8, other=other)
    ]
    ((_, _, cells),) = servers.hosts({"a": found})
    assert [cell[2:7] for cell in cells] == [["8", "512, 128", "2.00", "1.00", "2.000"]]
    ((_, _, cells),) = servers.loads({"a": found})
    assert [cell[2:7] for cell in cells] == [["8", "2048, 8", "166.7", "333.3", "2.000"]]


def test_interrupted_run_uses_default_base_lanes() -> None:
    rounds = [r for lane, ms in (("vllm", [4.0, 4.0]), ("vllm+fk", [2.0, 2.0])) for r in served(lane, ms)]
    (pair,) = servers.pairs({"a": [r for r in rounds if r.kind == "round"]})
    assert (pair.lane.lane, pair.base.lane, pair.ratio("tpot_ms_p50")) == (
        "vllm+fk",
        "vllm",
        (2.0, (2.0, 2.0)),
    )


def test_models_are_named_with_their_number_of_gpus() -> None:
    name = "Mixtral-8x7B shapes with 8 of 32 layers, random weights"
    found = [*served("sglang", [4.0], model=name, base="sglang", ranks=2)]
    found += served("sglang+fk", [2.0], model=name, base="sglang", ranks=2)
    (pair,) = servers.pairs({"a": found})
    assert (pair.model, pair.host) == ("Mixtral-8x7B, 8 of 32 layers, 2 GPUs", "SGLang")


def test_summary_has_our_engine_beside_each_host() -> None:
    found: list[Row] = []
    for requests in (1, 8):
        for lane, ms in (("vllm", 4.0), ("vllm+fk", 2.0), ("fastkernels", 1.0)):
            found += served(lane, [ms], requests)
    ((title, columns, cells),) = servers.summary_table({"a": found})
    assert cells[1] == ["vLLM", "8", "4.00", "2.00", "**2.00x**", "250.0", "500.0", "1000"]
    assert (
        len(columns) == len(cells[0])
        and "Llama-3.1-8B shapes with random weights, 512 tokens in and 128" in title
    )
    ((_, _, cells),) = servers.engine({"a": found})
    assert [c[:3] for c in cells] == [["Llama-3.1-8B", "vLLM", "1"], ["Llama-3.1-8B", "vLLM", "8"]]
    assert cells[0][4:7] == ["250.0", "1000", "4.000"]


def test_figure_has_a_bar_for_each_host_and_load() -> None:
    found = []
    for requests, faster in ((1, 2.0), (8, 1.25), (32, 0.8)):
        found += [*served("vllm", [4.0], requests), *served("vllm+fk", [4.0 / faster], requests)]
    drawn = ElementTree.fromstring(figure.speedup({"a": found}))
    space = "{http://www.w3.org/2000/svg}"
    bars = [r for r in drawn.iter(f"{space}rect") if r.find(f"{space}title") is not None]
    heights = [float(b.get("height") or 0) for b in bars]
    assert len(bars) == 3 and heights[0] == pytest.approx(4 * heights[1], abs=0.3)
    assert [float(b.get("y") or 0) for b in bars][2] > min(
        float(b.get("y") or 0) for b in bars[:2]
    )  # below 1
    assert {t.text for t in drawn.iter(f"{space}text")} >= {
        "Llama-3.1-8B",
        "vLLM",
        "2.00",
        "1.25",
        "0.80",
        "32",
    }
    with pytest.raises(ConfigError, match="no rows of a host and the same host patched"):
        figure.speedup({"a": served("vllm", [4.0])})


def test_kernels_leaves_out_and_names_unfinished_ops() -> None:
    dims = {"tokens": 1, "hidden": 4096}
    found = [judged("a", "x", 1.0, 2.0, dims), judged("a", "y", 1.0, 8.0, dims), ended("a")]
    found.append(judged("b", "z", 1.0, 1.0, dims))
    ((title, _, cells),) = kernels({"rows": found})
    assert cells == [["a", "4.00", "2", "2.00", "8.00", "", "", "", "", "", ""]]
    assert "2 cases timed of 2, 0 failed" in title and "b (1)" in title and "rows: `rows`" in title


def test_linear_sums_layers_of_each_model() -> None:
    one = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336),
           "lm_head": (128256, 4096)}  # fmt: skip
    two = {"qkv": (3072, 4096), "o": (4096, 2048), "gate_up": (14336, 4096), "down": (4096, 7168),
           "lm_head": (64128, 4096)}  # fmt: skip
    found = []
    for model, sizes, us in (("llama-8b", one, 10.0), ("llama-8b-tp2", two, 6.0)):
        for provider, factor in (("cublas", 1.0), ("ours", 0.9), ("ours", 0.5)):
            for layer, (out, k) in sizes.items():
                made = timed(provider, 8, out, us * factor)
                made.case |= {"layer": layer, "in": k}
                found.append(made)
        for provider, ms in (("cublas", us), ("best", us / 2)):
            graph = {"model": model, "tokens": 8}
            found.append(row("skinny_linear", "step", {"provider": provider}, {"ms": ms}, case=graph))
    ((_, columns, cells),) = layers.linear({"rows": found})
    assert columns[2:] == ["cuBLAS, sum", "ours, sum", "cuBLAS, one graph", "ours, one graph"]
    assert cells == [  # 129 launches in a step
        ["Llama-3.1-8B", "8", "1.29", "**0.65**", "10.00", "**5.00**"],
        ["Llama-3.1-8B, half of each layer", "8", "0.77", "**0.39**", "6.00", "**3.00**"],
    ]


def test_attention_shows_the_run_with_most_providers() -> None:
    def at(provider: str, us: float, run_id: str) -> Row:
        case = {"model": "llama-8b", "batch": 8, "context": 512, "params": provider}
        subject = {"op": "attention_decode", "provider": provider}
        return row("decode_attention", "time", subject, {"us": us, "tb_per_s": 1.0}, case=case, run_id=run_id)

    found = [
        at("fa3", 12.0, "a"),
        at("cuda-split", 8.0, "a"),
        at("cuda-split", 7.0, "a"),
        at("fa3", 9.0, "b"),
    ]
    ((_, columns, cells),) = layers.attention({"rows": found})
    assert columns[1:3] == ["cuda-split", "fa3"] and cells == [["8 x 512", "**7.0**", "12.0", "1.00"]]
