"""Every language model against transformers in float32: greedy tokens and logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import KINDS, MODELS, make_tiny

from fastkernels import LLM, SamplingParams
from fastkernels.core.forward_context import AttentionMetadata, forward_context
from fastkernels.models.common import build
from fastkernels.models.common.registry import models
from fastkernels.overrides.attention.attention import PagedAttention

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[7], list(range(10, 73)), [300, 4, 4, 4, 90]]


# Built by the same code as the others: by default, only their logits are compared.
SIMILAR = ("gemma", "seed_oss", "ernie4_5", "ministral", "cohere", "glm", "exaone4_full")
every_model = pytest.mark.parametrize(
    "folder",
    [pytest.param(name, marks=pytest.mark.slow if name in SIMILAR else ()) for name in MODELS],
    indirect=True,
)


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, fields = MODELS[request.param]
    return make_tiny(tmp_path_factory.mktemp("models") / request.param, kind, "float32", **fields)


@every_model
def test_greedy_equals_transformers(folder: Path, greedy: Any) -> None:
    outputs = LLM(str(folder), device="cpu", max_model_len=256).generate(PROMPTS, GREEDY)
    got = [o.outputs[0].token_ids for o in outputs]
    assert got == [greedy(folder, prompt, 12) for prompt in PROMPTS]
    assert len({tuple(t) for t in got}) == len(got)


@every_model
def test_small_steps_keep_tokens(folder: Path, greedy: Any) -> None:
    """Prompts in chunks, prefix hits and preemption: as many tokens as transformers' and the same ones."""
    llm = LLM(
        str(folder), device="cpu", num_blocks=10, block_size=8, max_num_seqs=4, max_num_batched_tokens=16,
        max_model_len=64,
    )  # fmt: skip
    prompts = [[*range(10, 34), i] for i in range(4)]
    for _ in range(2):
        got = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)]
        assert got == [greedy(folder, prompt, 12) for prompt in prompts]
    scheduler = llm.llm_engine.scheduler
    assert scheduler.num_preemptions > 0 and scheduler.prefix_hits > 0


@pytest.mark.slow
def test_two_ranks_keep_tokens(folder: Path, greedy: Any) -> None:
    llm = LLM(str(folder), device="cpu", max_model_len=256, tensor_parallel_size=2)
    got = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)]
    llm.llm_engine.shutdown()
    assert got == [greedy(folder, prompt, 12) for prompt in PROMPTS]


@torch.inference_mode()
def test_logits_equal_transformers(folder: Path) -> None:
    """Prefill all but two tokens, decode these, and compare each position with one full forward pass."""
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([(i * 37) % 500 for i in range(45)])
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    expected = reference(ids[None]).logits[0]
    config = build.load_config(folder)
    model = build.build(folder, config, torch.device("cpu"), torch.float32)
    for layer in model.modules():
        if isinstance(layer, PagedAttention):
            layer.kv_cache = tuple(torch.zeros(2, 4, 16, layer.num_kv_heads, layer.head_size))
    found = []
    for start, end in ((0, 43), (43, 44), (44, 45)):
        with forward_context(one_sequence(start, end)):
            hidden = model(ids[start:end], torch.arange(start, end))
        found.append(model.compute_logits(hidden))
    assert expected.std() > 0.1
    torch.testing.assert_close(torch.cat(found), expected, atol=2e-4, rtol=2e-4)


def one_sequence(start: int, end: int) -> AttentionMetadata:
    """Metadata of tokens start .. end - 1 of a sequence in blocks 3, 1, 2 of 16 tokens."""
    table = torch.tensor([[3, 1, 2]], dtype=torch.int32)
    at = torch.arange(start, end)
    slots = table[0, at // 16].long() * 16 + at % 16
    starts, lengths = (torch.tensor(n, dtype=torch.int32) for n in ([0, end - start], [end]))
    return AttentionMetadata(slots, starts, lengths, table, end - start, end)


def test_every_language_model_is_tested() -> None:
    kinds = {kind for kind, _ in MODELS.values()}
    names = {f"{KINDS[kind][0]}ForCausalLM" for kind in kinds}
    generators = [m.arch for m in models().values() if m.arch.runner == "Generate"]
    assert names == {name for arch in generators for name in arch.names}
