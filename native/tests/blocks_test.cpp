// Copies of blocks against copies made one pair at a time from an untouched pool.
#include "blocks.hpp"

#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

int main() {
  for (unsigned seed = 0; seed < 300; ++seed) {
    std::mt19937 random(seed);
    const std::size_t bytes = 1 + random() % 40, blocks = 1 + random() % 12;
    std::vector<std::uint8_t> pool(bytes * blocks), other(bytes * blocks);
    for (auto& byte : pool) byte = static_cast<std::uint8_t>(random());
    for (auto& byte : other) byte = static_cast<std::uint8_t>(random());
    std::vector<std::int32_t> targets, pairs;
    for (std::size_t b = 0; b < blocks; ++b) targets.push_back(static_cast<std::int32_t>(b));
    std::shuffle(targets.begin(), targets.end(), random);
    targets.resize(random() % (blocks + 1));
    for (const std::int32_t b : targets) pairs.insert(pairs.end(), {static_cast<std::int32_t>(random() % blocks), b});
    const std::vector<std::uint8_t> before = pool;
    std::vector<std::uint8_t> right = seed % 2 ? other : pool;
    for (std::size_t i = 0; i < pairs.size(); i += 2)
      std::copy_n(before.begin() + static_cast<std::ptrdiff_t>(bytes) * pairs[i], bytes,
                  right.begin() + static_cast<std::ptrdiff_t>(bytes) * pairs[i + 1]);
    std::vector<std::uint8_t>& target = seed % 2 ? other : pool;
    octavo::copy_blocks(pool.data(), target.data(), bytes, pairs.data(), static_cast<std::int64_t>(targets.size()), 2);
    if (target != right) {
      std::printf("FAIL seed %u\n", seed);
      return 1;
    }
  }
  std::printf("300 cases\n");
  return 0;
}
