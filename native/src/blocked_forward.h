// Forward pass of the level that is IS_BLOCKED: several blocks of rows visit a group of panels while it is in the
// cache.
#pragma once

#include "forward.h"
#include "row_weights.h"
#include "trimmed_products.h"

namespace LEVEL {

class BlockedForward {
 public:
  BlockedForward(const Arguments& args, Arena& arena)
      : args_(args),
        keys_(arena, args, args.k, args.dim),
        has_tiles_(args.plan.blocks > 1 && PANEL * args.value_dim * 4 <= TILE_BYTES),
        group_(has_tiles_ ? std::min<int64_t>(TILE_BYTES / (PANEL * args.value_dim * 4), PANELS) : PANELS),
        values_(arena, PANEL * args.value_dim, has_tiles_ ? group_ : 0),
        queries_(arena.take<float>(args.heads_per_task > 1 ? ROWS * args.dim : 0)),
        scores_(arena.take<float>(ROWS * STRIDE)),
        sums_(arena.take<float>(blocks_at_once(args) * ROWS * args.value_dim)) {}

  // Return how many blocks `run` processes at once.
  static int64_t blocks_at_once(const Arguments& args) {
    return std::clamp<int64_t>(SUM_BYTES / (ROWS * args.value_dim * 4), 1, std::min<int64_t>(BLOCKS, args.plan.blocks));
  }

  // Process consecutive blocks of rows of a head against one of `key_parts` slices of the keys.
  void run(int64_t b, int64_t head, int64_t first_block, int64_t count, int64_t part) {
    for (int64_t n = 0; n < count; ++n)
      states_[n].start({args_, b, head, args_.heads_per_task, first_block + n}, sums_ + n * ROWS * args_.value_dim);
    const int64_t first = args_.panels() * part / args_.key_parts, stop = args_.panels() * (part + 1) / args_.key_parts;
    // Groups begin at multiples of their size, so that no sum depends on which blocks are processed together.
    for (int64_t at = next_panel(count, first); at < stop; at = next_panel(count, at)) {
      const int64_t end = at / group_ * group_ + group_;
      for (int64_t n = 0; n < count; ++n) visit(states_[n], at, std::min(end, stop));
      at = end;
    }
    for (int64_t n = 0; n < count; ++n) finish(states_[n], part);
  }

 private:
  // A block of rows, and its sums so far.
  struct State {
    RowBlock block;
    float* sums;          // of weighted values
    float row_max[ROWS];  // the score that the weights of a row are relative to, see SLACK
    Floats totals[ROWS];  // sums of weights, lane by lane
    bool any;

    void start(const RowBlock& rows, float* memory) {
      block = rows, sums = memory, any = false;
      for (int i = 0; i < block.count(); ++i) row_max[i] = -INF, totals[i] = Floats{};
    }
  };

  // Return the first panel from `from` on that some block needs.
  int64_t next_panel(int64_t count, int64_t from) const {
    int64_t next = args_.panels();
    for (int64_t n = 0; n < count; ++n) next = std::min(next, next_needed(args_, states_[n].block, from));
    return next;
  }

  // Add the panels in [first, stop) to a block's sums.
  void visit(State& state, int64_t first, int64_t stop) {
    state_ = &state;
    const Left<Float32> query = queries();
    for_each_group<PANELS>(args_, state.block, first, stop, [&](const PanelGroup& group, bool) {
      state.any ? add<true>(group, query) : add<false>(group, query);
      state.any = true;
    });
  }

  // Return the queries of the block: in place, or copied together if the block has several heads.
  Left<Float32> queries() {
    const RowBlock& block = state_->block;
    if (block.heads == 1) return {args_.q.at<float>(block.b, block.head, block.first), args_.q.row / 4, 1};
    for (int i = 0; i < block.count(); ++i)
      std::memcpy(queries_ + i * args_.dim, args_.q.at<float>(block.b, block.head_of(i), block.row_of(i)),
                  args_.dim * sizeof(float));
    return {queries_, args_.dim, 1};
  }

  template <bool ACCUMULATE>
  void add(const PanelGroup& group, Left<Float32> query) {
    const Strips strips(group, state_->block.count());
    for (int n = 0; n < group.count; ++n) {
      const Right<Float32> keys = keys_.get(state_->block, group.panel[n]);
      if (args_.reads_keys_once()) prefetch_values(group.panel[n]);
      multiply_keys({scores_ + n * PANEL, STRIDE}, query, keys, args_.dim, strips, n);
    }
    for (int i = 0; i < state_->block.count(); ++i) weigh<ACCUMULATE>(group, i, strips.is_whole);
    const Out sums{state_->sums, args_.value_dim};
    for (int n = 0; n < group.count; ++n) {
      const ValueTiles values = values_of(group.panel[n]);
      const Left<Float32> weights{scores_ + n * PANEL, STRIDE, 1};
      ACCUMULATE || n ? multiply_values<true>(sums, weights, values, args_.value_dim, strips, n)
                      : multiply_values<false>(sums, weights, values, args_.value_dim, strips, n);
    }
  }

  void prefetch_values(int64_t panel) {
    const char* first = args_.v.at<char>(state_->block.b, state_->block.kv_head, panel * PANEL);
    prefetch_rows(first, args_.v.row, args_.keys_in(panel), args_.value_dim * 4);
  }

  // Return the values of a panel: in place if no other block reads them or they are large, or in tiles.
  ValueTiles values_of(int64_t panel) {
    const char* rows = args_.v.at<char>(state_->block.b, state_->block.kv_head, panel * PANEL);
    if (!has_tiles_) return {reinterpret_cast<const float*>(rows), args_.v.row / 4, TILE_KEYS};
    const uint32_t* packed = values_.get(state_->block.number_of_panel(args_, panel), panel, [&](uint32_t* to) {
      pack_tiles(rows, args_.v.row, args_.keys_in(panel), args_.value_dim, PANEL, reinterpret_cast<float*>(to));
    });
    return {reinterpret_cast<const float*>(packed), TILE_KEYS, PANEL * TILE_KEYS};
  }

  // Replace a row's scores by weights that are not yet normalised, and rescale its sums of earlier panels.
  template <bool ACCUMULATE>
  void weigh(const PanelGroup& group, int i, bool is_whole) {
    float* const scores = scores_ + i * STRIDE;
    const float factor = prepare_row(args_, group, i, ScoreTransform(args_, state_->block, i), scores);
    if (!is_whole) fill_masked(group, i, scores, -INF);
    const VisibleRanges ranges(group, i, is_whole);
    Floats top = broadcast(-INF);
    for (int n = 0; n < ranges.count; ++n) top = largest_score(scores, ranges.first[n], ranges.stop[n], factor, top);
    const float largest = reduce_max(top);
    if (largest > state_->row_max[i] + SLACK) follow<ACCUMULATE>(i, largest);
    const float shift = state_->row_max[i] == -INF ? 0.0f : state_->row_max[i];
    for (int n = 0; n < ranges.count; ++n)
      state_->totals[i] = exponentiate(scores, ranges.first[n], ranges.stop[n], factor, shift, state_->totals[i]);
    ranges.clear_rest(scores, group.count * PANEL);
    if (args_.row_words) drop_row(group, i, Dropout::of(args_, state_->block, i), 1.0f, scores);
  }

  // Make the weights of a row relative to a new maximum.
  template <bool ACCUMULATE>
  __attribute__((noinline)) void follow(int i, float largest) {
    const float before = state_->row_max[i], scale = before == -INF ? 0.0f : ::exp2f(before - largest);
    state_->row_max[i] = largest, state_->totals[i] *= scale;
    float* sums = state_->sums + i * args_.value_dim;
    for (int64_t d = 0; ACCUMULATE && d < args_.value_dim; d += LANES) store(sums + d, load(sums + d) * scale);
  }

  // Write the rows, or store their sums over this slice of the keys for `merge`.
  void finish(const State& state, int64_t part) {
    const int64_t rows = args_.batch * args_.heads * args_.q_len, width = args_.value_dim;
    for (int i = 0; i < state.block.count(); ++i) {
      const float *sums = state.sums + i * width, total = state.any ? reduce_sum(state.totals[i]) : 0.0f;
      if (!args_.partial) {
        write_row<Float32>(args_, state.block, i, sums, state.row_max[i], total);
        continue;
      }
      float* to = args_.partial + (part * rows + state.block.number(args_, i)) * (width + 2);
      if (state.any) std::memcpy(to, sums, width * sizeof(float));
      to[width] = state.row_max[i], to[width + 1] = total;
    }
  }

  const Arguments& args_;
  PackedRows<Float32> keys_;
  bool has_tiles_;  // whether values are copied into tiles
  int64_t group_;   // panels that are processed together
  PanelCache values_;
  float *queries_, *scores_, *sums_;
  State states_[BLOCKS];
  State* state_ = nullptr;  // of the block that is processed
};

}  // namespace LEVEL
