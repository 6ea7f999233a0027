"""Scores, resuming and the selftest's verdict on recorded rows: nothing runs."""

from __future__ import annotations

import math
import os
import runpy
from dataclasses import replace

import pytest
from fk_bench.core.baselines import why_provisional
from fk_bench.core.rows import Machine, Status, Subject
from fk_bench.evaluate import suites
from fk_bench.evaluate.reasons import Reason
from fk_bench.evaluate.run import report, results, selftest
from fk_bench.evaluate.run.fidelity import BOUNDS, calibration, fidelity
from fk_bench.evaluate.run.items import PHASES, Measured, Round, checked_tokens, conclude, spread, worse
from fk_bench.evaluate.run.results import Context
from fk_bench.evaluate.run.search import Dropped, Found
from fk_bench.evaluate.run.side import SideFailed

SUITE = suites.load("smoke")
VERSIONS = {"torch": "2.13.0", "python": "3.11.7"}
CONTEXT = Context("run", "abc", Machine(cpu="Xeon"), VERSIONS, SUITE.name, SUITE.digest, {"mine": "f00"})


def measured(entry, speed=1.0, apart=0.0, live=None, dropped=(), kept=("rms_norm",)) -> Measured:
    """An item whose set takes 1 / speed of the baseline's time, which scatters by 1%."""
    made = Measured(entry, Found(kept, tuple(dropped), (), 1))
    scatter = (1.0, 1.01, 0.99, 1.005, 0.995)
    for phase in PHASES:
        for n, s in enumerate(scatter):
            seconds = {"baseline": s, "set": scatter[-1 - n] / speed}
            made.rounds.append(Round(phase, n, seconds, work=10))
    made.live = {"rms_norm": 7} if live is None else live
    made.fidelity = fidelity(entry.workload.kind, [apart] * 5, [0.0] * 5)
    conclude(made)
    return made


def rows_of(*found: Measured, variant: str = "record"):
    return [row for f in found for row in results.item_rows(CONTEXT, "mine", f, variant, {})]


def score(rows):
    return results.scores(SUITE, rows, "mine")


def test_do_nothing_set_scores_one():
    rows = rows_of(*(measured(e) for e in SUITE.entries))
    assert score(rows).kept.overall.score == pytest.approx(1.0, abs=1e-6)
    assert selftest.outside([r for r in rows if r.kind == results.ITEM]) == []


def test_do_nothing_set_of_our_engine_imports(tmp_path):
    files = selftest.write("fastkernels", tmp_path)
    assert "rms_norm" in files and "moe_sum" not in files  # whose targets are functions
    for path in files.values():
        runpy.run_path(path)


@pytest.mark.parametrize(("speed", "apart"), [(1.2, 0.0), (0.8, 0.0), (1.0, 0.02)])
def test_selftest_sees_speed_and_wrong_outputs(speed, apart):
    row = rows_of(measured(SUITE.entries[0], speed, apart))[-1]
    assert selftest.outside([row])


def test_score_has_the_verdict_of_the_selftest_for_each_host(tmp_path, capsys):
    entries = {e.item.host: e for e in SUITE.entries if e.item.host != "fastkernels"}
    both = [e for e in SUITE.entries if e.item.host == "fastkernels"]
    context = replace(CONTEXT, sets={**CONTEXT.sets, selftest.NAME: "0"})

    def of(*found: Measured):
        return [row for f in found for row in results.item_rows(context, selftest.NAME, f, "record", {})]

    rows = [*of(measured(entries["timm"]), measured(both[0])), *rows_of(measured(both[0]))]
    verdicts = results.selftest_of(SUITE, rows)
    assert verdicts == {"fastkernels": "1 of 2 items run", "transformers": "not run", "timm": "passed"}
    rows += of(measured(both[1], 1.2))
    verdicts = results.selftest_of(SUITE, rows)
    assert verdicts["fastkernels"].startswith(
        "failed: smollm2-135m in fastkernels: throughput_speedup in [1."
    )
    found = score(rows)
    assert results.score_row(CONTEXT, "mine", found, {}, verdicts).case["selftest"] == verdicts
    page = report.write(tmp_path, SUITE, rows, {"mine": found}).read_text()
    report.show(SUITE, rows, {"mine": found})
    for output in (capsys.readouterr().out, page):
        assert "timm passed" in output and "transformers not run" in output


def test_slower_set_keeps_its_candidates_in_the_score():
    rows = rows_of(*(measured(e, 0.8) for e in SUITE.entries))
    assert score(rows).kept.overall.score == pytest.approx(0.8, rel=0.01)


def test_best_subset_is_shown_apart_from_the_score():
    rows = rows_of(*(measured(e, 0.8) for e in SUITE.entries))
    rows += rows_of(measured(SUITE.entries[0], 1.1), variant="best")
    found = score(rows)
    assert found.kept.overall.score == pytest.approx(0.8, rel=0.01)
    assert found.best is not None and found.best.overall.score > found.kept.overall.score


def test_wrong_and_empty_sets_are_at_the_floor():
    wrong = score(rows_of(*(measured(e, 3.0, apart=0.5) for e in SUITE.entries))).kept.overall
    empty = score([]).kept.overall
    for part in (wrong, empty):
        assert (part.S, part.C, part.coverage, part.score) == (pytest.approx(0.5), 0.0, 0.0, 0.0)


def test_item_in_which_no_candidate_ran_counts_as_not_run():
    made = measured(SUITE.entries[0], live={"rms_norm": 0})
    assert (made.outcome, made.reason) == (None, Reason.NOT_DEPLOYED)
    assert score(rows_of(made)).kept.overall.valid == 0


def test_partly_run_suite_has_less_coverage():
    part = score(rows_of(*(measured(e) for e in SUITE.entries[:3]))).kept.overall
    assert part.coverage == pytest.approx(0.5)  # three of three items of text, none of two of images


def test_dropped_candidate_counts_only_as_is():
    crash = [Dropped("silu_and_mul", Reason.RUN_TIME, "boom")]
    found = score(rows_of(*(measured(e, dropped=crash) for e in SUITE.entries)))
    assert found.kept.overall.score == pytest.approx(1.0, abs=1e-6)
    assert found.as_is.overall.score == 0.0
    harmless = [Dropped("silu_and_mul", Reason.UNSUPPORTED, "other shape")]
    assert (
        score(rows_of(*(measured(e, dropped=harmless) for e in SUITE.entries))).as_is.overall.coverage == 1.0
    )


def test_item_measured_twice_counts_once():
    rows = rows_of(measured(SUITE.entries[0], 2.0), measured(SUITE.entries[0], 1.0))
    assert results.items_done(rows, "mine")[SUITE.entries[0].item].metrics[
        "throughput_speedup"
    ] == pytest.approx(1.0)


def test_rounds_without_their_item_count_nothing():
    rows = rows_of(measured(SUITE.entries[0]))[:-1]
    assert results.items_done(rows, "mine") == {}


def test_digest_of_a_set_sees_its_native_sources(tmp_path):
    """A continued run is refused if a kernel has changed, and not for a log or a cache."""
    (tmp_path / "_gelu" / "__pycache__").mkdir(parents=True)
    (tmp_path / "gelu.py").write_text("")
    for name in ("gelu.cu", "table.bin"):
        (tmp_path / "_gelu" / name).write_text("1")
    files = {"gelu": str(tmp_path / "gelu.py")}

    def digest() -> str:
        return results.digest_of(tmp_path, files)

    before = digest()
    (tmp_path / "run.log").write_text("x")
    (tmp_path / "_gelu" / "__pycache__" / "a.so").write_text("x")
    os.mkfifo(tmp_path / "pipe.py")
    assert digest() == before
    for name in ("gelu.cu", "table.bin"):
        (tmp_path / "_gelu" / name).write_text("2")
        assert digest() != before
        before = digest()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"commit": "def"}, "commit"),
        ({"machine": Machine(gpu="NVIDIA H200", cpu="Xeon")}, "chip"),
        ({"versions": {**VERSIONS, "torch": "2.12.0"}}, "torch"),
        ({"digest": "0"}, "suite digest"),
        ({"sets": {"mine": "bad"}}, "files of the set mine"),
    ],
)
def test_rows_of_another_evaluation_are_told_apart(change, told):
    row = rows_of(measured(SUITE.entries[0]))[-1]
    assert CONTEXT.differs(row) == ""
    assert told in replace(CONTEXT, **change).differs(row)


@pytest.mark.parametrize(
    "found",
    [
        None,
        [[1, 2]],
        [[1, 2], [1]],
        [[1, 2], [1, 2, 3, 4]],
        [[1, 2], [1, 2, 99]],
        [[1, 2], [1, 2, True]],
        [[1, 2], "abc"],
    ],
)
def test_tokens_other_than_requested_are_refused(found):
    assert checked_tokens([[1, 2], [3, 4, 5]], [2, 3], 10)
    with pytest.raises(SideFailed) as failed:
        checked_tokens(found, [2, 3], 10)
    assert failed.value.reason is Reason.INCORRECT


def test_statuses_say_why_an_item_failed():
    made = measured(SUITE.entries[0])
    made.outcome, made.reason = None, Reason.TIME_LIMIT
    assert rows_of(made)[-1].status is Status.TIMEOUT


def test_page_and_line_hold_the_score(tmp_path):
    rows = rows_of(measured(SUITE.entries[0], dropped=[Dropped("gelu", Reason.IMPORT, "SyntaxError: <b>")]))
    found = score(rows)
    page = report.write(tmp_path, SUITE, rows, {"mine": found}).read_text()
    line = results.score_line("mine", found.kept.overall)
    assert "coverage 0.167" in line and line in page
    assert "gelu (import): SyntaxError: &lt;b&gt;" in page
    assert "not run" in page


def op_row(op, speedup, how="independent", **more):
    interval = {"speedup_geomean": (speedup * 0.99, speedup * 1.01)}
    case = {"kind": results.OP, "how": how}
    metrics = {"speedup_geomean": speedup}
    return CONTEXT.row("mine", case, Subject(op=op), metrics=metrics, ci95=interval, **more)


def test_gap_is_of_valid_items_and_the_ops_that_they_run():
    right, wrong = measured(SUITE.entries[0], 1.1), measured(SUITE.entries[1], 3.0, apart=0.5)
    gone = [Dropped("gelu", Reason.RUN_TIME, "boom")]
    ops = [op_row("rms_norm", 1.2), op_row("gelu", 5.0), op_row("silu_and_mul", 4.0, status=Status.WRONG)]
    found = results.gap_of([*rows_of(right, wrong), *ops], "mine")
    assert found["host_speedup"] == pytest.approx(1.1, rel=0.01)
    assert found["independent_speedup"] == pytest.approx(1.2)
    assert found["composition_gap"] == pytest.approx(1.1 / 1.2, rel=0.01)
    alone = results.gap_of([*rows_of(wrong, measured(SUITE.entries[2], dropped=gone, live={})), *ops], "mine")
    assert alone == {"independent_speedup": pytest.approx((1.2 * 5) ** 0.5)}


def test_wrong_items_are_not_compared_with_vllm():
    entry = next(e for e in SUITE.entries if e.item.host == "fastkernels" and e.workload.kind == "text")
    item = replace(entry.item, host="vllm")
    for apart, there in ((0.0, True), (0.5, False)):
        rows = rows_of(measured(entry, apart=apart), measured(replace(entry, item=item)))
        assert (results.production(rows, entry, "mine") is not None) is there


def test_provisional_speedups_are_marked_and_no_scores(tmp_path):
    why = why_provisional({"vllm": ("vllm",)}, {})
    rows = rows_of(measured(SUITE.entries[0], 1.1))
    rows += [op_row("rms_norm", 0.5, provisional=why), op_row("gelu", 2.0)]
    assert results.slower(rows, "mine") == set()
    assert results.slower([op_row("rms_norm", 0.5)], "mine") == {"rms_norm"}
    assert results.gap_of(rows, "mine").keys() == {"host_speedup"}
    assert [line[2] for line in report.op_lines(rows, "mine")] == [
        "0.500 [0.495, 0.505] provisional",
        "2.000 [1.980, 2.020]",
    ]
    page = report.write(tmp_path, SUITE, rows, {"mine": score(rows)}).read_text()
    assert "PROVISIONAL: the speedups of rms_norm are no scores" in page and "pip install vllm" in page


def test_parts_have_intervals_in_rows_tables_and_page(tmp_path, capsys):
    rows = rows_of(*(measured(e, speed) for e, speed in zip(SUITE.entries, (1.5, 1.1, 1.3), strict=False)))
    found = score(rows)
    whole = found.kept.by["category"]["text"]
    text = results.score_row(CONTEXT, "mine", found, {}, {}).case["parts"]["category"]["text"]
    assert text["ci95"] == whole.ci95 and text["ci95"]["score"][0] < text["score"] < text["ci95"]["score"][1]
    page = report.write(tmp_path, SUITE, rows, {"mine": found}).read_text()
    report.show(SUITE, rows, {"mine": found})
    low, high = whole.ci95["score"]
    shown = f"{whole.score:.3f} [{low:.3f}, {high:.3f}]"
    for output in (capsys.readouterr().out, page):
        assert shown in output and all(name in output for name in ("category text", "host timm", "level 4"))


def test_second_run_lies_within_the_interval_of_the_first():
    first, second = (measured(SUITE.entries[0], speed) for speed in (1.1, 1.105))
    for phase in PHASES:
        low, high = first.ci95[phase]
        assert low <= getattr(second.outcome, phase) <= high and high - low < 0.1


def scale(noise=0.004, unplanted=None, **found):
    return calibration("images", {"again": 0.0, "reorder": noise}, found, unplanted or {})


def test_bound_shrinks_until_the_least_fault_is_seen():
    wide, narrow = scale(residual=0.6, scale=0.3), scale(residual=0.6, scale=0.011)
    assert wide.bound == BOUNDS["images"] and narrow.noise < narrow.bound < BOUNDS["images"]
    assert wide.sensitive and narrow.sensitive
    assert narrow.correctness(0.011) < 0.9 <= narrow.correctness(0.006)
    assert fidelity("images", [0.004], [0.0], narrow).correctness > 0.99
    assert fidelity("images", [0.011], [0.0], narrow).correctness < 0.9


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (scale(scale=0.003), "the planted fault scale is no larger"),
        (scale(scale=0.5, unplanted={"head": "packed"}), "head could not be planted: packed"),
        (scale(), "no fault was planted"),
    ],
)
def test_insensitive_item_counts_as_not_valid(made, told):
    found = measured(SUITE.entries[-1])
    found.calibration, found.outcome = made, None
    conclude(found)
    assert found.outcome is None and found.reason is Reason.INSENSITIVE and told in found.text
    row = rows_of(found)[-1]
    assert row.status is Status.INVALID and score([row]).kept.overall.valid == 0


@pytest.mark.parametrize("found", [None, [[0.5]], [[0.5, "x"]], [[0.5, math.nan]], [[0.5, -0.25], []]])
def test_log_probabilities_of_another_shape_are_wrong(found):
    assert spread(found, [[0.5, -0.5]]) == math.inf


def test_spread_is_the_root_mean_square_over_all_tokens():
    assert spread([[0.5], [1.0, -2.0]], [[0.5], [1.0, -2.3]]) == pytest.approx(math.sqrt(0.09 / 3))


def test_worst_comparison_counts_and_its_bound_is_in_the_row():
    found = measured(SUITE.entries[0])
    narrow = calibration("logprobs", {"own": 0.001}, {"scale": 0.005}, {})
    found.fidelity = worse(found.fidelity, fidelity("logprobs", [0.004], [0.001], narrow))
    row = rows_of(found)[-1]
    assert (row.case["compared"], row.metrics["bound"]) == ("logprobs", narrow.bound)
