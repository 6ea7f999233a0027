"""Patterns in graphs that our compiler pass has found and not changed, with the reason."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple


class Unchanged(NamedTuple):
    """A pattern that the pass left as it was.

    op    whose row in the report shows it
    what  the nodes and how they stay, such as "activations of compiled graphs stay apart"
    why   the reason
    """

    op: str
    what: str
    why: str


Counts = Counter[Unchanged]
