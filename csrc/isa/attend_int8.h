// K and V as int8. Queries and weights keep 16 bits, as two planes of bytes, so that only K and V are
// rounded to 8. All sums are of integers, and exact in any order.
#pragma once

#include "isa/attend_span.h"

namespace turnstile::TURNSTILE_LEVEL {

struct Int8Cache {
  static constexpr int kDegree = 4;  // 3e-6, beside weights rounded to 8e-6
  static constexpr int kWeightBytes = 2 * kSpan;  // of a line: high bytes, low bytes
  INLINE int block_bytes(int d) { return 2 * (4 + d) * kTokens; }
  INLINE size_t query_bytes(int d) { return 2 * static_cast<size_t>(d); }
  INLINE F key_scale(const uint8_t* block) { return load(reinterpret_cast<const float*>(block)); }
  INLINE const uint8_t* keys(const uint8_t* block) { return block + 4 * kTokens; }
  INLINE F value_scale(const uint8_t* block, int d) {
    return load(reinterpret_cast<const float*>(block + (4 + static_cast<size_t>(d)) * kTokens));
  }
  INLINE const uint8_t* values_of(const uint8_t* block, int d) { return block + (8 + static_cast<size_t>(d)) * kTokens; }

  // Keys are stored + 128: what a query makes of that is taken off its scores.
  INLINE void prepare(const AttendTask& task, const Scratch& s, int lines, Ahead& ahead) {
    constexpr int kSoon = 8;  // lines; a prompt's rows are not in the caches near by any more
    const int d = task.head_dim;
    for (int line = 0; line < lines; ++line) {
      ahead.during(Work::kQuery);
      if (line + kSoon < lines)
        for (int i = 0; i < d; i += 16) __builtin_prefetch(s.lines[line + kSoon].query + i);
      const float* x = s.lines[line].query;
      uint8_t* bytes = s.queries + line * query_bytes(d);
      F highest_lane = splat(0.0f), probe = splat(0.0f);
      for (int i = 0; i < d; i += 16) {
        highest_lane = max(highest_lane, abs(load(x + i)));
        probe = fma(load(x + i), splat(0.0f), probe);
      }
      const float largest = highest(highest_lane);
      const F inverse = splat(largest > 0 ? 32512.0f / largest : 0.0f);
      I total = splat_i(0);
      for (int i = 0; i < d; i += 16) {
        const I q = round_i(load(x + i) * inverse);
        const I high = right<8>(q + splat_i(128));
        const I low = q - left<8>(high);
        total = total + q;
        store_u8(bytes + i, high);
        store_u8(bytes + d + i, low);
      }
      s.factor[line] = (largest / 32512.0f + sum(probe)) * task.scale * kLog2E;
      s.bias[line] = -128 * static_cast<int32_t>(sum(float_of(total)));  // exact: below 2^24
    }
  }

  // Of two planes: below 2^31 with its bias (see kMostDimensions), and rounded once.
  INLINE F whole(I high, I low) { return float_of(times_256(high) + low); }

  // Two blocks at a time where the registers are enough: a sum takes as long as several multiplications.
#if defined(__AVX512F__)
  static constexpr int kBlocks = 2;
#else
  static constexpr int kBlocks = 1;
#endif
  template <int lines, int blocks>
  INLINE void scores(const Scratch& s, const uint8_t* const* block, int line, F (*out)[lines]) {
    const int quads = s.head_dim / 4;
    const auto* query = reinterpret_cast<const int32_t*>(s.queries + line * query_bytes(s.head_dim));
    I high[blocks][lines], low[blocks][lines];
    for (int b = 0; b < blocks; ++b) {
      for (int i = 0; i < lines; ++i) high[b][i] = low[b][i] = splat_i(0);
    }
    for (int quad = 0; quad < quads; ++quad) {
      I k[blocks];
      for (int b = 0; b < blocks; ++b) k[b] = load_i(keys(block[b]) + 64 * static_cast<size_t>(quad));
      for (int i = 0; i < lines; ++i) {
        const I q_high = splat_i(query[2 * i * quads + quad]), q_low = splat_i(query[(2 * i + 1) * quads + quad]);
        for (int b = 0; b < blocks; ++b) {
          high[b][i] = dot4(high[b][i], k[b], q_high);
          low[b][i] = dot4(low[b][i], k[b], q_low);
        }
      }
    }
    for (int b = 0; b < blocks; ++b) {
      const F scale = key_scale(block[b]);
      for (int i = 0; i < lines; ++i) out[b][i] = whole(high[b][i], low[b][i] + splat_i(s.bias[line + i])) * scale;
    }
  }

  // A weight times the scale of V, as 16 bits of the largest scale that is seen of the span.
  struct Weigher {
    F scale[kSpanBlocks];
    float unit;
    Weigher(const Span& span, Seen seen, int d) {
      F highest_lane = splat(0.0f), probe = splat(0.0f);
      for (int block = 0; block < kSpanBlocks; ++block) {
        scale[block] = splat(0.0f);
        if (block < seen.from() || block >= seen.to()) continue;
        const Edge edge = seen.edge(block);
        F v = value_scale(span.blocks[block], d);
        if (!edge.whole()) v = between(v, splat(0.0f), edge.low, edge.high);
        scale[block] = v;
        highest_lane = max(highest_lane, v);
        probe = fma(v, splat(0.0f), probe);  // NaN if one is
      }
      const float largest = highest(highest_lane);
      unit = largest / 65280.0f + TURNSTILE_LEVEL::sum(probe);
      const F inverse = splat(largest > 0 ? 65280.0f / largest : 0.0f);
      for (F& v : scale) v = v * inverse;
    }
    void put(const F* p, int first, uint8_t* weights) const {
      I q[4];
      for (int i = 0; i < 4; ++i) q[i] = round_i(p[i] * scale[first + i]);
      store_planes(q, weights + first * kTokens, weights + kSpan + first * kTokens);
    }
  };

  template <int lines, int vectors>
  static void values(const Scratch& s, const Span& span, Seen seen, int line, int dim) {
    const int d = s.head_dim;
    I high[lines][vectors], low[lines][vectors];
    for (int i = 0; i < lines; ++i)
      for (int j = 0; j < vectors; ++j) high[i][j] = low[i][j] = splat_i(0);
    const auto* words = reinterpret_cast<const int32_t*>(s.weights);
    for (int block = seen.from(); block < seen.to(); ++block) {
      if (dim == 0) span.ahead.during(Work::kValues);
      const uint8_t* data = values_of(span.blocks[block], d) + 4 * static_cast<size_t>(dim);
      for (int quad = 0; quad < 4; ++quad) {
        I v[vectors];
        for (int j = 0; j < vectors; ++j) v[j] = load_i(data + 4 * static_cast<size_t>(quad) * d + 64 * j);
        for (int i = 0; i < lines; ++i) {
          const int32_t* word = words + i * (kWeightBytes / 4) + 4 * block + quad;
          const I p_high = splat_i(word[0]), p_low = splat_i(word[kSpan / 4]);
          for (int j = 0; j < vectors; ++j) {
            high[i][j] = dot4(high[i][j], p_high, v[j]);
            low[i][j] = dot4(low[i][j], p_low, v[j]);
          }
        }
      }
    }
    for (int j = 0; j < vectors; ++j)
      merge_results(s, line, lines, dim + 16 * j, [&](int i) { return whole(high[i][j], low[i][j]); });
  }
};

}  // namespace turnstile::TURNSTILE_LEVEL
