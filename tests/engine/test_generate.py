"""Offline generation: greedy tokens against transformers, seeds, stops, preemption, abort."""

from __future__ import annotations

import itertools
import math
import os

import numpy as np
import pytest
import torch

from fastkernels import LLM, SamplingParams
from fastkernels.engine.sampling.sampling_params import RequestOutputKind
from fastkernels.models.common.checkpoints.weights import CheckpointError

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PROMPTS = [[7], list(range(10, 73)), [300, 4, 4, 4, 90], list(range(200, 331))]


def tokens(outputs):
    return [o.outputs[0].token_ids for o in outputs]


@pytest.fixture(scope="module")
def llm(tiny):
    return LLM(str(tiny), device="cpu", max_model_len=512, num_blocks=200)


@pytest.mark.parametrize("which", ["tiny", "tiny_tied"])
def test_greedy_equals_transformers(which, request, greedy):
    folder = request.getfixturevalue(which)
    got = tokens(LLM(str(folder), device="cpu", num_blocks=200).generate(PROMPTS, GREEDY))
    assert got == [greedy(folder, p, 20) for p in PROMPTS]
    assert len({tuple(t) for t in got}) == len(got)


def test_greedy_past_the_original_rope_length(tiny, greedy):
    prompt = [(i * 37) % 500 for i in range(700)]
    assert tokens(LLM(str(tiny), device="cpu", num_blocks=200).generate([prompt], GREEDY)) == [
        greedy(tiny, prompt, 20)
    ]


def test_seed_does_not_depend_on_the_batch(llm):
    seeded = SamplingParams(temperature=1.0, top_p=0.95, seed=5, max_tokens=16, ignore_eos=True)
    other = SamplingParams(temperature=1.3, seed=6, max_tokens=9, ignore_eos=True)
    unseeded = SamplingParams(temperature=0.7, max_tokens=12, ignore_eos=True)
    alone = tokens(llm.generate([[9, 8, 7]], seeded))[0]
    batch = llm.generate([[1, 2], [9, 8, 7], [9, 8, 7], [5]], [unseeded, seeded, other, GREEDY])
    assert tokens(batch)[1] == alone
    assert tokens(batch)[2] != alone[:9]


def test_largest_seed_works_for_n_outputs(llm):
    largest, smallest = (
        SamplingParams(temperature=1.0, seed=seed, n=n, max_tokens=8, ignore_eos=True)
        for seed, n in ((2**63 - 1, 2), (-(2**63), 1))
    )
    both = llm.generate([[9, 8, 7]], largest)[0].outputs
    assert both[1].token_ids == tokens(llm.generate([[9, 8, 7]], smallest))[0] != both[0].token_ids


def test_logprobs_of_the_whole_vocabulary(tiny):
    llm = LLM(str(tiny), device="cpu", max_model_len=64, num_blocks=200, max_logprobs=-1)
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=-1, prompt_logprobs=-1)
    out = llm.generate([[9, 8, 7]], params)[0]
    assert out.prompt_logprobs is not None and out.prompt_logprobs[0] is None
    for entry in (*out.prompt_logprobs[1:], *out.outputs[0].logprobs):
        assert len(entry) == 512
        assert sum(math.exp(e.logprob) for e in entry.values()) == pytest.approx(1.0, abs=1e-4)


def test_preemption_keeps_all_tokens(tiny, greedy):
    small = LLM(str(tiny), device="cpu", num_blocks=9, block_size=4, max_model_len=32)
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6], [5, 3], [5, 8, 9, 7, 9]]
    greedy_20 = [greedy(tiny, p, 20) for p in prompts]
    assert tokens(small.generate(prompts, GREEDY)) == greedy_20
    assert small.llm_engine.scheduler.num_preemptions > 0
    seeded = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
    alone = [tokens(small.generate([p], seeded))[0] for p in prompts]
    assert tokens(small.generate(prompts, seeded)) == alone
    assert small.llm_engine.blocks.num_free == 8


def test_stop_strings_cut_the_text(llm):
    whole = llm.generate([[40, 41]], GREEDY)[0].outputs[0]
    stop = whole.text[5:8]
    at = whole.text.find(stop)
    cut = llm.generate([[40, 41]], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=[stop]))
    out = cut[0].outputs[0]
    assert (out.text, out.finish_reason, out.stop_reason) == (whole.text[:at], "stop", stop)
    assert len(out.token_ids) < 20
    kept = SamplingParams(
        temperature=0, max_tokens=20, ignore_eos=True, stop=stop, include_stop_str_in_output=True
    )
    assert llm.generate([[40, 41]], kept)[0].outputs[0].text == whole.text[: at + len(stop)]


def test_end_tokens_and_ignore_eos(llm):
    whole = tokens(llm.generate([[40, 41]], GREEDY))[0]
    token = next(t for i, t in enumerate(whole) if i >= 2 and t not in whole[:i])
    n = whole.index(token) + 1
    stopped = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[token])
    out = llm.generate([[40, 41]], stopped)[0].outputs[0]
    assert (out.token_ids, out.finish_reason, out.stop_reason) == (whole[:n], "stop", token)
    engine = llm.llm_engine
    saved, engine.eos_token_ids = engine.eos_token_ids, [token]
    try:
        out = llm.generate([[40, 41]], SamplingParams(temperature=0, max_tokens=20))[0].outputs[0]
        assert (out.token_ids, out.finish_reason, out.stop_reason) == (whole[:n], "stop", None)
        assert tokens(llm.generate([[40, 41]], GREEDY))[0] == whole
        later = SamplingParams(temperature=0, max_tokens=20, min_tokens=n + 1)
        assert token not in tokens(llm.generate([[40, 41]], later))[0][:n]
    finally:
        engine.eos_token_ids = saved


def test_abort_frees_blocks(llm):
    engine = llm.llm_engine
    free = engine.blocks.num_free
    for i in range(3):
        engine.add_request(f"a{i}", [5 + i] * 40, GREEDY)
    engine.step()
    assert engine.blocks.num_free < free
    engine.add_request("late", [5], GREEDY)
    last = engine.abort_request(["a0", "a1", "a2", "late", "unknown"])
    assert [o.outputs[0].finish_reason for o in last] == ["abort"] * 4
    assert len(last[0].outputs[0].token_ids) == 1
    assert engine.blocks.num_free == free and not engine.has_unfinished_requests()


@pytest.mark.parametrize("stop", [None, ["no such string"]])
def test_output_kinds_agree(llm, stop):
    engine, found = llm.llm_engine, {}
    for kind in RequestOutputKind:
        params = SamplingParams(
            temperature=1.5, seed=1, max_tokens=60, ignore_eos=True, stop=stop, output_kind=kind, n=2
        )
        engine.add_request(kind.name, [60, 61], params)
    outputs: dict[str, list] = {kind.name: [] for kind in RequestOutputKind}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id].append(output)
    for index in range(2):
        pieces = [o for r in outputs["DELTA"] for o in r.outputs if o.index == index]
        found["DELTA"] = ("".join(o.text for o in pieces), [t for o in pieces for t in o.token_ids])
        for kind in ("CUMULATIVE", "FINAL_ONLY"):
            last = outputs[kind][-1].outputs[index]
            found[kind] = (last.text, last.token_ids)
        assert found["DELTA"] == found["CUMULATIVE"] == found["FINAL_ONLY"]
        text, ids = found["DELTA"]
        assert len(ids) == 60 and text == engine.tokenizer.decode(ids, skip_special_tokens=True)
    assert len(outputs["FINAL_ONLY"]) == 1 and len(outputs["CUMULATIVE"]) >= 60
    texts = [o.outputs[0].text for o in outputs["CUMULATIVE"]]
    assert all(b.startswith(a) for a, b in itertools.pairwise(texts))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"), ("", "prompt is empty"), ([5, 512], "token id 512 is not in the vocabulary"),
        (["a"], "'a' is not an integer"), ([True], "True is not an integer"), ([5.0], "5.0 is not an integer"),
        ([-1], "-1 is not in the vocabulary"), ([5] * 512, "512 tokens, and the maximum context length is 512"),
        (None, "text or token ids, got None"), (b"ab", "text or token ids"), ({"text": "a"}, "text or token ids"),
        ("\udc80", "not valid Unicode text"),
    ],
)  # fmt: skip
def test_bad_prompts_are_refused(llm, prompt, message):
    with pytest.raises(ValueError, match=message):
        llm.llm_engine.make_request("x", prompt, GREEDY)
    with pytest.raises(ValueError, match=message):  # the valid one is not queued, either
        llm.generate([[5], prompt], GREEDY)
    assert not llm.llm_engine.has_unfinished_requests()


def test_prompt_forms(llm):
    want = tokens(llm.generate([[5, 6]], GREEDY))
    for same in (
        [5, 6],
        np.array([5, 6]),
        [np.array([5, 6])],
        [np.int64(5), 6],
        {"prompt_token_ids": [5, 6]},
    ):
        outputs = llm.generate(same, GREEDY)
        assert tokens(outputs) == want and outputs[0].prompt_token_ids == [5, 6]
        assert all(type(i) is int for i in outputs[0].prompt_token_ids)
    assert tokens(llm.generate({"prompt": "ab"}, GREEDY)) == tokens(llm.generate(["ab"], GREEDY))
    assert llm.generate([], GREEDY) == []
    for wrong in (None, 5, b"ab"):
        with pytest.raises(ValueError, match="prompts must be text, token ids or a list of these"):
            llm.generate(wrong, GREEDY)
    for params in ({"temperature": 0}, [None], "hot"):
        with pytest.raises(ValueError, match="sampling_params must be SamplingParams"):
            llm.generate([[5]], params)
    with pytest.raises(ValueError, match="1 prompts and 2 sampling_params"):
        llm.generate([[5]], [GREEDY, GREEDY])
    for messages in ("hi", {"role": "user"}, [[]], [["hi"]], [{"content": "hi"}], None):
        with pytest.raises(ValueError, match=r"messages? must be|a conversation must be"):
            llm.chat(messages, GREEDY)


def test_unsupported_params_are_refused(llm):
    for params, message in (
        (SamplingParams(stop_token_ids=[512]), "stop_token_ids: token id 512"),
        (SamplingParams(logit_bias={600: 1.0}), "logit_bias: token id 600"),
        (SamplingParams(logprobs=21), "logprobs must be at most 20"),
        (SamplingParams(prompt_logprobs=-1), "prompt_logprobs must be at most 20"),
        (SamplingParams(n=5000), "n must be at most 4096"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.generate([[5], [6]], [GREEDY, params])
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": ""}, "model is empty"),
        ({"model": "/no/such/folder"}, "neither a folder nor a hub id"),
        ({"max_model_len": "1k"}, "max_model_len must be an integer, got '1k'"),
        ({"num_blocks": True}, "num_blocks must be an integer, got True"),
        ({"seed": 1.5}, "seed must be an integer, got 1.5"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization must be a number"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be True or False, got 'no'"),
        ({"num_blocks": 1}, "the KV cache has 1 blocks, one of them for padding"),
        ({"kv_cache_memory": 1 << 56}, "more than this machine has free"),
        ({"max_model_len": 4096}, "max_model_len 4096 is more than the model's 2048"),
        ({"attention_backend": "triton"}, "triton runs on cuda, not on cpu"),
    ],
)
def test_unsupported_settings_are_refused(tiny, settings, message):
    with pytest.raises(ValueError, match=message):
        LLM(**{"model": str(tiny), "device": "cpu", **settings})


def test_unknown_option_and_object_as_model_are_refused(tmp_path):
    with pytest.raises(
        TypeError, match=r"unknown option of LLM 'max_model_length'\. Did you mean 'max_model_len'"
    ):
        LLM("folder", max_model_length=64)
    for model in (None, 3, b"folder", LLM):
        with pytest.raises(ValueError, match="model must be a checkpoint's folder or hub id, got "):
            LLM(model)
    (tmp_path / "some").mkdir()
    for entry in os.scandir(tmp_path):  # its str() is no path
        with pytest.raises(CheckpointError, match=f"{tmp_path}/some has no config.json"):
            LLM(entry)


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.1}, {"max_tokens": 0}, {"stop": [""]}, {"top_k": -2}],
)
def test_bad_sampling_params_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_dummy_weights_need_no_weight_file(tiny, tmp_path):
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text((tiny / name).read_text())
    settings = {"device": "cpu", "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 64}
    first, second = (LLM(str(tmp_path), seed=4, **settings) for _ in range(2))
    assert tokens(first.generate([[5, 6]], GREEDY)) == tokens(second.generate([[5, 6]], GREEDY))
    weights = dict(first.llm_engine.runner.model.named_parameters())
    assert torch.equal(weights["model.norm.weight"], torch.ones(128))
    assert 0.019 < weights["model.layers.1.mlp.gate_up_proj.weight"].std() < 0.021


@pytest.mark.gpu
def test_cuda_graphs_equal_eager_steps(tiny):
    settings = {
        "device": "cuda",
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "num_blocks": 200,
    }
    eager, graphs = (LLM(str(tiny), enforce_eager=e, **settings) for e in (True, False))
    for n in (1, 3, 4):
        assert tokens(graphs.generate(PROMPTS[:n], GREEDY)) == tokens(eager.generate(PROMPTS[:n], GREEDY))


def test_use_tqdm_shows_progress(llm, capsys):
    llm.generate([[1, 2], [9, 8, 7]], GREEDY, use_tqdm=False)
    assert "Processed prompts" not in capsys.readouterr().err
    llm.generate([[1, 2], [9, 8, 7]], GREEDY)
    shown = capsys.readouterr().err
    assert "Processed prompts: 100%" in shown and "2/2" in shown and "output:" in shown
    made = []

    class Bar:
        def __init__(self, **options):
            made.append((options["total"], self))
            self.done, self.closed = 0, False

        def set_postfix_str(self, text, refresh):
            self.speed = text

        def update(self, n):
            self.done += n

        def close(self):
            self.closed = True

    llm.generate([[1, 2], [9, 8, 7], [4]], GREEDY, use_tqdm=Bar)
    ((total, bar),) = made
    assert (total, bar.done, bar.closed) == (3, 3, True)
