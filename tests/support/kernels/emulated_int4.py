"""Emulate csrc/int4_linear.cu on a CPU: its own text, with lanes_on_cpu.hpp instead of PTX. Needs g++."""

from __future__ import annotations

import struct
from pathlib import Path

import torch
from support.kernels import emulated_mxfp4
from support.kernels.emulated import ported, run

from fastkernels.overrides.kit.hopper import text
from fastkernels.overrides.kit.launch import cdiv
from fastkernels.overrides.linear.kernels import int4_linear_cuda as few

BODIES = {
    **{
        name: emulated_mxfp4.BODIES[name]
        for name in (
            "shared_address",
            "meet",
            "widen",
            "load_16",
            "halves",
            "multiply",
            "narrow",
            "product",
            "difference",
        )
    },
    "load_scale": "return *at;",
    "scale_of": "_Float16 half; memcpy(&half, &bits, 2); return HALF_SCALES ? (float)half : widen(bits);",
    "scale_in_dtype": "return rounded(scale_of(bits)) * 0x00010001u;",
    "load_zero": "return *at;",
    "add_to": "const u32 old = *ticket; *ticket += value; return old;",
    "load_part": "return *at;",
    "evict_first": "return 0;",
    "load_weight": "return *at;",
    "copy_weight": "begin_copy(to, from, true);",
    "copy_16": "begin_copy(to, from, true);",
    "commit_copies": "close_copies();",
    "await_copies": "finish_copies(AHEAD - 1);",
    "make_barrier": "barriers_of_sums[barrier] = {arrivals};",
    "arrive": "arrive_at(barriers_of_sums[barrier]);",
    "wait": "Meeting& m = barriers_of_sums[barrier]; while ((m.held & 1) == (int)parity) wait_past(m, m.held);",
    "begin_product": "for (float& sum : c) sum = 0; multiply(c, a0, a1, a2, a3, b0, b1);",
    "add_product": "multiply(c, a0, a1, a2, a3, b0, b1);",
}
MAIN = """
static std::vector<u16> x, scales, bias, out;
static std::vector<uint4> weight;
static std::vector<unsigned char> zeros;
static std::vector<float4> partial;
static std::vector<u32> tickets;
static std::vector<int> head;

void one() {
    int4_linear(x.data(), weight.data(), scales.data(), zeros.data(), bias.data(), out.data(), partial.data(),
                tickets.data(), head[0], head[1], head[2]);
}

int main(int, char** names) {
    FILE* file = fopen(names[1], "rb");
    head = numbers<int>(file, 5);
    const int M = head[0], N = head[1];
    x = numbers<u16>(file, head[4]), weight = numbers<uint4>(file, N * K / 32);
    scales = numbers<u16>(file, N * GROUPS), zeros = numbers<unsigned char>(file, N * GROUPS);
    bias = numbers<u16>(file, N);
    out.assign(M * N, 0x7fff), tickets.assign(N, 0);
    partial.assign((size_t)SPLITS * ((N + ROWS - 1) / ROWS) * OUTPUTS * 32, {NAN, NAN, NAN, NAN});
    gridDim.x = head[3];
    for (int block = 0; block < gridDim.x; block++) {
        memset(shared_memory, 0xff, sizeof shared_memory);
        run_cluster(1, block, THREADS, one);
    }
    for (u32 ticket : tickets) if (ticket) fail("a ticket is not as it was");
    fwrite(out.data(), 2, out.size(), fopen(names[2], "wb"));
    fflush(nullptr);
}
"""


def program(p: few.Plan) -> str:
    """Return C++ of the kernel and its launcher."""
    source = ported(text(few.SOURCE), BODIES, p.options)
    end = source.index("typedef unsigned int u32;")
    barriers = "#include <map>\nstatic std::map<unsigned, Meeting> barriers_of_sums;\n"
    return source[:end] + emulated_mxfp4.BEFORE + barriers + source[end:] + MAIN


def product(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bias: torch.Tensor, p: few.Plan,
    folder: Path,
) -> torch.Tensor:  # fmt: skip
    """Return the result of linear_int4_cuda; what it does not write is NaN. x may have rows that are apart."""
    memory = x if x._base is None else x._base
    m, n = x.shape[0], weight.shape[0]
    if p.fp4:  # zero: factors, in the place of zero points
        zero = torch.nn.functional.pad(zero.view(torch.uint8), (0, n * (p.k // p.group - 4)))
    given = struct.pack("5i", m, n, x.stride(0), p.grid, memory.numel()) + b"".join(
        t.contiguous().view(torch.uint8).numpy().tobytes() for t in (memory, weight, scale, zero, bias)
    )
    assert p.grid <= p.splits * cdiv(n, 16 * p.height)
    return torch.frombuffer(bytearray(run(program(p), given, folder)), dtype=x.dtype).view(m, n)
