// One decoder layer, prepared; and the table of RoPE angles.
#pragma once

#include <memory>
#include <vector>

#include "engine/linear.h"

namespace turnstile {

// cos and sin of position * inv_freq, in rows made when a position is first asked for.
class Rope {
 public:
  Rope(std::vector<float> inv_freq, float scale) : inv_freq_(std::move(inv_freq)), scale_(scale) {}
  void reserve(int positions);
  const float* cosine(int position) const { return table_.data() + static_cast<size_t>(position) * 2 * inv_freq_.size(); }
  const float* sine(int position) const { return cosine(position) + inv_freq_.size(); }
  bool same(const std::vector<float>& inv_freq, float scale) const { return inv_freq == inv_freq_ && scale == scale_; }

 private:
  std::vector<float> inv_freq_;
  float scale_;
  std::vector<float> table_;  // [positions][cos, sin][head_dim / 2]
};

struct Attention {
  int heads, kv_heads, head_dim;
  int norm_width;  // of q and k norms: the head size without padding
  float scale;
  int window;  // 0: none
};

struct Layer {
  Attention attention;
  int hidden;
  float eps;
  std::vector<float> input_norm, output_norm;  // [hidden], padded with zeros
  std::vector<float> q_norm, k_norm;           // [head_dim] or empty
  std::shared_ptr<Rope> rope;
  Linear qkv, o, gate_up, down;
};

struct Head {
  int hidden;
  float eps;
  std::vector<float> norm;
  Linear projection;
  int vocabulary;
};

}  // namespace turnstile
