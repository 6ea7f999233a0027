"""Structured outputs with drafts: masks behind each draft, and tokens as without drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.drafts import ALWAYS, SMALL, counts, params, prompts, propose, results
from support.eagle import make_tiny_eagle3
from support.tiny import make_tiny

from fastkernels import LLM, StructuredOutputsParams

TREE = "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)]"
SCHEMA = json.dumps({"type": "array", "items": {"enum": ["ab", "cd", 12]}, "minItems": 2, "maxItems": 5})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("structured") / "llama", "llama", "float32")


@pytest.fixture(scope="module")
def wanted(folder: Path) -> tuple[list[Any], list[Any], list[Any]]:
    """(prompts, parameters, results without drafts) of rows with and without constraints."""
    ways: list[dict[str, Any]] = [
        {"structured_outputs": StructuredOutputsParams(json=SCHEMA)},
        {"structured_outputs": StructuredOutputsParams(regex="(ab|cd){3,9}e")},
        {"structured_outputs": StructuredOutputsParams(choice=["abcabcabc", "abcabd"])},
        {"allowed_token_ids": [5, 6, 7, 8]}, {"bad_words": ["a", "b c"]}, {},
    ]  # fmt: skip
    each = [params(i, max_tokens=20, **way) for i, way in enumerate(ways)]
    each += [params(i + 1, max_tokens=20, **way) for i, way in enumerate(ways)]
    given = prompts(len(each))
    return given, each, results(LLM(str(folder), **SMALL), given, each)


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle3", "tree"])
def test_constrained_tokens_are_those_without_drafts(
    method: str, folder: Path, wanted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, each, want = wanted
    settings: dict[str, Any] = {"method": method, "num_speculative_tokens": 4, **ALWAYS}
    if method != "ngram":
        settings["model"] = str(folder if method == "draft_model" else make_tiny_eagle3(tmp_path / "eagle"))
        propose(monkeypatch, [[*g, *w[0][0]] for g, w in zip(given, want, strict=True)])
    if method == "tree":
        settings.update(method="eagle3", speculative_token_tree=TREE, num_speculative_tokens=7)
    llm = LLM(str(folder), **{**SMALL, "num_blocks": 60}, speculative_config=settings)
    assert results(llm, given, each) == want
    assert counts(llm).by_place[1 if method == "ngram" else 2] > 5
    before = counts(llm).drafts
    assert results(llm, given[:3], each[:3]) == want[:3]  # every row has a grammar
    assert counts(llm).drafts > before


def test_forced_acceptance_has_no_drafts_next_to_a_grammar(folder: Path) -> None:
    settings = {"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}
    llm = LLM(str(folder), **SMALL, speculative_config={**settings, "synthetic_acceptance_length": 3})
    grammar = StructuredOutputsParams(regex="(ab|cd){3,9}e")
    (one, _) = results(llm, prompts(2), [params(1, structured_outputs=grammar), params(1, max_tokens=5)])
    assert one[0][1].strip("abcd") in ("", "e") and counts(llm).drafts < 30
