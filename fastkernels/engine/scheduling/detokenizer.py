"""Text from tokens as they come: whole characters only, ended by stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers.decoders import DecodeStream

REPLACEMENT = "\ufffd"  # what a tokenizer decodes an unfinished UTF-8 sequence to
CONTEXT = 6  # prompt tokens that the first decode starts from: spaces depend on what stands before
MAX_PENDING = 16  # tokens after which an unfinished character is text: bad bytes never hold it up


class Pieces:
    """Tokens to pieces of text. Of a fast tokenizer the Rust stream does it (0.7 us a token, tiny byte-level BPE on a
    Xeon core); where there is none, or it gives up, the same is done with two decodes."""

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], skip_special_tokens: bool):
        self.tokenizer, self.skip = tokenizer, skip_special_tokens
        self.rust = _rust(tokenizer)
        self.special = special_ids(tokenizer) if skip_special_tokens else frozenset()
        self.context = list(prompt_token_ids[-CONTEXT:])  # decoded before `pending`, and cut off again
        self.pending: list[int] = []
        self.stream: DecodeStream | None = None
        self._restart()

    def append(self, token_id: int) -> str:
        """The text that is whole now, '' if there is none."""
        if token_id in self.special:
            return ""
        self.pending.append(token_id)
        if self.stream is not None:
            try:
                text = self.stream.step(self.rust, token_id)
            except Exception:  # it found text that changed with what came after: the slow way copes
                self.stream = None
            else:
                if text is not None:
                    self.context, self.pending = self.pending, []
                    return text
                if len(self.pending) < MAX_PENDING:
                    return ""
        return self._decode_pending(final=False)

    def finish(self) -> str:
        """What is left, an unfinished character as U+FFFD."""
        return self._decode_pending(final=True) if self.pending else ""

    def _decode_pending(self, final: bool) -> str:
        before, after = self._decode(self.context), self._decode(self.context + self.pending)
        unfinished = after.endswith(REPLACEMENT) and len(self.pending) < MAX_PENDING
        if len(after) <= len(before) or (unfinished and not final):
            return ""
        self.context, self.pending = self.pending, []
        self._restart()
        return after[len(before) :]

    def _restart(self) -> None:
        """The Rust stream from `context`, if its text is one that the stream can start from."""
        text = self._decode(self.context) if self.rust is not None else ""
        fit = bool(text) and not text.endswith(REPLACEMENT)
        self.stream = DecodeStream(self.context, self.skip) if fit else None

    def _decode(self, ids: list[int]) -> str:
        if self.rust is not None:
            return self.rust.decode(ids, skip_special_tokens=self.skip)
        return self.tokenizer.decode(ids, skip_special_tokens=self.skip, clean_up_tokenization_spaces=False)


class Detokenizer:
    """The text of one request's output, held back where it may become a stop string."""

    def __init__(
        self,
        tokenizer: Any,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ):
        self.include_stop = include_stop
        self._stops: dict[str, list[str]] = {}  # by first character
        for string in stop:
            self._stops.setdefault(string[0], []).append(string)
        self._longest = max(map(len, stop), default=0)
        self._pieces = Pieces(tokenizer, prompt_token_ids, skip_special_tokens)
        self._parts: list[str] = []  # the text but for `_held`
        self._taken = 0  # of the parts
        self._held = ""  # the longest tail of the text that begins a stop string

    @property
    def text(self) -> str:
        """All text so far, without a character that is not whole yet."""
        return "".join(self._parts) + self._held

    def append(self, token_id: int, look: bool = True) -> str | None:
        """Add a token. Returns the stop string that its text completes, if any; `text` is cut there.

        look: False while a stop string must not end the output (min_tokens).
        """
        return self._add(self._pieces.append(token_id), look)

    def finish(self, look: bool = True) -> str | None:
        """No token will come: what is left becomes text."""
        return self._add(self._pieces.finish(), look)

    def take(self, final: bool) -> str:
        """The text since the last call. Until the end, a tail that may become a stop string is held back."""
        if final and self._held:
            self._parts.append(self._held)
            self._held = ""
        new, self._taken = "".join(self._parts[self._taken :]), len(self._parts)
        return new

    def _add(self, piece: str, look: bool) -> str | None:
        if not piece:
            return None
        if not self._held and self._stops.keys().isdisjoint(piece):
            self._parts.append(piece)
            return None
        # A stop string that ends in the new piece begins in it, or in what is held.
        window = self._held + piece
        found = self._find(window, len(self._held)) if look else None
        if found is None:
            keep = len(window) - self._tail(window)
            self._parts.append(window[:keep])
            self._held = window[keep:]
            return None
        at, stop = found
        self._parts.append(window[: at + (len(stop) if self.include_stop else 0)])
        self._held = ""
        return stop

    def _find(self, window: str, old: int) -> tuple[int, str] | None:
        """Where the stop string that ends first, after `old` characters, begins, and which it is."""
        found: tuple[int, str] | None = None
        for at in range(max(0, old - self._longest + 1), len(window)):
            for stop in self._stops.get(window[at], ()):
                end = at + len(stop)
                sooner = end > old and (found is None or end < found[0] + len(found[1]))
                if sooner and window.startswith(stop, at):
                    found = (at, stop)
        return found

    def _tail(self, window: str) -> int:
        """Length of the longest tail of the window that begins a stop string and is shorter than it."""
        for at in range(max(0, len(window) - self._longest + 1), len(window)):
            for stop in self._stops.get(window[at], ()):
                if len(stop) > len(window) - at and stop.startswith(window[at:]):
                    return len(window) - at
        return 0


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Tokens that skip_special_tokens leaves out. They are kept from the decoder: a sequence of nothing else (EOS after
    EOS, with ignore_eos) would be decoded from its beginning at every token."""
    ids = _SPECIAL.get(tokenizer)
    if ids is None:
        rust = _rust(tokenizer)
        if rust is None:
            ids = frozenset(tokenizer.all_special_ids)
        else:
            ids = frozenset(i for i, t in rust.get_added_tokens_decoder().items() if t.special)
        _SPECIAL[tokenizer] = ids
    return ids


def _rust(tokenizer: Any) -> Any:
    return tokenizer._tokenizer if getattr(tokenizer, "is_fast", False) else None


_SPECIAL: WeakKeyDictionary[Any, frozenset[int]] = WeakKeyDictionary()
