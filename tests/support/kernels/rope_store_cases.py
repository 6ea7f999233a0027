"""Script for TRITON_INTERPRET=1: compare the fused launch with the separate ones; prints a line of JSON per case."""

from __future__ import annotations

import dataclasses
import json
import traceback
from typing import Any

import torch
from op_cases import make_args, poison

from fastkernels.core import registry
from fastkernels.core.spec import Case
from fastkernels.overrides.cache import store_kvcache
from fastkernels.overrides.norm import gemma_rms_norm, rms_norm
from fastkernels.overrides.rope import rope_store_kvcache, rotary_emb

SPEC = registry.get("rope_store_kvcache")


def problem(case: Case) -> str | None:
    if case.dtype == "bfloat16":  # the interpreter truncates bfloat16
        case = dataclasses.replace(case, dtype="float16")
    args: list[Any] = make_args(SPEC, case)
    positions, query, key, value, *caches = (a.clone() for a in args[:6])
    slots, table, neox, q_weight, k_weight, eps, *scales, offset, norm_value = args[6:]
    if q_weight is not None and offset:
        query, key = (gemma_rms_norm._triton(x, w, eps) for x, w in ((query, q_weight), (key, k_weight)))
    elif q_weight is not None:
        query, key = (
            rms_norm._triton(x, w, eps, None, None, False) for x, w in ((query, q_weight), (key, k_weight))
        )
    value = rms_norm._triton(value, None, eps) if norm_value else value
    rotary_emb._triton(positions, query, key, query.shape[-1], table, neox)
    store_kvcache._triton(key, value, *caches, slots, *scales)
    before = args[2].clone()
    rope_store_kvcache._triton(*args)
    if not torch.equal(before, args[2]):
        return "it wrote to the key"
    for name, got, want in zip(
        ("query", "key_cache", "value_cache"), (args[1], *args[4:6]), (query, *caches), strict=True
    ):
        differing = int((got.float() != want.float()).sum())
        # The sum of squares has another order: the last bit may differ.
        close = case.dims.get("norms") and torch.allclose(got.float(), want.float(), rtol=2e-3, atol=2e-3)
        if differing and not close:
            return f"{differing} of {got.numel()} values of {name} differ"
    return None


def main() -> None:
    poison()
    for case in SPEC.cases:
        if "odd" in case.tags and case.name != "smollm2":  # its heads take half of the time
            try:
                found = problem(case)
            except Exception:
                found = traceback.format_exc()
            print(json.dumps({"case": case.name, "problem": found}), flush=True)


if __name__ == "__main__":
    main()
