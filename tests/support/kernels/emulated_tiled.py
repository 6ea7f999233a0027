"""Emulate csrc/tiled_linear.cu on a CPU: its own text, with lanes_on_cpu.hpp instead of PTX. Needs g++."""

from __future__ import annotations

import struct
from pathlib import Path

import torch
from support.kernels.emulated import ported, run

from fastkernels.overrides.kit.hopper import text
from fastkernels.overrides.linear.kernels import tiled_linear_cuda as tiled
from fastkernels.overrides.linear.kernels.linear_fp8_scales import BLOCK, strides
from fastkernels.overrides.routing.sorted_pairs import Sorted

FP8 = torch.float8_e4m3fn

BODIES = {
    "shared_address": "return (u32)((uintptr_t)p - (uintptr_t)shared_memory);",
    "make_barrier": "barriers[barrier] = {arrivals, arrivals};",
    "arrive": "count(barrier, 1, 0), changes.held++;",
    "arrive_at": "count(in_block(barrier, rank), 1, 0), changes.held++;",
    "expect": "count(barrier, 1, bytes), changes.held++;",
    "wait": "while ((u32)barriers[barrier].phase == parity) wait_past(changes, changes.held);",
    "wait_for_others": "wait(barrier, parity);",
    "send": "const float v[4] = {a, b, c, d}; memcpy(at(in_block(to, rank)), v, 16);",
    "received": "float4 v; memcpy(&v, at(from), 16); return v;",
    "load_x": "copy(to, map.opaque, column, row, barrier, SHARING_X == 1 ? 1 << rank_of_block() : blocks);",
    "load_w": "copy(to, map.opaque, column, row, barrier, SHARING_W == 1 ? 1 << rank_of_block() : blocks);",
    "cluster_begins": "arrive_at_cluster(), wait_for_cluster();",
    "cluster_ends": "arrive_at_cluster(), wait_for_cluster();",
    "rank_in_cluster": "return rank_of_block();",
    "begin_multiply": "__syncwarp();",
    "commit_multiply": "",
    "finish_multiply": "__syncwarp();",
    "power_of_2": "return exp2f(x);",
    "reciprocal": "return 1 / x;",
    "not_negative": "return x < 0 ? 0 : x;",
    "four_e4m3": "return to_e4m3(a) | to_e4m3(b) << 8 | to_e4m3(c) << 16 | to_e4m3(d) << 24;",
    "load_16": "return *at;",
    "widen": "return number(bits);",
    "narrow": "return rounded(low) | (u32)rounded(high) << 16;",
}
BEFORE = """#define EMULATED_BLOCKS (CLUSTER * SPLITS)
#include "on_cpu.hpp"
#include "lanes_on_cpu.hpp"
static Meeting changes;  // of barriers

// Of a tensor map: its address, rows, columns, stride, rows of a box, and whether 32 rows are 4 x 4 pairs to transpose.
static void copy(uint32_t to, const unsigned long long* map, int column, int row, uint32_t barrier, uint32_t blocks) {
    std::vector<uint16_t> box(64 * map[4]);
    for (int i = 0; i < (int)box.size(); i++) {
        int r = i / 64, c = column + i % 64;
        if (map[5]) r = r / 32 * 32 + r / 2 % 4 * 8 + r / 8 % 4 * 2 + r % 2;
        const bool there = row + r < (int)map[1] && c < (int)map[2];
        box[i] = there ? ((const uint16_t*)map[0])[(row + r) * map[3] + c] : 0;
    }
    for (int block = 0; block < CLUSTER * SPLITS; block++) {
        if (!(blocks >> block & 1)) continue;
        for (int i = 0; i < (int)box.size(); i++) memcpy(at(swizzled(in_block(to, block) + 2 * i)), &box[i], 2);
        count(in_block(barrier, block), 0, -128 * (long)map[4]), changes.held++;
    }
}

static float __fdiv_rn(float a, float b) { return a / b; }
static uint32_t __float_as_uint(float f) { uint32_t b; memcpy(&b, &f, 4); return b; }
static float __uint_as_float(uint32_t b) { float f; memcpy(&f, &b, 4); return f; }
static uint32_t to_e4m3(float f) {  // the nearest number, of two the even one
    uint32_t best = 0;
    for (uint32_t b = 1; b < 127; b++) {
        const float nearer = fabsf(e4m3(best) - fabsf(f)) - fabsf(e4m3(b) - fabsf(f));
        if (nearer > 0 || (nearer == 0 && b % 2 == 0)) best = b;
    }
    return best | (f < 0 ? 128 : 0);
}

template <int COUNT> void multiply(float (&c)[COUNT], unsigned long long a, unsigned long long b, int add) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, count = FP8 ? 32 : 16;
    auto value = [](unsigned long long descriptor, int row, int k) {
        if (FP8) return operand(descriptor, row, k);
        uint16_t bits;
        memcpy(&bits, at(swizzled(((descriptor & 0x3fff) << 4) + row / 8 * 1024 + row % 8 * 128 + 2 * k)), 2);
        return number(bits);
    };
    float rows[2][32];
    for (int i = 0; i < 2 * count; i++)
        rows[i / count][i % count] = value(a, 16 * warp + lane / 4 + i / count * 8, i % count);
    for (int i = 0; i < COUNT; i += i % 4 == 1 ? 3 : 1) {
        float sums[2] = {};
        for (int k = 0; k < count; k++) {
            const float v = value(b, i / 4 * 8 + lane % 4 * 2 + i % 2, k);
            sums[0] += rows[0][k] * v, sums[1] += rows[1][k] * v;
        }
        for (int j = 0; j < 2; j++) c[i + 2 * j] = (add ? c[i + 2 * j] : 0) + sums[j];
    }
}
"""
MAIN = """
static std::vector<uint4> x, w[PARTS], bias[PARTS], scale, residual, out, table;
static std::vector<int> head, steps, experts, total, pairs;
static std::vector<float> x_scales, w_scales, factors, scales_out;

void one() {
    const TensorMap x_map = {{(u64)x.data(), (u64)head[0], (u64)head[2], (u64)head[2], (u64)X_SLICE, 0}};
    auto given = [](std::vector<uint4>& v) { return v.empty() ? nullptr : (u16*)v.data(); };
    Weights weights;
    Biases biases;
    for (int i = 0; i < PARTS; i++) {
        const u64 rows = head[1] * (head[7] - (FP8 && i));
        weights.of[i] = {{(u64)w[i].data(), rows, (u64)head[2], (u64)head[2], (u64)W_BOX, 1}};
        biases.of[i] = given(bias[i]);
    }
    const u16* cosines = given(table);
    const Turns turns = {cosines, cosines + 64, 128, head[4], head[5], head[6]};
    u16* to = (u16*)out.data();
#if FP8
    const Scales scales = {x_scales.data(), w_scales.data(), steps[2], steps[3], steps[4], steps[5]};
#endif
#if GROUPED
    const Groups groups = {experts.data(), total.data(), pairs.data(), factors.data(), scales_out.data(),
                           head[7] / PARTS, (int)factors.size(), head[0], 1};
#define MORE , scales, groups
#elif FP8
#define MORE , scales
#else
#define MORE
#endif
    tiled_linear(x_map, weights, biases, given(scale), given(residual), to, head[0], head[1], head[2], turns MORE);
}

int main(int, char** names) {
    FILE* file = fopen(names[1], "rb");
    head = numbers<int>(file, 11 + PARTS);
    const int M = head[0], N = head[1], K = head[2], grid = head[3];
    const int numbers_out = (GATED ? 1 : PARTS) * M * N;
    x = numbers<uint4>(file, M * K / 8);
    for (auto& one : w) if (BEHIND != 8 || &one == w) one = numbers<uint4>(file, head[7] * N * K / 8);
    for (int i = 0; i < PARTS; i++) bias[i] = numbers<uint4>(file, head[8 + i] / 8);
    scale = numbers<uint4>(file, head[8 + PARTS] / 8), residual = numbers<uint4>(file, head[9 + PARTS] / 8);
    table = numbers<uint4>(file, head[10 + PARTS] / 8);
    if (FP8) {
        steps = numbers<int>(file, 6);
        x_scales = numbers<float>(file, steps[0]), w_scales = numbers<float>(file, steps[1]);
    }
    if (GROUPED) {
        total = numbers<int>(file, 2), pairs = numbers<int>(file, M), experts = numbers<int>(file, M / BM);
        factors = numbers<float>(file, total[1]);
        scales_out.resize(BEHIND == 8 ? N / 128 * M : 0);
        if (BEHIND == 8) w[1].assign(w[0].begin() + N * K / 8, w[0].end());
    }
    out.assign(numbers_out / 8, {~0u, ~0u, ~0u, ~0u});
    gridDim.x = grid;
    for (int block = 0; block < grid; block += EMULATED_BLOCKS) {
        memset(shared_memory, 0xff, sizeof shared_memory);
        run_cluster(EMULATED_BLOCKS, block, THREADS, one);
    }
    FILE* to = fopen(names[2], "wb");
    fwrite(out.data(), BEHIND == 8 ? 1 : 2, numbers_out, to), fwrite(scales_out.data(), 4, scales_out.size(), to);
    fflush(nullptr);
}
"""


def linear_tiled(
    args: list[torch.Tensor | None], f: int, params: dict[str, int | str], sms: int, stages: int, folder: Path,
    parts: int = 1, turns: tuple[int, int, int] = (1, 0, 0),
    scales: tuple[torch.Tensor, torch.Tensor] | None = None, groups: tuple[Sorted, torch.Tensor] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the kernel's result for x, weights, biases, scale, residual, and rows of 64 cosines and 64 sines.

    turns: tokens of an image, those without a row, columns that are rotated; scales: of float8 x and weight, dense,
    x's in any order of dimensions; groups: experts of rows, and the pairs' weights. A float8 result is dequantized.
    Raises RuntimeError with its error.
    """
    fp8 = scales is not None
    args = [t.view(torch.int16) if t is not None and t.dtype == FP8 else t for t in args]
    x, weight = args[:2]
    assert x is not None and weight is not None
    several = parts if f == tiled.SWIGLU_FP8 else 1  # in one tensor
    (m, k), n = x.shape, weight.shape[-2] // several
    matrices = several if groups is None else several * len(weight)
    dtype = torch.bfloat16 if fp8 else x.dtype
    bf16 = dtype == torch.bfloat16
    p = tiled.plan(m, n, **params, sms=sms, f=f, parts=parts, fp8=fp8)  # type: ignore[arg-type]
    p = p._replace(grouped=groups is not None)
    told = [o for o in p.options(bf16) if not o.startswith("-DSTAGES")]
    source = ported(text(tiled.SOURCE), BODIES, [*told, f"-DSTAGES={stages}"])
    end = source.index("typedef unsigned int u32;")
    source = source[:end] + BEFORE + source[end:] + MAIN
    args = [*args, *[None] * (4 + 2 * parts - len(args))]
    sizes = [0 if t is None else t.numel() for t in args[1 + parts :]]
    given = struct.pack(f"{8 + len(sizes)}i", m, n, k, p.grid, *turns, matrices, *sizes)
    given += b"".join(t.view(torch.int16).numpy().tobytes() for t in args if t is not None)
    if scales is not None:
        x_scale, w_scale = scales
        one = w_scale.view(-1, w_scale.shape[-1])
        given += struct.pack("6i", x_scale.numel(), w_scale.numel(), *strides(BLOCK, x_scale, one)[1])
        given += b"".join(t.numpy().tobytes("A") for t in scales)
    if groups is not None:
        sort, weights = groups
        given += struct.pack("2i", int(sort.total), sort.n_pairs)
        given += b"".join(t.numpy().tobytes() for t in (sort.pairs, sort.experts, weights))
    result = bytearray(run(source, given, folder))
    if f == tiled.SWIGLU_FP8:
        y = torch.frombuffer(result[: m * n], dtype=FP8)
        y_scale = torch.frombuffer(result[m * n :], dtype=torch.float32)
        return y.view(m, n).float() * y_scale.view(-1, m).t().repeat_interleave(BLOCK, 1)
    found = torch.frombuffer(result, dtype=dtype)
    return found.view(m, n) if f in tiled.GATED or parts == 1 else found.view(parts, m, n)
