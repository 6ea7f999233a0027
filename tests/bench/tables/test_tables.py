"""`fk-bench tables`: the documents say what the rows say, and tables of made rows have the numbers that they must."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fk_bench import cli
from fk_bench.core.rows import Machine, Row, append
from fk_bench.explain import measurements as pays_points
from fk_bench.explain import savings as pays
from fk_bench.serving.config import ConfigError
from fk_bench.tables import command as tables
from fk_bench.tables import experiments as tables_scenarios
from fk_bench.tables import measured as tables_made
from fk_bench.tables import savings_tables as pays_tables
from fk_bench.tables.command import Results, rewritten
from support.table_rows import checkout, ended, judged, row, run, served, timed

from fastkernels.core import tuning as tuned

ROOT = Path(__file__).resolve().parents[3]
# -- the documents


def test_the_documents_say_what_the_rows_say(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["tables", "--check", "--root", str(ROOT)])
    assert not end.value.code, capsys.readouterr().out


def test_a_number_that_was_changed_is_found_and_written_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = checkout(tmp_path, "Before.\n\n<!-- table: servers -->\n<!-- end -->\n\nAfter.\n")
    assert run("--check", "--root", str(root)) == 1 and run("--root", str(root)) == 0
    readme = root / "README.md"
    right = readme.read_text()
    assert "|  | vllm+fk | vllm | 476.9 (2.000, 2.000 to 2.000) | 2.10 (2.000, 2.000 to 2.000) |" in right
    assert right.startswith(
        "Before.\n\n<!-- table: servers -->\nLlama-3.1-8B shapes, random weights, bfloat16, 512 tokens in"
    )
    assert right.endswith("<!-- end -->\n\nAfter.\n") and run("--check", "--root", str(root)) == 0
    readme.write_text(right.replace("2.10 (2.000", "2.09 (2.010"))
    capsys.readouterr()
    assert run("--check", "--root", str(root)) == 1
    said = capsys.readouterr()
    assert "-|  | vllm+fk | vllm | 476.9 (2.000, 2.000 to 2.000) | 2.09 (2.010" in said.out
    assert "+|  | vllm+fk | vllm | 476.9 (2.000, 2.000 to 2.000) | 2.10 (2.000" in said.out
    assert json.loads(said.out.splitlines()[-1])["changed"] == ["README.md"] and "fk-bench tables" in said.err
    assert readme.read_text() != right and run("--root", str(root)) == 0 and readme.read_text() == right


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<!-- table: servers gone -->\n<!-- end -->\n", "no rows 'gone' in .*gone.jsonl.*bench-h200"),
        ("<!-- table: speed -->\n<!-- end -->\n", "there is no table 'speed': servers"),
        ("<!-- table: kernels servers-vllm -->\n<!-- end -->\n", "servers-vllm has no row for it"),
        ("<!-- table: servers -->\n", "no `<!-- end -->`"),
        ("<!-- table: servers -->\n<!-- table: servers -->\n<!-- end -->\n", "no `<!-- end -->`"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_is_said(tmp_path: Path, text: str, said: str) -> None:
    root = checkout(tmp_path, text)
    with pytest.raises(ConfigError, match=f"README.md: .*{said}"):
        rewritten(text, Results(root / "bench/results"), "README.md")
    assert run("--root", str(root)) == 2 and (root / "README.md").read_text() == text


def test_files_are_found_newest_first_and_named_by_the_mapping(tmp_path: Path) -> None:
    for name in (
        "2026-11-21-h200-servers",
        "2026-12-01-h200-servers",
        "2026-12-02-h200-other-servers",
        "mine",
    ):
        append(tmp_path / f"{name}.jsonl", served("vllm", [1.0]))
    results = Results(tmp_path)
    assert results.find("servers").stem == "2026-12-01-h200-servers"
    judged_in = ["kernels-norms", "kernels-attention", "kernels-experts", "kernels-layers"]
    assert results.files("pays") == [
        *judged_in,
        "skinny-linear",
        "decode-attention",
        "explain",
        "servers-vllm",
    ]
    (tmp_path / "tables.json").write_text('{"servers": ["mine"], "pays": ["servers", "x"]}')
    assert results.files("servers") == ["mine"] and results.files("pays") == ["mine", "x"]
    (tmp_path / "tables.json").write_text('{"server": ["mine"]}')
    with pytest.raises(ConfigError, match="server: not one of servers"):
        results.files("servers")


# -- tables of made rows


def test_prompts_that_are_not_random_have_the_tokens_that_were_counted() -> None:
    found = served("vllm", [4.0, 4.0])
    ((title, _, _),) = tables_made.servers({"a": found})
    assert ", 512 tokens in and 128 out, " in title
    for made, tokens in zip([r for r in found if r.kind == "round"], (300.0, 450.0), strict=True):
        made.case["dataset"] = "prompts"
        made.metrics |= {"requests": 2.0, "requests_failed": 0.0, "prompt_tokens": tokens}
    found[1].metrics |= {"requests": 4.0, "requests_failed": 1.0}  # a failed one's prompt is not counted
    ((title, _, _),) = tables_made.servers({"a": found})
    assert ", a mean of 150 tokens in and 128 out, " in title


def test_servers_of_two_runs_are_two_tables() -> None:
    files = {"a": served("vllm", [4.0]), "b": served("vllm+fk", [2.0])}
    made = list(tables_made.servers(files))
    assert [cells for _, _, cells in made] == [
        [["1", "vllm", "", "250.0", "4.00", "", ""]], [["1", "vllm+fk", "", "500.0", "2.00", "", ""]],
    ]  # fmt: skip


def test_a_load_of_other_lengths_has_a_line_of_its_own() -> None:
    """First in the file, last in the table; the title's lengths are the run's."""
    found = [r for other in ((2048, 8), None) for lane, ms in (("vllm", 6.0), ("vllm+fk", 3.0))
             for r in served(lane, [ms] if other else [ms / 3], 8, other=other)]  # fmt: skip
    ((title, _, cells),) = tables_made.servers({"a": found})
    assert [cell[:4] for cell in cells] == [
        ["8", "vllm", "", "500.0"],
        ["", "vllm+fk", "vllm", "1000 (2.000)"],
        ["8 x (2048, 8)", "vllm", "", "166.7"],
        ["", "vllm+fk", "vllm", "333.3 (2.000)"],
    ]
    assert "512 tokens in and 128 out" in title


def test_lanes_of_a_run_that_was_ended_are_compared_as_it_would_have_done() -> None:
    """Its rounds are there, its summary is not."""
    rounds = [r for lane, ms in (("vllm", [4.0, 4.0]), ("vllm+fk", [2.0, 2.0])) for r in served(lane, ms)]
    ((_, _, cells),) = tables_made.servers({"a": [r for r in rounds if r.kind == "round"]})
    assert [cell[1:3] for cell in cells] == [["vllm", ""], ["vllm+fk", "vllm"]]
    assert "(2.000" in cells[1][4]


def test_kernels_leaves_out_and_names_an_op_that_was_not_judged_to_its_end() -> None:
    dims = {"tokens": 1, "hidden": 4096}
    found = [
        judged("a", "x", 1.0, 2.0, dims),
        judged("a", "y", 1.0, 8.0, dims),
        ended("a"),
        judged("b", "z", 1.0, 1.0, dims),
    ]
    ((title, _, cells),) = tables_made.kernels({"rows": found})
    assert cells == [["a", "4.00", "2", "2.00", "8.00", "", "", "", "", "", ""]]
    assert "2 cases timed of 2, 0 failed" in title and "b (1)" in title and "commit abcdef1; `rows`" in title


def test_linear_layers_are_summed_over_a_step() -> None:
    sizes = {"qkv": 6144, "o": 4096, "gate_up": 28672, "down": 4096, "lm_head": 128256}
    found = []
    for provider, us in (("cublas", 10.0), ("ours", 9.0), ("ours", 8.0)):
        for layer, out in sizes.items():
            made = timed(provider, 8, out, us)
            made.case |= {"layer": layer, "in": 14336 if layer == "down" else 4096}
            found.append(made)
    graph = {"model": "llama-8b", "tokens": 8}
    found += [
        row("skinny_linear", "step", {"provider": p}, {"ms": ms}, case=graph)
        for p, ms in (("cublas", 1.5), ("best", 1.2))
    ]
    ((_, columns, cells),) = tables_scenarios.linear({"rows": found})
    assert columns == ["tokens", "run", "cublas", "ours", "one graph: cublas", "one graph: ours"]
    assert cells == [["8", "10:00, abcdef1", "1.29", "**1.03**", "1.50", "**1.20**"]]  # 129 launches
    ((_, _, layers),) = tables_scenarios.linear_layers({"rows": found})
    assert layers == [["8", *["8 ours (10)"] * 5]]


def test_layers_of_other_sizes_in_the_same_run_are_not_mixed() -> None:
    one = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336),
           "lm_head": (128256, 4096)}  # fmt: skip
    two = {"qkv": (3072, 4096), "o": (4096, 2048), "gate_up": (14336, 4096), "down": (4096, 7168),
           "lm_head": (64128, 4096)}  # fmt: skip
    found = []
    for model, sizes, us in (("llama-8b", one, 10.0), ("llama-8b-tp2", two, 6.0)):
        for provider, factor in (("cublas", 1.0), ("ours", 0.5)):
            for layer, (out, k) in sizes.items():
                made = timed(provider, 8, out, us * factor)
                made.case |= {"layer": layer, "in": k}
                found.append(made)
            found.append(
                row(
                    "skinny_linear",
                    "step",
                    {"provider": provider},
                    {"ms": us},
                    case={"model": model, "tokens": 8},
                )
            )
    (title, _, cells), (half, _, of_two) = tables_scenarios.linear({"rows": found})
    assert "of Llama-3.1-8B's shapes" in title and "a GPU's half" not in title and "a GPU's half" in half
    assert (cells[0][2:4], of_two[0][2:4]) == (["1.29", "**0.65**"], ["0.77", "**0.39**"])  # 129 launches
    (_, _, layers), (half, _, of_two) = tables_scenarios.linear_layers({"rows": found})
    assert layers == [["8", *["5 ours (10)"] * 5]] and of_two == [["8", *["3 ours (6)"] * 5]]
    assert "cuBLAS, a GPU's half of Llama-3.1-8B's shapes (" in half


# -- kernels that pay


def norm(tokens: int, ours: float, theirs: float, **dims: Any) -> Row:
    return judged(
        "rms_norm",
        f"norm_{tokens}",
        ours,
        theirs,
        {"tokens": tokens, "hidden": 4096, "residual": True, **dims},
    )


def line(known: list[Row], batch: int) -> pays.Line:
    """The norms with a residual of a step of Llama."""
    found = pays.lines("llama-3.1-8b", batch, 512, pays_points.points({"rows": known}))
    return next(x for x in found if x.call.op == "rms_norm" and x.call.count == 64)


def test_a_call_takes_the_nearest_case_of_its_kind() -> None:
    known = [
        norm(1, 2.0, 3.0),
        norm(32, 2.0, 4.0),
        norm(8, 2.0, 9.0, residual=False),
        norm(8, 2.0, 9.0, hidden=576),
    ]
    found = {batch: line(known, batch).point for batch in (1, 8, 32, 256)}
    assert {b: p.case if p else None for b, p in found.items()} == {
        1: "norm_1",
        8: "norm_32",
        32: "norm_32",
        256: None,
    }
    assert line(known, 8).production_ms == pytest.approx(64 * 4e-3)
    assert line(known, 8).saved_ms == pytest.approx(64 * 2e-3)
    later = norm(32, 2.0, 5.0)
    later.case["source"] = "captured"
    again = line([*known, later], 32).point
    assert again is not None and again.speedup == pytest.approx(2.5)


def test_what_production_does_not_have_is_no_measurement() -> None:
    slow = norm(1, 2.0, 30.0)
    slow.baseline = "reference"
    assert line([slow], 1).point is None


def test_the_mean_is_weighted_by_productions_time() -> None:
    known = [norm(1, 2.0, 4.0), judged("silu_and_mul", "act", 5.0, 5.0, {"tokens": 1, "d": 14336})]
    found = pays.lines("llama-3.1-8b", 1, 512, pays_points.points({"rows": known}))
    assert pays.speedup(found) == pytest.approx(2 ** (64 * 4 / (64 * 4 + 32 * 5)))
    assert pays.speedup([x for x in found if x.point is None]) is None


def test_ours_is_what_the_shipped_table_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chip, shape = "Chip of test_tables", {"N": 6144, "K": 4096, "dtype": "bfloat16"}
    fast = tuned.Entry(
        "linear", shape, {"M": 8}, "cuda-wgmma", "cublas", "r", {"splits": 1, "stages": 8}, 1.2, (1.1, 1.3)
    )
    slow = tuned.Entry("linear", shape, {"M": 32}, "cublas", "cublas", "r")
    (tmp_path / f"{tuned.slug(chip)}.json").write_text(tuned.Table(chip, {"r": {}}, (fast, slow)).to_json())
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path)
    times = [("cublas", 10.0, ""), ("cuda-wgmma", 8.0, "1/8/256"), ("cuda-wgmma", 6.0, "2/8/256")]
    found = [timed(p, tokens, 6144, us, params) for tokens in (8, 32, 128) for p, us, params in times]
    for each in found:
        each.machine = Machine(gpu=chip, gpus=1)
    made = {p.case: p.ours_us for p in pays_points.points({"rows": found})}
    assert made == {"layer, 8": 8.0, "layer, 32": 10.0, "layer, 128": 10.0}
    exact = [timed(p, 8, 6144, us, params) for p, us, params in (*times, ("cuda-wgmma", 9.0, "1/8"))]
    for each in exact:
        each.machine = Machine(gpu=chip, gpus=1)
    # A set with all of these parameters and no more comes before those that have more
    assert [p.ours_us for p in pays_points.points({"rows": exact})] == [9.0]
    known = pays_points.points({"rows": found})
    near = {
        b: next(x for x in pays.lines("llama-3.1-8b", b, 512, known) if x.call.label == "qkv_proj")
        for b in (8, 16)
    }
    # Another number of tokens may run another kernel
    assert near[8].point is not None and near[16].point is None


def test_a_call_timed_by_explain_counts_with_its_own_batch() -> None:
    case = {
        "timer": "cuda-graph", "label": "attn", "dtype": "bfloat16", "batch": 200, "context": 512,
        "dims": {**pays_points.HEADS, "seq_lens": str([512] * 200)[:200]},
        "us": {"vllm": 9.0, "ours/fa3": 8.0, "ours/tuned": 7.0, "ours/triton-split": 6.0},
    }  # fmt: skip
    made = row("explain", "call", {"op": "attention_decode"}, {"ours_us": 7.0}, case=case)
    made.machine = Machine(gpu="A chip without a table", gpus=1)
    (point,) = pays_points.points({"rows": [made]})
    assert (point.production, point.production_us, point.ours_us) == ("fa3", 8.0, 7.0)
    assert point.shape.load == {"sequences": 200.0, "context": 512.0}


def test_a_call_that_explain_timed_with_another_kernel_than_the_tables_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chip = "Chip of test_tables, explained"
    shape = {**pays_points.HEADS, "window": 0, "dtype": "bfloat16"}
    entry = tuned.Entry(
        "attention_decode", shape, {"batch": 8, "context": 2048}, "cuda-split", "fa3", "r", {"warps": 8}, 1.2,
        (1.1, 1.3),
    )  # fmt: skip
    (tmp_path / f"{tuned.slug(chip)}.json").write_text(tuned.Table(chip, {"r": {}}, (entry,)).to_json())
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path)

    def explained(*ours: str) -> list[pays_points.Point]:
        case = {
            "timer": "cuda-graph", "label": "attn", "dtype": "bfloat16", "batch": 8, "context": 1024,
            "dims": {**pays_points.HEADS, "seq_lens": str([1024] * 8)},
            "us": {"ours/fa3": 8.0, **{f"ours/{name}": 6.0 for name in ours}},
        }  # fmt: skip
        made = row("explain", "call", {"op": "attention_decode"}, {"ours_us": 6.0}, case=case)
        made.machine = Machine(gpu=chip, gpus=1)
        return pays_points.points({"rows": [made]})

    assert explained("triton-split") == []
    assert [p.ours_us for p in explained("triton-split", "cuda-split")] == [6.0]


def test_what_a_patched_server_realized_stands_beside_what_was_promised() -> None:
    found = {"rows": [norm(1, 2.0, 4.0), *served("vllm", [4.0, 4.2]), *served("vllm+fk", [3.9, 4.1])]}
    ((_, _, cells),) = pays_tables.realized(found)
    # 64 norms save 2 us each; the first layer's has no residual, and attention's parts have no row
    assert cells[0][:7] == ["vllm", "1", "4.10", "4.00", "0.128", "0.100", "**0.78**"]
    assert cells[0][7] == "rms_norm, store_kvcache, attention_decode" and cells[1][4:7] == [
        "0.128",
        "0.100",
        "**0.78**",
    ]


def test_loads_of_other_lengths_are_not_what_a_step_realized() -> None:
    others = [r for lane in ("vllm", "vllm+fk") for r in served(lane, [9.0, 9.5], other=(2048, 8))]
    own = [*served("vllm", [4.0, 4.2]), *served("vllm+fk", [3.9, 4.1])]
    (pair,) = pays_tables.served({"rows": [*others, *own]})
    assert (pair.requests, pair.context, round(pair.stock_ms, 3)) == (1, 576, 4.1)
    assert pays_tables.served({"rows": others}) == []


def test_the_checkouts_mapping_names_files_that_are_there() -> None:
    results = Results(ROOT / tables.RESULTS)
    said = json.loads((ROOT / tables.RESULTS / tables.MAPPING).read_text())
    for group in said:
        for file in results.files(group):
            assert results.find(file).is_file()
