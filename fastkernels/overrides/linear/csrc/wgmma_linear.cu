// y = x W^T + b for M <= 64 tokens on Hopper: x [M, K], W [N, K], 16-bit, float32 accumulators, one rounding. Or x and W
// in float8 e4m3 with scales, two values in each 16-bit word: K counts words, and 64 words are 128 bytes.
//
// The work is divided into items: ROWS rows of W (a tile) and one of SPLITS parts of K. A block has an even share of
// them, mostly one. One thread reads W into a ring of STAGES units of BLOCK_K (tensor maps, 128-byte swizzle), another
// reads x. A warpgroup multiplies from there, with tokens as wgmma's m64 and the tile's rows as its n. A tile can have
// any multiple of 8 rows, so that all blocks read equally much, and x is read once per tile instead of once per 16 or
// 64 rows. A token's sums depend on its own row only: rows past TOKENS can hold anything in shared memory.
//
// W is read before griddepcontrol.wait: the ring is full of it when the previous kernel ends. x is read, and all results
// are written, only after the wait. Reads of x queue behind outstanding reads of W, and no tile can be multiplied before
// x arrives. Therefore at most AHEAD stages of W are outstanding until the ring is full.
//
// With SPLITS, an item's sums go to memory, and a ticket of its tile counts the items that have arrived. Each block then
// waits briefly for the others and adds one part of the tile's columns, always in the same order. It cannot wait
// indefinitely, as the others may not have started: a block that leaves marks its part in the ticket, and the last block
// to arrive adds that part, too.
//
// Tensor cores accumulate float8 with 14 bits. Sums of 128 columns (which share a block scale) are therefore added to
// float32 sums while the next 128 are multiplied. Block scales go through the ring as well: one warp copies those of a
// stage. Scales per token and row are applied where a sum is stored.
//
// Compile-time constants: ROWS, TOKENS (8, 16, 32, 64), BLOCK_K, STAGES, AHEAD, SPLITS, BF16 (the result), SCALES (0:
// none, 16-bit; 1: per token and row; 2: per block). multiply(), whose operand list is as long as a tile, precedes this
// file (wgmma_linear_cuda.py). Requires K % 8 == 0 and K >= 64. Includes no header.

struct __align__(128) TensorMap { u64 opaque[16]; };

constexpr int CONSUMERS = 128, W_READER = 4, X_READER = 5, THREADS = CONSUMERS + (SCALES == 2 ? 96 : 64);  // warps
constexpr int CHUNKS = BLOCK_K / 64;  // of 128 bytes of each row, the width of the swizzle
constexpr int X_CHUNK = 128 * TOKENS, W_CHUNK = 128 * ROWS, X_STAGE = CHUNKS * X_CHUNK, W_STAGE = CHUNKS * W_CHUNK;
constexpr int COLUMNS = ROWS / 8, SLOTS = 32 * ((TOKENS + 15) / 16);  // threads that hold sums of tokens
constexpr int BATCH = 16 / SPLITS;  // sums of SPLITS parts that a thread adds at once
constexpr int TRIES = 8;  // polls of a ticket, each about 0.5 us
static_assert(ROWS % 8 == 0 && ROWS <= 256 && BLOCK_K % 64 == 0 && SPLITS <= 8, "what wgmma and a ticket hold");
static_assert(AHEAD >= 1 && AHEAD <= STAGES, "stages of W that are on their way at first");
static_assert(STAGES * W_STAGE + X_CHUNK >= 8192, "wgmma reads 64 rows of x, into the weights behind");
static_assert(!SCALES || (CHUNKS % 2 == 0 && ROWS <= 128), "two sets of sums in turn; two blocks of rows at most");

#if SCALES
// Strides in elements: of x by token and by 128 columns, of W by row (SCALES == 1) or 128 rows, and by 128 columns.
struct Scales {
    const float *x, *w;
    int x_token, x_block, w_row, w_block;
};
#endif

__device__ __forceinline__ void load(u32 to, const TensorMap& map, int column, int row, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3}], [%4], %5;"
        ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(barrier), "l"(policy) : "memory");
}

__device__ __forceinline__ void consumers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

__device__ __forceinline__ u32 or_to(u32* ticket, u32 value) {
    u32 old;
    asm volatile("atom.acq_rel.gpu.global.or.b32 %0, [%1], %2;" : "=r"(old) : "l"(ticket), "r"(value) : "memory");
    return old;
}

__device__ __forceinline__ u32 look_at(const u32* ticket) {
    u32 now;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(ticket) : "memory");
    return now;
}

// Returns the parts of a tile's columns that this block adds, as bits; one thread calls it after the sums are in memory.
// A ticket: arrived items in bits 0 to 7, parts whose blocks did not wait in 8 to 15, blocks that left from 16 on.
__device__ __forceinline__ u32 parts_to_add(u32* ticket, int split, int tries) {
    const u32 old = add_to(ticket, 1);
    if ((old & 0xff) == SPLITS - 1) return (old >> 8 & 0xff) | 1u << split;
    for (; tries > 0; tries--)
        if ((look_at(ticket) & 0xff) == SPLITS) return 1u << split;
    return (or_to(ticket, 0x100u << split) & 0xff) == SPLITS ? 1u << split : 0;
}

#if SCALES
// Copies a number asynchronously: see arrive_when_copied.
__device__ __forceinline__ void copy_number(float* to, const float* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

__device__ __forceinline__ void arrive_when_copied(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Adds the sums of 128 columns, scaled by by[0] and by[2] in the tile's rows before 8 * edge, by by[1] and by[3] after.
__device__ __forceinline__ void promote(float (&sums)[4 * COLUMNS], float (&part)[4 * COLUMNS], const float (&by)[4], int edge) {
#pragma unroll
    for (int i = 0; i < 4 * COLUMNS; i++) asm volatile("" : "+f"(part[i])::"memory");  // keeps the compiler from reading them earlier
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) {
        const float upper = SCALES == 1 ? 1 : j < edge ? by[0] : by[1], lower = SCALES == 1 ? 1 : j < edge ? by[2] : by[3];
        sums[4 * j] += upper * part[4 * j], sums[4 * j + 1] += upper * part[4 * j + 1];
        sums[4 * j + 2] += lower * part[4 * j + 2], sums[4 * j + 3] += lower * part[4 * j + 3];
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) wgmma_linear(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap w_map, const u16* __restrict__ bias,
    u16* __restrict__ out, float4* parts, u32* tickets, int M, int N, int K
#if SCALES
    , const __grid_constant__ Scales scales
#endif
) {
    SHARED_MEMORY(1024);
    __shared__ __align__(8) u64 w_barriers[STAGES];  // W has arrived
    __shared__ __align__(8) u64 x_barriers[STAGES];  // x and block scales have arrived
    __shared__ __align__(8) u64 empty_barriers[STAGES];
    __shared__ u32 mine;
#if SCALES == 1
    __shared__ float token_scales[TOKENS], row_scales[ROWS];
#elif SCALES == 2
    __shared__ float x_scales[STAGES][CHUNKS][TOKENS], w_scales[STAGES][CHUNKS][2];
#endif

    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int items = (N + ROWS - 1) / ROWS * SPLITS, units = (K + BLOCK_K - 1) / BLOCK_K;
    const int first = (int)((u64)blockIdx.x * items / gridDim.x), last = (int)((u64)(blockIdx.x + 1) * items / gridDim.x);
    const u32 w_full = shared_address(w_barriers), x_full = shared_address(x_barriers), empty = shared_address(empty_barriers);
    const u32 x_ring = (shared_address(memory) + 1023) & ~1023u, w_ring = x_ring + STAGES * X_STAGE;
    auto begin_of = [&](int item) { return item % SPLITS * units / SPLITS; };
    auto end_of = [&](int item) { return (item % SPLITS + 1) * units / SPLITS; };
    auto next = [&](int& item, int& k) {
        if (++k == end_of(item)) k = begin_of(++item);
    };

    u64 once;  // the weight is read once: first to be evicted from L2
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    auto read_weights = [&](int stage, int item, int k) {
        expect(w_full + 8 * stage, W_STAGE);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
            load(w_ring + stage * W_STAGE + c * W_CHUNK, w_map, k * BLOCK_K + 64 * c, item / SPLITS * ROWS,
                 w_full + 8 * stage, once);
    };
    if (thread == 32 * W_READER) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(&w_map) : "memory");
        for (int s = 0; s < STAGES; s++)
            make_barrier(w_full + 8 * s, 1), make_barrier(x_full + 8 * s, SCALES == 2 ? 33 : 1),
                make_barrier(empty + 8 * s, CONSUMERS / 32);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        int item = first, k = begin_of(first);
        for (int s = 0; s < AHEAD && item < last; s++) read_weights(s, item, k), next(item, k);
    }
    __syncthreads();

    if (warp >= W_READER) {
        if (lane != 0 && warp <= X_READER) return;  // a reader is one thread; for scales, a whole warp
        int item = first, k = begin_of(first), stage = 0;
        u32 parity = 1;
        auto go_on = [&] {
            next(item, k);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        };
        if (warp == W_READER) {
            for (int unit = 0; item < last; unit++, go_on()) {
                if (unit < AHEAD) continue;  // read above
                if (unit >= STAGES) wait(empty + 8 * stage, parity);
                else wait(w_full + 8 * (unit - AHEAD), 0);
                read_weights(stage, item, k);
            }
            return;
        }
        u64 often;
        asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(often));
        asm volatile("prefetch.tensormap [%0];" ::"l"(&x_map) : "memory");
        asm volatile("griddepcontrol.wait;" ::: "memory");
        for (int unit = 0; item < last; unit++, go_on()) {
            if (unit >= STAGES) wait(empty + 8 * stage, parity);
            if (SCALES != 2 || warp == X_READER) {
                expect(x_full + 8 * stage, X_STAGE);
#pragma unroll
                for (int c = 0; c < CHUNKS; c++)
                    load(x_ring + stage * X_STAGE + c * X_CHUNK, x_map, k * BLOCK_K + 64 * c, 0, x_full + 8 * stage, often);
                continue;
            }
#if SCALES == 2
            const int last_k = (K + 63) / 64 - 1, last_row = (N + 127) / 128 - 1;  // past the ends: the last one, for zeros
            for (int e = lane; e < CHUNKS * TOKENS; e += 32) {
                const int c = e / TOKENS, token = e % TOKENS;
                if (token < M)
                    copy_number(&x_scales[stage][c][token],
                                scales.x + (long long)token * scales.x_token + min(k * CHUNKS + c, last_k) * scales.x_block);
            }
            if (lane < 2 * CHUNKS) {
                const int c = lane / 2, row = min(item / SPLITS * ROWS / 128 + lane % 2, last_row);
                copy_number(&w_scales[stage][c][lane % 2],
                            scales.w + (long long)row * scales.w_row + min(k * CHUNKS + c, last_k) * scales.w_block);
            }
            arrive_when_copied(x_full + 8 * stage);
#endif
        }
#if SCALES == 2
        asm volatile("cp.async.wait_all;" ::: "memory");
#endif
        return;
    }

    asm volatile("griddepcontrol.wait;" ::: "memory");
#if SCALES == 1
    const float token_scale = thread < M ? scales.x[(long long)thread * scales.x_token] : 0;
#endif
    // Sums 4j to 4j + 3 of a thread: tokens 16 * warp + lane / 4 and 8 below, rows 8j + lane % 4 * 2 and the one after.
#if SCALES == 1
    int tile_row = 0;
#endif
    auto store = [&](int token, int row, float low, float high) {  // `row` of W
        if (token >= M || row >= N) return;
        const bool both = row + 1 < N;
#if SCALES == 1
        low *= token_scales[token] * row_scales[row - tile_row], high *= token_scales[token] * row_scales[row - tile_row + 1];
#endif
        if (bias) low += widen(bias[row]), high += both ? widen(bias[row + 1]) : 0;
        const u32 bits = narrow(low, high);
        u16* at = out + (long long)token * N + row;
        if (N % 2 == 0) {
            *(u32*)at = bits;
        } else {
            at[0] = (u16)bits;
            if (both) at[1] = (u16)(bits >> 16);
        }
    };
    auto store_four = [&](int slot, int row, const float4& v) {
        const int token = slot / 32 * 16 + slot % 32 / 4;
        store(token, row + slot % 4 * 2, v.x, v.y);
        store(token + 8, row + slot % 4 * 2, v.z, v.w);
    };

    int stage = 0;
    u32 parity = 0;
    for (int item = first; item < last; item++) {
        float acc[4 * COLUMNS];
        const int begin = begin_of(item), end = end_of(item), row = item / SPLITS * ROWS;
#if !SCALES
        int used = -1;  // the stage that the previous multiplications read
#else
#pragma unroll
        for (int i = 0; i < 4 * COLUMNS; i++) acc[i] = 0;
        const int edge = (128 - row % 128) / 8;
#endif
#if SCALES == 1
        tile_row = row;
        const float row_scale = thread < ROWS && row + thread < N ? scales.w[(long long)(row + thread) * scales.w_row] : 0;
#endif
        for (int k = begin; k < end; k++) {
            wait(w_full + 8 * stage, parity);
            wait(x_full + 8 * stage, parity);
            const u64 a = descriptor(x_ring + stage * X_STAGE), b = descriptor(w_ring + stage * W_STAGE);
#if SCALES
            float part[2][4 * COLUMNS];  // of 128 columns: one is added while the other is computed
            auto multiply_chunk = [&](int c) {
                begin_multiply();
#pragma unroll
                for (int i = 0; i < 4; i++)  // 32 of K are 32 bytes
                    multiply(part[c % 2], a + (c * X_CHUNK + 32 * i) / 16, b + (c * W_CHUNK + 32 * i) / 16, i);
                commit_multiply();
            };
            multiply_chunk(0);
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                if (c + 1 < CHUNKS) multiply_chunk(c + 1);
                float by[4] = {};
#if SCALES == 2
                for (int i = 0; i < 4; i++)
                    by[i] = x_scales[stage][c][(16 * warp + lane / 4 + i / 2 * 8) % TOKENS] * w_scales[stage][c][i % 2];
#endif
                if (c + 1 < CHUNKS) finish_multiply<1>();
                else finish_multiply<0>();
                promote(acc, part[c % 2], by, edge);
            }
            if (lane == 0) arrive(empty + 8 * stage);
#else
            begin_multiply();
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
#pragma unroll
                for (int i = 0; i < 4; i++)  // 16 of K are 32 bytes
                    multiply(acc, a + (c * X_CHUNK + 32 * i) / 16, b + (c * W_CHUNK + 32 * i) / 16, k > begin || c + i);
            commit_multiply();
            finish_multiply<1>();
            if (used >= 0 && lane == 0) arrive(empty + 8 * used);
            used = stage;
#endif
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
#if SCALES == 1
        consumers_meet();  // all have stored the previous tile
        if (thread < ROWS) row_scales[thread] = row_scale;
        if (thread < TOKENS) token_scales[thread] = token_scale;
        consumers_meet();
#elif !SCALES
        finish_multiply<0>();
        if (lane == 0) arrive(empty + 8 * used);
#endif
#pragma unroll
        for (int i = 0; i < 4 * COLUMNS; i++) asm volatile("" : "+f"(acc[i])::"memory");  // keeps the compiler from reading them earlier

        if constexpr (SPLITS == 1) {
            if (thread < SLOTS) {
#pragma unroll
                for (int j = 0; j < COLUMNS; j++)
                    store_four(thread, row + 8 * j,
                               make_float4(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]));
            }
            continue;
        }
        const int split = item % SPLITS, tile = item / SPLITS;
        if (thread < SLOTS) {
            float4* to = parts + (long long)item * COLUMNS * SLOTS + thread;
#pragma unroll
            for (int j = 0; j < COLUMNS; j++)
                to[j * SLOTS] = make_float4(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]);
        }
        consumers_meet();
        if (thread == 0) mine = parts_to_add(tickets + tile, split, item + 1 == last ? TRIES : 0);
        consumers_meet();
        for (u32 left = mine; left; left &= left - 1) {
            const int part = __ffs(left) - 1, from = part * COLUMNS / SPLITS;
            const int count = ((part + 1) * COLUMNS / SPLITS - from) * SLOTS;
            const float4* at = parts + (long long)(tile * SPLITS * COLUMNS + from) * SLOTS;
#pragma unroll 1
            for (int e = thread; e < count; e += BATCH * CONSUMERS) {  // all reads of a batch are outstanding at once
                float4 v[BATCH][SPLITS];
#pragma unroll
                for (int i = 0; i < BATCH; i++)
#pragma unroll
                    for (int s = 0; s < SPLITS; s++)  // past the end: the last one again
                        v[i][s] = load_part(at + min(e + i * CONSUMERS, count - 1) + s * COLUMNS * SLOTS);
#pragma unroll
                for (int i = 0; i < BATCH; i++) {
                    const int one = e + i * CONSUMERS;
                    float4 sum = v[i][0];
#pragma unroll
                    for (int s = 1; s < SPLITS; s++)
                        sum.x += v[i][s].x, sum.y += v[i][s].y, sum.z += v[i][s].z, sum.w += v[i][s].w;
                    if (one < count) store_four(one % SLOTS, row + 8 * (from + one / SLOTS), sum);
                }
            }
        }
        // The ticket is reset for the next launch.
        if (thread == 0 && add_to(tickets + tile, 1 << 16) >> 16 == SPLITS - 1) tickets[tile] = 0;
    }
}
