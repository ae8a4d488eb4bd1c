// Quantize new keys and values, scatter them to their slots, and count what did not fit: one pass.
#include <type_traits>

#include "formats.h"
#include "kernels.h"

namespace kv8::KV8_ISA {
namespace {

struct Counts {
  int64_t saturated = 0, underflowed = 0, nan = 0;
};

// One token's values of one head.
template <class From, class To>
void store_row(const uint8_t* from, uint8_t* to, int count, float scale, Counts& counts) {
  constexpr bool kHeldExactly = std::is_same_v<From, To> || std::is_same_v<To, Float32>;
  int32_t saturated = 0, underflowed = 0, nan = 0;
  for (int d = 0; d < count; ++d) {
    typename From::Code bits;
    std::memcpy(&bits, from + static_cast<size_t>(d) * sizeof bits, sizeof bits);
    const float value = From::decode(bits), scaled = value / scale;
    const auto code = static_cast<typename To::Code>(
        std::is_same_v<From, To> ? bits : To::encode_saturating(scaled));
    std::memcpy(to + static_cast<size_t>(d) * sizeof code, &code, sizeof code);
    const uint32_t magnitude = bits_of(scaled) & 0x7fffffffu;
    const bool is_nan = magnitude > 0x7f800000u;
    nan += is_nan;
    if constexpr (!kHeldExactly) {
      saturated += magnitude > To::kLargestBits && !is_nan;
      underflowed += (code & To::kMagnitude) == 0 && value != 0.0f;
    }
  }
  counts.saturated += saturated, counts.underflowed += underflowed, counts.nan += nan;
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
  for (int64_t i = 0; i < work; ++i) {
    const int64_t token = i / cache.num_kv_heads, head = i % cache.num_kv_heads;
    const int64_t slot = store.slots[token];
    const int64_t block = slot / cache.block_size, offset = slot % cache.block_size;
    Counts counts;
    const uint8_t* from = static_cast<const uint8_t*>(rows.data) + token * rows.token_stride +
                          head * rows.head_stride;
    uint8_t* to = codes + block * block_stride + (head * cache.block_size + offset) * row_bytes;
    if (std::is_same_v<From, To> && total == nullptr) {
      std::memcpy(to, from, static_cast<size_t>(row_bytes));
    } else {
      store_row<From, To>(from, to, cache.head_dim, scales == nullptr ? 1.0f : scales[head], counts);
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
