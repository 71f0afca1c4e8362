#include "program.hpp"

#include <omp.h>

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "dispatch.hpp"

namespace octavo {
namespace {

constexpr std::int64_t kLine = 64;  // bytes: every region begins at a cache line

std::int64_t round_up(std::int64_t n, std::int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

[[noreturn]] void refuse(const std::string& sentence) { throw std::invalid_argument(sentence); }

// While building; in a run the sentence is not made unless it is needed.
void require(bool condition, const std::string& sentence) {
  if (!condition) refuse(sentence);
}

std::string text(std::int64_t n) { return std::to_string(n); }

std::int64_t size_of(const std::vector<float>& v) { return static_cast<std::int64_t>(v.size()); }

// All of ids[0, count) lie in [0, limit).
void require_below(const std::int32_t* ids, std::int64_t count, std::int64_t limit, const char* name) {
  std::uint32_t largest = 0;  // a negative number is a huge one here
  for (std::int64_t i = 0; i < count; ++i) largest = std::max(largest, static_cast<std::uint32_t>(ids[i]));
  if (count == 0 || largest < limit) return;
  const auto bad = std::find_if(ids, ids + count, [&](std::int32_t id) { return id < 0 || id >= limit; });
  refuse(std::string(name) + " has " + text(*bad) + ", which is not from 0 to " + text(limit - 1) + ".");
}

// What is gated comes in pieces of 32 columns where it has whole ones.
bool makes_any_form(const Linear& op) { return op.gate && op.weight->rows / 2 % kGroup == 0; }

template <class... Ts>
struct Overloaded : Ts... {
  using Ts::operator()...;
};
template <class... Ts>
Overloaded(Ts...) -> Overloaded<Ts...>;

}  // namespace

// One run's sizes and addresses.
struct Program::Run {
  const RunArgs& args;
  std::int64_t tokens = 0, logits = 0;
  std::vector<std::uint8_t*> bases{};  // of the regions
  AttentionPlan* plan = nullptr;

  std::int64_t rows(Rows kind) const { return kind == Rows::tokens ? tokens : logits; }

  float* f32(const Value& v) const {
    return reinterpret_cast<float*>(bases[static_cast<std::size_t>(v.f32)]) + v.first;
  }

  Forms forms(const Value& v) const {
    Forms forms;
    if (v.f32 >= 0) {
      forms.f32 = f32(v);
      forms.stride = v.stride;
    }
    if (v.q8 >= 0) forms.q8 = reinterpret_cast<Q8*>(bases[static_cast<std::size_t>(v.q8)]);
    if (v.bf16 >= 0) {
      forms.bf16 = reinterpret_cast<std::uint16_t*>(bases[static_cast<std::size_t>(v.bf16)]);
      forms.bf16_stride = round_up(v.columns, kGroup);
    }
    return forms;
  }

  // For what makes float32 only; others of its value are converted later.
  Forms floats(const Value& v) const { return {.f32 = f32(v), .stride = v.stride}; }

  const std::int32_t* array(Source source) const {
    switch (source) {
      case Source::token_ids:
        return args.step->token_ids;
      case Source::positions:
        return args.step->positions;
      case Source::logit_rows:
        return args.step->logit_rows;
      default:
        return nullptr;
    }
  }
};

Program::Program(int threads) : threads_(threads), kernels_(choose()) {
  require(threads >= 1 && threads <= 4096, "a program runs on 1 to 4096 threads, not " + text(threads));
}

// --- building -------------------------------------------------------------------------------------------------------

int Program::add_region(std::int64_t token_bytes, std::int64_t logit_bytes) {
  regions_.push_back({Region::Holder::arena, token_bytes, logit_bytes, Rows::tokens, 0, nullptr});
  return static_cast<int>(regions_.size()) - 1;
}

int Program::add_input(std::int64_t columns) {
  regions_.push_back({Region::Holder::input, 0, 0, Rows::tokens, columns, nullptr});
  return static_cast<int>(regions_.size()) - 1;
}

int Program::add_output(Rows rows, std::int64_t columns) {
  regions_.push_back({Region::Holder::output, 0, 0, rows, columns, nullptr});
  return static_cast<int>(regions_.size()) - 1;
}

int Program::add_value(const Value& v) {
  for (const int region : {v.f32, v.q8, v.bf16}) {
    require(region >= -1 && region < static_cast<int>(regions_.size()), "a value lies in a region that is not there");
  }
  require(v.columns >= 1 && v.first >= 0 && v.first + v.columns <= v.stride, "a value lies outside its rows");
  require(v.q8 < 0 || v.columns % kGroup == 0, "int8 forms have whole groups of 32 columns");
  values_.push_back(v);
  return static_cast<int>(values_.size()) - 1;
}

int Program::add_rope(Rope rope) {
  require(!rope.inv_freq.empty(), "a rotation has at least one frequency");
  ropes_.push_back(std::move(rope));
  return static_cast<int>(ropes_.size()) - 1;
}

void Program::add(Instruction instruction) {
  check_fit(instruction);
  instructions_.push_back(std::move(instruction));
  const auto* const linear = std::get_if<Linear>(&instructions_.back());
  if (linear == nullptr) return;
  for (auto before = instructions_.rbegin() + 1; before != instructions_.rend(); ++before) {
    if (auto* const previous = std::get_if<Linear>(&*before)) {
      previous->after = linear->weight.get();
      previous->after_gated = linear->gate.has_value();
      return;
    }
  }
}

const Value& Program::value(int number) const {
  require(number >= 0 && number < static_cast<int>(values_.size()), "an instruction names a value that is not there");
  return values_[static_cast<std::size_t>(number)];
}

// A value of so many columns that an instruction may write.
const Value& Program::made(int number, std::int64_t columns) const {
  const Value& v = value(number);
  require(v.columns == columns, "an array has " + text(v.columns) + " columns where " + text(columns) + " belong");
  require(v.f32 < 0 || regions_[static_cast<std::size_t>(v.f32)].holder != Region::Holder::input,
          "an instruction writes to an input");
  return v;
}

// A value of so many columns that has a float32 form.
const Value& Program::floats(int number, std::int64_t columns) const {
  const Value& v = value(number);
  require(v.f32 >= 0, "an instruction reads or writes a value that has no float32 form");
  require(v.columns == columns, "an array has " + text(v.columns) + " columns where " + text(columns) + " belong");
  return v;
}

void Program::check_fit(const Instruction& instruction) const {
  std::visit(
      Overloaded{
          [](const Barrier&) {},
          [&](const Linear& op) {
            const Weight& weight = *op.weight;
            const std::int64_t columns = op.gate ? weight.rows / 2 : weight.rows;
            const Value &x = value(op.x), &out = made(op.out, columns);
            if (!makes_any_form(op) || (out.q8 < 0 && out.bf16 < 0)) floats(op.out, columns);
            require(x.columns == weight.columns,
                    "a product has " + text(x.columns) + " columns, but its weight has " + text(weight.columns));
            for (const Input input : weight.inputs) {
              const int region = input == Input::q8 ? x.q8 : input == Input::bf16 ? x.bf16 : x.f32;
              require(region >= 0, "a product reads a form of its input that is not there");
            }
            require(!op.gate || weight.gateable(), "this weight's halves cannot be gated as they are multiplied");
            require(
                op.bias.empty() || size_of(op.bias) == weight.rows,
                "a bias has " + text(size_of(op.bias)) + " elements, but its weight " + text(weight.rows) + " rows");
            require(x.rows == out.rows, "a product keeps the rows of its input");
            require(op.residual < 0 || floats(op.residual, out.columns).rows == out.rows, "a sum is of equal rows");
            require(op.residual < 0 || !op.gate, "what is gated has nothing added to it");
          },
          [&](const Embed& op) {
            made(op.out, op.weight->columns);
            floats(op.out, op.weight->columns);
            require(op.ids == Source::token_ids || op.ids == Source::positions, "an embedding is of tokens");
          },
          [&](const Norm& op) {
            const Value& x = value(op.x);
            const Value& out = made(op.out, x.columns);
            const std::int64_t group = size_of(op.weight);
            floats(op.x, x.columns);
            require(group >= 1 && x.columns % group == 0,
                    "a norm of " + text(group) + " columns does not divide " + text(x.columns) + " columns");
            require(op.bias.empty() || (size_of(op.bias) == group && group == x.columns),
                    "a layer norm's weight and bias are as long as a row");
            require(x.rows == out.rows, "a norm keeps the rows of its input");
            require(op.residual < 0 || floats(op.residual, out.columns).rows == out.rows, "a sum is of equal rows");
          },
          [&](const Map& op) {
            const Value& out = made(op.out, value(op.out).columns);
            const Value& x = floats(op.x, op.kind == MapArgs::Kind::gated ? 2 * out.columns : out.columns);
            const bool taken =
                op.rows == Source::logit_rows && x.rows == Rows::tokens && out.rows == Rows::logits;
            require(op.rows == Source::none ? x.rows == out.rows : taken, "rows are kept, or taken where wanted");
            require((op.kind == MapArgs::Kind::add) == (op.y >= 0), "a sum, and nothing else, has two summands");
            require(op.y < 0 || floats(op.y, out.columns).rows == out.rows, "a sum is of equal rows");
          },
          [&](const Convert& op) { floats(op.x, value(op.x).columns); },
          [&](const Attention& op) {
            require(
                op.head_dim >= 1 && op.num_kv_heads >= 1 && op.num_heads >= 1 && op.num_heads % op.num_kv_heads == 0,
                "attention has whole groups of query heads");
            require(op.head_dim <= kMaxHeadDim, "a head has " + text(op.head_dim) + " dimensions, more than the " +
                                                    text(kMaxHeadDim) + " that the kernels are made for");
            require(op.layer >= 0 && op.window >= 0, "attention's layer and window are not negative");
            require(op.rope >= -1 && op.rope < static_cast<int>(ropes_.size()), "attention has an unknown rotation");
            const std::int64_t queries = std::int64_t{op.num_heads} * op.head_dim;
            const std::int64_t keys = std::int64_t{op.num_kv_heads} * op.head_dim;
            made(op.out, queries);
            floats(op.out, queries);
            for (const Value* v : {&floats(op.q, queries), &floats(op.k, keys), &floats(op.v, keys)}) {
              require(v->rows == Rows::tokens, "attention is of tokens");
            }
            require(op.rope < 0 || 2 * size_of(ropes_[static_cast<std::size_t>(op.rope)].inv_freq) <= op.head_dim,
                    "more dimensions are rotated than a head has");
          },
      },
      instruction);
}

// --- what a run must be ---------------------------------------------------------------------------------------------

namespace {

void check_sequences(const StepView& step, std::int64_t table_columns, const CacheView& cache) {
  const std::int64_t sequences = step.sequences;
  if (step.query_starts[0] != 0 || step.query_starts[sequences] != step.tokens) {
    refuse("query_starts must begin with 0 and end with the number of tokens, " + text(step.tokens) + ".");
  }
  for (std::int64_t s = 0; s < sequences; ++s) {
    const std::int64_t count = std::int64_t{step.query_starts[s + 1]} - step.query_starts[s];
    const std::int64_t length = step.context_lens[s], blocks = (length + cache.block_size - 1) / cache.block_size;
    if (count < 0) refuse("query_starts must not decrease.");
    if (length < std::max<std::int64_t>(count, 1)) {
      refuse("context_lens has " + text(length) + ", which must be at least 1 and the sequence's " + text(count) +
             " tokens of the step.");
    }
    if (blocks > table_columns) {
      refuse("a context of " + text(length) + " tokens takes " + text(blocks) + " blocks, but block_tables has " +
             text(table_columns) + " columns.");
    }
    require_below(step.block_tables + s * step.table_stride, blocks, cache.num_blocks, "block_tables");
  }
}

void check_attention(const Attention& op, const CacheView& cache) {
  if (op.layer < cache.num_layers && op.num_kv_heads == cache.num_kv_heads && op.head_dim == cache.head_dim) return;
  refuse("this cache was made for " + text(cache.num_layers) + " layers of " + text(cache.num_kv_heads) +
         " key/value heads of " + text(cache.head_dim) + " dimensions, not for layer " + text(op.layer) + " with " +
         text(op.num_kv_heads) + " of " + text(op.head_dim) + ".");
}

void check_input(const Matrix& input, std::int64_t rows, std::int64_t columns) {
  if (input.columns != columns) {
    refuse("an input has " + text(input.columns) + " columns where " + text(columns) + " belong.");
  }
  if (input.rows != rows) refuse("an input has " + text(input.rows) + " rows where " + text(rows) + " belong.");
}

}  // namespace

bool Program::check_run(const Run& run) const {
  const RunArgs& args = run.args;
  std::size_t inputs = 0;
  for (const Region& region : regions_) {
    if (region.holder != Region::Holder::input) continue;
    if (inputs == args.inputs.size()) refuse("an input is missing.");
    check_input(args.inputs[inputs++], run.tokens, region.columns);
  }
  if (inputs != args.inputs.size()) refuse("there are more inputs than the program has.");
  if (args.step) require_below(args.step->logit_rows, run.logits, run.tokens, "logit_rows");
  bool attends = false;
  for (const Instruction& instruction : instructions_) {
    if (const auto* embed = std::get_if<Embed>(&instruction)) {
      if (!args.step) refuse("an embedding needs a step.");
      const char* name = embed->ids == Source::token_ids ? "token_ids" : "positions";
      require_below(run.array(embed->ids), run.tokens, embed->weight->rows, name);
    } else if (const auto* map = std::get_if<Map>(&instruction)) {
      if (map->rows != Source::none && !args.step) refuse("rows are taken of a step.");
    } else if (const auto* attention = std::get_if<Attention>(&instruction)) {
      if (!args.step || !args.cache) refuse("attention needs a step and a cache.");
      check_attention(*attention, *args.cache);
      attends = true;
    }
  }
  if (!attends) return false;
  check_sequences(*args.step, args.table_columns, *args.cache);
  require_below(args.step->slots, run.tokens, args.cache->num_blocks * args.cache->block_size, "slots");
  for (const Rope& rope : ropes_) require_below(args.step->positions, run.tokens, rope.max_positions, "positions");
  return true;
}

// --- running --------------------------------------------------------------------------------------------------------

void Program::prepare_planner(int block_size) {
  if (planner_ && planned_block_size_ == block_size) return;
  auto planner = std::make_unique<AttentionPlanner>(block_size);
  std::vector<int> ropes;
  for (const Rope& rope : ropes_) {
    ropes.push_back(planner->add_rope(rope.inv_freq.data(), size_of(rope.inv_freq), rope.factor, rope.max_positions));
  }
  for (const Instruction& instruction : instructions_) {
    if (const auto* op = std::get_if<Attention>(&instruction)) {
      planner->add_layer(op->num_heads, op->num_kv_heads, op->head_dim, op->window, takes(*op));
    }
  }
  planner_ = std::move(planner);
  planned_ropes_ = std::move(ropes);
  planned_block_size_ = block_size;
}

// Gives every region its address; answers the outputs.
std::vector<Output> Program::place(Run& run) {
  std::vector<std::int64_t> offsets;
  std::int64_t end = 0;
  for (const Region& region : regions_) {
    offsets.push_back(end);
    if (region.holder != Region::Holder::arena) continue;
    const std::int64_t bytes = std::max(run.tokens * region.token_bytes, run.logits * region.logit_bytes);
    end += round_up(bytes, kLine);
  }
  if (static_cast<std::int64_t>(arena_.size()) < end) {
    arena_ = Memory();  // first give back the old one
    arena_ = Memory(static_cast<std::size_t>(end));
  }
  std::vector<Output> outputs;
  std::size_t inputs = 0;
  for (std::size_t i = 0; i < regions_.size(); ++i) {
    Region& region = regions_[i];
    if (region.holder == Region::Holder::arena) {
      run.bases.push_back(arena_.data() + offsets[i]);
    } else if (region.holder == Region::Holder::input) {
      // Only read: check_fit lets no instruction write there.
      run.bases.push_back(reinterpret_cast<std::uint8_t*>(const_cast<float*>(run.args.inputs[inputs++].data)));
    } else {
      const std::int64_t rows = run.rows(region.rows);
      const auto bytes = static_cast<std::size_t>(rows * region.columns) * sizeof(float);
      if (!region.output || region.output.use_count() > 1 || region.output->size() < bytes) {
        region.output.reset();
        region.output = std::make_shared<Memory>(bytes);
      }
      run.bases.push_back(region.output->data());
      outputs.push_back({region.output, rows, region.columns});
    }
  }
  return outputs;
}

std::vector<Output> Program::run(const RunArgs& args) {
  const std::lock_guard lock(running_);
  Run run{.args = args};
  if (args.step) {
    run.tokens = args.step->tokens;
    run.logits = args.step->logits;
  } else if (!args.inputs.empty()) {
    run.tokens = args.inputs.front().rows;
  }
  const bool attends = check_run(run);
  std::vector<Output> outputs = place(run);
  if (run.tokens == 0) return outputs;
  if (attends) {
    prepare_planner(args.cache->block_size);
    run.plan = planner_->begin(*args.step, threads_);
  }
  Team all(threads_), alone(1);
#pragma omp parallel num_threads(threads_)
  {
    // Where the system grants fewer threads, one does it all: a team must be complete, and the result is the same.
    const int thread = omp_get_thread_num();
    if (omp_get_num_threads() == threads_) {
      if (thread > 0) settle(thread, threads_);
      execute(run, all, thread);
    } else if (thread == 0) {
      execute(run, alone, 0);
    }
  }
  return outputs;
}

void Program::execute(const Run& run, Team& team, int thread) noexcept {
  const auto v = [&](int number) -> const Value& { return values_[static_cast<std::size_t>(number)]; };
  const auto f32 = [&](int number) -> float* { return number < 0 ? nullptr : run.f32(v(number)); };
  const auto stride = [&](int number) -> std::int64_t { return number < 0 ? 0 : v(number).stride; };
  // This thread's share of a value's rows.
  const auto begin = [&](int number, int before = 0) {
    return run.rows(v(number).rows) * (thread + before) / team.size();
  };
  const auto end = [&](int number) { return begin(number, 1); };
  const Overloaded perform{
      [&](const Barrier&) { team.barrier(); },
      [&](const Linear& op) {
        const LinearArgs args{
            .weight = op.weight.get(),
            .bias = op.bias.empty() ? nullptr : op.bias.data(),
            .x = run.forms(v(op.x)),
            .rows = run.rows(v(op.x).rows),
            .residual = f32(op.residual),
            .residual_stride = stride(op.residual),
            .gated = op.gate.has_value(),
            .activation = op.gate.value_or(Activation::silu),
            .out = makes_any_form(op) ? run.forms(v(op.out)) : run.floats(v(op.out)),
            .after = op.after,
            .after_gated = op.after_gated,
        };
        if (args.rows > 0) kernels_.linear(args, team, thread);
      },
      [&](const Embed& op) {
        const EmbedArgs args{
            .weight = op.weight.get(),
            .ids = run.array(op.ids),
            .factor = op.factor,
            .columns = op.weight->columns,
            .out = run.floats(v(op.out)),
        };
        kernels_.embed(args, begin(op.out), end(op.out));
      },
      [&](const Norm& op) {
        const NormArgs args{
            .x = f32(op.x),
            .x_stride = stride(op.x),
            .columns = v(op.x).columns,
            .group = size_of(op.weight),
            .weight = op.weight.data(),
            .bias = op.bias.empty() ? nullptr : op.bias.data(),
            .eps = op.eps,
            .residual = f32(op.residual),
            .residual_stride = stride(op.residual),
            // Heads are made in float32 only: a group of int8 would lie across two of them.
            .out = size_of(op.weight) == v(op.x).columns ? run.forms(v(op.out)) : run.floats(v(op.out)),
        };
        kernels_.norm(args, begin(op.out), end(op.out));
      },
      [&](const Map& op) {
        const MapArgs args{
            .kind = op.kind,
            .x = f32(op.x),
            .x_stride = stride(op.x),
            .y = f32(op.y),
            .y_stride = stride(op.y),
            .number = op.number,
            .activation = op.activation,
            .rows = run.array(op.rows),
            .columns = v(op.out).columns,
            .out = run.forms(v(op.out)),
        };
        kernels_.map(args, begin(op.out), end(op.out));
      },
      [&](const Convert& op) {
        const Value& x = v(op.x);
        kernels_.convert(run.forms(x), x.columns, begin(op.x), end(op.x));
      },
      [&](const Attention& op) {
        const AttentionArgs args{
            .q = f32(op.q),
            .k = f32(op.k),
            .v = f32(op.v),
            .q_stride = stride(op.q),
            .k_stride = stride(op.k),
            .v_stride = stride(op.v),
            .cache = *run.args.cache,
            .layer = op.layer,
            .plan = run.plan,
            .num_heads = op.num_heads,
            .num_kv_heads = op.num_kv_heads,
            .head_dim = op.head_dim,
            .scale = op.scale,
            .window = op.window,
            .softcap = op.softcap,
            .rope = op.rope < 0 ? -1 : planned_ropes_[static_cast<std::size_t>(op.rope)],
            .taken = takes(op),
            .out = f32(op.out),
            .out_stride = stride(op.out),
        };
        kernels_.attention(args, team, thread);
      },
  };
  if (run.plan) planner_->rotate(team, thread);
  if (!timed_ || thread != 0) {
    for (const Instruction& instruction : instructions_) std::visit(perform, instruction);
    return;
  }
  double last = omp_get_wtime();
  for (std::size_t i = 0; i < instructions_.size(); ++i) {
    std::visit(perform, instructions_[i]);
    const double now = omp_get_wtime();
    seconds_[i] += now - last;
    last = now;
  }
}

void Program::time() {
  const std::lock_guard lock(running_);
  timed_ = true;
  seconds_.assign(instructions_.size(), 0.0);
}

std::vector<std::pair<std::string, double>> Program::seconds() {
  const std::lock_guard lock(running_);
  const Overloaded name{
      [](const Barrier&) { return std::string("barrier"); },
      [](const Linear& op) { return "linear " + text(op.weight->rows) + " x " + text(op.weight->columns); },
      [](const Embed&) { return std::string("embed"); },
      [](const Norm&) { return std::string("norm"); },
      [](const Map&) { return std::string("elementwise"); },
      [](const Convert&) { return std::string("convert"); },
      [](const Attention&) { return std::string("attention"); },
  };
  std::vector<std::pair<std::string, double>> all;
  for (std::size_t i = 0; i < seconds_.size(); ++i) all.emplace_back(std::visit(name, instructions_[i]), seconds_[i]);
  return all;
}

}  // namespace octavo
