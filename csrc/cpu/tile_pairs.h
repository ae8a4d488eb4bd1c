// The products of attention as dot products of bfloat16 pairs, summed in float32.
//
// FP8 and bfloat16 codes are bfloat16 numbers, so keys, values and what they are multiplied with lose
// nothing: a query or a weight with more digits is the sum of several bfloat16 parts, each multiplied
// with the same keys or values. A tile is packed as columns that a vector or a matrix unit takes:
// keys as [key / 16][pair of dimensions][16 keys], values as [d / 16][pair of keys][16 dimensions].
#pragma once

#include "arena.h"
#include "pairs.h"
#include "tile.h"
#if defined(__AMX_BF16__)
#include "multiply_amx.h"
#else
#include "multiply_vectors.h"
#endif

namespace kv8::KV8_ISA {

// Fetches the rows of the tile to come, a few at a time between everything else: a core waits for only
// so many cache lines at once, and a burst of requests keeps it from computing meanwhile.
class Fetch {
 public:
  void start(const TileRows& rows, int row_bytes) { rows_ = &rows, row_bytes_ = row_bytes, key_ = 0; }
  KV8_INLINE void rows(int count) {
    for (const int end = min(key_ + count, kTile); key_ < end; ++key_)
      for (int i = 0; i < row_bytes_; i += 64)
        prefetch(rows_->k[key_] + i), prefetch(rows_->v[key_] + i);
  }

 private:
  const TileRows* rows_ = nullptr;
  int row_bytes_ = 0, key_ = kTile;
};

template <class Code>
class PairProducts {
  static constexpr int kCodes = Code::kCodesPerWord, kPairs = ToPairs<Code>::kPairs;
  static constexpr int kKeyPairs = kTile / 2;
  static constexpr int kGroup = kLanes * kCodes;  // values of a row that a vector of codes holds

 public:
  static constexpr int kBlockRows = Multiplier::kBlockRows;
  static constexpr bool kTakesParts = true;  // and no float32
  using Session = Multiplier::Session;

  PairProducts(Arena& arena, int rows, int head_dim, Parts parts)
      : head_dim_(head_dim),
        pairs_(round_up(head_dim, 32) / 2),
        parts_(parts),
        queries_(arena.take<uint32_t>(static_cast<int64_t>(padded_rows(rows)) * parts.query * pairs_)),
        keys_(arena.take<uint32_t>(static_cast<int64_t>(kTile) * pairs_)),
        values_(arena.take<uint32_t>(static_cast<int64_t>(kKeyPairs) * padded(head_dim))),
        weights_(arena.take<uint32_t>(static_cast<int64_t>(kBlockRows) * parts.weight * kKeyPairs)),
        spare_(arena.take<float>(2 * static_cast<int64_t>(kBlockRows) * padded(head_dim))) {}

  // Where value d of a row of sums lies: see `pack_values`.
  static int lane_of(int d) {
    const int quarter = d % kGroup / (4 * kCodes), half = d % (4 * kCodes) / (2 * kCodes);
    const int word = d % (2 * kCodes) / kPairs, vector = half * kPairs + d % kPairs;
    return d / kGroup * kGroup + vector * kLanes + 4 * quarter + word;
  }

  // A piece of this many rows a head begins; `single` if all of them see the same keys.
  void begin(int rows, bool) { multiplier_.begin(rows); }

  // The parts of a query: each rounds what those before it left. Dimensions in the order in which
  // the words of a key widen.
  void set_query(int r, const float* values) const {
    uint32_t* row = queries_ + static_cast<int64_t>(r) * parts_.query * pairs_;
    std::memset(row, 0, sizeof(uint32_t) * static_cast<size_t>(parts_.query * pairs_));
    for (int d = 0; d < head_dim_; ++d) {
      const int pair = d / kCodes * kPairs + d % kPairs;
      float rest = values[d];
      for (int part = 0; part < parts_.query; ++part) {
        const uint32_t bits = BFloat16::encode(rest);
        row[part * pairs_ + pair] |= bits << (d % kCodes / kPairs * 16);
        rest -= BFloat16::decode(bits);
      }
    }
  }

  // The same of a row of bfloat16: its words are pairs already, or halves of two neighbours are.
  void copy_query(int r, const uint8_t* from) const {
    uint32_t* row = queries_ + static_cast<int64_t>(r) * pairs_;
    const size_t words = static_cast<size_t>(head_dim_ / 2);
    std::memcpy(row, from, words * sizeof(uint32_t));
    std::memset(row + words, 0, (static_cast<size_t>(pairs_) - words) * sizeof(uint32_t));
    for (size_t i = 0; i + 1 < words && kPairs == 2; i += 2) {
      const uint32_t a = row[i], b = row[i + 1];
      row[i] = (a & 0xffffu) | b << 16, row[i + 1] = a >> 16 | (b & 0xffff0000u);
    }
  }

  void load_keys(const TileRows& tile, const TileRows& next) {
    fetch_.start(next, head_dim_ * static_cast<int>(sizeof(typename Code::Code)));
    const ToPairs<Code> to_pairs;
    const int words = head_dim_ / kCodes;
    for (int key = 0; key < kTile; key += kLanes) {
      uint32_t* out = keys_ + key * pairs_;
      for (int word = 0; word < words; word += kLanes) {
        const uint8_t* from[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          from[i] = tile.k[key + i] + 4 * word;
        }
        U32 turned[kLanes];
        load_transposed(from, words - word, turned);
        const int some = min(kLanes, pairs_ / kPairs - word);
        for (int j = 0; j < some; ++j, out += kPairs * kLanes) {
          if (word == 0 && j % 3 == 0) fetch_.rows(1);
          U32 pairs[kPairs];
          to_pairs(turned[j], pairs);
          for (int i = 0; i < kPairs; ++i) store_words(out + i * kLanes, pairs[i]);
        }
      }
    }
  }

  // Dot products of rows start <= r < start + count with the keys, [count][kTile].
  void multiply_keys(int start, int count, float* dots) const {
    const int64_t stride = static_cast<int64_t>(parts_.query) * pairs_;
    multiplier_.multiply(queries_ + start * stride, stride, parts_.query, count, keys_,
                         kTile / kLanes, pairs_, dots, kTile, false);
  }

  void load_values(const TileRows& tile, const TileRows&) {
    tile_ = &tile;
    finite_ = pack_values(tile);
  }

  // Weights of row r of a block: pairs of neighbouring keys, part by part.
  void set_weights(int r, TileOfWeights& x) {
    fetch_.rows(4);
    uint32_t* row = weights_ + r * parts_.weight * kKeyPairs;
    for (int part = 1; part < parts_.weight; ++part, row += kKeyPairs) {
      for (int i = 0; i < kTile / kLanes; i += 2) {
        const F32 a = upper_part(x[i]), b = upper_part(x[i + 1]);
        store_words(row + i * kLanes / 2, to_pairs(a, b));
        x[i] = x[i] - a, x[i + 1] = x[i + 1] - b;
      }
    }
    for (int i = 0; i < kTile / kLanes; i += 2)
      store_words(row + i * kLanes / 2, to_pairs(x[i], x[i + 1]));
  }

  // Add the weighted values of the tile; visible(r) tells which keys row r sees.
  template <class Visible>
  void add_values(int start, int count, const Visible& visible, float* sums) {
    float* block = sums + static_cast<int64_t>(start) * padded(head_dim_);
    if (finite_) return multiply_values(parts_.weight, count, block);
    for (int r = 0; r < count; ++r) add_visible_values(r, count, visible(start + r), block);
    pack_values(*tile_);  // for the next block
  }

  void end_tile() { fetch_.rows(kTile); }

 private:
  // Interleave the words of two keys so that they widen to pairs of one dimension, in the order of
  // `lane_of`. Returns whether all values are finite.
  bool pack_values(const TileRows& tile) {
    const ToPairs<Code> to_pairs;
    const int words = head_dim_ / kCodes;
    U32 largest = splat_word(0);
    for (int pair = 0; pair < kKeyPairs; ++pair) {
      if (pair % 4 != 0) fetch_.rows(1);
      const uint8_t *a = tile.v[2 * pair], *b = tile.v[2 * pair + 1];
      uint32_t* out = values_ + pair * kLanes;
      for (int word = 0; word < words; word += kLanes) {
        const U32 x = load_some(a + 4 * word, words - word);
        const U32 y = load_some(b + 4 * word, words - word);
        largest = ToPairs<Code>::larger(ToPairs<Code>::larger(largest, x), y);
        U32 halves[2];
        interleave(x, y, halves);
        for (const U32& half : halves) {
          U32 pairs[kPairs];
          to_pairs(half, pairs);
          for (int i = 0; i < kPairs; ++i, out += kKeyPairs * kLanes) store_words(out, pairs[i]);
        }
      }
    }
    return ToPairs<Code>::finite(largest);
  }

  void multiply_values(int parts, int count, float* sums) const {
    multiplier_.multiply(weights_, parts_.weight * kKeyPairs, parts, count, values_,
                         round_up(head_dim_, kGroup) / kLanes, kKeyPairs, sums, padded(head_dim_),
                         true);
  }

  // A value that is no finite number must not reach rows that do not see it, nor meet a part of a
  // weight that is zero or negative.
  void add_visible_values(int r, int count, const KeyRange& visible,
                          float* block) {
    TileRows tile = *tile_;
    tile.hide_outside(visible);
    const bool finite = pack_values(tile);
    const int width = padded(head_dim_);
    float *row = block + r * width, *all = spare_ + r * width;
    float* first = spare_ + kBlockRows * width + r * width;
    const size_t bytes = static_cast<size_t>(width) * sizeof(float);
    std::memcpy(all, row, bytes);
    std::memcpy(first, row, bytes);
    multiply_values(parts_.weight, count, spare_);
    multiply_values(1, count, spare_ + kBlockRows * width);
    for (int d = 0; d < width; ++d) row[d] = finite || all[d] == all[d] ? all[d] : first[d];
  }

  Multiplier multiplier_;
  Fetch fetch_;
  int head_dim_, pairs_;  // pairs of dimensions, padded to whole tiles
  Parts parts_;
  bool finite_ = false;
  const TileRows* tile_ = nullptr;
  uint32_t* queries_;  // [R][parts][pairs]
  uint32_t* keys_;     // a packed tile
  uint32_t* values_;   // a packed tile
  uint32_t* weights_;  // [kBlockRows][parts][kTile / 2]
  float* spare_;       // sums of two blocks of rows
};

}  // namespace kv8::KV8_ISA
