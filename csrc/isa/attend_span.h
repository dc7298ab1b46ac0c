// What attention has in common for all storage formats: a span and who sees what of it, the scratch
// memory, the weights of a line and the merging of states. See attend.h.
#pragma once

#include "isa/ahead.h"
#include "isa/kernels.h"
#include "isa/math.h"

namespace turnstile::TURNSTILE_LEVEL {

constexpr int kLines = 48;     // computed together at most
constexpr int kTileLines = 16; // of these, the lines whose scores are kept at a time
constexpr int kFewLines = 4;   // int8: up to so many wait less for vectors than for tiles
#if defined(__AVX512F__)
constexpr int kGroup = 4, kVectors = 2;  // lines at a time, vectors of V at a time
#else
constexpr int kGroup = 2, kVectors = 1;
#endif
constexpr float kNothing = -3e38f;  // the maximum of no scores; finite, so that it can be subtracted from itself

struct Line {  // one query head of one token
  const float* query;
  uint8_t* out;
  float* state;
  int first, last;
};

struct Edge {  // the tokens of a block that are seen: low <= slot < high
  int low, high;
  bool whole() const { return low == 0 && high == kTokens; }
};

struct Seen {  // the tokens of a span that are seen
  int low, high;
  bool operator==(const Seen& other) const { return low == other.low && high == other.high; }
  bool none() const { return high <= low; }
  int from() const { return low / kTokens; }
  int to() const { return (high + kTokens - 1) / kTokens; }
  Edge edge(int block) const {
    const int start = block * kTokens;
    return {low > start ? low - start : 0, high - start < kTokens ? high - start : kTokens};
  }
};

struct Span {
  const uint8_t* const* blocks;
  int count;
  int start;  // its first token
  Ahead& ahead;

  Span(const AttendTask& task, int from, int to, Ahead& fetched)
      : blocks(task.blocks + from), count(to - from), start(from * kTokens), ahead(fetched) {}
  INLINE Seen clamp(int low, int high, int count) {
    return {low > 0 ? low : 0, high < count * kTokens ? high : count * kTokens};
  }
  Seen seen(const Line& line) const { return clamp(line.first - start, line.last - start, count); }
};

struct Scratch {
  int head_dim;
  Line* lines;       // [kLines]
  // Of all lines:
  uint8_t* queries;  // [kLines][Cache::query_bytes]: as the products want them
  int32_t* bias;     // [kLines]: int8 only, see there
  float* factor;     // [kLines + 16]: what a score is multiplied by at last
  float *maximum, *total;  // [kLines + 16]
  float* result;     // [kLines][head_dim]
  // Of a span:
  float *top, *sum, *unit;  // [kLines + 16]: largest score, sum of the weights, what the sum of V is measured in
  float *before, *now;      // [kLines + 16]: what the result so far and the span's are multiplied by
  // Of the lines at hand:
  float* scores;     // [kTileLines][kSpan]
  uint8_t* weights;  // [kTileLines][Cache::kWeightBytes]
  int32_t* sums;     // [2][kTileLines][2][kTokens]: tiles only, products of int8
  uint8_t* values;   // [kSpan][head_dim]: tiles only, V of the span, block after block

  Scratch(uint8_t* memory, int d) : head_dim(d) {
    const auto take = [&](size_t bytes) {
      uint8_t* taken = memory;
      memory += (bytes + 63) / 64 * 64;
      return taken;
    };
    const auto floats = [&](size_t count) { return reinterpret_cast<float*>(take(4 * count)); };
    lines = reinterpret_cast<Line*>(take(kLines * sizeof(Line)));
    queries = take(4 * static_cast<size_t>(kLines) * d);
    bias = reinterpret_cast<int32_t*>(floats(kLines));
    factor = floats(kLines + 16);
    maximum = floats(kLines + 16);
    total = floats(kLines + 16);
    result = floats(static_cast<size_t>(kLines) * d);
    scores = floats(kTileLines * kSpan);
    weights = take(4 * kTileLines * kSpan);
    sums = reinterpret_cast<int32_t*>(take(4 * 2 * kTileLines * 2 * kTokens));
    top = floats(kLines + 16);
    sum = floats(kLines + 16);
    unit = floats(kLines + 16);
    before = floats(kLines + 16);
    now = floats(kLines + 16);
    values = take(static_cast<size_t>(kSpan) * d);
    end = memory;
  }
  uint8_t* end;
};

static size_t attend_scratch_bytes(int head_dim) { return reinterpret_cast<uintptr_t>(Scratch(nullptr, head_dim).end); }

// How many lines from `line` on see the same tokens of the span.
INLINE int alike(const Scratch& s, const Span& span, int line, int lines, int most) {
  const Seen seen = span.seen(s.lines[line]);
  int count = 1;
  while (count < most && line + count < lines && span.seen(s.lines[line + count]) == seen) ++count;
  return count;
}

// The weights of line `line`, whose scores are in place `place` and whose largest is known, for all blocks
// of the span. Returns their sum, by lanes.
template <class Cache>
INLINE F weigh(const Scratch& s, const Span& span, int line, int place, Seen seen, const typename Cache::Weigher& weigher) {
  constexpr int kFour = 4;  // blocks at a time: 64 tokens fill a vector of bytes
  const float* scores = s.scores + place * kSpan;
  uint8_t* weights = s.weights + place * Cache::kWeightBytes;
  const F factor = splat(s.factor[line]), minus_top = splat(-s.top[line]);
  F total = splat(0.0f);
  for (int first = 0; first < span.count; first += kFour) {
    F p[kFour];
    if (seen.low <= first * kTokens && seen.high >= (first + kFour) * kTokens) {
      for (int i = 0; i < kFour; ++i) {
        p[i] = exp2<Cache::kDegree>(fma(load(scores + (first + i) * kTokens), factor, minus_top));
        total = total + p[i];
      }
    } else {
      for (int i = 0; i < kFour; ++i) {
        const int block = first + i;
        p[i] = splat(0.0f);
        if (block < seen.from() || block >= seen.to()) continue;
        p[i] = exp2<Cache::kDegree>(fma(load(scores + block * kTokens), factor, minus_top));
        const Edge edge = seen.edge(block);
        if (!edge.whole()) p[i] = between(p[i], splat(0.0f), edge.low, edge.high);
        total = total + p[i];
      }
    }
    weigher.put(p, first, weights);
  }
  span.ahead.during(Work::kWeights);
  s.unit[line] = weigher.unit;
  return total;
}

// A line that sees nothing of the span.
template <class Cache>
INLINE F weigh_nothing(const Scratch& s, int line, int place) {
  for (int i = 0; i < Cache::kWeightBytes; i += 64)
    store_i(s.weights + place * Cache::kWeightBytes + i, splat_i(0));
  s.top[line] = kNothing;
  s.unit[line] = 0.0f;
  return splat(0.0f);
}

// Merges maximum and total of a span into those of up to 16 lines from `line` on, and says by what their
// results are to be multiplied.
INLINE void merge_states(const Scratch& s, int line, int lines) {
  const F old = load(s.maximum + line), here = load(s.top + line), highest = max(old, here);
  const F before = exp2<6>(old - highest), now = exp2<6>(here - highest), total = load(s.total + line);
  store(s.before + line, before);
  store(s.now + line, now * load(s.unit + line));
  store(s.maximum + line, between(highest, old, 0, lines));
  store(s.total + line, between(fma(total, before, load(s.sum + line) * now), total, 0, lines));
}

// 16 dimensions of a span's weighted sums into the results of some lines.
template <class Value>
INLINE void merge_results(const Scratch& s, int line, int lines, int dim, const Value& value) {
  const int d = s.head_dim;
  float* result = s.result + line * d + dim;
  const float *before = s.before + line, *now = s.now + line;
  for (int i = 0; i < lines; ++i, result += d) store(result, fma(load(result), splat(before[i]), value(i) * splat(now[i])));
}

}  // namespace turnstile::TURNSTILE_LEVEL
