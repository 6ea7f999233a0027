"""The report and the regression gate, from rows with known numbers."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fk_bench.core.rows import Machine, Row, Status, Subject, append, read
from fk_bench.serving import summary
from fk_bench.serving.config import ConfigError, Level
from fk_bench.serving.diff import compare
from fk_bench.serving.report import render
from support.commands import fk_bench, last_json

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
                metrics = {k: v * factor if "per_s" in k else v / factor for k, v in METRICS.items()}
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
    assert text.index("<table>") < text.index("plot-pareto")  # the table first
    assert "&lt;b&gt;m&lt;/b&gt;" in text and "<b>m</b>" not in text
    assert "100.0 <small>± 2.5</small>" in text  # 4.303 * 1 / sqrt(3)
    assert "0.9871" in text and ">77<" in text
    assert "env -u B A=1 vllm serve &#39;x y&#39;" in text
    assert text.count("Plotly.newPlot(") >= 5


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
    assert re.findall(r"<h2>(c=.*?)</h2>", text) == ["c=1", "c=8", "c=16,2048-8: 2048 tokens in, 8 out"]
    assert "350.0" in text  # p99 of the first token
    assert "Time to first token at c=16,2048-8" in text and "Time to first token at c=8" in text
    curve = text[text.index('"plot-ttft"') : text.index('"plot-tpot"')]
    assert '"c=8"' in curve and "2048" not in curve
    only = tmp_path / "only"
    only.mkdir()
    text = render(add_other_lengths(only)).read_text()
    assert "input_len: 512" in text and "plot-pareto" not in text
    assert text.count("Time to first token at c=16,2048-8") == 1


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
    assert text.index("it &lt;died&gt;") < text.index("<table>")


def test_report_command(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with (run / "rows.jsonl").open("a") as f:
        f.write('{"half')
    done = fk_bench("report", run)
    assert done.returncode == 0 and last_json(done)["report"] == str(run / "report.html")
    assert "half-written line, skipped" in (run / "report.html").read_text()
    done = fk_bench("report", tmp_path)
    assert done.returncode == 2 and "has no rows.jsonl" in done.stderr


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
    done = fk_bench("diff", a, b, "--fail-under", "0.98")
    assert done.returncode == 1 and last_json(done)["ok"] is False
    assert "has no result of vllm+fk at c=1" in done.stdout
    assert "vllm c=8 output_tokens_per_s: 0.950 is below 0.98" in done.stdout
    assert fk_bench("diff", a, a, "--fail-under", "0.98").returncode == 0
    done = fk_bench("diff", a, tmp_path / "none")
    assert done.returncode == 2 and "no such run" in done.stderr
    with pytest.raises(ConfigError, match="neither run has 'speed'"):
        compare(a, a, ("speed",))
