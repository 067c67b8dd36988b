// bfloat16 products with AMX: one instruction multiplies 16 rows x 32 components by 32 components x 16 columns.
//
// A block of 24 rows is split into tiles of 16 and 8 rows. Rows and steps that do not fill a tile use BFloat16.
#pragma once

#include "microkernel.h"

#if defined(__AMX_BF16__)

namespace LEVEL {

struct BFloat16Tiles : BFloat16 {};

constexpr int TILE = 16;                                                 // rows of a tile, and 32-bit words of a row
constexpr uint8_t HEIGHTS[8] = {TILE, TILE, 8, 8, TILE, 8, TILE, TILE};  // tiles 0-3: sums; 4, 5: left; 6, 7: right

#if defined(EMULATED_TILES)  // for tests on processors without AMX

inline thread_local uint32_t emulated[8][TILE][TILE];

struct TileConfiguration {};

template <int T>
inline void tile_zero() {
  std::memset(emulated[T], 0, sizeof emulated[T]);
}

template <int T, class Word>
inline void tile_load(const Word* from, ptrdiff_t row) {
  for (int i = 0; i < HEIGHTS[T]; ++i) std::memcpy(emulated[T][i], from + i * row, TILE * 4);
}

template <int T>
inline void tile_store(float* to, ptrdiff_t row) {
  for (int i = 0; i < HEIGHTS[T]; ++i) std::memcpy(to + i * row, emulated[T][i], TILE * 4);
}

template <int SUM, int LEFT, int RIGHT>
inline void tile_multiply() {
  const auto half = [](uint32_t word, int n) {
    const uint32_t bits = n ? word & 0xFFFF0000 : word << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  };
  for (int i = 0; i < HEIGHTS[SUM]; ++i)
    for (int j = 0; j < TILE; ++j) {
      float total;
      std::memcpy(&total, &emulated[SUM][i][j], 4);
      for (int t = 0; t < TILE; ++t)
        for (int n = 0; n < 2; ++n) total += half(emulated[LEFT][i][t], n) * half(emulated[RIGHT][t][j], n);
      std::memcpy(&emulated[SUM][i][j], &total, 4);
    }
}

#else

// Configure this thread's tiles, and release them at the end of the scope. Other AMX code (oneDNN) does the same.
struct TileConfiguration {
  TileConfiguration() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    for (int i = 0; i < 8; ++i) shapes.row_bytes[i] = TILE * 4, shapes.rows[i] = HEIGHTS[i];
    asm volatile("ldtilecfg %0" ::"m"(shapes));
  }
  ~TileConfiguration() { asm volatile("tilerelease"); }
};

// Inline assembly: GCC's intrinsics accept no template constants and do not tell the compiler which memory they access.
template <int T>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}

template <int T, class Word>
inline void tile_load(const Word* from, ptrdiff_t row) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row * 4), "i"(T) : "memory");
}

template <int T>
inline void tile_store(float* to, ptrdiff_t row) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(row * 4), "i"(T) : "memory");
}

template <int SUM, int LEFT, int RIGHT>
inline void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(LEFT), "i"(RIGHT));
}

#endif

// Multiply 24 (UPPER and LOWER), 16 (UPPER) or 8 (LOWER) rows by one or two vectors of columns.
template <bool UPPER, bool LOWER, bool TWO>
inline void micro_kernel_tiles(Out out, Left<BFloat16Tiles> left, Right<BFloat16Tiles> right, ptrdiff_t steps,
                               bool accumulate) {
  float* const low = out.data + (UPPER ? TILE : 0) * out.row;
  const uint32_t* const low_left = left.data + (UPPER ? TILE : 0) * left.row;
  if (UPPER) accumulate ? tile_load<0>(out.data, out.row) : tile_zero<0>();
  if (UPPER && TWO) accumulate ? tile_load<1>(out.data + TILE, out.row) : tile_zero<1>();
  if (LOWER) accumulate ? tile_load<2>(low, out.row) : tile_zero<2>();
  if (LOWER && TWO) accumulate ? tile_load<3>(low + TILE, out.row) : tile_zero<3>();
  for (ptrdiff_t t = 0; t < steps; t += TILE) {
    tile_load<6>(right.data + t * right.step, right.step);
    if (TWO) tile_load<7>(right.data + t * right.step + TILE, right.step);
    if (UPPER) tile_load<4>(left.data + t, left.row), tile_multiply<0, 4, 6>();
    if (UPPER && TWO) tile_multiply<1, 4, 7>();
    if (LOWER) tile_load<5>(low_left + t, left.row), tile_multiply<2, 5, 6>();
    if (LOWER && TWO) tile_multiply<3, 5, 7>();
  }
  if (UPPER) tile_store<0>(out.data, out.row);
  if (UPPER && TWO) tile_store<1>(out.data + TILE, out.row);
  if (LOWER) tile_store<2>(low, out.row);
  if (LOWER && TWO) tile_store<3>(low + TILE, out.row);
}

template <bool UPPER, bool LOWER>
inline void multiply_tile_rows(Out out, Left<BFloat16Tiles> left, Right<BFloat16Tiles> right, int vectors,
                               ptrdiff_t steps, bool accumulate) {
  int n = 0;
  for (; n + 2 <= vectors; n += 2)
    micro_kernel_tiles<UPPER, LOWER, true>({out.data + n * TILE, out.row}, left, {right.data + n * TILE, right.step},
                                           steps, accumulate);
  if (n < vectors)
    micro_kernel_tiles<UPPER, LOWER, false>({out.data + n * TILE, out.row}, left, {right.data + n * TILE, right.step},
                                            steps, accumulate);
}

template <>
inline void multiply<BFloat16Tiles>(Out out, Left<BFloat16Tiles> left, Right<BFloat16Tiles> right, int rows,
                                    int vectors, ptrdiff_t steps, bool accumulate) {
  const auto advance = [&](int done) { out.data += done * out.row, left.data += done * left.row, rows -= done; };
  if (left.step == 1 && steps % TILE == 0) {
    while (rows >= 24) multiply_tile_rows<true, true>(out, left, right, vectors, steps, accumulate), advance(24);
    if (rows >= 16) multiply_tile_rows<true, false>(out, left, right, vectors, steps, accumulate), advance(16);
    if (rows >= 8) multiply_tile_rows<false, true>(out, left, right, vectors, steps, accumulate), advance(8);
  }
  const Left<BFloat16> rest{left.data, left.row, left.step};
  multiply<BFloat16>(out, rest, {right.data, right.step}, rows, vectors, steps, accumulate);
}

}  // namespace LEVEL

#endif
