// What torch calls: arguments become a problem, threads share its blocks.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <algorithm>

#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <tuple>
#include <vector>

#include "levels.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

enum Level : int64_t { PLAIN, AVX2, AVX512, AVX512_BF16, AMX };

// Whether the processor has tiles, and the system lets this process use them: it must be asked once.
bool has_tiles() {
#if defined(EMULATED_TILES)
  return true;
#elif defined(__x86_64__) && defined(__linux__)
  unsigned a, b, c, d;
  constexpr unsigned BF16 = 1u << 22, TILES = 1u << 24, ASK_PERMISSION = 0x1023, TILE_DATA = 18;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & BF16) || !(d & TILES)) return false;
  return syscall(SYS_arch_prctl, ASK_PERMISSION, TILE_DATA) == 0;
#else
  return false;
#endif
}

Level highest() {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return !__builtin_cpu_supports("avx512bf16") ? AVX512 : has_tiles() ? AMX : AVX512_BF16;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return AVX2;
#endif
  return PLAIN;
}

Level level() {  // SACCADE_CPU_LEVEL asks for a lower one, for tests
  static const Level found = [] {
    const char* asked = std::getenv("SACCADE_CPU_LEVEL");
    return asked ? std::min(highest(), static_cast<Level>(std::atoi(asked))) : highest();
  }();
  return found;
}

View view(const Tensor& x) {
  const int64_t item = x.scalar_type() == ScalarType::Float ? 4 : 2;
  return {static_cast<char*>(x.data_ptr()), x.size(0) > 1 ? x.stride(0) * item : 0,
          x.size(1) > 1 ? x.stride(1) * item : 0, x.size(2) > 1 ? x.stride(2) * item : 0};
}

template <class T>
const T* data(const std::optional<Tensor>& x) {
  return x ? static_cast<const T*>(x->data_ptr()) : nullptr;
}

int64_t of_thread(int64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

int64_t scratch_bytes(int64_t bytes) { return torch::stable::get_num_threads() * of_thread(bytes) + 64; }

// One parallel region: each thread takes tasks until none is left, with memory of its own.
template <class Work>
void share(const Tensor& like, int64_t bytes, Work work) {
  std::atomic<int64_t> next{0};
  const int64_t threads = torch::stable::get_num_threads(), each = of_thread(bytes);
  Tensor scratch = torch::stable::new_empty(like, {scratch_bytes(bytes)}, ScalarType::Byte);
  char* memory = static_cast<char*>(scratch.data_ptr());
  memory += (64 - reinterpret_cast<uintptr_t>(memory) % 64) % 64;
  torch::stable::parallel_for(0, threads, 1, [&](int64_t thread, int64_t) { work(memory + thread * each, next); });
}

// What forward and backward are told alike.
struct Told {
  Tensor q, k, v, starts, runs, spans;
  std::optional<Tensor> bits, visible, bias, row_words, column_words;
  bool by_distance;
  double scale, softcap, kept;
  int64_t threshold;

  Problem problem() const {
    Problem p{};
    p.batch = q.size(0), p.heads = q.size(1), p.q_len = q.size(2), p.dim = q.size(3);
    p.kv_heads = k.size(1), p.kv_len = k.size(2), p.value_dim = v.size(3);
    p.heads_at_once = 1, p.parts = 1;
    p.is_half = q.scalar_type() == ScalarType::BFloat16;
    p.q = view(q), p.k = view(k), p.v = view(v);
    Plan& plan = p.plan;
    plan.items = spans.size(0), plan.blocks = (p.q_len + ROWS - 1) / ROWS, plan.spans_per_row = spans.size(2);
    plan.starts = static_cast<const int32_t*>(starts.data_ptr());
    plan.runs = static_cast<const Run*>(runs.data_ptr());
    plan.spans = static_cast<const int32_t*>(spans.data_ptr());
    plan.bits = data<uint64_t>(bits);
    if (bits) plan.bits_batch = bits->size(0) > 1 ? bits->stride(0) : 0;
    if (bits) plan.bits_head = bits->size(1) > 1 ? bits->stride(1) : 0;
    plan.visible = data<uint64_t>(visible);
    p.scale = static_cast<float>(scale), p.softcap = static_cast<float>(softcap);
    if (bias) p.bias = view(*bias);
    if (by_distance) p.bias.data += (p.q_len - 1) * 4, p.bias.row = -4;
    p.row_words = data<int32_t>(row_words), p.column_words = data<int32_t>(column_words);
    if (column_words) p.column_words_batch = column_words->size(0) > 1 ? p.kv_len : 0;
    p.threshold = static_cast<int32_t>(threshold), p.kept = static_cast<float>(kept);
    return p;
  }
};

#define PLANNED                                                                              \
  const Tensor &starts, const Tensor &runs, const Tensor &spans, std::optional<Tensor> bits, \
      std::optional<Tensor> visible, std::optional<Tensor> bias, bool by_distance, double scale, double softcap

#define TOLD                                                                                   \
  const Tensor &q, const Tensor &k, const Tensor &v, PLANNED, std::optional<Tensor> row_words, \
      std::optional<Tensor> column_words, int64_t threshold, double kept

#define PROBLEM                                                                                            \
  Told{q,           k,     v,       starts, runs,     spans, bits, visible, bias, row_words, column_words, \
       by_distance, scale, softcap, kept,   threshold}                                                     \
      .problem()

// Where rows are few, heads that share keys are worked on together, and keys in parts, on any number of threads.
void share_out(Problem& p) {
  constexpr int64_t TASKS = 16, LEAST = 8;  // and panels of a part
  const int64_t group = p.heads / std::max<int64_t>(1, p.kv_heads);
  for (int64_t n = 2; n <= group && n * p.q_len <= ROWS; ++n)
    if (group % n == 0) p.heads_at_once = static_cast<int>(n);
  const int64_t tasks = std::max<int64_t>(1, p.batch * p.heads / p.heads_at_once);
  if (p.plan.blocks == 1) p.parts = std::max<int64_t>(1, std::min((TASKS + tasks - 1) / tasks, p.panels() / LEAST));
}

int64_t partial_numbers(const Problem& p) {
  return p.parts > 1 ? p.parts * p.batch * p.heads * p.q_len * (p.value_dim + 2) : 0;
}

std::tuple<Tensor, Tensor> forward(TOLD) {
  Problem p = PROBLEM;
  // [batch, len, heads, width] in memory, so that heads merge without a copy.
  Tensor out = torch::stable::transpose(torch::stable::new_empty(q, {p.batch, p.q_len, p.heads, p.value_dim}), 1, 2);
  Tensor lse = torch::stable::new_empty(q, {p.batch, p.heads, p.q_len}, ScalarType::Float);
  p.out = view(out), p.lse = static_cast<float*>(lse.data_ptr());
  share_out(p);
  Tensor partial = torch::stable::new_empty(q, {partial_numbers(p)}, ScalarType::Float);
  if (p.parts > 1) p.partial = static_cast<float*>(partial.data_ptr());
  const int64_t each = p.batch * p.heads * p.plan.blocks / (8 * torch::stable::get_num_threads());
  const int64_t blocks_at_once = std::max<int64_t>(1, std::min<int64_t>({each, p.plan.blocks, 32}));
  const Functions& functions = LEVELS[level()];
  share(q, functions.forward_bytes(p),
        [&](char* memory, std::atomic<int64_t>& next) { functions.forward(p, memory, next, blocks_at_once); });
  if (p.partial) functions.merge(p);
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(TOLD, const Tensor& grad_out, const Tensor& lse,
                                                    const Tensor& delta, int64_t chunks, int64_t table) {
  Problem p = PROBLEM;
  const auto made = [&](std::initializer_list<int64_t> sizes) {
    return torch::stable::new_zeros(q, std::vector<int64_t>(sizes), ScalarType::Float);
  };
  p.chunks = chunks, p.table = table > 0 ? table : 0;
  Tensor of_q = torch::stable::new_empty(q, {p.batch, p.heads, p.q_len, p.dim}, ScalarType::Float);
  Tensor of_k = made({chunks, p.batch, p.kv_heads, p.kv_len, p.dim});
  Tensor of_v = made({chunks, p.batch, p.kv_heads, p.kv_len, p.value_dim});
  Tensor of_bias = table < 0    ? made({0})
                   : table == 0 ? made({p.batch, p.heads, p.q_len, p.kv_len})
                                : made({chunks, p.batch, p.heads, table});
  p.grad_out = view(grad_out), p.lse = static_cast<float*>(lse.data_ptr());
  p.delta = static_cast<const float*>(delta.data_ptr());
  p.grad_q = static_cast<float*>(of_q.data_ptr()), p.grad_k = static_cast<float*>(of_k.data_ptr());
  p.grad_v = static_cast<float*>(of_v.data_ptr());
  p.grad_bias = table < 0 ? nullptr : static_cast<float*>(of_bias.data_ptr());
  const Functions& functions = LEVELS[level()];
  share(q, functions.backward_bytes(p),
        [&](char* memory, std::atomic<int64_t>& next) { functions.backward(p, memory, next); });
  return {of_q, of_k, of_v, of_bias};
}

// Panels of the block of rows that needs most of them.
int64_t most_panels(const Plan& plan) {
  int64_t most = 0;
  for (int64_t block = 0; block < plan.items * plan.blocks; ++block) {
    int64_t panels = 0;
    for (int32_t n = plan.starts[block]; n < plan.starts[block + 1]; ++n)
      panels += plan.runs[n].stop - plan.runs[n].first;
    most = std::max(most, panels);
  }
  return most;
}

// Numbers of each row, and what keys receive from each of so many parts of the rows.
std::tuple<Tensor, Tensor> look(const Tensor& q, const Tensor& k, PLANNED, std::optional<Tensor> sinks,
                                const Tensor& bands, int64_t ahead, int64_t chunks) {
  Problem p =
      Told{q, k, k, starts, runs, spans, bits, visible, bias, {}, {}, by_distance, scale, softcap, 1.0, 0}.problem();
  p.chunks = chunks, p.ahead = ahead, p.most_panels = most_panels(p.plan), p.sinks = data<float>(sinks);
  p.bands = static_cast<const Band*>(bands.data_ptr()), p.band_count = bands.size(0);
  Tensor answers = torch::stable::new_empty(q, {ANSWERS + p.band_count, p.batch, p.heads, p.q_len}, ScalarType::Float);
  Tensor received = torch::stable::new_zeros(q, {chunks, p.batch, p.heads, p.kv_len}, ScalarType::Double);
  p.answers = static_cast<float*>(answers.data_ptr()), p.received = static_cast<double*>(received.data_ptr());
  const Functions& functions = LEVELS[level()];
  share(q, functions.look_bytes(p), [&](char* memory, std::atomic<int64_t>& next) { functions.look(p, memory, next); });
  return {answers, received};
}

// Bytes that `forward` holds beside its results, of tensors of these sizes.
int64_t held(int64_t batch, int64_t heads, int64_t kv_heads, int64_t q_len, int64_t kv_len, int64_t dim,
             int64_t value_dim, bool is_half) {
  Problem p{};
  p.batch = batch, p.heads = heads, p.kv_heads = kv_heads, p.q_len = q_len, p.kv_len = kv_len;
  p.dim = dim, p.value_dim = value_dim, p.is_half = is_half, p.heads_at_once = 1, p.parts = 1;
  p.plan.blocks = (q_len + ROWS - 1) / ROWS;
  share_out(p);
  return scratch_bytes(LEVELS[level()].forward_bytes(p)) + partial_numbers(p) * 4;
}

int64_t abilities() { return level(); }

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
