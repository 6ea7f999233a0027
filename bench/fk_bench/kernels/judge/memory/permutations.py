"""Roll the rows and columns of each slot's values, as far as the op allows (OpSpec.permutable)."""

from __future__ import annotations

import secrets
from typing import Any

import torch

from fastkernels.core.spec import Permutable
from fk_bench.kernels.judge.memory import layout


class Permuter:
    """Permutes the arguments of one case; `free` says for each tensor whether every slot has its own copy.

    Raises ValueError if the op's Permutable do not fit the arguments.
    """

    def __init__(self, args: list[Any], permutable: Permutable, free: list[bool]):
        positions = [p for p, a in enumerate(args) for _ in layout.tensors([a])]
        tensors = layout.tensors(args)
        self._rows = self._found(positions, permutable.rows, free)
        self._columns = self._found(positions, permutable.columns, free)
        rows, columns = {len(tensors[i]) for i in self._rows}, {tensors[i].shape[-1] for i in self._columns}
        if (
            len(rows) > 1
            or len(columns) > 1
            or (permutable.group and max(columns, default=0) % permutable.group)
        ):
            raise ValueError(f"{permutable} does not fit: {sorted(rows)} rows and {sorted(columns)} columns")
        self._sizes = max(rows | {1}), max(columns | {1})  # without rows, columns are rolled
        self._group = permutable.group or self._sizes[1]

    @staticmethod
    def _found(positions: list[int], wanted: tuple[int, ...], free: list[bool]) -> set[int]:
        """The tensors at these positions; none if one of them cannot be moved, because they belong together."""
        found = {i for i, p in enumerate(positions) if p in wanted}
        return found if all(free[i] for i in found) else set()

    def permutes(self, i: int) -> bool:
        return i in self._rows or i in self._columns

    def draw(self, origin: list[int]) -> list[int]:
        """A permutation for each slot, as a number; slots of one master differ while there are enough permutations."""
        ways = self._sizes[0] * self._sizes[1]
        codes = [0] * len(origin)
        for master in set(origin):
            slots = [s for s, m in enumerate(origin) if m == master]
            turns = -(-len(slots) // ways)
            drawn = secrets.SystemRandom().sample(range(ways * turns), len(slots))
            for s, code in zip(slots, drawn, strict=True):
                codes[s] = code % ways
        return codes

    def apply(self, i: int, value: torch.Tensor, codes: list[int]) -> torch.Tensor:
        """Tensor i of a master, once for each code: [slots, *value.shape]."""
        if not value.numel() or not self.permutes(i):
            return value.expand(len(codes), *value.shape)
        code = torch.tensor(codes, device=value.device)[:, None]
        (rows, columns), group = self._sizes, self._group
        at = torch.arange(rows, device=value.device)
        row = (at + code % rows) % rows
        at, code = torch.arange(columns, device=value.device), code // rows
        column = (at // group * group + code // group * group) % columns + (at + code) % group
        if i not in self._columns:
            return value[row]
        if i not in self._rows:
            return value[..., column].movedim(-2, 0)
        inner = value.shape[1:-1]  # axes between rows and columns stay
        ones = [1] * (len(inner) + 1)
        axes = [torch.arange(n, device=value.device).view(-1, *ones[k + 1 :]) for k, n in enumerate(inner)]
        return value[(row.view(*row.shape, *ones), *axes, column.view(len(codes), *ones, columns))]
