#include "weight.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "dispatch.hpp"

namespace octavo {
namespace {

constexpr int kColumns = 32;  // of a group

std::uint16_t read16(const std::uint8_t* p) {
  std::uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}

std::uint32_t read32(const std::uint8_t* p) {
  std::uint32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

float from_f16(std::uint16_t h) {
  const int exponent = (h >> 10) & 31, mantissa = h & 1023;
  float magnitude;
  if (exponent == 31) {
    magnitude = mantissa ? std::nanf("") : INFINITY;
  } else {
    magnitude = exponent ? std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25)
                         : std::ldexp(static_cast<float>(mantissa), -24);
  }
  return h & 0x8000 ? -magnitude : magnitude;
}

// Rounded to the nearest, ties to even. |x| < 65520.
std::uint16_t to_f16(float x) {
  const std::uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const float magnitude = std::fabs(x);
  if (!(magnitude > 0)) return sign;
  const int exponent = std::max(std::ilogb(magnitude), -14);
  const auto units = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));  // 1024 to 2048 if normal
  return static_cast<std::uint16_t>(sign | (units + ((exponent + 14) << 10)));
}

// 32 columns of a row as they are kept: scale * (q - zero point) + minimum.
struct Group {
  std::uint8_t q[kColumns];
  std::uint16_t scale, minimum;
};

// How rows of a storage type become groups.
struct Layout {
  const char* name;
  Format format;
  std::size_t block_bytes;
  int block_columns;
  int zero_point;
  bool has_min;
  void (*decode)(const std::uint8_t* row, std::int64_t group, float inverse_factor, Group&);  // null: not quantised
  float (*largest)(const std::uint8_t* block);  // bound of |scale| and |minimum|; null: they are f16 in the file
};

void nibbles(const std::uint8_t* packed, std::uint8_t* q) {
  for (int i = 0; i < 16; ++i) {
    q[i] = packed[i] & 15;
    q[i + 16] = packed[i] >> 4;
  }
}

void fifth_bits(std::uint32_t bits, std::uint8_t* q) {
  for (int i = 0; i < kColumns; ++i) q[i] = static_cast<std::uint8_t>(q[i] | (((bits >> i) & 1) << 4));
}

// The simple types: a scale, perhaps a minimum, 32 values (llama.cpp's ggml-common.h describes all types).

void decode_q4_0(const std::uint8_t* row, std::int64_t group, float, Group& out) {
  const std::uint8_t* block = row + group * 18;
  out.scale = read16(block);
  nibbles(block + 2, out.q);
}

void decode_q4_1(const std::uint8_t* row, std::int64_t group, float, Group& out) {
  const std::uint8_t* block = row + group * 20;
  out.scale = read16(block);
  out.minimum = read16(block + 2);
  nibbles(block + 4, out.q);
}

void decode_q5_0(const std::uint8_t* row, std::int64_t group, float, Group& out) {
  const std::uint8_t* block = row + group * 22;
  out.scale = read16(block);
  nibbles(block + 6, out.q);
  fifth_bits(read32(block + 2), out.q);
}

void decode_q5_1(const std::uint8_t* row, std::int64_t group, float, Group& out) {
  const std::uint8_t* block = row + group * 24;
  out.scale = read16(block);
  out.minimum = read16(block + 2);
  nibbles(block + 8, out.q);
  fifth_bits(read32(block + 4), out.q);
}

void decode_q8_0(const std::uint8_t* row, std::int64_t group, float, Group& out) {
  const std::uint8_t* block = row + group * 34;
  out.scale = read16(block);
  for (int i = 0; i < kColumns; ++i) out.q[i] = block[2 + i] ^ 0x80;  // signed to unsigned: plus 128
}

// The K types: blocks of 256 with two levels of scales.

struct ScaleMin {
  int scale, min;
};

ScaleMin six_bits(const std::uint8_t* s, int j) {
  if (j < 4) return {s[j] & 63, s[j + 4] & 63};
  return {(s[j + 4] & 15) | ((s[j - 4] >> 6) << 4), (s[j + 4] >> 4) | ((s[j] >> 6) << 4)};
}

void scales_of_k(const std::uint8_t* block, int part, float inverse_factor, Group& out) {
  const ScaleMin both = six_bits(block + 4, part);
  out.scale = to_f16(from_f16(read16(block)) * static_cast<float>(both.scale) * inverse_factor);
  out.minimum = to_f16(-from_f16(read16(block + 2)) * static_cast<float>(both.min) * inverse_factor);
}

void decode_q4_k(const std::uint8_t* row, std::int64_t group, float inverse_factor, Group& out) {
  const std::uint8_t* block = row + group / 8 * 144;
  const int part = static_cast<int>(group % 8), shift = 4 * (part % 2);
  scales_of_k(block, part, inverse_factor, out);
  const std::uint8_t* packed = block + 16 + part / 2 * 32;
  for (int i = 0; i < kColumns; ++i) out.q[i] = (packed[i] >> shift) & 15;
}

void decode_q5_k(const std::uint8_t* row, std::int64_t group, float inverse_factor, Group& out) {
  const std::uint8_t* block = row + group / 8 * 176;
  const int part = static_cast<int>(group % 8), shift = 4 * (part % 2);
  scales_of_k(block, part, inverse_factor, out);
  const std::uint8_t* high = block + 16;
  const std::uint8_t* packed = block + 48 + part / 2 * 32;
  for (int i = 0; i < kColumns; ++i) {
    out.q[i] = static_cast<std::uint8_t>(((packed[i] >> shift) & 15) | (((high[i] >> part) & 1) << 4));
  }
}

float largest_k(const std::uint8_t* block) {
  return 63 * std::max(std::fabs(from_f16(read16(block))), std::fabs(from_f16(read16(block + 2))));
}

// Q6_K has a scale for each 16 values: brought to one scale for 32, of 8 bits, which is finer than its 6.
void decode_q6_k(const std::uint8_t* row, std::int64_t group, float inverse_factor, Group& out) {
  const std::uint8_t* block = row + group / 8 * 210;
  const int part = static_cast<int>(group % 8), half = part / 4, quarter = part % 4;
  const std::uint8_t* low = block + half * 64 + quarter % 2 * 32;
  const std::uint8_t* high = block + 128 + half * 32;
  const auto* scales = reinterpret_cast<const std::int8_t*>(block + 192 + half * 8 + quarter * 2);
  int whole[kColumns], largest = 0;
  for (int i = 0; i < kColumns; ++i) {
    const int q = ((low[i] >> (quarter / 2 * 4)) & 15) | (((high[i] >> (quarter * 2)) & 3) << 4);
    whole[i] = (q - 32) * scales[i / 16];
    largest = std::max(largest, std::abs(whole[i]));
  }
  const float step = static_cast<float>(std::max(largest, 1)) / 127;
  for (int i = 0; i < kColumns; ++i) {
    out.q[i] = static_cast<std::uint8_t>(128 + static_cast<int>(std::nearbyint(static_cast<float>(whole[i]) / step)));
  }
  out.scale = to_f16(from_f16(read16(block + 208)) * step * inverse_factor);
}

float largest_q6_k(const std::uint8_t* block) { return std::fabs(from_f16(read16(block + 208))) * 128 * 32 / 127; }

constexpr Layout kLayouts[] = {
    {"Q4_0", Format::q4, 18, 32, 8, false, decode_q4_0, nullptr},
    {"Q4_1", Format::q4, 20, 32, 0, true, decode_q4_1, nullptr},
    {"Q5_0", Format::q8, 22, 32, 16, false, decode_q5_0, nullptr},
    {"Q5_1", Format::q8, 24, 32, 0, true, decode_q5_1, nullptr},
    {"Q8_0", Format::q8, 34, 32, 128, false, decode_q8_0, nullptr},
    {"Q4_K", Format::q4, 144, 256, 0, true, decode_q4_k, largest_k},
    {"Q5_K", Format::q8, 176, 256, 0, true, decode_q5_k, largest_k},
    {"Q6_K", Format::q8, 210, 256, 128, false, decode_q6_k, largest_q6_k},
    {"BF16", Format::bf16, 2, 1, 0, false, nullptr, nullptr},
    {"F16", Format::f16, 2, 1, 0, false, nullptr, nullptr},
    {"F32", Format::f32, 4, 1, 0, false, nullptr, nullptr},
};

const Layout& layout_of(const Part& part) {
  for (const Layout& layout : kLayouts) {
    if (part.type == layout.name) {
      if (part.columns % layout.block_columns != 0) {
        throw std::invalid_argument(part.type + " weights have rows of a multiple of " +
                                    std::to_string(layout.block_columns) + " values, not " +
                                    std::to_string(part.columns) + ".");
      }
      return layout;
    }
  }
  throw std::invalid_argument("There is no kernel for weights of type " + part.type + ".");
}

std::size_t row_bytes(const Layout& layout, std::int64_t columns) {
  return static_cast<std::size_t>(columns / layout.block_columns) * layout.block_bytes;
}

std::size_t panel_bytes(const Layout& layout, std::int64_t groups) {
  std::size_t of_group = 0;
  switch (layout.format) {
    case Format::q4: of_group = 256; break;
    case Format::q8: of_group = 512; break;
    case Format::bf16:
    case Format::f16: of_group = 1024; break;
    case Format::f32: of_group = 2048; break;
  }
  if (layout.decode != nullptr) of_group += layout.has_min ? 64 : 32;
  return (static_cast<std::size_t>(groups) * of_group + 63) / 64 * 64;
}

Input input_of(Format format) {
  switch (format) {
    case Format::q4:
    case Format::q8: return Input::q8;
    case Format::bf16: return choose().bf16_rows ? Input::bf16 : Input::f32;
    default: return Input::f32;
  }
}

// The power of two that brings scales and minima below 2^14 if they would be larger or much smaller than f16 likes.
float factor_of(const Layout& layout, const std::uint8_t* raw, std::size_t blocks) {
  if (layout.largest == nullptr) return 1.0f;
  float largest = 0;
  for (std::size_t block = 0; block < blocks; ++block) {
    largest = std::max(largest, layout.largest(raw + block * layout.block_bytes));
  }
  return largest > 0 && std::isfinite(largest) ? std::ldexp(1.0f, std::ilogb(largest) - 13) : 1.0f;
}

// Rows of one type that lie together: one part, or parts in turn.
struct Run {
  const Layout* layout;
  std::vector<const Part*> parts;
  std::int64_t rows = 0;

  const std::uint8_t* row(std::int64_t r, std::int64_t columns) const {
    for (const Part* part : parts) {
      if (r < part->rows) return part->raw + static_cast<std::size_t>(r) * row_bytes(*layout, columns);
      r -= part->rows;
    }
    return nullptr;
  }
};

void put_group(const Layout& layout, const Group& group, std::int64_t g, std::int64_t groups, int lane,
               std::uint8_t* panel) {
  const std::size_t line_bytes = layout.format == Format::q4 ? 256 : 512;
  std::uint8_t* lines = panel + static_cast<std::size_t>(g) * line_bytes + 4 * lane;
  if (layout.format == Format::q4) {
    for (int line = 0; line < 4; ++line) {
      for (int i = 0; i < 4; ++i) {
        lines[64 * line + i] = static_cast<std::uint8_t>(group.q[4 * line + i] | (group.q[16 + 4 * line + i] << 4));
      }
    }
  } else {
    for (int line = 0; line < 8; ++line) std::memcpy(lines + 64 * line, group.q + 4 * line, 4);
  }
  std::uint8_t* scales = panel + static_cast<std::size_t>(groups) * line_bytes;
  std::memcpy(scales + g * 32 + 2 * lane, &group.scale, 2);
  if (layout.has_min) std::memcpy(scales + (groups + g) * 32 + 2 * lane, &group.minimum, 2);
}

void put_plain_row(Format format, const std::uint8_t* row, std::int64_t columns, int lane, std::uint8_t* panel) {
  for (std::int64_t k = 0; k < columns; ++k) {
    if (format == Format::bf16) {
      std::memcpy(panel + (k / 2) * 64 + 4 * lane + 2 * (k % 2), row + 2 * k, 2);
    } else if (format == Format::f16) {
      std::memcpy(panel + k * 32 + 2 * lane, row + 2 * k, 2);
    } else {
      std::memcpy(panel + k * 64 + 4 * lane, row + 4 * k, 4);
    }
  }
}

// The panel's memory is zero before, and stays so where there is no row or column.
void fill_panel(const Run& run, const Segment& segment, std::int64_t columns, std::int64_t p, std::uint8_t* panel) {
  const std::int64_t groups = (columns + kColumns - 1) / kColumns;
  const Layout& layout = *run.layout;
  for (int lane = 0; lane < kPanel && p * kPanel + lane < run.rows; ++lane) {
    const std::uint8_t* row = run.row(p * kPanel + lane, columns);
    if (layout.decode == nullptr) {
      put_plain_row(layout.format, row, columns, lane, panel);
      continue;
    }
    for (std::int64_t g = 0; g < groups; ++g) {
      Group group{};
      layout.decode(row, g, 1 / segment.factor, group);
      put_group(layout, group, g, groups, lane, panel);
    }
  }
}

std::vector<Run> runs_of(const std::vector<Part>& parts) {
  std::vector<Run> runs;
  for (const Part& part : parts) {
    const Layout& layout = layout_of(part);
    if (runs.empty() || runs.back().layout != &layout) runs.push_back({&layout, {}, 0});
    runs.back().parts.push_back(&part);
    runs.back().rows += part.rows;
  }
  return runs;
}

float factor_of(const Run& run, std::int64_t columns) {
  float factor = 0;
  for (const Part* part : run.parts) {
    const std::size_t blocks = static_cast<std::size_t>(part->rows * (columns / run.layout->block_columns));
    factor = std::max(factor, factor_of(*run.layout, part->raw, blocks));
  }
  return factor;
}

}  // namespace

const Segment* Weight::first_segment() const { return segments.data(); }

int Weight::num_segments() const { return static_cast<int>(segments.size()); }

bool Weight::gateable() const { return segments.size() == 1 && rows % (2 * kPanel) == 0; }

std::shared_ptr<const Weight> pack(const std::vector<Part>& parts, int threads) {
  auto weight = std::make_shared<Weight>();
  if (parts.empty()) throw std::invalid_argument("A weight needs at least one part.");
  weight->columns = parts.front().columns;
  for (const Part& part : parts) {
    if (part.columns != weight->columns) throw std::invalid_argument("The parts of a weight must be of the same width.");
  }
  const std::vector<Run> runs = runs_of(parts);
  const std::int64_t groups = (weight->columns + kColumns - 1) / kColumns;
  for (const Run& run : runs) {
    const Layout& layout = *run.layout;
    Segment segment{layout.format, run.rows, weight->rows, (run.rows + 2 * kPanel - 1) / (2 * kPanel) * 2,
                    panel_bytes(layout, groups)};
    segment.zero_point = layout.zero_point;
    segment.has_min = layout.has_min;
    segment.factor = factor_of(run, weight->columns);
    weight->rows += run.rows;
    weight->bytes += static_cast<std::size_t>(segment.panels) * segment.panel_bytes;
    weight->segments.push_back(segment);
    const Input input = input_of(layout.format);
    if (std::find(weight->inputs.begin(), weight->inputs.end(), input) == weight->inputs.end()) {
      weight->inputs.push_back(input);
    }
  }
  weight->storage = Memory(weight->bytes);
  std::uint8_t* data = weight->storage.data();
  for (std::size_t s = 0; s < runs.size(); ++s) {
    Segment& segment = weight->segments[s];
    segment.data = data;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4)
    for (std::int64_t p = 0; p < segment.panels; ++p) {
      fill_panel(runs[s], segment, weight->columns, p, data + static_cast<std::size_t>(p) * segment.panel_bytes);
    }
    data += static_cast<std::size_t>(segment.panels) * segment.panel_bytes;
  }
  return weight;
}

}  // namespace octavo
