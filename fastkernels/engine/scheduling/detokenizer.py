"""Incremental detokenization: whole characters only, ended by stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from fastkernels.engine.structured.special_tokens import rust_of, special_ids

REPLACEMENT = "\ufffd"  # decoded from an incomplete UTF-8 sequence
CONTEXT = 6  # prompt tokens before the first decoded token: leading spaces depend on them
MAX_PENDING = 16  # tokens after which an incomplete character becomes text, so that bad bytes cannot block


class Pieces:
    """Turns tokens into pieces of text.

    Uses the Rust stream of fast tokenizers (0.7 us per token, tiny byte-level BPE, Xeon core). Without one, or if it
    fails, two decodes give the same result.
    """

    def __init__(self, tokenizer: Any, prompt_token_ids: Sequence[int], skip_special_tokens: bool):
        self.tokenizer, self.skip = tokenizer, skip_special_tokens
        self.rust = rust_of(tokenizer)
        self.special = special_ids(tokenizer) if skip_special_tokens else frozenset()
        self.context = list(prompt_token_ids[-CONTEXT:])  # decoded together with `pending`, then cut off
        self.pending: list[int] = []
        self.stream: DecodeStream | None = None
        self._restart()

    def append(self, token_id: int) -> str:
        """Add a token. Returns the text that it completes, possibly ''."""
        if token_id in self.special:
            return ""
        self.pending.append(token_id)
        if self.stream is not None:
            try:
                text = self.stream.step(self.rust, token_id)
            except Exception:  # the text changed with later tokens: continue with the slow path
                self.stream = None
            else:
                if text is not None:
                    self.context, self.pending = self.pending, []
                    return text
                if len(self.pending) < MAX_PENDING:
                    return ""
        return self._decode_pending(final=False)

    def finish(self) -> str:
        """The remaining text, with an incomplete character as U+FFFD."""
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
        """Start the Rust stream from `context`, if the text of `context` allows it."""
        text = self._decode(self.context) if self.rust is not None else ""
        fit = bool(text) and not text.endswith(REPLACEMENT)
        self.stream = DecodeStream(self.context, self.skip) if fit else None

    def _decode(self, ids: list[int]) -> str:
        if self.rust is not None:
            return self.rust.decode(ids, skip_special_tokens=self.skip)
        return self.tokenizer.decode(ids, skip_special_tokens=self.skip, clean_up_tokenization_spaces=False)


class Detokenizer:
    """The output text of one request. Text that may become a stop string is held back."""

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
        self._parts: list[str] = []  # the text without `_held`
        self._taken = 0  # number of parts that take() returned
        self._held = ""  # the longest tail of the text that starts a stop string

    @property
    def text(self) -> str:
        """All text so far, without an incomplete character."""
        return "".join(self._parts) + self._held

    def append(self, token_id: int, look: bool = True) -> str | None:
        """Add a token. Returns the stop string that it completes, if any; `text` is cut there.

        look: False while stop strings must not end the output (min_tokens).
        """
        return self._add(self._pieces.append(token_id), look)

    def finish(self, look: bool = True) -> str | None:
        """End the text: the remaining characters become text."""
        return self._add(self._pieces.finish(), look)

    def take(self, final: bool) -> str:
        """The text since the last call; before the end, without a tail that may become a stop string."""
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
        # A stop string that ends in the new piece begins in it or in the held text.
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
        """(start, string) of the stop string that ends first after the first `old` characters."""
        found: tuple[int, str] | None = None
        for at in range(max(0, old - self._longest + 1), len(window)):
            for stop in self._stops.get(window[at], ()):
                end = at + len(stop)
                sooner = end > old and (found is None or end < found[0] + len(found[1]))
                if sooner and window.startswith(stop, at):
                    found = (at, stop)
        return found

    def _tail(self, window: str) -> int:
        """Length of the longest tail of the window that is the start of a stop string."""
        for at in range(max(0, len(window) - self._longest + 1), len(window)):
            for stop in self._stops.get(window[at], ()):
                if len(stop) > len(window) - at and stop.startswith(window[at:]):
                    return len(window) - at
        return 0
