"""linear_ternary in CUDA C++: the emulated kernel against the reference, its machine code, unsupported calls."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest
import torch
from support.kernels import emulated_mxfp4
from support.kernels.emulated import ported, run

from fastkernels.core import cuda_rtc
from fastkernels.overrides.kit.hopper import text
from fastkernels.overrides.linear import linear_ternary as op

BODIES = {
    **{
        name: emulated_mxfp4.BODIES[name]
        for name in ("shared_address", "meet", "widen", "kernels_before_end", "load_16", "narrow")
    },
    "load_once": "return *at;",
    "quotient": "return a / b;",
    "nearest": "return (u32)(int)nearbyintf(x);",
    "multiply_8": "multiply_bytes(c, {{a0, a1, a2, a3}, {b0, b1}});",
}
BEFORE = """#define CLUSTER 1
#include "on_cpu.hpp"
#include "lanes_on_cpu.hpp"
inline void multiply_bytes(int (&c)[4], const Operands& mine) {  // m16n8k32
    const int group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
    struct Sums { int of[4]; };
    const Sums found = among(mine, [&](auto of) {
        Sums s;
        for (int i = 0; i < 4; i++) {
            s.of[i] = c[i];
            for (int k = 0; k < 32; k++) {
                const Operands row = of(group * 4 + k % 16 / 4), column = of((2 * quad + i % 2) * 4 + k % 16 / 4);
                const unsigned a = row.a[i / 2 + k / 16 * 2], b = column.b[k / 16];
                s.of[i] += (int8_t)(a >> 8 * (k % 4)) * (int8_t)(b >> 8 * (k % 4));
            }
        }
        return s;
    });
    for (int i = 0; i < 4; i++) c[i] = found.of[i];
}
"""
MAIN = """
static std::vector<u16> x, bias, out;
static std::vector<uint4> weight;
static std::vector<unsigned char> scales;
static std::vector<int> head;

void one() {
    ternary_linear(x.data(), weight.data(), scales.data(), bias.data(), out.data(), head[0], head[1], head[2]);
}

int main(int, char** names) {
    FILE* file = fopen(names[1], "rb");
    head = numbers<int>(file, 4);
    const int M = head[0], N = head[1];
    x = numbers<u16>(file, M * head[2]), weight = numbers<uint4>(file, N * UNITS);
    scales = numbers<unsigned char>(file, head[3]), bias = numbers<u16>(file, N);
    out.assign(M * N, 0x7fff);
    gridDim.x = (N + 15) / 16;
    for (int block = 0; block < gridDim.x; block++) {
        memset(shared_memory, 0xff, sizeof shared_memory);
        run_cluster(1, block, THREADS, one);
    }
    fwrite(out.data(), 2, out.size(), fopen(names[2], "wb"));
    fflush(nullptr);
}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "wide"),
    [
        (1, 48, 320, torch.bfloat16, True),
        (3, 33, 2112, torch.float16, False),  # a last tile of one row, a step of one unit
        (8, 16, 4352, torch.bfloat16, False),  # two turns of a warp
    ],
)
def test_emulated_product_matches_reference(
    m: int, n: int, k: int, dtype: torch.dtype, wide: bool, tmp_path: Path
) -> None:
    g = torch.Generator().manual_seed(m)
    x, bias = torch.randn(m, k, generator=g).to(dtype), torch.randn(n, generator=g).to(dtype)
    x[0, :8] = 0 if m > 1 else x[0, :8]
    weight = op.pack_ternary(torch.randint(0, 3, (n, k), dtype=torch.uint8, generator=g))
    scale = ((torch.rand(n, generator=g) + 0.5) * k**-0.5).to(torch.float32 if wide else dtype)
    warps, shared, options = op.plan(m, k, dtype == torch.bfloat16, True, wide)
    written = {
        "extern static __align__(128) unsigned char memory[];": "unsigned char* memory = block_memory();",
        'extern "C" __global__ void __launch_bounds__(THREADS, 1)': "void",
    }
    source = ported(text(op.SOURCE), BODIES, written, options)
    end = source.index("typedef unsigned int u32;")
    given = struct.pack("4i", m, n, k, scale.numel() * scale.itemsize) + b"".join(
        t.view(torch.uint8).numpy().tobytes() for t in (x, weight, scale, bias)
    )
    found = run(source[:end] + BEFORE + source[end:] + MAIN, given, tmp_path)
    got = torch.frombuffer(bytearray(found), dtype=dtype).view(m, n)
    # Quantized values are the same, and sums of integers exact: only the result is rounded.
    torch.testing.assert_close(got, op.reference(x, weight, scale, bias), rtol=8e-3, atol=1e-5)
    assert shared <= op.SHARED and warps <= op.MOST_WARPS


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("m", [1, 8])
def test_kernels_compile_for_hopper(m: int) -> None:
    _, _, options = op.plan(m, 6912, True, False, True)
    found = cuda_rtc.nvrtc_compile(text(op.SOURCE), (*options, "--gpu-architecture=sm_90a"))
    assert found[:4] == b"\x7fELF"


def test_unsupported_calls_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "no_hopper", lambda source, device: None)
    x, weight, scale = torch.ones(8, 256).bfloat16(), torch.zeros(16, 64).byte(), torch.ones(16)
    assert op.supports_cuda(x, weight, scale, torch.ones(16).bfloat16()) is None
    wide = torch.ones(1, 32768).bfloat16(), torch.zeros(16, 8192).byte()
    refused = {
        "more than 8 tokens": (torch.ones(9, 256).bfloat16(), weight, scale),
        "x is torch.float32": (x.float(), weight, scale),
        "bias torch.float32": (x, weight, scale, torch.ones(16)),
        "weight_scale is torch.float16": (x, weight, scale.half()),
        "does not fit shared memory": (*wide, scale),
        "a multiple of 16 bytes": (
            torch.ones(8, 257).bfloat16().flatten()[1:2049].view(8, 256),
            weight,
            scale,
        ),
    }
    for reason, call in refused.items():
        assert reason in str(op.supports_cuda(*call))
