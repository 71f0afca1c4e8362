// Ends a test compiled for an instruction set that this machine lacks, with 77, before any of its code runs.
#include <unistd.h>

#include <cstring>

#include "kernels.hpp"

#define OCTAVO_QUOTE_(name) #name
#define OCTAVO_QUOTE(name) OCTAVO_QUOTE_(name)

__attribute__((constructor(101))) static void skip_without_the_processor() {
  for (const octavo::Build* build = octavo::kBuilds; build->kernels; ++build) {
    if (std::strcmp(build->kernels->name, OCTAVO_QUOTE(OCTAVO_ISA)) == 0 && !build->usable()) _exit(77);
  }
}
