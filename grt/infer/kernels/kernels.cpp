// The parts of decoding a token that read weights, for a few rows x:
//
//     row_product    y = x W^T * scale + bias, W in fp32, bf16 or int8
//     norm_product   the same of LayerNorm(x)
//     rest_of_block  h = x + out(attention(q, keys, values)),  y = h + down(gelu(up(LayerNorm(h))))
//
// With so few rows the time is that of reading W. So it is asked for ahead of its use, four of its rows are summed at
// once to hide the latency of additions, and every call deals the rows out to the threads in the same way: pass after
// pass, each thread finds its part of a recurrent core in its own cache.
//
// fp32 and bf16 are multiplied by x and summed up in fp32; the CPU's dot product of bf16 would round x too, and win
// nothing, as memory and caches are slower than either. For int8, x is rounded to 16 bits (steps of max |x| / 32767, by
// the row), and sums are of integers: widened to fp32, int8 would be read more slowly than caches deliver it.
//
// One text, compiled for several instruction sets; the widest that the CPU has is chosen at run time.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <string>
#include <vector>

#include "vectors.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

namespace {

struct Path {
  const char* name;
  void (*rows_fp32)(const Product&, int64_t, int64_t);
  void (*rows_bf16)(const Product&, int64_t, int64_t);
  void (*rows_int8)(const Product&, int64_t, int64_t);
  void (*attend_fp32)(const Attention&, int64_t, int64_t, float*);
  void (*attend_bf16)(const Attention&, int64_t, int64_t, float*);
  void (*norm)(const float*, const Numbers&, const Numbers&, float, int64_t, float*);
  void (*gelu)(float*, int64_t);
};

#define PATH(name)                                                                                                  \
  {#name, name::rows<float>, name::rows<bf16>, name::rows<int8_t>, name::attend<float>, name::attend<bf16>, name::norm, \
   name::gelu}

// What this CPU can run, the fastest first.
const std::vector<Path>& paths() {
  static const std::vector<Path> found = [] {
    std::vector<Path> paths;
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) paths.push_back(PATH(avx512));
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) paths.push_back(PATH(avx2));
#endif
    paths.push_back(PATH(portable));
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
  bool is_bf16 = t.scalar_type() == ScalarType::BFloat16;
  STD_TORCH_CHECK(t.is_contiguous() && (is_bf16 || t.scalar_type() == ScalarType::Float), "not fp32 or bf16 in a row");
  return {t.data_ptr(), is_bf16};
}

std::vector<float> widened(const Tensor& x) {
  Numbers given = numbers(x);
  std::vector<float> values(x.numel());
  for (size_t i = 0; i < values.size(); i++) values[i] = given[i];
  return values;
}

// x (k) in steps; returns the step, NaN where a number is not finite.
float in_steps(const float* x, int64_t k, int16_t* steps) {
  float largest = 0, nothing = 0;
#pragma omp simd reduction(max : largest) reduction(+ : nothing)
  for (int64_t i = 0; i < k; i++) {
    largest = std::max(largest, std::fabs(x[i]));
    nothing += 0 * x[i];
  }
  // At the least 8 lanes share the products of a row; the sum of each has to fit into 31 bits.
  float most = std::min(32767.0f, std::floor(8 * 2147483647.0f / (127.0f * (k + 64))));
  bool usable = nothing == 0 && largest > 1e-30f;  // a state so small is none
  float per_step = usable ? most / largest : 0;
  for (int64_t i = 0; i < k; i++)
    steps[i] = static_cast<int16_t>(usable ? x[i] * per_step + (x[i] < 0 ? -0.5f : 0.5f) : 0);
  return (usable ? largest / most : 0) + nothing;
}

// A linear's weight, scale and bias.
struct Matrix {
  const Tensor &weight;
  const MaybeTensor &scale, &bias;
  int64_t n() const { return weight.size(0); }

  // y (m, n) of x (m, k)
  void multiply(const Path& path, const float* x, int64_t m, Numbers y) const {
    int64_t k = weight.size(1);
    STD_TORCH_CHECK(weight.stride(1) == 1, "a row's weights must lie one after the other");
    Product p{weight.data_ptr(), n(), k, weight.stride(0), m, nullptr, std::nullopt, x, nullptr, y};
    if (scale) p.scale = static_cast<const float*>(numbers(*scale).at);
    if (bias) p.bias = numbers(*bias);
    auto rows = weight.scalar_type() == ScalarType::BFloat16 ? path.rows_bf16 : path.rows_fp32;
    std::vector<int16_t> steps;
    std::vector<float> step;
    if (weight.scalar_type() == ScalarType::Char) {
      rows = path.rows_int8;
      steps.resize(m * k);
      for (int64_t row = 0; row < m; row++) step.push_back(in_steps(x + row * k, k, steps.data() + row * k));
      p.x = steps.data(), p.x_step = step.data();
    }
    int64_t fours = (n() + AT_ONCE - 1) / AT_ONCE, grain = std::max<int64_t>(1, ALONE / (AT_ONCE * k));
    torch::stable::parallel_for(0, fours, grain, [&](int64_t first, int64_t last) {
      rows(p, first * AT_ONCE, std::min(last * AT_ONCE, p.n));
    });
  }

  Tensor product(const Path& path, const Tensor& like, const std::vector<float>& x) const {
    std::vector<int64_t> shape(like.sizes().begin(), like.sizes().end());
    int64_t m = like.numel() / shape.back();
    STD_TORCH_CHECK(shape.back() == weight.size(1), "x and weight do not fit");
    shape.back() = n();
    Tensor y = torch::stable::new_empty(like, {shape.data(), shape.size()});
    multiply(path, x.data(), m, numbers(y));
    return y;
  }
};

Tensor row_product(const Tensor& x, const Tensor& weight, const MaybeTensor& scale, const MaybeTensor& bias,
                   int64_t path) {
  return Matrix{weight, scale, bias}.product(paths().at(path), x, widened(x));
}

struct Norm {
  const Tensor &gain, &shift;
  double eps;

  std::vector<float> of(const Path& path, const std::vector<float>& x) const {
    int64_t d = gain.numel();
    std::vector<float> y(x.size());
    for (size_t row = 0; row < x.size(); row += d)
      path.norm(x.data() + row, numbers(gain), numbers(shift), static_cast<float>(eps), d, y.data() + row);
    return y;
  }
};

Tensor norm_product(const Tensor& x, const Tensor& gain, const Tensor& shift, double eps, const Tensor& weight,
                    const MaybeTensor& scale, const MaybeTensor& bias, int64_t path) {
  const Path& chosen = paths().at(path);
  return Matrix{weight, scale, bias}.product(chosen, x, Norm{gain, shift, eps}.of(chosen, widened(x)));
}

// (rows, d) of q (rows, d or more), keys and values (rows, heads, tokens, width), visible (rows, tokens)
std::vector<float> attention(const Path& path, const Tensor& q, const Tensor& keys, const Tensor& values,
                             const MaybeTensor& visible) {
  int64_t rows = keys.size(0), heads = keys.size(1), tokens = keys.size(2), width = keys.size(3);
  bool is_bf16 = keys.scalar_type() == ScalarType::BFloat16;
  STD_TORCH_CHECK(keys.stride(3) == 1 && (is_bf16 || keys.scalar_type() == ScalarType::Float), "keys do not fit");
  for (int64_t i = 0; i < 4; i++) STD_TORCH_CHECK(keys.stride(i) == values.stride(i), "keys are not as values");
  std::vector<float> queries = widened(q), y(rows * heads * width);
  Attention a{rows, heads, tokens, width, queries.data(), q.numel() / rows, keys.data_ptr(), values.data_ptr(),
              keys.stride(0), keys.stride(1), keys.stride(2), nullptr, 0, 0, y.data()};
  if (visible) {
    a.visible = static_cast<const bool*>(visible->data_ptr());
    a.visible_row = visible->stride(0), a.visible_token = visible->stride(1);
  }
  int64_t grain = std::max<int64_t>(1, ALONE / (2 * tokens * width));
  torch::stable::parallel_for(0, rows * heads, grain, [&](int64_t first, int64_t last) {
    std::vector<float> scores(tokens);
    (is_bf16 ? path.attend_bf16 : path.attend_fp32)(a, first, last, scores.data());
  });
  return y;
}

Tensor rest_of_block(const Tensor& x, const Tensor& qkv, const Tensor& keys, const Tensor& values,
                     const MaybeTensor& visible, const Tensor& out_weight, const MaybeTensor& out_scale,
                     const MaybeTensor& out_bias, const Tensor& gain, const Tensor& shift, double eps,
                     const Tensor& up_weight, const MaybeTensor& up_scale, const MaybeTensor& up_bias,
                     const Tensor& down_weight, const MaybeTensor& down_scale, const MaybeTensor& down_bias,
                     int64_t path) {
  const Path& chosen = paths().at(path);
  Matrix out{out_weight, out_scale, out_bias}, up{up_weight, up_scale, up_bias};
  Matrix down{down_weight, down_scale, down_bias};
  std::vector<float> h = widened(x), part(h.size());
  int64_t m = keys.size(0);
  auto add = [&] {
    for (size_t i = 0; i < h.size(); i++) h[i] += part[i];
  };
  out.multiply(chosen, attention(chosen, qkv, keys, values, visible).data(), m, {part.data(), false});
  add();
  std::vector<float> wide(m * up.n());
  up.multiply(chosen, Norm{gain, shift, eps}.of(chosen, h).data(), m, {wide.data(), false});
  chosen.gelu(wide.data(), wide.size());
  down.multiply(chosen, wide.data(), m, {part.data(), false});
  add();
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  Tensor y = torch::stable::new_empty(x, {shape.data(), shape.size()});
  Numbers result = numbers(y);
  for (size_t i = 0; i < h.size(); i++) result.set(i, h[i]);
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY(grt, m) {
  m.def("row_product(Tensor x, Tensor weight, Tensor? scale, Tensor? bias, int path=0) -> Tensor");
  m.def(
      "norm_product(Tensor x, Tensor gain, Tensor shift, float eps, Tensor weight, Tensor? scale, Tensor? bias, "
      "int path=0) -> Tensor");
  m.def(
      "rest_of_block(Tensor x, Tensor qkv, Tensor keys, Tensor values, Tensor? visible, Tensor out, Tensor? out_scale, "
      "Tensor? out_bias, Tensor gain, Tensor shift, float eps, Tensor up, Tensor? up_scale, Tensor? up_bias, "
      "Tensor down, Tensor? down_scale, Tensor? down_bias, int path=0) -> Tensor");
  m.def("paths() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(grt, CPU, m) {
  m.impl("row_product", TORCH_BOX(&row_product));
  m.impl("norm_product", TORCH_BOX(&norm_product));
  m.impl("rest_of_block", TORCH_BOX(&rest_of_block));
}
STABLE_TORCH_LIBRARY_IMPL(grt, CompositeExplicitAutograd, m) { m.impl("paths", TORCH_BOX(&path_names)); }
