"""Script for TRITON_INTERPRET=1: the Triton kernel for few tokens against float64; prints a line of JSON per case."""

from __future__ import annotations

import json
import traceback
from typing import Any

import torch
from op_cases import mismatch, poison

from fastkernels.core import registry
from fastkernels.core.spec import Case
from fastkernels.overrides.linear.kernels import skinny_linear_triton as skinny

SPEC = registry.get("linear")
# variant, block_m, block_n, block_k, split_k: every path of the kernel, with remainders in all dimensions
SIZES = (
    ("sum", 1, 8, 128, 1), ("sum", 1, 16, 64, 3), ("sum", 2, 8, 64, 1), ("sum", 2, 8, 128, 2), ("sum", 4, 8, 64, 1),
    ("sum", 4, 16, 128, 3), ("swap", 8, 16, 64, 1), ("swap", 8, 32, 128, 3), ("swap", 16, 64, 64, 2),
    ("swap", 64, 64, 128, 1), ("dot", 16, 32, 64, 1), ("dot", 16, 16, 128, 3), ("dot", 32, 64, 64, 2),
)  # fmt: skip
TOKENS = {"sum": ((1,), (2, 1), (5,)), "swap": ((1,), (2, 4), (17,)), "dot": ((3,), (16,), (33,))}


def problem(
    tokens: tuple[int, ...], n: int, k: int, dtype: str, bias: bool, strided: bool, params: dict[str, Any]
) -> str | None:
    case = Case("skinny", {"tokens": tokens, "in": k, "out": n, "bias": bias}, dtype=dtype)
    x, weight, b = SPEC.inputs(case, "cpu", torch.Generator().manual_seed(len(tokens) + n + k))
    if strided:  # rows of wider tensors, as q in a packed qkv
        x, weight = (torch.cat([t, t.flip(0)[..., :16]], dim=-1)[..., :k] for t in (x, weight))
        assert x.stride(-2) == k + 16 and weight.stride(0) == k + 16
    if (reason := skinny.supports_skinny(x, weight, b)) is not None:
        return f"unsupported: {reason}"
    want = SPEC.reference(x.double(), weight.double(), b.double() if bias else None)
    first = skinny.linear_skinny(x, weight, b, **params)
    if params.get("split_k", 1) > 1 and not torch.equal(first, skinny.linear_skinny(x, weight, b, **params)):
        return "equal calls have different bits"
    return mismatch(SPEC, case, [first], [want])


def main() -> None:
    poison()
    cases: dict[str, tuple[Any, ...]] = {}
    for i, sizes in enumerate(SIZES):
        params = skinny._set(*sizes, 4, 2)
        for j, tokens in enumerate(TOKENS[sizes[0]]):
            dtype = ("bfloat16", "float16")[(i + j) % 2]
            n, k = ((33, 200), (40, 192), (24, 72))[j]
            cases[f"{sizes} {tokens} {n}x{k} {dtype}"] = (tokens, n, k, dtype, j != 1, j == 1, params)
    for m in (1, 2, 4, 8, 16, 32, 64):
        cases[f"default {m}"] = ((m,), 37, 136, "bfloat16", True, False, {})
    cases["none"] = ((0,), 33, 64, "bfloat16", True, False, {})
    for name, arguments in cases.items():
        try:
            found = problem(*arguments)
        except Exception:
            found = traceback.format_exc()
        print(json.dumps({"case": name, "problem": found}), flush=True)


if __name__ == "__main__":
    main()
