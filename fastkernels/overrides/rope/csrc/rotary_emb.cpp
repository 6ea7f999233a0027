// rotary_emb on a CPU: channel j of a head pairs with j + half. In place, in float32, each product rounded.

#include <ATen/Parallel.h>

#include <cstdint>

#include "numbers.hpp"

namespace {

struct Call {
  void *query, *key;
  const float *cosines, *sines;  // [tokens, half], rows `table_t` apart
  int64_t tokens, query_heads, key_heads, half;
  int64_t query_t, query_h, key_t, key_h, table_t;
};

template <typename T>
inline void put(T* to, float x, bool) {
  store(to, x);
}
inline void put(Bf16* to, float x, bool truncate) {
  truncate ? to->bits = static_cast<uint16_t>(to_bits(x) >> 16), void() : store(to, x);
}

template <typename T, bool TRUNCATE>
void rotate(T* head, const float* cosines, const float* sines, int64_t half) {
#pragma omp simd
  for (int64_t j = 0; j < half; ++j) {
    const float x1 = load(head[j]), x2 = load(head[half + j]);
    put(head + j, x1 * cosines[j] - x2 * sines[j], TRUNCATE);
    put(head + half + j, x2 * cosines[j] + x1 * sines[j], TRUNCATE);
  }
}

template <typename T, bool TRUNCATE>
void run(const Call& c) {
  constexpr int64_t ENOUGH = 1 << 14;  // channels that are worth a thread
  const int64_t heads = c.query_heads + c.key_heads;
  at::parallel_for(0, c.tokens, 1 + ENOUGH / (heads * c.half), [&](int64_t from, int64_t to) {
    for (int64_t t = from; t < to; ++t) {
      const float *cosines = c.cosines + t * c.table_t, *sines = c.sines + t * c.table_t;
      T *query = static_cast<T*>(c.query) + t * c.query_t, *key = static_cast<T*>(c.key) + t * c.key_t;
      for (int64_t h = 0; h < c.query_heads; ++h) rotate<T, TRUNCATE>(query + h * c.query_h, cosines, sines, c.half);
      for (int64_t h = 0; h < c.key_heads; ++h) rotate<T, TRUNCATE>(key + h * c.key_h, cosines, sines, c.half);
    }
  });
}

}  // namespace

// dtype: 0 float32, 1 bfloat16, 2 float16, 3 bfloat16 whose results are truncated
extern "C" void rotary_emb(const Call* call, int dtype) {
  dtype == 0   ? run<float, false>(*call)
  : dtype == 1 ? run<Bf16, false>(*call)
  : dtype == 2 ? run<Fp16, false>(*call)
               : run<Bf16, true>(*call);
}
