"""Static trees of drafts: several candidates for each of the next tokens, verified in one step.

Node 0 is the last known token of a sequence, and its drafts are nodes 1, 2, ... in breadth-first order. A step computes
them one behind the other, while a node's position is its depth behind node 0, and it sees only its ancestors.
"""

from __future__ import annotations

import ast
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

Path = tuple[int, ...]
LONGEST = 4096  # characters of a tree's text


class Level(NamedTuple):
    """The nodes of one depth that have children.

    nodes     their numbers
    parents   the places of their parents in the level before
    children  of each, as (place in `nodes`, rank, number of the child)
    """

    nodes: tuple[int, ...]
    parents: tuple[int, ...]
    children: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class DraftTree:
    """paths: of all drafts, breadth first. The last number of a path is the draft's rank among its siblings."""

    paths: tuple[Path, ...]

    @staticmethod
    def read(given: Any) -> DraftTree:
        """The tree of vLLM's speculative_token_tree: a list of paths, or its text. Raises ValueError."""
        what = f"speculative_config: speculative_token_tree {reprlib.repr(given)}"
        value = given
        if isinstance(given, str):
            try:
                if len(given) > LONGEST:
                    raise ValueError(f"it has more than {LONGEST} characters")
                value = ast.literal_eval(given)
            except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError) as error:
                raise ValueError(f"{what} is not a list of paths such as [(0,), (1,), (0, 0)]") from error
        if not isinstance(value, (list, tuple)) or not value or not all(map(_is_path, value)):
            raise ValueError(f"{what} is not a list of paths such as [(0,), (1,), (0, 0)]")
        paths = sorted({tuple(path) for path in value}, key=lambda path: (len(path), path))
        if len(paths) != len(value):
            raise ValueError(f"{what} has a path twice")
        known = set(paths)
        for path in paths:
            if len(path) > 1 and path[:-1] not in known:
                raise ValueError(f"{what} has {path}, but not its parent {path[:-1]}")
            before = (*path[:-1], path[-1] - 1)
            if path[-1] and before not in known:
                raise ValueError(f"{what} has {path}, but not {before}: children are numbered from 0")
        return DraftTree(tuple(paths))

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def is_chain(self) -> bool:
        """Whether each draft has one child at most, and the last known token, too."""
        return all(not any(path) for path in self.paths)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Of each node, node 0 included."""
        return (0, *map(len, self.paths))

    @cached_property
    def depth(self) -> int:
        return self.depths[-1]

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """The parent of each node; of node 0, itself."""
        number = {(): 0, **{path: i + 1 for i, path in enumerate(self.paths)}}
        return (0, *(number[path[:-1]] for path in self.paths))

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The children of each node, by rank."""
        found: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node in range(1, len(self) + 1):
            found[self.parents[node]].append(node)
        return tuple(map(tuple, found))

    @cached_property
    def masks(self) -> tuple[int, ...]:
        """See `seen_bits`."""
        return seen_bits(self.parents)

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """The nodes with children, by depth."""
        made, before = list[Level](), tuple[int, ...]((0,))
        for depth in range(self.depth):
            nodes = tuple(n for n in range(len(self) + 1) if self.depths[n] == depth and self.children[n])
            parents = tuple(before.index(self.parents[n]) for n in nodes)
            children = tuple((i, r, c) for i, n in enumerate(nodes) for r, c in enumerate(self.children[n]))
            made.append(Level(nodes, parents, children))
            before = nodes
        return tuple(made)

    @cached_property
    def inner_masks(self) -> tuple[int, ...]:
        """As `masks`, for a sequence of the nodes with children only."""
        inner = [node for level in self.levels for node in level.nodes]
        return seen_bits([inner.index(self.parents[node]) for node in inner])

    def accepted(self, drafts: Sequence[int], sampled: Sequence[int], forced: int | None = None) -> list[int]:
        """The path of nodes, without node 0, whose drafts are accepted.

        drafts   tokens of the first nodes; sampled: one token behind node 0, and one behind each draft
        forced   length of a path along first children, whatever is sampled
        """
        path, node = list[int](), 0
        while True:
            kids = [kid for kid in self.children[node] if kid <= len(drafts)]
            if forced is None:
                kids = [kid for kid in kids if drafts[kid - 1] == sampled[node]]
            elif len(path) == forced:
                return path
            if not kids:
                return path
            node = kids[0]
            path.append(node)


def seen_bits(parents: Sequence[int]) -> tuple[int, ...]:
    """Return one number for each node: bit d is set if it sees the token d places before it, as a signed 64-bit number.

    Bits from its own number on are set: every node sees node 0 and what comes before.
    """
    made = list[int]()
    for node in range(len(parents)):
        bits, at = -1 << node, node
        while at:
            bits |= 1 << (node - at)
            at = parents[at]
        made.append(bits)
    return tuple(made)


def _is_path(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) > 0
        and all(type(number) is int and number >= 0 for number in value)
    )
