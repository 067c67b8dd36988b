// Compare every level that this CPU runs with loops in double precision; needs no torch, so it also runs in an
// emulator.
//
// Usage: check_kernels [file [masks]]. All float32 results are written to the file, to compare those of two compilers.
// `masks` holds further cases: batch, heads, kv_heads, q_len and kv_len as int64, and a byte for each pair.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "cpu_dispatch.h"

namespace {

using Sees = std::function<bool(int64_t b, int64_t h, int64_t i, int64_t j)>;
enum Bias { NO_BIAS, PER_ROW, BY_DISTANCE, BY_KEY };

struct Case {
  std::string name;
  int64_t batch, heads, kv_heads, q_len, kv_len, dim, value_dim;
  Sees sees;
  Bias bias = NO_BIAS;
  double dropout = 0.0, softcap = 0.0;
  int heads_per_task = 1;
  int64_t key_parts = 1;
};

// A tensor [batch, heads, rows, width] in double precision, and as the kernels read it.
struct Values {
  int64_t heads, rows, width;
  bool is_bf16;
  std::vector<double> wide;
  std::vector<char> memory;

  Values(std::mt19937& random, int64_t batch, int64_t heads, int64_t rows, int64_t width, bool is_bf16)
      : heads(heads), rows(rows), width(width), is_bf16(is_bf16), wide(batch * heads * rows * width) {
    std::normal_distribution<float> normal;
    memory.resize(wide.size() * item());
    for (size_t n = 0; n < wide.size(); ++n) {
      float x = normal(random);
      uint32_t bits;
      std::memcpy(&bits, &x, 4);
      if (is_bf16) bits &= 0xFFFF0000;  // exact in bfloat16
      std::memcpy(&x, &bits, 4);
      wide[n] = x;
      const char* low_end_first = reinterpret_cast<const char*>(&bits);
      std::memcpy(memory.data() + n * item(), low_end_first + 4 - item(), item());
    }
  }

  int64_t item() const { return is_bf16 ? 2 : 4; }
  View view() {
    const int64_t row = width * item();
    return {memory.data(), heads * rows * row, rows * row, row};
  }
  const double* at(int64_t b, int64_t h, int64_t i) const { return wide.data() + ((b * heads + h) * rows + i) * width; }
};

// A plan from a mask pair by pair: runs of panels that are visible in full, by one span per row, or by bits.
struct PlanOf {
  std::vector<int32_t> starts, spans;
  std::vector<Run> runs;
  std::vector<uint64_t> bits;
  Plan plan{};

  explicit PlanOf(const Case& c) {
    const int64_t blocks = (c.q_len + ROWS - 1) / ROWS, panels = (c.kv_len + PANEL - 1) / PANEL;
    bits.resize(c.batch * c.heads * c.q_len * panels);
    spans.resize(c.batch * c.q_len * 2);
    bool is_span = true;  // whether each row of all heads is one range
    for (int64_t b = 0; b < c.batch; ++b)
      for (int64_t i = 0; i < c.q_len; ++i) {
        int64_t first = c.kv_len, last = -1, count = 0;
        for (int64_t h = 0; h < c.heads; ++h)
          for (int64_t j = 0; j < c.kv_len; ++j) {
            if (c.sees(b, h, i, j) != c.sees(b, 0, i, j)) is_span = false;
            if (!c.sees(b, h, i, j)) continue;
            bits[((b * c.heads + h) * c.q_len + i) * panels + j / PANEL] |= 1ull << j % PANEL;
            if (h == 0) first = std::min(first, j), last = j, ++count;
          }
        if (count != std::max<int64_t>(0, last - first + 1)) is_span = false;
        spans[(b * c.q_len + i) * 2] = first, spans[(b * c.q_len + i) * 2 + 1] = last + 1;
      }
    for (int64_t b = 0; b < c.batch; ++b)
      for (int64_t block = 0; block < blocks; ++block) {
        starts.push_back(runs.size());
        for (int64_t panel = 0; panel < panels; ++panel) {
          int64_t seen = 0, pairs = 0;
          for (int64_t h = 0; h < c.heads; ++h)
            for (int64_t i = block * ROWS; i < std::min(c.q_len, (block + 1) * ROWS); ++i)
              for (int64_t j = panel * PANEL; j < std::min(c.kv_len, (panel + 1) * PANEL); ++j)
                seen += c.sees(b, h, i, j), ++pairs;
          if (!seen) continue;
          const int32_t kind = seen == pairs ? WHOLE : is_span ? LIMITED : RESIDUAL, at = panel;
          const bool goes_on = static_cast<int64_t>(runs.size()) > starts.back() && runs.back().stop == at;
          if (goes_on && runs.back().kind == kind)
            ++runs.back().stop;
          else
            runs.push_back({at, at + 1, kind});
        }
      }
    starts.push_back(runs.size());
    plan.items = c.batch, plan.blocks = blocks, plan.starts = starts.data(), plan.runs = runs.data();
    plan.spans = spans.data(), plan.spans_per_row = 1, plan.bits = bits.data();
    plan.bits_head = c.q_len * panels, plan.bits_batch = c.heads * plan.bits_head;
  }
};

using Results = std::vector<std::pair<std::string, std::vector<double>>>;

class Check {
 public:
  Check(const Case& c, bool is_bf16)
      : c_(c),
        q_(random_, c.batch, c.heads, c.q_len, c.dim, is_bf16),
        k_(random_, c.batch, c.kv_heads, c.kv_len, c.dim, is_bf16),
        v_(random_, c.batch, c.kv_heads, c.kv_len, c.value_dim, is_bf16),
        grad_(random_, c.batch, c.heads, c.q_len, c.value_dim, is_bf16),
        bias_(random_, c.batch, c.heads, c.bias == PER_ROW ? c.q_len : 1,
              c.bias == BY_DISTANCE ? c.q_len + c.kv_len - 1 : c.kv_len, false),
        plan_(c),
        scale_(1.0 / std::sqrt(c.dim)) {
    for (auto* words : {&row_words_, &column_words_}) {
      words->resize(words == &row_words_ ? c.batch * c.heads * c.q_len : c.batch * c.kv_len);
      for (auto& word : *words) word = static_cast<int32_t>(random_());
    }
    threshold_ = static_cast<int32_t>(c.dropout * 4294967296.0 - 2147483648.0);
  }

  // Return output, lse, gradients and statistics from loops over all pairs.
  Results expected() const {
    const auto& c = c_;
    const int64_t group = c.heads / c.kv_heads, rows = c.batch * c.heads * c.q_len;
    std::vector<double> out(rows * c.value_dim), lse(rows), grad_q(rows * c.dim), grad_k(k_.wide.size());
    std::vector<double> grad_v(v_.wide.size()), grad_bias(c.bias == NO_BIAS ? 0 : bias_.wide.size());
    std::vector<double> entropy(rows), received(c.batch * c.heads * c.kv_len);
    for (int64_t b = 0, row = 0; b < c.batch; ++b)
      for (int64_t h = 0; h < c.heads; ++h)
        for (int64_t i = 0; i < c.q_len; ++i, ++row) {
          const int64_t kv = h / group;
          std::vector<double> score(c.kv_len, -INFINITY), slope(c.kv_len, 1.0), weight(c.kv_len);
          double total = 0.0, max = -INFINITY;
          for (int64_t j = 0; j < c.kv_len; ++j) {
            if (!c.sees(b, h, i, j)) continue;
            double x = 0.0;
            for (int64_t d = 0; d < c.dim; ++d) x += q_.at(b, h, i)[d] * k_.at(b, kv, j)[d];
            x *= scale_;
            if (c.softcap > 0.0) {
              const double t = std::tanh(x / c.softcap);
              x = t * c.softcap, slope[j] = 1.0 - t * t;
            }
            if (c.bias != NO_BIAS) x += bias_.wide[bias_at(b, h, i, j)];
            score[j] = x, max = std::max(max, x);
          }
          for (int64_t j = 0; j < c.kv_len; ++j)
            total += weight[j] = score[j] == -INFINITY ? 0.0 : std::exp(score[j] - max);
          lse[row] = total == 0.0 ? -INFINITY : max + std::log(total);
          if (total == 0.0) continue;
          const double* grad = grad_.at(b, h, i);
          double delta = 0.0;
          std::vector<double> grad_weight(c.kv_len), dropped(c.kv_len);
          for (int64_t j = 0; j < c.kv_len; ++j) {
            weight[j] /= total, received[(b * c.heads + h) * c.kv_len + j] += weight[j];
            if (weight[j] > 0.0) entropy[row] -= weight[j] * std::log(weight[j]);
            const double factor = keeps(row, b, j) ? 1.0 / (1.0 - c.dropout) : 0.0;
            dropped[j] = weight[j] * factor;
            for (int64_t d = 0; d < c.value_dim; ++d) {
              out[row * c.value_dim + d] += dropped[j] * v_.at(b, kv, j)[d];
              grad_weight[j] += grad[d] * v_.at(b, kv, j)[d] * factor;
              grad_v[((b * c.kv_heads + kv) * c.kv_len + j) * c.value_dim + d] += dropped[j] * grad[d];
            }
            delta += weight[j] * grad_weight[j];
          }
          for (int64_t j = 0; j < c.kv_len; ++j) {
            const double grad_score = weight[j] * (grad_weight[j] - delta);
            if (c.bias != NO_BIAS) grad_bias[bias_at(b, h, i, j)] += grad_score;
            for (int64_t d = 0; d < c.dim; ++d) {
              grad_q[row * c.dim + d] += grad_score * slope[j] * scale_ * k_.at(b, kv, j)[d];
              grad_k[((b * c.kv_heads + kv) * c.kv_len + j) * c.dim + d] +=
                  grad_score * slope[j] * scale_ * q_.at(b, h, i)[d];
            }
          }
        }
    return {{"out", out},         {"lse", lse},          {"grad_q", grad_q},
            {"grad_k", grad_k},   {"grad_v", grad_v},    {"grad_bias", grad_bias},
            {"entropy", entropy}, {"received", received}};
  }

  // Return the same from the kernels of a level.
  Results computed(const Kernels& kernels) {
    const auto& c = c_;
    const int64_t rows = c.batch * c.heads * c.q_len;
    Arguments args{};
    args.q = q_.view(), args.k = k_.view(), args.v = v_.view(), args.is_bf16 = q_.is_bf16;
    args.batch = c.batch, args.heads = c.heads, args.kv_heads = c.kv_heads, args.q_len = c.q_len,
    args.kv_len = c.kv_len;
    args.dim = c.dim, args.value_dim = c.value_dim, args.plan = plan_.plan;
    args.scale = static_cast<float>(scale_), args.softcap = static_cast<float>(c.softcap);
    if (c.bias != NO_BIAS) args.bias = bias_.view();
    if (c.bias == BY_KEY) args.bias.row = 0;
    if (c.bias == BY_DISTANCE) args.bias.data += (c.q_len - 1) * 4, args.bias.row = -4;
    args.heads_per_task = c.heads_per_task, args.key_parts = c.key_parts, args.dropout_scale = 1.0f;
    args.chunks = 2, args.table = c.bias == BY_DISTANCE || c.bias == BY_KEY ? bias_.width : 0;
    args.max_panels = args.panels();
    std::vector<float> statistics(NUM_STATISTICS * rows);
    std::vector<double> received(args.chunks * c.batch * c.heads * c.kv_len);
    args.statistics = statistics.data(), args.received = received.data();
    run(kernels.statistics_bytes(args), [&](char* memory, auto& next) { kernels.statistics(args, memory, next); });

    if (c.dropout > 0.0) {
      args.row_words = row_words_.data(), args.column_words = column_words_.data();
      args.column_words_batch = c.kv_len, args.threshold = threshold_;
      args.dropout_scale = static_cast<float>(1.0 / (1.0 - c.dropout));
    }
    std::vector<char> out(rows * c.value_dim * q_.item());
    std::vector<float> lse(rows), delta(rows), partial(c.key_parts * rows * (c.value_dim + 2));
    const int64_t row_bytes = c.value_dim * q_.item();
    args.out = {out.data(), c.heads * c.q_len * row_bytes, c.q_len * row_bytes, row_bytes}, args.lse = lse.data();
    if (c.key_parts > 1) args.partial = partial.data();
    run(kernels.forward_bytes(args), [&](char* memory, auto& next) { kernels.forward(args, memory, next, 2); });
    if (c.key_parts > 1) kernels.merge(args);
    const std::vector<double> wide_out = widened(out);

    for (int64_t row = 0; row < rows; ++row)
      for (int64_t d = 0; d < c.value_dim; ++d)
        delta[row] += grad_.wide[row * c.value_dim + d] * wide_out[row * c.value_dim + d];
    std::vector<float> grad_q(rows * c.dim), grad_k(args.chunks * k_.wide.size()), grad_v(args.chunks * v_.wide.size());
    const int64_t bias_chunks = args.table ? args.chunks : 1;
    const float before = args.table ? 0.0f : NAN;  // the kernel clears the gradient of a bias per row
    std::vector<float> grad_bias(c.bias == NO_BIAS ? 0 : bias_chunks * bias_.wide.size(), before);
    args.grad_out = grad_.view(), args.delta = delta.data(), args.grad_q = grad_q.data(), args.grad_k = grad_k.data();
    args.grad_v = grad_v.data(), args.grad_bias = c.bias == NO_BIAS ? nullptr : grad_bias.data();
    args.heads_per_task = 1, args.key_parts = 1;
    run(kernels.backward_bytes(args), [&](char* memory, auto& next) { kernels.backward(args, memory, next); });
    const auto* entropy = statistics.data() + ENTROPY * rows;
    return {{"out", wide_out},
            {"lse", {lse.begin(), lse.end()}},
            {"grad_q", {grad_q.begin(), grad_q.end()}},
            {"grad_k", summed(grad_k, args.chunks)},
            {"grad_v", summed(grad_v, args.chunks)},
            {"grad_bias", summed(grad_bias, bias_chunks)},
            {"entropy", {entropy, entropy + rows}},
            {"received", summed(received, args.chunks)}};
  }

 private:
  int64_t bias_at(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const int64_t row = c_.bias == PER_ROW ? i : 0, at = c_.bias == BY_DISTANCE ? c_.q_len - 1 - i + j : j;
    return ((b * c_.heads + h) * bias_.rows + row) * bias_.width + at;
  }

  bool keeps(int64_t row, int64_t b, int64_t j) const {
    if (c_.dropout == 0.0) return true;
    const uint32_t word = row_words_[row], column = column_words_[b * c_.kv_len + j];
    return static_cast<int32_t>((column ^ word) * (word | 1)) >= threshold_;
  }

  std::vector<double> widened(const std::vector<char>& memory) const {
    std::vector<double> wide(memory.size() / q_.item());
    for (size_t n = 0; n < wide.size(); ++n) {
      uint32_t bits = 0;
      std::memcpy(reinterpret_cast<char*>(&bits) + 4 - q_.item(), memory.data() + n * q_.item(), q_.item());
      float x;
      std::memcpy(&x, &bits, 4);
      wide[n] = x;
    }
    return wide;
  }

  template <class T>
  static std::vector<double> summed(const std::vector<T>& parts, int64_t count) {
    std::vector<double> sum(parts.size() / count);
    for (size_t n = 0; n < parts.size(); ++n) sum[n % sum.size()] += parts[n];
    return sum;
  }

  template <class Work>
  static void run(int64_t bytes, Work work) {
    std::vector<char> memory(bytes + 64);
    std::atomic<int64_t> next{0};
    work(memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64, next);
  }

  const Case& c_;
  std::mt19937 random_{7};
  Values q_, k_, v_, grad_, bias_;
  PlanOf plan_;
  double scale_;
  std::vector<int32_t> row_words_, column_words_;
  int32_t threshold_;
};

// The norm of the difference relative to the norm of the expected values; infinite values must agree.
double relative_error(const std::vector<double>& actual, const std::vector<double>& expected) {
  if (actual.size() != expected.size()) return INFINITY;
  double difference = 0.0, norm = 0.0;
  for (size_t n = 0; n < expected.size(); ++n) {
    if (std::isinf(expected[n]) && actual[n] == expected[n]) continue;
    difference += (actual[n] - expected[n]) * (actual[n] - expected[n]), norm += expected[n] * expected[n];
  }
  return norm == 0.0 ? std::sqrt(difference) : std::sqrt(difference / norm);
}

const Sees FULL = [](auto, auto, auto, auto) { return true; };
const Sees CAUSAL = [](auto, auto, int64_t i, int64_t j) { return j <= i; };
const std::vector<Case> CASES = {
    {"full", 1, 2, 2, 50, 70, 16, 32, FULL},
    {"causal", 2, 2, 2, 130, 130, 32, 16, CAUSAL},
    {"window", 1, 2, 1, 200, 200, 64, 64, [](auto, auto, int64_t i, int64_t j) { return j > i - 40 && j < i + 10; }},
    {"documents", 1, 2, 2, 150, 150, 16, 48, [](auto, auto, int64_t i, int64_t j) { return i / 37 == j / 37; }},
    {"prefix", 1, 1, 1, 100, 100, 80, 16, [](auto, auto, int64_t i, int64_t j) { return j < 30 || j <= i; }},
    {"empty rows", 1, 2, 2, 60, 90, 16, 16, [](auto, auto, int64_t i, int64_t) { return i % 5 && (i < 24 || i > 47); }},
    {"steps", 1, 2, 2, 70, 140, 16, 16, [](auto, int64_t h, int64_t i, int64_t j) { return (i + j + h) % 3 == 0; }},
    {"padding", 3, 2, 1, 40, 100, 16, 16, [](int64_t b, auto, auto, int64_t j) { return j < 100 - 45 * b; }},
    {"grouped heads", 2, 6, 2, 75, 75, 32, 32, CAUSAL},
    {"bias per row", 1, 2, 2, 80, 90, 16, 16, CAUSAL, PER_ROW},
    {"bias by distance", 1, 4, 2, 70, 100, 16, 16, FULL, BY_DISTANCE},
    {"bias by key", 2, 2, 2, 50, 130, 16, 16, CAUSAL, BY_KEY},
    {"dropout", 2, 2, 2, 90, 90, 32, 32, CAUSAL, NO_BIAS, 0.3},
    {"softcap, bias, dropout", 1, 4, 2, 60, 150, 16, 16, FULL, BY_DISTANCE, 0.2, 2.0},
    {"softcap", 1, 1, 1, 30, 200, 32, 16, CAUSAL, NO_BIAS, 0.0, 0.7},
    {"one row of many heads", 2, 8, 2, 1, 600, 64, 64, FULL, NO_BIAS, 0.0, 0.0, 4, 3},
    {"one row of one head", 2, 2, 2, 1, 333, 64, 128, [](auto, auto, auto, int64_t j) { return j % 3 || j > 200; },
     NO_BIAS, 0.0, 0.0, 1, 3},
    {"one row of two heads", 1, 4, 2, 1, 401, 128, 256, [](auto, int64_t h, auto, int64_t j) { return j > 70 * h; },
     NO_BIAS, 0.2, 1.5, 2, 1},
    {"two rows", 2, 2, 2, 2, 190, 32, 128, [](int64_t b, auto, int64_t i, int64_t j) { return j < 150 + 20 * i - b; },
     PER_ROW},
    {"few rows in parts", 1, 4, 2, 5, 520, 16, 16, [](auto, auto, auto, int64_t j) { return j < 300; }, NO_BIAS, 0.1,
     0.0, 2, 4},
    {"long", 1, 1, 1, 30, 1200, 16, 16, FULL},
};

// Return the cases of a file of masks.
std::vector<Case> read_masks(const char* name) {
  std::vector<Case> cases;
  FILE* file = std::fopen(name, "rb");
  if (!file) std::exit(2);
  for (int64_t n[5]; std::fread(n, 8, 5, file) == 5;) {
    const int64_t heads = n[1], q_len = n[3], kv_len = n[4];
    std::vector<char> pairs(n[0] * heads * q_len * kv_len);
    if (std::fread(pairs.data(), 1, pairs.size(), file) != pairs.size()) std::exit(2);
    const Sees sees = [=](int64_t b, int64_t h, int64_t i, int64_t j) {
      return pairs[((b * heads + h) * q_len + i) * kv_len + j] != 0;
    };
    cases.push_back({"mask " + std::to_string(cases.size()), n[0], heads, n[2], q_len, kv_len, 16, 16, sees});
  }
  std::fclose(file);
  return cases;
}

// Relative errors of float32 are a few roundings (2**-24), those of bfloat16 a few of 2**-9.
constexpr double TOLERANCE = 3e-6, BF16_TOLERANCE = 0.01;

}  // namespace

int main(int count, char** names) {
  FILE* file = count > 1 ? std::fopen(names[1], "wb") : nullptr;
  std::vector<Case> cases = CASES;
  if (count > 2)
    for (const Case& c : read_masks(names[2])) cases.push_back(c);
  int failures = 0;
  for (int64_t level = 0; level <= cpu_level(); ++level) {
    const Kernels& kernels = kernels_at(level);
    for (const bool is_bf16 : {false, true}) {
      if (is_bf16 && !kernels.has_bf16()) continue;
      double largest = 0.0;
      for (const Case& c : cases) {
        Check check(c, is_bf16);
        const Results expected = check.expected(), computed = check.computed(kernels);
        for (size_t n = 0; n < expected.size(); ++n) {
          const double error = relative_error(computed[n].second, expected[n].second);
          largest = std::max(largest, error);
          if (file && !is_bf16) std::fwrite(computed[n].second.data(), 8, computed[n].second.size(), file);
          if (error < (is_bf16 ? BF16_TOLERANCE : TOLERANCE)) continue;
          std::printf("FAILED %s, %s, %s: %s is off by %.3g\n", kernels.level, is_bf16 ? "bfloat16" : "float32",
                      c.name.c_str(), expected[n].first.c_str(), error);
          ++failures;
        }
      }
      std::printf("%s, %s: %zu cases, largest relative error %.2g\n", kernels.level, is_bf16 ? "bfloat16" : "float32",
                  cases.size(), largest);
    }
  }
  if (file) std::fclose(file);
  return failures != 0;
}
