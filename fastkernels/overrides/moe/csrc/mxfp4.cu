// The decoding of MXFP4 in registers and the functions of SwiGLU, for both kernels with 4-bit weights of experts.

__device__ __forceinline__ void meet() { asm volatile("bar.sync 0;" ::: "memory"); }

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

__device__ __forceinline__ float from_half(u16 bits) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
    return f;
}

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

// Pairs of e2m1 are 2^-126 times their values. The factor is 2^62 times the scale, so that it is a bfloat16 for scales up
// to 2^65 and infinite above; the rest is RESTORE.
constexpr float RESTORE = 18446744073709551616.f;  // 2^64

__device__ __forceinline__ u32 factor(u32 scale) { return (u32)min((int)scale + 62, 255) * 0x00800080u; }

__device__ __forceinline__ void decode(u32 (&to)[4], u32 word, u32 by) {  // weights i and i + 4 of eight
    pairs_of_e2m1(to, word);
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = product(to[i], by);
}

__device__ __forceinline__ u32 word_of(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

