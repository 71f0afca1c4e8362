// How fast the attention kernel of one instruction set is, beside what the machine can do: bytes read and float32
// operations a second, measured in the same run. Usage: attention_bench [threads] [part of a name]
#include <omp.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "attention.hpp"
#include "plan.hpp"
#include "team.hpp"

namespace octavo::testing {
namespace {

namespace isa = octavo::OCTAVO_ISA;

// The shortest of some runs: other processes only ever add time. Of one thread its own CPU time: they touch it least.
double best(int runs, int threads, const std::function<void()>& f) {
  const clockid_t clock = threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
  const auto now = [clock] {
    timespec time;
    clock_gettime(clock, &time);
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
  };
  double shortest = 1e30;
  for (int i = 0; i < runs; ++i) {
    const double start = now();
    f();
    shortest = std::min(shortest, now() - start);
  }
  return shortest;
}

double sink = 0;

double read_rate(int threads) {
  std::vector<float> data(std::size_t{96} << 20, 1.0f);
  const double time = best(8, threads, [&] {
    double total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
    {
      const std::size_t share = data.size() / static_cast<std::size_t>(threads);
      const float* p = data.data() + share * static_cast<std::size_t>(omp_get_thread_num());
      isa::F sums[8] = {};
      for (std::size_t i = 0; i + 8 * isa::W <= share; i += 8 * isa::W)
        for (int j = 0; j < 8; ++j) sums[j] += isa::load(p + i + static_cast<std::size_t>(j * isa::W));
      for (const isa::F& sum : sums) total += static_cast<double>(isa::reduce_add(sum));
    }
    sink += total;
  });
  return static_cast<double>(data.size()) * 4 / time;
}

// Multiplications and additions a second, of float32 or of bf16 pairs.
template <bool bf16>
double product_rate(int threads) {
  constexpr int kSteps = 1 << 18;
  const double time = best(20, threads, [&] {
#pragma omp parallel num_threads(threads)
    {
      constexpr int kSums = isa::W == 16 ? 16 : 10;
      volatile float unknown = 1.0f;
      const isa::F a = isa::set1(unknown);
      isa::F sums[kSums];  // all different, or the compiler makes them one
#pragma GCC unroll 16
      for (int j = 0; j < kSums; ++j) sums[j] = isa::set1(static_cast<float>(j));
      for (int i = 0; i < kSteps; ++i)
#pragma GCC unroll 16
        for (int j = 0; j < kSums; ++j)
          sums[j] = bf16 ? isa::dot_bf16(sums[j], isa::as_int(a), isa::as_int(a)) : isa::fma(a, a, sums[j]);
      double total = 0;
#pragma GCC unroll 16
      for (int j = 0; j < kSums; ++j) total += static_cast<double>(isa::reduce_add(sums[j]));
#pragma omp critical
      sink += total;
    }
  });
  return static_cast<double>(kSteps) * (isa::W == 16 ? 16 : 10) * isa::W * (bf16 ? 4 : 2) * threads / time;
}

struct Setting {
  std::string name;
  int sequences, context, fresh, shared;  // tokens: each context, the new ones among them, the common prefix
  int num_kv_heads, group, head_dim;
  KvType type = KvType::bf16;
  int block_size = 16, layers = 30;
  std::int64_t window = 0;
};

void measure(const Setting& s, int threads, double bandwidth, double products) {
  const std::int64_t size = s.block_size, per_sequence = (s.context + size - 1) / size, common = s.shared / size;
  const std::int64_t blocks = common + s.sequences * (per_sequence - common);
  const std::size_t element = s.type == KvType::f32 ? 4 : 2;
  const std::size_t elements = static_cast<std::size_t>(blocks * s.layers * 2 * s.num_kv_heads * size * s.head_dim);
  const std::size_t huge = std::size_t{2} << 20, room = (elements * element + huge - 1) / huge * huge;
  const std::unique_ptr<std::uint16_t, decltype(&std::free)> cache(
      static_cast<std::uint16_t*>(std::aligned_alloc(huge, room)), &std::free);
  madvise(cache.get(), room, MADV_HUGEPAGE);
  std::fill_n(cache.get(), room / 2, std::uint16_t{0x2c00});  // small numbers in every type
  std::vector<std::int32_t> ids(static_cast<std::size_t>(blocks));
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i);
  std::shuffle(ids.begin(), ids.end(), std::mt19937(1));
  std::vector<std::int32_t> positions, slots, starts{0}, lens, tables;
  std::int64_t next = common;
  for (int i = 0; i < s.sequences; ++i) {
    std::vector<std::int32_t> table(ids.begin(), ids.begin() + common);
    while (static_cast<std::int64_t>(table.size()) < per_sequence)
      table.push_back(ids[static_cast<std::size_t>(next++)]);
    for (int t = s.context - s.fresh; t < s.context; ++t) {
      positions.push_back(t);
      slots.push_back(static_cast<std::int32_t>(table[static_cast<std::size_t>(t / size)] * size + t % size));
    }
    starts.push_back(static_cast<std::int32_t>(positions.size()));
    lens.push_back(s.context);
    tables.insert(tables.end(), table.begin(), table.end());
  }
  const std::int64_t tokens = starts.back(), heads = s.num_kv_heads * s.group;
  std::vector<float> q(static_cast<std::size_t>(tokens * heads * s.head_dim), 0.5f), out(q.size());
  std::vector<float> kv(static_cast<std::size_t>(tokens * s.num_kv_heads * s.head_dim), 0.5f);
  std::vector<float> inv_freq(static_cast<std::size_t>(s.head_dim / 2), 0.1f);
  AttentionPlanner planner(s.block_size);
  const int rope = planner.add_rope(inv_freq.data(), s.head_dim / 2, 1.0f, 1 << 20);
  planner.add_layer(static_cast<int>(heads), s.num_kv_heads, s.head_dim, s.window);
  const StepView view{nullptr, positions.data(), slots.data(), starts.data(), lens.data(), tables.data(), per_sequence,
                      nullptr, tokens, s.sequences, 0};
  AttentionPlan* plan = nullptr;
  Team team(threads);
  const double planning = best(5, threads, [&] { plan = planner.begin(view, threads); });
  const double rotating = best(5, threads, [&] {
#pragma omp parallel num_threads(threads)
    planner.rotate(team, omp_get_thread_num());
  });
  const double time = best(7, threads, [&] {
#pragma omp parallel num_threads(threads)
    for (int layer = 0; layer < s.layers; ++layer) {
      const AttentionArgs args{.q = q.data(), .k = kv.data(), .v = kv.data(), .q_stride = heads * s.head_dim,
                               .k_stride = s.num_kv_heads * s.head_dim, .v_stride = s.num_kv_heads * s.head_dim,
                               .cache = {cache.get(), s.type, blocks, s.layers, s.num_kv_heads, s.block_size,
                                         s.head_dim},
                               .layer = layer, .plan = plan, .num_heads = static_cast<int>(heads),
                               .num_kv_heads = s.num_kv_heads, .head_dim = s.head_dim, .scale = 0.125f,
                               .window = s.window, .softcap = 0.0f, .rope = rope, .out = out.data(),
                               .out_stride = heads * s.head_dim};
      team.barrier();
      isa::kKernels.attention(args, team, omp_get_thread_num());
    }
  });
  double pairs = 0;  // of a query and a key it sees
  for (std::int32_t position : positions) {
    const std::int64_t seen = position + 1;
    pairs += static_cast<double>(s.window ? std::min<std::int64_t>(seen, s.window) : seen);
  }
  const double rate = pairs * 4.0 * static_cast<double>(heads * s.head_dim) * s.layers / time;
  const double bytes = static_cast<double>(elements * element) / time;
  std::printf("%-34s %8.3f ms a layer %7.2f GB/s (%3.0f %%) %7.1f GFLOP/s (%3.0f %%)  plan %4.0f us, rotate %4.0f us\n",
              s.name.c_str(), time * 1e3 / s.layers, bytes / 1e9, 100 * bytes / bandwidth, rate / 1e9,
              100 * rate / products, planning * 1e6, rotating * 1e6);
}

int main_(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : omp_get_max_threads();
  const std::string wanted = argc > 2 ? argv[2] : "";
  const double bandwidth = read_rate(threads), products = product_rate<false>(threads);
  std::printf("%d threads: reads %.1f GB/s, float32 %.1f GFLOP/s, bf16 pairs %.1f GFLOP/s\n", threads,
              bandwidth / 1e9, products / 1e9, product_rate<true>(threads) / 1e9);
  const std::vector<Setting> settings = {
      {"decode 1 x 8192, G3x3 D64", 1, 8192, 1, 0, 3, 3, 64},
      {"decode 1 x 8192, G8x4 D128", 1, 8192, 1, 0, 8, 4, 128, KvType::bf16, 16, 8},
      {"decode 1 x 8192, G3x3 D64 f16", 1, 8192, 1, 0, 3, 3, 64, KvType::f16},
      {"decode 1 x 8192, G3x3 D64 f32", 1, 8192, 1, 0, 3, 3, 64, KvType::f32},
      {"decode 32 x 512, G3x3 D64", 32, 512, 1, 0, 3, 3, 64, KvType::bf16, 16, 8},
      {"decode 256 x 128, G3x3 D64", 256, 128, 1, 0, 3, 3, 64, KvType::bf16, 16, 8},
      {"decode 32 x 1088, 1024 shared", 32, 1088, 1, 1024, 3, 3, 64},
      {"decode 1 x 64, G3x3 D64", 1, 64, 1, 0, 3, 3, 64},
      {"prefill 2048, G3x3 D64", 1, 2048, 2048, 0, 3, 3, 64, KvType::bf16, 16, 4},
      {"prefill 2048, G8x4 D128", 1, 2048, 2048, 0, 8, 4, 128, KvType::bf16, 16, 1},
      {"prefill 2048, G3x3 D64 block 32", 1, 2048, 2048, 0, 3, 3, 64, KvType::bf16, 32, 4},
      {"prefill 2048, G3x3 D64 f32", 1, 2048, 2048, 0, 3, 3, 64, KvType::f32, 16, 2},
      {"prefill 512 of 4096, G3x3 D64", 1, 4096, 512, 0, 3, 3, 64, KvType::bf16, 16, 4},
      {"prefill 32 x 64, G3x3 D64", 32, 64, 64, 0, 3, 3, 64, KvType::bf16, 16, 8},
      {"decode 32 x 512, G3x3 D64 block 8", 32, 512, 1, 0, 3, 3, 64, KvType::bf16, 8, 8},
      {"prefill 2048, G1x4 D256 window 512", 1, 2048, 2048, 0, 1, 4, 256, KvType::bf16, 16, 2, 512},
  };
  for (const Setting& setting : settings)
    if (setting.name.find(wanted) != std::string::npos) measure(setting, threads, bandwidth, products);
  return sink == 0.5 ? 1 : 0;
}

}  // namespace
}  // namespace octavo::testing

int main(int argc, char** argv) { return octavo::testing::main_(argc, argv); }
