// Rows of logits, shared out over the team: each row is one member's work from beginning to end.
#pragma once

#include "engine/team.h"
#include "isa/kernels.h"

namespace turnstile {

struct Logits {
  const float* data;
  int rows;
  int64_t width, stride;
};

void argmax(Team& team, const Kernels& kernels, const Logits& logits, int64_t* out);
void log_normalizer(Team& team, const Kernels& kernels, const Logits& logits, float* out);
void top_k(Team& team, const Kernels& kernels, const Logits& logits, int k, float* values, int64_t* indices);

}  // namespace turnstile
