// Scores of a block of rows: which of them count, and what is made of them before the softmax.
#pragma once

#include "panels.h"

namespace LEVEL {

constexpr float LN2 = 0.6931471805599453f, LOG2E = 1.4426950408889634f;

// Rows that are worked on together: of one head, or the few rows of several heads that share keys.
struct Rows {
  int64_t b, kv_head, head, first;  // the first head and row
  int heads, of_head;
  int32_t heads_[ROWS], rows_[ROWS];

  Rows() = default;
  Rows(const Problem& p, int64_t b, int64_t head, int heads, int64_t block)
      : b(b),
        kv_head(head / (p.heads / p.kv_heads)),
        head(head),
        first(block * ROWS),
        heads(heads),
        of_head(static_cast<int>(std::min<int64_t>(ROWS, p.q_len - first))) {
    for (int i = 0; i < count(); ++i) heads_[i] = head + i / of_head, rows_[i] = first + i % of_head;
  }

  int count() const { return heads * of_head; }
  int64_t head_of(int i) const { return heads_[i]; }
  int64_t row_of(int i) const { return rows_[i]; }
  int64_t number(const Problem& p, int i) const { return (b * p.heads + heads_[i]) * p.q_len + rows_[i]; }
  int64_t number_of_panel(const Problem& p, int64_t panel) const {
    return (b * p.kv_heads + kv_head) * p.panels() + panel;
  }
};

// Rows of a tensor as columns of products, packed panel by panel: keys, or values where gradients meet them.
template <class E>
class Columns {
 public:
  Columns(Arena& arena, const Problem& p, const View& rows, int64_t components)
      : p_(p), rows_(rows), steps_(components / E::PER_STEP), panels_(arena, p, steps_ * PANEL) {}

  Right<E> get(const Rows& its, int64_t panel) {
    const uint32_t* found = panels_.get(its.number_of_panel(p_, panel), panel, [&](uint32_t* to) {
      const char* from = rows_.at<char>(its.b, its.kv_head, panel * PANEL);
      pack_columns(from, rows_.row, p_.keys_of(panel), steps_, to);
    });
    return {reinterpret_cast<const typename E::Number*>(found), PANEL};
  }

 private:
  const Problem& p_;
  View rows_;
  int64_t steps_;
  Panels panels_;
};

// Panels that are worked on together, and for each row the keys of each that it sees, as bits.
struct Seen {
  int64_t panel[PANELS];
  int count = 0;
  uint64_t words[ROWS][PANELS];
};

inline uint64_t bits_between(int64_t start, int64_t stop) {
  if (start >= stop || stop <= 0 || start >= PANEL) return 0;
  start = std::max<int64_t>(start, 0), stop = std::min<int64_t>(stop, PANEL);
  return (stop == PANEL ? ~0ull : (1ull << stop) - 1) & ~((1ull << start) - 1);
}

// The keys of one panel that a row sees, those included that nobody may see.
inline uint64_t allowed_by(const Plan& plan, Kind kind, int64_t b, int64_t h, int64_t item, int64_t row, int64_t q_len,
                           int64_t panel, int64_t panels) {
  if (kind == WHOLE) return ~0ull;
  if (kind == RESIDUAL) return plan.bits[b * plan.bits_batch + h * plan.bits_head + row * panels + panel];
  uint64_t word = 0;
  const int32_t* span = plan.spans + (item * q_len + row) * plan.spans_per_row * 2;
  for (int64_t n = 0; n < plan.spans_per_row; ++n, span += 2)
    word |= bits_between(span[0] - panel * PANEL, span[1] - panel * PANEL);
  return word;
}

// The panels that rows need, those of a range and up to PANELS of them at a time, with what each row sees.
template <class Do>
bool each_part(const Problem& p, const Rows& its, int64_t first, int64_t stop, Do run) {
  const int64_t item = p.plan.items > 1 ? its.b : 0, panels = p.panels();
  const int64_t at = item * p.plan.blocks + its.first / ROWS;
  const auto visible = [&](int64_t head) { return p.plan.visible + (its.b * p.heads + head) * panels; };
  Seen seen;
  bool any = false;
  for (int32_t n = p.plan.starts[at]; n < p.plan.starts[at + 1]; ++n) {
    const Run& span = p.plan.runs[n];
    for (int64_t panel = std::max<int64_t>(span.first, first); panel < std::min<int64_t>(span.stop, stop); ++panel) {
      const uint64_t there = bits_between(0, p.kv_len - panel * PANEL);
      for (int i = 0; i < its.count(); ++i) {
        uint64_t word = there & allowed_by(p.plan, Kind(span.kind), its.b, its.head_of(i), item, its.row_of(i), p.q_len,
                                           panel, panels);
        if (p.plan.visible) word &= visible(its.head_of(i))[panel];
        seen.words[i][seen.count] = word;
      }
      seen.panel[seen.count++] = panel;
      if (seen.count == PANELS) run(seen, any), any = true, seen.count = 0;
    }
  }
  if (seen.count) run(seen, any), any = true;
  return any;
}

// Vectors of scores of a row: where they stand, their first key, and which of them are seen.
template <class Do>
inline void each_vector(const Seen& seen, int i, Do run) {
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

inline Floats tanh(Floats x) {
  const Floats edge = all(7.90531110763549805f);
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

// Dropout: a word of the row and one of each key say whether a weight is kept. The same stands in engine/dropout.py.
struct Dropout {
  const int32_t* columns;
  uint32_t word;
  int32_t threshold;

  static Dropout of(const Problem& p, const Rows& its, int i) {
    const int32_t word = p.row_words[its.number(p, i)];
    return {p.column_words + its.b * p.column_words_batch, static_cast<uint32_t>(word), p.threshold};
  }

  Ints keeps(int64_t key, uint32_t bits) const {
    const Words column = (Words)load_some(reinterpret_cast<const float*>(columns + key), bits);
    return (Ints)((column ^ word) * (word | 1)) >= threshold;
  }
};

// Scores as powers of 2: scaled, capped, with the bias.
struct Terms {
  float factor;  // of a product, where there is neither a cap nor a bias
  float scale, softcap;
  const float* bias = nullptr;  // of the row, at key 0

  static bool any(const Problem& p) { return p.softcap > 0.0f || p.bias.data; }

  Terms(const Problem& p, const Rows& its, int i) : factor(p.scale * LOG2E), scale(p.scale), softcap(p.softcap) {
    if (p.bias.data) bias = p.bias.at<float>(its.b, its.head_of(i), its.row_of(i));
  }

  // Of products of the row with keys from this one on; the cap's slope is written where it is asked for.
  Floats of(Floats x, int64_t key, uint32_t bits, Floats* slope = nullptr) const {
    x *= scale;
    if (softcap > 0.0f) {
      const Floats t = tanh(x / softcap);
      if (slope) *slope = 1.0f - t * t;
      x = t * softcap;
    }
    if (bias) x += load_some(bias + key, bits);
    return x * LOG2E;
  }
};

}  // namespace LEVEL
