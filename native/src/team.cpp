#include "team.hpp"

namespace octavo {
namespace {

// Some 50 us: longer than threads of a step differ where each has a processor. Where they have not, a thread that went
// on spinning would keep the one that it waits for from running.
constexpr int kSpins = 1000;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Team::Team(int size) : size_(size) {}

int Team::size() const { return size_; }

void Team::barrier() {
  if (size_ == 1) {
    next_.store(0, std::memory_order_relaxed);
    return;
  }
  const int phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
    phase_.notify_all();
    return;
  }
  for (int spins = 0; spins < kSpins; ++spins) {
    if (phase_.load(std::memory_order_acquire) != phase) return;
    relax();
  }
  phase_.wait(phase, std::memory_order_acquire);
}

std::int64_t Team::claim(std::int64_t count) { return next_.fetch_add(count, std::memory_order_relaxed); }

}  // namespace octavo
