// The scores of a block of rows: which keys are visible, and the transforms before the softmax.
#pragma once

#include "packed_keys.h"

namespace LEVEL {

constexpr float LN2 = 0.6931471805599453f, LOG2E = 1.4426950408889634f;

// Query rows that are processed together: of one head, or the few rows of several heads that share keys.
struct RowBlock {
  int64_t b, kv_head, head, first;  // the first head and row
  int heads, rows_per_head;
  int32_t heads_[ROWS], rows_[ROWS];

  RowBlock() = default;
  RowBlock(const Arguments& args, int64_t b, int64_t head, int heads, int64_t block)
      : b(b),
        kv_head(head / (args.heads / args.kv_heads)),
        head(head),
        first(block * ROWS),
        heads(heads),
        rows_per_head(static_cast<int>(std::min<int64_t>(ROWS, args.q_len - first))) {
    for (int i = 0; i < count(); ++i) heads_[i] = head + i / rows_per_head, rows_[i] = first + i % rows_per_head;
  }

  int count() const { return heads * rows_per_head; }
  int64_t head_of(int i) const { return heads_[i]; }
  int64_t row_of(int i) const { return rows_[i]; }
  int64_t number(const Arguments& args, int i) const { return (b * args.heads + heads_[i]) * args.q_len + rows_[i]; }
  int64_t number_of_panel(const Arguments& args, int64_t panel) const {
    return (b * args.kv_heads + kv_head) * args.panels() + panel;
  }
};

// The transposed, packed panels of a tensor: keys, or values in the backward pass.
template <class Format>
class PackedRows {
 public:
  PackedRows(Arena& arena, const Arguments& args, const View& rows, int64_t components)
      : args_(args), rows_(rows), steps_(components / Format::PER_STEP), panels_(arena, args, steps_ * PANEL) {}

  Right<Format> get(const RowBlock& block, int64_t panel) {
    const uint32_t* result = panels_.get(block.number_of_panel(args_, panel), panel, [&](uint32_t* to) {
      const char* from = rows_.at<char>(block.b, block.kv_head, panel * PANEL);
      pack_transposed<TILE_KEYS>(from, rows_.row, args_.keys_in(panel), steps_, to);
    });
    return {reinterpret_cast<const typename Format::Number*>(result), TILE_KEYS};
  }

 private:
  const Arguments& args_;
  View rows_;
  int64_t steps_;
  PanelCache panels_;
};

// Panels that are processed together, and a mask word per row and panel.
struct PanelGroup {
  int64_t panel[MAX_PANELS];
  int count = 0;
  uint64_t words[ROWS][MAX_PANELS];
};

inline uint64_t bits_between(int64_t start, int64_t stop) {
  if (start >= stop || stop <= 0 || start >= PANEL) return 0;
  start = std::max<int64_t>(start, 0), stop = std::min<int64_t>(stop, PANEL);
  return (stop == PANEL ? ~0ull : (1ull << stop) - 1) & ~((1ull << start) - 1);
}

// Return the mask word of a row and panel, before `plan.visible` and the end of the keys are applied.
inline uint64_t visible_word(const Plan& plan, Kind kind, int64_t b, int64_t h, int64_t item, int64_t row,
                             int64_t q_len, int64_t panel, int64_t panels) {
  if (kind == WHOLE) return ~0ull;
  if (kind == RESIDUAL) return plan.bits[b * plan.bits_batch + h * plan.bits_head + row * panels + panel];
  uint64_t word = 0;
  const int32_t* span = plan.spans + (item * q_len + row) * plan.spans_per_row * 2;
  for (int64_t n = 0; n < plan.spans_per_row; ++n, span += 2)
    word |= bits_between(span[0] - panel * PANEL, span[1] - panel * PANEL);
  return word;
}

// Return the first run of a block and the end of its runs; they are sorted.
inline std::pair<const Run*, const Run*> runs_of(const Arguments& args, const RowBlock& block) {
  const int32_t* starts =
      args.plan.starts + (args.plan.items > 1 ? block.b * args.plan.blocks : 0) + block.first / ROWS;
  return {args.plan.runs + starts[0], args.plan.runs + starts[1]};
}

// Return the first run of a block that ends after a panel.
inline const Run* run_after(const Arguments& args, const RowBlock& block, int64_t panel) {
  const auto [first, end] = runs_of(args, block);
  return std::partition_point(first, end, [=](const Run& run) { return run.stop <= panel; });
}

// Return the first panel from `from` on that a block needs, or the number of panels.
inline int64_t next_needed(const Arguments& args, const RowBlock& block, int64_t from) {
  const Run* run = run_after(args, block, from);
  return run < runs_of(args, block).second ? std::max<int64_t>(run->first, from) : args.panels();
}

// Call `run` for the panels in [first, stop) that a block needs, up to LIMIT at a time. Return whether there were any.
template <int LIMIT, class Do>
bool for_each_group(const Arguments& args, const RowBlock& block, int64_t first, int64_t stop, Do run) {
  const int64_t item = args.plan.items > 1 ? block.b : 0, panels = args.panels();
  const Run* const end = runs_of(args, block).second;
  const auto visible = [&](int64_t head) { return args.plan.visible + (block.b * args.heads + head) * panels; };
  PanelGroup group;
  bool any = false;
  for (const Run* span = run_after(args, block, first); span < end && span->first < stop; ++span) {
    for (int64_t panel = std::max<int64_t>(span->first, first); panel < std::min<int64_t>(span->stop, stop); ++panel) {
      const uint64_t existing = bits_between(0, args.kv_len - panel * PANEL);
      for (int i = 0; i < block.count(); ++i) {
        uint64_t word = existing & visible_word(args.plan, Kind(span->kind), block.b, block.head_of(i), item,
                                                block.row_of(i), args.q_len, panel, panels);
        if (args.plan.visible) word &= visible(block.head_of(i))[panel];
        group.words[i][group.count] = word;
      }
      group.panel[group.count++] = panel;
      if (group.count == LIMIT) run(group, any), any = true, group.count = 0;
    }
  }
  if (group.count) run(group, any), any = true;
  return any;
}

// Call `run(offset, key, bits)` for each vector of a row's scores.
template <class Do>
inline void for_each_vector(const PanelGroup& group, int i, Do run) {
  for (int n = 0; n < group.count; ++n) {
    const uint64_t word = group.words[i][n];
    const int at = n * PANEL;
    const int64_t key = group.panel[n] * PANEL;
    if (word == ~0ull)
      for (int part = 0; part < PANEL; part += LANES) run(at + part, key + part, ALL_LANES);
    else
      for (int part = 0; part < PANEL; part += LANES) run(at + part, key + part, word >> part & ALL_LANES);
  }
}

inline Floats tanh(Floats x) {
  const Floats edge = broadcast(7.90531110763549805f);
  const Floats small = x, y = x > edge ? edge : x < -edge ? -edge : x, z = y * y;
  Floats p = z * -2.76076847742355e-16f + 2.00018790482477e-13f;
  p = p * z + -8.60467152213735e-11f;
  p = p * z + 5.12229709037114e-08f;
  p = p * z + 1.48572235717979e-05f;
  p = p * z + 6.37261928875436e-04f;
  p = p * z + 4.89352455891786e-03f;
  Floats q = z * 1.19825839466702e-06f + 1.18534705686654e-04f;
  q = q * z + 2.26843463243900e-03f;
  q = q * z + 4.89352518554385e-03f;
  return z < 1e-7f ? small : y * p / q;
}

// Dropout: a hash of the row's word and the key's word decides whether a weight is kept, as in engine/dropout.py.
struct Dropout {
  const int32_t* columns;
  uint32_t word;
  int32_t threshold;

  static Dropout of(const Arguments& args, const RowBlock& block, int i) {
    const int32_t word = args.row_words[block.number(args, i)];
    return {args.column_words + block.b * args.column_words_batch, static_cast<uint32_t>(word), args.threshold};
  }

  Ints keeps(int64_t key, uint32_t bits) const {
    const Words column = (Words)load_masked(reinterpret_cast<const float*>(columns + key), bits);
    return (Ints)((column ^ word) * (word | 1)) >= threshold;
  }
};

// Turns products into exponents of 2: scaled, capped, with the bias.
struct ScoreTransform {
  float factor;  // the whole transform if there is neither a softcap nor a bias
  float scale, softcap;
  const float* bias = nullptr;  // of the row, at key 0

  static bool is_needed(const Arguments& args) { return args.softcap > 0.0f || args.bias.data; }

  ScoreTransform(const Arguments& args, const RowBlock& block, int i)
      : factor(args.scale * LOG2E), scale(args.scale), softcap(args.softcap) {
    if (args.bias.data) bias = args.bias.at<float>(block.b, block.head_of(i), block.row_of(i));
  }

  // Transform the row's products with the keys from `key` on; write the derivative of the softcap to `slope`.
  Floats apply(Floats x, int64_t key, uint32_t bits, Floats* slope = nullptr) const {
    x *= scale;
    if (softcap > 0.0f) {
      const Floats t = tanh(x / softcap);
      if (slope) *slope = 1.0f - t * t;
      x = t * softcap;
    }
    if (bias) x += load_masked(bias + key, bits);
    return x * LOG2E;
  }
};

}  // namespace LEVEL
