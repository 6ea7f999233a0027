"""A run on a CPU: patched lanes run the host's own kernels, and the headline tells what was checked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fk_bench.core import machine
from fk_bench.core.rows import Machine, Row, Status, Subject
from fk_bench.serving import summary
from fk_bench.serving.config import Level
from fk_bench.serving.lanes import Lane, environment
from fk_bench.serving.report import verdict
from fk_bench.serving.summary import Cell, LaneResult

OWN = "rms_norm:vllm,silu_and_mul:vllm"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def put(count: int) -> None:
        found = machine.machine().model_copy(update={"gpus": count})
        monkeypatch.setattr(machine, "machine", lambda: found)

    return put


@pytest.mark.parametrize(
    ("name", "count", "env", "provider", "variable"),
    [
        ("vllm+fk", 0, {}, "vllm", OWN),
        ("sglang+fk", 0, {}, "sglang", OWN.replace("vllm", "sglang")),
        ("vllm+fk", 1, {}, "fastkernels", ""),
        ("vllm", 0, {}, None, ""),
        ("vllm+fk", 0, {"FASTKERNELS_OPS": "rms_norm"}, "fastkernels", ""),
        ("vllm+fk", 0, {"FASTKERNELS_PROVIDER": "rms_norm:reference"}, "fastkernels", "rms_norm:reference"),
    ],
)
def test_patched_lane_runs_the_hosts_kernels_on_a_cpu(
    name: str, count: int, env: dict[str, str], provider: str | None, variable: str,
    gpus: Callable[[int], None], tmp_path: Path,
) -> None:  # fmt: skip
    gpus(count)
    host, _, suffix = name.partition("+")
    lane = Lane(name, host, bool(suffix), env=env)
    assert lane.provider == provider
    assert environment(lane, "model", tmp_path).get("FASTKERNELS_PROVIDER", "") == variable


def result(name: str, count: int = 0, base: str | None = "vllm", **case: Any) -> LaneResult:
    made = Machine(gpu="H200" if count else None, gpus=count, cpu="c", cores=2)

    def row(**more: Any) -> Row:
        subject = Subject(model="m", lane=name, host=name.partition("+")[0])
        fields = {
            "run_id": "r",
            "commit": "",
            "command": "serve-compare",
            "machine": made,
            "subject": subject,
        }
        return Row(**{**fields, "status": Status.OK, **more})  # type: ignore[arg-type]

    calls = float(sum(case.get("patched_ops", {}).values()))
    lane = row(case={"kind": "lane", **case}, metrics={"patched_calls": calls, "patched_modules": calls})
    agreement = row(case={"kind": "agreement"}, metrics={"token_agreement": 1.0}, baseline=base)
    return LaneResult(name, lane, agreement)


PATCHED = {"patched_ops": {"rms_norm": 30, "silu_and_mul": 12}}
OWN_KERNELS = {"patched_providers": {"rms_norm": "vllm", "silu_and_mul": "vllm"}}


def test_headline_on_a_cpu_states_what_was_checked() -> None:
    dead = result("sglang")
    dead.problems = [dead.row.model_copy(update={"status": Status.DIED, "reason": "exit 3\nmore"})]  # type: ignore
    lines = summary.checked([result("vllm"), result("vllm+fk", **PATCHED, **OWN_KERNELS), dead])
    assert lines == [
        "vllm: served every request",
        "vllm+fk: served every request; swap proved by 42 calls of rms_norm, silu_and_mul (provider vllm);"
        " token agreement with vllm 1.000",
        "sglang: died: exit 3",
    ]
    (line,) = summary.checked([result("vllm+fk", **PATCHED)])
    assert "(our own CPU code)" in line
    (line,) = summary.checked([result("fastkernels", patched_ops={"linear": 1234567})])
    assert "; ran 1,234,567 calls of linear (our own CPU code);" in line
    assert not any(word in line for line in lines for word in ("tok/s", "faster", "speedup"))


def test_agreement_is_in_the_verdict_or_the_headline() -> None:
    results = [result("vllm"), result("vllm+fk", **PATCHED, **OWN_KERNELS)]
    bases = {"vllm": "vllm", "vllm+fk": "vllm"}
    assert "token agreement of vllm+fk with vllm: 1.000" in verdict.lines(results, bases, [])
    assert not any("agreement" in line for line in verdict.lines(results, bases, [], agreement=False))


def test_headline_on_a_gpu_is_empty() -> None:
    assert summary.checked([result("vllm", count=1)]) == summary.checked([]) == []


def test_host_kernels_are_never_a_speedup() -> None:
    level = Level("concurrency", 1.0)

    def found(**case: Any) -> verdict.RunVerdict:
        results = [result("vllm"), result("vllm+fk", **PATCHED, **case)]
        for one, speed in zip(results, (1.0, 2.0), strict=True):
            rounds = {r: {"output_tokens_per_s": speed + r / 10} for r in range(2)}
            one.cells = [Cell(one.lane, level, rounds, dict(rounds[0]))]
        (only,) = verdict.verdicts(results, {"vllm": "vllm", "vllm+fk": "vllm"})
        return only

    assert "1.952x as fast" in found().text
    assert found(**OWN_KERNELS).headline is None and "as fast" not in found(**OWN_KERNELS).text
