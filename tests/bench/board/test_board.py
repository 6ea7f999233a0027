"""The board from rows: standings, pages, and submissions that are refused."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from bench.board.conftest import CHIP, ITEMS, case_row, context, item_row
from fk_bench.board import figures, site, standings, submission
from fk_bench.cli import main
from fk_bench.core.checkout import checkout_path
from fk_bench.core.digests import digest_of
from fk_bench.core.rows import Machine, Row, Status, Subject, append
from fk_bench.evaluate.macro_eval import macro_eval
from fk_bench.evaluate.run import results
from fk_bench.kernels.judge import Options, judge_ops

Run = Callable[..., Path]


def rows_of(name: str, speeds: list[tuple[float, float, float]], **more: str) -> list[Row]:
    of = context(name, **more)
    return [item_row(of, name, i, *s) for i, s in zip(ITEMS, speeds, strict=False)]


def read(*folders: Path) -> list[standings.Standing]:
    return standings.standings(standings.entries_of([submission.read(f) for f in folders]))


def test_sets_are_ranked_by_the_score_of_their_items(run: Run) -> None:
    fast = rows_of("fast", [(2.0, 2.0, 1.0), (1.0, 1.0, 1.0), (1.0, 1.0, 1.0)])
    even = rows_of("even", [(1.1, 1.1, 1.0)] * 3)
    wrong = rows_of("wrong", [(3.0, 3.0, 0.2), (3.0, 3.0, 1.0), (3.0, 3.0, 1.0)])
    (found,) = read(run("all", [*wrong, *even, *fast]))
    assert [e.name for e in found.entries] == ["fast", "even", "wrong"]
    assert set(found.declared or ()) == set(ITEMS)
    for entry in found.entries:
        want = macro_eval(ITEMS, entry.outcomes).overall
        assert standings.rank_value(entry, "score") == pytest.approx(want.score)


def test_chips_and_suites_are_leagues_of_their_own(run: Run) -> None:
    first = run("a", rows_of("x", [(1.0, 1.0, 1.0)] * 3))
    second = run("b", rows_of("x", [(1.0, 1.0, 1.0)] * 3, chip="NVIDIA B200"))
    third = run("c", rows_of("x", [(1.0, 1.0, 1.0)] * 3, digest="d2"))
    assert [len(s.entries) for s in read(first, second, third)] == [1, 1, 1]


def test_ranks_at_other_bounds_follow_the_discrepancies(run: Run) -> None:
    """With half the bound, a set at c = 0.92 falls below 0.9 and behind a slower exact one."""
    near = rows_of("near", [(1.5, 1.5, 0.92)] * 3)
    exact = rows_of("exact", [(1.05, 1.05, 1.0)] * 3)
    (found,) = read(run("all", [*near, *exact]))
    assert [e.name for e in found.entries] == ["near", "exact"]
    assert found.thresholds["half"] == {"exact": 1, "near": 2}
    assert found.thresholds["double"] == {"near": 1, "exact": 2}


def test_ranks_are_those_that_the_times_allow(run: Run) -> None:
    """Sets whose intervals overlap may be in either order; one without intervals leaves the ranks open."""
    rows = []
    for name, speed, factor in (("a", 2.0, 1.1), ("b", 1.9, 1.2), ("c", 1.0, 1.05)):
        for one in rows_of(name, [(speed, speed, 1.0)] * 3):
            for metric in ("throughput_speedup", "latency_speedup"):
                one.ci95[metric] = (speed / factor, speed * factor)
            rows.append(one)
    (found,) = read(run("all", rows))
    assert found.ranges == {"a": (1, 2), "b": (1, 2), "c": (3, 3)}
    low, high = found.entries[2].measured or (0.0, 0.0)
    # Two texts and an image: a text has a quarter of the score's logarithm, the image half of it.
    half = math.log(1.05) * math.sqrt((2 * 0.25**2 + 0.5**2) / 2)
    assert (low, high) == pytest.approx((math.exp(-half), math.exp(half)))
    (bare,) = read(run("bare", [*rows, *rows_of("d", [(1.5, 1.5, 1.0)] * 3)]))
    assert bare.ranges == {} and bare.entries[1].measured is not None


def test_board_shows_the_verdict_of_the_do_nothing_set(run: Run, tmp_path: Path) -> None:
    """Of the set's own rows: a do-nothing set of another run says nothing about this one."""
    even = [(1.0, 1.0, 1.0)] * 3
    nothing = rows_of("do-nothing", even)
    (found,) = read(run("all", [*nothing, *rows_of("x", even)]), run("bare", rows_of("y", even)))
    verdicts = {e.name: set(standings.selftest_of(found, e).values()) for e in found.entries}
    assert verdicts == {"do-nothing": {"passed"}, "x": {"passed"}, "y": {"not run"}}
    nothing[0].ci95["throughput_speedup"] = (1.1, 1.2)
    (found,) = read(run("slanted", [*nothing, *rows_of("z", even)]))
    host = ITEMS[0].host
    site.write(tmp_path / "site", [found], [])
    text = (tmp_path / "site" / "index.html").read_text()
    assert ">failed</td>" in text and f"{host} failed: {ITEMS[0].model} in {host}: throughput_speedup" in text
    (league,) = json.loads((tmp_path / "site" / "board.json").read_text())
    assert all(s["selftest"][host].startswith("failed") for s in league["sets"])


def test_forged_score_row_is_not_believed(run: Run) -> None:
    rows = rows_of("x", [(1.0, 1.0, 1.0)] * 3)
    of = context("x")
    rows.append(
        of.row("x", {"kind": results.SCORE}, rows[0].subject, metrics={"score": 9.0, "declared": 3.0})
    )
    ((entry,),) = [s.entries for s in read(run("all", rows))]
    assert standings.rank_value(entry, "score") == pytest.approx(1.0)
    assert "says 9.0000, its items give 1.0000" in entry.warnings[0]


def test_undeclared_items_give_no_score(run: Run) -> None:
    """An unfinished run has fewer items than its suite, so its rows cannot be scored."""
    rows = rows_of("x", [(2.0, 2.0, 1.0)])
    rows.append(context("x").row("x", {"kind": results.SCORE}, rows[0].subject, metrics={"declared": 3.0}))
    (found,) = read(run("all", rows))
    assert found.declared is None and found.entries[0].macro is None


def test_fast_p_counts_failed_but_no_provisional_cases(run: Run) -> None:
    rows = [
        case_row("rms_norm", "a", 2.0), case_row("rms_norm", "b", 0.5), case_row("rms_norm", "c", None, Status.WRONG),
        case_row("rms_norm", "d", 9.0, provisional="no libraries"), case_row("rms_norm", "e", None, Status.SKIPPED),
    ]  # fmt: skip
    ((entry,),) = [s.entries for s in read(run("judged", rows))]
    assert sorted(entry.speeds) == [0.0, 0.5, 2.0]
    assert standings.fast_p(entry.speeds, 1.0) == pytest.approx(1 / 3)
    assert standings.fast_p(entry.speeds, 0.0) == pytest.approx(2 / 3)


def test_kernels_of_an_evaluated_set_are_one_entry(run: Run) -> None:
    (found,) = read(run("x", [*rows_of("x", [(1.0, 1.0, 1.0)] * 3), case_row("rms_norm", "a", 2.0)]))
    assert len(found.entries) == 1 and found.entries[0].speeds == [2.0]


class Page(HTMLParser):
    """References, ids and text of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.ids: list[str] = []
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "href":
                self.links.append(value or "")
            if name == "src" or (tag == "link" and name == "href"):
                self.loaded.append(value or "")
            if name == "id":
                self.ids.append(value or "")


def test_site_is_whole_and_loads_nothing(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = [*rows_of("<b>&one", [(1.2, 1.1, 1.0)] * 3), case_row("rms_norm", "a</script>", 2.0)]
    one[0].case["dropped"] = [
        {"op": "silu_and_mul", "reason": "run time", "text": "<img src=x onerror=alert(1)>"}
    ]
    two = rows_of("two", [(1.0, 1.0, 1.0)] * 3)
    out = tmp_path / "site"
    stale = out / "sets" / "gone.html"
    stale.parent.mkdir(parents=True)
    stale.write_text("")
    main_status(["board", str(run("a", one)), str(run("b", two)), "--out", str(out), "--json"], 0)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["sets"] == 3 and last["leagues"] == 2 and not stale.exists()
    for file in out.rglob("*.html"):
        page, text = Page(file), file.read_text()
        assert not page.loaded, "a page loads nothing"
        assert len(page.ids) == len(set(page.ids))
        assert "<img src=x" not in text and "<b>&one" not in text and "a</script>" not in text
        for link in page.links:
            target, _, anchor = link.partition("#")
            assert (file.parent / target).exists() if target else anchor in page.ids, link
    board = json.loads((out / "board.json").read_text())
    assert {s["name"] for league in board for s in league["sets"]} >= {"two"}
    index = (out / "index.html").read_text()
    assert (
        "silu_and_mul, run time" in index
        and "rank with bounds halved" in index
        and "prefers-color-scheme" in index
    )


class Tables(HTMLParser):
    """The cells of a page's tables that a browser without scripts shows: [table][row][column]."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[list[list[str]]] = []
        self._open: list[list[list[str]]] = []  # details hold tables, too
        self.feed(re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag != "table" or "hidden" not in dict(attrs)
        if tag == "table":
            self.found.append([])
            self._open.append(self.found[-1])
        elif tag == "tr":
            self._open[-1].append([])
        elif tag in ("td", "th"):
            self._open[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "table":
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] and self._open[-1][-1]:
            self._open[-1][-1][-1] += data


def test_ranking_needs_no_scripts(run: Run, tmp_path: Path) -> None:
    speeds = {f"set{i}": [(1.0 + i / 10, 1.0, 1.0)] * 3 for i in range(8)}
    folders = [str(run(name, rows_of(name, given))) for name, given in speeds.items()]
    main_status(["board", *folders, "--out", str(tmp_path / "site"), "--json"], 0)
    (head, *rest), *_ = Tables((tmp_path / "site" / "index.html").read_text()).found
    ranking = [row for row in rest if len(row) == len(head)]  # without details
    assert head[:6] == ["rank", "set", "score", "S", "C", "coverage"]
    assert [row[1] for row in ranking] == [f"set{i}" for i in reversed(range(8))]
    (standing,) = read(*map(Path, folders))
    scores = [e.macro.overall.score for e in standing.entries if e.macro is not None]
    assert [row[2][:5] for row in ranking] == [f"{score:.3f}" for score in scores]


def main_status(words: list[str], status: int) -> None:
    try:
        main(words)
    except SystemExit as ended:
        assert (ended.code or 0) == status
    else:
        assert status == 0


def test_script_gets_what_python_ranks(run: Run) -> None:
    """The page's data gives the same score by the rules of macro_eval, item by item."""
    (found,) = read(run("all", rows_of("x", [(1.3, 1.1, 1.0), (1.0, 0.9, 0.95), (2.0, 1.0, 0.5)])))
    data = standings.data(found)
    (one,) = data["sets"].values()
    assert [i["host"] for i in data["items"]] == [i.host for i in found.declared or ()]
    assert len(one["outcomes"]) == len(data["items"]) and data["floor"] == 0.5
    for item, outcome in zip(found.declared or (), one["outcomes"], strict=True):
        o = found.entries[0].outcomes[item]
        assert outcome == [o.throughput, o.latency, o.correctness]


def test_published_rows_make_a_board(tmp_path: Path) -> None:
    """Rows that were measured on H200s: our overrides as a set, with their fast_p."""
    file = checkout_path("bench/results/2026-11-22-h200-kernels.jsonl.xz")
    found = read(file)
    assert [s.league.chip for s in found] == [CHIP]
    (entry,) = found[0].entries
    assert len(entry.cases) > 300 and standings.fast_p(entry.speeds, 1.0) > 0.5
    index = site.write(tmp_path, found, ())
    assert "fast_1" in index.read_text()


def test_board_and_its_data_have_intervals_of_parts(run: Run, tmp_path: Path) -> None:
    found = read(run("all", rows_of("x", [(2.0, 2.0, 1.0), (1.2, 1.2, 0.95), (1.0, 1.0, 1.0)])))
    (entry,) = found[0].entries
    assert entry.macro is not None
    text = entry.macro.by["category"]["text"]
    index = site.write(tmp_path, found, ())
    (page,) = (tmp_path / "sets").iterdir()
    shown = f"{text.score:.3f} [{text.ci95['score'][0]:.3f}, {text.ci95['score'][1]:.3f}]"
    assert shown in index.read_text() and shown in page.read_text()
    ((plain,),) = [league["sets"] for league in json.loads((tmp_path / "board.json").read_text())]
    assert plain["parts"]["category"]["text"]["ci95"]["S"] == list(text.ci95["S"])
    assert plain["ci95"]["score"] == list(entry.macro.overall.ci95["score"])
    assert (plain["kept"], plain["cost"], plain["composition"]) == (1.0, {}, entry.gap)


def test_speed_of_wrong_items_is_in_no_figure(run: Run) -> None:
    (found,) = read(run("all", rows_of("x", [(3.0, 3.0, 0.1), (1.2, 1.2, 1.0), (9.0, 9.0, 0.89)])))
    assert site._panels(found.entries[0]) == {"text": {"qwen": pytest.approx(1.2)}}
    assert found.entries[0].gap == {"host_speedup": pytest.approx(1.2)}


def test_page_marks_provisional_speedups(run: Run, tmp_path: Path) -> None:
    rows, of = rows_of("x", [(1.0, 1.0, 1.0)] * 3), context("x")
    case = {"kind": results.OP, "how": "independent"}
    metrics = {"speedup_geomean": 7.0}
    rows.append(of.row("x", case, Subject(op="rms_norm"), metrics=metrics, provisional="no libraries"))
    found = read(run("all", rows))
    assert "independent_speedup" not in found[0].entries[0].gap
    index = site.write(tmp_path, found, ()).read_text()
    (page,) = (tmp_path / "sets").iterdir()
    assert "7.000 provisional" in page.read_text() and "no libraries" in index


def test_curve_falls_from_the_share_of_right_cases() -> None:
    text = figures.curves({"a": [0.0, 0.5, 2.0, 4.0]}, "t")
    (points,) = re.findall(r'polyline points="([^"]+)"', text)
    heights = [float(p.split(",")[1]) for p in points.split()]
    assert heights == sorted(heights)  # y grows downwards
    assert "fast_1 50% of 4" in text and figures.curves({"a": []}, "t") == ""


def test_panel_has_its_mean_as_a_line() -> None:
    text = figures.by_architecture({"text": {"llama": 2.0, "qwen": 0.5}, "image": {}}, "t")
    assert text.count('class="mean"') == 1 and ">1.00<" in text and "llama: 2.000" in text


def test_rows_without_a_set_are_an_error(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    row = case_row("rms_norm", "a", 1.0)
    row.command = "explain"
    main_status(["board", str(run("x", [row]))], 2)
    assert "no set in these rows" in capsys.readouterr().err
    main_status(["board", "no-such-folder"], 2)
    assert "no such run: no-such-folder" in capsys.readouterr().err


def test_right_submission_is_taken_and_shown(
    submission: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = submission()
    main_status(["submit-check", str(folder), "--json"], 0)
    assert json.loads(capsys.readouterr().out) == {"command": "submit-check", "ok": True, "refused": []}
    main_status(["board", str(folder), "--out", str(tmp_path / "site"), "--json"], 0)
    (page,) = (tmp_path / "site" / "sets").iterdir()
    text = page.read_text()
    assert "A. Author" in text and "Apache-2.0" in text and "SHA-256" in text and "def silu_and_mul" in text


def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    main_status(["submit-check", str(folder), "--json"], 1)
    return " ".join(json.loads(capsys.readouterr().out.splitlines()[-1])["refused"])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"licence": None}, "there is no licence"),
        ({"licence": "do what you like"}, "is no SPDX expression"),
        ({"author": " "}, "there is no author"),
        ({"name": "../fast"}, "at most 64 letters"),
        ({"candidates": "../other"}, "outside the submission"),
        ({"candidates": "/etc"}, "outside the submission"),
        ({"candidates": "nothing"}, "there is no folder"),
        ({"lisence": "MIT"}, "licence"),
        ({"tokens": -1}, "tokens = -1: give a number from 0"),
        ({"tokens": "many"}, "is no int"),
        ({"mode": "fast"}, "sequential"),
        ({"url": "javascript:alert(1)"}, "does not begin with https://"),
        ({"candidates": "a/" * 4000}, "is no path of at most 200 characters"),
        ({"hours": float("nan")}, "hours = nan: give a number from 0"),
        ({"cost_usd": float("inf")}, "cost_usd = inf: give a number from 0"),
        ({"tokens": 10**30}, f"tokens = {10**30}: give a number from 0"),
        ({"tokens": 10**400}, "0000: give a number from 0"),
    ],
)
def test_wrong_field_is_refused(
    submission: Run, changed: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(submission(**changed), capsys)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tokens = " + "9" * 5000, "submission.toml: "),
        ("name = 0x" + "f" * 5000, "name = an integer of thousands of digits is no str"),
        ("about = " + "[" * 100000, "submission.toml: "),
        ("name = 'a'\nname = 'b'", "submission.toml: "),
        ("\x00", "submission.toml: "),
        ("about = {a = 1}", "is no str"),
        ('name = "a"\nauthor = "b"\nlicence = "MIT"\ncandidates = "a\\u0000b"', "is no path of at most 200"),
    ],
)
def test_text_that_is_no_submission_is_refused(
    submission: Run, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = submission()
    (folder / "submission.toml").write_text(text)
    assert said in refused(folder, capsys)


def test_links_size_and_scan_are_refused(
    submission: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = submission()
    (folder / "candidates" / "other.txt").symlink_to(tmp_path)
    assert "is a link" in refused(folder, capsys)
    folder = submission()
    os.mkfifo(folder / "pipe")
    assert "no regular file" in refused(folder, capsys)
    folder = submission()
    with open(folder / "big.bin", "wb") as file:
        file.truncate((20 << 20) + 1)
    assert "more than 20" in refused(folder, capsys)
    folder = submission()
    with open(folder / "candidates" / "silu_and_mul.py", "a") as file:
        file.write("\nimport ctypes\nctypes.CDLL(None)\n")
    said = refused(folder, capsys)
    assert "the static scan rejects it" in said and "are of other files" in said
    (folder / "submission.toml").unlink()
    assert "has no submission.toml" in refused(folder, capsys)


def test_changed_checkout_and_foreign_rows_are_refused(
    submission: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = submission()
    dirty = case_row("silu_and_mul", "a", 1.0)
    dirty.commit = "abc+"
    append(folder / "rows.jsonl", [dirty, case_row("rms_norm", "a", 1.0, provisional="no libraries")])
    said = refused(folder, capsys)
    assert (
        "its commit ends with +" in said
        and "judge a candidate for rms_norm" in said
        and "provisional" in said
    )
    (folder / "rows.jsonl").unlink()
    assert "has no rows" in refused(folder, capsys)


def kernel_rows(folder: Path, speedup: float = 2.0, **case: str) -> Path:
    """Replace the rows of a submission by a case of the judge on its file."""
    (folder / "rows.jsonl").unlink()
    known = {"digest": digest_of(folder / "candidates" / "silu_and_mul.py"), **case}
    append(folder / "rows.jsonl", [case_row("silu_and_mul", "a", speedup, case=known)])
    return folder


def test_kernel_rows_of_another_file_are_refused(submission: Run, capsys: pytest.CaptureFixture[str]) -> None:
    folder = kernel_rows(submission())
    main_status(["submit-check", str(folder), "--json"], 0)
    assert "of another file (digest f00" in refused(kernel_rows(folder, digest="f00"), capsys)
    assert "of another file (without a digest" in refused(kernel_rows(folder, digest=""), capsys)
    ours = case_row("silu_and_mul", "b", 9.0)
    ours.subject.candidate, ours.subject.provider = None, "fastkernels"
    append(kernel_rows(folder) / "rows.jsonl", [ours])
    assert "the rows of silu_and_mul are of no candidate" in refused(folder, capsys)


def test_judge_writes_the_digest_that_is_checked(submission: Run) -> None:
    file = submission() / "candidates" / "silu_and_mul.py"
    options = Options(device="cpu", cage=False, cases=("random",), most=1, timed=False)
    found = judge_ops(["silu_and_mul"], {"silu_and_mul": file}, options)
    assert {r.case.get("digest") for r in found if r.kind == "case"} == {digest_of(file)}


def test_candidates_that_are_blocks_are_taken(submission: Run, capsys: pytest.CaptureFixture[str]) -> None:
    folder = submission()
    (folder / "candidates" / "silu_and_mul.py").rename(folder / "candidates" / "llama.mlp.py")
    (folder / "rows.jsonl").unlink()
    known = {"digest": digest_of(folder / "candidates" / "llama.mlp.py")}
    append(folder / "rows.jsonl", [case_row("llama.mlp", "a", 2.0, case=known)])
    main_status(["submit-check", str(folder)], 0)
    (folder / "candidates" / "llama.mlp.py").rename(folder / "candidates" / "lama.mlp.py")
    assert "'lama', which is no model" in refused(folder, capsys)


def test_own_sources_of_a_candidate_are_scanned(submission: Run, capsys: pytest.CaptureFixture[str]) -> None:
    folder = submission()
    (folder / "candidates" / "_silu_and_mul").mkdir()
    (folder / "candidates" / "_silu_and_mul" / "helper.py").write_text("import ctypes\nctypes.CDLL(None)\n")
    assert "helper.py: the static scan rejects it" in refused(folder, capsys)


def test_board_leaves_refused_submissions_out(
    submission: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that submit-check refuses would rank first here."""
    honest = kernel_rows(submission(name="honest"), 1.1)
    cheat = submission(name="cheat")
    with open(cheat / "candidates" / "silu_and_mul.py", "a") as file:
        file.write("\nimport ctypes\nctypes.CDLL(None)\n")
    kernel_rows(cheat, 5.0)
    other = kernel_rows(submission(name="other"), 4.0, digest="f00")
    twice = kernel_rows(submission(name="honest"), 3.0)
    linked = submission(name="linked")
    (linked / "candidates" / "more.txt").symlink_to(tmp_path)
    site = tmp_path / "site"
    words = ["board", *map(str, (cheat, other, honest, twice, linked)), "--out", str(site), "--json"]
    main_status(words, 0)
    (league,) = json.loads((site / "board.json").read_text())
    assert [s["name"] for s in league["sets"]] == ["honest"]
    warnings = json.loads(capsys.readouterr().out.splitlines()[-1])["warnings"]
    told = ("static scan", "of another file", "is named honest, too", "is a link")
    assert all(any(reason in w for w in warnings) for reason in told) and len(warnings) == 4

    main_status([*words, "--all"], 0)
    (league,) = json.loads((site / "board.json").read_text())
    marked = {s["name"]: bool(s["refused"]) for s in league["sets"]}
    assert marked == {"cheat": True, "other": True, "honest": False}
    assert "Refused: " in (site / "index.html").read_text()

    main_status(["agents-table", str(honest), str(cheat), "--json"], 0)
    out = capsys.readouterr()
    assert {x["name"] for x in json.loads(out.out.splitlines()[-1])["lines"]} == {"honest"}
    assert "static scan" in out.err
    main_status(["board", str(cheat), "--out", str(site)], 2)
    assert "static scan" in capsys.readouterr().err


def test_candidates_of_several_folders_are_sets_of_their_own(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One run judged the same op of two agents: neither replaces the other's cases."""
    rows = [
        case_row("rms_norm", "a", 2.0),
        case_row("rms_norm", "a", 0.5),
        case_row("gelu", "b", None, Status.WRONG),
    ]
    for row, folder in zip(rows, ("codex", "claude", "codex"), strict=True):
        row.subject.candidate = f"sets/{folder}/{row.subject.op}.py"
    judged = run("judged", rows)
    main_status(["agents-table", str(judged), "--json"], 0)
    lines = {line["name"]: line for line in json.loads(capsys.readouterr().out)["lines"]}
    assert {name: (line["cases"], line["speedup"]) for name, line in lines.items()} == {
        "codex": (2, 2.0), "claude": (1, 0.5),
    }  # fmt: skip
    kernels = run("one-folder", rows[:1]) / "rows.jsonl"
    main_status(["agents-table", str(kernels), "--json"], 0)
    assert [line["name"] for line in json.loads(capsys.readouterr().out)["lines"]] == ["one-folder"]
    main_status(["board", str(judged), "--out", str(tmp_path / "site")], 0)
    said = capsys.readouterr().out
    assert "speedup of right cases" in said and "coverage" not in said  # kernels alone have no score
    assert all(word in said for word in ("codex", "claude", "2.000", "50%"))


def test_agents_table_splits_by_level_and_baseline(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        case_row("rms_norm", "a", 2.0, baseline="vllm"), case_row("rms_norm", "b", None, Status.WRONG, baseline="vllm"),
        case_row("rms_norm", "c", 0.5, baseline="inductor"), case_row("rms_norm", "d", 3.0, baseline="reference"),
        case_row("rms_norm", "e", None, Status.SKIPPED),
    ]  # fmt: skip
    main_status(["agents-table", str(run("x", rows)), "--json"], 0)
    lines = {line["baseline"]: line for line in json.loads(capsys.readouterr().out)["lines"]}
    assert set(lines) == {"vendor or hand-written", "compiled", "eager"}
    vendor = lines["vendor or hand-written"]
    assert (vendor["cases"], vendor["right"], vendor["speedup"], vendor["fast_1"]) == (2, 0.5, 2.0, 0.5)
    assert lines["compiled"]["fast_1"] == 0.0 and lines["eager"]["fast_2"] == 1.0


def task_row(op: str, best: int | None, reason: str = "") -> Row:
    return Row(
        run_id="k", command="agent-loop", status=Status.OK if best else Status.FAILED, reason=reason,
        subject=Subject(op=op, provider="codex"), machine=Machine(gpu=CHIP, gpus=1, cpu="cpu", cores=8),
        case={"kind": "task", "level": 1, "agent": "codex", "mode": "independent", "suffix": "a", "best": best},
        metrics={"attempts": 3.0},
    )  # fmt: skip


def test_agents_table_names_tasks_without_a_kernel(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table has the cases of winners alone, so that a lost task must not vanish."""
    won = [task_row("rms_norm", 1), case_row("rms_norm", "a", 2.0, baseline="vllm")]
    lost = task_row("silu_and_mul", None, "no attempt of 3 was right: <wrong>")
    main_status(["agents-table", str(run("both", [*won, lost])), "--json"], 0)
    found = json.loads(capsys.readouterr().out)
    (sentence,) = found["without_kernels"]
    assert [line["cases"] for line in found["lines"]] == [1]
    assert (
        sentence.startswith("codex-a: 1 of 2 tasks brought no kernel in 3 attempts") and "<wrong>" in sentence
    )
    file = (alone := run("alone", [lost])) / "rows.jsonl"  # whose numbers may be any
    file.write_text(re.sub(r'"attempts": ?3.0', '"attempts": 1e999', file.read_text()))
    main_status(["agents-table", str(alone)], 0)
    said = capsys.readouterr().out
    assert "codex-a: 1 of 1 tasks brought no kernel in inf" in said and "speedup" not in said
    main_status(["board", str(tmp_path / "both"), "--out", str(tmp_path / "site"), "--json"], 0)
    pages = "".join(f.read_text() for f in (tmp_path / "site" / "sets").glob("*.html"))
    assert "codex-a: 1 of 2 tasks brought no kernel in 3 attempts" in pages and "<wrong>" not in pages
