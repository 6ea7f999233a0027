"""A checkpoint's tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastkernels.models.common.weights import CheckpointError

# transformers has these classes for whatever is in a tokenizer.json, and AutoTokenizer, whose import takes seconds,
# would take them for these model types.
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
PLAIN_MODELS = ("llama", "qwen3")


def load(source: str | Path) -> Any:
    """The transformers tokenizer of a folder or a hub id. Raises CheckpointError that says what works without one."""
    try:
        if is_plain(Path(source)):
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(source, local_files_only=True)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"the tokenizer of {source} cannot be used ({error}); token ids work without: skip_tokenizer_init"
        ) from error


def is_plain(folder: Path) -> bool:
    """Whether the folder's files name one of PLAIN_CLASSES, and all that it needs is there."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        kind = json.loads((folder / "config.json").read_text())["model_type"]
        return (
            (folder / "tokenizer.json").is_file()
            and kind in PLAIN_MODELS
            and config["tokenizer_class"] in PLAIN_CLASSES
            and "auto_map" not in config
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False
