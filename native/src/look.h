// Questions to the weights: scores of a block of rows are held, and read twice, for their totals and for all else.
//
// What is summed over rows belongs to one task: every so many-th block of rows of a head. Sums are so taken in one
// order, whatever the number of threads.
#pragma once

#include <atomic>
#include <cmath>

#include "scores.h"

namespace LEVEL {

typedef double Doubles __attribute__((vector_size(LANES * 8)));

// The sum of all lanes in double precision: of 1 and 1e-9 both are left.
inline double exact_sum(Floats x) {
  const Doubles wide = __builtin_convertvector(x, Doubles);
  double sum = 0.0;
  for (int i = 0; i < LANES; ++i) sum += wide[i];
  return sum;
}

template <class E>
class Look {
 public:
  Look(const Problem& p, Arena& arena)
      : p_(p),
        keys_(arena, p, p.k, p.dim),
        stride_(p.most_panels * PANEL + 32),
        scores_(arena.take<float>(ROWS * stride_)),
        panels_(arena.take<int64_t>(p.most_panels)),
        columns_(arena.take<float>(PANELS * PANEL)) {}

  // Rows of one head; what keys receive is added to these [kv_len].
  void run(const Rows& its, double* received) {
    its_ = its, held_ = 0;
    for (int i = 0; i < its.count(); ++i) rows_[i] = {};
    each_part(p_, its, 0, p_.panels(), [&](const Seen& seen, bool) { add(seen); });
    for (int i = 0; i < its.count(); ++i) settle(i);
    // Backwards: what was written last is still near.
    for (int64_t stop = held_; stop > 0;) {
      const int64_t first = (stop - 1) / PANELS * PANELS;
      read(first, static_cast<int>(stop - first), received);
      stop = first;
    }
    for (int i = 0; i < its.count(); ++i) write(i);
  }

 private:
  // Of a row. Logarithms are those to the base 2, and stand relative to the largest score.
  struct Row {
    float most = -INF, shift = 0.0f, share = 0.0f, log_total = 0.0f, mean = 0.0f;  // share: of the largest score
    double total = 0.0, scores = 0.0;  // of weights, and of them times scores
    double entropy = 0.0, squares = 0.0, variance = 0.0, distance = 0.0;
  };

  static constexpr float LEAST = -2000.0f;  // in place of -inf: its weight is 0, and so is 0 times it

  void add(const Seen& seen) {
    using Item = typename E::Number;
    const Left<E> query{p_.q.at<Item>(its_.b, its_.head, its_.first), p_.q.row / static_cast<ptrdiff_t>(sizeof(Item)),
                        1};
    for (int n = 0; n < seen.count; ++n) {
      const int vectors = (p_.keys_of(seen.panel[n]) + LANES - 1) / LANES;
      const Out out{scores_ + (held_ + n) * PANEL, stride_};
      multiply<E>(out, query, keys_.get(its_, seen.panel[n]), its_.count(), vectors, p_.dim / E::PER_STEP, false);
      panels_[held_ + n] = seen.panel[n];
    }
    for (int i = 0; i < its_.count(); ++i) Terms::any(p_) ? total<true>(seen, i) : total<false>(seen, i);
    held_ += seen.count;
  }

  // Products become scores, -inf where a key is not seen, and are added to the row's total.
  template <bool TERMS>
  void total(const Seen& seen, int i) {
    float* scores = scores_ + i * stride_ + held_ * PANEL;
    const Terms terms(p_, its_, i);
    Row& row = rows_[i];
    Floats top = all(-INF);
    uint32_t any = 0;
    each_vector(seen, i, [&](int at, int64_t key, uint32_t bits) __attribute__((always_inline)) {
      Floats x = all(-INF);
      if (bits) {
        x = load(scores + at);
        x = TERMS ? terms.of(x, key, bits) : x * terms.factor;
        if (bits != EVERY) x = chosen(bits) ? x : all(-INF);
        top = most(top, x), any |= bits;
      }
      store(scores + at, x);
    });
    if (!any) return;
    const float before = row.shift;
    row.most = std::max(row.most, most_of(top)), row.shift = row.most == -INF ? 0.0f : row.most;
    Floats total{}, lost{}, sum{};  // lost: by rounding, where many small weights are added to a large one
    for (int at = 0; at < seen.count * PANEL; at += LANES) {
      const Floats x = load(scores + at) - row.shift, weight = exp2(x), next = total + weight;
      lost += weight - (next - total), total = next;
      sum += weight * most(all(LEAST), x);
    }
    const double fallen = row.total == 0.0 ? 0.0 : before - row.shift, factor = ::exp2(fallen);
    row.scores = (row.scores + fallen * row.total) * factor + exact_sum(sum);
    row.total = row.total * factor + exact_sum(total) + exact_sum(lost);
  }

  // The totals are known: what the second reading needs of them, and the sums that read few keys.
  void settle(int i) {
    Row& row = rows_[i];
    double total = row.total;
    if (p_.sinks && total != 0.0) total += ::exp2(static_cast<double>(p_.sinks[its_.head]) * (1.0 / LN2) - row.shift);
    if (total == 0.0) return;
    row.share = static_cast<float>(1.0 / total), row.log_total = static_cast<float>(std::log2(total));
    row.mean = static_cast<float>(row.scores / row.total - std::log2(total));
  }

  // Panels that are held, and what their keys receive.
  void read(int64_t first, int count, double* received) {
    std::fill(columns_, columns_ + count * PANEL, 0.0f);
    for (int i = 0; i < its_.count(); ++i) read_row(i, first, count);
    for (int n = 0; n < count; ++n) {
      double* to = received + panels_[first + n] * PANEL;
      const int keys = p_.keys_of(panels_[first + n]);
      for (int k = 0; k < keys; ++k) to[k] += columns_[n * PANEL + k];
    }
  }

  void read_row(int i, int64_t first, int count) {
    Row& row = rows_[i];
    const float* scores = scores_ + i * stride_ + first * PANEL;
    const float shift = row.shift, share = row.share, log_total = row.log_total, mean = row.mean;
    Floats entropy{}, squares{}, variance{}, distance{}, lane{};
    for (int n = 0; n < LANES; ++n) lane[n] = static_cast<float>(n);
    for (int n = 0; n < count; ++n) {
      const Floats away = static_cast<float>(its_.row_of(i) + p_.ahead - panels_[first + n] * PANEL) - lane;
      for (int part = 0; part < PANEL; part += LANES) {
        const int at = n * PANEL + part;
        const Floats x = load(scores + at) - shift, weight = exp2(x) * share;
        const Floats log = most(all(LEAST), x - log_total), far = away - static_cast<float>(part), off = log - mean;
        entropy -= weight * log, squares += weight * weight, variance += weight * off * off;
        distance += weight * (Floats)((Ints)far & 0x7FFFFFFF);
        store(columns_ + at, load(columns_ + at) + weight);
      }
    }
    row.entropy += exact_sum(entropy), row.squares += exact_sum(squares);
    row.variance += exact_sum(variance), row.distance += exact_sum(distance);
  }

  void write(int i) {
    const Row& row = rows_[i];
    const bool is_empty = row.total == 0.0, is_nan = row.total != row.total;
    put(i, LARGEST_LOGIT, is_empty ? -INF : is_nan ? row.total : row.most * LN2);
    put(i, LARGEST_WEIGHT, row.share), put(i, HELD, row.total * row.share);
    put(i, ENTROPY, row.entropy * LN2), put(i, SQUARES, row.squares);
    put(i, VARIANCE, row.variance * LN2 * LN2), put(i, DISTANCE, row.distance);
    for (int64_t n = 0; n < p_.band_count; ++n) put(i, ANSWERS + n, within(i, p_.bands[n]));
  }

  void put(int i, int64_t number, double x) {
    p_.answers[number * p_.batch * p_.heads * p_.q_len + its_.number(p_, i)] = static_cast<float>(x);
  }

  // The sum of a row's weights in a band.
  double within(int i, const Band& band) const {
    const int64_t from = band.follows ? its_.row_of(i) : 0, first = from + band.first, stop = from + band.stop;
    const Row& row = rows_[i];
    Floats sum{};
    for (int64_t n = std::lower_bound(panels_, panels_ + held_, first / PANEL) - panels_; n < held_; ++n) {
      const int64_t key = panels_[n] * PANEL;
      if (key >= stop) break;
      const uint64_t word = bits_between(first - key, stop - key);
      for (int part = 0; part < PANEL; part += LANES) {
        const Ints is_in = chosen(word >> part & EVERY);
        sum += is_in ? exp2(load(scores_ + i * stride_ + n * PANEL + part) - row.shift) * row.share : Floats{};
      }
    }
    return exact_sum(sum);
  }

  const Problem& p_;
  Columns<E> keys_;
  int64_t stride_;
  float* scores_;     // of all panels that the rows need
  int64_t* panels_;   // these
  float* columns_;    // sums of weights of some of them
  int64_t held_ = 0;  // how many there are
  Row rows_[ROWS];
  Rows its_;
};

// What one thread does: all heads of a key head, for one chunk of their blocks. Chunks lie behind one another in
// memory.
template <class E>
void look_of(const Problem& p, Arena arena, std::atomic<int64_t>& next) {
  Look<E> work(p, arena);
  const int64_t group = p.heads / p.kv_heads, kv_heads = p.batch * p.kv_heads;
  for (int64_t task; (task = next.fetch_add(1)) < kv_heads * p.chunks;) {
    const int64_t kv = task / p.chunks, chunk = task % p.chunks;
    for (int64_t g = 0; g < group; ++g) {
      const int64_t head = kv % p.kv_heads * group + g;
      double* received = p.received + ((chunk * p.batch + kv / p.kv_heads) * p.heads + head) * p.kv_len;
      for (int64_t block = chunk; block < p.plan.blocks; block += p.chunks)
        work.run(Rows(p, kv / p.kv_heads, head, 1, block), received);
    }
  }
}

}  // namespace LEVEL
