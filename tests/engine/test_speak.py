"""CosyVoice3 as a whole against FunAudioLLM/CosyVoice ace7c47 on random weights, in float32.

speech/cosyvoice3.npz has the tokens and the sound of that code. Its draws were the most likely token, which is what
temperature 0 is here; tokens that end speech were all banned before the least length, as its vLLM path does.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fk_bench.info.verified import SOUNDS
from support.cosyvoice import TEXT, make_tiny_cosyvoice, voice
from support.tiny import make_tiny_llama

from fastkernels import LLM
from fastkernels.engine.engines.engine import make_engine
from fastkernels.engine.options.config import EngineConfig
from fastkernels.engine.scheduling.speaking import SpeechParams
from fastkernels.engine.speech import sentences
from fastkernels.models.common.checkpoints.checkpoint import CheckpointError

RECORDED = np.load(Path(__file__).parent / "speech" / "cosyvoice3.npz")
GREEDY: dict[str, Any] = {"voice": "anna", "temperature": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_cosyvoice(tmp_path_factory.mktemp("speech") / "cosyvoice")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), device="cpu", voices=str(folder / "voices"), num_blocks=200, max_num_seqs=8)


def sound_of(llm: LLM, params: SpeechParams, text: str = TEXT) -> list[np.ndarray]:
    """The pieces that a request is sent in."""
    engine, found = llm.llm_engine, []
    engine.add_request("one", text, params)
    while engine.has_unfinished_requests():
        found += [output.samples for output in engine.step()]
    return found


@pytest.mark.parametrize(("name", "text"), [("tokens", TEXT), ("other_tokens", "Is it so?")])
def test_tokens_equal_cosyvoice(llm: LLM, name: str, text: str) -> None:
    engine = llm.llm_engine
    request = engine.make_request("one", text, SpeechParams(**GREEDY))
    engine.add_request("one", request)
    while engine.core.busy:
        done = engine.core.step()
        engine._read(done)
    found = request.groups[0].sequences[0].output_token_ids[:-1]
    engine.abort_all()
    assert found == RECORDED[name].tolist()


@pytest.mark.parametrize(("name", "more"), [("whole", {}), ("fast", {"speed": 1.5})])
def test_sound_equals_cosyvoice(llm: LLM, name: str, more: dict[str, Any]) -> None:
    (found,) = llm.speak(TEXT, SpeechParams(**GREEDY, **more), use_tqdm=False)
    want = RECORDED[name].astype(np.float32)
    assert found.finished and found.rate == 24_000 and found.samples.shape == want.shape
    assert np.abs(found.samples - want).max() < SOUNDS
    assert np.abs(want).mean() > 0.01


def test_streamed_sound_and_its_pieces_equal_cosyvoice(llm: LLM) -> None:
    found = sound_of(llm, SpeechParams(**GREEDY, stream=True))
    assert [len(piece) for piece in found] == RECORDED["sizes"].tolist()
    assert np.abs(np.concatenate(found) - RECORDED["stream"].astype(np.float32)).max() < SOUNDS


def whole(outputs: list[Any]) -> list[np.ndarray]:
    return [output.samples for output in outputs]


def test_batches_have_the_sound_of_single_requests(llm: LLM) -> None:
    """Requests of other lengths, voices and kinds at once; their parts of tokens become sound together."""
    texts = ["Hi you.", "Is it so?", "No."]
    params = [
        SpeechParams(v, temperature=0, stream=s) for v, s in (("anna", False), ("ben", True), ("ben", False))
    ]
    together = whole(llm.speak(texts, params, use_tqdm=False))
    for text, own, found in zip(texts, params, together, strict=True):
        (alone,) = whole(llm.speak(text, own, use_tqdm=False))
        assert alone.shape == found.shape and np.abs(alone - found).max() < 1e-3


def test_preempted_requests_keep_their_sound(folder: Path, llm: LLM) -> None:
    """Three sequences of 78 tokens in a cache of 144."""
    texts, params = ["Hi you.", "Is it so?", "Was it?"], SpeechParams(**GREEDY)
    with LLM(
        str(folder),
        device="cpu",
        voices=str(folder / "voices"),
        num_blocks=10,
        max_model_len=128,
        enable_prefix_caching=False,
    ) as small:
        found = whole(small.speak(texts, params, use_tqdm=False))
        assert small.llm_engine.scheduler.num_preemptions > 0
    for one, other in zip(found, whole(llm.speak(texts, params, use_tqdm=False)), strict=True):
        assert one.shape == other.shape and np.abs(one - other).max() < 1e-3


def test_parts_of_a_text_come_in_order(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentences, "MOST", 12)
    monkeypatch.setattr(sentences, "LAST", 1)
    text = "Is it so? Hi you. No."
    request = llm.llm_engine.make_request("one", text, SpeechParams(**GREEDY))
    assert len(request.parts) == 2
    (found,) = whole(llm.speak(text, SpeechParams(**GREEDY), use_tqdm=False))
    alone = whole(llm.speak(["Is it so?", "Hi you. No."], SpeechParams(**GREEDY), use_tqdm=False))
    assert found.shape == (sum(map(len, alone)),) and np.abs(found - np.concatenate(alone)).max() < 1e-3


def test_seed_and_instructions_change_the_sound(llm: LLM) -> None:
    draws = [SpeechParams("ben", seed=s) for s in (3, 3, 4)]
    one, same, other = whole(llm.speak([TEXT] * 3, draws, use_tqdm=False))
    assert np.array_equal(one, same) or np.abs(one - same).max() < 1e-3
    assert one.shape != other.shape or np.abs(one - other).max() > 0.01
    ways = [SpeechParams(**GREEDY, instructions=i) for i in (None, "Speak quietly.")]
    plain, quiet = whole(llm.speak([TEXT] * 2, ways, use_tqdm=False))
    assert plain.shape != quiet.shape or np.abs(plain - quiet).max() > 0.01


def test_abort_leaves_nothing_and_others_go_on(llm: LLM) -> None:
    engine = llm.llm_engine
    (want,) = whole(llm.speak("Is it so?", SpeechParams(**GREEDY), use_tqdm=False))
    engine.add_request("gone", TEXT, SpeechParams(**GREEDY, stream=True))
    engine.add_request("kept", "Is it so?", SpeechParams(**GREEDY))
    while not (found := engine.step()):
        pass
    assert found[0].request_id == "gone"
    engine.abort_request("gone")
    kept = []
    while engine.has_unfinished_requests():
        kept += engine.step()
    assert {output.request_id for output in kept} == {"kept"}
    assert np.abs(np.concatenate(whole(kept)) - want).max() < 1e-3
    assert not engine._parts and not engine.runner._spoken and not engine.requests
    assert engine.blocks.num_usable == engine.blocks.num_blocks - 1


@pytest.mark.parametrize(
    ("text", "params", "words"),
    [
        ("", {}, "text has nothing to speak: ''"),
        ("?!", {}, "nothing to speak"),
        ("a" * 4097, {}, "at most 4096 characters, got 4097"),
        ("\ud800", {}, "not valid Unicode"),
        (7, {}, "text must be a string, got 7"),
        (TEXT, {"voice": "zoe"}, "voice 'zoe' is not one of anna, ben"),
        (TEXT, {"voice": None}, "voice is required"),
        (TEXT, {"speed": 0}, "speed must be a number from 0.25 to 4, got 0"),
        (TEXT, {"speed": float("nan")}, "speed must be"),
        (TEXT, {"temperature": -1.0}, "temperature must be a number from 0 to 2"),
        (TEXT, {"seed": 2**63}, "seed must be"),
        (TEXT, {"instructions": 3}, "instructions must be text"),
    ],
)
def test_unusable_requests_are_refused(llm: LLM, text: Any, params: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        llm.speak(text, SpeechParams(**{"voice": "anna", **params}), use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()


def test_other_models_and_other_methods_are_refused(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"LLM\.speak and /v1/audio/speech"):
        llm.generate("a", use_tqdm=False)
    other = LLM(str(make_tiny_llama(tmp_path / "llama")), device="cpu", num_blocks=20)
    with pytest.raises(ValueError, match=r"speak: .* is for LLM\.generate"):
        other.speak("a")


def _yaml(old: str, new: str) -> Any:
    def change(folder: Path) -> None:
        file = folder / "cosyvoice3.yaml"
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f / "flow.pt").unlink(), "has no flow.safetensors (or .pt)"),
        (lambda f: (f / "llm.pt").write_bytes(b"no"), "llm.pt is not a file of tensors"),
        (lambda f: torch.save({"x": torch.ones(1)}, f / "hift.pt"), "keys missing from it"),
        (lambda f: (f / "cosyvoice3.yaml").write_text("llm: 1"), "llm.speech_token_size"),
        (lambda f: (f / "cosyvoice3.yaml").write_text("a: [1"), "cosyvoice3.yaml cannot be read"),
        (
            _yaml("token_mel_ratio: 2", "token_mel_ratio: 0"),
            "config.flow.ratio=0 is not supported, only integers from 1",
        ),
        (_yaml("sample_rate: 24000", "sample_rate: 0"), "config.vocoder.rate=0 is not supported"),
        (
            _yaml("depth: 2", "depth: 1.5"),
            "config.flow.depth=1.5 is not supported, only integers from 1 to 10000",
        ),
        (
            _yaml("inference_cfg_rate: 0.7", "inference_cfg_rate: x"),
            "config.flow.guidance='x' is not supported",
        ),
        (
            _yaml("upsample_rates: [8, 5, 3]", "upsample_rates: 8"),
            "config.vocoder.rates=8 is not supported, only lists",
        ),
        (lambda f: (f / "CosyVoice-BlankEN" / "config.json").unlink(), "config.json cannot be read"),
    ],
)
def test_damaged_checkpoints_are_refused(folder: Path, tmp_path: Path, change: Any, words: str) -> None:
    made = tmp_path / "damaged"
    shutil.copytree(folder, made)
    change(made)
    with pytest.raises(CheckpointError, match=re.escape(words)):
        make_engine(EngineConfig(str(made), device="cpu", num_blocks=20))


def test_sampling_that_is_no_number_is_refused(folder: Path, tmp_path: Path) -> None:
    made = Path(shutil.copytree(folder, tmp_path / "damaged"))
    _yaml("top_p: 0.8", "top_p: x")(made)
    with pytest.raises(ValueError, match=r"top_p must be in \(0, 1\], got 'x'"):
        make_engine(EngineConfig(str(made), device="cpu", num_blocks=20))


def test_ranks_and_drafts_are_refused(folder: Path) -> None:
    for more in (
        {"tensor_parallel_size": 2},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    ):
        with pytest.raises(ValueError, match="not supported for speech models"):
            make_engine(EngineConfig(str(folder), device="cpu", **more))


def test_random_weights_need_no_files_of_weights(folder: Path, tmp_path: Path) -> None:
    for name in ("cosyvoice3.yaml", "CosyVoice-BlankEN"):
        source = folder / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    with LLM(str(tmp_path), device="cpu", num_blocks=50, load_format="dummy") as made:
        (found,) = made.speak("Hi.", SpeechParams(voice(), seed=1), use_tqdm=False)
    assert len(found.samples) >= 2 * 3 * 960 - 960 and np.isfinite(found.samples).all()


DEVICE = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.mark.parametrize("device", [DEVICE])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gpu_speaks_as_the_cpu_does(folder: Path, llm: LLM, device: str, dtype: str) -> None:
    """With graphs from the second time on: sounds of the same tokens, whole and streamed, in batches."""
    params = [SpeechParams(**GREEDY), SpeechParams("ben", temperature=0), SpeechParams(**GREEDY, stream=True)]
    want = whole(llm.speak([TEXT] * 3, params, use_tqdm=False))
    options = {"voices": str(folder / "voices"), "num_blocks": 200, "max_num_seqs": 8}
    with LLM(str(folder), device=device, dtype=dtype, **options) as gpu:
        for _ in range(3):
            found = whole(gpu.speak([TEXT] * 3, params, use_tqdm=False))
        assert gpu.llm_engine.runner.speech_graphs.replays > 0
    if dtype == "float32":
        for one, other in zip(found, want, strict=True):
            assert one.shape == other.shape and np.abs(one - other).max() < 2e-2
    assert all(len(x) and np.isfinite(x).all() for x in found)
