// octavo._native: weights, caches and programs for Python. Knows types and shapes, not what they mean.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <initializer_list>
#include <limits>
#include <map>
#include <memory>
#include <stdexcept>
#include <utility>

#include "blocks.hpp"
#include "dispatch.hpp"
#include "program.hpp"
#include "sampling.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

using Ints = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const std::int32_t, nb::ndim<2>, nb::device::cpu>;
using Pairs = nb::ndarray<const std::int32_t, nb::shape<-1, 2>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatRows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatArray = nb::ndarray<nb::numpy, float, nb::ndim<2>>;
using Longs = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Doubles = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using LongArray = nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>;
using LongTable = nb::ndarray<nb::numpy, std::int64_t, nb::ndim<2>>;
using DoubleArray = nb::ndarray<nb::numpy, double, nb::ndim<1>>;
using Raw = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

template <class T>
T named(const std::map<std::string, T>& names, const std::string& name) {
  const auto found = names.find(name);
  if (found == names.end()) throw std::invalid_argument("There is no " + name + " here.");
  return found->second;
}

const std::map<std::string, KvType> kKvTypes = {
    {"bf16", KvType::bf16}, {"f16", KvType::f16}, {"f32", KvType::f32}, {"int8", KvType::int8}};
const std::map<std::string, Rows> kRows = {{"tokens", Rows::tokens}, {"logits", Rows::logits}};
const std::map<std::string, Source> kSources = {
    {"token_ids", Source::token_ids}, {"positions", Source::positions}, {"logit_rows", Source::logit_rows}};
const std::map<std::string, Activation> kActivations = {{"silu", Activation::silu},
                                                        {"gelu", Activation::gelu},
                                                        {"gelu_tanh", Activation::gelu_tanh},
                                                        {"relu", Activation::relu}};

const std::map<std::string, MapArgs::Kind> kMaps = {
    {"take_rows", MapArgs::Kind::copy},  {"add", MapArgs::Kind::add},           {"scale", MapArgs::Kind::scale},
    {"softcap", MapArgs::Kind::softcap}, {"activate", MapArgs::Kind::activate}, {"gated", MapArgs::Kind::gated}};

std::vector<float> copied(const std::optional<Floats>& array) {
  return array ? std::vector<float>(array->data(), array->data() + array->size()) : std::vector<float>();
}

// --- weights --------------------------------------------------------------------------------------------------------

std::shared_ptr<const Weight> pack_arrays(
    const std::vector<std::tuple<std::string, Raw, std::int64_t, std::int64_t>>& arrays, int threads) {
  std::vector<Part> parts;
  for (const auto& [type, raw, rows, columns] : arrays) {
    parts.push_back({type, static_cast<const std::uint8_t*>(raw.data()), rows, columns});
  }
  const nb::gil_scoped_release others_may_run;
  return pack(parts, threads);
}

std::vector<std::string> input_names(const Weight& weight) {
  std::vector<std::string> names;
  for (const Input input : weight.inputs) {
    names.push_back(input == Input::q8 ? "q8" : input == Input::bf16 ? "bf16" : "f32");
  }
  return names;
}

// --- the cache ------------------------------------------------------------------------------------------------------

class Cache {
 public:
  Cache(std::int64_t num_blocks, const std::string& type, int num_layers, int num_kv_heads, int block_size,
        int head_dim)
      : block_bytes_(bytes_of(type, num_layers, num_kv_heads, block_size, head_dim)) {
    if (num_blocks < 0) throw std::invalid_argument("A cache has no negative number of blocks.");
    if (num_blocks > 0 && block_bytes_ > std::numeric_limits<std::int64_t>::max() / num_blocks) throw std::bad_alloc();
    memory_ = std::make_shared<Memory>(static_cast<std::size_t>(num_blocks * block_bytes_));
    view_ = {memory_->data(), named(kKvTypes, type), num_blocks, num_layers, num_kv_heads, block_size, head_dim};
  }

  static std::int64_t bytes_of(const std::string& type, int num_layers, int num_kv_heads, int block_size,
                               int head_dim) {
    if (num_layers < 1 || num_kv_heads < 1 || block_size < 1 || head_dim < 1) {
      throw std::invalid_argument("A block has at least one layer, head, token and dimension.");
    }
    return head_bytes(named(kKvTypes, type), head_dim) * 2 * num_layers * num_kv_heads * block_size;
  }

  const CacheView& view() const { return view_; }
  std::int64_t block_bytes() const { return block_bytes_; }

  nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<2>> blocks() const {
    auto* owner = new std::shared_ptr<Memory>(memory_);
    const nb::capsule capsule(owner, [](void* p) noexcept { delete static_cast<std::shared_ptr<Memory>*>(p); });
    return {
        memory_->data(), {static_cast<std::size_t>(view_.num_blocks), static_cast<std::size_t>(block_bytes_)}, capsule};
  }

 private:
  std::int64_t block_bytes_;
  std::shared_ptr<Memory> memory_;
  CacheView view_;
};

void require_blocks(const std::int32_t* pairs, std::size_t count, std::int64_t num_blocks) {
  for (std::size_t i = 0; i < count; ++i) {
    if (pairs[2 * i] < 0 || pairs[2 * i] >= num_blocks) {
      throw std::invalid_argument("There is no block " + std::to_string(pairs[2 * i]) + " among " +
                                  std::to_string(num_blocks) + ".");
    }
  }
}

void copy_cache_blocks(const Cache& source, const Cache& target, const Pairs& pairs, int threads) {
  if (source.block_bytes() != target.block_bytes()) {
    throw std::invalid_argument("Blocks are copied between caches whose blocks are as large.");
  }
  require_blocks(pairs.data(), pairs.shape(0), source.view().num_blocks);
  require_blocks(pairs.data() + 1, pairs.shape(0), target.view().num_blocks);
  const nb::gil_scoped_release others_may_run;
  copy_blocks(source.view().data, target.view().data, static_cast<std::size_t>(source.block_bytes()), pairs.data(),
              static_cast<std::int64_t>(pairs.shape(0)), threads);
}

// --- programs -------------------------------------------------------------------------------------------------------

void require_size(std::size_t size, std::size_t wanted, const char* name) {
  if (size != wanted) {
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(size) + " entries where " +
                                std::to_string(wanted) + " belong.");
  }
}

FloatArray array_of(const Output& output) {
  auto* owner = new std::shared_ptr<Memory>(output.memory);
  const nb::capsule capsule(owner, [](void* p) noexcept { delete static_cast<std::shared_ptr<Memory>*>(p); });
  return {output.memory->data(),
          {static_cast<std::size_t>(output.rows), static_cast<std::size_t>(output.columns)},
          capsule};
}

FloatArray run(Program& program, const RunArgs& args) {
  std::vector<Output> outputs;
  {
    const nb::gil_scoped_release others_may_run;
    outputs = program.run(args);
  }
  if (outputs.size() != 1) throw std::logic_error("a program has one output");
  return array_of(outputs.front());
}

std::vector<Matrix> matrices(const std::vector<FloatRows>& inputs) {
  std::vector<Matrix> result;
  for (const FloatRows& input : inputs) {
    result.push_back(
        {input.data(), static_cast<std::int64_t>(input.shape(0)), static_cast<std::int64_t>(input.shape(1))});
  }
  return result;
}

FloatArray run_step(Program& program, const std::vector<FloatRows>& inputs, const Ints& token_ids,
                    const Ints& positions, const Ints& slots, const Ints& query_starts, const Ints& context_lens,
                    const Table& block_tables, const Ints& logit_rows, const Cache* cache) {
  const std::size_t tokens = token_ids.size(), sequences = context_lens.size();
  require_size(positions.size(), tokens, "positions");
  require_size(slots.size(), tokens, "slots");
  require_size(query_starts.size(), sequences + 1, "query_starts");
  require_size(block_tables.shape(0), sequences, "block_tables");
  if (block_tables.shape(1) > 1 && block_tables.stride(1) != 1) {
    throw std::invalid_argument("The blocks of a sequence must lie side by side in block_tables.");
  }
  RunArgs args;
  args.inputs = matrices(inputs);
  args.table_columns = static_cast<std::int64_t>(block_tables.shape(1));
  args.step = StepView{.token_ids = token_ids.data(),
                       .positions = positions.data(),
                       .slots = slots.data(),
                       .query_starts = query_starts.data(),
                       .context_lens = context_lens.data(),
                       .block_tables = block_tables.data(),
                       .table_stride = block_tables.stride(0),
                       .logit_rows = logit_rows.data(),
                       .tokens = static_cast<std::int64_t>(tokens),
                       .sequences = static_cast<std::int64_t>(sequences),
                       .logits = static_cast<std::int64_t>(logit_rows.size())};
  if (cache) args.cache = cache->view();
  return run(program, args);
}

FloatArray run_rows(Program& program, const std::vector<FloatRows>& inputs) {
  RunArgs args;
  args.inputs = matrices(inputs);
  return run(program, args);
}

void add_map(Program& program, MapArgs::Kind kind, int x, int y, float number, const std::optional<std::string>& of,
             const std::optional<std::string>& rows, int out) {
  const Activation activation = of ? named(kActivations, *of) : Activation::silu;
  program.add(Map{kind, x, y, number, activation, rows ? named(kSources, *rows) : Source::none, out});
}

void bind_program(nb::module_& m) {
  nb::class_<Program> program(m, "Program");
  program.def(nb::init<int>(), "threads"_a)
      .def("region", &Program::add_region, "tokens"_a, "logits"_a)
      .def("input", &Program::add_input, "columns"_a)
      .def(
          "output",
          [](Program& p, const std::string& rows, std::int64_t columns) {
            return p.add_output(named(kRows, rows), columns);
          },
          "rows"_a, "columns"_a)
      .def(
          "value",
          [](Program& p, const std::string& rows, std::int64_t columns, std::int64_t stride, std::int64_t first,
             int f32, int q8,
             int bf16) { return p.add_value({named(kRows, rows), columns, stride, first, f32, q8, bf16}); },
          "rows"_a, "columns"_a, "stride"_a, "first"_a, "f32"_a, "q8"_a, "bf16"_a)
      .def(
          "rope",
          [](Program& p, const Floats& inv_freq, float factor, std::int64_t max_positions) {
            return p.add_rope({copied(inv_freq), factor, max_positions});
          },
          "inv_freq"_a, "factor"_a, "max_positions"_a)
      .def("barrier", [](Program& p) { p.add(Barrier{}); })
      .def(
          "linear",
          [](Program& p, int x, std::shared_ptr<const Weight> weight, const std::optional<Floats>& bias, int residual,
             const std::optional<std::string>& gate, int out) {
            std::optional<Activation> activation;
            if (gate) activation = named(kActivations, *gate);
            p.add(Linear{x, std::move(weight), copied(bias), residual, activation, out});
          },
          "x"_a, "weight"_a, "bias"_a.none(), "residual"_a = -1, "gate"_a.none() = nb::none(), "out"_a)
      .def(
          "embed",
          [](Program& p, std::shared_ptr<const Weight> weight, const std::string& ids, float factor, int out) {
            p.add(Embed{std::move(weight), named(kSources, ids), factor, out});
          },
          "weight"_a, "ids"_a, "factor"_a, "out"_a)
      .def(
          "norm",
          [](Program& p, int x, const Floats& weight, const std::optional<Floats>& bias, float eps, int residual,
             int out) { p.add(Norm{x, copied(weight), copied(bias), eps, residual, out}); },
          "x"_a, "weight"_a, "bias"_a.none(), "eps"_a, "residual"_a = -1, "out"_a)
      .def(
          "convert", [](Program& p, int x) { p.add(Convert{x}); }, "x"_a)
      .def(
          "attention",
          [](Program& p, int q, int k, int v, int layer, int num_heads, int num_kv_heads, int head_dim, float scale,
             std::int64_t window, float softcap, int rope, int out) {
            p.add(Attention{q, k, v, layer, num_heads, num_kv_heads, head_dim, scale, window, softcap, rope, out});
          },
          "q"_a, "k"_a, "v"_a, "layer"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "scale"_a, "window"_a,
          "softcap"_a, "rope"_a, "out"_a)
      .def("run_step", &run_step, "inputs"_a, "token_ids"_a.noconvert(), "positions"_a.noconvert(),
           "slots"_a.noconvert(), "query_starts"_a.noconvert(), "context_lens"_a.noconvert(),
           "block_tables"_a.noconvert(), "logit_rows"_a.noconvert(), "cache"_a.none())
      .def("run_rows", &run_rows, "inputs"_a)
      .def("time", &Program::time)
      .def("seconds", &Program::seconds)
      .def_prop_ro("threads", &Program::threads);
  for (const auto& [name, kind] : kMaps) {
    program.def(
        name.c_str(),
        [map = kind](Program& p, int x, int y, float number, const std::optional<std::string>& of,
                     const std::optional<std::string>& rows, int out) { add_map(p, map, x, y, number, of, rows, out); },
        "x"_a, "y"_a = -1, "number"_a = 0.0f, "kind"_a.none() = nb::none(), "rows"_a.none() = nb::none(), "out"_a);
  }
}

// --- sampling -------------------------------------------------------------------------------------------------------

void require_within(const Longs& numbers, std::size_t limit, const char* name) {
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (numbers.data()[i] < 0 || static_cast<std::size_t>(numbers.data()[i]) >= limit) {
      throw std::invalid_argument(std::string(name) + " has " + std::to_string(numbers.data()[i]) +
                                  " where there are " + std::to_string(limit) + ".");
    }
  }
}

void require_logits(const FloatRows& logits, const Longs& sources) {
  if (logits.shape(1) < 1 || logits.shape(1) > std::numeric_limits<std::int32_t>::max()) {
    throw std::invalid_argument("A row of logits has from 1 to 2^31 - 1 tokens.");
  }
  require_within(sources, logits.shape(0), "sources");
}

// Memory that NumPy owns.
template <class Array, class T>
Array handed_over(std::unique_ptr<T[]> memory, std::initializer_list<std::size_t> shape) {
  T* const data = memory.release();
  const nb::capsule capsule(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return {data, shape, capsule};
}

LongArray draw_tokens(const FloatRows& logits, const Longs& sources, const Doubles& temperature, const Longs& top_k,
                      const Doubles& top_p, const Doubles& min_p, const Doubles& uniform, int threads) {
  const std::size_t draws = sources.size();
  require_logits(logits, sources);
  require_size(temperature.size(), draws, "temperature");
  require_size(top_k.size(), draws, "top_k");
  require_size(top_p.size(), draws, "top_p");
  require_size(min_p.size(), draws, "min_p");
  require_size(uniform.size(), draws, "uniform");
  std::unique_ptr<std::int64_t[]> token_ids(new std::int64_t[draws]);
  const DrawArgs args{
      .logits = logits.data(),
      .vocab = static_cast<std::int64_t>(logits.shape(1)),
      .sources = sources.data(),
      .draws = static_cast<std::int64_t>(draws),
      .temperature = temperature.data(),
      .top_k = top_k.data(),
      .top_p = top_p.data(),
      .min_p = min_p.data(),
      .uniform = uniform.data(),
      .scratch = nullptr,
      .token_ids = token_ids.get(),
  };
  {
    const nb::gil_scoped_release others_may_run;
    draw(choose(), args, threads);
  }
  return handed_over<LongArray>(std::move(token_ids), {draws});
}

std::tuple<DoubleArray, LongArray, LongTable> token_logprobs(const FloatRows& logits, const Longs& sources,
                                                             const Longs& token_ids, int top, int threads) {
  const std::size_t rows = sources.size(), columns = static_cast<std::size_t>(std::max(top, 0));
  require_logits(logits, sources);
  require_size(token_ids.size(), rows, "token_ids");
  require_within(token_ids, logits.shape(1), "token_ids");
  std::unique_ptr<double[]> log_sums(new double[rows]);
  std::unique_ptr<std::int64_t[]> ranks(new std::int64_t[rows]), top_ids(new std::int64_t[rows * columns]);
  const LogprobArgs args{
      .logits = logits.data(),
      .vocab = static_cast<std::int64_t>(logits.shape(1)),
      .sources = sources.data(),
      .token_ids = token_ids.data(),
      .rows = static_cast<std::int64_t>(rows),
      .top = static_cast<std::int64_t>(columns),
      .scratch = nullptr,
      .log_sums = log_sums.get(),
      .ranks = ranks.get(),
      .top_ids = top_ids.get(),
  };
  {
    const nb::gil_scoped_release others_may_run;
    logprobs(choose(), args, threads);
  }
  return {handed_over<DoubleArray>(std::move(log_sums), {rows}), handed_over<LongArray>(std::move(ranks), {rows}),
          handed_over<LongTable>(std::move(top_ids), {rows, columns})};
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "The native kernels of Octavo: see _native.pyi.";
  m.def("default_threads", &default_threads);
  m.def("isa", [] { return std::string(choose().name); });
  m.def("byte_dots", [] { return choose().byte_dots; });
  m.def("bf16_dots", [] { return choose().bf16_dots; });
  m.def("usable_isas", &usable_names);
  nb::class_<Weight>(m, "Weight")
      .def_ro("rows", &Weight::rows)
      .def_ro("columns", &Weight::columns)
      .def_ro("bytes", &Weight::bytes)
      .def_prop_ro("inputs", &input_names)
      .def_prop_ro("gateable", &Weight::gateable);
  m.def("pack", &pack_arrays, "parts"_a, "threads"_a);
  nb::class_<Cache>(m, "Cache")
      .def(nb::init<std::int64_t, const std::string&, int, int, int, int>(), "num_blocks"_a, "kv_type"_a,
           "num_layers"_a, "num_kv_heads"_a, "block_size"_a, "head_dim"_a)
      .def_prop_ro("blocks", &Cache::blocks, nb::rv_policy::automatic);
  m.def("block_bytes", &Cache::bytes_of, "kv_type"_a, "num_layers"_a, "num_kv_heads"_a, "block_size"_a, "head_dim"_a);
  m.def("copy_blocks", &copy_cache_blocks, "source"_a, "target"_a, "pairs"_a, "threads"_a);
  m.def("draw", &draw_tokens, "logits"_a.noconvert(), "sources"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a,
        "uniform"_a, "threads"_a);
  m.def("logprobs", &token_logprobs, "logits"_a.noconvert(), "sources"_a, "token_ids"_a, "top"_a, "threads"_a);
  bind_program(m);
}

}  // namespace octavo
