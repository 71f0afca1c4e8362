// What happens to rows between products: embedding, norms, elementwise functions, and conversion to the forms wanted.
//
// A row is worked on in pieces of 32 columns, which is also the group of int8 activations. Knows no other row.
#pragma once
#include "activation.hpp"
#include "kernels.hpp"
#include "simd.hpp"
#include "weight.hpp"

namespace octavo::OCTAVO_ISA {

constexpr int kPieceVectors = kGroup / W;

struct Piece {
  F v[kPieceVectors];
};

// n columns (1 to 32); the others are 0.
OCTAVO_INLINE Piece load_piece(const float* p, std::int64_t n) {
  Piece x;
  for (int v = 0; v < kPieceVectors; ++v) {
    const std::int64_t some = n - v * W;
    x.v[v] = some >= W ? load(p + v * W) : load_some(p + v * W, most<std::int64_t>(some, 0));
  }
  return x;
}

OCTAVO_INLINE void store_piece(float* p, const Piece& x, std::int64_t n) {
  for (int v = 0; v < kPieceVectors; ++v) {
    const std::int64_t some = n - v * W;
    if (some >= W) {
      store(p + v * W, x.v[v]);
    } else {
      store_some(p + v * W, x.v[v], most<std::int64_t>(some, 0));
    }
  }
}

// --- forms ----------------------------------------------------------------------------------------------------------

// x = q8 * scale with |q8| <= 127. What is not a number, or infinite, makes the scale so, and all that is computed of it:
// as integers, the bits of an infinite size are above those of all numbers, and a NaN's above them.
OCTAVO_INLINE void quantise(const Piece& x, Q8& to) {
  I largest = {};
  for (const F& v : x.v) {
    const I size = as_int(abs(v));
    largest = largest > size ? largest : size;
  }
  const std::int32_t bits = reduce_max(largest);
  float peak;
  std::memcpy(&peak, &bits, 4);
  const float inverse = peak > 0 ? 127.0f / peak : 0.0f;
  to.scale = peak / 127.0f;
  I count = {};
  for (int v = 0; v < kPieceVectors; ++v) {
    const I whole = round_to_int(x.v[v] * set1(inverse));
    using B = std::int8_t __attribute__((vector_size(W)));
    store_as(to.q + v * W, __builtin_convertvector(whole, B));
    count += whole;
  }
  to.sum = reduce_add(to_float(count));
}

OCTAVO_INLINE void put_bf16(const Piece& x, std::uint16_t* to) {
  for (int v = 0; v < kPieceVectors; ++v) store_as(to + v * W, to_bf16(x.v[v]));
}

// Columns [column, column + n) of a row of `columns`, in all the forms wanted but float32.
OCTAVO_INLINE void convert_piece(const Forms& out, std::int64_t columns, std::int64_t row, std::int64_t column,
                                 const Piece& x) {
  if (out.q8 != nullptr) quantise(x, out.q8[(row * columns + column) / kGroup]);
  if (out.bf16 != nullptr) put_bf16(x, out.bf16 + row * out.bf16_stride + column);
}

OCTAVO_INLINE void put_piece(const Forms& out, std::int64_t columns, std::int64_t row, std::int64_t column,
                             std::int64_t n, const Piece& x) {
  if (out.f32 != nullptr) store_piece(out.f32 + row * out.stride + column, x, n);
  convert_piece(out, columns, row, column, x);
}

inline void convert(const Forms& x, std::int64_t columns, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    for (std::int64_t column = 0; column < columns; column += kGroup) {
      const std::int64_t n = least<std::int64_t>(kGroup, columns - column);
      convert_piece(x, columns, row, column, load_piece(x.f32 + row * x.stride + column, n));
    }
  }
}

// --- embedding ------------------------------------------------------------------------------------------------------

OCTAVO_INLINE float f16_to_float(std::uint16_t h) {
  std::uint16_t lanes_of[W] = {h};
  return load_f16(lanes_of)[0];
}

inline float element(const Segment& segment, const std::uint8_t* panel, std::int64_t lane, std::int64_t k) {
  if (segment.format == Format::f32) {
    float x;
    std::memcpy(&x, panel + 64 * k + 4 * lane, 4);
    return x;
  }
  std::uint16_t half;
  if (segment.format == Format::f16) {
    std::memcpy(&half, panel + 32 * k + 2 * lane, 2);
    return f16_to_float(half);
  }
  std::memcpy(&half, panel + k / 2 * 64 + 4 * lane + 2 * (k % 2), 2);
  return bf16_to_float(half);
}

// A group of a quantised row, as the numbers that its scale is multiplied with.
inline void unpack(const Segment& segment, const std::uint8_t* panel, std::int64_t lane, std::int64_t g,
                   std::uint8_t (&q)[kGroup]) {
  const bool nibbles = segment.format == Format::q4;
  const std::uint8_t* const lines = panel + g * (nibbles ? 256 : 512) + 4 * lane;
  for (int line = 0; line < (nibbles ? 4 : 8); ++line) std::memcpy(q + 4 * line, lines + 64 * line, 4);
  if (!nibbles) return;
  for (int k = 0; k < kGroup / 2; ++k) {
    q[k + kGroup / 2] = q[k] >> 4;
    q[k] &= 15;
  }
}

inline void embed(const EmbedArgs& args, std::int64_t begin, std::int64_t end) {
  const std::int64_t groups = args.columns / kGroup;
  for (std::int64_t row = begin; row < end; ++row) {
    std::int64_t id = args.ids[row];
    const Segment* at = args.weight->first_segment();
    while (id >= at->rows) id -= at++->rows;
    const Segment segment = *at;
    const std::uint8_t* const panel = segment.panel(id / kPanel);
    const std::int64_t lane = id % kPanel;
    float* const to = args.out.f32 + row * args.out.stride;
    if (segment.format != Format::q4 && segment.format != Format::q8) {
      for (std::int64_t k = 0; k < args.columns; ++k) to[k] = args.factor * element(segment, panel, lane, k);
      continue;
    }
    const std::uint8_t* const scales = panel + groups * (segment.format == Format::q4 ? 256 : 512) + 2 * lane;
    for (std::int64_t g = 0; g < groups; ++g) {
      std::uint16_t scale, minimum;
      std::memcpy(&scale, scales + g * 32, 2);
      std::memcpy(&minimum, scales + (segment.has_min ? groups + g : g) * 32, 2);
      const float step = f16_to_float(scale), lowest = segment.has_min ? f16_to_float(minimum) : 0.0f;
      std::uint8_t q[kGroup];
      unpack(segment, panel, lane, g, q);
      for (int k = 0; k < kGroup; ++k) {
        const float x = step * static_cast<float>(q[k] - segment.zero_point) + lowest;
        to[g * kGroup + k] = args.factor * (segment.factor * x);
      }
    }
  }
}

// --- norms ----------------------------------------------------------------------------------------------------------

struct Moments {
  float shift, scale;  // y = (x - shift) * scale
};

inline Moments moments(const NormArgs& args, const float* x) {
  const std::int64_t n = args.group;
  float mean = 0;
  if (args.bias != nullptr) {
    F sum = {};
    for (std::int64_t k = 0; k < n; k += W) sum += n - k >= W ? load(x + k) : load_some(x + k, n - k);
    mean = reduce_add(sum) / static_cast<float>(n);
  }
  F squares = {};
  for (std::int64_t k = 0; k < n; k += W) {
    const F centred = n - k >= W ? load(x + k) - set1(mean) : load_some(x + k, n - k) - set1(mean);
    const F inside = lanes() < set1(static_cast<std::int32_t>(least<std::int64_t>(n - k, W))) ? centred : F{};
    squares = fma(inside, inside, squares);
  }
  return {mean, 1.0f / __builtin_sqrtf(reduce_add(squares) / static_cast<float>(n) + args.eps)};
}

inline void norm(const NormArgs& args, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    for (std::int64_t start = 0; start < args.columns; start += args.group) {
      const float* x = args.x + row * args.x_stride + start;
      const Moments by = moments(args, x);
      for (std::int64_t k = 0; k < args.group; k += kGroup) {
        const std::int64_t n = least<std::int64_t>(kGroup, args.group - k);
        Piece y = load_piece(x + k, n);
        const Piece weight = load_piece(args.weight + k, n);
        for (int v = 0; v < kPieceVectors; ++v) y.v[v] = (y.v[v] - set1(by.shift)) * set1(by.scale) * weight.v[v];
        if (args.bias != nullptr) {
          const Piece bias = load_piece(args.bias + k, n);
          for (int v = 0; v < kPieceVectors; ++v) y.v[v] += bias.v[v];
        }
        if (args.residual != nullptr) {
          const Piece other = load_piece(args.residual + row * args.residual_stride + start + k, n);
          for (int v = 0; v < kPieceVectors; ++v) y.v[v] += other.v[v];
        }
        put_piece(args.out, args.columns, row, start + k, n, y);
      }
    }
  }
}

// --- elementwise ----------------------------------------------------------------------------------------------------

OCTAVO_INLINE F mapped(const MapArgs& args, F x, F y) {
  switch (args.kind) {
    case MapArgs::Kind::add: return x + y;
    case MapArgs::Kind::scale: return x * set1(args.number);
    case MapArgs::Kind::softcap: return tanh(x / set1(args.number)) * set1(args.number);
    case MapArgs::Kind::activate: return activate(args.activation, x);
    case MapArgs::Kind::gated: return activate(args.activation, x) * y;
    default: return x;
  }
}

inline void map(const MapArgs& args, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    const std::int64_t source = args.rows == nullptr ? row : args.rows[row];
    const float* x = args.x + source * args.x_stride;
    const float* y = args.kind == MapArgs::Kind::add     ? args.y + row * args.y_stride
                     : args.kind == MapArgs::Kind::gated ? x + args.columns
                                                         : nullptr;
    for (std::int64_t k = 0; k < args.columns; k += kGroup) {
      const std::int64_t n = least<std::int64_t>(kGroup, args.columns - k);
      Piece piece = load_piece(x + k, n);
      const Piece other = y == nullptr ? Piece{} : load_piece(y + k, n);
      for (int v = 0; v < kPieceVectors; ++v) {
        const F value = mapped(args, piece.v[v], other.v[v]);
        const std::int32_t inside = static_cast<std::int32_t>(least<std::int64_t>(most<std::int64_t>(n - v * W, 0), W));
        piece.v[v] = lanes() < set1(inside) ? value : F{};  // gelu(0) and the like may differ from 0: pads stay 0
      }
      put_piece(args.out, args.columns, row, k, n, piece);
    }
  }
}

}  // namespace octavo::OCTAVO_ISA
