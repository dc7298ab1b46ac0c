#include "engine/layer.h"

#include <cmath>

namespace turnstile {

void Rope::reserve(int positions) {
  const size_t half = inv_freq_.size();
  const size_t have = table_.size() / (2 * half);
  if (static_cast<size_t>(positions) <= have) return;
  size_t want = have ? have : 256;
  while (want < static_cast<size_t>(positions)) want *= 2;
  table_.resize(want * 2 * half);
  for (size_t position = have; position < want; ++position) {
    float* row = table_.data() + position * 2 * half;
    for (size_t i = 0; i < half; ++i) {
      const float angle = static_cast<float>(position) * inv_freq_[i];  // float32, as in training
      row[i] = static_cast<float>(std::cos(static_cast<double>(angle))) * scale_;
      row[half + i] = static_cast<float>(std::sin(static_cast<double>(angle))) * scale_;
    }
  }
}

}  // namespace turnstile
