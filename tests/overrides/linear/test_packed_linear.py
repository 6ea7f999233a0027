"""Weights in oneDNN's layout on the CPU: the same products, used for few rows, and never after a change."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from fastkernels.engine.execution.forward import packed_weights
from fastkernels.overrides.kit import cpu
from fastkernels.overrides.linear import linear as gemm
from fastkernels.overrides.linear.vllm import VllmUnquantizedLinearMethod


def packed(dtype, n=70, k=33):
    weight = torch.nn.Parameter(torch.randn(n, k, dtype=dtype), requires_grad=False)
    gemm.pack_weight(weight)
    return weight


@pytest.fixture
def calls(monkeypatch):
    """The rows of each product that reads the original weight."""
    seen = []

    def counted(x, weight, bias=None):
        seen.append(x.shape[0])
        return F.linear(x, weight, bias)

    monkeypatch.setattr(gemm, "F", SimpleNamespace(linear=counted, pad=F.pad))
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_packed_product_equals_the_plain_one(calls, dtype, bias):
    with torch.inference_mode(False):
        weight = packed(dtype)
    extra = torch.randn(70, dtype=dtype) if bias else None
    for rows in (0, 1, 5, 32, 33):
        for x in (torch.randn(rows, 33, dtype=dtype), torch.randn(rows, 66, dtype=dtype)[:, ::2]):
            want = F.linear(x, weight, extra)
            torch.testing.assert_close(gemm.linear(x, weight, extra), want, rtol=2e-2, atol=1e-2)
    few = [] if cpu.packing_unsupported(dtype) is None else [1, 1, 5, 5, 32, 32]
    assert calls == [0, 0, *few, 33, 33], "the others read the packed copy"


@torch.inference_mode()
def test_changed_weight_is_read_itself(calls):
    with torch.inference_mode(False):
        weight = packed(torch.float32)
        weight.mul_(2)
    x = torch.randn(1, 33)
    torch.testing.assert_close(gemm.linear(x, weight, None), x @ weight.T)
    assert calls == [1]


def test_engine_packs_layers_and_head(tiny, monkeypatch):
    from fastkernels import LLM

    def names(share):
        monkeypatch.setattr(packed_weights, "SHARE", share)
        with LLM(str(tiny), device="cpu", num_blocks=8, max_model_len=64) as llm:
            named = llm.llm_engine.runner.model.named_parameters()
            return {
                name.rpartition(".")[0].rpartition(".")[2] for name, p in named if hasattr(p, "onednn_packed")
            }

    assert names(4) == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"}
    assert names(10**12) == set(), "too large for the machine's memory"


def test_weight_that_vllm_packed_is_left_to_vllm():
    """A fork's class meets such layers; a live patch refuses them."""
    weight, x = torch.randn(70, 33), torch.randn(5, 33)
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    layer.cpu_linear = lambda x, _, bias: F.linear(x, weight, bias)
    torch.testing.assert_close(VllmUnquantizedLinearMethod().apply(layer, x), F.linear(x, weight))
