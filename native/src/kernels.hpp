// What a build for one instruction set offers: functions over plain structs. Knows neither Python nor the order of a step.
//
// Shapes: T rows (tokens), K columns in, N columns out, H query heads, G key/value heads, D head size, V vocabulary.
// A function that takes a Team is called by all its threads at once and shares the work among them; it ends without a
// barrier (the caller's next phase begins with one). A function over rows [begin, end) is called by one thread.
// No function allocates, throws, or touches anything beyond its arguments.
#pragma once
#include <cstdint>

#include "team.hpp"

namespace octavo {

struct Weight;         // weight.hpp: a matrix in panels
struct AttentionPlan;  // plan.hpp: what all layers' attention shares in a step

constexpr int kGroup = 32;  // columns of a row that share one int8 scale

// Columns of a row as int8: x = q * scale.
struct Q8 {
  std::int8_t q[kGroup];
  float scale;
  float sum;  // of the q
};

// One value of a step in the forms its readers want; a null pointer is a form nobody wants. Rows are `stride` apart
// (in elements); a value may be a run of columns of a wider one.
struct Forms {
  float* f32 = nullptr;
  std::int64_t stride = 0;
  Q8* q8 = nullptr;               // [T, columns / kGroup], only where columns % kGroup == 0
  std::uint16_t* bf16 = nullptr;  // [T, bf16_stride], zero from `columns` on
  std::int64_t bf16_stride = 0;   // columns rounded up to a multiple of 32
};

enum class Activation : int { silu, gelu, gelu_tanh, relu };

struct LinearArgs {
  const Weight* weight;
  const float* bias;  // [N] or null
  Forms x;            // the form that Weight::input() names is there
  std::int64_t rows;
  const float* residual;  // [T, N] added to the product, or null, as where it is gated; may be `out.f32`
  std::int64_t residual_stride;
  bool gated;  // out = activation(first half of the columns) * second half: [T, N / 2]; only if Weight::gateable()
  Activation activation;  // of the gate; without `gated` nothing is activated
  Forms out;              // float32; where it is gated and has whole groups of columns, any form
  const Weight* after = nullptr;  // what the next product will read, and how; or null
  bool after_gated = false;
};

struct EmbedArgs {
  const Weight* weight;
  const std::int32_t* ids;
  float factor;  // rows are multiplied by it
  std::int64_t columns;
  Forms out;  // q8 and bf16 are never wanted of an embedding
};

// y = norm(x) * weight (+ bias), (+ residual): RMS over groups of `group` columns, or layer norm over whole rows.
struct NormArgs {
  const float* x;
  std::int64_t x_stride;
  std::int64_t columns;
  std::int64_t group;  // columns of a norm; `weight` is as long
  const float* weight;
  const float* bias;  // layer norm only; null for RMS
  float eps;
  const float* residual;  // added after the norm (Gemma), or null
  std::int64_t residual_stride;
  Forms out;
};

// Elementwise operations on rows of `columns`.
struct MapArgs {
  enum class Kind : int { copy, add, scale, softcap, activate, gated } kind;
  const float* x;  // gated: [T, 2 * columns], gate then up
  std::int64_t x_stride;
  const float* y;  // add: the other summand
  std::int64_t y_stride;
  float number;  // scale: factor; softcap: cap
  Activation activation;
  const std::int32_t* rows;  // copy: row r of out is row rows[r] of x; null: row r
  std::int64_t columns;
  Forms out;
};

enum class KvType : int { bf16, f16, f32, int8 };

// Bytes of a token's key or value of one head, an int8's scale included.
constexpr std::int64_t head_bytes(KvType type, std::int64_t head_dim) {
  return type == KvType::int8 ? head_dim + 4 : type == KvType::f32 ? 4 * head_dim : 2 * head_dim;
}

// A block is [num_layers, 2, num_kv_heads, block_size * head_bytes]; attention.hpp orders the last.
struct CacheView {
  void* data;
  KvType type;
  std::int64_t num_blocks;
  int num_layers, num_kv_heads, block_size, head_dim;
};

struct AttentionArgs {
  const float *q, *k, *v;  // [T, H * D], [T, G * D], [T, G * D], not rotated
  std::int64_t q_stride, k_stride, v_stride;
  CacheView cache;
  int layer;
  AttentionPlan* plan;
  int num_heads, num_kv_heads, head_dim;
  float scale;
  std::int64_t window;  // 0: none
  float softcap;        // 0: none
  int rope;             // which of the plan's rotations; -1: none
  bool taken;           // of the tokens whose logits are wanted alone, R of them, in the order of the step's logit_rows
  float* out;           // [T or R, H * D]
  std::int64_t out_stride;
};

// Draws and their laws: `Ops.draw` in octavo/ops/interface.py says what they mean.
struct DrawArgs {
  const float* logits;  // [L, V]
  std::int64_t vocab;
  const std::int64_t* sources;  // [R] which row of the logits a draw reads
  std::int64_t draws;           // R
  const double* temperature;    // [R]; 0: the likeliest
  const std::int64_t* top_k;    // [R]; 0: all
  const double* top_p;          // [R] in (0, 1]
  const double* min_p;          // [R] in [0, 1]
  const double* uniform;        // [R] in [0, 1)
  float* scratch;               // [threads, row_scratch(V)], aligned to 8 bytes
  std::int64_t* token_ids;      // [R] out; -1 where the row has a NaN or its maximum is infinite
};

// What to report of given tokens, and of the likeliest.
struct LogprobArgs {
  const float* logits;  // [L, V]
  std::int64_t vocab;
  const std::int64_t* sources;    // [R] which row of the logits an answer reads
  const std::int64_t* token_ids;  // [R]
  std::int64_t rows;              // R
  std::int64_t top;               // N
  float* scratch;                 // as for drawing
  double* log_sums;               // [R] out: log(sum(exp(row))); NaN where the row has a NaN or its maximum is infinite
  std::int64_t* ranks;            // [R] out: 1 + the number of tokens of a strictly higher logit than the given one's
  std::int64_t* top_ids;          // [R, N] out: likeliest first, the lower id first among equals; -1 beyond the last
};

// Floats of scratch that a row of so many logits takes.
constexpr std::int64_t row_scratch(std::int64_t vocab) { return 4 * vocab + 1024; }

struct Kernels {
  const char* name;
  bool byte_dots;  // bytes are multiplied by an instruction of their own, four at a time
  bool bf16_dots;  // so are bf16 pairs, where attention reads keys and values of that type: it rounds the other factors
  bool bf16_rows;  // bf16 weights multiply bf16 activations, as the processor's instructions do; otherwise float32 ones
  void (*linear)(const LinearArgs&, Team&, int thread);
  void (*embed)(const EmbedArgs&, std::int64_t begin, std::int64_t end);
  void (*norm)(const NormArgs&, std::int64_t begin, std::int64_t end);
  void (*map)(const MapArgs&, std::int64_t begin, std::int64_t end);
  void (*convert)(const Forms& x, std::int64_t columns, std::int64_t begin, std::int64_t end);  // f32 to the others
  void (*attention)(const AttentionArgs&, Team&, int thread);
  void (*draw)(const DrawArgs&, Team&, int thread);
  void (*logprobs)(const LogprobArgs&, Team&, int thread);
};

// The builds that this library holds, best first; null-terminated. `usable` asks the processor (and for AMX the kernel);
// `pays`, of a usable one, whether it is faster here than the next.
struct Build {
  const Kernels* kernels;
  bool (*usable)();
  bool (*pays)();
};
extern const Build kBuilds[];

#if defined(OCTAVO_ISA)
namespace OCTAVO_ISA {
extern const Kernels kKernels;  // of the instruction set that this file is compiled for
}
#endif

}  // namespace octavo
