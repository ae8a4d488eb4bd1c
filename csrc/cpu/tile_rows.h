// Where the keys and values of a tile lie.
#pragma once

#include <cstring>

#include "simd.h"

namespace kv8::KV8_ISA {

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

constexpr int kTile = 64;          // keys of a tile; position p lies in tile p / kTile
constexpr int kMaxHeadDim = 512;
constexpr int kRunRows = 16, kRuns = kTile / kRunRows;  // rows that are read in one go
constexpr int kMostRunBytes = kRunRows * 4 * kMaxHeadDim;

alignas(64) inline const uint8_t kZeros[4 * kMaxHeadDim] = {};

// Keys of a tile, counted from its first.
struct KeyRange {
  int first, end;
};

// Where the rows of a tile lie, its keys or its values: sixteen at a time in turn, or each by itself.
// Those that are not there point to zeros.
struct Rows {
  const uint8_t* runs[kRuns];  // null where rows do not lie in turn
  const uint8_t* rows[kTile];  // of the runs that are null
  int row_bytes;

  KV8_INLINE const uint8_t* row(int i) const {
    const uint8_t* run = runs[i / kRunRows];
    return run != nullptr ? run + i % kRunRows * row_bytes : rows[i];
  }

  // The sixteen rows of a run in turn: where they lie, or copied to `spare`.
  KV8_INLINE const uint8_t* run(int i, uint8_t* spare) const {
    return runs[i] != nullptr ? runs[i] : copy_run(i, spare);
  }
  const uint8_t* copy_run(int i, uint8_t* spare) const {
    const size_t bytes = static_cast<size_t>(row_bytes);
    for (int j = 0; j < kRunRows; ++j)
      std::memcpy(spare + j * row_bytes, rows[i * kRunRows + j], bytes);
    return spare;
  }

  void hide_outside(const KeyRange& keys) {
    for (int i = 0; i < kTile; ++i) {
      if (i % kRunRows == 0 && keys.first <= i && i + kRunRows <= keys.end) {
        i += kRunRows - 1;
        continue;
      }
      rows[i] = keys.first <= i && i < keys.end ? row(i) : kZeros;
      if (i % kRunRows == kRunRows - 1) runs[i / kRunRows] = nullptr;
    }
  }
};

// The keys and values of a tile, of which [first, end) are there.
struct TileRows {
  Rows k, v;
  int first, end;
};

}  // namespace kv8::KV8_ISA
