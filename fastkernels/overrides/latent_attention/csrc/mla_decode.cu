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
// lengths: into equal ranges of all tiles, where a sequence counts EXTRA more; or each sequence into equal parts, one part a
// worker, or the same number of whole sequences for each worker, if no worker then gets over SLACK more than in ranges.
//
// The results of a sequence with several parts go through memory, in float16 with a scale. When all are there, each of the
// blocks adds up its share of the channels. It cannot wait indefinitely for the others, which may not have started: if one
// has left, the last block to arrive adds up everything.
//
// Compile-time constants: BOX (keys of one copy, which are in one block of the cache), LEAST (tiles of the smallest part of long sequences),
// EXTRA, SLACK, PAIRS (two blocks with the heads of a sequence are neighbors, which saves reads of L2), SPARSE (a sequence's keys are chosen by indices; see mla_sparse), BF16. multiply() for scores and weigh() precede this file.

struct __align__(128) TensorMap { u64 opaque[16]; };

constexpr int LATENT = 512, PIECES = 9, THREADS = 512, ADDERS = 256;  // pieces of 64 channels; threads that have sums
constexpr int STEPS = 2, AHEAD = 1;  // in which a tile's weights are handed over; tiles that are prefetched to L2 before the previous kernel ends
#if PAIRS
#define NEIGHBORS __cluster_dims__(2, 1, 1)
#else
#define NEIGHBORS
#endif
#ifndef TRIES  // a test has its own
#define TRIES 64  // looks at a ticket, each about 0.5 us
#endif
constexpr int KEYS = 64, PIECE = 128 * 64, TILE = PIECES * PIECE;  // bytes; queries are as large as a tile
constexpr int BOXES = KEYS / BOX;
#define LOWEST __int_as_float(0xff800000)
constexpr float GROWTH = 8;  // of a maximum, as a power of 2, that leaves sums as they are
static_assert(KEYS % BOX == 0 && BOX % 8 == 0, "a copy begins where the swizzle does");

__device__ __forceinline__ void load_box(u32 to, const TensorMap& map, int channel, int row, int block, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                 ::"r"(to), "l"(&map), "r"(channel), "r"(row), "r"(block), "r"(barrier) : "memory");
}

__device__ __forceinline__ void prefetch_box(const TensorMap& map, int channel, int row, int block) {  // to L2
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];"
                 ::"l"(&map), "r"(channel), "r"(row), "r"(block) : "memory");
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

__device__ __forceinline__ u32 look_at(const u32* ticket) {
    u32 now;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(ticket) : "memory");
    return now;
}

__device__ __forceinline__ void copy_or_zero(u32 to, const void* from, bool there) {  // 16 bytes
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

__device__ __forceinline__ void halves_meet() { asm volatile("bar.sync 5, %0;" ::"n"(ADDERS) : "memory"); }

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

// Rounded up; exact for less than a million tiles.
__device__ __forceinline__ int parts_of(int tiles, int size) { return (int)((tiles + (size - 0.5f)) * (1.0f / size)); }

constexpr int KEPT = 512;  // sequences whose lengths are kept in shared memory

enum Division { RANGES, EVEN, WHOLE };

struct Part {
    int seq, len, begin, end;  // tiles
    int index, count, first;  // of the sequence's parts; the worker of its first one
};

struct Notes {  // in shared memory
    int share, division, seq, before;
    float by[2][64], tops[2][64], totals[2][64];  // of each row, with a tile's weights: what sums change by; at a part's end
    Part joins[2];  // a later part and a first one of a sequence with several; none if their count is 0
    u32 seen[2];  // in their tickets, with parts that have arrived in bits 0 to 7, blocks that look no more in 8 to 15, that left from 16 on
    int from[2], to[2];  // shares of them that this block adds up
    int lens[KEPT];
};

// The work of worker `of`, and how all keys are divided.
struct Shares {
    const int *kept, *lens;
    int most;  // keys of a sequence that count
    int batch, of, share, division;  // share: tiles of a range or a part, or sequences of a worker
    int seq, before;  // the next sequence, and what all sequences before it count

    __device__ __forceinline__ int tiles(int i) const { return tiles_of(len(i)); }
    __device__ __forceinline__ int len(int i) const { return min(batch <= KEPT ? kept[i] : load_now(lens + i), most); }
    __device__ __forceinline__ int counts(int i) const { return division == EVEN ? parts_of(tiles(i), share) : tiles(i) + EXTRA; }
};

template <class F>
__device__ __forceinline__ int sum_of(int first, int last, const F& value) {
    int all = 0;
#pragma unroll 2
    for (int i = first; i < last; i++) all += value(i);
    return all;
}

// Whether `from` is among the counts of a warp's lanes, which follow `before`: then `owner` is the first lane with which it
// is reached, and `before` what precedes it; otherwise what precedes the next counts.
__device__ __forceinline__ bool find(int count, int from, int& before, int& owner) {
    const int lane = threadIdx.x % 32;
    int upto = count;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const int other = __shfl_up_sync(~0u, upto, by);
        if (lane >= by) upto += other;
    }
    const u32 found = __ballot_sync(~0u, before + upto > from);
    owner = found ? __ffs(found) - 1 : 31;
    before += __shfl_sync(~0u, found ? upto - count : upto, owner);
    return found;
}

// By a whole warp. A lane has `each` sequences in a row.
__device__ __forceinline__ void divide(Shares& s, int workers) {
    const int lane = threadIdx.x % 32, each = (s.batch + 31) / 32, first = min(lane * each, s.batch), last = min(first + each, s.batch);
    const int total = __reduce_add_sync(~0u, sum_of(first, last, [&](int i) { return s.tiles(i); }));
    s.share = max(quotient(total + EXTRA * s.batch, workers), LEAST + EXTRA), s.division = RANGES;
    if (s.batch <= workers) {  // the smallest part with which there are enough workers
        int low = max(quotient(total, workers), total > 32 * s.batch ? LEAST : 1) - 1, high = s.share + SLACK + 1;
        for (int size = low + 1; low + 1 < high; size = (low + high) / 2) {
            const int parts = sum_of(first, last, [&](int i) { return parts_of(s.tiles(i), size); });
            if (__reduce_add_sync(~0u, parts) <= workers) high = size; else low = size;
        }
        if (high <= s.share + SLACK) s.share = high, s.division = EVEN;
    } else if (s.batch <= KEPT) {
        const int size = quotient(s.batch, workers);
        int most = 0;
#pragma unroll 1
        for (int from = lane * size; from < s.batch; from += 32 * size) {
            most = max(most, sum_of(from, min(from + size, s.batch), [&](int i) { return s.tiles(i) + EXTRA; }));
        }
        if (!__ballot_sync(~0u, most > s.share + SLACK)) {
            s.share = size, s.division = WHOLE, s.seq = s.of * size;
            return;
        }
    }
    const int from = s.division == EVEN ? s.of : s.of * s.share;
    const int mine = sum_of(first, last, [&](int i) { return s.counts(i); });
    int owner;
    s.seq = s.batch, s.before = 0;
    if (!find(mine, from, s.before, owner)) return;
    const int start = owner * each, end = min(start + each, s.batch);
    bool found = each == 1;  // always in the end, unless the previous kernel is writing lengths
#pragma unroll 1
    for (s.seq = start; s.seq < end && !found; s.seq += found ? owner : 32)
        found = find(s.seq + lane < end ? s.counts(s.seq + lane) : 0, from, s.before, owner);
}

// False: there is no further part.
__device__ __forceinline__ bool next_part(Shares& s, Part& p) {
    if (s.seq >= s.batch) return false;
    p.seq = s.seq, p.len = s.len(s.seq);
    const int tiles = tiles_of(p.len);
    if (s.division == WHOLE) {
        p.index = 0, p.count = 1, p.begin = 0, p.end = tiles;
        if (++s.seq == (s.of + 1) * s.share) s.seq = s.batch;
        return true;
    }
    if (s.division == EVEN) {
        p.count = parts_of(tiles, s.share), p.index = s.of - s.before, p.first = s.before;
        const float size = (float)tiles / p.count;
        p.begin = (int)(p.index * size), p.end = p.index + 1 == p.count ? tiles : (int)((p.index + 1) * size);
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

// By ADDERS threads: channels of a sequence's heads that are share `index` of them = weighted sums of its parts.
__device__ __forceinline__ void join(
    uint4* out, const uint4* parts, const float4* sums, const Part& p, int index, int heads, int row, unsigned char* memory) {
    constexpr int ABOUT = 80 << 10, REST = ABOUT + (16 << 10);  // bytes before sums of parts, and before those of groups
    const int thread = threadIdx.x - 128, quads = min(heads - 64 * row, 64) * 16;  // of eight channels each
    const int from = index * quads / p.count * 4, size = (index + 1) * quads / p.count * 4 - from, head = from / 64;
    const int there = (from + size - 1) / 64 - head + 1;  // heads
    auto place = [&](int part) { return (long long)slot_of(p.first + part, part) * heads + 64 * row; };
    const uint4* const values = (uint4*)memory;
    const float4* const about = (float4*)(memory + ABOUT);
    float4* const given = (float4*)(memory + REST);
    const float of_size = 1.0f / size, of_there = 1.0f / there;
#pragma unroll 1
    for (int i = thread; i < there * p.count; i += ADDERS) {
        const int part = (int)((i + 0.5f) * of_there);
        copy_or_zero(shared_address(about + i), sums + place(part) + head + i - part * there, true);
    }
#pragma unroll 2
    for (int i = thread; i < size * p.count; i += ADDERS) {
        const int part = (int)((i + 0.5f) * of_size);
        copy_or_zero(shared_address(values + i), parts + place(part) * 64 + from + i - part * size, true);
    }
    copies_end();
    halves_meet();
    int width = ADDERS;  // threads that add up every groups-th part
    while (width > 32 && width / 2 >= size) width /= 2;
    const int groups = ADDERS / width, group = thread / width;
#pragma unroll 1
    for (int base = 0; base < size; base += width) {
        const int at = min(base + thread % width, size - 1), of = (from + at) / 64 - head, half = (from + at) / 32 % 2;
        float top = LOWEST, total = 0, sum[8] = {};
        for (int part = 0; part < p.count; part++) top = fmaxf(top, about[part * there + of].x);
        if (top == LOWEST) top = 0;
#pragma unroll 2
        for (int part = group; part < p.count; part += groups) {
            const float4 a = about[part * there + of];
            const uint4 v = values[part * size + at];
            const float share = power_of_2(a.x - top), w = share * (half ? a.z : a.y);
            const u32 pairs[4] = {v.x, v.y, v.z, v.w};
            total += share;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                sum[2 * j] = fmaf(w, widen_half((u16)pairs[j]), sum[2 * j]);
                sum[2 * j + 1] = fmaf(w, widen_half((u16)(pairs[j] >> 16)), sum[2 * j + 1]);
            }
        }
        if (groups > 1) {  // then there is one round
            float4* const own = given + 3 * thread;
            own[0] = make_float4(sum[0], sum[1], sum[2], sum[3]), own[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
            own[2] = make_float4(total, 0, 0, 0);
            halves_meet();
            if (group) break;
#pragma unroll 1
            for (int other = 1; other < groups; other++) {
                const float4* const more = own + 3 * other * width;
                const float4 low = more[0], high = more[1];
                sum[0] += low.x, sum[1] += low.y, sum[2] += low.z, sum[3] += low.w;
                sum[4] += high.x, sum[5] += high.y, sum[6] += high.z, sum[7] += high.w, total += more[2].x;
            }
        }
        const float by = total == 0 ? 0 : 1 / total;
        u32 v[4];
#pragma unroll
        for (int j = 0; j < 4; j++) v[j] = narrow(sum[2 * j] * by, sum[2 * j + 1] * by);
        const uint4 all = in_a_row(v, threadIdx.x % 4);
        if (base + thread % width < size) out[from + at] = all;
    }
}

extern "C" __global__ void NEIGHBORS __maxnreg__(128) mla_decode(
    const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap kv_map, const int* __restrict__ lens,
    const int* __restrict__ table, u16* __restrict__ out, uint4* __restrict__ parts, float* __restrict__ sums,
    u32* __restrict__ tickets, const int* __restrict__ indices, const u16* __restrict__ cache, long long block_stride,
    int key_stride, int most, int batch, int heads, int rows, int block_size, int width, int table_stride, float scale, float v_scale) {
    SHARED_MEMORY(1024);

    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const int thread = threadIdx.x, lane = thread % 32;
    const int warp = __shfl_sync(~0u, thread / 32, 0);  // the compiler sees that it is alike in a warp
    const u32 queries = (shared_address(memory) + 1023) & ~1023u, ring = queries + TILE;  // two tiles
    // Barriers: of a tile's halves (the second one has the rotary keys), there and read; of its weights; of queries, there and read
    const u32 full = ring + 2 * TILE, empty = full + 32, weights = empty + 32, asked = weights + 32;
    Notes& notes = *(Notes*)(memory + (asked + 16 - shared_address(memory)));
    const int row = blockIdx.x % rows, workers = gridDim.x / rows;  // row: of blocks, which has up to 64 heads
    Shares shares = {notes.lens, lens, most, batch, (int)blockIdx.x / rows, 0, 0, 0, 0};
    int stage = 0;
    Part p = {};
    auto take_plan = [&] {
        wait_for_plan();
        shares.share = notes.share, shares.division = notes.division, shares.seq = notes.seq, shares.before = notes.before;
    };

    auto read_lengths = [&] {  // returns whether they have changed
        bool changed = batch > KEPT;
#pragma unroll 1
        for (int i = lane; i < batch && batch <= KEPT; i += 128) {
            int now[4];
#pragma unroll
            for (int j = 0; j < 4; j++) now[j] = i + 32 * j < batch ? load_now(lens + i + 32 * j) : 0;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (i + 32 * j >= batch || notes.lens[i + 32 * j] == now[j]) continue;
                notes.lens[i + 32 * j] = now[j], changed = true;
            }
        }
        __syncwarp();
        return changed;
    };

    if (warp == 12) read_lengths();  // the previous kernel may still write them: see below
    if (thread == THREADS - 32) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(&q_map) : "memory");
        asm volatile("prefetch.tensormap [%0];" ::"l"(&kv_map) : "memory");
        for (int i = 0; i < 4; i++) make_barrier(full + 8 * i, SPARSE ? 128 : 1), make_barrier(empty + 8 * i, 4);
        make_barrier(asked, 1), make_barrier(asked + 8, 4);
        for (int i = 0; i < 4; i++) make_barrier(weights + 8 * i, 4);
        notes.joins[0].count = notes.joins[1].count = 0;
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
            Shares next;  // after this warp's first part
#pragma unroll 1
            for (bool again = false;; again = true) {
                divide(shares, workers);
                next = shares, more = next_part(next, p);
                if (!again && more && lane < PIECES) prefetch_box(q_map, 64 * lane, 64 * row, p.seq);
                if (!SPARSE && !again && more) {
                    here = page_of(p.begin * BOXES + lane);
                    const int first = p.begin * BOXES, count = min(min(p.end, p.begin + AHEAD) * BOXES, quotient(p.len, BOX)) - first;
#pragma unroll 1
                    for (int j = 0; j < count; j++) {
                        const int page = __shfl_sync(~0u, here, j);
                        if (lane < PIECES) prefetch_box(kv_map, 64 * lane, (first + j) * BOX % block_size, page);
                    }
                }
                if (!again) asm volatile("griddepcontrol.wait;" ::: "memory");
                if (!SPARSE && more) here = page_of(p.begin * BOXES + lane);
                if (again || !__ballot_sync(~0u, read_lengths())) break;
            }
            if (lane == 0) notes.share = shares.share, notes.division = shares.division, notes.seq = shares.seq, notes.before = shares.before;
            shares = next;
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
    const int quad = lane & 3, row_of_lane = warp % 4 * 16 + lane / 4;  // of heads
    u32 parity = 0;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    auto next = [&] { parity ^= stage, stage ^= 1; };
    if (warp < 4) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 112;" ::: "memory");
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
                float most_in[8];  // of every eighth score: a warp has its part of the multiprocessor for itself
#pragma unroll
                for (int i = 0; i < KEYS / 2; i++) most_in[i % 8] = i < 8 ? score[i] : fmaxf(most_in[i % 8], score[i]);
                float most_of[2];
#pragma unroll
                for (int i = 0; i < 4; i += 2)
                    most_of[i / 2] = fmaxf(fmaxf(most_in[i], most_in[i + 1]), fmaxf(most_in[i + 4], most_in[i + 5]));
                float by[2] = {1, 1}, base[2], added[2] = {};
                if (__ballot_sync(~0u, most_of[0] * scale > top[0] + GROWTH || most_of[1] * scale > top[1] + GROWTH)) {
#pragma unroll
                    for (int i = 0; i < 4; i++) most_of[i % 2] = fmaxf(most_of[i % 2], __shfl_xor_sync(~0u, most_of[i % 2], 1 + i / 2));
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const float now = most_of[r] * scale;
                        if (now > top[r] + GROWTH) by[r] = power_of_2(top[r] - now), top[r] = now;
                    }
                }
#pragma unroll
                for (int r = 0; r < 2; r++) {  // the row of this lane, and 8 below
                    base[r] = top[r] == LOWEST ? 0 : top[r];
                    if (quad == 0) notes.by[stage][row_of_lane + 8 * r] = by[r];
                }
                group_meets(0);  // all have read the rotary keys, which weights replace
#pragma unroll
                for (int step = 0; step < STEPS; step++) {
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const int own_row = row_of_lane + 8 * r;
#pragma unroll
                        for (int i = 2 * r + step * (KEYS / 2 / STEPS); i < (step + 1) * (KEYS / 2 / STEPS); i += 4) {
                            const float low = power_of_2(fmaf(score[i], scale, -base[r])), high = power_of_2(fmaf(score[i + 1], scale, -base[r]));
                            added[r] += low + high;
                            const int column = i / 4 * 16 + 4 * quad;  // bytes
                            store_pair(own + 8 * PIECE + own_row * 128 + (column ^ (own_row % 8) * 16), narrow(low, high));
                        }
                        if (step + 1 < STEPS) continue;
                        total[r] = fmaf(total[r], by[r], added[r]);
                        if (last) {
                            float all = total[r] + __shfl_xor_sync(~0u, total[r], 1);
                            all += __shfl_xor_sync(~0u, all, 2);
                            if (quad == 0) notes.totals[stage][own_row] = all, notes.tops[stage][own_row] = top[r];
                        }
                    }
                    show_to_multiply();
                    __syncwarp();
                    if (lane == 0) arrive(weights + 8 * (2 * stage + step));
                }
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
                wait(full + 8 * (2 * stage + half), parity), wait(weights + 16 * stage, parity);
                float by[2];
#pragma unroll
                for (int r = 0; r < 2; r++) by[r] = notes.by[stage][row_of_lane + 8 * r];
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
                    if (i == KEYS / 32) wait(weights + 16 * stage + 8, parity);
                    weigh<0>(sum, descriptor(own + 8 * PIECE) + i * 2, transposed(mine) + i * 2048 / 16);
                    weigh<64>(sum, descriptor(own + 8 * PIECE) + i * 2, transposed(mine + 2 * PIECE) + i * 2048 / 16);
                }
                commit_multiply();
                if (t + 1 == p.end) {
#pragma unroll
                    for (int r = 0; r < 2; r++)
                        top[r] = notes.tops[stage][row_of_lane + 8 * r], total[r] = notes.totals[stage][row_of_lane + 8 * r];
                }
                finish_multiply<0>();
#pragma unroll
                for (int i = 0; i < LATENT / 4; i++) asm volatile("" : "+f"(sum[i])::"memory");
                if (lane == 0) arrive(empty + 8 * (2 * stage + half));
                next();
            }
            const int slot = slot_of(shares.of, p.index);
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
            if (p.count == 1) continue;
            halves_meet();
            if (thread == 128) notes.joins[slot % 2] = p, notes.seen[slot % 2] = add_to(tickets + p.seq * rows + row, 1);
        }
        halves_meet();
#pragma unroll 1
        for (int i = 0; i < 2; i++) {
            const Part own = notes.joins[i];
            if (own.count == 0) continue;
            u32 *const ticket = tickets + own.seq * rows + row, old = 0;
            if (thread == 128) {
                const u32 seen = notes.seen[i];
                bool there = (seen & 255) == own.count - 1, stays = true;
                const bool every = there && seen >> 16;  // a block has left
#pragma unroll 1
                for (int tries = TRIES; tries > 0 && !there; tries--) there = (look_at(ticket) & 255) == own.count;
                if (there) old = add_to(ticket, 0x100);
                else old = add_to(ticket, 0x10100), stays = (old & 255) == own.count;
                notes.from[i] = every ? 0 : own.index, notes.to[i] = every ? own.count : own.index + stays;
            }
            halves_meet();
#pragma unroll 1
            for (int share = notes.from[i]; share < notes.to[i]; share++) {
                join((uint4*)(out + ((long long)own.seq * heads + 64 * row) * LATENT), parts, (const float4*)sums, own, share, heads, row,
                     memory + (ring - shared_address(memory)));
                halves_meet();
            }
            if (thread == 128 && (old >> 8 & 255) == own.count - 1) *ticket = 0;  // for the next launch
        }
    }
}
