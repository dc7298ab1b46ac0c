// Matrix products on AMX tiles: a panel of 32 outputs times up to 32 rows, 64 bytes of input a time.
//
//                 outputs 0..15   outputs 16..31
//               +---------------+---------------+
//   rows 0..15  |    tile 0     |    tile 1     |   tile 4 = 16 rows of input,
//   rows 16..31 |    tile 2     |    tile 3     |   tile 5 = 16 more,
//               +---------------+---------------+   tiles 6, 7 = 16 steps of the two halves of a panel
//
// The panels are laid out as the tiles want them already: 16 steps are a tile whose rows lie
// kStepBytes apart. int8 gives the same bits as the vector kernels, because integers do not round; in
// bfloat16 every height of a tile takes this path, so that a row does not know its neighbours.
#pragma once

#include <immintrin.h>

namespace turnstile::TURNSTILE_LEVEL {

constexpr int kTile = 16;            // rows of a tile; steps of a panel that fill one
constexpr int kAmxRows = 2 * kTile;  // rows computed together
// So few rows of int8 wait for the weights whichever way they are multiplied.
constexpr int kFewRows = 4;

// Tells the processor the shapes of the tiles for a block of `rows` rows. Clears all of them.
INLINE void shape_tiles(int rows) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } shape;
  const auto upper = static_cast<uint8_t>(rows < kTile ? rows : kTile);
  const auto lower = static_cast<uint8_t>(rows - upper);
  const uint8_t heights[8] = {upper, upper, lower, lower, upper, lower, kTile, kTile};
  for (int tile = 0; tile < 8; ++tile) {
    shape.rows[tile] = heights[tile];
    shape.row_bytes[tile] = heights[tile] ? 64 : 0;
  }
  _tile_loadconfig(&shape);
}

struct Int8Tiles {
  static constexpr bool exact_in_any_order = true;
#define TURNSTILE_MULTIPLY(out, rows, panel) _tile_dpbusd(out, rows, panel)
#include "isa/linear_amx_block.inc"
#undef TURNSTILE_MULTIPLY
};
struct Bfloat16Tiles {
  static constexpr bool exact_in_any_order = false;
#define TURNSTILE_MULTIPLY(out, rows, panel) _tile_dpbf16ps(out, rows, panel)
#include "isa/linear_amx_block.inc"
#undef TURNSTILE_MULTIPLY
};

// Whether a product goes through tiles. Depends on the matrix alone where the order of a sum shows.
template <class Tiles>
INLINE bool fits_tiles(const LinearTask& task) {
  if (task.weights->steps % kTile != 0) return false;
  return !Tiles::exact_in_any_order || task.last_row - task.first_row > kFewRows;
}

// The rows of one panel are finished while the tiles of the next are multiplied: the two use different
// units of the processor, and the first takes as long as the second.
template <class Tiles>
static void linear_in_tiles(const LinearTask& task) {
  const Weights& weights = *task.weights;
  alignas(64) int32_t raw[2][kAmxRows * kPanel];
  for (int first = task.first_row; first < task.last_row; first += kAmxRows) {
    const int count = task.last_row - first < kAmxRows ? task.last_row - first : kAmxRows;
    const uint8_t* input = task.input + static_cast<size_t>(first) * task.input_stride;
    const bool cold = first == task.first_row;
    const int blocks = weights.steps / kTile;
    const int share = (count + blocks - 1) / blocks;  // rows finished beside one block
    shape_tiles(count);
    for (int panel = task.first_panel; panel < task.last_panel; ++panel) {
      const uint8_t* data = weights.data + static_cast<size_t>(panel) * weights.steps * kStepBytes;
      const int32_t* before = raw[(panel + 1) & 1];
      const auto finish = [&](int block) {
        if (panel == task.first_panel) return;
        const int last = (block + 1) * share < count ? (block + 1) * share : count;
        for (int row = block * share; row < last; ++row)
          finish_row(task, before + row * kPanel, first + row, panel - 1);
      };
      if (count > kTile)
        Tiles::template block<true>(input, task.input_stride, data, weights.steps, cold, raw[panel & 1], finish);
      else
        Tiles::template block<false>(input, task.input_stride, data, weights.steps, cold, raw[panel & 1], finish);
    }
    const int last = task.last_panel - 1;
    for (int row = 0; row < count; ++row) finish_row(task, raw[last & 1] + row * kPanel, first + row, last);
  }
  _tile_release();
}

}  // namespace turnstile::TURNSTILE_LEVEL
