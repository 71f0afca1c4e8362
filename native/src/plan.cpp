// Deals a step's attention out as works, so that few long contexts and many short ones both fill all threads, and keys
// that several sequences share are read once. Knows tables and lengths; neither keys nor values.
//
// Cutting a context in parts that are computed apart and merged is Flash-Decoding (Dao et al. 2023); one pass over a
// shared prefix for all its sequences is Hydragen's (Juravsky et al. 2024, arXiv:2402.05099) and ChunkAttention's
// (Ye et al. 2024, arXiv:2402.15220), found here from the block tables alone.
#include "plan.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

namespace octavo {
namespace {

constexpr std::int64_t kTileRows = 96;   // query rows (tokens * heads) of a prefill work: each key read serves so many
constexpr std::int64_t kFewestRows = 24;  // with fewer, keys are read too often for what is done with them
constexpr std::int64_t kReadCost = 6;    // reading a partition's keys costs as much as this many rows' products
constexpr std::int64_t kWorksPerThread = 16;

std::int32_t first_partition(const Query& q) { return q.begin / kPartition; }
std::int32_t end_partition(const Query& q) { return (q.end + kPartition - 1) / kPartition; }

}  // namespace

Scratch::~Scratch() { std::free(data_); }

void* Scratch::need(std::size_t bytes) {
  if (bytes > bytes_) {
    std::free(data_);
    data_ = nullptr;
    bytes_ = 0;
    const std::size_t room = (bytes + bytes / 2 + 4095) / 4096 * 4096;  // a context grows by a token a step
    data_ = std::aligned_alloc(64, room);
    if (data_ == nullptr) throw std::bad_alloc();
    bytes_ = room;
  }
  return data_;
}

AttentionPlanner::AttentionPlanner(int block_size) : block_size_(block_size) {}

int AttentionPlanner::add_rope(const float* inv_freq, std::int64_t half, float factor, std::int64_t max_positions) {
  const Rope rope{{inv_freq, inv_freq + half}, factor, max_positions};
  for (std::size_t i = 0; i < ropes_.size(); ++i) {
    const Rope& other = ropes_[i];
    if (other.inv_freq == rope.inv_freq && other.factor == factor && other.max_positions == max_positions)
      return static_cast<int>(i);
  }
  ropes_.push_back(rope);
  return static_cast<int>(ropes_.size()) - 1;
}

void AttentionPlanner::add_layer(int num_heads, int num_kv_heads, int head_dim, std::int64_t window, bool taken) {
  if (head_dim > kMaxHeadDim)
    throw std::invalid_argument("a head of " + std::to_string(head_dim) + " dimensions is larger than the " +
                                std::to_string(kMaxHeadDim) + " that the native kernels are made for");
  const std::int64_t padded = (head_dim + 15) / 16 * 16;  // to whole vectors of any instruction set
  queries_per_key_ = std::max(queries_per_key_, num_heads / num_kv_heads);
  num_kv_heads_ = num_kv_heads_ == 0 ? num_kv_heads : std::min(num_kv_heads_, num_kv_heads);
  partial_elements_ = std::max<std::int64_t>(partial_elements_, num_heads * std::int64_t{head_dim + 2});
  // Queries; keys and values gathered; a tile of 64, sums and scores: attention.hpp, Room.
  const std::int64_t floats = (2 * kPartition + 64 + 2 * kSegment) * padded + kSegment * (kPartition + 16);
  tile_bytes_ = std::max<std::int64_t>(tile_bytes_, floats * 4);
  for (const Windowed& known : windowed_)
    if (known.window == window && known.taken == taken) return;
  windowed_.push_back(Windowed{window, taken, {}, {}, {}, {}, 0});
}

AttentionPlan* AttentionPlanner::begin(const StepView& step, int threads) {
  const std::int32_t last = step.tokens ? *std::max_element(step.positions, step.positions + step.tokens) : 0;
  for (const Rope& rope : ropes_)
    if (last >= rope.max_positions)
      throw std::out_of_range("position " + std::to_string(last) + " is beyond the " +
                              std::to_string(rope.max_positions) + " this model was set up for");
  plan_.step = step;
  schedules_.clear();
  std::int64_t partials = 0;
  const bool all = all_are_wanted();
  for (Windowed& windowed : windowed_) {
    const auto same = std::find_if(schedules_.begin(), schedules_.end(), [&](const Schedule& other) {
      return all && windowed.taken && other.window == windowed.window;
    });
    if (same != schedules_.end()) {
      Schedule again = *same;
      again.taken = true;
      schedules_.push_back(again);
      continue;
    }
    schedule(windowed, threads);
    partials = std::max(partials, windowed.partials);
    schedules_.push_back(made(windowed));
  }
  place_rotations();
  plan_.schedules = schedules_.data();
  plan_.num_schedules = static_cast<int>(schedules_.size());
  plan_.rotations = rotations_.data();
  plan_.partials = static_cast<float*>(partials_.need(4 * static_cast<std::size_t>(partials * partial_elements_)));
  plan_.tiles = static_cast<std::uint8_t*>(tiles_.need(static_cast<std::size_t>(threads * tile_bytes_)));
  plan_.tile_bytes = tile_bytes_;
  return &plan_;
}

// --- rotations ------------------------------------------------------------------------------------------------------

void AttentionPlanner::place_rotations() {
  std::size_t elements = 0;
  for (const Rope& rope : ropes_) elements += 2 * rope.inv_freq.size();
  const std::size_t tokens = static_cast<std::size_t>(plan_.step.tokens);
  float* next = static_cast<float*>(angles_.need(sizeof(float) * elements * tokens));
  rotations_.clear();
  for (const Rope& rope : ropes_) {
    const std::size_t size = rope.inv_freq.size() * tokens;
    rotations_.push_back({next, next + size, static_cast<std::int64_t>(rope.inv_freq.size())});
    next += 2 * size;
  }
}

void AttentionPlanner::rotate(Team& team, int thread) {
  const std::int64_t begin = plan_.step.tokens * thread / team.size();
  const std::int64_t end = plan_.step.tokens * (thread + 1) / team.size();
  for (std::size_t r = 0; r < ropes_.size(); ++r) {
    const Rope& rope = ropes_[r];
    const Rotation& to = rotations_[r];
    for (std::int64_t t = begin; t < end; ++t) {
      const float position = static_cast<float>(plan_.step.positions[t]);
      for (std::int64_t i = 0; i < to.half; ++i) {
        const float angle = position * rope.inv_freq[static_cast<std::size_t>(i)];  // float32, as models are trained
        to.cos[t * to.half + i] = std::cos(angle) * rope.factor;
        to.sin[t * to.half + i] = std::sin(angle) * rope.factor;
      }
    }
  }
}

// --- works ----------------------------------------------------------------------------------------------------------

Query AttentionPlanner::see(const Windowed& windowed, std::int32_t sequence, const Result& result) const {
  const std::int32_t place = plan_.step.context_lens[sequence] - plan_.step.query_starts[sequence + 1] + result.token;
  const std::int64_t begin = windowed.window > 0 ? std::max<std::int64_t>(0, place + 1 - windowed.window) : 0;
  return {result.token, result.row, static_cast<std::int32_t>(begin), place + 1, 0};
}

// Whether the rows whose logits are wanted are all tokens, in their order: as when every sequence only decodes.
bool AttentionPlanner::all_are_wanted() const {
  if (plan_.step.logits != plan_.step.tokens) return false;
  for (std::int32_t t = 0; t < plan_.step.tokens; ++t)
    if (plan_.step.logit_rows[t] != t) return false;
  return true;
}

void AttentionPlanner::find_results(bool taken) {
  results_.clear();
  const std::int64_t count = taken ? plan_.step.logits : plan_.step.tokens;
  for (std::int32_t i = 0; i < count; ++i) results_.push_back({taken ? plan_.step.logit_rows[i] : i, i});
  if (!taken) return;
  std::stable_sort(results_.begin(), results_.end(), [](const Result& a, const Result& b) { return a.token < b.token; });
}

// In rows times partitions.
std::int64_t AttentionPlanner::cost(std::int64_t queries, std::int64_t partitions) const {
  return (queries * queries_per_key_ + kReadCost) * partitions;
}

void AttentionPlanner::schedule(Windowed& windowed, int threads) {
  windowed.queries.clear();
  windowed.works.clear();
  windowed.merges.clear();
  windowed.early.clear();
  windowed.partials = 0;
  singles_.clear();
  find_results(windowed.taken);
  const StepView& step = plan_.step;
  const auto in_sequences = [&](const auto& call) {
    const Result *first = results_.data(), *const end = first + results_.size();
    for (std::int32_t s = 0; s < step.sequences; ++s) {
      const Result* next = first;
      while (next != end && next->token < step.query_starts[s + 1]) ++next;
      call(s, first, next - first);
      first = next;
    }
  };
  std::int64_t total = 0;
  in_sequences([&](std::int32_t s, const Result* results, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
      const Query q = see(windowed, s, results[i]);
      total += cost(1, end_partition(q) - first_partition(q));
    }
  });
  target_ = total * num_kv_heads_ / (std::int64_t{threads} * kWorksPerThread);
  in_sequences([&](std::int32_t s, const Result* results, std::int64_t count) {
    const std::int32_t begin = step.query_starts[s], end = step.query_starts[s + 1];
    if (count == 1 && end - begin == 1) {
      const Query q = see(windowed, s, *results);
      const std::int32_t p = first_partition(q), last = end_partition(q);
      singles_.push_back({s, *results, p, last, windowed.partials - p, -1, 0});
      windowed.partials += last - p;
    } else if (!add_tiles(windowed, s, results, count)) {
      for (std::int32_t t = begin; t < end; ++t) windowed.early.push_back(t);
    }
  });
  add_singles(windowed);
  // The most expensive first, so that the last ones taken are short; of equal ones the order of the step.
  std::sort(windowed.works.begin(), windowed.works.end(), [this](const Work& a, const Work& b) {
    const std::int64_t left = cost(a.num_queries, a.end_partition - a.first_partition);
    const std::int64_t right = cost(b.num_queries, b.end_partition - b.first_partition);
    if (left != right) return left > right;
    if (a.first_query != b.first_query) return a.first_query < b.first_query;
    return a.first_partition < b.first_partition;
  });
}

// Works of a sequence with several new tokens: tiles of neighbouring results, over their context or runs of it. Answers
// whether one work does it all, and writes the keys and values.
bool AttentionPlanner::add_tiles(Windowed& windowed, std::int32_t sequence, const Result* results, std::int64_t count) {
  const std::int32_t start = plan_.step.query_starts[sequence], last = plan_.step.query_starts[sequence + 1];
  bool every = count == last - start;  // token has one result
  for (std::int64_t i = 0; every && i < count; ++i) every = results[i].token == start + i;
  bool writes = false;
  for (std::int64_t first = 0; first < count;) {
    const std::int32_t begin = first_partition(see(windowed, sequence, results[first]));
    std::int64_t tile = std::max<std::int64_t>(1, kTileRows / queries_per_key_);
    tile = std::min<std::int64_t>(tile, count - first);
    std::int64_t partitions;
    for (;; tile = (tile + 1) / 2) {
      partitions = end_partition(see(windowed, sequence, results[first + tile - 1])) - begin;
      if (cost(tile, partitions) <= target_ || tile * queries_per_key_ <= kFewestRows || tile == 1) break;
    }
    const std::int64_t run = std::clamp<std::int64_t>(target_ / cost(tile, 1), 1, partitions);
    const bool whole = run == partitions;
    writes = whole && every && tile == count;
    const std::int64_t first_query = static_cast<std::int64_t>(windowed.queries.size());
    for (std::int64_t i = first; i < first + tile; ++i) {
      Query q = see(windowed, sequence, results[i]);
      if (!whole) {
        const std::int32_t parts = end_partition(q) - first_partition(q);
        q.partial = windowed.partials - first_partition(q);
        windowed.merges.push_back({q.row, windowed.partials, parts});
        windowed.partials += parts;
      }
      windowed.queries.push_back(q);
    }
    for (std::int64_t p = begin; p < begin + partitions; p += run)
      windowed.works.push_back({first_query, tile, sequence, static_cast<std::int32_t>(p),
                                static_cast<std::int32_t>(std::min(p + run, begin + partitions)), whole, writes});
    first += tile;
  }
  return writes;
}

Schedule AttentionPlanner::made(const Windowed& windowed) const {
  const auto count = [](const auto& all) { return static_cast<std::int64_t>(all.size()); };
  return {windowed.window,        windowed.taken,         windowed.queries.data(), windowed.works.data(),
          count(windowed.works),  windowed.merges.data(), count(windowed.merges),  windowed.early.data(),
          count(windowed.early)};
}

// Works of the sequences with one new token: in each partition, those whose blocks there are the same go together.
void AttentionPlanner::add_singles(Windowed& windowed) {
  std::int32_t end = 0;
  for (const Single& single : singles_) end = std::max(end, single.end_partition);
  for (std::int32_t p = 0; p < end; ++p) {
    order_.clear();
    for (std::size_t i = 0; i < singles_.size(); ++i)
      if (singles_[i].first_partition <= p && p < singles_[i].end_partition)
        order_.push_back(static_cast<std::int32_t>(i));
    const auto single = [this](std::int32_t i) -> Single& { return singles_[static_cast<std::size_t>(i)]; };
    std::sort(order_.begin(), order_.end(), [&](std::int32_t a, std::int32_t b) {
      const int order = compare_blocks(single(a), single(b), p);
      return order ? order < 0 : a < b;
    });
    for (std::size_t i = 0, next; i < order_.size(); i = next) {
      for (next = i + 1; next < order_.size(); ++next)
        if (compare_blocks(single(order_[i]), single(order_[next]), p)) break;
      if (next == i + 1)
        add_alone(windowed, single(order_[i]), p);
      else
        add_shared(windowed, &order_[i], static_cast<std::int64_t>(next - i), p);
    }
  }
  for (const Single& single : singles_) {
    if (single.num_works == 1 && single.last_work >= 0) {
      Work& work = windowed.works[static_cast<std::size_t>(single.last_work)];
      work.whole = work.writes = true;
      continue;
    }
    windowed.early.push_back(single.result.token);
    windowed.merges.push_back({single.result.row, single.partial + single.first_partition,
                               single.end_partition - single.first_partition});
  }
}

// Lengthens the sequence's work by a partition, or starts another.
void AttentionPlanner::add_alone(Windowed& windowed, Single& single, std::int32_t partition) {
  if (single.last_work >= 0) {
    Work& work = windowed.works[static_cast<std::size_t>(single.last_work)];
    if (work.end_partition == partition && cost(1, partition + 1 - work.first_partition) <= target_) {
      ++work.end_partition;
      return;
    }
  }
  const std::int64_t first_query = static_cast<std::int64_t>(windowed.queries.size());
  windowed.queries.push_back(see(windowed, single.sequence, single.result));
  windowed.queries.back().partial = single.partial;
  single.last_work = static_cast<std::int64_t>(windowed.works.size());
  ++single.num_works;
  windowed.works.push_back({first_query, 1, single.sequence, partition, partition + 1, false, false});
}

// Works for the members (of singles_) together: one, or several where one would keep the other threads waiting.
void AttentionPlanner::add_shared(Windowed& windowed, const std::int32_t* members, std::int64_t count,
                                  std::int32_t partition) {
  const std::int64_t fewest = std::max<std::int64_t>(1, kFewestRows / queries_per_key_);
  const std::int64_t most = std::max(fewest, (target_ - kReadCost) / queries_per_key_);
  const std::int64_t pieces = (count + most - 1) / most;
  for (std::int64_t piece = 0; piece < pieces; ++piece) {
    const std::int64_t begin = count * piece / pieces, end = count * (piece + 1) / pieces;
    const std::int64_t first_query = static_cast<std::int64_t>(windowed.queries.size());
    std::int32_t longest = singles_[static_cast<std::size_t>(members[begin])].sequence;
    for (std::int64_t i = begin; i < end; ++i) {
      Single& single = singles_[static_cast<std::size_t>(members[i])];
      windowed.queries.push_back(see(windowed, single.sequence, single.result));
      windowed.queries.back().partial = single.partial;
      single.num_works += 2;  // whatever follows, there is something to merge
    }
    windowed.works.push_back({first_query, end - begin, longest, partition, partition + 1, false, false});
  }
}

// Orders sequences by the blocks that they hold in a partition; 0 where these are the same.
int AttentionPlanner::compare_blocks(const Single& a, const Single& b, std::int32_t partition) const {
  const StepView& step = plan_.step;
  const std::int32_t first = partition * (kPartition / block_size_);
  const auto count = [&](const Single& single) {
    const std::int32_t held = (step.context_lens[single.sequence] + block_size_ - 1) / block_size_;
    return std::min(held - first, kPartition / block_size_);
  };
  const std::int32_t left = count(a), right = count(b);
  if (left != right) return left - right;
  return std::memcmp(step.block_tables + a.sequence * step.table_stride + first,
                     step.block_tables + b.sequence * step.table_stride + first,
                     static_cast<std::size_t>(left) * sizeof(std::int32_t));
}

}  // namespace octavo
