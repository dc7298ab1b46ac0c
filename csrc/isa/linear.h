// Matrix products: panels of 32 outputs times tiles of up to kTileRows rows, held in registers.
//
//                 32 outputs of a panel (2 vectors)
//               +----------------------------------+
//   row 0       | acc[0][0]       acc[0][1]        |   one step: load 2 vectors of weights,
//   row 1       | acc[1][0]       acc[1][1]        |   broadcast 4 bytes of each row,
//   ...         | ...                              |   2 multiply-accumulates a row
//   row 11      | acc[11][0]      acc[11][1]       |
//               +----------------------------------+
//
// Every accumulator runs over the inputs in order, whatever the tile's height, so a row's result does
// not know which rows share its tile.
#pragma once

#include "isa/kernels.h"
#include "isa/math.h"

namespace turnstile::TURNSTILE_LEVEL {

// As many accumulators as the registers hold beside the operands: 24 of 32, 10 of 16, and few.
#if defined(__AVX512F__)
constexpr int kTileRows = 12, kTileVectors = 2;
#elif defined(__AVX2__)
constexpr int kTileRows = 5, kTileVectors = 1;
#else
constexpr int kTileRows = 2, kTileVectors = 1;
#endif
constexpr int kPrefetch = 16;  // steps ahead: 2 KiB, for weights that come from memory

struct Int8Dot {
  using Acc = I;
  static constexpr bool integers = true;
  INLINE I zero() { return splat_i(0); }
  INLINE I step(I acc, int32_t row, const uint8_t* weights) {
    return dot4(acc, splat_i(row), load_i(weights));
  }
  INLINE I bits(I acc) { return acc; }
};
struct Bfloat16Dot {
  using Acc = F;
  static constexpr bool integers = false;
  INLINE F zero() { return splat(0.0f); }
  INLINE F step(F acc, int32_t row, const uint8_t* weights) {
    return dot2(acc, splat_i(row), load_i(weights));
  }
  INLINE I bits(F acc) { return bits_i(acc); }
};
struct Float32Dot {
  using Acc = F;
  static constexpr bool integers = false;
  INLINE F zero() { return splat(0.0f); }
  INLINE F step(F acc, int32_t row, const uint8_t* weights) {
    return fma(bits_f(splat_i(row)), bits_f(load_i(weights)), acc);
  }
  INLINE I bits(F acc) { return bits_i(acc); }
};

INLINE int32_t word(const uint8_t* p) {
  int32_t x;
  __builtin_memcpy(&x, p, 4);
  return x;
}

// out[row][32] = the raw accumulators of `rows` rows and one panel.
template <class Dot, int rows, bool cold>
static void tile(const uint8_t* input, size_t stride, const uint8_t* panel, int steps, int32_t* out) {
  for (int part = 0; part < 2 / kTileVectors; ++part) {
    const uint8_t* weights = panel + 64 * part;
    typename Dot::Acc acc[rows][kTileVectors];
#pragma GCC unroll 16
    for (int row = 0; row < rows; ++row)
#pragma GCC unroll 2
      for (int vector = 0; vector < kTileVectors; ++vector) acc[row][vector] = Dot::zero();
    for (int step = 0; step < steps; ++step) {
      const uint8_t* now = weights + static_cast<size_t>(step) * kStepBytes;
      if (cold) {
        __builtin_prefetch(now + kPrefetch * kStepBytes);
        __builtin_prefetch(now + kPrefetch * kStepBytes + 64);
      }
#pragma GCC unroll 16
      for (int row = 0; row < rows; ++row) {
        const int32_t x = word(input + row * stride + static_cast<size_t>(step) * 4);
#pragma GCC unroll 2
        for (int vector = 0; vector < kTileVectors; ++vector)
          acc[row][vector] = Dot::step(acc[row][vector], x, now + 64 * vector);
      }
    }
#pragma GCC unroll 16
    for (int row = 0; row < rows; ++row)
#pragma GCC unroll 2
      for (int vector = 0; vector < kTileVectors; ++vector)
        store_i(out + row * kPanel + 16 * (part + vector), Dot::bits(acc[row][vector]));
  }
}

template <class Dot, bool cold, int rows = kTileRows>
INLINE void tile_of(int count, const uint8_t* input, size_t stride, const uint8_t* panel, int steps,
                    int32_t* out) {
  if constexpr (rows > 1) {
    if (count < rows) return tile_of<Dot, cold, rows - 1>(count, input, stride, panel, steps, out);
  }
  tile<Dot, rows, cold>(input, stride, panel, steps, out);
}

// What all rows share of 16 outputs.
template <bool integers, bool biased>
struct Outputs {
  I offset;
  F scale, bias;
  INLINE Outputs of(const Weights& weights, int output) {
    Outputs o;
    if (integers) o.offset = load_i(weights.sum128 + output);
    if (integers) o.scale = load(weights.scale + output);
    if (biased) o.bias = load(weights.bias + output);
    return o;
  }
  // 16 raw accumulators of a row as floats.
  INLINE F value(const Outputs& o, const int32_t* raw, const float* row_scale) {
    F value = bits_f(load_i(raw));
    if (integers) value = float_of(load_i(raw) - o.offset) * (splat(*row_scale) * o.scale);
    return biased ? value + o.bias : value;
  }
};

// What becomes of the accumulators of a panel. Everything that holds for a whole product is known when this is
// compiled: it runs between tiles, where nothing can be asked of every row, and keeps its constants in registers.
template <class Outputs, Finish finish, bool apart>  // apart: stored past the caches, or as bfloat16 (SiLU)
struct Finisher {
  const Weights& weights;
  const float* scale;
  uint8_t* out;
  size_t stride;
  Outputs low{}, high{};

  INLINE Finisher of(const LinearTask& task) { return {*task.weights, task.scale, task.out, task.out_stride}; }

  INLINE void begin(Finisher& f, int panel) {
    f.low = Outputs::of(f.weights, panel * kPanel);
    f.high = Outputs::of(f.weights, panel * kPanel + 16);
  }

  // Brings the places near that rows first to last of a panel are added to or stored in.
  INLINE void expect(const Finisher& f, int first, int last, int panel) {
    if constexpr (apart) return;
    constexpr int bytes = finish == Finish::silu_product ? 64 : 128;
    for (int row = first; row < last; ++row)
      for (int line = 0; line < bytes; line += 64)
        __builtin_prefetch(f.out + row * f.stride + static_cast<size_t>(panel) * bytes + line, 1, 3);
  }

  // Rows first to last of a panel; `raw` are the accumulators of the first.
  INLINE void rows(const Finisher& f, const int32_t* raw, int first, int last, int panel) {
    for (int row = first; row < last; ++row, raw += kPanel) {
      const F a = Outputs::value(f.low, raw, f.scale + row), b = Outputs::value(f.high, raw + 16, f.scale + row);
      uint8_t* out = f.out + row * f.stride;
      if constexpr (finish == Finish::silu_product && apart) {
        store_bf16(reinterpret_cast<uint16_t*>(out) + panel * 16, silu(a) * b);
      } else if constexpr (finish == Finish::silu_product) {
        store(reinterpret_cast<float*>(out) + panel * 16, silu(a) * b);
      } else {
        float* to = reinterpret_cast<float*>(out) + panel * kPanel;
        if constexpr (apart) {
          stream(to, a);
          stream(to + 16, b);
        } else {
          constexpr bool add = finish == Finish::add;
          store(to, add ? load(to) + a : a);
          store(to + 16, add ? load(to + 16) + b : b);
        }
      }
    }
  }
};

// Calls `of` with the finisher of the task.
template <bool integers, bool biased, class Of>
INLINE void with_finisher(const LinearTask& task, const Of& of) {
  using O = Outputs<integers, biased>;
  switch (task.finish) {
    case Finish::store:
      return task.stream ? of(Finisher<O, Finish::store, true>::of(task)) : of(Finisher<O, Finish::store, false>::of(task));
    case Finish::add: return of(Finisher<O, Finish::add, false>::of(task));
    case Finish::silu_product:
      return task.out_bfloat16 ? of(Finisher<O, Finish::silu_product, true>::of(task))
                               : of(Finisher<O, Finish::silu_product, false>::of(task));
  }
}
template <bool integers, class Of>
INLINE void with_finisher(const LinearTask& task, const Of& of) {
  if (task.weights->bias) return with_finisher<integers, true>(task, of);
  return with_finisher<integers, false>(task, of);
}

template <class Dot, class Finisher>
static void linear_of(const LinearTask& task, Finisher finisher) {
  const Weights& weights = *task.weights;
  const int rows = task.last_row - task.first_row;
  // Tiles of equal height waste least: 13 rows are 7 and 6, not 12 and 1.
  const int tiles = (rows + kTileRows - 1) / kTileRows;
  alignas(64) int32_t raw[kTileRows * kPanel];
  for (int panel = task.first_panel; panel < task.last_panel; ++panel) {
    const uint8_t* data = weights.data + static_cast<size_t>(panel) * weights.steps * kStepBytes;
    Finisher::begin(finisher, panel);
    for (int t = 0; t < tiles; ++t) {
      const int first = task.first_row + rows * t / tiles;
      const int count = task.first_row + rows * (t + 1) / tiles - first;
      const uint8_t* input = task.input + static_cast<size_t>(first) * task.input_stride;
      if (t == 0)
        tile_of<Dot, true>(count, input, task.input_stride, data, weights.steps, raw);
      else
        tile_of<Dot, false>(count, input, task.input_stride, data, weights.steps, raw);
      Finisher::rows(finisher, raw, first, first + count, panel);
    }
  }
}
template <class Dot>
static void linear_of(const LinearTask& task) {
  with_finisher<Dot::integers>(task, [&](auto finisher) { linear_of<Dot>(task, finisher); });
}

}  // namespace turnstile::TURNSTILE_LEVEL

#if defined(__AMX_TILE__)
#include "isa/linear_amx.h"
#endif

namespace turnstile::TURNSTILE_LEVEL {

static void multiply(const LinearTask& task) {
#if defined(__AMX_TILE__)
  const Format format = task.weights->format;
  if (format == Format::int8 && fits_tiles<Int8Tiles>(task)) return linear_in_tiles<Int8Tiles>(task);
  if (format == Format::bfloat16 && fits_tiles<Bfloat16Tiles>(task)) return linear_in_tiles<Bfloat16Tiles>(task);
#endif
  switch (task.weights->format) {
    case Format::int8: return linear_of<Int8Dot>(task);
    case Format::bfloat16: return linear_of<Bfloat16Dot>(task);
    case Format::float32: return linear_of<Float32Dot>(task);
  }
}

static void linear(const LinearTask& task) {
  multiply(task);
  if (task.stream) finish_streams();
}

}  // namespace turnstile::TURNSTILE_LEVEL
