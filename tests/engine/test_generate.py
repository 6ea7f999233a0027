"""Whole generations: the same greedy tokens as transformers, seeds, stops, preemption, abort."""

from __future__ import annotations

import itertools

import pytest
import torch

from fastkernels import LLM, SamplingParams
from fastkernels.engine.sampling_params import RequestOutputKind

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PROMPTS = [[7], list(range(10, 73)), [300, 4, 4, 4, 90], list(range(200, 331))]


def tokens(outputs):
    return [o.outputs[0].token_ids for o in outputs]


@pytest.fixture(scope="module")
def llm(tiny):
    return LLM(str(tiny), device="cpu", max_model_len=512)


@pytest.mark.parametrize("which", ["tiny", "tiny_tied"])
def test_greedy_is_transformers(which, request, greedy):
    folder = request.getfixturevalue(which)
    got = tokens(LLM(str(folder), device="cpu").generate(PROMPTS, GREEDY))
    assert got == [greedy(folder, p, 20) for p in PROMPTS]
    assert len({tuple(t) for t in got}) == len(got)


def test_greedy_past_the_original_rope_length(tiny, greedy):
    prompt = [(i * 37) % 500 for i in range(700)]
    assert tokens(LLM(str(tiny), device="cpu").generate([prompt], GREEDY)) == [greedy(tiny, prompt, 20)]


def test_smollm2_is_transformers(greedy):
    from smollm2 import smollm2_path

    folder = smollm2_path()
    llm = LLM(str(folder), device="cpu", dtype="float32", max_model_len=1024)
    prompts = ["The three primary colours are", "def fibonacci(n):", "Once upon a time, in a small village,"]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    assert tokens(outputs) == [greedy(folder, o.prompt_token_ids, 24) for o in outputs]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = llm.chat(question, SamplingParams(temperature=0, max_tokens=24))[0].outputs[0]
    assert "Paris" in answer.text and answer.finish_reason == "stop"
    with pytest.raises(ValueError, match="messages must be a list"):
        llm.chat("What is the capital of France?")


def test_seed_does_not_depend_on_the_batch(llm):
    seeded = SamplingParams(temperature=1.0, top_p=0.95, seed=5, max_tokens=16, ignore_eos=True)
    other = SamplingParams(temperature=1.3, seed=6, max_tokens=9, ignore_eos=True)
    unseeded = SamplingParams(temperature=0.7, max_tokens=12, ignore_eos=True)
    alone = tokens(llm.generate([[9, 8, 7]], seeded))[0]
    batch = llm.generate([[1, 2], [9, 8, 7], [9, 8, 7], [5]], [unseeded, seeded, other, GREEDY])
    assert tokens(batch)[1] == alone
    assert tokens(batch)[2] != alone[:9]


def test_preemption_loses_no_token(tiny, greedy):
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
    last = engine.abort_request(["a0", "a1", "a2", "late", "nobody"])
    assert [o.outputs[0].finish_reason for o in last] == ["abort"] * 4
    assert len(last[0].outputs[0].token_ids) == 1
    assert engine.blocks.num_free == free and not engine.has_unfinished_requests()


@pytest.mark.parametrize("stop", [None, ["no such string"]])
def test_the_kinds_of_output_say_the_same(llm, stop):
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
    [([], "empty"), ([5, 512], "512"), (["a"], "vocabulary"), ([5] * 512, "512 tokens")],
)
def test_bad_prompts_are_refused(llm, prompt, message):
    with pytest.raises(ValueError, match=message):
        llm.llm_engine.make_request("x", prompt, GREEDY)
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.1}, {"max_tokens": 0}, {"stop": [""]}, {"top_k": -2}],
)
def test_bad_sampling_params_name_the_value(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_dummy_weights_need_no_file(tiny, tmp_path):
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text((tiny / name).read_text())
    settings = {"device": "cpu", "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 64}
    first, second = (LLM(str(tmp_path), seed=4, **settings) for _ in range(2))
    assert tokens(first.generate([[5, 6]], GREEDY)) == tokens(second.generate([[5, 6]], GREEDY))
    weights = dict(first.llm_engine.runner.model.named_parameters())
    assert torch.equal(weights["model.norm.weight"], torch.ones(128))
    assert 0.019 < weights["model.layers.1.mlp.gate_up_proj.weight"].std() < 0.021


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_cuda_graphs_give_the_eager_tokens(tiny):
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


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_after_a_step_that_failed_nothing_of_it_is_in_the_cache(tiny, monkeypatch, failure):
    llm = LLM(str(tiny), device="cpu", max_model_len=512)
    expected = tokens(LLM(str(tiny), device="cpu", max_model_len=512).generate(PROMPTS, GREEDY))

    def fail(step):
        raise failure("no step")

    with monkeypatch.context() as patch:
        patch.setattr(llm.llm_engine.executor, "launch", fail)
        with pytest.raises(failure):
            llm.generate(PROMPTS, GREEDY)
    assert not llm.llm_engine.has_unfinished_requests()
    assert tokens(llm.generate(PROMPTS, GREEDY)) == expected
