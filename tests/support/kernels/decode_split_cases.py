"""Script for TRITON_INTERPRET=1: the one-launch attention_decode against float64; prints a line of JSON per case.

Without the argument `all`, these are every second case, and uneven and ragged lengths have one set of parameters each.
"""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Iterable
from typing import Any

import torch
import triton.language as tl
from op_cases import make_args, mismatch, oracle, poison

from fastkernels.core import registry
from fastkernels.core.spec import Case
from fastkernels.overrides.attention import attention_decode_split as split
from fastkernels.overrides.attention.attention_decode_split import one_part

SPEC = registry.get("attention_decode")
# per_sm, block_n, num_warps, num_stages, min_split: one part and many, parts of one tile and of several.
EVEN = ((2, 16, 4, 2, 16, 1), (1, 16, 4, 2, 64, 1), (1, 32, 4, 2, 96, 1))
SETS = ((2, 16, 4, 2, 16), (2, 32, 4, 2, 32), (1, 16, 4, 2, 64), (2, 64, 4, 2, 32))
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"heads": 4, "kv_heads": 1, "head_size": 64, "block_size": 16},
    {"heads": 6, "kv_heads": 2, "head_size": 40, "block_size": 5},
    {"heads": 1, "kv_heads": 1, "head_size": 16, "block_size": 16, "window_left": 20},
    {"heads": 3, "kv_heads": 1, "head_size": 32, "block_size": 32, "softcap": 2.0},
)  # fmt: skip
# Each with one layout and one set: a length of none, around a block and a tile, of several parts.
LENGTHS = (
    ([0], 0), ([1], 1), ([15], 2), ([16, 17], 3), ([0, 1, 15, 16, 17], 0), ([65, 130, 3], 1), ([200, 33], 2),
    ([257], 3), ([70], 0), ([0, 40], 2),
)  # fmt: skip
# How lengths differ.
WORKERS = 33
WORKED = (1, 64, 4, 4, 128, 1), (2, 32, 2, 4, 64, 1)
UNEVEN: dict[str, Iterable[int]] = {
    "linear": range(128, 1921, 58), "equal": [2048] * 32, "one long": [20000] + [500] * 31,
    "few": [100, 5000, 700, 30, 0, 1200], "two kinds": [256, 256, 256, 3072] * 10,
    "many": [int(600 * -math.log(1 - (i + 0.5) / 200)) for i in range(200)],
}  # fmt: skip


def problem(dims: dict[str, Any], dtype: str, params: dict[str, int]) -> str | None:
    case = Case("split", dims, dtype)
    args = make_args(SPEC, case)
    if (reason := split.supports_split(*args)) is not None:
        return f"refused: {reason}"
    beyond = [i for i in range(args[1].shape[0]) if i not in set(args[4].flatten().tolist())]
    for cache in args[1:3] if dtype != "float8_e4m3fn" else []:  # what is no sequence's may be anything
        cache[beyond] = float("nan")
    if dtype == "float16":  # values whose blocks are farther from each other than those of keys
        args[2] = torch.nn.functional.pad(args[2], (0, 0, 0, 1))[:, :, :-1]
    first = split.decode_split(*args, **params)
    if not torch.equal(first, split.decode_split(*args, **params)):
        return "two equal calls have other bits"
    return mismatch(SPEC, case, [first], [oracle(SPEC, args)[0]])


class Parts:
    """Replaces one_part: records its arguments by sequence, and tiles by worker."""

    NAMES = ("seq", "low", "high", "parts", "row", "first", "bump", "step")

    def __init__(self) -> None:
        self.by_seq: dict[int, list[dict[str, int]]] = {}
        self.tiles: dict[int, int] = {}

    def __call__(self, *args: Any) -> None:
        given = dict(zip(one_part.arg_names, args, strict=True))
        values = {n: getattr(given[n], "handle", None) for n in self.NAMES}
        told = {n: int(given[n] if v is None else v.data.item()) for n, v in values.items()}
        worker, block_n = int(tl.program_id(1).handle.data.item()), int(given["BLOCK_N"])
        self.by_seq.setdefault(told["seq"], []).append(told)
        self.tiles[worker] = self.tiles.get(worker, 0) + max(-(-(told["high"] - told["low"]) // block_n), 1)


def uneven(lens: list[int], params: dict[str, int]) -> str | None:
    """Return an error in the parts of a batch: in their keys, their rows, or a worker's share."""
    split.one_part = parts = Parts()
    q, cache = torch.zeros(len(lens), 1, 16).half(), torch.zeros(1, 16, 1, 16).half()
    split.decode_split(
        q, cache, cache, torch.tensor(lens).int(), torch.zeros(len(lens), 1).int(), max(lens), 1.0, **params
    )
    rows: list[int] = []
    for seq, length in enumerate(lens):
        mine = sorted(parts.by_seq.get(seq, []), key=lambda p: p["low"])
        ends = [p["high"] for p in mine]
        if [p["low"] for p in mine] != [0, *ends[:-1]] or ends[-1] != length:
            return f"sequence {seq} of {length} keys is read as {mine}"
        added = [p["first"] + i * p["step"] + (p["bump"] if i == 0 else 0) for i, p in enumerate(mine)]
        if {p["parts"] for p in mine} != {len(mine)} or (len(mine) > 1 and [p["row"] for p in mine] != added):
            return f"sequence {seq} has inconsistent parts: {mine}"
        rows += added if len(mine) > 1 else []
    workers = WORKERS * params["per_sm"]
    if len(set(rows)) != len(rows) or max(rows, default=0) >= 2 * workers:
        return "two parts have one row, or one is beyond the memory"
    share, largest = sum(parts.tiles.values()) / workers, max(parts.tiles.values())
    return f"a worker has {largest} tiles where {share:.1f} is its share" if largest > share + 1 else None


def main(all_sets: bool) -> None:
    poison()
    split.multiprocessors = lambda device: 12  # fewer programs, each with more work
    cases: dict[str, tuple[Any, ...]] = {}
    for i, (lens, at) in enumerate(LENGTHS):
        layout, params = LAYOUTS[at], split._set(*SETS[(i + at) % len(SETS)])
        dtype = ("float16", "bfloat16")[i % 2]
        more = {"max_seqlen_k": 300} if i % 3 == 0 else {}  # as with a CUDA graph
        cases[f"{lens} {layout} {dtype} {tuple(params.values())}"] = (
            {"seq_lens": lens, **layout, **more}, dtype, params
        )  # fmt: skip
    ragged = (
        [0, 1, 15, 16, 17, 0, 33], [65, 130, 3, 0], [200, 33, 1, 1, 1, 90], [0], [257], [0, 0, 70, 0], [50] * 3,
        [130] * 5, [33] * 14,
    )  # fmt: skip
    for i, lens in enumerate(ragged):
        layout, dtype = LAYOUTS[i % len(LAYOUTS)], ("float16", "bfloat16")[i % 2]
        for sizes in EVEN[: 2 if i else 3] if all_sets else [EVEN[i % len(EVEN)]]:
            cases[f"even {lens} {layout} {dtype} {sizes}"] = (
                {"seq_lens": list(lens), **layout}, dtype, split._set(*sizes)
            )  # fmt: skip
    small = {"heads": 3, "kv_heads": 1, "head_size": 64, "block_size": 16}
    fp8 = {"seq_lens": [5, 17, 100], **small, "scales": (0.5, 0.75)}
    cases["fp8"] = (fp8, "float8_e4m3fn", split._set(1, 16, 4, 2, 16))
    wide = {"seq_lens": [70, 33], "heads": 3, "kv_heads": 1, "head_size": 320, "block_size": 16}
    cases["wide"] = (wide, "float16", {})
    cases["default"] = ({"seq_lens": [150, 70], **small}, "float16", {})
    for name, arguments in list(cases.items())[:: 1 if all_sets else 2]:
        try:
            found = problem(*arguments)
        except Exception:
            found = traceback.format_exc()
        print(json.dumps({"case": name, "problem": found}), flush=True)
    split.multiprocessors = lambda device: WORKERS
    for i, (name, lens) in list(enumerate(UNEVEN.items()))[:: 1 if all_sets else 2]:
        for sizes in WORKED if all_sets else [WORKED[i % 2]]:
            found = uneven(list(lens), split._set(*sizes))
            print(json.dumps({"case": f"{name} {sizes}", "problem": found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] == ["all"])
