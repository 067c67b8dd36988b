// The arguments of a kernel: tensors, the plan of the mask, and the score options. Identical for every CPU level.
#pragma once

#include <cstddef>
#include <cstdint>

constexpr int PANEL = 64;  // keys of a packed panel, and bits of a mask word
constexpr int ROWS = 24;   // query rows of a block

// A tensor [batch, heads, rows, components] with strides in bytes; components are contiguous.
struct View {
  char* data;
  ptrdiff_t batch, head, row;
  template <class T>
  T* at(int64_t b, int64_t h, int64_t i) const {
    return reinterpret_cast<T*>(data + b * batch + h * head + i * row);
  }
};

// Panels of keys [first, stop) that a block of rows needs.
struct Run {
  int32_t first, stop, kind;
};

enum Kind : int32_t {
  WHOLE,     // every row attends to every key
  LIMITED,   // a row attends to the keys of its spans
  RESIDUAL,  // a row attends to the keys whose bits are set
};

struct Plan {
  int64_t items, blocks;  // distinct batch items (1: all share the plan), and blocks of ROWS rows per item
  const int32_t* starts;  // [items * blocks + 1]: index of each block's first run
  const Run* runs;
  const int32_t* spans;  // [items, q_len, spans_per_row, 2]
  int64_t spans_per_row;
  const uint64_t* bits;             // [batch or 1, heads or 1, q_len, panels]: one bit per key
  ptrdiff_t bits_batch, bits_head;  // strides in words
  const uint64_t* visible;          // [batch, heads, panels]: bits of the keys that some row may attend to; null: all
};

// The statistics of a row, in order. The sums of its weights in each band follow.
enum Statistic : int64_t {
  LARGEST_LOGIT,
  LARGEST_WEIGHT,
  TOTAL,
  ENTROPY,
  SUM_OF_SQUARES,
  VARIANCE,
  DISTANCE,
  NUM_STATISTICS
};

// Keys [first, stop), relative to the row's index if `follows`.
struct Band {
  int32_t follows, first, stop;
};

struct Arguments {
  View q, k, v, out;
  float* lse;
  int64_t batch, heads, kv_heads, q_len, kv_len, dim, value_dim;
  bool is_bf16;
  Plan plan;
  float scale, softcap;  // softcap 0: none
  View bias;             // float32, contiguous along keys; bias.data null: none
  const int32_t *row_words,
      *column_words;  // dropout hashes [batch, heads, q_len] and [items, kv_len]; null: no dropout
  ptrdiff_t column_words_batch;
  int32_t threshold;
  float dropout_scale;  // 1 / (1 - p)

  // Backward only. Gradients are contiguous float32.
  View grad_out;
  const float* delta;  // [batch, heads, q_len]: sum(grad_out * out) - grad_lse
  float *grad_q, *grad_k, *grad_v;
  float* grad_bias;  // null: none; [chunks, batch, heads, table] or [batch, heads, q_len, kv_len]
  int64_t table;     // length of a bias shared by all rows (by distance or by key); 0: a bias per row
  int64_t chunks;    // parts of a head's rows; each accumulates its key gradients separately, in a fixed order

  // Statistics only.
  int64_t max_panels;  // largest number of panels of a block
  const float* sinks;  // [heads]: logit of an extra softmax term; null: none
  int64_t offset;      // position of query i minus position of key i
  const Band* bands;
  int64_t band_count;
  float* statistics;  // [NUM_STATISTICS + band_count, batch, heads, q_len]
  double* received;   // [chunks, batch, heads, kv_len]

  bool has_bias_per_row() const { return grad_bias && !table; }  // whose gradient each task clears for its own rows

  int64_t panels() const { return (kv_len + PANEL - 1) / PANEL; }
  int keys_in(int64_t panel) const {
    return static_cast<int>(kv_len - panel * PANEL < PANEL ? kv_len - panel * PANEL : PANEL);
  }

  // For few query rows: heads that share keys form one block, and the keys are split into parts that are merged.
  int heads_per_task;
  int64_t key_parts;
  float* partial;  // [key_parts, batch, heads, q_len, value_dim + 2]: sums, row maximum, row sum; null: one part
  bool reads_keys_once() const { return q_len <= ROWS && heads_per_task * kv_heads == heads; }
};
