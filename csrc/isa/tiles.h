// AMX tiles: their shapes, and what the compiler does not know of them.
//
// The processor puts the multiplier of tiles to sleep 250 ns after its last product, and the next one then
// takes 265 ns more, in which nothing else is done either (docs/performance.md). Loads and stores of tiles do
// not keep it awake. Where vectors are busy for longer between products, one is made for nothing now and then.
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
  // Not _tile_loadconfig: to some compilers that reads 8 bytes, and the others need not have been written yet.
  asm volatile("ldtilecfg %0" ::"m"(shape));
}

// The compiler does not know that tile loads read memory.
INLINE void tiles_see_memory() { asm volatile("" ::: "memory"); }

// The compiler's own functions take nothing but literals for tiles: these take template parameters.
template <int tile> INLINE void clear_tile() { asm volatile("tilezero %%tmm%c0" ::"i"(tile)); }
template <int tile> INLINE void load_tile(const void* from, size_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile));
}
template <int tile> INLINE void store_tile(void* to, size_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(tile) : "memory");
}
// sums += left (signed or unsigned bytes) * right (unsigned or signed ones)
template <int sums, int left, int right> INLINE void multiply_signed() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(left), "i"(right));
}
template <int sums, int left, int right> INLINE void multiply_unsigned() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(left), "i"(right));
}

}  // namespace turnstile::TURNSTILE_LEVEL
