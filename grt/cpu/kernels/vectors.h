// Number formats, and what kernels.cpp does with vectors of them, for each instruction set: each namespace has WIDTH,
// Floats and Ints (so many of them), every, load, add_products and total, and the loops of loops.h made of these. TARGET
// is the attribute that lets a function use the instructions.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>
#include <vector>

#include "team.h"

#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int64_t AT_ONCE = 4;       // rows of W
constexpr int64_t CACHE_LINE = 64;   // bytes
constexpr int64_t AHEAD = 24 << 10;  // bytes: memory answers late, and processors alone do not ask early enough
constexpr int64_t KEYS_AHEAD = 4 << 10;
constexpr int64_t ALONE = 32 << 10;  // elements of W for which a second thread would cost more than it saves

struct bf16 {
  uint16_t bits;
};

INLINE float widen(float w) { return w; }
INLINE int64_t widen(int8_t w) { return w; }
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
  void set(int64_t first, const float* values, int64_t n) const {
    for (int64_t i = 0; is_bf16 && i < n; i++) static_cast<bf16*>(at)[first + i] = narrow(values[i]);
    if (!is_bf16) std::copy(values, values + n, static_cast<float*>(at) + first);
  }
};

inline std::vector<float> widened(const Numbers& numbers, int64_t n) {
  if (!numbers.is_bf16) return {static_cast<float*>(numbers.at), static_cast<float*>(numbers.at) + n};
  std::vector<float> values(n);
  for (int64_t i = 0; i < n; i++) values[i] = widen(static_cast<bf16*>(numbers.at)[i]);
  return values;
}

enum class Format { fp32, bf16, int8 };

// A row x in steps of `size`, as integers of 16 bits and, for those who sum up bytes, their halves
struct Steps {
  std::vector<int16_t> all;
  std::vector<uint8_t> low;
  std::vector<int8_t> high;
  int32_t sum_of_high;
  float size;
  int64_t operator[](int64_t i) const { return all[i]; }
};

INLINE float size_of(const Steps& x) { return x.size; }
INLINE float size_of(const float*) { return 1; }

struct Linear {
  const void* w;  // (n, k), rows `stride` elements apart
  Format format;
  int64_t n, k, stride;
  const float* scale;           // (n) or none
  std::optional<Numbers> bias;  // (n)

  // Sums of the products of some of its rows, to outputs
  void finish(float* sums, Range of) const {
    int64_t n = of.last - of.first;
    for (int64_t i = 0; scale && i < n; i++) sums[i] *= scale[of.first + i];
    if (bias && bias->is_bf16) {
      for (int64_t i = 0; i < n; i++) sums[i] += widen(static_cast<bf16*>(bias->at)[of.first + i]);
    } else if (bias) {
      for (int64_t i = 0; i < n; i++) sums[i] += static_cast<float*>(bias->at)[of.first + i];
    }
  }
};

struct Norm {
  std::optional<Numbers> gain, shift;
  float eps;
  bool centred;
};

// y (m, n) of x (m, k)
struct Product {
  Linear linear;
  std::optional<Norm> norm;  // of x, before it is multiplied
  Numbers x;
  int64_t m;
  Numbers y;
};

// y (m, outputs of down) = down(silu(up(norm(x)) + anchor)), and room for what comes in between
struct Gate {
  Numbers x;
  int64_t m;
  Norm norm;
  Linear up;
  Numbers anchor;  // (m, outputs of up)
  Linear down;
  float* inner;  // likewise
  Numbers y;
};

// One query of each row. Strides are in elements; a head's numbers lie one after the other.
struct Attention {
  int64_t rows, heads, tokens, width;
  Numbers q;  // (rows, heads, width), rows q_row apart
  int64_t q_row;
  const void *keys, *values;  // (rows, heads, tokens, width)
  bool is_bf16;
  int64_t kv_row, kv_head, kv_token;
  const bool* visible;  // (rows, tokens), or none
  int64_t visible_row, visible_token;
  float* y;  // (rows, heads, width)
};

// y = h + down(gelu(up(norm(h)))),  h = x + out(attention), and room for what comes in between
struct Rest {
  Numbers x;  // (rows, d)
  Attention attention;
  Linear out;
  Norm norm;
  Linear up, down;
  float *part, *wide;  // (rows, d), (rows, outputs of up)
  Numbers y;
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
INLINE Floats every(float x) { return x - Floats{}; }
INLINE Floats load(const float* x) { return read<Floats>(x); }
INLINE Floats load(const bf16* x) {
  return reinterpret_cast<Floats>(__builtin_convertvector(read<Halves>(x), Words) << 16);
}
INLINE void load(const bf16* x, Floats& even, Floats& odd) {
  Words pairs = read<Words>(x);
  even = reinterpret_cast<Floats>(pairs << 16), odd = reinterpret_cast<Floats>(pairs & 0xffff0000);
}
INLINE Floats add_products(Floats a, Floats b, Floats sums) { return sums + a * b; }
INLINE Ints add_products(const int8_t* w, const int16_t* x, Ints sums) {
  for (int64_t i = 0; i < 2 * WIDTH; i += WIDTH) {
    Shorts bytes = __builtin_convertvector(read<Bytes>(w + i), Shorts);
    sums += __builtin_convertvector(bytes, Ints) * __builtin_convertvector(read<Shorts>(x + i), Ints);
  }
  return sums;
}
INLINE float total(Floats lanes) {
  float sum = 0;
  for (int64_t i = 0; i < WIDTH; i++) sum += lanes[i];
  return sum;
}
INLINE int64_t total(Ints lanes) {
  int64_t sum = 0;
  for (int64_t i = 0; i < WIDTH; i++) sum += lanes[i];
  return sum;
}
INLINE std::array<float, AT_ONCE> totals_of(const Floats v[AT_ONCE]) {
  return {total(v[0]), total(v[1]), total(v[2]), total(v[3])};
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
TARGET INLINE Floats every(float x) { return _mm256_set1_ps(x); }
TARGET INLINE Floats load(const float* x) { return _mm256_loadu_ps(x); }
TARGET INLINE Floats load(const bf16* x) {
  __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
TARGET INLINE void load(const bf16* x, Floats& even, Floats& odd) {
  __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  even = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
  odd = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-1 << 16)));
}
TARGET INLINE Floats add_products(Floats a, Floats b, Floats sums) { return _mm256_fmadd_ps(a, b, sums); }
TARGET INLINE Ints add_products(const int8_t* w, const int16_t* x, Ints sums) {
  __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w)));
  return _mm256_add_epi32(sums, _mm256_madd_epi16(wide, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))));
}
TARGET INLINE float total(Floats lanes) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
TARGET INLINE int64_t total(Ints lanes) {
  __m256i pairs = _mm256_add_epi64(_mm256_cvtepi32_epi64(_mm256_castsi256_si128(lanes)),
                                   _mm256_cvtepi32_epi64(_mm256_extracti128_si256(lanes, 1)));
  __m128i two = _mm_add_epi64(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  return _mm_cvtsi128_si64(two) + _mm_extract_epi64(two, 1);
}
TARGET INLINE std::array<float, AT_ONCE> totals_of(const Floats v[AT_ONCE]) {
  return {total(v[0]), total(v[1]), total(v[2]), total(v[3])};
}
#include "loops.h"
#undef TARGET
}  // namespace avx2

namespace avx512 {
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vnni")))
constexpr int64_t WIDTH = 16;
using Floats = __m512;
using Ints = __m512i;
TARGET INLINE Floats every(float x) { return _mm512_set1_ps(x); }
TARGET INLINE Floats load(const float* x) { return _mm512_loadu_ps(x); }
TARGET INLINE Floats load(const bf16* x) {
  __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
TARGET INLINE void load(const bf16* x, Floats& even, Floats& odd) {
  __m512i pairs = _mm512_loadu_si512(x);
  even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-1 << 16)));
}
TARGET INLINE Floats add_products(Floats a, Floats b, Floats sums) { return _mm512_fmadd_ps(a, b, sums); }
// By adding what two of them interleave to
TARGET INLINE std::array<float, AT_ONCE> totals_of(const Floats v[AT_ONCE]) {
  Floats ab = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
  Floats cd = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
  Floats low = _mm512_shuffle_ps(ab, cd, 0x44), high = _mm512_shuffle_ps(ab, cd, 0xee), abcd = _mm512_add_ps(low, high);
  __m512 swapped = _mm512_shuffle_f32x4(abcd, abcd, 0x4e);
  __m256 half = _mm512_castps512_ps256(_mm512_add_ps(abcd, swapped));
  std::array<float, AT_ONCE> sums;
  _mm_storeu_ps(sums.data(), _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
  return sums;
}
TARGET INLINE __m128i totals_of(const Ints v[AT_ONCE]) {
  Ints ab = _mm512_add_epi32(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
  Ints cd = _mm512_add_epi32(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
  Ints abcd = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(abcd), _mm512_extracti64x4_epi64(abcd, 1));
  return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

// x = 256 high + low. The CPU multiplies bytes without a sign by bytes with one: so low times w, and w + 128 times high.
#define BY_BYTES
struct FourInts {
  static constexpr int64_t STEP = CACHE_LINE;
  Ints low[AT_ONCE], high[AT_ONCE];
  TARGET INLINE void add(const int8_t* const w[AT_ONCE], const Steps& x, int64_t i) {
    Ints of_low = _mm512_loadu_si512(&x.low[i]), of_high = _mm512_loadu_si512(&x.high[i]);
    for (int64_t j = 0; j < AT_ONCE; j++) {
      Ints v = _mm512_loadu_si512(w[j] + i);
      low[j] = _mm512_dpbusd_epi32(low[j], of_low, v);
      high[j] = _mm512_dpbusd_epi32(high[j], _mm512_xor_si512(v, _mm512_set1_epi8(-128)), of_high);
    }
  }
  TARGET INLINE std::array<double, AT_ONCE> totals(const Steps& x) const {  // of integers that a double holds exactly
    __m256d of_low = _mm256_cvtepi32_pd(totals_of(low)), of_high = _mm256_cvtepi32_pd(totals_of(high));
    of_high = _mm256_sub_pd(of_high, _mm256_set1_pd(128.0 * x.sum_of_high));
    std::array<double, AT_ONCE> sums;
    _mm256_storeu_pd(sums.data(), _mm256_add_pd(_mm256_mul_pd(of_high, _mm256_set1_pd(256)), of_low));
    return sums;
  }
};
#include "loops.h"
#undef BY_BYTES
#undef TARGET
}  // namespace avx512
#endif

}  // namespace
