// y = (q W^T) s_x s_W + b for M <= 8 tokens on Hopper: x [M, K] in 16 bits, q its rows in 8 bits, W of -1, 0 and 1 in 2
// bits, packed as linear_ternary.py describes.
//
// A block multiplies 16 rows of W and quantizes all of x for itself, so that one kernel does both. Its warps share the
// steps of 256 columns. A lane reads the 64 columns of a unit, 16 bytes, of two rows into registers, before
// griddepcontrol.wait: x is read only after it. The weight is the left operand of the tensor cores (m16), tokens are their
// n8. Weights are multiplied plus 1, as they are stored; a second product takes the sum of q away again.
//
// Compile-time constants: K (a multiple of 64); TOKENS (M or more); WARPS; BF16; HAS_BIAS; WIDE (float32 scales of W).

constexpr int THREADS = 32 * WARPS, UNITS = K / 64, STEPS = (UNITS + 3) / 4, TURNS = (STEPS + WARPS - 1) / WARPS;
constexpr int PITCH = 64 * UNITS + (UNITS % 2 ? 0 : 64);  // bytes of a token: two adjacent tokens use different banks
constexpr int PIECES = K / 8, EACH = (PIECES + THREADS - 1) / THREADS;  // 16-byte pieces of a row of x, of a thread
constexpr int SUMS_AT = TOKENS * PITCH, LARGEST_AT = SUMS_AT + 512 * WARPS;
static_assert(K % 64 == 0 && TOKENS <= 8, "whole units, one tile of tokens");

__device__ __forceinline__ void kernels_before_end() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void meet() { asm volatile("bar.sync 0;" ::: "memory"); }

__device__ __forceinline__ float quotient(float a, float b) {
    float q;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(q) : "f"(a), "f"(b));
    return q;
}

__device__ __forceinline__ u32 nearest(float x) {  // integer, halves to even
    int i;
    asm("cvt.rni.s32.f32 %0, %1;" : "=r"(i) : "f"(x));
    return (u32)i;
}

// a [16, 32], b [32, 8], of 8 bits; c += a b.
__device__ __forceinline__ void multiply_8(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) ternary_linear(
    const u16* x, const uint4* weight, const void* scales, const u16* bias, u16* out, int M, int N, long long x_stride) {
    SHARED_MEMORY(128);
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, group = lane / 4, quad = lane % 4;
    const int first = blockIdx.x * 16;
    uint4 words[TURNS][2];
#pragma unroll
    for (int t = 0; t < TURNS; t++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int unit = 4 * (warp + WARPS * t) + quad, row = min(first + group + 8 * r, N - 1);
            words[t][r] = make_uint4(0, 0, 0, 0);
            if (unit < UNITS) words[t][r] = load_once(weight + (long long)row * UNITS + unit);
        }
    kernels_before_end();

    // Each row of x and its largest value
    uint4 pieces[TOKENS][EACH];
    float* const largest = (float*)(memory + LARGEST_AT);  // [TOKENS][WARPS]
#pragma unroll
    for (int token = 0; token < TOKENS; token++) {
        float most = 0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int piece = thread + THREADS * i;
            pieces[token][i] = make_uint4(0, 0, 0, 0);
            if (token < M && piece < PIECES)
                pieces[token][i] = load_16((const uint4*)(x + token * x_stride + 8 * piece));
            const u32 of[4] = {pieces[token][i].x, pieces[token][i].y, pieces[token][i].z, pieces[token][i].w};
#pragma unroll
            for (int j = 0; j < 8; j++) most = max(most, fabsf(widen((u16)(of[j / 2] >> 16 * (j % 2)))));
        }
#pragma unroll
        for (int by = 16; by; by /= 2) most = max(most, __shfl_xor_sync(~0u, most, by));
        if (lane == 0) largest[token * WARPS + warp] = most;
    }
    meet();

    // q: piece p of a unit's columns, 16 bytes, is next to that of the next unit, which the next quad reads.
#pragma unroll
    for (int token = 0; token < TOKENS; token++) {
        float most = 1e-5f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) most = max(most, largest[token * WARPS + w]);
        const float by = quotient(127.f, most);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int piece = thread + THREADS * i;
            if (piece >= PIECES) continue;
            const u32 of[4] = {pieces[token][i].x, pieces[token][i].y, pieces[token][i].z, pieces[token][i].w};
            u32 q[2] = {};
#pragma unroll
            for (int j = 0; j < 8; j++)
                q[j / 4] |= (nearest(widen((u16)(of[j / 2] >> 16 * (j % 2))) * by) & 255) << 8 * (j % 4);
            *(uint2*)(memory + token * PITCH + piece % 8 / 2 * 16 * UNITS + piece / 8 * 16 + piece % 2 * 8) =
                make_uint2(q[0], q[1]);
        }
    }
    meet();

    int acc[4] = {};
    const unsigned char* const tokens = memory + min(group, TOKENS - 1) * PITCH;
#pragma unroll
    for (int t = 0; t < TURNS; t++) {
        const int unit = 4 * (warp + WARPS * t) + quad;
#pragma unroll
        for (int p = 0; p < 4; p++) {
            uint4 b = make_uint4(0, 0, 0, 0);
            if (unit < UNITS) b = *(const uint4*)(tokens + 16 * UNITS * p + 16 * unit);
            const uint4 &w0 = words[t][0], &w1 = words[t][1];
            constexpr u32 TWO_BITS = 0x03030303, NEGATIVE = 0xFFFFFFFF;
            const int s = 2 * p;
            multiply_8(acc, w0.x >> s & TWO_BITS, w1.x >> s & TWO_BITS, w0.y >> s & TWO_BITS, w1.y >> s & TWO_BITS, b.x, b.y);
            multiply_8(acc, w0.z >> s & TWO_BITS, w1.z >> s & TWO_BITS, w0.w >> s & TWO_BITS, w1.w >> s & TWO_BITS, b.z, b.w);
            multiply_8(acc, NEGATIVE, NEGATIVE, NEGATIVE, NEGATIVE, b.x, b.y);
            multiply_8(acc, NEGATIVE, NEGATIVE, NEGATIVE, NEGATIVE, b.z, b.w);
        }
    }
    int* const sums = (int*)(memory + SUMS_AT);  // [WARPS][128]
#pragma unroll
    for (int j = 0; j < 4; j++) sums[128 * warp + 4 * lane + j] = acc[j];
    meet();

    for (int i = thread; i < 128; i += THREADS) {
        const int row = first + i / 16 + i % 4 / 2 * 8, token = 2 * (i / 4 % 4) + i % 2;
        if (token >= M || row >= N) continue;
        int sum = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += sums[128 * w + i];
        float most = 1e-5f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) most = max(most, largest[token * WARPS + w]);
        const float scale = WIDE ? ((const float*)scales)[row] : widen(((const u16*)scales)[row]);
        const float y = (float)sum * quotient(most, 127.f) * scale;
        out[(long long)token * N + row] = (u16)narrow(y + (HAS_BIAS ? widen(bias[row]) : 0), 0);
    }
}
