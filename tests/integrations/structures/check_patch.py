"""openfold3's layers and its whole model: patched, against the library's results, and after undo."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from check_models import SEED, reference
from openfold3.core.model.layers.attention_pair_bias import AttentionPairBias, DiffusionAttentionPairBias
from openfold3.core.model.layers.outer_product_mean import OuterProductMean
from openfold3.core.model.layers.transition import SwiGLUTransition
from openfold3.core.model.layers.triangular_attention import TriangleAttention
from openfold3.core.model.layers.triangular_multiplicative_update import (
    TriangleMultiplicationIncoming,
    TriangleMultiplicationOutgoing,
)
from openfold3.core.model.primitives import AdaLN
from support import structures

import fastkernels

OPS = [
    "attention_pair_bias", "triangle_multiplication", "swiglu_transition", "outer_product_mean",
    "conditioned_layer_norm",
]  # fmt: skip
N, C = 9, 12


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def pairs(*lead: int) -> torch.Tensor:
    return randn(*lead, N, N, C)


def mask(*shape: int) -> torch.Tensor:
    found = torch.ones(shape)
    found[..., -2:] = 0
    return found


def square(*lead: int) -> torch.Tensor:
    return mask(*lead, N)[..., None] * mask(*lead, N)[..., None, :]


CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any], dict[str, Any]]] = {
    "outgoing": (lambda: TriangleMultiplicationOutgoing(C, 7), lambda: (pairs(1), square(1)), {}),
    "incoming": (lambda: TriangleMultiplicationIncoming(C, 7), lambda: (pairs(2, 1), square(2, 1)), {}),
    "in_place": (
        lambda: TriangleMultiplicationOutgoing(C, 7), lambda: (pairs(1), square(1)),
        {"inplace_safe": True, "_add_with_inplace": True},
    ),
    "starting": (lambda: TriangleAttention(C, 4, 2), lambda: (pairs(1), square(1)), {}),
    "ending": (lambda: TriangleAttention(C, 4, 2, starting=False), lambda: (pairs(2, 1), square(2, 1)), {}),
    "ending_bias": (
        lambda: TriangleAttention(C, 4, 2, starting=False), lambda: (pairs(1), square(1)), {"transpose_bias": True},
    ),
    "transposed": (
        lambda: TriangleAttention(C, 4, 2), lambda: (pairs(1).transpose(-2, -3), square(1)), {"transpose_bias": True},
    ),
    "transposed_plain": (lambda: TriangleAttention(C, 4, 2), lambda: (pairs(1).transpose(-2, -3), square(1)), {}),
    "ending_transposed": (
        lambda: TriangleAttention(C, 4, 2, starting=False), lambda: (pairs(1).transpose(-2, -3), square(1)), {},
    ),
    "unmasked": (lambda: TriangleAttention(C, 4, 2), lambda: (pairs(1),), {}),
    "no_batch": (lambda: TriangleAttention(C, 4, 2), lambda: (pairs(), square()), {}),
    "transition": (lambda: SwiGLUTransition(C, 3), lambda: (pairs(1), square(1)), {}),
    "outer": (lambda: OuterProductMean(8, C, 5), lambda: (randn(1, 6, N, 8), mask(1, 6, N)), {}),
    "outer_unmasked": (lambda: OuterProductMean(8, C, 5), lambda: (randn(6, N, 8),), {}),
    "single": (
        lambda: AttentionPairBias(16, 16, 16, 16, C, 4, 4), lambda: (randn(2, N, 16), pairs(2), mask(2, N)), {},
    ),
    "samples": (
        lambda: DiffusionAttentionPairBias(16, 16, 16, 10, C, 4, 4),
        lambda: (randn(1, 3, N, 16), pairs(1, 1), randn(1, 1, N, 10), mask(1, 1, N)), {},
    ),
    "own_bias": (
        lambda: DiffusionAttentionPairBias(16, 16, 16, 10, C, 4, 4),
        lambda: (randn(2, 3, N, 16), pairs(2, 1), randn(2, 3, N, 10), mask(2, 1, N)), {},
    ),
    "norm": (lambda: AdaLN(16, 10), lambda: (randn(1, 3, N, 16), randn(1, 1, N, 10)), {}),
    "norm_windows": (lambda: AdaLN(16, 10), lambda: (randn(1, 2, 3, N, 16), randn(1, 1, 3, N, 10)), {}),
}  # fmt: skip


class Holder(torch.nn.Module):
    """A model of one layer."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer
        for parameter in layer.parameters():
            torch.nn.init.normal_(
                parameter, std=0.4, generator=torch.Generator().manual_seed(parameter.dim())
            )


@pytest.mark.parametrize("name", CASES)
def test_layer_equals_the_librarys(name: str) -> None:
    make, inputs, flags = CASES[name]
    model = Holder(make()).eval()
    with torch.inference_mode():
        want = model.layer(*inputs(), **flags)
        with fastkernels.patch(model, ops=OPS) as report:
            given = inputs()
            found = model.layer(*given, **flags)
            assert "inplace_safe" not in flags or found is given[0]
            calls = sum(r.calls for r in report.refresh().rows)
        assert calls > 0 and torch.equal(model.layer(*inputs(), **flags), want)
    if name not in ("outer", "outer_unmasked", "unmasked"):  # what padded tokens have is of no use
        found, want = found[..., : N - 2, :], want[..., : N - 2, :]
        if found.shape[-3:-2] == (N,):
            found, want = found[..., : N - 2, :, :], want[..., : N - 2, :, :]
    torch.testing.assert_close(found, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["outgoing", "outer"])
def test_empty_input_runs_the_librarys(name: str) -> None:
    make, inputs, _ = CASES[name]
    model = Holder(make()).eval()
    given = tuple(t[:, :0] if name == "outer" else t[:, :0, :0] for t in inputs())
    with torch.inference_mode():
        want = model.layer(*given)
        with fastkernels.patch(model, ops=OPS) as report:
            assert torch.equal(model.layer(*given), want)
            row = next(r for r in report.refresh().rows if r.modules)
            assert "is empty" in next(iter(row.fallbacks)) and not row.calls


def run(model: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(SEED)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model(structures.batch())[1]


def test_whole_model_is_patched_and_undone() -> None:
    model = reference()
    classes, want = [type(m) for m in model.modules()], run(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = fastkernels.patch(model, ops=OPS)
    assert report.host.name == "openfold3"
    found = run(model)
    rows = {r.op: r for r in report.refresh().rows if r.modules}
    assert set(rows) == set(OPS)
    for op, row in rows.items():
        print(op, row.modules, row.calls, row.proof, row.fallbacks)
        assert row.calls > 0 and row.proof == "calls" and not row.fallbacks, op
    for name in ("si_trunk", "zij_trunk", "atom_positions_predicted", "plddt_logits", "pae_logits"):
        error = float((found[name] - want[name]).abs().max() / want[name].abs().max())
        assert error < 1e-4, (name, error)
    report.undo()
    assert [type(m) for m in model.modules()] == classes
    again = run(model)
    assert all(torch.equal(again[name], want[name]) for name in want if torch.is_tensor(want[name]))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
