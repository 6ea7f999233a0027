"""Emulate csrc/mxfp4_stream.cu on a CPU: its own text, with lanes_on_cpu.hpp instead of PTX. Needs g++.

A copy takes place when it is begun. A barrier counts the bytes that it expects, too.
"""

from __future__ import annotations

import struct
from pathlib import Path

import torch
from support.kernels import emulated_mxfp4
from support.kernels.emulated import ported, run

from fastkernels.overrides.kit.hopper import text
from fastkernels.overrides.moe import mxfp4_gemm as few
from fastkernels.overrides.moe import mxfp4_stream as stream
from fastkernels.overrides.moe.sorted_pairs import Sorted

BODIES = {
    **{name: body for name, body in emulated_mxfp4.BODIES.items() if name != "difference"},
    "make_barrier": "ring_barriers[barrier] = {}, ring_barriers[barrier].meeting.size = arrivals;",
    "arrive": "ring_barriers[barrier].count(1, 0);",
    "expect": "ring_barriers[barrier].count(1, bytes);",
    "wait": "Meeting& m = ring_barriers[barrier].meeting; while ((m.held & 1) == (int)parity) wait_past(m, m.held);",
    "copy_rows": "copied.check(from, bytes); memcpy(at(to), from, bytes); ring_barriers[barrier].count(0, -bytes);"
    " if (to % 16 || (uintptr_t)from % 16 || bytes % 16) fail(\"a copy is not aligned\");",
}  # fmt: skip
BEFORE = """
#include <map>
struct Bounds {
    const unsigned char *begin[3], *end[3];
    void check(const void* from, int bytes) {
        for (int i = 0; i < 3; i++)
            if ((const unsigned char*)from >= begin[i] && (const unsigned char*)from + bytes <= end[i]) return;
        fail("reads past a tensor");
    }
};
static Bounds copied;  // weights, scales and more
struct Counted {
    Meeting meeting;
    long bytes = 0;
    void count(int arrivals, long more) {
        meeting.here += arrivals, bytes += more;
        if (meeting.here > meeting.size) fail("too many arrivals");
        if (meeting.here == meeting.size && !bytes) meeting.here = 0, meeting.held++;
    }
};
static std::map<unsigned, Counted> ring_barriers;
"""
MAIN = emulated_mxfp4.MAIN
for before, after in (
    ("mxfp4_gemm(a.data(), weight.data()", "mxfp4_stream(a.data(), (u8*)weight.data()"),
    (" scales.data(), more.data()", " (u8*)scales.data(), more.data()"),
    (
        "static std::vector<unsigned char> scales, more;",
        "typedef unsigned char u8;\nstatic std::vector<uint4> scales;\nstatic std::vector<u8> more;",
    ),
    ("scales = numbers<unsigned char>(file, head[6])", "scales = numbers<uint4>(file, head[6] / 16)"),
    ("run_cluster(", "ring_barriers.clear(), run_cluster("),
    (
        "gridDim.x = head[3];",
        "copied = {{(u8*)weight.data(), (u8*)scales.data(), more.data()}, {(u8*)(weight.data() + weight.size()),"
        " (u8*)(scales.data() + scales.size()), more.data() + more.size()}}, gridDim.x = head[3];",
    ),
):  # fmt: skip
    assert before in MAIN, before
    MAIN = MAIN.replace(before, after)


def program(p: stream.Plan) -> str:
    """Return C++ of the kernel and its launcher."""
    source = ported(text(few.COMMON, stream.SOURCE), BODIES, p.options)
    end = source.index("typedef unsigned int u32;")
    return source[:end] + emulated_mxfp4.BEFORE + BEFORE + source[end:] + MAIN


def product(
    a: torch.Tensor, w: torch.Tensor, scales: torch.Tensor, more: torch.Tensor, pairs: Sorted, p: stream.Plan,
    weights: torch.Tensor, alpha: float, limit: float, grid: int, folder: Path,
) -> torch.Tensor:  # fmt: skip
    """Return the result of mxfp4_stream with `grid` blocks; rows that it does not write are NaN."""
    assert pairs.pairs is not None and pairs.total is not None
    experts, n = w.shape[:2]
    columns = n // 2 if p.glu else n
    scales, more = (t.contiguous().view(torch.uint8) for t in (scales, more))
    head = (
        n, experts, pairs.n_pairs, grid, a.numel() // 8, w.numel() // 16, scales.numel(), pairs.pairs.numel(),
        pairs.experts.numel(), pairs.n_pairs * columns, more.numel(),
    )  # fmt: skip
    tensors = (a.view(torch.int16), w, scales, more, weights, pairs.pairs, pairs.experts, pairs.total)
    given = struct.pack("11i2f", *head, alpha, limit)
    found = run(program(p), given + b"".join(t.contiguous().numpy().tobytes() for t in tensors), folder)
    return torch.frombuffer(bytearray(found), dtype=torch.bfloat16).view(pairs.n_pairs, columns)
