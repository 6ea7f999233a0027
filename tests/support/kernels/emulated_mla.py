"""Emulate csrc/mla_decode.cu on a CPU: its own text, with lanes_on_cpu.hpp instead of PTX. Needs g++."""

from __future__ import annotations

import struct
from pathlib import Path

import torch
from support.kernels import emulated_tiled
from support.kernels.emulated import ported, run

from fastkernels.overrides.kit.hopper import text
from fastkernels.overrides.latent_attention import mla_decode_cuda as cuda

SHARED = (
    "shared_address", "make_barrier", "arrive", "expect", "wait", "begin_multiply", "commit_multiply",
    "finish_multiply", "power_of_2", "widen", "narrow",
)  # fmt: skip
BODIES = {
    **{name: emulated_tiled.BODIES[name] for name in SHARED},
    "copy_or_zero": "there ? memcpy(at_of(to), from, 16) : memset(at_of(to), 0, 16);",
    "arrive_when_copied": "count(barrier, 1, 0), changes.held++;",
    "copies_end": "",
    "load_box": "copy(to, map.opaque, channel, row, block, barrier);",
    "load_now": "return *at;",
    "load_part": "return *at;",
    "store_pair": "memcpy(at_of(at), &v, 4);",
    "halves_meet": "meets(own().halves);",
    "add_to": "const u32 old = *ticket; *ticket += value; if (value == 1) arrived[ticket]++; return old;",
    "look_at": "run_another(); return *ticket;",
    "store_zeros": "memset(at_of(at), 0, 16);",
    "plan_is_ready": "arrive_at(own().plan);",
    "wait_for_plan": "meets(own().plan);",
    "narrow_half": "const _Float16 v[2] = {(_Float16)low, (_Float16)high}; u32 bits; memcpy(&bits, v, 4); return bits;",
    "widen_half": "_Float16 f; memcpy(&f, &bits, 2); return f;",
    "group_meets": "meets(own().groups[group]);",
}
BEFORE = """#define EMULATED_BYTES (CLUSTER << 18)
#include "on_cpu.hpp"
#include "lanes_on_cpu.hpp"
static Meeting changes;  // of barriers
struct Meetings { Meeting plan = {SPARSE ? 512 : 416}, groups[3] = {{128}, {128}, {128}}, halves = {256}; };
static Meetings meetings[CLUSTER];  // of blocks
static std::unordered_map<const uint32_t*, int> arrived;  // at a ticket
inline Meetings& own() { return meetings[rank_of_block()]; }
inline int __reduce_add_sync(unsigned, int v) {
    return among(v, [](auto of) { int all = 0; for (int lane = 0; lane < 32; lane++) all += of(lane); return all; });
}
inline unsigned char* at_of(uint32_t address) { return at(address); }
inline int __float_as_int(float f) { int bits; memcpy(&bits, &f, 4); return bits; }
inline float __int_as_float(int bits) { float f; memcpy(&f, &bits, 4); return f; }

// Of a tensor map: its address, channels, rows, blocks, strides of the last two, and rows of a box.
static void copy(uint32_t to, const unsigned long long* map, int channel, int row, int block, uint32_t barrier) {
    if (block < 0 || block >= (int)map[3] || row >= (int)map[2]) fail("a copy outside of the tensor");
    for (int i = 0; i < 64 * (int)map[6]; i++) {
        const int r = row + i / 64, c = channel + i % 64;
        uint16_t v = 0;
        if (r < (int)map[2] && c < (int)map[1]) v = ((const uint16_t*)map[0])[block * map[5] + r * map[4] + c];
        memcpy(at(swizzled(to + 2 * i)), &v, 2);
    }
    count(barrier, 0, -128 * (long)map[6]), changes.held++;
}
"""
PRODUCTS = """
inline uint32_t field(unsigned long long descriptor, int from) { return (descriptor >> from & 0x3fff) << 4; }

inline float stored(uint32_t address) {
    uint16_t bits;
    memcpy(&bits, block_memory() + swizzled(address), 2);
    return number(bits);
}

template <int COUNT> void multiply(float (&c)[COUNT], unsigned long long a, unsigned long long b, int add) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    auto value = [](unsigned long long of, int row, int k) {
        return stored(field(of, 0) + row / 8 * field(of, 32) + row % 8 * 128 + 2 * k);
    };
    float rows[2][16];
    for (int i = 0; i < 32; i++) rows[i / 16][i % 16] = value(a, 16 * warp + lane / 4 + i / 16 * 8, i % 16);
    for (int i = 0; i < COUNT; i += i % 4 == 1 ? 3 : 1) {
        float sums[2] = {};
        for (int k = 0; k < 16; k++) {
            const float v = value(b, i / 4 * 8 + lane % 4 * 2 + i % 2, k);
            sums[0] += rows[0][k] * v, sums[1] += rows[1][k] * v;
        }
        for (int j = 0; j < 2; j++) c[i + 2 * j] = (add ? c[i + 2 * j] : 0) + sums[j];
    }
}

template <int COUNT> void add_weighted(float* c, const float (&rows)[2][16], unsigned long long b) {  // b: rows are k
    for (int i = 0; i < COUNT; i += i % 4 == 1 ? 3 : 1) {
        const int column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        for (int k = 0; k < 16; k++) {
            const uint32_t row = field(b, 0) + k / 8 * field(b, 32) + k % 8 * 128;
            const float v = stored(row + column / 64 * field(b, 16) + column % 64 * 2);
            c[i] += rows[0][k] * v, c[i + 2] += rows[1][k] * v;
        }
    }
}

template <int FIRST> void weigh(float (&c)[128], unsigned long long a, unsigned long long b) {
    const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
    float rows[2][16];
    for (int i = 0; i < 32; i++)
        rows[i / 16][i % 16] = stored(field(a, 0) + (row / 8 + i / 16) * field(a, 32) + row % 8 * 128 + i % 16 * 2);
    add_weighted<64>(c + FIRST, rows, b);
}
"""
MAIN = """
static std::vector<u16> q, cache, out;
static std::vector<int> head, lens, table, indices;
static std::vector<float> sums, scales;
static std::vector<uint4> parts;
static std::vector<u32> tickets;

void one() {
    const u64 batch = head[0], heads = head[1], size = head[3], blocks = head[5], topk = head[7];
    const TensorMap q_map = {{(u64)q.data(), 576, heads, batch, 576, heads * 576, 64}};
    const TensorMap kv_map = {{(u64)cache.data(), 576, size, blocks, 576, size * 576, BOX}};
    mla_decode(q_map, kv_map, lens.data(), table.data(), out.data(), parts.data(), sums.data(), tickets.data(),
               indices.data(), cache.data(), size * 576, 576, SPARSE ? topk : 1 << 30, batch, heads,
               head[2], size, head[4], head[4], scales[0], scales[1]);
}

int main(int, char** names) {
    FILE* file = fopen(names[1], "rb");
    head = numbers<int>(file, 8), scales = numbers<float>(file, 2);
    const int batch = head[0], heads = head[1], workers = head[6];
    q = numbers<u16>(file, batch * heads * 576), cache = numbers<u16>(file, (size_t)head[5] * head[3] * 576);
    lens = numbers<int>(file, batch), table = numbers<int>(file, batch * head[4]);
    indices = numbers<int>(file, batch * head[7]);
    out.assign(batch * heads * 512, 0xffff), tickets.assign(batch * head[2], 0);
    parts.assign((size_t)2 * workers * heads * 64, {~0u, ~0u, ~0u, ~0u}), sums.assign(8 * workers * heads, NAN);
    gridDim.x = workers * head[2];
    for (int block = 0; block < gridDim.x; block += CLUSTER) {
        memset(shared_memory, 0xff, sizeof shared_memory);
        barriers.clear();
        run_cluster(CLUSTER, block, THREADS, one);
    }
    for (u32 ticket : tickets) if (ticket) fail("a ticket is not as it was");
    fwrite(out.data(), 2, out.size(), fopen(names[2], "wb"));
    std::vector<int> counts;
    for (int i = 0; i < batch; i++) counts.push_back(std::max(arrived[&tickets[i * head[2]]], 1));
    fwrite(counts.data(), 4, counts.size(), fopen("counts", "wb"));
    fflush(nullptr);
}
"""


def decode(
    q: torch.Tensor, kv_cache: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, scale: float,
    workers: int, folder: Path, k_scale: float = 1.0, indices: torch.Tensor | None = None, at_once: int = 1,
    **params: int,
) -> tuple[torch.Tensor, list[int]]:  # fmt: skip
    """Return the kernel's result, and how many parts each sequence had. Raises RuntimeError with its error.

    at_once  blocks that run at the same time
    """
    p = cuda.plan(q, kv_cache, indices is not None, **params)
    told = (*p.options, f"-DCLUSTER={at_once}", f"-DTRIES={1 << 20 if at_once > 1 else 2}")
    source = ported(text(cuda.SOURCE), BODIES, told)
    end = source.index("typedef unsigned int u32;")
    source = source[:end] + BEFORE + PRODUCTS + source[end:] + MAIN
    (batch, heads), rows = q.shape[:2], -(-q.shape[1] // cuda.HEADS)
    sizes = (batch, heads, rows, kv_cache.shape[1], block_table.shape[1], len(kv_cache), workers)
    chosen = torch.empty(batch, 0, dtype=torch.int32) if indices is None else indices
    given = struct.pack("8i2f", *sizes, chosen.shape[1], scale * k_scale * cuda.LOG2E, k_scale)
    tensors = (q.view(torch.int16), kv_cache.view(torch.int16), seq_lens, block_table, chosen)
    given += b"".join(t.contiguous().numpy().tobytes() for t in tensors)
    found = run(source, given, folder)
    counts = struct.unpack(f"{batch}i", (folder / "counts").read_bytes())
    return torch.frombuffer(bytearray(found), dtype=q.dtype).view(batch, heads, cuda.RANK), list(counts)
