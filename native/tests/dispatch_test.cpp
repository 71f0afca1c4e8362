// Choosing a build, and reading quotas, against control groups made of files.
#include "dispatch.hpp"

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>

namespace {

int failures = 0;

void expect(bool fine, const char* what) {
  if (!fine) std::printf("failed: %s\n", what);
  failures += !fine;
}

std::string refusal() {
  try {
    octavo::choose();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

bool processor_is(const std::string& vendor) {
  std::ifstream file("/proc/cpuinfo");
  return std::string(std::istreambuf_iterator<char>(file), {}).find(vendor) != std::string::npos;
}

void choosing() {
  const auto names = octavo::usable_names();
  expect(!names.empty() && names.back() == "portable", "portable is usable, and the last");
  unsetenv("OCTAVO_ISA");
  // bf16's dot products are there on Intel's processors too, and slow.
  const bool slow_bf16 = processor_is("GenuineIntel") && names.front() == "avx512_bf16";
  expect(octavo::choose().name == names[slow_bf16 ? 1 : 0], "the best is chosen");
  for (const std::string& name : names) {
    setenv("OCTAVO_ISA", name.c_str(), 1);
    expect(octavo::choose().name == name, "a usable name is honoured");
    const bool old = name == "portable" || name == "avx2";  // from before there were such instructions
    expect(octavo::choose().byte_dots != old, "who multiplies bytes says so");
    expect(octavo::choose().bf16_dots == (name == "avx512_bf16"), "who multiplies pairs of bf16 says so");
  }
  setenv("OCTAVO_ISA", "avx3", 1);
  expect(refusal().find("OCTAVO_ISA is 'avx3', which this machine cannot run; it can run ") == 0, "avx3 is refused");
  expect(refusal().find("portable.") != std::string::npos, "what is usable is named");
  unsetenv("OCTAVO_ISA");
}

void threads() {
  setenv("OMP_NUM_THREADS", "3", 1);
  expect(octavo::default_threads() == 3, "a number is honoured");
  setenv("OMP_NUM_THREADS", "5,2", 1);
  expect(octavo::default_threads() == 5, "the outermost of nested numbers counts");
  unsetenv("OMP_NUM_THREADS");
  const int usual = octavo::default_threads();
  expect(usual >= 1, "there is at least one thread");
  for (const char* invalid : {"0", "-2", "four", "4 threads", "", "99999999999999999999"}) {
    setenv("OMP_NUM_THREADS", invalid, 1);
    expect(octavo::default_threads() == usual, "an invalid number is ignored");
  }
  unsetenv("OMP_NUM_THREADS");
}

void quotas() {
  namespace fs = std::filesystem;
  const fs::path root = fs::temp_directory_path() / ("octavo_dispatch_test_" + std::to_string(std::rand()));
  const auto write = [&root](const char* path, const char* text) {
    fs::create_directories((root / path).parent_path());
    std::ofstream(root / path) << text;
  };
  write("free/cpu.max", "max 100000\n");
  write("four/cpu.max", "400000 100000\n");
  write("four/inner/cpu.max", "max 100000\n");
  write("half/cpu.max", "50000 100000\n");
  write("broken/cpu.max", "many 0\n");
  write("cpu/cpu.cfs_quota_us", "-1\n");
  write("cpu/cpu.cfs_period_us", "100000\n");
  write("cpu/two/cpu.cfs_quota_us", "290000\n");
  write("cpu/two/cpu.cfs_period_us", "100000\n");
  const auto quota = [&root](const char* groups) { return octavo::quota_processors(groups, root.string()); };
  expect(quota("0::/free\n") == 0, "max is no quota");
  expect(quota("0::/four\n") == 4, "version 2");
  expect(quota("0::/four/inner\n") == 4, "the quota of a group above counts");
  expect(quota("0::/half\n") == 1, "half a processor is one thread");
  expect(quota("0::/broken\n") == 0 && quota("0::/missing\n") == 0 && quota("nonsense") == 0 && quota("") == 0,
         "what cannot be read is no quota");
  expect(quota("4:memory:/two\n") == 0, "another controller has no processors");
  expect(quota("4:cpu,cpuacct:/two\n0::/\n") == 2, "version 1, a part of a processor left");
  expect(quota("4:cpu:/\n") == 0, "-1 is no quota");
  expect(quota("4:cpu:/two\n0::/half\n") == 1, "the tightest counts");
  write("cpu.max", "300000 100000");
  expect(quota("0::/docker/gone\n") == 3, "the root counts where a container sees no more");
  fs::remove_all(root);
}

}  // namespace

int main() {
  choosing();
  threads();
  quotas();
  return failures != 0;
}
