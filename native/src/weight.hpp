// A weight matrix as the kernels read it: panels of 16 rows, kept quantised. Knows the storage types of files; no kernel.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "memory.hpp"

namespace octavo {

constexpr int kPanel = 16;  // rows of a weight (columns of a product) that lie together

enum class Format : int { q4, q8, bf16, f16, f32 };
enum class Input : int { q8, bf16, f32 };  // the form of activations a format is multiplied with

// Rows of one format. Panel p holds rows 16p to 16p + 15 (zero beyond `rows`); panels come in pairs, the last perhaps empty.
// In a panel, group after group of 32 columns:
//   q4   256 bytes of nibbles a group; after all groups 16 f16 scales a group; then, where `has_min`, 16 f16 minima a group
//   q8   512 bytes a group; then scales and minima as in q4
//   bf16 pairs of columns, of each row in turn: 1024 bytes a group
//   f16, f32: column after column, 16 rows each: 1024 or 2048 bytes a group
// A group of q8 is eight lines of 64 bytes: columns 0-3 of row 0, of row 1, ... row 15; then columns 4-7; and so on. In q4
// the low nibbles of the four lines are lines 0 to 3 of q8, the high ones lines 4 to 7.
// A quantised value is factor * (scale * (q - zero_point) + minimum).
struct Segment {
  Format format;
  std::int64_t rows;
  std::int64_t first_row;  // of the whole weight
  std::int64_t panels;
  std::size_t panel_bytes;
  int zero_point = 0;
  bool has_min = false;
  float factor = 1.0f;  // a power of two that keeps the scales within f16
  const std::uint8_t* data = nullptr;  // aligned to 64 bytes

  const std::uint8_t* panel(std::int64_t p) const { return data + static_cast<std::size_t>(p) * panel_bytes; }
};

struct Weight {
  std::int64_t rows = 0;     // N
  std::int64_t columns = 0;  // K; padded with zeros to a multiple of 32 inside the panels
  std::vector<Segment> segments;
  std::vector<Input> inputs;  // the forms of activations that its segments want, each once
  Memory storage;
  std::size_t bytes = 0;

  // For files compiled for several instruction sets, which must not use the standard library's templates.
  const Segment* first_segment() const;
  int num_segments() const;

  // Whether a product can pair column p with p + N / 2 as it goes.
  bool gateable() const;
};

// A piece of a file, rows of one type.
struct Part {
  std::string type;  // GGUF's name: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K
  const std::uint8_t* raw;
  std::int64_t rows;
  std::int64_t columns;
};

// Repacks the parts, one below another, on `threads` threads.
// Throws std::invalid_argument naming a type it does not know, std::bad_alloc where memory is short.
std::shared_ptr<const Weight> pack(const std::vector<Part>& parts, int threads);

}  // namespace octavo
