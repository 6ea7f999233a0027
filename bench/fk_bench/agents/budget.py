"""The budget of a task: time, attempts and tokens."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field

MOST = 365 * 86400  # seconds
UNITS = {"s": 1, "m": 60, "h": 3600}


def seconds_of(text: str) -> float:
    """Seconds of '90s', '20m', '1h' or '1h30m'. Raises ValueError."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smh])", text)
    if not parts or "".join(map("".join, parts)) != text:
        raise ValueError(f"--budget {text!r} is no duration: give 90s, 20m or 1h30m")
    found = sum(float(n) * UNITS[unit] for n, unit in parts)
    if not 0 < found <= MOST:
        raise ValueError(
            f"--budget {text[:40]}: must be more than 0 seconds and at most {MOST // 86400} days"
        )
    return found


@dataclass(frozen=True)
class TaskBudget:
    """Limits of one task; None is no limit. Checks of the judge count towards the time."""

    seconds: float | None = None
    attempts: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("attempts", "tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name} {value}: must be at least 1")


@dataclass
class Spent:
    """Use of the budget by a task. Tokens and cost are the agent's own report."""

    budget: TaskBudget
    attempts: int = 0
    tokens: int = 0
    cost_usd: float = 0.0
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def seconds_left(self) -> float | None:
        limit = self.budget.seconds
        return None if limit is None else max(0.0, limit - self.seconds)

    @property
    def used_up(self) -> str:
        """The limit that is reached; '' if none is."""
        b = self.budget
        if b.attempts is not None and self.attempts >= b.attempts:
            return f"{b.attempts} attempts"
        if b.tokens is not None and self.tokens >= b.tokens:
            return f"{b.tokens} tokens"
        return f"{b.seconds:g} seconds" if self.seconds_left == 0.0 else ""

    def left(self) -> dict[str, float | int]:
        """The rest of each limit, for the agent."""
        b = self.budget
        found: dict[str, float | int] = {}
        if (left := self.seconds_left) is not None:
            found["seconds"] = round(left, 1)
        if b.attempts is not None:
            found["attempts"] = max(0, b.attempts - self.attempts)
        if b.tokens is not None:
            found["tokens"] = max(0, b.tokens - self.tokens)
        return found
