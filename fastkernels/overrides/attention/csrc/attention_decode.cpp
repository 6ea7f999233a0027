// attention_decode on a CPU: one query per sequence over a paged KV cache, in float32.
//
// A task is a part (split) of the keys of one sequence and key head, for all query heads that share it. Splits leave
// their maximum, sum and unscaled result; `combine` adds them up.

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "numbers.hpp"

namespace {

constexpr int TILE = 64;    // keys whose scores are computed before their values are added up
constexpr int AT_ONCE = 4;  // keys that share a read of a query or a result

struct Call {
  const void *q, *keys, *values;
  void* out;
  float* parts;  // [batch, heads, splits, D + 2]: maximum, sum, result
  const int32_t *seq_lens, *table;
  const float* sinks;  // [heads] or null
  int64_t batch, heads, kv_heads, dims, blocks, block_size, table_size, splits, window_left;
  int64_t q_b, q_h, k_b, k_s, k_h, v_b, v_s, v_h, table_b;
  float scale, v_scale, softcap;
};

// Converts AT_ONCE rows to [AT_ONCE, D]; those from `count` on become zeros.
template <typename T, int DIMS>
inline void widen(const Call& c, const T* from, const int64_t* at, int64_t count, float* wide) {
  const int64_t D = DIMS ? DIMS : c.dims;
  for (int64_t j = 0; j < AT_ONCE; ++j, wide += D) {
    if (j >= count) {
      std::fill(wide, wide + D, 0.0f);
      continue;
    }
    const T* row = from + at[j];
#pragma omp simd
    for (int64_t d = 0; d < D; ++d) wide[d] = load(row[d]);
  }
}

// Attends to keys first .. last of one sequence and key head. out [group, D], top and sum [group] are updated.
template <typename T, int DIMS>
void attend(const Call& c, int64_t row, int64_t kv_head, int64_t first, int64_t last, const float* q, float* scratch,
            float* top, float* sum, float* out) {
  const int64_t D = DIMS ? DIMS : c.dims, group = c.heads / c.kv_heads;
  const T* keys = static_cast<const T*>(c.keys) + kv_head * c.k_h;
  const T* values = static_cast<const T*>(c.values) + kv_head * c.v_h;
  const int32_t* table = c.table + row * c.table_b;
  float *wide = scratch, *scores = scratch + AT_ONCE * D;  // [AT_ONCE, D], [group, TILE]
  int64_t key_at[TILE], value_at[TILE];
  for (int64_t begin = first; begin < last; begin += TILE) {
    const int64_t count = std::min<int64_t>(TILE, last - begin);
    int64_t column = begin / c.block_size, slot = begin % c.block_size;
    for (int64_t i = 0; i < count; ++i) {
      key_at[i] = table[column] * c.k_b + slot * c.k_s, value_at[i] = table[column] * c.v_b + slot * c.v_s;
      if (++slot == c.block_size) slot = 0, ++column;
    }
    for (int64_t i = 0; i < count; i += AT_ONCE) {
      widen<T, DIMS>(c, keys, key_at + i, count - i, wide);
      for (int64_t g = 0; g < group; ++g) {
        const float *query = q + g * D, *w = wide;
        float dot0 = 0, dot1 = 0, dot2 = 0, dot3 = 0;
#pragma omp simd reduction(+ : dot0, dot1, dot2, dot3)
        for (int64_t d = 0; d < D; ++d) {
          dot0 += query[d] * w[d], dot1 += query[d] * w[D + d];
          dot2 += query[d] * w[2 * D + d], dot3 += query[d] * w[3 * D + d];
        }
        float* score = scores + g * TILE + i;
        score[0] = dot0 * c.scale, score[1] = dot1 * c.scale, score[2] = dot2 * c.scale, score[3] = dot3 * c.scale;
      }
    }
    for (int64_t g = 0; g < group; ++g) {
      float* score = scores + g * TILE;
      if (c.softcap > 0)
        for (int64_t i = 0; i < count; ++i) score[i] = c.softcap * std::tanh(score[i] / c.softcap);
      float largest = top[g];
#pragma omp simd reduction(max : largest)
      for (int64_t i = 0; i < count; ++i) largest = score[i] > largest ? score[i] : largest;
      const float base = largest == -std::numeric_limits<float>::infinity() ? 0.0f : largest;
      const float decay = top[g] == -std::numeric_limits<float>::infinity() ? 0.0f : exponential(top[g] - base);
      float total = 0;
#pragma omp simd reduction(+ : total)
      for (int64_t i = 0; i < count; ++i) {
        score[i] = exponential(score[i] - base);
        total += score[i];
      }
      top[g] = largest;
      sum[g] = sum[g] * decay + total;
#pragma omp simd
      for (int64_t d = 0; d < D; ++d) out[g * D + d] *= decay;
    }
    for (int64_t i = 0; i < count; i += AT_ONCE) {
      widen<T, DIMS>(c, values, value_at + i, count - i, wide);
      for (int64_t g = 0; g < group; ++g) {
        const float *p = scores + g * TILE + i, *w = wide;
        const float p0 = p[0], p1 = i + 1 < count ? p[1] : 0;
        const float p2 = i + 2 < count ? p[2] : 0, p3 = i + 3 < count ? p[3] : 0;
        float* to = out + g * D;
#pragma omp simd
        for (int64_t d = 0; d < D; ++d)
          to[d] += p0 * w[d] + p1 * w[D + d] + (p2 * w[2 * D + d] + p3 * w[3 * D + d]);
      }
    }
  }
}

inline int64_t first_key(const Call& c, int64_t keys) {
  return c.window_left >= 0 ? std::max<int64_t>(0, keys - 1 - c.window_left) : 0;
}

// The first row whose keys are not all inside the table and the cache, or -1.
int64_t wrong_row(const Call& c) {
  for (int64_t row = 0; row < c.batch; ++row) {
    const int64_t keys = c.seq_lens[row], end = (keys + c.block_size - 1) / c.block_size;
    if (end > c.table_size) return row;
    const int32_t* table = c.table + row * c.table_b;
    bool wrong = false;
    for (int64_t i = first_key(c, keys) / c.block_size; i < end; ++i) wrong |= table[i] < 0 || table[i] >= c.blocks;
    if (wrong) return row;
  }
  return -1;
}

// Writes a head's result [D]: with its sink, which is a key without a value, in the sum; zeros without keys.
template <typename T>
void finish(const Call& c, int64_t row, int64_t head, float top, float sum, const float* result) {
  float factor = 1.0f;
  if (c.sinks != nullptr) {
    const float sink = c.sinks[head], largest = std::max(top, sink);
    factor = top == -std::numeric_limits<float>::infinity() ? 0.0f : std::exp(top - largest);
    sum = sum * factor + std::exp(sink - largest);
  }
  factor *= c.v_scale / (sum == 0.0f ? 1.0f : sum);
  T* out = static_cast<T*>(c.out) + (row * c.heads + head) * c.dims;
  for (int64_t d = 0; d < c.dims; ++d) store(out + d, result[d] * factor);
}

template <typename T, int DIMS>
void run(const Call& c) {
  const int64_t D = c.dims, group = c.heads / c.kv_heads;
  at::parallel_for(0, c.batch * c.kv_heads * c.splits, 1, [&](int64_t from, int64_t to) {
    std::vector<float> memory(group * (2 * D + TILE + 2) + AT_ONCE * D);
    float *q = memory.data(), *out = q + group * D, *top = out + group * D, *sum = top + group, *scratch = sum + group;
    for (int64_t task = from; task < to; ++task) {
      const int64_t split = task % c.splits, kv_head = task / c.splits % c.kv_heads, row = task / c.splits / c.kv_heads;
      const int64_t n = c.seq_lens[row];
      const int64_t start = first_key(c, n);
      const int64_t each = (n - start + c.splits - 1) / c.splits;
      const int64_t first = start + split * each, last = std::min(first + each, n);
      for (int64_t g = 0; g < group; ++g) {
        const T* query = static_cast<const T*>(c.q) + row * c.q_b + (kv_head * group + g) * c.q_h;
        for (int64_t d = 0; d < D; ++d) q[g * D + d] = load(query[d]);
      }
      std::fill(out, out + group * D, 0.0f);
      std::fill(top, top + group, -std::numeric_limits<float>::infinity());
      std::fill(sum, sum + group, 0.0f);
      attend<T, DIMS>(c, row, kv_head, first, last, q, scratch, top, sum, out);
      for (int64_t g = 0; g < group; ++g) {
        const int64_t head = kv_head * group + g;
        if (c.splits == 1) {
          finish<T>(c, row, head, top[g], sum[g], out + g * D);
          continue;
        }
        float* part = c.parts + ((row * c.heads + head) * c.splits + split) * (D + 2);
        part[0] = top[g], part[1] = sum[g];
        std::copy(out + g * D, out + (g + 1) * D, part + 2);
      }
    }
  });
}

template <typename T>
void combine(const Call& c) {
  const int64_t D = c.dims;
  at::parallel_for(0, c.batch * c.heads, 1, [&](int64_t from, int64_t to) {
    std::vector<float> result(D);
    for (int64_t task = from; task < to; ++task) {
      const float* parts = c.parts + task * c.splits * (D + 2);
      float top = -std::numeric_limits<float>::infinity(), sum = 0;
      for (int64_t s = 0; s < c.splits; ++s) top = std::max(top, parts[s * (D + 2)]);
      std::fill(result.begin(), result.end(), 0.0f);
      for (int64_t s = 0; s < c.splits; ++s) {
        const float* part = parts + s * (D + 2);
        if (part[0] == -std::numeric_limits<float>::infinity() && part[1] == 0) continue;  // no keys
        const float weight = std::exp(part[0] - top);
        sum += weight * part[1];
        for (int64_t d = 0; d < D; ++d) result[d] += weight * part[2 + d];
      }
      finish<T>(c, task / c.heads, task % c.heads, top, sum, result.data());
    }
  });
}

template <typename T>
void decode(const Call& c) {
  c.dims == 64 ? run<T, 64>(c) : c.dims == 128 ? run<T, 128>(c) : run<T, 0>(c);
  if (c.splits > 1) combine<T>(c);
}

}  // namespace

// dtype: 0 float32, 1 bfloat16, 2 float16. Returns -1, or the first row with a wrong block, and computes nothing then.
extern "C" int64_t attention_decode(const Call* call, int dtype) {
  const int64_t wrong = wrong_row(*call);
  if (wrong < 0) dtype == 0 ? decode<float>(*call) : dtype == 1 ? decode<Bf16>(*call) : decode<Fp16>(*call);
  return wrong;
}
