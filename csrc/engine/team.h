// The one pool of threads. A step is a function that every member runs from beginning to end:
//
//   team.run(phases, [&](Member& member) {
//     member.share(rows, ...);     // phase 0: items handed out, then everybody waits for the items
//     member.share(panels, ...);   // phase 1
//   });
//
// Each member owns a contiguous range of a phase's items and, when done, helps the others with
// theirs. A phase ends when its *items* are done, not when all members have arrived: a member that
// the operating system has put aside between two items, or that never woke up, holds up nobody.
// The caller is member 0. Between steps the others sleep.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace turnstile {

class Team;

class Member {
 public:
  int index() const { return index_; }
  int members() const;

  // Calls body(i) once for each i < count, over all members; returns when all calls have returned.
  template <class Body>
  void share(uint32_t count, const Body& body) {
    begin(count);
    uint32_t done = 0, item;
    while (claim(&item)) {
      body(item);
      ++done;
    }
    finish(done);
  }

 private:
  friend class Team;
  Member(Team& team, int index) : team_(team), index_(index) {}
  void begin(uint32_t count);
  bool claim(uint32_t* item);
  void finish(uint32_t done);

  Team& team_;
  int index_;
  int phase_ = -1;
  uint32_t count_ = 0;
  int victim_ = 0;
};

class Team {
 public:
  explicit Team(int members);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int members() const { return members_; }
  // At most `phases` calls of share. The function must not throw.
  void run(int phases, const std::function<void(Member&)>& step);

 private:
  friend class Member;
  struct alignas(64) Cursor { std::atomic<uint32_t> next{0}; };
  struct alignas(64) Count { std::atomic<uint32_t> done{0}; };
  void work(int index);
  Cursor& cursor(int phase, int member) { return cursors_[static_cast<size_t>(phase) * members_ + member]; }

  const int members_;
  int capacity_ = 0;
  std::unique_ptr<Cursor[]> cursors_;  // [phase][member]: items handed out of the member's range
  std::unique_ptr<Count[]> counts_;    // [phase]: items done
  const std::function<void(Member&)>* step_ = nullptr;
  std::atomic<uint32_t> generation_{0};  // odd while a step is open to members
  std::atomic<uint32_t> inside_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;     // started by the first step
};

}  // namespace turnstile
