"""Providers, candidates, counters and call cost of a functional op."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch

from fastkernels.core.counters import UnsupportedCase
from fastkernels.core.dispatch import (
    OPS,
    ForOthers,
    Op,
    Provider,
    begin_direct_calls,
    counters,
    define,
    end_direct_calls,
    installed,
)


def _small_only(x: torch.Tensor) -> str | None:
    if x.dim() == 0:
        return ForOthers("it is for vectors")
    return None if x.numel() < 4 else f"{x.numel()} elements are too many"


DOUBLE = define(
    "test_double(Tensor x) -> Tensor",
    fake=lambda x: torch.empty_like(x),
    providers=(
        Provider("gpu_only", lambda x: 0 * x),
        Provider("absent", lambda x: 0 * x, devices=("cpu",), module="no_such_package.part"),
        Provider("small", lambda x: x + x, devices=("cpu",), supports=_small_only),
        Provider("reference", lambda x: 2 * x, devices=("cuda", "cpu")),
    ),
)


def _total(x: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
    return x.clone() if total is None else total.add_(x).clone()


TOTAL = define(
    "test_total(Tensor x, Tensor(a!)? total=None) -> Tensor",
    fake=lambda x, total=None: torch.empty_like(x),
    providers=(Provider("reference", _total, devices=("cuda", "cpu")),),
)


@pytest.fixture(autouse=True)
def op(monkeypatch: pytest.MonkeyPatch) -> Iterator[Op]:
    for variable in ("FASTKERNELS_PROVIDER", "FASTKERNELS_STRICT", "TRITON_INTERPRET"):
        monkeypatch.delenv(variable, raising=False)
    DOUBLE.reset()
    yield DOUBLE
    DOUBLE.set_candidate(None)
    DOUBLE.reset()


def test_compiled_code_does_not_change_an_argument_of_none() -> None:
    def run(x: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
        return TOTAL(x, total) + 1

    x, total, nodes = torch.ones(3), torch.full((3,), 4.0), list[str]()

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        nodes.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(run, backend=backend)
    assert torch.equal(compiled(x), torch.full((3,), 2.0)) and TOTAL.calls == 1
    assert torch.equal(compiled(x, total), torch.full((3,), 6.0)) and total.tolist() == [5.0] * 3
    assert [n for n in nodes if "test_total" in n] == [
        "fastkernels.test_total.unchanging", "fastkernels.test_total.default",
    ]  # fmt: skip
    assert DOUBLE.unchanging is None


def test_op_is_a_torch_op_and_counts_calls(op: Op) -> None:
    assert torch.equal(torch.ops.fastkernels.test_double(torch.ones(3)), torch.full((3,), 2.0))
    assert torch.equal(op(torch.ones(3)), torch.full((3,), 2.0))
    assert torch.equal(op.run(torch.ones(3)), torch.full((3,), 2.0))
    assert op.calls == 3 and OPS["test_double"] is op
    assert counters()["test_double"] == {"calls": 3, "fallbacks": {}}
    op.reset()
    assert op.calls == 0


def test_order_gives_reasons_for_unavailable_providers(op: Op) -> None:
    reasons = {p.name: reason for p, reason in op.order("cpu")}
    assert reasons["gpu_only"] == "gpu_only runs on cuda, not on cpu"
    assert reasons["absent"] == "absent needs no_such_package.part, which is not installed"
    assert reasons["small"] is None and reasons["reference"] is None


def test_unsupported_case_falls_back_and_logs_once(op: Op, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fastkernels"):
        for _ in range(3):
            assert torch.equal(op(torch.ones(5)), torch.full((5,), 2.0))
    assert op.fallbacks == {"small: 5 elements are too many": 3}
    assert [r.getMessage().count("5 elements are too many") for r in caplog.records] == [1]


def test_calls_for_other_providers_are_no_fallbacks(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTKERNELS_STRICT", "1")
    op.reset()
    assert op(torch.tensor(1.5)) == 3.0 and op.fallbacks == {}
    monkeypatch.setenv("FASTKERNELS_PROVIDER", "test_double:small")
    op.reset()
    with pytest.raises(UnsupportedCase, match="small: it is for vectors"):
        op(torch.tensor(1.5))


def test_strict_makes_a_fallback_an_error(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTKERNELS_STRICT", "1")
    op.reset()
    assert torch.equal(op(torch.ones(2)), torch.full((2,), 2.0))
    with pytest.raises(UnsupportedCase, match="test_double: small: 5 elements are too many"):
        op(torch.ones(5))


def test_environment_chooses_the_provider(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTKERNELS_PROVIDER", "test_double:reference")
    op.reset()
    op(torch.ones(5))
    assert op.fallbacks == {}
    monkeypatch.setenv("FASTKERNELS_PROVIDER", "test_double:gpu_only")
    op.reset()
    assert torch.equal(op(torch.ones(1)), torch.full((1,), 2.0))
    assert list(op.fallbacks) == ["gpu_only runs on cuda, not on cpu"]
    monkeypatch.setenv("FASTKERNELS_PROVIDER", "test_double:fast")
    op.reset()
    with pytest.raises(ValueError, match="no provider 'fast', it has gpu_only, absent, small, reference"):
        op(torch.ones(1))


def test_candidate_comes_first_until_removed(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTKERNELS_PROVIDER", "test_double:reference")
    op.set_candidate(lambda x: 3 * x)
    assert torch.equal(op(torch.ones(5)), torch.full((5,), 3.0))
    op.set_candidate(None)
    assert torch.equal(op(torch.ones(5)), torch.full((5,), 2.0))


def test_case_without_provider_is_an_error() -> None:
    lonely = Op("lonely", (Provider("small", lambda x: x, devices=("cpu",), supports=_small_only),))
    with pytest.raises(UnsupportedCase, match=r"no provider supports this case on cpu.*5 elements"):
        lonely.run(torch.ones(5))
    with pytest.raises(UnsupportedCase, match="no provider on meta: small runs on cpu"):
        lonely.run(torch.ones(5, device="meta"))


def _add_one(x: torch.Tensor, by: float = 1.0, out: torch.Tensor | None = None) -> torch.Tensor:
    return torch.add(x, by, out=out)


ADD = define(
    "test_add(Tensor x) -> Tensor",
    fake=lambda x: torch.empty_like(x),
    providers=(
        Provider("places", _add_one, devices=("cpu",), supports=_small_only, out=True),
        Provider("reference", lambda x: x + 1, devices=("cuda", "cpu")),
    ),
)


@pytest.fixture
def add() -> Iterator[Op]:
    ADD.reset()
    yield ADD
    ADD.set_candidate(None)
    ADD.reset()


def test_into_writes_to_out(add: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """The provider that can write there does, of others the result is copied; counted and chosen as a call is."""
    out = torch.zeros(3)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_: pytest.fail("copied"))
    add.into(out, torch.ones(3))
    monkeypatch.undo()
    assert out.tolist() == [2, 2, 2] and (add.calls, add.fallbacks) == (1, {})
    long = torch.zeros(5)
    add.into(long, torch.ones(5))
    assert long.tolist() == [2] * 5
    assert (add.calls, add.fallbacks) == (2, {"places: 5 elements are too many": 1})
    monkeypatch.setenv("FASTKERNELS_PROVIDER", "test_add:reference")
    add.reset()
    add.into(out, torch.full((3,), 2.0))
    assert out.tolist() == [3, 3, 3] and add.fallbacks == {}


def test_into_strided_out_copies(add: Op) -> None:
    wide = torch.zeros(3, 2)
    add.into(wide[:, 1], torch.ones(3))
    assert wide.tolist() == [[0, 2]] * 3 and add.calls == 1


def test_into_with_candidate_and_bound_provider(add: Op) -> None:
    out = torch.zeros(3)
    bound = add.providers[0].bound({"by": 4.0})
    assert bound.out and bound.fn(torch.ones(3), out=out) is out and out.tolist() == [5, 5, 5]
    add.set_candidate(lambda x: 7 * x)
    add.into(out, torch.ones(3))
    assert out.tolist() == [7, 7, 7] and add.calls == 1


def test_into_rejects_other_shape_or_dtype(add: Op) -> None:
    add.set_candidate(lambda x: x + 1)
    with pytest.raises(
        ValueError, match=r"test_add: out is \(1, 3\) float32 on cpu, the result of candidate is \(3,\)"
    ):
        add.into(torch.zeros(1, 3), torch.ones(3))
    with pytest.raises(ValueError, match=r"out is \(3,\) float64 on cpu"):
        add.into(torch.zeros(3, dtype=torch.float64), torch.ones(3))
    add.set_candidate(lambda x: None)
    with pytest.raises(ValueError, match="candidate returns NoneType, not one tensor"):
        add.into(torch.zeros(3), torch.ones(3))


def test_installed_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    sys.modules.pop("xml.sax.saxutils", None)
    assert installed("xml.sax.saxutils") and "xml.sax.saxutils" not in sys.modules
    assert not installed("xml.sax.no_such") and not installed("no_such.part")
    (tmp_path / "a_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not installed("a_folder")
    either = Provider("either", lambda x: x, devices=("cpu",), module=("no_such", "json"))
    assert either.unavailable("cpu") is None


def test_call_costs_microseconds(op: Op) -> None:
    """Measured 2 to 4 us of one core (2026-11, 2-core Xeon); the limit is wide, since the machine may be busy."""
    x = torch.ones(2)
    op.set_candidate(lambda x: x.detach())
    base = min(_seconds(lambda: x.detach()) for _ in range(9))
    cost = min(_seconds(lambda: op(x)) for _ in range(9)) - base
    assert cost < 25e-6, f"{cost * 1e6:.1f} us a call"


def _seconds(fn, calls: int = 500) -> float:  # type: ignore[no-untyped-def]
    start = time.perf_counter()
    for _ in range(calls):
        fn()
    return (time.perf_counter() - start) / calls


def _python_calls(op: Op, *args: torch.Tensor | None) -> list[str]:
    """Return the names of the Python functions that a call runs, after a first one."""
    found = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            found.append(frame.f_code.co_name)

    op(*args)
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        op(*args)
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.parametrize(
    ("op", "through", "provider"),
    [(DOUBLE, "__call__", ["_small_only", "<lambda>"]), (TOTAL, "is_dynamo_compiling", ["_total"])],
)
def test_calls_run_few_python_functions(op: Op, through: str, provider: list[str]) -> None:
    args = torch.ones(3), *([torch.ones(3)] if op is TOTAL else [])
    with torch.inference_mode():
        assert _python_calls(op, *args) == ["__call__", through, "run", *provider]
        assert begin_direct_calls() and not begin_direct_calls()
        try:
            assert _python_calls(op, *args) == ["__call__", "is_dynamo_compiling", "run", *provider]
        finally:
            end_direct_calls()
        with torch.profiler.profile():
            assert not begin_direct_calls()


def test_code_compiled_in_a_direct_step_calls_the_op() -> None:
    """Dynamo would trace a provider, or stop at the question for the thread."""
    found = torch.compile(lambda x: DOUBLE(x) + 1, fullgraph=True, backend="eager")
    with torch.inference_mode():
        assert begin_direct_calls()
        try:
            assert torch.equal(found(torch.ones(3)), torch.full((3,), 3.0))
        finally:
            end_direct_calls()
