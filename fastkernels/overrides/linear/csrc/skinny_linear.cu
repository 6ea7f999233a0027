// y = x W^T + b for M <= 16 tokens on Hopper: x [M, K], W [N, K], 16-bit, float32 accumulators, one rounding.
//
// Reading W takes all the time. One warp of a block reads: bulk copies of KC columns of each of 16 rows, STAGES such
// units ahead, tile after tile of the block's share of N. The other warps multiply: each takes every CONSUMERS-th 32
// columns of K, with the weight's rows as the tensor cores' m16 and the tokens as their n8. At the end of a tile of
// 16 * GROUPS rows the warps' sums are added in order. x stays in registers if K is small (X_UNITS); else it is read
// from L2.
//
// The reader depends on no previous kernel: it fills the ring before griddepcontrol.wait. x is read, and all results are
// written, only after it.
//
// Compile-time constants: GROUPS, TOKEN_TILES (8 tokens each), KC, STAGES, X_UNITS (K / KC rounded up, or 0), BF16,
// HAS_BIAS. Requires K % 32 == 0 and rows of x and W that start at multiples of 16 bytes. Includes no header.

constexpr int CONSUMERS = 8, THREADS = 32 * (CONSUMERS + 1);
constexpr int ROWS = 16 * GROUPS, TOKENS = 8 * TOKEN_TILES, OUTPUTS = 16 * TOKENS;  // outputs of 16 rows
// 64 bytes more than a multiple of 128: the 64 bytes of two rows that 8 lanes read at once are in different banks.
constexpr int PITCH = 2 * KC + 64, STAGE = 16 * PITCH;
constexpr int STEPS = KC / 32 / CONSUMERS;  // of one warp in one unit
static_assert(KC % (32 * CONSUMERS) == 0, "each warp has as many steps of a unit as the others");

struct Tokens { uint4 of[STEPS][TOKEN_TILES]; };

__device__ __forceinline__ void copy(u32 to, const void* from, int bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}

__device__ __forceinline__ void consumers_meet() {
    asm volatile("bar.sync 1, %0;" ::"n"(32 * CONSUMERS) : "memory");
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

extern "C" __global__ void __launch_bounds__(THREADS, 1) skinny_linear(
    const u16* __restrict__ x, const u16* __restrict__ w, const u16* __restrict__ bias, u16* __restrict__ out,
    int M, int N, int K, long long x_stride, long long w_stride) {
    extern __shared__ __align__(128) unsigned char ring[];
    __shared__ float sums[CONSUMERS * OUTPUTS];
    __shared__ __align__(8) u64 full_barriers[STAGES];
    __shared__ __align__(8) u64 empty_barriers[STAGES];

    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int tiles = (N + ROWS - 1) / ROWS;
    const int first = (int)((u64)blockIdx.x * tiles / gridDim.x), last = (int)((u64)(blockIdx.x + 1) * tiles / gridDim.x);
    const u32 full = shared_address(full_barriers), empty = shared_address(empty_barriers);

    if (thread == 0) {
        for (int s = 0; s < STAGES; s++) make_barrier(full + 8 * s, 1), make_barrier(empty + 8 * s, CONSUMERS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();

    if (warp == CONSUMERS) {  // the reader
        u64 once;             // the weight is read once: first to be evicted from L2
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
        int stage = 0;
        u32 parity = 1;  // of an unused barrier: empty at once
        for (int tile = first; tile < last; tile++) {
            for (int k = 0; k < K; k += KC) {
                const int bytes = 2 * min(KC, K - k);
                for (int g = 0; g < GROUPS; g++) {
                    wait(empty + 8 * stage, parity);
                    if (lane == 0) expect(full + 8 * stage, 16 * bytes);
                    __syncwarp();
                    if (lane < 16) {
                        // A row past the end is the last row again; its result is not stored.
                        const u16* from = w + (long long)min(tile * ROWS + 16 * g + lane, N - 1) * w_stride + k;
                        copy(shared_address(ring) + stage * STAGE + lane * PITCH, from, bytes, full + 8 * stage, once);
                    }
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
            }
        }
        return;
    }

    asm volatile("griddepcontrol.wait;" ::: "memory");
    // Lane (group, quad) has 8 adjacent columns of token `group` and, below, of rows `group` and `group + 8`. The tensor
    // cores treat them as other columns of K, the same ones in both matrices.
    const int group = lane / 4, quad = lane % 4;
    auto load_tokens = [&](int unit, Tokens& to) {
#pragma unroll
        for (int i = 0; i < STEPS; i++)
#pragma unroll
            for (int t = 0; t < TOKEN_TILES; t++) {
                const int token = 8 * t + group, k = unit * KC + 32 * (warp + i * CONSUMERS);
                to.of[i][t] = make_uint4(0, 0, 0, 0);
                if (token < M && k < K) to.of[i][t] = load_16((const uint4*)(x + token * x_stride + k + 8 * quad));
            }
    };
    int stage = 0;
    u32 parity = 0;
    float acc[GROUPS][TOKEN_TILES][4];
    auto take = [&](int unit, const Tokens& tokens) {  // KC columns of all rows of the tile
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            wait(full + 8 * stage, parity);
            const unsigned char* rows = ring + stage * STAGE + group * PITCH + 16 * quad;
#pragma unroll
            for (int i = 0; i < STEPS; i++) {
                const int at = warp + i * CONSUMERS;
                if (unit * KC + 32 * at >= K) continue;
                const uint4 low = *(const uint4*)(rows + 64 * at);
                const uint4 high = *(const uint4*)(rows + 8 * PITCH + 64 * at);
#pragma unroll
                for (int t = 0; t < TOKEN_TILES; t++) {
                    const uint4 v = tokens.of[i][t];
                    multiply(acc[g][t], low.x, high.x, low.y, high.y, v.x, v.y);
                    multiply(acc[g][t], low.z, high.z, low.w, high.w, v.z, v.w);
                }
            }
            __syncwarp();  // all lanes have read the stage before it is refilled
            if (lane == 0) arrive(empty + 8 * stage);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    };
    auto store = [&](int row, int token, float sum) {  // `row` of W
        if (token >= M || row >= N) return;
#if HAS_BIAS
        sum += widen(bias[row]);
#endif
        out[(long long)token * N + row] = narrow(sum);
    };

#if X_UNITS
    Tokens tokens[X_UNITS];
#pragma unroll
    for (int u = 0; u < X_UNITS; u++) load_tokens(u, tokens[u]);
#else
    Tokens tokens;
    load_tokens(0, tokens);
#endif
    for (int tile = first; tile < last; tile++) {
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
#pragma unroll
            for (int t = 0; t < TOKEN_TILES; t++)
#pragma unroll
                for (int i = 0; i < 4; i++) acc[g][t][i] = 0;
#if X_UNITS
#pragma unroll
        for (int u = 0; u < X_UNITS; u++)
            take(u, tokens[u]);
#else
        for (int u = 0, units = (K + KC - 1) / KC; u < units; u++) {
            Tokens later;  // loaded one unit ahead
            load_tokens(u + 1 < units ? u + 1 : 0, later);
            take(u, tokens);
            tokens = later;
        }
#endif
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            consumers_meet();  // the previous sums have been read
#pragma unroll
            for (int t = 0; t < TOKEN_TILES; t++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int token = 8 * t + 2 * quad + i % 2, row = group + i / 2 * 8;
                    sums[warp * OUTPUTS + token * 16 + row] = acc[g][t][i];
                }
            consumers_meet();
            for (int i = thread; i < OUTPUTS; i += 32 * CONSUMERS) {
                float sum = sums[i];
#pragma unroll
                for (int v = 1; v < CONSUMERS; v++) sum += sums[v * OUTPUTS + i];
                store(tile * ROWS + 16 * g + i % 16, i / 16, sum);
            }
        }
    }
}
