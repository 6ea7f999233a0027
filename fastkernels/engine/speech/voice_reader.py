"""Make voices of recordings with a checkpoint's ONNX models: speech_tokenizer_v3.onnx and campplus.onnx."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fastkernels.engine.speech.files import AudioError, MissingPackage, recording
from fastkernels.engine.speech.voices import MOST_SECONDS, Voice, VoiceError

TOKENIZER, SPEAKER = "speech_tokenizer_v3.onnx", "campplus.onnx"
RATE, SOUND_RATE = 16_000, 24_000  # Hz: of what the ONNX models read, and of the mel spectrogram
LEAST_SECONDS = 0.5


class VoiceReader:
    """checkpoint: the folder with the ONNX models, which run on the CPU.

    Raises VoiceError without them, and MissingPackage without the extra `speech`.
    """

    def __init__(self, checkpoint: Path):
        try:
            import onnxruntime
        except ImportError as error:
            raise MissingPackage(
                "voices of recordings need the package onnxruntime: pip install 'fastkernels[speech]', or use files"
                " that `fk-bench voice` makes where it is installed"
            ) from error
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1

        def session(name: str) -> Any:
            file = checkpoint / name
            if not file.is_file():
                raise VoiceError(f"{checkpoint} has no {name}, which makes voices of recordings")
            try:
                return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
            except Exception as error:  # of its own kinds
                raise VoiceError(f"{file} cannot be used: {' '.join(str(error).split())}") from error

        self._tokenizer, self._speaker = session(TOKENIZER), session(SPEAKER)

    def read(self, given: Any, text: str, name: str) -> Voice:
        """A voice of a recording: a path, the bytes of a file, or samples, as `files.recording` takes them.

        text: what it says, or ''. Raises AudioError.
        """
        samples, sound = (_samples(given, rate) for rate in (RATE, SOUND_RATE))
        tokens, frames = self.tokens(samples), mel(sound)
        count = min(len(frames) // 2, len(tokens))
        return Voice.of(name, text, tokens[:count], frames[: 2 * count], self.speaker(samples))

    def tokens(self, samples: np.ndarray) -> np.ndarray:
        """Speech tokens [P] of samples [n] at RATE, 25 a second."""
        features = whisper_mel(samples)[None]
        names = [i.name for i in self._tokenizer.get_inputs()]
        length = np.array([features.shape[2]], np.int32)
        return self._tokenizer.run(None, dict(zip(names, (features, length), strict=True)))[0].reshape(-1)

    def speaker(self, samples: np.ndarray) -> np.ndarray:
        """The embedding [S] of the speaker of samples [n] at RATE."""
        features = kaldi_mel(samples)
        features = features - features.mean(axis=0, keepdims=True)
        return self._speaker.run(None, {self._speaker.get_inputs()[0].name: features[None]})[0].reshape(-1)


def _samples(given: Any, rate: int) -> np.ndarray:
    made = recording(given, rate, MOST_SECONDS).window(0, MOST_SECONDS * rate + 1)
    seconds = len(made) / rate
    if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise AudioError(
            f"a recording of a voice must have {LEAST_SECONDS} to {MOST_SECONDS} s, got {seconds:.1f} s"
        )
    return made


def whisper_mel(samples: np.ndarray) -> np.ndarray:
    """Whisper's features [128, T] float32 of samples at RATE, 100 a second, without padding."""
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=128)
    made = extractor(samples, sampling_rate=RATE, padding="do_not_pad", truncation=False, return_tensors="np")
    return np.asarray(made["input_features"][0], np.float32)


def kaldi_mel(samples: np.ndarray) -> np.ndarray:
    """Kaldi's logarithms of mel energies [T, 80] float32 of samples at RATE, 100 a second, without dither."""
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    filters = mel_filter_bank(
        257, 80, 20, RATE // 2, RATE, norm=None, mel_scale="kaldi", triangularize_in_mel_space=True
    )
    window = window_function(400, "povey", periodic=False)
    made = spectrogram(
        samples, window, frame_length=400, hop_length=160, fft_length=512, power=2.0, center=False, preemphasis=0.97,
        mel_filters=filters, log_mel="log", mel_floor=float(np.finfo(np.float32).eps), remove_dc_offset=True,
    )  # fmt: skip
    return np.ascontiguousarray(made.T, np.float32)


def mel(samples: np.ndarray) -> torch.Tensor:
    """The mel spectrogram [T, 80] float32 that the flow reads, of samples at SOUND_RATE: 50 frames a second."""
    from transformers.audio_utils import mel_filter_bank

    size, hop = 1920, 480
    filters = mel_filter_bank(
        size // 2 + 1, 80, 0, SOUND_RATE / 2, SOUND_RATE, norm="slaney", mel_scale="slaney"
    )
    x = F.pad(torch.from_numpy(samples)[None], ((size - hop) // 2,) * 2, mode="reflect")[0]
    found = torch.stft(x, size, hop, window=torch.hann_window(size), center=False, return_complex=True)
    magnitude = (found.real**2 + found.imag**2 + 1e-9).sqrt()
    return (torch.from_numpy(filters).float().T @ magnitude).clamp(min=1e-5).log().T
