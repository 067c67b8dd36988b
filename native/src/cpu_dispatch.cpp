// Choose among the levels that were compiled: setup.py passes their names, from the lowest on, as -DLEVELS(X)=X(a)X(b).
#include "cpu_dispatch.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#define DECLARE(LEVEL)                                                                              \
  namespace LEVEL {                                                                                 \
  bool is_supported(), has_bf16();                                                                  \
  void forward(const Arguments&, char* memory, std::atomic<int64_t>& next, int64_t blocks_at_once); \
  void merge(const Arguments&);                                                                     \
  void backward(const Arguments&, char* memory, std::atomic<int64_t>& next);                        \
  void statistics(const Arguments&, char* memory, std::atomic<int64_t>& next);                      \
  int64_t forward_bytes(const Arguments&);                                                          \
  int64_t backward_bytes(const Arguments&);                                                         \
  int64_t statistics_bytes(const Arguments&);                                                       \
  }
LEVELS(DECLARE)

// Whether this CPU, and its operating system, run a level. A level is only tried if the ones below it are supported.
namespace plain {
bool is_supported() { return true; }
}  // namespace plain

#if defined(__x86_64__)
namespace avx2 {
bool is_supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
}  // namespace avx2

namespace avx512 {
bool is_supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
}  // namespace avx512

namespace avx512_bf16 {
bool is_supported() { return __builtin_cpu_supports("avx512bf16"); }
}  // namespace avx512_bf16

namespace amx {
bool is_supported() {
#if defined(EMULATED_TILES)
  return true;
#elif defined(__linux__)
  unsigned a, b, c, d;
  constexpr unsigned BF16 = 1u << 22, TILES = 1u << 24, REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & BF16) || !(d & TILES)) return false;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;  // once per process
#else
  return false;
#endif
}
}  // namespace amx
#elif defined(__aarch64__)
namespace neon {
bool is_supported() { return true; }
}  // namespace neon

namespace neon_bf16 {
bool is_supported() {
#if defined(__linux__)
  constexpr unsigned long BF16 = 1ul << 14;  // HWCAP2_BF16
  return getauxval(AT_HWCAP2) & BF16;
#elif defined(__APPLE__)
  int has_bf16 = 0;
  size_t size = sizeof has_bf16;
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &has_bf16, &size, nullptr, 0) == 0 && has_bf16;
#else
  return false;
#endif
}
}  // namespace neon_bf16
#endif

namespace {

struct Level {
  bool (*is_supported)();
  Kernels kernels;
};

#define LEVEL_OF(LEVEL)                                                                                              \
  {LEVEL::is_supported,                                                                                              \
   {#LEVEL, LEVEL::has_bf16, LEVEL::forward, LEVEL::merge, LEVEL::backward, LEVEL::statistics, LEVEL::forward_bytes, \
    LEVEL::backward_bytes, LEVEL::statistics_bytes}},

constexpr Level COMPILED[] = {LEVELS(LEVEL_OF)};

int64_t highest_level() {
  int64_t level = 0;
  while (level + 1 < std::ssize(COMPILED) && COMPILED[level + 1].is_supported()) ++level;
  return level;
}

}  // namespace

int64_t cpu_level() {
  static const int64_t level = [] {
    const char* wanted = std::getenv("SACCADE_CPU_LEVEL");
    const int64_t highest = highest_level();
    return wanted ? std::clamp<int64_t>(std::atoll(wanted), 0, highest) : highest;
  }();
  return level;
}

const Kernels& kernels_at(int64_t level) { return COMPILED[level].kernels; }
