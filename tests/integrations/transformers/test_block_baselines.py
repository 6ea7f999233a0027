"""transformers' own modules as the judge's baselines of a model's blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fk_bench.info import model_blocks
from fk_integrations.transformers import blocks

from fastkernels.core import registry
from fastkernels.core.baseline import Baseline

# {block: part of the baseline's name}
FOUND = {
    "llama.decoder_layer": "LlamaDecoderLayer",  # pre-norm, packed projections, paged keys and values
    "gemma2.attention_0": "Gemma2Attention",  # a cap of the scores, and a window
    "cohere.decoder_layer": "CohereDecoderLayer",  # attention next to the MLP
    "mixtral.mixture": "MixtralSparseMoeBlock, grouped_mm",
    "bert.encoder_layer": "BertLayer",
}
REFUSED = {
    "deepseek_v2.attention": "cache has another form", "llama.model": "whole model",
    "mamba.recurrence": "states of recurrent layers",
}  # fmt: skip


def of(name: str) -> tuple[Baseline, ...]:
    model_blocks.register(name.partition(".")[0])
    return blocks.baselines(name)


def call(name: str, case: str, baseline: Baseline, seed: int = 0) -> tuple[Any, Any]:
    """The baseline's results and the reference's for a small case, in float32 and float64."""
    spec = registry.get(name)
    chosen = next(c for c in spec.cases if c.name == case)
    args = spec.inputs(chosen, "cpu", torch.Generator().manual_seed(seed))
    wide = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    want = spec.reference(*wide)
    with torch.no_grad():
        return baseline.make()(args)(), want


def check(name: str, case: str, baseline: Baseline) -> None:
    got, want = call(name, case, baseline)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", FOUND)
def test_host_module_equals_the_blocks_reference(name: str) -> None:
    found = of(name)
    assert found[0].name == f"transformers {FOUND[name]}" and found[0].available() is None
    cases = [c.name for c in registry.get(name).cases if "odd" in c.tags]
    for case in cases:
        check(name, case, found[0])


@pytest.mark.parametrize("name", REFUSED)
def test_block_without_host_module_has_a_reason(name: str) -> None:
    (only,) = of(name)
    assert REFUSED[name] in str(only.supports())


def test_few_tokens_alone_copy_experts() -> None:
    batched = next(b for b in of("mixtral.mixture") if b.name.endswith("batched_mm"))
    assert batched.supports(torch.zeros(64, 8)) is None
    assert "at most 64 tokens" in str(batched.supports(torch.zeros(65, 8)))
    check("mixtral.mixture", "small_7", batched)


def test_weights_in_another_order_are_refused() -> None:
    (only,) = of("gpt_neox.decoder_layer")
    assert "keys that differ" in str(only.supports())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama.decoder_layer", "mixtral.mixture"])
def test_compiled_host_module_is_one_graph_for_all_slots(name: str) -> None:
    compiled = next(b for b in of(name) if b.kind == "compiler")
    build, case = compiled.make(), [c for c in registry.get(name).cases if "odd" in c.tags][-1]
    torch._dynamo.utils.counters.clear()
    for seed in range(3):
        spec = registry.get(name)
        args = spec.inputs(case, "cpu", torch.Generator().manual_seed(seed))
        with torch.no_grad():
            run = build(args)
            run()
            got = run()
        for a, b in zip(got, spec.reference(*args), strict=True):
            torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
