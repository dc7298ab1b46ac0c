// Fetches the blocks to come while others are computed, at an even pace, and kPlaces of them at a time: the
// processor reads ahead by itself within each page of memory, so four places are four streams it runs ahead of.
//
// A core waits for at most some 16 cache lines at a time, and that is what bounds reading: it pays only
// while all of them are on their way. So every stretch of work of a task asks for a share of the lines
// in proportion to the time it takes, also those that read no K and V themselves (preparing queries, the
// exponentials). Lines asked for in bursts, or by the passes over K and V alone, leave the memory idle in
// between: a crowd's attention took half as long again.
#pragma once

#include "isa/kernels.h"
#include "isa/math.h"

namespace turnstile::TURNSTILE_LEVEL {

// Stretches of work and about how long each takes, in units of 8 ns: three lines, 64 dimensions, int8.
struct Work {
  static constexpr int kQuery = 6;    // preparing a line
  static constexpr int kKeys = 3;     // scores of a block
  static constexpr int kScales = 8;   // once a span
  static constexpr int kWeights = 5;  // of a line for a span
  static constexpr int kValues = 3;   // weighted sum of a block
  static constexpr int kMerge = 3;    // once a span
};

class Ahead {
 public:
  // For a task of which `lines` lines are computed together. It fetches as many blocks as it attends, each
  // kAhead after the one attended; a cold task its first ones at once.
  Ahead(const AttendTask& task, int block_bytes, int lines)
      : next_(task.blocks + task.begin + kAhead),
        end_(task.blocks + task.end + (task.num_ahead < kAhead ? task.num_ahead : kAhead)),
        bytes_(block_bytes) {
    if (task.cold)
      for (const uint8_t* const* block = task.blocks + task.begin; block < next_ && block < end_; ++block)
        fetch(*block, block_bytes);
    const int blocks = task.end - task.begin, spans = (blocks + kSpanBlocks - 1) / kSpanBlocks;
    const int units = lines * Work::kQuery + blocks * (Work::kKeys + Work::kValues) +
                      spans * (Work::kScales + lines * Work::kWeights + Work::kMerge);
    rate_ = blocks * (block_bytes / kCacheLine) * kOne / units;
  }

  // Fetches the share of `work` units.
  void during(int work) {
    due_ += work * rate_;
    while (due_ >= kOne) {
      if (left_ == 0 && !turn()) {
        due_ = 0;
        return;
      }
      const int wanted = (due_ / kOne + places_ - 1) / places_, lines = wanted < left_ ? wanted : left_;
      fetch_lines(lines);
      due_ -= lines * places_ * kOne;  // below zero: some lines too early
    }
  }

  // Whatever the shares have left over.
  void finish() {
    do fetch_lines(left_);
    while (turn());
  }

 private:
  static constexpr int kPlaces = 4, kCacheLine = 64, kOne = 1 << 12;

  // The next blocks, as many as there are places.
  bool turn() {
    if (next_ >= end_) return false;
    for (places_ = 0; places_ < kPlaces && next_ < end_; ++places_) at_[places_] = *next_++;
    left_ = bytes_ / kCacheLine;
    return true;
  }

  // Lines of every block at hand.
  void fetch_lines(int lines) {
    left_ -= lines;
    for (; lines > 0; --lines) {
      for (int place = 0; place < places_; ++place) {
        fetch(at_[place], kCacheLine);
        at_[place] += kCacheLine;
      }
    }
  }

  // Into the second-level cache.
  INLINE void fetch(const uint8_t* from, int bytes) {
    for (int i = 0; i < bytes; i += kCacheLine) __builtin_prefetch(from + i, 0, 2);
  }

  const uint8_t* const* next_;  // block to be fetched after the one at hand
  const uint8_t* const* const end_;
  const int bytes_;             // of a block
  const uint8_t* at_[kPlaces];  // in the blocks at hand
  int places_ = 0;              // how many they are
  int left_ = 0;                // lines of each of them
  int rate_;                    // cache lines a unit, times kOne
  int due_ = 0;
};

}  // namespace turnstile::TURNSTILE_LEVEL
