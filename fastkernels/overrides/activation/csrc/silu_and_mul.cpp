// silu_and_mul on a CPU: each of the two steps in float32, and rounded.

#include <ATen/Parallel.h>

#include <cstdint>

#include "numbers.hpp"

namespace {

inline float silu(float x) {
  const float size = std::fabs(x), e = size > 87.0f ? 0.0f : exponential(-size);
  return x / (1.0f + (x < 0 ? 1.0f / e : e));
}

template <typename T>
void run(const T* x, T* out, int64_t rows, int64_t size, int64_t stride) {
  constexpr int64_t ENOUGH = 1 << 13;  // channels that are worth a thread
  at::parallel_for(0, rows, 1 + ENOUGH / size, [&](int64_t from, int64_t to) {
    for (int64_t row = from; row < to; ++row) {
      const T *gate = x + row * stride, *up = gate + size;
      T* y = out + row * size;
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) {
        T activated;
        store(&activated, silu(load(gate[i])));
        store(y + i, load(activated) * load(up[i]));
      }
    }
  });
}

}  // namespace

// x: rows of 2 * size channels, `stride` apart; dtype: 0 float32, 1 bfloat16, 2 float16
extern "C" void silu_and_mul(const void* x, void* out, int64_t rows, int64_t size, int64_t stride, int dtype) {
  dtype == 0   ? run(static_cast<const float*>(x), static_cast<float*>(out), rows, size, stride)
  : dtype == 1 ? run(static_cast<const Bf16*>(x), static_cast<Bf16*>(out), rows, size, stride)
               : run(static_cast<const Fp16*>(x), static_cast<Fp16*>(out), rows, size, stride);
}
