#include "engine/logits.h"

namespace turnstile {

namespace {

template <class Body>
void each_row(Team& team, const Logits& logits, const Body& body) {
  if (logits.rows == 1) return body(0);
  team.run(1, [&](Member& member) { member.share(static_cast<uint32_t>(logits.rows), body); });
}

RowTask row_of(const Logits& logits, uint32_t row) { return {logits.data + row * logits.stride, logits.width}; }

}  // namespace

void argmax(Team& team, const Kernels& kernels, const Logits& logits, int64_t* out) {
  each_row(team, logits, [&](uint32_t row) { out[row] = kernels.argmax(row_of(logits, row)); });
}

void log_normalizer(Team& team, const Kernels& kernels, const Logits& logits, float* out) {
  each_row(team, logits, [&](uint32_t row) { out[row] = kernels.log_normalizer(row_of(logits, row)); });
}

void top_k(Team& team, const Kernels& kernels, const Logits& logits, int k, float* values, int64_t* indices) {
  each_row(team, logits, [&](uint32_t row) {
    kernels.top_k(row_of(logits, row), k, values + static_cast<int64_t>(row) * k, indices + static_cast<int64_t>(row) * k);
  });
}

}  // namespace turnstile
