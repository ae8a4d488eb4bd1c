// The tile registers of x86 servers' matrix unit, their number known when compiling. Only for CPUs
// that have it, once the system has allowed it: linear_amx.h, available().
#pragma once

#include <cstdint>

#include <immintrin.h>

#include "simd.h"

namespace kv8::KV8_ISA::amx {

// The compiler's intrinsics are macros that take a literal for a tile's number.
template <int kTileNumber>
KV8_INLINE void load(const void* rows, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2"
               :
               : "r"(rows), "r"(stride), "i"(kTileNumber)
               : "memory");
}
// The same, with the hint that they are not needed again soon: so that they do not push others out
// of the innermost cache.
template <int kTileNumber>
KV8_INLINE void load_once(const void* rows, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2"
               :
               : "r"(rows), "r"(stride), "i"(kTileNumber)
               : "memory");
}
template <int kTileNumber>
KV8_INLINE void store(void* rows, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)"
               :
               : "r"(rows), "r"(stride), "i"(kTileNumber)
               : "memory");
}
template <int kTileNumber>
KV8_INLINE void zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTileNumber));
}
// sums += rows * columns: the words of a row, pairs, with the rows of columns.
template <int kSums, int kRowTile, int kColumnTile>
KV8_INLINE void multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0"
               :
               : "i"(kSums), "i"(kRowTile), "i"(kColumnTile));
}

struct alignas(64) Shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int num_rows, int num_words) {
    rows[tile] = static_cast<uint8_t>(num_rows), row_bytes[tile] = static_cast<uint16_t>(4 * num_words);
  }
};

// Clears the tiles. The compiler's own intrinsic does not say that all of the shapes are read.
inline void configure(const Shapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }

// All tiles of sixteen rows of sixteen words.
inline void configure() {
  Shapes shapes;
  for (int i = 0; i < 8; ++i) shapes.set(i, 16, 16);
  configure(shapes);
}

inline void release() { _tile_release(); }

}  // namespace kv8::KV8_ISA::amx
