// Keys and values packed for the micro-kernel. Each thread packs a panel on first use and reuses it for later blocks.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "amx.h"
#include "blocking.h"

namespace LEVEL {

// A bump allocator over one thread's memory. Without memory it only counts bytes.
class Arena {
 public:
  explicit Arena(char* memory = nullptr) : memory_(memory) {}

  template <class T>
  T* take(int64_t count) {
    T* result = reinterpret_cast<T*>(memory_ + used_);
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return result;
  }

  int64_t used() const { return used_; }

 private:
  char* memory_;
  int64_t used_ = 0;
};

// Prefetch rows into the L2 cache.
inline void prefetch_rows(const char* rows, ptrdiff_t row, int count, int64_t bytes) {
  for (int i = 0; i < count; ++i)
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(rows + i * row + at, 0, 2);
}

// Load four components of each of LANES / 4 rows: rows 0, 4, 8, ...
inline Words load_blocks_of_4(const char* rows, ptrdiff_t row) {
#if defined(__AVX512F__)
  const auto load_row = [&](int n) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + 4 * n * row)); };
  const __m512i low = _mm512_inserti32x4(_mm512_castsi128_si512(load_row(0)), load_row(1), 1);
  return (Words)_mm512_inserti32x4(_mm512_inserti32x4(low, load_row(2), 2), load_row(3), 3);
#else
  Words result;
  for (int n = 0; n < LANES / 4; ++n) std::memcpy(reinterpret_cast<char*>(&result) + 16 * n, rows + 4 * n * row, 16);
  return result;
#endif
}

// Interleave the first (or LAST) two lanes of every four of two vectors, one by one or two GROUP.
template <bool LAST, int GROUP>
inline Words interleave(Words a, Words b) {
  constexpr auto lane = [](int i) {
    const int from = GROUP == 1 ? i % 2 * LANES + i % 4 / 2 : i % 4 / 2 * LANES + i % 2;
    return i / 4 * 4 + (LAST ? 2 : 0) + from;
  };
#if __has_builtin(__builtin_shufflevector)
  return [&]<int... I>(std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, lane(I)...);
  }(std::make_integer_sequence<int, LANES>());
#else  // g++ 11
  Words lanes;
  for (int i = 0; i < LANES; ++i) lanes[i] = lane(i);
  return __builtin_shuffle(a, b, lanes);
#endif
}

// Transpose `count` rows into a panel [PANEL / WIDTH][components][WIDTH]; missing columns are 0. `components` is a
// multiple of 4.
template <int WIDTH = PANEL>
inline void pack_transposed(const char* rows, ptrdiff_t row, int count, int64_t components, uint32_t* panel) {
  const auto at = [=](int64_t d, int i) { return panel + (i / WIDTH * components + d) * WIDTH + i % WIDTH; };
  int i = 0;
  for (; i + LANES <= count; i += LANES) {
    for (int64_t d = 0; d < components; d += 4) {
      const char* from = rows + i * row + d * 4;
      // The hardware prefetcher does not follow reads across rows: prefetch the next panel, a quarter each time.
      for (int n = 0; n < LANES; n += 4)
        __builtin_prefetch(rows + (i + n + d / 4 % 4 + PANEL) * row + d / 16 * 64, 0, 2);
      const Words a = load_blocks_of_4(from, row), b = load_blocks_of_4(from + row, row);
      const Words c = load_blocks_of_4(from + 2 * row, row), e = load_blocks_of_4(from + 3 * row, row);
      const Words ab = interleave<false, 1>(a, b), ce = interleave<false, 1>(c, e);
      const Words later_ab = interleave<true, 1>(a, b), later_ce = interleave<true, 1>(c, e);
      uint32_t* to = at(d, i);
      store(to, interleave<false, 2>(ab, ce)), store(to + WIDTH, interleave<true, 2>(ab, ce));
      store(to + 2 * WIDTH, interleave<false, 2>(later_ab, later_ce));
      store(to + 3 * WIDTH, interleave<true, 2>(later_ab, later_ce));
    }
  }
  for (; i < PANEL; ++i)
    for (int64_t d = 0; d < components; ++d) {
      *at(d, i) = 0;
      if (i < count) std::memcpy(at(d, i), rows + i * row + d * 4, 4);
    }
}

// Copy `count` rows into tiles [width / TILE_KEYS][height][TILE_KEYS], so that products read memory in order.
inline void pack_tiles(const char* rows, ptrdiff_t row, int count, int64_t width, int64_t height, float* tiles) {
  for (int i = 0; i < count; ++i)
    for (int64_t d = 0; d < width; d += LANES)
      store(tiles + (d / TILE_KEYS * height + i) * TILE_KEYS + d % TILE_KEYS, load(rows + i * row + d * 4));
}

// Pack pairs of bfloat16 rows into [PANEL / 2][width] words; each word holds one component of both rows.
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

// The packed panels of one thread: a direct-mapped cache of at most MAX_BYTES.
class PanelCache {
 public:
  PanelCache(Arena& arena, const Arguments& args, int64_t words)
      : PanelCache(arena, words,
                   args.reads_keys_once()
                       ? 1
                       : std::min(args.panels(), std::max<int64_t>(MAX_PANELS, MAX_BYTES / (words * 4 + 1)))) {}

  PanelCache(Arena& arena, int64_t words, int64_t capacity)
      : words_(words), capacity_(capacity), memory_(arena.take<uint32_t>(capacity_ * words)), numbers_(capacity_, -1) {}

  // Return the panel with this number (unique over batch, heads and panels); call `fill` if it is not cached.
  template <class Fill>
  uint32_t* get(int64_t number, int64_t panel, Fill fill) {
    const int64_t place = panel % capacity_;
    uint32_t* result = memory_ + place * words_;
    if (numbers_[place] != number) fill(result), numbers_[place] = number;
    return result;
  }

 private:
  static constexpr int64_t MAX_BYTES = 64 << 20;
  int64_t words_, capacity_;
  uint32_t* memory_;
  std::vector<int64_t> numbers_;
};

}  // namespace LEVEL
