// AMX tiles: their shapes, and what the compiler does not know of them.
#pragma once

#include <immintrin.h>

#include "isa/simd.h"

namespace turnstile::TURNSTILE_LEVEL {

struct TileShape { int rows, bytes; };

// Tells the processor the shapes of the tiles. Clears all of them.
INLINE void shape_tiles(const TileShape (&tiles)[8]) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } shape;
  for (int tile = 0; tile < 8; ++tile) {
    shape.rows[tile] = static_cast<uint8_t>(tiles[tile].rows);
    shape.row_bytes[tile] = static_cast<uint16_t>(tiles[tile].bytes);
  }
  _tile_loadconfig(&shape);
}

// The compiler does not know that tile loads read memory.
INLINE void tiles_see_memory() { asm volatile("" ::: "memory"); }

}  // namespace turnstile::TURNSTILE_LEVEL
