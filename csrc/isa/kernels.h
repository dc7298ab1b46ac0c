// The border between the engine (compiled for every machine) and the kernels (compiled once per
// instruction set level): plain structs of pointers and numbers, and one table of functions.
// Nothing here has inline code, so nothing compiled wide can be shared by the linker.
#pragma once

#include <cstddef>
#include <cstdint>

namespace turnstile {

// How weights and activations are stored; accumulation is float32, or int32 for int8.
enum class Format : int { float32 = 0, bfloat16 = 1, int8 = 2 };

// A matrix [outputs, inputs] in panels of 32 outputs. One step of a panel is 128 bytes: 32 lanes
// of 4 bytes, which hold 1 float32, 2 bfloat16 or 4 int8 consecutive inputs of one output.
//
//   panel 0: [step 0: out0 out1 ... out31][step 1: ...] ...   panel 1: ...
//
// Steps are contiguous, so a product reads memory strictly forward.
constexpr int kPanel = 32;
constexpr int kStepBytes = 128;
constexpr int kTokens = 16;  // tokens of a KV block: one lane each
// Of a head: a score of int8 is a sum of products of 15 and 7 bits, and has to fit 31.
constexpr int kMostDimensions = 512;

struct Weights {
  Format format;
  int inputs;             // padded to whole steps with zero weights
  int steps;              // of a panel
  int panels;
  int rotation;           // int8 only: both sides are rotated in blocks of 16, 32 or 64 inputs
  const uint8_t* data;
  const float* scale;     // int8: [panels * 32]
  const int32_t* sum128;  // int8: 128 * (sum of the output's weights), see pack
  const float* bias;      // [panels * 32] or null
};

// What becomes of a product. `silu_product` expects panels of 16 gate and 16 up outputs.
enum class Finish : int { store = 0, add = 1, silu_product = 2 };

struct LinearTask {
  const Weights* weights;
  const uint8_t* input;   // activations in the weights' format, rows of 4-byte steps
  size_t input_stride;    // bytes
  const float* scale;     // int8: one per row
  Finish finish;
  bool out_bfloat16;      // silu_product only: for a bfloat16 consumer
  uint8_t* out;
  size_t out_stride;      // bytes
  bool stream;            // store only, rows aligned to 64 bytes: too much for the caches, so written past them
  int first_panel, last_panel, first_row, last_row;
};

struct NormTask {         // RMS norm of each row, then stored in `format`
  const float* input;     // [rows, width]; null norm: only store
  const float* norm;
  size_t input_stride;    // bytes
  int width, padded;      // `padded` inputs of the consumer
  float eps;
  Format format;
  int rotation;
  uint8_t* out;
  size_t out_stride;
  float* scale;
  float* scratch;         // [padded] floats of this thread
  int first_row, last_row;
};

struct HeadTask {         // one query or key head of one token, in place
  float* values;          // [head_dim]
  const float* norm;      // or null
  const float* cosine;    // [head_dim / 2]
  const float* sine;
  int head_dim;
  int norm_width;         // the head's size without padding
  float eps;
};

// One KV block: 16 tokens of one layer and KV head. K by steps of dimensions with the tokens in the
// lanes, so that scores need no horizontal sums; V by steps of tokens with dimensions in the lanes.
//
//   float32   K [d][16]              V [16][d]
//   bfloat16  K [d/2][16][2]         V [8][d][2]
//   int8      scale of K [16], K + 128 as uint8 [d/4][16][4], scale of V [16], V [4][d][4]
struct WriteTask {
  uint8_t* block;
  Format format;
  const float* key;       // [head_dim], after norm and RoPE
  const float* value;
  int head_dim, slot;
};

struct AttendRow {        // one token
  const float* queries;   // [group, head_dim]
  uint8_t* out;           // [group, head_dim], float32 or bfloat16
  float* state;           // [group, attend_state_floats(head_dim)]: the blocks before, see AttendTask
  int first, last;        // tokens seen: first <= t < last
};

struct AttendTask {       // tokens that see the same blocks, the query heads of one KV head
  // Of tokens 0..15, 16..31, ...; unseen ones are never read. From `end` on come those of the tasks that
  // probably follow, see kAhead.
  const uint8_t* const* blocks;
  int num_ahead;
  bool cold;              // no task before it has fetched its first blocks
  Format format;
  bool out_bfloat16;
  int group, head_dim;
  float scale;
  const AttendRow* rows;
  int num_rows;
  int begin, end;         // the blocks to be attended now
  bool resume, suspend;   // begins from the rows' states; leaves states and no outputs. At ends of spans only
  uint8_t* scratch;       // attend_scratch_bytes(head_dim), aligned to 64 bytes
};

// A span is what a row attends in one go; its results are merged in order. Spans lie at fixed places of
// the sequence, so that a row's result does not depend on what else is computed.
constexpr int kSpanBlocks = 8;
constexpr int kSpan = kSpanBlocks * kTokens;
constexpr int kAhead = 8;  // by so many blocks fetching is before computing, whatever task they belong to
constexpr int attend_state_floats(int head_dim) { return head_dim + 16; }  // sum of V; maximum, total

struct RowTask {          // a row of logits
  const float* logits;
  int64_t width;
};

struct Kernels {
  const char* name;
  void (*linear)(const LinearTask&);
  void (*norm)(const NormTask&);
  void (*head)(const HeadTask&);
  void (*write)(const WriteTask&);
  void (*attend)(const AttendTask&);
  size_t (*attend_scratch_bytes)(int head_dim);
  int64_t (*argmax)(const RowTask&);
  float (*log_normalizer)(const RowTask&);
  void (*top_k)(const RowTask&, int k, float* values, int64_t* indices);
};

const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512vnni_kernels();
const Kernels* avx512_kernels();
const Kernels* amx_kernels();

}  // namespace turnstile
