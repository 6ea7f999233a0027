"""Prompt lookup: the tokens of steps with drafts are those of steps without, whatever the parameters."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.drafts import ALWAYS, SMALL, counts, params, prompts, results
from support.llada import make_tiny_llada
from support.tiny import make_scripted, make_tiny, make_tiny_bert

from fastkernels import LLM, SamplingParams
from fastkernels.engine.execution.drafts import draft_costs
from fastkernels.engine.execution.runners.generate import Generate
from fastkernels.engine.options.config import EngineConfig
from fastkernels.engine.options.speculation import Speculation
from fastkernels.engine.scheduling.ngrams import Lookup
from fastkernels.engine.scheduling.payoff import Payoff
from fastkernels.engine.steps.step import StepInput

NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, **ALWAYS}
SYNTHETIC = {**NGRAM, "rejection_sample_method": "synthetic"}


def both(folder: Path, **more: Any) -> tuple[LLM, LLM]:
    """An engine without drafts and one with."""
    settings = {**SMALL, **more}
    return LLM(str(folder), **settings), LLM(str(folder), **settings, speculative_config=NGRAM)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("drafts") / "llama", "llama", "float32")


@pytest.fixture(scope="module")
def engines(folder: Path) -> tuple[LLM, LLM]:
    return both(folder)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StepInput]]:
    found: list[StepInput] = []
    launch = Generate.launch

    def noted(self: Generate, step: StepInput) -> Any:
        found.append(step)
        return launch(self, step)

    monkeypatch.setattr(Generate, "launch", noted)
    yield found


def test_tokens_are_those_without_drafts(engines: tuple[LLM, LLM]) -> None:
    """Greedy and drawn; the cache is too small for all, so that some are preempted; the second time, prefixes hit."""
    plain, drafting = engines
    given = prompts(10)
    each = [params(i) for i in range(10)]
    want = results(plain, given, each)
    for _ in range(2):
        assert results(drafting, given, each) == want
    found = counts(drafting)
    assert found.drafts > found.accepted > 5 and sum(found.by_place) == found.accepted
    scheduler = drafting.llm_engine.scheduler
    assert scheduler.num_preemptions > 0 and scheduler.prefix_hits > 0 and scheduler.cache_usage == 0


def test_generated_blocks_hold_keys_of_accepted_tokens(folder: Path) -> None:
    """Prompts that go on from answers find their blocks, of which some keys were written for rejected drafts."""
    plain, drafting = both(folder, num_blocks=100)
    given = prompts(4)
    (tokens,) = zip(*[[c[0] for c in r] for r in results(drafting, given, params(0))], strict=True)
    longer = [[*p, *t, 5] for p, t in zip(given, tokens, strict=True)]
    before = drafting.llm_engine.scheduler.prefix_hits
    assert results(drafting, longer, params(0, max_tokens=8)) == results(
        plain, longer, params(0, max_tokens=8)
    )
    assert drafting.llm_engine.scheduler.prefix_hits > before + 80


def test_repeated_text_takes_fewer_steps(tmp_path: Path, steps: list[StepInput]) -> None:
    """The model writes abcdefghijklm, which the prompt has: one token, then three times three drafts and one."""
    folder, text = make_scripted(tmp_path, "abcdefghijklm"), "abcdefghijklm a"
    plain, drafting = (LLM(str(folder), **SMALL, speculative_config=own) for own in (None, NGRAM))
    greedy = SamplingParams(temperature=0, max_tokens=30)
    want = results(plain, [text], greedy)
    assert want[0][0][1:3] == ("bcdefghijklm", "stop") and len(steps) == 13
    steps.clear()
    assert results(drafting, [text], greedy) == want and len(steps) == 4
    assert [int(step.drafts.max()) for step in steps if step.drafts is not None] == [3, 3, 3]


def test_drafts_stop_where_too_many_sequences_run(folder: Path) -> None:
    settings = {**NGRAM, "disable_by_batch_size": 2}
    llm = LLM(str(folder), **SMALL, speculative_config=settings)
    llm.generate(prompts(3), params(0, max_tokens=8), use_tqdm=False)
    assert counts(llm).drafts == 0
    llm.generate(prompts(2), params(0, max_tokens=8), use_tqdm=False)
    assert counts(llm).drafts > 0


def test_drafts_are_measured_at_start_and_keep_tokens(folder: Path, engines: tuple[LLM, LLM]) -> None:
    llm = LLM(str(folder), **SMALL, speculative_config={**NGRAM, "disable_by_batch_size": "auto"})
    payoff = llm.llm_engine.scheduler.payoff
    assert payoff is not None
    sizes = list(payoff.ratios)  # fewer on a slow machine
    assert sizes and sizes == [1, 2, 4, 6][: len(sizes)] and min(payoff.ratios.values()) > 0
    given, each = prompts(8), [params(i) for i in range(8)]
    assert results(llm, given, each) == results(engines[0], given, each)
    payoff.ratios = dict.fromkeys(payoff.ratios, 9.0)  # as if they lost at every size
    before = counts(llm).drafts
    assert results(llm, given, each) == results(engines[0], given, each)
    assert counts(llm).drafts == before and payoff.num_off > 20


def test_one_slow_step_at_start_does_not_turn_drafts_off(
    engines: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels compile in the first steps, and another process takes the time of one that is measured."""
    slow = iter([9.0, 9.0, 0.1, 4.0])
    monkeypatch.setattr(
        draft_costs, "_run", lambda executor, step, depth: next(slow, 0.1 + 0.02 * (step.drafts is not None))
    )
    llm_engine = engines[1].llm_engine
    ratios = draft_costs.measure(llm_engine.executor, llm_engine.config, Speculation.read(NGRAM))
    assert ratios == pytest.approx({1: 1.2, 2: 1.2, 4: 1.2, 6: 1.2})


RECURRENT = ["mamba", "qwen3_next", "jamba", "rwkv7"]


@pytest.mark.parametrize(
    "kind", [k if k in RECURRENT[:1] else pytest.param(k, marks=pytest.mark.slow) for k in RECURRENT]
)
def test_recurrent_states_go_back_behind_rejected_drafts(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first cache is large, and the second one too small for all sequences."""
    folder = make_tiny(tmp_path, kind, "float32")
    given, each = prompts(5, seed=3), [params(i, max_tokens=20) for i in range(5)]
    want = results(LLM(str(folder), **SMALL, num_snapshots=4), given, each)
    rng, texts = random.Random(0), [[*g, *w[0][0]] for g, w in zip(given, want, strict=True)]

    def propose(self: Lookup, prompt: list[int], output: list[int], most: int) -> list[int]:
        known = [*prompt, *output]
        found = next(text for text in texts if text[: len(known)] == known)[len(known) :][:most]
        wrong = rng.randrange(2 * len(found) + 1)  # right in half of the cases
        return [(token + 1) % 512 if i == wrong else token for i, token in enumerate(found)]

    monkeypatch.setattr(Lookup, "propose", propose)
    for blocks in (100, 24):
        llm = LLM(str(folder), **{**SMALL, "num_blocks": blocks}, num_snapshots=24, speculative_config=NGRAM)
        for _ in range(3):  # the second time, snapshots are taken where prefixes branch
            assert results(llm, given, each) == want
        found, scheduler = counts(llm), llm.llm_engine.scheduler
        assert 20 < found.accepted < found.drafts - 20 and scheduler.prefix_hits > 0
        assert (scheduler.num_preemptions > 0) == (blocks == 24 and kind not in ("mamba", "rwkv7"))


def test_payoff_follows_times_and_accepted_drafts() -> None:
    payoff = Payoff({1: 1.2, 8: 1.6, 32: 4.5}, 4)
    assert [payoff.pays(rows) for rows in (1, 5, 8, 9, 32, 99)] == [True, True, True, False, False, False]
    assert "1.20 at 1, 1.60 at 8, 4.50 at 32" in payoff.describe() and "off above 8" in payoff.describe()
    for _ in range(200):
        payoff.count_tokens(1 + (_ % 2))  # 1.5 tokens each
    assert payoff.largest == 1 and payoff.tokens == pytest.approx(1.5, abs=0.05)
    trials = 0
    for _ in range(1000):  # where drafts can pay at all, they are tried again
        payoff.count_step(8)
        trials += payoff.pays(8)
        assert not payoff.pays(32)
    assert 20 < trials < 100 and payoff.num_off > 900
    for _ in range(600):
        payoff.count_tokens(3)
    assert payoff.largest == 8 and payoff.pays(8)
    with pytest.raises(ValueError, match="no size was measured"):
        Payoff({}, 4)


OTHERS = ["gemma3_text", "qwen3", "deepseek_v3", "deepseek_v32", "gpt_oss", "gemma4_text", "mpt", "mixtral"]


@pytest.mark.parametrize(
    "kind", [k if k in OTHERS[:1] else pytest.param(k, marks=pytest.mark.slow) for k in OTHERS]
)
def test_other_kinds_of_attention_keep_tokens(kind: str, tmp_path: Path) -> None:
    plain, drafting = both(make_tiny(tmp_path, kind, "float32"), num_blocks=100)
    given = prompts(4, seed=3)
    assert results(drafting, given, params(0)) == results(plain, given, params(0))
    assert counts(drafting).accepted > 0


@pytest.mark.slow
def test_thousand_prompts_keep_tokens(folder: Path) -> None:
    plain, drafting = both(folder, num_blocks=400, max_num_seqs=32, max_num_batched_tokens=512)
    given = prompts(1000, seed=4)
    each = [params(2 * i, max_tokens=16) for i in range(1000)]
    assert results(drafting, given, each) == results(plain, given, each)


@pytest.mark.slow
def test_two_ranks_keep_tokens(folder: Path, engines: tuple[LLM, LLM]) -> None:
    given, each = prompts(6), [params(i) for i in range(6)]
    with LLM(str(folder), **SMALL, tensor_parallel_size=2, speculative_config=NGRAM) as llm:
        assert results(llm, given, each) == results(engines[0], given, each)


@pytest.mark.gpu
def test_drafts_on_the_gpu_keep_greedy_tokens(folder: Path, engines: tuple[LLM, LLM]) -> None:
    given, settings = prompts(6), {**SMALL, "device": "cuda", "dtype": "float32"}
    llm = LLM(str(folder), **settings, speculative_config=NGRAM)
    assert results(llm, given, params(0)) == results(engines[0], given, params(0))
    assert counts(llm).accepted > 0


def test_lookup_finds_the_last_occurrence_of_the_longest_group() -> None:
    rng, settings = random.Random(0), Speculation(4, prompt_lookup_max=3, prompt_lookup_min=2)
    for _ in range(50):
        tokens, lookup = [rng.randrange(3) for _ in range(30)], Lookup(settings)
        for end in range(12, 30, rng.randrange(1, 4)):
            seen, want = tokens[:end], []
            for n in (3, 2):
                places = [i for i in range(n, end) if seen[i - n : i] == seen[-n:]]
                if places and not want:
                    want = seen[places[-1] : places[-1] + 4]
            assert lookup.propose(seen[:10], seen[10:], 4) == want


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "method must be one of 'ngram', 'eagle3', 'draft_model', 'mtp', got None"),
        ({"method": "medusa", "num_speculative_tokens": 2}, "'mtp', got 'medusa'"),
        ({"method": "eagle3", "num_speculative_tokens": 2}, "'eagle3' needs `model`, the folder or hub id"),
        ({"method": "draft_model", "num_speculative_tokens": 2, "model": 3}, "of a draft model, got 3"),
        ({**SYNTHETIC}, "needs one of synthetic_acceptance_length and synthetic_acceptance_rates, got none"),
        ({**NGRAM, "synthetic_acceptance_length": 2}, "'standard' needs neither of synthetic_acceptance_length"),
        ({**SYNTHETIC, "synthetic_acceptance_length": 4.5}, "must be a number in [1, 4], one more than"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [0.5, 0.9, 0]}, "must be 3 numbers in [0, 1], none larger"),
        ({**NGRAM, "rejection_sample_method": "block"}, "must be 'standard' or 'synthetic', got 'block'"),
        ({"method": "ngram"}, "needs num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "must be an integer in [1, 32], got 0"),
        ({**NGRAM, "prompt_lookup_min": 9}, "prompt_lookup_min must be an integer in [1, 4], got 9"),
        ({**NGRAM, "disable_by_batch_size": True}, "must be an integer at least 1, or 'auto', got True"),
        ({**NGRAM, "model": "a"}, "'model' is not supported by 'ngram', only disable_by_batch_size"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused_with_their_value(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        EngineConfig("m", speculative_config=given)
    assert said in str(caught.value)


def test_engines_without_drafts_refuse_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="async_scheduling True is not possible with speculative_config"):
        EngineConfig("m", speculative_config=NGRAM, async_scheduling=True)
    own: dict[str, Any] = {"device": "cpu", "speculative_config": NGRAM}
    with pytest.raises(ValueError, match="applies to models with causal attention"):
        LLM(str(make_tiny_llada(tmp_path / "llada")), **own)
    with pytest.raises(ValueError, match="speculative_config applies to models that generate"):
        LLM(str(make_tiny_bert(tmp_path / "bert")), **own)
