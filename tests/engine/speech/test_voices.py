"""Voices: files, recordings that ONNX models read, and those that are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.commands import fk_bench_here
from support.cosyvoice import TEXT, make_tiny_cosyvoice, voice

from fastkernels import LLM
from fastkernels.engine.scheduling.speaking import SpeechParams
from fastkernels.engine.speech.encoding import Encoder
from fastkernels.engine.speech.files import AudioError
from fastkernels.engine.speech.voice_folder import Voices
from fastkernels.engine.speech.voice_reader import (
    SPEAKER,
    TOKENIZER,
    VoiceReader,
    kaldi_mel,
    mel,
    whisper_mel,
)
from fastkernels.engine.speech.voices import Voice, VoiceError


def noise(seconds: float, rate: int = 16_000) -> np.ndarray:
    made = np.random.default_rng(4).normal(0, 0.1, round(seconds * rate))
    return (made * np.sin(np.arange(len(made)) / 500)).astype(np.float32)


def save_onnx(folder: Path) -> None:
    """Models with the inputs and outputs of the checkpoint's: the loudest of 50 bins, and the largest values."""
    import onnx
    from onnx import TensorProto as T
    from onnx import helper as h

    def save(name: str, nodes: list, inputs: list, output: object, constants: dict[str, list[int]]) -> None:
        made = [h.make_tensor(k, T.INT64, [len(v)], v) for k, v in constants.items()]
        graph = h.make_graph(nodes, "g", inputs, [output], made)
        model = h.make_model(graph, opset_imports=[h.make_opsetid("", 13)], ir_version=8)
        onnx.save(model, folder / name)

    value = h.make_tensor_value_info
    save(
        TOKENIZER,
        [
            h.make_node("Slice", ["feats", "starts", "ends", "axes", "steps"], ["some"]),
            h.make_node("ArgMax", ["some"], ["ids"], axis=1, keepdims=0),
            h.make_node("Cast", ["ids"], ["tokens"], to=T.INT32),
        ],
        [value("feats", T.FLOAT, [1, 128, "T"]), value("feats_length", T.INT32, [1])],
        value("tokens", T.INT32, [1, "N"]),
        {"starts": [0, 0], "ends": [50, 1 << 30], "axes": [1, 2], "steps": [1, 4]},
    )
    save(
        SPEAKER,
        [
            h.make_node("Slice", ["x", "starts", "ends", "axes"], ["some"]),
            h.make_node("ReduceMax", ["some"], ["speaker"], axes=[1], keepdims=0),
        ],
        [value("x", T.FLOAT, [1, "T", 80])],
        value("speaker", T.FLOAT, [1, 12]),
        {"starts": [0], "ends": [12], "axes": [2]},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_tiny_cosyvoice(tmp_path_factory.mktemp("voices") / "cosyvoice", voices=False)
    save_onnx(made)
    (made / "own").mkdir()
    encoder = Encoder("wav", 16_000, 32_000)
    (made / "own" / "cleo.wav").write_bytes(encoder.encode(noise(2.0)) + encoder.close())
    (made / "own" / "cleo.txt").write_text("Some noise.\n")
    return made


def test_features_equal_their_formulas() -> None:
    """Kaldi's filter bank and Whisper's mel in float64, from their definitions."""
    x = noise(1.0)
    rows = np.stack([x[i * 160 : i * 160 + 400] for i in range(1 + (len(x) - 400) // 160)]).astype(np.float64)
    rows -= rows.mean(1, keepdims=True)
    rows -= 0.97 * np.concatenate([rows[:, :1], rows[:, :-1]], 1)
    power = np.abs(np.fft.rfft(rows * np.hanning(400) ** 0.85, 512)) ** 2
    scale = 1127 * np.log1p(np.arange(257) * 16_000 / 512 / 700)
    edges = np.linspace(1127 * np.log1p(20 / 700), 1127 * np.log1p(8000 / 700), 82)
    left, middle, right = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    bank = np.clip(np.minimum((scale - left) / (middle - left), (right - scale) / (right - middle)), 0, None)
    bank[:, 256] = 0
    want = np.log(np.maximum(power @ bank.T, np.finfo(np.float32).eps))
    assert kaldi_mel(x).shape == want.shape and np.abs(kaldi_mel(x) - want).max() < 1e-4
    assert whisper_mel(x).shape == (128, 100)
    assert mel(noise(1.0, 24_000)).shape == (50, 80)


def test_recording_becomes_a_voice_that_speaks(folder: Path) -> None:
    with LLM(str(folder), device="cpu", num_blocks=200, voices=str(folder / "own")) as llm:
        made = llm.llm_engine.voices["cleo"]
        assert made.text == "Some noise." and len(made.tokens) == 50 and made.frames.shape == (100, 80)
        loudest = whisper_mel(noise(2.0))[:50, ::4].argmax(0)  # of samples with 16 bits in the file
        assert (made.tokens.numpy() == loudest).mean() > 0.9
        (found,) = llm.speak(TEXT, SpeechParams(temperature=0), use_tqdm=False)
        (other,) = llm.speak(TEXT, SpeechParams(voice(), temperature=0), use_tqdm=False)
    assert len(found.samples) and not np.array_equal(found.samples, other.samples)


def test_command_makes_voices_of_recordings_and_arrays(folder: Path, tmp_path: Path) -> None:
    done = fk_bench_here(
        "voice",
        folder / "own" / "cleo.wav",
        "--model",
        folder,
        "--text",
        "Noise.",
        "--out",
        tmp_path / "c.safetensors",
    )
    assert done.returncode == 0, done.stderr
    made = Voice.read(tmp_path / "c.safetensors")
    assert (made.name, made.text, len(made.tokens)) == ("c", "Noise.", 50)
    np.savez(tmp_path / "a.npz", tokens=made.tokens, frames=made.frames, speaker=made.speaker)
    assert fk_bench_here("voice", tmp_path / "a.npz", "--out", tmp_path / "d.safetensors").returncode == 0
    assert torch.equal(Voice.read(tmp_path / "d.safetensors").frames, made.frames)
    failed = fk_bench_here(
        "voice", folder / "own" / "cleo.txt", "--model", folder, "--out", tmp_path / "e.safetensors"
    )
    assert failed.returncode == 2 and "no audio file" in failed.stderr and "Traceback" not in failed.stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": [0, 50, 1, 1, 1, 1]}, "tokens must be from 0 to 49"),
        ({"tokens": []}, "P from 1 to 750, got \\[0\\]"),
        ({"frames": np.zeros((11, 80))}, "frames must be \\[12, 80\\], got \\[11, 80\\]"),
        ({"frames": np.full((12, 80), np.nan)}, "not finite"),
        ({"speaker": np.zeros(13)}, "speaker must be \\[12\\], got \\[13\\]"),
    ],
)
def test_voice_that_does_not_fit_is_refused(folder: Path, change: dict, words: str) -> None:
    good = voice()
    fields = {"tokens": good.tokens, "frames": good.frames, "speaker": good.speaker, **change}
    bad = Voice.of("odd", "", *fields.values())
    with LLM(str(folder), device="cpu", num_blocks=200) as llm, pytest.raises(VoiceError, match=words):
        llm.speak(TEXT, SpeechParams(bad), use_tqdm=False)


def test_folders_of_voices_are_checked(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(VoiceError, match="is not a folder"):
        Voices.read(tmp_path / "none", folder)
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    with pytest.raises(VoiceError, match=r"bad\.safetensors is not a file of a voice"):
        Voices.read(tmp_path, folder)
    (tmp_path / "bad.safetensors").unlink()
    (tmp_path / "short.wav").write_bytes((folder / "own" / "cleo.wav").read_bytes()[:2000])
    with pytest.raises(VoiceError, match=r"must have 0\.5 to 30 s"):
        Voices.read(tmp_path, folder)
    with pytest.raises(VoiceError, match=f"has no {TOKENIZER}"):
        Voices.read(tmp_path, tmp_path)
    with pytest.raises(AudioError, match=r"got 31\.0 s|at most 30 s"):
        VoiceReader(folder).read(noise(31.0), "", "long")
