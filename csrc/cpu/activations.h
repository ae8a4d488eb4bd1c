// The functions of gated activations, in float32. Sources that use them are compiled so that a sum
// after a product is not contracted: then their bits are the same everywhere.
#pragma once

#include "simd.h"

namespace kv8::KV8_ISA {

// e**-x, relative error below 2**-23; 0 where that is below 2**-100, infinity above some 2**127.
KV8_INLINE F32 exponential_of_minus(F32 x) {
  x = max(splat(-1000.0f), x);  // far beyond, the fraction would be a huge number; NaN stays
  // Adding 1.5 * 2**23 and taking it away again leaves a whole number.
  const F32 large = splat(12582912.0f);
  const F32 whole = fma(x, splat(-1.4426950408889634f), large) - large;
  // log(2) in two parts, the first with few enough bits that its product is exact.
  F32 f = fma(whole, splat(0.693359375f), x);
  f = fma(whole, splat(-2.12194440e-4f), f);
  F32 p = splat(0x1.6ae720p-10f);  // minimax of e**-f, |f| <= log(2) / 2, found by least squares
  p = fma(p, f, splat(-0x1.126792p-7f));
  p = fma(p, f, splat(0x1.555822p-5f));
  p = fma(p, f, splat(-0x1.55541ap-3f));
  p = fma(p, f, splat(0x1.fffffcp-2f));
  p = fma(p, f, splat(-1.0f));
  p = fma(p, f, splat(1.0f));
  return scale_by_power(p, whole);
}

struct Silu {
  static KV8_INLINE F32 of(F32 x) { return x / (splat(1.0f) + exponential_of_minus(x)); }
};

struct GeluTanh {
  static KV8_INLINE F32 of(F32 x) {
    const F32 inner = splat(0.7978845608028654f) * (x + splat(0.044715f) * (x * x * x));
    // 0.5 (1 + tanh(y)) = 1 / (1 + exp(-2 y))
    return x / (splat(1.0f) + exponential_of_minus(splat(2.0f) * inner));
  }
};

// Call work(f) with the function of this number (kv8_gate).
template <class Work>
KV8_INLINE void with_activation(int32_t function, Work&& work) {
  if (function == 0) return work(Silu{});
  return work(GeluTanh{});
}

}  // namespace kv8::KV8_ISA
