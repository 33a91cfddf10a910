// The loops of row_product.cpp, included once for each instruction set: inside a namespace that has Lanes (WIDTH floats),
// load (of floats, bf16 or bytes), add_product and total, with TARGET as the attribute that lets a function use them.

template <class W>
TARGET void rows(const Product& p, int64_t first, int64_t last) {
  constexpr int64_t LINE = CACHE_LINE / sizeof(W);
  int64_t lines = p.k / LINE * LINE;
  for (int64_t n = first; n < last; n += AT_ONCE) {
    const W* w[AT_ONCE];
    for (int64_t j = 0; j < AT_ONCE; j++)  // the last row stands in for those that would be behind it
      w[j] = static_cast<const W*>(p.w) + (n + j < last ? n + j : last - 1) * p.stride;
    for (int64_t row = 0; row < p.m; row++) {
      const float* x = p.x + row * p.k;
      Lanes lanes[AT_ONCE] = {};
      for (int64_t line = 0; line < lines; line += LINE) {
        for (int64_t j = 0; j < AT_ONCE; j++) __builtin_prefetch(reinterpret_cast<const char*>(w[j] + line) + AHEAD);
        for (int64_t i = line; i < line + LINE; i += WIDTH) {
          Lanes some = load(x + i);
          for (int64_t j = 0; j < AT_ONCE; j++) lanes[j] = add_product(load(w[j] + i), some, lanes[j]);
        }
      }
      for (int64_t j = 0; j < AT_ONCE && n + j < last; j++) {
        float sum = total(lanes[j]);
        for (int64_t i = lines; i < p.k; i++) sum += widen(w[j][i]) * x[i];
        p.finish(row, n + j, sum);
      }
    }
  }
}
