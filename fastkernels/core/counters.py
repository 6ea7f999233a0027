"""The counters of an op in this process: calls, which prove that it runs, and the reasons of other calls."""

from __future__ import annotations

import logging
import os
from dataclasses import KW_ONLY, dataclass, field

import torch

log = logging.getLogger("fastkernels")


class UnsupportedCase(RuntimeError):
    """No provider supports the call, or FASTKERNELS_STRICT=1 turned a fallback into an error."""


@dataclass
class Counters:
    """The counters of one op.

    calls      runs of the op's body
    plain      of the calls, those that fell back to plain PyTorch
    fallbacks  {reason: calls} that a provider did not support
    left       {reason: calls} that a seam left to the host because of the op's table; these are not fallbacks
    owned      the calls that an integration has attributed to single modules; all others are `unowned`

    `fallbacks` and `left` are replaced, not changed, so that a reader may keep them to compare.
    """

    name: str
    _: KW_ONLY
    calls: int = 0
    plain: int = 0
    owned: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    _unowned_before: int = 0  # in earlier counts
    _strict: bool = False

    @property
    def unowned(self) -> int:
        """The calls of this process that belong to no single module, those before `clear` included."""
        return self._unowned_before + self.calls - self.owned

    def clear(self) -> None:
        """Set the counters to zero."""
        self._unowned_before = self.unowned
        self.calls = self.plain = self.owned = 0
        self.fallbacks = {}
        self.left = {}

    def count_call(self) -> None:
        """Count a run of the op's kernel by another function than its body."""
        self.calls += 1

    def note(self, reason: str) -> None:
        """Count a fallback and log its reason once. Raises UnsupportedCase under FASTKERNELS_STRICT=1."""
        if self._strict:
            raise UnsupportedCase(f"{self.name}: {reason} (FASTKERNELS_STRICT=1)")
        if reason not in self.fallbacks:
            log.warning("%s falls back in pid %d: %s", self.name, os.getpid(), reason)
        self.fallbacks = {**self.fallbacks, reason: self.fallbacks.get(reason, 0) + 1}

    def leave(self, reason: str) -> None:
        """Count a call that stays with the host, which no table lists as slower. Compiled code counts nothing."""
        if torch.compiler.is_dynamo_compiling():  # a count would be a constant of the compiled code
            return
        self.left = {**self.left, reason: self.left.get(reason, 0) + 1}
