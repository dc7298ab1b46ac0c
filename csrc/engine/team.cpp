#include "engine/team.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace turnstile {

namespace {

// A wait is first a short spin (a phase is some microseconds), then gives the core away while it
// stays runnable, then sleeps until told.
constexpr int kSpins = 2000;
constexpr int kYields = 50;

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <class Ready>
void wait_until(const Ready& ready, std::atomic<uint32_t>& changing) {
  for (int i = 0; i < kSpins; ++i) {
    if (ready(changing.load(std::memory_order_acquire))) return;
    relax();
  }
  for (int i = 0; i < kYields; ++i) {
    if (ready(changing.load(std::memory_order_acquire))) return;
    std::this_thread::yield();
  }
  for (;;) {
    const uint32_t seen = changing.load(std::memory_order_acquire);
    if (ready(seen)) return;
    changing.wait(seen, std::memory_order_acquire);
  }
}

uint32_t boundary(uint32_t count, int member, int members) {
  return static_cast<uint32_t>(static_cast<uint64_t>(count) * member / members);
}

}  // namespace

int Member::members() const { return team_.members_; }

void Member::begin(uint32_t count) {
  ++phase_;
  count_ = count;
  victim_ = 0;
}

bool Member::claim(uint32_t* item) {
  const int members = team_.members_;
  for (; victim_ < members; ++victim_) {  // victim 0 is this member itself
    const int owner = (index_ + victim_) % members;
    const uint32_t first = boundary(count_, owner, members), last = boundary(count_, owner + 1, members);
    std::atomic<uint32_t>& next = team_.cursor(phase_, owner).next;
    if (next.load(std::memory_order_relaxed) >= last - first) continue;
    const uint32_t taken = next.fetch_add(1, std::memory_order_relaxed);
    if (taken < last - first) {
      *item = first + taken;
      return true;
    }
  }
  return false;
}

void Member::finish(uint32_t done) {
  std::atomic<uint32_t>& count = team_.counts_[phase_].done;
  if (done && count.fetch_add(done, std::memory_order_acq_rel) + done == count_) {
    count.notify_all();
    return;
  }
  const uint32_t all = count_;
  wait_until([all](uint32_t seen) { return seen == all; }, count);
}

Team::Team(int members) : members_(members < 1 ? 1 : members) {}

Team::~Team() {
  stop_.store(true);
  generation_.fetch_add(2);
  generation_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Team::run(int phases, const std::function<void(Member&)>& step) {
  if (phases > capacity_) {
    cursors_ = std::make_unique<Cursor[]>(static_cast<size_t>(phases) * members_);
    counts_ = std::make_unique<Count[]>(phases);
    capacity_ = phases;
  }
  for (int i = 0; i < phases * members_; ++i) cursors_[i].next.store(0, std::memory_order_relaxed);
  for (int i = 0; i < phases; ++i) counts_[i].done.store(0, std::memory_order_relaxed);
  step_ = &step;
  if (threads_.empty())
    for (int i = 1; i < members_; ++i) threads_.emplace_back([this, i] { work(i); });
  if (members_ > 1) {
    generation_.fetch_add(1, std::memory_order_seq_cst);  // opens the step
    generation_.notify_all();
  }
  Member member(*this, 0);
  step(member);
  if (members_ > 1) {
    generation_.fetch_add(1, std::memory_order_seq_cst);  // closes it: nobody enters any more
    wait_until([](uint32_t seen) { return seen == 0; }, inside_);
  }
}

void Team::work(int index) {
  uint32_t last = 0;
  while (!stop_.load()) {
    wait_until([&](uint32_t seen) { return stop_.load() || ((seen & 1) && seen != last); }, generation_);
    if (stop_.load()) return;
    inside_.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = generation_.load(std::memory_order_seq_cst);
    if ((seen & 1) && seen != last) {
      last = seen;
      Member member(*this, index);
      (*step_)(member);
    }
    if (inside_.fetch_sub(1, std::memory_order_seq_cst) == 1) inside_.notify_all();
  }
}

}  // namespace turnstile
