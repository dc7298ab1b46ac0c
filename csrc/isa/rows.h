// What happens to one row of activations between two products: RMS norm, quantisation, RoPE.
#pragma once

#include "isa/kernels.h"
#include "isa/math.h"

extern "C" float sqrtf(float) noexcept;

namespace turnstile::TURNSTILE_LEVEL {

// 1 / root mean square of `width` values; x has zeros from there to `padded`, a multiple of 16. Four
// partial sums, so that they need not wait for each other.
INLINE float inverse_rms(const float* x, int padded, int width, float eps) {
  F squares[4];
  for (auto& lane : squares) lane = splat(0.0f);
  int i = 0;
  for (; i + 64 <= padded; i += 64)
    for (int part = 0; part < 4; ++part)
      squares[part] = fma(load(x + i + 16 * part), load(x + i + 16 * part), squares[part]);
  for (; i < padded; i += 16) squares[0] = fma(load(x + i), load(x + i), squares[0]);
  const F all = (squares[0] + squares[1]) + (squares[2] + squares[3]);
  return 1.0f / sqrtf(sum(all) / static_cast<float>(width) + eps);
}

// Hadamard transform of 16 * vectors values, not normalised. An outlier is spread over its block, so
// that one scale a row suits all values; weights are rotated by the inverse when packed, so the product
// is the same (QuaRot, arXiv:2404.00456; here in blocks, on the way to every product).
template <int vectors>
INLINE void rotate(F (&x)[vectors]) {
  for (auto& lane : x) lane = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(lane))));
  for (int stride = 1; stride < vectors; stride *= 2) {
    for (int start = 0; start < vectors; start += 2 * stride) {
      for (int i = start; i < start + stride; ++i) {
        const F a = x[i], b = x[i + stride];
        x[i] = a + b;
        x[i + stride] = a - b;
      }
    }
  }
}

struct Row {
  const float* input;
  F inverse;          // 1 / RMS, where there is a norm
  const float* norm;  // or null
  INLINE F value(const Row& row, int i) {
    const F x = load(row.input + i);
    return row.norm ? x * row.inverse * load(row.norm + i) : x;
  }
};

INLINE float float_of_bits(int32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

// One row to int8: q = round(x / scale) with scale = max|x| / 127, stored as q + 128. A NaN or infinity
// anywhere makes the scale NaN, so that it comes out of the product as NaN and not as a finite number.
template <int vectors>
INLINE void quantize(const NormTask& task, const Row& row, uint8_t* out, float* scale) {
  // Magnitudes as integers: in the order of the numbers, with infinity and NaN above all.
  I highest_lane = splat_i(0);
  for (int i = 0; i < task.padded; i += 16 * vectors) {
    F x[vectors];
    for (int part = 0; part < vectors; ++part) x[part] = Row::value(row, i + 16 * part);
    rotate<vectors>(x);
    for (int part = 0; part < vectors; ++part) {
      highest_lane = max(highest_lane, bits_i(abs(x[part])));
      store(task.scratch + i + 16 * part, x[part]);
    }
  }
  const float largest = float_of_bits(highest(highest_lane));
  *scale = largest / 127.0f + 0.0f * largest;
  const F inverse = splat(largest > 0 ? 127.0f / largest : 0.0f);
  if constexpr (vectors == 4) {
    for (int i = 0; i < task.padded; i += 64) {
      I q[4];
      for (int part = 0; part < 4; ++part) q[part] = round_i(load(task.scratch + i + 16 * part) * inverse);
      store_offset_bytes(out + i, q);
    }
  } else {
    for (int i = 0; i < task.padded; i += 16)
      store_u8(out + i, round_i(load(task.scratch + i) * inverse) + splat_i(128));
  }
}

INLINE void norm_row(const NormTask& task, int index) {
  Row row;
  row.input = reinterpret_cast<const float*>(reinterpret_cast<const uint8_t*>(task.input) +
                                             index * task.input_stride);
  row.norm = task.norm;  // zero past the width
  row.inverse = splat(task.norm ? inverse_rms(row.input, task.padded, task.width, task.eps) : 1.0f);
  uint8_t* out = task.out + static_cast<size_t>(index) * task.out_stride;
  switch (task.format) {
    case Format::int8:
      if (task.rotation == 64) return quantize<4>(task, row, out, task.scale + index);
      if (task.rotation == 32) return quantize<2>(task, row, out, task.scale + index);
      return quantize<1>(task, row, out, task.scale + index);
    case Format::bfloat16:
      for (int i = 0; i < task.padded; i += 16)
        store_bf16(reinterpret_cast<uint16_t*>(out) + i, Row::value(row, i));
      return;
    case Format::float32:
      for (int i = 0; i < task.padded; i += 16)
        store(reinterpret_cast<float*>(out) + i, Row::value(row, i));
  }
}

static void norm(const NormTask& task) {
  for (int row = task.first_row; row < task.last_row; ++row) norm_row(task, row);
}

// Pairs are (i, i + head_dim / 2).
static void head(const HeadTask& task) {
  float* x = task.values;
  const int half = task.head_dim / 2;
  if (task.norm) {
    const F inverse = splat(inverse_rms(x, task.head_dim, task.norm_width, task.eps));
    for (int i = 0; i < task.head_dim; i += 16)
      store(x + i, load(x + i) * inverse * load(task.norm + i));
  }
  int i = 0;
  for (; i + 16 <= half; i += 16) {
    const F a = load(x + i), b = load(x + half + i);
    const F c = load(task.cosine + i), s = load(task.sine + i);
    store(x + i, a * c - b * s);
    store(x + half + i, b * c + a * s);
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    x[i] = a * task.cosine[i] - b * task.sine[i];
    x[half + i] = b * task.cosine[i] + a * task.sine[i];
  }
}

}  // namespace turnstile::TURNSTILE_LEVEL
