// Instructions and weighted sums for attention_decode.cu; included between hopper.cu and that file.

constexpr float NONE = -3e38f;  // the maximum of no keys

// Units of a sequence; one without keys has one unit, which gives zeros.
__device__ __forceinline__ int units_of(int keys) { return max((keys + KEYS - 1) / KEYS, 1); }

struct Place { int unit, seq, begin; };  // a unit, its sequence, the first unit of that one

struct Notes {
    int ends[SEQS], lens[SEQS], of_warp[WARPS], first_of[2], arrived;
    float tops[SLOTS][HEADS], totals[SLOTS][HEADS];
};

// Where a row's pieces are, so that 8 lanes that read at once use different banks: they are exclusive-ored with this.
__device__ __forceinline__ int turn_of_key(int row) { return FP8 && D == 64 ? 0 : row % 2 * 4; }
__device__ __forceinline__ int turn_of_value(int row) { return FP8 && D == 64 ? row / 2 % 4 : row % 8; }

__device__ __forceinline__ void meet() { asm volatile("bar.sync 0;" ::: "memory"); }

__device__ __forceinline__ void kernels_before_end() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ int load_now(const int* at) {  // bypasses L1, since it may have changed
    int v;
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}

__device__ __forceinline__ float2 load_pair(const float2* at) {
    float2 v;
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(at) : "memory");
    return v;
}

__device__ __forceinline__ void copy_or_zero(u32 to, const uint4* from, bool there) {  // 16 bytes
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LEFT>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ void bring_to_l2(const uint4* sector) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(sector) : "memory");
}

__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float capped(float score, float cap) {  // cap * tanh(score / cap)
    return cap * (1 - 2 * reciprocal(1 + power_of_2(score * (2.8853900817779268f / cap))));  // 2 log2 e
}

// Four 8 x 8 tiles whose rows lanes 0 to 7, 8 to 15, .. address: a lane gets two adjacent values of a column of each.
__device__ __forceinline__ void load_transposed(u32 (&a)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(row) : "memory");
}

__device__ __forceinline__ u32 transposed(u32 two) {  // an 8 x 8 tile in a warp's registers
    u32 turned;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(two));
    return turned;
}

__device__ __forceinline__ u32 two_halves(float low, float high) {  // in float16
    u32 bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

__device__ __forceinline__ float in_half(float v) { return v > 65504 ? 65504 : v < -65504 ? -65504 : v; }  // NaN stays

__device__ __forceinline__ u32 to_halves(u32 two) {  // from bfloat16
    return two_halves(in_half(__uint_as_float(two << 16)), in_half(__uint_as_float(two & 0xffff0000)));
}

__device__ __forceinline__ void halves_of_e4m3(u32 (&to)[2], u32 four) {  // float16, exactly
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }"
        : "=r"(to[0]), "=r"(to[1]) : "r"(four));
}

// a [16, 16], b [16, 8] in float16.
__device__ __forceinline__ void multiply_halves(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void cluster_arrives() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_waits() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ u32 of_rank(u32 address, int rank) {  // the same address in another block's shared memory
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

__device__ __forceinline__ void send(u32 to, float4 v) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};"
                 ::"r"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

__device__ __forceinline__ void send_pair(u32 to, float2 v) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(v.x), "f"(v.y) : "memory");
}

__device__ __forceinline__ float share_of(float top, float highest) {  // 0 without any keys
    return power_of_2(top - (highest == NONE ? 0 : highest));
}

struct Sum {  // of values times weights, and of weights, both divided by 2^top
    float4 v = {0, 0, 0, 0};
    float top = NONE, weights = 0;
    __device__ __forceinline__ void add(float4 more, float2 of) {  // requires top >= of.x
        const float share = share_of(of.x, top);
        weights += share * of.y;
        v.x += share * more.x, v.y += share * more.y, v.z += share * more.z, v.w += share * more.w;
    }
};

#if CLUSTER > 1
#define TOGETHER __cluster_dims__(CLUSTER, 1, 1)
#else
#define TOGETHER
#endif
