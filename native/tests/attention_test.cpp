// Paged attention of one instruction set, octavo::OCTAVO_ISA, against brute force in double, and against itself to the
// bit: alone or in a batch, in chunks or whole, on one thread or several, with shared blocks or copies.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "attention_case.hpp"

namespace octavo::testing {
namespace {

constexpr double kTolerance = 2e-5;  // of the largest value in sight
constexpr double kCoarseTolerance = 3e-4;  // where weights are rounded, as here too: their exponentials are coarser

int failures = 0;

std::string describe(const Shape& s) {
  static const char* const types[] = {"bf16", "f16", "f32", "int8"};
  return std::string(types[static_cast<int>(s.type)]) + " G" + std::to_string(s.num_kv_heads) + "x" +
         std::to_string(s.group) + " D" + std::to_string(s.head_dim) + " block " + std::to_string(s.block_size) +
         " window " + std::to_string(s.window) + " cap " + std::to_string(s.softcap) + " rotated " +
         std::to_string(s.rotated);
}

void fail(const Shape& shape, const std::string& what) {
  if (++failures <= 20) std::printf("FAIL %s: %s\n", describe(shape).c_str(), what.c_str());
}

// Every sequence in pieces of at most `most` tokens, from `begin` on; the pieces of all sequences step side by side.
Steps chunks(const std::vector<int>& lengths, int most, int shared, bool fork) {
  Steps steps;
  const auto add = [&](int sequence, int begin, std::size_t step) {
    for (int t = begin; t < lengths[static_cast<std::size_t>(sequence)]; t += most, ++step) {
      if (steps.size() <= step) steps.resize(step + 1);
      steps[step].push_back({sequence, t, std::min(t + most, lengths[static_cast<std::size_t>(sequence)])});
    }
  };
  add(0, 0, 0);
  const std::size_t ready = fork ? steps.size() : 0;  // the first sequence's blocks are there
  for (int s = 1; s < static_cast<int>(lengths.size()); ++s) add(s, fork ? shared : 0, ready);
  return steps;
}

// All but the last token of each in one step, then the last ones together: decode of a whole batch.
Steps last_together(const std::vector<int>& lengths, int shared, bool fork) {
  Steps steps(3);
  for (int s = 0; s < static_cast<int>(lengths.size()); ++s) {
    const int length = lengths[static_cast<std::size_t>(s)], begin = fork && s ? shared : 0;
    if (begin < length - 1) steps[fork && s ? 1 : 0].push_back({s, begin, length - 1});
    steps[2].push_back({s, length - 1, length});
  }
  return steps;
}

void compare(const Shape& shape, const std::vector<std::vector<float>>& left,
             const std::vector<std::vector<float>>& right, const std::string& what) {
  for (std::size_t s = 0; s < left.size(); ++s) {
    if (std::isnan(right[s].back())) return fail(shape, what + ": sequence " + std::to_string(s) + " has no last token");
    for (std::size_t i = 0; i < left[s].size(); ++i)
      if (!std::isnan(right[s][i]) && std::memcmp(&left[s][i], &right[s][i], 4) != 0)
        return fail(shape, what + ": sequence " + std::to_string(s) + " element " + std::to_string(i));
  }
}

void check(const Shape& shape, const std::vector<int>& lengths, int shared, unsigned seed) {
  Case test(shape, lengths, shared, seed);
  const auto whole = test.run(chunks(lengths, 1 << 20, 0, false), 2, false);
  for (std::size_t s = 0; s < lengths.size(); ++s) {
    std::mt19937 random(seed);
    for (int n = 0; n < 6; ++n) {
      const int token = n ? static_cast<int>(random() % static_cast<unsigned>(lengths[s])) : lengths[s] - 1;
      double largest;
      std::vector<double> either;
      const auto right = test.expect(static_cast<int>(s), token, &largest, &either);
      double worst = 0;
      for (std::size_t i = 0; i < right.size(); ++i) {
        const double off = std::abs(whole[s][static_cast<std::size_t>(token * test.query_width()) + i] - right[i]);
        const double error = off <= either[i] ? 0.0 : off - either[i];
        worst = error <= worst ? worst : error;  // NaN counts
      }
      if (!(worst <= (test.rounds_weights() ? kCoarseTolerance : kTolerance) * largest))
        fail(shape, "sequence " + std::to_string(s) + " token " + std::to_string(token) + " of " +
                        std::to_string(lengths[s]) + " is off by " + std::to_string(worst));
    }
  }
  compare(shape, whole, test.run(chunks(lengths, 1 << 20, 0, false), 1, false), "one thread");
  compare(shape, whole, test.run(chunks(lengths, 37, 0, false), 3, false), "chunks of 37, three threads");
  compare(shape, whole, test.run(chunks(lengths, 37, 0, false), 3, false, true), "the last token of each chunk of 37");
  compare(shape, whole, test.run(last_together(lengths, shared, false), 2, false), "the last tokens together");
  compare(shape, whole, test.run(last_together(lengths, shared, true), 2, true, true), "shared blocks, last tokens only");
  compare(shape, whole, test.run(last_together(lengths, shared, true), 2, true), "shared blocks");
  compare(shape, whole, test.run(chunks(lengths, 20, shared, true), 1, true), "shared blocks in chunks of 20");
  Steps alone;
  for (int s = 0; s < static_cast<int>(lengths.size()); ++s) {
    const int length = lengths[static_cast<std::size_t>(s)];
    if (length > 1) alone.push_back({{s, 0, length - 1}});
    alone.push_back({{s, length - 1, length}});
  }
  compare(shape, whole, test.run(alone, 8, false), "each alone, eight threads");
}

template <class T>
T pick(std::mt19937& random, std::initializer_list<T> of) {
  return of.begin()[random() % of.size()];
}

int main_(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 60;
  const unsigned first = argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1;
  for (unsigned seed = first; seed < first + static_cast<unsigned>(cases); ++seed) {
    std::mt19937 random(seed);
    Shape shape;
    shape.type = pick(random, {KvType::bf16, KvType::int8, KvType::f16, KvType::f32, KvType::int8});
    shape.num_kv_heads = pick(random, {1, 2, 3});
    shape.group = pick(random, {1, 2, 3, 4, 7, 9});
    shape.head_dim = pick(random, {64, 64, 80, 96, 128, 256, 10, 72, 33});
    shape.block_size = pick(random, {1, 4, 8, 16, 16, 32, 64});
    shape.window = pick<std::int64_t>(random, {0, 0, 0, 1, 17, 100, 300});
    shape.softcap = pick(random, {0.0f, 0.0f, 0.0f, 5.0f, 50.0f});
    shape.rotated = pick(random, {0, shape.head_dim / 2 * 2, shape.head_dim / 2 * 2, shape.head_dim / 4 * 2});
    const int shared = pick(random, {0, 64, 256, 320, 576});
    std::vector<int> lengths;
    for (unsigned n = 1 + random() % 5; lengths.size() < n;)
      lengths.push_back(std::max(shared + 1, pick(random, {1, 2, 15, 16, 17, 127, 255, 256, 257, 530, 777})));
    check(shape, lengths, shared, seed);
  }
  for (const KvType type : {KvType::bf16, KvType::f16, KvType::f32, KvType::int8}) {
    // So many samples of one prompt that their rows are more than walk together; and heads that are, on one key's.
    check({.type = type, .group = 3, .head_dim = 32, .rotated = 32}, std::vector<int>(48, 262), 256, 1);
    check({.type = type, .group = 150, .head_dim = 16, .rotated = 16}, {40, 70}, 32, 2);
    for (const int head_dim : {64, 256, kMaxHeadDim})
      check({.type = type, .group = 3, .head_dim = head_dim, .rotated = 0, .spiky = true}, {300, 70}, 32, 3);
  }
  std::printf("%d cases, %d failures\n", cases, failures);
  return failures ? 1 : 0;
}

}  // namespace
}  // namespace octavo::testing

int main(int argc, char** argv) { return octavo::testing::main_(argc, argv); }
