// y = x W^T + b for M <= 64 tokens on Hopper with 4-bit weights: x [M, K], 16-bit; W, its scales and zero points in
// tiles, as linear_int4.py describes. A step, 128 columns of 16 rows, is 1 KiB of adjacent memory.
//
// With FP4, weights are e2m1 and their scales e4m3, two adjacent ones for the 32 columns of a unit (linear_nvfp4.py); the
// pointer to zero points is the rows' factors in float32. Products of both have 6 significant bits: exact in bfloat16.
//
// The weight is the left operand of the tensor cores (m16), tokens are their n8. A lane reads the 32 columns of a unit,
// 16 bytes, of each of its rows from memory into registers, AHEAD steps early and beyond the end of a tile, and turns
// them into 16-bit numbers there: weights never pass through shared memory. x is copied to shared memory once, so a
// block multiplies one of SPLITS parts of K, and many tiles of 16 * HEIGHT rows with it. The order of the k axis is free
// if both operands share it: quad i of a step of 128 columns has columns 32 i to 32 i + 31.
//
// Where a step's columns have one scale and tokens are few (EXACT), the tensor cores multiply x by q - z, which no
// rounding changes, and a step's sums are scaled. Otherwise each weight is (q - z) s, rounded once.
//
// PARTS warps have each a part of a tile's steps. They take turns to add what the others leave in shared memory, while
// those go on with the next tile.
//
// With STREAM, each warp has an equal share of its block's steps and may begin and end within a tile. The weight passes
// through a ring in shared memory: ptxas gives all loads into registers one scoreboard, so that a step waits for the last
// of AHEAD. The warp with a tile's first step adds the sums of later warps, which never wait before they write them.
//
// W is read before griddepcontrol.wait; x is read, and all results are written, only after it.
//
// With SPLITS, sums go to memory, and the block whose ticket is the last one adds them, always in one order.
//
// Compile-time constants: K and GROUP (columns that share a scale), multiples of 128 and 32; TILES (of 8 tokens);
// WARPS; HEIGHT (tiles of 16 rows of a warp); PARTS; SPLITS; STREAM; AHEAD (steps); RAGGED (the last has one tile less);
// HAS_ZERO; HAS_BIAS; BF16; HALF_SCALES (float16 scales of bfloat16 x); FP4; EVICTED (L2 gives up W before anything
// else). Includes no header.

constexpr int THREADS = 32 * WARPS, SLOTS = WARPS / PARTS, STEPS = K / 128, GROUPS = K / GROUP, ROWS = 16 * HEIGHT;
constexpr int SCALED = GROUP < 128 ? 128 / GROUP : 1;  // groups of a step
constexpr int LOADS = 4;  // pairs of pieces of x that a thread loads before it stores the first
constexpr int MOST = (STEPS + SPLITS - 1) / SPLITS;  // steps of a split
constexpr int PITCH = 256 * MOST + 64;  // bytes of a token in shared memory: two adjacent tokens use different banks
constexpr int OUTPUTS = HEIGHT * TILES, BUFFERS = 2;  // a slot's sums of one tile are added while it has the next one
constexpr int SUMS = 512 * OUTPUTS * (STREAM ? 1 : PARTS - 1);  // bytes of a buffer
constexpr int BARRIERS = STREAM || PARTS > 1 ? 512 : 0;  // bytes
constexpr int SCALES_AT = 1024 * HEIGHT, ZEROS_AT = SCALES_AT + 32 * SCALED * HEIGHT;  // in a warp's step in the ring
constexpr int STAGE = ZEROS_AT + (HAS_ZERO ? 16 * SCALED * HEIGHT : 0);                // bytes
constexpr int X_AT = BARRIERS + (STREAM ? WARPS * (SUMS + AHEAD * STAGE) : BUFFERS * SLOTS * SUMS);
constexpr bool EXACT = GROUP % 128 == 0 && TILES < 8;  // with more, sums need too many registers
static_assert(K % 128 == 0 && K % GROUP == 0 && GROUP % 32 == 0 && (128 % GROUP == 0 || GROUP % 128 == 0),
              "a step is 128 columns, in which whole units have one scale");
static_assert(WARPS % PARTS == 0 && SPLITS <= STEPS && (!STREAM || PARTS == 1), "warps of a tile, steps of a split");
static_assert(16 * BUFFERS * SLOTS <= 512, "two barriers for each buffer");
static_assert(!FP4 || (BF16 && GROUP == 32 && !HAS_ZERO), "two float8 scales for a unit");

__device__ __forceinline__ u32 load_scale(const u16* at) {
    u16 v;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(at));
    return v;
}

__device__ __forceinline__ u32 load_zero(const unsigned char* at) {
    u32 v;
    asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}

__device__ __forceinline__ float scale_of(u32 bits) {
#if HALF_SCALES
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)bits));
    return f;
#else
    return widen((u16)bits);
#endif
}

__device__ __forceinline__ u32 scale_in_dtype(u32 bits) {  // of x, twice
#if HALF_SCALES
    return narrow(scale_of(bits), scale_of(bits));
#else
    return bits * 0x00010001u;
#endif
}

#if BF16
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
#endif

// a [16, 16], b [16, 8]; c = a b, and c += a b. The compiler may move them, unlike `multiply`.
__device__ __forceinline__ void begin_product(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm(MMA "{%10, %10, %10, %10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
}

__device__ __forceinline__ void add_product(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm(MMA "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

#if EVICTED
__device__ __forceinline__ u64 evict_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
#endif

__device__ __forceinline__ uint4 load_weight(const uint4* at) {
#if EVICTED
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at), "l"(evict_first()));
    return v;
#else
    return load_once(at);
#endif
}

__device__ __forceinline__ void copy_weight(u32 to, const void* from) {  // 16 bytes
#if EVICTED
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;"
                 ::"r"(to), "l"(from), "l"(evict_first()) : "memory");
#else
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#endif
}

__device__ __forceinline__ void copy_16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

__device__ __forceinline__ void await_copies() {  // all groups but the last AHEAD - 1
    asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD - 1) : "memory");
}

__device__ __forceinline__ void meet() { asm volatile("bar.sync 0;" ::: "memory"); }

extern "C" __global__ void __launch_bounds__(THREADS, 1) int4_linear(
    const u16* x, const uint4* weight, const u16* scales, const unsigned char* zeros, const u16* bias, u16* out,
    float4* partial, u32* tickets, int M, int N, long long x_stride) {
    SHARED_MEMORY(128);
    unsigned char* const x_at = memory + X_AT;
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, group = lane / 4, quad = lane % 4;
    const int split = blockIdx.x % SPLITS, block = blockIdx.x / SPLITS, blocks = gridDim.x / SPLITS;
    const int tiles = (N + ROWS - 1) / ROWS;
    const int begin = split * STEPS / SPLITS, steps = (split + 1) * STEPS / SPLITS - begin;
    const int first_tile = (int)((u32)block * tiles / blocks), end_tile = (int)((u32)(block + 1) * tiles / blocks);
    // Tile h of 16 rows of a warp's tile; what is missing at the end is read again.
    auto rows_of = [&](int tile, int h) { return RAGGED ? min(tile * HEIGHT + h, N / 16 - 1) : tile * HEIGHT + h; };
    auto words_of = [&](int tile, int h, int step) {
        return weight + ((long long)rows_of(tile, h) * STEPS + step) * 64 + lane;
    };
    auto scales_of = [&](int tile, int h, int column) { return (rows_of(tile, h) * GROUPS + column / GROUP) * 16; };

#if STREAM
    const int of_block = first_tile * steps, of_next = end_tile * steps;
    auto start = [&](int warp) { return of_block + (int)((u32)warp * (of_next - of_block) / WARPS); };
    const int mine = start(warp), count = start(warp + 1) - mine;
    const u32 ring = shared_address(memory) + BARRIERS + WARPS * SUMS + warp * AHEAD * STAGE;
    const unsigned char* const ring_at = memory + BARRIERS + WARPS * SUMS + warp * AHEAD * STAGE;
    int next = mine % steps, next_tile = mine / steps, to_fetch = count;
    auto fetch = [&](int stage) {
        if (to_fetch > 0) {
            const u32 to = ring + stage * STAGE;
#pragma unroll
            for (int h = 0; h < HEIGHT; h++) {
                const uint4* from = words_of(next_tile, h, begin + next);
                copy_weight(to + 1024 * h + 16 * lane, from), copy_weight(to + 1024 * h + 512 + 16 * lane, from + 32);
                const int at = scales_of(next_tile, h, 128 * (begin + next));
                const u32 scales_to = to + SCALES_AT + 32 * SCALED * h, zeros_to = to + ZEROS_AT + 16 * SCALED * h;
                if (lane < 2 * SCALED) copy_16(scales_to + 16 * lane, scales + at + 8 * lane);
                if (HAS_ZERO && lane < SCALED) copy_16(zeros_to + 16 * lane, zeros + at + 16 * lane);
            }
            to_fetch--;
            if (++next == steps) next = 0, next_tile++;
        }
        commit_copies();
    };
#else
    const int slot = warp / PARTS, part = warp % PARTS;
    const int first = first_tile + slot, last = end_tile;
    const int early = part * steps / PARTS, turns = (part + 1) * steps / PARTS - early;  // steps of a tile, perhaps none

    uint4 words[AHEAD][HEIGHT][2];
    u32 scale[AHEAD][HEIGHT][2], zero[AHEAD][HEIGHT][2];
    int next_tile = turns ? first : last, next_turn = 0;
    auto fetch = [&](int at) {
        if (next_tile >= last) return;
        const int now = begin + early + next_turn;
#pragma unroll
        for (int h = 0; h < HEIGHT; h++) {
            const uint4* from = words_of(next_tile, h, now);
            const int g = scales_of(next_tile, h, 128 * now + 32 * quad) + group;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                words[at][h][i] = load_weight(from + 32 * i);
                scale[at][h][i] = load_scale(scales + g + 8 * i);
                zero[at][h][i] = HAS_ZERO ? load_zero(zeros + g + 8 * i) : 8;
            }
        }
        if (++next_turn == turns) next_turn = 0, next_tile += SLOTS;
    };
#endif
#pragma unroll
    for (int i = 0; i < AHEAD; i++) fetch(i);

    const u32 barriers = shared_address(memory);
    if (STREAM && thread < WARPS) make_barrier(barriers + 8 * thread, 1);  // the warp's sums are there
    if (!STREAM && PARTS > 1 && thread < BUFFERS * SLOTS) {
        make_barrier(barriers + 16 * thread, PARTS - 1);  // the sums are there
        make_barrier(barriers + 16 * thread + 8, 1);      // they have been read
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
    // x in the order of decoded weights: column c is next to c + 2, then c + 1 and c + 3, and 16 columns later the same.
    const int pieces = (TILES == 1 ? M : 8 * TILES) * steps * 8;  // 8 of each half of a unit's columns
    for (int first_piece = thread; first_piece < pieces; first_piece += THREADS * LOADS) {
        uint4 a[LOADS], b[LOADS];
#pragma unroll
        for (int u = 0; u < LOADS; u++) {
            const int i = first_piece + u * THREADS, token = i / (8 * steps), piece = i % (8 * steps);
            a[u] = b[u] = make_uint4(0, 0, 0, 0);
            if (i < pieces && token < M) {
                const u16* from = x + token * x_stride + 128 * begin + piece / 2 * 32 + piece % 2 * 8;
                a[u] = load_16((const uint4*)from), b[u] = load_16((const uint4*)(from + 16));
            }
        }
#pragma unroll
        for (int u = 0; u < LOADS; u++) {
            const int i = first_piece + u * THREADS, token = i / (8 * steps), piece = i % (8 * steps);
            if (i >= pieces) break;
            unsigned char* to = x_at + token * PITCH + piece / 8 * 256 + piece % 2 * 128 + piece / 2 % 4 * 16;
            *(uint4*)to = make_uint4(halves(a[u].x, a[u].y, 0x5410), halves(a[u].x, a[u].y, 0x7632),
                                     halves(b[u].x, b[u].y, 0x5410), halves(b[u].x, b[u].y, 0x7632));
            *(uint4*)(to + 64) = make_uint4(halves(a[u].z, a[u].w, 0x5410), halves(a[u].z, a[u].w, 0x7632),
                                            halves(b[u].z, b[u].w, 0x5410), halves(b[u].z, b[u].w, 0x7632));
        }
    }
    meet();

    float acc[HEIGHT][TILES][4] = {};
    // Of less than 8 tokens the last one stands for those that are missing.
    const unsigned char* tokens = x_at + (TILES == 1 ? min(group, M - 1) : group) * PITCH + 16 * quad;
    auto store = [&](int tile) {
#pragma unroll
        for (int h = 0; h < HEIGHT; h++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int row = tile * ROWS + 16 * h + 8 * r + group;
                if (row >= N) continue;
                const float add = HAS_BIAS ? widen(bias[row]) : 0, by = FP4 ? ((const float*)zeros)[row] * REST_OF_TWO : 1;
#pragma unroll
                for (int t = 0; t < TILES; t++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const int token = 8 * t + 2 * quad + i;
                        if (token < M) out[(long long)token * N + row] = (u16)narrow(acc[h][t][2 * r + i] * by + add, 0);
                    }
            }
    };
    // ptxas loads a constant again for each use. With more outputs there is no register for it.
    const u32 mask = 0x000F000Fu | (OUTPUTS < 8 ? (u32)M & 0x80000000u : 0);
    auto step = [&](const uint4(&words)[HEIGHT][2], const u32(&scale)[HEIGHT][2], const u32(&zero)[HEIGHT][2],
                    const unsigned char* at) {
        float sums[HEIGHT][TILES][4];
        u32 by[HEIGHT][2][2];
        if (FP4)
#pragma unroll
            for (int j = 0; j < 2 * HEIGHT; j++) two_scales(by[j / 2][j % 2], scale[j / 2][j % 2]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 v[HEIGHT][2][4];
#pragma unroll
            for (int h = 0; h < HEIGHT; h++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const uint4& of = words[h][r];
                    const u32 word = i == 0 ? of.x : i == 1 ? of.y : i == 2 ? of.z : of.w;
                    if (FP4) pairs_of_e2m1(v[h][r], word);
#pragma unroll
                    for (int n = 0; n < 4; n++) {
                        if (FP4) {
                            v[h][r][n] = product(v[h][r][n], by[h][r][n % 2]);
                            continue;
                        }
                        v[h][r][n] = difference(word >> 4 * n, mask, zero[h][r] * 0x00010001u | ONE);
                        if (!EXACT) v[h][r][n] = product(v[h][r][n], scale_in_dtype(scale[h][r]));
                    }
                }
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                const uint4 b = *(const uint4*)(at + 8 * t * PITCH + 64 * i);
#pragma unroll
                for (int h = 0; h < HEIGHT; h++) {
                    float(&c)[4] = EXACT ? sums[h][t] : acc[h][t];
                    if (EXACT && i == 0)
                        begin_product(c, v[h][0][0], v[h][1][0], v[h][0][2], v[h][1][2], b.x, b.y);
                    else
                        add_product(c, v[h][0][0], v[h][1][0], v[h][0][2], v[h][1][2], b.x, b.y);
                    add_product(c, v[h][0][1], v[h][1][1], v[h][0][3], v[h][1][3], b.z, b.w);
                }
            }
        }
        if (EXACT)
#pragma unroll
            for (int j = 0; j < 4 * OUTPUTS; j++)
                acc[j / 4 / TILES][j / 4 % TILES][j % 4] +=
                    scale_of(scale[j / 4 / TILES][j / 2 % 2]) * sums[j / 4 / TILES][j / 4 % TILES][j % 4];
    };
    auto clear = [&]() {
#pragma unroll
        for (int j = 0; j < 4 * OUTPUTS; j++) acc[j / 4 / TILES][j / 4 % TILES][j % 4] = 0;
    };
#if !STREAM
    int done = 0;  // tiles
#endif
    auto finish = [&](int tile) {
#if STREAM
        const int low = tile * steps;
        float4* at = (float4*)(memory + BARRIERS) + lane;
        if (mine > low) {  // an earlier warp has the first step
#pragma unroll
            for (int j = 0; j < OUTPUTS; j++) {
                const float(&a)[4] = acc[j / TILES][j % TILES];
                at[(warp * OUTPUTS + j) * 32] = make_float4(a[0], a[1], a[2], a[3]);
            }
            __syncwarp();
            if (lane == 0) arrive(barriers + 8 * warp);
            return;
        }
        for (int w = warp + 1; w < WARPS && start(w) < low + steps; w++) {
            if (start(w + 1) == start(w)) continue;
            wait(barriers + 8 * w, 0);
#pragma unroll
            for (int j = 0; j < OUTPUTS; j++) {
                const float4 more = at[(w * OUTPUTS + j) * 32];
                float(&a)[4] = acc[j / TILES][j % TILES];
                a[0] += more.x, a[1] += more.y, a[2] += more.z, a[3] += more.w;
            }
        }
#else
        if (PARTS > 1) {
            const int buffer = slot * BUFFERS + done % BUFFERS, adds = done % PARTS;
            const u32 there = barriers + 16 * buffer, parity = done / BUFFERS & 1;
            float4* at = (float4*)(memory + BARRIERS + buffer * SUMS) + lane;
            done++;
            wait(there + 8, parity ^ 1);  // also the warp that adds: an earlier tile may have the same parity
            if (part != adds) {
#pragma unroll
                for (int j = 0; j < OUTPUTS; j++) {
                    const float(&a)[4] = acc[j / TILES][j % TILES];
                    at[((part - (part > adds)) * OUTPUTS + j) * 32] = make_float4(a[0], a[1], a[2], a[3]);
                }
                __syncwarp();
                if (lane == 0) arrive(there);
                return;
            }
            wait(there, parity);
#pragma unroll
            for (int j = 0; j < OUTPUTS; j++)
#pragma unroll
                for (int p = 0; p < PARTS - 1; p++) {
                    const float4 more = at[(p * OUTPUTS + j) * 32];
                    float(&a)[4] = acc[j / TILES][j % TILES];
                    a[0] += more.x, a[1] += more.y, a[2] += more.z, a[3] += more.w;
                }
            __syncwarp();
            if (lane == 0) arrive(there + 8);
        }
#endif
        if (SPLITS > 1) {
            const long long size = (long long)tiles * OUTPUTS * 32;  // of a split
            float4* at = partial + (long long)tile * OUTPUTS * 32 + lane;
#pragma unroll
            for (int j = 0; j < OUTPUTS; j++) {
                const float(&a)[4] = acc[j / TILES][j % TILES];
                at[split * size + j * 32] = make_float4(a[0], a[1], a[2], a[3]);
            }
            __syncwarp();
            u32 ticket = 0;
            if (lane == 0) ticket = add_to(tickets + tile, 1);
            if (__shfl_sync(0xffffffffu, ticket, 0) != SPLITS - 1) return;
            if (lane == 0) tickets[tile] = 0;  // for the next launch
#pragma unroll
            for (int j = 0; j < OUTPUTS; j++) {
                float(&a)[4] = acc[j / TILES][j % TILES];
                float4 v[SPLITS];
#pragma unroll
                for (int s = 0; s < SPLITS; s++) v[s] = load_part(at + s * size + j * 32);
                a[0] = v[0].x, a[1] = v[0].y, a[2] = v[0].z, a[3] = v[0].w;
#pragma unroll
                for (int s = 1; s < SPLITS; s++) a[0] += v[s].x, a[1] += v[s].y, a[2] += v[s].z, a[3] += v[s].w;
            }
        }
        store(tile);
    };

#if STREAM
    int tile = mine / steps, turn = mine % steps, stage = 0;
    for (int left = count; left > 0; left--) {
        await_copies();
        __syncwarp();  // other lanes have copied scales
        const unsigned char* from = ring_at + stage * STAGE;
        const int g = 32 * quad / GROUP * 16 + group;
        uint4 words[HEIGHT][2];
        u32 scale[HEIGHT][2], zero[HEIGHT][2];
#pragma unroll
        for (int j = 0; j < 2 * HEIGHT; j++) {
            const int at = j / 2 * 16 * SCALED + g + j % 2 * 8;
            words[j / 2][j % 2] = ((const uint4*)from)[32 * j + lane];
            scale[j / 2][j % 2] = ((const u16*)(from + SCALES_AT))[at];
            zero[j / 2][j % 2] = HAS_ZERO ? from[ZEROS_AT + at] : 8;
        }
        __syncwarp();  // they have been read
        fetch(stage);
        stage = stage + 1 == AHEAD ? 0 : stage + 1;
        step(words, scale, zero, tokens + 256 * turn);
        if (++turn == steps || left == 1) {
            finish(tile);
            turn = 0, tile++;
            clear();
        }
    }
#else
    for (int tile = first, turn = 0; tile < last;)
#pragma unroll
        for (int s = 0; s < AHEAD; s++) {
            if (tile >= last) break;
            if (turn < turns) {
                step(words[s], scale[s], zero[s], tokens + 256 * (early + turn));
                fetch(s);
            }
            if (++turn >= turns) {
                finish(tile);
                turn = 0, tile += SLOTS;
                clear();
            }
        }
#endif
}
