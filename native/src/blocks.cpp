// Copies of whole KV blocks. Only blocks that are both read and written are put aside first; the others go straight.
#include "blocks.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

namespace octavo {

void copy_blocks(const void* source, void* target, std::size_t block_bytes, const std::int32_t* pairs,
                 std::int64_t count, int threads) {
  const auto* from = static_cast<const std::uint8_t*>(source);
  auto* to = static_cast<std::uint8_t*>(target);
  std::vector<const std::uint8_t*> reads(static_cast<std::size_t>(count));
  std::vector<std::int64_t> aside;  // pairs whose source another pair overwrites
  std::vector<std::int32_t> written;
  if (source == target) {
    for (std::int64_t i = 0; i < count; ++i) written.push_back(pairs[2 * i + 1]);
    std::sort(written.begin(), written.end());
  }
  for (std::int64_t i = 0; i < count; ++i) {
    reads[static_cast<std::size_t>(i)] = from + static_cast<std::size_t>(pairs[2 * i]) * block_bytes;
    if (std::binary_search(written.begin(), written.end(), pairs[2 * i])) aside.push_back(i);
  }
  const std::unique_ptr<std::uint8_t[]> room(aside.empty() ? nullptr : new std::uint8_t[aside.size() * block_bytes]);
  const int team = static_cast<int>(std::min<std::int64_t>(threads, std::max<std::int64_t>(count, 1)));
#pragma omp parallel num_threads(team)
  {
#pragma omp for
    for (std::size_t i = 0; i < aside.size(); ++i) {
      const std::uint8_t*& read = reads[static_cast<std::size_t>(aside[i])];
      std::uint8_t* const kept = room.get() + i * block_bytes;
      std::memcpy(kept, read, block_bytes);
      read = kept;
    }
#pragma omp for
    for (std::int64_t i = 0; i < count; ++i) {
      const std::uint8_t* const read = reads[static_cast<std::size_t>(i)];
      std::uint8_t* const block = to + static_cast<std::size_t>(pairs[2 * i + 1]) * block_bytes;
      if (block != read) std::memcpy(block, read, block_bytes);
    }
  }
}

}  // namespace octavo
