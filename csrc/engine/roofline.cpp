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
  constexpr int kRows = 12, kInputs = 256, kRepeats = 4000;
  const std::vector<float> zeros(static_cast<size_t>(kPanel) * kInputs), scale(kRows);
  const Linear linear(format, {{zeros.data(), kPanel, kInputs, nullptr}}, false);
  const int pieces = 8 * team.members();
  const double seconds = best_seconds([&] {
    team.run(1, [&](Member& member) {
      alignas(64) uint8_t input[kRows * kInputs * 4] = {}, out[kRows * kPanel * 4];
      LinearTask task{};
      task.weights = &linear.weights();
      task.input = input;
      task.input_stride = linear.row_bytes();
      task.scale = scale.data();
      task.out = out;
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
  constexpr size_t kBytes = size_t{512} << 20;
  constexpr int kPieces = 256;
  const Buffer buffer(kBytes);
  std::fill(buffer.as<float>(), buffer.as<float>() + kBytes / 4, 1.0f);
  const int64_t width = kBytes / 4 / kPieces;
  const double seconds = best_seconds([&] {
    team.run(1, [&](Member& member) {
      // argmax reads a row of equal values once: the first one is the answer.
      member.share(kPieces, [&](uint32_t piece) { kernels.argmax({buffer.as<float>() + piece * width, width}); });
    });
  });
  return static_cast<double>(kBytes) / seconds;
}

}  // namespace turnstile
