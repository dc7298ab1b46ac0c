#include "engine/shared_runs.h"

#include <algorithm>
#include <numeric>

#include "isa/kernels.h"

namespace turnstile {

namespace {

constexpr int kMostRows = 16;   // of a piece
constexpr int kFewestRows = 4;  // with three heads a row, most of a tile
constexpr int kPieces = 4;      // wanted for each member, to share them evenly
constexpr int kAloneRows = 8;   // so many new tokens of a sequence fill tiles by themselves

const int32_t* table_of(const Batch& batch, int sequence) { return batch.page_tables + sequence * batch.table_stride; }

}  // namespace

void SharedRuns::find(const Batch& batch) {
  runs_.clear();
  tokens_.clear();
  order_.clear();
  states_ = 0;
  spans_.assign(batch.sequences, 0);
  blocks_of_.assign(batch.sequences, 0);
  state_of_.assign(batch.tokens, -1);
  for (int s = 0; s < batch.sequences; ++s) {
    const int count = batch.query_offsets[s + 1] - batch.query_offsets[s];
    spans_[s] = count && count < kAloneRows ? (batch.context_lengths[s] - count) / kSpan : 0;
    if (spans_[s]) order_.push_back(s);
  }
  std::sort(order_.begin(), order_.end(), [&](int a, int b) {
    const int32_t *x = table_of(batch, a), *y = table_of(batch, b);
    const int pages = std::min(spans_[a], spans_[b]) * kSpan / batch.page_size;
    const auto [p, q] = std::mismatch(x, x + pages, y);
    if (p != x + pages) return *p < *q;
    return spans_[a] != spans_[b] ? spans_[a] < spans_[b] : a < b;
  });
  alike_.assign(order_.size(), 0);
  for (size_t i = 1; i < order_.size(); ++i) alike_[i] = common_spans(batch, order_[i - 1], order_[i]);
  divide(batch, 0, static_cast<int>(order_.size()), 0, 0);
}

int SharedRuns::common_spans(const Batch& batch, int a, int b) const {
  const int32_t *x = table_of(batch, a), *y = table_of(batch, b);
  const int spans = std::min(spans_[a], spans_[b]);
  const int pages = (spans * kSpan + batch.page_size - 1) / batch.page_size;
  const auto same = static_cast<int>(std::mismatch(x, x + pages, y).first - x);
  return std::min(spans, same * batch.page_size / kSpan);
}

// Finds the runs of order_[first .. last), which have `span` spans in common.
void SharedRuns::divide(const Batch& batch, int first, int last, int span, int level) {
  if (level == kLevels) return;
  for (int begin = first, end; begin < last; begin = end) {
    int common = -1;
    for (end = begin + 1; end < last && alike_[end] > span; ++end)
      common = common < 0 ? alike_[end] : std::min(common, alike_[end]);
    if (common < 0) continue;
    add(batch, begin, end, span, common, level);
    divide(batch, begin, end, common, level + 1);
  }
}

void SharedRuns::add(const Batch& batch, int first, int last, int from, int to, int level) {
  SharedRun run{level, order_[first], from * kSpanBlocks, to * kSpanBlocks, static_cast<int>(tokens_.size()), 0};
  for (int i = first; i < last; ++i) {
    const int sequence = order_[i];
    blocks_of_[sequence] = run.end_block;
    for (int token = batch.query_offsets[sequence]; token < batch.query_offsets[sequence + 1]; ++token) {
      tokens_.push_back(token);
      if (state_of_[token] < 0) state_of_[token] = states_++;
    }
  }
  run.end_row = static_cast<int>(tokens_.size());
  runs_.push_back(run);
}

void SharedRuns::cut(int heads, int members) {
  for (std::vector<SharedPiece>& pieces : pieces_) pieces.clear();
  for (int index = 0; index < static_cast<int>(runs_.size()); ++index) {
    const SharedRun& run = runs_[index];
    const int rows = run.end_row - run.first_row;
    const int most = std::clamp(rows * heads / (kPieces * members), kFewestRows, kMostRows);
    const int parts = (rows + most - 1) / most;
    for (int head = 0; head < heads; ++head)
      for (int part = 0; part < parts; ++part)
        pieces_[run.level].push_back({index, head, run.first_row + rows * part / parts,
                                      run.first_row + rows * (part + 1) / parts});
  }
}

}  // namespace turnstile
