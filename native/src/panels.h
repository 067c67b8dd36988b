// Keys and values as the products want them, packed when a thread first meets them and kept for the rows that follow.
#pragma once

#include <algorithm>
#include <vector>

#include "multiply.h"
#include "problem.h"

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

// Rows as columns: row i of `rows` becomes column i of a panel [components][PANEL]; columns without a row are 0.
inline void pack_columns(const char* rows, ptrdiff_t row, int count, int64_t components, uint32_t* panel) {
  constexpr int AT_ONCE = 8;
  int64_t d = 0;
  for (; d + AT_ONCE <= components; d += AT_ONCE)
    for (int i = 0; i < PANEL; ++i) {
      uint32_t part[AT_ONCE] = {};
      if (i < count) std::memcpy(part, rows + i * row + d * 4, sizeof part);
      for (int n = 0; n < AT_ONCE; ++n) panel[(d + n) * PANEL + i] = part[n];
    }
  for (; d < components; ++d)
    for (int i = 0; i < PANEL; ++i) {
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

// Packed panels of one thread. Where there is no room for all of them, later ones take the places of earlier ones.
class Panels {
 public:
  Panels(Arena& arena, int64_t panels, int64_t words)
      : words_(words),
        room_(std::min(panels, std::max<int64_t>(PANELS, MOST / (words * 4)))),
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
