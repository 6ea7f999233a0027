"""A speedup without production's libraries: Inductor's code is the least baseline, and the rows are no scores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fk_bench.core.baselines import baselines, production
from fk_bench.core.rows import Row, Status, Subject, append, write_compressed
from fk_bench.core.terminal.flags import ConfigError
from fk_bench.kernels import report
from fk_bench.kernels.judge.correctness.checks import Checks
from fk_bench.kernels.judge.correctness.errors import Errors
from fk_bench.kernels.judge.processes.implementation import Implementation
from fk_bench.kernels.judge.processes.messages import Loaded, Used
from fk_bench.kernels.judge.processes.runner_process import RunnerError
from fk_bench.kernels.judge.rows.options import Options
from fk_bench.kernels.judge.rows.pair import Pair
from fk_bench.serving.diff import compare
from fk_bench.tables.results import Results

from fastkernels.core import dispatch, registry

OPS = [name for name in registry.op_names() if registry.get(name).op is not None]


@pytest.fixture
def have(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """have('flashinfer'): only the modules of these packages are installed."""

    def only(*packages: str) -> None:
        monkeypatch.setattr(dispatch, "installed", lambda module: module.partition(".")[0] in packages)

    return only


def pair(op: str, against: str = "production", device: str = "cuda") -> Pair:
    """The two sides of an op after its baselines were looked up on a machine with a GPU, without their processes."""
    made = Pair(cast(Any, None), Options(device=device, against=against), registry.get(op), {})
    state = Implementation()
    state.device, state.spec = "cuda", registry.get(op)
    state._find_baselines(against)
    found = [b for b in state.baselines.values() if b is not None]
    made.loaded["baseline"] = Loaded(
        import_s=0.0, baselines=list(state.baselines), compilers=[b.name for b in found if b.kind == "compiler"],
        production=state.production, missing={n: list(p) for n, p in state.missing.items()},
    )  # fmt: skip
    return made


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_inductor_before_the_reference(op: str) -> None:
    kinds = [b.kind for b in baselines(op, "production", "cuda")]
    assert "compiler" in kinds and kinds[-1] == "reference" and kinds.count("reference") == 1


@pytest.mark.parametrize("tags", [("captured",), ("held-out",), ("odd",), ("model",)])
def test_inductor_is_a_baseline_of_every_case(have: Callable[..., None], tags: tuple[str, ...]) -> None:
    have()
    judged = pair("rms_norm")
    names, last = judged._baselines(cast(Any, SimpleNamespace(case=SimpleNamespace(tags=tags))))
    assert "inductor" in names and last == ([] if "model" in tags else ["inductor"])
    judged.uncompiled.add("inductor")
    assert "inductor" not in judged._baselines(cast(Any, SimpleNamespace(case=SimpleNamespace(tags=tags))))[0]


class Timings:
    """A side whose baselines take these seconds; those with a text do not load, those with None refuse the case."""

    def __init__(self, seconds: dict[str, float | str | None]):
        self.seconds, self.used = seconds, ""

    def ask(self, do: str, baseline: str = "", **_: Any) -> Any:
        if do == "use":
            self.used = baseline
            if isinstance(why := self.seconds[baseline], str):
                raise RunnerError(Status.COMPILE_ERROR, why, False, "baseline")
            return Used(unsupported="another case" if why is None else None)
        return SimpleNamespace(refused={}, seconds=self.seconds[self.used])


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"vllm": 2.0, "flashinfer": 1.0, "inductor": 0.5, "reference": 0.1}, "flashinfer"),
        ({"vllm": None, "inductor": 0.5, "reference": 3.0}, "inductor"),
        ({"vllm": "no libcudart", "inductor": 0.5, "reference": 0.1}, "reference"),  # the faster of both
        ({"inductor": "InductorError", "reference": 3.0}, "reference"),
    ],
)
def test_inductor_serves_what_production_does_not(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float | str | None], chosen: str
) -> None:
    monkeypatch.setattr(Checks, "_errors", lambda *_: Errors())
    checks = Checks(registry.get("rms_norm"), registry.get("rms_norm").cases[0], "op")
    slots = SimpleNamespace(fill=lambda _: None, count=1)
    arena = SimpleNamespace(publish=lambda: None, poison=lambda: None, output_views=lambda _: [])
    side = cast(Any, Timings(seconds))
    assert checks.choose(side, cast(Any, arena), cast(Any, slots), list(seconds), ["inductor"]).name == chosen
    assert list(checks.unmade) == [n for n, s in seconds.items() if isinstance(s, str)]


def test_missing_libraries_make_rows_provisional(have: Callable[..., None]) -> None:
    have()
    why = pair("rms_norm").provisional
    assert "vllm is not installed" in why and "flashinfer is not installed" in why
    assert "pip install vllm" in why and "flashinfer-python" in why and "--python baseline=PATH" in why
    have("flashinfer")
    judged = pair("rms_norm")
    assert judged.provisional == ""
    judged.unmade["flashinfer"] = "ImportError: libcudart.so.13"  # it is installed, and does not load
    assert "flashinfer does not load (ImportError: libcudart.so.13)" in judged.provisional
    assert "vllm is not installed" in judged.provisional
    have()
    assert pair("linear").provisional == ""  # the hosts call cuBLAS, which torch has
    assert pair("softplus").provisional == ""  # the hosts have no kernel for it
    assert pair("rms_norm", device="cpu").provisional == ""
    assert "--against reference" in pair("rms_norm", "reference").provisional


def rows(provisional: str) -> list[Row]:
    shared: dict[str, Any] = {"run_id": "r", "command": "kernels", "subject": Subject(op="rms_norm")}
    case = {"kind": "case", "name": "a", "source": "random", "dtype": "bfloat16"}
    metrics, ci95 = {"speedup": 6.8}, {"speedup": (6.5, 7.1)}
    first = Row(**shared, case=case, metrics=metrics, ci95=ci95, provisional=provisional)
    return [first, Row(**shared, case={"kind": "op"}, provisional=provisional)]


def test_provisional_speedup_is_marked_and_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "vllm is not installed. Install them (pip install vllm)"
    found = rows(why)
    report.show(found)
    shown = capsys.readouterr().out
    assert shown.startswith(f"PROVISIONAL: the speedups of 1 cases are no scores. {why}")
    assert "6.800 (6.5" in shown and ") provisional" in shown and "PROVISIONAL" in report.line(found[0])
    assert f"PROVISIONAL: the speedups of 1 cases are no scores. {why}" in report.html(found, [])
    for name, why_here in (("a", ""), ("b", why)):
        (tmp_path / name).mkdir()
        append(tmp_path / name / "rows.jsonl", rows(why_here))
    with pytest.raises(ConfigError, match="b is provisional, so its speedups cannot be compared"):
        compare(tmp_path / "a", tmp_path / "b")
    assert compare(tmp_path / "a", tmp_path / "a")["ok"]
    path = tmp_path / "kernels.jsonl.xz"
    write_compressed(path, "".join(r.to_json() + "\n" for r in found))
    with pytest.raises(ConfigError, match="is provisional and has no scores for a table"):
        Results(tmp_path).read(path)


def test_missing_mean_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    timed, other = rows("")[0], {"kind": "case", "source": "random"}
    untimed = [
        timed.model_copy(update={"metrics": {}, "case": other | {"name": str(i), "untimed": why}})
        for i, why in enumerate(["the baseline's times scatter"] * 2 + ["without output", "checked only"])
    ]
    report.show([timed, *untimed])
    assert (
        "all: no mean, because 1 of the 3 cases that can be timed have a time, and 80% must:"
        " 2 the baseline's times scatter"
    ) in capsys.readouterr().out


def test_packages_of_production_are_named() -> None:
    for op in OPS:
        for names in production(baselines(op, "production", "cuda")).missing.values():
            assert names and not any("." in name or "_" in name for name in names)
