// Attention of query rows over the blocks of one KV head. A *line* is one query head of one token. Lines
// that see the same blocks are taken together, so that what is read serves all of them: the heads of a
// group, the rows of a prompt's chunk, sequences with a common beginning. None of them can tell.
//
// The context is taken in spans of 8 blocks (128 tokens), at fixed places of the sequence:
//   1. scores of the span, 16 tokens a vector             (reads K)
//   2. weights: 2^(score - the span's largest), in the form the products want
//   3. weighted sum of V, in registers or tiles           (reads V)
//   4. merged into the line's state (maximum, total, result) of the spans before
// A span is computed without regard to the spans before it, and within it the order is fixed by the
// positions: a line's result depends on its tokens alone. Scores are kept in units of ln 2.
//
// Slots that a line does not see may hold anything: their weight is exactly zero, and where zero times
// garbage could be NaN, the garbage is masked away.
#pragma once

#include "isa/attend_float.h"
#include "isa/attend_int8.h"
#if defined(__AMX_TILE__)
#include "isa/attend_amx.h"
#endif

namespace turnstile::TURNSTILE_LEVEL {

// -- one span, few lines, in vectors ---------------------------------------------------------------

template <class Cache, int lines>
static void span_in_vectors(const Scratch& s, const Span& span, int line, Seen seen) {
  const F nothing = splat(-__builtin_inff());
  F top[lines];
  for (int i = 0; i < lines; ++i) top[i] = nothing;
  const auto scores = [&]<int blocks>(int first) {
    F out[blocks][lines];
    span.ahead.during(blocks * Work::kKeys);
    Cache::template scores<lines, blocks>(s, span.blocks + first, line, out);
    for (int b = 0; b < blocks; ++b) {
      const Edge edge = seen.edge(first + b);
      for (int i = 0; i < lines; ++i) {
        if (!edge.whole()) out[b][i] = between(out[b][i], nothing, edge.low, edge.high);
        top[i] = max(top[i], out[b][i]);
        store(s.scores + i * kSpan + (first + b) * kTokens, out[b][i]);
      }
    }
  };
  int block = seen.from();
  for (; block + Cache::kBlocks <= seen.to(); block += Cache::kBlocks) scores.template operator()<Cache::kBlocks>(block);
  for (; block < seen.to(); ++block) scores.template operator()<1>(block);
  span.ahead.during(Work::kScales);
  const typename Cache::Weigher weigher(span, seen, s.head_dim);
  for (int i = 0; i < lines; ++i) {
    s.top[line + i] = highest(top[i]) * s.factor[line + i];
    s.sum[line + i] = sum(weigh<Cache>(s, span, line + i, i, seen, weigher));
  }
  span.ahead.during(Work::kMerge);
  merge_states(s, line, lines);
  int dim = 0;
  for (; dim + 16 * kVectors <= s.head_dim; dim += 16 * kVectors)
    Cache::template values<lines, kVectors>(s, span, seen, line, dim);
  for (; dim < s.head_dim; dim += 16) Cache::template values<lines, 1>(s, span, seen, line, dim);
}

template <class Cache>
struct InVectors {
  void attend(const Scratch& s, const Span& span, int lines) {
    for (int line = 0; line < lines;) {
      const Seen seen = span.seen(s.lines[line]);
      const int same = alike(s, span, line, lines, kGroup);
      if (!seen.none()) {
        switch (same) {
#if defined(__AVX512F__)
          case 4: span_in_vectors<Cache, 4>(s, span, line, seen); break;
          case 3: span_in_vectors<Cache, 3>(s, span, line, seen); break;
#endif
          case 2: span_in_vectors<Cache, 2>(s, span, line, seen); break;
          default: span_in_vectors<Cache, 1>(s, span, line, seen);
        }
      }
      line += same;
    }
  }
};

// -- the walk --------------------------------------------------------------------------------------

static void begin_states(const AttendTask& task, const Scratch& s, int lines) {
  const int d = task.head_dim;
  for (int i = 0; i < lines; ++i) {
    const float* state = s.lines[i].state;
    for (int j = 0; j < d; j += 16) store(s.result + i * d + j, task.resume ? load(state + j) : splat(0.0f));
    s.maximum[i] = task.resume ? state[d] : kNothing;
    s.total[i] = task.resume ? state[d + 1] : 0.0f;
  }
}

static void end_states(const AttendTask& task, const Scratch& s, int lines) {
  const int d = task.head_dim;
  for (int i = 0; i < lines; ++i) {
    const Line& line = s.lines[i];
    if (task.suspend) {
      for (int j = 0; j < d; j += 16) store(line.state + j, load(s.result + i * d + j));
      line.state[d] = s.maximum[i];
      line.state[d + 1] = s.total[i];
      continue;
    }
    const F inverse = splat(1.0f / s.total[i]);
    for (int j = 0; j < d; j += 16) {
      const F value = load(s.result + i * d + j) * inverse;
      if (task.out_bfloat16)
        store_bf16(reinterpret_cast<uint16_t*>(line.out) + j, value);
      else
        store(reinterpret_cast<float*>(line.out) + j, value);
    }
  }
}

template <class Cache, class How>
static void attend_lines(const AttendTask& task, const Scratch& s, int lines) {
  Ahead ahead(task, Cache::block_bytes(s.head_dim), lines);
  Cache::prepare(task, s, lines, ahead);
  begin_states(task, s, lines);
  How how;
  for (int block = task.begin; block < task.end;) {
    const int stop = (block / kSpanBlocks + 1) * kSpanBlocks;
    const int to = stop < task.end ? stop : task.end;
    how.attend(s, Span(task, block, to, ahead), lines);
    block = to;
  }
  ahead.finish();
  end_states(task, s, lines);
}

template <class Cache, class How, class HowFew = How>
static void attend_rows(const AttendTask& task) {
  const Scratch s(task.scratch, task.head_dim);
  const int all = task.num_rows * task.group;
  const size_t out_bytes = static_cast<size_t>(task.head_dim) * (task.out_bfloat16 ? 2 : 4);
  for (int begin = 0; begin < all; begin += kLines) {
    const int lines = all - begin < kLines ? all - begin : kLines;
    for (int i = 0; i < lines; ++i) {
      const AttendRow& row = task.rows[(begin + i) / task.group];
      const int head = (begin + i) % task.group;
      s.lines[i] = {row.queries + static_cast<size_t>(head) * task.head_dim, row.out + head * out_bytes,
                    row.state + static_cast<size_t>(head) * attend_state_floats(task.head_dim), row.first, row.last};
    }
    if (lines <= kFewLines)
      attend_lines<Cache, HowFew>(task, s, lines);
    else
      attend_lines<Cache, How>(task, s, lines);
  }
}

static void attend(const AttendTask& task) {
#if defined(__AMX_TILE__)
  if (task.format == Format::int8 && task.head_dim % 64 == 0)
    return attend_rows<Int8Cache, Int8InTiles, InVectors<Int8Cache>>(task);
  if (task.format == Format::bfloat16 && task.head_dim % 64 == 0)
    return attend_rows<Bfloat16Cache, Bfloat16InTiles>(task);
#endif
  switch (task.format) {
    case Format::int8: return attend_rows<Int8Cache, InVectors<Int8Cache>>(task);
    case Format::bfloat16: return attend_rows<Bfloat16Cache, InVectors<Bfloat16Cache>>(task);
    case Format::float32: return attend_rows<Float32Cache, InVectors<Float32Cache>>(task);
  }
}

}  // namespace turnstile::TURNSTILE_LEVEL
