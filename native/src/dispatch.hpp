// What this machine offers: which build of the kernels runs on it, and on how many threads. Knows no kernel.
#pragma once
#include <string>
#include <vector>

#include "kernels.hpp"

namespace octavo {

// The builds of kBuilds that this processor and its operating system can run, best first; the last is "portable".
std::vector<std::string> usable_names();

// The build that the environment variable OCTAVO_ISA names, else the best usable one.
// Throws std::invalid_argument where the name is unknown or not usable here.
const Kernels& choose();

// OMP_NUM_THREADS if it holds a number from 1 on, else the processors that this process may use: those of its affinity
// mask, or fewer where a control group's quota allows less processor time.
int default_threads();

// Whole processors that the tightest quota grants (at least 1), or 0 without a quota. `groups` is the text of
// /proc/self/cgroup and `root` where control groups are mounted; both versions of them are understood.
int quota_processors(const std::string& groups, const std::string& root);

}  // namespace octavo
