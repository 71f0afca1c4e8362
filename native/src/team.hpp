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

}  // namespace octavo
