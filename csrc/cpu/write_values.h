// A row of attention's results, from the order in which sums lie to that of their dimensions.
#pragma once

#include "simd.h"

namespace kv8::KV8_ISA {

// How many values a word of an output holds.
inline int values_of_word(Format dtype) { return dtype == Format::kFloat32 ? 1 : 2; }

// Where the values of each vector of an output's words are found, if value d is in lane_of(d): first
// the first ones of all words, then the second ones. Beyond the last value, any.
template <class LaneOf>
void order_values(Format dtype, int head_dim, LaneOf&& lane_of, int32_t* lanes) {
  const int count = values_of_word(dtype);
  for (int d = 0; d < head_dim; ++d) {
    const int word = d / count;
    lanes[(word / kLanes * count + d % count) * kLanes + word % kLanes] = lane_of(d);
  }
}

template <class To>
void write_values_as(const float* values, const int32_t* lanes, int head_dim, uint8_t* out) {
  constexpr int kCount = To::kCodesPerWord;
  const Round<To> round;
  for (int d = 0; d < head_dim; d += kCount * kLanes, out += 4 * kLanes) {
    F32 parts[kCount];
    for (int i = 0; i < kCount; ++i) parts[i] = lookup(values, load_words(lanes + d + i * kLanes));
    const int64_t bytes = (head_dim - d) * static_cast<int64_t>(sizeof(typename To::Code));
    if (bytes >= 4 * kLanes) store_words(out, round.words(parts));
    else store_bytes(out, round.words(parts), bytes);
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
