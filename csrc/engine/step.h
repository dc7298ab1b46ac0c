// One forward pass. The operations of a model are recorded and then run by the whole team in one go:
// one entry from Python a step, no lock held, and no thread put to sleep between operations.
#pragma once

#include <chrono>
#include <vector>

#include "engine/layer.h"
#include "engine/pool.h"
#include "engine/shared_runs.h"
#include "engine/team.h"

namespace turnstile {

struct Embedding {
  const void* table;  // [vocabulary, width], bfloat16 or float32; kept alive by the caller
  bool bfloat16;
  int vocabulary, width;
};

// Where the time of a step goes, as member 0 sees it: waiting for the others included.
enum class Lap { embed, qkv_input, qkv, write, attend, o_input, o, mlp_input, gate_up, down_input, down, head_input, head };
constexpr int kLaps = 13;

class Stopwatch {
 public:
  void start() { last_ = Clock::now(); }
  void lap(const Member& member, Lap lap) {
    if (member.index()) return;
    const auto now = Clock::now();
    seconds[static_cast<int>(lap)] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }
  double seconds[kLaps] = {};

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point last_;
};

enum class Operation { embed, attention_input, attend, attention_output, mlp_input, mlp_output, head };

class Step {
 public:
  Step(const Kernels& kernels, Team& team, Format format) : kernels_(kernels), team_(team), format_(format) {}

  // Forgets what was recorded. Throws std::invalid_argument for a batch that contradicts itself.
  void begin(const Batch& batch);
  void record_embed(const Embedding& embedding);
  void record(Operation operation, const Layer& layer, const Pool* pool, int index);
  // Runs everything recorded and the head; logits() then holds [rows, stride] floats.
  void run(const Head& head);
  const float* logits() const { return logits_.as<float>(); }
  int64_t logits_stride() const { return logits_stride_; }
  // Seconds of every lap since the beginning.
  const double* laps() const { return stopwatch_.seconds; }

 private:
  struct Run { int sequence, token, count; };  // consecutive tokens of a sequence
  struct Rows {  // tokens that go through operations together
    void clear(int tokens);
    void add(int sequence, int token);  // ascending
    int count = 0;
    std::vector<int> place;   // of a token among the rows, or -1
    std::vector<Run> chunks;  // what of them is attended together
    Buffer hidden;
  };
  struct Recorded {
    Operation operation;
    const Embedding* embedding;
    const Layer* layer;
    const Pool* pool;
    int index;
    const Rows* rows;
  };
  struct Activations { const uint8_t* rows; const float* scale; };
  struct Private {  // of one member
    Buffer floats, attend, rows, scale;
    std::vector<const uint8_t*> blocks;  // of the task at hand, then of those that will probably follow
    int fetched;                         // the task whose first blocks are near
    std::vector<AttendRow> attended;
  };

  void check_pages(const Pool& pool, int window) const;
  void reserve(const Head& head);
  void execute(Member& member, const Recorded& recorded);
  void embed(Member& member, const Embedding& embedding);
  void attention_input(Member& member, const Layer& layer, const Pool& pool, int index, const Rows& next);
  void rotate_and_write(Member& member, const Layer& layer, const Pool& pool, int index, const Rows& next);
  void expect_write(const Layer& layer, const Pool& pool, int index, const Run& run) const;
  void attend(Member& member, const Layer& layer, const Pool& pool, int index, const Rows& rows);
  void attend_shared(const Layer& layer, const Pool& pool, int index, const Rows& rows, const SharedPiece& piece,
                     const SharedPiece* next, Private& mine);
  void attend_chunk(const Layer& layer, const Pool& pool, int index, const Rows& rows, int item, Private& mine);
  void attend_rows(AttendTask& task, const Private& mine) const;
  void find_blocks(const Pool& pool, int index, int sequence, int head, int first, int last,
                   std::vector<const uint8_t*>& blocks) const;
  int first_block(const Attention& shape, const Run& chunk) const;
  int end_block(const Run& chunk) const;
  AttendTask attend_task(const Layer& layer, const Pool& pool, Private& mine) const;
  AttendRow attend_row(const Layer& layer, const Rows& rows, int token, int head);
  void attention_output(Member& member, const Layer& layer, const Rows& rows);
  void mlp_input(Member& member, const Layer& layer, const Rows& rows);
  void mlp_output(Member& member, const Layer& layer, const Rows& rows);
  void head(Member& member, const Head& head, const Rows& rows);
  // `rows` rows normed (if `norm`) and stored as `linear` wants its input; `gather` picks rows.
  Activations input_of(Member& member, const Linear& linear, const Buffer& from, size_t stride, int width, int rows,
                       const float* norm, float eps, const int32_t* gather = nullptr);

  const Kernels& kernels_;
  Team& team_;
  const Format format_;
  Batch batch_{};
  std::vector<Recorded> program_;
  std::vector<Run> writes_;  // tokens that share a KV block
  Rows all_;                 // every token
  Rows wanted_;              // those whose logits are wanted: of the last layer the others need K and V alone
  const Rows* recording_ = &all_;
  SharedRuns shared_;        // beginnings attended once for many sequences
  Buffer activations_, scales_, qkv_, states_, attended_, product_, logits_;
  size_t hidden_stride_ = 0;
  int64_t logits_stride_ = 0;
  std::vector<Private> private_;
  Stopwatch stopwatch_;
  const Pool* checked_ = nullptr;  // whose page ids were checked in this step, for which window
  int checked_window_ = 0;
};

}  // namespace turnstile
