"""CosyVoice3 as a whole against FunAudioLLM/CosyVoice ace7c47 on random weights, in float32.

speech/cosyvoice3.npz has the tokens and the sound of that code. Its draws were the most likely token, which is what
temperature 0 is here; tokens that end speech were all banned before the least length, as its vLLM path does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cosyvoice import TEXT, make_tiny_cosyvoice, voice

from fastkernels import LLM
from fastkernels.engine.config import EngineConfig
from fastkernels.engine.engine import make_engine
from fastkernels.engine.scheduling.speaking import SpeechParams

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
    assert np.abs(found.samples - want).max() < 2e-3  # recorded in float16
    assert np.abs(want).mean() > 0.01


def test_streamed_sound_and_its_pieces_equal_cosyvoice(llm: LLM) -> None:
    found = sound_of(llm, SpeechParams(**GREEDY, stream=True))
    assert [len(piece) for piece in found] == RECORDED["sizes"].tolist()
    assert np.abs(np.concatenate(found) - RECORDED["stream"].astype(np.float32)).max() < 2e-3
