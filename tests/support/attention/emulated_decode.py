"""Emulate csrc/attention_decode.cu on a CPU: its own text, with lanes_on_cpu.hpp instead of PTX. Needs g++."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import torch
from support.kernels.emulated import ported, run

from fastkernels.overrides.attention import attention_decode_cuda as cuda
from fastkernels.overrides.attention.paged_cache import dtype_of

BODIES = {
    "shared_address": "return (u32)((uintptr_t)p - (uintptr_t)shared_memory);",
    "meet": "meet_block();",
    "widen": "return number(bits);",
    "kernels_before_end": "what_they_wrote();",
    "load_now": "return *at;",
    "load_16": "return *at;",
    "load_pair": "return *at;",
    "load_part": "return *at;",
    "copy_or_zero": "begin_copy(to, from, there);",
    "commit_copies": "close_copies();",
    "wait_for_copies": "finish_copies(LEFT);",
    "bring_to_l2": "*(volatile const unsigned char*)sector;",
    "power_of_2": "return exp2f(x);",
    "reciprocal": "return 1 / x;",
    "load_transposed": "load_tiles_transposed(a, row);",
    "transposed": "return transpose(two);",
    "multiply": "multiply_tiles(c, {{a0, a1, a2, a3}, {b0, b1}}, number);",
    "multiply_halves": "multiply_tiles(c, {{a0, a1, a2, a3}, {b0, b1}}, float_of_half);",
    "two_halves": "return half_of_float(low) | (u32)half_of_float(high) << 16;",
    "to_halves": "auto wide = [](u32 bits) { float f; memcpy(&f, &bits, 4); return in_half(f); };"
    " return two_halves(wide(two << 16), wide(two & 0xffff0000));",
    "halves_of_e4m3": "for (int i = 0; i < 2; i++)"
    " to[i] = two_halves(e4m3(four >> 16 * i & 255), e4m3(four >> 16 * i + 8 & 255));",
    "halves": "u32 v = 0; const u64 both = low | (u64)high << 32;"
    " for (int i = 0; i < 4; i++) v |= (u32)(both >> 8 * (order >> 4 * i & 7) & 255) << 8 * i; return v;",
    "cluster_arrives": "arrive_at_cluster();",
    "cluster_waits": "wait_for_cluster();",
    "of_rank": "return in_block(address, rank);",
    "send": "memcpy(at(to), &v, sizeof v);",
    "send_pair": "memcpy(at(to), &v, sizeof v);",
    "add_to": "const u32 old = *ticket; *ticket += value; return old;",
    "narrow": "return rounded(low) | (u32)rounded(high) << 16;",
}
BEFORE = """#include "on_cpu.hpp"
#include "lanes_on_cpu.hpp"
void what_they_wrote();
"""
MAIN = """
struct Call {
    u16 *q, *keys, *values, *out;
    float* parts;
    u32* tickets;
    int *lens, *table;
    std::vector<int> sizes;
    float scale, v_scale, softcap;
    int early, window;
};
static Call call;
static std::vector<float> sinks;  // or pairs of 16 bits
static std::vector<int> real_lens, real_table;

void what_they_wrote() {
    std::copy(real_lens.begin(), real_lens.end(), call.lens);
    std::copy(real_table.begin(), real_table.end(), call.table);
}

void one() {
    const int* s = call.sizes.data();
    attention_decode(call.q, call.keys, call.values, call.out, call.parts, call.tickets, call.lens, call.table,
                     s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9], s[10], s[11], s[12], s[13],
                     call.scale, call.v_scale, call.early, call.window, call.softcap, sinks.data());
}

// A file has a header of 24 integers, three floats, and q, keys, values, lengths, table, sinks, as they lie in memory.
int main(int, char** names) {
    FILE* file = fopen(names[1], "rb");
    const auto head = numbers<int>(file, 24);
    const int grid = head[14], outputs = head[15], stale = head[16];
    const auto scales = numbers<float>(file, 3);
    auto rows = [&](int count) { return numbers<uint4>(file, (count + 15) / 16); };  // bytes, which begin at 16
    auto q = rows(head[17]), keys = rows(head[18]), values = rows(head[19]);
    real_lens = numbers<int>(file, head[20]), real_table = numbers<int>(file, head[21]);
    sinks = numbers<float>(file, head[23]);
    auto lens = real_lens, table = real_table;
    std::vector<u32> tickets(grid);
    gridDim.x = grid;
    FILE* found = fopen(names[2], "wb");
    for (int backwards = 0; backwards < 2; backwards++) {
        std::vector<uint2> out((outputs + 3) / 4, uint2{~0u, ~0u});
        std::vector<float4> parts(2 * grid / CLUSTER * HEADS * (D + 4) / 4, float4{NAN, NAN, NAN, NAN});
        call = {(u16*)q.data(), (u16*)keys.data(), (u16*)values.data(), (u16*)out.data(), (float*)parts.data(),
                tickets.data(), lens.data(), table.data(), {head.begin(), head.begin() + 14}, scales[0], scales[1],
                scales[2], stale != 0, head[22]};
        for (int i = 0; i < grid; i += CLUSTER) {
            // What the kernel before has yet to write: nothing of it, or all of it.
            auto nonsense = [&](int& n) { n = (u32)(n + i + 1) * 2654435761u; };
            if (stale == 2) for (int& n : lens) nonsense(n);
            if (stale >= 2) for (int& n : table) nonsense(n);
            memset(shared_memory, 0xff, sizeof shared_memory);
            run_cluster(CLUSTER, backwards ? grid - CLUSTER - i : i, THREADS, one);
        }
        for (u32 ticket : tickets) if (ticket) fail("a ticket is not as it was");
        fwrite(out.data(), 2, outputs, found);
    }
    fclose(found);
}
"""


def program(p: cuda.Plan, tickets: bool = True) -> str:
    """Return C++ of the kernel and its launcher; with tickets=False, taking a ticket is an error."""
    bodies = BODIES if tickets else {**BODIES, "add_to": 'fail("a ticket was taken"); return 0;'}
    source = ported(cuda.source(), bodies, p.options)
    end = source.index("typedef unsigned int u32;")
    return source[:end] + BEFORE + source[end:] + MAIN


def lying(t: torch.Tensor) -> torch.Tensor:
    """Return the memory that a tensor spans, from its first element, as bytes."""
    reach = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    flat = torch.as_strided(t, (reach,), (1,)).view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -len(flat) % 16))


def decode(
    args: list[Any],
    params: dict[str, int],
    sms: int,
    stale: int,
    folder: Path,
    tickets: bool = True,
    slots: int = 0,
) -> tuple[torch.Tensor, ...]:
    """Return the op's results with blocks in order, and in reverse order.

    args   the op's arguments
    stale  0: no previous kernel; 1: it has ended; 2: lengths and table are nonsense until the wait; 3: only the table
    slots  warps whose sums are in memory at once; 0: as the plan says
    """
    q, keys, values, lens, table = args[:5]
    window, softcap, k_scale, v_scale = args[7:11]
    sinks = args[11] if len(args) > 11 else None
    p = cuda.plan(params, q, keys, window >= 0, softcap > 0, sinks)
    source = program(p, tickets)
    if slots:
        source = source.replace(f"#define SLOTS {p.slots}\n", f"#define SLOTS {slots}\n")
    logits = (
        torch.zeros(0)
        if sinks is None
        else torch.nn.functional.pad(sinks, (0, len(sinks) % 2)).view(torch.float32)
    )
    workers = cuda.most_workers(keys.shape[2], params, sms)
    data = [lying(t) for t in (q, keys, values)]
    head = (
        *cuda.sizes(params, q, keys, values, table), keys.shape[2] * workers * params["cluster"], q.numel(), stale,
        *(t.numel() for t in data), lens.numel(), table.numel(), window,
        logits.numel(),
    )  # fmt: skip
    scales = (args[6] * k_scale * cuda.LOG2E, v_scale, softcap * cuda.LOG2E)
    given = struct.pack("24i3f", *head, *scales)
    given += b"".join(t.numpy().tobytes() for t in (*data, lens, table.contiguous(), logits))
    found = run(source, given, folder)
    return torch.frombuffer(bytearray(found), dtype=dtype_of(q)).view(2, *q.shape).unbind()
