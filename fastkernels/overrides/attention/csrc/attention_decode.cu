// Attention of one query per sequence over a paged KV cache on Hopper, in one launch: 16-bit, or a cache in e4m3; float32
// sums, one rounding.
//
// The keys of a sequence are divided into units of KEYS. For each key head, the head's workers (blocks) divide the
// concatenated units of all sequences evenly: one has the end of a sequence, some whole ones, and the beginning of
// another. Each worker computes its share from the lengths. Its warps take units in turn, and each warp reads its own,
// STAGES - 1 ahead, into its own ring: across the ends of sequences, and without barriers between warps. Warps
// synchronize at the end of a sequence to add their sums. A divided sequence leaves float32 parts in memory. The last of
// its workers to arrive, determined by a ticket, adds them in order: equal calls have equal bits. With CLUSTER a worker
// is so many blocks, whose warps share its units; their sums are exchanged in distributed shared memory, which is closer
// than L2. With WHOLE, if no sequence has more keys and each has its own worker, none is divided: no tickets, no parts.
//
// Products are transposed: keys (then the channels of values) are the tensor cores' m16, the query heads of the key head
// their n8. A warp keeps a maximum and a sum of weights for each head. Keys and values in e4m3 are widened to float16 in
// registers, which is exact, and multiplied as float16; queries are clamped to its range. SLOTS warps' sums fit in memory
// at once: until so few are left, half of the warps give theirs to the other half.
//
// A kernel that starts early reads lengths and table before griddepcontrol.wait, when they may be stale, and prefetches
// the keys and values that they name to L2, which is coherent. Everything that it computes with is read after the wait.
// If the lengths have changed, the shares are computed again.
//
// With a window, a sequence's first unit is the first that the window reaches into. No key before it is read.
//
// Compile-time constants: HEADS (query heads per key head, 1 to 16), HEAD_SIZE (a multiple of 8), D (that, rounded up to
// 64, 128 or 256; channels past HEAD_SIZE are zeros that are not read), PAGE (keys of a block), WARPS, KEYS (16 or 32),
// STAGES, RESIDENT (blocks per SM), AHEAD (units that a warp prefetches), CLUSTER (1, 2, 4, 8), WHOLE (keys; 0: divide
// any), SEQS (sequences, at most), SLOTS (WARPS over a power of 2), WINDOW and SOFTCAP (whether the call has one), SINKS
// (0: the call has none; 1: they are float32; 2: the result's dtype), BF16 (of q and the result), FP8 (keys and values are
// in e4m3), QUERY8 (q is, too; the result is not). Rows of q, keys and values start at multiples of 16 bytes; strides
// count 16 bytes, except the table's. scale and softcap contain log2 e. Sinks, one logit for each query head, join the
// last sum.

constexpr int THREADS = 32 * WARPS, TILES = KEYS / 16, COLUMNS = (HEADS + 7) / 8, QUERY = D / 32;
constexpr int ROW = (FP8 ? 1 : 2) * D, CHUNKS = ROW / 16, AT_ONCE = 32 / CHUNKS;  // bytes of a key; pieces of 16 bytes; keys that 32 lanes copy
constexpr int USED = HEAD_SIZE / (FP8 ? 16 : 8), STEPS = ROW / 64;                // pieces that are read; groups of four pieces
constexpr int HALF = KEYS * ROW, STAGE = 2 * HALF, RING = WARPS * STAGES * STAGE;
constexpr int WAYS = CLUSTER * WARPS;                          // warps of a worker
constexpr int ITEMS = HEADS * D / 4, MINE = ITEMS / CLUSTER;   // groups of 4 sums; those that one block of a cluster adds
constexpr int PITCH = D + 4, SUMS = SLOTS * HEADS * PITCH * 4;  // of a head's sums, so that lanes write to different banks; bytes
constexpr int GATHERED = CLUSTER > 1 ? ITEMS * 16 + CLUSTER * HEADS * 8 : 0;  // bytes of MINE items from all blocks
constexpr int EACH = (SEQS + THREADS - 1) / THREADS, ADDED = 8;  // sequences per thread; parts that are read at once
static_assert(HEAD_SIZE % (FP8 ? 16 : 8) == 0 && HEAD_SIZE <= D && (FP8 || !QUERY8) && WARPS % SLOTS == 0 && 32 % CHUNKS == 0 && KEYS % 16 == 0 && KEYS <= 32 && HEADS <= 16 && STAGES >= 2, "what lanes and tiles hold");

extern "C" __global__ void TOGETHER __launch_bounds__(THREADS, RESIDENT) attention_decode(
    const u16* q, const u16* key_cache, const u16* value_cache, u16* out, float* parts, u32* tickets, const int* seq_lens,
    const int* table, int batch, int kv_heads, int blocks, int width, int least, int q_seq, int q_head, int k_block,
    int k_slot, int k_head, int v_block, int v_slot, int v_head, int table_stride, float scale, float v_scale, int early,
    int window, float softcap, const void* sinks) {
    SHARED_MEMORY(128);
    Notes& notes = *(Notes*)(memory + RING + SUMS + 2 * GATHERED);
    int *ends = notes.ends, *lens = notes.lens, *of_warp = notes.of_warp, *first_of = notes.first_of;
    auto *tops = notes.tops, *totals = notes.totals;

    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, group = lane / 4, quad = lane % 4;
    const int rank = blockIdx.x % CLUSTER, kv_head = blockIdx.x / CLUSTER % kv_heads;
    const int worker = blockIdx.x / CLUSTER / kv_heads, most = gridDim.x / CLUSTER / kv_heads;
    const uint4* keys = (const uint4*)key_cache + (long long)kv_head * k_head;
    const uint4* values = (const uint4*)value_cache + (long long)kv_head * v_head;
    const unsigned char* mine = memory + warp * STAGES * STAGE;  // the warp's ring
    const u32 ring = shared_address(mine);
    float* sums = (float*)(memory + RING);
    unsigned char* gathered = memory + RING + SUMS;  // from the cluster: for one sequence, and for the previous one
    if (CLUSTER > 1) cluster_arrives();              // all blocks have started before the wait

    // -- the share

    int known[EACH] = {}, every = 0, workers = 0, begin = 0, last = 0;
    auto read_lengths = [&] {
        bool changed = false;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int seq = thread * EACH + i;
            const int n = seq < batch ? min(max(load_now(seq_lens + seq), 0), width * PAGE) : -1;
            changed |= n != known[i];
            known[i] = n;
        }
        return changed;
    };
    auto skipped = [&](int keys) { return WINDOW ? max(keys - 1 - window, 0) / KEYS : 0; };  // units before the window
    auto make_shares = [&] {
        int units = 0;
        bool cut = !WHOLE || batch > most;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            cut |= known[i] - KEYS * skipped(known[i]) > WHOLE;
            units += known[i] < 0 ? 0 : units_of(known[i]) - skipped(known[i]);
        }
        int upto = units;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int before = __shfl_up_sync(~0u, upto, step);
            if (lane >= step) upto += before;
        }
        if (lane == 31) of_warp[warp] = upto;
        cut = WHOLE ? __syncthreads_or(cut) : (meet(), true);
        int end = upto - units;
        every = begin = last = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) end += w < warp ? of_warp[w] : 0, every += of_warp[w];
        workers = cut ? min(max(every / least, 1), most) : batch;
        if (cut && worker < workers) begin = (u32)worker * every / workers, last = (u32)(worker + 1) * every / workers;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if (known[i] < 0) continue;
            const int start = end, seq = thread * EACH + i;
            end += units_of(known[i]) - skipped(known[i]);
            ends[seq] = end, lens[seq] = known[i];
            if (cut ? start <= begin && begin < end : seq == worker) first_of[0] = seq, first_of[1] = start;
        }
        meet();
        if (!cut && worker < workers) begin = first_of[1], last = ends[worker];
    };

    // -- reads of a warp

    Place start;
    auto settle = [&](Place& p) {
        if (p.unit < last)
            while (p.unit >= ends[p.seq]) p.begin = ends[p.seq++];
    };
    auto step = [&](Place& p) { p.unit += WAYS, settle(p); };
    auto first_key = [&](const Place& p) { return (p.unit - p.begin + skipped(lens[p.seq])) * KEYS; };
    auto look_up = [&](const Place& p) {  // the block of a unit's key, one per lane
        if (p.unit >= last) return 0;
        const int key = first_key(p) + lane % KEYS;
        if (key >= lens[p.seq]) return 0;
        return load_now(table + (long long)p.seq * table_stride + key / PAGE);
    };
    int pages[STAGES];  // of the first units
    auto look_up_first = [&] {
        start = {begin + rank * WARPS + warp, first_of[0], first_of[1]};
        settle(start);
        Place p = start;
#pragma unroll
        for (int i = 0; i < STAGES; i++) pages[i] = look_up(p), step(p);
    };
    auto at_of = [&](const Place& p, u32 page, int block, int slot) {
        return page * block + (u32)(first_key(p) + lane % KEYS) % PAGE * slot;
    };
    auto read = [&](const Place& p, u32 page, int slot) {
        if (p.unit < last) {
            const int left = lens[p.seq] - first_key(p), before = left - 1 - window, chunk = lane % CHUNKS;
            const u32 k_at = at_of(p, page, k_block, k_slot), v_at = at_of(p, page, v_block, v_slot);
            const u32 to = ring + slot * STAGE;
#pragma unroll
            for (int i = 0; i < KEYS / AT_ONCE; i++) {
                // Swizzled, so that 8 lanes that read at once use different banks.
                const int row = i * AT_ONCE + lane / CHUNKS;
                const u32 k_from = __shfl_sync(~0u, k_at, row), v_from = __shfl_sync(~0u, v_at, row);
                const bool there = chunk < USED && row < left && (!WINDOW || row >= before);
                copy_or_zero(to + row * ROW + 16 * (chunk ^ turn_of_key(row)), keys + k_from + chunk, there);
                copy_or_zero(to + HALF + row * ROW + 16 * (chunk ^ turn_of_value(row)), values + v_from + chunk, there);
            }
        }
        commit_copies();  // also empty groups, since groups are counted
    };
    auto bring = [&](const Place& p, u32 page) {  // prefetches a unit, 32 bytes per lane at once
        constexpr int SECTORS = ROW / 32;
        if (p.unit >= last) return;
        page = min(page, (u32)blocks - 1);  // a stale entry can be anything: stay inside the cache
        const u32 k_at = at_of(p, page, k_block, k_slot), v_at = at_of(p, page, v_block, v_slot);
#pragma unroll
        for (int i = 0; i < KEYS * SECTORS / 32; i++) {
            const int row = (32 * i + lane) / SECTORS, sector = lane % SECTORS * 2;
            const u32 k_from = __shfl_sync(~0u, k_at, row), v_from = __shfl_sync(~0u, v_at, row);
            if (sector < USED) bring_to_l2(keys + k_from + sector), bring_to_l2(values + v_from + sector);
        }
    };

    bool foresee = AHEAD && early;
    if (!foresee) kernels_before_end();
    read_lengths();
    for (;;) {
        make_shares();
        look_up_first();
        if (!foresee) break;
        Place p = start;
#pragma unroll
        for (int i = 0; i < AHEAD; i++) bring(p, pages[i]), step(p);
        kernels_before_end();
        foresee = false;
        look_up_first();  // read together with the lengths
        if (!__syncthreads_or(read_lengths())) break;
    }
    if (begin >= last) return;

    Place next = start;
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; i++) {
        read(next, pages[0], i);
        step(next);
#pragma unroll
        for (int j = 0; j < STAGES - 1; j++) pages[j] = pages[j + 1];
    }
    int page = pages[0], slot = 0;

    // -- sequence after sequence
    uint4 query[QUERY][COLUMNS], later[QUERY][COLUMNS];  // 8 adjacent channels of head `group`, which the tensor
    auto load_query = [&](uint4 (&to)[QUERY][COLUMNS], int seq) {  // cores treat as others, in queries and keys alike
#pragma unroll
        for (int c = 0; c < QUERY; c++)
#pragma unroll
            for (int n = 0; n < COLUMNS; n++) {
                // A piece of a key in e4m3 has 16 channels: two pieces of q, or one in e4m3.
                const int head = 8 * n + group, of_key = 4 * (FP8 ? c / 2 : c) + quad;
                to[c][n] = make_uint4(0, 0, 0, 0);
                if (head < HEADS && of_key < USED && !(QUERY8 && c % 2))
                    to[c][n] = load_16((const uint4*)q + (long long)seq * q_seq +
                                       (long long)(kv_head * HEADS + head) * q_head +
                                       (FP8 && !QUERY8 ? 2 * of_key + c % 2 : of_key));
            }
    };
    auto widened = [&](int c, int n) {  // of `later`, for products with keys
        const uint4 v = later[QUERY8 ? c / 2 * 2 : c][n];
        if (!FP8) return v;
        if (!QUERY8) return BF16 ? make_uint4(to_halves(v.x), to_halves(v.y), to_halves(v.z), to_halves(v.w)) : v;
        u32 low[2], high[2];
        halves_of_e4m3(low, c % 2 ? v.z : v.x), halves_of_e4m3(high, c % 2 ? v.w : v.y);
        return make_uint4(low[0], low[1], high[0], high[1]);
    };
    int seq = first_of[0], seq_begin = first_of[1], unit = start.unit, turn = 0;
    load_query(later, seq);
    for (int at = begin; at < last;) {
        const int seq_end = ends[seq], stop = min(seq_end, last);
#pragma unroll
        for (int c = 0; c < QUERY; c++)
#pragma unroll
            for (int n = 0; n < COLUMNS; n++) query[c][n] = widened(c, n);
        if (stop < last) load_query(later, seq + 1);

        float top[COLUMNS][2], total[COLUMNS][2], acc[D / 16][COLUMNS][4];  // of heads 8 n + 2 quad and the one after it
#pragma unroll
        for (int n = 0; n < COLUMNS; n++) {
            top[n][0] = top[n][1] = NONE, total[n][0] = total[n][1] = 0;
#pragma unroll
            for (int j = 0; j < D / 16; j++) acc[j][n][0] = acc[j][n][1] = acc[j][n][2] = acc[j][n][3] = 0;
        }
        for (; unit < stop; unit += WAYS) {
            wait_for_copies<STAGES - 2>();
            __syncwarp();  // all lanes' copies have arrived, and all have read what is overwritten now
            read(next, page, slot ? slot - 1 : STAGES - 1);
            step(next);
            page = look_up(next);

            const unsigned char* k_rows = mine + slot * STAGE + group * ROW;
            float s[TILES][COLUMNS][4], other[TILES][COLUMNS][4];  // of keys `group` and group + 8; two chains of sums
#pragma unroll
            for (int t = 0; t < TILES; t++) {
#pragma unroll
                for (int n = 0; n < COLUMNS; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) s[t][n][i] = other[t][n][i] = 0;
#pragma unroll
                for (int c = 0; c < STEPS; c++) {
                    const unsigned char* from = k_rows + 16 * t * ROW + 16 * (4 * c + quad ^ turn_of_key(group));
                    const uint4 low = *(const uint4*)from, high = *(const uint4*)(from + 8 * ROW);
                    if (FP8) {
                        const u32 lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
                        for (int i = 0; i < 4; i++) {  // four channels each
                            u32 a[2], b[2];
                            halves_of_e4m3(a, lows[i]), halves_of_e4m3(b, highs[i]);
#pragma unroll
                            for (int n = 0; n < COLUMNS; n++) {
                                const uint4 v = query[FP8 ? 2 * c + i / 2 : 0][n];
                                multiply_halves((i % 2 ? other : s)[t][n], a[0], b[0], a[1], b[1], i % 2 ? v.z : v.x,
                                                i % 2 ? v.w : v.y);
                            }
                        }
                        continue;
                    }
#pragma unroll
                    for (int n = 0; n < COLUMNS; n++) {
                        const uint4 v = query[c][n];
                        multiply(s[t][n], low.x, high.x, low.y, high.y, v.x, v.y);
                        multiply(other[t][n], low.z, high.z, low.w, high.w, v.z, v.w);
                    }
                }
            }
            const int left = lens[seq] - first_key({unit, seq, seq_begin}), before = left - 1 - window;
            u32 p[TILES][COLUMNS][2];
#pragma unroll
            for (int n = 0; n < COLUMNS; n++) {
                float highest[2] = {top[n][0], top[n][1]};
#pragma unroll
                for (int t = 0; t < TILES; t++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int key = 16 * t + group + i / 2 * 8;
                        const float score = (s[t][n][i] + other[t][n][i]) * scale;
                        const bool seen = key < left && (!WINDOW || key >= before);
                        s[t][n][i] = !seen ? NONE : SOFTCAP ? capped(score, softcap) : score;
                        highest[i % 2] = fmaxf(highest[i % 2], s[t][n][i]);
                    }
                float decay[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
#pragma unroll
                    for (int step = 4; step < 32; step *= 2)
                        highest[i] = fmaxf(highest[i], __shfl_xor_sync(~0u, highest[i], step));
                    decay[i] = share_of(top[n][i], highest[i]);
                    total[n][i] *= decay[i], top[n][i] = highest[i];
                }
#pragma unroll
                for (int t = 0; t < TILES; t++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        s[t][n][i] = share_of(s[t][n][i], highest[i % 2]);
                        total[n][i % 2] += s[t][n][i];
                    }
#pragma unroll
                for (int t = 0; t < TILES; t++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const float first = s[t][n][2 * i], second = s[t][n][2 * i + 1];
                        p[t][n][i] = transposed(FP8 ? two_halves(first, second) : narrow(first, second));
                    }
#pragma unroll
                for (int j = 0; j < D / 16; j++)
#pragma unroll
                    for (int i = 0; i < 4; i++) acc[j][n][i] *= decay[i % 2];
            }
            const u32 v_row = ring + slot * STAGE + HALF + (lane / 16 * 8 + lane % 8) * ROW;
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int j = 0; j < CHUNKS / 2; j++) {  // 32 bytes of 16 keys' values
                    u32 v[4];
                    load_transposed(v, v_row + 16 * t * ROW + 16 * (2 * j + lane / 8 % 2 ^ turn_of_value(lane % 8)));
                    if (FP8) {
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            // Of two keys, each with two channels: rows `group` and group + 8 are channels 2 group, + 1.
                            u32 a[2], b[2];
                            halves_of_e4m3(a, halves(v[i], 0, 0x3120)), halves_of_e4m3(b, halves(v[i + 2], 0, 0x3120));
#pragma unroll
                            for (int n = 0; n < COLUMNS; n++)
                                multiply_halves(acc[FP8 ? 2 * j + i : 0][n], a[0], a[1], b[0], b[1], p[t][n][0], p[t][n][1]);
                        }
                        continue;
                    }
#pragma unroll
                    for (int n = 0; n < COLUMNS; n++)
                        multiply(acc[j][n], v[0], v[1], v[2], v[3], p[t][n][0], p[t][n][1]);
                }
            slot = slot == STAGES - 1 ? 0 : slot + 1;
        }

        // -- add up the warps

#pragma unroll
        for (int n = 0; n < COLUMNS; n++)
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int step = 4; step < 32; step *= 2) total[n][i] += __shfl_xor_sync(~0u, total[n][i], step);
        constexpr int BETWEEN = FP8 ? 1 : 8;  // channels between rows `group` and group + 8 of a tile
        auto put = [&](int slot) {
#pragma unroll
            for (int n = 0; n < COLUMNS; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int head = 8 * n + 2 * quad + i;
                    if (head >= HEADS) continue;
                    if (group == 0) tops[slot][head] = top[n][i], totals[slot][head] = total[n][i];
                    float* to = sums + (slot * HEADS + head) * PITCH + (FP8 ? 2 : 1) * group;
#pragma unroll
                    for (int j = 0; j < D / 16; j++)
                        to[16 * j] = acc[j][n][i], to[16 * j + BETWEEN] = acc[j][n][i + 2];
                }
        };
        auto add_slot = [&](int slot) {
#pragma unroll
            for (int n = 0; n < COLUMNS; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int head = 8 * n + 2 * quad + i;
                    if (head >= HEADS) continue;
                    const float highest = fmaxf(top[n][i], tops[slot][head]);
                    const float here = share_of(top[n][i], highest), there = share_of(tops[slot][head], highest);
                    total[n][i] = here * total[n][i] + there * totals[slot][head], top[n][i] = highest;
                    const float* from = sums + (slot * HEADS + head) * PITCH + (FP8 ? 2 : 1) * group;
#pragma unroll
                    for (int j = 0; j < D / 16; j++) {
                        acc[j][n][i] = here * acc[j][n][i] + there * from[16 * j];
                        acc[j][n][i + 2] = here * acc[j][n][i + 2] + there * from[16 * j + BETWEEN];
                    }
                }
        };
        meet();  // the previous sums have been read
#pragma unroll
        for (int half = WARPS / 2; half >= SLOTS; half /= 2)
#pragma unroll
            for (int slot = 0; slot < half; slot += SLOTS) {  // SLOTS warps at a time
                if (warp >= half + slot && warp < half + slot + SLOTS) put(warp - half - slot);
                meet();
                if (warp >= slot && warp < slot + SLOTS) add_slot(warp - slot);
                meet();
            }
        if (warp < SLOTS) put(warp);
        meet();
        const bool whole = seq_begin >= begin && seq_end <= last;
        const long long ours = (long long)kv_head * most, at_out = ((long long)seq * kv_heads + kv_head) * HEADS * HEAD_SIZE;
        float2* pairs = (float2*)(parts + 2 * most * (long long)kv_heads * HEADS * D);
        auto share_of_keys = [&](const Sum& all, int head) {  // over the sum of weights
            if (!SINKS) return 1 / all.weights;
            const int at = kv_head * HEADS + head;
            const float sink = 1.4426950408889634f * (SINKS == 1 ? ((const float*)sinks)[at] : widen(((const u16*)sinks)[at]));
            const float highest = fmaxf(all.top, sink), share = share_of(all.top, highest);
            return share / (share * all.weights + share_of(sink, highest));
        };
        auto store = [&](int item, const Sum& all) {
            const int channel = item % (D / 4) * 4;
            if (channel >= HEAD_SIZE) return;
            const float by = all.weights == 0 ? 0 : v_scale * share_of_keys(all, item / (D / 4));
            *(uint2*)(out + at_out + item / (D / 4) * HEAD_SIZE + channel) =
                make_uint2(narrow(all.v.x * by, all.v.y * by), narrow(all.v.z * by, all.v.w * by));
        };
        // A worker has two rows for parts: for its first sequence, and for another that is its last.
        const long long row = 2 * (ours + worker) + (at > begin);
        auto keep = [&](int item, const Sum& all) {
            if (whole) {
                store(item, all);
            } else {
                *((float4*)parts + row * ITEMS + item) = all.v;
                if (item % (D / 4) == 0 || item % MINE == 0)
                    pairs[row * HEADS + item / (D / 4)] = make_float2(all.top, all.weights);
            }
        };
        unsigned char* received = gathered + turn * GATHERED;
        if (CLUSTER > 1 && at == begin) cluster_waits();
#pragma unroll 1
        for (int item = thread; item < ITEMS; item += THREADS) {
            const int head = item / (D / 4);
            const float* from = sums + head * PITCH + item % (D / 4) * 4;
            Sum all;
            for (int w = 0; w < SLOTS; w++) all.top = fmaxf(all.top, tops[w][head]);
            for (int w = 0; w < SLOTS; w++)
                all.add(*(const float4*)(from + w * HEADS * PITCH), make_float2(tops[w][head], totals[w][head]));
            if (CLUSTER == 1) {
                keep(item, all);
                continue;
            }
            const u32 to = shared_address(received);
            send(of_rank(to, item / MINE) + 16 * (rank * MINE + item % MINE), all.v);
            for (int r = 0; item % (D / 4) == 0 && r < CLUSTER; r++)
                send_pair(of_rank(to, r) + 16 * ITEMS + 8 * (rank * HEADS + head), make_float2(all.top, all.weights));
        }
        if (CLUSTER > 1) {
            cluster_arrives(), cluster_waits(), turn ^= 1;
#pragma unroll 1
            for (int item = thread; item < MINE; item += THREADS) {
                const float2* pair = (const float2*)(received + 16 * ITEMS) + (rank * MINE + item) / (D / 4);
                Sum all;
                for (int r = 0; r < CLUSTER; r++) all.top = fmaxf(all.top, pair[r * HEADS].x);
                for (int r = 0; r < CLUSTER; r++) all.add(((const float4*)received)[r * MINE + item], pair[r * HEADS]);
                keep(rank * MINE + item, all);
            }
        }

        // -- add up the workers

        if (!whole) {
            const int first = ((u32)(seq_begin + 1) * workers - 1) / every;
            const int count = ((u32)seq_end * workers - 1) / every - first + 1;
            meet();  // one thread takes the ticket, after all threads have stored
            if (thread == 0) {
                // No other sequence continues from that worker to the next.
                u32* ticket = tickets + (ours + first) * CLUSTER + rank;
                notes.arrived = add_to(ticket, 1) == count - 1;
                if (notes.arrived) *ticket = 0;  // for the next launch
            }
            meet();
            const int bump = seq_begin > (int)((u32)first * every / workers);
#pragma unroll 1
            for (int item = rank * MINE + thread; notes.arrived && item < (rank + 1) * MINE; item += THREADS) {
                Sum all;
#pragma unroll 1
                for (int from = 0; from < count; from += ADDED) {
                    float4 v[ADDED];
                    float2 pair[ADDED];
#pragma unroll
                    for (int i = 0; i < ADDED; i++) {
                        const long long row = 2 * (ours + first + from + i) + (from + i ? 0 : bump);
                        v[i] = make_float4(0, 0, 0, 0), pair[i] = make_float2(NONE, 0);
                        if (from + i < count) {
                            v[i] = load_part((const float4*)parts + row * ITEMS + item);
                            pair[i] = load_pair(pairs + row * HEADS + item / (D / 4));
                        }
                    }
                    const Sum before = all;
                    all = Sum(), all.top = before.top;
#pragma unroll
                    for (int i = 0; i < ADDED; i++) all.top = fmaxf(all.top, pair[i].x);
                    all.add(before.v, make_float2(before.top, before.weights));
#pragma unroll
                    for (int i = 0; i < ADDED; i++) all.add(v[i], pair[i]);
                }
                store(item, all);
            }
        }
        at = stop, seq_begin = seq_end, seq++;
    }
}
