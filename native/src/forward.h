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

template <class E>
class Forward {
 public:
  static constexpr bool IS_HALF = E::PER_STEP == 2;
  static constexpr ptrdiff_t ITEM = IS_HALF ? 2 : 4;

  Forward(const Problem& p, Arena& arena)
      : p_(p),
        keys_(arena, p.panels(), p.dim / E::PER_STEP * PANEL),
        values_(arena, IS_HALF ? p.panels() : 1, IS_HALF ? PANEL / 2 * p.value_dim : 1),
        scores_(arena.take<float>(ROWS * STRIDE)),
        weights_(arena.take<uint16_t>(IS_HALF ? ROWS * STRIDE : 1)),
        sums_(arena.take<float>(ROWS * p.value_dim)) {}

  // All rows of one block.
  void run(int64_t b, int64_t h, int64_t block) {
    b_ = b, h_ = h, kv_head_ = h / (p_.heads / p_.kv_heads), row_ = block * ROWS;
    rows_ = static_cast<int>(std::min<int64_t>(ROWS, p_.q_len - row_));
    for (int i = 0; i < rows_; ++i) most_[i] = -INF, total_[i] = 0.0f;
    const bool any = each_part(p_, b, h, block, rows_, [&](const Seen& seen, bool adds) { part(seen, adds); });
    finish(any);
  }

 private:
  using Number = typename E::Number;

  void part(const Seen& seen, bool adds) {
    const Left<E> query{p_.q.at<Number>(b_, h_, row_), p_.q.row / static_cast<ptrdiff_t>(sizeof(Number)), 1};
    for (int n = 0; n < seen.count; ++n) {
      const Right<E> keys{reinterpret_cast<const Number*>(packed_keys(seen.panel[n])), PANEL};
      multiply<E>({scores_ + n * PANEL, STRIDE}, query, keys, rows_, PANEL / LANES, p_.dim / E::PER_STEP, false);
    }
    for (int i = 0; i < rows_; ++i) {
      if (Terms::any(p_))
        p_.row_words ? softmax<true, true>(seen, i, adds) : softmax<true, false>(seen, i, adds);
      else
        p_.row_words ? softmax<false, true>(seen, i, adds) : softmax<false, false>(seen, i, adds);
    }
    for (int n = 0; n < seen.count; ++n) {
      const int64_t first = seen.panel[n] * PANEL, count = std::min<int64_t>(PANEL, p_.kv_len - first);
      const Out out{sums_, p_.value_dim};
      const int vectors = static_cast<int>(p_.value_dim / LANES);
      if constexpr (IS_HALF) {
        const Left<E> weights{reinterpret_cast<const uint32_t*>(weights_ + n * PANEL), STRIDE / 2, 1};
        const Right<E> values{packed_values(seen.panel[n]), p_.value_dim};
        multiply<E>(out, weights, values, rows_, vectors, PANEL / 2, adds || n);
      } else {
        const Left<E> weights{scores_ + n * PANEL, STRIDE, 1};
        const Right<E> values{p_.v.at<float>(b_, kv_head_, first), p_.v.row / ITEM};
        multiply<E>(out, weights, values, rows_, vectors, count, adds || n);
      }
    }
  }

  // Scores of a row to weights that are not yet divided by their total; what earlier parts left is scaled.
  template <bool TERMS, bool DROPS>
  void softmax(const Seen& seen, int i, bool adds) {
    float* scores = scores_ + i * STRIDE;
    const Terms terms(p_, b_, h_, row_ + i);
    const float factor = TERMS ? 1.0f : terms.factor;
    Floats top = all(-INF);
    each(seen, i, [&](int at, int64_t key, uint32_t bits) __attribute__((always_inline)) {
      if (!bits) return;
      Floats x = load(scores + at);
      if (TERMS) x = terms.of(x, key, bits), store(scores + at, x);
      x *= factor;
      top = most(top, bits == EVERY ? x : chosen(bits) ? x : all(-INF));
    });
    const float before = most_[i], largest = std::max(before, most_of(top));
    const float shift = largest == -INF ? 0.0f : largest;
    const Dropout dropout = DROPS ? Dropout::of(p_, b_, h_, row_ + i) : Dropout{};
    Floats total{};
    each(seen, i, [&](int at, int64_t key, uint32_t bits) __attribute__((always_inline)) {
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

  // Vectors of scores of a row: where they stand, their first key, and which of them are seen.
  template <class Do>
  void each(const Seen& seen, int i, Do run) {
    for (int n = 0; n < seen.count; ++n) {
      const uint64_t word = seen.words[i][n];
      const int at = n * PANEL;
      const int64_t key = seen.panel[n] * PANEL;
      if (word == ~0ull)
        for (int part = 0; part < PANEL; part += LANES) run(at + part, key + part, EVERY);
      else
        for (int part = 0; part < PANEL; part += LANES) run(at + part, key + part, word >> part & EVERY);
    }
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
    for (int i = 0; i < rows_; ++i) {
      const bool is_empty = total_[i] == 0.0f;
      const float factor = is_empty || !any ? 0.0f : p_.kept / total_[i];
      char* out = p_.out.at<char>(b_, h_, row_ + i);
      for (int64_t d = 0; d < p_.value_dim; d += LANES) {
        const Floats x = factor == 0.0f ? Floats{} : load(sums_ + i * p_.value_dim + d) * factor;
        if constexpr (IS_HALF)
          store(out + d * 2, rounded(x));
        else
          store(out + d * 4, x);
      }
      p_.lse[(b_ * p_.heads + h_) * p_.q_len + row_ + i] =
          is_empty ? -INF : most_[i] * LN2 + std::log(total_[i]);
    }
  }

  const uint32_t* packed_keys(int64_t panel) {
    return keys_.get(number(panel), panel, [&](uint32_t* to) {
      const int64_t first = panel * PANEL;
      const int count = static_cast<int>(std::min<int64_t>(PANEL, p_.kv_len - first));
      pack_columns(p_.k.at<char>(b_, kv_head_, first), p_.k.row, count, p_.dim / E::PER_STEP, to);
    });
  }

  const uint32_t* packed_values(int64_t panel) {
    return values_.get(number(panel), panel, [&](uint32_t* to) {
      const int64_t first = panel * PANEL;
      const int count = static_cast<int>(std::min<int64_t>(PANEL, p_.kv_len - first));
      pack_pairs(p_.v.at<char>(b_, kv_head_, first), p_.v.row, count, p_.value_dim, to);
    });
  }

  int64_t number(int64_t panel) const { return (b_ * p_.kv_heads + kv_head_) * p_.panels() + panel; }

  const Problem& p_;
  Panels keys_, values_;
  float* scores_;
  uint16_t* weights_;
  float* sums_;
  float most_[ROWS], total_[ROWS];
  int64_t b_ = 0, h_ = 0, kv_head_ = 0, row_ = 0;
  int rows_ = 0;
};

// What one thread does: blocks of one head after the other, taken from a counter that all threads share.
template <class E>
void forward_of(const Problem& p, Arena arena, std::atomic<int64_t>& next, int64_t blocks_at_once) {
  Forward<E> work(p, arena);
  const int64_t runs = (p.plan.blocks + blocks_at_once - 1) / blocks_at_once;
  for (int64_t task; (task = next.fetch_add(1)) < p.batch * p.heads * runs;) {
    const int64_t head = task / runs, first = task % runs * blocks_at_once;
    for (int64_t block = first; block < std::min(first + blocks_at_once, p.plan.blocks); ++block)
      work.run(head / p.heads, head % p.heads, block);
  }
}

}  // namespace LEVEL
