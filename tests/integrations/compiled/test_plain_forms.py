"""Our ops in a compiled graph become plain PyTorch with the same results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fk_integrations.vllm.passes.plain_forms import PLAIN, use_plain_forms
from fk_integrations.vllm.passes.unchanged import Counts, Unchanged
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd

from fastkernels.core import dispatch, registry
from fastkernels.core.spec import Case
from fastkernels.overrides.linear.linear import linear

ROPE = {"tokens": 5, "heads": 4, "kv_heads": 2, "head_size": 16}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("linear", {"tokens": (5,), "in": 24, "out": 40, "bias": True}),
    ("linear", {"tokens": (5,), "in": 24, "out": 40}),
    ("rms_norm", {"tokens": 5, "hidden": 40, "residual": True}),
    ("rms_norm", {"tokens": 5, "heads": 3, "hidden": 40}),
    ("gemma_rms_norm", {"tokens": 5, "hidden": 40, "residual": True}),
    ("layer_norm", {"tokens": 5, "hidden": 40}),
    ("silu_and_mul", {"tokens": 5, "d": 40}),
    ("gelu_and_mul", {"tokens": 5, "d": 40, "approximate": "tanh"}),
    ("gelu", {"tokens": 5, "d": 40, "approximate": "tanh"}),
    ("quick_gelu", {"tokens": 5, "d": 40}),
    ("relu2", {"tokens": 5, "d": 40}),
    ("embedding", {"tokens": (5,), "rows": 24, "dim": 40}),
    ("rotary_emb", ROPE),
    ("rotary_emb", {**ROPE, "rotary_dim": 6, "neox": False}),
]


class Pass:
    """A compiler that runs the graph as it is after the pass."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names, self.replaced = names, 0
        self.left: set[str] = set()
        self.unchanged = Counts()

    def __call__(self, module: fx.GraphModule, _: Any) -> Any:
        self.replaced = use_plain_forms(module.graph, self.names, self.unchanged)
        self.left = {
            str(a) for n in module.graph.nodes for a in (n.target, *n.args) if "fastkernels" in str(a)
        }
        module.graph.lint()
        module.recompile()
        return make_boxed_func(module.forward)


@pytest.fixture(autouse=True)
def as_in_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dispatch, "only_overload", True)  # as compiler_pass.py, which imports vLLM
    with torch._inductor.config.patch(enable_auto_functionalized_v2=False), torch.no_grad():
        yield


def compiled(fn: Any, names: tuple[str, ...]) -> tuple[Any, Pass]:
    torch._dynamo.reset()
    found = Pass(names)
    return torch.compile(fn, fullgraph=True, dynamic=True, backend=aot_autograd(fw_compiler=found)), found


def arguments(name: str, dims: dict[str, Any]) -> list[Any]:
    return registry.get(name).inputs(Case("c", dims, "float32"), "cpu", torch.Generator().manual_seed(0))


def tensors(args: list[Any]) -> list[torch.Tensor]:
    return [a for a in args if isinstance(a, torch.Tensor)]


def copied(args: list[Any]) -> list[Any]:
    return [a.clone() if isinstance(a, torch.Tensor) else a for a in args]


@pytest.mark.parametrize(("name", "dims"), CALLS, ids=str)
def test_plain_form_has_the_results_of_the_op(name: str, dims: dict[str, Any]) -> None:
    op = getattr(registry.get(name).op, "functional", None) or registry.get(name).op
    args = arguments(name, dims)
    fn, found = compiled(lambda *given: op(*given), PLAIN)
    want_args, got_args = copied(args), copied(args)
    want, got = op(*want_args), fn(*got_args)
    assert found.replaced == 1 and not found.left and not found.unchanged
    torch.testing.assert_close((got, tensors(got_args)), (want, tensors(want_args)), atol=1e-5, rtol=1e-5)


def test_every_plain_form_is_tested() -> None:
    assert {name for name, _ in CALLS} == {*PLAIN}


def test_only_named_ops_become_plain() -> None:
    silu_and_mul, x, weight = registry.get("silu_and_mul").op, torch.randn(5, 24), torch.randn(40, 24)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(linear(x, weight, None))

    fn, found = compiled(layer, ("linear",))
    torch.testing.assert_close(fn(x), layer(x), atol=1e-5, rtol=1e-5)
    assert found.replaced == 1 and found.left == {"fastkernels.silu_and_mul.default"}


def test_call_without_a_result_stays_and_is_counted() -> None:
    """rotary_emb without a key only changes the query."""
    op, (positions, query, _, *rest) = registry.get("rotary_emb").op, arguments("rotary_emb", ROPE)

    def turned(query: torch.Tensor) -> torch.Tensor:
        query = query.clone()
        op(positions, query, None, *rest)
        return query

    fn, found = compiled(turned, PLAIN)
    torch.testing.assert_close(fn(query), turned(query), atol=1e-5, rtol=1e-5)
    why = Unchanged("rotary_emb", "calls of compiled graphs stay ours at all sizes", "the call has no result")
    assert found.replaced == 0 and found.left and found.unchanged == {why: 1}
