"""Emulate the FP8 kernel of csrc/wgmma_linear.cu on a CPU: its own text, with on_cpu.hpp instead of PTX. Needs g++.

`ported` and `run` also serve emulated_decode.py.
"""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

import torch

from fastkernels.overrides.kit.hopper import text
from fastkernels.overrides.linear.kernels import wgmma_linear_fp8_cuda as wgmma
from fastkernels.overrides.linear.kernels.linear_fp8_scales import BLOCK, strides
from fastkernels.overrides.linear.kernels.wgmma_linear_cuda import Plan

BODIES = {
    "shared_address": "return (u32)((uintptr_t)p - (uintptr_t)shared_memory);",
    "make_barrier": "barriers[barrier] = {arrivals, arrivals};",
    "arrive": "count(barrier, 1, 0);",
    "arrive_when_copied": "count(barrier, 1, 0);",
    "expect": "count(barrier, 1, bytes);",
    "wait": "wait_for(barrier, parity);",
    "load": "load_box(to, map.opaque, column, row, barrier);",
    "consumers_meet": "pthread_barrier_wait(&consumers_barrier);",
    "begin_multiply": "warp_meets();",
    "commit_multiply": "",
    "finish_multiply": "warp_meets();",
    "add_to": "return __atomic_fetch_add(ticket, value, __ATOMIC_ACQ_REL);",
    "or_to": "return __atomic_fetch_or(ticket, value, __ATOMIC_ACQ_REL);",
    "look_at": "return __atomic_load_n(ticket, __ATOMIC_ACQUIRE);",
    "load_part": "return *at;",
    "copy_number": "*to = *from;",
    "widen": "const u32 wide = (u32)bits << 16; float f; memcpy(&f, &wide, 4); return f;",
    "narrow": "auto half = [](float f) { u32 b; memcpy(&b, &f, 4); return (b + 0x7fff + (b >> 16 & 1)) >> 16; };"
    " return half(low) | half(high) << 16;",
}
BEFORE = """#include "on_cpu.hpp"
template <int COUNT>
void multiply(float (&c)[COUNT], unsigned long long a, unsigned long long b, int add) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = 0; i < COUNT; i++) {
        float sum = add ? c[i] : 0;
        for (int k = 0; k < 32; k++)
            sum += operand(a, 16 * warp + lane / 4 + i % 4 / 2 * 8, k)
                * operand(b, i / 4 * 8 + lane % 4 * 2 + i % 2, k);
        c[i] = sum;
    }
}
"""
MAIN = """
int main(int, char** names) {
    FILE* file = fopen(names[1], "rb");
    const auto head = numbers<int>(file, 11);
    const int M = head[0], N = head[1], K = head[2], items = head[4];
    auto x = numbers<u16>(file, (size_t)M * K), w = numbers<u16>(file, (size_t)N * K);
    auto x_scales = numbers<float>(file, head[9]), w_scales = numbers<float>(file, head[10]);
    auto bias = numbers<u16>(file, N);
    std::vector<u16> out((size_t)M * N, 0x7fff);
    std::vector<float4> parts((size_t)items * COLUMNS * SLOTS);
    std::vector<u32> tickets(items);
    const TensorMap x_map = {{(u64)x.data(), (u64)M, (u64)K, (u64)K, TOKENS}};
    const TensorMap w_map = {{(u64)w.data(), (u64)N, (u64)K, (u64)K, ROWS}};
    const Scales scales = {x_scales.data(), w_scales.data(), head[5], head[6], head[7], head[8]};
    gridDim.x = head[3];
    pthread_barrier_init(&block_meets, 0, THREADS), pthread_barrier_init(&consumers_barrier, 0, CONSUMERS);
    for (auto& warp : warps_meet) pthread_barrier_init(&warp, 0, 32);
    memset(shared_memory, 0x7f, sizeof shared_memory);  // NaN
    for (int block = 0; block < gridDim.x; block++) {
        std::vector<std::thread> threads;
        for (int i = 0; i < THREADS; i++)
            threads.emplace_back([&, i] {
                threadIdx.x = i, blockIdx.x = block;
                wgmma_linear(x_map, w_map, bias.data(), out.data(), parts.data(), tickets.data(), M, N, K, scales);
            });
        for (auto& thread : threads) thread.join();
    }
    for (u32 ticket : tickets) if (ticket) fail("a ticket is not as it was");
    fwrite(out.data(), 2, out.size(), fopen(names[2], "wb"));
    fflush(nullptr);
}
"""


def ported(source: str, bodies: dict[str, str], told: Iterable[str]) -> str:
    """Return C++ for a CUDA source. on_cpu.hpp, included first, defines CUDA's keywords and the hooks of the sources.

    bodies  {function: its body}, for functions that contain PTX
    told    the compiler's options
    """
    for name, body in bodies.items():
        found = re.search(rf"__device__ __forceinline__ [\w *]*\b{name}\([^{{]*\) {{", source)
        assert found is not None, name
        end, depth = found.end(), 1
        while depth:
            depth += {"{": 1, "}": -1}.get(source[end], 0)
            end += 1
        source = f"{source[: found.end()]} {body} {source[end - 1 :]}"
    # The rest: hints, waits for the grid, unused functions
    source = re.sub(r'asm(?: volatile)?\((?:[^;"]|"[^"]*")*\);', ";", source)
    return "".join(f"#define {o[2:].replace('=', ' ')}\n" for o in told if o.startswith("-D")) + source


def program(p: Plan, blocks: bool) -> str:
    """Return C++ of the kernel and its launcher."""
    source = ported(text(wgmma.wgmma.SOURCE), BODIES, wgmma.options(p, True, blocks))
    return BEFORE + source + MAIN


GXX = ("g++", "-Og", "-std=c++17", "-w", "-pthread")  # compilation takes longer than the program


@cache
def standard_headers() -> TemporaryDirectory[str]:
    """Return a folder with standard.hpp, the precompiled headers of C++ itself."""
    folder = TemporaryDirectory()
    included = re.findall("#include <.*>", (Path(__file__).parent / "on_cpu.hpp").read_text())
    Path(folder.name, "standard.hpp").write_text("\n".join(included))
    subprocess.run([*GXX, "-x", "c++-header", "standard.hpp"], cwd=folder.name, check=True, timeout=120)
    return folder


@cache
def compiled(source: str) -> Path:
    """Compile a program once; return its path."""
    folder = Path(mkdtemp(dir=standard_headers().name))
    (folder / "kernel.cpp").write_text(source)
    include = f"-I{Path(__file__).parent}"
    command = [*GXX, "-include", "../standard.hpp", include, "kernel.cpp", "-o", "kernel"]
    subprocess.run(command, cwd=folder, check=True, timeout=120)
    return folder / "kernel"


def run(source: str, given: bytes, folder: Path) -> bytes:
    """Compile and run a program on input bytes; return its output. Raises RuntimeError with its error message."""
    (folder / "in").write_bytes(given)
    done = subprocess.run(
        [compiled(source), "in", "out"], cwd=folder, capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        raise RuntimeError(done.stderr or f"the program ended with {done.returncode}")
    return (folder / "out").read_bytes()


def linear_fp8(
    args: list[torch.Tensor], kind: int, params: dict[str, int], sms: int, folder: Path
) -> torch.Tensor:
    """Return the kernel's result; all arguments but x_scale are contiguous, the bias is bf16. Raises RuntimeError."""
    x, weight, x_scale, weight_scale, bias = args
    (m, k), n, blocks = x.shape, weight.shape[0], kind == BLOCK
    p = wgmma.plan(m, n, k, **params, blocks=blocks, sms=sms)
    memory = x_scale if x_scale._base is None else x_scale._base
    head = (
        m,
        n,
        k // 2,
        p.grid,
        p.items,
        *strides(kind, x_scale, weight_scale)[1],
        memory.numel(),
        weight_scale.numel(),
    )
    tensors = (x.view(torch.uint8), weight.view(torch.uint8), memory, weight_scale, bias.view(torch.int16))
    given = struct.pack("11i", *head) + b"".join(t.numpy().tobytes() for t in tensors)
    found = run(program(p, blocks), given, folder)
    return torch.frombuffer(bytearray(found), dtype=torch.bfloat16).view(m, n)
