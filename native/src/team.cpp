#include "team.hpp"

#if defined(__linux__)
#include <sched.h>
#endif

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

#if defined(__linux__)
void settle(int thread, int size) {
  thread_local bool settled = false;
  if (settled) return;
  settled = true;
  cpu_set_t allowed, own;
  // A machine of more processors than fit the set answers with an error: nobody is bound there.
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) != size) return;
  int cpu = -1;
  for (int seen = -1; seen < thread;) seen += CPU_ISSET(++cpu, &allowed) ? 1 : 0;
  CPU_ZERO(&own);
  CPU_SET(cpu, &own);
  sched_setaffinity(0, sizeof own, &own);  // where it is refused, all goes on as without
}
#else
void settle(int, int) {}
#endif

}  // namespace octavo
