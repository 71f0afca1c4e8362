// Products of activations with a weight: one row at the speed of memory, many at the speed of the multipliers.
//
// Every output is one sum over the columns in their order, whatever the number of rows or threads. Quantised weights
// multiply int8 activations: exact integer sums over groups of 32 columns, scaled and added in float32. Knows panels
// (weight.hpp); not where rows come from.
#pragma once
#include "activation.hpp"
#include "amx.hpp"
#include "kernels.hpp"
#include "simd.hpp"
#include "weight.hpp"

namespace octavo::OCTAVO_ISA {

constexpr int kVectors = kPanel / W;  // that make up a panel's 16 columns of the product

// Rows computed together: as many as the registers hold accumulators for, beside two panels.
constexpr int kQuantisedRows = W == 16 ? 6 : W == 8 ? 2 : 1;
constexpr int kFloatRows = W == 16 ? 12 : W == 8 ? 3 : 1;

constexpr std::int64_t kRowBlock = 512;     // rows whose activations stay in a core's second-level cache
constexpr std::int64_t kUnpackRows = 16;    // from so many on, nibbles are unpacked once for all of them
constexpr std::int64_t kUnpackGroups = 32;  // groups of a pair of panels unpacked at a time: 40 KiB, of a first-level cache

// What a tile of rows reads and where it goes.
struct Tile {
  const LinearArgs* args;
  const Segment* segment;
  std::int64_t panels[2];
  std::int64_t next[2];  // panels that this thread will probably read after these
  std::int64_t row;
};

// Brings the next panels closer, a few lines at a time, while these are multiplied: memory and multipliers work at once.
class Ahead {
 public:
  static constexpr std::int64_t kLines = 2;  // of each panel a group; 512 bytes of q8 and some scales, after 4 tiles

  OCTAVO_INLINE explicit Ahead(const Tile& tile)
      : at_{tile.segment->panel(tile.next[0]), tile.segment->panel(tile.next[1])},
        left_(static_cast<std::int64_t>(tile.segment->panel_bytes / 64)) {}

  OCTAVO_INLINE void more() {
    if (left_ <= 0) return;
    for (std::int64_t line = 0; line < kLines; ++line) {
      __builtin_prefetch(at_[0] + 64 * line, 0, 2);
      __builtin_prefetch(at_[1] + 64 * line, 0, 2);
    }
    at_[0] += 64 * kLines;
    at_[1] += 64 * kLines;
    left_ -= kLines;
  }

 private:
  const std::uint8_t* at_[2];
  std::int64_t left_;
};

template <int R>
using Sums = F[R][2 * kVectors];

// --- quantised weights ----------------------------------------------------------------------------------------------

// The integer sums of a group: R rows with the columns of both panels.
template <int R>
using Dots = I[R][2 * kVectors];

// A group of both panels, unpacked: as unsigned bytes, with scales and minima.
struct Group {
  I lines[8][2 * kVectors];
  F scale[2 * kVectors];
  F minimum[2 * kVectors];
};

// Where both panels' bytes, scales and minima of a format lie.
template <Format format>
struct Packed {
  static constexpr std::int64_t kBytes = format == Format::q4 ? 256 : 512;

  Packed(const Tile& tile)
      : groups(tile.args->weight->columns / kGroup),
        has_min(tile.segment->has_min),
        minus_zero(set1(-static_cast<float>(tile.segment->zero_point))),
        bytes{tile.segment->panel(tile.panels[0]), tile.segment->panel(tile.panels[1])},
        scales{halves(bytes[0] + groups * kBytes), halves(bytes[1] + groups * kBytes)} {}

  static const std::uint16_t* halves(const std::uint8_t* p) { return reinterpret_cast<const std::uint16_t*>(p); }

  std::int64_t groups;
  bool has_min;
  F minus_zero;
  const std::uint8_t* bytes[2];
  const std::uint16_t* scales[2];
};

// Two lines of a group: `line`, from 0 to 3, and the one four further.
template <Format format>
OCTAVO_INLINE void load_lines(const Packed<format>& packed, std::int64_t g, int line, I (&low)[2 * kVectors],
                              I (&high)[2 * kVectors]) {
#pragma GCC unroll 8
  for (int v = 0; v < 2 * kVectors; ++v) {
    const std::uint8_t* at = packed.bytes[v / kVectors] + g * packed.kBytes + 64 * line + v % kVectors * 4 * W;
    low[v] = load_as<I>(at);
    if constexpr (format == Format::q4) {
      high[v] = (I)((U)low[v] >> 4) & set1(0x0f0f0f0f);
      low[v] &= set1(0x0f0f0f0f);
    } else {
      high[v] = load_as<I>(at + 256);
    }
  }
}

template <Format format>
OCTAVO_INLINE void load_scales(const Packed<format>& packed, std::int64_t g, F (&scale)[2 * kVectors],
                               F (&minimum)[2 * kVectors]) {
#pragma GCC unroll 8
  for (int v = 0; v < 2 * kVectors; ++v) {
    const std::uint16_t* at = packed.scales[v / kVectors] + g * kPanel + v % kVectors * W;
    scale[v] = load_f16(at);
    minimum[v] = packed.has_min ? load_f16(at + packed.groups * kPanel) : scale[v] * packed.minus_zero;
  }
}

// Adds the products of a line (four columns) of both panels.
template <int R>
OCTAVO_INLINE void add_line(const I (&line)[2 * kVectors], const Q8* x, std::int64_t stride, int quad, Dots<R>& dots) {
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    std::int32_t four;
    std::memcpy(&four, x[r * stride].q + 4 * quad, 4);
    const I bytes = set1(four);
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kVectors; ++v) dots[r][v] = dot_u8s8(dots[r][v], line[v], bytes);
  }
}

template <int R>
OCTAVO_INLINE void clear(Dots<R>& dots) {
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kVectors; ++v) dots[r][v] = zero();
  }
}

OCTAVO_INLINE F scaled(F sum, I dot, F scale, F minimum, const Q8& x) {
  return fma(to_float(dot), scale * set1(x.scale), fma(minimum, set1(x.sum), sum));
}

template <int R>
OCTAVO_INLINE void add_scaled(const Dots<R>& dots, const F (&scale)[2 * kVectors], const F (&minimum)[2 * kVectors],
                              const Q8* x, std::int64_t stride, Sums<R>& sums) {
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kVectors; ++v) {
      sums[r][v] = scaled(sums[r][v], dots[r][v], scale[v], minimum[v], x[r * stride]);
    }
  }
}

// Adds all groups as they lie in the weight.
template <Format format, int R>
OCTAVO_INLINE void add_packed(const Tile& tile, Sums<R>& sums) {
  const Packed<format> packed(tile);
  const Q8* x = tile.args->x.q8 + tile.row * packed.groups;
  for (std::int64_t g = 0; g < packed.groups; ++g, ++x) {
    Dots<R> dots;
    clear<R>(dots);
#pragma GCC unroll 4
    for (int line = 0; line < 4; ++line) {
      I low[2 * kVectors], high[2 * kVectors];
      load_lines(packed, g, line, low, high);
      add_line<R>(low, x, packed.groups, line, dots);
      add_line<R>(high, x, packed.groups, line + 4, dots);
    }
    F scale[2 * kVectors], minimum[2 * kVectors];
    load_scales(packed, g, scale, minimum);
    add_scaled<R>(dots, scale, minimum, x, packed.groups, sums);
  }
}

template <Format format>
void unpack(const Tile& tile, std::int64_t first, std::int64_t last, Group* to) {
  const Packed<format> packed(tile);
  for (std::int64_t g = first; g < last; ++g, ++to) {
    for (int line = 0; line < 4; ++line) load_lines(packed, g, line, to->lines[line], to->lines[line + 4]);
    load_scales(packed, g, to->scale, to->minimum);
  }
}

// Adds groups [first, last), unpacked: the same sums in the same order as add_packed.
template <int R>
OCTAVO_INLINE void add_unpacked(const Tile& tile, const Group* group, std::int64_t first, std::int64_t last,
                                Sums<R>& sums, Ahead& ahead) {
  const std::int64_t groups = tile.args->weight->columns / kGroup;
  const Q8* x = tile.args->x.q8 + tile.row * groups + first;
  const Group* const end = group + (last - first);
  for (; group != end; ++group, ++x) {
    ahead.more();
    Dots<R> dots;
    clear<R>(dots);
#pragma GCC unroll 8
    for (int line = 0; line < 8; ++line) add_line<R>(group->lines[line], x, groups, line, dots);
    add_scaled<R>(dots, group->scale, group->minimum, x, groups, sums);
  }
}

// --- float weights --------------------------------------------------------------------------------------------------

// Widened to float32: on the processors that have them, products of bf16 pairs are issued at a quarter of the rate.
template <int R>
OCTAVO_INLINE void add_bf16(const Tile& tile, Sums<R>& sums) {
  const Forms& x = tile.args->x;
  const std::int64_t columns = tile.args->weight->columns;
  const std::uint8_t* const panel[2] = {tile.segment->panel(tile.panels[0]), tile.segment->panel(tile.panels[1])};
  const float* rows = x.f32 + tile.row * x.stride;
  for (std::int64_t k = 0; k < columns; k += 2, rows += 2) {
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

template <Format format, int R>
OCTAVO_INLINE void add_float(const Tile& tile, Sums<R>& sums) {
  constexpr int kBytes = format == Format::f16 ? 2 : 4;
  const Forms& x = tile.args->x;
  const std::int64_t columns = tile.args->weight->columns;
  const std::uint8_t* const panel[2] = {tile.segment->panel(tile.panels[0]), tile.segment->panel(tile.panels[1])};
  for (std::int64_t k = 0; k < columns; ++k) {
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
      const F value = set1(x.f32[(tile.row + r) * x.stride + k]);
#pragma GCC unroll 8
      for (int v = 0; v < 2 * kVectors; ++v) sums[r][v] = fma(value, lines[v], sums[r][v]);
    }
  }
}

// --- what becomes of a sum ------------------------------------------------------------------------------------------

// The sum's 16 columns from column n on: scaled, with bias.
OCTAVO_INLINE F finished(const LinearArgs& args, float factor, F sum, std::int64_t n, std::int64_t some) {
  F y = sum * set1(factor);
  if (args.bias != nullptr) y += load_some(args.bias + n, some);
  return y;
}

OCTAVO_INLINE void put(const LinearArgs& args, std::int64_t row, std::int64_t n, F y, std::int64_t some) {
  if (args.residual != nullptr) y += load_some(args.residual + row * args.residual_stride + n, some);
  store_some(args.out + row * args.out_stride + n, y, some);
}

template <int R>
OCTAVO_INLINE void finish(const Tile& tile, const Sums<R>& sums) {
  const LinearArgs& args = *tile.args;
  const Segment& segment = *tile.segment;
  const float factor = segment.factor;
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      const std::int64_t n = tile.panels[0] * kPanel + v * W;
      const std::int64_t m = tile.panels[1] * kPanel + v * W;
      const std::int64_t some_n = most<std::int64_t>(least<std::int64_t>(W, segment.rows - n), 0);
      const std::int64_t some_m = most<std::int64_t>(least<std::int64_t>(W, segment.rows - m), 0);
      const F a = finished(args, factor, sums[r][v], segment.first_row + n, some_n);
      const F b = finished(args, factor, sums[r][v + kVectors], segment.first_row + m, some_m);
      if (args.gated) {
        put(args, tile.row + r, n, activate(args.activation, a) * b, some_n);
      } else {
        put(args, tile.row + r, segment.first_row + n, a, some_n);
        put(args, tile.row + r, segment.first_row + m, b, some_m);
      }
    }
  }
}

// --- from tiles to the whole ----------------------------------------------------------------------------------------

template <Format format, int R>
void whole_tile(const Tile& tile) {
  Sums<R> sums = {};
  if constexpr (format == Format::q4 || format == Format::q8) {
    add_packed<format, R>(tile, sums);
  } else if constexpr (format == Format::bf16) {
    add_bf16<R>(tile, sums);
  } else {
    add_float<format, R>(tile, sums);
  }
  finish<R>(tile, sums);
}

// A tile's part of one run of unpacked groups; sums wait in `kept` [R][2 * kPanel] from run to run.
template <int R>
void unpacked_tile(const Tile& tile, const Group* group, std::int64_t first, std::int64_t last, float* kept,
                   Ahead& ahead) {
  Sums<R> sums = {};
  if (first > 0) {
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < 2 * kVectors; ++v) sums[r][v] = load(kept + (r * 2 * kVectors + v) * W);
  }
  add_unpacked<R>(tile, group, first, last, sums, ahead);
  if (last == tile.args->weight->columns / kGroup) {
    finish<R>(tile, sums);
    return;
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < 2 * kVectors; ++v) store(kept + (r * 2 * kVectors + v) * W, sums[r][v]);
}

template <int R, class Call>
OCTAVO_INLINE void with_rows(int rows, const Call& call) {
  if constexpr (R > 1) {
    if (rows < R) return with_rows<R - 1>(rows, call);
  }
  call.template operator()<R>();
}

// Calls for tiles of up to `Most` rows, as equal as can be, that cover [begin, end).
template <int Most, class Call>
OCTAVO_INLINE void in_tiles(std::int64_t begin, std::int64_t end, const Call& call) {
  const std::int64_t tiles = (end - begin + Most - 1) / Most;
  std::int64_t row = begin;
  for (std::int64_t t = 0; t < tiles; ++t) {
    const std::int64_t next = begin + (end - begin) * (t + 1) / tiles;
    with_rows<Most>(static_cast<int>(next - row), [&]<int R>() { call.template operator()<R>(row); });
    row = next;
  }
}

template <Format format>
void rows_of_pair(Tile tile, std::int64_t begin, std::int64_t end) {
  constexpr int kMost = format == Format::q4 || format == Format::q8 ? kQuantisedRows : kFloatRows;
  in_tiles<kMost>(begin, end, [&]<int R>(std::int64_t row) {
    tile.row = row;
    whole_tile<format, R>(tile);
  });
}

#if defined(OCTAVO_AMX)
// Many rows: runs of unpacked groups, on tiles. Bit for bit what add_packed makes of them.
template <Format format>
void many_rows_of_pair(Tile tile, std::int64_t begin, std::int64_t end) {
  Group unpacked[kUnpackGroups];
  alignas(64) F sums[kRowBlock][2];
  alignas(64) std::int32_t dots[2][kTileRows][kPanel];
  const std::int64_t groups = tile.args->weight->columns / kGroup;
  const Tiles tiles(tile_config(end - begin, kGroup, 8));
  std::memset(sums, 0, sizeof sums);
  for (std::int64_t first = 0; first < groups; first += kUnpackGroups) {
    const std::int64_t last = least(groups, first + kUnpackGroups);
    unpack<format>(tile, first, last, unpacked);
    for (std::int64_t row = begin; row < end; row += kTileRows) {
      const std::int64_t rows = least<std::int64_t>(kTileRows, end - row);
      for (std::int64_t g = first; g < last; ++g) {
        const Group& group = unpacked[g - first];
        const Q8* x = tile.args->x.q8 + row * groups + g;
        tile_dots(rows == kTileRows, x, groups * static_cast<std::int64_t>(sizeof(Q8)), &group.lines[0][0],
                  &group.lines[0][1], sizeof group.lines[0], dots[0][0]);
        for (std::int64_t r = 0; r < rows; ++r) {
          F(&sum)[2] = sums[row - begin + r];
          for (int p = 0; p < 2; ++p) {
            sum[p] = scaled(sum[p], load(dots[p][r]), group.scale[p], group.minimum[p], x[r * groups]);
          }
        }
      }
    }
  }
  for (tile.row = begin; tile.row < end; ++tile.row) {
    finish<1>(tile, reinterpret_cast<const Sums<1>&>(sums[tile.row - begin]));
  }
}

inline void bf16_rows_of_pair(Tile tile, std::int64_t begin, std::int64_t end) {
  alignas(64) float sums[2][kTileRows][kPanel];
  const Forms& x = tile.args->x;
  const Tiles tiles(tile_config(end - begin, 64, 16));
  for (std::int64_t row = begin; row < end; row += kTileRows) {
    const std::int64_t rows = least<std::int64_t>(kTileRows, end - row);
    tile_bf16(rows == kTileRows, x.bf16 + row * x.bf16_stride, x.bf16_stride, tile.segment->panel(tile.panels[0]),
              tile.segment->panel(tile.panels[1]), sums[0][0]);
    for (std::int64_t r = 0; r < rows; ++r) {
      tile.row = row + r;
      finish<1>(tile, {{load(sums[0][r]), load(sums[1][r])}});
    }
  }
}

#else

// Many rows: runs of unpacked groups. Bit for bit what add_packed makes of them.
template <Format format>
void many_rows_of_pair(Tile tile, std::int64_t begin, std::int64_t end) {
  Group unpacked[kUnpackGroups];
  alignas(64) float kept[kRowBlock * 2 * kPanel];
  Ahead ahead(tile);
  const std::int64_t groups = tile.args->weight->columns / kGroup;
  for (std::int64_t first = 0; first < groups; first += kUnpackGroups) {
    const std::int64_t last = least(groups, first + kUnpackGroups);
    unpack<format>(tile, first, last, unpacked);
    in_tiles<kQuantisedRows>(begin, end, [&]<int R>(std::int64_t row) {
      tile.row = row;
      unpacked_tile<R>(tile, unpacked, first, last, kept + (row - begin) * 2 * kPanel, ahead);
    });
  }
}

inline void bf16_rows_of_pair(const Tile& tile, std::int64_t begin, std::int64_t end) {
  rows_of_pair<Format::bf16>(tile, begin, end);
}
#endif

inline void rows_of_pair(const Tile& tile, std::int64_t begin, std::int64_t end) {
  const bool many = end - begin >= kUnpackRows;
  switch (tile.segment->format) {
    case Format::q4:
      return many ? many_rows_of_pair<Format::q4>(tile, begin, end) : rows_of_pair<Format::q4>(tile, begin, end);
    case Format::q8:
      return many ? many_rows_of_pair<Format::q8>(tile, begin, end) : rows_of_pair<Format::q8>(tile, begin, end);
    case Format::bf16: return bf16_rows_of_pair(tile, begin, end);
    case Format::f16: return rows_of_pair<Format::f16>(tile, begin, end);
    case Format::f32: return rows_of_pair<Format::f32>(tile, begin, end);
  }
}

// The pair of panels that is piece i of a product: neighbours, or where `gated` column p with column p + N / 2.
inline void place(const LinearArgs& args, std::int64_t pair, const Segment*& segment, std::int64_t (&panels)[2]) {
  segment = args.weight->first_segment();
  while (pair >= segment->panels / 2) pair -= segment++->panels / 2;
  panels[0] = args.gated ? pair : 2 * pair;
  panels[1] = args.gated ? pair + segment->rows / (2 * kPanel) : 2 * pair + 1;
}

// Pairs of panels are claimed, a few at a time where they are small beside the cost of a claim.
inline void linear(const LinearArgs& args, Team& team, int) {
  const Weight& weight = *args.weight;
  const Segment* segment = weight.first_segment();
  std::int64_t pairs = 0;
  for (int s = 0; s < weight.num_segments(); ++s) pairs += segment[s].panels / 2;
  const std::int64_t items = pairs * ((args.rows + kRowBlock - 1) / kRowBlock);
  const std::int64_t work = static_cast<std::int64_t>(2 * segment->panel_bytes) * args.rows;
  const std::int64_t fair = most<std::int64_t>(1, items / (4 * team.size()));
  const std::int64_t step = most<std::int64_t>(1, least(fair, (64 << 10) / most<std::int64_t>(work, 1)));
  for (std::int64_t item = team.claim(step); item < items; item = team.claim(step)) {
    for (std::int64_t i = item; i < least(item + step, items); ++i) {
      const std::int64_t begin = i / pairs * kRowBlock, end = least(args.rows, begin + kRowBlock);
      // Threads claim in turn, more or less.
      const std::int64_t guess = i + 1 < item + step ? i + 1 : item + team.size() * step;
      Tile tile{&args, nullptr, {}, {}, begin};
      place(args, least(guess, items - 1) % pairs, tile.segment, tile.next);
      const Segment* const after = tile.segment;
      place(args, i % pairs, tile.segment, tile.panels);
      if (after != tile.segment) std::memcpy(tile.next, tile.panels, sizeof tile.next);
      rows_of_pair(tile, begin, end);
    }
  }
}

}  // namespace octavo::OCTAVO_ISA
