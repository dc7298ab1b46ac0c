// What sampling asks of a row of logits, without sorting the vocabulary.
#pragma once

#include "isa/kernels.h"
#include "isa/math.h"

extern "C" float logf(float) noexcept;

namespace turnstile::TURNSTILE_LEVEL {

INLINE float row_maximum(const RowTask& task) {
  F best[4];
  for (auto& lane : best) lane = splat(-__builtin_inff());
  int64_t i = 0;
  for (; i + 64 <= task.width; i += 64)
    for (int part = 0; part < 4; ++part) best[part] = max(load(task.logits + i + 16 * part), best[part]);
  float top = highest(max(max(best[0], best[1]), max(best[2], best[3])));
  for (; i < task.width; ++i) top = task.logits[i] > top ? task.logits[i] : top;
  return top;
}

static int64_t argmax(const RowTask& task) {
  const float top = row_maximum(task);
  int64_t i = 0;
  for (; i + 16 <= task.width; i += 16) {
    const unsigned mask = equal_mask(load(task.logits + i), splat(top));
    if (mask) return i + __builtin_ctz(mask);
  }
  for (; i < task.width; ++i)
    if (task.logits[i] == top) return i;
  return 0;  // every logit is NaN
}

// log of the sum of exp: the lanes are summed in order, then in a fixed tree. A NaN or +inf logit, or
// a row of nothing but -inf, gives NaN.
static float log_normalizer(const RowTask& task) {
  const float top = row_maximum(task);
  F total[2] = {splat(0.0f), splat(0.0f)};
  int64_t i = 0;
  for (; i + 32 <= task.width; i += 32)
    for (int part = 0; part < 2; ++part)
      total[part] = total[part] + exp(load(task.logits + i + 16 * part) - splat(top));
  float all = sum(total[0] + total[1]);
  for (; i < task.width; ++i) all += exp_one(task.logits[i] - top);
  return top + logf(all);
}

// A heap of the best so far, worst on top: worse is a lower value, or the same value further right.
struct Heap {
  float* values;
  int64_t* indices;
  int size;

  bool worse(int a, int b) const {
    return values[a] < values[b] || (values[a] == values[b] && indices[a] > indices[b]);
  }
  void swap(int a, int b) {
    const float value = values[a];
    const int64_t index = indices[a];
    values[a] = values[b];
    indices[a] = indices[b];
    values[b] = value;
    indices[b] = index;
  }
  void sink(int at) {
    for (;;) {
      int child = 2 * at + 1;
      if (child >= size) return;
      if (child + 1 < size && worse(child + 1, child)) ++child;
      if (!worse(child, at)) return;
      swap(child, at);
      at = child;
    }
  }
};

static void top_k(const RowTask& task, int k, float* values, int64_t* indices) {
  Heap heap{values, indices, k};
  for (int i = 0; i < k; ++i) {
    values[i] = task.logits[i];
    indices[i] = i;
  }
  for (int at = k / 2 - 1; at >= 0; --at) heap.sink(at);
  const auto offer = [&](int64_t i) {
    if (!(task.logits[i] > values[0])) return;  // an equal one further right is worse
    values[0] = task.logits[i];
    indices[0] = i;
    heap.sink(0);
  };
  int64_t i = k;
  for (; i + 16 <= task.width; i += 16) {
    unsigned mask = greater_mask(load(task.logits + i), splat(values[0]));
    for (; mask; mask &= mask - 1) offer(i + __builtin_ctz(mask));
  }
  for (; i < task.width; ++i) offer(i);
  while (heap.size > 1) {  // the worst goes last, again and again
    heap.swap(0, heap.size - 1);
    --heap.size;
    heap.sink(0);
  }
}

}  // namespace turnstile::TURNSTILE_LEVEL
