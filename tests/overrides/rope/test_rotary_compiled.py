"""rotary_emb under torch.compile: it returns new tensors, so that the compiler copies nothing around the op."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from support.kernels import warm

from fastkernels.core import registry
from fastkernels.core.spec import Case
from fastkernels.overrides.rope.rotary_emb import reference, rotary_emb
from fastkernels.overrides.rope.vllm import VllmRotaryEmbedding

WHOLE = {"tokens": 5, "heads": 4, "kv_heads": 2, "head_size": 16}
DIMS = [WHOLE, {**WHOLE, "rotary_dim": 6, "neox": False}, {**WHOLE, "by_head": True}]


def arguments(dims: dict[str, Any]) -> list[Any]:
    return registry.get("rotary_emb").inputs(
        Case("c", dims, "float32"), "cpu", torch.Generator().manual_seed(0)
    )


@pytest.fixture(params=["triton", "reference", "candidate"])
def provider(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the interpreter is off")
    found = next(p for p in rotary_emb.providers if p.name in (request.param, "reference"))
    rotary_emb.set_candidate(found.fn)  # without `out`, like any candidate
    if request.param != "candidate":
        rotary_emb.set_candidate(None)
        monkeypatch.setenv("FASTKERNELS_PROVIDER", f"rotary_emb:{request.param}")
        rotary_emb.reset()
    yield request.param
    rotary_emb.set_candidate(None)
    rotary_emb.reset()


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_functional_variant_mutates_nothing(dims: dict[str, Any], provider: str) -> None:
    args = arguments(dims)
    before = [t.clone() for t in args[1:3]]
    found = torch.ops.fastkernels.rotary_emb_functional(*args)
    want = reference(*args)
    assert rotary_emb.calls == 1
    for new, right, old, was in zip(found, want, args[1:3], before, strict=True):
        assert new.is_contiguous() and torch.equal(old, was)
        torch.testing.assert_close(new, right)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is what it runs")
def test_interpreted_kernel_passes_too() -> None:
    command = ["-m", "pytest", "-rs", "-p", "no:cacheprovider", __file__, "-k", "triton"]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = warm.run(command, env)
    assert done.returncode == 0 and "SKIPPED" not in done.stdout, done.stdout


def test_compiled_layer_has_no_copies() -> None:
    from torch._inductor.utils import run_and_get_code

    rope = VllmRotaryEmbedding(16, 16, 64, 10000.0, True, torch.float32)
    weight = torch.randn(32, 128)

    def layer(positions: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = (x @ weight).split([64, 32, 32], dim=-1)
        return (*rope(positions, q, k), v)

    x, positions = torch.randn(5, 32), torch.arange(5)
    compiled = torch.compile(layer, fullgraph=True, options={"enable_auto_functionalized_v2": False})
    with torch.no_grad():
        found, code = run_and_get_code(compiled, positions, x)
        want = layer(positions, x)
    for new, right in zip(found, want, strict=True):
        torch.testing.assert_close(new, right)
    assert "rotary_emb_functional" in code[0] and "cpp_fused" not in code[0], code[0]


@pytest.mark.parametrize("dims", [WHOLE, {**WHOLE, "by_head": True}, {**WHOLE, "kv_heads": 0}], ids=str)
def test_graph_has_one_size_for_all_tokens(dims: dict[str, Any]) -> None:
    """As of a host's own arithmetic: vLLM splits a saved graph again and must find the inputs of its compiled code."""
    torch._dynamo.reset()
    args = arguments({**dims, "packed": False})
    sizes: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        values = [n.meta["example_value"] for n in graph.graph.find_nodes(op="placeholder")]
        first = [x.shape[0] for x in values if isinstance(x, torch.Tensor)]
        sizes.extend(str(n) for n in first if isinstance(n, torch.SymInt))
        return graph.forward

    def rotated(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None) -> Any:
        if key is None:
            return rotary_emb(positions, query, None, *args[3:])
        return rotary_emb.functional(positions, query, key, *args[3:])

    for x in args[:3]:
        if x is not None:
            torch._dynamo.mark_dynamic(x, 0)
    torch.compile(rotated, backend=backend, fullgraph=True)(*args[:3])
    assert len(sizes) == 3 - (args[2] is None) and len({*sizes}) == 1, sizes
