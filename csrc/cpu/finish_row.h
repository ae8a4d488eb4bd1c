// What becomes of a row of products that are rounded already: what finish.h does, for whole vectors
// of bfloat16, and with its bits.
#pragma once

#include "simd.h"
#include "step.h"

namespace kv8::KV8_ISA {

// kOutputs products of row t, from output n on, two to a word: out = residual + product *
// multiplier, or the product.
template <int kOutputs>
KV8_INLINE void finish_row(const kv8_linear& l, int64_t t, int64_t n, U32 product) {
  const Round<BFloat16> round;
  const Widen<BFloat16> widen;
  constexpr int64_t kBytes = 2 * kOutputs;
  auto* out = static_cast<uint16_t*>(l.out) + t * l.out_stride + n;
  if (l.residual != nullptr) {
    const auto* residual = static_cast<const uint16_t*>(l.residual) + t * l.residual_stride + n;
    F32 values[2], before[2];
    widen(product, values);
    widen(load_some(residual, kBytes / 4), before);
    for (int i = 0; i < 2; ++i) values[i] = before[i] + round(values[i] * splat(l.multiplier));
    product = round.words(values);
  }
  if constexpr (kBytes == sizeof product) store_words(out, product);
  else store_bytes(out, product, kBytes);
}

}  // namespace kv8::KV8_ISA
