"""Check that the judge measures a true factor of two as two and of one as one. On a GPU, memory-bound, 700 MB a call.

    judge_check.py --out FOLDER

The slower candidate runs the same kernel twice and moves twice the bytes; both are also judged against themselves.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fk_bench.core.rows import append
from fk_bench.kernels.judge import Options, judge_ops

KERNEL = """
import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x_ptr, out_ptr, d, BLOCK: tl.constexpr):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = tile * BLOCK + tl.arange(0, BLOCK)
    mask = cols < d
    gate = tl.load(x_ptr + row * 2 * d + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * d + d + cols, mask=mask, other=0.0).to(tl.float32)
    gate = (gate * tl.sigmoid(gate)).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * d + cols, (gate * up).to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(x):
    d = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], d), dtype=x.dtype, device=x.device)
    for _ in range(TIMES):
        kernel[(x.numel() // (2 * d), triton.cdiv(d, 2048))](x, out, d, BLOCK=2048, num_warps=8)
    return out
"""
PAIRS = (("once", "twice", 2.0), ("once", "once", 1.0), ("twice", "twice", 1.0))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    files = {}
    for name, times in (("once", 1), ("twice", 2)):
        files[name] = options.out / name / "silu_and_mul.py"
        files[name].parent.mkdir(parents=True, exist_ok=True)
        files[name].write_text(KERNEL + f"\n\nTIMES = {times}\n")
    wrong = 0
    for candidate, baseline, truth in PAIRS:
        judged = Options(
            device="cuda",
            against=str(files[baseline]),
            cases=("random",),
            names=("prefill_8k",),
            rounds=20,
            seconds=3.0,
        )
        row = judge_ops(["silu_and_mul"], {"silu_and_mul": files[candidate]}, judged)[0]
        row.case["truth"] = truth
        append(options.out / "rows.jsonl", [row])
        speedup, interval = row.metrics.get("speedup"), row.ci95.get("speedup")
        right = speedup is not None and abs(speedup / truth - 1) <= 0.05
        wrong += not right
        print(
            f"{candidate} over {baseline}: {speedup} {interval}, truly {truth}: {row.status.value} {row.reason}"
        )
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
