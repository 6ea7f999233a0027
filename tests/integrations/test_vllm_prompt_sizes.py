"""The sizes of prompts that a warm-up runs, and the routing of MXFP4 experts; vllm/check_eager.py runs them in vLLM."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from fk_integrations.core.journal import Journal
from fk_integrations.vllm import mxfp4_routing
from fk_integrations.vllm.prompt_sizes import MOST_DENSE, of, sizes

ARGUMENTS = {  # integers that kernels of triton_kernels 3.5.1 are given for T tokens to 4 of 32 experts
    "_topk_forward": lambda t: (mxfp4_routing.stride_of(t), _kind(t)),
    "_sum_bitmatrix_rows": lambda t: (mxfp4_routing.stride_of(t), _kind(t), _kind(_partials(t))),
    "_combined_routing_memset": lambda t: (_kind(8 * t), _kind(-(-t // 32)), _kind(_partials(t))),
    "_combined_routing_compute": lambda t: (_kind(_partials(t)), _kind(t)),
    "_matmul_ogs, gathered": lambda t: (_block(t), _kind(t), _kind(_blocks(t))),
    "_matmul_ogs, scattered": lambda t: (_block(t), _kind(4 * t), _kind(_blocks(t))),
}


def _kind(value: int) -> str:
    """Triton's specialization of an integer."""
    return "1" if value == 1 else "D" if value % 16 == 0 else ""


def _partials(tokens: int) -> int:
    return 4 * len(range(0, tokens, 128))


def _block(tokens: int) -> int:
    return next((b for b in (16, 32, 64) if 4 * tokens // 32 <= b), 128)


def _blocks(tokens: int) -> int:
    return 31 + len(range(0, 4 * tokens - 31, _block(tokens)))


def test_no_size_compiles_after_those_of_the_warm_up() -> None:
    most, last = 16384, 512
    warmed = [*sizes(last, most, 32, 4), most]
    for kernel, of_tokens in ARGUMENTS.items():
        keys = {of_tokens(tokens) for tokens in range(last + 1, most + 1)}
        assert keys == {of_tokens(tokens) for tokens in warmed}, kernel
        assert 3 <= len(keys) <= 25, kernel
    assert len(warmed) < 40 and sum(warmed) < 8 * most


def test_stock_routing_would_compile_for_each_32_tokens() -> None:
    assert len({-(-tokens // 32) for tokens in range(513, 16385)}) == 496
    assert {mxfp4_routing.stride_of(tokens) for tokens in range(1, 16385)} == {1 << n for n in range(5, 15)}


def test_dense_models_run_two_sizes_of_each_power_of_two() -> None:
    assert sizes(512, 2048) == [513, 528, 1025, 1040]
    assert max(sizes(512, 16384)) < MOST_DENSE and sizes(512, 16384) == sizes(512, MOST_DENSE)
    assert sizes(512, 512) == sizes(512, 100) == []


@pytest.mark.parametrize(("mode", "last"), [("PIECEWISE", 512), (None, 0)])
def test_sizes_follow_the_configuration(mode: str | None, last: int) -> None:
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
        compilation_config=SimpleNamespace(cudagraph_mode=mode, max_cudagraph_capture_size=512),
        model_config=SimpleNamespace(
            get_num_experts=lambda: 32, hf_text_config=SimpleNamespace(num_experts_per_tok=4)
        ),
    )
    assert of(config) == sizes(last, 2048, 32, 4) != sizes(last, 2048)


class FakeMatrix:
    """A triton_kernels Tensor or Bitmatrix, as far as the routing uses it."""

    def __init__(self, data: torch.Tensor, shape: Any, shape_max: Any, scratchpad: Any = None):
        self.storage, self.shape, self.shape_max = SimpleNamespace(data=data), shape, shape_max
        self.scratchpad = scratchpad


class FakeExperts:
    """The experts object of an MXFP4 layer."""

    __module__, __qualname__ = mxfp4_routing.EXPERTS.split(":")
    topk, renormalize, quant_config = 2, True, "config"

    def apply(self, **call: Any) -> str:
        return "stock"


def _product(out: Any, x: Any, w1: Any, w2: Any, routed: Any, gather: Any, scatter: Any, **more: Any) -> Any:
    return out.shape, x, w1, w2, routed, gather, scatter, more


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Stand-ins for vLLM's module of experts and for triton_kernels; the list of calls of topk_forward."""
    module, calls = ModuleType(mxfp4_routing.MODULE), []

    def topk_forward(x: FakeMatrix, k: int) -> Any:
        rows = x.shape_max[0]
        calls.append((x.storage.data, tuple(x.shape), rows))
        bits = torch.arange(rows, dtype=torch.int32)[None].T
        mask = FakeMatrix(bits, [x.shape[0], 32], [rows, None], "zeros")
        return torch.arange(rows * k).view(rows, k), torch.zeros(rows, k), mask

    def routing_from_bitmatrix(mask: FakeMatrix, weights: Any, ids: Any, n: int, k: int) -> Any:
        assert (mask.shape, mask.shape_max, mask.scratchpad) == ([70, 32], [70, None], "zeros")
        assert len(mask.storage.data) == len(weights) == len(ids) == 70 and (n, k) == (8, 2)
        return "routed", "gather", "scatter"

    vars(module).update(
        triton_kernel_fused_experts=_product, OAITritonMxfp4ExpertsMonolithic=FakeExperts, calls=calls
    )
    kernels = {
        "triton_kernels.topk": {"topk_forward": topk_forward},
        "triton_kernels.routing": {"routing_from_bitmatrix": routing_from_bitmatrix},
        "triton_kernels.tensor": {"Tensor": FakeMatrix, "Bitmatrix": FakeMatrix},
    }
    for name in ("triton_kernels", *kernels):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(kernels.get(name, {}))
    monkeypatch.setitem(sys.modules, mxfp4_routing.MODULE, module)
    clear = mxfp4_routing.known.cache_clear
    clear()
    yield module
    clear()


class RoutedExperts(torch.nn.Module):
    """A layer of experts, named as vLLM's."""

    def __init__(self) -> None:
        super().__init__()
        kernel = SimpleNamespace(impl=SimpleNamespace(fused_experts=FakeExperts()))
        self.quant_method = SimpleNamespace(moe_kernel=kernel)

    @property
    def experts(self) -> Any:
        return self.quant_method.moe_kernel.impl.fused_experts


def test_routing_gets_a_stride_that_is_a_power_of_two(
    host: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mxfp4_routing, "known", lambda: True)
    model, journal = torch.nn.Sequential(RoutedExperts(), torch.nn.Linear(2, 2)), Journal()
    assert mxfp4_routing.settle(model, journal) == 1
    x, logits = torch.randn(70, 4), torch.randn(70, 8)
    call = {
        "hidden_states": x, "w1": "w1", "w2": "w2", "router_logits": logits, "activation": "swiglu",
        "global_num_experts": 8, "expert_map": None, "a1q_scale": None, "apply_router_weight_on_input": False,
        "topk_group": None,
    }  # fmt: skip
    layer: Any = model[0]
    shape, *rest, more = layer.experts.apply(**call)
    assert (shape, *rest) == (x.shape, x, "w1", "w2", "routed", "gather", "scatter")
    assert more == {
        "topk": 2, "quant_config": "config", "global_num_experts": 8, "apply_router_weight_on_input": False,
    }  # fmt: skip
    assert host.calls == [(logits, (70, 8), 128)]
    assert layer.experts.apply(**{**call, "expert_map": torch.zeros(8)}) == "stock"
    journal.undo()
    assert layer.experts.apply(**call) == "stock" and type(layer.experts) is FakeExperts


def test_an_unknown_source_stays(host: ModuleType) -> None:
    layer, journal = RoutedExperts(), Journal()
    assert mxfp4_routing.settle(layer, journal) == 0 and not journal.steps
    assert type(layer.experts) is FakeExperts
