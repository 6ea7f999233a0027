"""Ops that a host gets by default only where a tuned table says that ours is faster."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fk_integrations import apply as apply_module
from fk_integrations.apply import Adapter, Patched, apply, plan
from torch import nn

from fastkernels import registry, tuned
from fastkernels.overrides.l1.linear import VllmUnquantizedLinearMethod
from fastkernels.patch import PatchError, Request
from fastkernels.tuned import Entry, Table

PATH = "fastkernels.overrides.l1.linear:VllmUnquantizedLinearMethod"
WEIGHTS = {"fast": (8, 16), "slow": (24, 16), "new": (8, 8)}  # name: (N, K)


class Host(Adapter):
    """The method objects of a plain model's layers are a host's as far as `apply` goes."""

    host, version = "vllm", "0.33.0"

    def targets(self, spec: Any, model: Any) -> list[Any]:
        return [
            dataclasses.replace(t, path=PATH) for t in super().targets(spec, model) if spec.name == "linear"
        ]

    def unknown(self, target: Any, host_class: Any) -> str | None:
        return None


def entry(name: str, provider: str | None, **more: Any) -> Entry:
    n, k = WEIGHTS[name]
    shape = {"N": n, "K": k, "dtype": "float32"}
    return Entry("linear", shape, {"M": 4}, provider, baseline="onednn", run="r1", **more)


FASTER = entry("fast", "reference", speedup=1.3, ci95=(1.2, 1.4))


@pytest.fixture
def model() -> nn.Module:
    found = nn.Module()
    for name, (n, k) in WEIGHTS.items():
        layer: Any = nn.Module()
        layer.weight = nn.Parameter(torch.randn(n, k), requires_grad=False)
        layer.quant_method = VllmUnquantizedLinearMethod()
        found.add_module(name, layer)
    return found


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A CPU's table: one shape where ours is faster, one where it is not."""
    path = tmp_path / "own.json"
    path.write_text(Table("cpu", {"r1": {}}, (FASTER, entry("slow", None))).to_json())
    monkeypatch.setenv("FASTKERNELS_TUNED", str(path))
    tuned._by_op.cache_clear()
    registry.get("linear").op.reset()
    yield path
    tuned._by_op.cache_clear()
    monkeypatch.undo()
    registry.get("linear").op.reset()


def patched(model: nn.Module, **request: Any) -> Patched:
    return apply(Host(), model, Request("patch", **request))


@pytest.mark.parametrize("strict", [False, True])
def test_only_modules_where_ours_is_faster(model: Any, strict: bool) -> None:
    before = model.fast.quant_method
    found = patched(model, strict=strict)
    (row,) = found.rows
    assert (row.state, row.modules) == ("active", 1)
    assert row.reason == (
        "1 left to the host: nothing of ours was faster at N=24 K=16 dtype=float32 on cpu; "
        "1 left to the host: N=8 K=8 dtype=float32 is not tuned on cpu: "
        "`fk-bench tune linear --shape N=8,K=8,dtype=float32` would measure it"
    )
    assert model.fast.quant_method is not before
    x = torch.randn(3, 16)
    expected = (x.double() @ model.fast.weight.double().T).float()
    torch.testing.assert_close(model.fast.quant_method.apply(model.fast, x), expected)
    assert found.report()[0]["calls"] == 1
    found.undo()
    assert model.fast.quant_method is before


def test_an_op_that_is_named_is_put_in_whatever_the_table_says(model: Any) -> None:
    (row,) = patched(model, ops=("linear",)).rows
    assert (row.modules, row.reason) == (3, "")


def test_without_a_table_a_cpu_is_not_told_anything(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTKERNELS_TUNED")
    assert list(plan(Host(), Request("patch"), model)) == []
    with pytest.raises(PatchError, match="nothing to patch: no op was asked for"):
        patched(model)


def test_a_chip_that_was_never_tuned_is_said_in_one_line(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(apply_module, "_device", lambda model: "cuda")
    monkeypatch.setattr(
        tuned, "torch", SimpleNamespace(cuda=SimpleNamespace(get_device_name=lambda: "NVIDIA X"))
    )
    before = [m.quant_method for m in model.children()]
    with (
        caplog.at_level(logging.WARNING, "fastkernels"),
        pytest.raises(
            PatchError, match=r"left to the host: not tuned on NVIDIA X: `fk-bench tune linear` would"
        ),
    ):
        patched(model, strict=True)
    lines = [r.getMessage() for r in caplog.records if "not tuned" in r.getMessage()]
    assert lines == ["linear: not tuned on NVIDIA X: `fk-bench tune linear` would measure it"]
    assert [m.quant_method for m in model.children()] == before


def test_a_damaged_table_fails_the_patch_and_changes_nothing(model: Any, table: Path) -> None:
    table.write_text(table.read_text().replace('"cpu"', "3"))
    before = [m.quant_method for m in model.children()]
    with pytest.raises(PatchError, match=f"TableError: tuned table {table}: it needs `chip`"):
        patched(model)
    assert [m.quant_method for m in model.children()] == before
