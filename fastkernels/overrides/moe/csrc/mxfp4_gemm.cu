// Grouped matrix product of few rows per expert with MXFP4 weights on Hopper: bf16 activations, float32 sums.
//
// A block multiplies 16 ROWS rows of an expert's matrix by up to 8 TILES tokens. The weight is the left operand of the
// tensor cores (m16), and tokens are their n8. Lanes read 32 adjacent weights of two rows, which are one block of the
// format, from memory into registers, AHEAD steps early, and turn them into bfloat16 there: weights never pass through
// shared memory. The order of the k axis is free if both operands share it: quad i of a step of 128 has weights 32 i to
// 32 i + 31. Activations are in shared memory in the same order.
//
// Compile-time constants: K (a multiple of 32), TOPK (pairs of one row of a), ROWS (tiles of 16 rows of a block), PARTS
// (warps that divide the steps of a tile among themselves), TILES (of 8 tokens), AHEAD (steps), RESIDENT (blocks per SM),
// GLU (rows 2 i and 2 i + 1 are a gate and an up value, and the result is their clamped SwiGLU), WEIGHTED (rows of the
// result are multiplied by the pairs' weights), SORTED (pairs are sorted; otherwise block i has pair i alone).

constexpr int WARPS = ROWS / WIDE * PARTS, THREADS = 32 * WARPS;
constexpr int STEPS = (K + 127) / 128, TURNS = (STEPS + PARTS - 1) / PARTS, BLOCKS = K / 32;  // of the format, in a row
constexpr int PITCH = 256 * STEPS + 64;  // bytes of a token in shared memory: two adjacent tokens use different banks
constexpr int SLOTS = AHEAD + 1;  // steps in registers: none is copied, since one is loaded while another is multiplied
constexpr int SCALES = (16 * ROWS * BLOCKS + 30) / 16;  // 16-byte words with the scales of a block's rows
constexpr int TOGETHER = WARPS % 4 == 0 ? 4 : WARPS % 3 == 0 ? 3 : WARPS % 2 == 0 ? 2 : 1;  // warps that load a token
constexpr int EACH = ((STEPS + 1) / 2 + TOGETHER - 1) / TOGETHER;  // 16-byte words of it for each of their lanes
constexpr int BELOW = (GLU ? 1 : 8) * BLOCKS;  // 16-byte words from a lane's row to its other row in the same tile
static_assert(K % 32 == 0 && AHEAD >= 1 && TILES >= 1 && TILES <= 4 && ROWS % WIDE == 0, "what lanes hold");

__device__ __forceinline__ void meet() { asm volatile("bar.sync 0;" ::: "memory"); }

__device__ __forceinline__ void kernels_before_end() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ uint4 load_weights(const uint4* at) {  // as load_once, but it stays in front of a wait or __syncwarp
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}

__device__ __forceinline__ int load_from_l2(const int* at) {  // not an earlier value in L1, which only a wait discards
    int v;
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}

__device__ __forceinline__ void bring_to_l2(const uint4* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

__device__ __forceinline__ float power(float x) {  // e^x
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
    return y;
}

__device__ __forceinline__ float inverse(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The three low bits of e2m1 are a bfloat16 when they follow its sign by six zeros: 2^-126 times the value. The factor
// is 2^62 times the scale, so that it is a bfloat16 for scales up to 2^65 and infinite above; the rest is RESTORE.
constexpr float RESTORE = 18446744073709551616.f;  // 2^64

__device__ __forceinline__ u32 factor(u32 scale) { return (u32)min((int)scale + 62, 255) * 0x00800080u; }

// One multiplication is two shifts: of the sign and of the other bits. It is not executed by the unit for masks and
// shifts, which has the most to do.
__device__ __forceinline__ void decode(u32 (&to)[4], u32 word, u32 by) {  // weights i and i + 4 of eight
    const u32 rest = word >> 8;
    to[0] = product((word & 0x000F000F) * 0x1040 & 0x81C081C0, by);
    to[1] = product((word & 0x00F000F0) * 0x0104 & 0x81C081C0, by);
    to[2] = product((rest & 0x000F000F) * 0x1040 & 0x81C081C0, by);
    to[3] = product((rest & 0x00F000F0) * 0x0104 & 0x81C081C0, by);
}

__device__ __forceinline__ u32 word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) mxfp4_gemm(
    const uint4* a, const uint4* weight, const unsigned char* scales, const u16* bias, u16* out, const float* weights,
    const int* pairs, const int* experts, const int* total, int n, int count, int n_pairs, float alpha, float limit) {
    extern __shared__ __align__(128) unsigned char memory[];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, group = lane / 4, quad = lane % 4;
    const int columns = (n + 16 * ROWS - 1) / (16 * ROWS), block = blockIdx.x / columns, part = warp % PARTS;
    const int begin = min(blockIdx.x % columns * 16 * ROWS, n - 16);
    auto bring = [&](int from_expert, int column, int count) {  // 16-byte words of the block's rows, to L2
#pragma unroll
        for (int i = 0; i < count; i++)
#pragma unroll
            for (int m = 0; m < WIDE; m++) {
                const int at = column + (i * PARTS + part) * 16 + lane % 2 * 8;
                const int tile_row = min(begin + (warp / PARTS * WIDE + m) * 16, n - 16) + lane / 2;
                if (at < BLOCKS) bring_to_l2(weight + ((long long)from_expert * n + tile_row) * BLOCKS + at);
            }
    };
    if (SORTED && !EARLY && block < count) bring(block, 0, GUESS);  // mostly, block i has expert i
    // The next kernel starts behind this wait: pairs, experts and total, which were complete then, can be read before its own.
    if (!EARLY) kernels_before_end();
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    int mine = lane ? n_pairs : block;
    if (SORTED) mine = lane < 8 * TILES ? load_from_l2(pairs + block * 8 * TILES + lane) : n_pairs;
    const int expert = load_from_l2(experts + block), end = SORTED ? load_from_l2(total) : 0;
    if ((SORTED && block * 8 * TILES >= end) || expert < 0 || expert >= count) {
        if (EARLY) kernels_before_end();  // no kernel ends before those in front of it
        return;
    }

    // Rows of the matrix: both values of a pair in one lane. A tile that would end behind the matrix is the last 16 rows.
    int row[WIDE];
    const uint4* from[WIDE];
    const unsigned char* scale_of[WIDE];
    const long long matrix = (long long)expert * n;
    const uint4* scales_from = (const uint4*)((u64)(scales + (matrix + begin) * BLOCKS) & ~15ull);
    const int shift = (int)((u64)(scales + (matrix + begin) * BLOCKS) & 15);
    unsigned char* const scale_memory = memory + 8 * TILES * PITCH;
#pragma unroll
    for (int i = 0; i < WIDE; i++) {
        row[i] = min(begin + (warp / PARTS * WIDE + i) * 16, n - 16) + (GLU ? 2 * group : group);
        from[i] = weight + (matrix + row[i]) * BLOCKS + 4 * part + quad;
        scale_of[i] = scale_memory + shift + (row[i] - begin) * BLOCKS;
    }
    uint4 words[SLOTS][WIDE][2] = {};
    int left = (BLOCKS - quad - 4 * part + 4 * PARTS - 1) / (4 * PARTS);  // turns of this lane
    auto fetch = [&](int slot, int turn) {
        if (turn >= left) return;  // earlier weights, which are multiplied by zeros
#pragma unroll
        for (int i = 0; i < WIDE; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) words[slot][i][j] = load_weights(from[i] + j * BELOW + 4 * PARTS * turn);
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) fetch(i, i);
    bring(expert, AHEAD * PARTS * 4, NEXT);  // while activations are loaded
    uint4 scale_words[(SCALES + THREADS - 1) / THREADS];
    const int scale_count = (min(16 * ROWS, n - begin) * BLOCKS + shift + 15) / 16;
#pragma unroll
    for (int i = 0; i * THREADS < SCALES; i++)
        if (i * THREADS + thread < scale_count) scale_words[i] = load_16(scales_from + i * THREADS + thread);

    if (EARLY) kernels_before_end();

    // Activations of the pairs, which stand before padding. Of eight in 16 bytes, i is next to i + 4, as weights are after
    // decoding. Sums of padding are not stored, so that it can be anything.
    const int filled = __popc(__ballot_sync(~0u, mine < n_pairs));
    const int at = warp % TOGETHER * 32 + lane;
    const uint4* source = a + at;
    unsigned char* target = memory + at / 16 * 256 + at % 4 * 64 + at / 4 % 4 * 16;
#pragma unroll 1
    for (int token = warp / TOGETHER; token < filled; token += WARPS / TOGETHER * FILL) {
        uint4 v[FILL][EACH];  // all are on their way at once
#pragma unroll
        for (int f = 0; f < FILL; f++) {
            const int other = token + WARPS / TOGETHER * f, pair = __shfl_sync(~0u, mine, other % 32);
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                v[f][i] = make_uint4(0, 0, 0, 0);
                if (other < filled && at + 32 * TOGETHER * i < K / 8)
                    v[f][i] = load_16(source + (long long)(pair / TOPK) * (K / 8) + 32 * TOGETHER * i);
            }
        }
#pragma unroll
        for (int f = 0; f < FILL; f++) {
            const int other = token + WARPS / TOGETHER * f;
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const uint4 w = v[f][i];
                if (other < filled && at + 32 * TOGETHER * i < 16 * STEPS)
                    *(uint4*)(target + other * PITCH + 512 * TOGETHER * i) = make_uint4(
                        halves(w.x, w.z, 0x5410), halves(w.x, w.z, 0x7632), halves(w.y, w.w, 0x5410), halves(w.y, w.w, 0x7632));
            }
        }
    }
#pragma unroll
    for (int i = 0; i * THREADS < SCALES; i++)
        if (i * THREADS + thread < scale_count) ((uint4*)scale_memory)[i * THREADS + thread] = scale_words[i];
    const float share = WEIGHTED && mine < n_pairs ? weights[mine] : 1;
    u16 add[WIDE][2];
#pragma unroll
    for (int i = 0; i < WIDE; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) add[i][j] = bias[matrix + row[i] + j * (GLU ? 1 : 8)];
    meet();

    float acc[WIDE][TILES][4] = {};
    const unsigned char* tokens = memory + group * PITCH + 16 * quad + 256 * part;
    auto multiply_all = [&](int used) {  // tiles that have pairs: a constant
        int scale_at = 4 * part + quad;
#pragma unroll 1
        for (int turn = 0; turn < TURNS; turn += SLOTS) {
#pragma unroll
            for (int slot = 0; slot < SLOTS; slot++) {
                if (turn + slot >= TURNS) break;
                fetch((slot + AHEAD) % SLOTS, slot + AHEAD);
                __syncwarp();  // otherwise the loads are moved behind the multiplications
                if ((turn + slot) * PARTS + part >= STEPS) break;  // the last turn of some parts
                u32 by[WIDE][2];
                const int block_of_row = min(scale_at + 4 * PARTS * slot, BLOCKS - 1);
#pragma unroll
                for (int i = 0; i < WIDE; i++)
#pragma unroll
                    for (int j = 0; j < 2; j++) by[i][j] = factor(scale_of[i][block_of_row + j * BELOW]);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    uint4 b[TILES];
#pragma unroll
                    for (int t = 0; t < TILES; t++)
                        if (t < used) b[t] = *(const uint4*)(tokens + 8 * t * PITCH + 256 * PARTS * slot + 64 * i);
#pragma unroll
                    for (int m = 0; m < WIDE; m++) {
                        u32 v[2][4];
                        decode(v[0], word_of(words[slot][m][0], i), by[m][0]);
                        decode(v[1], word_of(words[slot][m][1], i), by[m][1]);
#pragma unroll
                        for (int t = 0; t < TILES; t++) {
                            if (t >= used) continue;
                            multiply(acc[m][t], v[0][0], v[1][0], v[0][1], v[1][1], b[t].x, b[t].y);
                            multiply(acc[m][t], v[0][2], v[1][2], v[0][3], v[1][3], b[t].z, b[t].w);
                        }
                    }
                }
            }
            left -= SLOTS, tokens += 256 * PARTS * SLOTS, scale_at += 4 * PARTS * SLOTS;
#pragma unroll
            for (int i = 0; i < WIDE; i++) {
                from[i] += 4 * PARTS * SLOTS;
                asm volatile("" : "+l"(from[i]));  // otherwise every load's address is computed again
            }
        }
    };
    if (TILES == 2 && filled <= 8) multiply_all(1);
    else multiply_all(TILES);

    if (PARTS > 1) {
        meet();  // the activations have been read
        float4* sums = (float4*)memory + (warp / PARTS * (PARTS - 1) * WIDE * TILES * 32) + lane;
        float4* const own = sums + (part - 1) * WIDE * TILES * 32;
#pragma unroll
        for (int e = 0; e < WIDE * TILES; e++) {
            const float(&c)[4] = acc[e / TILES][e % TILES];
            if (part) own[32 * e] = make_float4(c[0], c[1], c[2], c[3]);
        }
        meet();
        if (part) return;
#pragma unroll
        for (int e = 0; e < WIDE * TILES; e++)
            for (int p = 0; p < PARTS - 1; p++) {
                float(&c)[4] = acc[e / TILES][e % TILES];
                const float4 more = sums[(p * WIDE * TILES + e) * 32];
                c[0] += more.x, c[1] += more.y, c[2] += more.z, c[3] += more.w;
            }
    }

#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int token = 8 * t + 2 * quad + i, pair = __shfl_sync(~0u, mine, token);
            const float by = __shfl_sync(~0u, share, token);
            if (pair >= n_pairs) continue;
#pragma unroll
            for (int m = 0; m < WIDE; m++) {
                const float(&c)[4] = acc[m][t];
                const float y[2] = {c[i] * RESTORE + widen(add[m][0]), c[i + 2] * RESTORE + widen(add[m][1])};
                if (GLU) {
                    const float gate = y[0] > limit ? limit : y[0];  // not fminf, which drops a NaN
                    const float up = y[1] > limit ? limit : y[1] < -limit ? -limit : y[1];
                    out[(long long)pair * (n / 2) + row[m] / 2] =
                        (u16)narrow(gate * inverse(1 + power(-alpha * gate)) * (up + 1), 0);
                    continue;
                }
#pragma unroll
                for (int r = 0; r < 2; r++) out[(long long)pair * n + row[m] + 8 * r] = (u16)narrow(y[r] * by, 0);
            }
        }
}
