// A row of attention's results, from the order in which sums lie to that of their dimensions.
#pragma once

#include "simd.h"

namespace kv8::KV8_ISA {

// Value d is values[lanes[d]]; lanes beyond the last is any.
template <class To>
void write_values_as(const float* values, const int32_t* lanes, int head_dim, uint8_t* out) {
  constexpr int kCodes = To::kCodesPerWord;
  const Round<To> round;
  for (int d = 0; d < head_dim; d += kCodes * kLanes, out += 4 * kLanes) {
    alignas(64) float parts[kCodes][kLanes];
    F32 codes[kCodes];
    for (int i = 0; i < kCodes; ++i) {
      for (int j = 0; j < kLanes; ++j) parts[i][j] = values[lanes[d + j * kCodes + i]];
      codes[i] = load(parts[i]);
    }
    const int64_t bytes = (head_dim - d) * static_cast<int64_t>(sizeof(typename To::Code));
    if (bytes >= 4 * kLanes) store_words(out, round.words(codes));
    else store_bytes(out, round.words(codes), bytes);
  }
}

inline void write_values(const float* values, const int32_t* lanes, int head_dim, Format dtype,
                         uint8_t* out) {
  switch (dtype) {
    case Format::kBFloat16: return write_values_as<BFloat16>(values, lanes, head_dim, out);
    case Format::kFloat16: return write_values_as<Float16>(values, lanes, head_dim, out);
    default: return write_values_as<Float32>(values, lanes, head_dim, out);
  }
}

}  // namespace kv8::KV8_ISA
