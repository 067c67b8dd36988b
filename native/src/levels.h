// The same functions for each processor level; which of them run is decided when the library is loaded.
#pragma once

#include <atomic>

#include "problem.h"

// A thread's part of the work, with memory of its own; and how much of that it needs.
#define DECLARE(LEVEL)                                                                            \
  namespace LEVEL {                                                                               \
  void forward(const Problem&, char* memory, std::atomic<int64_t>& next, int64_t blocks_at_once); \
  void merge(const Problem&);                                                                     \
  void backward(const Problem&, char* memory, std::atomic<int64_t>& next);                        \
  void look(const Problem&, char* memory, std::atomic<int64_t>& next);                            \
  int64_t forward_bytes(const Problem&);                                                          \
  int64_t backward_bytes(const Problem&);                                                         \
  int64_t look_bytes(const Problem&);                                                             \
  }

DECLARE(plain)
DECLARE(avx2)
DECLARE(avx512)
DECLARE(avx512_bf16)
DECLARE(amx)
#undef DECLARE

struct Functions {
  decltype(&plain::forward) forward;
  decltype(&plain::merge) merge;
  decltype(&plain::backward) backward;
  decltype(&plain::look) look;
  decltype(&plain::forward_bytes) forward_bytes;
  decltype(&plain::backward_bytes) backward_bytes;
  decltype(&plain::look_bytes) look_bytes;
};

#define FUNCTIONS(LEVEL)                                                       \
  {LEVEL::forward,       LEVEL::merge,          LEVEL::backward,  LEVEL::look, \
   LEVEL::forward_bytes, LEVEL::backward_bytes, LEVEL::look_bytes}

constexpr Functions LEVELS[] = {FUNCTIONS(plain), FUNCTIONS(avx2), FUNCTIONS(avx512), FUNCTIONS(avx512_bf16),
                                FUNCTIONS(amx)};
#undef FUNCTIONS
