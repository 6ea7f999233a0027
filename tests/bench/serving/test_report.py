"""The report and the regression gate, from rows with known numbers."""

from __future__ import annotations

import csv
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fk_bench.core.pages import model_name
from fk_bench.core.rows import Machine, Row, Status, Subject, append, read
from fk_bench.core.terminal.flags import ConfigError
from fk_bench.offline.host import make_row
from fk_bench.serving import summary
from fk_bench.serving.config import Level
from fk_bench.serving.diff import compare
from fk_bench.serving.report import terminal
from fk_bench.serving.report.page import render
from fk_bench.serving.report.requests import outcomes
from fk_bench.serving.report.verdict import verdicts
from fk_bench.serving.summary import Cell, LaneResult
from rich.console import Console
from support.commands import fk_bench_here, last_json

METRICS = {
    "output_tokens_per_s": 100.0,
    "ttft_ms_p50": 50.0,
    "tpot_ms_p50": 10.0,
    "e2el_ms_p50": 400.0,
    "tokens_per_s_per_user": 90.0,
    "ttft_ms_mean": 51.0,
    "ttft_ms_p90": 60.0,
    "ttft_ms_p95": 65.0,
    "ttft_ms_p99": 70.0,
    "requests": 16.0,
    "requests_failed": 0.0,
    "duration_s": 1.0,
    "e2el_ms_mean": 400.0,
}


def make_run(
    folder: Path, scale: dict[str, float] | None = None, lanes: tuple[str, ...] = ("vllm", "vllm+fk")
) -> Path:
    folder.mkdir()
    machine, rows = Machine(cpu="cpu", cores=2), []
    for lane in lanes:
        common = {"run_id": "r1", "command": "serve-compare", "machine": machine}
        subject = Subject(model="<b>m</b>", lane=lane, host="vllm")
        for value in (1, 8):
            for r in range(3):
                factor = (scale or {}).get(lane, 1.0) * (1 + 0.01 * (r - 1))
                metrics = {
                    k: v * factor if "per_s" in k else v / factor if "ms" in k else v
                    for k, v in METRICS.items()
                }
                case = {"kind": "round", "load": "concurrency", "value": value, "num_prompts": 4, "seed": r}
                rows.append(Row(**common, subject=subject, case=case, round=r, metrics=metrics))
        rows.append(
            Row(
                **common,
                subject=subject,
                case={"kind": "agreement"},
                baseline="vllm",
                metrics={"token_agreement": 0.9871, "self_agreement": 1.0},
            )
        )
        case = {"kind": "lane", "server_command": ["vllm", "serve", "x y"], "env": {"A": "1", "B": ""}}
        rows.append(Row(**common, subject=subject, case=case, metrics={"patched_calls": 77}))
    append(folder / "rows.jsonl", rows)
    return folder


class Loads(HTMLParser):
    """All resources that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [
            v or "" for k, v in attrs if k in ("src", "href", "data", "srcset", "action") and tag != "a"
        ]


def test_report_is_self_contained_and_matches_rows(tmp_path: Path) -> None:
    text = render(make_run(tmp_path / "run")).read_text()
    loads = Loads()
    loads.feed(text)
    assert [v for v in loads.found if not v.startswith("data:")] == []
    style = "".join(re.findall(r"<style>(.*?)</style>", text, re.S))
    assert "url(" not in style and "@import" not in style
    order = [text.index(part) for part in ('id="verdict"', "<table", "plot-pareto")]
    assert order == sorted(order)
    assert "&lt;b&gt;m&lt;/b&gt;" in text and "<b>m</b>" not in text
    assert '100.0<small class="under">± 2.5</small>' in text  # 4.303 * 1 / sqrt(3)
    assert "0.9871" in text and ">77<" in text
    assert "env -u B A=1 vllm serve &#39;x y&#39;" in text
    assert text.count("Plotly.newPlot(") >= 5


def test_cpu_note_explains_patched_lanes_only_if_there_are(tmp_path: Path) -> None:
    """A lane of ours on a CPU runs its own CPU code; a patched host its own kernels through our ops."""
    run = make_run(tmp_path / "run")
    rows, _ = read(run / "rows.jsonl")
    assert "own kernels" not in render(run).read_text()
    rows[-1].case["patched_providers"] = {"rms_norm": "vllm"}
    append(run / "rows.jsonl", rows[-1:])
    assert "runs its host's own kernels through our ops" in render(run).read_text().replace("&#39;", "'")


def add_other_lengths(run: Path, lanes: tuple[str, ...] = ("vllm", "vllm+fk")) -> Path:
    """Add rounds of 16 requests with 2048 input and 8 output tokens, five times as slow to the first token."""
    for lane in lanes:
        case = {"kind": "round", "load": "concurrency", "value": 16, "num_prompts": 4, "seed": 0, "input_len": 2048,
                "output_len": 8, "run_lengths": [512, 128]}  # fmt: skip
        metrics = {k: 5 * v if "ttft" in k else v for k, v in METRICS.items()}
        row = Row(run_id="r1", command="serve-compare", subject=Subject(lane=lane), case=case, round=0,
                  metrics=metrics)  # fmt: skip
        append(run / "rows.jsonl", [row])
    return run


def test_other_lengths_are_in_tables_not_on_curves(tmp_path: Path) -> None:
    run = add_other_lengths(make_run(tmp_path / "run"))
    text = render(run).read_text()
    words = ["1 request in flight", "up to 8 requests in flight"]
    words.append("up to 16 requests in flight, 2048 tokens in and 8 out")
    assert re.findall(r'<h2>([^<]* req[^<]*) <span class="soft">', text) == words
    assert "250.0" in text  # p50 of the first token
    assert all(f"Time to first token, {at}" in text for at in words[1:])
    curve = text[text.index('"plot-ttft"') : text.index('"plot-tpot"')]
    assert '"c=8"' in curve and "2048" not in curve
    only = tmp_path / "only"
    only.mkdir()
    text = render(add_other_lengths(only)).read_text()
    assert "input_len: 512" in text and "plot-pareto" not in text
    assert text.count("Time to first token, up to 16 requests in flight, 2048 tokens in and 8 out") == 1


def test_levels_of_rows(tmp_path: Path) -> None:
    """A row without the run's lengths has these lengths, as older rows do."""
    case = {"load": "concurrency", "value": 16, "input_len": 2048, "output_len": 8}
    row = Row(run_id="r", command="serve-compare", case=case)
    assert summary.level_of(row) == Level("concurrency", 16) and summary.level_of(row).label == "c=16"
    run = add_other_lengths(make_run(tmp_path / "run"))
    found, _ = read(run / "rows.jsonl")
    other = Level("concurrency", 16, 2048, 8)
    assert summary.level_of(found[-1]) == other and other != Level("concurrency", 16)
    own = found[-1].model_copy(
        update={"case": {k: v for k, v in found[-1].case.items() if k != "run_lengths"}}
    )
    assert len(summary.latest([own, found[-1], own])) == 2
    assert summary.highest([other, Level("concurrency", 8), Level("rate", 99)]).label == "c=8"
    assert summary.highest([other, Level("rate", 99)]).label == "rate=99"


def test_diff_of_loads_with_other_lengths(tmp_path: Path) -> None:
    a = add_other_lengths(make_run(tmp_path / "a"))
    ratios = compare(a, a)["ratios"]
    assert {x["at"] for x in ratios} == {"c=1", "c=8", "c=16,2048-8"}
    problems = compare(a, make_run(tmp_path / "b"))["problems"]
    assert [p for p in problems if "vllm+fk at c=16,2048-8" in p]


def test_problems_are_shown_at_the_top(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    case = {"kind": "lane"}
    died = Row(
        run_id="r1",
        command="c",
        status=Status.DIED,
        reason="it <died>",
        subject=Subject(lane="vllm"),
        case=case,
    )
    append(run / "rows.jsonl", [died])
    text = render(run).read_text()
    assert text.index("it &lt;died&gt;") < text.index("<table")


def test_report_command(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with (run / "rows.jsonl").open("a") as f:
        f.write('{"half')
    done = fk_bench_here("report", run)
    assert done.returncode == 0 and last_json(done)["report"] == str(run / "report.html")
    assert "half-written line, skipped" in (run / "report.html").read_text()
    done = fk_bench_here("report", tmp_path)
    assert done.returncode == 2 and "give a folder with rows.jsonl" in done.stderr
    file = run / "rows.jsonl"
    file.write_text(file.read_text().replace('"serve-compare"', '"patch-compare"'))
    done = fk_bench_here("report", run)
    assert done.returncode == 2 and "rows of 'patch-compare'" in done.stderr


def test_verdict_names_the_faster_lane_with_its_interval(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"vllm+fk": 1.2})
    text = render(run).read_text()
    card = text[text.index("vllm+fk against vllm") : text.index("Token agreement")]
    assert "20.0% faster" in card and "1.200x output tokens/s (95% interval 1.200 to 1.200)" in card
    assert "at up to 8 requests in flight (5.3 to 6.4 on average)</p>" in card and "2 loads: 2 faster" in card
    assert "TTFT p50" in card and "Measured on a CPU" in text
    slower = render(make_run(tmp_path / "slower", {"vllm+fk": 0.9})).read_text()
    assert "10.0% slower" in slower
    assert "no significant difference" in render(make_run(tmp_path / "same")).read_text()


def test_page_of_lanes_that_are_not_compared(tmp_path: Path) -> None:
    """A lane on a CPU that runs its host's kernels, and one whose server never started."""
    run = make_run(tmp_path / "run", lanes=("vllm", "vllm+fk"))
    rows, _ = read(run / "rows.jsonl")
    for row in rows:
        if row.kind == "lane" and row.subject.lane == "vllm+fk":
            row.case["patched_providers"] = {"rms_norm": "vllm"}
    subject = Subject(model="m", lane="sglang", host="sglang")
    rows.append(
        Row(
            run_id="r1",
            command="c",
            status=Status.DIED,
            reason="exit 3",
            subject=subject,
            case={"kind": "lane"},
        )
    )
    (run / "rows.jsonl").write_text("".join(r.to_json() + "\n" for r in rows))
    text = render(run).read_text()
    assert text.count('soft">not compared<') == 2 and "which proves the swap and no speed" in text
    assert "no load was measured on both" in text and "sglang: died: exit 3" in text


def test_unfinished_run_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert "every server ran to the end" in render(run).read_text()
    kept = [r for r in read(run / "rows.jsonl")[0] if r.kind != "lane"]
    (run / "rows.jsonl").write_text("".join(r.to_json() + "\n" for r in kept))
    text = render(run).read_text()
    assert "the run is not finished" in text and "ran to the end" not in text


def test_verdict_compares_latency_at_a_given_rate() -> None:
    """Arrivals at a rate give the throughput too: a lane that only keeps up is not equal, it may be faster."""
    level = Level("rate", 4.0)
    rounds = {r: {**METRICS, "e2el_ms_p50": 400.0 + r} for r in range(3)}
    faster = {r: {**m, "e2el_ms_p50": m["e2el_ms_p50"] / 2} for r, m in rounds.items()}
    results = [
        LaneResult(name, cells=[Cell(name, level, cells, dict(cells[0]))])
        for name, cells in (("vllm", rounds), ("sglang", faster))
    ]
    (only,) = verdicts(results, {"vllm": "vllm", "sglang": "vllm"})
    assert only.headline is not None and only.headline.ratio == pytest.approx(2)
    assert "E2EL p50" in only.text and "4 requests per second" in only.text


def test_verdict_without_agreement_phase_has_a_baseline(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"vllm+fk": 1.2})
    kept = [r for r in read(run / "rows.jsonl")[0] if r.kind != "agreement"]
    (run / "rows.jsonl").write_text("".join(r.to_json() + "\n" for r in kept))
    assert "20.0% faster" in render(run).read_text()


def test_percentiles_need_enough_requests(tmp_path: Path) -> None:
    """16 requests a round support p90, and neither p95 nor p99."""
    run = make_run(tmp_path / "run", lanes=("vllm",))
    text = render(run).read_text()
    table = text[text.index("Every latency") : text.index('id="requests"')]
    assert ">60.00<" in table and "65.00" not in table and "70.00" not in table
    rows, _ = read(run / "rows.jsonl")
    for row in rows:
        if row.kind == "round":
            row.metrics["requests"] = 100.0
    (run / "rows.jsonl").write_text("".join(r.to_json() + "\n" for r in rows))
    text = render(run).read_text()
    table = text[text.index("Every latency") : text.index('id="requests"')]
    assert ">65.00<" in table and ">70.00<" in table and "p99 100" in table


def test_percentiles_of_turns_need_enough_turns(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", lanes=("vllm",))
    rows, _ = read(run / "rows.jsonl")
    for row in rows:
        if row.kind == "round":
            row.metrics["requests_later_turns"] = 12.0  # of 16
            for turn, value in (("first_turn", 31.0), ("later_turns", 41.0)):
                row.metrics |= {f"ttft_{turn}_ms_mean": value, f"ttft_{turn}_ms_p90": value + 0.5}
    (run / "rows.jsonl").write_text("".join(r.to_json() + "\n" for r in rows))
    text = render(run).read_text()
    assert ">31.00<" in text and ">41.00<" in text and ">41.50<" in text and "31.50" not in text


def test_requests_are_counted_by_outcome(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", lanes=("vllm",))
    rows, _ = read(run / "rows.jsonl")
    rows[2].metrics["requests_failed"], rows[2].status = 2.0, Status.FAILED
    (run / "rows.jsonl").write_text("".join(r.to_json() + "\n" for r in rows))
    (run / "requests").mkdir()
    lines = [{"error": f"HTTP 500: request {i} broke", "chunks_s": []} for i in (17, 18)]
    lines += [{"error": None, "chunks_s": [0.1, 0.2], "finish_reason": "stop"}] * 14
    (run / "requests" / "vllm.c=1.r2.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    (one, other) = outcomes(rows, run)
    assert (one.sent, one.completed, one.failed) == (48, 46, 2) and other.failed == 0
    assert one.errors == {"HTTP 500: request N broke": 2} and one.finished == {"stop": 14}
    assert one.rounds == {"ok": 2, "failed": 1}
    text = render(run).read_text()
    assert "HTTP 500: request N broke" in text and re.search(r'big bad">2 <small>of 96<', text)
    assert ">6.4<" in text  # in flight: 16 requests of 0.4 s in 1 s


def test_cached_prompts_and_drafts_are_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert "prefix cache" not in render(run).read_text()
    rows, _ = read(run / "rows.jsonl")
    for row in rows:
        if row.kind == "round" and row.subject.lane == "vllm+fk":
            row.metrics |= {
                "cached_prompt_tokens": 2240.0,
                "prompt_tokens": 2560.0,
                "spec_acceptance_rate": 0.625,
            }
            row.case["warning"] = "2240 of 2560 prompt tokens were in the prefix cache"
    (run / "rows.jsonl").write_text("".join(r.to_json() + "\n" for r in rows))
    text = render(run).read_text()
    card = text[text.index("Prompt tokens from a prefix cache") : text.index('id="results"')]
    assert 'big bad">88%<' in card and "vllm+fk: 13440 of 15360 prompt tokens" in card
    assert card.count("vllm+fk at c=1: 2240 of 2560") == 1
    assert 'data-label="draft acceptance">0.625<' in text


def test_searched_load_is_the_headline() -> None:
    level = Level("max_rate", 16.0, start=1.0)
    rounds = [{r: {**METRICS, "max_rate_within_slo": value + r} for r in range(3)} for value in (4.0, 8.0)]
    names = ("vllm", "sglang")
    results = [
        LaneResult(n, cells=[Cell(n, level, c, dict(c[0]))]) for n, c in zip(names, rounds, strict=True)
    ]
    (only,) = verdicts(results, {"vllm": "vllm", "sglang": "vllm"})
    assert only.headline is not None and only.headline.ratio == pytest.approx(9 / 5)
    assert "requests/s within the SLOs" in only.text


@pytest.mark.parametrize(("lanes", "heads"), [(("vllm",), 0), (("vllm", "vllm+fk"), 5)])
def test_speedups_need_a_lane_to_compare_with(tmp_path: Path, lanes: tuple[str, ...], heads: int) -> None:
    run = make_run(tmp_path / "run", lanes=lanes)
    text = render(run).read_text()
    assert text.count(">speedup</th>") == heads and ("A ratio above 1x" in text) == bool(heads)
    screen = Console(file=io.StringIO(), width=200)
    terminal.show(read(run / "rows.jsonl")[0], screen)
    assert ("speedup" in screen.file.getvalue()) == bool(heads)  # type: ignore[attr-defined]


def test_columns_of_a_load_have_values(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    rows, _ = read(run / "rows.jsonl")
    for row in rows:
        if row.case["kind"] == "round":
            row.case["slo_ms"] = {"ttft": 500.0, "tpot": 50.0}
        if row.case.get("value") == 8:
            row.metrics["goodput_requests_per_s"] = 3.0
    (run / "rows.jsonl").write_text("".join(r.to_json() + "\n" for r in rows))
    text = render(run).read_text()
    results = text[text.index('id="results"') : text.index("Output and patching")]
    one, eight = results.split("<table")[1:]
    assert "goodput req/s" in eight and "goodput req/s" not in one
    assert "slo_ms: ttft 500, tpot 50" in results


def test_title_is_the_models_name() -> None:
    assert model_name("/data/models/SmolLM2-135M-Instruct/") == "SmolLM2-135M-Instruct"
    assert model_name("/c/hub/models--meta-llama--Llama-3.1-8B/snapshots/0e9e3") == "meta-llama/Llama-3.1-8B"
    assert model_name("meta-llama/Llama-3.1-8B") == "meta-llama/Llama-3.1-8B"
    assert model_name("Llama-3.1-8B shapes, random weights") == "Llama-3.1-8B shapes, random weights"


def test_page_title_is_no_path(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    rows, _ = read(run / "rows.jsonl")
    for row in rows:
        row.subject.model = "/home/user/models/SmolLM2"
    (run / "rows.jsonl").write_text("".join(r.to_json() + "\n" for r in rows))
    text = render(run).read_text()
    assert re.search("<title>(.*?)</title>", text)[1] == "SmolLM2: vllm, vllm+fk (serve-compare)"  # type: ignore[index]
    assert "<h1>SmolLM2</h1>" in text and "/home/user" not in text


def test_csv_has_each_lane_and_load(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"vllm+fk": 1.2})
    render(run)
    with (run / "results.csv").open(newline="") as file:
        lines = {(x["lane"], x["load"]): x for x in csv.DictReader(file)}
    assert set(lines) == {(lane, load) for lane in ("vllm", "vllm+fk") for load in ("c=1", "c=8")}
    fast = lines["vllm+fk", "c=8"]
    assert fast["baseline"] == "vllm" and float(fast["output_tokens_per_s"]) == pytest.approx(120)
    assert float(fast["speedup_output_tokens_per_s"]) == pytest.approx(1.2)
    assert float(fast["ttft_ms_p50_ci95_low"]) < float(fast["ttft_ms_p50"])
    assert fast["ttft_ms_p90"] and "ttft_ms_p99" not in fast
    assert lines["vllm", "c=1"]["speedup_ttft_ms_p50"] == ""


def test_diff_gate(tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", {"vllm+fk": 0.9})
    result = compare(a, b, fail_under=0.98)
    assert not result["ok"]
    lines = {(x["lane"], x["at"], x["metric"]): x for x in result["ratios"]}
    assert len(lines) == 2 * 2 * 4
    slow = lines["vllm+fk", "c=8", "output_tokens_per_s"]
    assert slow["ratio"] == pytest.approx(0.9) and slow["failed"] and slow["verdict"] == "worse"
    # A latency, where lower is better
    assert lines["vllm+fk", "c=1", "ttft_ms_p50"]["ratio"] == pytest.approx(0.9, rel=1e-3)
    same = lines["vllm", "c=1", "tpot_ms_p50"]
    assert same["ratio"] == pytest.approx(1.0) and not same["failed"] and same["verdict"] == "same"
    assert compare(a, b, fail_under=0.85)["ok"] and compare(a, a, fail_under=0.98)["ok"]
    better = compare(b, a, fail_under=0.98)
    assert better["ok"] and {x["verdict"] for x in better["ratios"] if x["lane"] == "vllm+fk"} == {"better"}


def test_diff_of_zero_times(tmp_path: Path) -> None:
    """If all tokens of a request are read at once, there is no time between them."""
    a, b = make_run(tmp_path / "a", lanes=("vllm",)), make_run(tmp_path / "b", lanes=("vllm",))
    for run, lanes in ((a, ("c=1", "c=8")), (b, ("c=1",))):
        rows, _ = read(run / "rows.jsonl")
        for r in rows:
            if r.kind == "round" and f"c={r.case['value']:g}" in lanes:
                r.metrics["tpot_ms_p50"] = 0.0
        (run / "rows.jsonl").write_text("".join(r.to_json() + "\n" for r in rows))
    assert compare(a, a, fail_under=0.98)["ok"]
    result = compare(b, a, fail_under=0.98)
    lines = {x["at"]: x for x in result["ratios"] if x["metric"] == "tpot_ms_p50"}
    assert lines["c=1"]["ratio"] == 1.0 and not lines["c=1"]["failed"]
    assert lines["c=8"]["ratio"] is None and lines["c=8"]["failed"]
    (problem,) = result["problems"]
    assert (
        problem.startswith("vllm c=8 tpot_ms_p50: ") and problem.endswith(" and 0") and "no ratio" in problem
    )


def test_diff_command(tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", {"vllm": 0.95}, lanes=("vllm",))
    done = fk_bench_here("diff", a, b, "--fail-under", "0.98")
    assert done.returncode == 1 and last_json(done)["ok"] is False
    assert "has no result of vllm+fk at c=1" in done.stdout
    assert "vllm c=8 output_tokens_per_s: 0.950 is below 0.98" in done.stdout
    assert fk_bench_here("diff", a, a, "--fail-under", "0.98").returncode == 0
    done = fk_bench_here("diff", a, tmp_path / "none")
    assert done.returncode == 2 and "no such run" in done.stderr
    (tmp_path / "rows.jsonl").write_text("hello\n")
    done = fk_bench_here("diff", tmp_path, tmp_path)
    assert (
        done.returncode == 2
        and "no result row: " in done.stderr
        and "rows.jsonl:1: half-written" in done.stderr
    )
    with pytest.raises(ConfigError, match="neither run has 'speed'"):
        compare(a, a, ("speed",))


def test_diff_names_the_command_whose_runs_it_cannot_compare(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    append(run / "rows.jsonl", [make_row("vllm", {"requests": 1}, {"seconds": 1.0}, command="e2e")])
    with pytest.raises(ConfigError, match=r"has rows of e2e: runs of serve-compare, kernels and agent-loop"):
        compare(run, run)
