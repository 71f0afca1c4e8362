#include "memory.hpp"

#include <sys/mman.h>

#include <limits>
#include <new>
#include <utility>

namespace octavo {
namespace {

constexpr std::size_t kHuge = std::size_t{2} << 20;

}  // namespace

Memory::Memory(std::size_t bytes) : size_(bytes) {
  if (bytes > std::numeric_limits<std::size_t>::max() / 2) throw std::bad_alloc();
  const std::size_t slack = bytes < 2 * kHuge ? 0 : kHuge;  // so that a huge page can begin at data_
  mapped_ = (bytes ? bytes : 1) + slack;
  mapping_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping_ == MAP_FAILED) throw std::bad_alloc();
  const auto begin = reinterpret_cast<std::uintptr_t>(mapping_);
  const std::uintptr_t aligned = slack ? (begin + kHuge - 1) / kHuge * kHuge : begin;
  data_ = static_cast<std::uint8_t*>(mapping_) + (aligned - begin);
#if defined(MADV_HUGEPAGE)
  if (slack) madvise(data_, bytes, MADV_HUGEPAGE);  // a wish: where it is not granted, small pages do
#endif
}

Memory::~Memory() {
  if (mapping_) munmap(mapping_, mapped_);
}

void Memory::swap(Memory& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(mapping_, other.mapping_);
  std::swap(mapped_, other.mapped_);
}

}  // namespace octavo
