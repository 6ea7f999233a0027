"""Emulate csrc/mxfp4_gemm.cu on a CPU: its own text, with lanes_on_cpu.hpp instead of PTX. Needs g++."""

from __future__ import annotations

import struct
from pathlib import Path

import torch
from support.kernels.emulated import ported, run

from fastkernels.overrides.kit.hopper import text
from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.moe import mxfp4_gemm as few
from fastkernels.overrides.routing.sorted_pairs import Sorted

BODIES = {
    "shared_address": "return (u32)((uintptr_t)p - (uintptr_t)shared_memory);",
    "meet": "meet_block();",
    "widen": "return number(bits);",
    "kernels_before_end": "",
    "copy_16": "begin_copy(to, from, true);",
    "commit_copies": "close_copies();",
    "await_copies": "finish_copies(AHEAD);",
    "load_16": "return *at;",
    "load_weights": "return *at;",
    "load_from_l2": "return *at;",
    "product": "u32 v = 0; for (int i = 0; i < 2; i++) v |= (u32)rounded(number(half_of(a, i)) * number(half_of(b, i)))"
    " << 16 * i; return v;",
    "halves": "u64 both = (u64)high << 32 | low; u32 v = 0; for (int i = 0; i < 4; i++)"
    " v |= (u32)(both >> 8 * (order >> 4 * i & 7) & 255) << 8 * i; return v;",
    "power": "return expf(x);",
    "from_half": "_Float16 half; memcpy(&half, &bits, 2); return (float)half;",
    "difference": "u32 v = 0; for (int i = 0; i < 2; i++) v |= (u32)rounded(number(half_of(two & mask | ONE, i))"
    " - number(half_of(zero, i))) << 16 * i; return v;",
    "inverse": "return 1 / x;",
    "multiply": "multiply_tiles(c, {{a0, a1, a2, a3}, {b0, b1}});",
    "narrow": "return rounded(low) | (u32)rounded(high) << 16;",
}
BEFORE = """#define CLUSTER 1
#include "on_cpu.hpp"
#include "lanes_on_cpu.hpp"
"""
MAIN = """
static std::vector<uint4> a, weight;
static std::vector<unsigned char> scales, more;
static std::vector<u16> out;
static std::vector<float> weights, floats;
static std::vector<int> pairs, experts, total, head;

void one() {
    mxfp4_gemm(a.data(), weight.data(), scales.data(), more.data(), out.data(), weights.data(), pairs.data(),
               experts.data(), total.data(), head[0], head[1], head[2], floats[0], floats[1]);
}

int main(int, char** names) {
    FILE* file = fopen(names[1], "rb");
    head = numbers<int>(file, 11), floats = numbers<float>(file, 2);
    a = numbers<uint4>(file, head[4]), weight = numbers<uint4>(file, head[5]);
    scales = numbers<unsigned char>(file, head[6]), more = numbers<unsigned char>(file, head[10]);
    weights = numbers<float>(file, head[2]), pairs = numbers<int>(file, head[7]);
    experts = numbers<int>(file, head[8]), total = numbers<int>(file, 1);
    out.assign(head[9], 0x7fff);
    gridDim.x = head[3];
    for (int block = 0; block < gridDim.x; block++) {
        memset(shared_memory, 0xff, sizeof shared_memory);
        run_cluster(1, block, THREADS, one);
    }
    fwrite(out.data(), 2, out.size(), fopen(names[2], "wb"));
    fflush(nullptr);
}
"""


def program(p: few.Plan) -> str:
    """Return C++ of the kernel and its launcher."""
    source = ported(text(few.COMMON, few.SOURCE), BODIES, p.options)
    end = source.index("typedef unsigned int u32;")
    return source[:end] + BEFORE + source[end:] + MAIN


def product(
    a: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, more: torch.Tensor, pairs: Sorted, p: few.Plan,
    weights: torch.Tensor, alpha: float, limit: float, folder: Path,
) -> torch.Tensor:  # fmt: skip
    """Return the result of mxfp4_gemm; rows that it does not write are NaN."""
    n = w.shape[1]
    columns = n // 2 if p.glu else n
    scales, more = (t.contiguous().view(torch.uint8) for t in (scales, more))
    sorted_ids = torch.zeros(0, dtype=torch.int32) if pairs.pairs is None else pairs.pairs
    total = torch.zeros(1, dtype=torch.int32) if pairs.total is None else pairs.total
    *numbers, _, _ = few.arguments(w, pairs, alpha, limit)
    head = (
        *numbers, pairs.blocks * cdiv(n, 16 * p.rows), a.numel() // 8, w.numel() // 16, scales.numel(),
        sorted_ids.numel(), pairs.experts.numel(), pairs.n_pairs * columns, more.numel(),
    )  # fmt: skip
    tensors = (
        a.view(torch.int16),
        w,
        scales,
        more,
        weights,
        sorted_ids,
        pairs.experts,
        total,
    )
    given = struct.pack("11i2f", *head, alpha, limit) + b"".join(
        t.contiguous().numpy().tobytes() for t in tensors
    )
    found = run(program(p), given, folder)
    return torch.frombuffer(bytearray(found), dtype=torch.bfloat16).view(pairs.n_pairs, columns)
