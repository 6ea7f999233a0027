// Numbers of 16 bits as float32 and back, rounded to nearest even, and an exponential: for loops that compilers vectorize.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float load(float x) { return x; }
inline float load(Bf16 x) { return from_bits(static_cast<uint32_t>(x.bits) << 16); }
inline float load(Fp16 x) {
  // The product moves the exponent's bias from 15 to 127, and makes normal numbers of subnormal ones.
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t rest = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  const uint32_t finite = to_bits(from_bits(rest) * 0x1p112f), infinite = rest | 0x7f800000u;
  return from_bits(sign | (rest >= 0x0f800000u ? infinite : finite));
}

inline void store(float* to, float x) { *to = x; }
inline void store(Bf16* to, float x) {
  const uint32_t bits = to_bits(x), even = (bits >> 16) & 1;
  to->bits = std::isnan(x) ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + even) >> 16);
}
inline void store(Fp16* to, float x) {
  const uint32_t bits = to_bits(x), sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
  uint32_t half;
  if (size > 0x7f800000u) {
    half = 0x7e00;
  } else if (size >= 0x477ff000u) {  // rounds to 65536 or more
    half = 0x7c00;
  } else if (size < 0x38800000u) {  // subnormal: the sum rounds at the last bit of the result
    half = to_bits(from_bits(size) + 0.5f) - to_bits(0.5f);
  } else {
    half = (size - 0x38000000u + 0xfffu + ((size >> 13) & 1u)) >> 13;
  }
  to->bits = static_cast<uint16_t>(sign | half);
}

// e^x of x <= 0 with an error of 2 units in the last place; it vectorizes, std::exp does not. NaN stays NaN.
inline float exponential(float x) {
  x = x < -87.0f ? -87.0f : x;
  const float whole = std::floor(x * 1.44269504f + 0.5f);
  const float r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * from_bits(static_cast<uint32_t>(static_cast<int32_t>(whole) + 127) << 23);
}
