"""TTT-E2E: sequences change their inner weights at the borders of chunks, however the engine computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.kernels.decode_launches import Recorded
from support.tiny import make_tiny

from fastkernels import LLM, SamplingParams
from fastkernels.overrides.norm.sandwich_norm import sandwich_norm
from fastkernels.overrides.rope.rope_store_kvcache import rope_store_kvcache

CHUNK = 8
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
SMALL: dict[str, Any] = {
    "device": "cpu",
    "block_size": 4,
    "max_num_seqs": 4,
    "max_model_len": 96,
    "num_blocks": 100,
}
PROMPT = [(i * 37) % 500 for i in range(21)]
OTHERS = [[(i * 11 + 3) % 500 for i in range(n)] for n in (8, 3, 16, 19)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("ttt"))


def tiny(folder: Path, **fields: Any) -> Path:
    """A model whose inner steps change its tokens: two layers learn, with clipped gradients of a large rate."""
    return make_tiny(folder, "ttt_e2e", "float32", mini_batch_size=CHUNK, **fields)


def tokens(outputs: Any) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in outputs]


def prompt_logprobs(output: Any) -> torch.Tensor:
    return torch.tensor([row[token].logprob for row, token in zip(
        output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)])  # fmt: skip


def check_logprobs(folder: Path, oracle: Any, llm: LLM, prompt: list[int]) -> None:
    output = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))[0]
    want = oracle.logits(folder, prompt).log_softmax(-1)
    want = want[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
    torch.testing.assert_close(prompt_logprobs(output), want, atol=1e-4, rtol=1e-4)


def test_inner_steps_have_autograds_logits(folder: Path, oracle: Any) -> None:
    check_logprobs(folder, oracle, LLM(str(folder), **SMALL), PROMPT * 2)


def test_inner_steps_change_the_tokens(folder: Path, tmp_path: Path, greedy: Any) -> None:
    """Otherwise no test here would see a border."""
    still = tiny(tmp_path, optimizer_inner={"lr": 0.0})
    assert greedy(folder, PROMPT, 12) != greedy(still, PROMPT, 12)
    assert tokens(LLM(str(still), **SMALL).generate([PROMPT], GREEDY)) == [greedy(still, PROMPT, 12)]


@pytest.mark.parametrize("overlap", [False, True])
def test_batch_has_the_tokens_of_each_sequence(folder: Path, greedy: Any, overlap: bool) -> None:
    """Prompts that end before, at and behind a border, and decodes that cross several."""
    llm = LLM(str(folder), async_scheduling=overlap, **SMALL)
    prompts = [PROMPT, *OTHERS]
    assert tokens(llm.generate(prompts, LONG)) == [greedy(folder, prompt, 30) for prompt in prompts]


def test_slots_of_tokens_are_found_once_a_step(folder: Path) -> None:
    llm = LLM(str(folder), **SMALL)
    with Recorded() as ops:
        llm.generate([PROMPT[:5], OTHERS[1]], SamplingParams(temperature=0, max_tokens=1))
    assert ops.names.count("aten::searchsorted.Tensor") == 1  # for two layers and what they keep


@pytest.mark.parametrize("most", [4, 7])
def test_prompt_may_be_split_anywhere(folder: Path, greedy: Any, most: int) -> None:
    llm = LLM(str(folder), max_num_batched_tokens=most, enable_prefix_caching=False, **SMALL)
    assert tokens(llm.generate([PROMPT, OTHERS[2]], GREEDY)) == [
        greedy(folder, prompt, 12) for prompt in (PROMPT, OTHERS[2])
    ]


def test_no_step_crosses_a_border(folder: Path) -> None:
    llm = LLM(str(folder), **SMALL)
    llm.llm_engine.add_request("0", PROMPT, GREEDY)
    (request,) = llm.llm_engine.requests["0"].sequences
    computed = []
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        computed.append(request.num_computed_tokens)
    assert computed[:4] == [8, 16, 21, 22]


def test_prefix_inside_a_chunk_is_served_from_its_snapshot(folder: Path, greedy: Any) -> None:
    """The third prompt with a common prefix of 20 tokens starts from the snapshot there, in the third chunk."""
    llm = LLM(str(folder), num_snapshots=4, **SMALL)
    stem = [(i * 17) % 500 for i in range(22)]
    cached = []
    for prompt in ([*stem, 3, 4], [*stem, 5], [*stem, 6, 7, 8]):
        output = llm.generate([prompt], LONG)[0]
        cached.append(output.num_cached_tokens)
        assert output.outputs[0].token_ids == greedy(folder, prompt, 30)
    assert cached == [0, 0, 20]


def test_snapshot_at_a_border_is_from_before_its_step(folder: Path, greedy: Any) -> None:
    llm = LLM(str(folder), num_snapshots=4, **SMALL)
    states = llm.llm_engine.scheduler.states
    assert states is not None
    states.interval = 16
    answer = tokens(llm.generate([PROMPT[:10]], LONG))[0]
    following = [*PROMPT[:10], *answer[:25], 9]
    output = llm.generate([following], GREEDY)[0]
    assert output.num_cached_tokens in (16, 32)
    assert output.outputs[0].token_ids == greedy(folder, following, 12)


def test_preempted_sequences_learn_again(folder: Path, greedy: Any) -> None:
    few = {**SMALL, "num_blocks": 22, "max_model_len": 60}
    llm = LLM(str(folder), num_snapshots=2, **few)
    prompts = [PROMPT, *OTHERS[:3]]
    assert tokens(llm.generate(prompts, LONG)) == [greedy(folder, prompt, 30) for prompt in prompts]
    assert llm.llm_engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize(
    "fields",
    [
        {"qk_norm": False, "post_norm": False, "optimizer_inner": {"lr": 0.5}},
        {"pre_norm": False, "tie_word_embeddings": True, "sliding_window_size": 5, "suffix_len": 1},
        {"suffix_len": 3, "sliding_window_size": 64},
    ],
)
def test_other_configs_have_autograds_logits(fields: dict[str, Any], tmp_path: Path, oracle: Any) -> None:
    check_logprobs(tiny(tmp_path, **fields), oracle, LLM(str(tmp_path), **SMALL), PROMPT * 2)


def test_fusions_of_gpus_learn_the_same(folder: Path, oracle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requested by name, they run on a CPU, too."""
    monkeypatch.setenv("FASTKERNELS_PROVIDER", "sandwich_norm:reference,rope_store_kvcache:reference")
    before = sandwich_norm.calls
    try:
        for op in (sandwich_norm, rope_store_kvcache):
            op.forget()
        check_logprobs(folder, oracle, LLM(str(folder), **SMALL), PROMPT * 2)
        assert sandwich_norm.calls > before
    finally:
        monkeypatch.undo()
        for op in (sandwich_norm, rope_store_kvcache):
            op.forget()


@pytest.mark.slow
def test_two_ranks_learn_the_same(folder: Path, greedy: Any) -> None:
    prompts = [PROMPT, OTHERS[0]]
    with LLM(str(folder), tensor_parallel_size=2, **SMALL) as llm:
        assert tokens(llm.generate(prompts, LONG)) == [greedy(folder, prompt, 30) for prompt in prompts]


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [True, False])
def test_gpu_learns_as_the_equations(folder: Path, greedy: Any, eager: bool) -> None:
    """Decodes in CUDA graphs, with inner steps between them."""
    settings = {**SMALL, "device": "cuda", "block_size": 16, "num_blocks": 60}
    llm = LLM(str(folder), dtype="float32", enforce_eager=eager, **settings)
    prompts = [PROMPT, *OTHERS]
    assert tokens(llm.generate(prompts, LONG)) == [greedy(folder, prompt, 30) for prompt in prompts]
    assert eager or sum(llm.llm_engine.runner.graphs.replays.values()) > 0


@pytest.mark.gpu
def test_gpu_learns_in_bfloat16_at_real_sizes(tmp_path: Path) -> None:
    """One layer of TTT-E2E 3B's sizes on a chunk of 1,024 tokens behind others: the step that float32 takes."""
    sizes = {
        "hidden_size": 2560, "intermediate_size": 5632, "num_attention_heads": 32, "num_hidden_layers": 2,
        "suffix_len": 2, "sliding_window_size": 8192, "mini_batch_size": 1024, "seq_len": 4096,
    }  # fmt: skip
    made = make_tiny(tmp_path / "large", "ttt_e2e", "float32", **sizes)
    prompt, change = [(i * i * 31 + 7 * i) % 500 for i in range(2100)], {}
    for dtype in ("float32", "bfloat16"):
        llm = LLM(
            str(made), device="cuda", dtype=dtype, max_num_seqs=2, max_model_len=4096, num_blocks=300,
            enable_prefix_caching=False, enforce_eager=True,
        )  # fmt: skip
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1))
        layer = llm.llm_engine.runner.model.model.layers[-1].feed_forward_prime
        state = {name: t.float() for name, t in layer.states.items()}
        whole = state["down"] + state.get("down_rest", 0.0)
        slot = int((whole[1:] != 0).flatten(1).any(1).nonzero()[0, 0]) + 1
        change[dtype] = (whole[slot] - whole[0]).flatten().cpu()
        del llm, layer, state, whole
        torch.cuda.empty_cache()
    similar = torch.cosine_similarity(change["float32"], change["bfloat16"], 0)
    ratio = change["bfloat16"].norm() / change["float32"].norm()
    assert similar > 0.98 and 0.97 < ratio < 1.03, (similar, ratio)
