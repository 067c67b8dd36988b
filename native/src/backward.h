// Gradients: scores are computed again, and five products are taken of each block of rows.
//
// What is summed over rows, the gradients of keys and values, belongs to one task: a run of the rows of all heads that
// share a key head. Sums are so taken in one order, whatever the number of threads.
#pragma once

#include "forward.h"

namespace LEVEL {

template <class E>
class Backward {
 public:
  static constexpr bool IS_HALF = E::PER_STEP == 2;
  static constexpr ptrdiff_t ITEM = IS_HALF ? 2 : 4;
#if defined(__AMX_BF16__)
  static constexpr bool HAS_TILES = std::is_same_v<E, Tiles>;
#else
  static constexpr bool HAS_TILES = false;
#endif
  static constexpr int PAIRS = HAS_TILES ? LANES : ROWS / 2;  // of rows; those without a row are 0

  Backward(const Problem& p, Arena& arena)
      : p_(p),
        keys_(arena, p, p.k, p.dim),
        values_(arena, p, p.v, p.value_dim),
        key_rows_(arena, p, IS_HALF ? PANEL / 2 * p.dim : 0),
        weights_(arena.take<float>(ROWS * STRIDE)),
        slopes_(arena.take<float>(ROWS * STRIDE)),
        halves_(arena.take<uint16_t>(IS_HALF ? ROWS * STRIDE : 0)),
        weight_pairs_(arena.take<uint32_t>(IS_HALF ? PAIRS * STRIDE : 0)),
        slope_pairs_(arena.take<uint32_t>(IS_HALF ? PAIRS * STRIDE : 0)),
        turned_(arena.take<uint32_t>(HAS_TILES ? PANEL * PANEL : 0)),
        query_pairs_(arena.take<uint32_t>(IS_HALF ? PANEL / 2 * p.dim : 0)),
        grad_pairs_(arena.take<uint32_t>(IS_HALF ? PANEL / 2 * p.value_dim : 0)) {}

  // Rows of one head; gradients of keys and values are added to these [kv_len, components].
  void run(const Rows& its, int64_t chunk, float* grad_k, float* grad_v) {
    its_ = its, chunk_ = chunk, grad_k_ = grad_k, grad_v_ = grad_v;
    if (IS_HALF) {
      pack_pairs(row_of<char>(p_.q), p_.q.row, its.count(), p_.dim, query_pairs_);
      pack_pairs(row_of<char>(p_.grad_out), p_.grad_out.row, its.count(), p_.value_dim, grad_pairs_);
    }
    const bool any = each_part(p_, its, 0, p_.panels(), [&](const Seen& seen, bool adds) { part(seen, adds); });
    if (!any) std::memset(grad_q(), 0, its.count() * p_.dim * sizeof(float));
  }

 private:
  using Number = typename E::Number;

  template <class T>
  const T* row_of(const View& x) const {
    return x.at<T>(its_.b, its_.head, its_.first);
  }

  void part(const Seen& seen, bool adds) {
    constexpr ptrdiff_t NUMBER = sizeof(Number);
    const Left<E> query{row_of<Number>(p_.q), p_.q.row / NUMBER, 1};
    const Left<E> grad{row_of<Number>(p_.grad_out), p_.grad_out.row / NUMBER, 1};
    const int rows = its_.count();
    for (int n = 0; n < seen.count; ++n) {
      const Right<E> keys = keys_.get(its_, seen.panel[n]), values = values_.get(its_, seen.panel[n]);
      multiply<E>({weights_ + n * PANEL, STRIDE}, query, keys, rows, PANEL / LANES, p_.dim / E::PER_STEP, false);
      multiply<E>({slopes_ + n * PANEL, STRIDE}, grad, values, rows, PANEL / LANES, p_.value_dim / E::PER_STEP, false);
    }
    for (int i = 0; i < rows; ++i) {
      if (Terms::any(p_))
        p_.row_words ? derive<true, true>(seen, i) : derive<true, false>(seen, i);
      else
        p_.row_words ? derive<false, true>(seen, i) : derive<false, false>(seen, i);
    }
    if (IS_HALF) pair_up(seen);
    for (int n = 0; n < seen.count; ++n) products(seen.panel[n], n * PANEL, adds || n);
  }

  // Of a row: weights as they meet the values, in place of scores; and the scores' gradients, in place of the weights'.
  template <bool TERMS, bool DROPS>
  void derive(const Seen& seen, int i) {
    float *weights = weights_ + i * STRIDE, *slopes = slopes_ + i * STRIDE;
    const Terms terms(p_, its_, i);
    const int64_t row = its_.number(p_, i);
    const float shift = p_.lse[row] * LOG2E, delta = p_.delta[row];
    const Dropout dropout = DROPS ? Dropout::of(p_, its_, i) : Dropout{};
    float* of_bias = p_.grad_bias ? bias_row(i) : nullptr;
    for (int n = 0; n < seen.count; ++n) {
      const int64_t first = seen.panel[n] * PANEL;
      for (int part = 0; part < PANEL; part += LANES) {
        const uint32_t bits = seen.words[i][n] >> part & EVERY;
        const int at = n * PANEL + part;
        Floats w{}, g{};
        if (bits) {
          Floats cap = all(1.0f), x = load(weights + at);
          x = TERMS ? terms.of(x, first + part, bits, &cap) : x * terms.factor;
          w = exp2<IS_HALF>(x - shift);
          if (bits != EVERY) w = chosen(bits) ? w : Floats{};
          Floats kept = w, of_weight = load(slopes + at);
          if (DROPS) {
            const Ints keeps = dropout.keeps(first + part, bits);
            kept = keeps ? w * p_.kept : Floats{}, of_weight = keeps ? of_weight * p_.kept : Floats{};
          }
          g = w * (of_weight - delta);
          if (bits != EVERY) g = chosen(bits) ? g : Floats{};
          if (TERMS && of_bias) store_some(of_bias + first + part, load_some(of_bias + first + part, bits) + g, bits);
          g = g * (TERMS ? cap * p_.scale : all(p_.scale));
          w = kept;
        }
        store(weights + at, w), store(slopes + at, g);
#if defined(__AVX512BF16__)
        if constexpr (IS_HALF) store(halves_ + i * STRIDE + at, _mm512_cvtneps_pbh((__m512)g));
#endif
      }
    }
  }

  // Weights and gradients of scores, those of two rows as one word.
  void pair_up(const Seen& seen) {
#if defined(__AVX512BF16__)
    for (int i = 0; i < (HAS_TILES ? 2 * PAIRS : its_.count()); i += 2)
      for (int at = 0; at < seen.count * PANEL; at += LANES) {
        pair(weights_, i, at, weight_pairs_);
        pair(slopes_, i, at, slope_pairs_);
      }
  }

  void pair(const float* rows, int i, int at, uint32_t* to) {
    const auto row = [&](int n) {
      if (n >= its_.count()) return _mm512_setzero_si512();
      return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)load(rows + n * STRIDE + at)));
    };
    const __m512i low = row(i), high = row(i + 1);
    store(to + i / 2 * STRIDE + at, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
#endif
  }

  // What one panel adds to the gradients of queries, keys and values.
  void products(int64_t panel, int at, bool adds) {
    const int64_t first = panel * PANEL;
    const int count = p_.keys_of(panel), rows = its_.count();
    const int wide = static_cast<int>(p_.dim / LANES), value_wide = static_cast<int>(p_.value_dim / LANES);
    const Out of_q{grad_q(), p_.dim}, of_k{grad_k_ + first * p_.dim, p_.dim};
    const Out of_v{grad_v_ + first * p_.value_dim, p_.value_dim};
    if constexpr (IS_HALF) {
      const uint32_t* packed = key_rows_.get(its_.number_of_panel(p_, panel), panel, [&](uint32_t* to) {
        pack_pairs(p_.k.at<char>(its_.b, its_.kv_head, first), p_.k.row, count, p_.dim, to);
      });
      const Left<E> slopes{reinterpret_cast<const uint32_t*>(halves_ + at), STRIDE / 2, 1};
      multiply<E>(of_q, slopes, {packed, p_.dim}, rows, wide, PANEL / 2, adds);
      const int pairs = HAS_TILES ? PAIRS : (rows + 1) / 2;
      multiply<E>(of_k, by_key(slope_pairs_ + at), {query_pairs_, p_.dim}, count, wide, pairs, true);
      multiply<E>(of_v, by_key(weight_pairs_ + at), {grad_pairs_, p_.value_dim}, count, value_wide, pairs, true);
    } else {
      const float *weights = weights_ + at, *slopes = slopes_ + at;
      const Right<E> keys{p_.k.at<float>(its_.b, its_.kv_head, first), p_.k.row / ITEM};
      const Right<E> query{row_of<float>(p_.q), p_.q.row / ITEM},
          grad{row_of<float>(p_.grad_out), p_.grad_out.row / ITEM};
      multiply<E>(of_q, {slopes, STRIDE, 1}, keys, rows, wide, count, adds);
      multiply<E>(of_k, {slopes, 1, STRIDE}, query, count, wide, rows, true);
      multiply<E>(of_v, {weights, 1, STRIDE}, grad, count, value_wide, rows, true);
    }
  }

  // Pairs of rows of a panel's keys, as the left side of a product: tiles want the pairs of a key side by side.
  Left<E> by_key(const uint32_t* pairs) {
    if (!HAS_TILES) return {reinterpret_cast<const Number*>(pairs), 1, STRIDE};
    pack_columns(reinterpret_cast<const char*>(pairs), STRIDE * 4, PAIRS, PANEL, turned_);
    return {reinterpret_cast<const Number*>(turned_), PANEL, 1};
  }

  float* grad_q() const { return p_.grad_q + its_.number(p_, 0) * p_.dim; }

  float* bias_row(int i) const {  // at key 0
    const int64_t head = its_.b * p_.heads + its_.head, row = its_.row_of(i);
    if (!p_.table) return p_.grad_bias + (head * p_.q_len + row) * p_.kv_len;
    float* table = p_.grad_bias + (chunk_ * p_.batch * p_.heads + head) * p_.table;
    return p_.bias.row ? table + p_.q_len - 1 - row : table;
  }

  const Problem& p_;
  Columns<E> keys_, values_;
  Panels key_rows_;
  float *weights_, *slopes_;
  uint16_t* halves_;
  uint32_t *weight_pairs_, *slope_pairs_, *turned_, *query_pairs_, *grad_pairs_;
  float *grad_k_ = nullptr, *grad_v_ = nullptr;
  int64_t chunk_ = 0;
  Rows its_;
};

// What one thread does: all heads of a key head, for one chunk of their rows. Chunks lie behind one another in memory.
template <class E>
void backward_of(const Problem& p, Arena arena, std::atomic<int64_t>& next) {
  Backward<E> work(p, arena);
  const int64_t kv_heads = p.batch * p.kv_heads, group = p.heads / std::max<int64_t>(1, p.kv_heads);
  for (int64_t task; (task = next.fetch_add(1)) < kv_heads * p.chunks;) {
    const int64_t kv = task / p.chunks, chunk = task % p.chunks;
    const int64_t first = p.plan.blocks * chunk / p.chunks, stop = p.plan.blocks * (chunk + 1) / p.chunks;
    float* grad_k = p.grad_k + (chunk * kv_heads + kv) * p.kv_len * p.dim;
    float* grad_v = p.grad_v + (chunk * kv_heads + kv) * p.kv_len * p.value_dim;
    for (int64_t g = 0; g < group; ++g)
      for (int64_t block = first; block < stop; ++block)
        work.run(Rows(p, kv / p.kv_heads, kv % p.kv_heads * group + g, 1, block), chunk, grad_k, grad_v);
  }
}

}  // namespace LEVEL
