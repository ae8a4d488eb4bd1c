// What one thread computes a piece with: the products for its format, and memory of its own.
#pragma once

#include <type_traits>

#include "arena.h"
#include "tile_float.h"
#if defined(__AVX512BF16__)
#include "tile_pairs.h"
#endif

namespace kv8::KV8_ISA {

#if defined(__AVX512BF16__)
// Pairs of bfloat16 hold these formats without loss; the others have too many digits.
template <class Code>
using Products = std::conditional_t<std::is_same_v<Code, Float16> || std::is_same_v<Code, Float32>,
                                    FloatProducts<Code>, PairProducts<Code>>;
#else
template <class Code>
using Products = FloatProducts<Code>;
#endif

// One thread's memory for a piece of up to R rows.
template <class Code>
struct Workspace {
  using Tile = Products<Code>;
  typename Tile::Session session;  // the thread's use of the unit that multiplies
  Fetch fetch;         // from the cache, meanwhile
  Tile products;
  KeyRange* visible;   // [R], positions that each row sees
  float* multipliers;  // [R], from a dot product to a logit
  float* dots;         // [R, kTile] of the rows that go through a tile together
  float* part;         // Sums of the current split
  float* total;        // Sums of all splits before it

  static int row_bytes(const kv8_cache& cache) {
    return cache.head_dim * static_cast<int>(sizeof(typename Code::Code));
  }

  Workspace(Arena& arena, int rows, const kv8_cache& cache, Parts parts)
      : fetch(cache, row_bytes(cache)),
        products(arena, rows, cache.head_dim, parts),
        visible(arena.take<KeyRange>(rows)),
        multipliers(arena.take<float>(rows + kLanes)),  // read in whole vectors
        // At least four: FewRows writes those of four queries at once.
        dots(arena.take<float>(static_cast<int64_t>(kTile) * max(4, min(rows, Tile::kBlockRows)))),
        part(arena.take<float>(Sums::floats(rows, cache.head_dim))),
        total(arena.take<float>(Sums::floats(rows, cache.head_dim))) {}
};

}  // namespace kv8::KV8_ISA
