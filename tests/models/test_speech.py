"""CosyVoice3's flow and vocoder against outputs of FunAudioLLM/CosyVoice ace7c47 on random weights, in float32.

cosyvoice3.npz has these outputs, and the names and shapes of the weights. Weights are a function of their names.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.cosyvoice import RECORDED, weights

from fastkernels.models.common.checkpoints.checkpoint import DIRECTION, LENGTH, without_norm
from fastkernels.models.common.speech.flow import FlowConfig, SpeechFlow, Utterance
from fastkernels.models.common.speech.vocoder import Vocoder, VocoderConfig

CPU = torch.device("cpu")
FLOW = FlowConfig(
    vocab=50, speaker=12, lookahead_width=32, width=64, depth=2, heads=4, head_size=16, chunk=10
)
SOUND = VocoderConfig(width=32, pitch_width=32)


@pytest.fixture(scope="module")
def flow() -> SpeechFlow:
    made = SpeechFlow(FLOW).eval()
    made.load_state_dict(weights("flow"))
    return made


@pytest.fixture(scope="module")
def vocoder() -> Vocoder:
    own = weights("sound")
    made = Vocoder(SOUND).eval()
    for name in [name for name in own if name.endswith(LENGTH)]:
        stem = name.removesuffix(LENGTH)
        own[f"{stem}.weight"] = without_norm(own.pop(name), own.pop(stem + DIRECTION))
    made.load_state_dict(own)
    return made


@pytest.fixture(scope="module")
def given() -> dict[str, torch.Tensor]:
    """Tokens, and tokens, frames and embedding of a voice; frames for the vocoder."""
    g = torch.Generator().manual_seed(5)
    made = {
        "tokens": torch.randint(0, 50, (17,), generator=g),
        "prompt": torch.randint(0, 50, (6,), generator=g),
        "frames": torch.randn(12, 80, generator=g),
        "speaker": torch.randn(12, generator=g),
        "mel": torch.randn(1, 80, 24, generator=g)[0].T,
    }
    return made


def run(flow: SpeechFlow, given: dict[str, torch.Tensor], n: int, **more: Any) -> torch.Tensor:
    return flow([row(given, n, **more)])[0]


def row(given: dict[str, torch.Tensor], n: int, **more: Any) -> Utterance:
    return Utterance(given["tokens"][:n], given["prompt"], given["frames"], given["speaker"], **more)


@pytest.mark.parametrize(
    ("name", "n", "more"),
    [
        ("whole", 17, {}),
        ("stream", 13, {"streaming": True, "final": False}),
        ("last", 17, {"streaming": True}),
    ],
)
def test_frames_equal_cosyvoice(
    flow: SpeechFlow, given: dict[str, torch.Tensor], name: str, n: int, more: Any
) -> None:
    found = run(flow, given, n, **more).numpy()
    assert np.abs(found - RECORDED[f"flow_{name}"]).max() < 1e-4


def test_later_tokens_keep_streamed_frames(flow: SpeechFlow, given: dict[str, torch.Tensor]) -> None:
    """Those of whole chunks: 20 frames of the voice's 12 and of 10 tokens, of which 3 are looked ahead."""
    first, more = (run(flow, given, n, streaming=True, final=False) for n in (12, 17))
    whole = (12 + len(first)) // FLOW.chunk * FLOW.chunk - 12
    assert whole > 0 and (first[:whole] - more[:whole]).abs().max() < 1e-5
    assert (run(flow, given, 12, final=False)[:whole] - run(flow, given, 17)[:whole]).abs().max() > 1e-3


def test_speech_longer_than_the_noise_is_refused(
    flow: SpeechFlow, given: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastkernels.models.common.speech.flow.MOST", 40)
    with pytest.raises(ValueError, match="speech of 46 frames is not possible, only 40"):
        run(flow, given, 17)


@pytest.mark.parametrize(("name", "final"), [("whole", True), ("part", False)])
def test_sound_equals_cosyvoice(
    vocoder: Vocoder, given: dict[str, torch.Tensor], name: str, final: bool
) -> None:
    found = vocoder([given["mel"]], [final])[0].numpy()
    want = RECORDED[f"sound_{name}"]
    assert found.shape == want.shape and np.abs(found - want).max() < 1e-3
    assert np.abs(want).mean() > 0.01


def test_later_frames_keep_streamed_sound(vocoder: Vocoder, given: dict[str, torch.Tensor]) -> None:
    part, whole = vocoder([given["mel"][:16], given["mel"]], [False, True])
    assert len(part) == 8 * SOUND.samples and len(whole) == 24 * SOUND.samples
    assert (part - whole[: len(part)]).abs().max() < 1e-3


def test_noise_has_one_beginning(vocoder: Vocoder) -> None:
    assert torch.equal(vocoder.noise(100, CPU).clone(), Vocoder(SOUND).noise(5000, CPU)[:100])


def test_batch_of_flow_equals_single_rows(flow: SpeechFlow, given: dict[str, torch.Tensor]) -> None:
    rows = [
        row(given, 17),
        row(given, 13, streaming=True, final=False),
        row(given, 5),
        row(given, 9, final=False),
    ]
    alone = [flow([one])[0] for one in rows]
    for multiple in (1, 64):
        together = flow(rows, multiple=multiple)
        assert all(
            a.shape == b.shape and (a - b).abs().max() < 1e-4 for a, b in zip(alone, together, strict=True)
        )


def test_batch_of_vocoder_equals_single_rows(vocoder: Vocoder, given: dict[str, torch.Tensor]) -> None:
    frames, final = [given["mel"], given["mel"][:11], given["mel"][3:20]], [True, True, False]
    together = vocoder(frames, final)
    for row, last, found in zip(frames, final, together, strict=True):
        alone = vocoder([row], [last])[0]
        assert alone.shape == found.shape and (alone - found).abs().max() < 1e-3
    assert [len(x) for x in together] == [24 * 480, 11 * 480, 9 * 480]
