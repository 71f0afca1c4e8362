// Tiles of AMX: 16 rows of activations times 16 columns of a weight by one instruction (Intel 64 manual, volume 1, ch. 18).
//
// With OCTAVO_EMULATE_AMX the tile instructions are computed in plain code, so that the tests reach this file on any
// processor. A product's integers are exact, so int8 rows get the bits of the kernels without tiles; bf16 rows always
// come here where there is AMX, whose order of summation is its own. Knows tiles; what is summed when, linear.hpp decides.
#pragma once
#include "kernels.hpp"
#include "simd.hpp"

namespace octavo::OCTAVO_ISA {
#if (defined(__AMX_INT8__) && defined(__AMX_BF16__)) || defined(OCTAVO_EMULATE_AMX)
#define OCTAVO_AMX
constexpr bool kTiles = true;
#else
constexpr bool kTiles = false;
#endif
}  // namespace octavo::OCTAVO_ISA

#if defined(OCTAVO_AMX)
namespace octavo::OCTAVO_ISA {

constexpr int kTileRows = 16;

// The layout of LDTILECFG's operand.
struct TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

// Tiles 0 and 1 are sums, 2 is of activations, for 16 rows; 3, 4 and 5 are the same for the rows that are left over.
// 6 and 7 are of weights, one for each panel.
OCTAVO_INLINE TileConfig tile_config(std::int64_t rows, int activation_bytes, int weight_rows) {
  TileConfig config;
  const auto rest = static_cast<std::uint8_t>(rows % kTileRows ? rows % kTileRows : kTileRows);
  for (int tile = 0; tile < 6; ++tile) {
    config.row_bytes[tile] = static_cast<std::uint16_t>(tile % 3 == 2 ? activation_bytes : 64);
    config.rows[tile] = tile < 3 ? static_cast<std::uint8_t>(kTileRows) : rest;
  }
  for (int tile = 6; tile < 8; ++tile) {
    config.row_bytes[tile] = 64;
    config.rows[tile] = static_cast<std::uint8_t>(weight_rows);
  }
  return config;
}

#if !defined(OCTAVO_EMULATE_AMX)

// Loaded by every thread: tiles are registers. Released at the end, so that the system need not save them.
class Tiles {
 public:
  explicit Tiles(const TileConfig& config) { _tile_loadconfig(&config); }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

#define OCTAVO_TILE_ZERO(tile) _tile_zero(tile)
#define OCTAVO_TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define OCTAVO_TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define OCTAVO_TILE_DOT_S8U8(sum, a, b) _tile_dpbsud(sum, a, b)
#define OCTAVO_TILE_DOT_BF16(sum, a, b) _tile_dpbf16ps(sum, a, b)

#else

class Tiles {
 public:
  explicit Tiles(const TileConfig& config) { config_ = config; }
  ~Tiles() = default;
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  static void zero(int tile) { std::memset(bytes_[tile], 0, sizeof bytes_[tile]); }
  static void load(int tile, const void* from, std::int64_t stride) {
    zero(tile);
    for (int r = 0; r < config_.rows[tile]; ++r)
      std::memcpy(bytes_[tile][r], static_cast<const std::uint8_t*>(from) + r * stride, config_.row_bytes[tile]);
  }
  static void store(int tile, void* to, std::int64_t stride) {
    for (int r = 0; r < config_.rows[tile]; ++r)
      std::memcpy(static_cast<std::uint8_t*>(to) + r * stride, bytes_[tile][r], config_.row_bytes[tile]);
  }
  // sum[m][n] += the products that `dot` makes of four bytes of a and of b.
  template <class T, class Dot>
  static void multiply(int sum, int a, int b, const Dot& dot) {
    for (int m = 0; m < config_.rows[sum]; ++m) {
      for (int k = 0; k < config_.row_bytes[a] / 4; ++k) {
        for (int n = 0; n < 16; ++n) {
          T total;
          std::memcpy(&total, bytes_[sum][m] + 4 * n, 4);
          total = dot(total, bytes_[a][m] + 4 * k, bytes_[b][k] + 4 * n);
          std::memcpy(bytes_[sum][m] + 4 * n, &total, 4);
        }
      }
    }
  }
  static std::int32_t dot_s8u8(std::int32_t sum, const std::uint8_t* a, const std::uint8_t* b) {
    for (int i = 0; i < 4; ++i) sum += static_cast<std::int8_t>(a[i]) * b[i];
    return sum;
  }
  static float dot_bf16(float sum, const std::uint8_t* a, const std::uint8_t* b) {
    for (int i = 0; i < 2; ++i) {
      std::uint16_t x, y;
      std::memcpy(&x, a + 2 * i, 2);
      std::memcpy(&y, b + 2 * i, 2);
      sum += bf16_to_float(x) * bf16_to_float(y);
    }
    return sum;
  }

 private:
  static inline thread_local TileConfig config_;
  alignas(64) static inline thread_local std::uint8_t bytes_[8][16][64];
};

#define OCTAVO_TILE_ZERO(tile) Tiles::zero(tile)
#define OCTAVO_TILE_LOAD(tile, from, stride) Tiles::load(tile, from, stride)
#define OCTAVO_TILE_STORE(tile, to, stride) Tiles::store(tile, to, stride)
#define OCTAVO_TILE_DOT_S8U8(sum, a, b) Tiles::multiply<std::int32_t>(sum, a, b, Tiles::dot_s8u8)
#define OCTAVO_TILE_DOT_BF16(sum, a, b) Tiles::multiply<float>(sum, a, b, Tiles::dot_bf16)

#endif

// The integer sums of a group of 32 columns: up to 16 rows of Q8 with two panels, whose eight lines lie `line_stride`
// bytes apart. `dots` is [2][16][16].
// A tile's number is part of the instruction, so that whole and partial rows have to be spelled out.
OCTAVO_INLINE void tile_dots(bool whole, const Q8* x, std::int64_t x_stride, const void* a, const void* b,
                             std::int64_t line_stride, std::int32_t* dots) {
  OCTAVO_TILE_LOAD(6, a, line_stride);
  OCTAVO_TILE_LOAD(7, b, line_stride);
  if (whole) {
    OCTAVO_TILE_ZERO(0);
    OCTAVO_TILE_ZERO(1);
    OCTAVO_TILE_LOAD(2, x->q, x_stride);
    OCTAVO_TILE_DOT_S8U8(0, 2, 6);
    OCTAVO_TILE_DOT_S8U8(1, 2, 7);
    OCTAVO_TILE_STORE(0, dots, 64);
    OCTAVO_TILE_STORE(1, dots + 256, 64);
  } else {
    OCTAVO_TILE_ZERO(3);
    OCTAVO_TILE_ZERO(4);
    OCTAVO_TILE_LOAD(5, x->q, x_stride);
    OCTAVO_TILE_DOT_S8U8(3, 5, 6);
    OCTAVO_TILE_DOT_S8U8(4, 5, 7);
    OCTAVO_TILE_STORE(3, dots, 64);
    OCTAVO_TILE_STORE(4, dots + 256, 64);
  }
}

// Whole sums: up to 16 rows of bf16 with two panels of bf16 weights, over `columns`, a multiple of 32.
// `sums` is [2][16][16].
OCTAVO_INLINE void tile_bf16(bool whole, const std::uint16_t* x, std::int64_t columns, const std::uint8_t* a,
                             const std::uint8_t* b, float* sums) {
  if (whole) {
    OCTAVO_TILE_ZERO(0);
    OCTAVO_TILE_ZERO(1);
  } else {
    OCTAVO_TILE_ZERO(3);
    OCTAVO_TILE_ZERO(4);
  }
  for (std::int64_t k = 0; k < columns; k += 32) {
    OCTAVO_TILE_LOAD(6, a + 32 * k, 64);
    OCTAVO_TILE_LOAD(7, b + 32 * k, 64);
    if (whole) {
      OCTAVO_TILE_LOAD(2, x + k, 2 * columns);
      OCTAVO_TILE_DOT_BF16(0, 2, 6);
      OCTAVO_TILE_DOT_BF16(1, 2, 7);
    } else {
      OCTAVO_TILE_LOAD(5, x + k, 2 * columns);
      OCTAVO_TILE_DOT_BF16(3, 5, 6);
      OCTAVO_TILE_DOT_BF16(4, 5, 7);
    }
  }
  if (whole) {
    OCTAVO_TILE_STORE(0, sums, 64);
    OCTAVO_TILE_STORE(1, sums + 256, 64);
  } else {
    OCTAVO_TILE_STORE(3, sums, 64);
    OCTAVO_TILE_STORE(4, sums + 256, 64);
  }
}

}  // namespace octavo::OCTAVO_ISA
#endif
