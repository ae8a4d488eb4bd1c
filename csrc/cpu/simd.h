// One vector of float32 lanes, and the few operations the kernels are written in. Only this header,
// the two behind it and those of bfloat16 pairs (pairs.h, multiply_*.h) know instruction sets. Three
// versions: AVX-512 with VBMI, AVX2, and the compiler's own vectors, which are right everywhere.
//
//   F32      kLanes float32 values                  +, -, *, / are the compiler's
//   U32      kLanes 32-bit words
//   kRows, kColumns     rows and vectors of sums that registers hold at once
#pragma once

#include "formats.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define KV8_INLINE inline __attribute__((always_inline))
// The same for a lambda, after its parameters.
#define KV8_INLINED __attribute__((always_inline))

namespace kv8::KV8_ISA {

// Always inline: a compiler may think that a function which only prefetches does nothing.
KV8_INLINE void prefetch(const void* address) { __builtin_prefetch(address, 0, 2); }
// The same, into the innermost cache.
KV8_INLINE void prefetch_near(const void* address) { __builtin_prefetch(address, 0, 3); }

// Keep a vector in a register: compilers like to read it from memory again for each use, and loads
// are what the inner loops have none of to spare.
template <class Vector>
KV8_INLINE void pin([[maybe_unused]] Vector& x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#elif defined(__AVX__)
  asm("" : "+x"(x));
#endif
}

// Values of FP8 codes, by code.
template <class Code>
struct ValueTable {
  alignas(64) float value[256];
  ValueTable() {
    for (uint32_t code = 0; code < 256; ++code) value[code] = Code::decode(code);
  }
  static const ValueTable& get() {
    static const ValueTable table;
    return table;
  }
};

// Words of codes to float32, exact: value i of a word to out[i].
template <class Code>
struct Widen;

// And back, to nearest even: words() gives those of Code::encode; operator() rounds one vector to
// what its codes stand for. There a NaN stays as it is, but must have come of widened values: then
// it has nothing below the code's bits that rounding could carry into them.
template <class Code>
struct Round;

}  // namespace kv8::KV8_ISA

#if defined(__AVX512VBMI__)
#include "simd_avx512.h"
#else
#include "simd_any.h"
#endif

namespace kv8::KV8_ISA {

template <>
struct Widen<Float32> {
  KV8_INLINE void operator()(U32 word, F32* out) const { out[0] = float_of(word); }
};

template <>
struct Round<Float32> {
  KV8_INLINE F32 operator()(F32 x) const { return x; }
  KV8_INLINE U32 words(const F32* values) const { return bits_of(values[0]); }
};

// ---------------------------------------------------------------------------------------------
// Minimax polynomials of 2**f on [0, 1], found by weighted least squares, from the highest power
// down. Relative errors: below 2**-23, and below 2**-13.7 for what eight bits are kept of.
struct FullPrecision {
  static constexpr float kPolynomial[] = {0x1.c7211cp-13f, 0x1.461956p-10f, 0x1.3d2800p-7f,
                                          0x1.c68500p-5f,  0x1.ebfd9ep-3f,  0x1.62e42ap-1f,
                                          1.0f};
};
struct EightBits {
  static constexpr float kPolynomial[] = {0x1.3f96a8p-4f, 0x1.cefc52p-3f, 0x1.64444ap-1f,
                                          0x1.fff634p-1f};
};

// 2**(x - m) for a whole number m. Its bits but for the exponent depend on x alone, so that a
// change of m only ever multiplies by a power of two. Minus infinity gives 0.
template <class Precision>
KV8_INLINE F32 exp2_minus(F32 x, F32 m) {
  const F32 f = fraction(x);
  constexpr int kTerms = sizeof(Precision::kPolynomial) / sizeof(float);
  F32 p = splat(Precision::kPolynomial[0]);
  for (int i = 1; i < kTerms; ++i) p = fma(p, f, splat(Precision::kPolynomial[i]));
  return scale_by_difference(p, x, m);
}

// tanh(x), absolute error below 2**-22.
KV8_INLINE F32 tanh(F32 x) {
  const F32 magnitude = float_of(bits_of(x) & splat_word(0x7fffffffu));
  const F32 t = exp2_minus<FullPrecision>(magnitude * splat(-2.885390081777927f), splat(0.0f));
  const F32 y = (splat(1.0f) - t) / (splat(1.0f) + t);
  return float_of(bits_of(y) | (bits_of(x) & splat_word(0x80000000u)));
}

}  // namespace kv8::KV8_ISA
