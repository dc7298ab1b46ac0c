// Attention on AMX tiles, for head sizes that are a multiple of 64: up to 16 lines a tile, and the blocks
// of the cache are tiles as they lie.
//
//   scores of a block   [lines] x [dimensions]   times   K, 16 rows of 64 bytes with the tokens in the lanes
//   values              [lines] x [tokens]       times   V, rows of 64 bytes with 16 dimensions in the lanes
//
// Tiles and vectors are different units of the processor, and what a tile has stored takes a while to be
// seen by loads. So products, storing their sums and what becomes of them are three stages: while a block is
// multiplied, the sums of the block before are stored, and those of the block before that are scaled.
// Storing sums right behind their products, the tiles would wait for it.
#pragma once

#include "isa/attend_float.h"
#include "isa/attend_int8.h"
#include "isa/tiles.h"

namespace turnstile::TURNSTILE_LEVEL {

// -- int8: the same bits as in vectors ---------------------------------------------------------------
//
// A line is two rows of a tile: the high bytes of its query or its weights, and the low ones. So 8 lines
// fill a tile, and two such tiles are multiplied by one right side.

struct Int8InTiles {
  using Cache = Int8Cache;
  using Sums = int32_t[kTileLines][2][kTokens];  // by line and plane
  static constexpr int kHalf = kTileLines / 2;

  ~Int8InTiles() { _tile_release(); }

  void attend(const Scratch& s, const Span& span, int lines) {
    gather_values(s, span);
    for (int line = 0; line < lines; line += kTileLines) {
      const int count = line + kTileLines <= lines ? kTileLines : lines - line;
      const Seen seen = span.seen(s.lines[line]);
      const bool whole = seen == Seen{0, kSpan} && alike(s, span, line, lines, count) == count;
      shape(half_of(count));
      if (count > kHalf)
        whole ? attend_tiles<true, true>(s, span, line, count) : attend_tiles<true, false>(s, span, line, count);
      else
        whole ? attend_tiles<false, true>(s, span, line, count) : attend_tiles<false, false>(s, span, line, count);
    }
  }

  template <bool two, bool whole>
  static void attend_tiles(const Scratch& s, const Span& span, int line, int count) {
    weights<two, whole>(s, span, line, count);
    values<two>(s, span, line, count);
  }

  // Where what is multiplied at even or odd steps is stored.
  INLINE Sums& sums_of(const Scratch& s, int parity) { return reinterpret_cast<Sums*>(s.sums)[parity]; }

  // Lines of a tile; the last row of the second one may come to nothing.
  INLINE int half_of(int count) { return count > kHalf ? (count + 1) / 2 : count; }

  // Tiles 0 and 1 are sums of even blocks or parts, 2 and 3 of odd ones, 4 and 5 left sides, 6 right sides.
  void shape(int half) {
    if (half == shaped_) return;
    shaped_ = half;
    const TileShape left{2 * half, 64}, right{16, 64};
    shape_tiles({left, left, left, left, left, left, right, right});
  }

  INLINE void keep_awake() { multiply_signed<0, 4, 6>(); }  // see tiles.h

  // V of the span, block after block, so that 64 tokens are a tile.
  INLINE void gather_values(const Scratch& s, const Span& span) {
    const int bytes = kTokens * s.head_dim;
    for (int block = 0; block < span.count; ++block) {
      span.ahead.during(Work::kValues);
      const uint8_t* from = Cache::values_of(span.blocks[block], s.head_dim);
      for (int i = 0; i < bytes; i += 64) store_i(s.values + block * bytes + i, load_i(from + i));
    }
  }

  template <bool two, bool whole>
  INLINE void weights(const Scratch& s, const Span& span, int line, int count) {
    F total[kTileLines];
    for (F& lane : total) lane = splat(0.0f);
    store(s.top + line, scores<two, whole>(s, span, line, count) * load(s.factor + line));
    Seen before = whole ? Seen{0, kSpan} : span.seen(s.lines[line]);
    Cache::Weigher weigher(span, before, s.head_dim);
    for (int i = 0; i < count; ++i) {
      if (i % 8 == 4) keep_awake();
      const Seen seen = whole ? Seen{0, kSpan} : span.seen(s.lines[line + i]);
      if (!whole && seen.none()) {
        total[i] = weigh_nothing<Cache>(s, line + i, i);
        continue;
      }
      if (!whole && !(seen == before)) weigher = Cache::Weigher(span, before = seen, s.head_dim);
      total[i] = weigh<Cache>(s, span, line + i, i, seen, weigher);
    }
    store(s.sum + line, each_sum(total));
    merge_states(s, line, count);
  }

  // Returns the largest of each line.
  template <bool two, bool whole>
  INLINE F scores(const Scratch& s, const Span& span, int line, int count) {
    F top[kTileLines];
    for (F& lane : top) lane = splat(-__builtin_inff());
    tiles_see_memory();
    load_queries<two>(s, line, half_of(count), 0);
    const auto step = [&]<int parity>(int block) {
      if (block < span.count) multiply_keys<two, parity>(s, span, block, line, half_of(count));
      if (block >= 1 && block <= span.count) store_sums<two, 1 - parity>(sums_of(s, 1 - parity), half_of(count));
      if (block < 2 || block >= span.count + 2) return;
      const Sums& sums = sums_of(s, parity);
      const F scale = Cache::key_scale(span.blocks[block - 2]);
      const int32_t* bias = s.bias + line;
      float* to = s.scores + (block - 2) * kTokens;
#pragma GCC unroll 16  // so that `top` is registers
      for (int i = 0; i < (two ? kTileLines : kHalf); ++i) {
        if (i % 4 == 0 && i >= count) break;
        F score = Cache::whole(load_i(sums[i][0]), load_i(sums[i][1]) + splat_i(bias[i])) * scale;
        if (!whole) {
          const Edge edge = span.seen(s.lines[line + i]).edge(block - 2);
          if (!edge.whole()) score = between(score, splat(-__builtin_inff()), edge.low, edge.high);
        }
        top[i] = max(top[i], score);
        store(to + i * kSpan, score);
      }
    };
    for (int block = 0; block < span.count + 2; block += 2) {
      step.template operator()<0>(block);
      step.template operator()<1>(block + 1);
    }
    return each_highest(top);
  }

  template <bool two, int parity>
  INLINE void multiply_keys(const Scratch& s, const Span& span, int block, int line, int half) {
    const int d = s.head_dim;
    span.ahead.during(Work::kKeys);
    const uint8_t* keys = Cache::keys(span.blocks[block]);
    tiles_see_memory();
    clear_tile<2 * parity>();
    if constexpr (two) clear_tile<2 * parity + 1>();
    for (int dim = 0; dim < d; dim += 64) {
      if (d > 64) load_queries<two>(s, line, half, dim);
      load_tile<6>(keys + static_cast<size_t>(dim) * kTokens, 64);
      multiply_signed<2 * parity, 4, 6>();
      if constexpr (two) multiply_signed<2 * parity + 1, 5, 6>();
    }
  }

  // 64 dimensions of the queries.
  template <bool two>
  INLINE void load_queries(const Scratch& s, int line, int half, int dim) {
    const uint8_t* query = s.queries + line * Cache::query_bytes(s.head_dim) + dim;
    load_tile<4>(query, s.head_dim);
    if constexpr (two) load_tile<5>(query + half * Cache::query_bytes(s.head_dim), s.head_dim);
  }

  template <bool two, int parity>
  INLINE void store_sums(Sums& sums, int half) {
    store_tile<2 * parity>(sums[0], 64);
    if constexpr (two) store_tile<2 * parity + 1>(sums[half], 64);
  }

  // The weighted sum of V, 16 dimensions at a time.
  template <bool two>
  INLINE void values(const Scratch& s, const Span& span, int line, int count) {
    const int parts = s.head_dim / 16;
    const auto step = [&]<int parity>(int part) {
      if (part < parts) multiply_values<two, parity>(s, span, half_of(count), 16 * part);
      if (part >= 1 && part <= parts) store_sums<two, 1 - parity>(sums_of(s, 1 - parity), half_of(count));
      if (part < 2) return;
      const Sums& sums = sums_of(s, parity);
      merge_results(s, line, count, 16 * (part - 2), [&](int i) { return Cache::whole(load_i(sums[i][0]), load_i(sums[i][1])); });
    };
    for (int part = 0; part < parts + 2; part += 2) {
      step.template operator()<0>(part);
      step.template operator()<1>(part + 1);
    }
  }

  template <bool two, int parity>
  INLINE void multiply_values(const Scratch& s, const Span& span, int half, int dim) {
    const int stride = 4 * s.head_dim;
    tiles_see_memory();
    clear_tile<2 * parity>();
    if constexpr (two) clear_tile<2 * parity + 1>();
    for (int token = 0; token < span.count * kTokens; token += 64) {
      load_tile<6>(s.values + token / 4 * stride + 4 * dim, stride);
      load_tile<4>(s.weights + token, kSpan);
      multiply_unsigned<2 * parity, 4, 6>();
      if constexpr (two) {
        load_tile<5>(s.weights + half * Cache::kWeightBytes + token, kSpan);
        multiply_unsigned<2 * parity + 1, 5, 6>();
      }
    }
  }

 private:
  int shaped_ = 0;
};

// -- bfloat16: every row goes this way, alone or not, because the order of a sum shows -----------------

// Scores of a block, by line, into their places; the largest of each line so far into `top`.
INLINE void keep_score(const Scratch& s, int place, int block, Edge edge, F score, F* top) {
  if (!edge.whole()) score = between(score, splat(-__builtin_inff()), edge.low, edge.high);
  top[place] = max(top[place], score);
  store(s.scores + place * kSpan + block * kTokens, score);
}

struct Bfloat16InTiles {
  using Cache = Bfloat16Cache;
  static constexpr int kLeft = 32;  // dimensions of a tile of queries

  ~Bfloat16InTiles() { _tile_release(); }

  // Lines of one tile see the same tokens: the weight zero of an unseen one would not hide its NaN.
  void attend(const Scratch& s, const Span& span, int lines) {
    for (int line = 0; line < lines;) {
      const Seen seen = span.seen(s.lines[line]);
      const int count = alike(s, span, line, lines, kTileLines);
      if (!seen.none()) {
        shape(count);
        attend_tile(s, span, seen, line, count);
      }
      line += count;
    }
  }

  // Tiles 0 to 3 are sums; 4 queries, 5 keys; 6 weights of a block, 7 its values.
  void shape(int lines) {
    if (lines == shaped_) return;
    shaped_ = lines;
    const TileShape sums{lines, 64};
    shape_tiles({sums, sums, sums, sums, {lines, 64}, {16, 64}, {lines, 2 * kTokens}, {kTokens / 2, 64}});
  }

  INLINE void keep_awake() { _tile_dpbf16ps(0, 4, 5); }  // see tiles.h

  static void attend_tile(const Scratch& s, const Span& span, Seen seen, int line, int count) {
    F top[kTileLines], total[kTileLines];
    for (int i = 0; i < kTileLines; ++i) top[i] = total[i] = splat(-__builtin_inff());
    scores(s, span, seen, line, count, top);
    store(s.top + line, each_highest(top) * load(s.factor + line));
    const Cache::Weigher weigher(span, seen, s.head_dim);
    for (int i = 0; i < count; ++i) {
      if (i % 8 == 4) keep_awake();
      total[i] = weigh<Cache>(s, span, line + i, i, seen, weigher);
    }
    store(s.sum + line, each_sum(total));
    merge_states(s, line, count);
    for (int dim = 0; dim < s.head_dim; dim += 64) values(s, span, seen, count, line, dim);
  }

  INLINE void scores(const Scratch& s, const Span& span, Seen seen, int line, int count, F* top) {
    constexpr int kLate = 2;  // blocks
    alignas(64) float raw[4][kTileLines * kTokens];
    const int d = s.head_dim;
    const uint8_t* query = s.queries + line * Cache::query_bytes(d);
    for (int block = seen.from(); block < seen.to() + kLate; ++block) {
      if (block < seen.to()) {
        span.ahead.during(Work::kKeys);
        const uint8_t* keys = span.blocks[block];
        tiles_see_memory();
        _tile_zero(0);
        for (int dim = 0; dim < d; dim += kLeft) {
          _tile_loadd(4, query + 2 * dim, 2 * d);
          _tile_loadd(5, keys + 2 * static_cast<size_t>(dim) * kTokens, 64);
          _tile_dpbf16ps(0, 4, 5);
        }
        _tile_stored(0, raw[block & 3], 64);
      }
      const int done = block - kLate;
      if (done < seen.from()) continue;
      for (int i = 0; i < count; ++i)
        keep_score(s, i, done, seen.edge(done), load(raw[done & 3] + 16 * i), top);
    }
  }

  // 64 dimensions of V of a block whose unseen tokens are replaced by zeros.
  INLINE void mask(const uint8_t* v, size_t stride, Edge edge, uint8_t* out) {
    for (int step = 0; step < kTokens / 2; ++step)
      for (int i = 0; i < 256; i += 64)
        store_i(out + 256 * step + i, load_i(v + step * stride + i) & splat_i(Bfloat16Words::seen(edge, step)));
  }

  INLINE void values(const Scratch& s, const Span& span, Seen seen, int count, int line, int dim) {
    const int d = s.head_dim;
    alignas(64) float sums[4][kTileLines * 16];
    alignas(64) uint8_t masked[2][256 * kTokens / 2];  // the first block of a span and the last one
    tiles_see_memory();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int block = seen.from(); block < seen.to(); ++block) {
      if (dim == 0) span.ahead.during(Work::kValues);
      const uint8_t* v = span.blocks[block] + Cache::block_bytes(d) / 2 + 4 * static_cast<size_t>(dim);
      size_t stride = 4 * static_cast<size_t>(d);
      const Edge edge = seen.edge(block);
      if (!edge.whole()) {
        uint8_t* to = masked[block + 1 == seen.to()];
        mask(v, stride, edge, to);
        tiles_see_memory();
        v = to;
        stride = 256;
      }
      _tile_loadd(6, s.weights + block * kTokens * 2, Cache::kWeightBytes);
      _tile_loadd(7, v, stride);
      _tile_dpbf16ps(0, 6, 7);
      _tile_loadd(7, v + 64, stride);
      _tile_dpbf16ps(1, 6, 7);
      _tile_loadd(7, v + 128, stride);
      _tile_dpbf16ps(2, 6, 7);
      _tile_loadd(7, v + 192, stride);
      _tile_dpbf16ps(3, 6, 7);
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    for (int part = 0; part < 4; ++part)
      merge_results(s, line, count, dim + 16 * part, [&](int i) { return load(sums[part] + 16 * i); });
  }

 private:
  int shaped_ = 0;
};

}  // namespace turnstile::TURNSTILE_LEVEL
