"""Sizes of the programs of a mixture of experts' products: the kernel's own choice, and what tables may name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any

import torch

SHARED = 227 * 1024  # bytes of shared memory that a program of Hopper may have


@dataclass(frozen=True)
class Tiles:
    """Sizes of one program's part of a product. block_m is also the block_size of moe_align.

    swap   the weight is the left matrix: tensor cores of Hopper take 64 of its rows and no more tokens than there are,
           where x on the left would be padded to 64, or go through the older instructions, which have no float8 there
    early  the kernel starts while the one before still runs (_overlap.py)
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int
    swap: bool = False
    early: bool = False

    def __str__(self) -> str:
        """As tables have it: 16/64/128/1/4/4, swap and early as a last part of s and e."""
        *sizes, swap, early = astuple(self)
        flags = "s" * swap + "e" * early
        return "/".join([*map(str, sizes), *([flags] if flags else [])])

    def shared(self, itemsize: int) -> int:
        """Bytes of shared memory that the tiles on their way take."""
        return (self.block_m + self.block_n) * self.block_k * itemsize * self.num_stages


@lru_cache(maxsize=256)
def parsed(text: str) -> Tiles:
    """The tiles of a table's '16/64/128/1/4/4/s'. Raises ValueError for anything else."""
    sizes, flags = text.split("/"), ""
    if len(sizes) == 7:
        flags = sizes.pop()
    if (
        len(sizes) != 6
        or not all(s.isdigit() and int(s) > 0 for s in sizes)
        or flags not in ("", "s", "e", "se")
    ):
        raise ValueError(
            f"tiles {text!r} must be block_m/block_n/block_k/group_m/num_warps/num_stages, and perhaps /s, /e or /se"
        )
    m, n, k, group, warps, stages = map(int, sizes)
    return Tiles(m, n, k, group, warps, stages, "s" in flags, "e" in flags)


@lru_cache
def wide(device: torch.device) -> bool:
    """Whether the device has the shared memory of Hopper and later (3 stages of 128 x 256 x 64 are 144 KiB)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in ((9, 0), (10, 0), (10, 3))


def tiles(rows: int, dtype: torch.dtype, wide: bool) -> Tiles:
    """The sizes for so many rows an expert on average; wide: there is shared memory for Hopper's largest.

    A block is larger than the average, for most experts of a router have more rows or fewer, and one of two blocks
    reads its weights twice: blocks of 32 took 1.29 to 1.36 times as long as those of 64 for 32 rows of Mixtral-8x7B.
    """
    block_m = 16 if rows <= 16 else 64 if rows <= 128 else 128
    if dtype == torch.float32:  # twice the shared memory, and no tensor cores to feed
        return Tiles(min(block_m, 64), 64, 32, 8, 4, 3)
    if block_m == 16:
        # The weights are read once and that is all the time: many small programs, deep pipelines.
        return Tiles(16, 64, 128, 1, 4, 4)
    if block_m == 64:
        return Tiles(64, 128, 64, 8, 4, 3)
    return Tiles(128, 256, 64, 8, 8, 3) if wide else Tiles(128, 128, 64, 8, 8, 3)


def tiles_fp8(rows: int, of_blocks: bool, wide: bool) -> Tiles:
    """The same for float8 e4m3, by what vLLM's tuned files for an H200 have; of_blocks: scales of 128 x 128 numbers.

    With those, 256 columns of 128 rows have no registers for a second sum.
    """
    if rows <= 16:
        return Tiles(16, 64, 128, 1, 4, 4, swap=wide)
    if of_blocks or not wide:
        return Tiles(64, 128, 128, 16, 4, 4 if wide else 3)
    return Tiles(64, 128, 128, 1, 4, 3) if rows <= 32 else Tiles(128, 256, 128, 16, 8, 4)


# What may be chosen beside that: any set is right for any shape. block_m, block_n, block_k, group_m, warps, stages.
_SETS: Mapping[int, tuple[str, ...]] = {
    2: (
        "16/64/128/1/4/4", "16/64/128/1/4/4/e", "16/64/64/1/4/5", "16/128/128/1/4/3", "16/128/128/16/4/5",
        "16/64/256/1/4/3", "16/128/128/1/4/4/s", "32/64/128/8/4/4", "32/128/128/16/4/3", "32/128/128/1/4/4/s",
        "64/128/64/8/4/3", "64/128/64/8/4/4", "64/128/128/1/8/4", "64/128/128/8/4/3", "64/256/64/8/8/4",
        "128/128/64/1/8/4", "128/128/128/1/8/3", "128/256/64/1/8/4", "128/256/64/8/8/3", "128/256/64/8/8/4",
        "128/256/64/16/8/4",
    ),
    1: (
        "16/64/128/1/4/4/s", "16/64/128/1/4/4/se", "16/64/128/1/4/6/s", "16/128/128/1/4/4/s", "16/128/128/1/4/5/se",
        "16/64/256/1/4/4/s", "32/64/128/1/4/5/s", "32/128/128/1/4/4/s", "64/64/128/1/4/4", "64/128/128/1/4/3",
        "64/128/128/1/4/4", "64/128/128/16/4/4", "64/128/256/1/8/3", "64/256/128/1/8/4", "128/128/128/1/8/4",
        "128/128/128/16/8/4", "128/256/128/1/8/4", "128/256/128/16/8/3", "128/256/128/16/8/4",
    ),
}  # fmt: skip


def sets(itemsize: int) -> tuple[dict[str, str], ...]:
    """`Provider.params` for weights of so many bytes a number: the tiles of both products, the same ones.

    A table may also name different ones for the two, of one block_m.
    """
    return tuple({"gate_up": text, "down": text} for text in _SETS[itemsize])


def fits(params: Mapping[str, Any], rows: int, of_blocks: bool = False) -> bool:
    """Whether these sizes are meant for so many rows an expert on average; of_blocks: see tiles_fp8."""
    least, most = (16, 16) if rows <= 4 else (16, 64) if rows <= 32 else (64, 128)
    several = [parsed(text) for text in params.values()]
    if of_blocks and any(t.block_k > 128 or t.block_m * t.block_n > 128 * 128 for t in several):
        return False
    return all(least <= t.block_m <= most for t in several)


def chosen(own: Tiles, gate_up: str | None, down: str | None) -> tuple[Tiles, Tiles]:
    """The tiles of both products: those that are named, else the kernel's own.

    Raises ValueError for two with another block_m: both read what one moe_align has sorted.
    """
    first = own if gate_up is None else parsed(gate_up)
    second = first if down is None else parsed(down)
    if first.block_m != second.block_m:
        raise ValueError(f"gate_up {first} and down {second} must have one block_m")
    return first, second
