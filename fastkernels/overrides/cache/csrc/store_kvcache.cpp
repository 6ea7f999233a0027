// store_kvcache on a CPU, for keys and values of the cache's dtype: copies of heads.

#include <ATen/Parallel.h>

#include <cstdint>
#include <cstring>

namespace {

struct Call {
  const char *key, *value;
  char *keys, *values;
  const void* slots;
  int64_t tokens, heads, bytes, blocks, block_size, wide;  // bytes: of a head; wide: whether slots are int64
  int64_t k_t, k_h, v_t, v_h, keys_b, keys_s, keys_h, values_b, values_s, values_h;  // strides in bytes
};

void copy(const char* from, int64_t from_h, char* to, int64_t to_h, int64_t heads, int64_t bytes) {
  if (from_h == bytes && to_h == bytes) {
    std::memcpy(to, from, heads * bytes);
    return;
  }
  for (int64_t h = 0; h < heads; ++h) std::memcpy(to + h * to_h, from + h * from_h, bytes);
}

inline int64_t slot_of(const Call& c, int64_t t) {
  return c.wide ? static_cast<const int64_t*>(c.slots)[t] : static_cast<const int32_t*>(c.slots)[t];
}

}  // namespace

// Returns the first token whose slot is past the cache, or -1. Nothing is stored if there is one.
extern "C" int64_t store_kvcache(const Call* call) {
  constexpr int64_t ENOUGH = 1 << 15;  // bytes that are worth a thread
  const Call& c = *call;
  for (int64_t t = 0; t < c.tokens; ++t)
    if (slot_of(c, t) >= c.blocks * c.block_size) return t;
  at::parallel_for(0, c.tokens, 1 + ENOUGH / (c.heads * c.bytes), [&](int64_t from, int64_t to) {
    for (int64_t t = from; t < to; ++t) {
      const int64_t slot = slot_of(c, t);
      if (slot < 0) continue;
      const int64_t block = slot / c.block_size, offset = slot % c.block_size;
      copy(c.key + t * c.k_t, c.k_h, c.keys + block * c.keys_b + offset * c.keys_s, c.keys_h, c.heads, c.bytes);
      copy(c.value + t * c.v_t, c.v_h, c.values + block * c.values_b + offset * c.values_s, c.values_h, c.heads,
           c.bytes);
    }
  });
  return -1;
}
