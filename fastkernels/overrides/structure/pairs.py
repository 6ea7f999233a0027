"""Numbers of tokens for held-out cases of this family, whose costs grow with the square or cube of the tokens."""

from __future__ import annotations

import random


def close(n: int, rng: random.Random) -> int:
    """A random number of tokens near n, odd at least half of the time."""
    found = rng.randint(max(n - n // 6 - 2, 1), n + n // 16 + 2)
    return found | 1 if rng.random() < 0.5 else found
