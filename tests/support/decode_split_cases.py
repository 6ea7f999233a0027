"""As a script under TRITON_INTERPRET=1: attention_decode in one launch against float64, a line of JSON a case."""

from __future__ import annotations

import json
import traceback
from typing import Any

import torch
from op_cases import make_args, mismatch, oracle, poison

from fastkernels import registry
from fastkernels.overrides.l1 import _attention_decode_split as split
from fastkernels.spec import Case

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


def problem(dims: dict[str, Any], dtype: str, params: dict[str, int]) -> str | None:
    case = Case("split", dims, dtype)
    args = make_args(SPEC, case)
    if (reason := split.supports_split(*args)) is not None:
        return f"refused: {reason}"
    beyond = [i for i in range(args[1].shape[0]) if i not in set(args[4].flatten().tolist())]
    for cache in args[1:3] if dtype != "float8_e4m3fn" else []:  # what is no sequence's may be anything
        cache[beyond] = float("nan")
    first = split.decode_split(*args, **params)
    if not torch.equal(first, split.decode_split(*args, **params)):
        return "two equal calls have other bits"
    return mismatch(SPEC, case, [first], [oracle(SPEC, args)[0]])


def main() -> None:
    poison()
    split.multiprocessors = lambda device: 12  # fewer programs, and more to do for each
    cases: dict[str, tuple[Any, ...]] = {}
    for i, (lens, at) in enumerate(LENGTHS):
        layout, params = LAYOUTS[at], split._set(*SETS[(i + at) % len(SETS)])
        dtype = ("float16", "bfloat16")[i % 2]
        more = {"max_seqlen_k": 300} if i % 3 == 0 else {}  # as a CUDA graph's, for sequences of any length
        cases[f"{lens} {layout} {dtype} {tuple(params.values())}"] = (
            {"seq_lens": lens, **layout, **more}, dtype, params
        )  # fmt: skip
    ragged = ([0, 1, 15, 16, 17, 0, 33], [65, 130, 3, 0], [200, 33, 1, 1, 1, 90], [0], [257], [0, 0, 70, 0])
    for i, lens in enumerate(ragged):
        layout, dtype = LAYOUTS[i % len(LAYOUTS)], ("float16", "bfloat16")[i % 2]
        for sizes in EVEN[: 2 if i else 3]:
            cases[f"even {lens} {layout} {dtype} {sizes}"] = (
                {"seq_lens": list(lens), **layout}, dtype, split._set(*sizes)
            )  # fmt: skip
    small = {"heads": 3, "kv_heads": 1, "head_size": 64, "block_size": 16}
    fp8 = {"seq_lens": [5, 17, 100], **small, "scales": (0.5, 0.75)}
    cases["fp8"] = (fp8, "float8_e4m3fn", split._set(1, 16, 4, 2, 16))
    cases["default"] = ({"seq_lens": [150, 70], **small}, "float16", {})
    for name, arguments in cases.items():
        try:
            found = problem(*arguments)
        except Exception:
            found = traceback.format_exc()
        print(json.dumps({"case": name, "problem": found}), flush=True)


if __name__ == "__main__":
    main()
