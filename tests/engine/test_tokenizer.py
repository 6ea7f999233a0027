"""Loading a tokenizer without AutoTokenizer gives the same tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.kernels import warm

from fastkernels.engine.inputs import tokenizer
from fastkernels.models.common.checkpoints.weights import CheckpointError


@pytest.fixture()
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy", ignore=shutil.ignore_patterns("*.safetensors")))


def edited(folder: Path, name: str, **fields: Any) -> Path:
    config = {**json.loads((folder / name).read_text()), **fields}
    (folder / name).write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "TokenizersBackend"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_tokenizer_equals_autotokenizer(copy: Path, name: str, kind: str) -> None:
    from transformers import AutoTokenizer

    edited(copy, "tokenizer_config.json", tokenizer_class=name)
    edited(copy, "config.json", model_type=kind)
    assert tokenizer.is_plain(copy)
    ours, theirs = tokenizer.load(copy), AutoTokenizer.from_pretrained(copy)
    found, expected = ({**t.init_kwargs, "local_files_only": None} for t in (ours, theirs))
    assert type(ours) is type(theirs) and found == expected
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert (ours.chat_template, ours.eos_token_id) == (theirs.chat_template, theirs.eos_token_id)
    assert ours("Grüße, 世界").input_ids == theirs("Grüße, 世界").input_ids


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"}),
        ("tokenizer_config.json", {"tokenizer_class": None}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["a", "b"]}}),
        ("config.json", {"model_type": "mixtral"}),
        ("config.json", {"model_type": None}),
    ],
)
def test_other_files_use_autotokenizer(copy: Path, name: str, fields: dict[str, Any]) -> None:
    assert not tokenizer.is_plain(edited(copy, name, **fields))


def test_missing_tokenizer_files_are_reported(copy: Path, tmp_path: Path) -> None:
    assert not tokenizer.is_plain(tmp_path / "none")
    (copy / "tokenizer.json").unlink()
    assert not tokenizer.is_plain(copy)
    with pytest.raises(CheckpointError, match="skip_tokenizer_init"):
        tokenizer.load(copy)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_files_of_other_json_are_reported(copy: Path, name: str) -> None:
    (copy / name).write_text("[]")
    with pytest.raises(CheckpointError, match="cannot be used"):
        tokenizer.load(copy)


def test_empty_vocabulary_is_reported(copy: Path) -> None:
    edited(copy, "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    (copy / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"vocab\.json and merges\.txt, are missing"):
        tokenizer.load(copy)


def test_text_outside_the_vocabulary_is_a_value_error(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({"cat": 0}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    own = PreTrainedTokenizerFast(tokenizer_object=made)
    assert tokenizer.encode(own, "cat") == [0]
    with pytest.raises(ValueError, match="the tokenizer cannot encode 'zebra'"):
        tokenizer.encode(own, "zebra")


def test_slow_modules_are_not_imported(copy: Path) -> None:
    code = (
        "import sys; from fastkernels.engine.inputs import tokenizer;"
        f"print(tokenizer.load({str(copy)!r})('a').input_ids);"
        "print([m for m in ('torch._dynamo', 'sympy', 'transformers.generation') if m in sys.modules])"
    )
    done = warm.run(["-c", code])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "[]" and done.stdout.startswith("[")
