"""The special tokens of a tokenizer, which neither texts nor grammars contain."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Tokens that skip_special_tokens leaves out.

    They never reach the decoder, which would decode a sequence of special tokens (EOS after EOS, with ignore_eos) from
    the beginning at every token.
    """
    ids = _SPECIAL.get(tokenizer)
    if ids is None:
        rust = rust_of(tokenizer)
        if rust is None:
            ids = frozenset(tokenizer.all_special_ids)
        else:
            ids = frozenset(i for i, t in rust.get_added_tokens_decoder().items() if t.special)
        _SPECIAL[tokenizer] = ids
    return ids


def rust_of(tokenizer: Any) -> Any:
    """The tokenizer of the tokenizers library in one of transformers, None for a slow one."""
    return tokenizer._tokenizer if getattr(tokenizer, "is_fast", False) else None


_SPECIAL: WeakKeyDictionary[Any, frozenset[int]] = WeakKeyDictionary()
