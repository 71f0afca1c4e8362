// Products of activations with a weight: one row at the speed of memory, many at the speed of the multipliers.
//
// Every output is one sum over the columns in their order, whatever the number of rows or threads. Quantised weights
// multiply int8 activations: exact integer sums over groups of 32 columns, scaled and added in float32. Knows panels
// (weight.hpp); not where rows come from.
#pragma once
#include "activation.hpp"
#include "amx.hpp"
#include "kernels.hpp"
#include "rows.hpp"
#include "simd.hpp"
#include "weight.hpp"

namespace octavo::OCTAVO_ISA {

constexpr int kVectors = kPanel / W;  // that make up a panel's 16 columns of the product

// Rows computed together: as many as the registers hold accumulators for, beside two panels.
constexpr int kQuantisedRows = W == 16 ? 7 : W == 8 ? 2 : 1;
constexpr int kFloatRows = W == 16 ? 12 : W == 8 ? 3 : 1;

constexpr std::int64_t kPanelsOfGroup = kGroup / kPanel;

constexpr std::int64_t kRowBlock = 512;               // rows whose activations stay in a core's second-level cache
constexpr std::int64_t kManyRows = kTiles ? 16 : 10;  // from so many on, all are multiplied with a run of groups in turn
constexpr std::int64_t kRunGroups = 20;               // a run unpacked takes 28 KiB, of a first-level cache

// Two panels that a thread will read, or at a product's end probably will, after those it multiplies; or none.
struct Upcoming {
  const std::uint8_t* panels[2] = {};
  std::int64_t lines = 0;  // of each: 64 bytes
};

// Two panels of a weight, and what they are multiplied for.
struct Pair {
  const LinearArgs* args;
  const Segment* segment;
  std::int64_t panels[2];
  Upcoming next;
  float* pieces;  // [kRowBlock][kGroup] of gated rows, where results wait until a group of columns is whole; or null

  std::int64_t groups() const { return args->weight->columns / kGroup; }
};

// Brings the next panels closer, line by line, while these are multiplied: memory and multipliers work at once.
class Ahead {
 public:
  // To have asked for all of them when more() has been called `calls` times.
  OCTAVO_INLINE Ahead(const Upcoming& next, std::int64_t calls)
      : at_(next.panels[0]), apart_(next.panels[1] - next.panels[0]), rate_((next.lines * kLine + calls - 1) / calls) {}

  // `lines` lines of each panel, when so many are due.
  template <int lines>
  OCTAVO_INLINE void more() {
    due_ += rate_;
    if (due_ < lines * kLine) return;
    due_ -= lines * kLine;
    for (int line = 0; line < lines; ++line) {
      __builtin_prefetch(at_ + 64 * line, 0, 2);
      __builtin_prefetch(at_ + apart_ + 64 * line, 0, 2);
    }
    at_ += 64 * lines;
  }

 private:
  static constexpr std::int64_t kLine = 1 << 16;
  const std::uint8_t* at_;
  std::ptrdiff_t apart_;
  std::int64_t rate_, due_ = 0;  // in parts of a line
};

template <int R>
using Sums = F[R][2 * kVectors];

// Loops over rows and vectors are unrolled by name: only then are these arrays registers.
template <int R>
OCTAVO_INLINE void clear(Sums<R>& sums) {
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kVectors; ++v) sums[r][v] = F{};
  }
}

template <int R>
OCTAVO_INLINE void load_sums(const float* from, Sums<R>& sums) {
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kVectors; ++v) sums[r][v] = load(from + (r * 2 * kVectors + v) * W);
  }
}

template <int R>
OCTAVO_INLINE void store_sums(const Sums<R>& sums, float* to) {
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kVectors; ++v) store(to + (r * 2 * kVectors + v) * W, sums[r][v]);
  }
}

// --- quantised weights ----------------------------------------------------------------------------------------------

// The integer sums of a group, biased (simd.hpp): R rows with the columns of both panels.
template <int R>
using Dots = I[R][2 * kVectors];

// A line of both panels: four columns, as unsigned bytes.
using Line = I[2 * kVectors];

// What a group's integer sums are multiplied with. `unbias` takes the bias away again, exactly: a scale has 11 bits.
struct Scales {
  F scale[2 * kVectors];
  F unbias[2 * kVectors];
  F minimum[2 * kVectors];  // only where there are minima
};

// Both panels' groups as they lie in the weight.
template <Format format, bool has_min>
class Packed {
 public:
  static constexpr bool kHasMin = has_min;
  static constexpr bool kNibbles = format == Format::q4;

  OCTAVO_INLINE explicit Packed(const Pair& pair)
      : groups_(pair.groups()), bytes_{pair.segment->panel(pair.panels[0]), pair.segment->panel(pair.panels[1])} {}

  // Two lines of group g: `line`, from 0 to 3, and the one four further.
  OCTAVO_INLINE void read(std::int64_t g, int line, Line& low, Line& high) const {
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kVectors; ++v) {
      const std::uint8_t* at = bytes_[v / kVectors] + g * kBytes + 64 * line + v % kVectors * 4 * W;
      low[v] = load_as<I>(at);
      if constexpr (format == Format::q4) {
        high[v] = (I)((U)low[v] >> 4) & set1(0x0f0f0f0f);
        low[v] &= set1(0x0f0f0f0f);
      } else {
        high[v] = load_as<I>(at + 256);
      }
    }
  }

  OCTAVO_INLINE void read(std::int64_t g, Scales& to) const {
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kVectors; ++v) {
      const auto* halves = reinterpret_cast<const std::uint16_t*>(bytes_[v / kVectors] + groups_ * kBytes);
      const std::uint16_t* at = halves + g * kPanel + v % kVectors * W;
      to.scale[v] = load_f16(at);
      to.unbias[v] = to.scale[v] * set1(-kBias);
      if constexpr (has_min) to.minimum[v] = load_f16(at + groups_ * kPanel);
    }
  }

 private:
  static constexpr std::int64_t kBytes = format == Format::q4 ? 256 : 512;
  std::int64_t groups_;
  const std::uint8_t* bytes_[2];
};

// A group of both panels, unpacked.
struct Group {
  Line lines[8];
  Scales scales;
};

// A run of them, from group `first` on, for the first of many tiles of rows, which leaves it unpacked for the others.
template <Format format, bool has_min>
class Unpacking {
 public:
  static constexpr bool kHasMin = has_min;
  static constexpr bool kNibbles = format == Format::q4;

  OCTAVO_INLINE Unpacking(const Pair& pair, std::int64_t first, Group* to) : packed_(pair), first_(first), to_(to) {}

  OCTAVO_INLINE void read(std::int64_t g, int line, Line& low, Line& high) const {
    packed_.read(g, line, low, high);
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kVectors; ++v) {
      to_[g - first_].lines[line][v] = low[v];
      to_[g - first_].lines[line + 4][v] = high[v];
    }
  }

  OCTAVO_INLINE void read(std::int64_t g, Scales& to) const {
    packed_.read(g, to);
    to_[g - first_].scales = to;
  }

 private:
  Packed<format, has_min> packed_;
  std::int64_t first_;
  Group* to_;
};

// The run for the other tiles.
template <bool has_min>
class Unpacked {
 public:
  static constexpr bool kHasMin = has_min;
  static constexpr bool kNibbles = true;  // bytes lie in the weight as they are read

  OCTAVO_INLINE Unpacked(std::int64_t first, const Group* from) : first_(first), from_(from) {}

  OCTAVO_INLINE void read(std::int64_t g, int line, Line& low, Line& high) const {
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kVectors; ++v) {
      low[v] = from_[g - first_].lines[line][v];
      high[v] = from_[g - first_].lines[line + 4][v];
    }
  }

  OCTAVO_INLINE void read(std::int64_t g, Scales& to) const { to = from_[g - first_].scales; }

 private:
  std::int64_t first_;
  const Group* from_;
};

// Where the integer sums of a row's group begin: without minima, the zero point is taken away here, from all at once.
template <bool has_min>
OCTAVO_INLINE I origin(const Q8& x, F minus_zero) {
  return as_int(has_min ? set1(kBias) : fma(minus_zero, set1(x.sum), set1(kBias)));
}

// Adds the products of a line to R rows, `stride` apart.
template <bool nibbles, int R>
OCTAVO_INLINE void add_line(const Line& line, const Q8* x, std::int64_t stride, int quad, Dots<R>& dots) {
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    std::int32_t four;
    std::memcpy(&four, x[r * stride].q + 4 * quad, 4);
    const I bytes = set1(four);
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kVectors; ++v) dots[r][v] = dot_u8s8<nibbles>(dots[r][v], line[v], bytes);
  }
}

// sum + x.scale * (scale * dot + minimum * x.sum), for vector v of both panels' columns.
template <bool has_min>
OCTAVO_INLINE F scaled(F sum, I dot, const Scales& scales, int v, const Q8& x) {
  F y = times_biased(dot, scales.scale[v], scales.unbias[v]);
  if constexpr (has_min) y = fma(scales.minimum[v], set1(x.sum), y);
  return fma(set1(x.scale), y, sum);
}

OCTAVO_INLINE F minus_zero_point(const Pair& pair) { return set1(-static_cast<float>(pair.segment->zero_point)); }

// Adds groups [first, last) to the sums of R rows, which are kept as [R][2 * kPanel]; group 0 begins them.
//
// One row or many, packed or not: it is this order of operations that makes a row's bits its own. Of a group's eleven
// operations on a vector eight are products: nothing is converted, and nothing multiplied twice. `many`: tiles of rows.
template <int R, bool many, class Groups>
OCTAVO_INLINE void add_groups(const Pair& pair, const Groups& groups, std::int64_t row, std::int64_t first,
                              std::int64_t last, float* kept, Ahead& ahead) {
  constexpr bool has_min = Groups::kHasMin;
  const F minus_zero = minus_zero_point(pair);
  const std::int64_t stride = pair.groups();
  const Q8* x = pair.args->x.q8 + row * stride + first;
  Sums<R> sums;
  if (first == 0) {
    clear<R>(sums);
  } else {
    load_sums<R>(kept, sums);
  }
  for (std::int64_t g = first; g < last; ++g, ++x) {
    if constexpr (many) ahead.more<4>();
    Dots<R> dots;
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < 2 * kVectors; ++v) dots[r][v] = origin<has_min>(x[r * stride], minus_zero);
    }
#pragma GCC unroll 4
    for (int line = 0; line < 4; ++line) {
      if constexpr (!many) ahead.more<2>();  // few tiles ask for much each: evenly, not at once
      Line low, high;
      groups.read(g, line, low, high);
      add_line<Groups::kNibbles, R>(low, x, stride, line, dots);
      add_line<Groups::kNibbles, R>(high, x, stride, line + 4, dots);
    }
    Scales scales;
    groups.read(g, scales);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < 2 * kVectors; ++v) {
        sums[r][v] = scaled<has_min>(sums[r][v], dots[r][v], scales, v, x[r * stride]);
      }
    }
  }
  store_sums<R>(sums, kept);
}

// --- float weights --------------------------------------------------------------------------------------------------

#if defined(__AVX512BF16__)
// Pairs of columns at once.
template <int R>
OCTAVO_INLINE void add_bf16(const Pair& pair, std::int64_t row, Sums<R>& sums, Ahead& ahead) {
  const Forms& x = pair.args->x;
  const std::int64_t columns = pair.args->weight->columns;
  const std::uint8_t* const panel[2] = {pair.segment->panel(pair.panels[0]), pair.segment->panel(pair.panels[1])};
  const std::uint16_t* rows = x.bf16 + row * x.bf16_stride;
  for (std::int64_t k = 0; k < columns; k += 2, rows += 2) {
    ahead.more<1>();
    I lines[2];
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) lines[v] = load_as<I>(panel[v] + 32 * k);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const I both = set1(load_as<std::int32_t>(rows + r * x.bf16_stride));
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) sums[r][v] = dot_bf16(sums[r][v], both, lines[v]);
    }
  }
}
#else
// Widened to float32: on Intel's cores products of bf16 pairs are issued at a quarter of the rate.
template <int R>
OCTAVO_INLINE void add_bf16(const Pair& pair, std::int64_t row, Sums<R>& sums, Ahead& ahead) {
  const Forms& x = pair.args->x;
  const std::int64_t columns = pair.args->weight->columns;
  const std::uint8_t* const panel[2] = {pair.segment->panel(pair.panels[0]), pair.segment->panel(pair.panels[1])};
  const float* rows = x.f32 + row * x.stride;
  for (std::int64_t k = 0; k < columns; k += 2, rows += 2) {
    ahead.more<1>();
    F even[2 * kVectors], odd[2 * kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kVectors; ++v) {
      const I pairs = load_as<I>(panel[v / kVectors] + 32 * k + v % kVectors * 4 * W);
      even[v] = as_float(pairs << 16);
      odd[v] = as_float(pairs & set1((std::int32_t)0xffff0000));
    }
    const bool both = k + 1 < columns;
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const F first = set1(rows[r * x.stride]), second = set1(both ? rows[r * x.stride + 1] : 0.0f);
#pragma GCC unroll 8
      for (int v = 0; v < 2 * kVectors; ++v) sums[r][v] = fma(second, odd[v], fma(first, even[v], sums[r][v]));
    }
  }
}

#endif

template <Format format, int R>
OCTAVO_INLINE void add_float(const Pair& pair, std::int64_t row, Sums<R>& sums, Ahead& ahead) {
  constexpr int kBytes = format == Format::f16 ? 2 : 4;
  const Forms& x = pair.args->x;
  const std::int64_t columns = pair.args->weight->columns;
  const std::uint8_t* const panel[2] = {pair.segment->panel(pair.panels[0]), pair.segment->panel(pair.panels[1])};
  for (std::int64_t k = 0; k < columns; ++k) {
    ahead.more<1>();
    F lines[2 * kVectors];
    for (int v = 0; v < 2 * kVectors; ++v) {
      const std::uint8_t* at = panel[v / kVectors] + kBytes * (kPanel * k + W * (v % kVectors));
      if constexpr (format == Format::f16) {
        lines[v] = load_f16(reinterpret_cast<const std::uint16_t*>(at));
      } else {
        lines[v] = load_as<F>(at);
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const F value = set1(x.f32[(row + r) * x.stride + k]);
#pragma GCC unroll 8
      for (int v = 0; v < 2 * kVectors; ++v) sums[r][v] = fma(value, lines[v], sums[r][v]);
    }
  }
}

// --- what becomes of sums -------------------------------------------------------------------------------------------

// The sum's 16 columns from column n on: scaled, with bias.
OCTAVO_INLINE F finished(const LinearArgs& args, float factor, F sum, std::int64_t n, std::int64_t some) {
  F y = sum * set1(factor);
  if (args.bias != nullptr) y += load_some(args.bias + n, some);
  return y;
}

OCTAVO_INLINE void put(const LinearArgs& args, std::int64_t row, std::int64_t n, F y, std::int64_t some) {
  if (args.residual != nullptr) y += load_some(args.residual + row * args.residual_stride + n, some);
  store_some(args.out.f32 + row * args.out.stride + n, y, some);
}

// Asks for what finish() will add to the product: another thread wrote it, and it comes while this one multiplies.
OCTAVO_INLINE void ask_for_residual(const Pair& pair, std::int64_t begin, std::int64_t end) {
  const LinearArgs& args = *pair.args;
  if (args.residual == nullptr) return;
  for (std::int64_t row = begin; row < end; ++row) {
    const float* const at = args.residual + row * args.residual_stride + pair.segment->first_row;
    for (const std::int64_t panel : pair.panels) {
      if (panel * kPanel < pair.segment->rows) __builtin_prefetch(at + panel * kPanel);
    }
  }
}

// Rows [begin, end), whose sums are [end - begin][2 * kPanel].
inline void finish(const Pair& pair, std::int64_t begin, std::int64_t end, const float* sums) {
  const LinearArgs args = *pair.args;  // copies, which no store can change
  const Segment segment = *pair.segment;
  for (int v = 0; v < kVectors; ++v) {
    const std::int64_t n = pair.panels[0] * kPanel + v * W;
    const std::int64_t m = pair.panels[1] * kPanel + v * W;
    const std::int64_t some_n = most<std::int64_t>(least<std::int64_t>(W, segment.rows - n), 0);
    const std::int64_t some_m = most<std::int64_t>(least<std::int64_t>(W, segment.rows - m), 0);
    const float* sum = sums + v * W;
    for (std::int64_t row = begin; row < end; ++row, sum += 2 * kPanel) {
      const F a = finished(args, segment.factor, load(sum), segment.first_row + n, some_n);
      const F b = finished(args, segment.factor, load(sum + kPanel), segment.first_row + m, some_m);
      if (pair.pieces != nullptr) {
        store(pair.pieces + row % kRowBlock * kGroup + n % kGroup, activate(args.activation, a) * b);
      } else if (args.gated) {
        put(args, row, n, activate(args.activation, a) * b, some_n);
      } else {
        put(args, row, segment.first_row + n, a, some_n);
        put(args, row, segment.first_row + m, b, some_m);
      }
    }
  }
  if (pair.pieces == nullptr || pair.panels[0] % kPanelsOfGroup < kPanelsOfGroup - 1) return;
  const std::int64_t column = pair.panels[0] / kPanelsOfGroup * kGroup;
  for (std::int64_t row = begin; row < end; ++row) {
    const Piece piece = load_piece(pair.pieces + row % kRowBlock * kGroup, kGroup);
    put_piece(args.out, segment.rows / 2, row, column, kGroup, piece);
  }
}

// --- from tiles to the whole ----------------------------------------------------------------------------------------

template <int R, class Call>
OCTAVO_INLINE void with_rows(int rows, const Call& call) {
  if constexpr (R > 1) {
    if (rows < R) return with_rows<R - 1>(rows, call);
  }
  call.template operator()<R>();
}

template <int Most>
OCTAVO_INLINE std::int64_t num_tiles(std::int64_t rows) {
  return (rows + Most - 1) / Most;
}

// Calls for tiles of up to `Most` rows, as equal as can be, that cover [begin, end).
template <int Most, class Call>
OCTAVO_INLINE void in_tiles(std::int64_t begin, std::int64_t end, const Call& call) {
  const std::int64_t tiles = num_tiles<Most>(end - begin);
  std::int64_t row = begin;
  for (std::int64_t t = 0; t < tiles; ++t) {
    const std::int64_t next = begin + (end - begin) * (t + 1) / tiles;
    with_rows<Most>(static_cast<int>(next - row), [&]<int R>() { call.template operator()<R>(row); });
    row = next;
  }
}

// Calls for runs of groups, as equal as can be.
template <class Call>
OCTAVO_INLINE void in_runs(std::int64_t groups, const Call& call) {
  const std::int64_t runs = (groups + kRunGroups - 1) / kRunGroups;
  for (std::int64_t run = 0; run < runs; ++run) call(groups * run / runs, groups * (run + 1) / runs);
}

// Few rows, or floats: each tile reads the panels as they lie in the weight.
template <Format format, bool has_min = false>
void rows_of_pair(const Pair& pair, std::int64_t begin, std::int64_t end) {
  constexpr bool kQuantised = format == Format::q4 || format == Format::q8;
  constexpr int kRows = kQuantised ? kQuantisedRows : kFloatRows;
  constexpr std::int64_t kColumnsOfCall = kQuantised ? 8 : format == Format::bf16 ? 2 : 1;
  Ahead ahead(pair.next, num_tiles<kRows>(end - begin) * (pair.args->weight->columns / kColumnsOfCall + 1));
  in_tiles<kRows>(begin, end, [&]<int R>(std::int64_t row) {
    alignas(64) float kept[R * 2 * kPanel];
    ask_for_residual(pair, row, row + R);
    if constexpr (kQuantised) {
      add_groups<R, false>(pair, Packed<format, has_min>(pair), row, 0, pair.groups(), kept, ahead);
    } else {
      Sums<R> sums;
      clear<R>(sums);
      if constexpr (format == Format::bf16) {
        add_bf16<R>(pair, row, sums, ahead);
      } else {
        add_float<format, R>(pair, row, sums, ahead);
      }
      store_sums<R>(sums, kept);
    }
    finish(pair, row, row + R, kept);
  });
}

#if defined(OCTAVO_AMX)
// Many rows: runs of unpacked groups, on tiles. Bit for bit what add_groups makes of them.
template <Format format, bool has_min>
void many_rows_of_pair(const Pair& pair, std::int64_t begin, std::int64_t end) {
  Group unpacked[kRunGroups];
  alignas(64) float kept[kRowBlock * 2 * kPanel];
  alignas(64) std::int32_t dots[2][kTileRows][kPanel];
  const std::int64_t groups = pair.groups();
  const F minus_zero = minus_zero_point(pair);
  const Tiles tiles(tile_config(end - begin, kGroup, 8));
  std::memset(kept, 0, sizeof kept);
  in_runs(pair.groups(), [&](std::int64_t first, std::int64_t last) {
    const Unpacking<format, has_min> unpacking(pair, first, unpacked);
    for (std::int64_t g = first; g < last; ++g) {
      Line low, high;
      Scales scales;
      for (int line = 0; line < 4; ++line) unpacking.read(g, line, low, high);
      unpacking.read(g, scales);
    }
    for (std::int64_t row = begin; row < end; row += kTileRows) {
      const std::int64_t rows = least<std::int64_t>(kTileRows, end - row);
      for (std::int64_t g = first; g < last; ++g) {
        const Group& group = unpacked[g - first];
        const Q8* x = pair.args->x.q8 + row * groups + g;
        tile_dots(rows == kTileRows, x, groups * static_cast<std::int64_t>(sizeof(Q8)), &group.lines[0][0],
                  &group.lines[0][1], sizeof group.lines[0], dots[0][0]);
        for (std::int64_t r = 0; r < rows; ++r) {
          float* sum = kept + (row - begin + r) * 2 * kPanel;
          const I from = origin<has_min>(x[r * groups], minus_zero);
          for (int p = 0; p < 2; ++p, sum += kPanel) {
            store(sum, scaled<has_min>(load(sum), from + load(dots[p][r]), group.scales, p, x[r * groups]));
          }
        }
      }
    }
  });
  finish(pair, begin, end, kept);
}

inline void bf16_rows_of_pair(const Pair& pair, std::int64_t begin, std::int64_t end) {
  alignas(64) float sums[2][kTileRows][kPanel];
  alignas(64) float kept[kTileRows][2][kPanel];
  const Forms& x = pair.args->x;
  const Tiles tiles(tile_config(end - begin, 64, 16));
  for (std::int64_t row = begin; row < end; row += kTileRows) {
    const std::int64_t rows = least<std::int64_t>(kTileRows, end - row);
    tile_bf16(rows == kTileRows, x.bf16 + row * x.bf16_stride, x.bf16_stride, pair.segment->panel(pair.panels[0]),
              pair.segment->panel(pair.panels[1]), sums[0][0]);
    for (std::int64_t r = 0; r < rows; ++r) {
      for (int p = 0; p < 2; ++p) store(kept[r][p], load(sums[p][r]));
    }
    finish(pair, row, row + rows, kept[0][0]);
  }
}

#else

// Many rows: runs of groups, whose nibbles the first tile unpacks for all. The sums wait in `kept` from run to run.
template <Format format, bool has_min>
void many_rows_of_pair(const Pair& pair, std::int64_t begin, std::int64_t end) {
  Group unpacked[kRunGroups];
  alignas(64) float kept[kRowBlock * 2 * kPanel];
  Ahead ahead(pair.next, num_tiles<kQuantisedRows>(end - begin) * pair.groups());
  in_runs(pair.groups(), [&](std::int64_t first, std::int64_t last) {
    in_tiles<kQuantisedRows>(begin, end, [&]<int R>(std::int64_t row) {
      float* const to = kept + (row - begin) * 2 * kPanel;
      if (last == pair.groups()) ask_for_residual(pair, row, row + R);
      if constexpr (format == Format::q8) {
        add_groups<R, true>(pair, Packed<format, has_min>(pair), row, first, last, to, ahead);
      } else if (row == begin) {
        add_groups<R, true>(pair, Unpacking<format, has_min>(pair, first, unpacked), row, first, last, to, ahead);
      } else {
        add_groups<R, true>(pair, Unpacked<has_min>(first, unpacked), row, first, last, to, ahead);
      }
      if (last == pair.groups()) finish(pair, row, row + R, to);
    });
  });
}

inline void bf16_rows_of_pair(const Pair& pair, std::int64_t begin, std::int64_t end) {
  rows_of_pair<Format::bf16>(pair, begin, end);
}
#endif

template <Format format>
void quantised_rows_of_pair(const Pair& pair, std::int64_t begin, std::int64_t end) {
  if (end - begin >= kManyRows) {
    return pair.segment->has_min ? many_rows_of_pair<format, true>(pair, begin, end)
                                 : many_rows_of_pair<format, false>(pair, begin, end);
  }
  return pair.segment->has_min ? rows_of_pair<format, true>(pair, begin, end)
                               : rows_of_pair<format, false>(pair, begin, end);
}

inline void rows_of_pair(const Pair& pair, std::int64_t begin, std::int64_t end) {
  switch (pair.segment->format) {
    case Format::q4: return quantised_rows_of_pair<Format::q4>(pair, begin, end);
    case Format::q8: return quantised_rows_of_pair<Format::q8>(pair, begin, end);
    case Format::bf16: return bf16_rows_of_pair(pair, begin, end);
    case Format::f16: return rows_of_pair<Format::f16>(pair, begin, end);
    case Format::f32: return rows_of_pair<Format::f32>(pair, begin, end);
  }
}

// The pair of panels that is piece i of a product: neighbours, or where `gated` column p with column p + N / 2.
inline void place(const Weight& weight, bool gated, std::int64_t pair, const Segment*& segment,
                  std::int64_t (&panels)[2]) {
  segment = weight.first_segment();
  while (pair >= segment->panels / 2) pair -= segment++->panels / 2;
  panels[0] = gated ? pair : 2 * pair;
  panels[1] = gated ? pair + segment->rows / (2 * kPanel) : 2 * pair + 1;
}

inline Upcoming upcoming(const Weight& weight, bool gated, std::int64_t pair) {
  const Segment* segment;
  std::int64_t panels[2];
  place(weight, gated, pair, segment, panels);
  return {{segment->panel(panels[0]), segment->panel(panels[1])}, static_cast<std::int64_t>(segment->panel_bytes / 64)};
}

inline std::int64_t pairs_of(const Weight& weight) {
  std::int64_t pairs = 0;
  for (int s = 0; s < weight.num_segments(); ++s) pairs += weight.first_segment()[s].panels / 2;
  return pairs;
}

// Pairs of panels are shared out, a few at a time where they are small beside the cost of a claim. A thread begins with
// those of its own number, and claims the next before it multiplies: so it knows which panels to ask memory for, and at
// the end of a product those that it will probably begin the next one with.
inline void linear(const LinearArgs& args, Team& team, int thread) {
  const Weight& weight = *args.weight;
  const std::int64_t pairs = pairs_of(weight);
  const std::int64_t items = pairs * ((args.rows + kRowBlock - 1) / kRowBlock);
  const std::int64_t work = static_cast<std::int64_t>(2 * weight.first_segment()->panel_bytes) * args.rows;
  const std::int64_t fair = most<std::int64_t>(1, items / (4 * team.size()));
  std::int64_t step = most<std::int64_t>(1, least(fair, (64 << 10) / most<std::int64_t>(work, 1)));
  // A group of gated columns is one thread's, who begins with its first: pairs come in whole groups.
  alignas(64) float pieces[kRowBlock * kGroup];
  const bool in_pieces = args.gated && (args.out.q8 != nullptr || args.out.bf16 != nullptr);
  if (in_pieces) step = (step + kPanelsOfGroup - 1) / kPanelsOfGroup * kPanelsOfGroup;
  Upcoming after;
  if (args.after != nullptr) {
    const std::int64_t first = args.after_gated ? thread * kPanelsOfGroup : thread;
    after = upcoming(*args.after, args.after_gated, least<std::int64_t>(first, pairs_of(*args.after) - 1));
  }
  for (std::int64_t item = thread * step, next; item < items; item = next) {
    next = team.size() * step + team.claim(step);
    for (std::int64_t i = item; i < least(item + step, items); ++i) {
      const std::int64_t begin = i / pairs * kRowBlock, end = least(args.rows, begin + kRowBlock);
      const std::int64_t then = i + 1 < least(item + step, items) ? i + 1 : next;
      Pair pair{&args, nullptr, {}, then < items ? upcoming(weight, args.gated, then % pairs) : after,
                in_pieces ? pieces : nullptr};
      place(weight, args.gated, i % pairs, pair.segment, pair.panels);
      rows_of_pair(pair, begin, end);
    }
  }
}

}  // namespace octavo::OCTAVO_ISA
