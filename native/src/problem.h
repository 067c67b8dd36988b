// What is asked of a kernel: tensors, a plan, and what is done to scores; the same for every processor level.
#pragma once

#include <cstddef>
#include <cstdint>

constexpr int PANEL = 64;                    // keys that are packed together, and bits of a word
constexpr int ROWS = 24;                     // rows that are worked on together
constexpr int PANELS = 16;                   // panels that are, so that scores of all rows stay in the nearest cache
constexpr int STRIDE = PANELS * PANEL + 32;  // from row to row of scores: a power of 2 would share lines of the cache

// A tensor [batch, heads, rows, components], with strides in bytes; components follow one another.
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
  WHOLE,     // every row sees every key
  LIMITED,   // a row sees the keys of its spans
  RESIDUAL,  // a row sees the keys whose bits are set
};

struct Plan {
  int64_t items, blocks;  // batch items that are told apart (1: all alike), and blocks of ROWS rows of each
  const int32_t* starts;  // [items * blocks + 1]: where the runs of a block begin
  const Run* runs;
  const int32_t* spans;  // [items, q_len, spans_per_row, 2]
  int64_t spans_per_row;
  const uint64_t* bits;             // [.., .., q_len, panels], a bit for each key
  ptrdiff_t bits_batch, bits_head;  // strides, in words
  const uint64_t* visible;          // [batch, heads, panels]: keys that any row may see; null: all
};

// What a look finds of each row. Behind these come the sums of its weights in the bands.
enum Answer : int64_t { LARGEST_LOGIT, LARGEST_WEIGHT, HELD, ENTROPY, SQUARES, VARIANCE, DISTANCE, ANSWERS };

// Keys [first, stop) of a row, counted from the row's own number if they follow it.
struct Band {
  int32_t follows, first, stop;
};

struct Problem {
  View q, k, v, out;
  float* lse;
  int64_t batch, heads, kv_heads, q_len, kv_len, dim, value_dim;
  bool is_half;
  Plan plan;
  float scale, softcap;                     // a softcap of 0: none
  View bias;                                // float32; bias.data null: none. Keys follow one another
  const int32_t *row_words, *column_words;  // of dropout: [batch, heads, q_len] and [items, kv_len]; null: none
  ptrdiff_t column_words_batch;
  int32_t threshold;
  float kept;  // 1 / (1 - p)

  // Of the backward pass: gradients are float32 and lie without gaps.
  View grad_out;
  const float* delta;  // [batch, heads, q_len]: of grad_out * out the sum, less the lse's gradient
  float *grad_q, *grad_k, *grad_v;
  float* grad_bias;  // null: none; [chunks, batch, heads, table] or [batch, heads, q_len, kv_len]
  int64_t table;     // numbers of a row's bias that all rows share: by distance, or by key; 0: none
  int64_t chunks;    // parts of a head's rows that sum up gradients of keys apart, in this order

  // Of a look, which asks rows and columns for sums.
  int64_t most_panels;  // that one block of rows needs
  const float* sinks;   // [heads]: logarithms of one more term in each total; null: none
  int64_t ahead;        // from key i to query i, in positions
  const Band* bands;
  int64_t band_count;
  float* answers;    // [ANSWERS + band_count, batch, heads, q_len]
  double* received;  // [chunks, batch, heads, kv_len]

  int64_t panels() const { return (kv_len + PANEL - 1) / PANEL; }
  int keys_of(int64_t panel) const {
    return static_cast<int>(kv_len - panel * PANEL < PANEL ? kv_len - panel * PANEL : PANEL);
  }

  // Few rows: those of several heads are worked on together, and keys in several parts whose results are merged.
  int heads_at_once;
  int64_t parts;
  float* partial;  // [parts, batch, heads, q_len, value_dim + 2]: sums, largest score and total; null: one part
  bool meets_keys_once() const { return q_len <= ROWS && heads_at_once * kv_heads == heads; }
};
