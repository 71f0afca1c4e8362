// Paged attention for one instruction set: rotate, write keys and values to their blocks, attend over block tables.
// Included by kernels.cpp and tests only. Knows blocks and the step's plan; no model, and not how works were dealt out.
//
// Keys and values lie in blocks anywhere in memory (PagedAttention: Kwon et al. 2023, arXiv:2309.06180) and are read
// where they lie: the inside of a block is ordered for the two products. Scores are never all in memory: a partition's
// are turned into a part (highest score, sum of weights, weighted values), and parts are merged by rescaling
// (online softmax: Milakov & Gimelshein 2018, arXiv:1805.02867; FlashAttention: Dao et al. 2022, arXiv:2205.14135).
//
// Every number is one chain of operations that depends on the query, its keys and their places in the context alone:
// a product is summed dimension by dimension or token by token, or pair by pair, in one lane, hidden keys add exactly 0,
// and lanes are added in a fixed order. So a result has the same bits in any batch, chunk, tile and team.
#pragma once
#include "kernels.hpp"
#include "plan.hpp"
#include "simd.hpp"

namespace octavo::OCTAVO_ISA {
namespace attend {

constexpr int kChunk = W;                     // tokens that are looked at in one vector
constexpr int kChunks = kPartition / kChunk;  // of a partition
constexpr int kRows = 6;                      // query rows and
static_assert(kSegment % kRows == 0);         // groups of so many, stand-ins included, fit where a segment does
constexpr int kColumns = W == 16 ? 4 : 2;     // vectors beside each other whose products stay in registers
constexpr int kTile = kColumns * W;           // tokens, or dimensions, of a product
constexpr int kPitch = kPartition + W;        // floats from one row's scores to the next: not a multiple of a page
constexpr int kManyRows = 2 * kRows;          // from so many on, keys are widened once for all rows
constexpr float kLowest = -1e30f;             // below any score, yet finite, so that differences are numbers
template <class Stored>
alignas(64) constexpr Stored kZeros[kMaxHeadDim] = {};

constexpr OCTAVO_INLINE std::int64_t whole_vectors(std::int64_t n) { return (n + W - 1) / W * W; }

OCTAVO_INLINE F load_up_to(const float* p, std::int64_t n) { return n >= W ? load(p) : load_some(p, n); }
OCTAVO_INLINE void store_up_to(float* p, F v, std::int64_t n) {
  if (n >= W)
    store(p, v);
  else
    store_some(p, v, n);
}

// --- element types --------------------------------------------------------------------------------------------------
// What a block holds, `step` of them in a lane. Of floats a product takes `parts` of the step, each with a factor of a
// query or a weight, where float32s lie; or where those are rounded as the block's are (`rounds`), the bytes of some.

// Products of float32. On Intel's cores they are faster than the dot products of bf16 pairs, and exact.
struct Widened {
  static constexpr bool scaled = false, rounds = false;
  static OCTAVO_INLINE F product(F sum, F part, const float* factor) { return fma(set1(*factor), part, sum); }
};

#if defined(__AVX512BF16__)
struct Bf16Products {
  static constexpr bool scaled = false, rounds = true;
  static constexpr int parts = 1;
  static OCTAVO_INLINE I part(const std::uint16_t* p, int) { return load_as<I>(p); }
  static OCTAVO_INLINE F product(F sum, I part, const float* factor) {
    return dot_bf16(sum, set1(load_as<std::int32_t>(factor)), part);
  }
};
#else
struct Bf16Products : Widened {
  static constexpr int parts = 2;
  static OCTAVO_INLINE F part(const std::uint16_t* p, int i) {
    const I pairs = load_as<I>(p);
    return as_float(i == 0 ? pairs << 16 : pairs & set1(static_cast<std::int32_t>(0xffff0000)));
  }
};
#endif

struct Bf16 : Bf16Products {
  using Stored = std::uint16_t;
  static constexpr std::int32_t beyond = 0x7f7f8000;  // bits of the least number that is rounded to infinity
  static constexpr int step = 2;
  static OCTAVO_INLINE void put(Stored* p, F x) { store_as(p, to_bf16(x)); }
};

struct F16 : Widened {
  static constexpr int parts = 1;
  using Stored = std::uint16_t;
  static constexpr std::int32_t beyond = 0x477ff000;
  static constexpr int step = 1;
  static OCTAVO_INLINE F part(const Stored* p, int) { return load_f16(p); }
  static OCTAVO_INLINE void put(Stored* p, F x) { store_as(p, to_f16(x)); }
};

struct F32 : Widened {
  static constexpr int parts = 1;
  using Stored = float;
  static constexpr std::int32_t beyond = 0x7f800000;
  static constexpr int step = 1;
  static OCTAVO_INLINE F part(const Stored* p, int) { return load(p); }
  static OCTAVO_INLINE void put(Stored* p, F x) { store(p, x); }
};

// Bytes and a float32 for each token's key or value of a head: x = q * scale, |q| <= 127. Keys are kept as q + 128, as
// the dot products of bytes want one side without a sign; queries are rounded likewise, weights to a byte too. Keys and
// queries are mixed before they are rounded.
struct Int8 {
  using Stored = std::uint8_t;
  static constexpr bool scaled = true, rounds = true;
  static constexpr int step = 4;
};

// The bits of a row's largest magnitude: NaN is above all.
OCTAVO_INLINE std::int32_t top_of(const float* x, std::int64_t n) {
  I largest = {};
#pragma GCC unroll 8
  for (std::int64_t i = 0; i < n; i += W) {
    const I bits = as_int(abs(load_up_to(x + i, n - i)));
    largest = bits > largest ? bits : largest;
  }
  return reduce_max(largest);
}

// What a row of n values is divided by to be at most 127; a row of next to nothing becomes zeros. NaN stays NaN.
struct Step {
  float scale, inverse;
};
OCTAVO_INLINE Step step_of(const float* x, std::int64_t n) {
  const std::int32_t top = top_of(x, n);
  float size;
  std::memcpy(&size, &top, sizeof size);
  if (size <= 1e-20f) return {1.0f, 0.0f};
  return {size / 127.0f, 127.0f / size};
}
OCTAVO_INLINE I to_steps(F x, const Step& step) { return round_to_int(x * set1(step.inverse)); }

// Mixes dimensions: the Walsh-Hadamard transform of each run of as many as the largest power of two that divides D, not
// normalised, so that the product of two mixed rows is `mixed(D)` times what it was. A key's few large dimensions, which
// would leave its bytes little for all others, are spread over all (QuaRot: Ashkboos et al. 2024, arXiv:2404.00456):
// the divergence that rounding keys and queries causes becomes a fourth. `x` has whole vectors, zeros from D on.
OCTAVO_INLINE std::int64_t mixed(std::int64_t dim) { return dim & -dim; }
OCTAVO_INLINE void mix(float* x, std::int64_t dim) {
  const std::int64_t run = mixed(dim);
#pragma GCC unroll 8
  for (std::int64_t i = 0; i < dim; i += W) {
    F v = load(x + i);
#pragma GCC unroll 4
    for (int far = 1; far < W; far *= 2) {
      if (far < run) v = fma(v, ((lanes() & far) == 0) ? set1(1.0f) : set1(-1.0f), across(v, far));
    }
    store(x + i, v);
  }
#pragma GCC unroll 4
  for (std::int64_t far = W; far < run; far *= 2)
#pragma GCC unroll 8
    for (std::int64_t i = 0; i < dim; i += 2 * far)
#pragma GCC unroll 8
      for (std::int64_t j = i; j < i + far; j += W) {
        const F left = load(x + j), right = load(x + j + far);
        store(x + j, left + right);
        store(x + j + far, left - right);
      }
}

// --- the inside of a block ------------------------------------------------------------------------------------------
// Of a layer, head, and key or value, a block holds block_size * D elements, and then scales, if any, of its tokens.
// Where both fill whole vectors:
//   keys   [D / step][block_size][step]: a vector is a chunk of tokens, for `step` dimensions
//   values [block_size / step][D][step]: a vector is a run of dimensions, for `step` tokens
// Otherwise both are [block_size][D], and chunks are gathered into the form above, padded, before they are read.

template <class T>
struct Layout {
  typename T::Stored* data;
  std::int64_t layer, num_layers, num_kv_heads, size, dim;
  bool in_place;

  explicit OCTAVO_INLINE Layout(const AttentionArgs& a)
      : data(static_cast<typename T::Stored*>(a.cache.data)),
        layer(a.layer),
        num_layers(a.cache.num_layers),
        num_kv_heads(a.num_kv_heads),
        size(a.cache.block_size),
        dim(a.head_dim),
        in_place(size % kChunk == 0 && dim % W == 0) {}

  OCTAVO_INLINE typename T::Stored* keys(std::int64_t block, std::int64_t head) const {
    return data + ((block * num_layers + layer) * 2 * num_kv_heads + head) * head_elements();
  }
  OCTAVO_INLINE typename T::Stored* values(std::int64_t block, std::int64_t head) const {
    return keys(block, head) + num_kv_heads * head_elements();
  }
  // Where a token's scale lies beside keys or values.
  OCTAVO_INLINE typename T::Stored* scale(typename T::Stored* head_data, std::int64_t offset) const {
    return head_data + size * dim + offset * static_cast<std::int64_t>(sizeof(float));
  }
  OCTAVO_INLINE std::int64_t head_elements() const {
    return size * (dim + (T::scaled ? static_cast<std::int64_t>(sizeof(float)) : 0));
  }
  OCTAVO_INLINE std::int64_t wide() const { return whole_vectors(dim); }  // dimensions of a query or gathered key
};

// --- writing keys and values ----------------------------------------------------------------------------------------

// Of a token: its place in the plan's tables.
OCTAVO_INLINE Rotation rotation_of(const AttentionArgs& a, std::int64_t token) {
  if (a.rope < 0) return {nullptr, nullptr, 0};
  const Rotation& all = a.plan->rotations[a.rope];
  return {all.cos + token * all.half, all.sin + token * all.half, all.half};
}

// Turns dimension i with dimension i + half; those from 2 * half on stay (RoFormer: Su et al. 2021, arXiv:2104.09864).
// `out` ends in zeros up to a whole vector.
OCTAVO_INLINE void rotate(const float* x, std::int64_t dim, const Rotation& by, float* out) {
  const std::int64_t half = by.half;
  for (std::int64_t i = 2 * half; i < dim; i += W) store_up_to(out + i, load_up_to(x + i, dim - i), dim - i);
  for (std::int64_t i = dim; i < whole_vectors(dim); ++i) out[i] = 0.0f;
#pragma GCC unroll 4
  for (std::int64_t i = 0; i < half; i += W) {
    const std::int64_t n = half - i;
    const F c = load_up_to(by.cos + i, n), s = load_up_to(by.sin + i, n);
    const F left = load_up_to(x + i, n), right = load_up_to(x + half + i, n);
    store_up_to(out + i, left * c - right * s, n);
    store_up_to(out + half + i, right * c + left * s, n);
  }
}

// n values to one of the `step` places of each lane; the others, which are another token's, are not touched.
template <class T>
OCTAVO_INLINE void scatter(const typename T::Stored* row, std::int64_t n, typename T::Stored* lanes_out, int place) {
  std::int64_t i = 0;
#if defined(__AVX512BW__)
  if constexpr (T::step == 2) {
    for (; i + W <= n; i += W) {
      const I values = widen(load_as<H>(row + i)) << (16 * place);
      _mm512_mask_storeu_epi16(lanes_out + 2 * i, place ? 0xaaaaaaaau : 0x55555555u, (__m512i)values);
    }
  }
  if constexpr (T::step == 4) {
    for (; i + W <= n; i += W) {
      const I values = (I)_mm512_cvtepu8_epi32(load_as<__m128i>(row + i)) << (8 * place);
      _mm512_mask_storeu_epi8(lanes_out + 4 * i, 0x1111111111111111ull << place, (__m512i)values);
    }
  }
#endif
  for (; i < n; ++i) lanes_out[i * T::step + place] = row[i];
}

// Puts a token's key, mixed where it is rounded, and value of a head at a place in a block.
//
// Tokens that a row does not see get weight 0, and 0 times infinity or NaN is NaN: a value that is not finite becomes
// zeros, and its key NaN, so that whoever sees the token has NaN and nobody else. Where values have scales, those of
// hidden tokens are left out, and that of a value of zeros is 0: weights are rounded relative to the largest product.
template <class T>
OCTAVO_INLINE void write_pair(const Layout<T>& at, std::int64_t block, std::int64_t offset, std::int64_t head,
                              const float* key, const float* value) {
  typename T::Stored k[kMaxHeadDim + W], v[kMaxHeadDim + W];
  typename T::Stored *keys = at.keys(block, head), *values = at.values(block, head);
  if constexpr (T::scaled) {
    const Step of_key = step_of(key, at.dim), of_value = step_of(value, at.dim);
    for (std::int64_t i = 0; i < at.dim; i += W) {
      store_bytes(k + i, to_steps(load(key + i), of_key) + 128);
      store_bytes(v + i, to_steps(load_up_to(value + i, at.dim - i), of_value));
    }
    float value_scale = of_value.scale;
    if (of_value.inverse == 0.0f) value_scale = of_value.scale == 1.0f ? 0.0f : __builtin_nanf("");
    const float key_scale = of_key.scale / static_cast<float>(mixed(at.dim));
    std::memcpy(at.scale(keys, offset), &key_scale, sizeof key_scale);
    std::memcpy(at.scale(values, offset), &value_scale, sizeof value_scale);
  } else {
    const bool finite = top_of(value, at.dim) < T::beyond;
    for (std::int64_t i = 0; i < at.dim; i += W) {
      T::put(k + i, finite ? load(key + i) : set1(__builtin_nanf("")));
      T::put(v + i, finite ? load_up_to(value + i, at.dim - i) : F{});
    }
  }
  if (!at.in_place) {
    std::memcpy(keys + offset * at.dim, k, static_cast<std::size_t>(at.dim) * sizeof *k);
    std::memcpy(values + offset * at.dim, v, static_cast<std::size_t>(at.dim) * sizeof *v);
    return;
  }
  for (std::int64_t i = 0; i < at.dim; i += T::step)
    std::memcpy(keys + i * at.size + offset * T::step, k + i, T::step * sizeof *k);
  const int place = static_cast<int>(offset % T::step);
  scatter<T>(v, at.dim, values + (offset - place) * at.dim, place);
}

// What goes with kRows rotated queries as bytes.
struct ByteQueries {
  float scale[kRows];
  std::int32_t origin[kRows];  // where sums begin: below 0, by what is too much in a product with keys 128 too high
};

// The bytes of kRows queries lie together: W dimensions of each, then the next W. Then what goes with them.
OCTAVO_INLINE std::int64_t bytes_of_queries(std::int64_t wide) { return kRows * wide; }
static_assert(kRows * W + static_cast<std::int64_t>(sizeof(ByteQueries)) <= kRows * W * 4);  // the room of their floats

OCTAVO_INLINE void round_query(const float* query, std::int64_t dim, int row, std::uint8_t* rows) {
  const std::int64_t wide = whole_vectors(dim);
  const Step step = step_of(query, dim);
  I sum = {};
#pragma GCC unroll 8
  for (std::int64_t i = 0; i < wide; i += W) {
    const I q = to_steps(load(query + i), step);
    sum += q;
    store_bytes(rows + i * kRows + row * W, q);
  }
  auto* const rest = reinterpret_cast<ByteQueries*>(rows + bytes_of_queries(wide));
  rest->scale[row] = step.scale;
  rest->origin[row] = -128 * reduce_add(sum);
}

// Calls turn(dim, rotation) with constants for the commonest head, whose whole row then stays in registers.
template <class Turn>
OCTAVO_INLINE void with_head(std::int64_t dim, const Rotation& by, const Turn& turn) {
  if (dim == 64 && by.half == 32)
    turn(64, Rotation{by.cos, by.sin, 32});
  else
    turn(dim, by);
}

// A token's rotated query of a head, as `attend` takes it: row i of queries [kSegment][wide]. Where it is rounded, what
// that makes lies in the room of its floats.
template <class T>
OCTAVO_INLINE void turn_query(const AttentionArgs& a, std::int64_t token, std::int64_t head, std::int64_t i,
                              float* queries) {
  const float* const query = a.q + token * a.q_stride + head * a.head_dim;
  const std::int64_t wide = whole_vectors(a.head_dim);
  if constexpr (T::rounds) {
    with_head(a.head_dim, rotation_of(a, token), [&](std::int64_t dim, const Rotation& by) __attribute__((always_inline)) {
      float turned[kMaxHeadDim + W];
      rotate(query, dim, by, turned);
      if constexpr (T::scaled) {
        mix(turned, dim);
        auto* const rows = reinterpret_cast<std::uint8_t*>(queries + i / kRows * kRows * wide);
        round_query(turned, dim, static_cast<int>(i % kRows), rows);
      } else {
        auto* const row = reinterpret_cast<typename T::Stored*>(queries + i * wide);
        for (std::int64_t d = 0; d < dim; d += W) T::put(row + d, load(turned + d));
      }
    });
  } else {
    rotate(query, a.head_dim, rotation_of(a, token), queries + i * wide);
  }
}

// A token's key and value of a head to their slot.
template <class T>
void write(const AttentionArgs& a, std::int64_t token, std::int64_t head) {
  const Layout<T> at(a);
  const std::int64_t slot = a.plan->step.slots[token];
  const float* const key = a.k + token * a.k_stride + head * at.dim;
  const float* const value = a.v + token * a.v_stride + head * at.dim;
  float turned[kMaxHeadDim + W];
  if constexpr (T::scaled) {
    with_head(at.dim, rotation_of(a, token), [&](std::int64_t dim, const Rotation& by) __attribute__((always_inline)) {
      rotate(key, dim, by, turned);
      mix(turned, dim);
    });
  } else {
    rotate(key, at.dim, rotation_of(a, token), turned);
  }
  write_pair(at, slot / at.size, slot % at.size, head, turned, value);
}

// --- reading a partition --------------------------------------------------------------------------------------------

// A partition's chunks in the form of the products; those from `first` to `end` may be read.
template <class T>
struct Keys {
  const typename T::Stored *key[kChunks], *value[kChunks];
  const typename T::Stored* next[kChunks];  // keys that will be read after these, to be prefetched
  const float *key_scale[kChunks], *value_scale[kChunks];  // of the tokens, where there are scales
  std::int64_t key_stride;    // from one step of dimensions to the next
  std::int64_t value_stride;  // from one step of tokens to the next
  int first, end;
};

// The last chunk of values up to token `end` of it, zeros from there: stale slots may hold NaN, and 0 * NaN is NaN.
template <class T>
const typename T::Stored* cut(const typename T::Stored* value, std::int64_t dim, int end, typename T::Stored* out) {
  constexpr int lanes = sizeof(H) / sizeof(typename T::Stored);
  for (int token = 0; token < kChunk; token += T::step)
    for (std::int64_t i = token * dim; i < (token + T::step) * dim; i += lanes) {
      H keep;
      for (int lane = 0; lane < W; ++lane) keep[lane] = token + lane % T::step < end ? 0xffff : 0;
      store_as(out + i, load_as<H>(value + i) & keep);
    }
  return out;
}

// The chunk at `origin` of blocks too small or heads too narrow for vectors; zeros outside [begin, end) and from D on.
template <class T>
void gather(const Layout<T>& at, const std::int32_t* table, std::int64_t head, std::int64_t origin, std::int64_t begin,
            std::int64_t end, typename T::Stored* key, typename T::Stored* value, float* scales) {
  const std::int64_t wide = at.wide(), even = at.dim / T::step * T::step;
  for (int token = 0; token < kChunk; ++token) {
    const typename T::Stored *k = kZeros<typename T::Stored>, *v = k;
    if constexpr (T::scaled) scales[token] = scales[W + token] = 0.0f;
    const std::int64_t slot = origin + token;
    if (begin <= slot && slot < end) {
      const std::int64_t block = table[slot / at.size], offset = slot % at.size;
      k = at.keys(block, head) + offset * at.dim;
      v = at.values(block, head) + offset * at.dim;
      if constexpr (T::scaled) {
        std::memcpy(scales + token, at.scale(at.keys(block, head), offset), sizeof *scales);
        std::memcpy(scales + W + token, at.scale(at.values(block, head), offset), sizeof *scales);
      }
    }
    typename T::Stored* const keys = key + token * T::step;
    for (std::int64_t i = 0; i < even; i += T::step) std::memcpy(keys + i * kChunk, k + i, T::step * sizeof *k);
    for (std::int64_t i = even; i < wide; ++i)
      keys[i / T::step * T::step * kChunk + i % T::step] = i < at.dim ? k[i] : typename T::Stored{};
    const int place = token % T::step;
    typename T::Stored* const values = value + (token - place) * wide;
    scatter<T>(v, at.dim, values, place);
    for (std::int64_t i = at.dim; i < wide; ++i) values[i * T::step + place] = typename T::Stored{};
  }
}

// Chunks of a context in their blocks, one after another. Where blocks are read in place, whole chunks fill them, so that
// only the first is divided for.
struct ChunkPlace {
  const std::int32_t* block;
  std::int64_t offset, size;

  OCTAVO_INLINE ChunkPlace(const std::int32_t* table, std::int64_t token, std::int64_t block_size)
      : block(table + token / block_size), offset(token % block_size), size(block_size) {}

  OCTAVO_INLINE void next() {
    offset += kChunk;
    if (offset < size) return;
    offset = 0;
    ++block;
  }
};

// The chunks of a partition that hold tokens [begin, end) of a context. `tile` has room for a gathered partition.
template <class T>
void find(const Layout<T>& at, const std::int32_t* table, std::int64_t head, std::int64_t partition, std::int64_t begin,
          std::int64_t end, typename T::Stored* tile, Keys<T>& keys) {
  const std::int64_t origin = partition * kPartition, wide = at.wide();
  keys.first = static_cast<int>((begin - origin) / kChunk);
  keys.end = static_cast<int>((end - origin + kChunk - 1) / kChunk);
  keys.key_stride = (at.in_place ? at.size : kChunk) * T::step;
  keys.value_stride = wide * T::step;
  ChunkPlace place(table, origin + keys.first * kChunk, at.size);
  for (int c = keys.first; c < keys.end; ++c, place.next()) {
    const std::int64_t token = origin + c * kChunk;
    if (!at.in_place) {
      typename T::Stored *key = tile + 2 * c * kChunk * wide, *value = key + kChunk * wide;
      float* const scales = reinterpret_cast<float*>(tile + 2 * kPartition * wide) + 2 * c * W;
      gather(at, table, head, token, begin, end, key, value, scales);
      keys.key[c] = key;
      keys.value[c] = value;
      keys.key_scale[c] = scales;
      keys.value_scale[c] = scales + W;
      continue;
    }
    typename T::Stored* const key = at.keys(*place.block, head);
    typename T::Stored* const value = at.values(*place.block, head);
    keys.key[c] = key + place.offset * T::step;
    keys.value[c] = value + place.offset * at.dim;
    if constexpr (T::scaled) {
      keys.key_scale[c] = reinterpret_cast<const float*>(at.scale(key, place.offset));
      keys.value_scale[c] = reinterpret_cast<const float*>(at.scale(value, place.offset));
      __builtin_prefetch(keys.value_scale[c], 0, 2);
    } else if (token + kChunk > end) keys.value[c] = cut<T>(keys.value[c], at.dim, static_cast<int>(end - token), tile);
  }
}

// A partition of a sequence that a thread will read, or is likely to.
struct Place {
  std::int32_t sequence;
  std::int64_t head, partition;
};

// Says which keys come next. Where none do, those of now stand in: a line that is there already costs little.
// What is looked at before the keys comes closer at once.
template <class T>
void look_ahead(const Layout<T>& at, const StepView& step, const Place& place, Keys<T>& keys) {
  for (int c = 0; c < kChunks; ++c) keys.next[c] = keys.key[keys.first];
  if (!at.in_place) return;
  const std::int64_t origin = place.partition * kPartition, end = step.context_lens[place.sequence];
  if (origin >= end) return;
  ChunkPlace chunk(step.block_tables + place.sequence * step.table_stride, origin, at.size);
  for (int c = 0; c < kChunks && origin + c * kChunk < end; ++c, chunk.next()) {
    typename T::Stored* const next = at.keys(*chunk.block, place.head);
    keys.next[c] = next + chunk.offset * T::step;
    if constexpr (T::scaled) {
      __builtin_prefetch(at.scale(next, chunk.offset), 0, 2);
    } else if (origin + (c + 1) * kChunk > end) {  // it will be cut
      const auto* const values = reinterpret_cast<const char*>(at.values(*chunk.block, place.head) + chunk.offset * at.dim);
      for (std::size_t i = 0; i < static_cast<std::size_t>(kChunk * at.dim) * sizeof *next; i += 64)
        __builtin_prefetch(values + i, 0, 2);
    }
  }
}

// --- a tile of query rows and a partition ---------------------------------------------------------------------------

// One head of one token, on its way through its context.
struct Row {
  const float* query;  // [D] and zeros up to a whole vector; where they are bytes, those of the first of kRows count
  const Query* seen;
  float* out;     // [D] values weighted so far
  float highest;  // of the scores so far, in powers of 2
  float sum;      // of the weights so far, relative to it
};

struct Scoring {
  float scale;   // from a product (or a capped score) to a power of 2
  float cap;     // softcap; 0: none
  float shrink;  // from a product to the argument of the cap's tanh
};

OCTAVO_INLINE Scoring scoring_of(const AttentionArgs& a) {
  if (a.softcap == 0.0f) return {a.scale * kLog2e, 0.0f, 0.0f};
  return {kLog2e, a.softcap, a.scale / a.softcap};
}

// A thread's room in the plan's tiles.
template <class T>
struct Room {
  float* queries;                // [kSegment][wide] rotated
  typename T::Stored* gathered;  // a partition's keys and values
  float* tile;                   // [wide][kTile] keys, or [kTile][wide] values, widened
  float* sums;                   // [kSegment][wide] weighted values
  float* scores;                 // [kSegment][kPitch], and soon weights

  OCTAVO_INLINE Room(const AttentionPlan& plan, int thread, std::int64_t wide)
      : queries(reinterpret_cast<float*>(plan.tiles + thread * plan.tile_bytes)),
        gathered(reinterpret_cast<typename T::Stored*>(queries + kSegment * wide)),
        tile(reinterpret_cast<float*>(gathered + 2 * kPartition * wide)),
        sums(tile + kTile * wide),
        scores(sums + kSegment * wide) {}
};

// What all rows of a work share.
struct Walk {
  const AttentionArgs* args;
  Scoring scoring;
  std::int64_t wide, partial_stride;
  std::int64_t partition;  // where they are
  bool whole;
};

// Lines of memory that are wanted soon: while vector (k, c) is read, line `line[c] + k * stride` is asked for.
template <class T, int C>
struct Ahead {
  const typename T::Stored* line[C];
  std::int64_t stride;
};

// sum[r][c] += over the steps, row r's factors times column c's vectors. One chain of additions for each lane.
template <class T, int R, int C>
OCTAVO_INLINE void multiply(F (&sum)[R][C], const float* const (&rows)[R],
                            const typename T::Stored* const (&columns)[C], std::int64_t stride, std::int64_t steps,
                            const Ahead<T, C>& ahead) {
  for (std::int64_t k = 0; k < steps; ++k) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) __builtin_prefetch(ahead.line[c] + k * ahead.stride, 0, 2);
#pragma GCC unroll 2
    for (int i = 0; i < T::parts; ++i) {
      decltype(T::part(columns[0], 0)) b[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) b[c] = T::part(columns[c] + k * stride, i);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const float* const factor = rows[r] + k * T::parts + i;
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) sum[r][c] = T::product(sum[r][c], b[c], factor);
      }
    }
  }
}

// Products of queries and C chunks of keys from chunk c on, of which those before `end` count. Meanwhile their values
// come closer.
template <class T, int R, int C>
OCTAVO_INLINE void score(const Keys<T>& keys, int c, int end, const float* const (&queries)[R], std::int64_t wide,
                         float (&scores)[R][kPitch]) {
  const typename T::Stored* columns[C];
  Ahead<T, C> ahead{{}, W * T::step};
#pragma GCC unroll 8
  for (int i = 0; i < C; ++i) {
    columns[i] = keys.key[least(c + i, end - 1)];
    ahead.line[i] = keys.value[least(c + i, end - 1)];
  }
  F sum[R][C] = {};
  multiply<T, R, C>(sum, queries, columns, keys.key_stride, wide / T::step, ahead);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int i = 0; i < C; ++i)
      if (c + i < end) store(scores[r] + (c + i) * kChunk, sum[r][i]);
}

// What the rows of a product see of a partition, and the chunks [first, last) that any of them sees.
template <int R>
struct Sight {
  alignas(64) std::int32_t begin[whole_vectors(R)] = {}, end[whole_vectors(R)] = {};
  int first = kChunks, last = 0;

  Sight() = default;
  // Of `count` rows; the last one stands in for those that are missing.
  OCTAVO_INLINE Sight(const Row* rows, std::int64_t count, std::int64_t partition) {
    for (int r = 0; r < R; ++r) {
      const Query& seen = *rows[least<std::int64_t>(r, count - 1)].seen;
      begin[r] = static_cast<int>(most<std::int64_t>(seen.begin - partition * kPartition, 0));
      end[r] = static_cast<int>(least<std::int64_t>(seen.end - partition * kPartition, kPartition));
      if (blind(r)) continue;
      first = least(first, begin[r] / kChunk);
      last = most(last, (end[r] + kChunk - 1) / kChunk);
    }
  }

  OCTAVO_INLINE bool blind(int r) const { return begin[r] >= end[r]; }
  OCTAVO_INLINE bool nothing() const { return first >= last; }
};

// A number of each row, as vectors.
template <int R>
struct PerRow {
  alignas(64) float of[whole_vectors(R)] = {};

  static OCTAVO_INLINE PerRow ones() {
    PerRow all;
    for (float& x : all.of) x = 1.0f;
    return all;
  }
};

constexpr auto kSum = [](F a, F b) __attribute__((always_inline)) { return a + b; };
constexpr auto kHigher = [](F a, F b) __attribute__((always_inline)) { return max(a, b); };
constexpr auto kGreater = [](F a, F b) __attribute__((always_inline)) { return greater_bits(a, b); };

// A vector of each row, brought to a number.
template <int R, int First = 0, class Op>
OCTAVO_INLINE void reduce_rows(const F (&rows)[R], const Op& op, PerRow<R>& to) {
  constexpr int left = R - First, some = left < W ? left : W;
  constexpr int number = some > 8 ? 16 : some > 4 ? 8 : some > 2 ? 4 : some;
  F these[number];
#pragma GCC unroll 16
  for (int i = 0; i < number; ++i) these[i] = rows[First + least(i, some - 1)];
  store(to.of + First, reduce_each(these, op));
  if constexpr (left > W) reduce_rows<R, First + W>(rows, op, to);
}

// What the rows' weights of a partition are relative to: each row's highest score.
template <int R>
struct Heights {
  PerRow<R> base, scale;
  int from = 0, to = kPartition;  // the tokens that all rows see

  OCTAVO_INLINE bool seen_by_all(int c) const { return from <= c * kChunk && (c + 1) * kChunk <= to; }

  // Exactly 1 for the highest score, whatever its size.
  template <bool coarse>
  OCTAVO_INLINE F weight(int r, F score) const {
    return exp2<coarse>((score - set1(base.of[r])) * set1(scale.of[r]));
  }
};

template <int R>
OCTAVO_INLINE I sees(const Sight<R>& sight, int r, int c) {
  return (lanes() >= sight.begin[r] - c * kChunk) & (lanes() < sight.end[r] - c * kChunk);
}

// Finds the highest of each row's products of the chunks in sight, which are `units` of each row, and gives `tops` them in
// powers of 2. What a row does not see is made lower than any.
template <int R>
OCTAVO_INLINE Heights<R> find_heights(float* scores, const Sight<R>& sight, const Scoring& scoring,
                                      const PerRow<R>& units, PerRow<R>& tops) {
  Heights<R> heights;
  for (int r = 0; r < R; ++r) {
    heights.from = most(heights.from, sight.begin[r]);
    heights.to = least(heights.to, sight.end[r]);
  }
  F highest[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) highest[r] = set1(kLowest);
  for (int c = sight.first; c < sight.last; ++c) {
    if (heights.seen_by_all(c) && scoring.cap == 0.0f) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) highest[r] = max(highest[r], load(scores + r * kPitch + c * kChunk));
      continue;
    }
    for (int r = 0; r < R; ++r) {
      F s = load(scores + r * kPitch + c * kChunk);
      if (scoring.cap != 0.0f) s = set1(scoring.cap) * tanh(s * set1(scoring.shrink * units.of[r]));
      s = sees(sight, r, c) ? s : set1(kLowest);
      store(scores + r * kPitch + c * kChunk, s);
      highest[r] = max(highest[r], s);
    }
  }
  PerRow<R> peaks;
  reduce_rows<R>(highest, kHigher, peaks);
  for (int r = 0; r < R; r += W) {
    const F scale = set1(scoring.scale) * (scoring.cap != 0.0f ? set1(1.0f) : load(units.of + r));
    const I blind = load(sight.begin + r) >= load(sight.end + r);
    const F top = load(peaks.of + r);
    store(heights.scale.of + r, scale);
    store(heights.base.of + r, blind ? F{} : top);
    store(tops.of + r, blind ? set1(kLowest) : top * scale);
  }
  return heights;
}

// Turns the rows' products into weights relative to each row's highest, and adds them up. What a row does not see gets
// weight 0. Where weights are rounded, those of a chunk then fill the first half of its place.
template <class T, int R>
OCTAVO_INLINE void weigh(float* scores, const Sight<R>& sight, const Scoring& scoring, PerRow<R>& tops,
                         PerRow<R>& sums) {
  const Heights<R> heights = find_heights<R>(scores, sight, scoring, PerRow<R>::ones(), tops);
  F total[R] = {};
  for (int c = sight.first; c < sight.last; ++c)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      float* const s = scores + r * kPitch + c * kChunk;
      const F weight = heights.template weight<T::rounds>(r, load(s));
      total[r] += weight;
      if constexpr (T::rounds)
        store_as(s, to_bf16(weight));
      else
        store(s, weight);
    }
  reduce_rows<R>(total, kSum, sums);
}

// How much the parts so far and a new one count once they are relative to the higher of their highest scores.
struct Fades {
  F old, fresh;
};

// The one place where parts are merged, of a row in each lane: see the top of the file.
OCTAVO_INLINE Fades merge(F& highest, F& sum, F new_highest, F new_sum) {
  const F top = max(highest, new_highest);
  const Fades fades{exp2(highest - top), exp2(new_highest - top)};
  highest = top;
  sum = fma(sum, fades.old, new_sum * fades.fresh);
  return fades;
}
OCTAVO_INLINE F join(F old, F fresh, F fade_old, F fade_fresh) { return fma(old, fade_old, fresh * fade_fresh); }

// Where a row's part of a partition goes, and what becomes of it on the way.
struct Goal {
  float* out = nullptr;  // into the row's result, or to its place among the parts; null: nowhere
  float old, fresh;      // what is there and what comes count so much;
  bool first;            // nothing is there yet
  float inverse;         // of the weights' sum where this is the last part, otherwise 0
};

OCTAVO_INLINE void put(const Walk& walk, const Goal& goal, std::int64_t d, F fresh) {
  float* const out = goal.out + d;
  const std::int64_t n = walk.args->head_dim - d;
  if (walk.whole) {
    fresh = join(goal.first ? F{} : load_up_to(out, n), fresh, set1(goal.old), set1(goal.fresh));
    if (goal.inverse != 0.0f) fresh *= set1(goal.inverse);
  }
  store_up_to(out, fresh, n);
}

// Settles where the parts of the first `count` rows go.
template <int R>
OCTAVO_INLINE void settle(const Walk& walk, Row* rows, int count, const Sight<R>& sight, const PerRow<R>& tops,
                          const PerRow<R>& sums, Goal* goals) {
  if (!walk.whole) {
    for (int r = 0; r < count; ++r) {
      if (sight.blind(r)) continue;
      float* const part = rows[r].out + (rows[r].seen->partial + walk.partition) * walk.partial_stride;
      part[walk.args->head_dim] = tops.of[r];
      part[walk.args->head_dim + 1] = sums.of[r];
      goals[r].out = part;
    }
    return;
  }
  PerRow<R> highest, sum, old, fresh;
  for (int r = 0; r < count; ++r) {
    highest.of[r] = rows[r].highest;
    sum.of[r] = rows[r].sum;
  }
  for (int r = 0; r < count; r += W) {
    F top = load(highest.of + r), total = load(sum.of + r);
    const Fades fades = merge(top, total, load(tops.of + r), load(sums.of + r));
    store(highest.of + r, top);
    store(sum.of + r, total);
    store(old.of + r, fades.old);
    store(fresh.of + r, fades.fresh);
  }
  for (int r = 0; r < count; ++r) {
    if (sight.blind(r)) continue;
    const bool last = rows[r].seen->end <= (walk.partition + 1) * kPartition;
    goals[r] = {rows[r].out, old.of[r], fresh.of[r], rows[r].sum == 0.0f, last ? 1.0f / sum.of[r] : 0.0f};
    rows[r].highest = highest.of[r];
    rows[r].sum = sum.of[r];
  }
}

// C vectors of the rows' weighted values from dimension d on, merged into what the rows have (whole) or put aside.
// Meanwhile the next keys come closer: as many lines as are read here.
template <class T, int R, int C>
OCTAVO_INLINE void add_values(const Walk& walk, const Keys<T>& keys, int first, int last,
                              const float (&weights)[R][kPitch], const Goal (&goals)[R], std::int64_t d) {
  F sum[R][C] = {};
  for (int c = first; c < last; ++c) {
    const float* rows[R];
    const typename T::Stored* columns[C];
    Ahead<T, C> ahead{{}, walk.wide / W * keys.key_stride};
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) rows[r] = weights[r] + c * kChunk;
#pragma GCC unroll 8
    for (int i = 0; i < C; ++i) {
      columns[i] = keys.value[c] + (d + i * W) * T::step;
      ahead.line[i] = keys.next[c] + (d / W + i) * keys.key_stride;
    }
    multiply<T, R, C>(sum, rows, columns, keys.value_stride, kChunk / T::step, ahead);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    if (goals[r].out == nullptr) continue;
#pragma GCC unroll 8
    for (int i = 0; i < C; ++i) put(walk, goals[r], d + i * W, sum[r][i]);
  }
}

// R rows and the keys of a partition: scores, weights, weighted values.
template <class T, int R>
void attend(const Walk& walk, const Keys<T>& keys, Row* rows) {
  const Sight<R> sight(rows, R, walk.partition);
  if (sight.nothing()) return;
  const int first = sight.first, last = sight.last;
  const float* queries[R];
  for (int r = 0; r < R; ++r) queries[r] = rows[r].query;

  alignas(64) float scores[R][kPitch];  // and soon weights
  int c = first;
  for (; c + kColumns / 2 < last; c += kColumns) score<T, R, kColumns>(keys, c, last, queries, walk.wide, scores);
  if (c < last) score<T, R, kColumns / 2>(keys, c, last, queries, walk.wide, scores);

  PerRow<R> tops, sums;
  Goal goals[R];
  weigh<T, R>(scores[0], sight, walk.scoring, tops, sums);
  settle<R>(walk, rows, R, sight, tops, sums, goals);

  std::int64_t d = 0;
  for (; d + kColumns * W <= walk.wide; d += kColumns * W)
    add_values<T, R, kColumns>(walk, keys, first, last, scores, goals, d);
  for (; d + kColumns / 2 * W <= walk.wide; d += kColumns / 2 * W)
    add_values<T, R, kColumns / 2>(walk, keys, first, last, scores, goals, d);
  for (; d < walk.wide; d += W) add_values<T, R, 1>(walk, keys, first, last, scores, goals, d);
}

// --- many query rows and a partition --------------------------------------------------------------------------------
// The same sums, in an order that suits prompts: keys and values are widened to float32 a tile at a time, and each tile
// is used by all rows while it is near.

// Chunks [c, end) of keys as float32: a row of the tile is a dimension of all of them.
template <class T>
OCTAVO_INLINE void widen_keys(const Keys<T>& keys, int c, int end, std::int64_t wide, float* tile) {
  for (int i = 0; c + i < end; ++i)
    for (std::int64_t k = 0; k < wide / T::step; ++k)
      for (int part = 0; part < T::step; ++part)
        store(tile + (k * T::step + part) * kTile + i * W, T::part(keys.key[c + i] + k * keys.key_stride, part));
}

// Chunks [c, end) of values as float32: a row of the tile is a token.
template <class T>
OCTAVO_INLINE void widen_values(const Keys<T>& keys, int c, int end, std::int64_t wide, float* tile) {
  for (; c < end; ++c)
    for (std::int64_t k = 0; k < kChunk / T::step; ++k, tile += T::step * wide)
      for (std::int64_t d = 0; d < wide; d += W)
        for (int part = 0; part < T::step; ++part)
          store(tile + part * wide + d, T::part(keys.value[c] + k * keys.value_stride + d * T::step, part));
}

// The lines of memory that the tile after this one will be made of, to be asked for bit by bit: they are scattered.
struct Lines {
  const char* chunk[kColumns];
  std::int64_t stride, of_chunk;

  OCTAVO_INLINE void prefetch(std::int64_t part, std::int64_t parts) const {
    for (std::int64_t i = of_chunk * part / parts; i < of_chunk * (part + 1) / parts; ++i)
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) __builtin_prefetch(chunk[c] + i * stride, 0, 2);
  }
};

// Of the keys from chunk c on, in keys.key or keys.next. The last chunk stands in for those from `end` on.
template <class T>
OCTAVO_INLINE Lines key_lines(const Keys<T>& keys, const typename T::Stored* const* chunks, int c, int end,
                              std::int64_t wide) {
  Lines lines{{}, keys.key_stride * static_cast<std::int64_t>(sizeof(typename T::Stored)), wide / T::step};
  for (int i = 0; i < kColumns; ++i) lines.chunk[i] = reinterpret_cast<const char*>(chunks[least(c + i, end - 1)]);
  return lines;
}

template <class T>
OCTAVO_INLINE Lines value_lines(const Keys<T>& keys, int c, std::int64_t wide) {
  Lines lines{{}, 64, kChunk * wide * static_cast<std::int64_t>(sizeof(typename T::Stored)) / 64};
  for (int i = 0; i < kColumns; ++i)
    lines.chunk[i] = reinterpret_cast<const char*>(keys.value[least(c + i, keys.end - 1)]);
  return lines;
}

// sum[r][c] += over the steps, row r's factors times column c's vectors, as the other `multiply`.
template <int C>
OCTAVO_INLINE void multiply(F (&sum)[kRows][C], const float* const (&rows)[kRows], const float* columns,
                            std::int64_t stride, std::int64_t steps) {
#pragma GCC unroll 2
  for (std::int64_t k = 0; k < steps; ++k, columns += stride) {
    F b[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) b[c] = load(columns + c * W);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const F a = set1(rows[r][k]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = fma(a, b[c], sum[r][c]);
    }
  }
}

// Products of a group's queries and C chunks of a tile's keys.
template <int C>
void score_tile(const float* const (&queries)[kRows], const float* tile, std::int64_t wide, float* scores) {
  F sum[kRows][C] = {};
  multiply<C>(sum, queries, tile, kTile, wide);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(scores + r * kPitch + c * W, sum[r][c]);
}

// C vectors of `steps` tokens' values, weighted, added to a group's sums; these begin at 0 where `fresh`.
template <int C>
void add_tile(const float* weights, const float* tile, std::int64_t wide, std::int64_t steps, bool fresh, float* sums) {
  const float* rows[kRows];
  F sum[kRows][C] = {};
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    rows[r] = weights + r * kPitch;
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[r][c] = fresh ? F{} : load(sums + r * wide + c * W);
  }
  multiply<C>(sum, rows, tile, wide, steps);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(sums + r * wide + c * W, sum[r][c]);
}

// Calls product<C>() for C = n, or the most there is.
template <int C = kColumns, class Product>
OCTAVO_INLINE void with_columns(std::int64_t n, const Product& product) {
  if constexpr (C > 1) {
    if (n < C) return with_columns<C - 1>(n, product);
  }
  product.template operator()<C>();
}

// Rows that are multiplied together.
struct Group {
  const float* queries[kRows];
  Sight<kRows> sight;

  Group() = default;
  OCTAVO_INLINE Group(const Row* rows, std::int64_t count, std::int64_t partition) : sight(rows, count, partition) {
    for (int r = 0; r < kRows; ++r) queries[r] = rows[least<std::int64_t>(r, count - 1)].query;
  }
};

// Products of a group's queries with chunks [c, stop) of the keys, those in the tile, as far as the group sees them.
OCTAVO_INLINE void score_group(const Group& group, int c, int stop, std::int64_t wide, const float* tile,
                               float* scores) {
  const int from = most(c, group.sight.first), to = least(stop, group.sight.last);
  if (from >= to) return;
  const float* const keys = tile + (from - c) * W;
  with_columns(to - from, [&]<int C>() { score_tile<C>(group.queries, keys, wide, scores + from * kChunk); });
}

// Likewise the weighted values.
OCTAVO_INLINE void add_group(const Group& group, int c, int stop, std::int64_t wide, const float* tile,
                             const float* weights, float* sums) {
  const int from = most(c, group.sight.first), to = least(stop, group.sight.last);
  if (from >= to) return;
  const bool fresh = from == group.sight.first;
  const std::int64_t tokens = (to - from) * kChunk;
  const float* const values = tile + (from - c) * kChunk * wide;
  for (std::int64_t d = 0; d < wide; d += kTile)
    with_columns((wide - d) / W, [&]<int C>() {
      add_tile<C>(weights + from * kChunk, values + d, wide, tokens, fresh, sums + d);
    });
}

// Up to kSegment rows and the keys of a partition.
template <class T>
void attend_many(const Walk& walk, const Keys<T>& keys, Row* rows, std::int64_t count, const Room<T>& room) {
  const std::int64_t wide = walk.wide;
  Group groups[kSegment / kRows];
  std::int64_t num_groups = 0;
  for (std::int64_t i = 0; i < count; i += kRows)
    groups[num_groups++] = Group(rows + i, least<std::int64_t>(kRows, count - i), walk.partition);

  for (int c = keys.first; c < keys.end; c += kColumns) {
    const int stop = least(c + kColumns, keys.end);
    widen_keys(keys, c, stop, wide, room.tile);
    const Lines after = stop < keys.end ? key_lines<T>(keys, keys.key, stop, keys.end, wide)
                                        : value_lines<T>(keys, keys.first, wide);
    for (std::int64_t g = 0; g < num_groups; ++g) {
      after.prefetch(g, num_groups);
      score_group(groups[g], c, stop, wide, room.tile, room.scores + g * kRows * kPitch);
    }
  }

  Goal goals[kSegment];
  for (std::int64_t g = 0; g < num_groups; ++g) {
    if (groups[g].sight.nothing()) continue;
    PerRow<kRows> tops, sums;
    weigh<T, kRows>(room.scores + g * kRows * kPitch, groups[g].sight, walk.scoring, tops, sums);
    const int rows_here = static_cast<int>(least<std::int64_t>(kRows, count - g * kRows));
    settle<kRows>(walk, rows + g * kRows, rows_here, groups[g].sight, tops, sums, goals + g * kRows);
  }

  for (int c = keys.first; c < keys.end; c += kColumns) {
    const int stop = least(c + kColumns, keys.end);
    widen_values(keys, c, stop, wide, room.tile);
    const Lines after = stop < keys.end ? value_lines<T>(keys, stop, wide)
                                        : key_lines<T>(keys, keys.next, 0, kChunks, wide);
    for (std::int64_t g = 0; g < num_groups; ++g) {
      after.prefetch(g, num_groups);
      add_group(groups[g], c, stop, wide, room.tile, room.scores + g * kRows * kPitch, room.sums + g * kRows * wide);
    }
  }
  for (std::int64_t i = 0; i < count; ++i)
    for (std::int64_t d = 0; goals[i].out != nullptr && d < walk.args->head_dim; d += W)
      put(walk, goals[i], d, load(room.sums + i * wide + d));
}

// --- rows and a partition of bytes ----------------------------------------------------------------------------------
// Sums of bytes' products are exact in integers, and scores, below 2^24, in float32 too. Weighted values are added with
// their bias still on, and lose two units or three, ten at most: a few hundredths of what they lost when weights were
// rounded to bytes.

// Chunks whose weights are rounded together, to multiples of a 255th of a row's largest among them: beside a token that
// has nearly all the weight, many that have little each vanish, and the fewer share its fate the better. With 64 tokens
// that adds a tenth to the divergence that rounding keys and values causes, with all of a partition as much again.
constexpr int kStretch = 64 / kChunk;
constexpr int kStretches = kChunks / kStretch;
constexpr std::int64_t kFour = 16;  // bytes from one four tokens' rounded weights to the next

// Where the chunks from c on that are of one stretch end, and are before `last`.
OCTAVO_INLINE int end_of_stretch(int c, int last) { return least((c / kStretch + 1) * kStretch, last); }

// Calls stretch<C>(c) for the chunks [first, last): C from chunk c on, all of one stretch.
template <class Stretch>
OCTAVO_INLINE void in_stretches(int first, int last, const Stretch& stretch) {
  for (int c = first, stop; c < last; c = stop) {
    stop = end_of_stretch(c, last);
    with_columns<kStretch>(stop - c, [&]<int C>() { stretch.template operator()<C>(c); });
  }
}

// R rows on their way through a partition, a stage after another. `asks`, a constant: whether lines that will be read
// soon are asked for; once is enough for all rows of a work.
template <int R>
struct ByteRows {
  Row* rows;
  Sight<R> sight;
  Heights<R> heights;
  PerRow<R> tops, sums, unbias;
  PerRow<R> units[kStretches], inverses[kStretches];  // of a stretch: what its rounded weights are multiples of
  alignas(64) float scores[R][kPitch];                // and soon weights

  OCTAVO_INLINE ByteRows(const Walk& walk, Row* all) : rows(all), sight(all, R, walk.partition) {}

  OCTAVO_INLINE const std::uint8_t* queries() const { return reinterpret_cast<const std::uint8_t*>(rows[0].query); }
  OCTAVO_INLINE const ByteQueries& rest(const Walk& walk) const {
    return *reinterpret_cast<const ByteQueries*>(queries() + bytes_of_queries(walk.wide));
  }

  template <bool asks>
  OCTAVO_INLINE void score(const Walk& walk, const Keys<Int8>& keys) {
    for (int c = sight.first; c < sight.last; c += kColumns)
      with_columns(sight.last - c, [&]<int C>() { score_chunks<C, asks>(walk, keys, c); });
  }

  // Products with the keys of C chunks.
  template <int C, bool asks>
  OCTAVO_INLINE void score_chunks(const Walk& walk, const Keys<Int8>& keys, int c) {
    I sum[R][C];
    const std::uint8_t *key[C], *value[C];
#pragma GCC unroll 8
    for (int i = 0; i < C; ++i) {
      key[i] = keys.key[c + i];
      value[i] = keys.value[c + i];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sum[r][i] = set1(rest(walk).origin[r]);
    }
    const std::int64_t stride = keys.key_stride;
    const std::uint8_t *bytes = queries(), *const end = bytes + bytes_of_queries(walk.wide);
    for (std::int64_t at = 0, line = 0; bytes < end; bytes += kRows * W)
#pragma GCC unroll 4
      for (int word = 0; word < W; word += Int8::step, at += stride, line += W * Int8::step) {
        I b[C];
#pragma GCC unroll 8
        for (int i = 0; i < C; ++i) {
          if constexpr (asks) __builtin_prefetch(value[i] + line, 0, 2);
          b[i] = load_as<I>(key[i] + at);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const I four = set1(load_as<std::int32_t>(bytes + r * W + word));
#pragma GCC unroll 8
          for (int i = 0; i < C; ++i) sum[r][i] = dot_u8s8(sum[r][i], b[i], four);
        }
      }
#pragma GCC unroll 8
    for (int i = 0; i < C; ++i) {
      const F scale = load(keys.key_scale[c + i]);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) store(scores[r] + (c + i) * kChunk, to_float(sum[r][i]) * scale);
    }
  }

  OCTAVO_INLINE void find_heights(const Walk& walk) {
    PerRow<R> of_queries;
    for (int r = 0; r < R; r += W) store(of_queries.of + r, load_some(rest(walk).scale + r, least(W, R - r)));
    heights = attend::find_heights<R>(scores[0], sight, walk.scoring, of_queries, tops);
  }

  // Products become weights times the values' scales, in place, and the weights are added up.
  OCTAVO_INLINE void weigh(const Keys<Int8>& keys) {
    F totals[R] = {};
    in_stretches(sight.first, sight.last, [&]<int C>(int c) {
      if (heights.seen_by_all(c) && heights.seen_by_all(c + C - 1))
        weigh_stretch<C, true>(keys, c, totals);
      else
        weigh_stretch<C, false>(keys, c, totals);
    });
    reduce_rows<R>(totals, kSum, sums);
  }

  // Scales of tokens out of sight may be NaN.
  template <int C, bool all>
  OCTAVO_INLINE void weigh_stretch(const Keys<Int8>& keys, int c, F (&totals)[R]) {
    F scale[C], top[R];
#pragma GCC unroll 8
    for (int i = 0; i < C; ++i) scale[i] = load(keys.value_scale[c + i]);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      float* const row = scores[r] + c * kChunk;
      F total = totals[r];
      top[r] = F{};
#pragma GCC unroll 8
      for (int i = 0; i < C; ++i) {
        F weight = heights.template weight<true>(r, load(row + i * kChunk));
        total += weight;
        weight *= scale[i];
        if constexpr (!all) weight = sees(sight, r, c + i) ? weight : F{};
        top[r] = greater_bits(top[r], weight);
        store(row + i * kChunk, weight);
      }
      totals[r] = total;
    }
    PerRow<R> largest;
    reduce_rows<R>(top, kGreater, largest);
    for (int r = 0; r < R; r += W) {
      const F peak = load(largest.of + r);
      store(units[c / kStretch].of + r, peak * set1(1.0f / 255.0f));
      store(inverses[c / kStretch].of + r, peak <= set1(1e-30f) ? F{} : set1(255.0f) / peak);
    }
  }

  // Weights become bytes, in place.
  OCTAVO_INLINE void round_weights() {
    in_stretches(sight.first, sight.last, [&]<int C>(int c) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        float* const row = scores[r] + c * kChunk;
        const F steps = set1(inverses[c / kStretch].of[r]);
#pragma GCC unroll 8
        for (int i = 0; i < C; ++i)
          store_as(row + i * kChunk, low_bytes(as_int(fma(load(row + i * kChunk), steps, set1(kBias)))));
      }
    });
    for (int r = 0; r < R; r += W) {
      F all = {};
      for (int i = sight.first / kStretch; i * kStretch < sight.last; ++i) all += load(units[i].of + r);
      store(unbias.of + r, all * set1(-kBias));
    }
  }

  // Weighted values go where the rows' parts of the partition go. Meanwhile the next keys come closer.
  template <bool asks>
  OCTAVO_INLINE void add_values(const Walk& walk, const Keys<Int8>& keys) {
    Goal goals[R];
    settle<R>(walk, rows, R, sight, tops, sums, goals);
    constexpr int most_columns = R <= kRows / 2 ? kColumns : kColumns / 2;  // each in two sums
    for (std::int64_t d = 0; d < walk.wide; d += most_columns * W)
      with_columns<most_columns>((walk.wide - d) / W, [&]<int C>() { add_columns<C, asks>(walk, keys, goals, d); });
  }

  // C vectors of dimensions from d on.
  template <int C, bool asks>
  OCTAVO_INLINE void add_columns(const Walk& walk, const Keys<Int8>& keys, const Goal (&goals)[R], std::int64_t d) {
    F sum[R][C] = {};
    for (int c = sight.first, stop; c < sight.last; c = stop) {
      stop = end_of_stretch(c, sight.last);
      I dots[R][C];  // biased
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < C; ++v) dots[r][v] = as_int(set1(kBias));
      for (int i = c; i < stop; ++i) {
        const std::uint8_t* const values = keys.value[i] + d * Int8::step;
        const std::uint8_t* const next = keys.next[i] + d / W * keys.key_stride;
#pragma GCC unroll 4
        for (std::int64_t k = 0; k < kChunk / Int8::step; ++k) {
          I b[C];
#pragma GCC unroll 8
          for (int v = 0; v < C; ++v) {
            if constexpr (asks) __builtin_prefetch(next + (k * (walk.wide / W) + v) * keys.key_stride, 0, 2);
            b[v] = load_as<I>(values + k * keys.value_stride + v * W * Int8::step);
          }
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const auto* const four = reinterpret_cast<const std::uint8_t*>(scores[r] + i * kChunk) + k * kFour;
            const I bytes = set1(load_as<std::int32_t>(four));
#pragma GCC unroll 8
            for (int v = 0; v < C; ++v) dots[r][v] = dot_u8s8(dots[r][v], bytes, b[v]);
          }
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const F unit = set1(units[c / kStretch].of[r]);
#pragma GCC unroll 8
        for (int v = 0; v < C; ++v) sum[r][v] = fma(as_float(dots[r][v]), unit, sum[r][v]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      if (goals[r].out == nullptr) continue;
      const F minus = set1(unbias.of[r]);
#pragma GCC unroll 8
      for (int v = 0; v < C; ++v) put(walk, goals[r], d + v * W, sum[r][v] + minus);
    }
  }
};

template <int R, bool asks>
void attend_bytes(const Walk& walk, const Keys<Int8>& keys, Row* rows) {
  ByteRows<R> these(walk, rows);
  if (these.sight.nothing()) return;
  these.template score<asks>(walk, keys);
  these.find_heights(walk);
  these.weigh(keys);
  these.round_weights();
  these.template add_values<asks>(walk, keys);
}

// Twice as many: while the numbers of some that all others hang on are found, there is work for the others.
template <bool asks>
void attend_bytes_twice(const Walk& walk, const Keys<Int8>& keys, Row* rows) {
  ByteRows<kRows> these(walk, rows), those(walk, rows + kRows);
  these.template score<asks>(walk, keys);
  those.template score<false>(walk, keys);
  these.find_heights(walk);
  those.find_heights(walk);
  these.weigh(keys);
  those.weigh(keys);
  these.round_weights();
  those.round_weights();
  these.template add_values<asks>(walk, keys);
  those.template add_values<false>(walk, keys);
}

template <class T, int R>
OCTAVO_INLINE void attend_up_to(const Walk& walk, const Keys<T>& keys, Row* rows, std::int64_t n, bool asks) {
  if constexpr (R > 1) {
    if (n < R) return attend_up_to<T, R - 1>(walk, keys, rows, n, asks);
  }
  if constexpr (!T::scaled)
    attend<T, R>(walk, keys, rows);
  else if (asks)
    attend_bytes<R, true>(walk, keys, rows);
  else
    attend_bytes<R, false>(walk, keys, rows);
}

// --- works ----------------------------------------------------------------------------------------------------------

// Rows [first, first + n) of a work: of its queries' heads that share a key/value head, one token's after another's.
template <class T>
OCTAVO_INLINE void make_rows(const AttentionArgs& a, const Work& work, const Query* queries, std::int64_t head,
                             std::int64_t first, std::int64_t n, float* turned, Row* rows) {
  const std::int64_t group = a.num_heads / a.num_kv_heads, dim = a.head_dim, wide = whole_vectors(dim);
  for (std::int64_t i = 0; i < n; ++i) {
    const Query& query = queries[(first + i) / group];
    const std::int64_t h = head * group + (first + i) % group;
    turn_query<T>(a, query.token, h, i, turned);
    float* const out = work.whole ? a.out + query.row * a.out_stride + h * dim : a.plan->partials + h * (dim + 2);
    rows[i] = {turned + i * wide, &query, out, kLowest, 0.0f};
  }
}

// The tokens of a partition that any of the rows sees.
OCTAVO_INLINE void span(const Row* rows, std::int64_t count, std::int64_t partition, std::int64_t& begin,
                        std::int64_t& end) {
  begin = (partition + 1) * kPartition;
  end = partition * kPartition;
  const std::int64_t lowest = end, highest = begin;
  for (std::int64_t i = 0; i < count; ++i) {
    begin = least<std::int64_t>(begin, rows[i].seen->begin);
    end = most<std::int64_t>(end, rows[i].seen->end);
  }
  begin = most(begin, lowest);
  end = least(end, highest);
}

// Rows of a work through all its partitions, one after another. `next`: what this thread is likely to read after them.
template <class T>
void walk_rows(Walk& walk, const Work& work, std::int64_t head, Row* rows, std::int64_t count, const Place& next,
               const Room<T>& room) {
  const AttentionArgs& a = *walk.args;
  const Layout<T> at(a);
  const std::int32_t* table = a.plan->step.block_tables + work.sequence * a.plan->step.table_stride;
  for (std::int64_t p = work.first_partition; p < work.end_partition; ++p) {
    std::int64_t begin, end;
    span(rows, count, p, begin, end);
    if (begin >= end) continue;
    Keys<T> keys;
    find(at, table, head, p, begin, end, room.gathered, keys);
    look_ahead(at, a.plan->step, p + 1 < work.end_partition ? Place{work.sequence, head, p + 1} : next, keys);
    walk.partition = p;
    if constexpr (!T::rounds) {
      if (count >= kManyRows) {
        attend_many<T>(walk, keys, rows, count, room);
        continue;
      }
    }
    std::int64_t i = 0;
    if constexpr (T::scaled) {
      for (; i + 2 * kRows <= count; i += 2 * kRows) {
        if (i == 0)
          attend_bytes_twice<true>(walk, keys, rows + i);
        else
          attend_bytes_twice<false>(walk, keys, rows + i);
      }
    }
    for (; i < count; i += kRows)
      attend_up_to<T, kRows>(walk, keys, rows + i, least<std::int64_t>(kRows, count - i), i == 0);
  }
}

template <class T>
void do_work(const AttentionArgs& a, const Work& work, const Query* queries, std::int64_t head, const Place& next,
             const Room<T>& room) {
  const std::int64_t count = work.num_queries * (a.num_heads / a.num_kv_heads), dim = a.head_dim;
  Walk walk{&a, scoring_of(a), whole_vectors(dim), a.num_heads * (dim + 2), 0, work.whole};
  Row rows[kSegment];
  for (std::int64_t first = 0; first < count; first += kSegment) {
    const std::int64_t n = least<std::int64_t>(kSegment, count - first);
    make_rows<T>(a, work, queries, head, first, n, room.queries, rows);
    walk_rows<T>(walk, work, head, rows, n, next, room);
  }
}

// The parts of one head of one query, merged in the order of the context.
OCTAVO_INLINE void merge_parts(const AttentionArgs& a, const Merge& m, std::int64_t head) {
  const std::int64_t dim = a.head_dim, stride = a.num_heads * (dim + 2);
  const float* part = a.plan->partials + m.first_partial * stride + head * (dim + 2);
  float* out = a.out + m.row * a.out_stride + head * dim;
  F highest = set1(kLowest), sum = {};
  for (std::int64_t p = 0; p < m.num_partials; ++p, part += stride) {
    const Fades fades = merge(highest, sum, set1(part[dim]), set1(part[dim + 1]));
    const bool last = p + 1 == m.num_partials;
    const F inverse = set1(last ? 1.0f / sum[0] : 0.0f);
    for (std::int64_t d = 0; d < dim; d += W) {
      const std::int64_t n = dim - d;
      const F old = p == 0 ? F{} : load_up_to(out + d, n);
      const F x = join(old, load_up_to(part + d, n), fades.old, fades.fresh);
      store_up_to(out + d, last ? x * inverse : x, n);
    }
  }
}

// The planner was told of every layer, so it is there.
OCTAVO_INLINE const Schedule& schedule_of(const AttentionArgs& a) {
  const Schedule* schedule = a.plan->schedules;
  while (schedule->window != a.window || schedule->taken != a.taken) ++schedule;
  return *schedule;
}

// A thread's share of the pairs of a work and a head, one after another. The heads of a work lie beside each other, so
// that they go together, until so few are left that threads would wait for each other.
class Share {
 public:
  OCTAVO_INLINE Share(Team& team, std::int64_t heads, std::int64_t total) : team_(team), heads_(heads), total_(total) {}

  OCTAVO_INLINE std::int64_t next() {  // total or more: that was all
    if (next_ == end_) {
      const std::int64_t run = total_ - end_ > 2 * heads_ * team_.size() ? heads_ : 1;
      next_ = team_.claim(run);
      end_ = next_ + run;
    }
    return next_++;
  }

 private:
  Team& team_;
  const std::int64_t heads_, total_;
  std::int64_t next_ = 0, end_ = 0;
};

// All works. A thread knows the one after the one it is at: it has written that one's keys, which takes its time to
// reach memory, and lets the others come closer.
template <class T>
void do_works(const AttentionArgs& a, const Schedule& schedule, Team& team, const Room<T>& room) {
  const std::int64_t heads = a.num_kv_heads, total = schedule.num_works * heads;
  Share share(team, heads, total);
  const auto take = [&] {
    const std::int64_t i = share.next();
    if (i >= total) return i;
    const Work& work = schedule.works[i / heads];
    for (std::int64_t q = 0; work.writes && q < work.num_queries; ++q)
      write<T>(a, schedule.queries[work.first_query + q].token, i % heads);
    return i;
  };
  for (std::int64_t i = take(), next; i < total; i = next) {
    next = take();
    const std::int64_t then = next < total ? next : i;
    const Work &work = schedule.works[i / heads], &after = schedule.works[then / heads];
    do_work<T>(a, work, schedule.queries + work.first_query, i % heads,
               {after.sequence, then % heads, after.first_partition}, room);
  }
}

template <class T>
void run(const AttentionArgs& a, Team& team, int thread) {
  const Schedule& schedule = schedule_of(a);
  if (schedule.num_early > 0) {
    const std::int64_t begin = schedule.num_early * thread / team.size();
    const std::int64_t end = schedule.num_early * (thread + 1) / team.size();
    for (std::int64_t i = begin; i < end; ++i)
      for (std::int64_t head = 0; head < a.num_kv_heads; ++head) write<T>(a, schedule.early[i], head);
    team.barrier();
  }
  do_works<T>(a, schedule, team, Room<T>(*a.plan, thread, whole_vectors(a.head_dim)));
  if (schedule.num_merges == 0) return;
  team.barrier();
  const std::int64_t merges = schedule.num_merges * a.num_heads;
  // Too little work each to be claimed.
  for (std::int64_t i = merges * thread / team.size(); i < merges * (thread + 1) / team.size(); ++i)
    merge_parts(a, schedule.merges[i / a.num_heads], i % a.num_heads);
}

}  // namespace attend

// Rotates q and k, writes k and v to the step's slots, and attends causally over each sequence's blocks. The planner
// must know the layer; `scale` is above 0.
inline void attention(const AttentionArgs& a, Team& team, int thread) {
  switch (a.cache.type) {
    case KvType::bf16: return attend::run<attend::Bf16>(a, team, thread);
    case KvType::f16: return attend::run<attend::F16>(a, team, thread);
    case KvType::f32: return attend::run<attend::F32>(a, team, thread);
    case KvType::int8: return attend::run<attend::Int8>(a, team, thread);
  }
}

}  // namespace octavo::OCTAVO_ISA
