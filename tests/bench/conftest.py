"""Fixtures of the tests of fk-bench: a model directory for prompts, an interpreter of stub servers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

STUB_SERVER = Path(__file__).with_name("stub_server.py")


@pytest.fixture(scope="session", autouse=True)
def shared_fork_servers() -> Iterator[None]:
    from support.kernels import fork_servers

    with fork_servers.shared():
        yield


@pytest.fixture(scope="session")
def words_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json and a byte-level tokenizer.json of 300 ids, 4 of them special; no weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("models") / "words"
    folder.mkdir()
    names = ["<s>", "</s>", "<unk>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"<extra_{i}>" for i in range(len(names), 300)]
    tokenizer = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(names[:4])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 320, "model_type": "llama"}))
    return folder


@pytest.fixture(scope="session")
def stub_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An 'interpreter' whose servers are stub_server.py."""
    path = tmp_path_factory.mktemp("bin") / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -S {STUB_SERVER} "$@"\n')
    path.chmod(0o755)
    return path
