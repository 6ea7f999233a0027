"""What a call of an op costs the CPU, launched from Python: by launch_kernel, and by Triton itself. By hand, on a GPU.

    python bench/scenarios/launch_cost.py

A prompt's shapes of Llama-3.1-8B. The least of seven times 200 calls, us a call, without waiting for the chip; first
the values must be the same, and those of a captured graph too.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from fastkernels.overrides.activation.silu_and_mul import silu_and_mul
from fastkernels.overrides.kit import overlap as _overlap
from fastkernels.overrides.norm.rms_norm import rms_norm
from fastkernels.overrides.rope.rotary_emb import rotary_emb

TOKENS, HIDDEN, INNER, CALLS = 600, 4096, 14336, 200
Outputs = tuple[torch.Tensor, ...]


def calls() -> dict[str, Callable[[], Outputs]]:
    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16)

    x, weight = randn(TOKENS, HIDDEN), randn(HIDDEN)
    gate_up, qkv = randn(TOKENS, 2 * INNER), randn(TOKENS, 6144)
    positions, cache = torch.arange(TOKENS, device="cuda"), randn(TOKENS, 128)
    assert rotary_emb.functional is not None
    rotate = rotary_emb.functional

    def rotary() -> Outputs:
        query, key, _ = qkv.split([4096, 1024, 1024], 1)
        return rotate(positions, query, key, 128, cache, True)

    return {
        "rms_norm": lambda: (rms_norm(x, weight, 1e-6, None),),
        "silu_and_mul": lambda: (silu_and_mul(gate_up),),
        "rotary_emb": rotary,
    }


def same(a: Outputs, b: Outputs) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def measure(fn: Callable[[], Outputs]) -> tuple[Outputs, float]:
    """(its values, us a call)."""
    fn()
    found, best = fn(), float("inf")
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            fn()
        best = min(best, (time.perf_counter() - start) / CALLS)
    return found, 1e6 * best


@torch.inference_mode()
def main() -> None:
    for name, fn in calls().items():
        found = {}
        for quick in (False, True):
            _overlap._quick = quick
            found[quick] = measure(fn)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = fn()
        graph.replay()
        torch.cuda.synchronize()
        (by_triton, slow), (ours, fast) = found[False], found[True]
        right = same(by_triton, ours) and same(replayed, ours)
        print(
            f"{name:<14} {'same' if right else 'WRONG'}  Triton {slow:.1f} us, launch_kernel {fast:.1f} us",
            flush=True,
        )


if __name__ == "__main__":
    main()
