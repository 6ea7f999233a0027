"""LLaDA: answers equal to the papers' equations, alone and in batches of requests at different blocks and steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fk_bench.info.verified import LOGITS
from support.graphs import stand_in
from support.llada import FIELDS, Llada, make_tiny_llada

from fastkernels import LLM, SamplingParams, UnmaskParams
from fastkernels.core.forward_context import AttentionMetadata, forward_context
from fastkernels.engine.execution.forward.forward_graphs import ForwardGraphs
from fastkernels.engine.execution.runners import unmask
from fastkernels.engine.execution.runners.unmask import Unmask
from fastkernels.engine.sampling.unmask_params import NOT_HERE, OWN
from fastkernels.engine.steps.unmask_step import UnmaskInput
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError
from fastkernels.models.common.descriptions.description import Unsupported
from fastkernels.models.common.plans.plan import plan

CPU: dict[str, Any] = {"device": "cpu", "num_blocks": 40, "block_size": 8}
PROMPTS = [[7], list(range(10, 47)), [300, 4, 4, 4, 90]]
WAYS: dict[str, dict[str, Any]] = {
    "default": {"max_tokens": 16, "block_length": 8},
    "uneven": {"max_tokens": 16, "block_length": 8, "steps": 6},
    "prefix": {"max_tokens": 16, "block_length": 8, "steps": 8, "block_cache": "prefix"},
    "dual": {"max_tokens": 24, "block_length": 8, "steps": 12, "block_cache": "dual"},
    "threshold": {"max_tokens": 16, "block_length": 16, "threshold": 0.4},
    "both": {"max_tokens": 16, "block_length": 8, "threshold": 0.3, "block_cache": "dual"},
    "guided": {"max_tokens": 8, "block_length": 8, "steps": 4, "cfg_scale": 1.5},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llada(tmp_path_factory.mktemp("llada") / "tiny", seed=2)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Llada:
    return Llada(folder)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), **CPU)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[UnmaskInput]]:
    """The inputs of all steps."""
    found: list[UnmaskInput] = []
    launch = Unmask.launch

    def noted(self: Unmask, step: UnmaskInput) -> Any:
        found.append(step)
        return launch(self, step)

    monkeypatch.setattr(Unmask, "launch", noted)
    yield found


def params(**given: Any) -> UnmaskParams:
    return UnmaskParams(**{"ignore_eos": True, **given})


def answers(llm: LLM, prompts: Any, given: Any) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, given, use_tqdm=False)]


@pytest.mark.parametrize(
    "fields", [{}, {"n_kv_heads": None, "include_qkv_bias": True, "weight_tying": True, "rope_theta": 1e4}]
)
def test_llada_logits_equal_its_equations(tmp_path: Path, fields: dict[str, Any]) -> None:
    folder = make_tiny_llada(tmp_path, **fields)
    model, ids = LLM(str(folder), **CPU).llm_engine.runner.model, list(range(10, 73))
    ends = torch.tensor([0, len(ids)], dtype=torch.int32)
    metadata = AttentionMetadata(
        slot_mapping=ends[:0].long(), cu_seqlens_q=ends, seq_lens=ends[1:], block_table=ends[:0].view(0, 1),
        max_seqlen_q=len(ids), max_seqlen_k=len(ids), num_whole=1, num_whole_tokens=len(ids),
    )  # fmt: skip
    with torch.inference_mode(), forward_context(metadata):
        logits = model.compute_logits(model(torch.tensor(ids), torch.arange(len(ids))))
    torch.testing.assert_close(logits.double(), Llada(folder).logits(ids), atol=LOGITS, rtol=LOGITS)


def test_answers_equal_the_equations_in_one_batch(llm: LLM, oracle: Llada) -> None:
    """Every way of every prompt, all at once: requests differ in blocks, steps, caches and lengths."""
    mixed = [(PROMPTS[i % 3], way) for i, way in enumerate(WAYS.values())]
    want = [oracle.generate(prompt, **way)[0] for prompt, way in mixed]
    given = [params(**way) for _, way in mixed]
    assert answers(llm, [prompt for prompt, _ in mixed], given) == want
    assert len({tuple(w) for w in want}) == len(want)
    for (prompt, _), own, tokens in zip(mixed, given, want, strict=True):
        assert answers(llm, [prompt], own) == [tokens]
    assert llm.llm_engine.blocks.usage == 0


def test_block_caches_are_not_exact_and_save_tokens(
    llm: LLM, oracle: Llada, steps: list[UnmaskInput]
) -> None:
    """The first step of a block computes all 53 tokens, the others those from the block on, or the block's 8."""
    own, found = {"max_tokens": 16, "block_length": 8, "steps": 8}, []
    for cache, later in (("none", (53, 53)), ("prefix", (16, 8)), ("dual", (8, 8))):
        steps.clear()
        found += answers(llm, [PROMPTS[1]], params(**own, block_cache=cache))
        assert found[-1] == oracle.generate(PROMPTS[1], **own, block_cache=cache)[0]
        counts = [len(step.input_ids) for step in steps]
        assert counts == [53, *[later[0]] * 3, 53, *[later[1]] * 3]
    assert len({tuple(tokens) for tokens in found}) == 3


def test_threshold_takes_as_many_steps_as_the_equations(
    llm: LLM, oracle: Llada, steps: list[UnmaskInput]
) -> None:
    for threshold in (0.2, 0.6, 1.0):
        way = {"max_tokens": 16, "block_length": 8, "threshold": threshold}
        steps.clear()
        (tokens,) = answers(llm, [PROMPTS[1]], params(**way))
        assert (tokens, len(steps)) == oracle.generate(PROMPTS[1], **way)


def test_steps_without_a_token_are_left_out(llm: LLM, steps: list[UnmaskInput]) -> None:
    """The public code runs the model in all of these steps, and changes nothing in the last 24."""
    few = answers(llm, [PROMPTS[0]], params(max_tokens=8, block_length=8))
    steps.clear()
    assert answers(llm, [PROMPTS[0]], params(max_tokens=8, block_length=8, steps=32)) == few
    assert len(steps) == 8


def test_defaults_follow_max_tokens(llm: LLM) -> None:
    for tokens, length in ((16, 16), (96, 32), (100, 25), (37, 1)):
        assert UnmaskParams(max_tokens=tokens).plan(tokens).block_length == length
    assert UnmaskParams(max_tokens=12, steps=6, block_length=6).plan(12).counts == (2, 2, 2)
    assert UnmaskParams(max_tokens=10, steps=4, block_length=5).plan(10).counts == (3, 2)
    assert len(answers(llm, [PROMPTS[0]], params(max_tokens=None, threshold=0.01))[0]) == 128
    assert answers(llm, [PROMPTS[0]], None) == answers(llm, [PROMPTS[0]], SamplingParams(temperature=0))


def test_drawn_tokens_have_the_distribution_of_the_logits(llm: LLM, oracle: Llada) -> None:
    prompt, temperature, n = PROMPTS[2], 1.7, 1500
    logits = oracle.logits([*prompt, oracle.config["mask_token_id"]])[-1].clone()
    logits[oracle.config["mask_token_id"]] = -torch.inf
    chances = (logits / temperature).softmax(-1).numpy()
    (output,) = llm.generate(
        prompt, params(max_tokens=1, n=n, temperature=temperature, seed=0), use_tqdm=False
    )
    counts = np.bincount([o.token_ids[0] for o in output.outputs], minlength=len(chances))
    top = np.argsort(-chances)[:8]
    want, got = (np.append(x[top], x.sum() - x[top].sum()) for x in (chances * n, counts))
    assert want.min() > 5
    assert ((got - want) ** 2 / want).sum() < 26.1  # of 8 degrees of freedom: 1 in 1,000


def test_noise_is_of_the_seed_and_not_of_the_batch(llm: LLM) -> None:
    ways = [
        params(max_tokens=16, block_length=8, steps=8, temperature=1.5, seed=5),
        params(max_tokens=16, block_length=8, steps=8, remasking="random", seed=5),
        params(max_tokens=16, block_length=8, steps=8, temperature=1.5, seed=6, block_cache="dual"),
    ]
    alone = [answers(llm, [PROMPTS[1]], way)[0] for way in ways]
    assert answers(llm, [PROMPTS[1]] * 3, ways) == alone
    greedy = answers(llm, [PROMPTS[1]], params(max_tokens=16, block_length=8, steps=8))[0]
    assert len({tuple(tokens) for tokens in (*alone, greedy)}) == 4
    other = answers(llm, [PROMPTS[1]], replace(ways[1], seed=7))[0]
    assert other != alone[1]


def test_steps_of_equal_sizes_replay_a_graph(
    llm: LLM, oracle: Llada, steps: list[UnmaskInput], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers are those of eager steps: of a request alone, of requests that end in turn, and with cached blocks."""
    runner, captured = llm.llm_engine.runner, stand_in(monkeypatch, 1000)
    graphs = ForwardGraphs(runner.device, 8)
    monkeypatch.setattr(runner, "graphs", graphs)
    for way in ({"steps": 12}, {"steps": 12, "block_cache": "prefix"}, {"steps": 12, "block_cache": "dual"}):
        given = {"max_tokens": 24, "block_length": 12, **way}
        want = [oracle.generate(prompt, **given)[0] for prompt in PROMPTS]
        for prompt, tokens in zip(PROMPTS, want, strict=True):
            assert answers(llm, [prompt], params(**given)) == [tokens]
        mixed = [params(**{**given, "max_tokens": 24 - 12 * (i == 1)}) for i in range(3)]
        want[1] = oracle.generate(PROMPTS[1], **{**given, "max_tokens": 12})[0]
        assert answers(llm, PROMPTS, mixed) == want
    assert -1 not in captured and graphs.replays > len(steps) / 2
    # Prompts of 33 and 34 tokens: the second replays the first one's graph in all of its steps
    graphs, whole = ForwardGraphs(runner.device), params(max_tokens=12, block_length=12, steps=6)
    monkeypatch.setattr(runner, "graphs", graphs)
    first, second = list(range(100, 133)), list(range(100, 134))
    want = [oracle.generate(p, max_tokens=12, block_length=12, steps=6)[0] for p in (first, second)]
    assert answers(llm, [first], whole) == want[:1] and graphs.replays == 5
    assert answers(llm, [second], whole) == want[1:] and graphs.replays == 5 + 6


def test_large_steps_run_kernel_by_kernel(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, captured = llm.llm_engine.runner, stand_in(monkeypatch, 1000)
    monkeypatch.setattr(runner, "graphs", ForwardGraphs(runner.device))
    monkeypatch.setattr(unmask, "GRAPH_WORK", 60 * runner.hf_config.hidden_size**2)
    way = params(max_tokens=12, block_length=12, steps=6)
    answers(llm, [list(range(100, 149))], way)
    assert not captured
    answers(llm, [list(range(100, 148))], way)
    assert len(captured) == 1


def test_end_token_or_stop_string_ends_after_its_block(llm: LLM, steps: list[UnmaskInput]) -> None:
    way = {"max_tokens": 32, "block_length": 8, "steps": 8}
    (whole,) = llm.generate([PROMPTS[1]], params(**way), use_tqdm=False)
    tokens = whole.outputs[0].token_ids
    assert len(tokens) == 32 and len(steps) == 8 and whole.outputs[0].finish_reason == "length"
    last = next(i for i in range(8, 16) if tokens[i] not in tokens[:i])
    steps.clear()
    (output,) = llm.generate([PROMPTS[1]], params(**way, stop_token_ids=[tokens[last]]), use_tqdm=False)
    assert output.outputs[0].token_ids == tokens[: last + 1] and len(steps) == 4
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", tokens[last])
    text = whole.outputs[0].text
    (output,) = llm.generate([PROMPTS[1]], params(**way, stop=text[3:6]), use_tqdm=False)
    assert (
        output.outputs[0].text == text[: text.index(text[3:6])] and output.outputs[0].finish_reason == "stop"
    )


def test_full_cache_and_small_steps_delay_requests_only(
    folder: Path, llm: LLM, steps: list[UnmaskInput]
) -> None:
    """The cache holds two of the five requests; a step has room for all tokens of three."""
    way = params(max_tokens=16, block_length=8, steps=8, block_cache="dual")
    prompts = [[*PROMPTS[1], i] for i in range(5)]
    want = answers(llm, prompts, way)
    small = LLM(
        str(folder), **{**CPU, "num_blocks": 15}, max_num_batched_tokens=64, max_model_len=64, max_num_seqs=4
    )
    steps.clear()
    assert answers(small, prompts, way) == want
    assert (
        max(len(step.input_ids) for step in steps) <= 64 and max(len(step.query_lens) for step in steps) == 2
    )
    plain = replace(way, block_cache="none")
    assert answers(small, prompts, plain) == answers(llm, prompts, plain)


def test_abort_frees_blocks_and_keeps_other_answers(llm: LLM) -> None:
    engine, way = llm.llm_engine, params(max_tokens=16, block_length=8, block_cache="dual")
    (want,) = answers(llm, [PROMPTS[2]], way)
    for i, prompt in enumerate((PROMPTS[1], PROMPTS[2])):
        engine.add_request(str(i), prompt, way)
    engine.step()
    assert engine.blocks.usage > 0
    (ended,) = engine.abort_request("0")
    assert ended.outputs[0].finish_reason == "abort"
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[-1].outputs[0].token_ids == want and engine.blocks.usage == 0
    assert len(outputs) == 2  # one for each block


@pytest.mark.slow
def test_two_ranks_keep_tokens(folder: Path, llm: LLM) -> None:
    given = [params(**way) for way in WAYS.values()]
    prompts = [PROMPTS[i % 3] for i in range(len(given))]
    with LLM(str(folder), **CPU, tensor_parallel_size=2) as two:
        assert answers(two, prompts, given) == answers(llm, prompts, given)


@pytest.mark.gpu
def test_answers_on_the_gpu_equal_the_cpu(folder: Path, llm: LLM) -> None:
    given = [params(**way) for way in WAYS.values()]
    prompts = [PROMPTS[i % 3] for i in range(len(given))]
    on_gpu = LLM(str(folder), **{**CPU, "device": "cuda"}, dtype="float32")
    assert answers(on_gpu, prompts, given) == answers(llm, prompts, given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"block_length": 7}, "block_length must be a divisor of max_tokens=16: 1, 2, 4, 8, 16; got 7"),
        ({"block_length": 0}, "block_length must be an integer of at least 1, got 0"),
        ({"steps": 0}, "steps must be an integer of at least 1, got 0"),
        ({"block_length": 8, "steps": 3}, "steps must be a multiple of the 2 blocks"),
        ({"steps": 4, "threshold": 0.5}, "steps cannot be set with threshold"),
        ({"threshold": 0.0}, "threshold must be a number in (0, 1], got 0.0"),
        ({"threshold": float("nan")}, "threshold must be a number in (0, 1], got nan"),
        ({"threshold": 0.5, "remasking": "random"}, "threshold needs remasking='low_confidence', got 'random'"),
        ({"remasking": "none"}, "remasking must be one of 'low_confidence', 'random', got 'none'"),
        ({"cfg_scale": -1}, "cfg_scale must be a number in [0, 100], got -1"),
        ({"cfg_scale": 1, "block_cache": "dual"}, "cfg_scale needs block_cache='none', got 'dual'"),
        ({"block_cache": "all"}, "block_cache must be one of 'none', 'prefix', 'dual', got 'all'"),
        ({"max_tokens": 300}, "max_tokens is 300, and the context has room for 255 tokens after the prompt"),
        ({"max_tokens": None, "block_length": 200}, "block_length must be at most 128"),
        ({"top_p": 0.9, "temperature": 1.0}, "top_p is not supported for a diffusion language model, only 1.0"),
        ({"logprobs": 2}, "logprobs is not supported for a diffusion language model, leave it out: got 2"),
        ({"min_tokens": 3}, "min_tokens is not supported"),
    ],
)  # fmt: skip
def test_bad_parameter_is_refused_with_its_value(llm: LLM, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        answers(llm, [[7]], params(**{"max_tokens": 16, **given}))
    assert said in str(caught.value)


def test_plan_has_no_more_steps_than_tokens() -> None:
    """A request with 2^60 steps must not take the memory of a list of these."""
    assert UnmaskParams(steps=2**60, block_length=8).plan(16).counts == (1,) * 8
    assert UnmaskParams(steps=6, block_length=8).plan(16).counts == (3, 3, 2)


def test_every_parameter_of_tokens_in_order_is_refused() -> None:
    values = {
        "presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.1, "top_p": 0.5, "top_k": 4,
        "min_p": 0.1, "min_tokens": 2, "logprobs": 0, "prompt_logprobs": 0, "logit_bias": {3: 1.0},
        "bad_words": ["a"], "allowed_token_ids": [3],
    }  # fmt: skip
    assert {*values, "structured_outputs"} == {*NOT_HERE}
    for name, value in values.items():
        with pytest.raises(ValueError, match=f"^{name} is not supported"):
            UnmaskParams(temperature=1.0, **{name: value})
    UnmaskParams(top_k=-1, temperature=1.0, bad_words=[])  # without effect


def test_prompt_and_engine_limits_are_named(folder: Path, llm: LLM, tiny: Path) -> None:
    with pytest.raises(ValueError, match="the prompt has the mask token 500 at position 1"):
        answers(llm, [[7, 500]], params(max_tokens=4))
    settings = {"num_blocks": 3, "max_num_batched_tokens": 64, "max_model_len": 64, "max_num_seqs": 4}
    small = LLM(str(folder), **{**CPU, **settings})
    with pytest.raises(ValueError, match="block_cache='dual' is for up to 16 tokens in this engine's cache"):
        answers(small, [PROMPTS[1]], params(max_tokens=4, block_cache="dual"))
    with pytest.raises(ValueError, match="need max_num_batched_tokens=82, and this engine has 64"):
        answers(small, [PROMPTS[1]], params(max_tokens=4, cfg_scale=2.0))
    with pytest.raises(ValueError, match="max_num_batched_tokens 8 is less than max_model_len 256"):
        LLM(str(folder), device="cpu", max_num_batched_tokens=8, max_num_seqs=4)
    with pytest.raises(ValueError, match="kv_cache_dtype 'fp8' applies to models with causal attention"):
        LLM(str(folder), device="cpu", kv_cache_dtype="fp8")
    with pytest.raises(ValueError, match=r"embed: .* is for LLM\.generate"):
        llm.embed(["a"])
    llama = LLM(str(tiny), device="cpu", num_blocks=20)
    with pytest.raises(ValueError, match="UnmaskParams are for diffusion language models"):
        answers(llama, [[7]], UnmaskParams(max_tokens=4))
    assert {*OWN} == {"block_length", "steps", "threshold", "remasking", "cfg_scale", "block_cache"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"block_type": "sequential"}, "config.block_type='sequential' is not supported, only 'llama'"),
        ({"layer_norm_type": "default"}, "config.layer_norm_type='default' is not supported, only 'rms'"),
        ({"embedding_size": 640}, "config.embedding_size=640 is not supported, only 512"),
        ({"mask_token_id": 512}, "config.mask_token_id=512 is not supported, only tokens of the vocabulary of 512"),
        ({"n_kv_heads": 3}, "is not a multiple of num_key_value_heads=3"),
        ({"rope": False}, "config.rope=False is not supported, only True"),
    ],
)  # fmt: skip
def test_unsupported_config_is_refused_by_field(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    folder = make_tiny_llada(tmp_path)
    (folder / "config.json").write_text(json.dumps({**FIELDS, **fields}))
    with pytest.raises((Unsupported, CheckpointError)) as caught:
        plan(folder)
    assert said in str(caught.value)
