// The loops of kernels.cpp, included by vectors.h once for each instruction set, inside its namespace.

// Rows first..last of W times x (m, k), which is of int16_t, in steps, where W is of int8_t, else of float
template <class W, class X>
TARGET void rows(const Linear& linear, const X* x, const float* step, int64_t m, const Numbers& y, Range own) {
  using Sums = std::conditional_t<sizeof(W) == 1, Ints, Floats>;
  using Sum = std::conditional_t<sizeof(W) == 1, int64_t, float>;
  constexpr int64_t LINE = CACHE_LINE / sizeof(W), STEP = sizeof(W) == 1 ? 2 * WIDTH : WIDTH;
  int64_t k = linear.k, lines = k / LINE * LINE;
  for (int64_t n = own.first; n < own.last; n += AT_ONCE) {
    const W* w[AT_ONCE];
    for (int64_t j = 0; j < AT_ONCE; j++)  // the last row stands in for those that would be behind it
      w[j] = static_cast<const W*>(linear.w) + std::min(n + j, own.last - 1) * linear.stride;
    for (int64_t row = 0; row < m; row++) {
      const X* of_row = x + row * k;
      Sums sums[AT_ONCE] = {};
      for (int64_t line = 0; line < lines; line += LINE) {
        for (int64_t j = 0; j < AT_ONCE; j++) __builtin_prefetch(reinterpret_cast<const char*>(w[j] + line) + AHEAD);
        for (int64_t i = line; i < line + LINE; i += STEP)
          for (int64_t j = 0; j < AT_ONCE; j++) {
            if constexpr (sizeof(W) == 1)
              sums[j] = add_products(w[j] + i, of_row + i, sums[j]);
            else
              sums[j] = add_products(load(w[j] + i), load(of_row + i), sums[j]);
          }
      }
      for (int64_t j = 0; j < AT_ONCE && n + j < own.last; j++) {
        Sum sum = total(sums[j]);
        for (int64_t i = lines; i < k; i++) sum += static_cast<Sum>(widen(w[j][i])) * of_row[i];
        y.set(row * linear.n + n + j, linear.finished(n + j, static_cast<float>(sum) * (step ? step[row] : 1)));
      }
    }
  }
}

// x (k) in steps, of which the largest |x| has `most`; returns the size of a step, NaN where a number is not finite.
TARGET inline float in_steps(const float* x, int64_t k, float most, int16_t* steps) {
  float largest = 0, nothing = 0;
#pragma omp simd reduction(max : largest) reduction(+ : nothing)
  for (int64_t i = 0; i < k; i++) {
    largest = std::max(largest, std::fabs(x[i]));
    nothing += 0 * x[i];
  }
  bool usable = nothing == 0 && largest > 1e-30f;  // a state so small is none
  float per_step = usable ? most / largest : 0;
#pragma omp simd
  for (int64_t i = 0; i < k; i++)
    steps[i] = static_cast<int16_t>(static_cast<int32_t>(x[i] * per_step + (x[i] < 0 ? -0.5f : 0.5f)));
  return (usable ? largest / most : 0) + nothing;
}

// This member's part of y (m, n)
TARGET inline Range multiply(const Linear& linear, const float* x, int64_t m, const Numbers& y, const Member& me) {
  Range own = me.part(linear.n, AT_ONCE);
  int64_t k = linear.k;
  if (linear.format == Format::fp32) rows<float>(linear, x, nullptr, m, y, own);
  if (linear.format == Format::bf16) rows<bf16>(linear, x, nullptr, m, y, own);
  if (linear.format == Format::int8) {
    // At the least 8 lanes share the products of a row; the sum of each has to fit into 31 bits.
    float most = std::min(32767.0f, std::floor(8 * 2147483647.0f / (127.0f * (k + 64))));
    std::vector<int16_t> steps(m * k);
    std::vector<float> step(m);
    for (int64_t row = 0; row < m; row++) step[row] = in_steps(x + row * k, k, most, steps.data() + row * k);
    rows<int8_t>(linear, steps.data(), step.data(), m, y, own);
  }
  return own;
}

TARGET inline void norm(const Norm& norm, const float* x, int64_t d, float* y) {
  float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < d; i++) sum += x[i];
  float mean = sum / d;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < d; i++) squares += (x[i] - mean) * (x[i] - mean);
  float to_unit = 1 / std::sqrt(squares / d + norm.eps);
  for (int64_t i = 0; i < d; i++) y[i] = (x[i] - mean) * to_unit * norm.gain[i] + norm.shift[i];
}

TARGET inline void product(const Product& p, Member& me) {
  std::vector<float> normed(p.norm ? p.m * p.linear.k : 0);
  for (size_t at = 0; at < normed.size(); at += p.linear.k)
    norm(*p.norm, p.x + at, p.linear.k, normed.data() + at);
  multiply(p.linear, p.norm ? normed.data() : p.x, p.m, p.y, me);
}

// This member's heads, counted through all rows
template <class N>
TARGET void attend(const Attention& a, Range own) {
  int64_t even = a.width / WIDTH * WIDTH;
  float to_scores = 1 / std::sqrt(static_cast<float>(a.width));
  std::vector<float> scores(a.tokens);
  for (int64_t i = own.first; i < own.last; i++) {
    int64_t row = i / a.heads, head = i % a.heads, offset = row * a.kv_row + head * a.kv_head;
    const N *key = static_cast<const N*>(a.keys) + offset, *value = static_cast<const N*>(a.values) + offset;
    const float* q = a.q + row * a.q_row + head * a.width;
    const bool* visible = a.visible ? a.visible + row * a.visible_row : nullptr;
    float largest = -INFINITY, all = 0;
    for (int64_t t = 0; t < a.tokens; t++, key += a.kv_token) {
      scores[t] = -INFINITY;
      if (visible && !visible[t * a.visible_token]) continue;
      __builtin_prefetch(reinterpret_cast<const char*>(key) + AHEAD / 2);
      __builtin_prefetch(value + t * a.kv_token);
      Floats sums = {};
      for (int64_t c = 0; c < even; c += WIDTH) sums = add_products(load(key + c), load(q + c), sums);
      float sum = total(sums);
      for (int64_t c = even; c < a.width; c++) sum += widen(key[c]) * q[c];
      scores[t] = sum * to_scores;
      largest = std::max(scores[t], largest);
    }
#pragma omp simd reduction(+ : all)
    for (int64_t t = 0; t < a.tokens; t++) {
      scores[t] = scores[t] == -INFINITY ? 0 : exponential(scores[t] - largest);
      all += scores[t];
    }
#pragma omp simd
    for (int64_t t = 0; t < a.tokens; t++) scores[t] /= all;
    float* y = a.y + i * a.width;
    std::fill(y, y + a.width, 0.0f);
    for (int64_t c = 0; c < even; c += WIDTH) {
      Floats sums = {};
      for (int64_t t = 0; t < a.tokens; t++)
        sums = add_products(load(value + t * a.kv_token + c), every(scores[t]), sums);
      std::memcpy(y + c, &sums, sizeof sums);
    }
    for (int64_t t = 0; t < a.tokens; t++)
      for (int64_t c = even; c < a.width; c++) y[c] += scores[t] * widen(value[t * a.kv_token + c]);
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
  std::vector<float> h(rest.x, rest.x + m * d), normed(m * d);  // by every member for itself
  for (int64_t i = 0; i < m * d; i++) h[i] += rest.part[i];
  for (int64_t at = 0; at < m * d; at += d) norm(rest.norm, h.data() + at, d, normed.data() + at);
  Range own = multiply(rest.up, normed.data(), m, {rest.wide, false}, me);
  for (int64_t row = 0; row < m; row++) gelu(rest.wide + row * wide + own.first, own.last - own.first);
  me.meet();
  own = multiply(rest.down, rest.wide, m, {rest.part, false}, me);
  for (int64_t row = 0; row < m; row++)
    for (int64_t i = row * d + own.first; i < row * d + own.last; i++) rest.y.set(i, h[i] + rest.part[i]);
}
