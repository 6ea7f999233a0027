"""A host's own kernel as a provider of our op: added for the patch that requests it, and removed by undo."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fk_integrations.core.adapter import Adapter
from fk_integrations.patching.apply import apply
from torch import nn

from fastkernels.core import registry
from fastkernels.core.dispatch import Op, Provider
from fastkernels.patch import PatchError, Request

RAN: list[int] = []


class Silu(nn.Module):
    """A host's SiluAndMul."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the host's class must not run")


def own(x: torch.Tensor) -> torch.Tensor:
    """The host's own kernel."""
    RAN.append(len(x))
    gate, up = x.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


class Host(Adapter):
    host, version, faster_on_cpu = "vllm", "0.33.0", True

    def targets(self, spec: Any, model: Any) -> list[Any]:
        found = [t for t in super().targets(spec, model) if spec.name == "silu_and_mul"]
        return [dataclasses.replace(t, path=f"{__name__}:Silu") for t in found]

    def unknown(self, target: Any, host_class: Any) -> None:
        return None

    def providers(self) -> dict[str, Provider]:
        return {"silu_and_mul": Provider("vllm", own, devices=("cpu",))}


@pytest.fixture
def op() -> Iterator[Op]:
    RAN.clear()
    found = registry.get("silu_and_mul").op
    yield found
    found.reset()


def test_requested_host_kernel_runs_in_our_op(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTKERNELS_PROVIDER", "silu_and_mul:vllm")
    before, model = op.providers, nn.Sequential(Silu())
    patched = apply(Host(), model, Request("patch"))
    x = torch.randn(3, 8)
    assert torch.equal(model(x), own(x)) and RAN == [3, 3]
    (row,) = patched.report()
    assert (row["state"], row["modules"], row["calls"], row["provider"]) == ("active", 1, 1, "vllm")
    assert row["fallbacks"] == {} and row["reasons"] == []
    patched.undo()
    assert op.providers == before and type(model[0]) is Silu


def test_default_patch_adds_no_provider(op: Op) -> None:
    before, model = op.providers, nn.Sequential(Silu())
    (row,) = apply(Host(), model, Request("patch")).rows
    assert (row.state, row.provider) == ("off", "") and op.providers == before
    assert (
        row.reason == "left to the host: on a CPU our silu_and_mul is plain PyTorch, slower than the host's"
    )
    (row,) = apply(Host(), model, Request("patch", ("silu_and_mul",))).rows
    assert (row.state, row.provider) == ("active", "") and op.providers == before
    torch.testing.assert_close(model(x := torch.randn(2, 8)), own(x))
    assert RAN == [2]


@pytest.mark.parametrize("name", ["reference", "vllm"])
def test_explicit_provider_counts_as_a_request(op: Op, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTKERNELS_PROVIDER", f"silu_and_mul:{name}")
    patched = apply(Host(), nn.Sequential(Silu()), Request("patch"))
    assert [(row.state, row.provider) for row in patched.rows] == [("active", name)]
    patched.undo()


def test_unknown_provider_fails_and_restores_the_op(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTKERNELS_PROVIDER", "silu_and_mul:sglang")
    before, model = op.providers, nn.Sequential(Silu())
    with pytest.raises(
        PatchError, match="silu_and_mul has no provider 'sglang', it has triton, cpp, reference"
    ):
        apply(Host(), model, Request("patch"))
    assert op.providers == before and type(model[0]) is Silu


def test_failed_patch_removes_the_provider(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTKERNELS_PROVIDER", "silu_and_mul:vllm")
    before = op.providers
    with pytest.raises(PatchError, match="the model has no such module"):
        apply(Host(), nn.Sequential(nn.Identity()), Request("patch"))
    assert op.providers == before
