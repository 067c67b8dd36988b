// The one product of matrices that everything here is made of: a few rows, 6 at a time in registers.
#pragma once

#include "lanes.h"

namespace LEVEL {

// What is multiplied at one step: a number of each row with a vector of columns.
struct Singles {
  using Number = float;
  static constexpr int PER_STEP = 1;  // components or keys
  static inline Floats add(Floats total, Number left, const Number* right) { return total + left * load(right); }
};

#if defined(__AVX512BF16__)
// Two numbers of half precision, products of which are added to one of single precision.
struct Pairs {
  using Number = uint32_t;
  static constexpr int PER_STEP = 2;
  static inline Floats add(Floats total, Number left, const Number* right) {
    const __m512i l = _mm512_set1_epi32(static_cast<int>(left)), r = _mm512_loadu_si512(right);
    return (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)l, (__m512bh)r);
  }
};
#endif

// Rows of numbers, so many apart; steps along a row, so many apart.
template <class E>
struct Left {
  const typename E::Number* data;
  ptrdiff_t row, step;
};

template <class E>
struct Right {
  const typename E::Number* data;
  ptrdiff_t step;
};

struct Out {
  float* data;
  ptrdiff_t row;
};

template <class E, int ROWS, int WIDE>
void micro(Out out, Left<E> left, Right<E> right, ptrdiff_t steps, bool adds) {
  Floats sums[ROWS][WIDE];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
    for (int n = 0; n < WIDE; ++n) sums[i][n] = adds ? load(out.data + i * out.row + n * LANES) : Floats{};
  for (ptrdiff_t t = 0; t < steps; ++t)
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
      for (int n = 0; n < WIDE; ++n)
        sums[i][n] =
            E::add(sums[i][n], left.data[i * left.row + t * left.step], right.data + t * right.step + n * LANES);
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
    for (int n = 0; n < WIDE; ++n) store(out.data + i * out.row + n * LANES, sums[i][n]);
}

template <class E, int ROWS>
void few_rows(Out out, Left<E> left, Right<E> right, int vectors, ptrdiff_t steps, bool adds) {
  for (int n = 0; n < vectors;) {
    const Out to{out.data + n * LANES, out.row};
    const Right<E> from{right.data + n * LANES, right.step};
    if constexpr (VECTORS == 4) {
      if (vectors - n >= 4) {
        micro<E, ROWS, 4>(to, left, from, steps, adds), n += 4;
        continue;
      }
    }
    if (vectors - n >= 2)
      micro<E, ROWS, 2>(to, left, from, steps, adds), n += 2;
    else
      micro<E, ROWS, 1>(to, left, from, steps, adds), n += 1;
  }
}

// out [rows, vectors of columns] = left [rows, steps] * right [steps, columns], or added to what is there.
template <class E>
void multiply(Out out, Left<E> left, Right<E> right, int rows, int vectors, ptrdiff_t steps, bool adds) {
  for (; rows >= 6; rows -= 6) {
    few_rows<E, 6>(out, left, right, vectors, steps, adds);
    out.data += 6 * out.row, left.data += 6 * left.row;
  }
  if (rows >= 4) {
    few_rows<E, 4>(out, left, right, vectors, steps, adds);
    out.data += 4 * out.row, left.data += 4 * left.row, rows -= 4;
  }
  for (; rows > 0; --rows, out.data += out.row, left.data += left.row)
    few_rows<E, 1>(out, left, right, vectors, steps, adds);
}

}  // namespace LEVEL
