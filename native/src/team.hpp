// The threads that run a step together: how they wait for each other and share work out. Knows no kernel.
#pragma once
#include <atomic>
#include <cstdint>

namespace octavo {

// One team runs one step at a time. Every thread of it calls every member the same number of times, in the same order,
// but for claim(). Members are not inline: files compiled for several instruction sets include this header.
class Team {
 public:
  explicit Team(int size);
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const;

  // Waits until all threads are here; what any wrote before is seen by all after. Also puts the claim counter back to 0.
  void barrier();

  // The next `count` pieces of work of this phase (from one barrier to the next): the number of the first.
  // Pieces are handed out in order, each to one thread; a thread stops when the answer is beyond the last piece.
  std::int64_t claim(std::int64_t count = 1);

 private:
  const int size_;
  alignas(64) std::atomic<std::int64_t> next_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
};

// Gives the calling thread, number `thread` > 0 of a team of `size`, a processor of its own, if the team has as many
// threads as the processors it may use. Where a step shares them with others for a moment (a server's event loop, say),
// the system else wakes two of the team on one processor, and a step takes a tenth longer. Thread 0 is the caller's, and
// goes where the others are not. To be called at the begin of every step; does something the first time only.
void settle(int thread, int size);

}  // namespace octavo
