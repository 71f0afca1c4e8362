// Vectors of the instruction set this file is compiled for, and the few operations the kernels are made of.
//
// Included only by kernels.cpp, which is compiled once per instruction set: everything lies in the namespace of that
// set, and nothing here may come from the standard library's templates, whose copies the linker would share among sets.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo::OCTAVO_ISA {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

using F = float __attribute__((vector_size(4 * W)));
using I = std::int32_t __attribute__((vector_size(4 * W)));
using U = std::uint32_t __attribute__((vector_size(4 * W)));
using H = std::uint16_t __attribute__((vector_size(2 * W)));  // as many halves

#define OCTAVO_INLINE inline __attribute__((always_inline))

template <class T>
OCTAVO_INLINE T least(T a, T b) {
  return b < a ? b : a;
}
template <class T>
OCTAVO_INLINE T most(T a, T b) {
  return a < b ? b : a;
}

// --- making, loading, storing ---------------------------------------------------------------------------------------

OCTAVO_INLINE F set1(float x) {
#if defined(__AVX512F__)
  return (F)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  return (F)_mm256_set1_ps(x);
#else
  F v;
  for (int i = 0; i < W; ++i) v[i] = x;
  return v;
#endif
}
OCTAVO_INLINE I set1(std::int32_t x) { return I{} + x; }
OCTAVO_INLINE I lanes() {
  I v;
  for (int i = 0; i < W; ++i) v[i] = i;
  return v;
}

template <class V>
OCTAVO_INLINE V load_as(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
OCTAVO_INLINE F load(const float* p) { return load_as<F>(p); }
OCTAVO_INLINE I load(const std::int32_t* p) { return load_as<I>(p); }
template <class V>
OCTAVO_INLINE void store_as(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}
OCTAVO_INLINE void store(float* p, F v) { store_as(p, v); }
OCTAVO_INLINE void store(std::int32_t* p, I v) { store_as(p, v); }

// The first n lanes only (n from 0 to W); the others load as 0.
OCTAVO_INLINE F load_some(const float* p, std::int64_t n) {
#if defined(__AVX512F__)
  return (F)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#else
  F v = {};
  for (int i = 0; i < W; ++i)
    if (i < n) v[i] = p[i];
  return v;
#endif
}
OCTAVO_INLINE void store_some(float* p, F v, std::int64_t n) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v);
#else
  for (int i = 0; i < W; ++i)
    if (i < n) p[i] = v[i];
#endif
}

// Each lane from the one whose number differs in bit `far`, a power of two below W.
OCTAVO_INLINE F across(F v, int far) {
#if defined(__AVX512F__)
  return (F)_mm512_permutexvar_ps((__m512i)(lanes() ^ far), (__m512)v);
#elif defined(__AVX2__)
  return (F)_mm256_permutevar8x32_ps((__m256)v, (__m256i)(lanes() ^ far));
#else
  F out;
  for (int i = 0; i < W; ++i) out[i] = v[i ^ far];
  return out;
#endif
}

// Lowest byte of each lane.
OCTAVO_INLINE void store_bytes(std::uint8_t* p, I v) {
#if defined(__AVX512F__)
  store_as(p, _mm512_cvtepi32_epi8((__m512i)v));
#else
  for (int i = 0; i < W; ++i) p[i] = (std::uint8_t)v[i];
#endif
}
// Of every four lanes: their lowest bytes in the first, zeros in the others.
OCTAVO_INLINE I low_bytes(I v) {
#if defined(__AVX512BW__) || defined(__AVX2__)
  const __m128i order = _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
#endif
#if defined(__AVX512BW__)
  return (I)_mm512_shuffle_epi8((__m512i)v, _mm512_broadcast_i32x4(order));
#elif defined(__AVX2__)
  return (I)_mm256_shuffle_epi8((__m256i)v, _mm256_broadcastsi128_si256(order));
#else
  I out = {};
  for (int i = 0; i < 4; ++i) out[0] |= (v[i] & 0xff) << (8 * i);
  return out;
#endif
}

// --- conversions ----------------------------------------------------------------------------------------------------

OCTAVO_INLINE F as_float(I v) { return (F)v; }
OCTAVO_INLINE I as_int(F v) { return (I)v; }
OCTAVO_INLINE F to_float(I v) { return __builtin_convertvector(v, F); }
OCTAVO_INLINE I widen(H v) { return __builtin_convertvector(v, I); }

// An integer n with |n| < 2^22 is held biased as the bits of the float kBias + n: sums of integers that begin at the bits
// of kBias are read as floats without being converted.
constexpr float kBias = 12582912.0f;  // 1.5 * 2^23

// Nearest integer, ties to even; |x| < 2^22.
OCTAVO_INLINE I round_to_int(F x) {
  return as_int(x + set1(kBias)) - as_int(set1(kBias));
}

// Rounded to the nearest, ties to even; NaN stays NaN. The processor's own instruction takes subnormal numbers for 0.
OCTAVO_INLINE H to_bf16(F x) {
#if defined(__AVX512BF16__)
  return (H)_mm512_cvtneps_pbh((__m512)x);
#else
  const U u = (U)x;
  const U rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const U quiet = (u >> 16) | 0x40u;
  return __builtin_convertvector((U)(x == x ? (I)rounded : (I)quiet), H);
#endif
}
OCTAVO_INLINE float bf16_to_float(std::uint16_t h) {
  const std::uint32_t u = (std::uint32_t)h << 16;
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

OCTAVO_INLINE F load_f16(const std::uint16_t* p) {
#if defined(__AVX512F__)
  return (F)_mm512_cvtph_ps(load_as<__m256i>(p));
#elif defined(__F16C__)
  return (F)_mm256_cvtph_ps(load_as<__m128i>(p));
#else
  // Exponent and mantissa moved into place, then scaled by 2^112, which also makes subnormals right (F. Giesen).
  const U h = (U)widen(load_as<H>(p));
  const F magnitude = (F)((h & 0x7fffu) << 13) * set1(0x1p112f);
  const I infinite = (I)((h & 0x7c00u) == 0x7c00u);
  const U bits = (U)magnitude | ((U)infinite & 0x7f800000u) | ((h & 0x8000u) << 16);
  return (F)bits;
#endif
}
OCTAVO_INLINE H to_f16(F x) {
#if defined(__AVX512F__)
  return (H)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
  return (H)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#else
  const U u = (U)x, sign = u & 0x80000000u, magnitude = u ^ sign;
  const U subnormal = (U)((F)magnitude + set1(0.5f)) - 0x3f000000u;  // adding 0.5 rounds at 2^-24
  const U normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;
  const U infinite = ((U)(magnitude > 0x7f800000u) & 0x200u) | 0x7c00u;
  U half = (U)((magnitude < 0x38800000u) ? (I)subnormal : (I)normal);
  half = (U)((magnitude >= 0x47800000u) ? (I)infinite : (I)half);
  return __builtin_convertvector(half | (sign >> 16), H);
#endif
}

// --- arithmetic -----------------------------------------------------------------------------------------------------

OCTAVO_INLINE F fma(F a, F b, F c) {
#if defined(__AVX512F__)
  return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
// scale * n, rounded once, of a biased n. `unbias` is scale * -kBias, which must be exact.
OCTAVO_INLINE F times_biased(I n, F scale, [[maybe_unused]] F unbias) {
#if defined(__FMA__)
  return fma(as_float(n), scale, unbias);
#else
  return (as_float(n) - set1(kBias)) * scale;
#endif
}
// Of a NaN and a number, the second argument. One instruction, where compilers may make two of a comparison and a choice.
OCTAVO_INLINE F max(F a, F b) {
#if defined(__AVX512F__)
  return (F)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (F)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
OCTAVO_INLINE F min(F a, F b) {
#if defined(__AVX512F__)
  return (F)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (F)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}
// The one whose bits are the greater number: of sizes the larger, and NaN above all.
OCTAVO_INLINE F greater_bits(F a, F b) {
  const I x = as_int(a), y = as_int(b);
  return as_float(x > y ? x : y);
}
OCTAVO_INLINE F abs(F a) { return as_float(as_int(a) & set1((std::int32_t)0x7fffffff)); }

OCTAVO_INLINE float reduce_add(F v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float lane[W];
  store(lane, v);
  for (int n = W / 2; n; n /= 2)
    for (int i = 0; i < n; ++i) lane[i] += lane[i + n];
  return lane[0];
#endif
}
OCTAVO_INLINE float reduce_max(F v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float lane[W];
  store(lane, v);
  for (int n = W / 2; n; n /= 2)
    for (int i = 0; i < n; ++i) lane[i] = most(lane[i], lane[i + n]);
  return lane[0];
#endif
}

OCTAVO_INLINE std::int32_t reduce_add(I v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  std::int32_t sum = v[0];
  for (int i = 1; i < W; ++i) sum += v[i];
  return sum;
#endif
}
OCTAVO_INLINE std::int32_t reduce_max(I v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)v);
#else
  std::int32_t top = v[0];
  for (int i = 1; i < W; ++i) top = most(top, v[i]);
  return top;
#endif
}

// N vectors, a power of two up to W, each brought to one number: lane i is that of vector i % N. The same tree of
// operations, which must be commutative, whatever N.
template <int N, class Op>
OCTAVO_INLINE F reduce_each(const F (&v)[N], const Op& op, int far = 1) {
  if constexpr (N == 1) {
    F all = v[0];
#pragma GCC unroll 4
    for (; far < W; far *= 2) all = op(all, across(all, far));
    return all;
  } else {
    const I odd = (lanes() & far) != 0;
    F half[N / 2];
#pragma GCC unroll 8
    for (int i = 0; i < N / 2; ++i) {
      const F &a = v[2 * i], &b = v[2 * i + 1];
      half[i] = op(odd ? b : a, across(odd ? a : b, far));
    }
    return reduce_each(half, op, 2 * far);
  }
}

constexpr float kLog2e = 1.44269504088896341f;  // of e

// e^x to about 1e-7 relative: 2^n * p(r), |r| <= ln(2)/2 (Cephes' expf). 0 below -87.3; +inf is not made: x is bounded at 88.3.
OCTAVO_INLINE F exp(F x) {
#if defined(__AVX512F__)
  const F bounded = min(set1(88.3f), x);
  const F whole = (F)_mm512_roundscale_ps((__m512)(bounded * set1(kLog2e)), 0);
#else
  const F bounded = max(set1(-87.3f), min(set1(88.3f), x));
  const I n = round_to_int(bounded * set1(kLog2e));
  const F whole = to_float(n);
#endif
  F r = fma(whole, set1(-0.693359375f), bounded);
  r = fma(whole, set1(2.12194440e-4f), r);
  F p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r + set1(1.0f));
#if defined(__AVX512F__)
  return x < set1(-87.3f) ? set1(0.0f) : (F)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
  const F y = as_float(as_int(p) + (n << 23));
  return x == x ? (x < set1(-87.3f) ? set1(0.0f) : y) : x;
#endif
}

// 2^x to about 1.5e-7 relative, or where `coarse` 1.1e-4; exactly 0 far below; for x up to 127. NaN stays NaN.
template <bool coarse = false>
OCTAVO_INLINE F exp2(F x) {
#if defined(__AVX512DQ__)
  const F r = (F)_mm512_reduce_ps((__m512)x, 1);  // x - floor(x)
#else
  const F bounded = x < set1(-126.0f) ? set1(-126.0f) : x;
  const I n = round_to_int(bounded - set1(0.5f));
  const F r = bounded - to_float(n);
#endif
  F p;  // minimax for 2^r on [0, 1], exact at 0
  if constexpr (coarse) {
    p = fma(set1(0.07826797f), r, set1(0.22630768f));
    p = fma(p, r, set1(0.6954243f));
  } else {
    p = fma(set1(0.0018671304f), r, set1(0.00901702978f));
    p = fma(p, r, set1(0.0557999127f));
    p = fma(p, r, set1(0.240164444f));
    p = fma(p, r, set1(0.693151295f));
  }
  p = fma(p, r, set1(1.0f));
#if defined(__AVX512DQ__)
  return (F)_mm512_scalef_ps((__m512)p, (__m512)x);  // p * 2^floor(x)
#else
  const F y = as_float(as_int(p) + (n << 23));
  return x < set1(-126.0f) ? set1(0.0f) : (x == x ? y : x);
#endif
}
// 1 / x to float32's last digit or two, for x from 1 to 2^126: what divisions of whole vectors cost ten times as much.
OCTAVO_INLINE F inverse(F x) {
#if defined(__AVX512F__)
  const F y = (F)_mm512_rcp14_ps((__m512)x);
  return fma(y, fma(F{} - x, y, set1(1.0f)), y);  // a step of Newton's doubles the 14 bits
#else
  return set1(1.0f) / x;
#endif
}
OCTAVO_INLINE F tanh(F x) {
  const F e = exp(abs(x) * set1(2.0f));
  const F y = fma(set1(-2.0f), inverse(e + set1(1.0f)), set1(1.0f));
  return as_float(as_int(y) | (as_int(x) & set1((std::int32_t)0x80000000)));
}

// --- dot products inside lanes --------------------------------------------------------------------------------------

#if defined(__AVX512VNNI__)
constexpr bool kByteDots = true;
#else
constexpr bool kByteDots = false;
#endif

// acc + the four products of each lane's unsigned bytes of u with the signed bytes of s, exactly.
// `seven_bits`: no byte of u is above 127.
template <bool seven_bits = false>
OCTAVO_INLINE I dot_u8s8(I acc, I u, I s) {
#if defined(__AVX512VNNI__)
  return (I)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)u, (__m512i)s);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  // Sums of two products saturate at 16 bits, which seven bits of u cannot reach: the eighth goes by itself.
  const __m256i ones = _mm256_set1_epi16(1), bytes = (__m256i)s;
  if constexpr (seven_bits) return acc + (I)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)u, bytes), ones);
  const __m256i low = _mm256_and_si256((__m256i)u, _mm256_set1_epi8(0x7f));
  const __m256i top = _mm256_and_si256(_mm256_srli_epi16((__m256i)u, 7), _mm256_set1_epi8(1));
  const __m256i of_low = _mm256_madd_epi16(_mm256_maddubs_epi16(low, bytes), ones);
  const __m256i of_top = _mm256_madd_epi16(_mm256_maddubs_epi16(top, bytes), ones);
  return acc + (I)of_low + ((I)of_top << 7);
#else
  for (int i = 0; i < 4; ++i) {
    const I a = (I)(((U)u >> (8 * i)) & 0xffu), b = (s << (24 - 8 * i)) >> 24;
    acc += a * b;
  }
  return acc;
#endif
}

// acc + the two products of each lane's bf16. Subnormal numbers count as 0.
#if defined(__AVX512BF16__)
constexpr bool kBf16Dots = true;
OCTAVO_INLINE F dot_bf16(F acc, I a, I b) { return (F)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b); }
#else
constexpr bool kBf16Dots = false;
#endif

}  // namespace octavo::OCTAVO_ISA
