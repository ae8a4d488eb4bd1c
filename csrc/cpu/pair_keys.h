// The keys of a tile as pairs of bfloat16, and queries in the same order of pairs: what dot products
// are formed of (tile_pairs.h).
//
// The words of a row widen vector by vector: of sixteen words of FP8 codes, first their pairs (0, 2),
// then their pairs (1, 3). Pairs are padded with zeros to whole tiles of the matrix unit.
#pragma once

#include "fetch.h"
#include "pairs.h"

namespace kv8::KV8_ISA {

// Call work(n) if a row is n whole vectors, for those n that most models have; work(0) if not.
template <class Work>
KV8_INLINE void with_vectors(int row_bytes, Work&& work) {
  switch (row_bytes) {
    case 64: return work(std::integral_constant<int, 1>{});
    case 128: return work(std::integral_constant<int, 2>{});
    case 256: return work(std::integral_constant<int, 4>{});
    default: return work(std::integral_constant<int, 0>{});
  }
}

template <class Code>
struct PairOrder {
  static constexpr int kCodes = Code::kCodesPerWord, kPairs = ToPairs<Code>::kPairs;
  const int head_dim, words, pairs;

  explicit PairOrder(int d) : head_dim(d), words(d / kCodes), pairs(round_up(d, 32) / 2) {}

  int row_bytes() const { return words * 4; }
  // Words of the vector that begins at `word`.
  int words_from(int word) const { return min(kLanes, words - word); }
  // Where pair i of a word lies.
  int pair_of(int word, int i) const {
    const int first = word / kLanes * kLanes;
    return first * kPairs + i * words_from(first) + word - first;
  }

  // The parts of a query as rows of pairs, [parts][pairs]: each rounds what those before it left.
  void write_query(const float* values, int parts, uint32_t* row) const {
    std::memset(row, 0, sizeof(uint32_t) * static_cast<size_t>(parts * pairs));
    for (int d = 0; d < head_dim; ++d) {
      const int pair = pair_of(d / kCodes, d % kPairs);
      float rest = values[d];
      for (int part = 0; part < parts; ++part) {
        const uint32_t bits = BFloat16::encode(rest);
        row[part * pairs + pair] |= bits << (d % kCodes / kPairs * 16);
        rest -= BFloat16::decode(bits);
      }
    }
  }

  // The same of a row of bfloat16: its words are pairs already, or halves of two neighbours are.
  void copy_query(const uint8_t* from, uint32_t* row) const {
    const int count = head_dim / 2;
    for (int word = 0; word < pairs; word += kLanes)
      store_words(row + word, load_some(from + 4 * word, count - word));
    if (kPairs == 1) return;
    uint32_t halves[kMaxHeadDim / 2];
    std::memcpy(halves, row, static_cast<size_t>(count) * sizeof(uint32_t));
    for (int first = 0; first < words; first += kLanes) {
      const int some = words_from(first);
      uint32_t *even = row + first * kPairs, *odd = even + some;
      for (int i = 0; i < some; ++i) {
        const uint32_t a = halves[2 * (first + i)], b = halves[2 * (first + i) + 1];
        even[i] = (a & 0xffffu) | b << 16, odd[i] = a >> 16 | (b & 0xffff0000u);
      }
    }
  }
};

// Turned into columns, for any number of queries: [key / 16][pair][16 keys].
template <class Code>
class TurnedKeys {
  static constexpr int kPairs = PairOrder<Code>::kPairs;

 public:
  TurnedKeys(const PairOrder<Code>& order, uint32_t* memory) : order_(order), columns_(memory) {}

  uint32_t* columns() const { return columns_; }

  void pack(const TileRows& tile, Fetch& fetch) const {
    const ToPairs<Code> to_pairs;
    alignas(64) uint8_t spare[kMostRunBytes];
    for (int key = 0; key < kTile; key += kLanes) {
      const uint8_t* run = tile.k.run(key / kRunRows, spare);
      uint32_t* columns = columns_ + key * order_.pairs;
      for (int word = 0; word < order_.words; word += kLanes) {
        const int words = order_.words_from(word);
        const uint8_t* from[kLanes];
        for (int i = 0; i < kLanes; ++i) from[i] = run + i * tile.k.row_bytes + 4 * word;
        U32 turned[kLanes];
        load_transposed(from, words, turned);
        uint32_t* out = columns + word * kPairs * kLanes;
        for (int j = 0; j < words; ++j, out += kLanes) {
          if (word == 0 && j % 4 == 0) fetch.step();
          U32 pairs[kPairs];
          to_pairs(turned[j], pairs);
          for (int i = 0; i < kPairs; ++i) store_words(out + i * words * kLanes, pairs[i]);
        }
      }
      for (int pair = order_.words * kPairs; pair < order_.pairs; ++pair)
        store_words(columns + pair * kLanes, splat_word(0));
    }
  }

 private:
  const PairOrder<Code> order_;
  uint32_t* columns_;
};

}  // namespace kv8::KV8_ISA
