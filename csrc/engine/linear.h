// A weight matrix in the layout the kernels read (see isa/kernels.h).
#pragma once

#include <vector>

#include "engine/memory.h"
#include "engine/team.h"
#include "isa/kernels.h"

namespace turnstile {

// A matrix of float32 as it comes from the checkpoint: row-major [outputs, inputs].
struct Matrix {
  const float* data;
  int outputs, inputs;
  const float* bias;  // [outputs] or null
};

class Linear {
 public:
  // The parts one below the other. With `interleave` (two parts, gate and up), panels take 16 outputs
  // of each part in turn. Throws std::invalid_argument if the parts do not fit each other.
  Linear(Format format, const std::vector<Matrix>& parts, bool interleave);
  Linear(Linear&&) = default;
  Linear(const Linear&) = delete;

  const Weights& weights() const { return weights_; }
  int inputs() const { return weights_.inputs; }
  int padded_outputs() const { return weights_.panels * kPanel; }
  size_t row_bytes() const { return static_cast<size_t>(weights_.steps) * 4; }  // of its input
  size_t bytes() const { return data_.bytes(); }

 private:
  void pack_row(const Matrix& part, int row, int output, std::vector<float>& inputs);

  Weights weights_{};
  Buffer data_;
  std::vector<float> scale_, bias_;
  std::vector<int32_t> sum128_;
};

// Where a product goes.
struct Product {
  Finish finish;
  uint8_t* out;
  size_t out_stride;
  bool out_bfloat16 = false;
  bool stream = false;  // see LinearTask
};

// One phase: rows x panels in pieces small enough to balance, large enough to reuse a panel.
void multiply(Member& member, const Kernels& kernels, const Linear& linear, const uint8_t* input,
              const float* scale, int rows, const Product& product);

}  // namespace turnstile
