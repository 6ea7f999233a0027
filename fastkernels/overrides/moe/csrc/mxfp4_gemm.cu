// Grouped matrix product of few rows per expert with 4-bit weights on Hopper: bf16 activations, float32 sums.
//
// A block multiplies 16 ROWS rows of an expert's matrix by up to TOKENS tokens. The weight is the left operand of the tensor
// cores (m16), and tokens are their n8: a lane turns 4-bit weights into bfloat16 once for all of the block's tokens.
// Lanes read 32 adjacent weights of two rows, which are one block of the format, AHEAD steps early.
// The order of the k axis is free if both operands share it: quad i of a step of 128 has weights 32 i to 32 i + 31.
// Activations are in shared memory in the same order, and scales are there, too. With PHASES, activations are there in
// parts, one after the other, so that more tokens fit.
//
// With RING, each lane copies its weights into its own places in shared memory, and waits for the step that it needs.
// Without, it loads them into registers: ptxas gives all of these loads one scoreboard, so a step often waits for the last
// of AHEAD. Shared memory is taken from L1, which holds the places of such loads until they arrive.
//
// The second product (not GLU) loads its first weights before the first one ends.
//
// FORM is the weights' format, and `more` what it has in addition to weights and scales:
//   0  MXFP4: a scale of 8 bits for 32 weights; more: the bias of each row, bfloat16
//   1  integers, packed as those of linear_int4, of which GROUP share a scale of 16 bits (HALF_SCALES: float16); more:
//      with HAS_ZERO their zero points, 8 bits
//   2  NVFP4: a scale in e4m3 for 16 weights; more: the factor of each row, float32
//
// Compile-time constants: K (a multiple of 32), TOKENS (8, 16, 24 or 32, fewer with a large K, 1 if pairs are not sorted),
// TOPK (pairs of one row of a), ROWS (tiles of 16 rows of a block), PARTS (warps that divide the steps of a tile among
// themselves), AHEAD (steps), RING, PHASES, RESIDENT (blocks per SM), GLU (1: rows 2 i and
// 2 i + 1 are a gate and an up value, and the result is their clamped SwiGLU; 2: rows i and n / 2 + i, and the result is
// that of silu_and_mul), WEIGHTED (rows of the result are multiplied by the pairs' weights), SORTED (pairs are sorted;
// otherwise block i has pair i alone). A matrix has 16 rows or more.

constexpr int WARPS = ROWS * PARTS, THREADS = 32 * WARPS;
constexpr int STEPS = (K + 127) / 128, TURNS = (STEPS + PARTS - 1) / PARTS, BLOCKS = K / 32;  // of the format, in a row
constexpr int SLOTS = AHEAD + 1;  // places of a step: one is loaded while another is multiplied
constexpr int TILES = (TOKENS + 7) / 8;
constexpr int PHASE = PHASES == 1 ? TURNS : (TURNS + PHASES * SLOTS - 1) / (PHASES * SLOTS) * SLOTS;  // turns of a phase
constexpr int CHUNK = PHASE * PARTS < STEPS ? PHASE * PARTS : STEPS;  // steps of activations in shared memory
constexpr int PITCH = 256 * CHUNK + 64;  // bytes of a token there: two adjacent tokens use different banks
constexpr int AT_ONCE = RING || TILES > 1 ? 2 : 1;  // tokens that a warp loads before it stores the first
constexpr bool INTEGERS = FORM == 1, HALVES = GLU == 2;
constexpr int OF_ROW = INTEGERS ? 2 * (K / GROUP) : FORM == 2 ? 2 * BLOCKS : BLOCKS;  // bytes of a row's scales
// Regions of the scales, and of zero points, of a block's rows: with HALVES those of gates and of up values.
constexpr int HEIGHT = HALVES ? 8 : 16, REGIONS = (HALVES ? 2 : 1) * (INTEGERS && HAS_ZERO ? 2 : 1);
constexpr int SCALES = (HEIGHT * ROWS * OF_ROW + 30) / 16;  // 16-byte words of a region
constexpr int TOGETHER = WARPS % 4 == 0 ? 4 : WARPS % 3 == 0 ? 3 : WARPS % 2 == 0 ? 2 : 1;  // warps that load a token
constexpr int EACH = ((CHUNK + 1) / 2 + TOGETHER - 1) / TOGETHER;  // 16-byte words of it for each of their lanes
static_assert(K % 32 == 0 && AHEAD >= 1 && (SORTED || TOKENS == 1), "what lanes hold");
static_assert(TOKENS <= 8 || (TOKENS % 8 == 0 && TOKENS <= 32), "whole tiles of at most a warp's lanes");
static_assert(!INTEGERS || (GROUP % 128 == 0 && K % GROUP == 0), "a step has one scale");

__device__ __forceinline__ void kernels_before_end() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void copy_16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

__device__ __forceinline__ void await_copies() {  // all groups but the last AHEAD
    asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD) : "memory");
}

__device__ __forceinline__ uint4 permuted(const uint4& v) {  // of eight numbers, i is next to i + 4
    return make_uint4(halves(v.x, v.z, 0x5410), halves(v.x, v.z, 0x7632), halves(v.y, v.w, 0x5410), halves(v.y, v.w, 0x7632));
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) mxfp4_gemm(
    const uint4* a, const uint4* weight, const unsigned char* scales, const void* more, u16* out, const float* weights,
    const int* pairs, const int* experts, const int* total, int n, int count, int n_pairs, float alpha, float limit) {
    SHARED_MEMORY(128);
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, group = lane / 4, quad = lane % 4;
    const int height = HALVES ? n / 2 : n;  // rows of a region in the matrix
    const int columns = (height + HEIGHT * ROWS - 1) / (HEIGHT * ROWS), block = blockIdx.x / columns, part = warp % PARTS;
    const int begin = min(blockIdx.x % columns * HEIGHT * ROWS, height - HEIGHT);
    // The next kernel starts behind this wait: pairs, experts and total, which were complete then, can be read before its own.
    if (GLU) kernels_before_end();
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    int mine = lane ? n_pairs : block;
    if (SORTED) mine = lane < TOKENS ? load_from_l2(pairs + block * TOKENS + lane) : n_pairs;
    const int expert = load_from_l2(experts + block), end = SORTED ? load_from_l2(total) : 0;
    if ((SORTED && block * TOKENS >= end) || expert < 0 || expert >= count) {
        if (!GLU) kernels_before_end();  // no kernel ends before those in front of it
        return;
    }

    // Rows of the matrix: both values of a pair in one lane. A tile that would end behind the matrix is the last 16 rows.
    const long long matrix = (long long)expert * n;
    auto region = [&](int i) {
        const long long first = matrix + begin + (HALVES && i % 2 ? height : 0);
        return i < (HALVES ? 2 : 1) ? scales + first * OF_ROW : (const unsigned char*)more + first * (OF_ROW / 2);
    };
    unsigned char* const scale_memory = memory + TOKENS * PITCH;
    const int row = min(begin + warp / PARTS * HEIGHT, height - HEIGHT) + (GLU == 1 ? 2 * group : group);
    const int other = GLU == 1 ? 1 : HALVES ? height : 8;  // from a lane's row to its other row in the same tile
    const uint4* from = weight + (matrix + row) * BLOCKS + 4 * part + quad;
    // Of this lane's two rows: scales and zero points of their first columns.
    auto place = [&](int r, bool zero) {
        const int i = (HALVES ? r : 0) + (zero ? REGIONS / 2 : 0), bytes = zero ? OF_ROW / 2 : OF_ROW;
        const int first = (int)((u64)region(i) & 15) + (row - begin + (HALVES ? 0 : r * other)) * bytes;
        return scale_memory + 16 * SCALES * i + first;
    };
    const unsigned char* const ring = scale_memory + 16 * SCALES * REGIONS + 1024 * SLOTS * warp + 16 * lane;
    const u32 ring_address = shared_address(ring);
    uint4 words[RING ? 1 : SLOTS][2] = {};
    int left = (BLOCKS - quad - 4 * part + 4 * PARTS - 1) / (4 * PARTS);  // turns of this lane
    auto fetch = [&](int slot, int turn) {
        if (turn < left) {  // otherwise other weights, which are multiplied by zeros
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint4* const at = from + i * other * BLOCKS + 4 * PARTS * turn;
                if (RING) copy_16(ring_address + 1024 * slot + 512 * i, at);
                else words[RING ? 0 : slot][i] = load_weights(at);
            }
        }
        if (RING) commit_copies();  // also an empty group, since groups are counted
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) fetch(i, i);
    uint4 scale_words[REGIONS][(SCALES + THREADS - 1) / THREADS];
    auto words_of = [&](int i) {
        const int bytes = i < (HALVES ? 2 : 1) ? OF_ROW : OF_ROW / 2;
        return (min(HEIGHT * ROWS, height - begin) * bytes + (int)((u64)region(i) & 15) + 15) / 16;
    };
#pragma unroll
    for (int r = 0; r < REGIONS; r++) {
        const uint4* scales_from = (const uint4*)((u64)region(r) & ~15ull);
#pragma unroll
        for (int i = 0; i * THREADS < SCALES; i++)
            if (i * THREADS + thread < words_of(r)) scale_words[r][i] = load_16(scales_from + i * THREADS + thread);
    }

    if (!GLU) kernels_before_end();

    // Activations of the pairs, which stand before padding. Of eight in 16 bytes, i is next to i + 4, as weights are after
    // decoding; with INTEGERS, i is next to i + 2, and those 16 columns later are in the same 16 bytes. Sums of padding are
    // not stored, so that it can be anything.
    const int filled = __popc(__ballot_sync(~0u, mine < n_pairs));
    const int at = warp % TOGETHER * 32 + lane;
    unsigned char* const target =
        memory + at / 16 * 256 + (INTEGERS ? at % 2 * 128 + at / 2 % 2 * 8 : at % 4 * 64) + at / 4 % 4 * 16;
    auto copy_activations = [&](int phase) {
        const uint4* const source = a + 16 * CHUNK * phase + at;
        const int end = K / 8 - 16 * CHUNK * phase;
#pragma unroll 1
        for (int first = warp / TOGETHER; first < filled; first += AT_ONCE * (WARPS / TOGETHER)) {
            uint4 v[AT_ONCE][EACH];  // all are on their way at once
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const int token = first + j * (WARPS / TOGETHER), pair = __shfl_sync(~0u, mine, min(token, 31));
#pragma unroll
                for (int i = 0; i < EACH; i++) {
                    v[j][i] = make_uint4(0, 0, 0, 0);
                    if ((AT_ONCE == 1 || token < filled) && at + 32 * TOGETHER * i < min(end, 16 * CHUNK))
                        v[j][i] = load_16(source + (long long)(pair / TOPK) * (K / 8) + 32 * TOGETHER * i);
                }
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const int token = first + j * (WARPS / TOGETHER);
                if (AT_ONCE > 1 && token >= filled) break;
#pragma unroll
                for (int i = 0; i < EACH; i++)
                    if (at + 32 * TOGETHER * i < 16 * CHUNK) {
                        unsigned char* const to = target + token * PITCH + 512 * TOGETHER * i;
                        const uint4 w = v[j][i];
                        if (INTEGERS) {
                            *(uint2*)to = make_uint2(halves(w.x, w.y, 0x5410), halves(w.x, w.y, 0x7632));
                            *(uint2*)(to + 64) = make_uint2(halves(w.z, w.w, 0x5410), halves(w.z, w.w, 0x7632));
                        } else {
                            *(uint4*)to = permuted(w);
                        }
                    }
            }
        }
    };
    copy_activations(0);
#pragma unroll
    for (int r = 0; r < REGIONS; r++)
#pragma unroll
        for (int i = 0; i * THREADS < SCALES; i++)
            if (i * THREADS + thread < words_of(r))
                ((uint4*)scale_memory)[r * SCALES + i * THREADS + thread] = scale_words[r][i];
    const float share = WEIGHTED && mine < n_pairs ? weights[mine] : 1;
    float add[2] = {}, factors[2] = {INTEGERS ? 1 : RESTORE, INTEGERS ? 1 : RESTORE};
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (FORM == 0) add[r] = widen(((const u16*)more)[matrix + row + r * other]);
        if (FORM == 2) factors[r] = ((const float*)more)[matrix + row + r * other] * REST_OF_TWO;
    }
    const unsigned char* const scale_of[2] = {place(0, false), place(1, false)};
    meet();

    float acc[TILES][4] = {};
    const unsigned char* const first_tokens = memory + min(group, TOKENS - 1) * PITCH + 16 * quad + 256 * part;
    // used: the tiles of 8 tokens that have pairs, a constant. NVRTC 12 has no generic lambdas in a kernel.
    auto multiply_all = [&](int used) {
        const unsigned char* tokens = first_tokens;
        int first = 0;  // block of the format in this lane's first slot
#pragma unroll 1
        for (int turn = 0; turn < TURNS; turn += SLOTS) {
            if (PHASES > 1 && turn && turn % PHASE == 0) {
                meet();  // the activations have been read
                copy_activations(turn / PHASE);
                tokens = first_tokens;
                meet();
            }
#pragma unroll
            for (int slot = 0; slot < SLOTS; slot++) {
                if (turn + slot >= TURNS) break;
                fetch((slot + AHEAD) % SLOTS, slot + AHEAD);
                if (RING) await_copies();
                else __syncwarp();  // otherwise the loads are moved behind the multiplications
                if ((turn + slot) * PARTS + part >= STEPS) break;  // the last turn of some parts
                const int at = min(first + 4 * PARTS * slot + 4 * part + quad, BLOCKS - 1);
                uint4 own[2];
                u32 by[2][2];
                float sums[TILES][4] = {};
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    own[r] = RING ? *(const uint4*)(ring + 1024 * slot + 512 * r) : words[RING ? 0 : slot][r];
                    if (FORM == 0) by[r][0] = factor(scale_of[r][at]);
                    if (FORM == 1) by[r][0] = (HAS_ZERO ? place(r, true)[at / (GROUP / 32)] : 8) * 0x00010001u | ONE;
                    if (FORM == 2) two_scales(by[r], ((const u16*)scale_of[r])[at]);
                }
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    uint4 b[TILES];
#pragma unroll
                    for (int t = 0; t < TILES; t++)
                        if (t < used) b[t] = *(const uint4*)(tokens + 8 * PITCH * t + 256 * PARTS * slot + 64 * i);
                    u32 v[2][4];
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const u32 word = word_of(own[r], i);
                        if (!INTEGERS) {
                            decode(v[r], word, by[r][FORM == 2 ? i / 2 : 0]);
                            continue;
                        }
                        // columns that are adjacent in this word, then those 16 columns later
                        v[r][0] = difference(word, 0x000F000F, by[r][0]);
                        v[r][1] = difference(word >> 8, 0x000F000F, by[r][0]);
                        v[r][2] = difference(word >> 4, 0x000F000F, by[r][0]);
                        v[r][3] = difference(word >> 12, 0x000F000F, by[r][0]);
                    }
#pragma unroll
                    for (int t = 0; t < TILES; t++) {
                        if (t >= used) continue;
                        float(&c)[4] = INTEGERS ? sums[t] : acc[t];
                        multiply(c, v[0][0], v[1][0], v[0][1], v[1][1], b[t].x, b[t].y);
                        multiply(c, v[0][2], v[1][2], v[0][3], v[1][3], b[t].z, b[t].w);
                    }
                }
                if (INTEGERS)
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const u16 bits = ((const u16*)scale_of[j / 2])[at / (GROUP / 32)];
#pragma unroll
                        for (int t = 0; t < TILES; t++)
                            if (t < used) acc[t][j] += (HALF_SCALES ? from_half(bits) : widen(bits)) * sums[t][j];
                    }
            }
            left -= SLOTS, first += 4 * PARTS * SLOTS, from += 4 * PARTS * SLOTS, tokens += 256 * PARTS * SLOTS;
            asm volatile("" : "+l"(from));  // otherwise every load's address is computed again
        }
    };
    if (TILES == 1 || filled <= 8) multiply_all(1);
    else if (TILES == 2 || filled <= 16) multiply_all(2);
    else multiply_all(TILES);

    if (PARTS > 1) {
        meet();  // the activations have been read
        float4* sums = (float4*)memory + warp / PARTS * (PARTS - 1) * TILES * 32 + lane;
        if (part)
#pragma unroll
            for (int t = 0; t < TILES; t++)
                sums[((part - 1) * TILES + t) * 32] = make_float4(acc[t][0], acc[t][1], acc[t][2], acc[t][3]);
        meet();
        if (part) return;
#pragma unroll
        for (int p = 0; p < PARTS - 1; p++)
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                const float4 more = sums[(p * TILES + t) * 32];
                acc[t][0] += more.x, acc[t][1] += more.y, acc[t][2] += more.z, acc[t][3] += more.w;
            }
    }

#pragma unroll
    for (int token = 0; token < 8 * TILES; token += 8) {
        const float(&sum)[4] = acc[token / 8];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int pair = __shfl_sync(~0u, mine, token + 2 * quad + i);
            const float by = __shfl_sync(~0u, share, token + 2 * quad + i);
            if (pair >= n_pairs) continue;
            const float y[2] = {sum[i] * factors[0] + add[0], sum[i + 2] * factors[1] + add[1]};
            if (HALVES) {
                out[(long long)pair * height + row] = (u16)narrow(y[0] * inverse(1 + power(-y[0])) * y[1], 0);
                continue;
            }
            if (GLU) {
                const float gate = y[0] > limit ? limit : y[0];  // not fminf, which drops a NaN
                const float up = y[1] > limit ? limit : y[1] < -limit ? -limit : y[1];
                out[(long long)pair * (n / 2) + row / 2] =
                    (u16)narrow(gate * inverse(1 + power(-alpha * gate)) * (up + 1), 0);
                continue;
            }
#pragma unroll
            for (int r = 0; r < 2; r++) out[(long long)pair * n + row + other * r] = (u16)narrow(y[r] * by, 0);
        }
    }
}
