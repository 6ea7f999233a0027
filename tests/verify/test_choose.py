"""Verified choices of a patched model: measured once, kept, used by the patch, removed by its undo."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fk_integrations.core.adapter import Adapter
from fk_integrations.core.host_op import HostOp
from fk_integrations.core.journal import Journal
from fk_integrations.fastkernels.host import FastKernelsAdapter
from fk_integrations.patching import choose
from fk_integrations.patching.apply import Patched, apply
from fk_integrations.vllm import compiled
from torch import nn

import fastkernels
from fastkernels import LLM
from fastkernels.core import kept_files, registry, tuning
from fastkernels.core.dispatch import Provider
from fastkernels.core.reasons import Kind
from fastkernels.models.common.plans.ops import one_layer
from fastkernels.overrides.linear.vllm import VllmUnquantizedLinearMethod
from fastkernels.patch import Report, Request
from fastkernels.verify import cache, measure
from tests.verify.test_measure import after, clock

__all__ = ["clock"]  # a fixture of all tests here
PATH = "fastkernels.overrides.linear.vllm:VllmUnquantizedLinearMethod"
BEATS = Provider("quick", after(0), devices=("cpu",)), Provider("slow", after(5e-3), devices=("cpu",))


class Host(Adapter):
    """A host whose linear layers are those of the model in this file."""

    host, version = "vllm", "0.33.0"

    def targets(self, spec: Any, model: Any) -> list[Any]:
        found = super().targets(spec, model)
        return [dataclasses.replace(t, path=PATH) for t in found if spec.name == "linear"]

    def unknown(self, target: Any, host_class: Any) -> None:
        return None


def proposed(shape: Any, sizes: Any, chip: Any) -> Any:
    """Quick for one shape, only the slow one for the other."""
    return [("slow", {})] if shape[0] == 24 else [("slow", {}), ("quick", {})]


@pytest.fixture(autouse=True)
def op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("FASTKERNELS_CACHE", str(tmp_path))
    monkeypatch.setenv("FASTKERNELS_VERIFY", "1")
    monkeypatch.setattr(measure, "CPU_ROUNDS", 21)  # the interval leaves out four of each end
    monkeypatch.setattr(measure, "MOST_CALLS", 1)
    cache.compile_cache.folder.cache_clear()
    linear = registry.get("linear").op
    before = linear.providers, linear.key
    linear.providers = (Provider("usual", after(2e-3), devices=("cpu",)), *BEATS)
    linear.key = dataclasses.replace(linear.key, propose=proposed, points=((1,), (8,)))
    linear.reset()
    yield linear
    linear.providers, linear.key = before
    tuning.set_verified("cpu", ())
    linear.reset()
    cache.compile_cache.folder.cache_clear()


@pytest.fixture
def model() -> Any:
    found: Any = nn.Module()
    for name, n in (("first", 8), ("second", 8), ("third", 24)):
        layer: Any = nn.Module()
        layer.weight = nn.Parameter(torch.randn(n, 16), requires_grad=False)
        layer.quant_method = VllmUnquantizedLinearMethod()
        found.add_module(name, layer)
    return found


@pytest.fixture
def no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "measure", lambda *args, **kwargs: pytest.fail("it measures"))


def patched(model: Any, **request: Any) -> Patched:
    return apply(Host(), model, Request("patch", **request))


def provider_for(op: Any, weight: torch.Tensor, tokens: int) -> str:
    return str(op._pick("cpu", (torch.randn(tokens, 16), weight), {}).name)


def test_ours_goes_in_only_where_it_was_measured_faster(model: Any, op: Any) -> None:
    before = [m.quant_method for m in model.children()]
    found = patched(model)
    (row,) = found.rows
    assert (row.state, row.modules) == ("active", 2)
    assert row.reason == "1 left to the host: no kernel of ours is faster at N=24 K=16 dtype=float32 on cpu"
    assert model.third.quant_method is before[2]
    assert [provider_for(op, model.first.weight, m) for m in (1, 5, 9)] == ["quick", "quick", "usual"]
    lines = "\n".join(row.measured)
    assert len(row.measured) == 4 and "linear N=8 K=16 dtype=float32 M=1: quick (slow: 0." in lines
    assert "linear N=24 K=16 dtype=float32 M=8: usual, the host's (slow: 0." in lines
    report = Report(None, None, [{"rank": 0, "pid": 1, "version": "1", "rows": found.report()}])  # type: ignore[arg-type]
    report.host = Host()  # type: ignore[assignment]
    Host.name = "vllm"  # type: ignore[attr-defined]
    assert "measured on this chip" in str(report) and row.measured[0] in str(report)
    found.undo()
    assert [m.quant_method for m in model.children()] == before and tuning.verified("cpu") == ()
    assert provider_for(op, model.first.weight, 1) == "usual"


def test_second_start_measures_nothing(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = patched(model)
    first.undo()
    monkeypatch.setattr(measure, "measure", lambda *args, **kwargs: pytest.fail("it measures"))
    for wanted in ("1", "0"):
        monkeypatch.setenv("FASTKERNELS_VERIFY", wanted)
        again = patched(model)
        assert [dataclasses.asdict(r) for r in again.rows] == [dataclasses.asdict(r) for r in first.rows]
        again.undo()


def test_a_chip_without_any_table_is_measured(
    model: Any, op: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "chip_of", lambda device: "Imaginary X1")
    assert not tuning.entries("linear", "Imaginary X1")
    found = patched(model)
    assert found.rows[0].modules == 2 and kept(tmp_path).name.startswith("imaginary-x1-")
    assert {e.provider for e in tuning.verified("Imaginary X1")} == {"quick", "usual"}
    assert provider_for(op, model.first.weight, 8) == "quick"
    assert provider_for(op, model.third.weight, 8) == "usual"  # its only proposal was slow
    found.undo()
    monkeypatch.setattr(tuning, "chip_of", lambda device: "Imaginary X2")  # has choices of its own
    monkeypatch.setenv("FASTKERNELS_VERIFY", "0")
    assert patched(model).rows[0].modules == 0


def test_kept_choices_are_used_without_verification(
    model: Any, monkeypatch: pytest.MonkeyPatch, no_measurement: None
) -> None:
    facts = kept_files.facts("cpu", Host.host, Host.version)
    entry = tuning.Entry(
        "linear", {"N": 8, "K": 16, "dtype": "float32"}, {"M": 8}, "quick", "usual", "r1", {}, 1.3, (1.2, 1.4)
    )
    cache.keep(tuning.Table("cpu", {"r1": {"facts": facts}}, (entry,)), facts)
    monkeypatch.setenv("FASTKERNELS_VERIFY", "0")
    (row,) = patched(model).rows
    assert row.modules == 2 and [line.partition(":")[0] for line in row.measured] == [str(entry)]


def test_choices_that_are_kept_at_once_add_up() -> None:
    """Each thread opens the lock's file itself, as ranks do."""
    facts = {"chip": "cpu"}

    def keep(width: int) -> None:
        shape = {"N": width, "K": 16, "dtype": "float32"}
        entry = tuning.Entry("linear", shape, {"M": 8}, "quick", "usual", "r1", {}, 1.3, (1.2, 1.4))
        cache.keep(tuning.Table("cpu", {"r1": {"facts": facts}}, (entry,)), facts)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(keep, range(8, 24)))
    assert len(cache.kept(facts).entries) == 16


@pytest.mark.usefixtures("no_measurement")
@pytest.mark.parametrize("value", ["0", None])
def test_without_verification_everything_stays(
    model: Any, value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FASTKERNELS_VERIFY")
    if value is not None:
        monkeypatch.setenv("FASTKERNELS_VERIFY", value)
    (row,) = patched(model).rows
    assert row.modules == 0 and row.kinds == [Kind.LEFT_TO_HOST] and "no tuned table" in row.reason


@pytest.mark.usefixtures("no_measurement")
def test_listed_shapes_are_not_measured(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        tuning.Entry("linear", shape, {"M": 4}, "quick", "usual", "r1", {}, 1.3, (1.2, 1.4))
        for shape in ({"N": n, "K": 16, "dtype": "float32"} for n in (8, 24))
    ]
    (tmp_path / "own.json").write_text(tuning.Table("cpu", {"r1": {}}, tuple(entries)).to_json())
    monkeypatch.setenv("FASTKERNELS_TUNED", str(tmp_path / "own.json"))
    tuning._by_op.cache_clear()
    assert patched(model).rows[0].modules == 3


@pytest.mark.usefixtures("no_measurement")
@pytest.mark.parametrize("variable, value", [("DISABLE", "linear"), ("PROVIDER", "linear:quick")])
def test_explicit_choices_are_not_measured(
    model: Any, variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"FASTKERNELS_{variable}", value)
    request = Request("patch", disable=("linear",) if variable == "DISABLE" else ())
    assert choose.verify(Host(), model, request, torch.device("cpu")).measured == {}


def kept(tmp_path: Path) -> Path:
    (found,) = (tmp_path / "verified").glob("*.json")
    return found


@pytest.mark.parametrize("damage", ["foreign", "chip", "cut", "other versions"])
def test_a_file_that_does_not_fit_is_measured_again(
    damage: str, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    patched(model).undo()
    path = kept(tmp_path)
    data = json.loads(path.read_text())
    for run in data["runs"].values():
        run["facts"] |= {"torch": "1.0"} if damage == "foreign" else {}
    data["chip"] = "Imaginary X1" if damage == "chip" else "cpu"
    path.write_text(json.dumps(data)[: 40 if damage == "cut" else None])
    if damage == "other versions":
        monkeypatch.setattr(Host, "version", "0.34.0")
    messages = {
        "foreign": "is from another chip or other versions and is not used",
        "chip": "is from another chip or other versions and is not used",
        "cut": "choices are measured again: tuned table",
        "other versions": "choices of other versions in",
    }
    with caplog.at_level(logging.INFO, "fastkernels"):
        found = patched(model)
    assert found.rows[0].modules == 2
    assert sum(messages[damage] in r.getMessage() for r in caplog.records) == 1
    assert sum("points of linear are measured" in r.getMessage() for r in caplog.records) == 1
    found.undo()


def test_too_little_memory_leaves_all_to_the_host(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_room(*args: Any) -> None:
        raise measure.NoRoom("1 MiB are free, and 2 MiB are needed")

    monkeypatch.setattr(measure, "leave_room", no_room)
    found = choose.verify(Host(), model, Request("patch"), torch.device("cpu"))
    text = "4 of 4 points were not measured and stay with the host: too little free memory: 1 MiB are free"
    assert [t[: len(text)] for t in found.measured["linear"]] == [text] and tuning.verified("cpu") == ()
    assert sum(text in r.getMessage() for r in caplog.records) == 1


def test_report_says_how_much_memory_the_measurement_took(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = iter([5 << 20, 8 << 20, 12 << 20, *[6 << 20] * 9])
    monkeypatch.setattr(measure, "reserved", lambda device: next(held))
    text = "the measurement took 7 MiB of device memory, freed since, and "
    found = patched(model)
    assert found.rows[0].measured[0].startswith(text)
    found.undo()
    found = patched(model)  # reads the choices
    assert not any(line.startswith(text) for line in found.rows[0].measured)
    found.undo()


def test_choices_are_part_of_the_compile_key(model: Any) -> None:
    before = compiled.swapped("key", model)
    entry = tuning.Entry("linear", {"N": 8, "K": 16, "dtype": "float32"}, {"M": 1}, "usual", "usual", "r1")
    keys = []
    for change in ({}, {"speedup": 1.5}, {"provider": "quick"}, {"params": {"tile": 4}}):
        journal = Journal()
        choose.use("cpu", [dataclasses.replace(entry, **change)], journal)
        keys.append(compiled.swapped("key", model))
        journal.undo()
    assert keys[0] == keys[1] and len({before, *keys}) == 4  # times differ from run to run
    assert compiled.swapped("key", model) == before


def test_a_failure_is_a_warning_and_everything_stays(
    model: Any, op: Any, caplog: pytest.LogCaptureFixture
) -> None:
    op.key = dataclasses.replace(op.key, propose=lambda *args: [("absent", {})])
    found = choose.verify(Host(), model, Request("patch"), torch.device("cpu"))
    assert found.measured == {}
    text = (
        "shapes without a table entry stay with the host: ValueError: linear: a proposal names the provider"
    )
    assert [text in r.getMessage() for r in caplog.records] == [True]


def test_sizes_end_at_the_largest_batch(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    points = choose.points_of(Host(), model, Request("patch", ops=("linear",)), "cpu")
    assert {point.sizes for point in points} == {(1,), (8,)}
    monkeypatch.setattr(Host, "largest_batch", lambda self: 7)
    points = choose.points_of(Host(), model, Request("patch", ops=("linear",)), "cpu")
    assert points and {point.sizes for point in points} == {(1,)}


def test_prompts_are_measured_apart_from_tabled_decodes(
    model: Any, op: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    op.key = dataclasses.replace(op.key, points=((1,), (2048,)))
    shape = {"N": 8, "K": 16, "dtype": "float32"}
    listed = tuning.Entry("linear", shape, {"M": 8}, "usual", "usual", "r1")
    monkeypatch.setattr(tuning, "entries", lambda name, chip: [listed] if name == "linear" else [])
    points = choose.points_of(Host(), model, Request("patch", ops=("linear",)), "cpu")
    assert [(p.shape[0], p.sizes) for p in points] == [(24, (1,)), (8, (2048,)), (24, (2048,))]


def test_decodes_decide_where_a_pass_has_prompts(
    model: Any, op: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def proposed(shape: Any, sizes: Any, chip: Any) -> Any:
        return [("quick", {})] if sizes[0] > 1 else [("slow", {})]

    op.key = dataclasses.replace(op.key, propose=proposed, points=((1,), (2047,)))
    found = patched(model)
    assert [row.modules for row in found.rows] == [3]
    found.undo()
    monkeypatch.setattr(Host, "prompts_in_pass", lambda self, op, module: op == "linear", raising=False)
    (row,) = patched(model).rows
    assert row.modules == 0 and "no kernel of ours is faster" in row.reason


def test_a_hosts_failure_in_one_op_leaves_the_others(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Fails(HostOp):
        def live(self, op: Any, shape: Any, modules: Any) -> Any:
            raise RuntimeError("no pool")

    class One(Host):
        def of(self, name: str) -> HostOp:
            return Fails() if name == failing else HostOp()

    failing = "linear"
    assert not choose.points_of(One(), model, Request("patch"), "cpu")
    assert "linear is not measured and stays with the host: RuntimeError: no pool" in caplog.text
    failing = "attention_decode"
    assert choose.points_of(One(), model, Request("patch"), "cpu")


def test_requested_linear_uses_the_verified_choice(model: Any, op: Any) -> None:
    (row,) = patched(model, ops=("linear",)).rows
    assert row.modules == 3 and Kind.LEFT_TO_HOST not in row.kinds
    assert provider_for(op, model.first.weight, 8) == "quick"
    assert provider_for(op, model.third.weight, 8) == "usual"


def test_our_engine_measures_while_it_is_built(
    op: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fastkernels")
    monkeypatch.setattr(choose, "SECONDS", 600.0)  # a busy machine compiles C++ for minutes
    op.key = dataclasses.replace(op.key, propose=lambda shape, sizes, chip: [("slow", {}), ("quick", {})])
    with LLM(str(tiny), device="cpu", dtype="float32", num_blocks=16, skip_tokenizer_init=True) as llm:
        (weight, *_) = [
            m.weight for m in llm.llm_engine.executor.runner.model.modules() if hasattr(m, "quant_method")
        ]
        assert op._pick("cpu", (torch.randn(1, weight.shape[1]), weight), {}).name == "quick"
        report = fastkernels.patch(llm)
        assert "quick (slow: 0." in str(report)
        report.undo()
        assert op._pick("cpu", (torch.randn(1, weight.shape[1]), weight), {}).name == "quick"
    assert "against the usual kernels" in caplog.text
    tuning.set_verified("cpu", ())
    monkeypatch.setattr(measure, "measure", lambda *args, **kwargs: pytest.fail("it measures again"))
    with LLM(str(tiny), device="cpu", dtype="float32", num_blocks=16, skip_tokenizer_init=True):
        assert tuning.verified("cpu")


def test_our_engine_measures_the_lm_head_last() -> None:
    model = one_layer("gpt_oss")
    adapter = FastKernelsAdapter(LLM)  # sinks are not measured, so that nothing of a runner is read
    points = choose.points_of(adapter, model, Request("patch"), "cpu")
    linears = [point for point in points if point.op == "linear"]
    assert [point.modules for point in linears[-2:]] == [(model.lm_head,)] * 2
    assert points[-2:] == linears[-2:] and linears[-1].shape[:2] == (201088, 2880)
    assert sum(model.lm_head in point.modules for point in points) == 2
