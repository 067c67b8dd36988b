// The product with values: blocks of rows, all keys that they see, one softmax; nothing of size queries x keys is held.
#pragma once

#include <atomic>
#include <cmath>

#include "scores.h"

namespace LEVEL {

inline Shorts rounded(Floats x) {  // to bfloat16, ties to even
  const Words bits = (Words)x, even = bits + 0x7FFF + (bits >> 16 & 1);
  return __builtin_convertvector((x != x ? bits | 0x400000 : even) >> 16, Shorts);
}

// Output and lse of a row, from the sum of its values with weights of this total.
template <class E>
void write_row(const Problem& p, const Rows& its, int i, const float* sums, float most, float total) {
  const bool is_empty = total == 0.0f;
  const float factor = is_empty ? 0.0f : p.kept / total;
  char* out = p.out.at<char>(its.b, its.head_of(i), its.row_of(i));
  for (int64_t d = 0; d < p.value_dim; d += LANES) {
    const Floats x = is_empty ? Floats{} : load(sums + d) * factor;
    if constexpr (E::PER_STEP == 2)
      store(out + d * 2, rounded(x));
    else
      store(out + d * 4, x);
  }
  p.lse[its.number(p, i)] = is_empty ? -INF : most * LN2 + std::log(total);
}

template <class E>
class Forward {
 public:
  static constexpr bool IS_HALF = E::PER_STEP == 2;
  static constexpr ptrdiff_t ITEM = IS_HALF ? 2 : 4;

  Forward(const Problem& p, Arena& arena)
      : p_(p),
        keys_(arena, p, p.k, p.dim),
        values_(arena, p, IS_HALF ? PANEL / 2 * p.value_dim : 0),
        queries_(arena.take<Number>(p.heads_at_once > 1 ? ROWS * p.dim / E::PER_STEP : 0)),
        scores_(arena.take<float>(ROWS * STRIDE)),
        weights_(arena.take<uint16_t>(IS_HALF ? ROWS * STRIDE : 0)),
        sums_(arena.take<float>(ROWS * p.value_dim)) {}

  // Some rows, and the keys of one of so many parts.
  void run(const Rows& its, int64_t part) {
    its_ = its;
    for (int i = 0; i < its.count(); ++i) most_[i] = -INF, total_[i] = 0.0f;
    const int64_t first = p_.panels() * part / p_.parts, stop = p_.panels() * (part + 1) / p_.parts;
    const Left<E> query = queries();
    const bool any = each_part(p_, its, first, stop, [&](const Seen& seen, bool adds) { add(seen, query, adds); });
    p_.partial ? keep(any, part) : finish(any);
  }

 private:
  using Number = typename E::Number;

  // In place, or those of several heads below one another.
  Left<E> queries() {
    if (its_.heads == 1) {
      const auto* data = p_.q.at<Number>(its_.b, its_.head, its_.first);
      return {data, p_.q.row / static_cast<ptrdiff_t>(sizeof(Number)), 1};
    }
    const ptrdiff_t steps = p_.dim / E::PER_STEP;
    for (int i = 0; i < its_.count(); ++i) {
      const auto* row = p_.q.at<Number>(its_.b, its_.head_of(i), its_.row_of(i));
      std::memcpy(queries_ + i * steps, row, steps * sizeof(Number));
    }
    return {queries_, steps, 1};
  }

  void add(const Seen& seen, Left<E> query, bool adds) {
    const int rows = its_.count();
    for (int n = 0; n < seen.count; ++n) {
      const Right<E> keys = keys_.get(its_, seen.panel[n]);
      if (p_.meets_keys_once()) expect_next(seen, n);
      const int vectors = (p_.keys_of(seen.panel[n]) + LANES - 1) / LANES;
      multiply<E>({scores_ + n * PANEL, STRIDE}, query, keys, rows, vectors, p_.dim / E::PER_STEP, false);
    }
    for (int i = 0; i < rows; ++i) {
      if (Terms::any(p_))
        p_.row_words ? softmax<true, true>(seen, i, adds) : softmax<true, false>(seen, i, adds);
      else
        p_.row_words ? softmax<false, true>(seen, i, adds) : softmax<false, false>(seen, i, adds);
    }
    for (int n = 0; n < seen.count; ++n) {
      const int64_t first = seen.panel[n] * PANEL;
      const int count = p_.keys_of(seen.panel[n]);
      const Out out{sums_, p_.value_dim};
      const int vectors = static_cast<int>(p_.value_dim / LANES);
      if constexpr (IS_HALF) {
        const Left<E> weights{reinterpret_cast<const uint32_t*>(weights_ + n * PANEL), STRIDE / 2, 1};
        const Right<E> values{packed_values(seen.panel[n]), p_.value_dim};
        multiply<E>(out, weights, values, rows, vectors, (count + 1) / 2, adds || n);
      } else {
        const Left<E> weights{scores_ + n * PANEL, STRIDE, 1};
        const Right<E> values{p_.v.at<float>(its_.b, its_.kv_head, first), p_.v.row / ITEM};
        multiply<E>(out, weights, values, rows, vectors, count, adds || n);
      }
    }
  }

  void expect_next(const Seen& seen, int n) {
    const char* first = p_.v.at<char>(its_.b, its_.kv_head, seen.panel[n] * PANEL);
    expect(first, p_.v.row, p_.keys_of(seen.panel[n]), p_.value_dim * ITEM);
  }

  // Scores of a row to weights that are not yet divided by their total; what earlier parts left is scaled.
  template <bool TERMS, bool DROPS>
  void softmax(const Seen& seen, int i, bool adds) {
    float* scores = scores_ + i * STRIDE;
    const Terms terms(p_, its_, i);
    const float factor = TERMS ? 1.0f : terms.factor;
    Floats top = all(-INF);
    each_vector(seen, i, [&](int at, int64_t key, uint32_t bits) __attribute__((always_inline)) {
      if (!bits) return;
      Floats x = load(scores + at);
      if (TERMS) x = terms.of(x, key, bits), store(scores + at, x);
      x *= factor;
      top = most(top, bits == EVERY ? x : chosen(bits) ? x : all(-INF));
    });
    const float before = most_[i], largest = std::max(before, most_of(top));
    const float shift = largest == -INF ? 0.0f : largest;
    const Dropout dropout = DROPS ? Dropout::of(p_, its_, i) : Dropout{};
    Floats total{};
    each_vector(seen, i, [&](int at, int64_t key, uint32_t bits) __attribute__((always_inline)) {
      Floats x{};
      if (bits) {
        x = exp2<IS_HALF>(load(scores + at) * factor - shift);
        if (bits != EVERY) x = chosen(bits) ? x : Floats{};
        total += x;
        if (DROPS) x = dropout.keeps(key, bits) ? x : Floats{};
      }
      put(i, at, x);
    });
    const float scale = before == -INF ? 0.0f : ::exp2f(before - shift);
    total_[i] = total_[i] * scale + sum_of(total), most_[i] = largest;
    if (adds && scale != 1.0f)
      for (int64_t d = 0; d < p_.value_dim; ++d) sums_[i * p_.value_dim + d] *= scale;
  }

  void put(int i, int at, Floats x) {
#if defined(__AVX512BF16__)
    if constexpr (IS_HALF) {
      store(weights_ + i * STRIDE + at, _mm512_cvtneps_pbh((__m512)x));
      return;
    }
#endif
    store(scores_ + i * STRIDE + at, x);
  }

  void finish(bool any) {
    for (int i = 0; i < its_.count(); ++i)
      write_row<E>(p_, its_, i, sums_ + i * p_.value_dim, most_[i], any ? total_[i] : 0.0f);
  }

  // What this part of the keys adds to the rows, for `merge`.
  void keep(bool any, int64_t part) {
    const int64_t rows = p_.batch * p_.heads * p_.q_len, width = p_.value_dim;
    for (int i = 0; i < its_.count(); ++i) {
      float* to = p_.partial + (part * rows + its_.number(p_, i)) * (width + 2);
      if (any) std::memcpy(to, sums_ + i * width, width * sizeof(float));
      to[width] = most_[i], to[width + 1] = any ? total_[i] : 0.0f;
    }
  }

  const uint32_t* packed_values(int64_t panel) {
    return values_.get(its_.number_of_panel(p_, panel), panel, [&](uint32_t* to) {
      const int64_t first = panel * PANEL;
      const int count = p_.keys_of(panel);
      pack_pairs(p_.v.at<char>(its_.b, its_.kv_head, first), p_.v.row, count, p_.value_dim, to);
    });
  }

  const Problem& p_;
  Columns<E> keys_;
  Panels values_;
  Number* queries_;
  float* scores_;
  uint16_t* weights_;
  float* sums_;
  float most_[ROWS], total_[ROWS];
  Rows its_;
};

// What one thread does: blocks of one head, or of heads that are worked on together, one after the other, taken from a
// counter that all threads share.
template <class E>
void forward_of(const Problem& p, Arena arena, std::atomic<int64_t>& next, int64_t blocks_at_once) {
  Forward<E> work(p, arena);
  const int64_t runs = (p.plan.blocks + blocks_at_once - 1) / blocks_at_once, heads = p.heads / p.heads_at_once;
  for (int64_t task; (task = next.fetch_add(1)) < p.batch * heads * runs * p.parts;) {
    const int64_t part = task % p.parts, run = task / p.parts % runs, head = task / p.parts / runs;
    for (int64_t block = run * blocks_at_once; block < std::min((run + 1) * blocks_at_once, p.plan.blocks); ++block)
      work.run(Rows(p, head / heads, head % heads * p.heads_at_once, p.heads_at_once, block), part);
  }
}

// Results of all parts of the keys as one.
template <class E>
void merge_of(const Problem& p) {
  const int64_t rows = p.batch * p.heads * p.q_len, width = p.value_dim, apart = rows * (width + 2);
  for (int64_t row = 0; row < rows; ++row) {
    float* sums = p.partial + row * (width + 2);
    float most = -INF, total = 0.0f;
    for (int64_t part = 0; part < p.parts; ++part) most = std::max(most, sums[part * apart + width]);
    const float shift = most == -INF ? 0.0f : most;
    for (int64_t part = 0; part < p.parts; ++part) {
      const float* its = sums + part * apart;
      const float its_total = its[width + 1], scale = its[width] == -INF ? 1.0f : ::exp2f(its[width] - shift);
      const bool is_first = total == 0.0f;
      if (its_total == 0.0f) continue;  // its sums were not written
      for (int64_t d = 0; d < width; ++d) sums[d] = (is_first ? 0.0f : sums[d]) + its[d] * scale;
      total += its_total * scale;
    }
    const int64_t head = row / p.q_len;
    Rows its(p, head / p.heads, head % p.heads, 1, 0);
    write_row<E>(p, its, static_cast<int>(row % p.q_len), sums, most, total);
  }
}

}  // namespace LEVEL
