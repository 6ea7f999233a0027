"""The engine against transformers: chunked prompts, prefix hits, preemption, two steps in flight, random arrivals."""

from __future__ import annotations

import gc
import random

import pytest
from support.oracle import REQUESTS

from fastkernels import LLM, SamplingParams
from fastkernels.engine.scheduling.request import Request

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def tokens(outputs):
    return [o.outputs[0].token_ids for o in outputs]


def make(folder, **settings):
    return LLM(str(folder), device="cpu", **{"num_blocks": 200, "block_size": 8, **settings})


@pytest.fixture(params=[False, True], ids=["one step", "two steps"])
def overlap(request):
    return request.param


@pytest.mark.parametrize("budget", [2, 3, 7, 16, 37])
def test_every_chunking_of_a_prompt(tiny, greedy, overlap, budget):
    prompts = [list(range(20, 57)), [9], list(range(100, 116))]
    llm = make(tiny, max_num_seqs=2, max_num_batched_tokens=budget, async_scheduling=overlap)
    assert tokens(llm.generate(prompts, GREEDY)) == [greedy(tiny, p, 12) for p in prompts]


def test_prefix_hits_do_not_change_tokens(tiny, greedy, overlap):
    llm = make(tiny, async_scheduling=overlap)
    stem = [(i * 17) % 500 for i in range(40)]
    prompts = [stem, [*stem, 3], stem[:24], [*stem[:16], 8, 8, 8], stem]
    expected = [greedy(tiny, p, 12) for p in prompts]
    cold = [llm.generate(p, GREEDY)[0] for p in prompts]
    assert tokens(cold) == expected
    assert [o.num_cached_tokens for o in cold] == [0, 40, 16, 16, 32]
    together = llm.generate(prompts, GREEDY)
    assert tokens(together) == expected and all(o.num_cached_tokens >= 16 for o in together)
    off = make(tiny, enable_prefix_caching=False)
    assert tokens(off.generate(prompts, GREEDY)) == expected
    assert off.llm_engine.scheduler.prefix_hits == 0


def test_conversation_hits_its_own_answers(tiny, greedy, overlap):
    """Blocks of generated tokens are found, too."""
    llm = make(tiny, async_scheduling=overlap)
    first = llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))[0]
    prompt = [5, 6, 7, *first.outputs[0].token_ids, 99]
    second = llm.generate(prompt, GREEDY)[0]
    assert second.num_cached_tokens == 40
    assert tokens([second]) == [greedy(tiny, prompt, 12)]


def test_preemption_does_not_change_tokens(tiny, greedy, overlap):
    llm = make(tiny, num_blocks=9, max_num_seqs=6, async_scheduling=overlap)
    prompts = [[i + 3, 1, 4, i] * (1 + i) for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    assert tokens(llm.generate(prompts, params)) == [greedy(tiny, p, 24) for p in prompts]
    assert llm.llm_engine.scheduler.num_preemptions > 0
    assert llm.llm_engine.blocks.num_free == 8


BAD = [
    ([], {}), ([512], {}), ([5] * 3000, {}), ([5] * 200, {}), ([5], {"stop_token_ids": [512]}), ([5], {"logprobs": 30}),
]  # fmt: skip


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(k, marks=pytest.mark.slow) for k in ("qwen3", "mixtral"))]
)
def test_random_arrivals_aborts_and_bad_requests(tiny_of, oracle, overlap, kind, seed):
    """All kinds of requests; each one that is not aborted gives the same result as alone."""
    rng, folder = random.Random(seed), tiny_of(kind)
    llm = make(
        folder, num_blocks=20, max_num_seqs=5, max_num_batched_tokens=rng.choice([5, 16, 64]),
        async_scheduling=overlap,
    )  # fmt: skip
    engine = llm.llm_engine
    arriving = {f"r{i}": request for i, request in enumerate(rng.sample(REQUESTS * 2, len(REQUESTS) * 2))}
    waiting, done, aborted = list(arriving.items()), {}, set()
    while waiting or engine.has_unfinished_requests():
        if waiting and rng.random() < 0.3:
            name, (prompt, params) = waiting.pop()
            engine.add_request(name, prompt, params, priority=rng.randint(0, 1))
        if rng.random() < 0.1:
            prompt, fields = rng.choice(BAD)
            with pytest.raises(ValueError):
                engine.add_request("bad", prompt, SamplingParams(max_tokens=8, **fields))
        if engine.requests and rng.random() < 0.02:
            aborted.add(name := rng.choice(list(engine.requests)))
            assert [o.request_id for o in engine.abort_request(name)] == [name]
        done.update((o.request_id, o) for o in engine.step() if o.finished)
    assert set(done) == set(arriving) - aborted and len(done) >= 8
    for name, output in done.items():
        oracle.check(folder, output, arriving[name][1])
    assert engine.blocks.num_free == 19


def test_failed_step_ends_only_its_requests(tiny, greedy, overlap, monkeypatch):
    llm = make(tiny, async_scheduling=overlap)
    engine, prompt = llm.llm_engine, list(range(30))
    engine.add_request("a", prompt, GREEDY)
    engine.step()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="broken"):
        patch.setattr(engine.runner.model, "forward", _broken)
        engine.step()
    assert not engine.requests and not engine.has_unfinished_requests() and engine.blocks.num_free == 199
    again = llm.generate(prompt, GREEDY)[0]
    assert again.num_cached_tokens == 0 and tokens([again]) == [greedy(tiny, prompt, 12)]


def test_generate_after_an_unlaunched_step(tiny, greedy, overlap, monkeypatch):
    """The blocks of its prompt were already named, but empty."""
    llm = make(tiny, async_scheduling=overlap)
    prompt = list(range(30))
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="broken"):
        patch.setattr(llm.llm_engine.executor, "launch", _broken)
        llm.generate(prompt, GREEDY)
    assert tokens(llm.generate(prompt, GREEDY)) == [greedy(tiny, prompt, 12)]


def test_offline_engine_drops_finished_requests(tiny):
    def count():
        gc.collect()
        return sum(type(o) is Request for o in gc.get_objects())

    llm, before = make(tiny), count()
    llm.generate([[5, 6 + i] for i in range(3)], GREEDY)
    assert count() == before


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_interrupted_generate_leaves_a_clean_cache(tiny, greedy, overlap, monkeypatch, error):
    """The blocks of the step that did not run are already in the prefix cache."""
    llm, prompt = make(tiny, async_scheduling=overlap), list(range(30))

    def cut(*args, **kwargs):
        raise error("cut off")

    with monkeypatch.context() as patch, pytest.raises(error, match="cut off"):
        patch.setattr(llm.llm_engine.runner.model, "forward", cut)
        llm.generate([prompt, [7]], GREEDY)
    assert not llm.llm_engine.has_unfinished_requests() and llm.llm_engine.blocks.num_free == 199
    assert tokens(llm.generate([prompt, [7]], GREEDY)) == [greedy(tiny, p, 12) for p in (prompt, [7])]


def _broken(*args, **kwargs):
    raise RuntimeError("broken")


def test_request_larger_than_the_cache_is_refused(tiny):
    llm = make(tiny, num_blocks=5)
    with pytest.raises(ValueError, match="32 tokens"):
        llm.generate([1] * 40, GREEDY)


def test_smollm2_equals_transformers(oracle):
    """Real weights with chunks, prefix hits, preemption and two steps in flight."""
    from smollm2 import smollm2_path

    folder = smollm2_path()
    llm = make(
        folder, dtype="float32", num_blocks=14, block_size=4, max_num_seqs=5, max_num_batched_tokens=9,
        async_scheduling=True,
    )  # fmt: skip
    tokenizer, scheduler = llm.get_tokenizer(), llm.llm_engine.scheduler
    greedy = SamplingParams(temperature=0, max_tokens=16, logprobs=2)
    seeded = SamplingParams(n=2, seed=3, top_p=0.9, max_tokens=14, logprobs=2, prompt_logprobs=1, stop=["."])
    hot = SamplingParams(temperature=1.5, seed=4, top_k=50, repetition_penalty=1.3, max_tokens=16, logprobs=0)
    prompts = [
        "Once upon a time, in a small village,",
        "The three primary",
        "Once upon a time, in a small town",
    ]
    params = [greedy, seeded, hot]
    for output, own in zip(llm.generate(prompts, params), params, strict=True):
        oracle.check(folder, output, own, tokenizer.eos_token_id)
    assert scheduler.num_preemptions > 0 and scheduler.prefix_hits > 0
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = llm.chat(question, SamplingParams(temperature=0, max_tokens=24))[0].outputs[0]
    assert "Paris" in answer.text and answer.finish_reason == "stop"
