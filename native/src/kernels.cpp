// Compiled once per CPU level, each into its namespace: -DLEVEL=name.
#include "passes.h"
#include "statistics.h"

namespace LEVEL {

// Call a template with the element type of the arguments.
template <class Call>
auto with_element_type(const Arguments& args, Call call) {
#if defined(__AMX_BF16__)
  if (args.is_bf16) {
    [[maybe_unused]] const TileConfiguration configuration;
    return call(BFloat16Tiles{});
  }
#elif defined(HAS_BF16)
  if (args.is_bf16) return call(BFloat16{});
#endif
  return call(Float32{});
}

bool has_bf16() {
#if defined(HAS_BF16)
  return true;
#else
  return false;
#endif
}

void forward(const Arguments& args, char* memory, std::atomic<int64_t>& next, int64_t blocks_at_once) {
  with_element_type(args, [&](auto kind) { forward_of<decltype(kind)>(args, Arena(memory), next, blocks_at_once); });
}

void merge(const Arguments& args) {
  with_element_type(args, [&](auto kind) { merge_of<decltype(kind)>(args); });
}

void backward(const Arguments& args, char* memory, std::atomic<int64_t>& next) {
  with_element_type(args, [&](auto kind) { backward_of<decltype(kind)>(args, Arena(memory), next); });
}

void statistics(const Arguments& args, char* memory, std::atomic<int64_t>& next) {
  with_element_type(args, [&](auto kind) { statistics_of<decltype(kind)>(args, Arena(memory), next); });
}

int64_t forward_bytes(const Arguments& args) {
  Arena arena;
  with_element_type(args, [&](auto kind) { ForwardOf<decltype(kind)>(args, arena); });
  return arena.used();
}

int64_t backward_bytes(const Arguments& args) {
  Arena arena;
  with_element_type(args, [&](auto kind) { BackwardOf<decltype(kind)>(args, arena); });
  return arena.used();
}

int64_t statistics_bytes(const Arguments& args) {
  Arena arena;
  with_element_type(args, [&](auto kind) { Statistics<decltype(kind)>(args, arena); });
  return arena.used();
}

}  // namespace LEVEL
