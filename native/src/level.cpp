// Compiled once for each processor level, into a namespace of its own: -DLEVEL=name.
#include "backward.h"
#include "levels.h"
#include "look.h"

namespace LEVEL {

// Calls a template with the kind of numbers that a problem has.
template <class Call>
auto with_numbers(const Problem& p, Call call) {
#if defined(__AMX_BF16__)
  if (p.is_half) {
    [[maybe_unused]] const Tiling while_running;
    return call(Tiles{});
  }
#elif defined(__AVX512BF16__)
  if (p.is_half) return call(Pairs{});
#endif
  return call(Singles{});
}

void forward(const Problem& p, char* memory, std::atomic<int64_t>& next, int64_t blocks_at_once) {
  with_numbers(p, [&](auto kind) { forward_of<decltype(kind)>(p, Arena(memory), next, blocks_at_once); });
}

void merge(const Problem& p) {
  with_numbers(p, [&](auto kind) { merge_of<decltype(kind)>(p); });
}

void backward(const Problem& p, char* memory, std::atomic<int64_t>& next) {
  with_numbers(p, [&](auto kind) { backward_of<decltype(kind)>(p, Arena(memory), next); });
}

void look(const Problem& p, char* memory, std::atomic<int64_t>& next) {
  with_numbers(p, [&](auto kind) { look_of<decltype(kind)>(p, Arena(memory), next); });
}

int64_t forward_bytes(const Problem& p) {
  Arena arena;
  with_numbers(p, [&](auto kind) { Forward<decltype(kind)>(p, arena); });
  return arena.used();
}

int64_t backward_bytes(const Problem& p) {
  Arena arena;
  with_numbers(p, [&](auto kind) { Backward<decltype(kind)>(p, arena); });
  return arena.used();
}

int64_t look_bytes(const Problem& p) {
  Arena arena;
  with_numbers(p, [&](auto kind) { Look<decltype(kind)>(p, arena); });
  return arena.used();
}

}  // namespace LEVEL
