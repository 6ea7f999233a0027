"""Tiny checkpoints, and transformers' greedy tokens to compare with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from oracle import Oracle
from tiny import make_tiny, make_tiny_llama


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """float32, so that a batch of another shape gives the same tokens."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama", dtype="float32")


@pytest.fixture(scope="session")
def tiny_tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "tied"
    return make_tiny_llama(folder, dtype="float32", tie_word_embeddings=True, rope_parameters=None, seed=1)


@pytest.fixture(scope="session")
def tiny_of(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """tiny_of(kind): a float32 checkpoint of that kind, made once."""
    folder = tmp_path_factory.mktemp("kinds")
    return lambda kind: tiny if kind == "llama" else make_tiny(folder / kind, kind, "float32")


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="session")
def greedy(oracle: Oracle) -> Callable[[Path, list[int], int], list[int]]:
    """greedy(folder, prompt token ids, n): transformers' next n tokens, in float32, EOS ignored."""
    return oracle.greedy
