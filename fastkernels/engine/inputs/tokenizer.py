"""Load a checkpoint's tokenizer."""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any

from fastkernels.models.common.checkpoints.weights import CheckpointError
from fastkernels.models.common.descriptions import registry

# The generic classes, which read any tokenizer.json. They avoid AutoTokenizer, whose import takes seconds.
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


def load(source: str | Path) -> Any:
    """The transformers tokenizer of a folder or a hub id. Raises CheckpointError."""
    try:
        if is_plain(Path(source)):
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(source, local_files_only=True)
        from transformers import AutoTokenizer

        found = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        if found.vocab_size < 2:  # transformers makes an empty tokenizer of a class whose files are missing
            raise ValueError(
                "its vocabulary is empty: tokenizer.json, or vocab.json and merges.txt, are missing"
            )
        return found
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:  # of files that hold other JSON
        raise CheckpointError(
            f"the tokenizer of {source} cannot be used ({error}); set skip_tokenizer_init to use token ids only"
        ) from error


def lower(tokenizer: Any, folder: Path) -> None:
    """Make the tokenizer lower-case its texts first, if do_lower_case of sentence_bert_config.json says so."""
    try:
        found = json.loads((folder / "sentence_bert_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not isinstance(found, dict) or found.get("do_lower_case") is not True:
        return
    from tokenizers import normalizers

    own = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])


def encode(
    tokenizer: Any, text: str, special: bool = True, limit: int | None = None, side: str | None = None
) -> list[int]:
    """Token ids of a text, at most `limit`.

    side: as in `cut`. None, as vLLM does: as the tokenizer says, and the special tokens around the text are kept.
    """
    try:
        found = tokenizer(text, add_special_tokens=special, return_special_tokens_mask=limit is not None)
    except Exception as error:
        if type(error) is not Exception:  # tokenizers raises this class itself
            raise
        raise ValueError(f"the tokenizer cannot encode {reprlib.repr(text)}: {error}") from error
    ids = list(found.input_ids)
    if limit is None or len(ids) <= limit:
        return ids
    mask = found.special_tokens_mask
    before = next((i for i, added in enumerate(mask) if not added), 0)
    after = next((i for i, added in enumerate(reversed(mask)) if not added), 0)
    room = limit - before - after
    own = getattr(tokenizer, "truncation_side", "right")
    if side is not None or room < 1:
        return cut(ids, limit, side or own)
    return ids[:before] + cut(ids[before : len(ids) - after], room, own) + ids[len(ids) - after :]


def encode_pair(
    tokenizer: Any, first: str, second: str, limit: int | None = None, side: str | None = None
) -> tuple[list[int], list[int]]:
    """Token ids and token types of a pair of texts, as a cross-encoder reads them.

    limit  the most tokens; the longer text is cut, unless `side` says on which side the ids are, as in `cut`
    """
    whole = tokenizer(first, second, return_token_type_ids=True)
    if limit is not None and len(whole.input_ids) > limit and side is None:
        whole = tokenizer(first, second, return_token_type_ids=True, truncation=True, max_length=limit)
    ids, types = list(whole.input_ids), list(whole.token_type_ids)
    return (ids, types) if limit is None else (cut(ids, limit, side), cut(types, limit, side))


def shortened(tokenizer: Any, text: str, limit: int) -> str:
    """The beginning of a text that has at most `limit` tokens, without special ones."""
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return text if len(found.input_ids) <= limit else text[: found.offset_mapping[limit - 1][1]]


def cut(ids: list[int], limit: int, side: str | None = None) -> list[int]:
    """The first `limit` tokens; with side 'left', the last ones."""
    if len(ids) <= limit:
        return ids
    return ids[-limit:] if side == "left" else ids[:limit]


def is_plain(folder: Path) -> bool:
    """Whether AutoTokenizer would select one of PLAIN_CLASSES, and its files are in the folder."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        kind = json.loads((folder / "config.json").read_text())["model_type"]
        return (
            (folder / "tokenizer.json").is_file()
            and any(m.arch.fast_tokenizer and m.arch.model_type == kind for m in registry.models().values())
            and config["tokenizer_class"] in PLAIN_CLASSES
            and "auto_map" not in config
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False
