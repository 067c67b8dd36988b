// Products of a block of rows with a group of panels that leave out what the mask hides, for levels that are
// IS_BLOCKED.
//
// A block is multiplied in strips of 6 rows. Scores are computed in the vectors of which some row of the strip sees a
// key, and values are read from the first to the last key that some row of it sees.
#pragma once

#include "scores.h"

namespace LEVEL {

// The operands of a tile: `steps` elements of up to 6 rows times as many rows of columns.
struct Operands {
  const float *left, *right;
  ptrdiff_t steps;
};

// The strides of the operands of a tile. The other stride of the left operand is 1: along a row, or across the rows if
// it is transposed.
struct Strides {
  ptrdiff_t left, right;
};

// Add a product. In C++, g++ 12 splits the sums of an unrolled loop over more registers than there are.
inline void add_product(Floats& sum, Floats left, Floats right) {
#if defined(__FMA__)
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(left), "x"(right));
#else
  sum += left * right;
#endif
}

// Call `run(i)` for i below COUNT. Each i is a constant, so that g++ keeps arrays indexed by it in registers.
template <int COUNT, class Do>
__attribute__((always_inline)) inline void repeat(Do run) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (run(std::integral_constant<int, I>()), ...);
  }(std::make_integer_sequence<int, COUNT>());
}

// Multiply HEIGHT rows by COLUMNS vectors; the sums stay in registers.
template <int HEIGHT, int COLUMNS, bool IS_TRANSPOSED, bool ACCUMULATE>
__attribute__((always_inline)) inline void multiply_tile(Out out, Operands operands, Strides strides) {
  constexpr int SETS = HEIGHT <= 2 ? 2 : 1;  // few sums wait for each other: take turns with two sets of them
  Floats sums[SETS][HEIGHT][COLUMNS] = {};
  const ptrdiff_t row = IS_TRANSPOSED ? 1 : strides.left, step = IS_TRANSPOSED ? strides.left : 1;
  // Two pointers to the left operand: x86 adds one or two times a register to an address, not five times.
  const float *upper = operands.left, *lower = upper + 3 * row, *right = operands.right;
  const auto add = [&](auto set) __attribute__((always_inline)) {
    Floats columns[COLUMNS];
    repeat<COLUMNS>([&](auto n) __attribute__((always_inline)) { columns[n] = load(right + n * LANES); });
    repeat<HEIGHT>([&](auto i) __attribute__((always_inline)) {
      const Floats left = broadcast(i < 3 ? upper[i * row] : lower[(i - 3) * row]);
      repeat<COLUMNS>([&](auto n) __attribute__((always_inline)) { add_product(sums[set][i][n], left, columns[n]); });
    });
    upper += step, lower += step, right += strides.right;
  };
  ptrdiff_t steps = operands.steps;
  constexpr std::integral_constant<int, 0> FIRST;
  constexpr std::integral_constant<int, SETS - 1> LAST;
  for (; steps >= 4; steps -= 4) add(FIRST), add(LAST), add(FIRST), add(LAST);
  for (; steps > 0; --steps) add(FIRST);
  repeat<HEIGHT>([&](auto i) __attribute__((always_inline)) {
    repeat<COLUMNS>([&](auto n) __attribute__((always_inline)) {
      // Earlier sums are added last: the products need not wait until these arrive.
      float* const to = out.data + i * out.row + n * LANES;
      const Floats sum = SETS == 2 ? sums[0][i][n] + sums[LAST][i][n] : sums[0][i][n];
      store(to, ACCUMULATE ? load(to) + sum : sum);
    });
  });
}

// Multiply fewer than 6 rows.
template <int COLUMNS, bool IS_TRANSPOSED, bool ACCUMULATE>
__attribute__((noinline)) void multiply_rest(int rows, Out out, Operands operands, Strides strides) {
  const auto call = [&](auto height) {
    multiply_tile<height, COLUMNS, IS_TRANSPOSED, ACCUMULATE>(out, operands, strides);
  };
  if (rows == 5) return call(std::integral_constant<int, 5>());
  if (rows == 4) return call(std::integral_constant<int, 4>());
  if (rows == 3) return call(std::integral_constant<int, 3>());
  if (rows == 2) return call(std::integral_constant<int, 2>());
  call(std::integral_constant<int, 1>());
}

// Multiply the rows of a strip: 6, or those that are left.
template <int COLUMNS, bool IS_TRANSPOSED, bool ACCUMULATE>
__attribute__((always_inline)) inline void multiply_strip(int rows, Out out, Operands operands, Strides strides) {
  if (rows >= STRIP)
    multiply_tile<STRIP, COLUMNS, IS_TRANSPOSED, ACCUMULATE>(out, operands, strides);
  else
    multiply_rest<COLUMNS, IS_TRANSPOSED, ACCUMULATE>(rows, out, operands, strides);
}

// For each strip of a block, the keys of each panel that some of its rows may attend to.
struct Strips {
  int rows, count;
  bool is_whole;  // whether every row may attend to every key
  uint64_t words[ROWS / STRIP][MAX_PANELS];

  Strips(const PanelGroup& group, int rows) : rows(rows), count((rows + STRIP - 1) / STRIP) {
    uint64_t all = ~0ull;
    for (int strip = 0; strip < count; ++strip)
      for (int n = 0; n < group.count; ++n) {
        uint64_t word = 0;
        for (int i = strip * STRIP; i < std::min(rows, (strip + 1) * STRIP); ++i)
          word |= group.words[i][n], all &= group.words[i][n];
        words[strip][n] = word;
      }
    is_whole = all == ~0ull;
  }

  int rows_from(int strip) const { return rows - strip * STRIP; }
};

// Compute the scores of panel `n` of a group. A tile of keys stays in the L1 cache while all strips read it.
__attribute__((noinline)) inline void multiply_keys(Out scores, Left<Float32> query, Right<Float32> keys, ptrdiff_t dim,
                                                    const Strips& strips, int n) {
  const Strides strides{query.row, keys.step};
  for (int at = 0; at < PANEL; at += TILE_KEYS)
    for (int strip = 0; strip < strips.count; ++strip) {
      const uint64_t bits = strips.words[strip][n] >> at;
      const bool low = bits & ALL_LANES, high = bits >> LANES & ALL_LANES;
      const float* left = query.data + strip * STRIP * query.row;
      const Out out{scores.data + strip * STRIP * scores.row + at, scores.row};
      const int rows = strips.rows_from(strip), skipped = low ? 0 : LANES;
      if (low && high)
        multiply_strip<2, false, false>(rows, out, {left, keys.data + at * dim, dim}, strides);
      else if (low || high)
        multiply_strip<1, false, false>(rows, {out.data + skipped, out.row},
                                        {left, keys.data + at * dim + skipped, dim}, strides);
    }
}

// Rows of a panel as columns to multiply: in tiles of TILE_KEYS columns, `tile` apart, with `row` between their rows.
struct ValueTiles {
  const float* data;
  ptrdiff_t row, tile;
};

// Add the weighted rows of panel `n` of a group to the sums, or store them in the sums.
template <bool ACCUMULATE>
__attribute__((noinline)) void multiply_values(Out sums, Left<Float32> weights, ValueTiles values, int64_t width,
                                               const Strips& strips, int n) {
  for (int64_t d = 0; d < width; d += TILE_KEYS, values.data += values.tile)
    for (int strip = 0; strip < strips.count; ++strip) {
      const uint64_t word = strips.words[strip][n];
      if (ACCUMULATE && !word) continue;
      const int first = word ? __builtin_ctzll(word) : 0, stop = word ? PANEL - __builtin_clzll(word) : 0;
      const Operands operands{weights.data + strip * STRIP * weights.row + first, values.data + first * values.row,
                              stop - first};
      multiply_strip<2, false, ACCUMULATE>(strips.rows_from(strip),
                                           {sums.data + strip * STRIP * sums.row + d, sums.row}, operands,
                                           {weights.row, values.row});
    }
}

// Add to the gradients of `count` keys the rows of `height` queries in tiles, weighted by [query, key] numbers.
// `words` holds, for each strip of queries, the keys that some of its rows may attend to.
__attribute__((noinline)) inline void multiply_queries(Out sums, int count, Left<Float32> weights, const float* tiles,
                                                       int64_t height, int64_t width, const uint64_t* words) {
  const int strips = static_cast<int>((height + STRIP - 1) / STRIP);
  for (int key = 0; key < count; key += STRIP) {
    const uint64_t mask = bits_between(key, key + STRIP);
    for (int first = 0, stop; first < strips; first = stop) {
      for (; first < strips && !(words[first] & mask);) ++first;
      for (stop = first; stop < strips && words[stop] & mask;) ++stop;
      const int64_t row = first * STRIP, rows = std::min<int64_t>(stop * STRIP, height) - row;
      for (int64_t d = 0; rows > 0 && d < width; d += TILE_KEYS)
        multiply_strip<2, true, true>(
            count - key, {sums.data + key * sums.row + d, sums.row},
            {weights.data + row * weights.step + key, tiles + d * height + row * TILE_KEYS, rows},
            {weights.step, TILE_KEYS});
    }
  }
}

}  // namespace LEVEL
