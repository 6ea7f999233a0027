"""Every language model against transformers in float32: greedy tokens and logits."""

from __future__ import annotations

import subprocess
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fk_bench.info.verified import LOGITS
from support.serving.rank_forks import Fork
from support.tiny import KINDS, MODELS, VLMS, make_tiny

from fastkernels import LLM, SamplingParams
from fastkernels.core.dispatch import OPS
from fastkernels.core.forward_context import AttentionMetadata, forward_context
from fastkernels.core.layer_state import StateSpec
from fastkernels.engine.execution import ranks
from fastkernels.models.common.descriptions.registry import models
from fastkernels.models.common.layers import decoder
from fastkernels.models.common.layers.clamped_experts import StackedExperts
from fastkernels.models.common.plans import build
from fastkernels.overrides.attention.attention import PagedAttention
from fastkernels.overrides.moe.sparse_moe import Experts

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[7], list(range(10, 73)), [300, 4, 4, 4, 90]]


# One of each kind of cache and router: windows, sinks, latent and sparse attention, experts
CACHES = (
    "llama", "qwen3_windows", "mixtral", "gemma3_text", "gemma4_text", "gpt_oss", "deepseek_v3", "deepseek_v32",
)  # fmt: skip


def models_of(fast: Collection[str]) -> pytest.MarkDecorator:
    """All models, of which only these are fast."""
    params = [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in MODELS]
    return pytest.mark.parametrize("folder", params, indirect=True)


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, fields = MODELS[request.param]
    return make_tiny(tmp_path_factory.mktemp("models") / request.param, kind, "float32", **fields)


@models_of(
    {
        *CACHES,
        "phi3",
        "olmo2",
        "cohere2",
        "gpt_neox",
        "bitnet",
        "granitemoeshared",
        "glm4",
        "gemma4_experts",
        "mpt",
    }
)
def test_greedy_equals_transformers(folder: Path, greedy: Any) -> None:
    outputs = LLM(str(folder), device="cpu", max_model_len=256, num_blocks=100).generate(PROMPTS, GREEDY)
    got = [o.outputs[0].token_ids for o in outputs]
    assert got == [greedy(folder, prompt, 12) for prompt in PROMPTS]
    assert len({tuple(t) for t in got}) == len(got)


@models_of(CACHES)
def test_small_steps_keep_tokens(folder: Path, greedy: Any) -> None:
    """Prompts in chunks, prefix hits and preemption: as many tokens as transformers' and the same ones."""
    llm = LLM(
        str(folder), device="cpu", num_blocks=10, block_size=8, max_num_seqs=4, max_num_batched_tokens=16,
        max_model_len=64, num_snapshots=8,
    )  # fmt: skip
    prompts = [[*range(10, 34), i] for i in range(4)]
    for _ in range(2):
        got = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)]
        assert got == [greedy(folder, prompt, 12) for prompt in prompts]
    scheduler = llm.llm_engine.scheduler
    assert scheduler.prefix_hits > 0
    # Where all layers have a window of 8 or 9 tokens, ten blocks are enough for four sequences; states need none.
    assert (scheduler.num_preemptions > 0) is any(group.window is None for group in scheduler.groups)


def held(llm: LLM) -> list[int]:
    """The KV blocks in use, by group of layers."""
    return [group.num_usable - group.num_free for group in llm.llm_engine.scheduler.groups]


@pytest.mark.parametrize(
    ("kind", "windows"), [("gemma3_text", [None, 8]), ("gemma4_text", [None, 8]), ("mistral", [8])]
)
def test_windows_free_blocks(kind: str, windows: list[int | None], tmp_path: Path, greedy: Any) -> None:
    """A sequence of 100 tokens fills 25 blocks; a window of 8 tokens touches three at a time."""
    folder = make_tiny(tmp_path, kind, "float32")
    llm = LLM(
        str(folder), device="cpu", num_blocks=60, block_size=4, max_num_seqs=2, max_num_batched_tokens=16,
        max_model_len=128,
    )  # fmt: skip
    groups = llm.llm_engine.scheduler.groups
    assert [group.window for group in groups] == windows
    if len(windows) > 1:  # 2 sequences of up to 5 blocks, 4 for a step's tokens, and block 0
        assert [group.num_blocks for group in groups] == [60, 15]
        sizes = {m.kv_group: m.kv_cache[0].shape[0] for m in llm.llm_engine.executor.runner.layers}
        assert sizes == {0: 60, 1: 15}
    prompt = list(range(20, 80))
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    llm.llm_engine.add_request("0", prompt, sampling)
    most = [0 for _ in groups]
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        most = [max(pair) for pair in zip(most, held(llm), strict=True)]
    for window, blocks in zip(windows, most, strict=True):
        # 24 tokens of a chunk and the window before it, or all 99 that are computed
        assert blocks <= 7 if window else blocks == 25
    assert held(llm) == [0 for _ in groups]
    outputs = llm.generate([[*prompt, 5, 6]], sampling)[0]
    assert outputs.outputs[0].token_ids == greedy(folder, [*prompt, 5, 6], 40)
    assert outputs.num_cached_tokens == 60


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks start as forks, in a tenth of the time."""
    monkeypatch.setattr(ranks, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Fork}))


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_two_ranks_keep_tokens(folder: Path, greedy: Any) -> None:
    llm = LLM(str(folder), device="cpu", max_model_len=256, tensor_parallel_size=2)
    got = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)]
    llm.llm_engine.shutdown()
    assert got == [greedy(folder, prompt, 12) for prompt in PROMPTS]


EXPERTS = [
    name for name in MODELS if name in ("mixtral", "deepseek_v3", "qwen3_moe", "gemma4_experts", "gpt_oss")
]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("folder", EXPERTS, indirect=True)
def test_expert_parallel_ranks_keep_tokens(folder: Path, greedy: Any) -> None:
    """Each of two ranks has half of the experts, whole."""
    ranks = {"tensor_parallel_size": 2, "expert_parallel_size": 2}
    llm = LLM(str(folder), device="cpu", max_model_len=256, **ranks)
    modules = llm.llm_engine.executor.runner.model.modules()
    kinds = Experts, StackedExperts
    shapes = {tuple(next(m.parameters()).shape) for m in modules if isinstance(m, kinds)}
    got = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)]
    llm.llm_engine.shutdown()
    assert got == [greedy(folder, prompt, 12) for prompt in PROMPTS]
    config = build.load_config(folder)
    count = next(n for name in decoder.EXPERTS if (n := getattr(config, name, None)))
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    assert shapes == {(count // 2, 2 * inner, config.hidden_size)}


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
            layer.kv_cache = tuple(torch.zeros(shape) for shape in layer.cache_shapes(4, 16))
        if isinstance(kept := getattr(layer, "keeps", None), StateSpec):
            layer.states = kept.new(4, torch.float32, "cpu")
            if hasattr(layer, "begin"):
                layer.begin()
    found = []
    for start, end in ((0, 43), (43, 44), (44, 45)):
        with forward_context(one_sequence(start, end)):
            hidden = model(ids[start:end], torch.arange(start, end))
        found.append(model.compute_logits(hidden))
    assert expected.std() > 0.1
    torch.testing.assert_close(torch.cat(found), expected, atol=LOGITS, rtol=LOGITS)


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        ("gemma4_text", {"rope_store_kvcache": 3, "sandwich_norm": 15}),
        ("gemma4_experts", {"sandwich_norm": 4, "rope_store_kvcache": 2}),
        ("gemma3_text", {"sandwich_norm": 6, "rope_store_kvcache": 3}),
        ("olmo2", {"sandwich_norm": 4}),
        ("ttt_e2e", {"sandwich_norm": 8, "rope_store_kvcache": 3}),
        ("gpt_oss", {"rope_store_kvcache": 2}),  # YaRN
        ("starcoder2", {"linear_gelu": 2, "gated_residual": 4}),
        ("nemotron", {"gated_residual": 4}),
    ],
)
def test_fusions_of_gpus_keep_logits(
    kind: str, counts: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requested by name, fusions run on a CPU, too. counts: calls in one of the three forward passes."""
    folder = make_tiny(tmp_path, *(fields := MODELS.get(kind, (kind, {})))[:1], "float32", **fields[1])
    ops = [OPS[name] for name in counts]
    monkeypatch.setenv("FASTKERNELS_PROVIDER", ",".join(f"{name}:reference" for name in counts))
    before = [op.calls for op in ops]
    try:
        for op in ops:
            op.forget()
        test_logits_equal_transformers(folder)
    finally:
        monkeypatch.undo()
        for op in ops:
            op.forget()
    found = {op.name: op.calls - n for op, n in zip(ops, before, strict=True)}
    assert found == {name: 3 * n for name, n in counts.items()}


def one_sequence(start: int, end: int) -> AttentionMetadata:
    """Metadata of tokens start .. end - 1 of a sequence in blocks 3, 1, 2 of 16 tokens."""
    table = torch.tensor([[3, 1, 2]], dtype=torch.int32)
    at = torch.arange(start, end)
    slots = table[0, at // 16].long() * 16 + at % 16
    starts, lengths = (torch.tensor(n, dtype=torch.int32) for n in ([0, end - start], [end]))
    own, fresh = torch.tensor([3], dtype=torch.int32), torch.tensor([start == 0])
    return AttentionMetadata(slots, starts, lengths, table, end - start, end, state_slots=own, fresh=fresh)


def test_every_language_model_is_tested() -> None:
    kinds = {kind for kind, _ in MODELS.values()}
    names = {f"{KINDS[kind][0]}ForCausalLM" for kind in kinds}
    generators = [m.arch for m in models().values() if m.arch.runner == "Generate"]
    assert names == {name for arch in generators if not arch.media for name in arch.names}
    readers = {f"{prefix}ForConditionalGeneration" for prefix, *_ in VLMS.values()}  # in test_media.py
    readers.add("WhisperForConditionalGeneration")  # in test_whisper.py
    readers.add("Qwen2_5OmniThinkerForConditionalGeneration")  # in test_omni.py
    assert readers == {name for arch in generators if arch.media for name in arch.names}
