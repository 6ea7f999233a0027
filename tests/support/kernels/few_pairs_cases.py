"""Script for TRITON_INTERPRET=1: experts of few tokens against float64; prints a line of JSON per case."""

from __future__ import annotations

import json
import traceback

import torch
from op_cases import mismatch, poison

from fastkernels.core import registry
from fastkernels.core.spec import Case
from fastkernels.overrides.moe import fused_experts as experts
from fastkernels.overrides.moe.few_pairs import PARAMS

SPEC = registry.get("fused_experts")
# tokens, experts, top k, hidden, intermediate, dtype, and more: remainders in every dimension
CASES = {
    "one": ((1, 1, 1, 1, 1, "float32"), {}),
    "remainders": ((3, 5, 2, 70, 33, "float32"), {}),
    "parts": ((1, 3, 3, 40, 600, "float32"), {}),  # several steps for each expert
    "deep": ((1, 3, 1, 1100, 8, "bfloat16"), {}),
    "elsewhere": ((4, 7, 3, 24, 16, "float32"), {"elsewhere": True}),
    "on_input": ((3, 3, 1, 40, 24, "float16"), {"on_input": True}),
}


def problem(name: str, params: dict[str, int]) -> str | None:
    (*sizes, dtype), more = CASES[name]
    dims = dict(zip(("tokens", "experts", "topk", "hidden", "intermediate"), sizes, strict=True))
    case = Case(name, {**dims, **more}, str(dtype))
    args = SPEC.inputs(case, "cpu", torch.Generator().manual_seed(len(name)))
    if name == "remainders":
        args[4][1] = -1  # a padded token
        args[4][2, 1] = 99
    if (reason := experts._supports_few(*args)) is not None:
        return f"unsupported: {reason}"
    want = SPEC.reference(
        *(a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)
    )
    return mismatch(SPEC, case, [experts._few(*args, **params)], [want])


def main() -> None:
    poison()
    for i, name in enumerate(CASES):
        try:
            found = problem(name, PARAMS[i % len(PARAMS)])
        except Exception:
            found = traceback.format_exc()
        print(json.dumps([name, found]), flush=True)


if __name__ == "__main__":
    main()
