"""Task files: they run alone, the judge reads only their cases, and contradictions are errors."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from fk_bench.kernels import task as tasks
from fk_bench.kernels.judge.correctness.cases import SOURCES, trials
from fk_bench.kernels.task import TaskError
from fk_bench.scaffold import task_file
from support.commands import fk_bench_here, last_json

from fastkernels.core import registry
from fastkernels.core.case import Case

NORM = Case("norm_decode_4", {"tokens": 4, "hidden": 96, "residual": True, "eps": 1e-6}, "float32", 8.0)
LAST = Case("norm_decode_1", {"tokens": 1, "hidden": 96, "eps": 1e-6}, "bfloat16", 1.0)
RIGHT = "y = x if residual is None else residual.add_(x)\n    "
RIGHT += (
    "return (y.float() * torch.rsqrt(y.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight"
)


def candidate(folder: Path, body: str) -> Path:
    file = folder / "rms_norm.py"
    head = (
        "def rms_norm(x, weight, eps, residual=None, var_hidden_size=None, cast_x_before_out_mul=True):\n    "
    )
    file.write_text(f"import torch\n\n\n{head}{body}\n")
    return file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "task.py"
    path.write_text(task_file.text("rms_norm", "Tiny-1B", [NORM, LAST], str(path)))
    return path


def alone(file: Path, *args: str) -> int:
    """The exit status of `python FILE ARGS`."""
    return runpy.run_path(str(file))["task_main"](*args)


def test_task_checks_the_reference_and_a_candidate(file: Path, tmp_path: Path, capsys: Any) -> None:
    assert "fastkernels" not in file.read_text().replace("fastkernels.core", "")
    assert alone(file) == 0
    assert alone(file, str(candidate(tmp_path, RIGHT))) == 0
    capsys.readouterr()
    assert alone(file, str(candidate(tmp_path, RIGHT.replace("+ eps", "+ 0.1")))) == 1
    assert "norm_decode_4" in (said := capsys.readouterr().out) and "WRONG: result 0 differs" in said
    forgets = RIGHT.replace("residual.add_(x)", "residual + x")
    assert alone(file, str(candidate(tmp_path, forgets))) == 1
    assert "result 1 differs" in capsys.readouterr().out


def test_task_has_the_sizes_of_its_model(file: Path) -> None:
    stated = runpy.run_path(str(file))["TASK"]
    assert [c["arguments"]["x"]["shape"] for c in stated["cases"]] == [(4, 96), (1, 96)]
    assert (
        stated["cases"][0]["arguments"]["eps"] == 1e-6 and stated["cases"][1]["arguments"]["residual"] is None
    )


WITHOUT = {
    "fused_experts_fp8",
    "fused_experts_swigluoai",
    "linear_fp8",
    "mla_decode",
    "mla_prefill",
    "mla_sparse",
    "mla_rope_store",
    "rope_store_kvcache",
}  # their references use other modules of ours


@pytest.mark.parametrize("op", registry.op_names())
def test_task_of_every_op_runs_alone(op: str, tmp_path: Path) -> None:
    spec = registry.get(op)
    small = [c for c in spec.cases if "odd" in c.tags and c.dtype in ("float32", "bfloat16", "float16")]
    case, path = (small or spec.cases)[0], tmp_path / f"{op}_task.py"
    try:
        path.write_text(task_file.text(op, "Tiny-1B", [case], str(path)))
    except task_file.NoTask:
        assert spec.op is None or not spec.arguments or op in WITHOUT
        return
    assert alone(path) == 0 and op not in WITHOUT
    read = tasks.read(path)
    assert (read.op, read.model, dict(read.cases[0].dims)) == (op, "Tiny-1B", dict(case.dims))


def test_reading_runs_no_code(file: Path) -> None:
    file.write_text("raise SystemExit('run')\n" + file.read_text())
    found = tasks.read(file)
    assert found.op == "rms_norm" and [c.name for c in found.cases] == ["norm_decode_4", "norm_decode_1"]
    assert [c.weight for c in found.cases] == [8.0, 1.0]


def test_judge_takes_exactly_the_cases_and_its_own_values(file: Path) -> None:
    spec = registry.get("rms_norm")
    found = trials(spec, SOURCES, "cpu", task=tasks.read(file).cases)
    assert [(t.source, t.case.name, t.edit) for t in found] == [("task", c.name, None) for c in (NORM, LAST)]
    args = found[0].make("cpu", torch.Generator().manual_seed(1))
    own = spec.inputs(NORM, "cpu", torch.Generator().manual_seed(1))
    assert all(torch.equal(a, b) for a, b in zip(args, own, strict=True) if isinstance(a, torch.Tensor))


CONTRADICTIONS = {
    "op": ('"op": "rms_norm"', '"op": "rms_norn"', "Did you mean 'rms_norm'"),
    "shape": (
        '"shape": (4, 96)',
        '"shape": (4, 64)',
        "x is ('float32', (4, 64)), but rms_norm with these dims takes",
    ),
    "dtype": ('"dtype": "float32", "weight"', '"dtype": "int8", "weight"', "not judged in dtype 'int8'"),
    "axis": ('"tokens": 4', '"rows": 4', "no axis 'rows'"),
    "missing": ('"hidden": 96, "residual"', '"residual"', "dims lack hidden"),
    "scalar": ('"eps": 1e-06,\n', '"eps": 1.0,\n', "eps is 1.0"),
    "argument": ('"residual": None', '"rest": None', "no argument 'rest'"),
    "weight": ('"weight": 8.0', '"weight": -1', "weight -1"),
    "key": ('"model":', '"reference":', "must be a dict with the keys"),
    "code": ('"op": "rms_norm"', '"op": print("x")', "not a literal"),
    "twice": ("norm_decode_1", "norm_decode_4", "two cases have the name 'norm_decode_4'"),
    "no_task": ("TASK = {", "WORK = {", "is no task file"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradiction_is_an_error(case: str, file: Path) -> None:
    old, new, message = CONTRADICTIONS[case]
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    with pytest.raises((TaskError, registry.UnknownName)) as error:
        tasks.read(file)
    assert message in str(error.value)


def test_task_excludes_other_choices_of_cases(file: Path) -> None:
    said = fk_bench_here("kernels", "rms_norm", "--task", str(file))
    assert said.returncode == 2 and "--task states the op and its cases" in said.stderr


@pytest.mark.slow
def test_judge_ignores_the_code_of_a_task(file: Path, tmp_path: Path) -> None:
    """A task whose own reference and tolerance accept everything does not make a wrong candidate right."""
    text = file.read_text()
    for old, new in (
        ('"float32": (1e-05, 1e-05)', '"float32": (1e9, 1e9)'),
        ("def reference(", "def reference(x, *more, **named):\n    return x, None\n\n\ndef unused("),
    ):
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)
    judge = ("--no-time", "--device", "cpu", "--json")
    good = fk_bench_here(
        "kernels", "--task", str(file), "--candidate", str(candidate(tmp_path, RIGHT)), *judge, "--out",
        str(tmp_path / "good"),
    )  # fmt: skip
    found = last_json(good)
    assert found["ok"] and found["cases"] == 2 and found["task"] == str(file), good.stderr
    rows = [json.loads(line) for line in (tmp_path / "good/rows.jsonl").read_text().splitlines()]
    assert {r["case"]["source"] for r in rows if r["case"]["kind"] == "case"} == {"task"}
    wrong = candidate(tmp_path, "return torch.zeros_like(x)")
    bad = fk_bench_here(
        "kernels", "--task", str(file), "--candidate", str(wrong), *judge, "--out", str(tmp_path / "bad")
    )
    assert bad.returncode == 1 and last_json(bad)["failed"] == 2
