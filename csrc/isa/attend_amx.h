// Attention on AMX tiles, for head sizes that are a multiple of 64: up to 16 lines a tile, and the blocks
// of the cache are tiles as they lie.
//
//   scores of a block   [lines] x [dimensions]   times   K, 16 rows of 64 bytes with the tokens in the lanes
//   values              [lines] x [tokens]       times   V, rows of 64 bytes with 16 dimensions in the lanes
//
// What a tile has stored takes a while to be seen by loads, and tiles and vectors are different units of
// the processor: the scores of one block are scaled while those of the next are multiplied.
#pragma once

#include "isa/attend_float.h"
#include "isa/attend_int8.h"
#include "isa/tiles.h"

namespace turnstile::TURNSTILE_LEVEL {

// Scores of a block, by line, into their places; the largest of each line so far into `top`.
INLINE void keep_score(const Scratch& s, int place, int block, Edge edge, F score, F* top) {
  if (!edge.whole()) score = between(score, splat(-__builtin_inff()), edge.low, edge.high);
  top[place] = max(top[place], score);
  store(s.scores + place * kSpan + block * kTokens, score);
}

// -- int8: the same bits as in vectors ---------------------------------------------------------------
//
// A line is two rows of a tile: the high bytes of its query or its weights, and the low ones. So 8 lines
// fill a tile, and two such tiles are multiplied by one right side.

struct Int8InTiles {
  using Cache = Int8Cache;
  static constexpr int kHalf = kTileLines / 2;

  INLINE void enter() {}
  INLINE void leave() { _tile_release(); }

  // First the weights of all lines, then the sums of V: what was stored last would not be seen at once.
  INLINE void attend(const Scratch& s, const Span& span, int lines) {
    gather_values(s, span);
    int shaped = 0;
    for (int summing = 0; summing < 2; ++summing) {
      for (int line = 0; line < lines; line += kTileLines) {
        const int count = line + kTileLines <= lines ? kTileLines : lines - line;
        const bool two = count > kHalf;
        const int half = two ? (count + 1) / 2 : count;  // lines of a tile; the last row may come to nothing
        if (half != shaped) shape(shaped = half);
        if (summing) {
          for (int dim = 0; dim < s.head_dim; dim += two ? 32 : 64)
            two ? values<true>(s, span, line, count, half, dim) : values<false>(s, span, line, count, half, dim);
        } else {
          const Seen seen = span.seen(s.lines[line]);
          const bool whole = seen.low == 0 && seen.high == span.count * kTokens && alike(s, span, line, lines, count) == count;
          if (two)
            whole ? weights<true, true>(s, span, line, count, half) : weights<true, false>(s, span, line, count, half);
          else
            whole ? weights<false, true>(s, span, line, count, half) : weights<false, false>(s, span, line, count, half);
        }
      }
    }
  }

  // Tiles 0 to 3 are sums, 4 and 5 left sides, 6 and 7 right sides.
  INLINE void shape(int lines) {
    const TileShape left{2 * lines, 64}, right{16, 64};
    shape_tiles({left, left, left, left, left, left, right, right});
  }

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
  static void weights(const Scratch& s, const Span& span, int line, int count, int half) {
    F top[kTileLines];
    for (int i = 0; i < count; ++i) top[i] = splat(-__builtin_inff());
    scores<two, whole>(s, span, line, count, half, top);
    Seen before = span.seen(s.lines[line]);
    Cache::Weigher weigher(span, before, s.head_dim);
    for (int i = 0; i < count; ++i) {
      const Seen seen = span.seen(s.lines[line + i]);
      if (!whole && seen.none()) {
        weigh_nothing<Cache>(s, line + i);
        continue;
      }
      if (!whole && !(seen == before)) weigher = Cache::Weigher(span, before = seen, s.head_dim);
      weigh<Cache>(s, span, line + i, i, seen, highest(top[i]), weigher);
    }
    merge_states(s, line, count);
  }

  using Sums = int32_t[kTileLines][2][kTokens];  // by line and plane

  // Two blocks at a time.
  template <bool two, bool whole>
  INLINE void scores(const Scratch& s, const Span& span, int line, int count, int half, F* top) {
    alignas(64) Sums raw[2][2];
    for (int pair = 0; pair < span.count + 2; pair += 2) {
      const int slot = pair / 2 % 2;
      if (pair < span.count) multiply_keys<two>(s, span, pair, line, half, raw[slot]);
      if (pair == 0) continue;
      for (int block = pair - 2; block < pair && block < span.count; ++block) {
        const Sums& sums = raw[slot ^ 1][block % 2];
        const F scale = Cache::key_scale(span.blocks[block]);
        for (int i = 0; i < count; ++i) {
          const Edge edge = whole ? Edge{0, kTokens} : span.seen(s.lines[line + i]).edge(block);
          keep_score(s, i, block, edge, Cache::whole(load_i(sums[i][0]), load_i(sums[i][1])) * scale, top);
        }
      }
    }
  }

  template <bool two>
  INLINE void multiply_keys(const Scratch& s, const Span& span, int pair, int line, int half, Sums* out) {
    const int d = s.head_dim;
    const int other = pair + 1 < span.count ? pair + 1 : pair;
    span.ahead.during(2 * Work::kKeys);
    const uint8_t* query = s.queries + line * Cache::query_bytes(d);
    const int32_t* bias = Cache::bias(s, line);
    const uint8_t *left = Cache::keys(span.blocks[pair]), *right = Cache::keys(span.blocks[other]);
    tiles_see_memory();
    _tile_loadd(0, bias, 64);
    _tile_loadd(2, bias, 64);
    if constexpr (two) {
      _tile_loadd(1, bias + 32 * half, 64);
      _tile_loadd(3, bias + 32 * half, 64);
    }
    for (int dim = 0; dim < d; dim += 64) {
      _tile_loadd(6, left + static_cast<size_t>(dim) * kTokens, 64);
      _tile_loadd(7, right + static_cast<size_t>(dim) * kTokens, 64);
      _tile_loadd(4, query + dim, d);
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(2, 4, 7);
      if constexpr (two) {
        _tile_loadd(5, query + half * Cache::query_bytes(d) + dim, d);
        _tile_dpbsud(1, 5, 6);
        _tile_dpbsud(3, 5, 7);
      }
    }
    _tile_stored(0, out[0], 64);
    _tile_stored(2, out[1], 64);
    if constexpr (two) {
      _tile_stored(1, out[0][half], 64);
      _tile_stored(3, out[1][half], 64);
    }
  }

  // 32 dimensions of the weighted sum of V for two tiles of lines, 64 for one.
  template <bool two>
  static void values(const Scratch& s, const Span& span, int line, int count, int half, int dim) {
    alignas(64) Sums sums[two ? 2 : 4];
    const uint8_t* weights = s.weights + line * Cache::kWeightBytes;
    const int stride = 4 * s.head_dim;
    tiles_see_memory();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int token = 0; token < span.count * kTokens; token += 64) {
      const uint8_t* v = s.values + token / 4 * stride + 4 * dim;
      _tile_loadd(6, v, stride);
      _tile_loadd(7, v + 64, stride);
      _tile_loadd(4, weights + token, kSpan);
      _tile_dpbusd(0, 4, 6);
      _tile_dpbusd(1, 4, 7);
      if constexpr (two) {
        _tile_loadd(5, weights + half * Cache::kWeightBytes + token, kSpan);
        _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(3, 5, 7);
      } else {
        _tile_loadd(6, v + 128, stride);
        _tile_dpbusd(2, 4, 6);
        _tile_loadd(7, v + 192, stride);
        _tile_dpbusd(3, 4, 7);
      }
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, two ? sums[0][half] : sums[2 % (two ? 2 : 4)][0], 64);
    _tile_stored(3, two ? sums[1][half] : sums[3 % (two ? 2 : 4)][0], 64);
    for (int part = 0; part < (two ? 2 : 4); ++part)
      for (int i = 0; i < count; ++i)
        merge_result(s, line + i, dim + 16 * part, Cache::whole(load_i(sums[part][i][0]), load_i(sums[part][i][1])));
  }
};

// -- bfloat16: every row goes this way, alone or not, because the order of a sum shows -----------------

struct Bfloat16InTiles {
  using Cache = Bfloat16Cache;
  static constexpr int kLeft = 32;  // dimensions of a tile of queries

  INLINE void enter() {}
  INLINE void leave() { _tile_release(); }

  // Lines of one tile see the same tokens: the weight zero of an unseen one would not hide its NaN.
  INLINE void attend(const Scratch& s, const Span& span, int lines) {
    int height = 0;
    for (int line = 0; line < lines;) {
      const Seen seen = span.seen(s.lines[line]);
      const int count = alike(s, span, line, lines, kTileLines);
      if (!seen.none()) {
        if (count != height) shape(height = count);
        attend_tile(s, span, seen, line, count);
      }
      line += count;
    }
  }

  // Tiles 0 to 3 are sums; 4 queries, 5 keys; 6 weights of a block, 7 its values.
  INLINE void shape(int lines) {
    const TileShape sums{lines, 64};
    shape_tiles({sums, sums, sums, sums, {lines, 64}, {16, 64}, {lines, 2 * kTokens}, {kTokens / 2, 64}});
  }

  static void attend_tile(const Scratch& s, const Span& span, Seen seen, int line, int count) {
    F top[kTileLines];
    for (F& lane : top) lane = splat(-__builtin_inff());
    scores(s, span, seen, line, count, top);
    const Cache::Weigher weigher(span, seen, s.head_dim);
    for (int i = 0; i < count; ++i) weigh<Cache>(s, span, line + i, i, seen, highest(top[i]), weigher);
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
      _tile_loadd(6, s.weights + line * Cache::kWeightBytes + block * kTokens * 2, Cache::kWeightBytes);
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
      for (int i = 0; i < count; ++i)
        merge_result(s, line + i, dim + 16 * part, load(sums[part] + 16 * i));
  }
};

}  // namespace turnstile::TURNSTILE_LEVEL
