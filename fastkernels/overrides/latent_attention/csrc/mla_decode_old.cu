// Latent attention of one query per sequence on Hopper: 512 channels of a latent and 64 of a rotary key, 16-bit, float32 sums.
//
// A block computes up to 64 heads of a sequence over a range of its keys, its part. One warp copies queries, and keys in tiles
// of KEYS, to shared memory (tensor maps, 128-byte swizzle). Two warpgroups each compute all scores of a tile, and then the
// sums of half of the channels: a tile's latents are wgmma's right operand twice, first with the channels, then with the keys
// as its k. Scores are computed twice, so that warpgroups exchange nothing.
//
// Workers are the blocks that share a row of heads. The lengths are divided among them on the device, so one CUDA graph serves
// all lengths: each sequence into equal parts, one part a worker, if that gives no worker much more than the mean; else each
// worker takes an equal range of all tiles, and a sequence counts EXTRA more of them. Results of parts go to mla_combine.
//
// Compile-time constants: KEYS (32 or 64), STAGES, BOX (keys of one copy, which are in one block of the cache), LEAST (tiles of
// the smallest part), EXTRA, TURNS (warpgroups compute scores one after the other), BF16. multiply() for scores and weigh()
// precede this file.

#ifdef TRACE
#define MARK(i) if (lane == 0 && warp % 4 == 0 && marks < 64) counts[2 * batch + (blockIdx.x * 3 + warp / 4) * 64 + marks++] = (i) << 24 | (int)(clock64() & 0xffffff);
#else
#define MARK(i)
#endif

struct __align__(128) TensorMap { u64 opaque[16]; };

constexpr int LATENT = 512, PIECES = 9, THREADS = 384, COMBINE_THREADS = 64, MOST = 160;  // pieces of 64 channels; workers
constexpr int QUERIES = PIECES * 8192, PIECE = 128 * KEYS, STAGE = PIECES * PIECE;
constexpr int GROUPS = 3, IN_GROUP = PIECES / GROUPS;  // pieces with a barrier
#define LOWEST __int_as_float(0xff800000)
constexpr float GROWTH = 8;  // of a maximum, as a power of 2, that leaves sums as they are
static_assert(KEYS % (BOX * CLUSTER) == 0 && BOX % 8 == 0, "a copy begins where the swizzle does");

__device__ __forceinline__ void load_box(u32 to, const TensorMap& map, int channel, int row, int block, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                 ::"r"(to), "l"(&map), "r"(channel), "r"(row), "r"(block), "r"(barrier) : "memory");
}

// To the same place in both blocks of a cluster.
__device__ __forceinline__ void load_box_for_both(u32 to, const TensorMap& map, int channel, int row, int block, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3, %4}], [%5], %6;"
        ::"r"(to), "l"(&map), "r"(channel), "r"(row), "r"(block), "r"(barrier), "h"((u16)3) : "memory");
}

__device__ __forceinline__ void arrive_at(u32 barrier, int rank) {
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;"
        " mbarrier.arrive.shared::cluster.b64 _, [there]; }"
        ::"r"(barrier), "r"(rank) : "memory");
}

__device__ __forceinline__ void cluster_meets() {
    asm volatile("barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
}

__device__ __forceinline__ int rank_in_cluster() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

template <bool EARLY>
__device__ __forceinline__ int load_now(const int* at) {  // early: before griddepcontrol.wait, and not into L1
    int v;
    if (EARLY) asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    else asm volatile("ld.global.s32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}

__device__ __forceinline__ void bring_to_l2(const TensorMap& map, int channel, int row, int block) {
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];"
                 ::"l"(&map), "r"(channel), "r"(row), "r"(block) : "memory");
}

__device__ __forceinline__ float load_number(const float* at) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(at) : "memory");
    return v;
}

__device__ __forceinline__ void store_zeros(u32 at) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
}

__device__ __forceinline__ void store_pair(u32 at, u32 v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}

__device__ __forceinline__ void show_to_multiply() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void group_meets(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }

__device__ __forceinline__ void groups_meet() { asm volatile("bar.sync 3, 256;" ::: "memory"); }

__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The right operand whose k are rows of 128 bytes: groups of 8 rows are 1024 bytes apart, 64 columns a piece.
__device__ __forceinline__ u64 transposed(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)(PIECE >> 4) << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

__device__ __forceinline__ int quotient(int a, int b) { return (a + b - 1) / b; }

__device__ __forceinline__ int tiles_of(int len) { return max(quotient(len, KEYS), 1); }

// What worker `of` does, and how all keys are divided.
struct Shares {
    const int* lens;
    int batch, of, share, even;  // even: a sequence is divided into parts of up to `share` tiles
    int seq, before;  // the next sequence, and what all sequences before it count
};

struct Part {
    int seq, len, begin, end;  // tiles
    int index, count, first;  // of the sequence's parts; the worker of its first one
};

__device__ __forceinline__ int sum_of_lanes(int v) {
#pragma unroll
    for (int i = 16; i; i /= 2) v += __shfl_xor_sync(~0u, v, i);
    return v;
}

// By a whole warp.
template <bool EARLY>
__device__ __forceinline__ void divide(Shares& s, int workers) {
    const int lane = threadIdx.x % 32;
    int total = 0;
    for (int i = lane; i < s.batch; i += 32) total += tiles_of(load_now<EARLY>(s.lens + i));
    total = sum_of_lanes(total);
    s.share = max(quotient(total + EXTRA * s.batch, workers), LEAST + EXTRA), s.even = 0;
    if (s.batch <= workers) {  // lanes try part sizes from the smallest possible one to twice as much
        const int least = max(quotient(total, workers), LEAST), size = least + (least * lane + 30) / 31;
        const float inverse = 1.0f / size;
        int parts = 0;
        for (int i = 0; i < s.batch; i += 32) {
            const int mine = i + lane < s.batch ? tiles_of(load_now<EARLY>(s.lens + i + lane)) : 0;
            for (int j = 0; j < min(32, s.batch - i); j++)
                parts += (int)(((float)(__shfl_sync(~0u, mine, j) + size) - 0.5f) * inverse);  // rounded up
        }
        const u32 enough = __ballot_sync(~0u, parts <= workers);
        if (enough) {
            const int smallest = __shfl_sync(~0u, size, __ffs(enough) - 1);
            if (smallest <= s.share) s.share = smallest, s.even = 1;
        }
    }
    const int from = s.even ? s.of : s.of * s.share;
    s.before = 0;
    for (s.seq = 0; s.seq < s.batch; s.seq += 32) {
        const int i = s.seq + lane, tiles = i < s.batch ? tiles_of(load_now<EARLY>(s.lens + i)) : 0;
        const int count = i >= s.batch ? 0 : s.even ? quotient(tiles, s.share) : tiles + EXTRA;
        int upto = count;
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
            const int other = __shfl_up_sync(~0u, upto, by);
            if (lane >= by) upto += other;
        }
        const u32 found = __ballot_sync(~0u, s.before + upto > from);
        if (found) {
            const int first = __ffs(found) - 1;
            s.before += __shfl_sync(~0u, upto - count, first), s.seq += first;
            return;
        }
        s.before += __shfl_sync(~0u, upto, 31);
    }
    s.seq = s.batch;
}

// False: there is no further part.
template <bool EARLY>
__device__ __forceinline__ bool next_part(Shares& s, Part& p) {
    if (s.seq >= s.batch) return false;
    p.seq = s.seq, p.len = load_now<EARLY>(s.lens + s.seq);
    const int tiles = tiles_of(p.len);
    if (s.even) {
        p.count = quotient(tiles, s.share), p.index = s.of - s.before, p.first = s.before;
        p.begin = p.index * tiles / p.count, p.end = (p.index + 1) * tiles / p.count;
        s.seq = s.batch;
        return true;
    }
    const int start = s.before + EXTRA, from = s.of * s.share;
    if (start >= from + s.share) return false;
    p.first = start / s.share, p.count = (start + tiles - 1) / s.share - p.first + 1, p.index = s.of - p.first;
    p.begin = max(from - start, 0), p.end = min(from + s.share - start, tiles);
    s.before += tiles + EXTRA, s.seq++;
    return true;
}

struct Notes {  // in shared memory
    int share, even, seq, before;
    float tops[2][64], totals[2][2][64];  // of each row: by a warpgroup; of two parts, by a warpgroup
};

// Where a worker stores its part: at most one that is a sequence's first of several, and one that is a later one.
__device__ __forceinline__ int slot_of(int worker, int index) { return 2 * worker + (index == 0); }

// 160 registers of each thread leave room for a block of mla_combine, which then need not be started when this ends.
extern "C" __global__ void CLUSTERED __maxnreg__(160) mla_decode(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap kv_map, const int* __restrict__ lens,
    const int* __restrict__ table, u16* __restrict__ out, float* __restrict__ parts, float* __restrict__ sums,
    int* __restrict__ counts, int batch, int heads, int rows, int block_size, int width, int table_stride,
    int ahead, float scale, float v_scale) {
    extern __shared__ __align__(1024) unsigned char memory[];

    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const int thread = threadIdx.x, lane = thread % 32;
    const int warp = __shfl_sync(~0u, thread / 32, 0);  // the compiler sees that it is alike in a warp
#ifdef TRACE
    int marks = 0;
#endif
    MARK(1)
    const u32 queries = (shared_address(memory) + 1023) & ~1023u, ring = queries + QUERIES;
    const u32 full = ring + STAGES * STAGE, empty = full + 8 * GROUPS * STAGES, asked = empty + 16 * STAGES;
    const u32 turns = asked + 16, weights = turns + 16;  // weights: of each stage
    Notes& notes = *(Notes*)(memory + (weights + 8 * STAGES - shared_address(memory)));
    const int rank = CLUSTER == 1 ? 0 : rank_in_cluster();
    const int row = blockIdx.x % rows;  // of blocks, which has up to 64 heads
    Shares shares = {lens, batch, (int)blockIdx.x / rows, 0, 0, 0, 0};

    if (warp == 0 && lane == 0) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(&q_map) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&kv_map) : "memory");
        for (int i = 0; i < GROUPS * STAGES; i++) make_barrier(full + 8 * i, 1);
        for (int i = 0; i < 2 * STAGES; i++) make_barrier(empty + 8 * i, SEESAW ? 4 * CLUSTER : 8);
        for (int i = 0; i < STAGES; i++) make_barrier(weights + 8 * i, 4);
        make_barrier(asked, 1), make_barrier(asked + 8, 8);
        make_barrier(turns, 4), make_barrier(turns + 8, 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        show_to_multiply();
    }
    // The previous kernel may still run: lengths and pages may be stale, and what they name is brought to L2 only.
    if (ahead && warp == 8 && rank == 0) {
        Shares early = shares;
        Part p;
        divide<true>(early, gridDim.x / rows);
        if (next_part<true>(early, p)) {
            const int box = p.begin * (KEYS / BOX) + lane, page = box * BOX / block_size;
            if (lane < ahead * (KEYS / BOX) && box * BOX < p.len && (u32)page < (u32)width) {
                const int block = load_now<true>(table + (long long)p.seq * table_stride + page);
                for (int piece = 0; piece < PIECES; piece++) bring_to_l2(kv_map, 64 * piece, box * BOX % block_size, block);
            }
        }
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
    MARK(2)
    if (warp == 8) {
        divide<false>(shares, gridDim.x / rows);
        if (lane == 0) notes.share = shares.share, notes.even = shares.even, notes.seq = shares.seq, notes.before = shares.before;
    }
    if (CLUSTER == 1) __syncthreads();
    else cluster_meets();
    MARK(3)
    shares.share = notes.share, shares.even = notes.even, shares.seq = notes.seq, shares.before = notes.before;
    int stage = 0;
    Part p;

    if (warp >= 8) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;" ::: "memory");
        u32 parity = 1, of_queries = 1;
        while (warp == 8 && next_part<false>(shares, p)) {
            const int* const pages = table + (long long)p.seq * table_stride;
            const int first_box = p.begin * (KEYS / BOX), boxes = min(p.end * (KEYS / BOX), quotient(p.len, BOX));
            auto page_of = [&](int box) { return box < boxes ? load_now<false>(pages + box * BOX / block_size) : 0; };
            int here = page_of(first_box + lane), ahead = page_of(first_box + 32 + lane), box = first_box;
            MARK(4)
            wait(asked + 8, of_queries);
            of_queries ^= 1;
            if (lane == 0) expect(asked, QUERIES);
            __syncwarp();
            if (lane < PIECES) load_box(queries + 8192 * lane, q_map, 64 * lane, 64 * row, p.seq, asked);
            for (int tile = p.begin; tile < p.end; tile++) {
                const int count = max(min(KEYS / BOX, boxes - box), 0), at = (box - first_box) % 32;
                if (at == 0 && box > first_box) here = ahead, ahead = page_of(box + 32 + lane);
#if SEESAW
#pragma unroll
                for (int i = 0; i < 2; i++) {  // what the warpgroup of this tile frees first is read first
                    const int half = i ? 1 - stage : stage, barrier = full + 8 * (2 * stage + half);
                    wait(empty + 8 * (2 * stage + half), parity);
                    MARK(5 + i)
                    if (lane == 0) expect(barrier, count * BOX * 128 * (4 + i));
                    __syncwarp();
                    for (int j = 0; j < count; j++) {
                        const int page = __shfl_sync(~0u, here, at + j), piece = lane == 4 ? 8 : 4 * half + lane;
                        const u32 to = ring + STAGE * stage + PIECE * piece + 128 * BOX * j;
                        const int from = (box + j) * BOX % block_size;
                        if (lane >= 4 + i || j % CLUSTER != rank) continue;
                        if (CLUSTER == 1) load_box(to, kv_map, 64 * piece, from, page, barrier);
                        else load_box_for_both(to, kv_map, 64 * piece, from, page, barrier);
                    }
                }
#else
                wait(empty + 8 * stage, parity);
                if (lane < GROUPS) expect(full + 8 * (GROUPS * stage + lane), count * BOX * 128 * IN_GROUP);
                __syncwarp();
                for (int j = 0; j < count; j++) {
                    const int page = __shfl_sync(~0u, here, at + j);
                    if (lane < PIECES)
                        load_box(ring + STAGE * stage + PIECE * lane + 128 * BOX * j, kv_map, 64 * lane,
                                 (box + j) * BOX % block_size, page, full + 8 * (GROUPS * stage + lane / IN_GROUP));
                }
#endif
                box += count;
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;" ::: "memory");
        const int half = warp / 4, quad = lane % 4, row_of_lane = warp % 4 * 16 + lane / 4;  // of channels; of heads
#if SEESAW
        u32 of_queries = 0;
        const u32 own = ring + STAGE * half, others = ring + STAGE * (1 - half), mine = half * 4 * PIECE;  // mine: of the channels
        for (int before = 0, part = 0; next_part<false>(shares, p); before += p.end - p.begin, part++) {
            const int tiles = p.end - p.begin;
            float sum[LATENT / 4], top[2], total[2] = {};
            top[0] = top[1] = LOWEST;
#pragma unroll
            for (int i = 0; i < LATENT / 4; i++) sum[i] = 0;
            auto scale_sums = [&](const float (&by)[2]) {
                if (!__ballot_sync(~0u, by[0] != 1 || by[1] != 1)) return;
                total[0] *= by[0], total[1] *= by[1];
#pragma unroll
                for (int i = 0; i < LATENT / 4; i++) sum[i] *= by[i % 4 / 2];
            };
            auto weigh_others = [&](int tile) {  // tile: of all that this block has had
                wait(weights + 8 * (1 - half), tile / 2 & 1);
                float by[2];
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const float now = notes.tops[1 - half][row_of_lane + 8 * r];
                    by[r] = now == top[r] ? 1 : power_of_2(top[r] - now), top[r] = now;
                }
                scale_sums(by);
            };
            auto multiply_others = [&] {
                begin_multiply();
#pragma unroll
                for (int i = 0; i < KEYS / 16; i++)
                    weigh(sum, descriptor(others + 8 * PIECE) + i * 2, transposed(others + mine) + i * 2048 / 16);
                commit_multiply();
            };
            auto release = [&](int stage) {  // this half of the channels
                if (CLUSTER == 1 && lane == 0) arrive(empty + 8 * (2 * stage + half));
                if (CLUSTER > 1 && lane < CLUSTER) arrive_at(empty + 8 * (2 * stage + half), lane);
            };
            auto drop_past = [&](int left, u32 values) {  // what lies past the end can be NaN
                for (int i = thread % 128 + max(left, 0) * 8; i < KEYS * 8; i += 128)
#pragma unroll
                    for (int piece = 0; piece < 4; piece++) store_zeros(values + PIECE * piece + 16 * i);
                show_to_multiply();
                group_meets(half);
            };
            wait(asked, of_queries);
            of_queries ^= 1;
            MARK(7)
            const int first = (before ^ half) & 1;
            if (first >= tiles && lane == 0) arrive(asked + 8);
            for (int t = first; t < tiles; t += 2) {
                const u32 parity = (before + t) / 2 & 1;
                float score[KEYS / 2];
#pragma unroll
                for (int group = 0; group < 2; group++) {
                    const int from = group ? 1 - half : half;
                    wait(full + 8 * (2 * half + from), parity);
                    MARK(8 + group)
                    if (group == 0) begin_multiply();
#pragma unroll
                    for (int i = 0; i < 4 * (4 + group); i++) {  // 16 channels are 32 bytes
                        const u32 piece = i / 4 == 4 ? 8 : 4 * from + i / 4;
                        multiply(score, descriptor(queries + 8192 * piece) + i % 4 * 2, descriptor(own + PIECE * piece) + i % 4 * 2, group + i);
                    }
                }
                commit_multiply();
                finish_multiply<0>();
                MARK(10)
                if (t + 2 >= tiles && lane == 0) arrive(asked + 8);
#pragma unroll
                for (int i = 0; i < KEYS / 2; i++) asm volatile("" : "+f"(score[i])::"memory");  // not read earlier
                group_meets(half);  // all have read the rotary keys, which weights replace
                if (t > 0) weigh_others(before + t - 1), multiply_others();

                const int left = p.len - (p.begin + t) * KEYS;
                if (left < KEYS) {
#pragma unroll
                    for (int i = 0; i < KEYS / 2; i++)
                        if (i / 4 * 8 + quad * 2 + i % 2 >= left) score[i] = LOWEST;
                }
                float by[2];
                u32 weight[KEYS / 16][4];
#pragma unroll
                for (int r = 0; r < 2; r++) {  // the row of this lane, and 8 below
                    float most = score[2 * r];
#pragma unroll
                    for (int i = 0; i < KEYS / 2; i++)
                        if (i % 4 / 2 == r) most = fmaxf(most, score[i]);
                    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
                    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2)) * scale;
                    const bool grows = most > top[r] + GROWTH;
                    by[r] = grows ? power_of_2(top[r] - most) : 1;
                    if (grows) top[r] = most;
                    if (quad == 0) notes.tops[half][row_of_lane + 8 * r] = top[r];
                    const float base = top[r] == LOWEST ? 0 : top[r];
                    float added = 0;
#pragma unroll
                    for (int i = 2 * r; i < KEYS / 2; i += 4) {
                        const float low = power_of_2(fmaf(score[i], scale, -base)), high = power_of_2(fmaf(score[i + 1], scale, -base));
                        added += low + high;
                        weight[i / 8][i % 8 / 2] = narrow(low, high);
                        const u32 row_at = row_of_lane + 8 * r, column = i / 4 * 16 + 4 * quad;  // bytes
                        store_pair(own + 8 * PIECE + row_at * 128 + (column ^ (row_at % 8) * 16), weight[i / 8][i % 8 / 2]);
                    }
                    total[r] = fmaf(total[r], by[r], added);
                }
                show_to_multiply();
                __syncwarp();
                if (lane == 0) arrive(weights + 8 * half);
                MARK(11)
                finish_multiply<0>();
                MARK(12)
                if (t > 0) release(1 - half);
#pragma unroll
                for (int i = 0; i < LATENT / 4; i++) asm volatile("" : "+f"(sum[i])::"memory");
                if (__ballot_sync(~0u, by[0] != 1 || by[1] != 1)) {
#pragma unroll
                    for (int i = 0; i < LATENT / 4; i++) sum[i] *= by[i % 4 / 2];
                }
                if (left < KEYS) drop_past(left, own + mine);
                begin_multiply();
#pragma unroll
                for (int i = 0; i < KEYS / 16; i++) weigh(sum, weight[i], transposed(own + mine) + i * 2048 / 16);
                commit_multiply();
                finish_multiply<0>();
                release(half);
                MARK(13)
            }
            if ((before + tiles - 1 ^ half) & 1) {
                weigh_others(before + tiles - 1);
                const int left = p.len - (p.end - 1) * KEYS;
                if (left < KEYS) drop_past(left, others + mine);
                multiply_others();
                finish_multiply<0>();
                release(1 - half);
                MARK(14)
            }
#pragma unroll
            for (int r = 0; r < 2; r++) {
                total[r] += __shfl_xor_sync(~0u, total[r], 1);
                total[r] += __shfl_xor_sync(~0u, total[r], 2);
                if (quad == 0) notes.totals[part % 2][half][row_of_lane + 8 * r] = total[r];
            }
            groups_meet();
            MARK(15)
#pragma unroll
            for (int r = 0; r < 2; r++) total[r] += notes.totals[part % 2][1 - half][row_of_lane + 8 * r];
#pragma unroll
            for (int i = 0; i < LATENT / 4; i++) asm volatile("" : "+f"(sum[i])::"memory");
#else
        u32 parity = 0, of_queries = 0, turn = 0;
        while (next_part<false>(shares, p)) {
            float sum[LATENT / 4], top[2], total[2] = {};
            top[0] = top[1] = LOWEST;
#pragma unroll
            for (int i = 0; i < LATENT / 4; i++) sum[i] = 0;
            wait(asked, of_queries);
            of_queries ^= 1;
            for (int tile = p.begin; tile < p.end; tile++) {
                const u32 keys = ring + STAGE * stage, values = keys + half * 4 * PIECE;
                float score[KEYS / 2];
                if (TURNS) {
                    if (half || turn) wait(turns + 8 * half, half ? turn & 1 : turn - 1 & 1);
                    turn++;
                }
#pragma unroll
                for (int group = 0; group < GROUPS; group++) {
                    wait(full + 8 * (GROUPS * stage + group), parity);
                    if (group == 0) begin_multiply();
#pragma unroll
                    for (int i = 0; i < 4 * IN_GROUP; i++) {  // 16 channels are 32 bytes
                        const int piece = IN_GROUP * group + i / 4;
                        multiply(score, descriptor(queries + 8192 * piece) + i % 4 * 2, descriptor(keys + PIECE * piece) + i % 4 * 2, group + i);
                    }
                }
                commit_multiply();
                if (TURNS && lane == 0) arrive(turns + 8 * (1 - half));
                finish_multiply<0>();
                if (tile == p.end - 1 && lane == 0) arrive(asked + 8);
#pragma unroll
                for (int i = 0; i < KEYS / 2; i++) asm volatile("" : "+f"(score[i])::"memory");  // not read earlier

                const int left = p.len - tile * KEYS;
                if (left < KEYS) {  // past the end: no weight, and no NaN that it would be multiplied by
#pragma unroll
                    for (int i = 0; i < KEYS / 2; i++)
                        if (i / 4 * 8 + quad * 2 + i % 2 >= left) score[i] = LOWEST;
                    for (int i = thread % 128 + max(left, 0) * 8; i < KEYS * 8; i += 128)
#pragma unroll
                        for (int piece = 0; piece < 4; piece++) store_zeros(values + PIECE * piece + 16 * i);
                    show_to_multiply();
                    group_meets(half);
                }
                float base[2];
                u32 grows = 0;
#pragma unroll
                for (int r = 0; r < 2; r++) {  // the row of this lane, and 8 below
                    float most = score[2 * r];
#pragma unroll
                    for (int i = 0; i < KEYS / 2; i++)
                        if (i % 4 / 2 == r) most = fmaxf(most, score[i]);
                    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
                    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2)) * scale;
                    const float decay = most > top[r] + GROWTH ? power_of_2(top[r] - most) : 1;
                    if (most > top[r] + GROWTH) top[r] = most, grows = 1;
                    total[r] *= decay, base[r] = decay;
                }
                if (__ballot_sync(~0u, grows)) {
#pragma unroll
                    for (int i = 0; i < LATENT / 4; i++) sum[i] *= base[i % 4 / 2];
                }
#pragma unroll
                for (int r = 0; r < 2; r++) base[r] = top[r] == LOWEST ? 0 : top[r];
                u32 weight[KEYS / 16][4];
#pragma unroll
                for (int i = 0; i < KEYS / 2; i += 2) {
                    const int r = i % 4 / 2;
                    const float low = power_of_2(fmaf(score[i], scale, -base[r])), high = power_of_2(fmaf(score[i + 1], scale, -base[r]));
                    total[r] += low + high;
                    weight[i / 8][i % 8 / 2] = narrow(low, high);
                }
                begin_multiply();
#pragma unroll
                for (int i = 0; i < KEYS / 16; i++) weigh(sum, weight[i], transposed(values) + i * 2048 / 16);
                commit_multiply();
                finish_multiply<0>();
                if (lane == 0) arrive(empty + 8 * stage);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
#pragma unroll
            for (int i = 0; i < LATENT / 4; i++) asm volatile("" : "+f"(sum[i])::"memory");
#pragma unroll
            for (int r = 0; r < 2; r++) {
                total[r] += __shfl_xor_sync(~0u, total[r], 1);
                total[r] += __shfl_xor_sync(~0u, total[r], 2);
            }
#endif
            const int slot = slot_of(shares.of, p.index);
            if (thread == 0 && row == 0 && p.index == 0) counts[2 * p.seq] = p.first, counts[2 * p.seq + 1] = p.count;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int head = 64 * row + row_of_lane + 8 * r, channel = 256 * half + 2 * quad;
                if (head >= heads) continue;
                const float by = total[r] == 0 ? 0 : v_scale / total[r];
                if (p.count == 1) {
                    u32* const to = (u32*)(out + ((long long)p.seq * heads + head) * LATENT + channel);
#pragma unroll
                    for (int i = 0; i < 32; i++) to[4 * i] = narrow(sum[4 * i + 2 * r] * by, sum[4 * i + 2 * r + 1] * by);
                } else {
                    const long long at = (long long)slot * heads + head;
                    float2* const to = (float2*)(parts + at * LATENT + channel);
#pragma unroll
                    for (int i = 0; i < 32; i++) to[4 * i] = make_float2(sum[4 * i + 2 * r] * by, sum[4 * i + 2 * r + 1] * by);
                    if (half == 0 && quad == 0) sums[at] = total[r] == 0 ? top[r] : top[r] + log2f(total[r]);
                }
            }
        }
    }
    MARK(16)
    if (CLUSTER > 1) cluster_meets();  // neither ends while the other one copies or arrives
}

// out: weighted sums of parts. A warp adds up a quarter of a head's channels; blocks have `rows` heads each.
extern "C" __global__ void __launch_bounds__(COMBINE_THREADS, 16) mla_combine(
    u16* __restrict__ out, const float* __restrict__ parts, const float* __restrict__ sums, const int* __restrict__ counts,
    int heads, int rows) {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int lane = threadIdx.x % 32, blocks = quotient(heads, rows), seq = blockIdx.x / blocks, from = blockIdx.x % blocks * rows;
    const int first = load_now<false>(counts + 2 * seq), count = load_now<false>(counts + 2 * seq + 1);
    if (count == 1) return;
    for (int unit = threadIdx.x / 32; unit < 4 * min(rows, heads - from); unit += COMBINE_THREADS / 32) {
        const int head = from + unit / 4, channel = unit % 4 * 128 + 4 * lane;
        auto place = [&](int part) { return (long long)slot_of(first + part, part) * heads + head; };
        float share[MOST / 32], most = LOWEST, all = 0;
#pragma unroll
        for (int i = 0; i < MOST / 32; i++) {
            share[i] = 32 * i + lane < count ? load_number(sums + place(32 * i + lane)) : LOWEST;
            most = fmaxf(most, share[i]);
        }
#pragma unroll
        for (int i = 16; i; i /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, i));
        const float base = most == LOWEST ? 0 : most;
#pragma unroll
        for (int i = 0; i < MOST / 32; i++) share[i] = power_of_2(share[i] - base), all += share[i];
#pragma unroll
        for (int i = 16; i; i /= 2) all += __shfl_xor_sync(~0u, all, i);
        const float by = all == 0 ? 0 : 1 / all;
        float4 sum = {};
#pragma unroll
        for (int i = 0; i < MOST / 32; i++) {
            if (32 * i >= count) break;
#pragma unroll 8
            for (int j = 0; j < min(32, count - 32 * i); j++) {
                const float4 v = load_part((const float4*)(parts + place(32 * i + j) * LATENT + channel));
                const float w = __shfl_sync(~0u, share[i], j);
                sum.x += w * v.x, sum.y += w * v.y, sum.z += w * v.z, sum.w += w * v.w;
            }
        }
        *(uint2*)(out + ((long long)seq * heads + head) * LATENT + channel) =
            make_uint2(narrow(sum.x * by, sum.y * by), narrow(sum.z * by, sum.w * by));
    }
}
