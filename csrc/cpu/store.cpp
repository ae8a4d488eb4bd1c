// Quantize new keys and values, scatter them to their slots, and count what did not fit: in one pass,
// and a second one over rows where something may be to count.
#include <type_traits>

#include "formats.h"
#include "kernels.h"

namespace kv8::KV8_ISA {
namespace {

struct Counts {
  int64_t saturated = 0, underflowed = 0, nan = 0;
};

template <class From>
float value_at(const uint8_t* from, int d) {
  typename From::Code bits;
  std::memcpy(&bits, from + static_cast<size_t>(d) * sizeof bits, sizeof bits);
  return From::decode(bits);
}

constexpr uint32_t kInfinityBits = 0x7f800000u;

// Values of one token and head that are stored as they are.
template <class From, class To>
void copy_row(const uint8_t* from, uint8_t* to, int count, Counts& counts) {
  int32_t nan = 0;
  for (int d = 0; d < count; ++d) {
    typename From::Code bits;
    std::memcpy(&bits, from + static_cast<size_t>(d) * sizeof bits, sizeof bits);
    const float value = From::decode(bits);
    const auto code = static_cast<typename To::Code>(
        std::is_same_v<From, To> ? bits : To::encode_saturating(value));
    std::memcpy(to + static_cast<size_t>(d) * sizeof code, &code, sizeof code);
    nan += (bits_of(value) & 0x7fffffffu) > kInfinityBits;
  }
  counts.nan += nan;
}

// Count what did not fit of a row.
template <class From, class To, class Divide>
void count_row(const uint8_t* from, int count, const Divide& divide, Counts& counts) {
  int32_t saturated = 0, underflowed = 0, nan = 0;
  for (int d = 0; d < count; ++d) {
    const float value = value_at<From>(from, d), scaled = divide(value);
    const uint32_t magnitude = bits_of(scaled) & 0x7fffffffu;
    const bool is_nan = magnitude > kInfinityBits;
    nan += is_nan;
    saturated += magnitude > To::kLargestBits && !is_nan;
    underflowed += (To::encode_saturating(scaled) & To::kMagnitude) == 0 && value != 0.0f;
  }
  counts.saturated += saturated, counts.underflowed += underflowed, counts.nan += nan;
}

// One token's values of one head, divided and rounded. They are counted only where there is
// something to count, which the largest magnitude and the smallest code tell.
template <class From, class To, class Divide>
void round_row(const uint8_t* from, uint8_t* to, int count, const Divide& divide, Counts& counts) {
  uint32_t largest = 0, smallest = To::kMagnitude;
  for (int d = 0; d < count; ++d) {
    const float scaled = divide(value_at<From>(from, d));
    const uint32_t bits = To::encode_saturating(scaled);
    const auto code = static_cast<typename To::Code>(bits);
    std::memcpy(to + static_cast<size_t>(d) * sizeof code, &code, sizeof code);
    const uint32_t magnitude = bits_of(scaled) & 0x7fffffffu, kept = bits & To::kMagnitude;
    largest = magnitude > largest ? magnitude : largest;
    smallest = kept < smallest ? kept : smallest;
  }
  if (largest > To::kLargestBits || smallest == 0)
    count_row<From, To>(from, count, divide, counts);
}

// Call work(divide) with what divides by the scale. By a power of two that is a multiplication, which
// is exact, too, and takes less time.
template <class Work>
void with_divide(float scale, Work&& work) {
  constexpr uint32_t kMantissa = 0x7fffffu;
  const float inverse = 1.0f / scale;
  const bool normal = scale > 0x1p-126f && inverse > 0x1p-126f;
  if (normal && (bits_of(scale) & kMantissa) == 0)
    return work([inverse](float value) { return value * inverse; });
  return work([scale](float value) { return value / scale; });
}

template <class From, class To>
void store_side(const kv8_store& store, const kv8_rows& rows, uint8_t* codes, int64_t block_stride,
                const float* scales, int64_t* total, int num_threads) {
  const kv8_cache& cache = *store.cache;
  const int64_t code_bytes = sizeof(typename To::Code), row_bytes = cache.head_dim * code_bytes;
  const int64_t work = store.num_tokens * cache.num_kv_heads;
  int64_t saturated = 0, underflowed = 0, nan = 0;
  // A thread is worth waking for some 10 us of work.
  const bool worthwhile = work * cache.head_dim >= 65536;
#pragma omp parallel for num_threads(num_threads) if (worthwhile && num_threads > 1) \
    reduction(+ : saturated, underflowed, nan) schedule(static)
  for (int64_t token = 0; token < store.num_tokens; ++token) {
    const int64_t slot = store.slots[token];
    const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
    Counts counts;
    for (int64_t head = 0; head < cache.num_kv_heads; ++head) {
      const uint8_t* from = static_cast<const uint8_t*>(rows.data) + token * rows.token_stride +
                            head * rows.head_stride;
      uint8_t* to = codes + block * block_stride + (head * cache.block_size + offset) * row_bytes;
      if constexpr (std::is_same_v<From, To> || std::is_same_v<To, Float32>) {
        if (std::is_same_v<From, To> && total == nullptr)
          std::memcpy(to, from, static_cast<size_t>(row_bytes));
        else
          copy_row<From, To>(from, to, cache.head_dim, counts);
      } else {
        with_divide(scales == nullptr ? 1.0f : scales[head], [&](auto divide) {
          round_row<From, To>(from, to, cache.head_dim, divide, counts);
        });
      }
    }
    saturated += counts.saturated, underflowed += counts.underflowed, nan += counts.nan;
  }
  if (total != nullptr) {
    total[0] += work * cache.head_dim;
    total[1] += saturated, total[2] += underflowed, total[3] += nan;
  }
}

}  // namespace

int64_t store(const kv8_store& store, int num_threads) {
  const kv8_cache& cache = *store.cache;
  for (int64_t i = 0; i < store.num_tokens; ++i)
    if (store.slots[i] < 0 || store.slots[i] / cache.block_size >= cache.num_blocks) return -1;
  with_format(static_cast<Format>(cache.format), [&](auto to) {
    using To = decltype(to);
    auto side = [&](const kv8_rows& rows, void* codes, int64_t stride, const float* scales,
                    int64_t* counts) {
      auto* bytes = static_cast<uint8_t*>(codes);
      switch (static_cast<Format>(rows.dtype)) {
        case Format::kBFloat16:
          return store_side<BFloat16, To>(store, rows, bytes, stride, scales, counts, num_threads);
        case Format::kFloat16:
          return store_side<Float16, To>(store, rows, bytes, stride, scales, counts, num_threads);
        default:
          return store_side<Float32, To>(store, rows, bytes, stride, scales, counts, num_threads);
      }
    };
    side(store.key, cache.k_codes, cache.k_block_stride, cache.k_scale, store.k_counts);
    side(store.value, cache.v_codes, cache.v_block_stride, cache.v_scale, store.v_counts);
  });
  return 0;
}

}  // namespace kv8::KV8_ISA
