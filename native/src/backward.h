// Backward pass: recompute the scores of each block of rows, then take five matrix products.
//
// Gradients of keys and values are sums over rows. One task computes them for a chunk of the rows of all heads that
// share a key head, so the order of additions does not depend on the number of threads.
#pragma once

#include "forward.h"

namespace LEVEL {

template <class Format>
class Backward {
 public:
  static constexpr bool IS_BF16 = Format::PER_STEP == 2;
  static constexpr ptrdiff_t ITEM = IS_BF16 ? 2 : 4;
#if defined(__AMX_BF16__)
  static constexpr bool HAS_TILES = std::is_same_v<Format, BFloat16Tiles>;
#else
  static constexpr bool HAS_TILES = false;
#endif
  static constexpr int PAIRS = HAS_TILES ? LANES : ROWS / 2;  // pairs of rows; missing rows are 0

  Backward(const Arguments& args, Arena& arena)
      : args_(args),
        keys_(arena, args, args.k, args.dim),
        values_(arena, args, args.v, args.value_dim),
        key_rows_(arena, args, IS_BF16 ? PANEL / 2 * args.dim : 0),
        weights_(arena.take<float>(ROWS * STRIDE)),
        grad_scores_(arena.take<float>(ROWS * STRIDE)),
        grad_scores_bf16_(arena.take<uint16_t>(IS_BF16 ? ROWS * STRIDE : 0)),
        weight_pairs_(arena.take<uint32_t>(IS_BF16 ? PAIRS * STRIDE : 0)),
        grad_score_pairs_(arena.take<uint32_t>(IS_BF16 ? PAIRS * STRIDE : 0)),
        transposed_(arena.take<uint32_t>(HAS_TILES ? PANEL * PANEL : 0)),
        query_pairs_(arena.take<uint32_t>(IS_BF16 ? PANEL / 2 * args.dim : 0)),
        grad_pairs_(arena.take<uint32_t>(IS_BF16 ? PANEL / 2 * args.value_dim : 0)) {}

  // Process one block of rows; add its gradients of keys and values to grad_k and grad_v [kv_len, components].
  void run(const RowBlock& block, int64_t chunk, float* grad_k, float* grad_v) {
    block_ = block, chunk_ = chunk, grad_k_ = grad_k, grad_v_ = grad_v;
    for (int i = 0; args_.has_bias_per_row() && i < block.count(); ++i)
      std::memset(grad_bias_row(i), 0, args_.kv_len * sizeof(float));
    if (IS_BF16) {
      pack_pairs(row_of<char>(args_.q), args_.q.row, block.count(), args_.dim, query_pairs_);
      pack_pairs(row_of<char>(args_.grad_out), args_.grad_out.row, block.count(), args_.value_dim, grad_pairs_);
    }
    const bool any = for_each_group<PANELS>(
        args_, block, 0, args_.panels(), [&](const PanelGroup& group, bool accumulate) { process(group, accumulate); });
    if (!any) std::memset(grad_q(), 0, block.count() * args_.dim * sizeof(float));
  }

 private:
  using Number = typename Format::Number;

  template <class T>
  const T* row_of(const View& x) const {
    return x.at<T>(block_.b, block_.head, block_.first);
  }

  void process(const PanelGroup& group, bool accumulate) {
    constexpr ptrdiff_t NUMBER = sizeof(Number);
    const Left<Format> query{row_of<Number>(args_.q), args_.q.row / NUMBER, 1};
    const Left<Format> grad{row_of<Number>(args_.grad_out), args_.grad_out.row / NUMBER, 1};
    const int rows = block_.count();
    for (int n = 0; n < group.count; ++n) {
      const Right<Format> keys = keys_.get(block_, group.panel[n]), values = values_.get(block_, group.panel[n]);
      multiply<Format>({weights_ + n * PANEL, STRIDE}, query, keys, rows, PANEL / LANES, args_.dim / Format::PER_STEP,
                       false);
      multiply<Format>({grad_scores_ + n * PANEL, STRIDE}, grad, values, rows, PANEL / LANES,
                       args_.value_dim / Format::PER_STEP, false);
    }
    for (int i = 0; i < rows; ++i) {
      if (ScoreTransform::is_needed(args_))
        args_.row_words ? score_gradients<true, true>(group, i) : score_gradients<true, false>(group, i);
      else
        args_.row_words ? score_gradients<false, true>(group, i) : score_gradients<false, false>(group, i);
    }
    if (IS_BF16) pair_up(group);
    for (int n = 0; n < group.count; ++n) accumulate_gradients(group.panel[n], n * PANEL, accumulate || n);
  }

  // Replace a row's scores by its weights (after dropout), and the gradients of the weights by those of the scores.
  template <bool HAS_TRANSFORM, bool HAS_DROPOUT>
  void score_gradients(const PanelGroup& group, int i) {
    float *weights = weights_ + i * STRIDE, *grad_scores = grad_scores_ + i * STRIDE;
    const ScoreTransform transform(args_, block_, i);
    const int64_t row = block_.number(args_, i);
    const float shift = args_.lse[row] * LOG2E, delta = args_.delta[row];
    const Dropout dropout = HAS_DROPOUT ? Dropout::of(args_, block_, i) : Dropout{};
    float* grad_bias = args_.grad_bias ? grad_bias_row(i) : nullptr;
    for (int n = 0; n < group.count; ++n) {
      const int64_t first = group.panel[n] * PANEL;
      for (int part = 0; part < PANEL; part += LANES) {
        const uint32_t bits = group.words[i][n] >> part & ALL_LANES;
        const int at = n * PANEL + part;
        Floats w{}, g{};
        if (bits) {
          Floats cap_slope = broadcast(1.0f), x = load(weights + at);
          x = HAS_TRANSFORM ? transform.apply(x, first + part, bits, &cap_slope) : x * transform.factor;
          w = exp2<IS_BF16>(x - shift);
          if (bits != ALL_LANES) w = lane_mask(bits) ? w : Floats{};
          Floats dropped = w, grad_weight = load(grad_scores + at);
          if (HAS_DROPOUT) {
            const Ints keeps = dropout.keeps(first + part, bits);
            dropped = keeps ? w * args_.dropout_scale : Floats{},
            grad_weight = keeps ? grad_weight * args_.dropout_scale : Floats{};
          }
          g = w * (grad_weight - delta);
          if (bits != ALL_LANES) g = lane_mask(bits) ? g : Floats{};
          if (HAS_TRANSFORM && grad_bias)
            store_masked(grad_bias + first + part, load_masked(grad_bias + first + part, bits) + g, bits);
          g = g * (HAS_TRANSFORM ? cap_slope * args_.scale : broadcast(args_.scale));
          w = dropped;
        }
        store(weights + at, w), store(grad_scores + at, g);
        if constexpr (IS_BF16) store(grad_scores_bf16_ + i * STRIDE + at, to_bf16(g));
      }
    }
  }

  // Convert weights and score gradients to bfloat16, two rows per 32-bit word.
  void pair_up(const PanelGroup& group) {
    for (int i = 0; i < (HAS_TILES ? 2 * PAIRS : block_.count()); i += 2)
      for (int at = 0; at < group.count * PANEL; at += LANES) {
        pair(weights_, i, at, weight_pairs_);
        pair(grad_scores_, i, at, grad_score_pairs_);
      }
  }

  void pair(const float* rows, int i, int at, uint32_t* to) {
    const auto row = [&](int n) {
      return n < block_.count() ? __builtin_convertvector(to_bf16(load(rows + n * STRIDE + at)), Words) : Words{};
    };
    store(to + i / 2 * STRIDE + at, row(i) | row(i + 1) << 16);
  }

  // Add one panel's share to the gradients of queries, keys and values.
  void accumulate_gradients(int64_t panel, int at, bool accumulate) {
    const int64_t first = panel * PANEL;
    const int count = args_.keys_in(panel), rows = block_.count();
    const int vectors = static_cast<int>(args_.dim / LANES), value_vectors = static_cast<int>(args_.value_dim / LANES);
    const Out grad_q_out{grad_q(), args_.dim}, grad_k_out{grad_k_ + first * args_.dim, args_.dim};
    const Out grad_v_out{grad_v_ + first * args_.value_dim, args_.value_dim};
    if constexpr (IS_BF16) {
      const uint32_t* packed = key_rows_.get(block_.number_of_panel(args_, panel), panel, [&](uint32_t* to) {
        pack_pairs(args_.k.at<char>(block_.b, block_.kv_head, first), args_.k.row, count, args_.dim, to);
      });
      const Left<Format> grad_scores{reinterpret_cast<const uint32_t*>(grad_scores_bf16_ + at), STRIDE / 2, 1};
      multiply<Format>(grad_q_out, grad_scores, {packed, args_.dim}, rows, vectors, PANEL / 2, accumulate);
      const int pairs = HAS_TILES ? PAIRS : (rows + 1) / 2;
      multiply<Format>(grad_k_out, by_key(grad_score_pairs_ + at), {query_pairs_, args_.dim}, count, vectors, pairs,
                       true);
      multiply<Format>(grad_v_out, by_key(weight_pairs_ + at), {grad_pairs_, args_.value_dim}, count, value_vectors,
                       pairs, true);
    } else {
      const float *weights = weights_ + at, *grad_scores = grad_scores_ + at;
      const Right<Format> keys{args_.k.at<float>(block_.b, block_.kv_head, first), args_.k.row / ITEM};
      const Right<Format> query{row_of<float>(args_.q), args_.q.row / ITEM},
          grad{row_of<float>(args_.grad_out), args_.grad_out.row / ITEM};
      multiply<Format>(grad_q_out, {grad_scores, STRIDE, 1}, keys, rows, vectors, count, accumulate);
      multiply<Format>(grad_k_out, {grad_scores, 1, STRIDE}, query, count, vectors, rows, true);
      multiply<Format>(grad_v_out, {weights, 1, STRIDE}, grad, count, value_vectors, rows, true);
    }
  }

  // Return pairs of rows, by key, as a left operand. Tiles need the pairs of a key to be contiguous.
  Left<Format> by_key(const uint32_t* pairs) {
    if (!HAS_TILES) return {reinterpret_cast<const Number*>(pairs), 1, STRIDE};
    pack_transposed(reinterpret_cast<const char*>(pairs), STRIDE * 4, PAIRS, PANEL, transposed_);
    return {reinterpret_cast<const Number*>(transposed_), PANEL, 1};
  }

  float* grad_q() const { return args_.grad_q + block_.number(args_, 0) * args_.dim; }

  float* grad_bias_row(int i) const {  // at key 0
    const int64_t head = block_.b * args_.heads + block_.head, row = block_.row_of(i);
    if (!args_.table) return args_.grad_bias + (head * args_.q_len + row) * args_.kv_len;
    float* table = args_.grad_bias + (chunk_ * args_.batch * args_.heads + head) * args_.table;
    return args_.bias.row ? table + args_.q_len - 1 - row : table;
  }

  const Arguments& args_;
  PackedRows<Format> keys_, values_;
  PanelCache key_rows_;
  float *weights_, *grad_scores_;
  uint16_t* grad_scores_bf16_;
  uint32_t *weight_pairs_, *grad_score_pairs_, *transposed_, *query_pairs_, *grad_pairs_;
  float *grad_k_ = nullptr, *grad_v_ = nullptr;
  int64_t chunk_ = 0;
  RowBlock block_;
};

}  // namespace LEVEL
