// Grouped matrix product of many rows per expert with MXFP4 weights on Hopper: bf16 activations, float32 sums.
//
// A tile is 256 rows of an expert's matrix times up to 128 of its tokens. The weight is wgmma's left operand (m64), from
// registers; tokens are its n, from shared memory. Four warps copy 64 columns of both at a time into a ring in shared
// memory. Two warpgroups multiply 128 rows each: lanes read 16 adjacent weights of four rows and turn 8 of two rows at a time
// into bfloat16 while the tensor cores multiply the other two. A block works on several tiles: the next one is copied while
// one is stored, and one warpgroup is ahead of the other, so that one multiplies while the other stores. A token's sums
// depend on its own row only: rows of the ring without a token can hold anything.
//
// The order of the k axis is free if both operands share it, and so is the order of a matrix's rows in a tile. x has its
// columns in the order in which lanes hold weights (mxfp4_prompt.py's in_order), and rows are in such places that a lane
// stores adjacent results of a token, those of SwiGLU in the order in which the next product reads them.
//
// Compile-time constants: K (a multiple of 64), TOPK (pairs of one row of x), STAGES (of the ring), SKEW (stages that one
// warpgroup is ahead at first), GROUP (token tiles that run next to each other and share weights through L2), GLU (rows 2 i and
// 2 i + 1 are a gate and an up value, and the result is their clamped SwiGLU; n is a multiple of 128; otherwise n is a multiple
// of 64, and rows of the result are multiplied by the pairs' weights). multiply(), whose operand list is as long as a tile has
// tokens, precedes this file.

constexpr int TOKENS = 128, ROWS = 256, CONSUMERS = 256, PRODUCERS = 128, THREADS = CONSUMERS + PRODUCERS;
constexpr int CHUNKS = K / 64;  // of columns
constexpr int WEIGHTS = 128 * TOKENS, STAGE = WEIGHTS + 32 * ROWS;  // bytes: tokens with the 128-byte swizzle, weights
static_assert(K % 64 == 0 && SKEW < STAGES && STAGES > 1, "what lanes and the ring hold");

__device__ __forceinline__ void copy_16(u32 to, const uint4* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy_weights(u32 to, const unsigned char* from) {  // 16 bytes; what follows is needed soon
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// wgmma reads what such copies have stored once the barrier has counted them. PTX requires a proxy fence in between, which
// took 2% of the time and changed no bit of 240 results.
__device__ __forceinline__ void arrive_when_copied(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ uint2 load_shared(u32 at) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
    return v;
}

__device__ __forceinline__ u32 load_scales(const unsigned char* at) {  // two
    u16 v;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(at) : "memory");
    return v;
}

__device__ __forceinline__ u32 turn(u32 two) {  // 8 x 8 numbers, of which lanes hold pairs: rows become columns
    u32 turned;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(two));
    return turned;
}

struct Ring {
    u32 memory;  // address of the stages; barriers are behind them
    int stage;
    u32 parity;

    __device__ __forceinline__ u32 stored() const { return memory + STAGE * stage; }
    __device__ __forceinline__ u32 full(int of) const { return memory + STAGE * STAGES + 8 * of; }
    __device__ __forceinline__ u32 empty(int of) const { return memory + STAGE * STAGES + 8 * (STAGES + of); }
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

struct Arguments {
    const unsigned char* scales;
    const u16* bias;
    u16* out;
    const float* weights;
    int n, n_pairs;
    float alpha, limit;
};

// Rows of the matrix that a lane holds: `row`, BELOW further down, and both again HALF further down. Of 64 columns of a result
// of SwiGLU, which are 8 pieces of 16 bytes in the next product, a warp has two.
constexpr int BELOW = GLU ? 1 : 2, HALF = GLU ? 32 : 4;

struct Tile {
    int expert, column, filled;  // tokens; negative: there are no more tiles
    const int* pairs;
    int row;  // of this lane in the expert's matrix
    const unsigned char* scales;
    u32 coming[2][2];  // of 64 columns of each row two scales: those of step 4 j + quad are in this lane

    __device__ __forceinline__ void fetch_scales(int ahead, int k) {
        if (k + ahead + (int)threadIdx.x % 4 >= CHUNKS) return;
#pragma unroll
        for (int i = 0; i < 4; i++)
            coming[i / 2][i % 2] = load_scales(scales + (i / 2 * HALF + i % 2 * BELOW) * (K / 32) + 2 * ahead);
    }

    __device__ __forceinline__ void begin(const Arguments& m) {  // reads the first scales
        const int part = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, group = threadIdx.x % 32 / 4;
        const int piece = 2 * warp + group / 4;
        row = ROWS * column + 128 * part;
        if (row >= m.n) return;
        if (GLU) row += 2 * (group / 2 % 2 * 32 + piece / 4 * 8 + piece % 4 + group % 2 * 4);
        else row += 32 * warp + group / 2 * 8 + group % 2;
        if (row >= m.n) row -= 64;  // not stored
        scales = m.scales + ((long long)expert * m.n + row) * (K / 32) + threadIdx.x % 4 * 2;
        fetch_scales(0, 0);
    }
};

// One tile of N tokens at most: this warpgroup's 128 rows. go_on() makes `tile` the next one.
template <int N, class F>
__device__ __forceinline__ void multiply_tile(const Arguments& m, Ring& ring, Tile& tile, const F& go_on) {
    const int thread = threadIdx.x, part = thread / 128, warp = thread / 32 % 4, lane = thread % 32, group = lane / 4, quad = lane % 4;
    const int left = m.n - ROWS * tile.column;  // rows of the matrix from this tile on
    if (128 * part >= left) {
        for (int k = 0; k < CHUNKS; k++, ring.next()) {
            wait(ring.full(ring.stage), ring.parity);
            if (lane == 0) arrive(ring.empty(ring.stage));
        }
        go_on();
        if (tile.filled >= 0) tile.begin(m);
        return;
    }

    u32 scales[2];
    float acc[2][N / 2];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < N / 2; j++) acc[i][j] = 0;
    const u32 place = WEIGHTS + 1024 * (4 * part + warp) + 8 * lane;
    u32 a[2][2][4];  // of each half, 16 columns twice
    int used = -1;  // the stage that the multiplications under way may read
    uint2 words[2][2][2];  // of even and odd steps: 16 weights of each row
    u32 stored[2];  // where a step's stage is: known to be the same in all lanes
    auto load_step = [&](int s) {
        wait(ring.full(ring.stage), ring.parity);
        stored[s % 2] = __shfl_sync(~0u, ring.stored(), 0);
#pragma unroll
        for (int i = 0; i < 4; i++) words[s % 2][i / 2][i % 2] = load_shared(ring.stored() + place + 256 * i);
    };
    auto step = [&](int s, int k, bool more) {  // 64 columns; s = k % 4
        if (s == 0) {
#pragma unroll
            for (int i = 0; i < 2; i++) scales[i] = halves(tile.coming[i][0], tile.coming[i][1], 0x5410);
            tile.fetch_scales(4, k);
        }
        u32 by[2][2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 both = __shfl_sync(~0u, scales[i], lane / 4 * 4 + s) >> quad / 2 * 8;
            by[i][0] = factor(both & 255), by[i][1] = factor(both >> 16 & 255);
        }
        const int stage = ring.stage;
        const u64 tokens = descriptor(stored[s % 2]);
#pragma unroll
        for (int w = 0; w < 2; w++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                u32 v[2][4];
#pragma unroll
                for (int h = 0; h < 2; h++) decode(v[h], w ? words[s % 2][i][h].y : words[s % 2][i][h].x, by[i][h]);
#pragma unroll
                for (int t = 0; t < 2; t++)
                    a[i][t][0] = v[0][2 * t], a[i][t][1] = v[1][2 * t], a[i][t][2] = v[0][2 * t + 1], a[i][t][3] = v[1][2 * t + 1];
                begin_multiply();
#pragma unroll
                for (int t = 0; t < 2; t++) multiply(acc[i], a[i][t], tokens + (2 * w + t) * 2);  // 16 columns are 32 bytes
                commit_multiply();
                if (w && !i) {  // while this is multiplied
                    ring.next();
                    if (more) load_step(s + 1);
                }
                finish_multiply<1>();  // of the other half
            }
            if (w == 0 && used >= 0 && lane == 0) arrive(ring.empty(used));
        }
        used = stage;
    };
    load_step(0);
    int k = 0;
#pragma unroll 1
    for (; k + 4 <= CHUNKS; k += 4) {
#pragma unroll
        for (int s = 0; s < 4; s++) step(s, k, s < 3 || CHUNKS % 4 || k + 4 < CHUNKS);
        tile.scales += 4 * 2;
    }
#pragma unroll
    for (int s = 0; s < CHUNKS % 4; s++) step(s, k, s + 1 < CHUNKS % 4);
    // Biases and pairs, which storing this tile needs, are read meanwhile.
    float add[2][2], share[(N + 31) / 32];
    int mine[(N + 31) / 32];  // pairs of tokens lane, lane + 32, ...
    const int column = tile.column;
    const u16* const bias = m.bias + (long long)tile.expert * m.n + tile.row;
#pragma unroll
    for (int i = 0; i < 4; i++) add[i / 2][i % 2] = widen(bias[i / 2 * HALF + i % 2 * BELOW]);
#pragma unroll
    for (int i = 0; i < (N + 31) / 32; i++) mine[i] = tile.pairs[32 * i + lane];
    go_on();
    finish_multiply<0>();
    if (lane == 0) arrive(ring.empty(used));
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < N / 2; j++) asm volatile("" : "+f"(acc[i][j])::"memory");  // keeps the compiler from reading them earlier
#pragma unroll
    for (int i = 0; i < (N + 31) / 32; i++) share[i] = !GLU && mine[i] < m.n_pairs ? m.weights[mine[i]] : 0;
    if (tile.filled >= 0) tile.begin(m);

    // Sums 4 j to 4 j + 3 of a lane: tokens 8 j + 2 quad and the next one of its row, then of the one below.
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        const int pair = __shfl_sync(~0u, mine[j / 4], j % 4 * 8 + group);
        if (GLU) {
            u32 turned[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float y[2];
#pragma unroll
                for (int t = 0; t < 2; t++) {
                    const float g = acc[i][4 * j + t] * RESTORE + add[i][0], u = acc[i][4 * j + t + 2] * RESTORE + add[i][1];
                    const float gate = g > m.limit ? m.limit : g;  // not fminf, which drops a NaN
                    const float up = u > m.limit ? m.limit : u < -m.limit ? -m.limit : u;
                    y[t] = gate * inverse(1 + power(-m.alpha * gate)) * (up + 1);
                }
                turned[i] = turn(narrow(y[0], y[1]));
            }
            if (pair < m.n_pairs)
                *(uint2*)(m.out + (long long)pair * (m.n / 2) + ROWS / 2 * column + 64 * part + 16 * warp + 4 * quad) =
                    make_uint2(turned[0], turned[1]);
            continue;
        }
        float by[2];
#pragma unroll
        for (int t = 0; t < 2; t++) by[t] = __shfl_sync(~0u, share[j / 4], j % 4 * 8 + 2 * quad + t);
        u32 turned[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float* sums = acc[i / 2] + 4 * j + i % 2 * 2;
            const float more = add[i / 2][i % 2];
            turned[i] = turn(narrow((sums[0] * RESTORE + more) * by[0], (sums[1] * RESTORE + more) * by[1]));
        }
        const int at = ROWS * column + 128 * part + 32 * warp + 8 * quad;
        if (pair < m.n_pairs && at < m.n)
            *(uint4*)(m.out + (long long)pair * m.n + at) = make_uint4(turned[0], turned[1], turned[2], turned[3]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) mxfp4_prompt(
    const uint4* x, const unsigned char* weight, const unsigned char* scales, const u16* bias, u16* out, const float* weights,
    const int* pairs, const int* experts, const int* total, int n, int count, int n_pairs, float alpha, float limit) {
    SHARED_MEMORY(1024);
    const int thread = threadIdx.x, lane = thread % 32;
    Ring ring = {(shared_address(memory) + 1023) & ~1023u, 0, 0};
    asm volatile("" : "+r"(ring.memory));  // otherwise it is computed again wherever it is used
    if (thread == 0) {
        for (int s = 0; s < STAGES; s++) make_barrier(ring.full(s), PRODUCERS), make_barrier(ring.empty(s), CONSUMERS / 32);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    meet();

    const int columns = (n + ROWS - 1) / ROWS, blocks = *total / TOKENS, tiles = columns * blocks;
    auto tile_of = [&](int tile, int& block, int& column) {
        const int first = tile / (GROUP * columns) * GROUP, height = min(blocks - first, GROUP), at = tile % (GROUP * columns);
        block = first + at % height, column = at / height;
        const int expert = experts[block];
        return expert < count ? expert : -1;
    };

    if (thread >= CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const int at = thread - CONSUMERS, first = at / 8;  // tokens first, first + 16, ...
        const u32 target = first * 128 + ((at % 8 ^ first % 8) << 4);
        // Weights are where a warp's lanes read theirs at once, 8 bytes each: bits of a place are those of a row in another
        // order, [part, warp (2), half, below, group (3)].
        const int group = at / 2 % 8, below = at / 16 % 2, half = at / 32 % 2, warp = at / 64;
        const int row = GLU ? group % 2 * 8 + group / 2 % 2 * 64 + group / 4 * 2 + below + 32 * half + 4 * warp
                            : group + group / 2 * 6 + 2 * below + 4 * half + 32 * warp;
        ring.parity = 1;
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            int block, column;
            const int expert = tile_of(tile, block, column);
            if (expert < 0) continue;
            u32 from[TOKENS / 16];
            int filled = 0;  // pairs stand before padding
#pragma unroll
            for (int i = 0; i < TOKENS / 16; i++) {
                const int pair = pairs[block * TOKENS + first + 16 * i];
                from[i] = (u32)(pair / TOPK) * (K / 8) + at % 8;
                filled += pair < n_pairs;
            }
            const int left = n - ROWS * column;
            const unsigned char* weights_from = weight + ((long long)expert * n + ROWS * column + row) * (K / 2) + at % 2 * 16;
#pragma unroll 1
            for (int k = 0; k < CHUNKS; k++, ring.next(), weights_from += 32) {
                wait(ring.empty(ring.stage), ring.parity);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if ((GLU ? i / 2 * 128 : i * 64) < left)
                        copy_weights(ring.stored() + WEIGHTS + 2048 * i + 16 * at,
                                     weights_from + (GLU ? i % 2 * 16 + i / 2 * 128 : 64 * i) * (K / 2));
#pragma unroll
                for (int i = 0; i < TOKENS / 16; i++)
                    if (i < filled) copy_16(ring.stored() + target + 2048 * i, x + from[i] + 8 * k);
                arrive_when_copied(ring.full(ring.stage));
            }
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const Arguments m = {scales, bias, out, weights, n, n_pairs, alpha, limit};
    Tile tile;
    int at = blockIdx.x;
    auto look_up = [&] {
        for (tile.filled = -1; at < tiles && tile.filled < 0; at += gridDim.x) {
            int block;
            tile.expert = tile_of(at, block, tile.column);
            tile.pairs = pairs + block * TOKENS;
            if (tile.expert < 0) continue;
            tile.filled = 0;
#pragma unroll
            for (int i = 0; i < TOKENS / 32; i++) tile.filled += __popc(__ballot_sync(~0u, tile.pairs[32 * i + lane] < n_pairs));
        }
    };
    look_up();
    if (tile.filled < 0) return;
    tile.begin(m);
    if (SKEW && CHUNKS >= SKEW && thread >= 128) wait(ring.full(SKEW - 1), 0);
    while (tile.filled >= 0) {
        if (tile.filled > 96) multiply_tile<128>(m, ring, tile, look_up);
        else if (tile.filled > 64) multiply_tile<96>(m, ring, tile, look_up);
        else if (tile.filled > 32) multiply_tile<64>(m, ring, tile, look_up);
        else if (tile.filled > 16) multiply_tile<32>(m, ring, tile, look_up);
        else multiply_tile<16>(m, ring, tile, look_up);
    }
}
