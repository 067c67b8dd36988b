// How much work is done at a time, so that it stays in the caches of the CPU level.
#pragma once

#include "arguments.h"
#include "simd.h"

namespace LEVEL {

// AVX2: 16 registers, and often no more than 512 KiB of L2 cache. This level processes several blocks of rows per visit
// to a group of panels, and skips the keys of a panel that no row of a strip may attend to. SSE2 also has 16
// registers, but needs one more for each product: it became 4 to 16 % slower this way.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool IS_BLOCKED = true;
#else
constexpr bool IS_BLOCKED = false;
#endif

constexpr int MAX_PANELS = 16;  // panels of a group at most

// Panels that the forward pass processes together: the scores of a block stay in the L1 cache (21 KiB), or in L1 and
// L2.
constexpr int PANELS = IS_BLOCKED ? 3 : MAX_PANELS;

// Between rows of scores; a power of 2 would map all rows to the same cache sets.
constexpr int STRIDE = PANELS * PANEL + 32;

// Blocks of rows that read a group of panels while it is in the L2 cache. Their sums take at most SUM_BYTES, and the
// group's values, copied into tiles, TILE_BYTES: with the scores no more than those of 16 panels would.
constexpr int BLOCKS = IS_BLOCKED ? 8 : 1;
constexpr int64_t SUM_BYTES = 30 << 10, TILE_BYTES = 64 << 10;

// Keys that lie side by side in a packed panel: as many as a tile multiplies, so that it reads memory in order, or all.
constexpr int TILE_KEYS = IS_BLOCKED ? 2 * LANES : PANEL;

// The backward pass processes one panel at a time with blocks whose rows of queries and output gradients, in tiles,
// take at most ROW_BYTES. Half a line is left between its rows of weights.
constexpr int64_t ROW_BYTES = 48 << 10;
constexpr int BACKWARD_STRIDE = PANEL + 16;

constexpr int STRIP = 6;  // rows that the micro-kernel multiplies at a time

}  // namespace LEVEL
