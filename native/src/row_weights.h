// The weights of one row of a group of panels, for the level that is IS_BLOCKED.
//
// Masked scores become -inf first, so that the passes over a row have neither masks nor branches, and the constants of
// exp2 stay in registers.
#pragma once

#include "scores.h"

namespace LEVEL {

// The ranges of a row's scores [first, stop) that hold all visible keys, in whole vectors.
struct VisibleRanges {
  int count = 0, first[MAX_PANELS], stop[MAX_PANELS];

  VisibleRanges(const PanelGroup& group, int i, bool is_whole) {
    if (is_whole) {
      count = 1, first[0] = 0, stop[0] = group.count * PANEL;
      return;
    }
    const uint64_t* words = group.words[i];
    for (int n = 0; n < group.count; ++n) {
      if (!words[n]) continue;
      const int leading = __builtin_ctzll(words[n]) / LANES * LANES,
                trailing = __builtin_clzll(words[n]) / LANES * LANES;
      const bool goes_on = count && stop[count - 1] == n * PANEL && !leading;
      if (!goes_on) first[count++] = n * PANEL + leading;
      stop[count - 1] = (n + 1) * PANEL - trailing;
    }
  }

  // Set the scores outside of the ranges to 0.
  void clear_rest(float* scores, int size) const {
    int at = 0;
    for (int n = 0; n < count; ++n) {
      for (; at < first[n]; at += LANES) store(scores + at, Floats{});
      at = stop[n];
    }
    for (; at < size; at += LANES) store(scores + at, Floats{});
  }
};

// A row's weights are relative to a score that follows the row's maximum only when that has grown by more than this, so
// that few sums are rescaled. Weights stay below 2**8.
constexpr float SLACK = 8.0f;

// Set a row's numbers at masked keys to `x`, in panels that have visible keys.
inline void fill_masked(const PanelGroup& group, int i, float* row, float x) {
  for (int n = 0; n < group.count; ++n) {
    const uint64_t word = group.words[i][n];
    if (word == ~0ull || !word) continue;
    for (int part = 0; part < PANEL; part += LANES) {
      const uint32_t bits = word >> part & ALL_LANES;
      float* const at = row + n * PANEL + part;
      if (bits != ALL_LANES) store(at, lane_mask(bits) ? load(at) : broadcast(x));
    }
  }
}

// Turn the products of a whole panel into exponents of 2: scaled, with the bias.
__attribute__((noinline)) inline void add_bias(float* scores, const float* bias, float scale) {
  const Floats factors = broadcast(scale * LOG2E), log2e = broadcast(LOG2E);
  for (int at = 0; at < PANEL; at += LANES) store(scores + at, load(scores + at) * factors + load(bias + at) * log2e);
}

// Turn a row's products into exponents of 2; write the derivatives of a softcap to `slopes`, if there are any.
inline void transform_row(const PanelGroup& group, int i, const ScoreTransform& transform, float* scores,
                          float* slopes = nullptr) {
  for (int n = 0; n < group.count; ++n) {
    const uint64_t word = group.words[i][n];
    const int64_t key = group.panel[n] * PANEL;
    if (word == ~0ull && transform.softcap <= 0.0f) {
      add_bias(scores + n * PANEL, transform.bias + key, transform.scale);
      continue;
    }
    for (int part = 0; part < PANEL; part += LANES) {
      const uint32_t bits = word >> part & ALL_LANES;
      float* const at = scores + n * PANEL + part;
      Floats slope{};
      if (bits) store(at, transform.apply(load(at), key + part, bits, &slope));
      if (slopes) store(slopes + n * PANEL + part, slope);
    }
  }
}

// Multiply the first `size` scores of a row.
inline void scale_row(float* scores, int size, float factor) {
  for (int at = 0; at < size; at += LANES) store(scores + at, load(scores + at) * factor);
}

// Turn a row's products into numbers that, times the factor returned, are exponents of 2. The factor is positive: times
// it, the -inf of a masked key stays -inf.
inline float prepare_row(const Arguments& args, const PanelGroup& group, int i, const ScoreTransform& transform,
                         float* scores, float* slopes = nullptr) {
  if (ScoreTransform::is_needed(args))
    transform_row(group, i, transform, scores, slopes);
  else if (transform.factor > 0.0f)
    return transform.factor;
  else
    scale_row(scores, group.count * PANEL, transform.factor);
  return 1.0f;
}

// Multiply the kept numbers of a whole panel by `factor`, and set the others to 0.
__attribute__((noinline)) inline void drop_panel(float* row, Dropout dropout, int64_t key, float factor) {
  const Floats factors = broadcast(factor);
  for (int at = 0; at < PANEL; at += LANES)
    store(row + at, dropout.keeps(key + at, ALL_LANES) ? load(row + at) * factors : Floats{});
}

// Multiply a row's kept numbers by `factor`, and set the others to 0.
inline void drop_row(const PanelGroup& group, int i, const Dropout& dropout, float factor, float* row) {
  for (int n = 0; n < group.count; ++n) {
    const uint64_t word = group.words[i][n];
    const int64_t key = group.panel[n] * PANEL;
    if (word == ~0ull) {
      drop_panel(row + n * PANEL, dropout, key, factor);
      continue;
    }
    for (int part = 0; part < PANEL; part += LANES) {
      const uint32_t bits = word >> part & ALL_LANES;
      float* const at = row + n * PANEL + part;
      if (bits) store(at, dropout.keeps(key + part, bits) ? load(at) * factor : Floats{});
    }
  }
}

// Add the score gradients of a panel to those of a row's bias, then multiply them by `scale`.
__attribute__((noinline)) inline void add_bias_gradient(float* gradients, float* bias, uint64_t word, float scale) {
  const Floats factors = broadcast(scale);
  if (word == ~0ull) {
    for (int at = 0; at < PANEL; at += LANES) {
      const Floats g = load(gradients + at);
      store(bias + at, load(bias + at) + g), store(gradients + at, g * factors);
    }
    return;
  }
  for (int at = 0; at < PANEL; at += LANES) {
    const uint32_t bits = word >> at & ALL_LANES;
    if (!bits) continue;
    const Floats g = load(gradients + at);
    store_masked(bias + at, load_masked(bias + at, bits) + g, bits), store(gradients + at, g * factors);
  }
}

// Return the largest of `factor` times the scores in [first, stop), or `top`.
inline Floats largest_score(const float* scores, int first, int stop, float factor, Floats top) {
  const Floats factors = broadcast(factor);
  Floats other = top;  // a second maximum, so that two instructions run at a time
  int at = first;
  for (; at + LANES < stop; at += 2 * LANES) {
    top = maximum(top, load(scores + at) * factors);
    other = maximum(other, load(scores + at + LANES) * factors);
  }
  if (at < stop) top = maximum(top, load(scores + at) * factors);
  return maximum(top, other);
}

// Replace the scores in [first, stop) by 2**(factor * score - shift), and return their sum plus `total`.
__attribute__((noinline)) inline Floats exponentiate(float* scores, int first, int stop, float factor, float shift,
                                                     Floats total) {
  const Floats factors = broadcast(factor), shifts = broadcast(shift);
#pragma GCC unroll 1
  for (int at = first; at < stop; at += LANES) {
    const Floats x = exp2(load(scores + at) * factors - shifts);
    store(scores + at, x);
    total += x;
  }
  return total;
}

// Numbers of a row that turn its scores into weights, and the gradients of its weights into those of its scores.
struct RowGradient {
  float factor, shift;  // weight = 2**(factor * score - shift)
  float scale, delta;   // gradient of the score = weight * (scale * gradient of the weight - delta)
};

// Replace the scores in [first, stop) by weights, and the gradients of the weights by those of the scores.
__attribute__((noinline)) inline void differentiate(float* weights, float* gradients, int first, int stop,
                                                    RowGradient row) {
  const Floats factor = broadcast(row.factor), shift = broadcast(row.shift);
  const Floats scale = broadcast(row.scale), delta = broadcast(row.delta);
#pragma GCC unroll 1
  for (int at = first; at < stop; at += LANES) {
    const Floats weight = exp2(load(weights + at) * factor - shift);
    store(weights + at, weight);
    store(gradients + at, weight * (load(gradients + at) * scale - delta));
  }
}

}  // namespace LEVEL
