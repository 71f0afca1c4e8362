// What the attention of all layers shares in a step, worked out once: who reads which keys together, and the rotations
// of the step's positions. Knows the step's tables and lengths; neither keys nor values, no instruction set.
//
// Determinism: a context is cut at multiples of kPartition tokens, whatever the batch, the chunk or the thread count.
// The attention to each part is one sum, and the parts are merged in ascending order with the same arithmetic wherever
// they were computed. How the parts are dealt out as works below therefore changes no bit of a result.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "team.hpp"

namespace octavo {

constexpr int kPartition = 256;   // tokens of a context whose attention is one sum
constexpr int kSegment = 132;     // query rows (tokens * heads) that walk through a context together, at most
constexpr int kMaxHeadDim = 512;  // what a layer's head may have

// What one forward pass computes: T tokens of S sequences, as StepInput in octavo/ops/interface.py.
struct StepView {
  const std::int32_t* token_ids;     // [T]
  const std::int32_t* positions;     // [T]
  const std::int32_t* slots;         // [T] block * block_size + offset
  const std::int32_t* query_starts;  // [S + 1]
  const std::int32_t* context_lens;  // [S]
  const std::int32_t* block_tables;  // [S, table_stride]
  std::int64_t table_stride;
  const std::int32_t* logit_rows;  // [R]
  std::int64_t tokens, sequences, logits;  // T, S, R
};

// A token of the step, the row its result goes to, and the keys of its sequence that it sees: [begin, end).
struct Query {
  std::int32_t token, row;
  std::int32_t begin, end;
  std::int64_t partial;  // where the part of partition 0 would lie; that of partition p is `partial + p`
};

// A piece of work, done for each key/value head: some queries that read the same blocks, over a run of partitions.
struct Work {
  std::int64_t first_query, num_queries;
  std::int32_t sequence;  // whose block table leads to the keys
  std::int32_t first_partition, end_partition;
  bool whole;   // these are all the partitions its queries see: the results are finished here, nothing is left to merge
  bool writes;  // its queries are all that is new of the sequence, and nobody else reads it: who does the work writes it
};

// A query whose parts were computed by several works.
struct Merge {
  std::int32_t row;
  std::int64_t first_partial, num_partials;
};

// The works of all layers that have this window and are, or are not, `taken`. Works are in the order in which threads
// should take them.
struct Schedule {
  std::int64_t window;  // 0: none
  bool taken;           // only tokens whose logits are wanted attend: result i is that of logit_rows[i]
  const Query* queries;
  const Work* works;
  std::int64_t num_works;
  const Merge* merges;
  std::int64_t num_merges;
  const std::int32_t* early;  // tokens whose keys and values no work writes: written before any of them begins
  std::int64_t num_early;
};

// Cosines and sines, times the table's factor, of the step's positions: [T, half].
struct Rotation {
  float *cos, *sin;
  std::int64_t half;
};

// What the kernels read; made by AttentionPlanner.
struct AttentionPlan {
  StepView step;
  const Schedule* schedules;
  int num_schedules;
  const Rotation* rotations;
  float* partials;        // [partials, H, D + 2]
  std::uint8_t* tiles;    // [threads, tile_bytes] room for a segment's queries, a partition's keys and values, and more
  std::int64_t tile_bytes;
};

// Memory without a value, aligned to a cache line, which only grows: a step seldom asks for more than the one before.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch();
  void* need(std::size_t bytes);  // the contents are lost where it grows; throws std::bad_alloc

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Owns the plan of the current step. Told of a model's layers first; then, each step, begin() by one thread and
// rotate() by all, and a barrier before the first attention.
class AttentionPlanner {
 public:
  explicit AttentionPlanner(int block_size);
  AttentionPlanner(const AttentionPlanner&) = delete;
  AttentionPlanner& operator=(const AttentionPlanner&) = delete;

  // A table of rotations: AttentionArgs::rope is the answer. `inv_freq` [half], radians a position, is copied.
  // The same table again has the same number.
  int add_rope(const float* inv_freq, std::int64_t half, float factor, std::int64_t max_positions);

  // A layer that attends: makes sure of a schedule for its window (0: none) and of room for its heads. `taken`: as in
  // Schedule. Throws std::invalid_argument, a sentence, where a head is larger than kMaxHeadDim.
  void add_layer(int num_heads, int num_kv_heads, int head_dim, std::int64_t window, bool taken);

  // Plans a step for a team of `threads`; the view's arrays must last as long as the plan is used.
  // Throws std::out_of_range, a sentence, where a position is beyond a rope table.
  AttentionPlan* begin(const StepView& step, int threads);

  // Computes this thread's share of the rotations.
  void rotate(Team& team, int thread);

 private:
  struct Rope {
    std::vector<float> inv_freq;
    float factor;
    std::int64_t max_positions;
  };
  struct Result {  // one that is wanted: a token's, and where it goes
    std::int32_t token, row;
  };
  struct Windowed {  // a schedule and what it points into
    std::int64_t window;
    bool taken;
    std::vector<Query> queries;
    std::vector<Work> works;
    std::vector<Merge> merges;
    std::vector<std::int32_t> early;
    std::int64_t partials;
  };
  struct Single {  // a sequence with one new token, which attends
    std::int32_t sequence;
    Result result;
    std::int32_t first_partition, end_partition;
    std::int64_t partial;   // as in Query
    std::int64_t last_work;  // the one that ends with the partition before, its alone; -1: none
    int num_works;
  };

  void find_results(bool taken);
  bool all_are_wanted() const;
  void schedule(Windowed& windowed, int threads);
  Schedule made(const Windowed& windowed) const;
  bool add_tiles(Windowed& windowed, std::int32_t sequence, const Result* results, std::int64_t count);
  void add_singles(Windowed& windowed);
  void add_alone(Windowed& windowed, Single& single, std::int32_t partition);
  void add_shared(Windowed& windowed, const std::int32_t* members, std::int64_t count, std::int32_t partition);
  void place_rotations();

  Query see(const Windowed& windowed, std::int32_t sequence, const Result& result) const;
  std::int64_t cost(std::int64_t queries, std::int64_t partitions) const;
  int compare_blocks(const Single& a, const Single& b, std::int32_t partition) const;

  const int block_size_;
  int queries_per_key_ = 1;             // most query heads of a key/value head
  int num_kv_heads_ = 0;                // the fewest of a layer
  std::int64_t partial_elements_ = 0;   // of a query and partition, the most of a layer
  std::int64_t tile_bytes_ = 0;         // of a thread, the most of a layer
  std::int64_t target_ = 1;             // cost of a work that leaves no thread idle for long
  std::vector<Rope> ropes_;
  std::vector<Windowed> windowed_;
  std::vector<Schedule> schedules_;
  std::vector<Rotation> rotations_;
  std::vector<Result> results_;  // those wanted of the schedule that is being made, in the order of tokens
  std::vector<Single> singles_;
  std::vector<std::int32_t> order_;
  Scratch angles_, partials_, tiles_;
  AttentionPlan plan_{};
};

}  // namespace octavo
