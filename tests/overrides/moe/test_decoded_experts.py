"""MXFP4 experts whose weights are decoded to memory first, in Triton's interpreter, against the reference."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from support.kernels import warm

from fastkernels.overrides.moe import biased_gemm

SCRIPT = Path(__file__).parents[2] / "support" / "kernels" / "decoded_cases.py"


def test_decoded_weights_give_the_same_experts() -> None:
    done = warm.run([SCRIPT], {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, timeout=120)
    assert done.returncode == 0, done.stderr
    found = {r["case"]: r["right"] for r in map(json.loads, done.stdout.splitlines())}
    assert len(found) == 5 and all(found.values()), found


def test_only_long_prompts_decode_first() -> None:
    """512 rows of an expert are 4,096 tokens of GPT-OSS-20B, 1,024 rows are 8,192."""
    for rows, decoded in ((512, False), (1024, True)):
        assert biased_gemm.biased_tiles(rows, torch.bfloat16, True).decoded == decoded
    assert not biased_gemm.biased_tiles(4096, torch.bfloat16, False).decoded
    assert not biased_gemm.biased_tiles(4096, torch.float16, True).decoded
