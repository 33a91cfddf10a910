// The loops of kernels.cpp, included by vectors.h once for each instruction set, inside its namespace.

template <class W>
TARGET void rows(const Product& p, int64_t first, int64_t last) {
  using X = std::conditional_t<sizeof(W) == 1, int16_t, float>;
  using Sums = std::conditional_t<sizeof(W) == 1, Ints, Floats>;
  constexpr int64_t LINE = CACHE_LINE / sizeof(W), STEP = sizeof(W) == 1 ? 2 * WIDTH : WIDTH;
  int64_t lines = p.k / LINE * LINE;
  for (int64_t n = first; n < last; n += AT_ONCE) {
    const W* w[AT_ONCE];
    for (int64_t j = 0; j < AT_ONCE; j++)  // the last row stands in for those that would be behind it
      w[j] = static_cast<const W*>(p.w) + (n + j < last ? n + j : last - 1) * p.stride;
    for (int64_t row = 0; row < p.m; row++) {
      const X* x = static_cast<const X*>(p.x) + row * p.k;
      Sums sums[AT_ONCE] = {};
      for (int64_t line = 0; line < lines; line += LINE) {
        for (int64_t j = 0; j < AT_ONCE; j++) __builtin_prefetch(reinterpret_cast<const char*>(w[j] + line) + AHEAD);
        for (int64_t i = line; i < line + LINE; i += STEP)
          for (int64_t j = 0; j < AT_ONCE; j++) sums[j] = add_products(w[j] + i, x + i, sums[j]);
      }
      for (int64_t j = 0; j < AT_ONCE && n + j < last; j++) {
        float sum = total(sums[j]);
        for (int64_t i = lines; i < p.k; i++) sum += widen(w[j][i]) * x[i];
        p.finish(row, n + j, sum);
      }
    }
  }
}

// Heads first..last, counted through all rows; scores has room for one head's.
template <class N>
TARGET void attend(const Attention& a, int64_t first, int64_t last, float* scores) {
  int64_t even = a.width / WIDTH * WIDTH;
  float to_scores = 1 / std::sqrt(static_cast<float>(a.width));
  for (; first < last; first++) {
    int64_t row = first / a.heads, head = first % a.heads, offset = row * a.kv_row + head * a.kv_head;
    const float* q = a.q + row * a.q_row + head * a.width;
    const bool* visible = a.visible ? a.visible + row * a.visible_row : nullptr;
    float largest = -INFINITY, all = 0;
    for (int64_t t = 0; t < a.tokens; t++) {
      const N* key = static_cast<const N*>(a.keys) + offset + t * a.kv_token;
      scores[t] = -INFINITY;
      if (visible && !visible[t * a.visible_token]) continue;
      Floats sums = {};
      for (int64_t i = 0; i < even; i += WIDTH) sums = add_products(key + i, q + i, sums);
      float sum = total(sums);
      for (int64_t i = even; i < a.width; i++) sum += widen(key[i]) * q[i];
      scores[t] = sum * to_scores;
      largest = std::max(scores[t], largest);
    }
#pragma omp simd reduction(+ : all)
    for (int64_t t = 0; t < a.tokens; t++) {
      scores[t] = scores[t] == -INFINITY ? 0 : exponential(scores[t] - largest);
      all += scores[t];
    }
    float* y = a.y + first * a.width;
    std::fill(y, y + a.width, 0.0f);
    for (int64_t t = 0; t < a.tokens; t++) {
      const N* value = static_cast<const N*>(a.values) + offset + t * a.kv_token;
      float p = scores[t] / all;
      if (p == 0) continue;
#pragma omp simd
      for (int64_t i = 0; i < a.width; i++) y[i] += p * widen(value[i]);
    }
  }
}

TARGET inline void norm(const float* x, const Numbers& gain, const Numbers& shift, float eps, int64_t d, float* y) {
  float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < d; i++) sum += x[i];
  float mean = sum / d;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < d; i++) squares += (x[i] - mean) * (x[i] - mean);
  float to_unit = 1 / std::sqrt(squares / d + eps);
  for (int64_t i = 0; i < d; i++) y[i] = (x[i] - mean) * to_unit * gain[i] + shift[i];
}

// The tanh form, in place: x (1 + tanh(u)) / 2 = x / (1 + e^(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
TARGET inline void gelu(float* x, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; i++)
    x[i] /= 1 + exponential(-1.5957691216f * (x[i] + 0.044715f * x[i] * x[i] * x[i]));
}
