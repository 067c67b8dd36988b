// Backward pass of the level that is IS_BLOCKED: five products of several blocks of rows with one panel of keys.
//
// Gradients of keys and values are sums over all rows of the blocks at once, which keeps them in registers for longer.
#pragma once

#include "row_weights.h"
#include "trimmed_products.h"

namespace LEVEL {

class BlockedBackward {
 public:
  BlockedBackward(const Arguments& args, Arena& arena)
      : args_(args),
        keys_(arena, args, args.k, args.dim),
        values_(arena, args, args.v, args.value_dim),
        key_tiles_(arena, PANEL * args.dim, 1),
        weights_(arena.take<float>(blocks_at_once(args) * ROWS * BACKWARD_STRIDE)),
        grad_scores_(arena.take<float>(blocks_at_once(args) * ROWS * BACKWARD_STRIDE)),
        query_tiles_(arena.take<float>(blocks_at_once(args) * ROWS * args.dim)),
        grad_tiles_(arena.take<float>(blocks_at_once(args) * ROWS * args.value_dim)) {}

  // Return how many blocks `run` processes at once.
  static int64_t blocks_at_once(const Arguments& args) {
    const int64_t bytes = ROWS * (args.dim + args.value_dim) * 4;
    return std::clamp<int64_t>(ROW_BYTES / bytes, 1, std::min<int64_t>(BLOCKS, args.plan.blocks));
  }

  // Process consecutive blocks of rows; add their gradients of keys and values to grad_k and grad_v [kv_len, width].
  void run(int64_t b, int64_t head, int64_t first_block, int64_t count, int64_t chunk, float* grad_k, float* grad_v) {
    chunk_ = chunk, height_ = 0;
    for (int64_t n = 0; n < count; ++n) {
      blocks_[n] = {args_, b, head, 1, first_block + n};
      any_[n] = false, height_ += blocks_[n].count();
      for (int i = 0; args_.has_bias_per_row() && i < blocks_[n].count(); ++i)
        std::memset(grad_bias_row(blocks_[n], i), 0, args_.kv_len * sizeof(float));
    }
    const auto pack = [&](const View& x, int64_t width, float* tiles) {
      pack_tiles(x.at<char>(b, head, blocks_[0].first), x.row, height_, width, height_, tiles);
    };
    pack(args_.q, args_.dim, query_tiles_), pack(args_.grad_out, args_.value_dim, grad_tiles_);
    for (int64_t panel = next_panel(count, 0); panel < args_.panels(); panel = next_panel(count, panel + 1)) {
      std::fill(words_, words_ + BLOCKS * STRIPS, 0);
      prefetch_sums(grad_k, args_.dim, panel), prefetch_sums(grad_v, args_.value_dim, panel);
      for (int64_t n = 0; n < count; ++n)
        for_each_group<1>(args_, blocks_[n], panel, panel + 1, [&](const PanelGroup& group, bool) {
          any_[n] ? add<true>(n, group) : add<false>(n, group);
          any_[n] = true;
        });
      const int keys = args_.keys_in(panel);
      multiply_queries({grad_k + panel * PANEL * args_.dim, args_.dim}, keys, {grad_scores_, 1, BACKWARD_STRIDE},
                       query_tiles_, height_, args_.dim, words_);
      multiply_queries({grad_v + panel * PANEL * args_.value_dim, args_.value_dim}, keys,
                       {weights_, 1, BACKWARD_STRIDE}, grad_tiles_, height_, args_.value_dim, words_);
    }
    for (int64_t n = 0; n < count; ++n)
      if (!any_[n]) std::memset(grad_q(n), 0, blocks_[n].count() * args_.dim * sizeof(float));
  }

 private:
  static constexpr int STRIPS = ROWS / STRIP;

  int64_t next_panel(int64_t count, int64_t from) const {
    int64_t next = args_.panels();
    for (int64_t n = 0; n < count; ++n) next = std::min(next, next_needed(args_, blocks_[n], from));
    return next;
  }

  void prefetch_sums(const float* sums, int64_t width, int64_t panel) const {
    prefetch_rows(reinterpret_cast<const char*>(sums + panel * PANEL * width), width * 4, args_.keys_in(panel),
                  width * 4);
  }

  float* grad_q(int64_t n) const { return args_.grad_q + blocks_[n].number(args_, 0) * args_.dim; }

  Left<Float32> rows_of(const View& x, const RowBlock& block) const {
    return {x.at<float>(block.b, block.head, block.first), x.row / 4, 1};
  }

  // Compute weights and score gradients of block `n` with a panel, and add to or store its gradients of queries.
  template <bool ACCUMULATE>
  void add(int64_t n, const PanelGroup& group) {
    const RowBlock& block = blocks_[n];
    const Strips strips(group, block.count());
    float *weights = weights_ + n * ROWS * BACKWARD_STRIDE, *grad_scores = grad_scores_ + n * ROWS * BACKWARD_STRIDE;
    const int64_t panel = group.panel[0];
    multiply_keys({weights, BACKWARD_STRIDE}, rows_of(args_.q, block), keys_.get(block, panel), args_.dim, strips, 0);
    multiply_keys({grad_scores, BACKWARD_STRIDE}, rows_of(args_.grad_out, block), values_.get(block, panel),
                  args_.value_dim, strips, 0);
    for (int i = 0; i < block.count(); ++i)
      differentiate_row(block, group, i, strips.is_whole, weights + i * BACKWARD_STRIDE,
                        grad_scores + i * BACKWARD_STRIDE);
    for (int strip = 0; strip < strips.count; ++strip) words_[n * STRIPS + strip] = strips.words[strip][0];
    const uint32_t* tiles = key_tiles_.get(block.number_of_panel(args_, panel), panel, [&](uint32_t* to) {
      const char* rows = args_.k.at<char>(block.b, block.kv_head, panel * PANEL);
      pack_tiles(rows, args_.k.row, args_.keys_in(panel), args_.dim, PANEL, reinterpret_cast<float*>(to));
    });
    multiply_values<ACCUMULATE>({grad_q(n), args_.dim}, {grad_scores, BACKWARD_STRIDE, 1},
                                {reinterpret_cast<const float*>(tiles), TILE_KEYS, PANEL * TILE_KEYS}, args_.dim,
                                strips, 0);
  }

  // Replace a row's scores by its weights (after dropout), and the gradients of the weights by those of the scores.
  void differentiate_row(const RowBlock& block, const PanelGroup& group, int i, bool is_whole, float* weights,
                         float* grad_scores) {
    const bool is_capped = args_.softcap > 0.0f;
    const int64_t row = block.number(args_, i);
    float slopes[PANEL];
    const ScoreTransform transform(args_, block, i);
    const float factor = prepare_row(args_, group, i, transform, weights, is_capped ? slopes : nullptr);
    if (!is_whole) fill_masked(group, i, weights, -INF), fill_masked(group, i, grad_scores, 0.0f);
    const Dropout dropout = args_.row_words ? Dropout::of(args_, block, i) : Dropout{};
    if (args_.row_words) drop_row(group, i, dropout, args_.dropout_scale, grad_scores);
    const VisibleRanges ranges(group, i, is_whole);
    const bool is_last = !is_capped && !args_.grad_bias;  // whether the scale can be applied at once
    const float scale = is_last ? args_.scale : 1.0f;
    const RowGradient gradient{factor, args_.lse[row] * LOG2E, scale, args_.delta[row] * scale};
    for (int n = 0; n < ranges.count; ++n)
      differentiate(weights, grad_scores, ranges.first[n], ranges.stop[n], gradient);
    ranges.clear_rest(weights, PANEL), ranges.clear_rest(grad_scores, PANEL);
    if (args_.row_words) drop_row(group, i, dropout, args_.dropout_scale, weights);
    if (is_last) return;
    const float last = is_capped ? 1.0f : args_.scale;
    if (args_.grad_bias)
      add_bias_gradient(grad_scores, grad_bias_row(block, i) + group.panel[0] * PANEL, group.words[i][0], last);
    for (int at = 0; is_capped && at < PANEL; at += LANES)
      store(grad_scores + at, load(grad_scores + at) * load(slopes + at) * args_.scale);
  }

  float* grad_bias_row(const RowBlock& block, int i) const {  // at key 0
    const int64_t head = block.b * args_.heads + block.head, row = block.row_of(i);
    if (!args_.table) return args_.grad_bias + (head * args_.q_len + row) * args_.kv_len;
    float* table = args_.grad_bias + (chunk_ * args_.batch * args_.heads + head) * args_.table;
    return args_.bias.row ? table + args_.q_len - 1 - row : table;
  }

  const Arguments& args_;
  PackedRows<Float32> keys_, values_;
  PanelCache key_tiles_;
  float *weights_, *grad_scores_;  // of all blocks, BACKWARD_STRIDE apart
  float *query_tiles_, *grad_tiles_;
  int64_t chunk_ = 0;
  int height_ = 0;  // rows of all blocks
  RowBlock blocks_[BLOCKS];
  bool any_[BLOCKS];                 // whether a block's gradients of queries have been stored
  uint64_t words_[BLOCKS * STRIPS];  // the keys that each strip needs of the current panel
};

}  // namespace LEVEL
