"""A tiny random Whisper with the tokens of a recognizer, windows of a second, and what transformers generates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.tiny import make_tiny_whisper

RATE = 16_000
END, START = 256, 257
LANGUAGES = {"en": 258, "de": 259, "fr": 260}
TRANSLATE, TRANSCRIBE, PREVIOUS, NO_SPEECH, NO_TIMES = 261, 262, 264, 265, 266
FIRST = NO_TIMES + 1  # of 51 timestamps, 0.02 s apart
VOCAB = FIRST + 51
SUPPRESSED = (5, 66, 130)
NAMES = (
    "<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES), "<|translate|>", "<|transcribe|>",
    "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
)  # fmt: skip
SPEECH = Path(__file__).with_name("speech.ogg")


def recording(seed: int, seconds: float) -> np.ndarray:
    """Noise of changing loudness, one channel at RATE."""
    made = np.random.default_rng(seed).normal(0, 0.1, round(seconds * RATE))
    return (made * np.sin(np.arange(len(made)) / 2000) ** 2).astype(np.float32)


def make_tiny_speech(folder: str | Path, seed: int = 0, **fields: Any) -> Path:
    """A random float32 Whisper in `folder`. fields: of the config"""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {
        "vocab_size": VOCAB, "bos_token_id": END, "eos_token_id": END, "pad_token_id": END,
        "decoder_start_token_id": START, "encoder_layers": 1, "decoder_layers": 2, "max_target_positions": 56,
    }  # fmt: skip
    made = make_tiny_whisper(folder, seed, **{**ids, **fields})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    assert tokenizer.add_special_tokens(list(NAMES)) == len(NAMES)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(made)
    config = {"suppress_tokens": list(SUPPRESSED), "eos_token_id": END, "is_multilingual": True}
    (made / "generation_config.json").write_text(json.dumps(config))
    return made


class SpeechOracle:
    """transformers' model of a tiny checkpoint, with its own rules for timestamps."""

    def __init__(self, folder: Path):
        self.folder = folder

    @cached_property
    def model(self) -> Any:
        from transformers import WhisperForConditionalGeneration

        return WhisperForConditionalGeneration.from_pretrained(self.folder, dtype=torch.float32).eval()

    @cached_property
    def features(self) -> Any:
        from transformers import AutoFeatureExtractor

        extractor = AutoFeatureExtractor.from_pretrained(self.folder)
        return lambda samples: extractor(samples, sampling_rate=RATE, return_tensors="pt")["input_features"]

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], samples: np.ndarray) -> torch.Tensor:
        """Of the next token: [V]."""
        return self.model(
            input_features=self.features(samples), decoder_input_ids=torch.tensor([ids])
        ).logits[0, -1]

    def greedy(self, prompt: Sequence[int], samples: np.ndarray, most: int) -> list[int]:
        """The tokens after a prompt, the end included, at most `most`."""
        from types import SimpleNamespace

        from transformers.generation.logits_process import (
            SuppressTokensLogitsProcessor,
            WhisperTimeStampLogitsProcessor,
        )

        config: Any = SimpleNamespace(
            no_timestamps_token_id=NO_TIMES,
            eos_token_id=END,
            bos_token_id=START,
            max_initial_timestamp_index=50,
        )
        times = WhisperTimeStampLogitsProcessor(config, begin_index=len(prompt))
        special = list(range(END + 1, FIRST))
        banned = SuppressTokensLogitsProcessor([*SUPPRESSED, *special], device="cpu")
        ids = list(prompt)
        while len(ids) - len(prompt) < most and (len(ids) == len(prompt) or ids[-1] != END):
            given = torch.tensor([ids])
            ids.append(int(times(given, banned(given, self.logits(ids, samples)[None]))[0].argmax()))
        return ids[len(prompt) :]
