"""Qwen2.5-Omni's Thinker: images, videos and audio in prompts, equal to transformers however a step is composed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fk_bench.info.verified import LOGITS
from support.media_oracle import RATE, MediaOracle, clip, prompt, tone, wav
from support.rerun import install
from support.tiny import OMNI, make_tiny_omni, small_videos
from support.vlm_oracle import image

from fastkernels import LLM, SamplingParams
from fastkernels.engine.execution.forward.media_features import MediaFeatures
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError

CPU: dict[str, Any] = {"device": "cpu", "max_model_len": 256, "num_blocks": 100}
WIDE = image(0, 40, 24)  # 15 tokens
SHORT, LONG = tone(1, 0.53), tone(2, 1.27)  # 13 and 32 tokens; neither is a multiple of a chunk
CLIP, TALL = clip(3, 6, 32, 24), clip(4, 3, 16, 56)  # 36 and 28 tokens
PICTURE, V, A = OMNI["image"], OMNI["video"], OMNI["audio"]
PROMPTS = [
    prompt(f"Hear {A} it", audio=[SHORT]),
    prompt("No media at all"),
    prompt(f"{A}{PICTURE} and {V}{A}?", audio=[LONG, SHORT], image=[WIDE], video=[CLIP]),
    prompt(f"{V} then {V}", video=[TALL, CLIP]),
]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MediaOracle]:
    with small_videos():
        yield MediaOracle(make_tiny_omni(tmp_path_factory.mktemp("omni") / "thinker"))


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, int]]]:
    """The kinds and features of the media of each step that encodes some."""
    found: list[list[tuple[str, int]]] = []
    prepare = MediaFeatures.prepare

    def noted(self: MediaFeatures, step: Any) -> Any:
        if step.encodes:
            found.append([(item.kind, item.size) for item in step.encodes])
        return prepare(self, step)

    monkeypatch.setattr(MediaFeatures, "prepare", noted)
    return found


def check(
    oracle: MediaOracle, llm: LLM, prompts: list[dict[str, Any]], n: int = 6, tolerance: float = LOGITS
) -> list[Any]:
    """Log-probabilities of each greedy token are those of transformers, which has no token that is more likely."""
    params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=0)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for given, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == oracle.prompt_ids(given)
        ids = output.outputs[0].token_ids
        want = oracle.logprobs(given, ids)[-n - 1 : -1]
        got = [entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, ids, strict=True)]
        assert got == pytest.approx(want[range(n), ids].tolist(), abs=tolerance, rel=tolerance)
        assert got == pytest.approx(want.amax(-1).tolist(), abs=tolerance, rel=tolerance)
    return outputs


def test_omni_logits_equal_transformers(oracle: MediaOracle) -> None:
    """Log-probabilities of the prompts' tokens, alone and in one batch; those of other audio differ."""
    llm = LLM(str(oracle.folder), **CPU)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    alone = [llm.generate(given, params, use_tqdm=False)[0] for given in PROMPTS]
    for outputs in (alone, llm.generate(PROMPTS, params, use_tqdm=False)):
        for given, output in zip(PROMPTS, outputs, strict=True):
            want, ids = oracle.logprobs(given), output.prompt_token_ids
            got = [entry[t].logprob for entry, t in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
            assert got == pytest.approx(want[range(len(ids) - 1), ids[1:]].tolist(), abs=LOGITS, rel=LOGITS)
    other = oracle.logprobs(prompt(PROMPTS[0]["prompt"], audio=[tone(9, 0.53)]))
    assert (other[-1] - oracle.logprobs(PROMPTS[0])[-1]).abs().max() > 0.01


def test_each_decode_step_equals_transformers(oracle: MediaOracle) -> None:
    """Requests with and without media in the same steps."""
    check(oracle, LLM(str(oracle.folder), **CPU), PROMPTS)


def test_small_steps_keep_tokens(oracle: MediaOracle) -> None:
    """Media are cut by chunks, preempted and found in the prefix cache."""
    llm = LLM(
        str(oracle.folder), device="cpu", num_blocks=18, block_size=8, max_num_seqs=4, max_num_batched_tokens=11,
        max_model_len=128,
    )  # fmt: skip
    same = [prompt(f"{i} {A} {V}", audio=[SHORT], video=[TALL]) for i in range(3)]
    for _ in range(2):
        check(oracle, llm, same, n=30)
        check(oracle, llm, [PROMPTS[2], *PROMPTS[:2]])
    scheduler = llm.llm_engine.scheduler
    assert scheduler.num_preemptions > 0 and scheduler.prefix_hits > 0


def test_equal_audio_shares_blocks_and_features(oracle: MediaOracle, encoded: list[Any]) -> None:
    llm = LLM(str(oracle.folder), block_size=4, **CPU)
    text = f"1234567{A} and then"
    check(oracle, llm, [prompt(text, audio=[SHORT])])
    again = check(oracle, llm, [prompt(text, audio=[SHORT.copy()])])[0]
    assert encoded == [[("audio", 13)]] and again.num_cached_tokens == 28
    other = check(oracle, llm, [prompt(text, audio=[tone(5, 0.53)])])[0]
    assert other.num_cached_tokens == 8  # the text before it
    check(oracle, llm, [prompt(f"x{V}{A}", audio=[SHORT], video=[TALL])])
    assert encoded[2:] == [[("video", 28)]]  # the audio's features are known


def test_media_of_a_step_are_encoded_by_kind(oracle: MediaOracle, encoded: list[Any]) -> None:
    check(oracle, LLM(str(oracle.folder), **CPU), [PROMPTS[0], PROMPTS[2]])
    assert [sorted(step) for step in encoded] == [
        [("audio", 13), ("audio", 32), ("image", 15), ("video", 36)]
    ]


def test_graphs_with_media_equal_transformers(oracle: MediaOracle) -> None:
    llm = LLM(str(oracle.folder), **CPU, max_num_seqs=4, max_num_batched_tokens=32)
    runner: Any = llm.llm_engine.runner
    install(runner)
    check(oracle, llm, PROMPTS)
    check(
        oracle, llm, [prompt(f"{A} and", audio=[SHORT]), prompt("a text of more tokens than a step has, 32")]
    )
    assert runner.graphs.replays["decode"] > 8 and runner.graphs.replays["mixed"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [True, False])
def test_media_on_the_gpu_equal_transformers(oracle: MediaOracle, eager: bool) -> None:
    """With CUDA graphs for the decodes, and in steps of a few tokens."""
    gpu = {**CPU, "device": "cuda", "dtype": "float32", "enforce_eager": eager}
    check(oracle, LLM(str(oracle.folder), **gpu), PROMPTS, n=12, tolerance=2e-3)
    check(
        oracle,
        LLM(str(oracle.folder), max_num_batched_tokens=16, max_num_seqs=4, **gpu),
        PROMPTS,
        tolerance=2e-3,
    )


@pytest.mark.slow
def test_ranks_compute_the_same(oracle: MediaOracle) -> None:
    with LLM(str(oracle.folder), tensor_parallel_size=2, **CPU) as llm:
        check(oracle, llm, PROMPTS)


def test_files_and_other_rates_are_read(oracle: MediaOracle) -> None:
    """A file has the samples of its 16 bits; another rate is resampled, to about as many tokens."""
    llm = LLM(str(oracle.folder), **CPU)
    file = wav(SHORT)
    samples = (SHORT * 32767).astype("<i2").astype(np.float32) / 32768
    given = prompt("f" + A, audio=[file])
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    found = llm.generate(given, params, use_tqdm=False)[0]
    want = oracle.logprobs(prompt("f" + A, audio=[samples]))[-2, found.prompt_token_ids[-1]]
    assert found.prompt_logprobs[-1][found.prompt_token_ids[-1]].logprob == pytest.approx(
        float(want), abs=LOGITS
    )
    slow = llm.generate(prompt(A, audio=[(SHORT[::2], RATE // 2)]), params, use_tqdm=False)[0]
    assert len(slow.prompt_token_ids) == 13 + 2


def test_whole_checkpoint_has_the_thinker(oracle: MediaOracle, tmp_path: Path) -> None:
    """As Qwen/Qwen2.5-Omni-7B is published, with talker and vocoder."""
    from safetensors.torch import load_file, save_file

    for file in oracle.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((oracle.folder / "config.json").read_text())
    whole = {"model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniModel"], "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps({**whole, "thinker_config": config}))
    weights = {f"thinker.{k}": v for k, v in load_file(oracle.folder / "model.safetensors").items()}
    weights["talker.codec_head.weight"] = weights["thinker.lm_head.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors")
    check(oracle, LLM(str(tmp_path), **CPU), [PROMPTS[2]], n=2)


BAD: list[tuple[dict[str, Any], str]] = [
    (prompt("a", audio=[SHORT]), "0 placeholders of audios, and 1 audios are given: each audio needs one, <.audio_"),
    (prompt(A, audio=[tone(0, 4.01)]), r"audio 0 of the prompt cannot be read: the audio has 4\.01 s, and at most 4 s"),
    (prompt(A, audio=[(SHORT, 1)]), "a sampling rate of 1 Hz, and 4000 to 384000 are possible"),
    (prompt(A, audio=[b"no audio"]), "audio 0 of the prompt cannot be read: the file is damaged, or no audio file"),
    (prompt(A, audio=[tone(0, 0.01)]), r"audio 0 of the prompt has 0\.01 s, and 0\.04 s are the least"),
    (prompt(A, audio=[np.full(9999, np.nan, np.float32)]), "samples that are not finite numbers"),
    (prompt(A * 3, audio=[SHORT] * 3), "the prompt has 3 audios, and at most 2 are allowed"),
    (prompt(V, video=[(CLIP, {"fps": 0})]), "video 0 of the prompt is one of frames with fps 0, which must be"),
    (prompt(A, audio=[np.zeros((2, 9), np.float32)]), r"samples of one channel \[n\], got shape \[2, 9\]"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), BAD)
def test_bad_audio_is_refused(oracle: MediaOracle, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shared(oracle).generate(given, SamplingParams(max_tokens=1), use_tqdm=False)
    assert not shared(oracle).llm_engine.has_unfinished_requests()


def shared(oracle: MediaOracle) -> LLM:
    """An engine for requests that are refused."""
    if not hasattr(oracle, "llm"):
        oracle.llm = LLM(str(oracle.folder), limit_mm_per_prompt={"audio": 2}, **CPU)  # type: ignore[attr-defined]
    return oracle.llm  # type: ignore[attr-defined,no-any-return]


def test_processor_without_audio_is_named(oracle: MediaOracle, tmp_path: Path) -> None:
    """A checkpoint for images only has no feature extractor."""
    from transformers import AutoProcessor

    for file in oracle.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    own = AutoProcessor.from_pretrained(oracle.folder)
    own.feature_extractor = None
    for name in ("processor_config.json", "preprocessor_config.json"):
        (tmp_path / name).unlink(missing_ok=True)
    own.image_processor.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"preprocessor_config.json"):
        LLM(str(tmp_path), **CPU)


def test_spectrum_is_that_of_padded_audio(oracle: MediaOracle) -> None:
    """Ours is of the audio and a few zeros; transformers' of zeros up to the longest audio."""
    reader = LLM(str(oracle.folder), **CPU).llm_engine.media
    for seconds in (0.1, 0.53, 1.0, 3.99, 4.0):
        given = prompt(A, audio=[tone(7, seconds)])
        item = reader.read(None, oracle.processor.tokenizer(A)["input_ids"], given["multi_modal_data"]).items[
            0
        ]
        made = oracle.inputs(given)
        frames = int(made["feature_attention_mask"].sum())
        assert item.grid[0] == frames
        assert np.abs(made["input_features"][0, :, :frames].numpy() - item.values.numpy()).max() < 1e-5
