// The matrix product that all kernels use: 6 rows x VECTORS vectors of columns accumulate in registers.
#pragma once

#include "simd.h"

namespace LEVEL {

// One step of a product: multiply one element of each row by a vector of columns.
struct Float32 {
  using Number = float;
  static constexpr int PER_STEP = 1;  // components (or keys) per step
  static inline Floats add(Floats total, Number left, const Number* right) { return total + left * load(right); }
};

#if defined(HAS_BF16)
// Pairs of bfloat16 numbers; the dot product of two pairs is added to a float32 sum.
struct BFloat16 {
  using Number = uint32_t;
  static constexpr int PER_STEP = 2;
  static inline Floats add(Floats total, Number left, const Number* right) {
#if defined(__AVX512BF16__)
    const __m512i l = _mm512_set1_epi32(static_cast<int>(left)), r = _mm512_loadu_si512(right);
    return (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)l, (__m512bh)r);
#else
    const bfloat16x8_t l = vreinterpretq_bf16_u32(vdupq_n_u32(left)), r = vreinterpretq_bf16_u32(vld1q_u32(right));
    return (Floats)vbfdotq_f32((float32x4_t)total, l, r);
#endif
  }
};
#endif

// The left operand. `row` and `step` are strides, in elements.
template <class Format>
struct Left {
  const typename Format::Number* data;
  ptrdiff_t row, step;
};

template <class Format>
struct Right {
  const typename Format::Number* data;
  ptrdiff_t step;
};

struct Out {
  float* data;
  ptrdiff_t row;
};

template <class Format, int ROWS, int COLUMNS>
void micro_kernel(Out out, Left<Format> left, Right<Format> right, ptrdiff_t steps, bool accumulate) {
  Floats sums[ROWS][COLUMNS];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
    for (int n = 0; n < COLUMNS; ++n) sums[i][n] = accumulate ? load(out.data + i * out.row + n * LANES) : Floats{};
  for (ptrdiff_t t = 0; t < steps; ++t)
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
      for (int n = 0; n < COLUMNS; ++n)
        sums[i][n] =
            Format::add(sums[i][n], left.data[i * left.row + t * left.step], right.data + t * right.step + n * LANES);
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
    for (int n = 0; n < COLUMNS; ++n) store(out.data + i * out.row + n * LANES, sums[i][n]);
}

template <class Format, int ROWS>
void multiply_rows(Out out, Left<Format> left, Right<Format> right, int vectors, ptrdiff_t steps, bool accumulate) {
  for (int n = 0; n < vectors;) {
    const Out to{out.data + n * LANES, out.row};
    const Right<Format> from{right.data + n * LANES, right.step};
    if constexpr (VECTORS == 4) {
      if (vectors - n >= 4) {
        micro_kernel<Format, ROWS, 4>(to, left, from, steps, accumulate), n += 4;
        continue;
      }
    }
    if (vectors - n >= 2)
      micro_kernel<Format, ROWS, 2>(to, left, from, steps, accumulate), n += 2;
    else
      micro_kernel<Format, ROWS, 1>(to, left, from, steps, accumulate), n += 1;
  }
}

// out[rows, columns] = left[rows, steps] @ right[steps, columns], or += if `accumulate`. `vectors` counts column
// vectors.
template <class Format>
void multiply(Out out, Left<Format> left, Right<Format> right, int rows, int vectors, ptrdiff_t steps,
              bool accumulate) {
  for (; rows >= 6; rows -= 6) {
    multiply_rows<Format, 6>(out, left, right, vectors, steps, accumulate);
    out.data += 6 * out.row, left.data += 6 * left.row;
  }
  if (rows >= 4) {
    multiply_rows<Format, 4>(out, left, right, vectors, steps, accumulate);
    out.data += 4 * out.row, left.data += 4 * left.row, rows -= 4;
  }
  for (; rows > 0; --rows, out.data += out.row, left.data += left.row)
    multiply_rows<Format, 1>(out, left, right, vectors, steps, accumulate);
}

}  // namespace LEVEL
