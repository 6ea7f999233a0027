// Latent attention of one query per sequence on Hopper: 512 channels of a latent and 64 of a rotary key, 16-bit, float32 sums.
//
// A block computes up to 64 heads of a sequence over a range of its keys, its part. One warp copies queries, and keys in tiles
// of 64, to shared memory (tensor maps, 128-byte swizzle). One warpgroup computes scores and weights; two add up half of the
// channels each. A tile is wgmma's right operand twice, with the channels and then with the keys as its k; when its scores are
// known, weights take the place of its rotary keys. Shared memory holds two tiles: what counts is how soon one is free again.
//
// A wgmma whose sums other instructions touch before it ends makes the compiler wait after each wgmma of the kernel: a
// warpgroup has one set of sums, and waits for its products before it reads them.
//
// A maximum that grows by less than GROWTH (a power of 2) is kept: weights may exceed 1, and sums need not be scaled.
//
// Workers are the blocks of a sequence's heads. The lengths are divided among them on the device, so one CUDA graph serves all
// lengths: each sequence into equal parts, one part a worker, if no worker then gets more than in equal ranges of all tiles,
// where a sequence counts EXTRA more. The results of a sequence with several parts go through memory, in float16 with a scale.
// The block that is last to store one adds up all of them; those of many parts are left to mla_combine.
//
// Compile-time constants: BOX (keys of one copy, which are in one block of the cache), LEAST (tiles of the smallest part of long sequences),
// EXTRA, JOINED (most heads times parts of a sequence that its last block adds up), SPARSE (a sequence's keys are chosen by indices; see
// mla_sparse), BF16. multiply() for scores and weigh() precede this file.

struct __align__(128) TensorMap { u64 opaque[16]; };

constexpr int LATENT = 512, PIECES = 9, THREADS = 512, COMBINE_THREADS = 64, MOST = 160;  // pieces of 64 channels; workers
constexpr int KEYS = 64, PIECE = 128 * 64, TILE = PIECES * PIECE;  // bytes; queries are as large as a tile
constexpr int BOXES = KEYS / BOX;
#define LOWEST __int_as_float(0xff800000)
constexpr float GROWTH = 8;  // of a maximum, as a power of 2, that leaves sums as they are
static_assert(KEYS % BOX == 0 && BOX % 8 == 0, "a copy begins where the swizzle does");

__device__ __forceinline__ void load_box(u32 to, const TensorMap& map, int channel, int row, int block, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                 ::"r"(to), "l"(&map), "r"(channel), "r"(row), "r"(block), "r"(barrier) : "memory");
}

__device__ __forceinline__ int load_now(const int* at) {  // from L2: the previous kernel may have written it
    int v;
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}

__device__ __forceinline__ u32 narrow_half(float low, float high) {  // float16, whatever the dtype
    u32 bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

__device__ __forceinline__ float widen_half(u16 bits) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
    return f;
}

__device__ __forceinline__ uint4 load_eight(const uint4* at) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}

__device__ __forceinline__ void copy_or_zero(u32 to, const u16* from, bool there) {  // 16 bytes
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void arrive_when_copied(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void copies_end() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void store_zeros(u32 at) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
}

__device__ __forceinline__ void store_pair(u32 at, u32 v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}

__device__ __forceinline__ void show_to_multiply() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void group_meets(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }

__device__ __forceinline__ void plan_is_ready() { asm volatile("bar.arrive 4, %0;" ::"n"(SPARSE ? 512 : 416) : "memory"); }

__device__ __forceinline__ void wait_for_plan() { asm volatile("bar.sync 4, %0;" ::"n"(SPARSE ? 512 : 416) : "memory"); }

__device__ __forceinline__ void halves_meet() { asm volatile("bar.sync 5, 256;" ::: "memory"); }

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

__device__ __forceinline__ int tiles_of(int keys) { return max(quotient(keys, KEYS), 1); }

constexpr int KEPT = 512;  // sequences whose lengths are kept in shared memory

struct Notes {  // in shared memory
    int share, even, seq, before;
    float by[2][64], tops[2][64], totals[2][64];  // of each row, with a tile's weights: what sums change by; at a part's end
    int joins, lens[KEPT];  // joins: whether this block adds up a sequence's parts
};

// The work of worker `of`, and how all keys are divided.
struct Shares {
    const int *kept, *lens;
    int most;  // keys of a sequence that count
    int batch, of, share, even;  // even: a sequence is divided into parts of up to `share` tiles
    int seq, before;  // the next sequence, and what all sequences before it count

    __device__ __forceinline__ int len(int i) const { return min(batch <= KEPT ? kept[i] : load_now(lens + i), most); }
};

struct Part {
    int seq, len, begin, end;  // tiles
    int index, count, first;  // of the sequence's parts; the worker of its first one
};

// By a whole warp.
__device__ __forceinline__ void divide(Shares& s, int workers) {
    const int lane = threadIdx.x % 32;
    int total = 0;
#pragma unroll 1
    for (int i = lane; i < s.batch; i += 32) total += tiles_of(s.len(i));
    total = __reduce_add_sync(~0u, total);
    s.share = max(quotient(total + EXTRA * s.batch, workers), LEAST + EXTRA), s.even = 0;
    if (s.batch <= workers) {  // the smallest part with which there are enough workers, if it is not larger than that
        float mine[MOST / 32];
#pragma unroll
        for (int i = 0; i < MOST / 32; i++) mine[i] = 32 * i + lane < s.batch ? tiles_of(s.len(32 * i + lane)) : 0;
        int low = max(quotient(total, workers), total > 32 * s.batch ? LEAST : 1) - 1, high = s.share + 1;
        while (low + 1 < high) {
            const int size = (low + high) / 2;
            const float inverse = 1.0f / size, up = size - 0.5f;
            int parts = 0;
#pragma unroll
            for (int i = 0; i < MOST / 32; i++) parts += (int)((mine[i] + up) * inverse);  // rounded up
            if (__reduce_add_sync(~0u, parts) <= workers) high = size; else low = size;
        }
        if (high <= s.share) s.share = high, s.even = 1;
    }
    const int from = s.even ? s.of : s.of * s.share;
    const float inverse = 1.0f / s.share, up = s.share - 0.5f;
    s.before = 0;
#pragma unroll 1
    for (s.seq = 0; s.seq < s.batch; s.seq += 32) {
        const int i = s.seq + lane, tiles = i < s.batch ? tiles_of(s.len(i)) : 0;
        const int count = i >= s.batch ? 0 : s.even ? (int)((tiles + up) * inverse) : tiles + EXTRA;
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
__device__ __forceinline__ bool next_part(Shares& s, Part& p) {
    if (s.seq >= s.batch) return false;
    p.seq = s.seq, p.len = s.len(s.seq);
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

// Where a worker stores its part: at most one that is a sequence's first of several, and one that is a later one.
__device__ __forceinline__ int slot_of(int worker, int index) { return 2 * worker + (index == 0); }

// Pairs 8 channels apart, of four lanes, become 8 channels in a row: v[j] of lane i and v[i] of lane j change places.
__device__ __forceinline__ uint4 in_a_row(u32 (&v)[4], int quad) {
#pragma unroll
    for (int by = 1; by <= 2; by *= 2) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & by) continue;
            const bool upper = quad & by;
            const u32 other = __shfl_xor_sync(~0u, upper ? v[i] : v[i + by], by);
            if (upper) v[i] = other; else v[i + by] = other;
        }
    }
    return make_uint4(v[0], v[1], v[2], v[3]);
}

// Weights of a sequence's parts, of which a lane has one, from the logarithms of their sums.
__device__ __forceinline__ float weight_of(float log) {
    float most = log;
#pragma unroll
    for (int i = 16; i; i /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, i));
    const float share = power_of_2(log - (most == LOWEST ? 0 : most));
    float all = share;
#pragma unroll
    for (int i = 16; i; i /= 2) all += __shfl_xor_sync(~0u, all, i);
    return all == 0 ? 0 : share / all;
}

// By eight warps: out of a sequence = weighted sums of its parts. A warp adds up two heads at a time.
__device__ __forceinline__ void join(
    u16* out, const uint4* parts, const float4* sums, const Part& p, int heads, int from, int warp, int lane) {
    constexpr int AHEAD = 2;  // parts that are read before their weights are known
    for (int group = from; group < min(from + 64, heads); group += 16) {
        struct { uint4 of[2][AHEAD][2]; } early;
        float4 about[2];  // of a lane's part
        auto place = [&](int part, int i) {  // past the last head: that of the first one
            const int head = group + 8 * i + warp;
            return (long long)slot_of(p.first + part, part) * heads + (head < heads ? head : group);
        };
        auto value = [&](int part, int i, int half) { return load_eight(parts + place(part, i) * 64 + 32 * half + lane); };
#pragma unroll
        for (int i = 0; i < 2; i++) about[i] = load_part(sums + place(min(lane, p.count - 1), i));
#pragma unroll
        for (int part = 0; part < AHEAD; part++)
#pragma unroll
            for (int i = 0; i < 4; i++) early.of[i / 2][part][i % 2] = value(part, i / 2, i % 2);
        float weights[2][2], sum[2][2][8] = {};  // of a lane's part: of halves; of two heads, by halves
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float weight = weight_of(lane < p.count ? about[i].x : LOWEST);
            weights[i][0] = weight * about[i].y, weights[i][1] = weight * about[i].z;
        }
        auto add = [&](const uint4& v, int part, int i, int half) {
            const float w = __shfl_sync(~0u, weights[i][half], part);
            const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                sum[i][half][2 * j] += w * widen_half((u16)pairs[j]);
                sum[i][half][2 * j + 1] += w * widen_half((u16)(pairs[j] >> 16));
            }
        };
#pragma unroll
        for (int part = 0; part < AHEAD; part++)
#pragma unroll
            for (int i = 0; i < 4; i++) add(early.of[i / 2][part][i % 2], part, i / 2, i % 2);
#pragma unroll 2
        for (int part = AHEAD; part < p.count; part++) {
            uint4 v[4];
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] = value(part, i / 2, i % 2);
#pragma unroll
            for (int i = 0; i < 4; i++) add(v[i], part, i / 2, i % 2);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int head = group + 8 * (i / 2) + warp;
            u32 v[4];
#pragma unroll
            for (int j = 0; j < 4; j++) v[j] = narrow(sum[i / 2][i % 2][2 * j], sum[i / 2][i % 2][2 * j + 1]);
            const uint4 all = in_a_row(v, lane % 4);
            if (head < heads) ((uint4*)(out + (long long)head * LATENT + 256 * (i % 2)))[lane] = all;
        }
    }
}

// 120 registers of each thread leave room for a block of mla_combine, which then need not be started when this ends.
extern "C" __global__ void __maxnreg__(120) mla_decode(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap kv_map, const int* __restrict__ lens,
    const int* __restrict__ table, u16* __restrict__ out, uint4* __restrict__ parts, float* __restrict__ sums,
    int* __restrict__ counts, u32* __restrict__ tickets, const int* __restrict__ indices, const u16* __restrict__ cache, long long block_stride,
    int key_stride, int most, int batch, int heads, int rows, int block_size, int width, int table_stride, float scale, float v_scale) {
    extern __shared__ __align__(1024) unsigned char memory[];

    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const int thread = threadIdx.x, lane = thread % 32;
    const int warp = __shfl_sync(~0u, thread / 32, 0);  // the compiler sees that it is alike in a warp
    const u32 queries = (shared_address(memory) + 1023) & ~1023u, ring = queries + TILE;  // two tiles
    // Barriers: of a tile's halves (the second one has the rotary keys), there and read; of its weights; of queries, there and read
    const u32 full = ring + 2 * TILE, empty = full + 32, weights = empty + 32, asked = weights + 16;
    Notes& notes = *(Notes*)(memory + (asked + 16 - shared_address(memory)));
    const int row = blockIdx.x % rows, workers = gridDim.x / rows;  // row: of blocks, which has up to 64 heads
    Shares shares = {notes.lens, lens, most, batch, (int)blockIdx.x / rows, 0, 0, 0, 0};
    int stage = 0;
    Part p = {};
    auto take_plan = [&] {
        wait_for_plan();
        shares.share = notes.share, shares.even = notes.even, shares.seq = notes.seq, shares.before = notes.before;
    };

    if (warp == 12) {  // the previous kernel may still write them: see below
#pragma unroll 1
        for (int i = lane; i < batch && batch <= KEPT; i += 32) notes.lens[i] = load_now(lens + i);
    }
    if (thread == THREADS - 32) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(&q_map) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&kv_map) : "memory");
        for (int i = 0; i < 4; i++) make_barrier(full + 8 * i, SPARSE ? 128 : 1), make_barrier(empty + 8 * i, 4);
        make_barrier(asked, 1), make_barrier(asked + 8, 4), make_barrier(weights, 4), make_barrier(weights + 8, 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        show_to_multiply();
    }
    __syncthreads();
    if (warp >= 12) {
        // The previous kernel may still run and write lengths. The plan is made meanwhile, and again if they have changed.
        bool more = false;
        int here = 0;  // pages of the part's next keys
        auto page_of = [&](int box) {
            const int page = box * BOX / block_size;
            const bool there = box < p.end * BOXES && box * BOX < p.len && (u32)page < (u32)width;
            return there ? load_now(table + (long long)p.seq * table_stride + page) : 0;
        };
        if (warp == 12) {
            Shares first = shares;
            divide(first, workers);
            for (bool again = false;; again = true) {
                shares.share = first.share, shares.even = first.even, shares.seq = first.seq, shares.before = first.before;
                more = next_part(first, p);
                if (!again) asm volatile("griddepcontrol.wait;" ::: "memory");
                if (!SPARSE && more) here = page_of(p.begin * BOXES + lane);
                if (again) break;
                int changed = batch > KEPT;
                for (int i = lane; i < batch && batch <= KEPT; i += 32) {
                    const int len = load_now(lens + i);
                    if (len != notes.lens[i]) notes.lens[i] = len, changed = 1;
                }
                __syncwarp();
                if (!__ballot_sync(~0u, changed)) break;
                first = shares;
                divide(first, workers);
            }
            if (lane == 0) notes.share = shares.share, notes.even = shares.even, notes.seq = shares.seq, notes.before = shares.before;
            shares = first;
            __syncwarp();
            plan_is_ready();
        }
        asm volatile("setmaxnreg.dec.sync.aligned.u32 64;" ::: "memory");
        if (SPARSE && warp > 12) {
            take_plan();
            more = next_part(shares, p);
        }
        u32 parity = 1, of_queries = 1;
        auto read_queries = [&] {
            wait(asked + 8, of_queries);
            of_queries ^= 1;
            if (lane == 0) expect(asked, TILE);
            __syncwarp();
            if (lane < PIECES) load_box(queries + PIECE * lane, q_map, 64 * lane, 64 * row, p.seq, asked);
        };
#if SPARSE
        const int own_row = warp % 4 * 16 + lane / 8;  // of a tile; and 4, 8 and 12 below. Eight lanes read 128 bytes
        for (; more; more = next_part(shares, p)) {
            const int *const pages = table + (long long)p.seq * table_stride, *const chosen = indices + (long long)p.seq * most;
            struct { int of[4]; } index, page, next;
            auto index_of = [&](int tile, int i) {
                const int at = KEYS * tile + own_row + 4 * i;
                return tile < p.end && at < p.len ? load_now(chosen + at) : -1;
            };
#pragma unroll
            for (int i = 0; i < 4; i++) index.of[i] = index_of(p.begin, i), next.of[i] = index_of(p.begin + 1, i);
#pragma unroll
            for (int i = 0; i < 4; i++) page.of[i] = index.of[i] < 0 ? 0 : load_now(pages + index.of[i] / block_size);
            if (warp == 12) read_queries();
            for (int tile = p.begin; tile < p.end; tile++) {
                const u16* from[4];
                bool there[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    there[i] = index.of[i] >= 0;
                    from[i] = cache + 8 * (lane % 8);
                    if (there[i]) from[i] += page.of[i] * block_stride + (long long)(index.of[i] % block_size) * key_stride;
                    index.of[i] = next.of[i];
                    page.of[i] = index.of[i] < 0 ? 0 : load_now(pages + index.of[i] / block_size);
                    next.of[i] = index_of(tile + 2, i);
                }
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    wait(empty + 8 * (2 * stage + half), parity);
#pragma unroll
                    for (int piece = 4 * half; piece < 4 + 5 * half; piece++) {
#pragma unroll
                        for (int k = 0; k < 4; k++) {
                            const int to = own_row + 4 * k;
                            copy_or_zero(ring + TILE * stage + PIECE * piece + 128 * to + 16 * (lane % 8 ^ to % 8),
                                         from[k] + 64 * piece, there[k]);
                        }
                    }
                    arrive_when_copied(full + 8 * (2 * stage + half));
                }
                parity ^= stage, stage ^= 1;
            }
        }
        copies_end();
#else
        for (bool known = true; more; more = next_part(shares, p), known = false) {
            const int first_box = p.begin * BOXES, boxes = min(p.end * BOXES, quotient(p.len, BOX));
            if (!known) here = page_of(first_box + lane);
            int ahead = page_of(first_box + 32 + lane), box = first_box;
            read_queries();
            for (int tile = p.begin; tile < p.end; tile++) {
                const int count = max(min(BOXES, boxes - box), 0), at = (box - first_box) % 32;
                if (at == 0 && box > first_box) here = ahead, ahead = page_of(box + 32 + lane);
#pragma unroll
                for (int half = 0; half < 2; half++) {  // a lane has a piece
                    const int piece = 4 * half + lane;
                    const u32 barrier = full + 8 * (2 * stage + half);
                    wait(empty + 8 * (2 * stage + half), parity);
                    if (lane == 0) expect(barrier, (4 + half) * count * BOX * 128);
                    __syncwarp();
                    for (int j = 0; j < count; j++) {
                        const int page = __shfl_sync(~0u, here, at + j), from = (box + j) * BOX % block_size;
                        const u32 to = ring + TILE * stage + PIECE * piece + 128 * BOX * j;
                        if (lane < 4 + half) load_box(to, kv_map, 64 * piece, from, page, barrier);
                    }
                }
                box += count;
                parity ^= stage, stage ^= 1;
            }
        }
#endif
        return;
    }
    const int quad = lane % 4, row_of_lane = warp % 4 * 16 + lane / 4;  // of heads
    u32 parity = 0;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    auto next = [&] { parity ^= stage, stage ^= 1; };
    if (warp < 4) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 80;" ::: "memory");
        take_plan();
        u32 of_queries = 0;
        while (next_part(shares, p)) {
            wait(asked, of_queries), of_queries ^= 1;
            float top[2], total[2] = {};
            top[0] = top[1] = LOWEST;
            for (int t = p.begin; t < p.end; t++) {
                const u32 own = ring + TILE * stage;
                float score[KEYS / 2];
                int chosen[2];
#pragma unroll
                for (int i = 0; SPARSE && i < 2; i++) {
                    const int at = t * KEYS + 32 * i + lane;
                    chosen[i] = at < p.len ? load_now(indices + (long long)p.seq * most + at) : -1;
                }
#pragma unroll
                for (int piece = 0; piece < PIECES; piece++) {
                    if (piece % 4 == 0 && piece < 8) {
                        wait(full + 8 * (2 * stage + piece / 4), parity);
                        if (SPARSE) show_to_multiply();
                        begin_multiply();
                    }
#pragma unroll
                    for (int k = 0; k < 4; k++)  // 16 channels are 32 bytes
                        multiply(score, descriptor(queries + PIECE * piece) + k * 2, descriptor(own + PIECE * piece) + k * 2, piece + k);
                }
                commit_multiply();
                finish_multiply<0>();
#pragma unroll
                for (int i = 0; i < KEYS / 2; i++) asm volatile("" : "+f"(score[i])::"memory");  // not read earlier
                const bool last = t + 1 == p.end;
                if (last && lane == 0) arrive(asked + 8);

                const int left = p.len - t * KEYS;
                if (!SPARSE && left < KEYS) {
#pragma unroll
                    for (int i = 0; i < KEYS / 2; i++)
                        if (i / 4 * 8 + quad * 2 + i % 2 >= left) score[i] = LOWEST;
                }
                if (SPARSE) {
                    const u32 there[2] = {__ballot_sync(~0u, chosen[0] >= 0), __ballot_sync(~0u, chosen[1] >= 0)};
#pragma unroll
                    for (int i = 0; i < KEYS / 2 && ~(there[0] & there[1]); i++)
                        if (!(there[i / 16] >> (i / 4 % 4 * 8 + quad * 2 + i % 2) & 1)) score[i] = LOWEST;
                }
                float most_of[2] = {score[0], score[2]};
#pragma unroll
                for (int i = 0; i < KEYS / 2; i++) most_of[i % 4 / 2] = fmaxf(most_of[i % 4 / 2], score[i]);
#pragma unroll
                for (int i = 0; i < 4; i++) most_of[i % 2] = fmaxf(most_of[i % 2], __shfl_xor_sync(~0u, most_of[i % 2], 1 + i / 2));
                group_meets(0);  // all have read the rotary keys, which weights replace
#pragma unroll
                for (int r = 0; r < 2; r++) {  // the row of this lane, and 8 below
                    const int own_row = row_of_lane + 8 * r;
                    const float now = most_of[r] * scale;
                    const bool grows = now > top[r] + GROWTH;
                    const float by = grows ? power_of_2(top[r] - now) : 1;
                    if (grows) top[r] = now;
                    const float base = top[r] == LOWEST ? 0 : top[r];
                    float added = 0;
#pragma unroll
                    for (int i = 2 * r; i < KEYS / 2; i += 4) {
                        const float low = power_of_2(fmaf(score[i], scale, -base)), high = power_of_2(fmaf(score[i + 1], scale, -base));
                        added += low + high;
                        const int column = i / 4 * 16 + 4 * quad;  // bytes
                        store_pair(own + 8 * PIECE + own_row * 128 + (column ^ (own_row % 8) * 16), narrow(low, high));
                    }
                    total[r] = fmaf(total[r], by, added);
                    if (quad == 0) notes.by[stage][own_row] = by;
                    if (last) {
                        float all = total[r] + __shfl_xor_sync(~0u, total[r], 1);
                        all += __shfl_xor_sync(~0u, all, 2);
                        if (quad == 0) notes.totals[stage][own_row] = all, notes.tops[stage][own_row] = top[r];
                    }
                }
                show_to_multiply();
                __syncwarp();
                if (lane == 0) arrive(weights + 8 * stage);
                next();
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 168;" ::: "memory");
        take_plan();
        const int half = warp / 4 - 1;  // of channels
        while (next_part(shares, p)) {
            float sum[LATENT / 4], top[2], total[2];
#pragma unroll
            for (int i = 0; i < LATENT / 4; i++) sum[i] = 0;
            for (int t = p.begin; t < p.end; t++) {
                const u32 own = ring + TILE * stage, mine = own + half * 4 * PIECE;
                wait(full + 8 * (2 * stage + half), parity), wait(weights + 8 * stage, parity);
                float by[2];
#pragma unroll
                for (int r = 0; r < 2; r++) by[r] = notes.by[stage][row_of_lane + 8 * r];
                if (t + 1 == p.end) {
#pragma unroll
                    for (int r = 0; r < 2; r++)
                        top[r] = notes.tops[stage][row_of_lane + 8 * r], total[r] = notes.totals[stage][row_of_lane + 8 * r];
                }
                if (__ballot_sync(~0u, by[0] != 1 || by[1] != 1)) {
#pragma unroll
                    for (int i = 0; i < LATENT / 4; i++) sum[i] *= by[i % 4 / 2];
                }
                const int left = p.len - t * KEYS;
                if (!SPARSE && left < KEYS) {  // what lies past the end can be NaN
                    for (int i = thread % 128 + max(left, 0) * 8; i < KEYS * 8; i += 128)
#pragma unroll
                        for (int piece = 0; piece < 4; piece++) store_zeros(mine + PIECE * piece + 16 * i);
                    show_to_multiply();
                    group_meets(1 + half);
                }
                if (SPARSE) show_to_multiply();
#pragma unroll
                for (int i = 0; i < LATENT / 4; i++) asm volatile("" : "+f"(sum[i])::"memory");
                begin_multiply();
#pragma unroll
                for (int i = 0; i < KEYS / 16; i++) {
                    weigh<0>(sum, descriptor(own + 8 * PIECE) + i * 2, transposed(mine) + i * 2048 / 16);
                    weigh<64>(sum, descriptor(own + 8 * PIECE) + i * 2, transposed(mine + 2 * PIECE) + i * 2048 / 16);
                }
                commit_multiply();
                finish_multiply<0>();
#pragma unroll
                for (int i = 0; i < LATENT / 4; i++) asm volatile("" : "+f"(sum[i])::"memory");
                if (lane == 0) arrive(empty + 8 * (2 * stage + half));
                next();
            }
            const int slot = slot_of(shares.of, p.index);
            const bool joined = p.count <= 32 && p.count * min(heads, 64) <= JOINED;
            if (thread == 128 && row == 0 && p.index == 0) counts[2 * p.seq] = p.first, counts[2 * p.seq + 1] = joined ? -p.count : p.count;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int head = 64 * row + row_of_lane + 8 * r;
                float by = total[r] == 0 ? 0 : v_scale / total[r], peak = 0;
                if (p.count == 1) {
                    uint4* const to = (uint4*)(out + ((long long)p.seq * heads + head) * LATENT + 256 * half) + quad;
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        u32 v[4];
#pragma unroll
                        for (int j = 0; j < 4; j++) v[j] = narrow(sum[16 * i + 4 * j + 2 * r] * by, sum[16 * i + 4 * j + 2 * r + 1] * by);
                        const uint4 all = in_a_row(v, quad);
                        if (head < heads) to[4 * i] = all;
                    }
                    continue;
                }
                // In float16, times a power of 2 with which the largest is from 2^14 to 2^15: it is stored with the sum
#pragma unroll
                for (int i = 0; i < 32; i++) peak = fmaxf(peak, fmaxf(fabsf(sum[4 * i + 2 * r]), fabsf(sum[4 * i + 2 * r + 1])));
                peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
                peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2)) * fabsf(by);
                const int exponent = max(__float_as_int(peak) >> 23, 15);
                by *= __int_as_float((268 - exponent) << 23);
                if (head >= heads) continue;
                const long long at = (long long)slot * heads + head;
                uint4* const to = parts + at * 64 + 32 * half + quad;
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    u32 v[4];
#pragma unroll
                    for (int j = 0; j < 4; j++) v[j] = narrow_half(sum[16 * i + 4 * j + 2 * r] * by, sum[16 * i + 4 * j + 2 * r + 1] * by);
                    to[4 * i] = make_uint4(v[0], v[1], v[2], v[3]);
                }
                if (quad == 0) sums[4 * at + 1 + half] = __int_as_float((exponent - 14) << 23);
                if (half == 0 && quad == 0) sums[4 * at] = total[r] == 0 ? top[r] : top[r] + log2f(total[r]);
            }
            if (p.count == 1 || !joined) continue;
            halves_meet();
            if (thread == 128) {
                u32* const ticket = tickets + p.seq * rows + row;
                notes.joins = add_to(ticket, 1) == p.count - 1;
                if (notes.joins) *ticket = 0;  // for the next launch
            }
            halves_meet();
            if (notes.joins)
                join(out + (long long)p.seq * heads * LATENT, parts, (const float4*)sums, p, heads, 64 * row, warp - 4, lane);
            halves_meet();
        }
    }
}

// out: weighted sums of parts that no block has added up. Blocks take turns with heads: a warp has every other part.
extern "C" __global__ void __launch_bounds__(COMBINE_THREADS, 16) mla_combine(
    u16* __restrict__ out, const uint4* __restrict__ parts, const float4* __restrict__ sums, const int* __restrict__ counts,
    int batch, int heads) {
    __shared__ float weights[2][MOST];  // of halves of parts
    __shared__ float4 others[2][2][32];  // sums of half a head, for the other warp
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int turn = blockIdx.x;  // heads that come before this block's next one
    for (int from = 0; from < batch; from += 32) {
        const int seq_of_lane = min(from + lane, batch - 1);
        const int first_of_lane = load_now(counts + 2 * seq_of_lane), count_of_lane = load_now(counts + 2 * seq_of_lane + 1);
        for (u32 left = __ballot_sync(~0u, from + lane < batch && count_of_lane > 1); left; left &= left - 1) {
            const int bit = __ffs(left) - 1, seq = from + bit;
            const int first = __shfl_sync(~0u, first_of_lane, bit), count = __shfl_sync(~0u, count_of_lane, bit);
            for (; turn < heads; turn += gridDim.x) {
                auto place = [&](int part) { return (long long)slot_of(first + part, part) * heads + turn; };
                auto value = [&](int part, int half) { return load_eight(parts + place(part) * 64 + 32 * half + lane); };
                struct { uint4 of[2][2]; } early;  // which do not wait for weights
#pragma unroll
                for (int i = 0; i < 4; i++) early.of[i / 2][i % 2] = value(min(warp + i / 2 * 2, count - 1), i % 2);
                float4 about[MOST / 32];
                float most = LOWEST, all = 0;
#pragma unroll
                for (int i = 0; i < MOST / 32; i++) {
                    if (32 * i >= count) break;
                    about[i] = load_part(sums + place(min(32 * i + lane, count - 1)));
                    most = fmaxf(most, about[i].x);
                }
#pragma unroll
                for (int i = 16; i; i /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, i));
                const float base = most == LOWEST ? 0 : most;
#pragma unroll
                for (int i = 0; i < MOST / 32; i++) {
                    if (32 * i >= count) break;
                    const float share = 32 * i + lane < count ? power_of_2(about[i].x - base) : 0;
                    all += share;
                    weights[0][32 * i + lane] = share * about[i].y, weights[1][32 * i + lane] = share * about[i].z;
                }
#pragma unroll
                for (int i = 16; i; i /= 2) all += __shfl_xor_sync(~0u, all, i);
                const float by = all == 0 ? 0 : 1 / all;
                __syncthreads();
                float sum[2][8] = {};
                auto add = [&](const uint4& v, int part, int half) {
                    const float w = weights[half][part];
                    const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        sum[half][2 * j] += w * widen_half((u16)pairs[j]);
                        sum[half][2 * j + 1] += w * widen_half((u16)(pairs[j] >> 16));
                    }
                };
                add(early.of[0][0], warp, 0), add(early.of[0][1], warp, 1);
                if (warp + 2 < count) add(early.of[1][0], warp + 2, 0), add(early.of[1][1], warp + 2, 1);
#pragma unroll 4
                for (int part = warp + 4; part < count; part += 2) {
                    const uint4 low = value(part, 0), high = value(part, 1);
                    add(low, part, 0), add(high, part, 1);
                }
                float(&kept)[8] = sum[0];
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const float given = warp ? sum[0][i] : sum[1][i];
                    ((float*)&others[warp][i / 4][lane])[i % 4] = given;
                    kept[i] = warp ? sum[1][i] : sum[0][i];
                }
                __syncthreads();
                u32 v[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float4 more = others[1 - warp][j / 2][lane];
                    v[j] = narrow((kept[2 * j] + (j % 2 ? more.z : more.x)) * by, (kept[2 * j + 1] + (j % 2 ? more.w : more.y)) * by);
                }
                ((uint4*)(out + ((long long)seq * heads + turn) * LATENT + 256 * warp))[lane] = in_a_row(v, lane % 4);
            }
            turn -= heads;
        }
    }
}
