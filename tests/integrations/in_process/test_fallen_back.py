"""Norms of heads in front of tokens have a kernel; a row whose calls all fell back is no proof."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastkernels
from fastkernels.core.dispatch import OPS, Provider
from fastkernels.overrides.norm import diffusers as ours
from fastkernels.overrides.norm import rms_norm as op

timm = pytest.importorskip("timm")
normalization = pytest.importorskip("diffusers.models.normalization")


@pytest.mark.parametrize("name", ["RMSNorm", "MochiRMSNorm"])
@pytest.mark.parametrize("packed", [False, True])
def test_heads_in_front_of_tokens_have_a_kernel(
    name: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in SD3.5's attention: [B, heads, T, D], a view of a product's [B, T, heads, D]."""
    rows = torch.randn(2, 5, 3 * 3 * 16 if packed else 3 * 16)
    x = rows[..., :48].unflatten(-1, (3, 16)).transpose(1, 2)
    host, module = getattr(normalization, name)(16, 1e-5), getattr(ours, f"Diffusers{name}")(16, 1e-5)
    with torch.no_grad():
        host.weight.normal_()
        module.weight.copy_(host.weight)
    refused = []

    def recorded(*args: Any) -> Any:
        refused.append(op._supports_triton(*args))
        return op.rms_norm(*args)

    monkeypatch.setattr(ours, "rms_norm", recorded)
    with torch.no_grad():
        found, want = module(x), host(x)
    torch.testing.assert_close(found, want)
    assert refused == [None] and (packed or found.stride() == want.stride())


def test_row_whose_calls_all_fell_back_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = OPS["layer_norm"]
    refuses = Provider("refuses", norm.providers[0].fn, ("cpu",), supports=lambda *args: "strides")
    monkeypatch.setattr(norm, "providers", (refuses, norm.providers[-1]))
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=48, depth=1, num_heads=3).eval()
    with fastkernels.patch(model, ops=["layer_norm"]) as report, torch.no_grad():
        model(torch.randn(1, 3, 32, 32))
        (row,) = report.refresh().active
        assert row.calls == 3 and row.proof == "fell back" and row.fallbacks == {"refuses: strides": 3}
        assert not report.verified and "active (fell back)" in str(report)
        monkeypatch.setattr(norm, "providers", norm.providers[-1:])
        norm.reset()
        model(torch.randn(1, 3, 32, 32))
        assert report.refresh().active[0].proof == "calls" and report.verified
