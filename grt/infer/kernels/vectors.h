// Number formats, and what kernels.cpp does with vectors of them, for each instruction set: each namespace has WIDTH,
// Floats and Ints (so many of them), add_products and total, and the loops of loops.h made of these. TARGET is the
// attribute that lets a function use the instructions.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int64_t AT_ONCE = 4;       // rows of W
constexpr int64_t CACHE_LINE = 64;   // bytes
constexpr int64_t AHEAD = 8 << 10;   // bytes: memory answers late, and processors alone do not ask early enough
constexpr int64_t ALONE = 32 << 10;  // elements of W for which a second thread would cost more than it saves

struct bf16 {
  uint16_t bits;
};

INLINE float widen(float w) { return w; }
INLINE float widen(int8_t w) { return static_cast<float>(w); }
INLINE float widen(bf16 w) {
  uint32_t bits = static_cast<uint32_t>(w.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

bf16 narrow(float value) {  // to the nearest, ties to even; what is not a number stays none
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bool nan = (bits & 0x7fffffff) > 0x7f800000;
  return {nan ? uint16_t{0x7fc0} : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

// Numbers of fp32 or bf16, read and written one at a time.
struct Numbers {
  void* at;
  bool is_bf16;
  float operator[](int64_t i) const { return is_bf16 ? widen(static_cast<bf16*>(at)[i]) : static_cast<float*>(at)[i]; }
  void set(int64_t i, float value) const {
    if (is_bf16)
      static_cast<bf16*>(at)[i] = narrow(value);
    else
      static_cast<float*>(at)[i] = value;
  }
};

// A product of a few rows. x is of int16_t where w is of int8_t, else of float.
struct Product {
  const void* w;  // (n, k), rows `stride` elements apart
  int64_t n, k, stride, m;
  const float* scale;           // (n) or none
  std::optional<Numbers> bias;  // (n)
  const void* x;                // (m, k)
  const float* x_step;          // (m) of x in int16_t, or none
  Numbers y;                    // (m, n)

  void finish(int64_t row, int64_t i, float sum) const {
    if (x_step) sum *= x_step[row];
    if (scale) sum *= scale[i];
    if (bias) sum += (*bias)[i];
    y.set(row * n + i, sum);
  }
};

// Attention of one query of each row. Strides are in elements; a head's numbers lie one after the other.
struct Attention {
  int64_t rows, heads, tokens, width;
  const float* q;  // (rows, heads, width), rows q_row apart
  int64_t q_row;
  const void *keys, *values;  // (rows, heads, tokens, width)
  int64_t kv_row, kv_head, kv_token;
  const bool* visible;  // (rows, tokens), or none
  int64_t visible_row, visible_token;
  float* y;  // (rows, heads, width)
};

// e^x between the smallest and the largest normal float: 2^n e^r with |r| <= log(2) / 2, e^r by its series.
INLINE float exponential(float x) {
  x = std::min(std::max(x, -87.0f), 88.0f);
  float n = static_cast<float>(static_cast<int32_t>(x * 1.44269504f + (x < 0 ? -0.5f : 0.5f)));
  float r = x - n * 0.693359375f + n * 2.12194440e-4f;  // log(2) in two parts, the first of which is exact times n
  float series = ((1.0f / 5040 * r + 1.0f / 720) * r + 1.0f / 120) * r + 1.0f / 24;
  series = (((series * r + 1.0f / 6) * r + 0.5f) * r + 1) * r + 1;
  int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return series * power;
}

namespace portable {
#define TARGET
constexpr int64_t WIDTH = 8;
typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));
typedef int16_t Shorts __attribute__((vector_size(2 * WIDTH)));
typedef int8_t Bytes __attribute__((vector_size(WIDTH)));
template <class V>
INLINE V read(const void* at) {
  V v;
  std::memcpy(&v, at, sizeof v);
  return v;
}
INLINE Floats add_products(const float* w, const float* x, Floats sums) {
  return sums + read<Floats>(w) * read<Floats>(x);
}
INLINE Floats add_products(const bf16* w, const float* x, Floats sums) {
  return sums + reinterpret_cast<Floats>(__builtin_convertvector(read<Halves>(w), Words) << 16) * read<Floats>(x);
}
INLINE Ints add_products(const int8_t* w, const int16_t* x, Ints sums) {
  for (int64_t i = 0; i < 2 * WIDTH; i += WIDTH) {
    Shorts bytes = __builtin_convertvector(read<Bytes>(w + i), Shorts);
    sums += __builtin_convertvector(bytes, Ints) * __builtin_convertvector(read<Shorts>(x + i), Ints);
  }
  return sums;
}
template <class V>
INLINE float total(V lanes) {
  float sum = 0;
  for (int64_t i = 0; i < WIDTH; i++) sum += lanes[i];
  return sum;
}
#include "loops.h"
#undef TARGET
}  // namespace portable

#ifdef __x86_64__
namespace avx2 {
#define TARGET __attribute__((target("avx2,fma")))
constexpr int64_t WIDTH = 8;
using Floats = __m256;
using Ints = __m256i;
TARGET INLINE Floats add_products(const float* w, const float* x, Floats sums) {
  return _mm256_fmadd_ps(_mm256_loadu_ps(w), _mm256_loadu_ps(x), sums);
}
TARGET INLINE Floats add_products(const bf16* w, const float* x, Floats sums) {
  __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w));
  __m256 wide = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  return _mm256_fmadd_ps(wide, _mm256_loadu_ps(x), sums);
}
TARGET INLINE Ints add_products(const int8_t* w, const int16_t* x, Ints sums) {
  __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
  return _mm256_add_epi32(sums, _mm256_madd_epi16(wide, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))));
}
TARGET INLINE float total(Floats lanes) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
TARGET INLINE float total(Ints lanes) { return total(_mm256_cvtepi32_ps(lanes)); }
#include "loops.h"
#undef TARGET
}  // namespace avx2

namespace avx512 {
#define TARGET __attribute__((target("avx512f,avx512bw")))
constexpr int64_t WIDTH = 16;
using Floats = __m512;
using Ints = __m512i;
TARGET INLINE Floats add_products(const float* w, const float* x, Floats sums) {
  return _mm512_fmadd_ps(_mm512_loadu_ps(w), _mm512_loadu_ps(x), sums);
}
TARGET INLINE Floats add_products(const bf16* w, const float* x, Floats sums) {
  __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
  __m512 wide = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  return _mm512_fmadd_ps(wide, _mm512_loadu_ps(x), sums);
}
TARGET INLINE Ints add_products(const int8_t* w, const int16_t* x, Ints sums) {
  __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)));
  return _mm512_add_epi32(sums, _mm512_madd_epi16(wide, _mm512_loadu_si512(x)));
}
TARGET INLINE float total(Floats lanes) { return _mm512_reduce_add_ps(lanes); }
TARGET INLINE float total(Ints lanes) { return total(_mm512_cvtepi32_ps(lanes)); }
#include "loops.h"
#undef TARGET
}  // namespace avx512
#endif

}  // namespace
