// y = f(x W^T + b) for many tokens on Hopper: x [M, K], W [N, K], 16-bit, float32 accumulators, one rounding. f is the
// identity, GELU, or residual + scale * (...) with one scale a column (LayerScale), computed from the float32 sums.
//
// Blocks are persistent. One thread reads x and W into a ring of STAGES pieces of 64 columns (tensor maps, 128-byte
// swizzle). Two warpgroups take the block's tiles of BM x BN in turn: while one computes f and stores, the other multiplies.
// They pass the turn to each other with a tile's last piece: a barrier of the ring cannot be waited for a lap ahead.
//
// With CLUSTER blocks in a cluster, their tiles lie next to each other, and each block reads a slice of what they have in
// common and copies it to all: of W (SHARE_W: below each other) or of x.
//
// Sums are stored without shared memory: four threads hold eight columns each of a row once they have exchanged pairs.
//
// Compile-time constants: BM (64, 128), BN (multiple of 32), STAGES, CLUSTER, SHARE_W, GROUP (rows of tiles that share W in
// L2), BEHIND (0: nothing, 1: GELU with erf, 2: with tanh, 3: scale and residual), BF16. multiply() precedes this file
// (wgmma_linear_cuda.py). Requires N % 8 == 0 and K % 8 == 0.

struct __align__(128) TensorMap { u64 opaque[16]; };

constexpr int THREADS = 384, ATOMS = BM / 64, SUMS = BN / 2;  // of each thread, for 64 rows
constexpr int X_STAGE = 128 * BM, W_STAGE = 128 * BN;
constexpr int X_SLICE = SHARE_W ? BM : BM / CLUSTER, W_SLICE = SHARE_W ? BN / CLUSTER : BN;  // rows that a block reads
constexpr int BLOCKS_OF_COLUMNS = BN / 32;
static_assert(BM % 64 == 0 && BN % 32 == 0 && BN <= 256 && ATOMS * SUMS <= 192, "what registers hold");
static_assert(X_SLICE % 8 == 0 && W_SLICE % 8 == 0, "slices begin where the swizzle does");

__device__ __forceinline__ void load(u32 to, const TensorMap& map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier) : "memory");
}

// Into all blocks of the cluster, at the same addresses.
__device__ __forceinline__ void load_to_all(u32 to, const TensorMap& map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;"
        ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"((u16)((1 << CLUSTER) - 1)) : "memory");
}

__device__ __forceinline__ void arrive_at(u32 barrier, int rank) {
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
        " mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there]; }"
        ::"r"(barrier), "r"(rank) : "memory");
}

__device__ __forceinline__ void cluster_meets() {
    if (CLUSTER == 1) return __syncthreads();
    asm volatile("barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
}

__device__ __forceinline__ int rank_in_cluster() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return CLUSTER == 1 ? 0 : rank;
}

// Of a swizzled matrix with rows of 128 bytes: groups of 8 rows are 1024 bytes apart.
__device__ __forceinline__ u64 descriptor(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

__device__ __forceinline__ void begin_multiply() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void commit_multiply() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void finish_multiply() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float not_negative(float x) {  // NaN stays
    float y;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float activate(float x) {
#if BEHIND == 1
    // x Phi(x) is max(x, 0) - |x| Phi(-|x|). The logarithm of Phi(-a) is smooth: a polynomial of degree 7 is within
    // 5e-6 up to a = 6, and falls on beyond, where |x| Phi(-|x|) is under 6e-9. Bounded, as inf * 0 is NaN.
    const float a = fminf(fabsf(x), 16);
    float p = -1.83480961e-06f;
    p = fmaf(p, a, 6.15982572e-05f), p = fmaf(p, a, -0.000930524548f), p = fmaf(p, a, 0.0085078897f);
    p = fmaf(p, a, -0.0539600663f), p = fmaf(p, a, -0.458464384f), p = fmaf(p, a, -1.15125108f);
    return fmaf(-a, power_of_2(fmaf(p, a, -0.999995291f)), not_negative(x));
#elif BEHIND == 2
    // (1 + tanh(u)) / 2 is 1 / (1 + exp(-2u)), with u = sqrt(2 / pi) (x + 0.044715 x^3).
    const float u = x * fmaf(x * x, -2.302208198f * 0.044715f, -2.302208198f);
    return x * reciprocal(1 + power_of_2(u));
#else
    return x;
#endif
}

// Thread t of four has pairs 4j + t of columns in v[j]; afterwards it has pairs 4t to 4t + 3. It is its own inverse.
__device__ __forceinline__ void exchange(u32 (&v)[4], int lane) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        const bool upper = lane & step;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int low = step == 1 ? 2 * i : i, high = low + step;
            const u32 got = __shfl_xor_sync(~0u, upper ? v[low] : v[high], step);
            (upper ? v[low] : v[high]) = got;
        }
    }
}

extern "C" __global__ void TOGETHER __launch_bounds__(THREADS, 1) tiled_linear(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const u16* __restrict__ bias,
    const u16* __restrict__ scale, const u16* __restrict__ residual, u16* __restrict__ out, int M, int N, int K) {
    extern __shared__ __align__(1024) unsigned char memory[];

    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const int thread = threadIdx.x, lane = thread % 32, group = thread / 128, rank = rank_in_cluster();
    const int pieces = (K + 63) / 64, m_tiles = (M + BM - 1) / BM, n_tiles = (N + BN - 1) / BN;
    // The clusters' tiles: `below` by `beside` of them.
    const int below = SHARE_W ? (m_tiles + CLUSTER - 1) / CLUSTER : m_tiles;
    const int beside = SHARE_W ? n_tiles : (n_tiles + CLUSTER - 1) / CLUSTER;
    const int tiles = below * beside, first = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
    const u32 x_ring = (shared_address(memory) + 1023) & ~1023u, w_ring = x_ring + STAGES * X_STAGE;
    const u32 full = w_ring + STAGES * W_STAGE, empty = full + 8 * STAGES, turns = empty + 8 * STAGES;
    auto place = [&](int tile, int& row, int& column) {
        const int band = tile / (GROUP * beside), in_band = tile % (GROUP * beside), height = min(GROUP, below - band * GROUP);
        const int m = band * GROUP + in_band % height, n = in_band / height;
        row = (SHARE_W ? m * CLUSTER + rank : m) * BM, column = (SHARE_W ? n : n * CLUSTER + rank) * BN;
    };

    if (thread == 0) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(&x_map) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&w_map) : "memory");
        for (int s = 0; s < STAGES; s++) make_barrier(full + 8 * s, 1), make_barrier(empty + 8 * s, 4 * CLUSTER);
        make_barrier(turns, 4), make_barrier(turns + 8, 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    cluster_meets();

    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;" ::: "memory");
        if (thread == 0) {
            auto read_weights = [&](int stage, int piece, int column) {
                expect(full + 8 * stage, X_STAGE + W_STAGE);
                const u32 to = w_ring + stage * W_STAGE;
                if (SHARE_W && CLUSTER > 1)
                    load_to_all(to + 128 * W_SLICE * rank, w_map, 64 * piece, column + W_SLICE * rank, full + 8 * stage);
                else
                    load(to, w_map, 64 * piece, column, full + 8 * stage);
            };
            int row, column, stage = 0, ahead = 0;
            u32 parity = 1;
            if (first < tiles) {  // the weight is there before the previous kernel ends
                place(first, row, column);
                for (; ahead < min(STAGES, pieces); ahead++) read_weights(ahead, ahead, column);
            }
            asm volatile("griddepcontrol.wait;" ::: "memory");
            for (int tile = first; tile < tiles; tile += clusters) {
                place(tile, row, column);
                for (int piece = 0; piece < pieces; piece++) {
                    if (ahead > 0) {
                        ahead--;
                    } else {
                        wait(empty + 8 * stage, parity);
                        read_weights(stage, piece, column);
                    }
                    const u32 to = x_ring + stage * X_STAGE;
                    if (!SHARE_W && CLUSTER > 1)
                        load_to_all(to + 128 * X_SLICE * rank, x_map, 64 * piece, row + X_SLICE * rank, full + 8 * stage);
                    else
                        load(to, x_map, 64 * piece, row, full + 8 * stage);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;" ::: "memory");
        asm volatile("griddepcontrol.wait;" ::: "memory");
        const int quad = lane % 4, row_of_thread = thread % 128 / 32 * 16 + lane / 4;
        int piece = 0;  // of all that the ring will have held
        for (int tile = first, i = 0; tile < tiles; tile += clusters, i++) {
            if (i % 2 != group - 1) {
                piece += pieces;
                continue;
            }
            int row, column;
            place(tile, row, column);
            int stage = piece % STAGES, used = -1;
            u32 parity = piece / STAGES & 1;
            float sums[ATOMS][SUMS];
            auto release = [&](int of) {
                if (CLUSTER == 1 ? lane == 0 : lane < CLUSTER) {
                    if (CLUSTER == 1) arrive(empty + 8 * of);
                    else arrive_at(empty + 8 * of, lane);
                }
            };
            wait(turns + 8 * (i % 2), (i + 1) / 2 - 1 & 1);
            for (int k = 0; k < pieces; k++) {
                wait(full + 8 * stage, parity);
                const u64 a = descriptor(x_ring + stage * X_STAGE), b = descriptor(w_ring + stage * W_STAGE);
                begin_multiply();
#pragma unroll
                for (int step = 0; step < 4; step++)  // 16 of K are 32 bytes
#pragma unroll
                    for (int atom = 0; atom < ATOMS; atom++)
                        multiply(sums[atom], a + (8192 * atom + 32 * step) / 16, b + 32 * step / 16, k + step);
                commit_multiply();
                if (k == pieces - 1 && lane == 0) arrive(turns + 8 * ((i + 1) % 2));
                finish_multiply<1>();
                if (used >= 0) release(used);
                used = stage;
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
            finish_multiply<0>();
            release(used);
            piece += pieces;
#pragma unroll
            for (int atom = 0; atom < ATOMS; atom++)
#pragma unroll
                for (int s = 0; s < SUMS; s++) asm volatile("" : "+f"(sums[atom][s])::"memory");  // not read earlier

            // Sums 4j to 4j + 3 of a thread: columns 8j + 2 * quad and the one after, of a row and of the 8th below.
#pragma unroll
            for (int block = 0; block < BLOCKS_OF_COLUMNS; block++) {
                float added[4][2];
#if BEHIND == 3
                float factors[4][2];
#endif
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int at = column + 32 * block + 8 * j;
                    const bool there = at < N;
                    const u32 pair = bias && there ? *(const u32*)(bias + at + 2 * quad) : 0;
                    added[j][0] = widen((u16)pair), added[j][1] = widen((u16)(pair >> 16));
#if BEHIND == 3
                    factors[j][0] = factors[j][1] = 1;
                    if (scale && there) {
                        const u32 two = *(const u32*)(scale + at + 2 * quad);
                        factors[j][0] = widen((u16)two), factors[j][1] = widen((u16)(two >> 16));
                    }
#endif
                }
                const int to_column = column + 32 * block + 8 * quad;
#pragma unroll
                for (int half = 0; half < 2 * ATOMS; half++) {
                    const int to_row = row + row_of_thread + 8 * half + half / 2 * 48;
                    const bool there = to_row < M && to_column < N;
                    const long long to = (long long)to_row * N + to_column;
                    u32 v[4];
#if BEHIND == 3
                    u32 more[4] = {};
                    if (there) {
                        const uint4 four = *(const uint4*)(residual + to);
                        more[0] = four.x, more[1] = four.y, more[2] = four.z, more[3] = four.w;
                    }
                    exchange(more, lane);
#endif
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const float* sum = sums[half / 2] + 16 * block + 4 * j + half % 2 * 2;
                        float low = sum[0] + added[j][0], high = sum[1] + added[j][1];
#if BEHIND == 3
                        low = fmaf(low, factors[j][0], widen((u16)more[j]));
                        high = fmaf(high, factors[j][1], widen((u16)(more[j] >> 16)));
#endif
                        v[j] = narrow(activate(low), activate(high));
                    }
                    exchange(v, lane);
                    if (there) *(uint4*)(out + to) = make_uint4(v[0], v[1], v[2], v[3]);
                }
            }
        }
    }
    cluster_meets();  // no block ends while another one reads into it or arrives there
}
