// The loops of kernels.cpp, included by vectors.h once for each instruction set, inside its namespace.

// Sums of products of a row x with AT_ONCE rows w, a vector of each at a time
struct FourFloats {
  static constexpr int64_t STEP = WIDTH;
  Floats sums[AT_ONCE];
  template <class N>
  TARGET INLINE void add(const N* const w[AT_ONCE], const float* x, int64_t i) {
    for (int64_t j = 0; j < AT_ONCE; j++) sums[j] = add_products(load(w[j] + i), load(x + i), sums[j]);
  }
  TARGET INLINE std::array<float, AT_ONCE> totals(const float*) const { return totals_of(sums); }
};

// The same of rows of bf16, two numbers at a time: x is as evens_first makes it.
struct FourPairs : FourFloats {
  static constexpr int64_t STEP = 2 * WIDTH;
  TARGET INLINE void add(const bf16* const w[AT_ONCE], const float* x, int64_t i) {
    Floats of_even = load(x + i), of_odd = load(x + i + WIDTH), even, odd;
    for (int64_t j = 0; j < AT_ONCE; j++) {
      load(w[j] + i, even, odd);
      sums[j] = add_products(odd, of_odd, add_products(even, of_even, sums[j]));
    }
  }
};

#ifndef BY_BYTES
struct FourInts {
  static constexpr int64_t STEP = 2 * WIDTH;
  Ints sums[AT_ONCE];
  TARGET INLINE void add(const int8_t* const w[AT_ONCE], const Steps& x, int64_t i) {
    for (int64_t j = 0; j < AT_ONCE; j++) sums[j] = add_products(w[j] + i, &x.all[i], sums[j]);
  }
  TARGET INLINE std::array<int64_t, AT_ONCE> totals(const Steps&) const {
    return {total(sums[0]), total(sums[1]), total(sums[2]), total(sums[3])};
  }
};
#endif

// For the cache line at this address. Of second-level caches, as they wait for more lines at once than first-level ones.
INLINE void ask_for(const char* at) { __builtin_prefetch(at, 0, 2); }

// This member's rows of W times x, m rows of k numbers, each of which are floats (evens first where W is of bf16), or
// Steps where W is of int8_t
template <class W, class X>
TARGET void rows(const Linear& linear, const std::vector<X>& x, const Numbers& y, Range own) {
  using Four = std::conditional_t<sizeof(W) == 1, FourInts, std::conditional_t<sizeof(W) == 2, FourPairs, FourFloats>>;
  constexpr int64_t LINE = CACHE_LINE / sizeof(W);
  int64_t k = linear.k, lines = k / LINE * LINE, count = own.last - own.first;
  std::vector<float> results(x.size() * count);
  for (int64_t n = 0; n < count; n += AT_ONCE) {
    const W* w[AT_ONCE];
    for (int64_t j = 0; j < AT_ONCE; j++)  // the last row stands in for those that would be behind it
      w[j] = static_cast<const W*>(linear.w) + (own.first + std::min(n + j, count - 1)) * linear.stride;
    for (size_t row = 0; row < x.size(); row++) {
      Four four = {};
      for (int64_t i = 0; i < lines; i += LINE) {
        for (int64_t j = 0; j < AT_ONCE; j++) ask_for(reinterpret_cast<const char*>(w[j] + i) + AHEAD);
        for (int64_t part = i; part < i + LINE; part += Four::STEP) four.add(w, x[row], part);
      }
      auto sums = four.totals(x[row]);
      for (int64_t i = lines; i < k; i++)
        for (int64_t j = 0; j < AT_ONCE; j++) sums[j] += widen(w[j][i]) * x[row][i];
      float* to = &results[row * count + n];
      for (int64_t j = 0; j < std::min(AT_ONCE, count - n); j++) to[j] = static_cast<float>(sums[j]) * size_of(x[row]);
    }
  }
  for (size_t row = 0; row < x.size(); row++) {
    linear.finish(&results[row * count], own);
    y.set(row * linear.n + own.first, &results[row * count], count);
  }
}

// y: of each 2 WIDTH numbers of x (k) the even ones, then the odd ones; what fills no cache line of bf16 as it is
TARGET inline const float* evens_first(const float* __restrict x, int64_t k, float* __restrict y) {
  int64_t i = 0, lines = k * 2 / CACHE_LINE * CACHE_LINE / 2;
  for (; i < lines; i += 2 * WIDTH)
    for (int64_t j = 0; j < WIDTH; j++) y[i + j] = x[i + 2 * j], y[i + WIDTH + j] = x[i + 2 * j + 1];
  std::copy(x + i, x + k, y + i);
  return y;
}

// x (k) in steps, of which the largest |x| has `most`; NaN is the size of a step where a number is not finite.
TARGET inline void to_steps(const float* x, int64_t k, float most, Steps& steps) {
  float largest = 0, nothing = 0;
#pragma omp simd reduction(max : largest) reduction(+ : nothing)
  for (int64_t i = 0; i < k; i++) {
    largest = std::max(largest, std::fabs(x[i]));
    nothing += 0 * x[i];
  }
  bool usable = nothing == 0 && largest > 1e-30f;  // a state so small is none
  float per_step = usable ? most / largest : 0;
  steps.size = (usable ? largest / most : 0) + nothing;
  steps.all.resize(k);
  int16_t* __restrict all = steps.all.data();
#pragma omp simd
  for (int64_t i = 0; i < k; i++)
    all[i] = static_cast<int16_t>(static_cast<int32_t>(x[i] * per_step + (x[i] < 0 ? -0.5f : 0.5f)));
#ifdef BY_BYTES
  int64_t lines = k / CACHE_LINE * CACHE_LINE;
  steps.low.resize(lines);
  steps.high.resize(lines);
  uint8_t* __restrict low = steps.low.data();
  int8_t* __restrict high = steps.high.data();
  int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < lines; i++) {
    low[i] = static_cast<uint8_t>(all[i]);
    high[i] = static_cast<int8_t>(all[i] >> 8);
    sum += all[i] >> 8;
  }
  steps.sum_of_high = sum;
#endif
}

// This member's part of y (m, n)
TARGET inline Range multiply(const Linear& linear, const float* x, int64_t m, const Numbers& y, const Member& me) {
  Range own = me.part(linear.n, AT_ONCE);
  int64_t k = linear.k;
  if (linear.format == Format::int8) {
    // At the least 8 lanes share the products of a row; the sum of each has to fit into 31 bits.
    float most = std::min(32767.0f, std::floor(8 * 2147483647.0f / (127.0f * (k + 64))));
    std::vector<Steps> steps(m);
    for (int64_t row = 0; row < m; row++) to_steps(x + row * k, k, most, steps[row]);
    rows<int8_t>(linear, steps, y, own);
  } else {
    bool pairs = linear.format == Format::bf16;
    std::vector<float> sorted(pairs ? m * k : 0);
    std::vector<const float*> of_rows(m);
    for (int64_t row = 0; row < m; row++)
      of_rows[row] = pairs ? evens_first(x + row * k, k, &sorted[row * k]) : x + row * k;
    pairs ? rows<bf16>(linear, of_rows, y, own) : rows<float>(linear, of_rows, y, own);
  }
  return own;
}

TARGET inline void norm(const Norm& norm, const float* x, int64_t d, float* y) {
  float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < d; i++) sum += x[i];
  float mean = norm.centred ? sum / d : 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < d; i++) squares += (x[i] - mean) * (x[i] - mean);
  float to_unit = 1 / std::sqrt(squares / d + norm.eps);
  for (int64_t i = 0; i < d; i++) y[i] = (x[i] - mean) * to_unit;
  for (int64_t i = 0; norm.gain && i < d; i++) y[i] *= (*norm.gain)[i];
  for (int64_t i = 0; norm.shift && i < d; i++) y[i] += (*norm.shift)[i];
}

TARGET inline void product(const Product& p, Member& me) {
  int64_t k = p.linear.k;
  std::vector<float> x = widened(p.x, p.m * k);  // by every member for itself, as all that is so short
  for (int64_t row = 0; p.norm && row < p.m; row++) norm(*p.norm, &x[row * k], k, &x[row * k]);
  multiply(p.linear, x.data(), p.m, p.y, me);
}

// For n numbers, some bytes behind these
template <class N>
INLINE void ask_for(const N* numbers, int64_t n, int64_t behind) {
  const char* at = reinterpret_cast<const char*>(numbers) + behind;
  for (int64_t i = 0; i < n * static_cast<int64_t>(sizeof(N)); i += CACHE_LINE) ask_for(at + i);
}

// The product of q with AT_ONCE keys of c numbers
template <class N>
TARGET INLINE void score(const N* const key[AT_ONCE], const float* q, int64_t c, float* scores) {
  int64_t even = c / WIDTH * WIDTH;
  FourFloats four = {};
  for (int64_t i = 0; i < even; i += WIDTH) four.add(key, q, i);
  auto sums = four.totals(q);
  for (int64_t j = 0; j < AT_ONCE; j++) {
    for (int64_t i = even; i < c; i++) sums[j] += widen(key[j][i]) * q[i];
    scores[j] = sums[j];
  }
}

// y = the sum of COUNT vectors' breadth of the values, each times its weight
template <int COUNT, class N>
TARGET INLINE void mix(const N* value, int64_t distance, const std::vector<float>& weights, float* y) {
  Floats sums[COUNT] = {};
  for (size_t t = 0; t < weights.size(); t++, value += distance)
    for (int j = 0; j < COUNT; j++) sums[j] = add_products(load(value + j * WIDTH), every(weights[t]), sums[j]);
  std::memcpy(y, sums, sizeof sums);
}

TARGET inline void gate(const Gate& gate, Member& me) {
  int64_t k = gate.up.k;
  std::vector<float> x = widened(gate.x, gate.m * k);
  for (int64_t row = 0; row < gate.m; row++) norm(gate.norm, &x[row * k], k, &x[row * k]);
  Range own = multiply(gate.up, x.data(), gate.m, {gate.inner, false}, me);
  for (int64_t row = 0; row < gate.m; row++)
    for (int64_t i = row * gate.up.n + own.first; i < row * gate.up.n + own.last; i++) {
      float a = gate.inner[i] + gate.anchor[i];
      gate.inner[i] = a / (1 + exponential(-a));  // silu
    }
  me.meet();
  multiply(gate.down, gate.inner, gate.m, gate.y, me);
}

TARGET inline void softmax(float* x, int64_t n) {
  float largest = -INFINITY, all = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < n; i++) largest = std::max(x[i], largest);
#pragma omp simd
  for (int64_t i = 0; i < n; i++) x[i] = exponential(x[i] - largest);
#pragma omp simd reduction(+ : all)
  for (int64_t i = 0; i < n; i++) all += x[i];
#pragma omp simd
  for (int64_t i = 0; i < n; i++) x[i] /= all;
}

// Which of a row's tokens its query sees: all between first and last, but for holes
struct Seen {
  int64_t first, last;
  bool holes;
};

inline Seen seen(const Attention& a, int64_t row) {
  if (!a.visible) return {0, a.tokens, false};
  const bool* visible = a.visible + row * a.visible_row;
  int64_t first = 0, last = a.tokens, count = 0;
  while (first < last - 1 && !visible[first * a.visible_token]) first++;
  while (first < last - 1 && !visible[(last - 1) * a.visible_token]) last--;
  for (int64_t t = first; t < last; t++) count += visible[t * a.visible_token];
  return {first, last, count != last - first};
}

// This member's heads, counted through all rows
template <class N>
TARGET void attend(const Attention& a, Range own) {
  int64_t even = a.width / WIDTH * WIDTH, of_row = -1;
  float to_scores = 1 / std::sqrt(static_cast<float>(a.width));
  Seen sees{};
  std::vector<float> scores, q(a.width);
  for (int64_t i = own.first; i < own.last; i++) {
    int64_t row = i / a.heads, head = i % a.heads;
    if (row != of_row) sees = seen(a, of_row = row);
    int64_t tokens = sees.last - sees.first;
    int64_t offset = row * a.kv_row + head * a.kv_head + sees.first * a.kv_token;
    const N *keys = static_cast<const N*>(a.keys) + offset, *value = static_cast<const N*>(a.values) + offset;
    for (int64_t c = 0; c < a.width; c++) q[c] = a.q[row * a.q_row + head * a.width + c] * to_scores;
    scores.resize(tokens + AT_ONCE);
    for (int64_t t = 0; t < tokens; t += AT_ONCE) {
      const N* key[AT_ONCE];
      for (int64_t j = 0; j < AT_ONCE; j++) {
        key[j] = keys + std::min(t + j, tokens - 1) * a.kv_token;
        ask_for(key[j], a.width, KEYS_AHEAD);
        ask_for(value + (t + j) * a.kv_token, a.width, 0);
      }
      score(key, q.data(), a.width, &scores[t]);
    }
    scores.resize(tokens);
    const bool* visible = a.visible + row * a.visible_row + sees.first * a.visible_token;
    for (int64_t t = 0; sees.holes && t < tokens; t++)
      if (!visible[t * a.visible_token]) scores[t] = -INFINITY;
    softmax(scores.data(), tokens);
    float* y = a.y + i * a.width;
    int64_t c = 0;
    for (; c + AT_ONCE * WIDTH <= even; c += AT_ONCE * WIDTH) mix<AT_ONCE>(value + c, a.kv_token, scores, y + c);
    for (; c < even; c += WIDTH) mix<1>(value + c, a.kv_token, scores, y + c);
    std::fill(y + c, y + a.width, 0.0f);
    for (int64_t t = 0; t < tokens; t++)
      for (int64_t rest = c; rest < a.width; rest++) y[rest] += scores[t] * widen(value[t * a.kv_token + rest]);
  }
}

// The tanh form, in place: x (1 + tanh(u)) / 2 = x / (1 + e^(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
TARGET inline void gelu(float* x, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; i++) x[i] /= 1 + exponential(-1.5957691216f * (x[i] + 0.044715f * x[i] * x[i] * x[i]));
}

TARGET inline void rest_of_block(const Rest& rest, Member& me) {
  int64_t m = rest.attention.rows, d = rest.out.n, wide = rest.up.n;
  Range heads = me.part(m * rest.attention.heads, 1);
  rest.attention.is_bf16 ? attend<bf16>(rest.attention, heads) : attend<float>(rest.attention, heads);
  me.meet();
  multiply(rest.out, rest.attention.y, m, {rest.part, false}, me);
  me.meet();
  std::vector<float> h = widened(rest.x, m * d), normed(m * d);
  for (int64_t i = 0; i < m * d; i++) h[i] += rest.part[i];
  for (int64_t at = 0; at < m * d; at += d) norm(rest.norm, h.data() + at, d, normed.data() + at);
  Range own = multiply(rest.up, normed.data(), m, {rest.wide, false}, me);
  for (int64_t row = 0; row < m; row++) gelu(rest.wide + row * wide + own.first, own.last - own.first);
  me.meet();
  own = multiply(rest.down, rest.wide, m, {rest.part, false}, me);
  for (int64_t row = 0; row < m; row++)
    for (int64_t i = row * d + own.first; i < row * d + own.last; i++) rest.y.set(i, h[i] + rest.part[i]);
}
