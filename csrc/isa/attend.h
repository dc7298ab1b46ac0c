// Attention of one token over the blocks of one KV head: the same function for decode and for every
// row of a prompt chunk, so that neither can tell.
//
// The context is taken in spans of 32 blocks (512 tokens), at fixed places of the sequence:
//   1. scores of the span, 16 tokens a vector     (reads K)
//   2. weights: exp(score - maximum so far), in the form the products want
//   3. weighted sum of V, in registers            (reads V)
//   4. merged into the state (maximum, sum, result) of the spans before
// Within a span the order is fixed by the positions, so a row's result depends on its tokens alone.
// Slots outside [first, last) may hold anything: their weight is exactly zero, and where zero times
// garbage could be NaN, the garbage is masked away.
#pragma once

#include "isa/kernels.h"
#include "isa/math.h"

namespace turnstile::TURNSTILE_LEVEL {

constexpr int kSpanBlocks = 32;
constexpr int kSpan = kSpanBlocks * kTokens;
#if defined(__AVX512F__)
constexpr int kGroup = 4, kVectors = 2;  // query heads at a time, vectors of V at a time
#else
constexpr int kGroup = 2, kVectors = 1;
#endif

// What the three storage formats share: views of the scratch memory for `kGroup` heads.
struct Scratch {
  float* scores;    // [kGroup][kSpan]
  int32_t* weights; // per block and head: the words to broadcast
  int32_t* query;   // per head: the words to broadcast
  float* result;    // [2][kGroup][head_dim]: the spans so far, this span
};

INLINE Scratch scratch_of(uint8_t* memory, int head_dim) {
  Scratch s;
  s.scores = reinterpret_cast<float*>(memory);
  s.weights = reinterpret_cast<int32_t*>(s.scores + kGroup * kSpan);
  s.query = s.weights + kGroup * kSpan;
  s.result = reinterpret_cast<float*>(s.query + kGroup * (head_dim + 4));
  return s;
}

static size_t attend_scratch_bytes(int head_dim) {
  return 4 * static_cast<size_t>(kGroup) * (2 * kSpan + head_dim + 4 + 2 * head_dim);
}

struct Edge {  // the tokens of a block that are seen: low <= slot < high
  int low, high;
  INLINE Edge of(const AttendTask& task, int block) {
    const int start = block * kTokens;
    const int low = task.first > start ? task.first - start : 0;
    const int high = task.last - start < kTokens ? task.last - start : kTokens;
    return {low, high};
  }
  bool whole() const { return low == 0 && high == kTokens; }
};

// Into the second-level cache: the blocks of the next span or the next task, while this one computes.
INLINE void prefetch(const uint8_t* block, int bytes) {
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(block + i, 0, 2);
}

// -- float32 and bfloat16 ------------------------------------------------------------------------

struct Float32Cache {
  static constexpr int kStep = 1;  // dimensions or tokens of a word
  INLINE F step(F acc, int32_t x, I y) { return fma(bits_f(splat_i(x)), bits_f(y), acc); }
  INLINE int block_bytes(int d) { return 2 * 4 * d * kTokens; }
  INLINE void words(F x, int32_t* out) { store_i(out, bits_i(x)); }
  INLINE int32_t seen(Edge edge, int step) { return step >= edge.low && step < edge.high ? -1 : 0; }
};

struct Bfloat16Cache {
  static constexpr int kStep = 2;
  INLINE F step(F acc, int32_t x, I y) { return dot2(acc, splat_i(x), y); }
  INLINE int block_bytes(int d) { return 2 * 2 * d * kTokens; }
  INLINE void words(F x, int32_t* out) { store_bf16(reinterpret_cast<uint16_t*>(out), x); }
  INLINE int32_t seen(Edge edge, int step) {
    const uint32_t a = 2 * step >= edge.low && 2 * step < edge.high ? 0x0000FFFFu : 0;
    const uint32_t b = 2 * step + 1 >= edge.low && 2 * step + 1 < edge.high ? 0xFFFF0000u : 0;
    return static_cast<int32_t>(a | b);
  }
};

// Scores of a block for `heads` query heads. Two accumulators a head: even steps and odd ones.
template <class Cache, int heads>
INLINE void float_scores(const uint8_t* block, const int32_t* query, int steps, F* out) {
  F acc[heads][2];
  for (int h = 0; h < heads; ++h) acc[h][0] = acc[h][1] = splat(0.0f);
  for (int step = 0; step < steps; step += 2) {
    for (int odd = 0; odd < 2; ++odd) {
      const I keys = load_i(block + 64 * static_cast<size_t>(step + odd));
      for (int h = 0; h < heads; ++h)
        acc[h][odd] = Cache::step(acc[h][odd], query[h * steps + step + odd], keys);
    }
  }
  for (int h = 0; h < heads; ++h) out[h] = acc[h][0] + acc[h][1];
}

// vectors * 16 dimensions of the weighted sum of V over the blocks of a span.
template <class Cache, int heads, int vectors>
static void float_values(const AttendTask& task, const int32_t* weights, int from, int to, int dim,
                         float* out) {
  constexpr int steps = kTokens / Cache::kStep;
  const int d = task.head_dim;
  F acc[heads][vectors];
  for (auto& head : acc)
    for (auto& lane : head) lane = splat(0.0f);
  for (int block = from; block < to; ++block) {
    const uint8_t* values = task.blocks[block] + Cache::block_bytes(d) / 2 + 4 * static_cast<size_t>(dim);
    const int32_t* words = weights + (block - from) * steps * heads;
    const Edge edge = Edge::of(task, block);
    for (int step = 0; step < steps; ++step) {
      I v[vectors];
      for (int i = 0; i < vectors; ++i)
        v[i] = load_i(values + 4 * static_cast<size_t>(step) * d + 64 * i);
      if (!edge.whole())
        for (int i = 0; i < vectors; ++i) v[i] = v[i] & splat_i(Cache::seen(edge, step));
      for (int h = 0; h < heads; ++h)
        for (int i = 0; i < vectors; ++i) acc[h][i] = Cache::step(acc[h][i], words[h * steps + step], v[i]);
    }
  }
  for (int h = 0; h < heads; ++h)
    for (int i = 0; i < vectors; ++i) store(out + h * d + dim + 16 * i, acc[h][i]);
}

template <class Cache>
struct FloatAttention {
  template <int heads>
  INLINE void prepare(const AttendTask& task, int head, const Scratch& s) {
    const float* x = task.queries + static_cast<size_t>(head) * task.head_dim;
    for (int i = 0; i < heads * task.head_dim; i += 16) Cache::words(load(x + i), s.query + i / Cache::kStep);
  }
  template <int heads>
  INLINE void scores(const AttendTask& task, const Scratch& s, int block, F* out) {
    float_scores<Cache, heads>(task.blocks[block], s.query, task.head_dim / Cache::kStep, out);
    for (int h = 0; h < heads; ++h) out[h] = out[h] * splat(task.scale);
  }
  INLINE int block_bytes(int d) { return Cache::block_bytes(d); }
  // The weights p[16] of a block, as words.
  struct Weigher {
    explicit Weigher(const AttendTask&, int, int) {}
    INLINE void put(const AttendTask&, F p, Edge, int, int32_t* words) { Cache::words(p, words); }
  };
  static constexpr int kWords = kTokens / Cache::kStep;  // of a block and head
  template <int heads, int vectors>
  INLINE void values(const AttendTask& task, const Scratch& s, int from, int to, int dim, const Weigher&,
                     float* out) {
    float_values<Cache, heads, vectors>(task, s.weights, from, to, dim, out);
  }
};

// -- int8 ----------------------------------------------------------------------------------------
// Queries and weights keep 16 bits, as two bytes each, so that only K and V are rounded to 8.

struct Int8Attention {
  static constexpr int kWords = 2 * kTokens / 4;  // of a block and head: high bytes, low bytes

  // Query words, then, per head: scale, 128 * sum of the high bytes, 128 * sum of the low ones.
  struct Query { float scale; int32_t high, low; };
  INLINE Query* query_of(const AttendTask& task, const Scratch& s) {
    return reinterpret_cast<Query*>(s.query + kGroup * task.head_dim / 2);
  }
  INLINE int block_bytes(int d) { return 2 * (4 + d) * kTokens; }

  template <int heads>
  INLINE void prepare(const AttendTask& task, int head, const Scratch& s) {
    const int d = task.head_dim;
    for (int h = 0; h < heads; ++h) {
      const float* x = task.queries + static_cast<size_t>(head + h) * d;
      F highest_lane = splat(0.0f), probe = splat(0.0f);
      for (int i = 0; i < d; i += 16) {
        highest_lane = max(highest_lane, abs(load(x + i)));
        probe = fma(load(x + i), splat(0.0f), probe);
      }
      const float largest = highest(highest_lane);
      const F inverse = splat(largest > 0 ? 32512.0f / largest : 0.0f);
      I sum_high = splat_i(0), sum_low = splat_i(0);
      auto* bytes = reinterpret_cast<uint8_t*>(s.query) + static_cast<size_t>(2 * h) * d;
      for (int i = 0; i < d; i += 16) {
        const I q = round_i(load(x + i) * inverse);
        const I high = right<8>(q + splat_i(128));
        const I low = q - left<8>(high);
        sum_high = sum_high + high;
        sum_low = sum_low + low;
        store_u8(bytes + i, high);
        store_u8(bytes + d + i, low);
      }
      Query& query = query_of(task, s)[h];
      query.scale = (largest / 32512.0f + sum(probe)) * task.scale;
      query.high = 128 * static_cast<int32_t>(sum(float_of(sum_high)));  // exact: below 2^24
      query.low = 128 * static_cast<int32_t>(sum(float_of(sum_low)));
    }
  }

  template <int heads>
  INLINE void scores(const AttendTask& task, const Scratch& s, int block, F* out) {
    const uint8_t* data = task.blocks[block];
    const F key_scale = load(reinterpret_cast<const float*>(data));
    const uint8_t* keys = data + 4 * kTokens;
    I high[heads], low[heads];
    for (int h = 0; h < heads; ++h) high[h] = low[h] = splat_i(0);
    const int quads = task.head_dim / 4;
    for (int quad = 0; quad < quads; ++quad) {
      const I k = load_i(keys + 64 * static_cast<size_t>(quad));
      for (int h = 0; h < heads; ++h) {
        high[h] = dot4(high[h], k, splat_i(s.query[2 * h * quads + quad]));
        low[h] = dot4(low[h], k, splat_i(s.query[(2 * h + 1) * quads + quad]));
      }
    }
    const Query* query = query_of(task, s);
    for (int h = 0; h < heads; ++h) {
      const F a = float_of(high[h] - splat_i(query[h].high));
      const F b = float_of(low[h] - splat_i(query[h].low));
      out[h] = fma(a, splat(256.0f), b) * (splat(query[h].scale) * key_scale);
    }
  }

  INLINE const float* value_scale(const AttendTask& task, int block) {
    return reinterpret_cast<const float*>(task.blocks[block] + (4 + static_cast<size_t>(task.head_dim)) * kTokens);
  }

  // The weight times the scale of V, as 16 bits of the largest scale in the span.
  struct Weigher {
    float unit, inverse;
    F probe;
    Weigher(const AttendTask& task, int from, int to) : probe(splat(0.0f)) {
      F highest_lane = splat(0.0f);
      for (int block = from; block < to; ++block) {
        const Edge edge = Edge::of(task, block);
        F v = load(value_scale(task, block));
        if (!edge.whole()) v = between(v, splat(0.0f), edge.low, edge.high);
        highest_lane = max(highest_lane, v);
      }
      const float largest = highest(highest_lane);
      unit = largest / 65280.0f;
      inverse = largest > 0 ? 65280.0f / largest : 0.0f;
    }
    void put(const AttendTask& task, F p, Edge edge, int block, int32_t* words) {
      F scaled = p * (load(value_scale(task, block)) * splat(inverse));
      if (!edge.whole()) scaled = between(scaled, splat(0.0f), edge.low, edge.high);
      probe = fma(scaled, splat(0.0f), probe);
      const I q = round_i(scaled);
      store_u8(reinterpret_cast<uint8_t*>(words), right<8>(q));
      store_u8(reinterpret_cast<uint8_t*>(words + 4), q);
    }
  };

  template <int heads, int vectors>
  static void values(const AttendTask& task, const Scratch& s, int from, int to, int dim,
                     const Weigher& weigher, float* out) {
    const int d = task.head_dim;
    I high[heads][vectors], low[heads][vectors];
    for (int h = 0; h < heads; ++h)
      for (int i = 0; i < vectors; ++i) high[h][i] = low[h][i] = splat_i(0);
    const int32_t* words = s.weights;
    for (int block = from; block < to; ++block) {
      const uint8_t* data = task.blocks[block] + (8 + static_cast<size_t>(d)) * kTokens + 4 * static_cast<size_t>(dim);
      for (int quad = 0; quad < 4; ++quad) {
        I v[vectors];
        for (int i = 0; i < vectors; ++i) v[i] = load_i(data + 4 * static_cast<size_t>(quad) * d + 64 * i);
        for (int h = 0; h < heads; ++h) {
          const I p_high = splat_i(words[kWords * h + quad]), p_low = splat_i(words[kWords * h + 4 + quad]);
          for (int i = 0; i < vectors; ++i) {
            high[h][i] = dot4(high[h][i], p_high, v[i]);
            low[h][i] = dot4(low[h][i], p_low, v[i]);
          }
        }
      }
      words += kWords * heads;
    }
    const F unit = splat(weigher.unit + sum(weigher.probe));
    for (int h = 0; h < heads; ++h)
      for (int i = 0; i < vectors; ++i)
        store(out + h * d + dim + 16 * i, fma(float_of(high[h][i]), splat(256.0f), float_of(low[h][i])) * unit);
  }
};

// -- the walk ------------------------------------------------------------------------------------

template <class Cache, int heads>
static void span_of(const AttendTask& task, const Scratch& s, int from, int to, float* maximum, float* total,
                    bool merge, const uint8_t* const* ahead, int num_ahead) {
  const int d = task.head_dim;
  const F nothing = splat(-__builtin_inff());
  F highest_lane[heads];
  for (int h = 0; h < heads; ++h) highest_lane[h] = nothing;
  for (int block = from; block < to; ++block) {
    const int next = block - from;
    if (next < num_ahead) prefetch(ahead[next], Cache::block_bytes(d) / 2);
    F out[heads];
    Cache::template scores<heads>(task, s, block, out);
    const Edge edge = Edge::of(task, block);
    for (int h = 0; h < heads; ++h) {
      if (!edge.whole()) out[h] = between(out[h], nothing, edge.low, edge.high);
      highest_lane[h] = max(highest_lane[h], out[h]);
      store(s.scores + h * kSpan + (block - from) * kTokens, out[h]);
    }
  }
  typename Cache::Weigher weigher(task, from, to);
  float keep[heads];
  for (int h = 0; h < heads; ++h) {
    const float here = highest(highest_lane[h]);
    const float next = merge && maximum[h] > here ? maximum[h] : here;
    keep[h] = merge ? exp_one(maximum[h] - next) : 0.0f;
    maximum[h] = next;
    F sum_lane = splat(0.0f);
    for (int block = from; block < to; ++block) {
      const Edge edge = Edge::of(task, block);
      F p = exp(load(s.scores + h * kSpan + (block - from) * kTokens) - splat(next));
      if (!edge.whole()) p = between(p, splat(0.0f), edge.low, edge.high);
      sum_lane = sum_lane + p;
      weigher.put(task, p, edge, block, s.weights + ((block - from) * heads + h) * Cache::kWords);
      if (h + 1 == heads && block - from < num_ahead)
        prefetch(ahead[block - from] + Cache::block_bytes(d) / 2, Cache::block_bytes(d) / 2);
    }
    const float span_total = sum(sum_lane);
    total[h] = merge ? total[h] * keep[h] + span_total : span_total;
  }
  float* out = s.result + (merge ? heads * d : 0);
  int dim = 0;
  for (; dim + 16 * kVectors <= d; dim += 16 * kVectors)
    Cache::template values<heads, kVectors>(task, s, from, to, dim, weigher, out);
  for (; dim < d; dim += 16) Cache::template values<heads, 1>(task, s, from, to, dim, weigher, out);
  if (merge)
    for (int h = 0; h < heads; ++h)
      for (int i = 0; i < d; i += 16)
        store(s.result + h * d + i, fma(load(s.result + h * d + i), splat(keep[h]), load(out + h * d + i)));
}

template <class Cache, int heads>
static void heads_of(const AttendTask& task, int head, const Scratch& s) {
  const int d = task.head_dim;
  Cache::template prepare<heads>(task, head, s);
  float maximum[heads], total[heads];
  const int end = (task.last + kTokens - 1) / kTokens;
  bool merge = false;
  for (int block = task.first / kTokens; block < end; merge = true) {
    const int stop = (block / kSpanBlocks + 1) * kSpanBlocks;
    const int to = stop < end ? stop : end;
    const bool more = to < end;  // then the next span is ahead
    span_of<Cache, heads>(task, s, block, to, maximum, total, merge, more ? task.blocks + to : task.ahead,
                          more ? end - to : task.num_ahead);
    block = to;
  }
  for (int h = 0; h < heads; ++h) {
    const F inverse = splat(1.0f / total[h]);
    for (int i = 0; i < d; i += 16) {
      const F value = load(s.result + h * d + i) * inverse;
      const size_t at = static_cast<size_t>(head + h) * d + i;
      if (task.out_bfloat16)
        store_bf16(reinterpret_cast<uint16_t*>(task.out) + at, value);
      else
        store(reinterpret_cast<float*>(task.out) + at, value);
    }
  }
}

template <class Cache>
static void attend_of(const AttendTask& task) {
  const Scratch s = scratch_of(task.scratch, task.head_dim);
  int head = 0;
  for (; head + kGroup <= task.group; head += kGroup) heads_of<Cache, kGroup>(task, head, s);
  switch (task.group - head) {
#if defined(__AVX512F__)
    case 3: return heads_of<Cache, 3>(task, head, s);
    case 2: return heads_of<Cache, 2>(task, head, s);
#endif
    case 1: return heads_of<Cache, 1>(task, head, s);
    default: return;
  }
}

static void attend(const AttendTask& task) {
  switch (task.format) {
    case Format::int8: return attend_of<Int8Attention>(task);
    case Format::bfloat16: return attend_of<FloatAttention<Bfloat16Cache>>(task);
    case Format::float32: return attend_of<FloatAttention<Float32Cache>>(task);
  }
}

}  // namespace turnstile::TURNSTILE_LEVEL
