// Loops over rows in blocks whose size the compiler knows, so that their sums stay in registers.
#pragma once

#include <type_traits>

namespace kv8::KV8_ISA {

// Call work with 0, 1, ... kCount - 1, each known when compiling.
template <int kCount, class Work, int kFirst = 0>
__attribute__((always_inline)) inline void for_each(const Work& work) {
  if constexpr (kFirst < kCount) {
    work(std::integral_constant<int, kFirst>{});
    for_each<kCount, Work, kFirst + 1>(work);
  }
}

// Call work.template operator()<n> for blocks of at most kMost rows, as even as they get.
template <int kMost, class Work, int kCount = kMost>
inline void with_count(int count, Work&& work) {
  if constexpr (kCount > 1) {
    if (count < kCount) return with_count<kMost, Work, kCount - 1>(count, static_cast<Work&&>(work));
  }
  work(std::integral_constant<int, kCount>{});
}

template <int kMost, class Work>
inline void in_blocks(int rows, Work&& work) {
  int blocks = (rows + kMost - 1) / kMost;
  for (int start = 0; blocks > 0; --blocks) {
    const int count = (rows - start + blocks - 1) / blocks;
    with_count<kMost>(count, [&](auto n) { work(start, n); });
    start += count;
  }
}

}  // namespace kv8::KV8_ISA
