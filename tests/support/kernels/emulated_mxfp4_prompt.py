"""Emulate csrc/mxfp4_prompt.cu on a CPU: its own text, with lanes_on_cpu.hpp instead of PTX. Needs g++.

A multiplication takes place when it is waited for, with what registers and shared memory hold then.
"""

from __future__ import annotations

import struct
from pathlib import Path

import torch
from support.kernels import emulated_mxfp4
from support.kernels.emulated import ported, run

from fastkernels.overrides.kit.hopper import text
from fastkernels.overrides.moe import mxfp4_gemm as few
from fastkernels.overrides.moe import mxfp4_prompt as many
from fastkernels.overrides.routing.sorted_pairs import Sorted

SHARED = (
    "shared_address", "meet", "widen", "load_weights", "load_from_l2", "halves", "product", "power", "inverse",
    "narrow",
)  # fmt: skip
BODIES = {
    **{name: emulated_mxfp4.BODIES[name] for name in SHARED},
    "make_barrier": "ring_barriers[barrier] = {arrivals};",
    "arrive": "arrive_at(ring_barriers[barrier]);",
    "wait": "Meeting& m = ring_barriers[barrier]; while ((m.held & 1) == (int)parity) wait_past(m, m.held);",
    "copy_16": "begin_copy(to, from, true);",
    "copy_weights": "of_weights.check(from, 16); begin_copy(to, from, true);",
    "arrive_when_copied": "close_copies(); finish_copies(0); arrive_at(ring_barriers[barrier]);",
    "load_shared": "return *(uint2*)(shared_memory + at);",
    "load_scales": "of_scales.check(at, 2); return *(const u16*)at;",
    "commit_multiply": "under_way[running].emplace_back();",
    "finish_multiply": "finish_groups(LEFT);",
    "turn": "return transpose(two);",
}
BEFORE = """
#include <map>
struct Bounds {
    const unsigned char *begin, *end;
    void check(const unsigned char* at, int bytes) { if (at < begin || at + bytes > end) fail("reads past a tensor"); }
};
static Bounds of_weights, of_scales;
template <class T> Bounds bounds(const std::vector<T>& v) {
    return {(const unsigned char*)v.data(), (const unsigned char*)(v.data() + v.size())};
}
static std::map<unsigned, Meeting> ring_barriers;
struct Multiplication { float* sums; int count; const uint32_t* a; unsigned long long b; };
static std::map<int, std::deque<std::vector<Multiplication>>> under_way;  // of a thread, in groups

template <int COUNT>
void multiply(float (&c)[COUNT], const uint32_t (&a)[4], unsigned long long b) {
    auto& groups = under_way[running];
    if (groups.empty()) groups.emplace_back();
    groups.back().push_back({c, COUNT, a, b});
}

inline void finish_groups(int left) {
    struct Fragment { uint32_t of[4]; };
    auto& groups = under_way[running];
    for (; (int)groups.size() > left + 1; groups.pop_front())
        for (const Multiplication& m : groups.front()) {
            Fragment mine;
            memcpy(mine.of, m.a, 16);
            among(mine, [&](auto of) {
                const int group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
                float a[2][16];
                for (int i = 0; i < 32; i++) {
                    const int k = i % 16;
                    a[i / 16][k] = number(half_of(of(group * 4 + k % 8 / 2).of[i / 16 + k / 8 * 2], k % 2));
                }
                for (int i = 0; i < m.count; i++) {
                    const int token = i / 4 * 8 + 2 * quad + i % 2;
                    for (int k = 0; k < 16; k++) {
                        uint16_t bits;
                        const uint32_t row = ((m.b & 0x3fff) << 4) + token / 8 * 1024 + token % 8 * 128;
                        memcpy(&bits, at(swizzled(row + 2 * k)), 2);
                        m.sums[i] += a[i % 4 / 2][k] * number(bits);
                    }
                }
                return 0;
            });
        }
}
"""
MAIN = emulated_mxfp4.MAIN
for before, after in (
    ("mxfp4_gemm(a.data(), weight.data()", "mxfp4_prompt(a.data(), (unsigned char*)weight.data()"),
    ("more.data()", "(u16*)more.data()"),
    ("run_cluster(", "ring_barriers.clear(), under_way.clear(), run_cluster("),
    ("gridDim.x = head[3];", "of_weights = bounds(weight), of_scales = bounds(scales), gridDim.x = head[3];"),
):
    MAIN = MAIN.replace(before, after)


def program(p: many.Plan) -> str:
    """Return C++ of the kernel and its launcher."""
    source = ported(text(few.COMMON, many.SOURCE), BODIES, p.options)
    end = source.index("typedef unsigned int u32;")
    return source[:end] + emulated_mxfp4.BEFORE + BEFORE + source[end:] + MAIN


def product(
    a: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor, pairs: Sorted, p: many.Plan,
    weights: torch.Tensor, alpha: float, limit: float, grid: int, folder: Path,
) -> torch.Tensor:  # fmt: skip
    """Return the result of mxfp4_prompt with `grid` blocks; rows that it does not write are NaN."""
    assert pairs.pairs is not None and pairs.total is not None
    experts, n = w.shape[:2]
    columns = n // 2 if p.glu else n
    head = (
        n, experts, pairs.n_pairs, grid, a.numel() // 8, w.numel() // 16, scales.numel(), pairs.pairs.numel(),
        pairs.experts.numel(), pairs.n_pairs * columns, 2 * bias.numel(),
    )  # fmt: skip
    tensors = (
        a.view(torch.int16), w, scales, bias.view(torch.int16), weights, pairs.pairs, pairs.experts, pairs.total,
    )  # fmt: skip
    given = struct.pack("11i2f", *head, alpha, limit)
    found = run(program(p), given + b"".join(t.contiguous().numpy().tobytes() for t in tensors), folder)
    return torch.frombuffer(bytearray(found), dtype=torch.bfloat16).view(pairs.n_pairs, columns)
