// y = x W^T + b for M <= 16 tokens on Hopper: x [M, K], W [N, K], 16-bit, float32 accumulators, one rounding.
//
// The weight's rows are the tensor cores' m16 and the tokens its n8, so 8 tokens waste nothing. W comes through a ring
// of bulk copies into shared memory, one ring a warp, so that a warp waits for nobody; x is small and comes from L1 / L2.
// A block reads a part of the list of units (tile of ROWS rows, KW of K), tile by tile; its warps take every WARPS-th
// unit and add up at the end of a tile. A tile that two blocks share is added up by the one that arrives last, in the
// blocks' order. Everything of W may be read before griddepcontrol.wait; x, and all that is written, only after it.
//
// Compiled for one set of: ROW_TILES (16 rows each), TOKEN_TILES (8 tokens each), KW, STAGES, BF16, HAS_BIAS.
// Needs K % 32 == 0 and rows of x and W that start at multiples of 16 bytes. No header is needed.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

constexpr int WARPS = 4, THREADS = 32 * WARPS;
constexpr int ROWS = 16 * ROW_TILES, TOKENS = 8 * TOKEN_TILES, OUTPUTS = ROWS * TOKENS;
// 64 bytes more than a multiple of 128: two rows' 64 bytes, which 8 lanes read at once, are in different banks.
constexpr int PITCH = 2 * KW + 64, STAGE = ROWS * PITCH;
static_assert(KW % 64 == 0, "rows of the ring must be multiples of 128 bytes before the padding");

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    u32 done = 0;
    while (!done) {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    }
}

__device__ __forceinline__ uint4 load_x(const u16* at) {
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}

__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
#if BF16
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float widen(u16 bits) {
#if BF16
    return __uint_as_float((u32)bits << 16);
#else
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
    return f;
#endif
}

__device__ __forceinline__ u16 narrow(float f) {
    u16 bits;
#if BF16
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(f));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(f));
#endif
    return bits;
}

// The part of W that block `block` reads: units from here to here(block + 1). granule: the units are dealt in such lots.
__device__ __forceinline__ int first_unit(int block, int units, int granule) {
    return (int)((u64)block * (u64)(units / granule) / gridDim.x) * granule;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) skinny_linear(
    const u16* __restrict__ x, const u16* __restrict__ w, const u16* __restrict__ bias, u16* __restrict__ out,
    float* partial, u32* tickets, int M, int N, int K, long long x_stride, long long w_stride, int granule) {
    extern __shared__ __align__(128) unsigned char ring[];
    __shared__ float sums[WARPS * OUTPUTS];
    __shared__ __align__(8) u64 barriers[WARPS * STAGES];
    __shared__ u32 arrived;

    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, group = lane / 4, quad = lane % 4;
    const int per_tile = (K + KW - 1) / KW, units = (N + ROWS - 1) / ROWS * per_tile;
    const int begin = first_unit(blockIdx.x, units, granule), end = first_unit(blockIdx.x + 1, units, granule);
    const u32 mine = shared_address(ring) + warp * STAGES * STAGE;
    const u32 full = shared_address(barriers + warp * STAGES);

    if (lane == 0) {
        for (int s = 0; s < STAGES; s++)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full + 8 * s) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
    u64 once;  // what is read once is the first to leave L2
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));

    auto read_ahead = [&](int unit, int stage) {
        if (unit >= end) return;
        const int tile = unit / per_tile, k = (unit - tile * per_tile) * KW, bytes = 2 * min(KW, K - k);
        const u32 barrier = full + 8 * stage;
        if (lane == 0)
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(ROWS * bytes)
                         : "memory");
        __syncwarp();
        for (int row = lane; row < ROWS; row += 32) {
            // A row past the end is the last row once more; it is not stored.
            const u16* from = w + (long long)min(tile * ROWS + row, N - 1) * w_stride + k;
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                " [%0], [%1], %2, [%3], %4;" ::"r"(mine + stage * STAGE + row * PITCH), "l"(from), "r"(bytes),
                "r"(barrier), "l"(once) : "memory");
        }
    };

    int unit = begin + warp, stage = 0;
    u32 parity = 0;
    for (int s = 0; s < STAGES; s++) read_ahead(unit + s * WARPS, s);
    asm volatile("griddepcontrol.wait;" ::: "memory");

    // Lane (group, quad) has 8 neighbours of K of token `group` and, below, of rows `group` and `group + 8`. The tensor
    // cores believe that they are at other places of K: the same ones in both matrices.
    auto load_tokens = [&](int unit, uint4 (&to)[KW / 32][TOKEN_TILES]) {
        const int k = unit % per_tile * KW, length = unit < end ? min(KW, K - k) : 0;
#pragma unroll
        for (int i = 0; i < KW / 32; i++)
#pragma unroll
            for (int t = 0; t < TOKEN_TILES; t++) {
                const int token = 8 * t + group;
                to[i][t] = make_uint4(0, 0, 0, 0);
                if (token < M && 32 * i < length) to[i][t] = load_x(x + token * x_stride + k + 32 * i + 8 * quad);
            }
    };
    uint4 tokens[KW / 32][TOKEN_TILES];
    load_tokens(unit, tokens);

    auto store = [&](int tile, int i, float sum) {  // output i of a tile: token i / ROWS, row i % ROWS
        const int token = i / ROWS, n = tile * ROWS + i % ROWS;
        if (token >= M || n >= N) return;
#if HAS_BIAS
        sum += widen(bias[n]);
#endif
        out[(long long)token * N + n] = narrow(sum);
    };

    for (int from = begin; from < end;) {
        const int tile = from / per_tile, first = tile * per_tile, to = min(end, first + per_tile);
        float acc[ROW_TILES][TOKEN_TILES][4] = {};
        for (; unit < to; unit += WARPS) {
            const int length = min(KW, K - (unit - first) * KW);
            uint4 later[KW / 32][TOKEN_TILES];  // x comes from L2: it is asked for one unit ahead
            load_tokens(unit + WARPS, later);
            wait(full + 8 * stage, parity);
            const unsigned char* rows = ring + (warp * STAGES + stage) * STAGE + group * PITCH + 16 * quad;
            auto step = [&](int i) {
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++) {
                    const uint4 low = *(const uint4*)(rows + 16 * r * PITCH + 64 * i);
                    const uint4 high = *(const uint4*)(rows + (16 * r + 8) * PITCH + 64 * i);
#pragma unroll
                    for (int t = 0; t < TOKEN_TILES; t++) {
                        multiply(acc[r][t], low.x, high.x, low.y, high.y, tokens[i][t].x, tokens[i][t].y);
                        multiply(acc[r][t], low.z, high.z, low.w, high.w, tokens[i][t].z, tokens[i][t].w);
                    }
                }
            };
            if (length == KW) {  // no branch between the steps: shared memory is read ahead of the tensor cores
#pragma unroll
                for (int i = 0; i < KW / 32; i++) step(i);
            } else {
#pragma unroll
                for (int i = 0; i < KW / 32; i++)
                    if (32 * i < length) step(i);
            }
#pragma unroll
            for (int i = 0; i < KW / 32; i++)
#pragma unroll
                for (int t = 0; t < TOKEN_TILES; t++) tokens[i][t] = later[i][t];
            __syncwarp();  // all lanes have read the stage before it is written again
            read_ahead(unit + STAGES * WARPS, stage);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }

#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
            for (int t = 0; t < TOKEN_TILES; t++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int token = 8 * t + 2 * quad + i % 2, row = 16 * r + group + i / 2 * 8;
                    sums[warp * OUTPUTS + token * ROWS + row] = acc[r][t][i];
                }
        __syncthreads();
        const bool whole = from == first && to == first + per_tile;
        // A block has at most two tiles that are not whole: the one that it begins in and the one that it ends in.
        float* place = partial + (2 * blockIdx.x + (from != begin)) * OUTPUTS;
        for (int i = thread; i < OUTPUTS; i += THREADS) {
            float sum = sums[i];
            for (int v = 1; v < WARPS; v++) sum += sums[v * OUTPUTS + i];
            if (whole) store(tile, i, sum);
            else place[i] = sum;
        }
        if (!whole) {
            __threadfence();
            __syncthreads();
            // The blocks that have units of this tile; granule is 1 here, and no block is empty.
            const int low = (int)(((u64)(first + 1) * gridDim.x - 1) / units);
            const int high = (int)(((u64)(first + per_tile) * gridDim.x - 1) / units);
            if (thread == 0) arrived = atomicAdd(tickets + tile, 1);
            __syncthreads();
            if (arrived == high - low) {
                __threadfence();
                for (int i = thread; i < OUTPUTS; i += THREADS) {
                    float sum = 0;
                    for (int block = low; block <= high; block++) {
                        const int slot = first_unit(block, units, granule) / per_tile != tile;
                        sum += ((volatile float*)partial)[(2 * block + slot) * OUTPUTS + i];
                    }
                    store(tile, i, sum);
                }
                if (thread == 0) tickets[tile] = 0;  // as it was found, for the next launch
            }
        }
        __syncthreads();  // `sums` and `arrived` are read
        from = to;
    }
}
