// K and V as float32 or bfloat16. Every accumulator runs over its inputs in order.
#pragma once

#include "isa/attend_span.h"

namespace turnstile::TURNSTILE_LEVEL {

struct Float32Words {
  static constexpr int kStep = 1;    // dimensions or tokens of a word
  static constexpr int kDegree = 6;  // of the polynomial for the weights
  INLINE F step(F acc, int32_t x, I y) { return fma(bits_f(splat_i(x)), bits_f(y), acc); }
  INLINE void words(F x, void* out) { store_i(out, bits_i(x)); }
  INLINE int32_t seen(Edge edge, int step) { return step >= edge.low && step < edge.high ? -1 : 0; }
};

struct Bfloat16Words {
  static constexpr int kStep = 2;
  static constexpr int kDegree = 4;
  INLINE F step(F acc, int32_t x, I y) { return dot2(acc, splat_i(x), y); }
  INLINE void words(F x, void* out) { store_bf16(static_cast<uint16_t*>(out), x); }
  INLINE int32_t seen(Edge edge, int step) {
    const uint32_t a = 2 * step >= edge.low && 2 * step < edge.high ? 0x0000FFFFu : 0;
    const uint32_t b = 2 * step + 1 >= edge.low && 2 * step + 1 < edge.high ? 0xFFFF0000u : 0;
    return static_cast<int32_t>(a | b);
  }
};

template <class Words>
struct FloatCache {
  static constexpr int kDegree = Words::kDegree;
  static constexpr int kBytes = 4 / Words::kStep;          // of a value
  static constexpr int kSteps = kTokens / Words::kStep;    // words of a block's weights
  static constexpr int kWeightBytes = kBytes * kSpan;      // of a line
  INLINE int block_bytes(int d) { return 2 * kBytes * d * kTokens; }
  INLINE size_t query_bytes(int d) { return static_cast<size_t>(kBytes) * d; }

  INLINE void prepare(const AttendTask& task, const Scratch& s, int lines, Ahead& ahead) {
    const int d = task.head_dim;
    for (int line = 0; line < lines; ++line) {
      ahead.during(Work::kQuery);
      for (int i = 0; i < d; i += 16)
        Words::words(load(s.lines[line].query + i), s.queries + line * query_bytes(d) + i * kBytes);
      s.factor[line] = task.scale * kLog2E;
    }
  }

  // Two accumulators a line: even steps and odd ones.
  static constexpr int kBlocks = 1;  // whose scores are computed together
  template <int lines, int blocks>
  INLINE void scores(const Scratch& s, const uint8_t* const* block, int line, F (*out)[lines]) {
    const int steps = s.head_dim / Words::kStep;
    const auto* query = reinterpret_cast<const int32_t*>(s.queries + line * query_bytes(s.head_dim));
    F acc[lines][2];
    for (int i = 0; i < lines; ++i) acc[i][0] = acc[i][1] = splat(0.0f);
    for (int step = 0; step < steps; step += 2) {
      for (int odd = 0; odd < 2; ++odd) {
        const I keys = load_i(*block + 64 * static_cast<size_t>(step + odd));
        for (int i = 0; i < lines; ++i) acc[i][odd] = Words::step(acc[i][odd], query[i * steps + step + odd], keys);
      }
    }
    for (int i = 0; i < lines; ++i) out[0][i] = acc[i][0] + acc[i][1];
  }

  struct Weigher {
    static constexpr float unit = 1.0f;
    Weigher(const Span&, Seen, int) {}
    INLINE void put(const F* p, int first, uint8_t* weights) {
      for (int i = 0; i < 4; ++i) Words::words(p[i], weights + (first + i) * kTokens * kBytes);
    }
  };

  // vectors * 16 dimensions of the weighted sum of V.
  template <int lines, int vectors>
  static void values(const Scratch& s, const Span& span, Seen seen, int line, int dim) {
    const int d = s.head_dim;
    F acc[lines][vectors];
    for (auto& of_line : acc)
      for (auto& lane : of_line) lane = splat(0.0f);
    for (int block = seen.from(); block < seen.to(); ++block) {
      if (dim == 0) span.ahead.during(Work::kValues);
      const uint8_t* data = span.blocks[block] + block_bytes(d) / 2 + 4 * static_cast<size_t>(dim);
      const auto* words = reinterpret_cast<const int32_t*>(s.weights) + block * kSteps;
      const Edge edge = seen.edge(block);
      for (int step = 0; step < kSteps; ++step) {
        I v[vectors];
        for (int j = 0; j < vectors; ++j) v[j] = load_i(data + 4 * static_cast<size_t>(step) * d + 64 * j);
        if (!edge.whole())
          for (int j = 0; j < vectors; ++j) v[j] = v[j] & splat_i(Words::seen(edge, step));
        for (int i = 0; i < lines; ++i)
          for (int j = 0; j < vectors; ++j)
            acc[i][j] = Words::step(acc[i][j], words[i * (kWeightBytes / 4) + step], v[j]);
      }
    }
    for (int j = 0; j < vectors; ++j)
      merge_results(s, line, lines, dim + 16 * j, [&](int i) { return acc[i][j]; });
  }
};

using Float32Cache = FloatCache<Float32Words>;
using Bfloat16Cache = FloatCache<Bfloat16Words>;

}  // namespace turnstile::TURNSTILE_LEVEL
