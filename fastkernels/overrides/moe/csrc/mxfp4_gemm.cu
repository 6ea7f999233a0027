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

constexpr int THREADS = 32 * ROWS * PARTS, STEPS = (K + 127) / 128, TURNS = (STEPS + PARTS - 1) / PARTS;
constexpr int PITCH = 256 * STEPS + 64;  // bytes of a token in shared memory: two adjacent tokens use different banks
constexpr int WARPS = THREADS / 32, TOGETHER = WARPS % 4 == 0 ? 4 : WARPS % 3 == 0 ? 3 : WARPS % 2 == 0 ? 2 : 1;
constexpr int EACH = ((STEPS + 1) / 2 + TOGETHER - 1) / TOGETHER;  // TOGETHER warps load a token, a lane of each these 16 bytes
static_assert(K % 32 == 0 && AHEAD >= 1 && TILES >= 1 && TILES <= 4, "what lanes hold");

constexpr int SLOTS = AHEAD + 1;  // steps in registers: none is copied, since one is loaded while another is multiplied

__device__ __forceinline__ void meet() { asm volatile("bar.sync 0;" ::: "memory"); }

__device__ __forceinline__ void kernels_before_end() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ u32 load_scale(const unsigned char* at) {
    u32 v;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}

__device__ __forceinline__ uint4 load_early(const uint4* at) {  // as load_once, but not moved behind a wait
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}

__device__ __forceinline__ float power(float x) {  // e^x
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
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
    // The next kernel starts behind this wait: pairs, experts and total, which were complete then, can be read before its own.
    if (!EARLY) kernels_before_end();
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const int mine = lane >= (SORTED ? 8 * TILES : 1) ? n_pairs : SORTED ? pairs[block * 8 * TILES + lane] : block;
    const int expert = experts[block];
    if ((SORTED && block * 8 * TILES >= *total) || expert < 0 || expert >= count) {
        if (EARLY) kernels_before_end();  // no kernel ends before those in front of it
        return;
    }

    // Rows of the matrix: both values of a pair in one lane.
    const int first = blockIdx.x % columns * 16 * ROWS + warp / PARTS * 16;
    const int row[2] = {first + (GLU ? 2 * group : group), first + (GLU ? 2 * group + 1 : group + 8)};
    const uint4* from[2];
    const unsigned char* scale_of[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const long long at = (long long)expert * n + min(row[i], n - 1);
        from[i] = weight + at * (K / 32) + 4 * part + quad, scale_of[i] = scales + at * (K / 32) + 4 * part + quad;
    }
    uint4 words[SLOTS][2] = {};
    u32 scale[SLOTS][2];
    int left = (K / 32 - quad - 4 * part + 4 * PARTS - 1) / (4 * PARTS);  // turns of this lane
    auto fetch = [&](int slot, int turn, bool early = false) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            scale[slot][i] = 0;
            if (turn >= left) continue;  // earlier weights, which are multiplied by zeros
            words[slot][i] = load_early(from[i] + 4 * PARTS * turn);
            scale[slot][i] = load_scale(scale_of[i] + 4 * PARTS * turn);
        }
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) fetch(i, i, EARLY);

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
    const float share = WEIGHTED && mine < n_pairs ? weights[mine] : 1;
    u16 add[2];
#pragma unroll
    for (int i = 0; i < 2; i++) add[i] = bias[(long long)expert * n + min(row[i], n - 1)];
    meet();

    float acc[TILES][4] = {};
    const unsigned char* tokens = memory + group * PITCH + 16 * quad + 256 * part;
    auto multiply_all = [&](int used) {  // tiles that have pairs: a constant
#pragma unroll 1
        for (int turn = 0; turn < TURNS; turn += SLOTS) {
#pragma unroll
            for (int slot = 0; slot < SLOTS; slot++) {
                if (turn + slot >= TURNS) break;
                fetch((slot + AHEAD) % SLOTS, slot + AHEAD);
                __syncwarp();
                if ((turn + slot) * PARTS + part >= STEPS) break;  // the last turn of some parts
                const u32 by[2] = {factor(scale[slot][0]), factor(scale[slot][1])};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    u32 v[2][4];
                    decode(v[0], word_of(words[slot][0], i), by[0]), decode(v[1], word_of(words[slot][1], i), by[1]);
#pragma unroll
                    for (int t = 0; t < TILES; t++) {
                        if (t >= used) continue;
                        const uint4 b = *(const uint4*)(tokens + 8 * t * PITCH + 256 * PARTS * slot + 64 * i);
                        multiply(acc[t], v[0][0], v[1][0], v[0][1], v[1][1], b.x, b.y);
                        multiply(acc[t], v[0][2], v[1][2], v[0][3], v[1][3], b.z, b.w);
                    }
                }
            }
            left -= SLOTS, tokens += 256 * PARTS * SLOTS;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                from[i] += 4 * PARTS * SLOTS, scale_of[i] += 4 * PARTS * SLOTS;
                asm volatile("" : "+l"(from[i]), "+l"(scale_of[i]));  // otherwise every load's address is computed again
            }
        }
    };
    if (TILES == 2 && filled <= 8) multiply_all(1);
    else multiply_all(TILES);

    if (PARTS > 1) {
        meet();  // the activations have been read
        float4* sums = (float4*)memory + (warp / PARTS * (PARTS - 1) * TILES * 32) + lane;
#pragma unroll
        for (int t = 0; t < TILES; t++)
            if (part) sums[((part - 1) * TILES + t) * 32] = make_float4(acc[t][0], acc[t][1], acc[t][2], acc[t][3]);
        meet();
        if (part) return;
#pragma unroll
        for (int t = 0; t < TILES; t++)
            for (int p = 0; p < PARTS - 1; p++) {
                const float4 more = sums[(p * TILES + t) * 32];
                acc[t][0] += more.x, acc[t][1] += more.y, acc[t][2] += more.z, acc[t][3] += more.w;
            }
    }

#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int token = 8 * t + 2 * quad + i, pair = __shfl_sync(~0u, mine, token);
            const float by = __shfl_sync(~0u, share, token);
            float y[2] = {acc[t][i] * RESTORE + widen(add[0]), acc[t][i + 2] * RESTORE + widen(add[1])};
            if (pair >= n_pairs) continue;
            if (GLU) {
                const float gate = y[0] > limit ? limit : y[0];  // not fminf, which drops a NaN
                const float up = y[1] > limit ? limit : y[1] < -limit ? -limit : y[1];
                if (row[1] < n)
                    out[(long long)pair * (n / 2) + row[0] / 2] =
                        (u16)narrow(gate / (1 + power(-alpha * gate)) * (up + 1), 0);
                continue;
            }
#pragma unroll
            for (int r = 0; r < 2; r++)
                if (row[r] < n) out[(long long)pair * n + row[r]] = (u16)narrow(y[r] * by, 0);
        }
}
