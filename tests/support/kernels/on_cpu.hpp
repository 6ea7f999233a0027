// Emulates on a CPU the GPU features that csrc/wgmma_linear.cu uses: blocks in sequence, a CPU thread for each CUDA thread.
// Copies and multiplications are done where they are begun, so what comes too early is not found; where things lie,
// who waits for whom and what is added up is. Included by emulated.py, which puts these bodies in the place of PTX.
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __restrict__
#define __shared__ static
#define __global__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __cluster_dims__(...)
#define SHARED_MEMORY(alignment) unsigned char* memory = shared_memory
using std::min;
struct Index { int x; };
struct float4 { float x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct Barrier { int count = 0, pending = 0, phase = 0; long bytes = 0; };

thread_local Index threadIdx, blockIdx;
static Index gridDim;
#ifndef EMULATED_BYTES
#define EMULATED_BYTES (1 << 18)
#endif
alignas(1 << 18) static unsigned char shared_memory[EMULATED_BYTES];
static std::mutex barriers_lock;
static std::unordered_map<uint32_t, Barrier> barriers;  // by shared address
static pthread_barrier_t block_meets, consumers_barrier, warps_meet[4];

inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline void __syncthreads() { pthread_barrier_wait(&block_meets); }
inline void warp_meets() { pthread_barrier_wait(&warps_meet[threadIdx.x / 32]); }
inline unsigned char* at(uint32_t address) { return shared_memory + (int32_t)address; }
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

inline void fail(const char* why) {
    fprintf(stderr, "%s (thread %d of block %d)\n", why, threadIdx.x, blockIdx.x);
    _exit(2);
}

// Of the file of arguments.
template <class T> std::vector<T> numbers(FILE* file, size_t count) {
    std::vector<T> found(count);
    if (fread(found.data(), sizeof(T), count, file) != count) fail("the file of arguments is short");
    return found;
}

inline void count(uint32_t barrier, int arrivals, long bytes) {
    std::lock_guard<std::mutex> guard(barriers_lock);
    Barrier& b = barriers[barrier];
    b.pending -= arrivals, b.bytes += bytes;
    if (b.pending < 0) fail("too many arrivals");
    if (!b.pending && !b.bytes) b.phase ^= 1, b.pending = b.count;
}

inline void wait_for(uint32_t barrier, uint32_t parity) {
    for (int tries = 0; tries < 2000000; tries++) {
        {
            std::lock_guard<std::mutex> guard(barriers_lock);
            if ((uint32_t)barriers[barrier].phase != parity) return;
        }
        std::this_thread::yield();
    }
    fail("waits for ever");
}

// Of a tensor map: its address, rows, columns, stride and rows of a box.
inline void load_box(uint32_t to, const unsigned long long* map, int column, int row, uint32_t barrier) {
    const uint16_t* from = (const uint16_t*)map[0];
    const long rows = map[1], columns = map[2], stride = map[3], box = map[4];
    for (int r = 0; r < box; r++)
        for (int c = 0; c < 64; c++) {
            const uint16_t v = row + r < rows && column + c < columns ? from[(row + r) * stride + column + c] : 0;
            memcpy(at(swizzled(to + 128 * r + 2 * c)), &v, 2);
        }
    count(barrier, 0, -128 * box);
}

inline float e4m3(unsigned char bits) {
    const int exponent = bits >> 3 & 15, mantissa = bits & 7;
    if ((bits & 127) == 127) return NAN;
    const float v = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
    return bits & 128 ? -v : v;
}

inline float operand(unsigned long long descriptor, int row, int k) {  // of 8 rows in 1024 bytes
    return e4m3(*at(swizzled(((descriptor & 0x3fff) << 4) + row / 8 * 1024 + row % 8 * 128 + k)));
}
