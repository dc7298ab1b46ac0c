#include "engine/step.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace turnstile {

namespace {

constexpr int kChunk = 16;     // rows of a prompt attended by one member at a time
constexpr int kRowBlock = 8;   // rows normed by one member at a time
constexpr int kTogether = 4;   // up to so many rows, every member norms all of them for itself: no wait
constexpr size_t kStreamedBytes = size_t{2} << 20;  // of logits: more do not stay in a second-level cache
constexpr int kMaxPhases = 3;  // of one operation
static_assert(SharedRuns::kLevels + 1 <= kMaxPhases);

void grow(Buffer& buffer, size_t bytes) {
  if (buffer.bytes() < bytes) buffer = Buffer(bytes);
}

int first_seen(const Attention& shape, int position) {
  return shape.window ? std::max(0, position + 1 - shape.window) : 0;
}

uint32_t blocks_of(int rows) { return static_cast<uint32_t>((rows + kRowBlock - 1) / kRowBlock); }

}  // namespace

void Step::Rows::clear(int tokens) {
  count = 0;
  place.assign(tokens, -1);
  chunks.clear();
}

void Step::Rows::add(int sequence, int token) {
  const bool follows = !chunks.empty() && chunks.back().sequence == sequence &&
                       chunks.back().token + chunks.back().count == token;
  if (!follows || chunks.back().count == kChunk) chunks.push_back({sequence, token, 0});
  ++chunks.back().count;
  place[token] = count++;
}

void Step::begin(const Batch& batch) {
  program_.clear();
  writes_.clear();
  all_.clear(batch.tokens);
  wanted_.clear(batch.tokens);
  recording_ = &all_;
  batch_ = batch;
  checked_ = nullptr;
  for (int s = 0; s < batch.sequences; ++s) {
    const int first = batch.query_offsets[s], last = batch.query_offsets[s + 1];
    const int context = batch.context_lengths[s];
    if (first < 0 || last < first || last > batch.tokens || context < last - first)
      throw std::invalid_argument("query_offsets and context_lengths of the batch contradict each other");
    if (last > first && (context + batch.page_size - 1) / batch.page_size > batch.table_width)
      throw std::invalid_argument("a page table is shorter than its sequence");
    for (int token = first; token < last; ++token) {
      const int position = context - (last - token);
      if (batch.positions[token] != position)
        throw std::invalid_argument("the positions of a sequence must end at its context length");
      if (token == first || position % kTokens == 0) writes_.push_back({s, token, 0});
      ++writes_.back().count;
      all_.add(s, token);
      if (wanted_.count < batch.rows && batch.logit_rows[wanted_.count] == token) wanted_.add(s, token);
    }
  }
  if (all_.count != batch.tokens) throw std::invalid_argument("a token belongs to no sequence of the batch");
  if (wanted_.count != batch.rows)
    throw std::invalid_argument("a logit row lies outside the batch, or the rows do not ascend");
  shared_.find(batch_);
}

void Step::record_embed(const Embedding& embedding) {
  for (int t = 0; t < batch_.tokens; ++t)
    if (batch_.ids[t] < 0 || batch_.ids[t] >= embedding.vocabulary)
      throw std::invalid_argument("token id " + std::to_string(batch_.ids[t]) + " is outside the vocabulary");
  program_.push_back({Operation::embed, &embedding, nullptr, nullptr, 0, &all_});
}

void Step::record(Operation operation, const Layer& layer, const Pool* pool, int index) {
  if (pool) {
    const PoolShape& shape = pool->shape();
    if (shape.page_size != batch_.page_size || shape.kv_heads != layer.attention.kv_heads ||
        shape.head_dim != layer.attention.head_dim || index < 0 || index >= shape.layers)
      throw std::invalid_argument("the page pool does not fit the layer or the batch");
    if (checked_ != pool || layer.attention.window != checked_window_) {
      check_pages(*pool, layer.attention.window);
      checked_ = pool;
      checked_window_ = layer.attention.window;
    }
    // A layer before this one hands on K and V of every token; this one to nobody but the head.
    if (index == shape.layers - 1 && wanted_.count < all_.count) recording_ = &wanted_;
  }
  program_.push_back({operation, nullptr, &layer, pool, index, recording_});
}

void Step::check_pages(const Pool& pool, int window) const {
  for (int s = 0; s < batch_.sequences; ++s) {
    if (batch_.query_offsets[s + 1] == batch_.query_offsets[s]) continue;
    const int32_t* table = batch_.page_tables + s * batch_.table_stride;
    const int oldest = batch_.context_lengths[s] - (batch_.query_offsets[s + 1] - batch_.query_offsets[s]);
    const int first = window ? std::max(0, oldest + 1 - window) / batch_.page_size : 0;
    for (int i = first; i <= (batch_.context_lengths[s] - 1) / batch_.page_size; ++i)
      if (table[i] < 0 || table[i] >= pool.shape().pages)
        throw std::invalid_argument("a page table names page " + std::to_string(table[i]) + ", outside the pool");
  }
}

void Step::reserve(const Head& head) {
  const size_t rows = std::max(batch_.tokens, 1);
  size_t hidden = 0, input = head.projection.row_bytes();
  size_t qkv = 0, states = 0, attended = 0, product = 0, floats = head.projection.inputs(), attend = 0;
  int kv_heads = 1;
  for (const Recorded& recorded : program_) {
    if (recorded.embedding) hidden = std::max<size_t>(hidden, (recorded.embedding->width + kPanel - 1) / kPanel * kPanel);
    if (!recorded.layer) continue;
    const Layer& layer = *recorded.layer;
    for (const Linear* linear : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down}) {
      input = std::max(input, linear->row_bytes());
      floats = std::max<size_t>(floats, linear->inputs());
    }
    qkv = std::max<size_t>(qkv, 4 * layer.qkv.padded_outputs());
    attended = std::max<size_t>(attended, 4 * layer.o.inputs());
    product = std::max<size_t>(product, 4 * layer.down.inputs());
    attend = std::max(attend, kernels_.attend_scratch_bytes(layer.attention.head_dim));
    states = std::max<size_t>(states, 4 * layer.attention.heads * attend_state_floats(layer.attention.head_dim));
    kv_heads = layer.attention.kv_heads;
    if (recorded.operation == Operation::attention_input) {
      int longest = 0;
      for (int s = 0; s < batch_.sequences; ++s) longest = std::max(longest, batch_.context_lengths[s]);
      layer.rope->reserve(longest);
    }
  }
  hidden_stride_ = 4 * hidden;
  grow(all_.hidden, rows * hidden_stride_);
  if (recording_ == &wanted_) grow(wanted_.hidden, wanted_.count * hidden_stride_);
  grow(activations_, rows * input);
  grow(scales_, rows * 4);
  grow(qkv_, rows * qkv);
  shared_.cut(kv_heads, team_.members());
  grow(states_, shared_.rows() * states);
  grow(attended_, rows * attended);
  grow(product_, rows * product);
  logits_stride_ = head.projection.padded_outputs();
  grow(logits_, 4 * static_cast<size_t>(logits_stride_) * std::max(batch_.rows, 1));
  private_.resize(team_.members());
  for (Private& mine : private_) {
    grow(mine.floats, 4 * floats);
    grow(mine.attend, attend);
    grow(mine.rows, kTogether * input);
    grow(mine.scale, kTogether * 4);
  }
}

void Step::run(const Head& last) {
  reserve(last);
  const int phases = kMaxPhases * (static_cast<int>(program_.size()) + 1);
  stopwatch_.start();
  team_.run(phases, [&](Member& member) {
    for (const Recorded& recorded : program_) execute(member, recorded);
    head(member, last, *recording_);
  });
  program_.clear();
}

void Step::execute(Member& member, const Recorded& recorded) {
  const Rows& rows = *recorded.rows;
  switch (recorded.operation) {
    case Operation::embed: return embed(member, *recorded.embedding);
    case Operation::attention_input: return attention_input(member, *recorded.layer, *recorded.pool, recorded.index, rows);
    case Operation::attend: return attend(member, *recorded.layer, *recorded.pool, recorded.index, rows);
    case Operation::attention_output: return attention_output(member, *recorded.layer, rows);
    case Operation::mlp_input: return mlp_input(member, *recorded.layer, rows);
    case Operation::mlp_output: return mlp_output(member, *recorded.layer, rows);
    case Operation::head: return;
  }
}

void Step::embed(Member& member, const Embedding& embedding) {
  member.share(blocks_of(batch_.tokens), [&](uint32_t block) {
    const int last = std::min<int>(batch_.tokens, (block + 1) * kRowBlock);
    for (int token = block * kRowBlock; token < last; ++token) {
      auto* to = reinterpret_cast<float*>(all_.hidden.data() + token * hidden_stride_);
      const size_t at = static_cast<size_t>(batch_.ids[token]) * embedding.width;
      if (embedding.bfloat16) {
        const auto* from = static_cast<const uint16_t*>(embedding.table) + at;
        for (int i = 0; i < embedding.width; ++i) {
          const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
          std::memcpy(to + i, &bits, 4);
        }
      } else {
        std::memcpy(to, static_cast<const float*>(embedding.table) + at, 4 * static_cast<size_t>(embedding.width));
      }
      std::fill(to + embedding.width, to + hidden_stride_ / 4, 0.0f);
    }
  });
  stopwatch_.lap(member, Lap::embed);
}

Step::Activations Step::input_of(Member& member, const Linear& linear, const Buffer& from, size_t stride, int width,
                                 int rows, const float* norm, float eps, const int32_t* gather) {
  Private& mine = private_[member.index()];
  const bool together = rows <= kTogether;
  NormTask task{};
  task.norm = norm;
  task.input_stride = stride;
  task.width = width;
  task.padded = linear.inputs();
  task.eps = eps;
  task.format = format_;
  task.rotation = linear.weights().rotation;
  task.out = together ? mine.rows.data() : activations_.data();
  task.out_stride = linear.row_bytes();
  task.scale = together ? mine.scale.as<float>() : scales_.as<float>();
  task.scratch = mine.floats.as<float>();
  const size_t out_row = task.out_stride;
  const auto one_row = [&](int row) {
    NormTask one = task;
    one.input = reinterpret_cast<const float*>(from.data() + (gather ? gather[row] : row) * stride);
    one.out = task.out + row * out_row;
    one.scale = task.scale + row;
    one.first_row = 0;
    one.last_row = 1;
    kernels_.norm(one);
  };
  if (together) {
    for (int row = 0; row < rows; ++row) one_row(row);
  } else {
    member.share(blocks_of(rows), [&](uint32_t block) {
      const int last = std::min<int>(rows, (block + 1) * kRowBlock);
      for (int row = block * kRowBlock; row < last; ++row) one_row(row);
    });
  }
  return {task.out, task.scale};
}

// Every token's; `next` are those whose queries and hidden state the following operations take.
void Step::attention_input(Member& member, const Layer& layer, const Pool& pool, int index, const Rows& next) {
  const int rows = batch_.tokens;
  const Activations input = input_of(member, layer.qkv, all_.hidden, hidden_stride_, layer.hidden, rows,
                                     layer.input_norm.data(), layer.eps);
  stopwatch_.lap(member, Lap::qkv_input);
  multiply(member, kernels_, layer.qkv, input.rows, input.scale, rows,
           {Finish::store, qkv_.data(), 4 * static_cast<size_t>(layer.qkv.padded_outputs())});
  stopwatch_.lap(member, Lap::qkv);
  rotate_and_write(member, layer, pool, index, next);
  stopwatch_.lap(member, Lap::write);
}

void Step::rotate_and_write(Member& member, const Layer& layer, const Pool& pool, int index, const Rows& next) {
  const Attention& shape = layer.attention;
  const int d = shape.head_dim;
  const int per_page = batch_.page_size / kTokens;
  member.share(static_cast<uint32_t>(writes_.size()), [&](uint32_t item) {
    const Run& run = writes_[item];
    if (item + 1 < writes_.size()) expect_write(layer, pool, index, writes_[item + 1]);
    for (int token = run.token; token < run.token + run.count; ++token) {
      const int position = batch_.positions[token];
      auto* q = reinterpret_cast<float*>(qkv_.data()) + static_cast<size_t>(token) * layer.qkv.padded_outputs();
      float* k = q + shape.heads * d;
      const float* v = k + shape.kv_heads * d;
      HeadTask turn{q, layer.q_norm.empty() ? nullptr : layer.q_norm.data(), layer.rope->cosine(position),
                    layer.rope->sine(position), d, shape.norm_width, layer.eps};
      if (const int place = next.place[token]; place >= 0) {
        for (int head = 0; head < shape.heads; ++head, turn.values += d) kernels_.head(turn);
        if (&next != &all_)
          std::memcpy(next.hidden.data() + place * hidden_stride_, all_.hidden.data() + token * hidden_stride_,
                      hidden_stride_);
      }
      turn.values = k;
      turn.norm = layer.k_norm.empty() ? nullptr : layer.k_norm.data();
      for (int head = 0; head < shape.kv_heads; ++head, turn.values += d) kernels_.head(turn);
      const int block = position / kTokens;
      const int32_t page = batch_.page_tables[run.sequence * batch_.table_stride + block / per_page];
      for (int head = 0; head < shape.kv_heads; ++head)
        kernels_.write({pool.block(page, index, block % per_page, head), pool.shape().format, k + head * d, v + head * d,
                        d, position % kTokens});
    }
  });
}

// Brings the blocks of a run near, while the run before it is still computed.
void Step::expect_write(const Layer& layer, const Pool& pool, int index, const Run& run) const {
  const int per_page = batch_.page_size / kTokens;
  const int block = batch_.positions[run.token] / kTokens;
  const int32_t page = batch_.page_tables[run.sequence * batch_.table_stride + block / per_page];
  const uint8_t* first = pool.block(page, index, block % per_page, 0);
  const size_t bytes = Pool::block_bytes(pool.shape().format, pool.shape().head_dim) * layer.attention.kv_heads;
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(first + i, 1, 2);
}

// First the beginnings that sequences share, each once for all of them; then what is a chunk's own.
void Step::attend(Member& member, const Layer& layer, const Pool& pool, int index, const Rows& rows) {
  Private& mine = private_[member.index()];
  if (!layer.attention.window) {
    for (int level = 0; level < SharedRuns::kLevels && shared_.any(level); ++level) {
      const std::vector<SharedPiece>& pieces = shared_.pieces(level);
      member.share(static_cast<uint32_t>(pieces.size()), [&](uint32_t item) {
        attend_shared(layer, pool, index, rows, pieces[item], item + 1 < pieces.size() ? &pieces[item + 1] : nullptr, mine);
      });
    }
  }
  mine.fetched = -1;
  const auto items = static_cast<uint32_t>(rows.chunks.size()) * layer.attention.kv_heads;
  member.share(items, [&](uint32_t item) { attend_chunk(layer, pool, index, rows, static_cast<int>(item), mine); });
  stopwatch_.lap(member, Lap::attend);
}

// Pointers to the blocks first <= block < last of a sequence.
void Step::find_blocks(const Pool& pool, int index, int sequence, int head, int first, int last,
                       std::vector<const uint8_t*>& blocks) const {
  const int per_page = batch_.page_size / kTokens;
  const int32_t* table = batch_.page_tables + sequence * batch_.table_stride;
  for (int block = first; block < last; ++block)
    blocks.push_back(pool.block(table[block / per_page], index, block % per_page, head));
}

// The first block of a chunk that is not attended with other sequences.
int Step::first_block(const Attention& shape, const Run& chunk) const {
  if (!shape.window) return shared_.blocks_of(chunk.sequence);
  return first_seen(shape, batch_.positions[chunk.token]) / kTokens;
}

int Step::end_block(const Run& chunk) const { return batch_.positions[chunk.token + chunk.count - 1] / kTokens + 1; }

AttendTask Step::attend_task(const Layer& layer, const Pool& pool, Private& mine) const {
  const Attention& shape = layer.attention;
  AttendTask task{};
  task.format = pool.shape().format;
  task.out_bfloat16 = format_ == Format::bfloat16;
  task.group = shape.heads / shape.kv_heads;
  task.head_dim = shape.head_dim;
  task.scale = shape.scale;
  task.scratch = mine.attend.data();
  return task;
}

AttendRow Step::attend_row(const Layer& layer, const Rows& rows, int token, int head) {
  const Attention& shape = layer.attention;
  const int first_head = head * (shape.heads / shape.kv_heads);
  const size_t value = format_ == Format::bfloat16 ? 2 : 4;
  const size_t row = rows.place[token];
  AttendRow out{};
  out.queries = qkv_.as<float>() + static_cast<size_t>(token) * layer.qkv.padded_outputs() + first_head * shape.head_dim;
  out.out = attended_.data() + (row * layer.o.inputs() + first_head * shape.head_dim) * value;
  if (const int state = shared_.state_of(token); state >= 0)
    out.state = states_.as<float>() +
                (static_cast<size_t>(state) * shape.heads + first_head) * attend_state_floats(shape.head_dim);
  out.first = first_seen(shape, batch_.positions[token]);
  out.last = batch_.positions[token] + 1;
  return out;
}

void Step::attend_shared(const Layer& layer, const Pool& pool, int index, const Rows& rows, const SharedPiece& piece,
                         const SharedPiece* next, Private& mine) {
  const SharedRun& run = shared_.run(piece.run);
  mine.attended.clear();
  for (int i = piece.first; i < piece.last; ++i)
    if (const int token = shared_.token(i); rows.place[token] >= 0)
      mine.attended.push_back(attend_row(layer, rows, token, piece.head));
  if (mine.attended.empty()) return;
  AttendTask task = attend_task(layer, pool, mine);
  mine.blocks.assign(run.first_block, nullptr);
  find_blocks(pool, index, run.sequence, piece.head, run.first_block, run.end_block, mine.blocks);
  if (next && (next->run != piece.run || next->head != piece.head)) {
    const SharedRun& other = shared_.run(next->run);
    find_blocks(pool, index, other.sequence, next->head, other.first_block,
                std::min(other.end_block, other.first_block + kAhead), mine.blocks);
  }
  task.begin = run.first_block;
  task.end = run.end_block;
  task.resume = run.first_block > 0;
  task.suspend = true;
  attend_rows(task, mine);
}

// Item: a KV head of a chunk, the heads of a chunk one after the other.
void Step::attend_chunk(const Layer& layer, const Pool& pool, int index, const Rows& rows, int item, Private& mine) {
  const int heads = layer.attention.kv_heads, items = static_cast<int>(rows.chunks.size()) * heads;
  const Run& chunk = rows.chunks[item / heads];
  AttendTask task = attend_task(layer, pool, mine);
  task.begin = first_block(layer.attention, chunk);
  task.end = end_block(chunk);
  task.resume = !layer.attention.window && task.begin > 0;
  task.cold = mine.fetched != item;
  mine.fetched = item + 1;
  mine.blocks.assign(task.begin, nullptr);
  find_blocks(pool, index, chunk.sequence, item % heads, task.begin, task.end, mine.blocks);
  const int wanted = task.end + kAhead;
  for (int next = item + 1, have; next < items && (have = static_cast<int>(mine.blocks.size())) < wanted; ++next) {
    const Run& other = rows.chunks[next / heads];
    const int first = first_block(layer.attention, other);
    find_blocks(pool, index, other.sequence, next % heads, first, std::min(end_block(other), first + wanted - have),
                mine.blocks);
  }
  mine.attended.clear();
  for (int i = 0; i < chunk.count; ++i) mine.attended.push_back(attend_row(layer, rows, chunk.token + i, item % heads));
  attend_rows(task, mine);
}

void Step::attend_rows(AttendTask& task, const Private& mine) const {
  task.blocks = mine.blocks.data();
  task.num_ahead = static_cast<int>(mine.blocks.size()) - task.end;
  task.rows = mine.attended.data();
  task.num_rows = static_cast<int>(mine.attended.size());
  kernels_.attend(task);
}

void Step::attention_output(Member& member, const Layer& layer, const Rows& rows) {
  const int width = layer.o.inputs();
  Activations input{attended_.data(), nullptr};
  if (format_ == Format::int8)
    input = input_of(member, layer.o, attended_, 4 * static_cast<size_t>(width), width, rows.count, nullptr, 0);
  stopwatch_.lap(member, Lap::o_input);
  multiply(member, kernels_, layer.o, input.rows, input.scale, rows.count,
           {Finish::add, rows.hidden.data(), hidden_stride_});
  stopwatch_.lap(member, Lap::o);
}

void Step::mlp_input(Member& member, const Layer& layer, const Rows& rows) {
  const Activations input = input_of(member, layer.gate_up, rows.hidden, hidden_stride_, layer.hidden,
                                     rows.count, layer.output_norm.data(), layer.eps);
  stopwatch_.lap(member, Lap::mlp_input);
  const bool narrow = format_ == Format::bfloat16;
  multiply(member, kernels_, layer.gate_up, input.rows, input.scale, rows.count,
           {Finish::silu_product, product_.data(), (narrow ? 2 : 4) * static_cast<size_t>(layer.down.inputs()), narrow});
  stopwatch_.lap(member, Lap::gate_up);
}

void Step::mlp_output(Member& member, const Layer& layer, const Rows& rows) {
  const int width = layer.down.inputs();
  Activations input{product_.data(), nullptr};
  if (format_ == Format::int8)
    input = input_of(member, layer.down, product_, 4 * static_cast<size_t>(width), width, rows.count, nullptr, 0);
  stopwatch_.lap(member, Lap::down_input);
  multiply(member, kernels_, layer.down, input.rows, input.scale, rows.count,
           {Finish::add, rows.hidden.data(), hidden_stride_});
  stopwatch_.lap(member, Lap::down);
}

void Step::head(Member& member, const Head& head, const Rows& rows) {
  const Activations input = input_of(member, head.projection, rows.hidden, hidden_stride_, head.hidden, batch_.rows,
                                     head.norm.data(), head.eps, &rows == &all_ ? batch_.logit_rows : nullptr);
  stopwatch_.lap(member, Lap::head_input);
  const size_t stride = 4 * static_cast<size_t>(logits_stride_);
  multiply(member, kernels_, head.projection, input.rows, input.scale, batch_.rows,
           {Finish::store, logits_.data(), stride, false, batch_.rows * stride > kStreamedBytes});
  stopwatch_.lap(member, Lap::head);
}

}  // namespace turnstile
