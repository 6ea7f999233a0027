"""Emulate csrc/attention_dense.cu on a CPU: its own text, with lanes_on_cpu.hpp instead of PTX. Needs g++."""

from __future__ import annotations

import struct
from pathlib import Path

import torch
from support.kernels import emulated_mla
from support.kernels.emulated import ported, run

from fastkernels.overrides.dense_attention import attention_dense_cuda as cuda
from fastkernels.overrides.kit.hopper import text

BODIES = {
    **{name: emulated_mla.BODIES[name] for name in emulated_mla.SHARED},
    "never": 'fail("a sum of exponentials under zero");',
    "clear_16": "memset(at(to), 0, 16);",
    "cleared": "__syncwarp();",
    "load_rows": "copy(to, map.opaque, channel, row, head, image, barrier);",
}
BEFORE = """#define CLUSTER 1
#include "on_cpu.hpp"
#include "lanes_on_cpu.hpp"
static Meeting changes;  // of barriers
inline float __int_as_float(int bits) { float f; memcpy(&f, &bits, 4); return f; }

// Of a tensor map: its address, tokens, heads, images, strides of these, rows of a box, and channels.
static void copy(
    uint32_t to, const unsigned long long* map, int channel, int row, int head, int image, uint32_t barrier) {
    if (head >= (int)map[2] || image >= (int)map[3] || row >= (int)map[1]) fail("a copy outside of the tensor");
    for (int i = 0; i < 64 * (int)map[7]; i++) {
        const int r = row + i / 64;
        const size_t from = r * map[4] + head * map[5] + image * map[6] + channel + i % 64;
        const uint16_t v = r < (int)map[1] && channel + i % 64 < (int)map[8] ? ((const uint16_t*)map[0])[from] : 0;
        memcpy(at(swizzled(to + 2 * i)), &v, 2);
    }
    count(barrier, 0, -128 * (long)map[7]), changes.held++;
}
"""
WEIGH = """
struct Weights { uint32_t of[4]; };

template <int COUNT> void weigh(float (&c)[COUNT], const uint32_t (&a)[4], unsigned long long b) {
    const int group = threadIdx.x % 32 / 4;
    struct Row { float of[2][16]; };
    const Row row = among(Weights{{a[0], a[1], a[2], a[3]}}, [&](auto lane) {
        Row r;
        for (int i = 0; i < 32; i++) {
            const int k = i % 16;
            r.of[i / 16][k] = number(half_of(lane(group * 4 + k % 8 / 2).of[k / 8 * 2 + i / 16], k % 2));
        }
        return r;
    });
    add_weighted<COUNT>(c, row.of, b);
}
"""
MAIN = """
static std::vector<u16> given[3], out;
// Images, heads, heads of keys, queries, keys, blocks of a head, whether heads are neighbors, blocks
static std::vector<int> head, integers;
static float scale;

void one() {
    auto map = [&](int i) -> TensorMap {
        const u64 heads = head[i ? 2 : 1], tokens = head[i ? 4 : 3];
        const u64 row = CHANNELS * heads, rows = i ? KEYS : QUERIES;
        return {{(u64)given[i].data(), tokens, heads, (u64)head[0], row, CHANNELS, row * tokens, rows, CHANNELS}};
    };
#if RAGGED  // kv and rotary keys instead of keys and values, cu_seqlens_q and other integers
    const u64 heads = head[1], tokens = head[4], both = CHANNELS + VALUE;
    auto of = [&](const u16* p, u64 rows, u64 heads, u64 size, u64 channels, u64 box) -> TensorMap {
        return {{(u64)p, rows, heads, 1, size * heads, size, 0, box, channels}};
    };
    const int *cu = integers.data(), *starts = cu + head[0] + 1;
    attention_dense(
        of(given[0].data(), head[3], heads, CHANNELS + ROPE, CHANNELS + ROPE, QUERIES),
        of(given[1].data(), tokens, heads, both, CHANNELS, KEYS),
        of(given[1].data() + CHANNELS, tokens, heads, both, VALUE, KEYS),
        out.data(), 0, 0, heads, 1, head[5], 0, scale, of(given[2].data(), tokens, 1, ROPE, ROPE, KEYS), cu, starts,
        starts + head[0], head[0]);
#else
    const int shared_by = head[1] / head[2];
    attention_dense(
        map(0), map(1), map(2), out.data(), head[3], head[4], head[1], shared_by, head[5], head[6], scale);
#endif
}

int main(int, char** names) {
    FILE* file = fopen(names[1], "rb");
    head = numbers<int>(file, 8), scale = numbers<float>(file, 1)[0];
#if RAGGED
    integers = numbers<int>(file, 3 * head[0] + 1);
    const int sizes[] = {(CHANNELS + ROPE) * head[1] * head[3], (CHANNELS + VALUE) * head[1] * head[4], ROPE * head[4]};
    for (int i = 0; i < 3; i++) given[i] = numbers<u16>(file, sizes[i]);
#else
    for (int i = 0; i < 3; i++) given[i] = numbers<u16>(file, CHANNELS * head[0] * head[i ? 2 : 1] * head[i ? 4 : 3]);
#endif
    out.assign(head[3] * VALUE * (RAGGED ? head[1] : head[0] * head[1]), 0xffff), gridDim.x = head[7];
    for (int block = 0; block < head[7]; block++) {
        memset(shared_memory, 0xff, sizeof shared_memory);
        barriers.clear();
        run_cluster(1, block, THREADS, one);
    }
    fwrite(out.data(), 2, out.size(), fopen(names[2], "wb"));
    fflush(nullptr);
}
"""


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, across: bool, folder: Path, **params: int
) -> torch.Tensor:  # fmt: skip
    """Return the kernel's result. Raises RuntimeError with its error."""
    p = cuda.Plan(**params, bf16=q.dtype == torch.bfloat16, channels=q.shape[3])
    (batch, n_q, heads, _), n_k, kv_heads = q.shape, *k.shape[1:3]
    tiles = -(-n_q // (64 * p.groups))
    sizes = (batch, heads, kv_heads, n_q, n_k, tiles, across, tiles * batch * heads)
    return _run(p, struct.pack("8if", *sizes, scale * cuda.LOG2E), (q, k, v), folder).view(q.shape)


def attend_ragged(
    p: cuda.Plan, q: torch.Tensor, kv: torch.Tensor, k_rope: torch.Tensor, cu_seqlens_q: torch.Tensor,
    starts: torch.Tensor, seq_lens: torch.Tensor, scale: float, folder: Path,
) -> torch.Tensor:  # fmt: skip
    """Return mla_expanded's result. Raises RuntimeError with its error."""
    (tokens, heads, _), batch = q.shape, len(seq_lens)
    blocks = tokens // (64 * p.groups) + batch
    given = struct.pack(
        "8if", batch, heads, heads, tokens, len(kv), blocks, 0, blocks * heads, scale * cuda.LOG2E
    )
    given += b"".join(t.int().numpy().tobytes() for t in (cu_seqlens_q, starts, seq_lens))
    return _run(p, given, (q, kv, k_rope), folder).view(tokens, heads, p.value)


def _run(p: cuda.Plan, given: bytes, tensors: tuple[torch.Tensor, ...], folder: Path) -> torch.Tensor:
    source = ported(text(cuda.SOURCE), BODIES, p.options)
    end = source.index("typedef unsigned int u32;")
    source = source[:end] + BEFORE + emulated_mla.PRODUCTS + WEIGH + source[end:] + MAIN
    given += b"".join(t.contiguous().view(torch.int16).numpy().tobytes() for t in tensors)
    return torch.frombuffer(bytearray(run(source, given, folder)), dtype=tensors[0].dtype)
