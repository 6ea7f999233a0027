"""Whisper: equal to transformers however a step is composed; keys of the encoder's states are computed once."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fk_bench.info.verified import LOGITS
from support.rerun import install
from support.tiny import make_tiny_whisper
from support.whisper_base import whisper_base_path

from fastkernels import LLM, SamplingParams
from fastkernels.engine.execution.forward.cross_states import CrossStates

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
CPU: dict[str, Any] = {"device": "cpu", "num_blocks": 60}
RATE = 16_000


def audio(seed: int, samples: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.1, samples).astype(np.float32)


SHORT, LONG, FULL = audio(0, 3000), audio(1, 9001), audio(2, RATE)
PROMPTS: list[tuple[list[int], np.ndarray]] = [
    ([2], SHORT), ([2, 40, 41, 42], LONG), (list(range(10, 45)), FULL), ([2, 40, 41, 42], SHORT),
]  # fmt: skip


class Oracle:
    """transformers' model of a tiny checkpoint."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._known: dict[Any, list[int]] = {}

    @cached_property
    def model(self) -> Any:
        from transformers import WhisperForConditionalGeneration

        return WhisperForConditionalGeneration.from_pretrained(self.folder, dtype=torch.float32).eval()

    @cached_property
    def extractor(self) -> Any:
        from transformers import AutoFeatureExtractor

        return AutoFeatureExtractor.from_pretrained(self.folder)

    @torch.inference_mode()
    def logits(self, ids: list[int], samples: np.ndarray) -> torch.Tensor:
        features = self.extractor(samples, sampling_rate=RATE, return_tensors="pt")["input_features"]
        return self.model(input_features=features, decoder_input_ids=torch.tensor([ids])).logits[0]

    def greedy(self, ids: list[int], samples: np.ndarray, n: int = 12) -> list[int]:
        key = (tuple(ids), samples.tobytes(), n)
        if key in self._known:
            return self._known[key]
        made = list(ids)
        for _ in range(n):
            made.append(int(self.logits(made, samples)[-1].argmax()))
        return self._known.setdefault(key, made[len(ids) :])


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(make_tiny_whisper(tmp_path_factory.mktemp("whisper") / "whisper"))


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of sources of each step that encodes some."""
    counts: list[int] = []
    update = CrossStates.update

    def noted(self: CrossStates, step: Any) -> None:
        if step.encodes:
            counts.append(len(step.encodes))
        update(self, step)

    monkeypatch.setattr(CrossStates, "update", noted)
    return counts


def prompt(ids: list[int], samples: Any) -> dict[str, Any]:
    return {"prompt_token_ids": ids, "multi_modal_data": {"audio": samples}}


def generate(llm: LLM, prompts: list[tuple[list[int], Any]], params: Any = GREEDY) -> list[Any]:
    return llm.generate([prompt(*p) for p in prompts], params, use_tqdm=False)


def check(oracle: Oracle, llm: LLM, prompts: Any = PROMPTS, n: int = 12) -> list[Any]:
    outputs = generate(llm, prompts, replace(GREEDY, max_tokens=n))
    assert [o.outputs[0].token_ids for o in outputs] == [oracle.greedy(*p, n=n) for p in prompts]
    return outputs


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_graphs_read_the_keys_of_their_sources(oracle: Oracle, device: str) -> None:
    """The graph of a step has fewer or other rows later, whose sources are others."""
    llm = LLM(str(oracle.folder), **{**CPU, "device": device}, dtype="float32", max_num_seqs=3)
    runner: Any = llm.llm_engine.runner
    if device == "cpu":
        install(runner)
    check(oracle, llm)
    check(oracle, llm, PROMPTS[2:0:-1], n=20)
    assert runner.graphs.replays["decode"] > 20


def test_whisper_equals_transformers(oracle: Oracle, encoded: list[int]) -> None:
    """Alone, and in one batch, in which equal audio is encoded once."""
    llm = LLM(str(oracle.folder), **CPU)
    for one in PROMPTS:
        check(oracle, llm, [one])
    llm.llm_engine.reset_prefix_cache()
    encoded.clear()
    outputs = check(oracle, llm)
    assert encoded == [3]
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == len(outputs)


def test_whisper_logits_equal_transformers(oracle: Oracle) -> None:
    llm = LLM(str(oracle.folder), **CPU)
    ids, samples = PROMPTS[2]
    output = generate(llm, [(ids, samples)], SamplingParams(max_tokens=1, prompt_logprobs=0))[0]
    want = oracle.logits(ids, samples).log_softmax(-1)
    got = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
    assert got == pytest.approx(want[range(len(ids) - 1), ids[1:]].tolist(), abs=LOGITS, rel=LOGITS)
    assert (oracle.logits(ids, SHORT) - oracle.logits(ids, samples)).abs().max() > 0.05


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_whisper_in_small_steps_keeps_tokens(oracle: Oracle, overlap: bool) -> None:
    """Prompts in chunks, preempted sequences, and fewer blocks of states than requests need at once."""
    llm = LLM(
        str(oracle.folder), device="cpu", num_blocks=14, block_size=8, max_num_seqs=4, max_num_batched_tokens=9,
        async_scheduling=overlap,
    )  # fmt: skip
    cross = llm.llm_engine.scheduler.cross
    assert cross.blocks.num_usable == cross.each == 7  # one source
    for _ in range(2):
        check(oracle, llm, PROMPTS[1:])
    assert cross.blocks.num_free == 7


def test_whisper_preempted_sequences_keep_tokens(oracle: Oracle) -> None:
    llm = LLM(str(oracle.folder), device="cpu", num_blocks=25, block_size=4, max_num_seqs=4, max_model_len=32)
    prompts = [([2, i], SHORT) for i in range(40, 44)]
    check(oracle, llm, prompts, n=24)
    assert llm.llm_engine.scheduler.num_preemptions > 0


def test_equal_audio_shares_states_and_prefix(oracle: Oracle, encoded: list[int]) -> None:
    llm = LLM(str(oracle.folder), block_size=4, max_num_seqs=2, device="cpu", num_blocks=60)
    ids = list(range(20, 33))
    first, again = (check(oracle, llm, [(ids, samples)])[0] for samples in (LONG, LONG.copy()))
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 12) and encoded == [1]
    other = check(oracle, llm, [(ids, SHORT)])[0]
    assert other.num_cached_tokens == 0 and encoded == [1, 1]
    for seed in range(3, 6):  # evict the states of the first audio
        check(oracle, llm, [(ids, audio(seed, 500))])
    assert len(encoded) == 5
    check(oracle, llm, [(ids, LONG)])
    assert len(encoded) == 6


@pytest.mark.slow
def test_whisper_ranks_compute_the_same(oracle: Oracle) -> None:
    with LLM(str(oracle.folder), tensor_parallel_size=2, **CPU) as llm:
        check(oracle, llm)


@pytest.mark.slow
def test_whisper_base_equals_transformers() -> None:
    """The published weights, on tones and noise, for which the model has little to say."""
    oracle = Oracle(whisper_base_path())
    prompt = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
    llm = LLM(str(oracle.folder), device="cpu", dtype="float32", num_blocks=100, max_num_seqs=2)
    ids = llm.get_tokenizer()(prompt, add_special_tokens=False).input_ids
    assert len(ids) == 4
    time = np.arange(3 * RATE) / RATE
    tones = sum(
        np.sin(2 * np.pi * f * time) * np.sin(np.pi * (f % 7 + 1) * time) for f in (180, 420, 950, 2300)
    )
    for samples in ((0.1 * tones).astype(np.float32), audio(0, 5 * RATE)):
        given = {"prompt": prompt, "multi_modal_data": {"audio": (samples, RATE)}}
        output = llm.generate(given, replace(GREEDY, logprobs=0), use_tqdm=False)[0]
        made = list(output.outputs[0].token_ids)
        assert output.prompt_token_ids == ids and made == oracle.greedy(ids, samples)
        want = oracle.logits([*ids, *made[:-1]], samples).log_softmax(-1)[len(ids) - 1 :]
        got = [entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, made, strict=True)]
        assert got == pytest.approx(want[range(len(made)), made].tolist(), abs=1e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([2], r"the prompt needs one audio in multi_modal_data, got none"),
        (prompt([2], audio(0, RATE + 1)), "the audio has 1.0 s, and at most 1 s are possible"),
        (prompt([2], (SHORT, 1)), "the audio has a sampling rate of 1, and this model takes 16000"),
        (prompt([2], np.zeros((2, 30))), r"samples of one channel \[n\], got shape \[2, 30\]"),
        (prompt([2], np.full(30, np.nan)), "samples that are not finite"),
        (prompt([2], []), "samples of one channel"),
        ({"prompt_token_ids": [2], "multi_modal_data": {"image": 1}}, "needs one audio in multi_modal_data, got image"),
    ],
)  # fmt: skip
def test_bad_audio_is_refused(oracle: Oracle, given: Any, message: str) -> None:
    llm = LLM(str(oracle.folder), **CPU)
    with pytest.raises(ValueError, match=message):
        llm.generate(given, GREEDY, use_tqdm=False)
