"""Tile sizes of the grouped matrix product: the kernel's default choice and the sets that a tuned table may name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any

import torch

FLAGS = "se"  # swap, early
LEAST = 32  # rows of an expert, on average, from which the CUDA C++ tiles of 128 rows are faster (float8 in blocks)
SHARED = 227 * 1024  # bytes of shared memory per program on Hopper


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of one program. block_m is also the block_size of moe_align.

    swap   the weight is the left operand: Hopper's tensor cores take 64 rows of the left operand and any multiple of 8
           columns of the right one, so few tokens on the right need no padding to 64
    early  the kernel starts while the previous one still runs (kit/overlap.py)
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
        """Return the form of tables: 16/64/128/1/4/4, with a last part of the flags' letters, as in FLAGS."""
        values = astuple(self)
        sizes, flags = values[: -len(FLAGS)], values[-len(FLAGS) :]
        letters = "".join(letter for letter, on in zip(FLAGS, flags, strict=True) if on)
        return "/".join([*map(str, sizes), *([letters] if letters else [])])

    def shared(self, itemsize: int) -> int:
        """Return the bytes of shared memory that the pipelined tiles take."""
        return (self.block_m + self.block_n) * self.block_k * itemsize * self.num_stages


@lru_cache(maxsize=256)
def parsed(text: str) -> Tiles:
    """Parse the tiles of a table, such as '16/64/128/1/4/4/s'. Raises ValueError for malformed text."""
    sizes, flags = text.split("/"), ""
    if len(sizes) == 7:
        flags = sizes.pop()
    if (
        len(sizes) != 6
        or not all(s.isdigit() and int(s) > 0 for s in sizes)
        or flags != "".join(letter for letter in FLAGS if letter in flags)
    ):
        raise ValueError(
            f"tiles {text!r}: want block_m/block_n/block_k/group_m/num_warps/num_stages, then nothing or / and letters"
            f" of {FLAGS} in this order"
        )
    m, n, k, group, warps, stages = map(int, sizes)
    return Tiles(m, n, k, group, warps, stages, *(letter in flags for letter in FLAGS))


@lru_cache
def wide(device: torch.device) -> bool:
    """Return whether the device has the shared memory of Hopper or later (3 stages of 128 x 256 x 64 take 144 KiB)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in ((9, 0), (10, 0), (10, 3))


def tiles(rows: int, dtype: torch.dtype, wide: bool) -> Tiles:
    """Return the default tiles for an average number of rows per expert; wide: use Hopper's shared memory.

    Blocks are larger than the average: routing is uneven, and an expert whose rows need two blocks reads its weights
    twice. For 32 rows per expert of Mixtral-8x7B, blocks of 32 took 1.29 to 1.36 times as long as blocks of 64.
    """
    block_m = 16 if rows <= 16 else 64 if rows <= 128 else 128
    if dtype == torch.float32:  # twice the shared memory per value, and no tensor cores
        return Tiles(min(block_m, 64), 64, 32, 8, 4, 3)
    if block_m == 16:
        # Reading the weights takes all the time: many small programs with deep pipelines.
        return Tiles(16, 64, 128, 1, 4, 4)
    if block_m == 64:
        return Tiles(64, 128, 64, 8, 4, 3)
    return Tiles(128, 256, 64, 8, 8, 3) if wide else Tiles(128, 128, 64, 8, 8, 3)


def tiles_fp8(rows: int, of_blocks: bool, wide: bool) -> Tiles:
    """Return the default tiles for float8 e4m3, after vLLM's tuned configurations for an H200.

    of_blocks: one scale per 128 x 128 weights, whose second accumulator does not fit the registers of 128 x 256 tiles.
    """
    if rows <= 16:
        return Tiles(16, 64, 128, 1, 4, 4, swap=wide)
    if of_blocks or not wide:
        return Tiles(64, 128, 128, 16, 4, 4 if wide else 3)
    return Tiles(64, 128, 128, 1, 4, 3) if rows <= 32 else Tiles(128, 256, 128, 16, 8, 4)


# Sets that a tuned table may name, by bytes per weight. Every set is correct for every shape.
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
    """Return `Provider.params` for weights of this many bytes per value: one set for both products.

    A table may also name different sets for the two products if their block_m is equal.
    """
    return tuple({"gate_up": text, "down": text} for text in _SETS[itemsize])


def fits(params: Mapping[str, Any], rows: int, of_blocks: bool = False) -> bool:
    """Return whether the tiles are worth trying for an average number of rows per expert; of_blocks: see tiles_fp8."""
    least, most = (16, 16) if rows <= 4 else (16, 64) if rows <= 32 else (64, 128)
    several = [parsed(text) for text in params.values()]
    if of_blocks and any(t.block_k > 128 or t.block_m * t.block_n > 128 * 128 for t in several):
        return False
    return all(least <= t.block_m <= most for t in several)


def chosen(own: Tiles, gate_up: str | None, down: str | None) -> tuple[Tiles, Tiles]:
    """Return the tiles of both products: the named ones, else `own`.

    Raises ValueError unless both have the same block_m: both products read the result of one moe_align.
    """
    first = own if gate_up is None else parsed(gate_up)
    second = first if down is None else parsed(down)
    if first.block_m != second.block_m:
        raise ValueError(f"gate_up {first} and down {second} must have one block_m")
    return first, second
