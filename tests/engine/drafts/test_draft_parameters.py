"""Speculation with every sampling parameter: tokens, ends and log-probabilities are those without drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.drafts import ALWAYS, SMALL, counts, params, prompts, propose, results
from support.eagle import make_tiny_eagle3
from support.mtp import make_mtp
from support.tiny import make_tiny

from fastkernels import LLM, SamplingParams, StructuredOutputsParams
from fastkernels.engine.sampling.repetition import RepetitionAware

TREE = "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)]"
SCHEMA = json.dumps({"type": "array", "items": {"enum": ["ab", "cd", 12]}, "minItems": 2, "maxItems": 5})
ROOM = {**SMALL, "num_blocks": 80, "max_num_seqs": 8}
END = 1  # the tiny models' EOS


def ways(text: str, tokens: list[int]) -> list[dict[str, Any]]:
    """Parameters of one request each. text, tokens: of a greedy output, which stop strings and tokens are part of."""
    ended, drawn = {"ignore_eos": False, "logit_bias": {END: 9.0}}, {"temperature": 0.8}
    return [
        {"stop": [text[4:6]]}, {"stop": [text[3:5]], "include_stop_str_in_output": True},
        {"stop_token_ids": [tokens[6]]}, {"stop_token_ids": tokens[:3], "min_tokens": 9},
        ended, {**ended, "min_tokens": 7}, {"bad_words": ["a", "b c"]}, {"allowed_token_ids": [5, 6, 7, 8]},
        {"presence_penalty": 1.5}, {"frequency_penalty": -0.7}, {"repetition_penalty": 1.3, **drawn},
        {"logit_bias": {7: 4.0, 9: -100.0}}, {"min_p": 0.2, **drawn}, {"top_k": 5, **drawn},
        {"top_p": 0.7, "seed": 2**63 - 1, **drawn}, {"structured_outputs": StructuredOutputsParams(json=SCHEMA)},
        {"max_tokens": 1}, {"n": 2, **drawn}, {"logprobs": 3}, {"logprobs": 0, "prompt_logprobs": 2, **drawn},
        {"logprobs": 2, "presence_penalty": 0.5}, {"logprobs": 1, "bad_words": ["a"]},
        {"repetition_aware": RepetitionAware()}, {"repetition_aware": RepetitionAware(), **drawn},
    ]  # fmt: skip


def requests(plain: LLM) -> tuple[list[list[int]], list[SamplingParams]]:
    """One of each way. The first four have the prompt whose output ends them."""
    given = prompts(24, seed=4)
    given[:4] = [given[4]] * 4
    first = plain.generate(given[4], params(0, max_tokens=12), use_tqdm=False)[0].outputs[0]
    each = ways(first.text, list(first.token_ids))
    return given, [params(2 * i, **{"max_tokens": 12, **way}) for i, way in enumerate(each)]


def outcome(llm: LLM, given: Any, each: Any) -> tuple[list[Any], list[float], list[list[int]]]:
    """Results that must be equal, by request; log-probabilities, which are nearly so; tokens of each first output."""
    same, near, texts = [], [], []
    for ids, output in zip(given, llm.generate(given, each, use_tqdm=False), strict=True):
        tops = [found for made in output.outputs for found in made.logprobs or ()] + (
            output.prompt_logprobs or []
        )
        names = [{t: (v.rank, v.decoded_token) for t, v in (found or {}).items()} for found in tops]
        same.append(([(m.token_ids, m.text, m.finish_reason, m.stop_reason) for m in output.outputs], names))
        near += [v.logprob for found in tops for v in (found or {}).values()]
        texts.append([*ids, *output.outputs[0].token_ids])
    return same, near, texts


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("parameters")
    return {
        "llama": make_tiny(made / "llama", "llama", "float32"),
        "mtp": make_mtp(made / "mtp", "deepseek_v3"),
    }


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    """(prompts, parameters, outcome without drafts) by target."""
    return {}


def drafting(method: str, folders: dict[str, Path], tmp_path: Path, **more: Any) -> LLM:
    """An engine with drafts: two steps in flight with EAGLE-3, or one with its trees and the others."""
    settings: dict[str, Any] = {"method": method, "num_speculative_tokens": 3, **ALWAYS}
    if method == "ngram":
        settings["prompt_lookup_min"] = 1
    if method in ("eagle3", "tree"):
        settings["model"] = str(make_tiny_eagle3(tmp_path / "eagle"))
    if method == "draft_model":
        settings["model"] = str(folders["llama"])
    if method == "tree":
        settings |= {"method": "eagle3", "speculative_token_tree": TREE, "num_speculative_tokens": 7}
    target = "mtp" if method == "mtp" else "llama"
    room = {**ROOM, **more}
    return LLM(str(folders[target]), **room, speculative_config=settings, async_scheduling=method == "eagle3")


METHODS = ["ngram", "draft_model", "eagle3", "tree", "mtp"]


@pytest.mark.parametrize("method", METHODS)
def test_every_parameter_keeps_its_tokens(
    method: str,
    folders: dict[str, Path],
    known: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = "mtp" if method == "mtp" else "llama"
    if target not in known:
        plain = LLM(str(folders[target]), **ROOM)
        given, each = requests(plain)
        known[target] = given, each, outcome(plain, given, each)
    given, each, (same, near, texts) = known[target]
    if method != "ngram":
        propose(monkeypatch, texts)
    llm = drafting(method, folders, tmp_path)
    found, logprobs, _ = outcome(llm, given, each)
    assert [way for way, a, b in zip(each, found, same, strict=True) if a != b] == []
    assert logprobs == pytest.approx(near, abs=1e-4)
    assert 10 < counts(llm).accepted < counts(llm).drafts


@pytest.mark.parametrize("method", METHODS)
def test_requests_with_penalties_have_drafts(
    method: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few blocks: some requests are preempted, and their tokens are counted again."""
    given = prompts(9, seed=5)
    ways = [
        {"frequency_penalty": -0.3}, {"presence_penalty": -0.8, "repetition_penalty": 0.9},
        {"presence_penalty": 1.2, "frequency_penalty": 0.4}, {"repetition_penalty": 1.4},
    ]  # fmt: skip
    each = [params(i, max_tokens=20, **ways[i % 4]) for i in range(9)]
    room = {"num_blocks": 17}
    plain = LLM(str(folders["mtp" if method == "mtp" else "llama"]), **{**ROOM, **room})
    want = results(plain, given, each)
    if method != "ngram":
        propose(monkeypatch, [[*ids, *found[0][0]] for ids, found in zip(given, want, strict=True)])
    llm = drafting(method, folders, tmp_path, **room)
    assert results(llm, given, each) == want
    assert 10 < counts(llm).accepted < counts(llm).drafts
    assert llm.llm_engine.scheduler.num_preemptions > 0
