// Writes one token's K and V of one head into its slot of a block (the layout is in kernels.h).
#pragma once

#include "isa/kernels.h"
#include "isa/math.h"

namespace turnstile::TURNSTILE_LEVEL {

// The scale of a head's values; NaN if one of them is not finite.
INLINE float head_scale(const float* x, int head_dim, float* inverse) {
  F highest_lane = splat(0.0f), probe = splat(0.0f);
  for (int i = 0; i < head_dim; i += 16) {
    highest_lane = max(highest_lane, abs(load(x + i)));
    probe = fma(load(x + i), splat(0.0f), probe);
  }
  const float largest = highest(highest_lane);
  *inverse = largest > 0 ? 127.0f / largest : 0.0f;
  return largest / 127.0f + sum(probe);
}

// Byte `place` of 16 lanes in memory = the low byte of q.
INLINE void put_byte(uint8_t* lanes, int place, I q) {
  const I others = load_i(lanes) & splat_i(static_cast<int32_t>(~(0xFFu << (8 * place))));
  switch (place) {
    case 0: return store_i(lanes, others | q);
    case 1: return store_i(lanes, others | left<8>(q));
    case 2: return store_i(lanes, others | left<16>(q));
    default: return store_i(lanes, others | left<24>(q));
  }
}

static void write_int8(const WriteTask& task) {
  const int d = task.head_dim, slot = task.slot;
  float* key_scale = reinterpret_cast<float*>(task.block);
  uint8_t* keys = task.block + 4 * kTokens;
  float* value_scale = reinterpret_cast<float*>(keys + static_cast<size_t>(d) * kTokens);
  uint8_t* values = reinterpret_cast<uint8_t*>(value_scale + kTokens);
  float inverse;
  uint8_t bytes[16];
  key_scale[slot] = head_scale(task.key, d, &inverse);
  for (int i = 0; i < d; i += 16) {
    store_u8(bytes, round_i(load(task.key + i) * splat(inverse)) + splat_i(128));
    for (int quad = 0; quad < 4; ++quad)
      __builtin_memcpy(keys + (static_cast<size_t>(i / 4 + quad) * kTokens + slot) * 4, bytes + 4 * quad, 4);
  }
  value_scale[slot] = head_scale(task.value, d, &inverse);
  for (int i = 0; i < d; i += 16) {
    const I q = round_i(load(task.value + i) * splat(inverse)) & splat_i(0xFF);
    put_byte(values + (static_cast<size_t>(slot / 4) * d + i) * 4, slot % 4, q);
  }
}

static void write_bfloat16(const WriteTask& task) {
  const int d = task.head_dim, slot = task.slot;
  auto* keys = reinterpret_cast<uint16_t*>(task.block);
  uint16_t* values = keys + static_cast<size_t>(d) * kTokens;
  uint16_t words[16];
  for (int i = 0; i < d; i += 16) {
    store_bf16(words, load(task.key + i));
    for (int pair = 0; pair < 8; ++pair)
      __builtin_memcpy(keys + (static_cast<size_t>(i / 2 + pair) * kTokens + slot) * 2, words + 2 * pair, 4);
    store_bf16(words, load(task.value + i));
    uint16_t* to = values + (static_cast<size_t>(slot / 2) * d + i) * 2 + slot % 2;
    for (int lane = 0; lane < 16; ++lane) to[2 * lane] = words[lane];
  }
}

static void write_float32(const WriteTask& task) {
  const int d = task.head_dim, slot = task.slot;
  auto* keys = reinterpret_cast<float*>(task.block);
  float* values = keys + static_cast<size_t>(d) * kTokens;
  for (int i = 0; i < d; ++i) keys[static_cast<size_t>(i) * kTokens + slot] = task.key[i];
  for (int i = 0; i < d; i += 16) store(values + static_cast<size_t>(slot) * d + i, load(task.value + i));
}

static void write(const WriteTask& task) {
  switch (task.format) {
    case Format::int8: return write_int8(task);
    case Format::bfloat16: return write_bfloat16(task);
    case Format::float32: return write_float32(task);
  }
}

}  // namespace turnstile::TURNSTILE_LEVEL
