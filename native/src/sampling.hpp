// Drawing and log-probabilities for callers without a team: starts the threads and lends the scratch. Knows no Python.
#pragma once
#include "kernels.hpp"

namespace octavo {

// Runs `kernels.draw` or `kernels.logprobs` on up to `threads` threads; `args.scratch` is set here.
// The result has the same bits whatever the number of threads. Throws std::bad_alloc.
void draw(const Kernels& kernels, DrawArgs args, int threads);
void logprobs(const Kernels& kernels, LogprobArgs args, int threads);

}  // namespace octavo
