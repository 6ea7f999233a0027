"""Draft models of targets that read images: tokens are those without drafts, and drafts have the right positions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.drafts import ALWAYS, counts, propose
from support.eagle import make_tiny_eagle3
from support.tiny import IMAGE, make_tiny, make_tiny_vlm, make_tiny_whisper
from support.vlm_oracle import image, prompt

from fastkernels import LLM, SamplingParams
from fastkernels.engine.execution.drafts.drafting import Drafter

SIZES = {"device": "cpu", "num_blocks": 120, "block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 24,
         "max_model_len": 160}  # fmt: skip
FIELDS: dict[str, Any] = {"vocab_size": 520, "hidden_size": 64}
AXES = {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
TREE = "[(0,),(1,),(0,0)]"
PROMPTS = [
    "the text alone",
    prompt(f"See {IMAGE} well, then {IMAGE}", image(1, 40, 24), image(2, 24, 40)),
    prompt(f"{IMAGE} and", image(3, 64, 64)),
    prompt(f"See {IMAGE} well, then {IMAGE}", image(1, 40, 24), image(4, 24, 40)),
    "more text of another request",
]
PARAMS = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=16, ignore_eos=True) for i in range(5)]


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen3_vl"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vlm(tmp_path_factory.mktemp("targets") / request.param, request.param)


@pytest.fixture(scope="module")
def want(target: Path) -> list[tuple[list[int], list[int]]]:
    """(tokens of the prompt, generated tokens) without drafts."""
    with LLM(str(target), **SIZES) as llm:
        found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [(o.prompt_token_ids, o.outputs[0].token_ids) for o in found]


@pytest.mark.parametrize("kind", ["eagle", "axes", "tree", "text"])
def test_tokens_are_those_without_drafts(
    target: Path, want: list[tuple[list[int], list[int]]], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Prompts with images are computed in parts, next to requests that verify drafts."""
    draft = (
        make_tiny(tmp_path / kind, "llama", "float32", vocab_size=520)
        if kind == "text"
        else make_tiny_eagle3(tmp_path / kind, **FIELDS, **(AXES if kind == "axes" else {}))
    )
    config: dict[str, Any] = {
        "method": "draft_model" if kind == "text" else "eagle3", "model": str(draft), "num_speculative_tokens": 3,
        **ALWAYS, **({"speculative_token_tree": TREE} if kind == "tree" else {}),
    }  # fmt: skip
    propose(monkeypatch, [[*before, *after] for before, after in want])
    with LLM(str(target), **SIZES, speculative_config=config) as llm:
        for _ in range(2):  # the second time with cached images
            found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            assert [(o.prompt_token_ids, o.outputs[0].token_ids) for o in found] == want
        assert 5 < counts(llm).accepted < counts(llm).drafts


def test_drafts_have_positions_behind_the_image(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[torch.Tensor] = []
    forward = Drafter._forward

    def spied(self: Drafter, ids: Any, positions: torch.Tensor, *rest: Any) -> Any:
        found.append(positions.clone())
        return forward(self, ids, positions, *rest)

    monkeypatch.setattr(Drafter, "_forward", spied)
    given = prompt(f"{IMAGE} and", image(3, 64, 64))  # 64 features in a square of 8
    config = {"method": "eagle3", "num_speculative_tokens": 3, **ALWAYS}
    for kind, more in (("temporal", {}), ("axes", AXES)):
        draft = make_tiny_eagle3(tmp_path / kind, **FIELDS, **more)
        found.clear()
        sizes = {**SIZES, "max_num_batched_tokens": 160}
        with LLM(str(target), **sizes, speculative_config={**config, "model": str(draft)}) as llm:
            llm.generate(given, SamplingParams(max_tokens=1), use_tqdm=False)
        first, chain = next((p, found[i + 1 :]) for i, p in enumerate(found) if p.shape[-1] > 60)
        features = first[..., 1:65]
        if kind == "temporal":
            assert first.dim() == 1 and features.tolist() == [1] * 64
        else:
            assert features[1].tolist() == [1 + i // 8 for i in range(64)]
            assert features[2].tolist() == [1 + i % 8 for i in range(64)]
        last = int(first.reshape(-1, first.shape[-1])[0, -1])
        assert last == 8 + first.shape[-1] - 65
        assert [p.tolist() for p in chain[:2]] == [[last + 1], [last + 2]]


def test_models_that_read_other_sources_are_refused(tmp_path: Path) -> None:
    vision = make_tiny_vlm(tmp_path / "vision", "qwen2_vl")
    speech = make_tiny_whisper(tmp_path / "speech")
    text = make_tiny(tmp_path / "text", "llama", "float32", vocab_size=520)

    def said(target: Path, draft: Path) -> str:
        config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
        with pytest.raises(ValueError, match="reads more than text") as error:
            LLM(str(target), **{**SIZES, "max_model_len": 64}, speculative_config=config)
        return str(error.value)

    assert said(text, vision).endswith("not supported for a draft model")
    vocab = make_tiny(tmp_path / "vocab", "llama", "float32", vocab_size=_vocab_of(speech))
    assert said(speech, vocab).endswith("not supported with a draft model")


def _vocab_of(folder: Path) -> int:
    return json.loads((folder / "config.json").read_text())["vocab_size"]
