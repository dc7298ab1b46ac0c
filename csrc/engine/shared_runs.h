// Which sequences of a batch begin with the same pages: their rows attend those pages together, so that
// each is read once for all of them and not once for each.
//
//   pages of   a   1 2 3 4 5            level 0   spans 1 2 3       for a, b, c, d
//              b   1 2 3 4 6            level 1   span 4            for a, b
//              c   1 2 3 7              its own   everything else
//              d   1 2 3 8 9
//
// Only whole spans before a sequence's first new token count: they were written in earlier steps, and
// every row sees all of them. Pages are compared from the first on: the same page at another place, or
// behind another page, is another context. A prompt's many rows read each page once for all of them anyway:
// they gain nothing by sharing, and would pay for preparing their queries twice and for keeping states.
#pragma once

#include <vector>

#include "engine/batch.h"

namespace turnstile {

struct SharedRun {
  int level;
  int sequence;                // one of those that share
  int first_block, end_block;  // whole spans
  int first_row, end_row;      // see SharedRuns::token
};

struct SharedPiece {  // rows of a run, for one KV head: what one member does at a time
  int run, head, first, last;
};

class SharedRuns {
 public:
  static constexpr int kLevels = 2;  // what is shared deeper is left to the sequences themselves

  // Time: O(rows + sequences * log(sequences) * pages compared).
  void find(const Batch& batch);
  // Divides the runs among the members; every layer has `heads` KV heads.
  void cut(int heads, int members);

  bool any(int level) const { return !pieces_[level].empty(); }
  const std::vector<SharedPiece>& pieces(int level) const { return pieces_[level]; }
  const SharedRun& run(int index) const { return runs_[index]; }
  int token(int row) const { return tokens_[row]; }
  // Rows that need a state between the runs and their own blocks, and the state of a token, or -1.
  int rows() const { return states_; }
  int state_of(int token) const { return state_of_[token]; }
  // The blocks at a sequence's beginning that runs take care of.
  int blocks_of(int sequence) const { return blocks_of_[sequence]; }

 private:
  int common_spans(const Batch& batch, int a, int b) const;
  void divide(const Batch& batch, int first, int last, int span, int level);
  void add(const Batch& batch, int first, int last, int from, int to, int level);

  std::vector<int> spans_;     // by sequence: whole spans before its first new token
  std::vector<int> order_;     // sequences sorted by their pages
  std::vector<int> alike_;     // of order_[i]: spans in common with order_[i - 1]
  std::vector<SharedRun> runs_;
  std::vector<int> tokens_;    // rows of the runs
  std::vector<int> state_of_;  // by token
  std::vector<int> blocks_of_; // by sequence
  std::vector<SharedPiece> pieces_[kLevels];
  int states_ = 0;
};

}  // namespace turnstile
