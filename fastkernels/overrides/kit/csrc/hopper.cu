// Code that the CUDA C++ kernels for Hopper share. It is prepended to the source of each of them (text in hopper.py)
// and compiled for one value of BF16.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#ifndef SHARED_MEMORY  // the tests' emulator, in which a block's memory is an array, has its own
#define SHARED_MEMORY(alignment) extern __shared__ __align__(alignment) unsigned char memory[]
#endif

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void make_barrier(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    u32 done = 0;
    while (!done) {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    }
}

__device__ __forceinline__ float widen(u16 bits) {
#if BF16
    return __uint_as_float((u32)bits << 16);
#else
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
    return f;
#endif
}

__device__ __forceinline__ u32 narrow(float low, float high) {  // two, the first one in the lower half
    u32 bits;
#if BF16
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
#endif
    return bits;
}

__device__ __forceinline__ uint4 load_16(const uint4* at) {  // 16 bytes, not before a wait that stands before it
    uint4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}

__device__ __forceinline__ uint4 load_once(const uint4* at) {  // 16 bytes that are constant and not needed again
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}

__device__ __forceinline__ u32 halves(u32 low, u32 high, u32 order) {  // bytes of both, by order's digits
    u32 v;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(low), "r"(high), "r"(order));
    return v;
}

__device__ __forceinline__ u32 product(u32 a, u32 b) {  // of pairs
    u32 v;
    asm(
#if BF16
        "mul.rn.bf16x2 %0, %1, %2;"
#else
        "mul.rn.f16x2 %0, %1, %2;"
#endif
        : "=r"(v) : "r"(a), "r"(b));
    return v;
}

// Weights i and i + 4 of eight in e2m1 as bfloat16, 2^-126 times their values: the three low bits are a bfloat16 when they
// follow the sign by six zeros. One multiplication is two shifts: of the sign and of the other bits. It is not executed by
// the unit for masks and shifts, which has the most to do.
__device__ __forceinline__ void pairs_of_e2m1(u32 (&to)[4], u32 word) {
    const u32 rest = word >> 8;
    to[0] = (word & 0x000F000F) * 0x1040 & 0x81C081C0;
    to[1] = (word & 0x00F000F0) * 0x0104 & 0x81C081C0;
    to[2] = (rest & 0x000F000F) * 0x1040 & 0x81C081C0;
    to[3] = (rest & 0x00F000F0) * 0x0104 & 0x81C081C0;
}

// Two scales in e4m3 as bfloat16 pairs, 2^100 times the scales. Their bits, shifted by 4, are a bfloat16 of 2^-120 times the
// value, also where it is subnormal. With weights of 2^-126 times their values, 2^26 is left for the sums.
__device__ __forceinline__ void two_scales(u32 (&to)[2], u32 bits) {
#pragma unroll
    for (int i = 0; i < 2; i++)
        to[i] = product(product((bits >> 8 * i & 0xFF) * 0x00100010u, 0x76807680u), 0x76807680u);
}
constexpr float REST_OF_TWO = 67108864.f;  // 2^26

// Integers below 16 are the last bits of 128 (bfloat16) and 1024 (float16).
constexpr u32 ONE = BF16 ? 0x43004300u : 0x64006400u;

__device__ __forceinline__ u32 difference(u32 two, u32 mask, u32 zero) {  // q - z of both
    u32 v;
    asm(
#if BF16
        "sub.rn.bf16x2 %0, %1, %2;"
#else
        "sub.rn.f16x2 %0, %1, %2;"
#endif
        : "=r"(v) : "r"((two & mask) | ONE), "r"(zero));
    return v;
}

// a [16, 16], b [16, 8].
__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
#if BF16
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 add_to(u32* ticket, u32 value) {
    u32 old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(ticket), "r"(value) : "memory");
    return old;
}

__device__ __forceinline__ float4 load_part(const float4* at) {  // another multiprocessor wrote it: not from L1
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at) : "memory");
    return v;
}

// Of a swizzled matrix with rows of 128 bytes: groups of 8 rows are 1024 bytes apart.
__device__ __forceinline__ u64 descriptor(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

__device__ __forceinline__ void begin_multiply() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void commit_multiply() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void finish_multiply() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
