// The products of attention as dot products of bfloat16 pairs, summed in float32.
//
// FP8 and bfloat16 codes are bfloat16 numbers, so keys, values and what they are multiplied with lose
// nothing: a query or a weight with more digits is the sum of several bfloat16 parts, each multiplied
// with the same keys or values. A tile is packed as columns that a vector or a matrix unit takes:
// keys as [key / 16][pair of dimensions][16 keys], values as [d / 16][pair of keys][16 dimensions].
#pragma once

#include "arena.h"
#include "pair_keys.h"
#if defined(__AMX_BF16__)
#include "few_rows_amx.h"
#include "multiply_amx.h"
#else
#include "multiply_vectors.h"
#endif

namespace kv8::KV8_ISA {

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
        order_(head_dim),
        parts_(parts),
        query_words_(parts.query * order_.pairs),
        queries_(arena.take<uint32_t>(static_cast<int64_t>(padded_rows(rows)) * query_words_)),
        keys_(order_, arena.take<uint32_t>(static_cast<int64_t>(kTile) * order_.pairs + kLanes)),
        few_rows_(order_, keys_.columns()),
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
  void begin(int rows, bool) {
    few_ = FewRows<Code>::kThere && rows <= kFewRows ? rows : 0;
    if constexpr (FewRows<Code>::kThere)
      if (few_ > 0) return few_rows_.begin(rows);
    multiplier_.begin();
  }

  // Whether the first tile's values replace the sums, rather than being added to them.
  bool overwrites() const { return few_ == 0; }

  void set_query(int r, const float* values) const {
    write_query(r, [&](uint32_t* words) { order_.write_query(values, parts_.query, words); });
  }
  void copy_query(int r, const uint8_t* from) const {
    write_query(r, [&](uint32_t* words) { order_.copy_query(from, words); });
  }

  void load_keys(const TileRows& tile, Fetch& fetch) {
    fetch_ = &fetch;
    if constexpr (FewRows<Code>::kThere)
      if (few_ > 0) return few_rows_.pack_keys(tile, fetch);
    keys_.pack(tile, fetch);
  }

  // Dot products of rows start <= r < start + count with the keys, [count][kTile].
  void multiply_keys(int start, int count, float* dots) const {
    const uint32_t* queries = queries_ + static_cast<int64_t>(start) * query_words_;
    if constexpr (FewRows<Code>::kThere)
      if (few_ > 0) return few_rows_.multiply_keys(queries, parts_.query, dots, *fetch_);
    multiplier_.multiply(queries, query_words_, parts_.query, count, keys_.columns(),
                         kTile / kLanes, order_.pairs, dots, kTile, false);
  }

  void load_values(const TileRows& tile, Fetch& fetch) {
    tile_ = &tile;
    finite_ = pack_values(tile, &fetch);
  }

  // Weights of row r of a block: pairs of neighbouring keys, part by part.
  KV8_INLINE void set_weights(int r, TileOfWeights& x) {
    if (r < 4) fetch_->step(), fetch_->step();
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

  // Into the innermost cache: the sums of row r, which are wanted soon, and a row of the next block's
  // queries.
  KV8_INLINE void prefetch_next(int r, const float* sums) const {
    if (few_ > 0) return;
    prefetch_row(sums + static_cast<int64_t>(r) * padded(head_dim_), 4 * padded(head_dim_));
    prefetch_row(queries_ + static_cast<int64_t>(r + kBlockRows) * query_words_, 4 * query_words_);
  }

  // Add the weighted values of the tile; visible(r) tells which keys row r sees. With `fresh` they
  // are the first of their sums, and replace what is there (`overwrites`).
  template <class Visible>
  void add_values(int start, int count, const Visible& visible, float* sums, bool fresh) {
    float* block = sums + static_cast<int64_t>(start) * padded(head_dim_);
    fresh = fresh && overwrites();
    if (finite_) return multiply_values(parts_.weight, count, block, !fresh);
    if (fresh) std::memset(block, 0, sizeof(float) * static_cast<size_t>(count * padded(head_dim_)));
    for (int r = 0; r < count; ++r) add_visible_values(r, count, visible(start + r), block);
    pack_values(*tile_);  // for the next block
  }

 private:
  static KV8_INLINE void prefetch_row(const void* row, int bytes) {
    with_vectors(bytes, [&](auto vectors) KV8_INLINED {
      for (int i = 0; i < (vectors > 0 ? 64 * vectors : bytes); i += 64)
        prefetch_near(static_cast<const uint8_t*>(row) + i);
    });
  }
  // As a row of queries_, or where few rows are columns, as the words of a column.
  template <class Write>
  void write_query(int r, const Write& write) const {
    if (few_ == 0) return write(queries_ + static_cast<int64_t>(r) * query_words_);
    uint32_t words[3 * kMaxHeadDim / 2];
    write(words);
    uint32_t* column = queries_ + static_cast<int64_t>(r - r % few_) * query_words_ + r % few_;
    for (int i = 0; i < query_words_; ++i) column[i * few_] = words[i];
  }

  // Interleave the words of two keys so that they widen to pairs of one dimension, in the order of
  // `lane_of`. Returns whether all values are finite.
  bool pack_values(const TileRows& tile, Fetch* fetch = nullptr) {
    alignas(64) uint8_t spare[kMostRunBytes];
    U32 largest = splat_word(0);
    for (int run = 0; run < kRuns; ++run) {
      const uint8_t* rows = tile.v.run(run, spare);
      uint32_t* out = values_ + run * kRunRows / 2 * kLanes;
      with_vectors(tile.v.row_bytes, [&](auto vectors) {
        largest = pack_run<vectors>(rows, out, largest, fetch);
      });
    }
    return ToPairs<Code>::finite(largest);
  }

  // Sixteen rows of so many vectors, if that is known. Returns the largest codes.
  template <int kVectors>
  U32 pack_run(const uint8_t* rows, uint32_t* columns, U32 largest, Fetch* fetch) const {
    const ToPairs<Code> to_pairs;
    const int words = kVectors > 0 ? kVectors * kLanes : head_dim_ / kCodes;
    for (int pair = 0; pair < kRunRows / 2; ++pair, rows += 8 * words, columns += kLanes) {
      if (fetch != nullptr && pair % 2 == 0) fetch->step();
      uint32_t* out = columns;
      for (int word = 0; word < words; word += kLanes) {
        const U32 x = load_some(rows + 4 * word, words - word);
        const U32 y = load_some(rows + 4 * (words + word), words - word);
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
    return largest;
  }

  void multiply_values(int parts, int count, float* sums, bool add = true) const {
    const int groups = round_up(head_dim_, kGroup) / kLanes;
    if constexpr (FewRows<Code>::kThere)
      if (few_ > 0)
        return few_rows_.add_values(weights_, parts, parts_.weight, values_, groups, sums,
                                    padded(head_dim_), *fetch_);
    multiplier_.multiply(weights_, parts_.weight * kKeyPairs, parts, count, values_, groups,
                         kKeyPairs, sums, padded(head_dim_), add);
  }

  // A value that is no finite number must not reach rows that do not see it, nor meet a part of a
  // weight that is zero or negative.
  void add_visible_values(int r, int count, const KeyRange& visible,
                          float* block) {
    TileRows tile = *tile_;
    tile.v.hide_outside(visible);
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
  int head_dim_;
  Fetch* fetch_ = nullptr;
  int few_ = 0;  // rows a head, if they are columns
  PairOrder<Code> order_;
  Parts parts_;
  int query_words_;
  bool finite_ = false;
  const TileRows* tile_ = nullptr;
  uint32_t* queries_;  // [R][parts][pairs]
  TurnedKeys<Code> keys_;
  FewRows<Code> few_rows_;
  uint32_t* values_;   // a packed tile
  uint32_t* weights_;  // [kBlockRows][parts][kTile / 2]
  float* spare_;       // sums of two blocks of rows
};

}  // namespace kv8::KV8_ISA
