// rms_norm on a CPU, in float32: y = x / sqrt(mean(x^2) + eps) * w, after the sum with a residual, which is replaced.

#include <ATen/Parallel.h>

#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "numbers.hpp"

namespace {

struct Call {
  const void *x, *weight;  // weight: null for none
  void *residual, *out;    // residual: null for none
  int64_t rows, inner, hidden, var_hidden;
  int64_t x_0, x_1, residual_0, residual_1;  // row i is at i / inner * stride_0 + i % inner * stride_1
  float eps;
  int32_t cast_first;
};

template <typename T>
inline float rounded(float x) {
  T stored;
  store(&stored, x);
  return load(stored);
}
template <>
inline float rounded<float>(float x) {
  return x;
}

template <typename T, typename W>
void run(const Call& c) {
  constexpr int64_t ENOUGH = 1 << 14;  // channels that are worth a thread
  const int64_t H = c.hidden;
  at::parallel_for(0, c.rows, 1 + ENOUGH / H, [&](int64_t from, int64_t to) {
    std::vector<float> memory(H);
    float* h = memory.data();
    for (int64_t row = from; row < to; ++row) {
      const T* x = static_cast<const T*>(c.x) + row / c.inner * c.x_0 + row % c.inner * c.x_1;
      T* out = static_cast<T*>(c.out) + row * H;
      if (c.residual == nullptr) {
#pragma omp simd
        for (int64_t i = 0; i < H; ++i) h[i] = load(x[i]);
      } else {
        T* residual = static_cast<T*>(c.residual) + row / c.inner * c.residual_0 + row % c.inner * c.residual_1;
#pragma omp simd
        for (int64_t i = 0; i < H; ++i) {
          h[i] = load(x[i]) + load(residual[i]);
          store(residual + i, h[i]);
        }
      }
      float squares = 0;
#pragma omp simd reduction(+ : squares)
      for (int64_t i = 0; i < c.var_hidden; ++i) squares += h[i] * h[i];
      const float scale = 1.0f / std::sqrt(squares / static_cast<float>(c.var_hidden) + c.eps);
      const W* weight = static_cast<const W*>(c.weight);
      if (weight == nullptr) {
#pragma omp simd
        for (int64_t i = 0; i < H; ++i) store(out + i, h[i] * scale);
      } else if (c.cast_first) {
#pragma omp simd
        for (int64_t i = 0; i < H; ++i) store(out + i, rounded<T>(h[i] * scale) * load(weight[i]));
      } else {
#pragma omp simd
        for (int64_t i = 0; i < H; ++i) store(out + i, h[i] * scale * load(weight[i]));
      }
    }
  });
}

template <typename T>
void norm(const Call& c, bool same) {
  same ? run<T, T>(c) : run<T, float>(c);
}

}  // namespace

// dtype: 0 float32, 1 bfloat16, 2 float16; same: whether the weight has it, too, and is not float32
extern "C" void rms_norm(const Call* call, int dtype, int same) {
  dtype == 0 ? norm<float>(*call, true) : dtype == 1 ? norm<Bf16>(*call, same) : norm<Fp16>(*call, same);
}
