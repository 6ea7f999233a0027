"""Text from tokens as they come: whole characters only, ended by stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"  # what a tokenizer decodes an unfinished UTF-8 sequence to
CONTEXT = 6  # prompt tokens that the first decode starts from: spaces depend on what stands before
MAX_PENDING = (
    16  # tokens after which an unfinished character is text, however odd: bad bytes never hold it up
)


class Detokenizer:
    """The text of one request's output.

    text      all text that is final
    pending   whether the last tokens ended inside a character
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ):
        self.tokenizer, self.stop, self.include_stop = tokenizer, tuple(stop), include_stop
        self.skip_special_tokens = skip_special_tokens
        self.ids = list(prompt_token_ids[-CONTEXT:])
        self.prefix, self.read = 0, len(self.ids)  # ids[prefix:read] are the context of ids[read:]
        self.text = ""
        self._sent = 0

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=self.skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def append(self, token_id: int, look: bool = True) -> str | None:
        """Add a token. Returns the stop string that its text completes, if any; `text` is cut there.

        look: False while a stop string must not end the output (min_tokens).
        """
        self.ids.append(token_id)
        return self._advance(final=False, look=look)

    def finish(self, look: bool = True) -> str | None:
        """No token will come: what is left becomes text, an unfinished character as U+FFFD."""
        return self._advance(final=True, look=look)

    def take(self, final: bool) -> str:
        """The text since the last call. Until the end, a tail that may become a stop string is held back."""
        end = len(self.text) if final else len(self.text) - self._held()
        new, self._sent = self.text[self._sent : end], max(self._sent, end)
        return new

    def _advance(self, final: bool, look: bool) -> str | None:
        before = self._decode(self.ids[self.prefix : self.read])
        after = self._decode(self.ids[self.prefix :])
        pending = after.endswith(REPLACEMENT) and len(self.ids) - self.read < MAX_PENDING
        if len(after) <= len(before) or (pending and not final):
            return None
        start, self.text = len(self.text), self.text + after[len(before) :]
        self.prefix, self.read = self.read, len(self.ids)
        return self._stopped(start) if look else None

    def _stopped(self, start: int) -> str | None:
        """The stop string that ends first in the text, looked for where new text can complete one."""
        found = None
        for stop in self.stop:
            at = self.text.find(stop, max(0, start - len(stop) + 1))
            if at >= 0 and (found is None or at + len(stop) < found[0] + len(found[1])):
                found = (at, stop)
        if found is None:
            return None
        self.text = self.text[: found[0] + (len(found[1]) if self.include_stop else 0)]
        return found[1]

    def _held(self) -> int:
        """Length of the longest tail of the text that begins a stop string."""
        longest = max((len(s) for s in self.stop), default=1) - 1
        for size in range(min(longest, len(self.text) - self._sent), 0, -1):
            tail = self.text[-size:]
            if any(s.startswith(tail) for s in self.stop):
                return size
        return 0
