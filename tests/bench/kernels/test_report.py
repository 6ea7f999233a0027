"""Tables, the page and the comparison of kernel runs, from rows with known numbers."""

from __future__ import annotations

import math
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fk_bench.core import scores
from fk_bench.core.rows import Machine, Row, Status, Subject, append
from fk_bench.core.terminal.flags import ConfigError
from fk_bench.kernels import report
from fk_bench.serving.diff import compare
from fk_bench.serving.report.page import render
from support.commands import fk_bench_here, last_json

H200 = Machine(gpu="NVIDIA H200", gpus=1, cpu="cpu", cores=16)


def case(op: str, name: str, speedup: float | None, half: float = 0.02, **fields) -> Row:
    """A judged case; speedup None: not timed."""
    metrics, ci95 = {}, {}
    if speedup is not None:
        metrics = {
            "time_us_p20": 9.5, "time_us_p50": 10.0, "time_us_p80": 11.0, "baseline_us_p20": 9.0 * speedup,
            "baseline_us_p50": 10.0 * speedup, "baseline_us_p80": 10.5 * speedup, "speedup": speedup, "noise": 0.011,
            "gb_per_s": 2400.0, "tflops": 1.2, "roofline_pct": 50.0, "floor_us": 5.0, "error_rms": 1e-3,
        }  # fmt: skip
        ci95 = {"speedup": (speedup - half, speedup + half)}
    known = {
        "kind": "case",
        "name": name,
        "source": "random",
        "dtype": "bfloat16",
        "weight": fields.pop("weight", 1.0),
    }
    known |= {"dims": {"tokens": 32}, "level": 1, "timer": fields.pop("timer", "cuda-graph")}
    known |= {"significant": True} if speedup is not None else {}
    return Row(
        run_id="r1", command="kernels", machine=fields.pop("machine", H200), versions={"torch": "2.11"},
        subject=Subject(op=op, provider="candidate", candidate=fields.pop("candidate", None)), baseline="vllm",
        case=known | fields.pop("case", {}), metrics=metrics, ci95=ci95, **fields,
    )  # fmt: skip


def write(folder: Path, rows: list[Row]) -> Path:
    folder.mkdir()
    append(folder / "rows.jsonl", rows)
    return folder


class Page(HTMLParser):
    """The text of a page, and the resources that it would load."""

    def __init__(self, html: str):
        super().__init__()
        self.text, self.loads, self.skip = "", [], False
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.skip = tag in ("script", "style")
        self.loads += [v for k, v in attrs if k in ("src", "href") and v and not v.startswith("#")]

    def handle_endtag(self, tag):
        self.skip = False

    def handle_data(self, data):
        self.text += "" if self.skip else data


def test_mean_is_weighted_and_failures_count():
    rows = [
        case("rms_norm", "a", 2.0, weight=3.0),
        *(case("rms_norm", name, 1.0, weight=0.25) for name in "bcde"),
        case("rms_norm", "f", None, status=Status.WRONG, reason="output 0 is off"),
        case("rms_norm", "g", None, status=Status.SKIPPED, reason="no GPU"),
        case("silu", "a", 0.5, weight=4.0),
    ]
    ops, total = scores.scores(rows)
    assert ops[0].speedup == pytest.approx(2 ** (3 / 4))
    assert (ops[0].timed, ops[0].cases, ops[0].failed, ops[0].not_run) == (5, 7, 1, 1)
    assert ops[0].ci95[0] < ops[0].speedup < ops[0].ci95[1]
    assert total.speedup == pytest.approx(math.exp((3 * math.log(2) + 4 * math.log(0.5)) / 8))


@pytest.mark.parametrize("status", [Status.OK, Status.WRONG, Status.INVALID, Status.TIMEOUT])
def test_mean_needs_most_cases_timed(status):
    """A candidate must not leave out the cases in which it is slow, by an unsteady time or otherwise."""
    untimed = [case("rms_norm", f"u{i}", None, status=status) for i in range(2)]
    not_counted = [
        case("rms_norm", "e", None, case={"source": "extreme"}),
        case("rms_norm", "s", None, status=Status.SKIPPED),
        case("rms_norm", "n", None, status=Status.UNSUPPORTED),
    ]
    for timed, known in ((8, True), (7, False)):
        rows = [case("rms_norm", f"t{i}", 2.0) for i in range(timed)] + untimed + not_counted
        found = scores.score("rms_norm", rows)
        assert (found.speedup is not None) is known and (found.ci95 is not None) is known
        assert found.timed == timed and found.cases == timed + 5


def test_later_row_of_a_case_replaces_earlier():
    rows = [case("rms_norm", "a", 2.0), case("rms_norm", "a", 3.0)]
    assert [r.metrics["speedup"] for r in scores.latest(rows)] == [3.0]
    assert len(scores.latest([*rows, case("rms_norm", "a", 1.0, case={"source": "captured"})])) == 2


def test_table_shows_cases_and_failures(capsys):
    report.show(
        [
            case("rms_norm", "decode", 1.25),
            case("silu", "x", None, status=Status.CRASH, reason="signal 11\nmore"),
        ]
    )
    out = capsys.readouterr().out
    for said in ("10 [9.5-11]", "1.250 (1.230 to 1.270)", "silu x: crash: signal 11", "vllm", "2400", "50"):
        assert said in out
    assert "more" not in out and "CPU timer" not in out


def test_unsteady_times_are_not_shown():
    row = case("rms_norm", "noisy", 1.0, reason="the baseline's times scatter too much here")
    for name in ("speedup", "gb_per_s", "tflops", "roofline_pct"):
        del row.metrics[name]
    row.metrics |= {"time_us_p20": -3.0, "time_us_p50": 2.0}
    assert report.cells(row)[5:7] == ["", ""]
    assert "scatter too much" in report.line(row) and " us," not in report.line(row)
    assert scores.score("rms_norm", [row]).speedup is None


def test_line_of_a_case():
    said = report.line(case("rms_norm", "decode", 1.25))
    assert "rms_norm" in said and "10 [9.5-11] us, 1.250 (1.230 to 1.270) over vllm, significant" in said
    assert report.line(case("silu", "x", None, status=Status.OOM, reason="16 GiB\nmore")).endswith(
        "oom      16 GiB"
    )


def test_page_is_complete_and_self_contained(tmp_path):
    source = tmp_path / "rms_norm.py"
    source.write_text("def rms_norm(x):\n    return x < 1  # <script>alert(1)</script>\n")
    rows = [
        case("rms_norm", "decode", 1.25, candidate=str(source), case={"scan": ["line 2: <b>odd</b>"]}),
        case("rms_norm", "prefill", 0.8, case={"times_us": [9.9, 10.1]}),
        case("store_kvcache", "no_flops", 1.0),
        case("silu", "x", None, status=Status.WRONG, reason="output 0: <i>error</i> 3.0\nsecond line"),
    ]
    rows[2].metrics["tflops"] = 0.0
    path = render(write(tmp_path / "run", rows))
    html = path.read_text()
    page = Page(html)
    assert page.loads == []
    for said in (
        "1.250 (1.230 to 1.270)", "line 2: <b>odd</b>", "<script>alert(1)</script>", "second line", "NVIDIA H200",
        "Noise floor", "1.1%", "torch", "error_rms", "wrong.", "this: 10 us [9.5 - 11]",
    ):  # fmt: skip
        assert said in page.text, said
    assert "alert(1)</script>" not in html
    assert all(f'id="plot-{name}"' in html for name in ("ops", "roofline", "cases"))
    assert "H200, bfloat16" in html  # the roofs
    assert report.CPU_MARK not in html


def test_escapes_in_a_row_change_no_line(tmp_path, capsys):
    """A candidate writes its error's text and names its file: neither draws a row of its own."""
    fake = "\x1b[2K\x1b[1Arms_norm decode ok\u202e\r\x9b1m\x1b]0;title\x07"
    row = case(
        "rms_norm",
        "decode\x1b[31m",
        None,
        status=Status.FAILED,
        reason=f"wrong {fake}\nmore",
        candidate=f"{fake}.py",
    )
    printed = report.line(row)
    report.show([row])
    page = report.write(write(tmp_path / "run", [row]), [row], [f"damaged {fake}"]).read_text()
    for text in (printed, capsys.readouterr().out, page):
        assert not set(text) & set("\x1b\x9b\r\x07\u202e")
        assert "wrong rms_norm decode ok" in text
    assert "\n" not in printed


def test_cpu_results_are_marked_everywhere(tmp_path, capsys):
    rows = [case("rms_norm", "a", 1.5, timer="cpu", machine=Machine(cpu="cpu", cores=2))]
    report.show(rows)
    assert report.CPU_MARK in capsys.readouterr().out
    assert report.render(write(tmp_path / "run", rows)).read_text().count(report.CPU_MARK) >= 3


def test_untimed_run_has_a_report(tmp_path):
    rows = [case("rms_norm", "a", None, status=Status.COMPILE_ERROR, reason="", case={"name": "<x>"})]
    rows += [
        Row(
            run_id="r1",
            command="kernels",
            subject=Subject(op="silu"),
            case={"kind": "case"},
            status=Status.REJECTED,
        )
    ]
    page = Page(report.render(write(tmp_path / "run", rows)).read_text())
    assert "compile_error" in page.text and "<x>" in page.text
    with pytest.raises(ConfigError, match="no judged case"):
        report.render(write(tmp_path / "empty", [Row(run_id="r", command="kernels", case={"kind": "run"})]))


def test_two_runs_agree_within_their_intervals(tmp_path):
    a = [case("rms_norm", "same", 1.20), case("rms_norm", "worse", 1.5), case("silu", "gone", 1.0)]
    b = [
        case("rms_norm", "same", 1.21),
        case("rms_norm", "worse", 1.2),
        case("silu", "gone", None, status=Status.WRONG),
    ]
    found = compare(write(tmp_path / "a", a), write(tmp_path / "b", b))
    assert [(x["case"], x["verdict"]) for x in found["ratios"]] == [("same", "agree"), ("worse", "worse")]
    assert (found["agree"], found["differ"], found["ok"]) == (1, 1, False)
    assert found["problems"] == ["silu gone: wrong in B"]
    again = compare(tmp_path / "a", tmp_path / "a", fail_under=0.99)
    assert again["ok"] and again["agree"] == 3 and again["speedup_a"] == again["speedup_b"]
    gated = compare(
        tmp_path / "a", write(tmp_path / "c", [*b[:2], case("silu", "gone", 1.0)]), fail_under=0.9
    )
    assert not gated["ok"] and "rms_norm worse: 0.800 is below 0.9" in gated["problems"]


def test_report_and_diff_accept_kernels_runs(tmp_path):
    a = write(tmp_path / "a", [case("rms_norm", "same", 1.20)])
    result = fk_bench_here("diff", a, a)
    assert result.returncode == 0 and "1.180 to 1.220" in result.stdout and last_json(result)["agree"] == 1
    result = fk_bench_here("report", a, "--json")
    assert last_json(result)["ok"] and (a / "report.html").is_file()
    other = write(tmp_path / "b", [Row(run_id="r", command="serve-compare", case={"kind": "round"})])
    result = fk_bench_here("diff", a, other)
    assert result.returncode == 2 and "is not a kernels run" in result.stderr
