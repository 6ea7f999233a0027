"""Wrong kernels for which no clock is needed, against the judge's extreme calls, in one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fk_bench.kernels.cheats import Cheat, catalogue
from fk_bench.kernels.judge.correctness import extremes
from fk_bench.kernels.judge.correctness.cases import maker, trials
from fk_bench.kernels.judge.correctness.errors import compare, expect
from fk_bench.kernels.judge.memory import layout
from fk_bench.kernels.judge.rows.case import _drawn

from fastkernels.core import candidate, registry
from fastkernels.core.spec import Case, OpSpec

EXTREME = [c for c in catalogue() if c.device == "cpu" and c.sources == ("extreme",)]


def problem(
    spec: OpSpec, case: Case, args: list[Any], function: Callable[..., Any], nonfinite: bool = False
) -> str:
    """The judge's objection to one call; an exception is one, too."""
    want = expect(spec, case, layout.mapped(args, torch.clone), "op")
    honest = compare(spec, case, want.native, want, nonfinite=nonfinite)
    assert not honest.problem, f"{case.name}: the reference itself: {honest.problem}"
    try:
        result = function(*args)
    except Exception as error:
        return repr(error)
    got = [v for v in (result if isinstance(result, (tuple, list)) else (result,)) if v is not None]
    got += [args[i] for i in want.written]
    return compare(spec, case, got, want, honest.rms, baseline=honest, nonfinite=nonfinite).problem


def wrong(cheat: Cheat, honest: bool) -> dict[str, str]:
    """{extreme case: objection} of a cheat's function, or of its twin's."""
    spec = registry.get(cheat.op)
    function = candidate.load(cheat.op, str(cheat.file(honest))).function
    found = {}
    for trial in trials(spec, ("extreme",), "cpu"):
        for seed in (1, 2):
            args = trial.make("cpu", torch.Generator().manual_seed(seed))
            if trial.edit is not None:
                trial.edit(args)
            assert function is not None
            text = problem(spec, trial.case, args, function, trial.is_nonfinite)
            found[trial.case.name] = found.get(trial.case.name) or text
    return {name: text for name, text in found.items() if text}


@pytest.mark.parametrize("cheat", EXTREME, ids=lambda c: c.name)
def test_extreme_calls_show_what_is_wrong(cheat: Cheat) -> None:
    if candidate.load(cheat.op, str(cheat.file())).function is None:
        pytest.skip("a class, which the judge builds")
    assert wrong(cheat, honest=True) == {}
    assert wrong(cheat, honest=False)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("gate_nan", {"nan", "huge_x"}),
        ("residual_nan", {"nan_residual"}),
        ("ignores_minus_infinity", {"minus_inf"}),
        ("passes_large_values", {"huge_x"}),
        ("ignores_table_stride", {"rows_apart_integers"}),
    ],
)
def test_kind_of_its_own_shows_the_fault(name: str, kinds: set[str]) -> None:
    (cheat,) = [c for c in EXTREME if c.name == name]
    assert {case.partition(":")[2] for case in wrong(cheat, honest=False)} >= kinds


def test_heavy_tails_show_sums_that_leave_values_out() -> None:
    """For normal values the error of such a sum is less than that of bfloat16."""
    spec, kind = registry.get("rms_norm"), extremes.HEAVY
    (cheat,) = [c for c in catalogue() if c.name == "sampled_statistics"]
    (case,) = [c for c in spec.cases if c.name == cheat.case]
    edits = {k.name: k.edit for k in extremes.kinds(spec)}
    found = {}
    for honest in (False, True):
        function = candidate.load(cheat.op, str(cheat.file(honest))).function
        for edit in (None, edits[kind]):
            args = maker(spec, case)("cpu", torch.Generator().manual_seed(1))
            if edit is not None:
                edit(args)
            assert function is not None
            found[honest, edit is not None] = bool(problem(spec, case, args, function))
    assert found == {(False, False): False, (False, True): True, (True, False): False, (True, True): False}


def test_heavy_tails_are_among_several_drawn_kinds() -> None:
    names = sorted(k.name for k in extremes.kinds(registry.get("rms_norm")) if k.values)
    for most in (2, 4, 100):
        drawn = _drawn(names, most)
        assert extremes.HEAVY in drawn and len(drawn) == len({*drawn}) == min(most, len(names))
    assert len({_drawn(names, 1)[0] for _ in range(200)}) > 5
    assert _drawn(["nan"], 4) == ["nan"] and _drawn([], 4) == []


@pytest.mark.parametrize("shape", [(1, 64), (3, 10), (20, 64), (2, 3, 4, 8), (7,), (1,), (5, 1), ()])
def test_places_are_in_each_part_of_a_row(shape: tuple[int, ...]) -> None:
    drawn = random.Random(1)
    for _ in range(10):
        t = torch.randn(shape, generator=torch.Generator().manual_seed(drawn.getrandbits(32)))
        found = extremes.places(t)
        assert found == extremes.places(t.clone()) and len({*found}) == len(found)
        rows, columns = (t.numel() // shape[-1], shape[-1]) if shape else (1, 1)
        assert len(found) == min(columns, extremes.PARTS)
        assert len({at[:-1] for at in found}) <= max(1, rows // 2)
        if columns >= extremes.PARTS:
            ends = [part * columns // extremes.PARTS for part in range(extremes.PARTS + 1)]
            found_in = sorted(at[-1] for at in found)
            assert all(a <= c < b for a, b, c in zip(ends[:-1], ends[1:], found_in, strict=True))
        if rows > 2 * extremes.PARTS and len(shape) == 2:
            assert {0, rows - 1} <= {at[0] for at in found}
        if len(shape) == 2 and columns >= extremes.PARTS:
            t[0, 0], t[-1, -1] = -1.0, 1.0
            extremes.put_signed(t, 1000.0)
            halves = [t[:, : columns // 2], t[:, columns // 2 :]]
            assert all((half == 1000).any() and (half == -1000).any() for half in halves)
