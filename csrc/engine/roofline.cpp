#include "engine/roofline.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "engine/linear.h"
#include "engine/memory.h"

namespace turnstile {

namespace {

// The best of several runs: whatever else the machine does can only slow one down.
template <class Body>
double best_seconds(const Body& body) {
  double best = 1e9;
  for (int i = 0; i < 5; ++i) {
    const auto start = std::chrono::steady_clock::now();
    body();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

}  // namespace

double peak_operations(Team& team, const Kernels& kernels, Format format) {
  constexpr int kRows = 96, kInputs = 512, kRepeats = 400;  // operands of 48 and 16 KiB: in the caches
  const std::vector<float> zeros(static_cast<size_t>(kPanel) * kInputs), scale(kRows);
  const Linear linear(format, {{zeros.data(), kPanel, kInputs, nullptr}}, false);
  const int pieces = 8 * team.members();
  const double seconds = best_seconds([&] {
    team.run(1, [&](Member& member) {
      const Buffer input(kRows * kInputs * 4), out(kRows * kPanel * 4);
      LinearTask task{};
      task.weights = &linear.weights();
      task.input = input.data();
      task.input_stride = linear.row_bytes();
      task.scale = scale.data();
      task.out = out.data();
      task.out_stride = kPanel * 4;
      task.last_panel = 1;
      task.last_row = kRows;
      member.share(static_cast<uint32_t>(pieces), [&](uint32_t) {
        for (int i = 0; i < kRepeats / 8; ++i) kernels.linear(task);
      });
    });
  });
  return 2.0 * kRows * kPanel * kInputs * (kRepeats / 8) * pieces / seconds;
}

double peak_bandwidth(Team& team, const Kernels& kernels) {
  // One row times 512 MiB of zero weights: the way a step of one user reads its weights.
  constexpr int kSteps = 2048, kPanels = 2048, kPieces = 256;
  constexpr size_t kBytes = static_cast<size_t>(kPanels) * kSteps * kStepBytes;
  const Buffer buffer(kBytes), input(4 * kSteps), out(4 * kPanels * kPanel);
  std::fill(buffer.data(), buffer.data() + kBytes, uint8_t{0});  // or all of it is one page of zeros
  const std::vector<float> scale(kPanels * kPanel);
  const std::vector<int32_t> sums(kPanels * kPanel);
  const float row_scale = 1.0f;
  Weights weights{};
  weights.format = Format::int8;
  weights.inputs = 4 * kSteps;
  weights.steps = kSteps;
  weights.panels = kPanels;
  weights.data = buffer.data();
  weights.scale = scale.data();
  weights.sum128 = sums.data();
  LinearTask task{};
  task.weights = &weights;
  task.input = input.data();
  task.input_stride = 4 * kSteps;
  task.scale = &row_scale;
  task.out = out.data();
  task.out_stride = 4 * kPanels * kPanel;
  task.last_row = 1;
  const double seconds = best_seconds([&] {
    team.run(1, [&](Member& member) {
      member.share(kPieces, [&](uint32_t piece) {
        LinearTask mine = task;
        mine.first_panel = kPanels / kPieces * piece;
        mine.last_panel = kPanels / kPieces * (piece + 1);
        kernels.linear(mine);
      });
    });
  });
  return static_cast<double>(kBytes) / seconds;
}

}  // namespace turnstile
