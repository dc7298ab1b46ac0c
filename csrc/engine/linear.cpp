#include "engine/linear.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace turnstile {

namespace {

constexpr int kMaxRotation = 64;  // 512 is no better for perplexity and costs three more stages

uint16_t bfloat16_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

// To the nearest integer, ties to even: what is added leaves the sum no bits for fractions. For |x| < 2^22.
int32_t rounded(float x) { return std::bit_cast<int32_t>(x + 12582912.0f) - std::bit_cast<int32_t>(12582912.0f); }

// The largest magnitude. Floats without their sign are in the order of their bits.
float largest_of(const float* x, int count) {
  int32_t largest = 0;
  for (int i = 0; i < count; ++i) largest = std::max(largest, std::bit_cast<int32_t>(x[i]) & 0x7FFFFFFF);
  return std::bit_cast<float>(largest);
}

int per_step(Format format) {
  return format == Format::int8 ? 4 : format == Format::bfloat16 ? 2 : 1;
}

// The largest power of two that divides the inputs, so that every block is whole.
int rotation_of(int inputs) { return std::min(inputs & -inputs, kMaxRotation); }

// The inverse of what the kernels do to activations (see isa/rows.h): the transform over the block size.
void rotate(std::vector<float>& x, int block) {
  const auto count = static_cast<int>(x.size());
  int stride = 1;
  if (block >= 4) {
    // Two stages at once, for the strides that are no vector wide.
    for (int i = 0; i < count; i += 4) {
      const float sum = x[i] + x[i + 1], difference = x[i] - x[i + 1];
      const float next_sum = x[i + 2] + x[i + 3], next_difference = x[i + 2] - x[i + 3];
      x[i] = sum + next_sum;
      x[i + 1] = difference + next_difference;
      x[i + 2] = sum - next_sum;
      x[i + 3] = difference - next_difference;
    }
    stride = 4;
  }
  for (; stride < block; stride *= 2) {
    for (int start = 0; start < count; start += 2 * stride) {
      float* low = x.data() + start;
      float* high = low + stride;
      for (int i = 0; i < stride; ++i) {
        const float a = low[i], b = high[i];
        low[i] = a + b;
        high[i] = a - b;
      }
    }
  }
  const float share = 1.0f / static_cast<float>(block);  // a power of two: exact
  for (float& value : x) value *= share;
}

}  // namespace

Linear::Linear(Format format, const std::vector<Matrix>& parts, bool interleave) {
  if (parts.empty()) throw std::invalid_argument("a linear layer needs at least one matrix");
  int outputs = 0;
  bool biased = false;
  for (const Matrix& part : parts) {
    if (part.inputs != parts[0].inputs) throw std::invalid_argument("matrices of one layer differ in inputs");
    outputs += part.outputs;
    biased |= part.bias != nullptr;
  }
  if (interleave && (parts.size() != 2 || parts[0].outputs != parts[1].outputs))
    throw std::invalid_argument("gate and up differ in outputs");
  const int group = interleave ? (parts[0].outputs + 15) / 16 : 0;
  weights_.format = format;
  weights_.inputs = (parts[0].inputs + 15) / 16 * 16;
  weights_.steps = weights_.inputs / per_step(format);
  weights_.panels = interleave ? group : (outputs + kPanel - 1) / kPanel;
  weights_.rotation = format == Format::int8 ? rotation_of(weights_.inputs) : 0;
  data_ = Buffer(static_cast<size_t>(weights_.panels) * weights_.steps * kStepBytes);
  scale_.assign(padded_outputs(), 0.0f);
  sum128_.assign(padded_outputs(), 0);
  if (biased) bias_.assign(padded_outputs(), 0.0f);
  std::vector<float> row_inputs(weights_.inputs);
  int base = 0;
  for (size_t p = 0; p < parts.size(); ++p) {
    for (int row = 0; row < parts[p].outputs; ++row)
      pack_row(parts[p], row, interleave ? row / 16 * kPanel + static_cast<int>(p) * 16 + row % 16 : base + row,
               row_inputs);
    base += parts[p].outputs;
  }
  weights_.data = data_.data();
  weights_.scale = scale_.data();
  weights_.sum128 = sum128_.data();
  weights_.bias = biased ? bias_.data() : nullptr;
}

// int8: q = round(w / scale), scale = max|w| / 127 of the output. The products take activations as
// q + 128 (the hardware multiplies unsigned by signed), so 128 * sum(q) is subtracted afterwards.
// Start-up waits for this: each loop is one that a compiler turns into vectors.
void Linear::pack_row(const Matrix& part, int row, int output, std::vector<float>& inputs) {
  const float* from = part.data + static_cast<size_t>(row) * part.inputs;
  std::fill(std::copy(from, from + part.inputs, inputs.begin()), inputs.end(), 0.0f);
  if (weights_.rotation) rotate(inputs, weights_.rotation);
  const float* w = inputs.data();
  uint8_t* panel = data_.data() + static_cast<size_t>(output / kPanel) * weights_.steps * kStepBytes + output % kPanel * 4;
  const auto put = [&](int step, uint32_t four_bytes) {
    std::memcpy(panel + static_cast<size_t>(step) * kStepBytes, &four_bytes, 4);
  };
  if (part.bias) bias_[output] = part.bias[row];
  switch (weights_.format) {
    case Format::int8: {
      const float largest = largest_of(w, weights_.inputs);
      const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
      int32_t sum = 0;
      for (int i = 0; i < weights_.inputs; ++i) sum += rounded(w[i] * inverse);
      for (int step = 0; step < weights_.steps; ++step) {
        uint32_t four = 0;
        for (int i = 0; i < 4; ++i)
          four |= static_cast<uint32_t>(rounded(w[4 * step + i] * inverse) & 255) << (8 * i);
        put(step, four);
      }
      scale_[output] = largest / 127.0f;
      sum128_[output] = 128 * sum;
      break;
    }
    case Format::bfloat16:
      for (int step = 0; step < weights_.steps; ++step)
        put(step, bfloat16_of(w[2 * step]) | static_cast<uint32_t>(bfloat16_of(w[2 * step + 1])) << 16);
      break;
    case Format::float32:
      for (int step = 0; step < weights_.steps; ++step) put(step, std::bit_cast<uint32_t>(w[step]));
      break;
  }
}

void multiply(Member& member, const Kernels& kernels, const Linear& linear, const uint8_t* input,
              const float* scale, int rows, const Product& product) {
  const Weights& weights = linear.weights();
  LinearTask task{};
  task.weights = &weights;
  task.input = input;
  task.input_stride = linear.row_bytes();
  task.scale = scale;
  task.finish = product.finish;
  task.out_bfloat16 = product.out_bfloat16;
  task.out = product.out;
  task.out_stride = product.out_stride;
  task.stream = product.stream;
  // A piece is about 100,000 steps of one row (some 10 us), but at least 8 pieces a member. Rows stay together,
  // so that a panel is read once, as long as all of them fit half of a second-level cache; a member takes
  // all panels of some rows before it turns to others.
  const int wanted = 8 * member.members();
  const int together = std::max<int>(48, (size_t{1} << 20) / linear.row_bytes());
  const int row_pieces = std::max({1, (rows + together - 1) / together,
                                   std::min((wanted + weights.panels - 1) / weights.panels, rows / 32)});
  const int per_piece = std::max(1, rows / row_pieces);
  const int cost = weights.steps * std::max(per_piece, 4);
  int panels = std::max(1, 100000 / std::max(1, cost));
  panels = std::min(panels, std::max(1, weights.panels * row_pieces / wanted));
  const int panel_pieces = (weights.panels + panels - 1) / panels;
  member.share(static_cast<uint32_t>(panel_pieces * row_pieces), [&](uint32_t piece) {
    LinearTask mine = task;
    const int r = static_cast<int>(piece) / panel_pieces, p = static_cast<int>(piece) % panel_pieces;
    mine.first_panel = weights.panels * p / panel_pieces;
    mine.last_panel = weights.panels * (p + 1) / panel_pieces;
    mine.first_row = rows * r / row_pieces;
    mine.last_row = rows * (r + 1) / row_pieces;
    kernels.linear(mine);
  });
}

}  // namespace turnstile
