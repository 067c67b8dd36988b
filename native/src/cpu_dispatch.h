// The kernels of each CPU level. The level is chosen when the library is loaded.
#pragma once

#include <atomic>

#include "arguments.h"

// Each function runs one thread's share of the tasks in that thread's memory; *_bytes returns the size of that memory.
struct Kernels {
  const char* level;
  bool (*has_bf16)();  // whether arguments may be bfloat16; float32 always is
  void (*forward)(const Arguments&, char* memory, std::atomic<int64_t>& next, int64_t blocks_at_once);
  void (*merge)(const Arguments&);
  void (*backward)(const Arguments&, char* memory, std::atomic<int64_t>& next);
  void (*statistics)(const Arguments&, char* memory, std::atomic<int64_t>& next);
  int64_t (*forward_bytes)(const Arguments&);
  int64_t (*backward_bytes)(const Arguments&);
  int64_t (*statistics_bytes)(const Arguments&);
};

// Return the highest level that was compiled and that this CPU runs, or the lower one that SACCADE_CPU_LEVEL selects.
int64_t cpu_level();

const Kernels& kernels_at(int64_t level);
