// Memory straight from the system: zeroed, given as it is touched, in huge pages where large. Knows no use of it.
#pragma once
#include <cstddef>
#include <cstdint>

namespace octavo {

// Owns `bytes` bytes, aligned to a page at least. Throws std::bad_alloc where the system refuses.
class Memory {
 public:
  Memory() = default;
  explicit Memory(std::size_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  Memory(Memory&& other) noexcept { swap(other); }
  Memory& operator=(Memory&& other) noexcept {
    swap(other);
    return *this;
  }

  std::uint8_t* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  void swap(Memory& other) noexcept;

  std::uint8_t* data_ = nullptr;
  std::size_t size_ = 0;
  void* mapping_ = nullptr;
  std::size_t mapped_ = 0;
};

}  // namespace octavo
