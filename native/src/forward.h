// Forward pass: the softmax and output of one block of rows at a time; no buffer has size queries x keys.
#pragma once

#include <atomic>
#include <cmath>

#include "keys_in_place.h"
#include "scores.h"

namespace LEVEL {

// Write the output and lse of a row from its weighted sum of values, its score maximum and its sum of weights.
template <class Format>
void write_row(const Arguments& args, const RowBlock& block, int i, const float* sums, float max, float total) {
  const bool is_empty = total == 0.0f;
  const float factor = is_empty ? 0.0f : args.dropout_scale / total;
  char* out = args.out.at<char>(block.b, block.head_of(i), block.row_of(i));
  for (int64_t d = 0; d < args.value_dim; d += LANES) {
    const Floats x = is_empty ? Floats{} : load(sums + d) * factor;
    if constexpr (Format::PER_STEP == 2)
      store(out + d * 2, round_to_bf16(x));
    else
      store(out + d * 4, x);
  }
  args.lse[block.number(args, i)] = is_empty ? -INF : max * LN2 + std::log(total);
}

template <class Format>
class Forward {
 public:
  static constexpr bool IS_BF16 = Format::PER_STEP == 2;
  static constexpr ptrdiff_t ITEM = IS_BF16 ? 2 : 4;

  Forward(const Arguments& args, Arena& arena)
      : args_(args),
        keys_(arena, args, args.k, args.dim),
        values_(arena, args, IS_BF16 ? PANEL / 2 * args.value_dim : 0),
        queries_(arena.take<Number>(args.heads_per_task > 1 ? ROWS * args.dim / Format::PER_STEP : 0)),
        scores_(arena.take<float>(ROWS * STRIDE)),
        weights_(arena.take<uint16_t>(IS_BF16 ? ROWS * STRIDE : 0)),
        sums_(arena.take<float>(ROWS * args.value_dim)) {}

  // Process one block of rows against one of `key_parts` slices of the keys.
  void run(const RowBlock& block, int64_t part) {
    block_ = block;
    for (int i = 0; i < block.count(); ++i) row_max_[i] = -INF, row_sum_[i] = 0.0f;
    const int64_t first = args_.panels() * part / args_.key_parts, stop = args_.panels() * (part + 1) / args_.key_parts;
    const Left<Format> query = queries();
    const auto each = [&](const PanelGroup& group, bool accumulate) { add(group, query, accumulate); };
    const bool any = reads_in_place() ? for_each_group<FEW_PANELS>(args_, block, first, stop, each)
                                      : for_each_group<PANELS>(args_, block, first, stop, each);
    args_.partial ? store_partial(any, part) : write_rows(any);
  }

 private:
  using Number = typename Format::Number;
  static constexpr int FEW_PANELS = PANELS < 4 ? PANELS : 4;  // whose values stay in the cache

  // Return whether few queries read each key once, in place.
  bool reads_in_place() const {
    return READS_IN_PLACE && !IS_BF16 && args_.reads_keys_once() && block_.count() <= FEW_ROWS &&
           args_.dim % LANES == 0;
  }

  // Return the queries of the block: in place, or copied together if the block has several heads.
  Left<Format> queries() {
    if (block_.heads == 1) {
      const auto* data = args_.q.at<Number>(block_.b, block_.head, block_.first);
      return {data, args_.q.row / static_cast<ptrdiff_t>(sizeof(Number)), 1};
    }
    const ptrdiff_t steps = args_.dim / Format::PER_STEP;
    for (int i = 0; i < block_.count(); ++i) {
      const auto* row = args_.q.at<Number>(block_.b, block_.head_of(i), block_.row_of(i));
      std::memcpy(queries_ + i * steps, row, steps * sizeof(Number));
    }
    return {queries_, steps, 1};
  }

  void add(const PanelGroup& group, Left<Format> query, bool accumulate) {
    const int rows = block_.count();
    for (int n = 0; n < group.count; ++n) {
      if (reads_in_place()) {
        score(group.panel[n], query, {scores_ + n * PANEL, STRIDE});
        continue;
      }
      const Right<Format> keys = keys_.get(block_, group.panel[n]);
      if (args_.reads_keys_once()) prefetch_values(group, n);
      const int vectors = (args_.keys_in(group.panel[n]) + LANES - 1) / LANES;
      multiply<Format>({scores_ + n * PANEL, STRIDE}, query, keys, rows, vectors, args_.dim / Format::PER_STEP, false);
    }
    for (int i = 0; i < rows; ++i) {
      if (ScoreTransform::is_needed(args_))
        args_.row_words ? softmax<true, true>(group, i, accumulate) : softmax<true, false>(group, i, accumulate);
      else
        args_.row_words ? softmax<false, true>(group, i, accumulate) : softmax<false, false>(group, i, accumulate);
    }
    for (int n = 0; n < group.count; ++n) {
      const int64_t first = group.panel[n] * PANEL;
      const int count = args_.keys_in(group.panel[n]);
      const Out out{sums_, args_.value_dim};
      const int vectors = static_cast<int>(args_.value_dim / LANES);
      if constexpr (IS_BF16) {
        const Left<Format> weights{reinterpret_cast<const uint32_t*>(weights_ + n * PANEL), STRIDE / 2, 1};
        const Right<Format> values{packed_values(group.panel[n]), args_.value_dim};
        multiply<Format>(out, weights, values, rows, vectors, (count + 1) / 2, accumulate || n);
      } else {
        const Left<Format> weights{scores_ + n * PANEL, STRIDE, 1};
        const Right<Format> values{args_.v.at<float>(block_.b, block_.kv_head, first), args_.v.row / ITEM};
        if (reads_in_place() && vectors % 8 == 0)
          add_values_in_place(out, weights, values, rows, vectors, count, accumulate || n);
        else
          multiply<Format>(out, weights, values, rows, vectors, count, accumulate || n);
      }
    }
  }

  // Compute the scores of one or two queries with a panel of keys in place.
  void score(int64_t panel, Left<Format> query, Out scores) {
    if constexpr (!IS_BF16) {
      const auto run = block_.count() == 2 ? score_in_place<2> : score_in_place<1>;
      run(scores, query, args_.k.at<char>(block_.b, block_.kv_head, panel * PANEL), args_.k.row,
          args_.v.at<char>(block_.b, block_.kv_head, panel * PANEL), args_.v.row, args_.value_dim * ITEM,
          args_.keys_in(panel), args_.dim);
    }
  }

  void prefetch_values(const PanelGroup& group, int n) {
    const char* first = args_.v.at<char>(block_.b, block_.kv_head, group.panel[n] * PANEL);
    prefetch_rows(first, args_.v.row, args_.keys_in(group.panel[n]), args_.value_dim * ITEM);
  }

  // Replace a row's scores by weights that are not yet normalised, and rescale its sums of earlier panels.
  template <bool HAS_TRANSFORM, bool HAS_DROPOUT>
  void softmax(const PanelGroup& group, int i, bool accumulate) {
    float* scores = scores_ + i * STRIDE;
    const ScoreTransform transform(args_, block_, i);
    const float factor = HAS_TRANSFORM ? 1.0f : transform.factor;
    Floats top = broadcast(-INF);
    for_each_vector(group, i, [&](int at, int64_t key, uint32_t bits) __attribute__((always_inline)) {
      if (!bits) return;
      Floats x = load(scores + at);
      if (HAS_TRANSFORM) x = transform.apply(x, key, bits), store(scores + at, x);
      x *= factor;
      top = maximum(top, bits == ALL_LANES ? x : lane_mask(bits) ? x : broadcast(-INF));
    });
    const float before = row_max_[i], largest = std::max(before, reduce_max(top));
    const float shift = largest == -INF ? 0.0f : largest;
    const Dropout dropout = HAS_DROPOUT ? Dropout::of(args_, block_, i) : Dropout{};
    Floats total{};
    for_each_vector(group, i, [&](int at, int64_t key, uint32_t bits) __attribute__((always_inline)) {
      Floats x{};
      if (bits) {
        x = exp2<IS_BF16>(load(scores + at) * factor - shift);
        if (bits != ALL_LANES) x = lane_mask(bits) ? x : Floats{};
        total += x;
        if (HAS_DROPOUT) x = dropout.keeps(key, bits) ? x : Floats{};
      }
      put(i, at, x);
    });
    const float scale = before == -INF ? 0.0f : ::exp2f(before - shift);
    row_sum_[i] = row_sum_[i] * scale + reduce_sum(total), row_max_[i] = largest;
    if (accumulate && scale != 1.0f)
      for (int64_t d = 0; d < args_.value_dim; ++d) sums_[i * args_.value_dim + d] *= scale;
  }

  void put(int i, int at, Floats x) {
    if constexpr (IS_BF16)
      store(weights_ + i * STRIDE + at, to_bf16(x));
    else
      store(scores_ + i * STRIDE + at, x);
  }

  void write_rows(bool any) {
    for (int i = 0; i < block_.count(); ++i)
      write_row<Format>(args_, block_, i, sums_ + i * args_.value_dim, row_max_[i], any ? row_sum_[i] : 0.0f);
  }

  // Store the sums over this slice of the keys for `merge`.
  void store_partial(bool any, int64_t part) {
    const int64_t rows = args_.batch * args_.heads * args_.q_len, width = args_.value_dim;
    for (int i = 0; i < block_.count(); ++i) {
      float* to = args_.partial + (part * rows + block_.number(args_, i)) * (width + 2);
      if (any) std::memcpy(to, sums_ + i * width, width * sizeof(float));
      to[width] = row_max_[i], to[width + 1] = any ? row_sum_[i] : 0.0f;
    }
  }

  const uint32_t* packed_values(int64_t panel) {
    return values_.get(block_.number_of_panel(args_, panel), panel, [&](uint32_t* to) {
      const int64_t first = panel * PANEL;
      const int count = args_.keys_in(panel);
      pack_pairs(args_.v.at<char>(block_.b, block_.kv_head, first), args_.v.row, count, args_.value_dim, to);
    });
  }

  const Arguments& args_;
  PackedRows<Format> keys_;
  PanelCache values_;
  Number* queries_;
  float* scores_;
  uint16_t* weights_;
  float* sums_;
  float row_max_[ROWS], row_sum_[ROWS];
  RowBlock block_;
};

// Merge the partial results of all slices of the keys.
template <class Format>
void merge_of(const Arguments& args) {
  const int64_t rows = args.batch * args.heads * args.q_len, width = args.value_dim, stride = rows * (width + 2);
  for (int64_t row = 0; row < rows; ++row) {
    float* sums = args.partial + row * (width + 2);
    float max = -INF, total = 0.0f;
    for (int64_t part = 0; part < args.key_parts; ++part) max = std::max(max, sums[part * stride + width]);
    const float shift = max == -INF ? 0.0f : max;
    for (int64_t part = 0; part < args.key_parts; ++part) {
      const float* partial = sums + part * stride;
      const float sum = partial[width + 1], scale = partial[width] == -INF ? 1.0f : ::exp2f(partial[width] - shift);
      const bool is_first = total == 0.0f;
      if (sum == 0.0f) continue;  // its sums were not written
      for (int64_t d = 0; d < width; ++d) sums[d] = (is_first ? 0.0f : sums[d]) + partial[d] * scale;
      total += sum * scale;
    }
    const int64_t head = row / args.q_len;
    RowBlock block(args, head / args.heads, head % args.heads, 1, 0);
    write_row<Format>(args, block, static_cast<int>(row % args.q_len), sums, max, total);
  }
}

}  // namespace LEVEL
