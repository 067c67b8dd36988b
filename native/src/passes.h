// The passes as one thread runs them: it takes tasks from a shared counter.
#pragma once

#include "backward.h"
#include "blocked_backward.h"
#include "blocked_forward.h"

namespace LEVEL {

template <class Format>
using ForwardOf = std::conditional_t<IS_BLOCKED, BlockedForward, Forward<Format>>;

template <class Format>
using BackwardOf = std::conditional_t<IS_BLOCKED, BlockedBackward, Backward<Format>>;

// A task is some blocks of one head, or of heads processed together.
template <class Format>
void forward_of(const Arguments& args, Arena arena, std::atomic<int64_t>& next, int64_t blocks_at_once) {
  ForwardOf<Format> work(args, arena);
  const int64_t runs = (args.plan.blocks + blocks_at_once - 1) / blocks_at_once,
                heads = args.heads / args.heads_per_task;
  for (int64_t task; (task = next.fetch_add(1)) < args.batch * heads * runs * args.key_parts;) {
    const int64_t part = task % args.key_parts, run = task / args.key_parts % runs, head = task / args.key_parts / runs;
    const int64_t b = head / heads, first_head = head % heads * args.heads_per_task;
    const int64_t stop = std::min((run + 1) * blocks_at_once, args.plan.blocks);
    if constexpr (IS_BLOCKED) {
      const int64_t most = work.blocks_at_once(args);
      for (int64_t block = run * blocks_at_once; block < stop; block += most)
        work.run(b, first_head, block, std::min(most, stop - block), part);
    } else {
      for (int64_t block = run * blocks_at_once; block < stop; ++block)
        work.run(RowBlock(args, b, first_head, args.heads_per_task, block), part);
    }
  }
}

// A task is one chunk of the rows of all heads of a key head.
template <class Format>
void backward_of(const Arguments& args, Arena arena, std::atomic<int64_t>& next) {
  BackwardOf<Format> work(args, arena);
  const int64_t kv_heads = args.batch * args.kv_heads, group = args.heads / std::max<int64_t>(1, args.kv_heads);
  for (int64_t task; (task = next.fetch_add(1)) < kv_heads * args.chunks;) {
    const int64_t kv = task / args.chunks, chunk = task % args.chunks;
    const int64_t first = args.plan.blocks * chunk / args.chunks, stop = args.plan.blocks * (chunk + 1) / args.chunks;
    float* grad_k = args.grad_k + (chunk * kv_heads + kv) * args.kv_len * args.dim;
    float* grad_v = args.grad_v + (chunk * kv_heads + kv) * args.kv_len * args.value_dim;
    for (int64_t g = 0; g < group; ++g) {
      const int64_t b = kv / args.kv_heads, head = kv % args.kv_heads * group + g;
      if constexpr (IS_BLOCKED) {
        const int64_t most = work.blocks_at_once(args);
        for (int64_t block = first; block < stop; block += most)
          work.run(b, head, block, std::min(most, stop - block), chunk, grad_k, grad_v);
      } else {
        for (int64_t block = first; block < stop; ++block)
          work.run(RowBlock(args, b, head, 1, block), chunk, grad_k, grad_v);
      }
    }
  }
}

}  // namespace LEVEL
