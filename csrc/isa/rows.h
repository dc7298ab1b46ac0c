// What happens to one row of activations between two products: RMS norm, quantisation, RoPE.
#pragma once

#include "isa/kernels.h"
#include "isa/math.h"

extern "C" float sqrtf(float) noexcept;

namespace turnstile::TURNSTILE_LEVEL {

// 1 / root mean square of `width` values; x has zeros from there to `padded`, a multiple of 16.
INLINE float inverse_rms(const float* x, int padded, int width, float eps) {
  F squares = splat(0.0f);
  for (int i = 0; i < padded; i += 16) squares = fma(load(x + i), load(x + i), squares);
  return 1.0f / sqrtf(sum(squares) / static_cast<float>(width) + eps);
}

// Hadamard transform of each block of `block` values (a power of two, at least 16), not normalised.
// An outlier is spread over its block, so that one scale a row suits all of them; the weights are
// rotated by the inverse when packed, so the product is the same (QuaRot, arXiv:2404.00456, here in
// blocks and on the fly).
INLINE void rotate(float* x, int count, int block) {
  for (int i = 0; i < count; i += 16)
    store(x + i, butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(load(x + i))))));
  for (int stride = 16; stride < block; stride *= 2) {
    for (int start = 0; start < count; start += 2 * stride) {
      for (int i = start; i < start + stride; i += 16) {
        const F a = load(x + i), b = load(x + i + stride);
        store(x + i, a + b);
        store(x + i + stride, a - b);
      }
    }
  }
}

// One row to int8: q = round(x / scale) with scale = max|x| / 127, stored as q + 128. A `wide` row is
// q of 16 bits in two rows of bytes: q = 256 * high + low. A NaN or infinity anywhere makes the scale
// NaN, so that it comes out of the product as NaN and not as some finite number.
INLINE void quantize(const float* x, int padded, bool wide, uint8_t* out, size_t stride, float* scale) {
  F highest_lane = splat(0.0f), probe = splat(0.0f);
  for (int i = 0; i < padded; i += 16) {
    const F value = load(x + i);
    highest_lane = max(highest_lane, abs(value));
    probe = fma(value, splat(0.0f), probe);
  }
  const float limit = wide ? 32512.0f : 127.0f;
  const float largest = highest(highest_lane);
  const float step = largest / limit;
  *scale = step + sum(probe);
  const F inverse = splat(largest > 0 ? limit / largest : 0.0f);
  const I offset = splat_i(128);
  for (int i = 0; i < padded; i += 16) {
    const I q = round_i(load(x + i) * inverse);
    if (wide) {
      const I high = right<8>(q + offset);
      store_u8(out + i, high + offset);
      store_u8(out + stride + i, q - left<8>(high) + offset);
    } else {
      store_u8(out + i, q + offset);
    }
  }
}

INLINE void norm_row(const NormTask& task, int row) {
  const auto* x = reinterpret_cast<const float*>(reinterpret_cast<const uint8_t*>(task.input) +
                                                 row * task.input_stride);
  const int planes = task.format == Format::int8 && task.wide ? 2 : 1;
  uint8_t* out = task.out + static_cast<size_t>(row) * planes * task.out_stride;
  float* y = task.format == Format::float32 ? reinterpret_cast<float*>(out) : task.scratch;
  if (task.norm) {
    const F inverse = splat(inverse_rms(x, task.padded, task.width, task.eps));
    for (int i = 0; i < task.padded; i += 16)  // weights past the width are zero
      store(y + i, load(x + i) * inverse * load(task.norm + i));
  } else {
    for (int i = 0; i < task.padded; i += 16) store(y + i, load(x + i));
  }
  if (task.format == Format::int8) {
    if (task.rotation) rotate(y, task.padded, task.rotation);
    quantize(y, task.padded, task.wide, out, task.out_stride, task.scale + row);
  } else if (task.format == Format::bfloat16) {
    for (int i = 0; i < task.padded; i += 16)
      store_bf16(reinterpret_cast<uint16_t*>(out) + i, load(y + i));
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
