// Grouped matrix product of up to TOKENS rows per expert with 4-bit weights on Hopper: bf16 activations, float32 sums. A
// weight is decoded once for all of them, and weights of the next tiles are on their way without a pause.
//
// A tile is 16 ROWS rows of an expert's matrix with all of their columns. Each multiprocessor has one block, which works on
// an equal, contiguous share of all tiles. One warp copies tiles into a ring in shared memory. ROWS * PARTS warps
// multiply: PARTS of them divide the columns among themselves, TURNS steps of 128 each, and keep the activations of
// these columns in registers for as long as the expert is the same. The weight is the left operand of the tensor cores (m16),
// tokens are their n8. FINISHERS warps add up the parts of a tile and store it while the next one is multiplied.
//
// As in mxfp4_gemm.cu, the order of the k axis is free if both operands share it: quad i of a step has weights 32 i to 32 i + 31.
// The second product (not GLU) loads its first weights before the first one ends.
//
// FORM is the weights' format, and `more` what it has in addition to weights and scales:
//   0  MXFP4: a scale of 8 bits for 32 weights; more: the bias of each row, bfloat16
//   2  NVFP4: a scale in e4m3 for 16 weights; more: the factor of each row, float32
//
// Compile-time constants: K (a multiple of 32), TOKENS (8 to 32), TOPK (pairs of one row of a), ROWS, PARTS, STAGES (tiles of
// the ring), GLU (1: rows 2 i and 2 i + 1 are a gate and an up value, and the result is their clamped SwiGLU; 2: rows i and
// n / 2 + i, and the result is that of silu_and_mul), WEIGHTED (rows of the result are multiplied by the pairs' weights).
// A matrix has a multiple of 16 ROWS rows.

constexpr int WARPS = ROWS * PARTS, FINISHERS = 3, THREADS = 32 * (WARPS + 1 + FINISHERS);
constexpr int STEPS = (K + 127) / 128, TURNS = (STEPS + PARTS - 1) / PARTS, BLOCKS = K / 32;  // of the format, in a row
constexpr int TILES = TOKENS / 8, HEIGHT = 16 * ROWS;
constexpr bool HALVES = GLU == 2;
constexpr int OF_ROW = FORM == 2 ? 2 * BLOCKS : BLOCKS;  // bytes of a row's scales
constexpr int MORE = FORM == 0 ? 2 : 4;  // bytes of a row
// A tile in shared memory: weights, scales and more, each as in its matrix: lanes begin copies one after another, so that few
// copies are best. Rows of gates are in front of those of up values.
constexpr int SCALES_AT = HEIGHT * (K / 2), MORE_AT = SCALES_AT + HEIGHT * OF_ROW, STAGE = MORE_AT + HEIGHT * MORE;
constexpr int REGIONS = HALVES ? 2 : 1, REGION = HEIGHT / REGIONS;  // rows that are adjacent in the matrix
// Eight lanes read 64 bytes of two rows at once: of rows so far apart, if possible, that these use different banks.
constexpr int APART_BY_ONE = (GLU == 1 ? 2 : 1) * (K / 2) % 128;
constexpr int APART = APART_BY_ONE == 64 ? 1 : 2 * APART_BY_ONE % 128 == 64 ? 2 : 4 * APART_BY_ONE % 128 == 64 ? 4 : 1;
constexpr int SLOTS = 2, SUMS = WARPS * TILES * 512;  // of the tiles' sums
constexpr int ITEMS = (ROWS * TILES + FINISHERS - 1) / FINISHERS;  // results of 16 rows and 8 tokens that a warp finishes
static_assert(K % 32 == 0 && REGION * OF_ROW % 16 == 0 && TOKENS % 8 == 0 && TOKENS <= 32, "what copies and lanes hold");

__device__ __forceinline__ void copy_rows(u32 to, const void* from, int bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
        ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}

struct Turn {  // of a ring
    int at = 0;
    u32 parity = 0;

    __device__ __forceinline__ void next(int size) {
        if (++at == size) at = 0, parity ^= 1;
    }
};

// This block's tiles: the next one, the end of those with the same pairs, and the end of all.
struct Walk {
    int tile, until, end, columns, block, expert;
    bool changed;

    __device__ __forceinline__ Walk(int columns, int tiles) : until(0), columns(columns) {
        tile = (int)((long long)tiles * blockIdx.x / gridDim.x), end = (int)((long long)tiles * (blockIdx.x + 1) / gridDim.x);
    }

    // Whether there is a tile; `changed`: its pairs are others. Experts of other ranks have no result.
    __device__ __forceinline__ bool find(const int* experts, int count) {
        changed = false;
        while (tile < end) {
            if (tile < until) return true;
            block = tile / columns, until = min((block + 1) * columns, end), changed = true;
            expert = load_from_l2(experts + block);
            if (expert < 0 || expert >= count) tile = until;
        }
        return false;
    }
};

// The two rows of a group of lanes, i = 0 and 1, among 16 of a tile.
__device__ __forceinline__ int row_of_tile(int tall, int group, int i) {
    const int at = APART == 4 ? (group & 2) | (group & 1) << 2 | group >> 2
                 : APART == 2 ? (group & 4) | (group & 1) << 1 | (group >> 1 & 1) : group;
    return HALVES ? 8 * (ROWS * i + tall) + at : 16 * tall + (GLU ? 2 * at + i : at + 8 * i);
}

__device__ __forceinline__ int row_of_matrix(int column, int row, int n) {  // of a tile's row
    return REGION * column + row + (row >= REGION ? n / 2 - REGION : 0);
}

// The sums of a tile's 16 rows with 8 USED tokens over this warp's columns. read() says that
// the tile's shared memory is read, room() waits for that of the sums.
template <int USED, class F, class G>
__device__ __forceinline__ void multiply_tile(
    float4* sums, const uint4 (&b)[TURNS][4][TILES], const unsigned char* const (&weights)[2],
    const unsigned char* const (&scales)[2], int first, int quad, const F& read, const G& room) {
    uint4 words[TURNS][2];
    u32 bits[TURNS][2];
#pragma unroll
    for (int s = 0; s < TURNS; s++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int at = min(4 * (first + s) + quad, BLOCKS - 1);  // behind the last one: multiplied by zeros
            words[s][r] = *(const uint4*)(weights[r] + 16 * at);
            bits[s][r] = FORM == 2 ? ((const u16*)scales[r])[at] : scales[r][at];
        }
    read();
    float acc[USED][4] = {};
#pragma unroll
    for (int s = 0; s < TURNS; s++) {
        if (TURNS * PARTS > STEPS && first + s >= STEPS) break;
        u32 by[2][2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (FORM == 2) two_scales(by[r], bits[s][r]);
            else by[r][0] = factor(bits[s][r]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 v[2][4];
#pragma unroll
            for (int r = 0; r < 2; r++) decode(v[r], word_of(words[s][r], i), by[r][FORM == 2 ? i / 2 : 0]);
#pragma unroll
            for (int t = 0; t < USED; t++) {
                multiply(acc[t], v[0][0], v[1][0], v[0][1], v[1][1], b[s][i][t].x, b[s][i][t].y);
                multiply(acc[t], v[0][2], v[1][2], v[0][3], v[1][3], b[s][i][t].z, b[s][i][t].w);
            }
        }
    }
    room();
#pragma unroll
    for (int t = 0; t < USED; t++) sums[32 * t] = make_float4(acc[t][0], acc[t][1], acc[t][2], acc[t][3]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) mxfp4_stream(
    const uint4* a, const unsigned char* weight, const unsigned char* scales, const unsigned char* more, u16* out,
    const float* weights, const int* pairs, const int* experts, const int* total, int n, int count, int n_pairs, float alpha,
    float limit) {
    SHARED_MEMORY(128);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, group = lane / 4, quad = lane % 4;
    unsigned char* const sums = memory + STAGES * STAGE;
    const u32 barriers = shared_address(sums + SLOTS * SUMS);
    auto full = [&](int stage) { return barriers + 8 * stage; };
    auto empty = [&](int stage) { return barriers + 8 * (STAGES + stage); };
    auto summed = [&](int slot) { return barriers + 8 * (2 * STAGES + slot); };
    auto stored = [&](int slot) { return barriers + 8 * (2 * STAGES + SLOTS + slot); };
    if (thread == 0) {
        for (int i = 0; i < STAGES; i++) make_barrier(full(i), 1), make_barrier(empty(i), WARPS + FINISHERS);
        for (int i = 0; i < SLOTS; i++) make_barrier(summed(i), WARPS), make_barrier(stored(i), FINISHERS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    meet();
    // The next kernel starts behind this wait: pairs, experts and total, which were complete then, can be read before its own.
    if (GLU) kernels_before_end();
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const int columns = n / HEIGHT;
    Walk walk(columns, columns * (load_from_l2(total) / TOKENS));
    Turn ring, slot;

    if (warp == WARPS) {
        u64 once = 0;  // weights are read once: first to be evicted from L2
        asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
        ring.parity = 1;
        for (; walk.find(experts, count); walk.tile++, ring.next(STAGES)) {
            const int column = walk.tile - walk.block * columns;
            const long long matrix = (long long)walk.expert * n;
            const u32 to = shared_address(memory + STAGE * ring.at);
            wait(empty(ring.at), ring.parity);
            if (lane == 0) expect(full(ring.at), STAGE);
            __syncwarp();
            if (lane < REGIONS) {
                const int first = REGION * lane;
                const long long row = matrix + row_of_matrix(column, first, n);
                copy_rows(to + first * (K / 2), weight + row * (K / 2), REGION * (K / 2), full(ring.at), once);
                copy_rows(to + SCALES_AT + first * OF_ROW, scales + row * OF_ROW, REGION * OF_ROW, full(ring.at), once);
                copy_rows(to + MORE_AT + first * MORE, more + row * MORE, REGION * MORE, full(ring.at), once);
            }
        }
        return;
    }

    if (warp > WARPS) {
        int mine = n_pairs;
        float share = 1;
        for (; walk.find(experts, count); walk.tile++, ring.next(STAGES), slot.next(SLOTS)) {
            if (walk.changed) {
                mine = lane < TOKENS ? load_from_l2(pairs + walk.block * TOKENS + lane) : n_pairs;
                share = WEIGHTED && mine < n_pairs ? weights[mine] : 1;
            }
            const int used = (__popc(__ballot_sync(~0u, mine < n_pairs)) + 7) / 8;  // pairs stand before padding
            const int column = walk.tile - walk.block * columns;
            const unsigned char* const of_rows = memory + STAGE * ring.at + MORE_AT;  // read here: a global load takes longer
            wait(full(ring.at), ring.parity);
            wait(summed(slot.at), slot.parity);
#pragma unroll
            for (int j = 0; j < ITEMS; j++) {
                const int item = warp - WARPS - 1 + FINISHERS * j, t = item / ROWS;
                if (t >= used) break;
                float add[2] = {}, factors[2];
                int row[2];
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const int at = row_of_tile(item % ROWS, group, r);
                    row[r] = row_of_matrix(column, at, n);
                    if (FORM == 0) add[r] = widen(((const u16*)of_rows)[at]), factors[r] = RESTORE;
                    else factors[r] = ((const float*)of_rows)[at] * REST_OF_TWO;
                }
                const float4* from = (const float4*)(sums + SUMS * slot.at) + (item % ROWS * PARTS * TILES + t) * 32 + lane;
                float4 sum = from[0];
#pragma unroll
                for (int p = 1; p < PARTS; p++) {
                    const float4 v = from[p * TILES * 32];
                    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
                }
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int pair = __shfl_sync(~0u, mine, 8 * t + 2 * quad + i);
                    const float by = __shfl_sync(~0u, share, 8 * t + 2 * quad + i);
                    if (pair >= n_pairs) continue;
                    const float y[2] = {(i ? sum.y : sum.x) * factors[0] + add[0],
                                        (i ? sum.w : sum.z) * factors[1] + add[1]};
                    if (HALVES) {
                        out[(long long)pair * (n / 2) + row[0]] = (u16)narrow(y[0] * inverse(1 + power(-y[0])) * y[1], 0);
                        continue;
                    }
                    if (GLU) {
                        const float gate = y[0] > limit ? limit : y[0];  // not fminf, which drops a NaN
                        const float up = y[1] > limit ? limit : y[1] < -limit ? -limit : y[1];
                        out[(long long)pair * (n / 2) + row[0] / 2] =
                            (u16)narrow(gate * inverse(1 + power(-alpha * gate)) * (up + 1), 0);
                        continue;
                    }
#pragma unroll
                    for (int r = 0; r < 2; r++) out[(long long)pair * n + row[r]] = (u16)narrow(y[r] * by, 0);
                }
            }
            __syncwarp();
            if (lane == 0) arrive(stored(slot.at)), arrive(empty(ring.at));
        }
        return;
    }

    if (!GLU) kernels_before_end();  // also without a tile: no kernel ends before those in front of it
    const int first = warp % PARTS * TURNS;  // step
    const int mine[2] = {row_of_tile(warp / PARTS, group, 0), row_of_tile(warp / PARTS, group, 1)};
    uint4 b[TURNS][4][TILES];
    int used = 0;
    slot.parity = 1;
    for (; walk.find(experts, count); walk.tile++, ring.next(STAGES), slot.next(SLOTS)) {
        if (walk.changed) {
            int pair[TILES];
            used = 0;
#pragma unroll
            for (int t = 0; t < TILES; t++) pair[t] = load_from_l2(pairs + walk.block * TOKENS + 8 * t + group);
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                used += __ballot_sync(~0u, pair[t] < n_pairs) ? 1 : 0;
                const uint4* from = a + (long long)(pair[t] / TOPK) * (K / 8);
#pragma unroll
                for (int s = 0; s < TURNS; s++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int at = 4 * (4 * (first + s) + quad) + i;
                        b[s][i][t] = make_uint4(0, 0, 0, 0);
                        if (pair[t] < n_pairs && at < K / 8) b[s][i][t] = load_16(from + at);
                    }
            }
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int s = 0; s < TURNS; s++)
#pragma unroll
                    for (int i = 0; i < 4; i++) b[s][i][t] = permuted(b[s][i][t]);
        }
        const unsigned char* const stage = memory + STAGE * ring.at;
        const unsigned char* const of[2] = {stage + SCALES_AT + mine[0] * OF_ROW, stage + SCALES_AT + mine[1] * OF_ROW};
        const unsigned char* const from[2] = {stage + mine[0] * (K / 2), stage + mine[1] * (K / 2)};
        float4* const to = (float4*)(sums + SUMS * slot.at) + warp * TILES * 32 + lane;
        auto read = [&] {
            __syncwarp();
            if (lane == 0) arrive(empty(ring.at));
        };
        auto room = [&] { wait(stored(slot.at), slot.parity); };
        wait(full(ring.at), ring.parity);
        if (TILES > 1 && used == 1) multiply_tile<1>(to, b, from, of, first, quad, read, room);
        else if (TILES > 2 && used == 2) multiply_tile<(TILES > 2 ? 2 : 1)>(to, b, from, of, first, quad, read, room);
        else multiply_tile<TILES>(to, b, from, of, first, quad, read, room);
        __syncwarp();
        if (lane == 0) arrive(summed(slot.at));
    }
}
