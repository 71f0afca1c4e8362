// The kernels of one instruction set: CMake compiles this file once for each, as OCTAVO_ISA. What it includes must lie in
// that namespace and use no standard templates; it knows neither the other builds nor which of them will run.
#include "kernels.hpp"

#include "attention.hpp"
#include "draw.hpp"
#include "linear.hpp"
#include "rows.hpp"
#include "simd.hpp"

#ifndef OCTAVO_ISA
#error "kernels.cpp is compiled for an instruction set: -DOCTAVO_ISA=portable, for example"
#endif
#define OCTAVO_QUOTE_(name) #name
#define OCTAVO_QUOTE(name) OCTAVO_QUOTE_(name)

namespace octavo::OCTAVO_ISA {

const Kernels kKernels = {
    .name = OCTAVO_QUOTE(OCTAVO_ISA),
    .byte_dots = kByteDots,
    .bf16_dots = kBf16Dots,
    .bf16_rows = kTiles || kBf16Dots,
    .linear = linear,
    .embed = embed,
    .norm = norm,
    .map = map,
    .convert = convert,
    .attention = attention,
    .draw = draw,
    .logprobs = logprobs,
};

}  // namespace octavo::OCTAVO_ISA
