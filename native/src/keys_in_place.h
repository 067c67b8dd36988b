// Products of one or two queries with float32 keys and values in memory: panels that are read once are not worth
// packing.
#pragma once

#include "arguments.h"
#include "microkernel.h"

namespace LEVEL {

constexpr int FEW_ROWS = 2;                    // with more, packing is faster
constexpr bool READS_IN_PLACE = VECTORS == 4;  // with fewer registers, packing is faster

// Store the sums over the lanes of four vectors.
inline void store_lane_sums(float* to, const Floats (&sums)[4]) {
#if defined(__AVX512F__)
  const __m512 a = (__m512)sums[0], b = (__m512)sums[1], c = (__m512)sums[2], d = (__m512)sums[3];
  const __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
  const __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
  const __m512 low = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), high = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
  const __m512 all = _mm512_add_ps(low, high);  // four partial sums of each vector
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#else
  for (int n = 0; n < 4; ++n) to[n] = reduce_sum(sums[n]);
#endif
}

// Compute the scores [ROWS, PANEL] of ROWS queries with the `count` keys of a panel; those of missing keys are 0. All
// strides are in bytes but for those of the queries and scores. `steps` is a multiple of LANES. Values are prefetched.
template <int ROWS>
void score_in_place(Out scores, Left<Float32> query, const char* keys, ptrdiff_t key_row, const char* values,
                    ptrdiff_t value_row, int64_t value_bytes, int count, ptrdiff_t steps) {
  constexpr int KEYS = 4, AHEAD = 16;
  int j = 0;
  for (; j + KEYS <= count; j += KEYS) {
    const char* from = keys + j * key_row;
    for (int n = 0; n < KEYS; ++n) {
      for (int64_t byte = 0; byte < steps * 4; byte += 64)
        __builtin_prefetch(from + (n + AHEAD) * key_row + byte, 0, 3);
      for (int64_t byte = 0; byte < value_bytes; byte += 64)
        __builtin_prefetch(values + (j + n) * value_row + byte, 0, 2);
    }
    Floats sums[ROWS][KEYS] = {};
    for (ptrdiff_t t = 0; t < steps; t += LANES)
#pragma GCC unroll 8
      for (int n = 0; n < KEYS; ++n)
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i)
          sums[i][n] += load(query.data + i * query.row + t) * load(from + n * key_row + t * 4);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) store_lane_sums(scores.data + i * scores.row + j, sums[i]);
  }
  for (; j < PANEL; ++j)
    for (int i = 0; i < ROWS; ++i) {
      Floats sum{};
      for (ptrdiff_t t = 0; t < steps && j < count; t += LANES)
        sum += load(query.data + i * query.row + t) * load(keys + j * key_row + t * 4);
      scores.data[i * scores.row + j] = reduce_sum(sum);
    }
}

// Multiply one or two rows of weights by values, as `multiply` does, but read 8 vectors of each value at a time.
inline void add_values_in_place(Out out, Left<Float32> weights, Right<Float32> values, int rows, int vectors,
                                ptrdiff_t steps, bool accumulate) {
  for (int n = 0; n < vectors; n += 8) {
    const Out to{out.data + n * LANES, out.row};
    const Right<Float32> from{values.data + n * LANES, values.step};
    if (rows == 2)
      micro_kernel<Float32, 2, 8>(to, weights, from, steps, accumulate);
    else
      micro_kernel<Float32, 1, 8>(to, weights, from, steps, accumulate);
  }
}

}  // namespace LEVEL
