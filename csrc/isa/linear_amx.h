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

#include "isa/tiles.h"

namespace turnstile::TURNSTILE_LEVEL {

constexpr int kTile = 16;            // rows of a tile; steps of a panel that fill one
constexpr int kAmxRows = 2 * kTile;  // rows computed together
// So few rows of int8 wait for the weights whichever way they are multiplied.
constexpr int kFewRows = 4;

// The tiles for a block of `rows` rows.
INLINE void shape_tiles(int rows) {
  const int upper = rows < kTile ? rows : kTile, lower = rows - upper;
  const TileShape above{upper, 64}, below{lower, lower ? 64 : 0}, panel{kTile, 64};
  shape_tiles({above, above, below, below, above, below, panel, panel});
}

// Brings the panel that is probably multiplied next into the second-level cache, a share beside every product.
// All quarters of it at once: the processor reads ahead of what is asked for, in every page of memory for itself,
// and a core that asks for one line after the other gets two thirds of what it gets from four places.
class NextPanel {
 public:
  // `shares` shares are all of it; none if there is no panel.
  NextPanel(const uint8_t* panel, size_t bytes, int shares)
      : at_(panel), quarter_(bytes / kPlaces), left_(panel ? quarter_ / kLine : 0), share_((left_ + shares - 1) / shares) {}

  void share() {
    for (int i = 0; i < share_ && left_ > 0; ++i, --left_, at_ += kLine)
      for (int place = 0; place < kPlaces; ++place) __builtin_prefetch(at_ + place * quarter_, 0, 2);
  }

 private:
  static constexpr int kPlaces = 4, kLine = 64;
  const uint8_t* at_;      // in the first quarter
  const size_t quarter_;   // bytes
  int left_;               // lines of a quarter
  const int share_;        // lines of a quarter
};

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

// Panel by panel, and for each all rows, block by block: a panel stays in the first-level cache, which the
// rows pass by, and while its blocks are multiplied the next panel is fetched. The rows of one block are finished
// between the tiles of the next, which use other units of the processor; where they go is brought near a block
// before. What that does is in docs/performance.md. All blocks have one height, so that the tiles keep their shape; the last block may
// begin with rows of the block before, which are then computed twice and finished once.
template <class Tiles, class Finisher>
static void linear_in_tiles(const LinearTask& task, Finisher finisher) {
  const Weights& weights = *task.weights;
  const int rows = task.last_row - task.first_row;
  if (rows == 0) return;
  const int row_blocks = (rows + kAmxRows - 1) / kAmxRows;
  const int height = (rows + row_blocks - 1) / row_blocks;
  const int tiles = weights.steps / kTile;                // of a panel, one below the other
  const int share = (height + tiles - 1) / tiles;         // rows finished beside one of them
  const size_t panel_bytes = static_cast<size_t>(weights.steps) * kStepBytes;
  // Some lines more than 4 KiB apart: a load takes a store at the same place of another 4 KiB for its own.
  alignas(64) int32_t raw[2][kAmxRows * kPanel + 5 * kTile];
  int parity = 0;
  struct { int panel, first, row, last; } before{0, 0, 0, 0};  // what is not yet finished of the block before
  const auto finish = [&](int count) {
    const int stop = before.row + count < before.last ? before.row + count : before.last;
    Finisher::rows(finisher, raw[parity ^ 1] + (before.row - before.first) * kPanel, before.row, stop, before.panel);
    before.row = stop;
  };
  shape_tiles(height);
  for (int panel = task.first_panel; panel < task.last_panel; ++panel) {
    const uint8_t* data = weights.data + panel * panel_bytes;
    NextPanel next(panel + 1 < weights.panels ? data + panel_bytes : nullptr, panel_bytes, 2 * tiles * row_blocks);
    for (int block = 0; block < row_blocks; ++block) {
      const int begin = task.first_row + block * height;
      const int first = begin + height <= task.last_row ? begin : task.last_row - height;
      const int last = first + height;
      const auto meanwhile = [&](int tile) {
        const int row = begin + tile * share;
        Finisher::expect(finisher, row, row + share < last ? row + share : last, panel);
        finish(share);
      };
      const uint8_t* input = task.input + static_cast<size_t>(first) * task.input_stride;
      if (height > kTile)
        Tiles::template block<true>(input, task.input_stride, data, weights.steps, raw[parity], next, meanwhile);
      else
        Tiles::template block<false>(input, task.input_stride, data, weights.steps, raw[parity], next, meanwhile);
      before = {panel, first, begin, last};
      if (block == 0) Finisher::begin(finisher, panel);
      parity ^= 1;
    }
  }
  finish(height);
  _tile_release();
}
template <class Tiles>
static void linear_in_tiles(const LinearTask& task) {
  with_finisher<Tiles::exact_in_any_order>(task, [&](auto finisher) { linear_in_tiles<Tiles>(task, finisher); });
}

}  // namespace turnstile::TURNSTILE_LEVEL
