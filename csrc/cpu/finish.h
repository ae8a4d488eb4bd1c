// What a product does with its sums: bias, rounding, residual.
#pragma once

#include "formats.h"
#include "step.h"

namespace kv8::KV8_ISA {

constexpr int kMostOutputs = 16;  // outputs finished at once

// What becomes of `count` sums of row t, from output n on: each rounding is one that the model's own
// modules make.
template <class Code>
inline void finish(const kv8_linear& l, int64_t t, int64_t n, int64_t count, const float* sums) {
  using Bits = typename Code::Code;
  const auto* bias = static_cast<const Bits*>(l.bias);
  const auto* residual = static_cast<const Bits*>(l.residual);
  auto* out = static_cast<Bits*>(l.out) + t * l.out_stride + n;
  float values[kMostOutputs];
  for (int64_t i = 0; i < count; ++i)
    values[i] = bias == nullptr ? sums[i] : sums[i] + Code::decode(bias[n + i]);
  if (residual != nullptr) {
    residual += t * l.residual_stride + n;
    for (int64_t i = 0; i < count; ++i) {
      float value = Code::decode(Code::encode(values[i]));
      value = Code::decode(Code::encode(value * l.multiplier));  // by 1 changes nothing
      values[i] = Code::decode(residual[i]) + value;
    }
  }
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<Bits>(Code::encode(values[i]));
}

}  // namespace kv8::KV8_ISA
