// The kernels of each CPU level. The level is chosen when the library is loaded.
#pragma once

#include <atomic>

#include "arguments.h"

// Each function runs one thread's share of the tasks in that thread's memory; *_bytes returns the size of that memory.
#define DECLARE(LEVEL)                                                                              \
  namespace LEVEL {                                                                                 \
  void forward(const Arguments&, char* memory, std::atomic<int64_t>& next, int64_t blocks_at_once); \
  void merge(const Arguments&);                                                                     \
  void backward(const Arguments&, char* memory, std::atomic<int64_t>& next);                        \
  void look(const Arguments&, char* memory, std::atomic<int64_t>& next);                            \
  int64_t forward_bytes(const Arguments&);                                                          \
  int64_t backward_bytes(const Arguments&);                                                         \
  int64_t statistics_bytes(const Arguments&);                                                       \
  }

DECLARE(plain)
DECLARE(avx2)
DECLARE(avx512)
DECLARE(avx512_bf16)
DECLARE(amx)
#undef DECLARE

struct Kernels {
  decltype(&plain::forward) forward;
  decltype(&plain::merge) merge;
  decltype(&plain::backward) backward;
  decltype(&plain::look) look;
  decltype(&plain::forward_bytes) forward_bytes;
  decltype(&plain::backward_bytes) backward_bytes;
  decltype(&plain::statistics_bytes) statistics_bytes;
};

#define KERNELS(LEVEL)                                                               \
  {LEVEL::forward,       LEVEL::merge,          LEVEL::backward,        LEVEL::look, \
   LEVEL::forward_bytes, LEVEL::backward_bytes, LEVEL::statistics_bytes}

constexpr Kernels LEVELS[] = {KERNELS(plain), KERNELS(avx2), KERNELS(avx512), KERNELS(avx512_bf16), KERNELS(amx)};
#undef KERNELS
