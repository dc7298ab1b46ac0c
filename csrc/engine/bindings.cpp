// The Python module `turnstile_kernels`. Arrays come in as numpy; results are written into arrays the
// caller made, or stay in native memory that the caller sees as an array.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <mutex>
#include <optional>

#include "engine/cpu.h"
#include "engine/layer.h"
#include "engine/logits.h"
#include "engine/pool.h"
#include "engine/roofline.h"
#include "engine/step.h"

namespace nb = nanobind;
using namespace turnstile;

namespace {

using FloatMatrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatVector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IntMatrix = nb::ndarray<const int32_t, nb::ndim<2>, nb::device::cpu>;
using LogitRows = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using FloatOut = nb::ndarray<float, nb::c_contig, nb::device::cpu>;
using LongOut = nb::ndarray<int64_t, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bias = std::optional<FloatVector>;

Format format_of(const std::string& name) {
  if (name == "float32") return Format::float32;
  if (name == "bfloat16") return Format::bfloat16;
  if (name == "int8") return Format::int8;
  throw nb::value_error(("unknown format '" + name + "'; choose float32, bfloat16 or int8").c_str());
}

Matrix matrix_of(const FloatMatrix& weight, const Bias& bias) {
  if (bias && bias->shape(0) != weight.shape(0)) throw nb::value_error("a bias has another length than its layer");
  return {weight.data(), static_cast<int>(weight.shape(0)), static_cast<int>(weight.shape(1)),
          bias ? bias->data() : nullptr};
}

std::vector<float> padded(const std::optional<FloatVector>& values, size_t multiple) {
  if (!values) return {};
  std::vector<float> out((values->shape(0) + multiple - 1) / multiple * multiple, 0.0f);
  std::copy(values->data(), values->data() + values->shape(0), out.begin());
  return out;
}

Logits logits_of(const LogitRows& logits) {
  if (logits.shape(1) == 0 || logits.stride(1) != 1) throw nb::value_error("rows of logits must be contiguous and not empty");
  return {logits.data(), static_cast<int>(logits.shape(0)), static_cast<int64_t>(logits.shape(1)), logits.stride(0)};
}

// Everything of one engine: kernels, threads, and the step in the making.
class Engine {
 public:
  Engine(const std::string& level, int threads, const std::string& format)
      : kernels_(kernels_of(level)), team_(threads), format_(format_of(format)), step_(kernels_, team_, format_) {}

  Format format() const { return format_; }
  Step& step() { return step_; }
  Team& team() { return team_; }
  const Kernels& kernels() const { return kernels_; }

  std::shared_ptr<Rope> rope(const FloatVector& inv_freq, float scale) {
    const std::lock_guard<std::mutex> lock(ropes_mutex_);  // layers are made in several threads
    std::vector<float> values(inv_freq.data(), inv_freq.data() + inv_freq.shape(0));
    for (const auto& known : ropes_)
      if (known->same(values, scale)) return known;
    ropes_.push_back(std::make_shared<Rope>(std::move(values), scale));
    return ropes_.back();
  }

  void begin(int page_size, const Ints& ids, const Ints& positions, const IntMatrix& tables, const Ints& offsets,
             const Ints& contexts, const Ints& rows) {
    if (positions.shape(0) != ids.shape(0) || offsets.shape(0) != contexts.shape(0) + 1 ||
        tables.shape(0) < contexts.shape(0) || (tables.shape(1) > 1 && tables.stride(1) != 1))
      throw nb::value_error("the arrays of the batch do not fit each other");
    step_.begin({page_size, static_cast<int>(ids.shape(0)), static_cast<int>(contexts.shape(0)),
                 static_cast<int>(rows.shape(0)), ids.data(), positions.data(), offsets.data(), contexts.data(),
                 rows.data(), tables.data(), tables.stride(0), static_cast<int64_t>(tables.shape(1))});
  }

 private:
  const Kernels& kernels_;
  Team team_;
  const Format format_;
  Step step_;
  std::mutex ropes_mutex_;
  std::vector<std::shared_ptr<Rope>> ropes_;
};

Layer* make_layer(Engine& engine, const FloatVector& input_norm, const FloatMatrix& q,
                                  const FloatMatrix& k, const FloatMatrix& v, const FloatMatrix& o,
                                  const FloatVector& output_norm, const FloatMatrix& gate, const FloatMatrix& up,
                                  const FloatMatrix& down, const Bias& q_bias, const Bias& k_bias, const Bias& v_bias,
                                  const Bias& o_bias, const Bias& q_norm, const Bias& k_norm,
                                  const FloatVector& inv_freq, float rope_scale, int heads, int kv_heads, int head_dim,
                                  int norm_width, float scale, int window, float eps) {
  if (head_dim % 16 || heads % kv_heads || static_cast<int>(q.shape(0)) != heads * head_dim ||
      static_cast<int>(k.shape(0)) != kv_heads * head_dim || static_cast<int>(inv_freq.shape(0)) * 2 != head_dim)
    throw nb::value_error("the native backend needs a head size that is a multiple of 16 and matching projections");
  const Format format = engine.format();
  return new Layer{
      {heads, kv_heads, head_dim, norm_width, scale, window},
      static_cast<int>(input_norm.shape(0)),
      eps,
      padded(input_norm, kPanel),
      padded(output_norm, kPanel),
      padded(q_norm, 16),
      padded(k_norm, 16),
      engine.rope(inv_freq, rope_scale),
      Linear(format, {matrix_of(q, q_bias), matrix_of(k, k_bias), matrix_of(v, v_bias)}, false),
      Linear(format, {matrix_of(o, o_bias)}, false),
      Linear(format, {matrix_of(gate, {}), matrix_of(up, {})}, true),
      Linear(format, {matrix_of(down, {})}, false),
  };
}

}  // namespace

NB_MODULE(turnstile_kernels, m) {
  // A model held in a global of the user's program is alive at exit: no fault, no reason to be loud.
  nb::set_leak_warnings(false);
  m.doc() = "Native CPU kernels of Turnstile.";
  m.attr("__version__") = "0.1.0";
  m.def("levels", &available_levels, "Instruction set levels this processor runs, best first.");

  nb::class_<Embedding>(m, "Embedding")
      .def("__init__", [](Embedding* self, const Table& table) {
        const bool narrow = table.itemsize() == 2;
        new (self) Embedding{table.data(), narrow, static_cast<int>(table.shape(0)), static_cast<int>(table.shape(1))};
      }, nb::arg("table"), nb::keep_alive<1, 2>(), "A table of float32, or of bfloat16 seen as 16-bit integers; not copied.");
  nb::class_<Layer>(m, "Layer");
  nb::class_<Head>(m, "Head").def_ro("vocabulary", &Head::vocabulary);
  nb::class_<Pool>(m, "Pool")
      .def("__init__", [](Pool* self, const std::string& format, int layers, int kv_heads, int head_dim, int page_size, int64_t pages) {
        new (self) Pool({format_of(format), layers, kv_heads, head_dim, page_size, pages});
      })
      .def_static("page_bytes", [](const std::string& format, int layers, int kv_heads, int head_dim, int page_size) {
        return Pool::page_bytes({format_of(format), layers, kv_heads, head_dim, page_size, 0});
      })
      .def("copy_page", &Pool::copy_page, nb::call_guard<nb::gil_scoped_release>())
      .def("bytes", [](Pool& self) {
        return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(self.data(), {self.bytes()}, nb::find(self));
      }, nb::rv_policy::reference_internal, "The raw memory, for tests.");

  nb::class_<Engine>(m, "Engine")
      .def(nb::init<const std::string&, int, const std::string&>(), nb::arg("level"), nb::arg("threads"), nb::arg("format"))
      .def_prop_ro("level", [](Engine& self) { return self.kernels().name; })
      .def_prop_ro("threads", [](Engine& self) { return self.team().members(); })
      .def("layer", &make_layer, nb::rv_policy::take_ownership, nb::call_guard<nb::gil_scoped_release>())
      .def("head", [](Engine& self, const FloatVector& norm, const FloatMatrix& projection, float eps) {
        return new Head{static_cast<int>(norm.shape(0)), eps, padded(norm, kPanel),
                        Linear(self.format(), {matrix_of(projection, {})}, false),
                        static_cast<int>(projection.shape(0))};
      }, nb::rv_policy::take_ownership, nb::call_guard<nb::gil_scoped_release>())
      .def("begin", &Engine::begin)
      .def("embed", [](Engine& self, const Embedding& table) { self.step().record_embed(table); })
      .def("attention_input", [](Engine& self, const Layer& layer, const Pool& pool, int index) {
        self.step().record(Operation::attention_input, layer, &pool, index);
      })
      .def("attend", [](Engine& self, const Layer& layer, const Pool& pool, int index) {
        self.step().record(Operation::attend, layer, &pool, index);
      })
      .def("attention_output", [](Engine& self, const Layer& layer) {
        self.step().record(Operation::attention_output, layer, nullptr, 0);
      })
      .def("mlp_input", [](Engine& self, const Layer& layer) {
        self.step().record(Operation::mlp_input, layer, nullptr, 0);
      })
      .def("mlp_output", [](Engine& self, const Layer& layer) {
        self.step().record(Operation::mlp_output, layer, nullptr, 0);
      })
      .def("run", [](Engine& self, const Head& head, int rows) {
        {
          nb::gil_scoped_release release;
          self.step().run(head);
        }
        return nb::ndarray<nb::numpy, float, nb::ndim<2>>(
            const_cast<float*>(self.step().logits()), {static_cast<size_t>(rows), static_cast<size_t>(head.vocabulary)},
            nb::find(self), {self.step().logits_stride(), 1});
      }, "Run what was recorded; the logits are valid until the next run.")
      .def("peak_operations", [](Engine& self) {
        return peak_operations(self.team(), self.kernels(), self.format());
      }, nb::call_guard<nb::gil_scoped_release>(), "Operations a second of this format's products at best.")
      .def("peak_bandwidth", [](Engine& self) {
        return peak_bandwidth(self.team(), self.kernels());
      }, nb::call_guard<nb::gil_scoped_release>(), "Bytes a second read from memory at best.")
      .def("laps", [](Engine& self) {
        const char* names[kLaps] = {"embed", "norm for qkv", "qkv", "rope, write K V", "attention", "quantise for o",
                                    "o", "norm for mlp", "gate, up, silu", "quantise for down", "down",
                                    "norm for head", "head"};
        nb::dict laps;
        for (int i = 0; i < kLaps; ++i) laps[names[i]] = self.step().laps()[i];
        return laps;
      }, "Seconds spent in each part of all steps so far.")
      .def("argmax", [](Engine& self, const LogitRows& logits, LongOut out) {
        argmax(self.team(), self.kernels(), logits_of(logits), out.data());
      }, nb::call_guard<nb::gil_scoped_release>())
      .def("log_normalizer", [](Engine& self, const LogitRows& logits, FloatOut out) {
        log_normalizer(self.team(), self.kernels(), logits_of(logits), out.data());
      }, nb::call_guard<nb::gil_scoped_release>())
      .def("top_k", [](Engine& self, const LogitRows& logits, int k, FloatOut values, LongOut indices) {
        top_k(self.team(), self.kernels(), logits_of(logits), k, values.data(), indices.data());
      }, nb::call_guard<nb::gil_scoped_release>());
}
