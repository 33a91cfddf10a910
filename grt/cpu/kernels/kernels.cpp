// The parts of decoding a token that read weights, for a few rows x:
//
//     row_product    y = x W^T * scale + bias, W in fp32, bf16 or int8
//                    the same of LayerNorm(x)
//     gate           y = down(silu(up(LayerNorm(x)) + anchor))
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

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "vectors.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

namespace {

struct Path {
  const char* name;
  void (*product)(const Product&, Member&);
  void (*gate)(const Gate&, Member&);
  void (*rest_of_block)(const Rest&, Member&);
};

#define PATH(name) {#name, name::product, name::gate, name::rest_of_block}

// What this CPU can run, the fastest first.
const std::vector<Path>& paths() {
  static const std::vector<Path> found = [] {
    std::vector<Path> paths;
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vnni")) paths.push_back(PATH(avx512));
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

Linear linear_of(const Tensor& weight, const MaybeTensor& scale, const MaybeTensor& bias) {
  STD_TORCH_CHECK(weight.stride(1) == 1, "a row's weights must lie one after the other");
  ScalarType type = weight.scalar_type();
  Format format = type == ScalarType::Char ? Format::int8 : type == ScalarType::BFloat16 ? Format::bf16 : Format::fp32;
  STD_TORCH_CHECK(format != Format::fp32 || type == ScalarType::Float, "weights must be fp32, bf16 or int8");
  STD_TORCH_CHECK(format != Format::int8 || weight.size(1) <= 1 << 16, "rows of int8 must not be longer than 65,536");
  STD_TORCH_CHECK(!scale || (scale->scalar_type() == ScalarType::Float && scale->numel() == weight.size(0)),
                  "a scale must be fp32, one for each output");
  STD_TORCH_CHECK(!bias || bias->numel() == weight.size(0), "a bias must be one number for each output");
  Linear linear{weight.data_ptr(), format, weight.size(0), weight.size(1), weight.stride(0), nullptr, std::nullopt};
  if (scale) linear.scale = static_cast<const float*>(numbers(*scale).at);
  if (bias) linear.bias = numbers(*bias);
  return linear;
}

Norm norm_of(const Tensor& gain, const Tensor& shift, double eps, int64_t k) {
  STD_TORCH_CHECK(gain.numel() == k && shift.numel() == k, "a norm must have one gain and one shift for each input");
  return {numbers(gain), numbers(shift), static_cast<float>(eps), true};
}

std::shared_ptr<float[]> room(int64_t n) { return std::shared_ptr<float[]>(new float[n]); }

Tensor new_like(const Tensor& x, int64_t width) {
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = width;
  return torch::stable::new_empty(x, {shape.data(), shape.size()});
}

Tensor row_product(const Tensor& x, const Tensor& weight, const MaybeTensor& scale, const MaybeTensor& bias,
                   const MaybeTensor& gain, const MaybeTensor& shift, double eps, int64_t path) {
  Linear linear = linear_of(weight, scale, bias);
  STD_TORCH_CHECK(x.size(-1) == linear.k, "x and weight do not fit");
  Tensor y = new_like(x, linear.n);
  Product p{linear, std::nullopt, numbers(x), x.numel() / linear.k, numbers(y)};
  if (gain && shift) p.norm = norm_of(*gain, *shift, eps, linear.k);
  const Path& chosen = paths().at(path);
  together(linear.n * linear.k / ALONE, [p, &chosen](Member& me) { chosen.product(p, me); });
  return y;
}

Tensor gate(const Tensor& x, const Tensor& gain, const Tensor& shift, double eps, const Tensor& up_weight,
            const MaybeTensor& up_scale, const Tensor& anchor, const Tensor& down_weight,
            const MaybeTensor& down_scale, const MaybeTensor& down_bias, int64_t path) {
  Linear up = linear_of(up_weight, up_scale, std::nullopt), down = linear_of(down_weight, down_scale, down_bias);
  int64_t d = up.k, m = x.numel() / d;
  STD_TORCH_CHECK(x.size(-1) == d && down.k == up.n && anchor.numel() == m * up.n, "the parts of a gate do not fit");
  auto inner = room(m * up.n);
  Tensor y = new_like(x, down.n);
  Gate parts{numbers(x), m, norm_of(gain, shift, eps, d), up, numbers(anchor), down, inner.get(), numbers(y)};
  const Path& chosen = paths().at(path);
  together(up.n * d / ALONE, [parts, inner, &chosen](Member& me) { chosen.gate(parts, me); });
  return y;
}

// Of q (rows, d or more), keys and values (rows, heads, tokens, width), visible (rows, tokens)
Attention attention_of(Numbers q, int64_t q_row, const Tensor& keys, const Tensor& values,
                       const MaybeTensor& visible, float* y) {
  bool is_bf16 = keys.scalar_type() == ScalarType::BFloat16;
  STD_TORCH_CHECK(keys.stride(3) == 1 && (is_bf16 || keys.scalar_type() == ScalarType::Float), "keys do not fit");
  STD_TORCH_CHECK(values.scalar_type() == keys.scalar_type(), "keys are not as values");
  for (int64_t i = 0; i < 4; i++) STD_TORCH_CHECK(keys.stride(i) == values.stride(i), "keys are not as values");
  Attention a{keys.size(0), keys.size(1), keys.size(2), keys.size(3), q, q_row, keys.data_ptr(), values.data_ptr(),
              is_bf16, keys.stride(0), keys.stride(1), keys.stride(2), nullptr, 0, 0, y};
  if (visible) {
    STD_TORCH_CHECK(visible->scalar_type() == ScalarType::Bool, "visible must be true or false");
    a.visible = static_cast<const bool*>(visible->data_ptr());
    a.visible_row = visible->stride(0), a.visible_token = visible->stride(1);
  }
  return a;
}

Tensor rest_of_block(const Tensor& x, const Tensor& qkv, const Tensor& keys, const Tensor& values,
                     const MaybeTensor& visible, const Tensor& out_weight, const MaybeTensor& out_scale,
                     const MaybeTensor& out_bias, const Tensor& gain, const Tensor& shift, double eps,
                     const Tensor& up_weight, const MaybeTensor& up_scale, const MaybeTensor& up_bias,
                     const Tensor& down_weight, const MaybeTensor& down_scale, const MaybeTensor& down_bias,
                     int64_t path) {
  Linear out = linear_of(out_weight, out_scale, out_bias), up = linear_of(up_weight, up_scale, up_bias);
  Linear down = linear_of(down_weight, down_scale, down_bias);
  int64_t m = keys.size(0), d = out.n;
  STD_TORCH_CHECK(x.numel() == m * d && qkv.numel() == m * 3 * d && up.k == d && down.n == d && down.k == up.n &&
                      out.k == d && keys.size(1) * keys.size(3) == d,
                  "the parts of a block do not fit");
  auto mixed = room(2 * m * d + m * up.n);
  float *part = mixed.get() + m * d, *wide = part + m * d;
  Tensor y = new_like(x, d);
  Rest rest{numbers(x), attention_of(numbers(qkv), qkv.size(-1), keys, values, visible, mixed.get()), out,
            norm_of(gain, shift, eps, d), up, down, part, wide, numbers(y)};
  const Path& chosen = paths().at(path);
  together(up.n * d / ALONE, [rest, mixed, &chosen](Member& me) { chosen.rest_of_block(rest, me); });
  return y;
}

// Small works between those, of one member: only for tapes, as torch has all of them.

void alone(std::function<void(Member&)> work) { together(1, work); }

// Rows of a table, whatever they consist of
void pick(const Tensor& y, const Tensor& table, const Tensor& ids, int64_t row_bytes) {
  STD_TORCH_CHECK(ids.scalar_type() == ScalarType::Long && ids.is_contiguous(), "ids must be int64");
  char *to = static_cast<char*>(y.data_ptr()), *from = static_cast<char*>(table.data_ptr());
  const int64_t *id = static_cast<int64_t*>(ids.data_ptr()), n = ids.numel();
  alone([=](Member&) {
    for (int64_t i = 0; i < n; i++) std::memcpy(to + i * row_bytes, from + id[i] * row_bytes, row_bytes);
  });
}

// x into a store of `outer` times `length` pieces, at the place that index names
void put(const Tensor& store, const Tensor& index, const Tensor& x, int64_t outer, int64_t length, int64_t bytes) {
  STD_TORCH_CHECK(index.scalar_type() == ScalarType::Long && index.numel() == 1, "an index must be one int64");
  char *to = static_cast<char*>(store.data_ptr()), *from = static_cast<char*>(x.data_ptr());
  const int64_t* at = static_cast<int64_t*>(index.data_ptr());
  alone([=](Member&) {
    for (int64_t i = 0; i < outer; i++) std::memcpy(to + (i * length + *at) * bytes, from + i * bytes, bytes);
  });
}

// n numbers of x, which has them all, or one in the place of all; in fp32, bf16 or int8
std::function<std::vector<float>()> reader(const Tensor& x, int64_t n) {
  STD_TORCH_CHECK(x.numel() == n || x.numel() == 1, "operands must be as long as the result, or one number");
  bool one = x.numel() != n;
  if (x.scalar_type() == ScalarType::Char) {
    STD_TORCH_CHECK(!one, "one number must be fp32 or bf16");
    const int8_t* at = static_cast<int8_t*>(x.data_ptr());
    return [=] { return std::vector<float>(at, at + n); };
  }
  Numbers given = numbers(x);
  return [=] { return one ? std::vector<float>(n, given[0]) : widened(given, n); };
}

// kind: copy a, add, mul, sigmoid of a, or lerp, from a to b by a part c of the way
void elementwise(const Tensor& y, std::string kind, const Tensor& a, const MaybeTensor& b, const MaybeTensor& c) {
  int64_t n = y.numel();
  Numbers to = numbers(y);
  auto read_a = reader(a, n), read_b = reader(b ? *b : a, n), read_c = reader(c ? *c : a, n);
  bool add = kind == "add", mul = kind == "mul", sigmoid = kind == "sigmoid", lerp = kind == "lerp";
  alone([=](Member&) {
    std::vector<float> x = read_a(), other, part;
    if (add || mul || lerp) other = read_b();
    if (lerp) part = read_c();
    for (int64_t i = 0; add && i < n; i++) x[i] += other[i];
    for (int64_t i = 0; mul && i < n; i++) x[i] *= other[i];
    for (int64_t i = 0; sigmoid && i < n; i++) x[i] = 1 / (1 + exponential(-x[i]));
    for (int64_t i = 0; lerp && i < n; i++) {
      float way = other[i] - x[i];
      x[i] = part[i] < 0.5f ? x[i] + part[i] * way : other[i] - way * (1 - part[i]);
    }
    to.set(0, x.data(), n);
  });
}

// LayerNorm, or RMSNorm, which does not centre
void norm_alone(const Tensor& y, const Tensor& x, const MaybeTensor& gain, const MaybeTensor& shift, double eps,
                bool centred) {
  int64_t d = x.size(-1), n = x.numel();
  Norm norm{std::nullopt, std::nullopt, static_cast<float>(eps), centred};
  if (gain) norm.gain = numbers(*gain);
  if (shift) norm.shift = numbers(*shift);
  Numbers from = numbers(x), to = numbers(y);
  alone([=](Member&) {
    std::vector<float> all = widened(from, n);
    for (float* row = all.data(); row < all.data() + n; row += d) portable::norm(norm, row, d, row);
    to.set(0, all.data(), n);
  });
}

// Tapes, by numbers: between record() and recorded(), what this thread does goes onto one. They hold no tensors.
std::map<int64_t, std::shared_ptr<Tape>> tapes;
std::mutex of_tapes;

int64_t record() {
  std::lock_guard lock(of_tapes);
  int64_t tape = tapes.empty() ? 1 : tapes.rbegin()->first + 1;
  tapes[tape] = std::make_shared<Tape>();
  recording = tapes[tape].get();
  return tape;
}

void recorded() { recording = nullptr; }

void play(int64_t tape) {
  std::shared_ptr<Tape> found;
  {
    std::lock_guard lock(of_tapes);
    found = tapes.at(tape);
  }
  found->play();
}

void erase(int64_t tape) {
  std::lock_guard lock(of_tapes);
  tapes.erase(tape);
}

}  // namespace

STABLE_TORCH_LIBRARY(grt, m) {
  m.def(
      "row_product(Tensor x, Tensor weight, Tensor? scale, Tensor? bias, Tensor? gain=None, Tensor? shift=None, "
      "float eps=0, int path=0) -> Tensor");
  m.def(
      "gate(Tensor x, Tensor gain, Tensor shift, float eps, Tensor up, Tensor? up_scale, Tensor anchor, Tensor down, "
      "Tensor? down_scale, Tensor? down_bias, int path=0) -> Tensor");
  m.def(
      "rest_of_block(Tensor x, Tensor qkv, Tensor keys, Tensor values, Tensor? visible, Tensor out, Tensor? out_scale, "
      "Tensor? out_bias, Tensor gain, Tensor shift, float eps, Tensor up, Tensor? up_scale, Tensor? up_bias, "
      "Tensor down, Tensor? down_scale, Tensor? down_bias, int path=0) -> Tensor");
  m.def("paths() -> str");
  m.def("record() -> int");
  m.def("recorded() -> ()");
  m.def("play(int tape) -> ()");
  m.def("erase(int tape) -> ()");
  m.def("pick(Tensor(a!) y, Tensor table, Tensor ids, int row_bytes) -> ()");
  m.def("put(Tensor(a!) store, Tensor index, Tensor x, int outer, int length, int bytes) -> ()");
  m.def("elementwise(Tensor(a!) y, str kind, Tensor a, Tensor? b=None, Tensor? c=None) -> ()");
  m.def("norm(Tensor(a!) y, Tensor x, Tensor? gain, Tensor? shift, float eps, bool centred) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(grt, CPU, m) {
  m.impl("row_product", TORCH_BOX(&row_product));
  m.impl("gate", TORCH_BOX(&gate));
  m.impl("rest_of_block", TORCH_BOX(&rest_of_block));
  m.impl("pick", TORCH_BOX(&pick));
  m.impl("put", TORCH_BOX(&put));
  m.impl("elementwise", TORCH_BOX(&elementwise));
  m.impl("norm", TORCH_BOX(&norm_alone));
}
STABLE_TORCH_LIBRARY_IMPL(grt, CompositeExplicitAutograd, m) {
  m.impl("paths", TORCH_BOX(&path_names));
  m.impl("record", TORCH_BOX(&record));
  m.impl("recorded", TORCH_BOX(&recorded));
  m.impl("play", TORCH_BOX(&play));
  m.impl("erase", TORCH_BOX(&erase));
}
