"""The judge against known cheats: each is caught without the static scan, and its honest twin passes with it."""

from __future__ import annotations

import dataclasses
import inspect
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from fk_bench.capture.replay import captured_cases
from fk_bench.core.checkout import checkout_path
from fk_bench.core.rows import Row, Status, read
from fk_bench.kernels import cheats
from fk_bench.kernels.cheats import Cheat, _gain, catalogue, run_cheats, try_cheat
from fk_bench.kernels.judge import Judge, Options
from fk_bench.kernels.judge.scan.scan import REJECT, scan
from support.kernels.op_cases import call, make_args, mismatch, oracle

from fastkernels.core import candidate, registry
from fastkernels.core.registry import UnknownName

FOLDER = checkout_path("tests/cheats")
CHEATS = catalogue()
HERE = [c for c in CHEATS if c.device == "cpu"]
OPTIONS = Options(device="cpu", rounds=4, seconds=0.5, timeout=60)
# One or two of each kind, in the catalogue's order; the other cheats are judged by `make test-slow`.
FAST = {
    "thread_later", "patched_clock", "fingerprint_cache", "returns_mean", "fp8_inside", "wrong_dtype", "call_counting",
    "forged_output", "reads_memory", "mutates_input", "forked_child", "hogs_memory", "compile_only", "answers_ok",
    "skip_one", "claims_skipped", "ranks_equal_inputs", "turned_output",
}  # fmt: skip


def ids(cheat: Cheat) -> str:
    return cheat.name


@pytest.mark.parametrize(
    ("speedup", "least", "p80", "baseline", "said"),
    [
        (1.1, 1.0, 9.0, 9.0, ""),
        (2.0, 1.9, 9.0, 9.0, "it gains: 2.00"),
        (2.0, 0.9, 9.0, 9.0, "it may gain"),
        (1.1, 1.0, 5.0, 9.0, "it gains: its"),
        (1.1, 1.0, 5.0, 5.0, ""),  # as fast as the baseline, with a slower twin
        (1.1, 1.0, 5.0, 6.5, "it gains: its"),
    ],
)
def test_gain_needs_no_certainty(
    speedup: float, least: float, p80: float, baseline: float, said: str
) -> None:
    """Times that scatter prove nothing, and the baseline's do not hide a gain."""

    def row(speedup: float, ends: list[float], times: list[float]) -> Any:
        metrics = {
            "speedup": speedup,
            "time_us_p20": times[0],
            "time_us_p80": times[1],
            "baseline_us_p20": baseline,
        }
        return SimpleNamespace(case={"name": "a"}, metrics=metrics, ci95={"speedup": ends})

    twin, cheat = row(1.0, [0.9, 1.1], [9.0, 11.0]), row(speedup, [least, 3.0], [4.0, p80])
    assert _gain([cheat], [twin]).startswith(said) and bool(_gain([cheat], [twin])) is bool(said)


@pytest.fixture(scope="session")
def judge() -> Iterator[Judge]:
    """One for all tests, so that its fork server starts once."""
    with Judge({}, OPTIONS) as found:
        yield found


@pytest.fixture(scope="session")
def twins() -> dict[tuple[Any, ...], list[Row]]:
    return {}


@pytest.mark.parametrize(
    "cheat", [pytest.param(c, marks=[] if c.name in FAST else [pytest.mark.slow]) for c in HERE], ids=ids
)
def test_cheat_is_caught_and_twin_passes(
    judge: Judge, cheat: Cheat, twins: dict[tuple[Any, ...], list[Row]]
) -> None:
    verdict = try_cheat(judge, cheat, OPTIONS, twins=twins)
    assert not verdict.twin_problem, verdict.twin_problem
    assert not verdict.problem, f"{verdict.problem} (the judge said: {verdict.outcome})"
    assert all(line.isprintable() for line in verdict.outcome.split("\n")), "a reason has control characters"


@pytest.mark.parametrize("name", ["one_call", "one_call_memory"])
def test_calls_merged_into_one_are_wrong(judge: Judge, name: str) -> None:
    """The inputs of one call are there at a time, and its outputs are looked at when it reports its end."""
    cheat = next(c for c in CHEATS if c.name == name)
    judge.candidates = {cheat.op: cheat.file()}
    judge.options = dataclasses.replace(OPTIONS, cases=cheat.sources, names=(str(cheat.case),), scan=False)
    judge.op(cheat.op)
    (row,) = [r for r in judge.rows if r.kind == "case"][-1:]
    assert row.status is Status.WRONG and "timed call" in row.reason, row.reason


@pytest.mark.gpu
@pytest.mark.parametrize("cheat", [c for c in CHEATS if c.device == "cuda"], ids=ids)
def test_cheat_is_caught_on_gpu(cheat: Cheat) -> None:
    options = dataclasses.replace(OPTIONS, device="cuda", rounds=10, seconds=2.0)
    with Judge({}, options) as found:
        verdict = try_cheat(found, cheat, options)
    assert not verdict.twin_problem and not verdict.problem, (verdict.problem, verdict.twin_problem)


@pytest.mark.parametrize("cheat", CHEATS, ids=ids)
def test_scan_of_cheat_and_twin(cheat: Cheat) -> None:
    patterns = {f.pattern for f in scan(cheat.file(), cheat.op) if f.severity == REJECT}
    assert (cheat.scan in patterns) if cheat.scan else not patterns, patterns
    assert not [str(f) for f in scan(cheat.file(honest=True), cheat.op) if f.severity == REJECT]


def test_scan_rejects_before_anything_runs(judge: Judge) -> None:
    judge.candidates = {"silu_and_mul": next(c for c in HERE if c.name == "early_exit").file()}
    judge.options = OPTIONS
    judge.op("silu_and_mul")
    row = judge.rows[-1]
    assert row.status is Status.REJECTED
    assert "early_exit.py: line 7: os._exit starts, ends or controls processes" in row.reason


@pytest.mark.parametrize("cheat", [c for c in HERE if not c.ranks], ids=ids)
def test_honest_twin_is_correct(cheat: Cheat) -> None:
    """Against float64 on a small case, so that the twin is not a cheat itself."""
    spec = registry.get(cheat.op)
    found = candidate.load(cheat.op, str(cheat.file(honest=True)))
    function = found.function
    if function is None:
        module = next(iter(found.classes.values()))
        if any(p.default is p.empty for p in list(inspect.signature(module).parameters.values())):
            pytest.skip("the judge builds its class from a case; test_cheat_is_caught_and_twin_passes does")
        function = module()
    named = {c.name: c for c in spec.cases}
    case = named.get(str(cheat.case)) or named[_small(cheat.op)]
    args = make_args(spec, case)
    want = oracle(spec, args)
    with torch.no_grad():
        assert (problem := mismatch(spec, case, call(spec.op, function, args), want)) is None, problem


def test_table_of_captured_routing_is_of_no_use() -> None:
    """It has the calls that ship, and none that the judge makes of them."""
    cheat = next(c for c in CHEATS if c.name == "captured_table")
    table = candidate.load(cheat.op, str(cheat.file())).module
    cases = [c for c in captured_cases(cheat.op) if c.case.name.startswith("small-moe-trained-e8k2/4.")]
    for case, known in zip(cases, table.KNOWN, strict=True):
        shipped = case.recorded_args("cpu", torch.Generator().manual_seed(0))
        assert torch.equal(shipped[0], known) and tuple(shipped[1:4]) == table.SIZES
        for seed in range(20):
            made = case.make_args("cpu", torch.Generator().manual_seed(seed))
            assert made[1:] == shipped[1:] and not any(torch.equal(made[0], ids) for ids in table.KNOWN)


def _small(op: str) -> str:
    return next(c.name for c in registry.get(op).cases if "odd" in c.tags and c.name != "one")


def test_command_counts_cheats(tmp_path: Path) -> None:
    folder = tmp_path / "cheats"
    (folder / "honest").mkdir(parents=True)
    few = ("returns_zeros", "no_op")
    for cheat in (c for c in HERE if c.name in few):
        for honest in (False, True):
            shutil.copy(cheat.file(honest), cheat.file(honest, folder))
    lines = [x for x in (FOLDER / "catalogue.json").read_text().splitlines() if '"name"' in x]
    mine = [x.rstrip(",") for x in lines if any(f'"{n}"' in x for n in (*few, "graph_only"))]
    (folder / "catalogue.json").write_text("[" + ",".join(mine) + "]")
    # An honest kernel where a cheat should be
    shutil.copy(folder / "honest" / "no_op.py", folder / "no_op.py")
    result = run_cheats(OPTIONS, tmp_path / "rows.jsonl", quiet=True, folder=folder)
    assert 0 < result.pop("seconds") < 600
    assert result == {"ok": False, "cheats": 2, "caught": 1, "twins": 2, "passed": 2, "not_run": 1}
    rows, warnings = read(tmp_path / "rows.jsonl")
    assert not warnings and [(r.case["twin"], r.status) for r in rows] == [
        (False, Status.OK), (True, Status.OK), (False, Status.FAILED), (True, Status.OK),
    ]  # fmt: skip
    assert rows[2].reason == "it was accepted as correct"
    none = run_cheats(OPTIONS, tmp_path / "none.jsonl", quiet=True, folder=folder, names=("graph_only",))
    assert (none["ok"], none["cheats"], none["not_run"]) == (False, 0, 1)
    with pytest.raises(UnknownName, match=r"unknown cheat 'nop'.*no_op"):
        run_cheats(OPTIONS, tmp_path / "none.jsonl", folder=folder, names=("nop",))


@pytest.mark.parametrize(("took", "seconds"), [(0.5, 10.0), (20.0, 60.0), (200.0, 300.0)])
def test_busy_machine_gives_cheats_and_twins_more_time(
    monkeypatch: pytest.MonkeyPatch, took: float, seconds: float
) -> None:
    """A twin has the time of any candidate, and a cheat three times its twin's."""
    given = []

    def rows(judge: Any, cheat: Cheat, file: Path, options: Options) -> list[Any]:
        given.append(options.case_budget)
        status = Status.OK if file.parent.name == "honest" else Status.WRONG
        return [
            SimpleNamespace(status=status, reason="", metrics={"wall_s": took}, case={"name": "a"}, ci95={})
        ]

    monkeypatch.setattr(cheats, "_rows", rows)
    verdict = try_cheat(cast(Any, None), next(c for c in HERE if c.name == "no_op"), OPTIONS)
    assert not verdict.problem and not verdict.twin_problem
    assert given == [OPTIONS.case_budget, seconds]


def test_every_file_is_in_the_catalogue() -> None:
    for honest in (False, True):
        folder = FOLDER / "honest" if honest else FOLDER
        assert {p.stem for p in folder.glob("*.py")} == {c.name for c in CHEATS}
    assert len(CHEATS) == len({c.name for c in CHEATS}) >= 26
    assert {c.name for c in HERE} > FAST
