// The flat batch of a step, as the caller hands it over.
#pragma once

#include <cstdint>

namespace turnstile {

// The caller's arrays, read until the step has run (shapes: see FlatBatch in kernels/base.py).
struct Batch {
  int page_size;
  int tokens, sequences, rows;
  const int32_t *ids, *positions, *query_offsets, *context_lengths, *logit_rows;
  const int32_t* page_tables;
  int64_t table_stride, table_width;
};

}  // namespace turnstile
