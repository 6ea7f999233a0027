// Emulates on a CPU the GPU features that csrc/attention_decode.cu uses: clusters of blocks in sequence, a fiber for each thread,
// so that what a warp's lanes say to each other costs little. A warp runs as far as it can before another does: who should
// have waited for another warp finds what was not there yet. Copies take place when they are waited for, and spoil what
// they will overwrite when they are begun. Included by emulated_decode.py behind on_cpu.hpp, whose types it uses.
#include <ucontext.h>

#include <deque>

using std::max;
struct float2 { float x, y; };
struct uint2 { unsigned x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct Meeting { int size = 0, here = 0, held = 0; };
struct Copy { unsigned char* to; const void* from; bool there; int bytes; };
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    Meeting* waits_for = nullptr;
    int until = 0, at_cluster = 0;
    bool ended = false;
    std::deque<std::vector<Copy>> copies;  // in groups, the last of which is not committed
};

static std::vector<Fiber> fibers;
static int running;
static ucontext_t launcher;
static Meeting of_cluster;
static std::vector<Meeting> of_blocks, of_warps;
static int per_block, first_block;  // threads; the cluster's first block
#ifndef EMULATED_BLOCKS
#define EMULATED_BLOCKS CLUSTER
#endif
constexpr int BLOCK_MEMORY = sizeof shared_memory / (EMULATED_BLOCKS);
static uint32_t said[512][32][8];  // by each lane of a warp

inline bool may_run(const Fiber& f) { return !f.ended && (!f.waits_for || f.waits_for->held != f.until); }

inline void become(int fiber) {
    running = fiber, threadIdx.x = fiber % per_block, blockIdx.x = first_block + fiber / per_block;
}

inline void run_another() {  // in the same warp, if one can
    const int last = running, warp = last / 32 * 32, count = (int)fibers.size();
    for (int i = 1; i <= count + 32; i++) {
        const int other = i <= 32 ? warp + (last + i) % 32 : (last + i - 32) % count;
        if (!may_run(fibers[other])) continue;
        if (other == last) return;
        become(other);
        swapcontext(&fibers[last].context, &fibers[other].context);
        return;
    }
    for (const Fiber& f : fibers) if (!f.ended) fail("waits for ever");
    swapcontext(&fibers[last].context, &launcher);
}

inline int arrive_at(Meeting& m) {
    const int held = m.held;
    if (++m.here == m.size) m.here = 0, m.held++;
    return held;
}

inline void wait_past(Meeting& m, int held) {
    if (m.held != held) return;
    Fiber& self = fibers[running];
    self.waits_for = &m, self.until = held;
    run_another();
    self.waits_for = nullptr;
}

inline void meets(Meeting& m) { wait_past(m, arrive_at(m)); }
inline void arrive_at_cluster() { fibers[running].at_cluster = arrive_at(of_cluster); }
inline void wait_for_cluster() { wait_past(of_cluster, fibers[running].at_cluster); }

inline int rank_of_block() { return running / per_block; }
inline unsigned char* block_memory() { return shared_memory + rank_of_block() * BLOCK_MEMORY; }
inline uint32_t in_block(uint32_t address, int rank) { return address + (rank - rank_of_block()) * BLOCK_MEMORY; }
inline void meet_block() { meets(of_blocks[rank_of_block()]); }
#define __syncthreads meet_block
#undef SHARED_MEMORY
#define SHARED_MEMORY(alignment) unsigned char* memory = block_memory()
inline void __syncwarp() { meets(of_warps[running / 32]); }

inline int __syncthreads_or(int value) {
    static int any[16], result[16];
    const int rank = rank_of_block();
    any[rank] |= value;
    meet_block();
    if (threadIdx.x == 0) result[rank] = any[rank], any[rank] = 0;
    meet_block();
    return result[rank];
}

// All lanes say `value`; each then hears what `heard` makes of it: heard(lane) is the lane's words.
template <class T, class F> auto among(const T& value, const F& heard) {
    const int warp = running / 32;
    memcpy(said[warp][threadIdx.x % 32], &value, sizeof value);
    __syncwarp();
    const auto result = heard([&](int lane) {
        T other;
        memcpy(&other, said[warp][lane], sizeof other);
        return other;
    });
    __syncwarp();
    return result;
}

template <class T> T __shfl_sync(unsigned, T v, int lane) { return among(v, [&](auto of) { return of(lane); }); }
template <class T> T __shfl_xor_sync(unsigned, T v, int mask) {
    return among(v, [&](auto of) { return of(threadIdx.x % 32 ^ mask); });
}
template <class T> T __shfl_up_sync(unsigned, T v, int by) {
    const int lane = threadIdx.x % 32;
    return among(v, [&](auto of) { return of(lane >= by ? lane - by : lane); });
}
inline unsigned __ballot_sync(unsigned, bool v) {
    return among(v, [&](auto of) {
        unsigned all = 0;
        for (int lane = 0; lane < 32; lane++) all |= (unsigned)of(lane) << lane;
        return all;
    });
}
inline int __popc(unsigned v) { return __builtin_popcount(v); }

inline uint16_t half_of(uint32_t two, int i) { return two >> 16 * i; }

inline uint32_t transpose(uint32_t two) {  // lane (row, quad) has columns 2 quad and 2 quad + 1
    const int row = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
    return among(two, [&](auto of) {
        const uint32_t low = half_of(of(2 * quad * 4 + row / 2), row % 2);
        return low | (uint32_t)half_of(of((2 * quad + 1) * 4 + row / 2), row % 2) << 16;
    });
}

struct Rows { uint32_t of[4]; };

inline void load_tiles_transposed(uint32_t (&a)[4], uint32_t row) {
    const int column = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
    const Rows found = among(row, [&](auto of) {
        Rows r;
        for (int tile = 0; tile < 4; tile++) {
            uint16_t two[2];
            for (int i = 0; i < 2; i++) memcpy(&two[i], at(of(8 * tile + 2 * quad + i)) + 2 * column, 2);
            r.of[tile] = two[0] | (uint32_t)two[1] << 16;
        }
        return r;
    });
    for (int i = 0; i < 4; i++) a[i] = found.of[i];
}

inline float float_of_half(uint16_t bits) {
    _Float16 f;
    memcpy(&f, &bits, 2);
    return f;
}

inline uint16_t half_of_float(float f) {
    const _Float16 h = f;
    uint16_t b;
    memcpy(&b, &h, 2);
    return b;
}

inline float number(uint16_t bits) {  // of the dtype that the kernel is compiled for
#if BF16
    const uint32_t wide = (uint32_t)bits << 16;
    float f;
    memcpy(&f, &wide, 4);
    return f;
#else
    return float_of_half(bits);
#endif
}

inline uint16_t rounded(float f) {
#if BF16
    uint32_t b;
    memcpy(&b, &f, 4);
    return (b + 0x7fff + (b >> 16 & 1)) >> 16;
#else
    return half_of_float(f);
#endif
}

struct Operands { uint32_t a[4], b[2]; };

// m16n8k16; value: that of an operand's 16 bits
inline void multiply_tiles(float (&c)[4], const Operands& mine, float (*value)(uint16_t) = number) {
    const int group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
    struct Sums { float of[4]; };
    const Sums found = among(mine, [&](auto of) {
        Sums s;
        for (int i = 0; i < 4; i++) {
            s.of[i] = c[i];
            for (int k = 0; k < 16; k++) {
                const Operands row = of(group * 4 + k % 8 / 2), column = of((2 * quad + i % 2) * 4 + k % 8 / 2);
                const uint32_t a = row.a[i / 2 + k / 8 * 2], b = column.b[k / 8];
                s.of[i] += value(half_of(a, k % 2)) * value(half_of(b, k % 2));
            }
        }
        return s;
    });
    for (int i = 0; i < 4; i++) c[i] = found.of[i];
}

inline void begin_copy(uint32_t to, const void* from, bool there, int bytes = 16) {
    auto& copies = fibers[running].copies;
    if (copies.empty()) copies.emplace_back();
    memset(at(to), 0xff, bytes);
    copies.back().push_back({at(to), from, there, bytes});
}

inline void close_copies() {
    auto& copies = fibers[running].copies;
    if (copies.empty()) copies.emplace_back();
    copies.emplace_back();
}

inline void finish_copies(int but) {
    auto& copies = fibers[running].copies;
    while ((int)copies.size() > but + 1) {
        for (const Copy& c : copies.front())
            if (c.there) memcpy(c.to, c.from, c.bytes); else memset(c.to, 0, c.bytes);
        copies.pop_front();
    }
}

static void (*body_of_fiber)();

inline void begin_fiber() {
    body_of_fiber();
    fibers[running].ended = true;
    run_another();
}

inline void run_cluster(int blocks, int first, int threads, void (*body)()) {
    body_of_fiber = body, per_block = threads, first_block = first;
    fibers = std::vector<Fiber>(blocks * threads), of_cluster = {blocks * threads};
    of_blocks.assign(blocks, Meeting{threads}), of_warps.assign(blocks * threads / 32, Meeting{32});
    for (Fiber& f : fibers) {
        f.stack.resize(1 << 16);
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.data(), f.context.uc_stack.ss_size = f.stack.size();
        makecontext(&f.context, begin_fiber, 0);
    }
    become(0);
    swapcontext(&launcher, &fibers[0].context);
}
