// Products and attention of every level this machine runs, against loops anybody can read. The Python
// tests are thorough; this is for machines without them (an emulator, a cross compiler):
//
//   aarch64-linux-gnu-g++ -std=c++20 -O2 -ffp-contract=off -static -DTURNSTILE_LEVEL=portable -Icsrc
//       csrc/tests/check.cpp csrc/isa/level.cpp csrc/engine/{cpu,memory,team,linear,pool}.cpp -o check
//   qemu-aarch64 check
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "engine/cpu.h"
#include "engine/linear.h"
#include "engine/pool.h"

using namespace turnstile;

namespace {

std::vector<float> normal(size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> draw;
  std::vector<float> values(count);
  for (float& value : values) value = draw(random);
  return values;
}

const Format kFormats[] = {Format::float32, Format::bfloat16, Format::int8};
const char* const kNames[] = {"float32", "bfloat16", "int8"};
const double kTolerance[] = {1e-5, 0.02, 0.03};

double product_error(const Kernels& kernels, Format format, int rows, int inputs, int outputs) {
  const auto x = normal(static_cast<size_t>(rows) * inputs, 1), w = normal(static_cast<size_t>(outputs) * inputs, 2);
  const Linear linear(format, {{w.data(), outputs, inputs, nullptr}}, false);
  Buffer input(linear.row_bytes() * rows), padded(4 * static_cast<size_t>(linear.inputs()) * rows);
  Buffer out(4 * static_cast<size_t>(linear.padded_outputs()) * rows), scratch(4 * linear.inputs());
  std::vector<float> scale(rows);
  for (int r = 0; r < rows; ++r)
    std::copy(&x[static_cast<size_t>(r) * inputs], &x[static_cast<size_t>(r) * inputs] + inputs,
              padded.as<float>() + static_cast<size_t>(r) * linear.inputs());
  NormTask norm{};
  norm.input = padded.as<float>();
  norm.input_stride = 4 * static_cast<size_t>(linear.inputs());
  norm.width = inputs;
  norm.padded = linear.inputs();
  norm.format = format;
  norm.rotation = linear.weights().rotation;
  norm.out = input.data();
  norm.out_stride = linear.row_bytes();
  norm.scale = scale.data();
  norm.scratch = scratch.as<float>();
  norm.last_row = rows;
  kernels.norm(norm);
  Team team(3);
  team.run(1, [&](Member& member) {
    multiply(member, kernels, linear, input.data(), scale.data(), rows,
             {Finish::store, out.data(), 4 * static_cast<size_t>(linear.padded_outputs())});
  });
  double wrong = 0, size = 0;
  for (int r = 0; r < rows; ++r) {
    for (int o = 0; o < outputs; ++o) {
      double expected = 0;
      for (int i = 0; i < inputs; ++i) expected += double{x[r * inputs + i]} * w[o * inputs + i];
      wrong += std::pow(expected - out.as<float>()[r * linear.padded_outputs() + o], 2);
      size += expected * expected;
    }
  }
  return std::sqrt(wrong / size);
}

double attention_error(const Kernels& kernels, Format format, int tokens, int d, int group) {
  const auto q = normal(static_cast<size_t>(group) * d, 3), k = normal(static_cast<size_t>(tokens) * d, 4),
             v = normal(static_cast<size_t>(tokens) * d, 5);
  Pool pool({format, 1, 1, d, 16, (tokens + 15) / 16});
  std::vector<const uint8_t*> blocks;
  for (int t = 0; t < tokens; ++t) {
    if (t % 16 == 0) blocks.push_back(pool.block(t / 16, 0, 0, 0));
    kernels.write({pool.block(t / 16, 0, 0, 0), format, &k[t * d], &v[t * d], d, t % 16});
  }
  std::vector<float> out(group * d);
  Buffer scratch(kernels.attend_scratch_bytes(d));
  AttendTask task{};
  task.blocks = blocks.data();
  task.format = format;
  const AttendRow row{q.data(), reinterpret_cast<uint8_t*>(out.data()), nullptr, 0, tokens};
  task.group = group;
  task.head_dim = d;
  task.scale = 1 / std::sqrt(static_cast<float>(d));
  task.rows = &row;
  task.num_rows = 1;
  task.end = static_cast<int>(blocks.size());
  task.scratch = scratch.data();
  kernels.attend(task);
  double wrong = 0, size = 0;
  for (int h = 0; h < group; ++h) {
    std::vector<double> weight(tokens), expected(d);
    double total = 0;
    for (int t = 0; t < tokens; ++t) {
      for (int i = 0; i < d; ++i) weight[t] += double{q[h * d + i]} * k[t * d + i];
      total += weight[t] = std::exp(weight[t] * task.scale);
    }
    for (int t = 0; t < tokens; ++t)
      for (int i = 0; i < d; ++i) expected[i] += weight[t] / total * v[t * d + i];
    for (int i = 0; i < d; ++i) {
      wrong += std::pow(expected[i] - out[h * d + i], 2);
      size += expected[i] * expected[i];
    }
  }
  return std::sqrt(wrong / size);
}

}  // namespace

int main() {
  int failures = 0;
  const auto check = [&](const char* what, const char* level, int format, double error) {
    const bool good = error < kTolerance[format];
    failures += !good;
    std::printf("%-10s %-9s %-20s error %.2g%s\n", level, kNames[format], what, error, good ? "" : "  WRONG");
  };
  for (const std::string& level : available_levels()) {
    const Kernels& kernels = kernels_of(level);
    for (int f = 0; f < 3; ++f) {
      check("product 1 x 576", level.c_str(), f, product_error(kernels, kFormats[f], 1, 576, 100));
      check("product 29 x 88", level.c_str(), f, product_error(kernels, kFormats[f], 29, 88, 333));
      check("attention 5", level.c_str(), f, attention_error(kernels, kFormats[f], 5, 80, 1));
      check("attention 1100", level.c_str(), f, attention_error(kernels, kFormats[f], 1100, 64, 7));
    }
  }
  std::printf(failures ? "%d checks failed\n" : "all good\n", failures);
  return failures ? 1 : 0;
}
