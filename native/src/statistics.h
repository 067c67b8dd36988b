// Statistics of the weights. The scores of a block of rows are stored and read twice: for the row sums, then for the
// rest.
//
// Column sums are sums over rows. One task computes them for every `chunks`-th block of a head, so the order of
// additions does not depend on the number of threads.
#pragma once

#include <atomic>
#include <cmath>

#include "trimmed_products.h"

namespace LEVEL {

typedef double Doubles __attribute__((vector_size(LANES * 8)));

// Return the sum of all lanes in double precision.
inline double exact_sum(Floats x) {
  const Doubles wide = __builtin_convertvector(x, Doubles);
  double sum = 0.0;
  for (int i = 0; i < LANES; ++i) sum += wide[i];
  return sum;
}

template <class Format>
class Statistics {
 public:
  Statistics(const Arguments& args, Arena& arena)
      : args_(args),
        keys_(arena, args, args.k, args.dim),
        stride_(args.max_panels * PANEL + 32),
        scores_(arena.take<float>(ROWS * stride_)),
        panels_(arena.take<int64_t>(args.max_panels)),
        columns_(arena.take<float>(MAX_PANELS * PANEL)) {}

  // Process one block of rows; add its column sums to `received` [kv_len].
  void run(const RowBlock& block, double* received) {
    block_ = block, count_ = 0;
    for (int i = 0; i < block.count(); ++i) rows_[i] = {};
    for_each_group<MAX_PANELS>(args_, block, 0, args_.panels(),
                               [&](const PanelGroup& group, bool) { add_scores(group); });
    for (int i = 0; i < block.count(); ++i) finish_totals(i);
    // Backwards: the scores that were written last are still in the cache.
    for (int64_t stop = count_; stop > 0;) {
      const int64_t first = (stop - 1) / MAX_PANELS * MAX_PANELS;
      read(first, static_cast<int>(stop - first), received);
      stop = first;
    }
    for (int i = 0; i < block.count(); ++i) write(i);
  }

 private:
  // Sums of a row. Logarithms are to base 2, relative to the largest score.
  struct Row {
    float max = -INF, shift = 0.0f, max_weight = 0.0f, log_total = 0.0f, mean = 0.0f;
    double total = 0.0, scores = 0.0;  // sums of weights, and of weights times scores
    double entropy = 0.0, squares = 0.0, variance = 0.0, distance = 0.0;
  };

  static constexpr float MIN_LOG = -2000.0f;  // replaces -inf: its weight is 0, and 0 times it is 0, not NaN

  void add_scores(const PanelGroup& group) {
    using Number = typename Format::Number;
    const Left<Format> query{args_.q.at<Number>(block_.b, block_.head, block_.first),
                             args_.q.row / static_cast<ptrdiff_t>(sizeof(Number)), 1};
    const Strips strips(group, block_.count());
    for (int n = 0; n < group.count; ++n) {
      const int vectors = (args_.keys_in(group.panel[n]) + LANES - 1) / LANES;
      const Out out{scores_ + (count_ + n) * PANEL, stride_};
      const Right<Format> keys = keys_.get(block_, group.panel[n]);
      if constexpr (IS_BLOCKED)
        multiply_keys(out, query, keys, args_.dim, strips, n);
      else
        multiply<Format>(out, query, keys, block_.count(), vectors, args_.dim / Format::PER_STEP, false);
      panels_[count_ + n] = group.panel[n];
    }
    for (int i = 0; i < block_.count(); ++i)
      ScoreTransform::is_needed(args_) ? add_row_sums<true>(group, i) : add_row_sums<false>(group, i);
    count_ += group.count;
  }

  // Turn a row's products into scores, -inf for masked keys, and add their weights to the row sum.
  template <bool HAS_TRANSFORM>
  void add_row_sums(const PanelGroup& group, int i) {
    float* scores = scores_ + i * stride_ + count_ * PANEL;
    const ScoreTransform transform(args_, block_, i);
    Row& row = rows_[i];
    Floats top = broadcast(-INF);
    uint32_t any = 0;
    for_each_vector(group, i, [&](int at, int64_t key, uint32_t bits) __attribute__((always_inline)) {
      Floats x = broadcast(-INF);
      if (bits) {
        x = load(scores + at);
        x = HAS_TRANSFORM ? transform.apply(x, key, bits) : x * transform.factor;
        if (bits != ALL_LANES) x = lane_mask(bits) ? x : broadcast(-INF);
        top = maximum(top, x), any |= bits;
      }
      store(scores + at, x);
    });
    if (!any) return;
    const float before = row.shift;
    row.max = std::max(row.max, reduce_max(top)), row.shift = row.max == -INF ? 0.0f : row.max;
    Floats total{}, error{}, sum{};  // error: lost by rounding of `total` (compensated summation)
    for (int at = 0; at < group.count * PANEL; at += LANES) {
      const Floats x = load(scores + at) - row.shift, weight = exp2(x), next = total + weight;
      error += weight - (next - total), total = next;
      sum += weight * maximum(broadcast(MIN_LOG), x);
    }
    const double shift_change = row.total == 0.0 ? 0.0 : before - row.shift, factor = ::exp2(shift_change);
    row.scores = (row.scores + shift_change * row.total) * factor + exact_sum(sum);
    row.total = row.total * factor + exact_sum(total) + exact_sum(error);
  }

  // Compute what the second pass needs of the row sums.
  void finish_totals(int i) {
    Row& row = rows_[i];
    double total = row.total;
    if (args_.sinks && total != 0.0)
      total += ::exp2(static_cast<double>(args_.sinks[block_.head]) * (1.0 / LN2) - row.shift);
    if (total == 0.0) return;
    row.max_weight = static_cast<float>(1.0 / total), row.log_total = static_cast<float>(std::log2(total));
    row.mean = static_cast<float>(row.scores / row.total - std::log2(total));
  }

  // Read stored panels, and add the weights of their keys to `received`.
  void read(int64_t first, int count, double* received) {
    std::fill(columns_, columns_ + count * PANEL, 0.0f);
    for (int i = 0; i < block_.count(); ++i) read_row(i, first, count);
    for (int n = 0; n < count; ++n) {
      double* to = received + panels_[first + n] * PANEL;
      const int keys = args_.keys_in(panels_[first + n]);
      for (int k = 0; k < keys; ++k) to[k] += columns_[n * PANEL + k];
    }
  }

  void read_row(int i, int64_t first, int count) {
    Row& row = rows_[i];
    const float* scores = scores_ + i * stride_ + first * PANEL;
    const float shift = row.shift, max_weight = row.max_weight, log_total = row.log_total, mean = row.mean;
    Floats entropy{}, squares{}, variance{}, distance{}, lane{};
    for (int n = 0; n < LANES; ++n) lane[n] = static_cast<float>(n);
    for (int n = 0; n < count; ++n) {
      const Floats distances = static_cast<float>(block_.row_of(i) + args_.offset - panels_[first + n] * PANEL) - lane;
      for (int part = 0; part < PANEL; part += LANES) {
        const int at = n * PANEL + part;
        const Floats x = load(scores + at) - shift, weight = exp2(x) * max_weight;
        const Floats log = maximum(broadcast(MIN_LOG), x - log_total), offsets = distances - static_cast<float>(part),
                     deviation = log - mean;
        entropy -= weight * log, squares += weight * weight, variance += weight * deviation * deviation;
        distance += weight * (Floats)((Ints)offsets & 0x7FFFFFFF);
        store(columns_ + at, load(columns_ + at) + weight);
      }
    }
    row.entropy += exact_sum(entropy), row.squares += exact_sum(squares);
    row.variance += exact_sum(variance), row.distance += exact_sum(distance);
  }

  void write(int i) {
    const Row& row = rows_[i];
    const bool is_empty = row.total == 0.0, is_nan = row.total != row.total;
    put(i, LARGEST_LOGIT, is_empty ? -INF : is_nan ? row.total : row.max * LN2);
    put(i, LARGEST_WEIGHT, row.max_weight), put(i, TOTAL, row.total * row.max_weight);
    put(i, ENTROPY, row.entropy * LN2), put(i, SUM_OF_SQUARES, row.squares);
    put(i, VARIANCE, row.variance * LN2 * LN2), put(i, DISTANCE, row.distance);
    for (int64_t n = 0; n < args_.band_count; ++n) put(i, NUM_STATISTICS + n, within(i, args_.bands[n]));
  }

  void put(int i, int64_t number, double x) {
    args_.statistics[number * args_.batch * args_.heads * args_.q_len + block_.number(args_, i)] =
        static_cast<float>(x);
  }

  // Return the sum of a row's weights in a band.
  double within(int i, const Band& band) const {
    const int64_t from = band.follows ? block_.row_of(i) : 0, first = from + band.first, stop = from + band.stop;
    const Row& row = rows_[i];
    Floats sum{};
    for (int64_t n = std::lower_bound(panels_, panels_ + count_, first / PANEL) - panels_; n < count_; ++n) {
      const int64_t key = panels_[n] * PANEL;
      if (key >= stop) break;
      const uint64_t word = bits_between(first - key, stop - key);
      for (int part = 0; part < PANEL; part += LANES) {
        const Ints is_in = lane_mask(word >> part & ALL_LANES);
        sum += is_in ? exp2(load(scores_ + i * stride_ + n * PANEL + part) - row.shift) * row.max_weight : Floats{};
      }
    }
    return exact_sum(sum);
  }

  const Arguments& args_;
  PackedRows<Format> keys_;
  int64_t stride_;
  float* scores_;      // of all panels of the block
  int64_t* panels_;    // numbers of these panels
  float* columns_;     // column sums of up to MAX_PANELS of them
  int64_t count_ = 0;  // number of stored panels
  Row rows_[ROWS];
  RowBlock block_;
};

// Run one thread: a task is one chunk of the blocks of all heads of a key head.
template <class Format>
void statistics_of(const Arguments& args, Arena arena, std::atomic<int64_t>& next) {
  Statistics<Format> work(args, arena);
  const int64_t group = args.heads / args.kv_heads, kv_heads = args.batch * args.kv_heads;
  for (int64_t task; (task = next.fetch_add(1)) < kv_heads * args.chunks;) {
    const int64_t kv = task / args.chunks, chunk = task % args.chunks;
    for (int64_t g = 0; g < group; ++g) {
      const int64_t head = kv % args.kv_heads * group + g;
      double* received = args.received + ((chunk * args.batch + kv / args.kv_heads) * args.heads + head) * args.kv_len;
      for (int64_t block = chunk; block < args.plan.blocks; block += args.chunks)
        work.run(RowBlock(args, kv / args.kv_heads, head, 1, block), received);
    }
  }
}

}  // namespace LEVEL
