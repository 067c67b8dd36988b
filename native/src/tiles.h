// Tiles of a processor (AMX): products of 16 rows, 32 numbers of half precision and 16 columns by one instruction.
//
// Rows are taken as 16 and 8 together, as 24 fall apart; what does not fill tiles is multiplied as pairs are.
#pragma once

#include "multiply.h"

#if defined(__AMX_BF16__)

namespace LEVEL {

struct Tiles : Pairs {};

constexpr int TILE = 16;                                                 // rows, words of a row
constexpr uint8_t HEIGHTS[8] = {TILE, TILE, 8, 8, TILE, 8, TILE, TILE};  // sums 0 to 3, left 4 and 5, right 6 and 7

#if defined(EMULATED_TILES)  // for tests on processors without them

inline thread_local uint32_t emulated[8][TILE][TILE];

struct Tiling {};

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

// While it lives, this thread's tiles have their shapes. Others that use them configure them again.
struct Tiling {
  Tiling() {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    for (int i = 0; i < 8; ++i) shapes.row_bytes[i] = TILE * 4, shapes.rows[i] = HEIGHTS[i];
    asm volatile("ldtilecfg %0" ::"m"(shapes));
  }
  ~Tiling() { asm volatile("tilerelease"); }
};

// Written as instructions: GCC's intrinsics take no constants of templates, and do not say that they touch memory.
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

// 24, 16 or 8 rows, and one or two vectors of columns.
template <bool HIGH, bool LOW, bool TWO>
inline void micro_tiles(Out out, Left<Tiles> left, Right<Tiles> right, ptrdiff_t steps, bool adds) {
  float* const low = out.data + (HIGH ? TILE : 0) * out.row;
  const uint32_t* const low_left = left.data + (HIGH ? TILE : 0) * left.row;
  if (HIGH) adds ? tile_load<0>(out.data, out.row) : tile_zero<0>();
  if (HIGH && TWO) adds ? tile_load<1>(out.data + TILE, out.row) : tile_zero<1>();
  if (LOW) adds ? tile_load<2>(low, out.row) : tile_zero<2>();
  if (LOW && TWO) adds ? tile_load<3>(low + TILE, out.row) : tile_zero<3>();
  for (ptrdiff_t t = 0; t < steps; t += TILE) {
    tile_load<6>(right.data + t * right.step, right.step);
    if (TWO) tile_load<7>(right.data + t * right.step + TILE, right.step);
    if (HIGH) tile_load<4>(left.data + t, left.row), tile_multiply<0, 4, 6>();
    if (HIGH && TWO) tile_multiply<1, 4, 7>();
    if (LOW) tile_load<5>(low_left + t, left.row), tile_multiply<2, 5, 6>();
    if (LOW && TWO) tile_multiply<3, 5, 7>();
  }
  if (HIGH) tile_store<0>(out.data, out.row);
  if (HIGH && TWO) tile_store<1>(out.data + TILE, out.row);
  if (LOW) tile_store<2>(low, out.row);
  if (LOW && TWO) tile_store<3>(low + TILE, out.row);
}

template <bool HIGH, bool LOW>
inline void rows_of_tiles(Out out, Left<Tiles> left, Right<Tiles> right, int vectors, ptrdiff_t steps, bool adds) {
  int n = 0;
  for (; n + 2 <= vectors; n += 2)
    micro_tiles<HIGH, LOW, true>({out.data + n * TILE, out.row}, left, {right.data + n * TILE, right.step}, steps,
                                 adds);
  if (n < vectors)
    micro_tiles<HIGH, LOW, false>({out.data + n * TILE, out.row}, left, {right.data + n * TILE, right.step}, steps,
                                  adds);
}

template <>
inline void multiply<Tiles>(Out out, Left<Tiles> left, Right<Tiles> right, int rows, int vectors, ptrdiff_t steps,
                            bool adds) {
  const auto go_on = [&](int done) { out.data += done * out.row, left.data += done * left.row, rows -= done; };
  if (left.step == 1 && steps % TILE == 0) {
    for (; rows >= 24; go_on(24)) rows_of_tiles<true, true>(out, left, right, vectors, steps, adds);
    if (rows >= 16) rows_of_tiles<true, false>(out, left, right, vectors, steps, adds), go_on(16);
    if (rows >= 8) rows_of_tiles<false, true>(out, left, right, vectors, steps, adds), go_on(8);
  }
  const Left<Pairs> rest{left.data, left.row, left.step};
  multiply<Pairs>(out, rest, {right.data, right.step}, rows, vectors, steps, adds);
}

}  // namespace LEVEL

#endif
