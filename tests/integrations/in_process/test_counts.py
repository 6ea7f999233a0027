"""Rows of a report count the calls of their own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import fastkernels

SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 8}
TOKENS = torch.arange(6)[None]


def llama(layers: int = 1) -> Any:
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=layers, num_attention_heads=2)
    return transformers.LlamaModel(config).eval()


def calls(report: Any) -> dict[str, int]:
    return {row.op: row.calls for row in report.refresh().active}


@torch.no_grad()
def test_calls_of_another_model_prove_nothing() -> None:
    first, second = llama(), llama(2)
    with fastkernels.patch(first) as a, fastkernels.patch(second) as b:
        second(TOKENS)
        assert set(calls(a).values()) == {0} and not a.verified
        assert calls(b) == {"gated_mlp": calls(b)["gated_mlp"], "rms_norm": 5, "rotary_emb": 2} and b.verified
        first(TOKENS)
        assert calls(a)["rms_norm"] == 3 and calls(b)["rms_norm"] == 5
        b.reset()
        assert calls(a)["rms_norm"] == 3 and set(calls(b).values()) == {0}
        first(TOKENS)
        assert calls(a)["rms_norm"] == 6 and set(calls(b).values()) == {0}


@torch.no_grad()
def test_part_that_never_ran_shows_no_calls() -> None:
    config = transformers.MistralConfig(
        **SIZES, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    encoder = transformers.MistralModel(config).eval()
    whole = nn.ModuleDict({"text_encoder": encoder, "model": llama()})
    with fastkernels.patch(whole, ops="rms_norm") as report:
        whole["model"](TOKENS)
        rows = {row.host_class: (row.calls, row.proof) for row in report.refresh().active}
        assert rows == {"LlamaRMSNorm": (3, "calls"), "MistralRMSNorm": (0, "uncalled")}
        whole["text_encoder"](TOKENS)
        rows = {row.host_class: (row.calls, row.proof) for row in report.refresh().active}
        assert rows == {"LlamaRMSNorm": (3, "calls"), "MistralRMSNorm": (3, "calls")}


@torch.no_grad()
def test_fallbacks_belong_to_the_model_that_fell_back() -> None:
    first, second = llama(), llama()
    with fastkernels.patch(first) as a, fastkernels.patch(second) as b:
        first(TOKENS)
        with torch.enable_grad():
            second(TOKENS)
        assert not any(row.fallbacks for row in a.refresh().active)
        reasons = [reason for row in b.refresh().active for reason in row.fallbacks]
        assert reasons and all("gradients" in reason for reason in reasons)


@torch.no_grad()
def test_compiled_model_proves_its_own_rows() -> None:
    first, second = llama(), llama()
    torch.compiler.reset()
    with fastkernels.patch(first) as a, fastkernels.patch(second) as b:
        compiled = torch.compile(second, backend="eager")
        for _ in range(3):
            compiled(TOKENS)
        assert set(calls(a).values()) == {0}
        assert calls(b)["rms_norm"] == 9 and b.verified
        first(TOKENS)
        assert calls(a)["rms_norm"] == 3 and calls(b)["rms_norm"] == 9
    torch.compiler.reset()


@pytest.mark.parametrize("fullgraph", [False, True])
@torch.no_grad()
def test_counting_leaves_nothing_in_compiled_code(fullgraph: bool) -> None:
    graphs: list[str] = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(module.code)
        return module.forward

    norm = nn.Sequential(llama().norm)
    torch.compiler.reset()
    with fastkernels.patch(norm, ops="rms_norm"):
        torch.compile(norm, backend=backend, fullgraph=fullgraph)(torch.randn(3, 16))
    torch.compiler.reset()
    (code,) = graphs
    assert code.count("torch.ops.fastkernels.rms_norm") == 1 and code.count(" = ") <= 8
