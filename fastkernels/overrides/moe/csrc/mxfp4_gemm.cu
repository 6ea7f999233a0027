// Grouped matrix product of few rows per expert with MXFP4 weights on Hopper: bf16 activations, float32 sums.
//
// A block multiplies 16 ROWS rows of an expert's matrix by up to 8 tokens. The weight is the left operand of the tensor
// cores (m16), and tokens are their n8. Lanes read 32 adjacent weights of two rows, which are one block of the format, from
// memory into registers, AHEAD steps early, and turn them into bfloat16 there: weights never pass through shared memory.
// The order of the k axis is free if both operands share it: quad i of a step of 128 has weights 32 i to 32 i + 31.
// Activations are in shared memory in the same order, and scales are there, too. Shared memory is taken from L1, which
// holds the places of loads until they arrive: with too little L1, fewer weights are on their way.
//
// The second product (not GLU) loads its first weights before the first one ends.
//
// Compile-time constants: K (a multiple of 32), TOPK (pairs of one row of a), ROWS (tiles of 16 rows of a block), PARTS
// (warps that divide the steps of a tile among themselves), AHEAD (steps), RESIDENT (blocks per SM), GLU (rows 2 i and
// 2 i + 1 are a gate and an up value, and the result is their clamped SwiGLU), WEIGHTED (rows of the result are multiplied
// by the pairs' weights), SORTED (pairs are sorted; otherwise block i has pair i alone). A matrix has 16 rows or more.

constexpr int WARPS = ROWS * PARTS, THREADS = 32 * WARPS;
constexpr int STEPS = (K + 127) / 128, TURNS = (STEPS + PARTS - 1) / PARTS, BLOCKS = K / 32;  // of the format, in a row
constexpr int SLOTS = AHEAD + 1;  // steps in registers: none is copied, since one is loaded while another is multiplied
constexpr int PITCH = 256 * STEPS + 64;  // bytes of a token in shared memory: two adjacent tokens use different banks
constexpr int SCALES = (16 * ROWS * BLOCKS + 30) / 16;  // 16-byte words with the scales of a block's rows
constexpr int TOGETHER = WARPS % 4 == 0 ? 4 : WARPS % 3 == 0 ? 3 : WARPS % 2 == 0 ? 2 : 1;  // warps that load a token
constexpr int EACH = ((STEPS + 1) / 2 + TOGETHER - 1) / TOGETHER;  // 16-byte words of it for each of their lanes
constexpr int BELOW = (GLU ? 1 : 8) * BLOCKS;  // 16-byte words from a lane's row to its other row in the same tile
static_assert(K % 32 == 0 && AHEAD >= 1, "what lanes hold");

__device__ __forceinline__ void kernels_before_end() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ uint4 permuted(const uint4& v) {  // of eight numbers, i is next to i + 4
    return make_uint4(halves(v.x, v.z, 0x5410), halves(v.x, v.z, 0x7632), halves(v.y, v.w, 0x5410), halves(v.y, v.w, 0x7632));
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) mxfp4_gemm(
    const uint4* a, const uint4* weight, const unsigned char* scales, const u16* bias, u16* out, const float* weights,
    const int* pairs, const int* experts, const int* total, int n, int count, int n_pairs, float alpha, float limit) {
    extern __shared__ __align__(128) unsigned char memory[];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, group = lane / 4, quad = lane % 4;
    const int columns = (n + 16 * ROWS - 1) / (16 * ROWS), block = blockIdx.x / columns, part = warp % PARTS;
    const int begin = min(blockIdx.x % columns * 16 * ROWS, n - 16);
    // The next kernel starts behind this wait: pairs, experts and total, which were complete then, can be read before its own.
    if (GLU) kernels_before_end();
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    int mine = lane ? n_pairs : block;
    if (SORTED) mine = lane < 8 ? load_from_l2(pairs + block * 8 + lane) : n_pairs;
    const int expert = load_from_l2(experts + block), end = SORTED ? load_from_l2(total) : 0;
    if ((SORTED && block * 8 >= end) || expert < 0 || expert >= count) {
        if (!GLU) kernels_before_end();  // no kernel ends before those in front of it
        return;
    }

    // Rows of the matrix: both values of a pair in one lane. A tile that would end behind the matrix is the last 16 rows.
    const long long matrix = (long long)expert * n;
    const uint4* scales_from = (const uint4*)((u64)(scales + (matrix + begin) * BLOCKS) & ~15ull);
    const int shift = (int)((u64)(scales + (matrix + begin) * BLOCKS) & 15);
    unsigned char* const scale_memory = memory + 8 * PITCH;
    const int row = min(begin + warp / PARTS * 16, n - 16) + (GLU ? 2 * group : group);
    const uint4* from = weight + (matrix + row) * BLOCKS + 4 * part + quad;
    const unsigned char* scale_of = scale_memory + shift + (row - begin) * BLOCKS + 4 * part + quad;
    uint4 words[SLOTS][2] = {};
    int left = (BLOCKS - quad - 4 * part + 4 * PARTS - 1) / (4 * PARTS);  // turns of this lane
    auto fetch = [&](int slot, int turn) {
        if (turn >= left) return;  // earlier weights, which are multiplied by zeros
#pragma unroll
        for (int i = 0; i < 2; i++) words[slot][i] = load_weights(from + i * BELOW + 4 * PARTS * turn);
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) fetch(i, i);
    uint4 scale_words[(SCALES + THREADS - 1) / THREADS];
    const int scale_count = (min(16 * ROWS, n - begin) * BLOCKS + shift + 15) / 16;
#pragma unroll
    for (int i = 0; i * THREADS < SCALES; i++)
        if (i * THREADS + thread < scale_count) scale_words[i] = load_16(scales_from + i * THREADS + thread);

    if (!GLU) kernels_before_end();

    // Activations of the pairs, which stand before padding. Of eight in 16 bytes, i is next to i + 4, as weights are after
    // decoding. Sums of padding are not stored, so that it can be anything.
    const int filled = __popc(__ballot_sync(~0u, mine < n_pairs));
    const int at = warp % TOGETHER * 32 + lane;
    const uint4* source = a + at;
    unsigned char* target = memory + at / 16 * 256 + at % 4 * 64 + at / 4 % 4 * 16;
#pragma unroll 1
    for (int token = warp / TOGETHER; token < filled; token += WARPS / TOGETHER) {
        uint4 v[EACH];  // all are on their way at once
        const int pair = __shfl_sync(~0u, mine, token);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            v[i] = make_uint4(0, 0, 0, 0);
            if (at + 32 * TOGETHER * i < K / 8)
                v[i] = load_16(source + (long long)(pair / TOPK) * (K / 8) + 32 * TOGETHER * i);
        }
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (at + 32 * TOGETHER * i < 16 * STEPS)
                *(uint4*)(target + token * PITCH + 512 * TOGETHER * i) = permuted(v[i]);
    }
#pragma unroll
    for (int i = 0; i * THREADS < SCALES; i++)
        if (i * THREADS + thread < scale_count) ((uint4*)scale_memory)[i * THREADS + thread] = scale_words[i];
    const float share = WEIGHTED && mine < n_pairs ? weights[mine] : 1;
    const u16 add[2] = {bias[matrix + row], bias[matrix + row + (GLU ? 1 : 8)]};
    meet();

    float acc[4] = {};
    const unsigned char* tokens = memory + group * PITCH + 16 * quad + 256 * part;
    int first = 0;  // block of the format in this lane's first slot
#pragma unroll 1
    for (int turn = 0; turn < TURNS; turn += SLOTS) {
#pragma unroll
        for (int slot = 0; slot < SLOTS; slot++) {
            if (turn + slot >= TURNS) break;
            fetch((slot + AHEAD) % SLOTS, slot + AHEAD);
            __syncwarp();  // otherwise the loads are moved behind the multiplications
            if ((turn + slot) * PARTS + part >= STEPS) break;  // the last turn of some parts
            const int at = min(first + 4 * PARTS * slot, BLOCKS - 1 - 4 * part - quad);
            const u32 by[2] = {factor(scale_of[at]), factor(scale_of[at + BELOW])};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint4 b = *(const uint4*)(tokens + 256 * PARTS * slot + 64 * i);
                u32 v[2][4];
                decode(v[0], word_of(words[slot][0], i), by[0]), decode(v[1], word_of(words[slot][1], i), by[1]);
                multiply(acc, v[0][0], v[1][0], v[0][1], v[1][1], b.x, b.y);
                multiply(acc, v[0][2], v[1][2], v[0][3], v[1][3], b.z, b.w);
            }
        }
        left -= SLOTS, first += 4 * PARTS * SLOTS, from += 4 * PARTS * SLOTS, tokens += 256 * PARTS * SLOTS;
        asm volatile("" : "+l"(from));  // otherwise every load's address is computed again
    }

    if (PARTS > 1) {
        meet();  // the activations have been read
        float4* sums = (float4*)memory + warp / PARTS * (PARTS - 1) * 32 + lane;
        if (part) sums[(part - 1) * 32] = make_float4(acc[0], acc[1], acc[2], acc[3]);
        meet();
        if (part) return;
#pragma unroll
        for (int p = 0; p < PARTS - 1; p++) {
            const float4 more = sums[p * 32];
            acc[0] += more.x, acc[1] += more.y, acc[2] += more.z, acc[3] += more.w;
        }
    }

#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int pair = __shfl_sync(~0u, mine, 2 * quad + i);
        const float by = __shfl_sync(~0u, share, 2 * quad + i);
        if (pair >= n_pairs) continue;
        const float y[2] = {acc[i] * RESTORE + widen(add[0]), acc[i + 2] * RESTORE + widen(add[1])};
        if (GLU) {
            const float gate = y[0] > limit ? limit : y[0];  // not fminf, which drops a NaN
            const float up = y[1] > limit ? limit : y[1] < -limit ? -limit : y[1];
            out[(long long)pair * (n / 2) + row / 2] =
                (u16)narrow(gate * inverse(1 + power(-alpha * gate)) * (up + 1), 0);
            continue;
        }
#pragma unroll
        for (int r = 0; r < 2; r++) out[(long long)pair * n + row + 8 * r] = (u16)narrow(y[r] * by, 0);
    }
}
