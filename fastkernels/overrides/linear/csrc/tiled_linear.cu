// y = f(x W^T + b) for many tokens on Hopper: x [M, K], W [N, K], 16-bit, float32 accumulators, one rounding. f is the
// identity, GELU, or residual + scale * (...) with one scale a column (LayerScale), computed from the float32 sums. W may
// be PARTS tensors of N rows each: results [PARTS, M, N], as of queries, keys and values; or, with f = SiLU(gate) * up or
// GELU(gate) * up, one result [M, N] of two of them, whose tiles have half of their columns from each. Or queries and keys,
// all columns before `turned`, are rotated by their token's row of cosines and sines: heads of 64 channels, whose pairs a
// thread holds.
//
// Blocks are persistent. One thread reads x and W into a ring of STAGES pieces of 64 columns (tensor maps, 128-byte
// swizzle). Two warpgroups take the block's tiles of BM x BN in turn: while one computes f and stores, the other multiplies.
// They pass the turn to each other with a tile's last piece: a barrier of the ring cannot be waited for a lap ahead. Or they
// COOPERATE: each has half of a tile's rows. Such tiles can be larger, so that less is read, but f is computed in between.
//
// With CLUSTER blocks in a cluster, their tiles are neighbors: SHARING_W of them with the same columns, and the others next
// to these, with the same rows. Each block reads a slice of the W and of the x that it shares, and copies it to all that do.
//
// Sums are stored from registers. wgmma gives a thread two of every eight columns: W's rows are read in another order, so
// that these columns are eight that lie next to each other, 16 bytes of the result.
//
// With FP8, x and W are float8 e4m3 with a scale for 128 columns of a row of x and for 128 x 128 of W; K counts pairs, and a
// piece is 128 columns. Tensor cores accumulate float8 with 14 bits: the sums of a piece are scaled and added to float32 sums
// by one warpgroup while the other one multiplies, or, where registers hold two sets of sums, while the next piece is
// multiplied. With SPLITS, the blocks of a cluster share a tile: each has a part of K, sends its sums to the others'
// shared memory, and adds up and stores one part of the tile; there are no more tiles than clusters. With GROUPED, W is a
// matrix for each expert, [E, N, K], and each BM rows of x belong to one expert; blocks of rows with another one are left
// out.
//
// Compile-time constants: BM and BN (multiples of 64 and 32), STAGES, COOPERATE, CLUSTER, SHARING_W, GROUP (rows of tiles
// that share W in L2), SPLITS, PARTS, BEHIND (0: nothing, 1: GELU with erf, 2: with tanh, 3: scale and residual, 4: SiLU(gate) * up,
// 5: rotation of pairs that are 32 channels apart, 6: of neighbors, 7: GELU(gate) * up, with erf, 8: 4 in float8
// with a scale for 128 columns), FP8, GROUPED, BF16 (the result).
// multiply() precedes this file (wgmma_linear_cuda.py). Requires N % 32 == 0, K % 8 == 0, and less than 2^32 results.

struct __align__(128) TensorMap { u64 opaque[16]; };
struct Weights { TensorMap of[PARTS]; };
struct Biases { const u16* of[PARTS]; };
struct Turns { const u16 *cosines, *sines; int row, tokens, prefix, turned; };  // row: numbers from one token's to the next

struct Scales { const float *x, *w; int x_token, x_block, w_row, w_block; };  // strides by token or 128 rows, by 128 columns
// experts: of each BM rows; total: rows in use; pairs: where rows of results go (null: to their own place), times weights.
// scales, column, powers_of_2: of float8 results, numbers from one block of columns' to the next one's, rounded up.
struct Groups { const int *experts, *total, *pairs; const float* weights; float* scales; int E, n_pairs, column, powers_of_2; };

constexpr int THREADS = 384, ROWS = COOPERATE ? BM / 2 : BM;  // of a warpgroup
constexpr int ATOMS = ROWS / 64, SUMS = BN / 2;  // of each thread, for 64 rows
constexpr int X_STAGE = 128 * BM, W_STAGE = 128 * BN;
constexpr int SHARING_X = CLUSTER / SHARING_W;
constexpr int X_SLICE = BM / SHARING_X, W_SLICE = BN / SHARING_W;  // rows that a block reads
#define GATES (BEHIND == 4 || BEHIND == 7)
#define ROTATES (BEHIND == 5 || BEHIND == 6)
#define TWO_SETS (FP8 && BM == 128 && BN <= 128)  // of sums of a piece
constexpr bool GATED = GATES || BEHIND == 8;
constexpr int WIDTH = GATED ? BN / 2 : BN;  // columns of a tile's result
constexpr int W_BOX = GATED ? BN / 2 : W_SLICE;  // rows of one copy
constexpr int BLOCKS = WIDTH / 32, PLACES = 2 * ATOMS;  // of 32 columns; rows of a thread
constexpr int OWN = BLOCKS * PLACES / SPLITS;  // rows of blocks, of eight sums each, that a block of a split tile stores
constexpr int SENT = (SPLITS - 1) * OWN * 32 * 256;  // bytes of others' sums
#if BEHIND == 3 || ROTATES
constexpr u32 ONES = BF16 ? 0x3f803f80 : 0x3c003c00;  // a pair
#endif
constexpr int AT_ONCE = FP8 && BN > 128 ? 128 : BN, HALVES = BN / AT_ONCE;  // columns of a multiplication, which share a scale
constexpr int SETS = TWO_SETS ? 2 : 1;
constexpr bool MANY = ATOMS * SUMS + FP8 * SETS * AT_ONCE / 2 >= 160;  // sums: the two warpgroups have all registers but a few
constexpr bool EARLY = BEHIND != 3 && !ROTATES || ATOMS * SUMS < 192;  // registers are left to read a block of columns ahead
static_assert(ROWS % 64 == 0 && BN % 32 == 0 && BN <= 256 && ATOMS * SUMS <= 192, "what registers hold");
static_assert(X_SLICE % 8 == 0 && W_BOX % 32 == 0, "slices begin where the swizzle and blocks of columns do");
static_assert(!GATED || PARTS == 2, "gate and up");
static_assert(!FP8 || (COOPERATE && 256 % BN == 0), "columns of a tile share one or two scales");
static_assert(SPLITS == 1 || (SETS == 2 && CLUSTER == 1 && !GROUPED && BLOCKS * PLACES % SPLITS == 0), "split tiles");
static_assert(!FP8 || BEHIND == 0 || (BEHIND == 8 && GROUPED && BN == 256), "128 columns of gate and of up");

// Of x: rows in their order. Of W: rows 32b + 8q + 2j + e as 32b + 8j + 2q + e, `row` a multiple of 32.
#define COPY "cp.async.bulk.tensor."
#define INTO ".shared::cluster.global.tile.mbarrier::complete_tx::bytes"
#define ALL ".multicast::cluster"
__device__ __forceinline__ void load_x(u32 to, const TensorMap& map, int column, int row, u32 barrier, u16 blocks) {
    if (SHARING_X == 1)
        asm volatile(COPY "2d" INTO " [%0], [%1, {%2, %3}], [%4];"
                     ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier) : "memory");
    else
        asm volatile(COPY "2d" INTO ALL " [%0], [%1, {%2, %3}], [%4], %5;"
                     ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(blocks) : "memory");
}

__device__ __forceinline__ void load_w(u32 to, const TensorMap& map, int column, int row, u32 barrier, u16 blocks) {
    if (SHARING_W == 1)
        asm volatile(COPY "5d" INTO " [%0], [%1, {%2, %3, %3, %3, %4}], [%5];"
                     ::"r"(to), "l"(&map), "r"(column), "r"(0), "r"(row / 32), "r"(barrier) : "memory");
    else
        asm volatile(COPY "5d" INTO ALL " [%0], [%1, {%2, %3, %3, %3, %4}], [%5], %6;"
                     ::"r"(to), "l"(&map), "r"(column), "r"(0), "r"(row / 32), "r"(barrier), "h"(blocks) : "memory");
}

// Not with .release.cluster, which would first wait for this thread's stores to global memory.
__device__ __forceinline__ void arrive_at(u32 barrier, int rank) {
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
        " mbarrier.arrive.shared::cluster.b64 _, [there]; }"
        ::"r"(barrier), "r"(rank) : "memory");
}

__device__ __forceinline__ void cluster_begins() {  // after the fence of its barriers
    if (CLUSTER * SPLITS == 1) return __syncthreads();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_ends() {  // not while a block reads into another one or arrives there
    if (CLUSTER * SPLITS > 1) asm volatile("barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
}

__device__ __forceinline__ int rank_in_cluster() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return CLUSTER * SPLITS == 1 ? 0 : rank;
}

__device__ __forceinline__ void send(u32 to, int rank, float a, float b, float c, float d) {  // to another block's memory
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
        " st.shared::cluster.v4.f32 [there], {%2, %3, %4, %5}; }"
        ::"r"(to), "r"(rank), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

__device__ __forceinline__ void sent(u32 barrier, int rank) {  // by this warp
    asm volatile("fence.acq_rel.cluster;" ::: "memory");
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive_at(barrier, rank);
}

__device__ __forceinline__ void wait_for_others(u32 barrier, u32 parity) {  // for what they have sent
    u32 done = 0;
    while (!done) {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    }
}

__device__ __forceinline__ float4 received(u32 from) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(from) : "memory");
    return v;
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
#if BEHIND == 1 || BEHIND == 7
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
#elif BEHIND == 4 || BEHIND == 8
    return x * reciprocal(1 + power_of_2(-1.442695041f * x));
#else
    return x;
#endif
}

// Eight numbers from a column on, of a bias for example; `absent` in pairs if there are none.
__device__ __forceinline__ uint4 eight(const u16* numbers, int column, u32 absent) {
    return numbers ? load_16((const uint4*)(numbers + column)) : make_uint4(absent, absent, absent, absent);
}

__device__ __forceinline__ u32 pair_of(const uint4& v, int j) { return j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w; }

#if BEHIND == 8
__device__ __forceinline__ u32 four_e4m3(float a, float b, float c, float d) {  // the first one in the lowest byte
    u16 low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return low | (u32)high << 16;
}
#endif

__device__ __forceinline__ float low_of(u32 pair) { return widen((u16)pair); }

__device__ __forceinline__ float high_of(u32 pair) { return widen((u16)(pair >> 16)); }

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, 1) tiled_linear(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ Weights weights, const __grid_constant__ Biases biases_of,
    const u16* __restrict__ scale, const u16* __restrict__ residual, u16* __restrict__ out, int M, int N, int K,
    const Turns turns_of
#if FP8
    , const __grid_constant__ Scales scales
#endif
#if GROUPED
    , const __grid_constant__ Groups groups
#endif
) {
    SHARED_MEMORY(1024);

    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const int thread = threadIdx.x, lane = thread % 32, rank_of_all = rank_in_cluster();
    const int rank = SPLITS == 1 ? rank_of_all : 0, split = SPLITS == 1 ? 0 : rank_of_all;
    const int group = __shfl_sync(~0u, thread / 128, 0);  // a warpgroup; the compiler sees that it is alike in a warp
#if GROUPED
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int all_pieces = (K + 63) / 64, m_tiles = *groups.total / BM;
    auto expert_of = [&](int row) { return groups.experts[row / BM]; };
    auto left_out = [&](int row) { return (u32)expert_of(row) >= groups.E; };
#else
    const int all_pieces = (K + 63) / 64, m_tiles = (M + BM - 1) / BM;
    auto expert_of = [](int) { return 0; };
    auto left_out = [](int) { return false; };
#endif
    const int begin = all_pieces * split / SPLITS, pieces = all_pieces * (split + 1) / SPLITS - begin;  // of this block
    const int of_part = (N + WIDTH - 1) / WIDTH, n_tiles = GATED ? of_part : PARTS * of_part;
    // Of clusters: m_count by n_count.
    const int m_count = (m_tiles + SHARING_W - 1) / SHARING_W, n_count = (n_tiles + SHARING_X - 1) / SHARING_X;
    const int rank_m = rank % SHARING_W, rank_n = rank / SHARING_W;
    const u16 with_my_columns = ((1 << SHARING_W) - 1) << SHARING_W * rank_n;  // masks of the cluster's blocks
    u16 with_my_rows = 0;
#pragma unroll
    for (int n = 0; n < SHARING_X; n++) with_my_rows |= 1 << (SHARING_W * n + rank_m);
    const int tiles = m_count * n_count, first = blockIdx.x / (CLUSTER * SPLITS), clusters = gridDim.x / (CLUSTER * SPLITS);
    const u32 x_ring = (shared_address(memory) + 1023) & ~1023u, w_ring = x_ring + STAGES * X_STAGE;
    const u32 others = w_ring + STAGES * W_STAGE, full = others + SENT, empty = full + 8 * STAGES, turns = empty + 8 * STAGES;
    auto place = [&](int tile, int& row, int& column, int& part) {
        const int band = tile / (GROUP * n_count), in_band = tile % (GROUP * n_count), height = min(GROUP, m_count - band * GROUP);
        const int m = band * GROUP + in_band % height, n = in_band / height * SHARING_X + rank_n;
        part = GATED || PARTS == 1 ? 0 : min(n / of_part, PARTS - 1);  // the last block of a cluster may have no columns
        row = (m * SHARING_W + rank_m) * BM, column = (n - part * of_part) * WIDTH;
    };

    if (thread == 0) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(&x_map) : "memory");
        for (int i = 0; i < PARTS; i++) asm volatile("prefetch.tensormap [%0];" ::"l"(&weights.of[i]) : "memory");
        for (int s = 0; s < STAGES; s++) make_barrier(full + 8 * s, 1), make_barrier(empty + 8 * s, 4 * (1 + COOPERATE) * (SHARING_W + SHARING_X - 1));
        make_barrier(turns, SPLITS == 1 ? 4 : 8 * (SPLITS - 1)), make_barrier(turns + 8, 4);  // or: others have sent
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    cluster_begins();

    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(MANY ? 24 : 40) : "memory");
        if (thread == 0) {
            auto read_weights = [&](int stage, int piece, int column, int part) {
                expect(full + 8 * stage, X_STAGE + W_STAGE);
                const int first = W_SLICE * rank_m;
                for (int from = first; from < first + W_SLICE; from += W_BOX)
                    load_w(w_ring + stage * W_STAGE + 128 * from, weights.of[GATED ? from / W_BOX : part], 64 * (begin + piece),
                           column + (GATED ? 0 : from), full + 8 * stage, with_my_columns);
            };
            int row, column, part, stage = 0, ahead = 0;
            u32 parity = 1;
            if (!GROUPED && first < tiles) {  // the weight is there before the previous kernel ends
                place(first, row, column, part);
                for (; ahead < min(STAGES, pieces); ahead++) read_weights(ahead, ahead, column, part);
            }
            asm volatile("griddepcontrol.wait;" ::: "memory");
            for (int tile = first; tile < tiles; tile += clusters) {
                place(tile, row, column, part);
                if (left_out(row)) continue;
                const int before = expert_of(row) * N * (GATED ? 2 : 1);
                for (int piece = 0; piece < pieces; piece++) {
                    if (ahead > 0) {
                        ahead--;
                    } else {
                        wait(empty + 8 * stage, parity);
                        read_weights(stage, piece, before + column, part);
                    }
                    const int from = X_SLICE * rank_n;
                    load_x(x_ring + stage * X_STAGE + 128 * from, x_map, 64 * (begin + piece), row + from, full + 8 * stage,
                           with_my_rows);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MANY ? 240 : 232) : "memory");
        asm volatile("griddepcontrol.wait;" ::: "memory");
        const int quad = lane % 4, row_of_thread = thread % 128 / 32 * 16 + lane / 4;
        const int own_rows = COOPERATE ? (group - 1) * ROWS : 0;  // of a tile
        int piece = 0;  // of all that the ring will have held
        for (int tile = first, i = 0; tile < tiles; tile += clusters, i++) {
            if (!COOPERATE && i % 2 != group - 1) {
                piece += pieces;
                continue;
            }
            int row, column, part;
            place(tile, row, column, part);
            if (left_out(row)) continue;
            const int expert = expert_of(row);
            row += own_rows;
            int stage = piece % STAGES, used = -1;
            u32 parity = piece / STAGES & 1;
            float sums[ATOMS][SUMS] = {};
            // A thread has eight columns of each of PLACES rows in each block of 32 columns.
            auto row_of = [&](int i) { return row + row_of_thread + 64 * (i / 2) + 8 * (i % 2); };
            auto column_of = [&](int block) { return column + 32 * block + 8 * quad; };
            auto there = [&](int i, int block) { return row_of(i) < M && column_of(block) < N; };
            auto inside = [&](int block) { return min(column_of(block), N - 8); };  // past the end: any numbers
            auto release = [&](int of) {  // for the blocks that copy to this one
                if (CLUSTER == 1 ? lane == 0 : (with_my_rows | with_my_columns) >> lane & 1) {
                    if (CLUSTER == 1) arrive(empty + 8 * of);
                    else arrive_at(empty + 8 * of, lane);
                }
            };
            if (!COOPERATE) wait(turns + 8 * (i % 2), (i + 1) / 2 - 1 & 1);
#if FP8
            const float *w_scale[HALVES], *x_scale[PLACES];
            float next[SETS][PLACES + HALVES], fresh[SETS][AT_ONCE / 2];
#pragma unroll
            for (int h = 0; h < HALVES; h++)
                w_scale[h] = scales.w + (long long)((N + 127) / 128 * (GATED ? 2 * expert + h : expert) +
                                                    min(column / 128 + (GATED ? 0 : h), (N - 1) / 128)) * scales.w_row;
#pragma unroll
            for (int i = 0; i < PLACES; i++) x_scale[i] = scales.x + (long long)min(row_of(i), M - 1) * scales.x_token;
            auto read_scales = [&](float (&to)[PLACES + HALVES], int k) {
                k = begin + min(k, pieces - 1);
#pragma unroll
                for (int i = 0; i < PLACES; i++) to[i] = x_scale[i][k * scales.x_block];
#pragma unroll
                for (int h = 0; h < HALVES; h++) to[PLACES + h] = w_scale[h][k * scales.w_block];
            };
            auto multiply_piece = [&](float (&to)[AT_ONCE / 2], int atom, int half) {
                const u64 a = descriptor(x_ring + stage * X_STAGE + 128 * own_rows), b = descriptor(w_ring + stage * W_STAGE);
                begin_multiply();
#pragma unroll
                for (int step = 0; step < 4; step++)  // 32 of K are 32 bytes
                    multiply(to, a + (8192 * atom + 32 * step) / 16, b + (128 * AT_ONCE * half + 32 * step) / 16, step);
                commit_multiply();
            };
            auto add = [&](float (&of)[AT_ONCE / 2], const float (&by)[PLACES], int atom, int half) {
#pragma unroll
                for (int s = 0; s < AT_ONCE / 2; s++) asm volatile("" : "+f"(of[s])::"memory");  // not read earlier
#pragma unroll
                for (int s = 0; s < AT_ONCE / 2; s++) sums[atom][AT_ONCE / 2 * half + s] += by[2 * atom + s / 2 % 2] * of[s];
            };
            auto scales_of = [&](float (&by)[PLACES], const float (&v)[PLACES + HALVES], int half) {
#pragma unroll
                for (int i = 0; i < PLACES; i++) by[i] = v[i] * v[PLACES + half];
            };
            auto forward = [&] {
                if (++stage == STAGES) stage = 0, parity ^= 1;
            };
#pragma unroll
            for (int i = 0; i < SETS; i++) read_scales(next[i], i);
#if TWO_SETS
            float by[PLACES];
            int k = 0;
            auto begin_piece = [&](int set) {
                wait(full + 8 * stage, parity);
                multiply_piece(fresh[set], 0, 0);
                used = stage;
                forward();
            };
            for (; k < pieces % 4; k++) {
                begin_piece(0);
                scales_of(by, next[0], 0);
                read_scales(next[0], k + 1), read_scales(next[1], k + 2);
                finish_multiply<0>();
                release(used);
                add(fresh[0], by, 0, 0);
            }
            while (k < pieces) {  // four, and no products go on into the next round: the compiler would wait for each
                begin_piece(0);
#pragma unroll
                for (int i = 0; i < 4; i++, k++) {
                    const int set = i % 2, last = used;
                    if (i < 3) begin_piece(1 - set);
                    scales_of(by, next[set], 0);
                    read_scales(next[set], k + 2);
                    if (i < 3) finish_multiply<1>();
                    else finish_multiply<0>();
                    release(last);
                    add(fresh[set], by, 0, 0);
                }
            }
#else
            for (int k = 0; k < pieces; k++) {
                float by[HALVES][PLACES];
#pragma unroll
                for (int h = 0; h < HALVES; h++) scales_of(by[h], next[0], h);
                read_scales(next[0], k + 1);
                wait(full + 8 * stage, parity);
#pragma unroll
                for (int i = 0; i < ATOMS * HALVES; i++) {
                    multiply_piece(fresh[0], i / HALVES, i % HALVES);
                    finish_multiply<0>();
                    if (i == ATOMS * HALVES - 1) release(stage);
                    add(fresh[0], by[i % HALVES], i / HALVES, i % HALVES);
                }
                forward();
            }
#endif
#else
            for (int k = 0; k < pieces; k++) {
                wait(full + 8 * stage, parity);
                const u64 a = descriptor(x_ring + stage * X_STAGE + 128 * own_rows), b = descriptor(w_ring + stage * W_STAGE);
                begin_multiply();
#pragma unroll
                for (int step = 0; step < 4; step++)  // 16 of K are 32 bytes
#pragma unroll
                    for (int atom = 0; atom < ATOMS; atom++)
                        multiply(sums[atom], a + (8192 * atom + 32 * step) / 16, b + 32 * step / 16, 1);
                commit_multiply();
                if (!COOPERATE && k == pieces - 1 && lane == 0) arrive(turns + 8 * ((i + 1) % 2));
                finish_multiply<1>();
                if (used >= 0) release(used);
                used = stage;
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
#endif
            auto bias_of = [&](int block) { return eight(biases_of.of[part], inside(block), 0); };
            uint4 biases = bias_of(0);
#if GATES
            auto bias_of_up = [&](int block) { return eight(biases_of.of[1], inside(block), 0); };
            uint4 biases_up = bias_of_up(0);
#endif
#if BEHIND == 3
            auto scale_of = [&](int block) { return eight(scale, inside(block), ONES); };
            auto residual_of = [&](int i, int block) {
                return load_16((const uint4*)(residual + ((u32)min(row_of(i), M - 1) * N + inside(block))));
            };
            uint4 scales = scale_of(0), residuals[PLACES];
            if (EARLY)
#pragma unroll
                for (int i = 0; i < PLACES; i++) residuals[i] = residual_of(i, 0);
#endif
#if ROTATES
            struct Turn { uint4 cosines[2], sines[2]; };  // of channels 8 * quad and 32 + 8 * quad, and the 7 behind each
            auto turn_of = [&](int i) {
                const int position = row_of(i) % turns_of.tokens - turns_of.prefix;
                Turn v;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const u32 at = max(position, 0) * turns_of.row + 32 * half + 8 * quad;
                    v.cosines[half] = load_16((const uint4*)(turns_of.cosines + at));
                    v.sines[half] = load_16((const uint4*)(turns_of.sines + at));
                    if (position < 0) v.cosines[half] = make_uint4(ONES, ONES, ONES, ONES), v.sines[half] = make_uint4(0, 0, 0, 0);
                }
                return v;
            };
            Turn next = turn_of(0);
#endif
#if !FP8
            finish_multiply<0>();
            release(used);
#endif
            piece += pieces;
#pragma unroll
            for (int atom = 0; atom < ATOMS; atom++)
#pragma unroll
                for (int s = 0; s < SUMS; s++) asm volatile("" : "+f"(sums[atom][s])::"memory");  // not read earlier

#if ROTATES
#pragma unroll
            for (int block = 0; block < (biases_of.of[part] ? BLOCKS : 0); block++) {
                const uint4 added = block == 0 ? biases : bias_of(block);
#pragma unroll
                for (int s = 0; s < ATOMS * 16; s++) {  // 4j to 4j + 3 of each atom: a pair of columns of two rows
                    const u32 two = pair_of(added, s % 16 / 4);
                    sums[s / 16][16 * block + s % 16] += s % 2 ? high_of(two) : low_of(two);
                }
            }
#pragma unroll
            for (int i = 0; i < PLACES; i++) {
                const Turn turn = EARLY || i == 0 ? next : turn_of(i);
                if (EARLY && i + 1 < PLACES) next = turn_of(i + 1);
#pragma unroll
                for (int head = 0; head < WIDTH / 64; head++) {
                    if (part * N + column + 64 * head >= turns_of.turned) break;
#pragma unroll
                    for (int pair = 0; pair < 8; pair++) {
#if BEHIND == 5  // channels c and c + 32
                        const int at = pair / 2 * 4 + pair % 2, other = at + 16;
                        auto of = [&](const uint4* v, int second) {
                            return pair % 2 ? high_of(pair_of(v[second], pair / 2)) : low_of(pair_of(v[second], pair / 2));
                        };
#else  // 2c and 2c + 1
                        const int at = pair / 4 * 16 + pair % 4 * 4, other = at + 1;
                        auto of = [&](const uint4* v, int second) {
                            return second ? high_of(pair_of(v[pair / 4], pair % 4)) : low_of(pair_of(v[pair / 4], pair % 4));
                        };
#endif
                        float* sum = sums[i / 2] + 32 * head + i % 2 * 2;
                        const float p = sum[at], q = sum[other];
                        sum[at] = fmaf(p, of(turn.cosines, 0), -q * of(turn.sines, 0));
                        sum[other] = fmaf(q, of(turn.cosines, 1), p * of(turn.sines, 1));
                    }
                }
            }
#endif

#if BEHIND == 8
            // Gate, up and their product are rounded to 16 bits, as by kernels that follow each other.
#pragma unroll
            for (int i = 0; i < PLACES; i++) {
                float* gate = sums[i / 2] + i % 2 * 2;
                float most = 0;
#pragma unroll
                for (int j = 0; j < SUMS / 2; j += 4) {
                    const u32 g = narrow(gate[j], gate[j + 1]), up = narrow(gate[j + SUMS / 2], gate[j + SUMS / 2 + 1]);
                    const u32 silu = narrow(activate(low_of(g)), activate(high_of(g)));
                    const u32 y = narrow(low_of(silu) * low_of(up), high_of(silu) * high_of(up));
                    gate[j] = low_of(y), gate[j + 1] = high_of(y);
                    most = fmaxf(most, fmaxf(fabsf(gate[j]), fabsf(gate[j + 1])));
                }
                most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
                most = fmaxf(fmaxf(most, __shfl_xor_sync(~0u, most, 2)), 1e-10f);
                float by = __fdiv_rn(most, 448);
                if (groups.powers_of_2) by = __uint_as_float((__float_as_uint(by) + 0x7fffff) & 0x7f800000);
                const float inverse = __fdiv_rn(1, by);
                if (quad == 0) groups.scales[(long long)(column / 128) * groups.column + row_of(i)] = by;
#pragma unroll
                for (int block = 0; block < BLOCKS; block++) {
                    const float* v = gate + 16 * block;
                    auto four = [&](int j) { return four_e4m3(v[j] * inverse, v[j + 1] * inverse, v[j + 4] * inverse, v[j + 5] * inverse); };
                    *(uint2*)((unsigned char*)out + (u64)row_of(i) * N + column_of(block)) = make_uint2(four(0), four(8));
                }
            }
#else
#if GROUPED
            u32 to_row[PLACES];
            float factors_of[PLACES];
#pragma unroll
            for (int i = 0; i < PLACES; i++) {
                to_row[i] = groups.pairs ? groups.pairs[row_of(i)] : row_of(i);
                factors_of[i] = groups.weights && to_row[i] < groups.n_pairs ? groups.weights[to_row[i]] : 1;
            }
            auto row_to = [&](int i) { return to_row[i]; };
            auto stores = [&](int i, int block) { return to_row[i] < groups.n_pairs && column_of(block) < N; };
#else
            auto row_to = [&](int i) { return (u32)part * M + row_of(i); };
            auto stores = there;
#endif
#if SPLITS > 1
            // Unit u of a tile: eight sums of block u / PLACES and row u % PLACES. Block u / OWN of the cluster stores it.
            auto of_unit = [&](int u, int i) -> float& { return sums[0][u / PLACES * 16 + i / 2 * 4 + u % PLACES * 2 + i % 2]; };
            const u32 own = others + 16 * (thread - 128);
#pragma unroll
            for (int u = 0; u < SPLITS * OWN; u++) {
                const int from_there = (split - u / OWN + SPLITS) % SPLITS - 1;
                if (u / OWN == split) continue;
#pragma unroll
                for (int half = 0; half < 2; half++)
                    send(own + 4096 * ((from_there * OWN + u % OWN) * 2 + half), u / OWN, of_unit(u, 4 * half),
                         of_unit(u, 4 * half + 1), of_unit(u, 4 * half + 2), of_unit(u, 4 * half + 3));
            }
            for (int other = 1; other < SPLITS; other++) sent(turns, (split + other) % SPLITS);
            wait_for_others(turns, 0);
#pragma unroll
            for (int u = 0; u < SPLITS * OWN; u++) {
                if (u / OWN != split) continue;
                for (int of = 0; of < SPLITS - 1; of++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const float4 v = received(own + 4096 * ((of * OWN + u % OWN) * 2 + half));
                        of_unit(u, 4 * half) += v.x, of_unit(u, 4 * half + 1) += v.y;
                        of_unit(u, 4 * half + 2) += v.z, of_unit(u, 4 * half + 3) += v.w;
                    }
            }
            auto stored = [&](int i, int block) { return (block * PLACES + i) / OWN == split && stores(i, block); };
#else
            auto stored = stores;
#endif
            // Sums 4j to 4j + 3 of a block: columns 8 * quad + 2j and the one after, of a row and of the 8th below.
#pragma unroll
            for (int block = 0; block < BLOCKS; block++) {
                const bool more = EARLY && block + 1 < BLOCKS;
#if ROTATES
                const uint4 added = make_uint4(0, 0, 0, 0);  // already
#else
                const uint4 added = EARLY || block == 0 ? biases : bias_of(block);
                if (more) biases = bias_of(block + 1);
#endif
#if GATES
                const uint4 added_up = EARLY || block == 0 ? biases_up : bias_of_up(block);
                if (more) biases_up = bias_of_up(block + 1);
#endif
#if BEHIND == 3
                const uint4 factors = EARLY || block == 0 ? scales : scale_of(block);
                if (more) scales = scale_of(block + 1);
#endif
#pragma unroll
                for (int i = 0; i < PLACES; i++) {
#if BEHIND == 3
                    const uint4 other = EARLY ? residuals[i] : residual_of(i, block);
                    if (more) residuals[i] = residual_of(i, block + 1);
#endif
                    u32 v[4];
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const float* sum = sums[i / 2] + 16 * block + 4 * j + i % 2 * 2;
                        float low = sum[0] + low_of(pair_of(added, j)), high = sum[1] + high_of(pair_of(added, j));
#if BEHIND == 3
                        low = fmaf(low, low_of(pair_of(factors, j)), low_of(pair_of(other, j)));
                        high = fmaf(high, high_of(pair_of(factors, j)), high_of(pair_of(other, j)));
#endif
                        low = activate(low), high = activate(high);
#if GROUPED
                        low *= factors_of[i], high *= factors_of[i];
#endif
#if GATES
                        const float* up = sum + 16 * BLOCKS;
                        low *= up[0] + low_of(pair_of(added_up, j)), high *= up[1] + high_of(pair_of(added_up, j));
#endif
                        v[j] = narrow(low, high);
                    }
                    u16* to = out + (row_to(i) * N + column_of(block));
                    if (stored(i, block)) *(uint4*)to = make_uint4(v[0], v[1], v[2], v[3]);
                }
            }
#endif
        }
    }
    cluster_ends();
}
