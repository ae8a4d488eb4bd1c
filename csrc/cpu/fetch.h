// Fetching codes from memory while others are computed with.
#pragma once

#include "kernels.h"
#include "simd.h"
#include "tile_rows.h"

namespace kv8::KV8_ISA {

// Fetches the keys and values of a tile of several heads in the order in which they lie in memory, a
// few lines at a time between everything else: a core waits for only so many at once, and a burst of
// requests keeps it from computing meanwhile.
class Fetch {
 public:
  static constexpr int kSteps = 64;  // while a head's tile is computed with

  Fetch(const kv8_cache& cache, int row_bytes)
      : cache_(cache),
        row_bytes_(row_bytes),
        lines_(max(2, (row_bytes + kSteps / 2 - 1) / (kSteps / 2))) {}

  // Fetch keys first <= key < end of these heads from now on, what is left of others no more.
  void start(const int32_t* table, int first, int end, int head, int num_heads) {
    table_ = table, key_ = first, end_key_ = end, head_ = head, num_heads_ = num_heads;
    part_ = parts_ = rows_ = 0;
    at_ = end_ = nullptr;
  }
  void begin_tile() { step_ = 0; }
  KV8_INLINE void step() {
    if (step_ == kSteps) return;
    ++step_;
    const uint8_t* at = at_;
    if (end_ - at >= 64 * lines_) {  // mostly
      prefetch(at), prefetch(at + 64);
      for (int i = 2; i < lines_; ++i) prefetch(at + 64 * i);
      at_ = at + 64 * lines_;
      return;
    }
    step_over_end();
  }
  // What is left to fetch during this tile.
  void end_tile() {
    while (step_ < kSteps) step();
  }

 private:
  void step_over_end() {
    for (int i = 0; i < lines_; ++i, at_ += 64) {
      if (at_ >= end_ && !next_part()) return;
      prefetch(at_);
    }
  }

  // Of a block, the keys of all heads lie side by side, and so do the values; of a part of a block,
  // those of each head.
  bool next_part() {
    if (part_ == 2 * parts_) {
      key_ += rows_;
      if (key_ >= end_key_) return rows_ = 0, false;
      offset_ = key_ % cache_.block_size;
      rows_ = min(cache_.block_size - offset_, end_key_ - key_);
      parts_ = rows_ == cache_.block_size ? 1 : num_heads_;
      part_ = 0;
    }
    const int64_t block = table_[key_ / cache_.block_size];
    const uint8_t* codes = part_ < parts_
        ? static_cast<const uint8_t*>(cache_.k_codes) + block * cache_.k_block_stride
        : static_cast<const uint8_t*>(cache_.v_codes) + block * cache_.v_block_stride;
    const int64_t row = (head_ + part_ % parts_) * static_cast<int64_t>(cache_.block_size) + offset_;
    at_ = codes + row * row_bytes_;
    end_ = at_ + (parts_ == 1 ? num_heads_ : 1) * static_cast<int64_t>(rows_) * row_bytes_;
    ++part_;
    return true;
  }

  const kv8_cache& cache_;
  const int row_bytes_, lines_;
  const int32_t* table_ = nullptr;
  const uint8_t *at_ = nullptr, *end_ = nullptr;
  int key_ = 0, end_key_ = 0, head_ = 0, num_heads_ = 0, offset_ = 0, rows_ = 0, part_ = 0, parts_ = 0;
  int step_ = 0;
};

}  // namespace kv8::KV8_ISA
