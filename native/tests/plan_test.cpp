// The plan of random steps: every query sees each of its partitions once, every key is written once and before another
// work reads it, shared blocks are read once, and no thread is left without work. Knows no kernel.
#include "plan.hpp"

#include <algorithm>
#include <cstdio>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <vector>

namespace octavo::testing {
namespace {

int failures = 0;
unsigned seed = 0;

void expect(bool right, const char* what) {
  if (!right && ++failures <= 20) std::printf("FAIL seed %u: %s\n", seed, what);
}

struct Step {
  std::vector<std::int32_t> positions, slots, starts{0}, lens, tables, logit_rows;
  std::int64_t stride = 0;

  StepView view() const {
    return {nullptr, positions.data(), slots.data(), starts.data(), lens.data(), tables.data(), stride,
            logit_rows.data(), starts.back(), static_cast<std::int64_t>(lens.size()),
            static_cast<std::int64_t>(logit_rows.size())};
  }

  // The tokens that attend, in the order of their results.
  std::vector<std::int32_t> attending(const Schedule& schedule) const {
    if (schedule.taken) return logit_rows;
    std::vector<std::int32_t> all(positions.size());
    std::iota(all.begin(), all.end(), 0);
    return all;
  }
};

// Sequences of (context, new tokens), whose first `shared` tokens lie in the same blocks.
Step make(const std::vector<std::pair<int, int>>& sequences, int shared, int block_size) {
  Step step;
  for (const auto& [context, fresh] : sequences)
    step.stride = std::max<std::int64_t>(step.stride, context / block_size + 1);
  std::int32_t next = 1 << 16;
  for (const auto& [context, fresh] : sequences) {
    for (std::int32_t b = 0; b < step.stride; ++b) {
      const bool own = b * block_size < context, common = (b + 1) * block_size <= shared;
      step.tables.push_back(!own ? 0 : common ? b + 1 : next++);
    }
    for (int t = context - fresh; t < context; ++t) step.positions.push_back(t);
    step.starts.push_back(static_cast<std::int32_t>(step.positions.size()));
    step.lens.push_back(context);
  }
  step.slots.assign(step.positions.size(), 0);
  return step;
}

void check_cover(const Step& step, const Schedule& schedule) {
  const std::vector<std::int32_t> tokens = step.attending(schedule);
  std::map<std::int32_t, std::multiset<std::int32_t>> seen;  // partitions of each result, by its row
  std::map<std::int32_t, std::set<std::int64_t>> parts;
  std::set<std::int32_t> whole;
  for (std::int64_t w = 0; w < schedule.num_works; ++w) {
    const Work& work = schedule.works[w];
    for (std::int64_t i = 0; i < work.num_queries; ++i) {
      const Query& query = schedule.queries[work.first_query + i];
      const bool known = 0 <= query.row && query.row < static_cast<std::int64_t>(tokens.size());
      expect(known && tokens[static_cast<std::size_t>(query.row)] == query.token, "a result is that of its row's token");
      if (work.whole) expect(whole.insert(query.row).second, "a result is finished once");
      for (std::int32_t p = work.first_partition; p < work.end_partition; ++p) {
        if (query.end <= p * kPartition || query.begin >= (p + 1) * kPartition) continue;
        seen[query.row].insert(p);
        if (!work.whole) expect(parts[query.row].insert(query.partial + p).second, "a part has a place of its own");
      }
    }
  }
  for (std::int64_t m = 0; m < schedule.num_merges; ++m) {
    const Merge& merge = schedule.merges[m];
    expect(!whole.count(merge.row), "a finished result is not merged");
    std::set<std::int64_t> places;
    for (std::int64_t i = 0; i < merge.num_partials; ++i) places.insert(merge.first_partial + i);
    expect(places == parts[merge.row], "what is merged is what was computed");
    parts.erase(merge.row);
  }
  for (const auto& [row, places] : parts) expect(places.empty(), "every part is merged");
  expect(seen.size() == tokens.size(), "each token that attends has a result, and no other");
  for (std::size_t row = 0; row < tokens.size(); ++row) {
    const std::int64_t end = step.positions[static_cast<std::size_t>(tokens[row])] + 1;
    const std::int64_t begin = schedule.window ? std::max<std::int64_t>(0, end - schedule.window) : 0;
    std::multiset<std::int32_t> right;
    for (std::int64_t p = begin / kPartition; p * kPartition < end; ++p) right.insert(static_cast<std::int32_t>(p));
    expect(seen[static_cast<std::int32_t>(row)] == right, "each partition in sight is looked at once");
  }
}

// Keys are written early, or by the one work that computes all that is new of their sequence.
void check_writes(const Step& step, const Schedule& schedule) {
  std::multiset<std::int32_t> written(schedule.early, schedule.early + schedule.num_early), right;
  for (std::int64_t w = 0; w < schedule.num_works; ++w) {
    const Work& work = schedule.works[w];
    if (!work.writes) continue;
    const auto sequence = static_cast<std::size_t>(work.sequence);
    expect(work.whole, "who writes keys reads all of them");
    expect(work.num_queries == step.starts[sequence + 1] - step.starts[sequence], "who writes keys is their one reader");
    for (std::int64_t i = 0; i < work.num_queries; ++i) {
      const std::int32_t token = schedule.queries[work.first_query + i].token;
      expect(step.starts[sequence] <= token && token < step.starts[sequence + 1], "a work writes to its own sequence");
      written.insert(token);
    }
  }
  for (std::size_t t = 0; t < step.positions.size(); ++t) right.insert(static_cast<std::int32_t>(t));
  expect(written == right, "each key is written once");
}

void random_steps() {
  for (seed = 0; seed < 300; ++seed) {
    std::mt19937 random(seed);
    const int block_size = 1 << random() % 7, shared = static_cast<int>(random() % 1200);
    std::vector<std::pair<int, int>> sequences;
    for (unsigned n = 1 + random() % 20; sequences.size() < n;) {
      const int context = shared + 1 + static_cast<int>(random() % 900);
      const int some = 1 + static_cast<int>(random() % 400) % (context - shared);
      const int fresh = random() % 3 ? 1 : random() % 8 ? some : 0;
      sequences.emplace_back(context, fresh);
    }
    Step step = make(sequences, shared, block_size);
    // Of no token, of all, or of some, in any order, one perhaps twice.
    for (std::size_t t = 0; seed % 4 > 0 && t < step.positions.size(); ++t)
      for (unsigned n = seed % 4 == 1 ? 1 : random() % 8 / 6; n > 0; --n)
        step.logit_rows.push_back(static_cast<std::int32_t>(t));
    if (seed % 4 == 2) std::shuffle(step.logit_rows.begin(), step.logit_rows.end(), random);
    if (seed % 4 == 3 && !step.logit_rows.empty()) step.logit_rows.push_back(step.logit_rows.back());
    AttentionPlanner planner(block_size);
    const std::int64_t window = 1 + static_cast<std::int64_t>(random() % 700);
    planner.add_layer(9, 3, 64, 0, false);
    planner.add_layer(9, 3, 64, window, false);
    planner.add_layer(9, 3, 64, 0, true);
    planner.add_layer(9, 3, 64, window, true);
    for (int threads : {1, 2, 16}) {
      const AttentionPlan* plan = planner.begin(step.view(), threads);
      expect(plan->num_schedules == 4, "each window has a schedule, and another of the tokens whose logits are wanted");
      for (int i = 0; i < plan->num_schedules; ++i) {
        check_cover(step, plan->schedules[i]);
        check_writes(step, plan->schedules[i]);
      }
    }
  }
}

void shared_prefix_is_read_once() {
  const Step step = make(std::vector<std::pair<int, int>>(32, {1088, 1}), 1024, 16);
  AttentionPlanner planner(16);
  planner.add_layer(9, 3, 64, 0, false);
  const Schedule& schedule = planner.begin(step.view(), 2)->schedules[0];
  std::int64_t shared = 0, alone = 0;
  for (std::int64_t w = 0; w < schedule.num_works; ++w) {
    const Work& work = schedule.works[w];
    (work.num_queries == 32 ? shared : alone) += work.end_partition - work.first_partition;
  }
  expect(shared == 4 && alone == 32, "32 sequences read 4 shared partitions once and one of their own each");
}

// The longest thread's share of the partitions if each takes the next work when it is done, over the mean.
double imbalance(const std::vector<std::pair<int, int>>& sequences, int threads) {
  const Step step = make(sequences, 0, 16);
  AttentionPlanner planner(16);
  planner.add_layer(9, 3, 64, 0, false);
  const Schedule& schedule = planner.begin(step.view(), threads)->schedules[0];
  std::vector<std::int64_t> load(static_cast<std::size_t>(threads));
  std::int64_t total = 0;
  for (std::int64_t i = 0; i < 3 * schedule.num_works; ++i) {
    const Work& work = schedule.works[i / 3];
    const std::int64_t cost = work.num_queries * (work.end_partition - work.first_partition);
    *std::min_element(load.begin(), load.end()) += cost;
    total += cost;
  }
  return static_cast<double>(*std::max_element(load.begin(), load.end()) * threads) / static_cast<double>(total);
}

void no_thread_is_idle() {
  for (int threads : {2, 8, 32}) {
    expect(imbalance({{8192, 1}}, threads) < 1.2, "one long context fills all threads");
    expect(imbalance(std::vector<std::pair<int, int>>(256, {100, 1}), threads) < 1.2, "many short contexts do");
    expect(imbalance({{2048, 2048}}, threads) < 1.2, "a prompt does");
    expect(imbalance({{8192, 16}}, threads) < 1.2, "the end of a long prompt does");
    expect(imbalance({{8192, 1}, {100, 1}, {300, 300}, {40, 1}}, threads) < 1.25, "a mixture does");
  }
}

void far_positions_are_refused() {
  const Step step = make({{100, 1}}, 0, 16);
  AttentionPlanner planner(16);
  const float inv_freq[] = {1.0f, 0.1f};
  planner.add_layer(1, 1, 4, 0, false);
  expect(planner.add_rope(inv_freq, 2, 1.0f, 100) == 0 && planner.add_rope(inv_freq, 2, 1.0f, 99) == 1 &&
             planner.add_rope(inv_freq, 2, 1.0f, 100) == 0,
         "a table has one number");
  try {
    planner.begin(step.view(), 1);
    expect(false, "position 99 is beyond 99 positions");
  } catch (const std::out_of_range&) {
  }
}

}  // namespace
}  // namespace octavo::testing

int main() {
  using namespace octavo::testing;
  random_steps();
  shared_prefix_is_read_once();
  no_thread_is_idle();
  far_positions_are_refused();
  std::printf("%d failures\n", failures);
  return failures ? 1 : 0;
}
