// What becomes of sums of many rows: sixteen outputs of a row side by side, and sixteen others. As
// finish.h, and with its bits.
#pragma once

#include "activations.h"
#include "simd.h"
#include "step.h"

namespace kv8::KV8_ISA {

// Two vectors to bfloat16, side by side. The CPU's own conversion takes subnormal numbers for zero
// and keeps what a NaN carries: where there are any, Round's is used.
KV8_INLINE void store_side_by_side(uint16_t* to, F32 a, F32 b) {
  constexpr int kRare = 0x81 | 0x20;  // NaN, subnormal
  if (__builtin_expect(_mm512_kortestz(_mm512_fpclass_ps_mask(a, kRare),
                                       _mm512_fpclass_ps_mask(b, kRare)), 1)) {
    store_words(to, reinterpret_cast<U32>(_mm512_cvtne2ps_pbh(b, a)));
  } else {
    store_halves(to, a), store_halves(to + kLanes, b);
  }
}

// Outputs n to n + 32: the product, or what kv8_linear makes of it with a residual.
struct Neighbours {
  const kv8_linear& l;
  const Round<BFloat16> round{};

  KV8_INLINE void operator()(int64_t row, int64_t n, F32 a, F32 b) const {
    const bool both = n + kLanes < l.num_outputs;
    if (l.bias != nullptr) {
      const auto* bias = static_cast<const uint16_t*>(l.bias) + n;
      a = a + widen_halves(bias);
      if (both) b = b + widen_halves(bias + kLanes);
    }
    if (l.residual != nullptr) {
      const auto* before = static_cast<const uint16_t*>(l.residual) + row * l.residual_stride + n;
      a = add(before, a);
      if (both) b = add(before + kLanes, b);
    }
    auto* out = static_cast<uint16_t*>(l.out) + row * l.out_stride + n;
    if (both) store_side_by_side(out, a, b);
    else store_halves(out, a);
  }

 private:
  KV8_INLINE F32 add(const uint16_t* before, F32 product) const {
    return widen_halves(before) + round(round(product) * splat(l.multiplier));  // by 1 changes nothing
  }
};

// Or gates n / 2 to n / 2 + 16 and as many ups, all rounded before ones gate the others.
template <class Function>
struct Gated {
  const kv8_linear& l;
  const kv8_gate& g;
  const Round<BFloat16> round{};

  KV8_INLINE void operator()(int64_t row, int64_t n, F32 gate, F32 up) const {
    if (l.bias != nullptr) {
      const auto* bias = static_cast<const uint16_t*>(l.bias) + n / 2;
      gate = gate + widen_halves(bias), up = up + widen_halves(bias + l.num_outputs / 2);
    }
    store_halves(static_cast<uint16_t*>(g.out) + row * g.out_stride + n / 2,
                 round(Function::of(round(gate))) * round(up));
  }
};

}  // namespace kv8::KV8_ISA
