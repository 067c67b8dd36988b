// The operations that torch calls: they translate tensors into Arguments and run the kernels on torch's threads.
#if defined(__linux__)
#include <sys/mman.h>
#endif
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <algorithm>

#include <cstring>
#include <initializer_list>
#include <optional>
#include <tuple>
#include <vector>

#include "cpu_dispatch.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

View view(const Tensor& x) {
  const int64_t item = x.scalar_type() == ScalarType::Float ? 4 : 2;
  return {static_cast<char*>(x.data_ptr()), x.size(0) > 1 ? x.stride(0) * item : 0,
          x.size(1) > 1 ? x.stride(1) * item : 0, x.size(2) > 1 ? x.stride(2) * item : 0};
}

template <class T>
const T* data(const std::optional<Tensor>& x) {
  return x ? static_cast<const T*>(x->data_ptr()) : nullptr;
}

// Request pages of 2 MB for a new, large tensor: the first write to it then takes a fraction of the time.
Tensor on_huge_pages(Tensor x) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t PAGE = 2 << 20, FEW = 16;  // smaller tensors reuse memory that has pages already
  const uintptr_t start = reinterpret_cast<uintptr_t>(x.data_ptr()),
                  bytes = x.numel() * (x.scalar_type() == ScalarType::Float ? 4 : 2),
                  first = (start + PAGE - 1) / PAGE * PAGE, last = (start + bytes) / PAGE * PAGE;
  if (bytes >= FEW * PAGE) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
  return x;
}

int64_t bytes_per_thread(int64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

int64_t scratch_bytes(int64_t bytes) { return torch::stable::get_num_threads() * bytes_per_thread(bytes) + 64; }

// Run `work` once per thread in one parallel region, each with its slice of a scratch buffer and a shared counter.
template <class Work>
void run_parallel(const Tensor& like, int64_t bytes, Work work) {
  std::atomic<int64_t> next{0};
  const int64_t threads = torch::stable::get_num_threads(), each = bytes_per_thread(bytes);
  Tensor scratch = torch::stable::new_empty(like, {scratch_bytes(bytes)}, ScalarType::Byte);
  char* memory = static_cast<char*>(scratch.data_ptr());
  memory += (64 - reinterpret_cast<uintptr_t>(memory) % 64) % 64;
  torch::stable::parallel_for(0, threads, 1, [&](int64_t thread, int64_t) { work(memory + thread * each, next); });
}

// The arguments that forward and backward share.
struct CallArguments {
  Tensor q, k, v, starts, runs, spans;
  std::optional<Tensor> bits, visible, bias, row_words, column_words;
  bool by_distance;
  double scale, softcap, dropout_scale;
  int64_t threshold;

  Arguments arguments() const {
    Arguments args{};
    args.batch = q.size(0), args.heads = q.size(1), args.q_len = q.size(2), args.dim = q.size(3);
    args.kv_heads = k.size(1), args.kv_len = k.size(2), args.value_dim = v.size(3);
    args.heads_per_task = 1, args.key_parts = 1;
    args.is_bf16 = q.scalar_type() == ScalarType::BFloat16;
    args.q = view(q), args.k = view(k), args.v = view(v);
    Plan& plan = args.plan;
    plan.items = spans.size(0), plan.blocks = (args.q_len + ROWS - 1) / ROWS, plan.spans_per_row = spans.size(2);
    plan.starts = static_cast<const int32_t*>(starts.data_ptr());
    plan.runs = static_cast<const Run*>(runs.data_ptr());
    plan.spans = static_cast<const int32_t*>(spans.data_ptr());
    plan.bits = data<uint64_t>(bits);
    if (bits) plan.bits_batch = bits->size(0) > 1 ? bits->stride(0) : 0;
    if (bits) plan.bits_head = bits->size(1) > 1 ? bits->stride(1) : 0;
    plan.visible = data<uint64_t>(visible);
    args.scale = static_cast<float>(scale), args.softcap = static_cast<float>(softcap);
    if (bias) args.bias = view(*bias);
    if (by_distance) args.bias.data += (args.q_len - 1) * 4, args.bias.row = -4;
    args.row_words = data<int32_t>(row_words), args.column_words = data<int32_t>(column_words);
    if (column_words) args.column_words_batch = column_words->size(0) > 1 ? args.kv_len : 0;
    args.threshold = static_cast<int32_t>(threshold), args.dropout_scale = static_cast<float>(dropout_scale);
    return args;
  }
};

#define PLAN_PARAMETERS                                                                      \
  const Tensor &starts, const Tensor &runs, const Tensor &spans, std::optional<Tensor> bits, \
      std::optional<Tensor> visible, std::optional<Tensor> bias, bool by_distance, double scale, double softcap

#define CALL_PARAMETERS                                                                                \
  const Tensor &q, const Tensor &k, const Tensor &v, PLAN_PARAMETERS, std::optional<Tensor> row_words, \
      std::optional<Tensor> column_words, int64_t threshold, double dropout_scale

#define CALL_ARGUMENTS                                                                                           \
  CallArguments{                                                                                                 \
      q,           k,     v,       starts,        runs,     spans, bits, visible, bias, row_words, column_words, \
      by_distance, scale, softcap, dropout_scale, threshold}                                                     \
      .arguments()

// For few query rows, group heads that share keys and split the keys; independent of the number of threads.
void split_work(Arguments& args) {
  constexpr int64_t TASKS = 16, MIN_PANELS = 8;  // tasks wanted, and panels per part
  const int64_t group = args.heads / std::max<int64_t>(1, args.kv_heads);
  for (int64_t n = 2; n <= group && n * args.q_len <= ROWS; ++n)
    if (group % n == 0) args.heads_per_task = static_cast<int>(n);
  const int64_t tasks = std::max<int64_t>(1, args.batch * args.heads / args.heads_per_task);
  if (args.plan.blocks == 1)
    args.key_parts = std::max<int64_t>(1, std::min((TASKS + tasks - 1) / tasks, args.panels() / MIN_PANELS));
}

int64_t partial_size(const Arguments& args) {
  return args.key_parts > 1 ? args.key_parts * args.batch * args.heads * args.q_len * (args.value_dim + 2) : 0;
}

std::tuple<Tensor, Tensor> forward(CALL_PARAMETERS) {
  Arguments args = CALL_ARGUMENTS;
  // [batch, len, heads, width] in memory, so that heads merge without a copy.
  Tensor out = torch::stable::transpose(
      on_huge_pages(torch::stable::new_empty(q, {args.batch, args.q_len, args.heads, args.value_dim})), 1, 2);
  Tensor lse = torch::stable::new_empty(q, {args.batch, args.heads, args.q_len}, ScalarType::Float);
  args.out = view(out), args.lse = static_cast<float*>(lse.data_ptr());
  split_work(args);
  Tensor partial = torch::stable::new_empty(q, {partial_size(args)}, ScalarType::Float);
  if (args.key_parts > 1) args.partial = static_cast<float*>(partial.data_ptr());
  const int64_t each = args.batch * args.heads * args.plan.blocks / (8 * torch::stable::get_num_threads());
  const int64_t blocks_at_once = std::max<int64_t>(1, std::min<int64_t>({each, args.plan.blocks, 32}));
  const Kernels& kernels = kernels_at(cpu_level());
  run_parallel(q, kernels.forward_bytes(args),
               [&](char* memory, std::atomic<int64_t>& next) { kernels.forward(args, memory, next, blocks_at_once); });
  if (args.partial) kernels.merge(args);
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(CALL_PARAMETERS, const Tensor& grad_out, const Tensor& lse,
                                                    const Tensor& delta, int64_t chunks, int64_t table) {
  Arguments args = CALL_ARGUMENTS;
  const auto empty = [&](std::initializer_list<int64_t> sizes) {
    return on_huge_pages(torch::stable::new_empty(q, std::vector<int64_t>(sizes), ScalarType::Float));
  };
  const auto zeros = [&](std::initializer_list<int64_t> sizes) {
    Tensor x = empty(sizes);
    return torch::stable::zero_(x);
  };
  args.chunks = chunks, args.table = table > 0 ? table : 0;
  Tensor grad_q = empty({args.batch, args.heads, args.q_len, args.dim});
  Tensor grad_k = zeros({chunks, args.batch, args.kv_heads, args.kv_len, args.dim});
  Tensor grad_v = zeros({chunks, args.batch, args.kv_heads, args.kv_len, args.value_dim});
  Tensor grad_bias = table < 0 ? zeros({0})
                     : table == 0
                         ? empty({args.batch, args.heads, args.q_len, args.kv_len})  // each task clears its rows
                         : zeros({chunks, args.batch, args.heads, table});
  args.grad_out = view(grad_out), args.lse = static_cast<float*>(lse.data_ptr());
  args.delta = static_cast<const float*>(delta.data_ptr());
  args.grad_q = static_cast<float*>(grad_q.data_ptr()), args.grad_k = static_cast<float*>(grad_k.data_ptr());
  args.grad_v = static_cast<float*>(grad_v.data_ptr());
  args.grad_bias = table < 0 ? nullptr : static_cast<float*>(grad_bias.data_ptr());
  const Kernels& kernels = kernels_at(cpu_level());
  run_parallel(q, kernels.backward_bytes(args),
               [&](char* memory, std::atomic<int64_t>& next) { kernels.backward(args, memory, next); });
  return {grad_q, grad_k, grad_v, grad_bias};
}

// Return the largest number of panels that a block of rows needs.
int64_t max_panels(const Plan& plan) {
  int64_t max = 0;
  for (int64_t block = 0; block < plan.items * plan.blocks; ++block) {
    int64_t panels = 0;
    for (int32_t n = plan.starts[block]; n < plan.starts[block + 1]; ++n)
      panels += plan.runs[n].stop - plan.runs[n].first;
    max = std::max(max, panels);
  }
  return max;
}

// Return the statistics of each row, and the column sums of each chunk of rows.
std::tuple<Tensor, Tensor> look(const Tensor& q, const Tensor& k, PLAN_PARAMETERS, std::optional<Tensor> sinks,
                                const Tensor& bands, int64_t offset, int64_t chunks) {
  Arguments args =
      CallArguments{q, k, k, starts, runs, spans, bits, visible, bias, {}, {}, by_distance, scale, softcap, 1.0, 0}
          .arguments();
  args.chunks = chunks, args.offset = offset, args.max_panels = max_panels(args.plan), args.sinks = data<float>(sinks);
  args.bands = static_cast<const Band*>(bands.data_ptr()), args.band_count = bands.size(0);
  Tensor statistics = torch::stable::new_empty(
      q, {NUM_STATISTICS + args.band_count, args.batch, args.heads, args.q_len}, ScalarType::Float);
  Tensor received = torch::stable::new_zeros(q, {chunks, args.batch, args.heads, args.kv_len}, ScalarType::Double);
  args.statistics = static_cast<float*>(statistics.data_ptr()),
  args.received = static_cast<double*>(received.data_ptr());
  const Kernels& kernels = kernels_at(cpu_level());
  run_parallel(q, kernels.statistics_bytes(args),
               [&](char* memory, std::atomic<int64_t>& next) { kernels.statistics(args, memory, next); });
  return {statistics, received};
}

// Return the bytes that `forward` allocates beside its results.
int64_t held(int64_t batch, int64_t heads, int64_t kv_heads, int64_t q_len, int64_t kv_len, int64_t dim,
             int64_t value_dim, bool is_bf16) {
  Arguments args{};
  args.batch = batch, args.heads = heads, args.kv_heads = kv_heads, args.q_len = q_len, args.kv_len = kv_len;
  args.dim = dim, args.value_dim = value_dim, args.is_bf16 = is_bf16, args.heads_per_task = 1, args.key_parts = 1;
  args.plan.blocks = (q_len + ROWS - 1) / ROWS;
  split_work(args);
  return scratch_bytes(kernels_at(cpu_level()).forward_bytes(args)) + partial_size(args) * 4;
}

int64_t abilities() { return cpu_level(); }

}  // namespace

#define PLAN                                                                                                  \
  "Tensor starts, Tensor runs, Tensor spans, Tensor? bits, Tensor? visible, Tensor? bias, bool by_distance, " \
  "float scale, float softcap"
#define ARGUMENTS \
  "Tensor q, Tensor k, Tensor v, " PLAN ", Tensor? row_words, Tensor? column_words, int threshold, float kept"

STABLE_TORCH_LIBRARY(saccade_cpu, m) {
  m.def("forward(" ARGUMENTS ") -> (Tensor, Tensor)");
  m.def("backward(" ARGUMENTS
        ", Tensor grad_out, Tensor lse, Tensor delta, int chunks, int table) "
        "-> (Tensor, Tensor, Tensor, Tensor)");
  m.def("look(Tensor q, Tensor k, " PLAN ", Tensor? sinks, Tensor bands, int ahead, int chunks) -> (Tensor, Tensor)");
  m.def("held(int batch, int heads, int kv_heads, int q_len, int kv_len, int dim, int value_dim, bool is_half) -> int");
  m.def("abilities() -> int");
}
STABLE_TORCH_LIBRARY_IMPL(saccade_cpu, CPU, m) {
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("backward", TORCH_BOX(&backward));
  m.impl("look", TORCH_BOX(&look));
}
STABLE_TORCH_LIBRARY_IMPL(saccade_cpu, CompositeExplicitAutograd, m) {
  m.impl("held", TORCH_BOX(&held));
  m.impl("abilities", TORCH_BOX(&abilities));
}
