"""Products with some weights become our op in a compiled graph; all others stay."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fk_integrations.vllm.passes.fx_products import use_ours
from fk_integrations.vllm.passes.unchanged import Counts, Unchanged
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from fastkernels.core import dispatch
from fastkernels.overrides.linear.linear import linear

T = torch.Tensor
K, N = 40, 72
SHAPES = frozenset({(N, K, torch.float32)})


class Pass(CustomGraphPass):
    """Ours at its place in Inductor, which has decomposed the layers by then."""

    def __init__(self) -> None:
        self.replaced, self.unchanged = 0, Counts()

    def __call__(self, graph: fx.Graph) -> None:
        self.replaced += use_ours(graph, SHAPES, self.unchanged)
        graph.lint()

    def uuid(self) -> None:  # None: not cached
        return None


@pytest.fixture(autouse=True)
def as_in_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dispatch, "only_overload", True)
    with torch.no_grad():
        yield


def run(fn: Any, *args: Any, why: str = "") -> tuple[Any, int, int]:
    """Results of a compiled function, products that became ours, and calls of the op.

    why: the reason that the pass counts for the product; '' for none
    """
    torch._dynamo.reset()
    found, before = Pass(), linear.calls
    with torch._inductor.config.patch(post_grad_custom_post_pass=found):
        torch._dynamo.mark_dynamic(args[0], 0)
        result = torch.compile(fn, fullgraph=True)(*args)
    what = "products of compiled graphs stay the host's"
    assert found.unchanged == ({Unchanged("linear", what, why): 1} if why else {})
    return result, found.replaced, linear.calls - before


def tensors(*shape: int) -> list[T]:
    """x, weight and bias."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(*shape, K, generator=generator), torch.randn(N, K, generator=generator) / K**0.5,
        torch.randn(N, generator=generator),
    ]  # fmt: skip


FORMS = {
    "bias": lambda x, w, b: F.linear(x, w, b),
    "no bias": lambda x, w, b: F.linear(x, w) * 2,
    "two users": lambda x, w, b: (y := F.linear(x, w), y.sum(-1) + 1),
    "a residual after it": lambda x, w, b: F.linear(x, w) + x.sum(-1, keepdim=True) * b,
    "the weight's transpose": lambda x, w, b: x @ w.t(),
    "a row after it": lambda x, w, b: torch.addmm(b[None], x.flatten(0, -2), w.t()),
}


@pytest.mark.parametrize("shape", [(7,), (2, 3)])
@pytest.mark.parametrize("form", FORMS)
def test_product_becomes_ours(form: str, shape: tuple[int, ...]) -> None:
    args = tensors(*shape)
    (got, replaced, calls), want = run(FORMS[form], *args), FORMS[form](*args)
    assert replaced == calls == 1
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_one_number_for_all_columns_is_no_bias() -> None:
    """Kernels of ours read N numbers of a bias; torch's product broadcasts one."""
    x, weight, bias = tensors(7)
    biases: list[T | None] = []

    def note(op: Any, provider: dispatch.Provider) -> dispatch.Provider:
        def fn(x: T, weight: T, bias: T | None = None) -> Any:
            biases.append(bias)
            return provider.fn(x, weight, bias)

        return dataclasses.replace(provider, fn=fn)

    dispatch.observe(note)
    try:
        got, replaced, calls = run(lambda x, w, b: torch.addmm(b, x, w.t()), x, weight, bias[:1])
    finally:
        dispatch.observe(None)
    torch.testing.assert_close(got, F.linear(x, weight) + bias[:1], atol=1e-5, rtol=1e-5)
    assert (replaced, calls, biases) == (1, 1, [None])


UNKNOWN_SIZES, NOT_TRANSPOSED = (
    "the weight's sizes are unknown",
    "the product's weight is not a transposed matrix",
)
OTHERS: dict[str, tuple[Any, str]] = {
    "another shape": (lambda x, w, b: F.linear(x, w[:64], b[:64]), ""),
    "a product without a weight": (lambda x, w, b: x @ x.t(), UNKNOWN_SIZES),
    "a weight of K rows": (lambda x, w, b: x @ w[:K, :K], NOT_TRANSPOSED),
    "scaled": (lambda x, w, b: torch.addmm(b, x, w.t(), alpha=2.0), "an addmm with scales"),
}


@pytest.mark.parametrize("form", OTHERS)
def test_other_products_stay(form: str) -> None:
    args = tensors(7)
    fn, why = OTHERS[form]
    got, replaced, calls = run(fn, *args, why=why)
    assert replaced == calls == 0
    torch.testing.assert_close(got, fn(*args), atol=1e-5, rtol=1e-5)


def test_ours_stays_ours() -> None:
    args = tensors(7)
    got, replaced, calls = run(lambda x, w, b: linear(x, w, b), *args)
    assert (replaced, calls) == (0, 1)
    torch.testing.assert_close(got, F.linear(*args), atol=1e-5, rtol=1e-5)
