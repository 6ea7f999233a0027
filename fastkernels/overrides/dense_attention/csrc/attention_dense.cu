// Attention of all queries to all keys on Hopper, without a mask: 16-bit heads, float32 sums.
//
// A block computes 64 * GROUPS queries of a head, 64 for each warpgroup. Queries, and keys and values in tiles of KEYS, are
// copied to shared memory (tensor maps, 128-byte swizzle) by one more warpgroup, or by the only one. While a warpgroup
// multiplies its weights by a tile's values, it computes the exponentials of the next tile's scores. With one warpgroup, a
// multiprocessor has three or four blocks, whose exponentials and products overlap, and multiprocessors have more equal work.
//
// With RAGGED, sequences are concatenated, a sequence's queries are its last tokens and see no later keys, and the last
// ROPE channels of a key are all heads' (mla_expanded). Values behind a sequence's last key may be NaN: a warp clears them.
//
// Compile-time constants: CHANNELS (of a head, a multiple of 8), ROPE and VALUE (channels of a value), RAGGED, GROUPS, KEYS
// (a multiple of 16), STAGES, BF16. multiply() for scores and weigh() for values precede this file.

struct __align__(128) TensorMap { u64 opaque[16]; };

// Pieces of 64 channels, the last one with zeros
constexpr int PIECES = (CHANNELS + ROPE + 63) / 64, V_PIECES = (VALUE + 63) / 64, QUERIES = 64 * GROUPS;
constexpr int ROW = 128, PIECE = ROW * KEYS, TILE = PIECES * PIECE, V_TILE = V_PIECES * PIECE;  // bytes
constexpr int SCORES = KEYS / 2;  // of a thread
constexpr bool ALONE = GROUPS == 1;
constexpr int THREADS = ALONE ? 128 : 128 * (GROUPS + 1);
#define LOWEST __int_as_float(0xff800000)
static_assert(KEYS % 16 == 0 && KEYS <= 256 && CHANNELS % 8 == 0 && CHANNELS + ROPE <= 256 && VALUE <= 256, "steps of a product");
static_assert(ROPE == 0 || (CHANNELS % 64 == 0 && ROPE % 64 == 0), "whole pieces");

__device__ __forceinline__ void load_rows(u32 to, const TensorMap& map, int channel, int row, int head, int image, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];"
                 ::"r"(to), "l"(&map), "r"(channel), "r"(row), "r"(head), "r"(image), "r"(barrier) : "memory");
}

__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The right operand whose k are rows of 128 bytes: groups of 8 rows are 1024 bytes apart, 64 columns a piece.
__device__ __forceinline__ u64 transposed(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)(PIECE >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// The compiler moves computations past a wait for products, but not past a branch that needs their result. With a trap
// there, it would not use the registers of setmaxnreg.
__device__ __forceinline__ void never() {
    if (RAGGED) asm volatile("st.shared.u32 [%0], %0;" ::"r"(0) : "memory");
    else asm volatile("trap;");
}

__device__ __forceinline__ void clear_16(u32 to) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
}

__device__ __forceinline__ void cleared() {  // by this warp
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
}

__device__ __forceinline__ float largest_of_row(float v) {  // four threads have a row
    v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
    return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}

__device__ __forceinline__ float sum_of_row(float v) {
    v += __shfl_xor_sync(~0u, v, 1);
    return v + __shfl_xor_sync(~0u, v, 2);
}

// scale: of scores, times log2(e). blocks: of a head. across: heads of one block of queries are neighbors.
extern "C" __global__ void __launch_bounds__(THREADS, ALONE ? 3 : 1) attention_dense(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
    u16* __restrict__ out, int n_q, int n_k, int heads, int shared_by, int blocks, int across, float scale
#if RAGGED
    , const __grid_constant__ TensorMap rope_map, const int* __restrict__ starts_q, const int* __restrict__ starts_k,
    const int* __restrict__ lens, int sequences
#endif
) {
    SHARED_MEMORY(1024);

    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const int thread = threadIdx.x, lane = thread % 32;
    const int warp = __shfl_sync(~0u, thread / 32, 0);  // the compiler sees that it is alike in a warp
    const u32 queries = (shared_address(memory) + 1023) & ~1023u, keys = queries + PIECES * ROW * QUERIES, values = keys + STAGES * TILE;
    const u32 asked = values + STAGES * V_TILE;  // barriers: of queries; of keys and values, there and read
    const u32 full_k = asked + 8, full_v = full_k + 8 * STAGES, empty_k = full_v + 8 * STAGES, empty_v = empty_k + 8 * STAGES;
    const int of_heads = gridDim.x / blocks;  // heads of all images
    const int which = across ? (int)blockIdx.x % of_heads : (int)blockIdx.x / blocks;
    const int image = which / heads, head = which % heads;
#if RAGGED
    // Late queries see the most keys: they go first. Blocks of sequence i begin at i + (queries before it) / QUERIES.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int number = blocks - 1 - (int)blockIdx.x % blocks;
    int sequence = 0;
    for (int most = sequences - 1; sequence < most;) {
        const int middle = (sequence + most + 1) / 2;
        if ((starts_q[middle] - starts_q[0]) / QUERIES + middle > number) most = middle - 1;
        else sequence = middle;
    }
    const int first_q = starts_q[sequence], first_k = starts_k[sequence];
    const int block = number - sequence - (first_q - starts_q[0]) / QUERIES;
    n_q = starts_q[sequence + 1] - first_q, n_k = lens[sequence];
    if (block * QUERIES >= n_q) return;
    const int before = n_k - n_q + block * QUERIES;  // keys before the block's first query
    const int seen = min(before + QUERIES, n_k);
    if (seen <= 0) {  // no keys
        for (int i = thread; i < min(QUERIES, n_q - block * QUERIES) * (VALUE / 8); i += THREADS) {
            const long long row = first_q + block * QUERIES + i / (VALUE / 8);
            *(uint4*)(out + (row * heads + head) * VALUE + i % (VALUE / 8) * 8) = make_uint4(0, 0, 0, 0);
        }
        return;
    }
#else
    const int block = across ? (int)blockIdx.x / of_heads : (int)blockIdx.x % blocks;
    const int first_q = 0, first_k = 0, before = 0, seen = n_k;
#endif
    const int tiles = (seen + KEYS - 1) / KEYS;
    const int groups = min(GROUPS, (n_q - block * QUERIES + 63) / 64);  // that have queries

    if (thread == 0) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(&q_map) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&k_map) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&v_map) : "memory");
        make_barrier(asked, 1);
        for (int s = 0; s < STAGES; s++) {
            make_barrier(full_k + 8 * s, 1), make_barrier(full_v + 8 * s, 1);
            make_barrier(empty_k + 8 * s, 4 * groups), make_barrier(empty_v + 8 * s, 4 * groups);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    asm volatile("griddepcontrol.wait;" ::: "memory");

    const int kv_head = head / shared_by;
    auto load_k = [&](int tile, int stage) {
        expect(full_k + 8 * stage, TILE);
        for (int i = 0; i < (CHANNELS + 63) / 64; i++)
            load_rows(keys + stage * TILE + i * PIECE, k_map, 64 * i, first_k + tile * KEYS, kv_head, image, full_k + 8 * stage);
#if RAGGED
        for (int i = CHANNELS / 64; i < PIECES; i++)
            load_rows(keys + stage * TILE + i * PIECE, rope_map, 64 * i - CHANNELS, first_k + tile * KEYS, 0, 0, full_k + 8 * stage);
#endif
    };
    auto load_v = [&](int tile, int stage) {
        expect(full_v + 8 * stage, V_TILE);
        for (int i = 0; i < V_PIECES; i++)
            load_rows(values + stage * V_TILE + i * PIECE, v_map, 64 * i, first_k + tile * KEYS, kv_head, image, full_v + 8 * stage);
    };
    if (thread == THREADS - 128) {  // before anything has been read
        expect(asked, PIECES * ROW * QUERIES);
        for (int i = 0; i < PIECES; i++)
            load_rows(queries + i * ROW * QUERIES, q_map, 64 * i, first_q + block * QUERIES, head, image, asked);
        for (int tile = 0; tile < min(STAGES, tiles); tile++) load_k(tile, tile), load_v(tile, tile);
    }
    if (!ALONE && warp >= 4 * GROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(GROUPS == 2 ? 40 : 32));
        if (thread == THREADS - 128) {
            u32 parity = 0;
            for (int tile = STAGES, stage = 0; tile < tiles; tile++) {
                wait(empty_k + 8 * stage, parity);
                load_k(tile, stage);
                wait(empty_v + 8 * stage, parity);
                load_v(tile, stage);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
        return;
    }
    if (!ALONE) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GROUPS == 2 ? 232 : 160));

    const int group = warp / 4, quad = lane % 4;
    if (group >= groups) return;
    float scores[SCORES], sums[VALUE / 2] = {};
    float top[2] = {LOWEST, LOWEST}, total[2] = {}, decay[2];
    u32 weights[KEYS / 16][4];
    const u64 own = descriptor(queries + 64 * ROW * group);
    auto score = [&](int stage, u32 parity) {
        wait(full_k + 8 * stage, parity);
        const u64 b = descriptor(keys + stage * TILE);
        begin_multiply();
#pragma unroll
        for (int step = 0; step < (CHANNELS + ROPE + 15) / 16; step++)
            multiply(scores, own + (step / 4 * ROW * QUERIES + step % 4 * 32) / 16, b + (step / 4 * PIECE + step % 4 * 32) / 16, step > 0);
        commit_multiply();
    };
    auto weigh_values = [&](int stage, u32 parity, int tile) {
        wait(full_v + 8 * stage, parity);
        const int left = n_k - tile * KEYS;
        if (RAGGED && left < KEYS) {
            for (int i = max(left, 0) * 8 + lane; i < 8 * KEYS; i += 32)
                for (int piece = 0; piece < V_PIECES; piece++) clear_16(values + stage * V_TILE + piece * PIECE + 16 * i);
            cleared();
        }
        const u64 b = transposed(values + stage * V_TILE);
        begin_multiply();
#pragma unroll
        for (int step = 0; step < KEYS / 16; step++) weigh(sums, weights[step], b + step * 16 * ROW / 16);
        commit_multiply();
    };
    const int row_of_thread = warp * 16 + lane / 4;  // and the eighth after it
    auto use_scores = [&](int tile) {  // exponentials take their place
        int left[2];  // keys that each row sees
#pragma unroll
        for (int r = 0; r < 2; r++) left[r] = (RAGGED ? min(before + row_of_thread + 8 * r + 1, n_k) : n_k) - tile * KEYS;
        if ((RAGGED ? before + 64 * group + 1 - tile * KEYS : left[0]) < KEYS)
#pragma unroll
            for (int i = 0; i < SCORES; i++)
                if (i / 4 * 8 + 2 * quad + i % 2 >= left[i / 2 % 2]) scores[i] = LOWEST;
#pragma unroll
        for (int r = 0; r < 2; r++) {  // rows of this thread: every other pair
            float most = top[r], other = LOWEST, sum = 0, rest = 0;  // of every other group of 8 keys: shorter chains
#pragma unroll
            for (int i = 2 * r; i < SCORES; i += 8) {
                most = fmaxf(most, fmaxf(scores[i], scores[i + 1]));
                other = fmaxf(other, fmaxf(scores[i + 4], scores[i + 5]));
            }
            most = largest_of_row(fmaxf(most, other));
            const float finite = RAGGED && most == LOWEST ? 0 : most;  // a row without keys
            decay[r] = power_of_2((top[r] - finite) * scale);
            top[r] = most;
            const float base = finite * scale;
#pragma unroll
            for (int i = 2 * r; i < SCORES; i += 8) {
#pragma unroll
                for (int j = i; j < i + 8; j += j % 2 ? 3 : 1) scores[j] = power_of_2(fmaf(scores[j], scale, -base));
                sum += scores[i] + scores[i + 1], rest += scores[i + 4] + scores[i + 5];
            }
            total[r] = fmaf(total[r], decay[r], sum + rest);
        }
    };
    auto keep_weights = [&] {
#pragma unroll
        for (int i = 0; i < SCORES / 2; i++) weights[i / 4][i % 4] = narrow(scores[2 * i], scores[2 * i + 1]);
    };
    auto release_k = [&](int stage) {  // this warp has read a tile's keys
        if (lane == 0) arrive(empty_k + 8 * stage);
    };
    auto release_v = [&](int stage) {
        if (lane == 0) arrive(empty_v + 8 * stage);
    };
    auto refill = [&](int tile, int stage, u32 parity) {  // the place of a tile that all warps will have read
        if (!ALONE || warp != 0 || tile + STAGES >= tiles) return;
        wait(empty_k + 8 * stage, parity);
        wait(empty_v + 8 * stage, parity);
        if (lane == 0) load_k(tile + STAGES, stage), load_v(tile + STAGES, stage);
    };
    auto hold = [&] {  // the compiler moves no computation of scores past it
#pragma unroll
        for (int i = 0; i < SCORES; i++) asm volatile("" : "+f"(scores[i])::"memory");
    };

    wait(asked, 0);
    score(0, 0);
    finish_multiply<0>();
    hold();
    release_k(0);
    use_scores(0);
    keep_weights();
    int stage = 0;
    u32 parity = 0;
    for (int tile = 1; tile < tiles; tile++) {
        const int next = stage + 1 == STAGES ? 0 : stage + 1;
        const u32 next_parity = next == 0 ? parity ^ 1 : parity;
        score(next, next_parity);
        weigh_values(stage, parity, tile - 1);
        finish_multiply<1>();
        hold();
        release_k(next);
        use_scores(tile);
        if (__ballot_sync(~0u, total[0] + total[1] < 0)) never();
        finish_multiply<0>();
#pragma unroll
        for (int i = 0; i < VALUE / 2; i++) asm volatile("" : "+f"(sums[i])::"memory");
        release_v(stage);
        refill(tile - 1, stage, parity);
#pragma unroll
        for (int i = 0; i < VALUE / 2; i++) sums[i] *= decay[i / 2 % 2];
        keep_weights();
        stage = next, parity = next_parity;
    }
    weigh_values(stage, parity, tiles - 1);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        total[r] = sum_of_row(total[r]);
        total[r] = RAGGED && total[r] == 0 ? 0 : 1 / total[r];
    }
    finish_multiply<0>();
#pragma unroll
    for (int i = 0; i < VALUE / 2; i++) asm volatile("" : "+f"(sums[i])::"memory");
    const int row = block * QUERIES + row_of_thread;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (row + 8 * r >= n_q) continue;
        u16* const to = out + (((long long)image * n_q + first_q + row + 8 * r) * heads + head) * VALUE + 2 * quad;
#pragma unroll
        for (int i = 0; i < VALUE / 8; i++)
            *(u32*)(to + 8 * i) = narrow(sums[4 * i + 2 * r] * total[r], sums[4 * i + 2 * r + 1] * total[r]);
    }
}
