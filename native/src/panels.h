// Keys and values as the products want them, packed when a thread first meets them and kept for the rows that follow.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "problem.h"
#include "tiles.h"

namespace LEVEL {

// Memory of one thread, given out piece by piece; without any it counts what would be given out.
class Arena {
 public:
  explicit Arena(char* memory = nullptr) : memory_(memory) {}

  template <class T>
  T* take(int64_t count) {
    T* found = reinterpret_cast<T*>(memory_ + used_);
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return found;
  }

  int64_t used() const { return used_; }

 private:
  char* memory_;
  int64_t used_ = 0;
};

// Asks for rows that are needed soon.
inline void expect(const char* rows, ptrdiff_t row, int count, int64_t bytes) {
  for (int i = 0; i < count; ++i)
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(rows + i * row + at, 0, 2);
}

// Four components of each of LANES / 4 rows that stand 4 apart.
inline Words fours(const char* rows, ptrdiff_t row) {
#if defined(__AVX512F__)
  const auto four = [&](int n) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + 4 * n * row)); };
  const __m512i low = _mm512_inserti32x4(_mm512_castsi128_si512(four(0)), four(1), 1);
  return (Words)_mm512_inserti32x4(_mm512_inserti32x4(low, four(2), 2), four(3), 3);
#else
  Words found;
  for (int n = 0; n < LANES / 4; ++n) std::memcpy(reinterpret_cast<char*>(&found) + 16 * n, rows + 4 * n * row, 16);
  return found;
#endif
}

// Lanes of two vectors in turn: the first two of every four, or the last two; one by one, or two by two.
template <bool LAST, int TOGETHER>
inline Words in_turn(Words a, Words b) {
  Words lane;
  for (int i = 0; i < LANES; ++i) {
    const int from = TOGETHER == 1 ? i % 2 * LANES + i % 4 / 2 : i % 4 / 2 * LANES + i % 2;
    lane[i] = i / 4 * 4 + (LAST ? 2 : 0) + from;
  }
  return __builtin_shuffle(a, b, lane);
}

// Rows as columns: row i of `rows` becomes column i of a panel [components][PANEL]; columns without a row are 0.
// Components come in fours.
inline void pack_columns(const char* rows, ptrdiff_t row, int count, int64_t components, uint32_t* panel) {
  int i = 0;
  for (; i + LANES <= count; i += LANES) {
    for (int64_t d = 0; d < components; d += 4) {
      const char* from = rows + i * row + d * 4;
      // A processor does not foresee what is read across rows: those of the next panel are asked for, a quarter each
      // time.
      for (int n = 0; n < LANES; n += 4)
        __builtin_prefetch(rows + (i + n + d / 4 % 4 + PANEL) * row + d / 16 * 64, 0, 2);
      const Words a = fours(from, row), b = fours(from + row, row);
      const Words c = fours(from + 2 * row, row), e = fours(from + 3 * row, row);
      const Words ab = in_turn<false, 1>(a, b), ce = in_turn<false, 1>(c, e);
      const Words later_ab = in_turn<true, 1>(a, b), later_ce = in_turn<true, 1>(c, e);
      uint32_t* to = panel + d * PANEL + i;
      store(to, in_turn<false, 2>(ab, ce)), store(to + PANEL, in_turn<true, 2>(ab, ce));
      store(to + 2 * PANEL, in_turn<false, 2>(later_ab, later_ce));
      store(to + 3 * PANEL, in_turn<true, 2>(later_ab, later_ce));
    }
  }
  for (; i < PANEL; ++i)
    for (int64_t d = 0; d < components; ++d) {
      panel[d * PANEL + i] = 0;
      if (i < count) std::memcpy(panel + d * PANEL + i, rows + i * row + d * 4, 4);
    }
}

// Rows of half precision two by two: [PANEL / 2][width] words, of which each holds a component of both rows.
inline void pack_pairs(const char* rows, ptrdiff_t row, int count, int64_t width, uint32_t* panel) {
  for (int i = 0; i < PANEL; i += 2) {
    const uint16_t* one = reinterpret_cast<const uint16_t*>(rows + i * row);
    const uint16_t* other = reinterpret_cast<const uint16_t*>(rows + (i + 1) * row);
    uint32_t* to = panel + i / 2 * width;
    if (i + 1 < count)
      for (int64_t d = 0; d < width; ++d) to[d] = one[d] | static_cast<uint32_t>(other[d]) << 16;
    else if (i < count)
      for (int64_t d = 0; d < width; ++d) to[d] = one[d];
    else
      std::memset(to, 0, width * 4);
  }
}

// Packed panels of one thread, those that are met again. Where there is no room for all of them, later ones take the
// places of earlier ones.
class Panels {
 public:
  Panels(Arena& arena, const Problem& p, int64_t words)
      : words_(words),
        room_(p.meets_keys_once() ? 1 : std::min(p.panels(), std::max<int64_t>(PANELS, MOST / (words * 4 + 1)))),
        memory_(arena.take<uint32_t>(room_ * words)),
        held_(room_, -1) {}

  // The panel of this number (which tells heads apart too); `fill` writes it if it is not there.
  template <class Fill>
  uint32_t* get(int64_t number, int64_t panel, Fill fill) {
    const int64_t place = panel % room_;
    uint32_t* found = memory_ + place * words_;
    if (held_[place] != number) fill(found), held_[place] = number;
    return found;
  }

 private:
  static constexpr int64_t MOST = 64 << 20;
  int64_t words_, room_;
  uint32_t* memory_;
  std::vector<int64_t> held_;
};

}  // namespace LEVEL
