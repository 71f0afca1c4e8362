// A recorded forward pass: instructions over a few regions of memory, run for any number of tokens in one call.
//
// octavo/ops/native_layout.py decides the order, the barriers and who lies where; here it is carried out, by one team
// of threads from the first instruction to the last. Knows neither Python nor how a kernel works.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "kernels.hpp"
#include "memory.hpp"
#include "plan.hpp"
#include "weight.hpp"

namespace octavo {

enum class Rows : int { tokens, logits };  // a value has a row for each token, or for each row wanted as logits
enum class Source : int { none, token_ids, positions, logit_rows };  // which array of the step rows are looked up by

// A value: columns [first, first + columns) of the float32 rows of `stride` columns in region `f32`, and its other
// forms in regions of their own; -1 where it has none. Instructions name values by their numbers, -1 for none.
struct Value {
  Rows rows;
  std::int64_t columns, stride, first;
  int f32, q8, bf16;
};

// The instructions: each makes `out`, as Kernels says.
struct Linear {
  int x;
  std::shared_ptr<const Weight> weight;
  std::vector<float> bias;  // empty: none
  int residual;
  std::optional<Activation> gate;  // none: not gated
  int out;
  const Weight* after = nullptr;  // what the program's next product reads, and how: add() knows when that comes
  bool after_gated = false;
};
struct Embed {
  std::shared_ptr<const Weight> weight;
  Source ids;
  float factor;
  int out;
};
struct Norm {
  int x;
  std::vector<float> weight, bias;  // empty bias: RMS
  float eps;
  int residual;
  int out;
};
struct Map {
  MapArgs::Kind kind;
  int x, y;
  float number;
  Activation activation;
  Source rows;
  int out;
};
struct Convert {
  int x;  // its float32 form to the others it has
};
struct Attention {
  int q, k, v;
  int layer, num_heads, num_kv_heads, head_dim;
  float scale;
  std::int64_t window;  // 0: none
  float softcap;        // 0: none
  int rope;             // what add_rope answered; -1: none
  int out;              // of all tokens, or of those alone whose logits are wanted
};
struct Barrier {};  // every thread waits for all others
using Instruction = std::variant<Barrier, Linear, Embed, Norm, Map, Convert, Attention>;

struct Rope {
  std::vector<float> inv_freq;  // radians a position
  float factor;
  std::int64_t max_positions;
};

// A matrix of the caller's, rows one after another.
struct Matrix {
  const float* data;
  std::int64_t rows, columns;
};

// What a run made: [rows, columns]. Its memory is used again by a later run once nobody else holds it.
struct Output {
  std::shared_ptr<Memory> memory;
  std::int64_t rows, columns;
};

// What a run works on. Without a step, its tokens are the rows of the inputs.
struct RunArgs {
  std::vector<Matrix> inputs;
  std::optional<StepView> step;
  std::int64_t table_columns = 0;  // of step->block_tables
  std::optional<CacheView> cache;
};

class Program {
 public:
  explicit Program(int threads);
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // --- building: each throws std::invalid_argument, a sentence, for what does not fit together ---

  // Memory of so many bytes a token, or a logit row, whichever is more; answers its number, as do the next three.
  int add_region(std::int64_t token_bytes, std::int64_t logit_bytes);
  int add_input(std::int64_t columns);              // the next of RunArgs::inputs
  int add_output(Rows rows, std::int64_t columns);  // the next of what run() answers
  int add_value(const Value& value);
  int add_rope(Rope rope);
  void add(Instruction instruction);

  // --- running ---

  // Carries it all out; calls from several threads take turns. Throws before anything is written:
  // std::invalid_argument, a sentence, where the arguments do not fit each other or the program; std::bad_alloc.
  std::vector<Output> run(const RunArgs& args);

  int threads() const { return threads_; }

  // From now on, note the time that thread 0 spends in each instruction; a barrier's is the time it waits.
  void time();
  std::vector<std::pair<std::string, double>> seconds();  // each instruction's kind, and its sum since time()

 private:
  struct Region {
    enum class Holder : int { arena, input, output } holder;
    std::int64_t token_bytes, logit_bytes;
    Rows rows;             // of an output
    std::int64_t columns;  // of an input or output
    std::shared_ptr<Memory> output;
  };
  struct Run;

  const Value& value(int number) const;
  const Value& made(int number, std::int64_t columns) const;
  const Value& floats(int number, std::int64_t columns) const;
  bool takes(const Attention& op) const { return value(op.out).rows == Rows::logits; }
  void check_fit(const Instruction& instruction) const;
  bool check_run(const Run& run) const;  // whether it attends
  void prepare_planner(int block_size);
  std::vector<Output> place(Run& run);
  void execute(const Run& run, Team& team, int thread) noexcept;

  const int threads_;
  const Kernels& kernels_;
  std::vector<Region> regions_;
  std::vector<Value> values_;
  std::vector<Rope> ropes_;
  std::vector<Instruction> instructions_;

  bool timed_ = false;
  std::vector<double> seconds_;  // of each instruction; written by thread 0

  std::mutex running_;  // guards what follows, and the outputs of the regions
  Memory arena_;
  std::unique_ptr<AttentionPlanner> planner_;
  int planned_block_size_ = 0;
  std::vector<int> planned_ropes_;  // the planner's numbers of ropes_
};

}  // namespace octavo
