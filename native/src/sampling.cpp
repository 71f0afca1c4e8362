#include "sampling.hpp"

#include <omp.h>

#include <algorithm>
#include <memory>
#include <optional>

namespace octavo {
namespace {

constexpr std::int64_t kShare = 32768;  // logits that a thread gets at least: fewer are read before it has woken up

template <class Args>
void run(void (*kernel)(const Args&, Team&, int), Args& args, std::int64_t rows, int threads) {
  if (rows == 0) return;
  const int wanted = static_cast<int>(std::clamp<std::int64_t>(rows * args.vocab / kShare, 1, std::max(threads, 1)));
  // Most of it is never touched, and so never given by the system.
  const std::unique_ptr<double[]> scratch(new double[wanted * row_scratch(args.vocab) / 2]);
  args.scratch = reinterpret_cast<float*>(scratch.get());
  if (wanted == 1) {
    Team team(1);
    kernel(args, team, 0);
    return;
  }
  std::optional<Team> team;
#pragma omp parallel num_threads(wanted)
  {
#pragma omp single
    team.emplace(omp_get_num_threads());
    kernel(args, *team, omp_get_thread_num());
  }
}

}  // namespace

void draw(const Kernels& kernels, DrawArgs args, int threads) { run(kernels.draw, args, args.draws, threads); }

void logprobs(const Kernels& kernels, LogprobArgs args, int threads) {
  run(kernels.logprobs, args, args.rows, threads);
}

}  // namespace octavo
