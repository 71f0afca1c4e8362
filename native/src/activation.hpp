// The non-linear functions between products, on vectors. Knows nothing else.
#pragma once
#include "kernels.hpp"
#include "simd.hpp"

namespace octavo::OCTAVO_ISA {

OCTAVO_INLINE F silu(F x) {
  const F power = min(set1(126.0f), x * set1(-kLog2e));
  return x * inverse(set1(1.0f) + exp2(power));
}

OCTAVO_INLINE F gelu_tanh(F x) {
  const F inner = set1(0.7978845608028654f) * (x + set1(0.044715f) * x * x * x);
  return set1(0.5f) * x * (set1(1.0f) + tanh(inner));
}

// The error function to 1.5e-7 (Abramowitz & Stegun 1964, 7.1.26).
OCTAVO_INLINE F erf(F x) {
  const F size = abs(x);
  const F t = inverse(fma(set1(0.3275911f), size, set1(1.0f)));
  F p = set1(1.061405429f);
  p = fma(p, t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  const F y = set1(1.0f) - p * t * exp(F{} - size * size);
  return as_float(as_int(y) | (as_int(x) & set1((std::int32_t)0x80000000)));
}

OCTAVO_INLINE F gelu(F x) { return set1(0.5f) * x * (set1(1.0f) + erf(x * set1(0.7071067811865476f))); }

OCTAVO_INLINE F activate(Activation kind, F x) {
  switch (kind) {
    case Activation::silu: return silu(x);
    case Activation::gelu: return gelu(x);
    case Activation::gelu_tanh: return gelu_tanh(x);
    default: return max(set1(0.0f), x);
  }
}

}  // namespace octavo::OCTAVO_ISA
