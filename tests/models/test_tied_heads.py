"""Tied configs whose weights have a matrix of the head, too: transformers compares the two, and so does the loader."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny import make_tiny

from fastkernels import LLM, SamplingParams
from fastkernels.models.common.plans import build
from fastkernels.models.common.plans.plan import plan

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[7], list(range(10, 40))]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def with_head(folder: Path, factor: float, sharded: bool = False) -> Path:
    """Add a head to a tied checkpoint: the embedding's matrix, changed if factor is not 0."""
    tensors = load_file(folder / "model.safetensors")
    table = tensors[EMBEDDING]
    noise = torch.randn(table.shape, generator=torch.Generator().manual_seed(3))
    tensors[HEAD] = table + factor * noise
    if not sharded:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    head = {HEAD: tensors.pop(HEAD)}
    save_file(tensors, folder / "a.safetensors", {"format": "pt"})
    save_file(head, folder / "b.safetensors", {"format": "pt"})
    (folder / "model.safetensors").unlink()
    where = {**dict.fromkeys(tensors, "a.safetensors"), HEAD: "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


@pytest.mark.parametrize(
    "kind", ["qwen2", "granite", "llama"]
)  # with transformers' config and with a plain one
@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "index"])
def test_other_head_is_used_as_in_transformers(
    tmp_path: Path, kind: str, sharded: bool, greedy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = with_head(make_tiny(tmp_path, kind, "float32", tie_word_embeddings=True), 0.1, sharded)
    with caplog.at_level(logging.WARNING, "fastkernels"):
        llm = LLM(str(folder), device="cpu", max_model_len=128)
    assert f"the weights have another {HEAD}" in caplog.text and "tie_word_embeddings" in caplog.text
    got = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)]
    assert got == [greedy(folder, prompt, 8) for prompt in PROMPTS]
    assert not plan(folder).tied


def test_equal_head_stays_tied(tmp_path: Path, greedy: Any, caplog: pytest.LogCaptureFixture) -> None:
    folder = with_head(make_tiny(tmp_path, "qwen2", "float32", tie_word_embeddings=True), 0.0)
    with caplog.at_level(logging.WARNING, "fastkernels"):
        assert build.load_config(folder).tie_word_embeddings and plan(folder).tied
        llm = LLM(str(folder), device="cpu", max_model_len=128)
    assert "another" not in caplog.text
    assert llm.generate([PROMPTS[1]], GREEDY)[0].outputs[0].token_ids == greedy(folder, PROMPTS[1], 8)


def test_config_without_weights_stays_tied(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, "qwen2", "float32", tie_word_embeddings=True)
    (folder / "model.safetensors").unlink()
    assert build.load_config(folder).tie_word_embeddings
