#include "dispatch.hpp"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace octavo {

#define OCTAVO_DECLARE(isa)      \
  namespace isa {                \
  extern const Kernels kKernels; \
  }
OCTAVO_DECLARE(portable)
OCTAVO_DECLARE(avx2)
OCTAVO_DECLARE(avx512)
OCTAVO_DECLARE(avx512_bf16)
OCTAVO_DECLARE(amx)
#undef OCTAVO_DECLARE

namespace {

bool everywhere() { return true; }

#if defined(__x86_64__)
// __builtin_cpu_supports also asks whether the operating system saves the wider registers.
[[maybe_unused]] bool has_avx2() {
  static const bool answer = [] {  // asked once: under a hypervisor a cpuid takes tens of microseconds
    __builtin_cpu_init();
    unsigned a, b, c, d;
    const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  }();
  return answer;
}
[[maybe_unused]] bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}

[[maybe_unused]] bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

// Where AMD's cores multiply bf16 pairs at the rate of their float32 FMAs, Intel's do at a quarter of it.
[[maybe_unused]] bool has_fast_bf16() { return __builtin_cpu_is("amd"); }

// Linux gives the 8 KiB of tile registers only to a process that asked for them.
bool tiles_granted() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
[[maybe_unused]] bool has_amx() {
  static const bool answer = [] {
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
    unsigned a, b, c, d;
    if (!has_avx512() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    return (d & kBf16) && (d & kTile) && (d & kInt8) && tiles_granted();
  }();
  return answer;
}
#endif

}  // namespace

const Build kBuilds[] = {
#if defined(OCTAVO_HAS_AMX)
    {&amx::kKernels, has_amx, everywhere},
#endif
#if defined(OCTAVO_HAS_AVX512_BF16)
    {&avx512_bf16::kKernels, has_avx512_bf16, has_fast_bf16},
#endif
#if defined(OCTAVO_HAS_AVX512)
    {&avx512::kKernels, has_avx512, everywhere},
#endif
#if defined(OCTAVO_HAS_AVX2)
    {&avx2::kKernels, has_avx2, everywhere},
#endif
    {&portable::kKernels, everywhere, everywhere},
    {nullptr, nullptr, nullptr},
};

std::vector<std::string> usable_names() {
  std::vector<std::string> names;
  for (const Build* build = kBuilds; build->kernels; ++build) {
    if (build->usable()) names.push_back(build->kernels->name);
  }
  return names;
}

const Kernels& choose() {
  const char* variable = std::getenv("OCTAVO_ISA");
  const std::string wanted = variable ? variable : "";
  for (const Build* build = kBuilds; build->kernels; ++build) {
    if (wanted.empty() ? build->usable() && build->pays() : wanted == build->kernels->name && build->usable())
      return *build->kernels;
  }
  std::string usable;
  for (const std::string& name : usable_names()) usable += (usable.empty() ? "" : ", ") + name;
  throw std::invalid_argument("OCTAVO_ISA is '" + wanted + "', which this machine cannot run; it can run " + usable + ".");
}

// --- threads --------------------------------------------------------------------------------------------------------

namespace {

// Whether the text is a whole number, up to a newline, or a comma in a list.
bool parse(std::string_view text, long long& number) {
  const char* end = text.data() + std::min(text.find_first_of(",\n"), text.size());
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && stop == end;
}

std::string read(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// A step's threads wait for each other, and one that the quota stops holds them all up: a part of a processor is left.
int processors(long long quota, long long period) {
  return quota > 0 && period > 0 ? static_cast<int>(std::clamp(quota / period, 1LL, 1LL << 20)) : 0;
}

int quota_of_v2(const std::string& folder) {
  std::istringstream limits(read(folder + "/cpu.max"));
  std::string quota;  // microseconds a period, or "max"
  long long number = 0, period = 0;
  return limits >> quota >> period && parse(quota, number) ? processors(number, period) : 0;
}

int quota_of_v1(const std::string& folder) {
  long long quota = 0, period = 0;  // -1: no quota
  return parse(read(folder + "/cpu.cfs_quota_us"), quota) && parse(read(folder + "/cpu.cfs_period_us"), period)
             ? processors(quota, period)
             : 0;
}

int allowed_processors() {
#if defined(__linux__)
  // A machine may have more processors than a cpu_set_t holds; the kernel then asks for a longer one.
  for (int count = CPU_SETSIZE; count <= 1 << 20; count *= 2) {
    std::vector<cpu_set_t> set(static_cast<std::size_t>(count / CPU_SETSIZE));
    const std::size_t bytes = set.size() * sizeof(cpu_set_t);
    if (sched_getaffinity(0, bytes, set.data()) == 0) return std::max(1, CPU_COUNT_S(bytes, set.data()));
  }
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace

int quota_processors(const std::string& groups, const std::string& root) {
  int tightest = 0;
  const auto narrow = [&tightest](int processors) {
    if (processors > 0 && (tightest == 0 || processors < tightest)) tightest = processors;
  };
  std::istringstream lines(groups);
  for (std::string line; std::getline(lines, line);) {  // "hierarchy:controllers:/path", "0::/path" in version 2
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool v2 = controllers == ",,";
    if (!v2 && controllers.find(",cpu,") == std::string::npos) continue;
    // Every group above counts too. In a container the path may be the host's, of which only the root is there.
    for (std::string path = line.substr(second + 1);; path.resize(path.rfind('/'))) {
      if (path == "/") path.clear();
      narrow(v2 ? quota_of_v2(root + path) : quota_of_v1(root + "/cpu" + path));
      if (path.empty()) break;
      if (path.front() != '/') break;
    }
  }
  return tightest;
}

int default_threads() {
  const char* variable = std::getenv("OMP_NUM_THREADS");  // "4", or "4,2" for nested regions
  long long threads = 0;
  if (variable && parse(variable, threads) && threads > 0 && threads <= 1 << 20) return static_cast<int>(threads);
  const int allowed = allowed_processors(), quota = quota_processors(read("/proc/self/cgroup"), "/sys/fs/cgroup");
  return quota > 0 ? std::min(allowed, quota) : allowed;
}

}  // namespace octavo
