// y = (x W^T) * scale + bias for a few rows x and a matrix W of fp32, bf16 or int8; summed up in fp32.
//
// With so few rows the time is that of reading W. So its elements are widened in registers, four of its rows are summed
// at once to hide the latency of additions, and every call deals the rows out to the threads in the same way: pass after
// pass, each thread finds its part of a recurrent core in its own cache. x stays in fp32: rounded to bf16 or int8 for the
// CPU's dot products of these, it would lose digits and win nothing, as reading W takes longer than the sums.
//
// One text, compiled for several instruction sets; the widest that the CPU has is chosen at run time.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>
#ifdef __x86_64__
#include <immintrin.h>
#endif

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

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
    if (is_bf16) static_cast<bf16*>(at)[i] = narrow(value);
    else static_cast<float*>(at)[i] = value;
  }
};

struct Product {
  const void* w;  // (n, k), rows `stride` elements apart
  int64_t n, k, stride, m;
  const float* x;                      // (m, k)
  const float* scale;                  // (n) or none
  std::optional<Numbers> bias;         // (n)
  Numbers y;                           // (m, n)

  void finish(int64_t row, int64_t i, float sum) const {
    if (scale) sum *= scale[i];
    if (bias) sum += (*bias)[i];
    y.set(row * n + i, sum);
  }
};

namespace portable {
#define TARGET
constexpr int64_t WIDTH = 8;
typedef float Lanes __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));
typedef int8_t Bytes __attribute__((vector_size(WIDTH)));
typedef int16_t Shorts __attribute__((vector_size(2 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
template <class V>
INLINE V read(const void* at) {
  V v;
  std::memcpy(&v, at, sizeof v);
  return v;
}
INLINE Lanes load(const float* w) { return read<Lanes>(w); }
INLINE Lanes load(const bf16* w) {
  return reinterpret_cast<Lanes>(__builtin_convertvector(read<Halves>(w), Words) << 16);
}
INLINE Lanes load(const int8_t* w) {  // in steps, for which there are instructions everywhere
  return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(read<Bytes>(w), Shorts), Ints), Lanes);
}
INLINE Lanes add_product(Lanes a, Lanes b, Lanes sums) { return sums + a * b; }
INLINE float total(Lanes lanes) {
  float sum = 0;
  for (int64_t i = 0; i < WIDTH; i++) sum += lanes[i];
  return sum;
}
#include "rows.h"
#undef TARGET
}  // namespace portable

#ifdef __x86_64__
namespace avx2 {
#define TARGET __attribute__((target("avx2,fma")))
constexpr int64_t WIDTH = 8;
using Lanes = __m256;
TARGET INLINE Lanes load(const float* w) { return _mm256_loadu_ps(w); }
TARGET INLINE Lanes load(const bf16* w) {
  __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
TARGET INLINE Lanes load(const int8_t* w) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(w))));
}
TARGET INLINE Lanes add_product(Lanes a, Lanes b, Lanes sums) { return _mm256_fmadd_ps(a, b, sums); }
TARGET INLINE float total(Lanes lanes) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#include "rows.h"
#undef TARGET
}  // namespace avx2

namespace avx512 {
#define TARGET __attribute__((target("avx512f")))
constexpr int64_t WIDTH = 16;
using Lanes = __m512;
TARGET INLINE Lanes load(const float* w) { return _mm512_loadu_ps(w); }
TARGET INLINE Lanes load(const bf16* w) {
  __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
TARGET INLINE Lanes load(const int8_t* w) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w))));
}
TARGET INLINE Lanes add_product(Lanes a, Lanes b, Lanes sums) { return _mm512_fmadd_ps(a, b, sums); }
TARGET INLINE float total(Lanes lanes) { return _mm512_reduce_add_ps(lanes); }
#include "rows.h"
#undef TARGET
}  // namespace avx512
#endif

using Rows = void (*)(const Product&, int64_t, int64_t);

struct Path {
  const char* name;
  Rows fp32, bf16_, int8;
};

// What this CPU can run, the fastest first.
const std::vector<Path>& paths() {
  static const std::vector<Path> found = [] {
    std::vector<Path> paths;
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx512f"))
      paths.push_back({"avx512", avx512::rows<float>, avx512::rows<bf16>, avx512::rows<int8_t>});
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
      paths.push_back({"avx2", avx2::rows<float>, avx2::rows<bf16>, avx2::rows<int8_t>});
#endif
    paths.push_back({"portable", portable::rows<float>, portable::rows<bf16>, portable::rows<int8_t>});
    return paths;
  }();
  return found;
}

std::string path_names() {
  std::string names;
  for (const Path& path : paths()) names += std::string(names.empty() ? "" : " ") + path.name;
  return names;
}

Numbers numbers(const Tensor& t) {
  STD_TORCH_CHECK(t.is_contiguous(), "numbers must lie one after the other");
  bool is_bf16 = t.scalar_type() == ScalarType::BFloat16;
  STD_TORCH_CHECK(is_bf16 || t.scalar_type() == ScalarType::Float, "only fp32 and bf16 are supported");
  return {t.data_ptr(), is_bf16};
}

Tensor row_product(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& scale,
                   const std::optional<Tensor>& bias, int64_t path) {
  int64_t n = weight.size(0), k = weight.size(1);
  STD_TORCH_CHECK(x.size(x.dim() - 1) == k && weight.stride(1) == 1, "x and weight do not fit");
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = n;
  Tensor y = torch::stable::new_empty(x, {shape.data(), shape.size()});

  Numbers given = numbers(x);
  std::vector<float> widened;
  const float* fp32 = static_cast<const float*>(given.at);
  if (given.is_bf16) {
    widened.resize(x.numel());
    for (int64_t i = 0; i < x.numel(); i++) widened[i] = given[i];
    fp32 = widened.data();
  }
  Product p{weight.data_ptr(), n, k, weight.stride(0), x.numel() / k, fp32, nullptr, std::nullopt, numbers(y)};
  if (scale) p.scale = static_cast<const float*>(numbers(*scale).at);
  if (bias) p.bias = numbers(*bias);
  const Path& chosen = paths().at(path);
  ScalarType kind = weight.scalar_type();
  Rows rows_of = kind == ScalarType::Char ? chosen.int8 : kind == ScalarType::BFloat16 ? chosen.bf16_ : chosen.fp32;
  int64_t fours = (n + AT_ONCE - 1) / AT_ONCE, grain = std::max<int64_t>(1, ALONE / (AT_ONCE * k));
  torch::stable::parallel_for(0, fours, grain, [&](int64_t first, int64_t last) {
    rows_of(p, first * AT_ONCE, std::min(last * AT_ONCE, n));
  });
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY(grt, m) {
  m.def("row_product(Tensor x, Tensor weight, Tensor? scale, Tensor? bias, int path=0) -> Tensor");
  m.def("paths() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(grt, CPU, m) { m.impl("row_product", TORCH_BOX(&row_product)); }
STABLE_TORCH_LIBRARY_IMPL(grt, CompositeExplicitAutograd, m) { m.impl("paths", TORCH_BOX(&path_names)); }
