"""The product of gate and up and its activation become one op in a compiled graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fk_integrations.vllm.passes.fx_gated_products import fuse
from fk_integrations.vllm.passes.unchanged import Counts
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from fastkernels.core import dispatch
from fastkernels.overrides.activation.silu_and_mul import silu_and_mul
from fastkernels.overrides.linear.linear import linear
from fastkernels.overrides.linear.linear_silu_and_mul import linear_silu_and_mul

T = torch.Tensor
K, N = 40, 72
SHAPES = frozenset({(N, K, torch.float32)})


class Pass(CustomGraphPass):
    """Ours at its place in Inductor, which has decomposed the layers by then."""

    def __init__(self, shapes: frozenset[Any]) -> None:
        self.shapes, self.replaced, self.unchanged = shapes, 0, Counts()

    def __call__(self, graph: fx.Graph) -> None:
        self.replaced += fuse(graph, self.shapes, self.unchanged)
        graph.lint()

    def uuid(self) -> None:  # None: not cached
        return None


@pytest.fixture(autouse=True)
def as_in_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """compiler_pass.py, which imports vLLM, does the same."""
    monkeypatch.setattr(dispatch, "only_overload", True)
    with torch.no_grad():
        yield


def run(fn: Any, *args: Any, shapes: frozenset[Any] = SHAPES) -> tuple[Any, Pass, int]:
    """Results of a compiled function, its pass, and calls of the op."""
    torch._dynamo.reset()
    found = Pass(shapes)
    before = linear_silu_and_mul.calls
    with torch._inductor.config.patch(post_grad_custom_post_pass=found):
        torch._dynamo.mark_dynamic(args[0], 0)
        result = torch.compile(fn, fullgraph=True)(*args)
    return result, found, linear_silu_and_mul.calls - before


def tensors(*shape: int) -> list[T]:
    """x, weight and bias."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(*shape, K, generator=generator), torch.randn(N, K, generator=generator) / K**0.5,
        torch.randn(N, generator=generator),
    ]  # fmt: skip


FORMS = {
    "ours": lambda x, w, b: silu_and_mul(linear(x, w, b)),
    "ours without bias": lambda x, w, b: silu_and_mul(linear(x, w, None)),
    "torch": lambda x, w, b: silu_and_mul(F.linear(x, w, b)),
    "torch without bias": lambda x, w, b: silu_and_mul(F.linear(x, w)),
    "view": lambda x, w, b: silu_and_mul(linear(x, w, b).view(-1, N)),
}


@pytest.mark.parametrize("form", FORMS)
def test_product_and_activation_are_one_op(form: str) -> None:
    args = tensors(7)
    (got, found, calls), want = run(FORMS[form], *args), FORMS[form](*args)
    assert found.replaced == 1 and calls == 1 and not found.unchanged
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


OTHERS: dict[str, tuple[Any, str]] = {
    "two users": (lambda x, w, b: (y := linear(x, w, b), silu_and_mul(y)), "the product has another user"),
    "a sum between": (lambda x, w, b: silu_and_mul(linear(x, w, b) + 1), "the input of the activation is of"),
    "another shape": (lambda x, w, b: silu_and_mul(linear(x, w[:64], b[:64])), "no kernel of ours is faster"),
    "no layer": (lambda x, w, b: silu_and_mul(x), "the input of the activation is of"),
}


@pytest.mark.parametrize("form", OTHERS)
def test_other_patterns_are_left_and_counted(form: str) -> None:
    fn, reason = OTHERS[form]
    args = tensors(7)
    got, found, calls = run(fn, *args)
    assert found.replaced == calls == 0
    assert [(op, why[: len(reason)], n) for (op, _, why), n in found.unchanged.items()] == [
        ("linear_silu_and_mul", reason, 1)
    ]
    torch.testing.assert_close(got, fn(*args), atol=1e-5, rtol=1e-5)


def test_layers_of_three_dimensions() -> None:
    args = tensors(2, 3)
    got, found, _ = run(FORMS["ours"], *args)
    assert found.replaced == 1
    torch.testing.assert_close(got, FORMS["ours"](*args), atol=1e-5, rtol=1e-5)
    got, found, _ = run(FORMS["torch"], *args)  # a view of another shape is between
    assert found.replaced == 0 and found.unchanged.total() == 1
    torch.testing.assert_close(got, FORMS["torch"](*args), atol=1e-5, rtol=1e-5)
