"""Tiny checkpoints, and transformers' greedy tokens to compare with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from tiny import make_tiny_llama


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """float32, so that a batch of another shape gives the same tokens."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama", dtype="float32")


@pytest.fixture(scope="session")
def tiny_tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "tied"
    return make_tiny_llama(folder, dtype="float32", tie_word_embeddings=True, rope_parameters=None, seed=1)


@pytest.fixture(scope="session")
def greedy() -> Callable[[Path, list[int], int], list[int]]:
    """greedy(folder, prompt token ids, n): transformers' next n tokens, in float32, EOS ignored."""
    from transformers import AutoModelForCausalLM

    models = {}

    def generate(folder: Path, prompt: list[int], n: int) -> list[int]:
        if folder not in models:
            models[folder] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ids = torch.tensor([prompt])
        out = models[folder].generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        return out[0, len(prompt) :].tolist()

    return generate
